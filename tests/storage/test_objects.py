"""Snapshots in an object store: pushed, pulled, deleted, and cleaned; killed at every call, damaged, beside a job."""

import errno
import itertools
import json
import os
import re
import shutil
import threading
import time
import uuid

import fsspec
import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import (
    CorruptTableError,
    FormatVersionError,
    LockedError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.objects import marks, object_store, pull as pull_module, push as push_module
from oneemb.storage.objects.deletion import clean_store, delete_stored
from oneemb.storage.objects.manifests import names_in, newest_in, part_keys_in
from oneemb.storage.objects.marks import Cleaning
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import pull
from oneemb.storage.objects.push import push, push_of_writer
from oneemb.storage.table.check import check_table
from tests.storage.test_backups import held_at
from tests.storage.test_persistent_table import open_table
from tests.support.table_model import put_random


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A store of its own: in memory, where calls are those of a server, or in a folder."""
    if request.param == "file":
        return f"file://{tmp_path}/objects"
    return f"memory://{uuid.uuid4().hex}/items"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 3000)


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr("oneemb.storage.objects.object_store._WAIT_S", 0)


def saved_table(path, names="abc", size=400, seed=0):
    """A table with a snapshot of each name; each has more rows."""
    rng = np.random.default_rng(seed)
    with open_table(path) as table:
        rows = {}
        for name in names:
            put_random(table, rows, rng, size)
            table.save_snapshot(name, {})
    return held_at(path)


@pytest.mark.usefixtures("small_pieces")
def test_what_is_pulled_is_what_was_pushed_bit_for_bit(tmp_path, url):
    held = saved_table(tmp_path / "live")
    pushed = push(tmp_path / "live", url)
    assert sorted(pushed.snapshots) == sorted(pushed.pushed) == ["a", "b", "c"] and pushed.bytes_uploaded > 0
    pulled = pull(url, tmp_path / "copy")
    assert sorted(pulled.snapshots) == sorted(pulled.pulled) == ["a", "b", "c"]
    assert held_at(tmp_path / "copy") == held and check_table(tmp_path / "copy").problems == []
    assert not (tmp_path / "copy.pull").exists()
    again = push(tmp_path / "live", url), pull(url, tmp_path / "copy")
    assert again[0].pushed == again[1].pulled == [] and again[0].bytes_uploaded == 0
    assert held_at(tmp_path / "copy") == held


@pytest.mark.usefixtures("small_pieces")
def test_only_what_is_new_goes_over_the_wire_and_known_chunks_are_not_read(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "live", "a", size=4000)
    whole = push(tmp_path / "live", url).bytes_uploaded
    pull(url, tmp_path / "copy")
    examined = []
    original = push_module.check_chunk
    monkeypatch.setattr(push_module, "check_chunk", lambda *args: examined.append(args[3]) or original(*args))
    with open_table(tmp_path / "live") as table:
        table.load_snapshot("a")
        put_random(table, {}, np.random.default_rng(1), 50)
        table.save_snapshot("b", {})
    more = push(tmp_path / "live", url)
    assert more.pushed == ["b"] and 0 < more.bytes_uploaded < whole / 3
    with_rows = len(list((tmp_path / "live/chunks").glob("*.keys")))
    assert 0 < len(examined) < with_rows
    brought = pull(url, tmp_path / "copy")
    assert brought.pulled == ["b"] and brought.bytes_downloaded < whole / 2
    assert held_at(tmp_path / "copy") == held_at(tmp_path / "live")


@pytest.mark.usefixtures("small_pieces")
def test_chosen_snapshots_go_and_come_alone(tmp_path, url):
    held = saved_table(tmp_path / "live")
    assert push(tmp_path / "live", url, ["b"]).snapshots == ["b"]
    assert pull(url, tmp_path / "copy").snapshots == ["b"]
    assert held_at(tmp_path / "copy") == {"b": held["b"]}
    push(tmp_path / "live", url)
    assert pull(url, tmp_path / "other", ["a", "c"]).snapshots == ["a", "c"]
    with pytest.raises(SnapshotNotFoundError, match="no snapshot named 'd' in .*; there are: 'a', 'b', 'c'"):
        pull(url, tmp_path / "copy", ["d"])
    with pytest.raises(SnapshotNotFoundError, match="no snapshot named 'd'"):
        push(tmp_path / "live", url, ["d"])


class Killed(BaseException):
    """In place of a kill: nothing that a handler of errors does comes after it."""


@pytest.mark.usefixtures("small_pieces")
def test_a_push_that_is_killed_at_any_write_leaves_whole_snapshots_and_is_continued(tmp_path, url, monkeypatch):
    held = saved_table(tmp_path / "live", "ab")
    write = ObjectStore.write
    for n in itertools.count():
        left = itertools.count(n, -1)

        def killed(store, key, data, left=left):
            if next(left) <= 0:
                raise Killed
            write(store, key, data)

        monkeypatch.setattr(ObjectStore, "write", killed)
        try:
            push(tmp_path / "live", f"{url}/{n}")
            break
        except Killed:
            pass
        monkeypatch.setattr(ObjectStore, "write", write)
        if n % 5 == 0 or n > 20:
            for name in names_in(ObjectStore(f"{url}/{n}")):
                assert pull(f"{url}/{n}", tmp_path / f"early{n}", [name]).snapshots == [name]
            rest = push(tmp_path / "live", f"{url}/{n}")
            assert sorted(rest.snapshots) == ["a", "b"]
            pull(f"{url}/{n}", tmp_path / f"copy{n}")
            assert held_at(tmp_path / f"copy{n}") == held
    assert n > 8


@pytest.mark.usefixtures("small_pieces")
def test_a_pull_that_is_killed_at_any_read_leaves_whole_snapshots_and_is_continued(tmp_path, url, monkeypatch):
    held = saved_table(tmp_path / "live", "ab")
    push(tmp_path / "live", url)
    read, downloaded = ObjectStore.get, []
    for n in itertools.count():
        left = itertools.count(n, -1)

        def killed(store, piece, left=left):
            if next(left) <= 0:
                raise Killed
            return read(store, piece)

        monkeypatch.setattr(ObjectStore, "get", killed)
        copy = tmp_path / f"copy{n}"
        try:
            pull(url, copy)
            break
        except Killed:
            pass
        monkeypatch.setattr(ObjectStore, "get", read)
        assert not copy.exists() or held_at(copy).items() <= held.items()
        downloaded.append(pull(url, copy).bytes_downloaded)
        assert held_at(copy) == held and not (tmp_path / f"copy{n}.pull").exists()
    assert n > 5 and downloaded[-1] < downloaded[0]


def test_a_piece_that_is_damaged_or_missing_is_an_error_and_changes_nothing(tmp_path, url):
    held = saved_table(tmp_path / "live")
    push(tmp_path / "live", url, ["a"])
    pull(url, tmp_path / "copy")
    push(tmp_path / "live", url)
    fs, root = fsspec.core.url_to_fs(url)
    told = 0
    for n, path in enumerate(sorted(fs.find(f"{root}/objects"))):
        data = fs.cat_file(path)
        for m, wrong in enumerate((data[:-1] + bytes([data[-1] ^ 1]), data[:-1], None)):
            fs.rm_file(path) if wrong is None else fs.pipe_file(path, wrong)
            new = tmp_path / f"new{n}.{m}"
            try:
                pull(url, new)
                assert held_at(new) == held  # A longer version of the chunk has come instead.
            except CorruptTableError as error:
                assert re.search("is damaged|is missing, though a snapshot needs it", str(error)) and not new.exists()
                told, last = told + 1, new
            fs.pipe_file(path, data)
    assert told >= 9 and held_at(tmp_path / "copy") == {"a": held["a"]}
    pull(url, last)  # goes on with what came before
    assert held_at(last) == held


HOSTILE = {
    "no JSON": b"{",
    "no checksum": b'{"version": 1}',
    "a list": b"[]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("key", ["current.json", "0.json"])
def test_texts_that_are_damaged_are_told(tmp_path, url, what, key):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    fs, root = fsspec.core.url_to_fs(url)
    (path,) = (one for one in fs.find(f"{root}/snapshots") if one.endswith(key))
    fs.pipe_file(path, HOSTILE[what])
    with pytest.raises(CorruptTableError, match="is damaged"):
        pull(url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("path", ["../out", "/out", "chunks/../../out", "", "a//b", "chunks/\0"])
def test_a_text_cannot_name_a_file_elsewhere(tmp_path, url, path):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    ((name, identity, shard),) = part_keys_in(store)
    key = f"snapshots/{name}/{identity}/{shard}.json"
    fields = store.get_text(key)
    fields["files"][0]["path"] = path
    store.put_text(key, fields)
    with pytest.raises(CorruptTableError, match="no description of a part"):
        pull(url, tmp_path / "copy")
    assert not (tmp_path / "out").exists() and not (tmp_path.parent / "out").exists()


def part_text(store, name="a"):
    """Key of the text of a part."""
    (found,) = (one for one in part_keys_in(store) if one[0] == name)
    return "snapshots/{}/{}/{}.json".format(*found)


def changed(fields, place, value):
    *path, last = place
    inner = fields
    for word in path:
        inner = inner[word]
    inner[last] = value
    return fields


WRONG_FIELDS = [
    (["shards"], "1/../../../out"), (["shards"], 1 << 70), (["shards"], 0), (["sequence"], "x"), (["rows"], None),
    (["table_name"], 3), (["files"], []), (["files"], {}), (["files", 0, "chunk"], []), (["files", 0, "path"], 1),
    (["files", 0, "path"], "LOCK"), (["files", -1, "path"], "snapshots"), (["files", -1, "path"], "snapshots/\ud800"),
    (["files", 0, "size"], -1), (["files", 0, "pieces"], [["../../../../kept", 1]]),
]  # fmt: skip


@pytest.mark.parametrize("place, value", WRONG_FIELDS)
def test_fields_of_a_text_that_no_push_writes_are_told_by_every_call(tmp_path, url, place, value):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    key = part_text(store)
    store.put_text(key, changed(store.get_text(key), place, value))
    for call in (
        lambda: pull(url, tmp_path / "copy"),
        lambda: delete_stored(url, "a"),
        lambda: clean_store(url, 0.0),
        lambda: oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving"),
    ):
        with pytest.raises(CorruptTableError, match=re.escape(key)):
            call()
    assert "a" in push(tmp_path / "live", url).damaged
    assert not (tmp_path / "copy").exists() and not (tmp_path / "out").exists()


def test_cleaning_removes_no_file_outside_of_the_store_whatever_a_text_names(tmp_path):
    saved_table(tmp_path / "live", "a")
    url, kept = f"file://{tmp_path}/objects", tmp_path / "kept"
    kept.write_text("x")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    key = part_text(store)
    fields = store.get_text(key)
    store.put_text(key, changed(fields, ["files", 0, "pieces"], [["../../../kept", 1]]))
    store.remove("snapshots/a/current.json")
    clean_store(url, 0.0)
    assert kept.exists()


@pytest.mark.parametrize("key", ["snapshots/a/current.json", "newest.json"])
@pytest.mark.parametrize("field, value", [("shards", 0), ("shards", -1), ("sequence", -1), ("shards", 2)])
def test_numbers_of_a_snapshot_that_no_push_writes_are_told(tmp_path, url, key, field, value):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    store.put_text(key, store.get_text(key) | {field: value})
    if key != "newest.json":
        with pytest.raises(CorruptTableError, match="snapshot"):
            pull(url, tmp_path / "copy")
    if key != "newest.json" or value != 2:  # The newest snapshot is read by its own text.
        with pytest.raises(CorruptTableError, match="snapshot"):
            oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving")


def test_texts_of_a_later_release_are_not_guessed_at(tmp_path, url):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    store.put_text("snapshots/a/current.json", store.get_text("snapshots/a/current.json") | {"version": 2})
    with pytest.raises(FormatVersionError, match="version 2, this release reads version 1"):
        pull(url, tmp_path / "copy")


def embedding_at(path, **more):
    options = oneemb.make_cached_ssd_store_options(1, str(path))
    return oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()], options, **more)


def train(embedding, ids, value):
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=value), [embedding])
    embedding(ids).sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("small_pieces")
def test_deltas_come_with_their_parents_and_parents_are_not_deleted_before(tmp_path, url):
    with embedding_at(tmp_path / "live") as embedding:
        ids, saved = torch.arange(500), {}
        for n, name in enumerate(("base", "d1", "d2")):
            train(embedding, ids[: 500 // (n + 1)], 0.5)
            embedding.save_snapshot(name) if n == 0 else embedding.save_delta(name, since=("base", "d1")[n - 1])
            saved[name] = embedding(ids).detach().clone()
    assert push(tmp_path / "live", url, ["d2"]).snapshots == ["base", "d1", "d2"]
    assert pull(url, tmp_path / "copy", ["d1"]).snapshots == ["base", "d1"]
    with embedding_at(tmp_path / "copy") as embedding:
        embedding.load_snapshot("d1")
        assert torch.equal(embedding(ids), saved["d1"])
    for name, children in (("base", "'d1'"), ("d1", "'d2'")):
        with pytest.raises(StorageError, match=f"must not be deleted before its deltas {children}"):
            delete_stored(url, name)
    for name in ("d2", "d1", "base"):
        delete_stored(url, name)
    assert names_in(ObjectStore(url)) == []
    clean_store(url, 0)
    assert list(ObjectStore(url).keys("objects/")) == []


@pytest.mark.usefixtures("small_pieces")
def test_parts_of_ranks_are_pushed_from_their_own_disks_and_loaded_by_another_number_of_ranks(tmp_path, url):
    disks = [str(tmp_path / f"disk{n}") for n in range(2)]
    writer = oneemb.make_persistent_table_writer(
        disks, "s", torch.int64, torch.float32, storage_dim=4, physical_block_size=512
    )
    with writer:
        writer.write(np.arange(1000), np.repeat(np.arange(1000, dtype=np.float32)[:, None], 4, 1))
    first, second = disks
    waiting = push(first, url)
    assert waiting.waiting == ["s"] and waiting.snapshots == []
    with pytest.raises(SnapshotNotFoundError, match="no snapshot named 's' in .*; there are: none"):
        pull(url, tmp_path / "copy", ["s"])
    assert push(second, url).snapshots == ["s"]
    assert push(first, url).snapshots == ["s"]
    assert pull(url, tmp_path / "copy").snapshots == ["s"]
    with embedding_at(tmp_path / "copy") as embedding:
        embedding.load_snapshot("s")
        assert embedding.eval()(torch.arange(1000)).tolist() == [[float(i)] * 4 for i in range(1000)]


def test_a_snapshot_that_is_saved_anew_takes_the_place_of_the_old_one(tmp_path, url):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    with open_table(tmp_path / "live") as table:
        put_random(table, {}, np.random.default_rng(5), 100)
        table.save_snapshot("a", {}, overwrite=True)
    assert push(tmp_path / "live", url).pushed == ["a"]
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == held_at(tmp_path / "live")
    assert clean_store(url, 0).parts == 1
    pull(url, tmp_path / "fresh")
    assert held_at(tmp_path / "fresh") == held_at(tmp_path / "live")


@pytest.mark.usefixtures("small_pieces")
def test_cleaning_removes_what_nobody_needs_and_nothing_young(tmp_path, url):
    held = saved_table(tmp_path / "live")
    push(tmp_path / "live", url)
    store = ObjectStore(url)
    store.put(b"left by a killed push")
    before = set(store.keys("objects/"))
    assert clean_store(url).objects == 0 and set(store.keys("objects/")) == before
    cleaned = clean_store(url, 0)
    assert cleaned.objects == 1 and cleaned.bytes == len(b"left by a killed push")
    delete_stored(url, "c")
    assert clean_store(url, 0).objects > 0
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == {name: held[name] for name in "ab"}


class OfALibrary(Exception):
    """In place of errors of botocore, which are no OSErrors."""


def test_a_pull_to_a_full_disk_says_what_to_do_at_any_call_and_goes_on_once_it_is_freed(tmp_path, monkeypatch):
    url, source, calls = f"memory://{uuid.uuid4().hex}", str(tmp_path / "copy.pull"), []
    held = saved_table(tmp_path / "live", "ab")
    push(tmp_path / "live", url)

    def full_at(n, call):
        def counted(*arguments, **options):
            if any(str(argument).startswith(source) for argument in arguments):
                calls.append(call.__name__)
                if len(calls) == n:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        return counted

    done, failed = False, set()
    for n in itertools.count(1):
        calls.clear()
        with monkeypatch.context() as patch:
            for name in ("make_directories", "create", "rename"):
                patch.setattr(LocalFileSystem, name, full_at(n, getattr(LocalFileSystem, name)))
            patch.setattr(pull_module, "open", full_at(n, open), raising=False)
            try:
                pull(url, tmp_path / "copy")
                done = len(calls) < n
            except StorageError as error:
                assert "free space on that file system and call again" in str(error)
                failed.add(calls[n - 1])
        if done:
            break
        pull(url, tmp_path / "copy")
        assert held_at(tmp_path / "copy") == held
        shutil.rmtree(tmp_path / "copy")
    assert failed == {"make_directories", "create", "rename", "open"}


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("error", [TimeoutError, OfALibrary])
def test_calls_that_the_network_fails_are_made_again_and_then_told(tmp_path, monkeypatch, error):
    url = f"memory://{uuid.uuid4().hex}"
    held = saved_table(tmp_path / "live", "ab")
    fs = fsspec.filesystem("memory")
    kind, calls, failures = type(fs), itertools.count(), {"every": 2, "error": error("the network is down")}
    for name in ("pipe_file", "cat_file", "info", "find"):
        original = getattr(kind, name)

        def failing(self, *args, original=original, **kwargs):
            if next(calls) % failures["every"] == 0:
                raise failures["error"]
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, failing)
    assert sorted(push(tmp_path / "live", url).snapshots) == ["a", "b"]
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == held
    failures["every"] = 1
    with pytest.raises(StorageError, match="could not be .*: the network is down"):
        push(tmp_path / "live", url)
    with pytest.raises(StorageError, match="could not be .*: the network is down"):
        pull(url, tmp_path / "copy")


def test_an_interrupt_after_an_object_has_its_name_is_raised_as_it_is(tmp_path, monkeypatch):
    rename = LocalFileSystem.rename

    def interrupted(fs, *paths):
        rename(fs, *paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "rename", interrupted)
    store = ObjectStore(f"file://{tmp_path}/objects")
    with pytest.raises(KeyboardInterrupt):
        store.write("a", b"bytes")
    assert list(store.keys("")) == ["a"] and store.get_object("a") == b"bytes"


def test_a_store_without_snapshots_is_told(tmp_path, url):
    with pytest.raises(SnapshotNotFoundError, match="must have snapshots, it has none"):
        pull(url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.usefixtures("small_pieces")
def test_each_byte_of_a_growing_chunk_comes_once(tmp_path, url):
    saved_table(tmp_path / "live", "abcdef", size=50)
    uploaded = push(tmp_path / "live", url).bytes_uploaded
    assert pull(url, tmp_path / "copy").bytes_downloaded <= uploaded


@pytest.mark.usefixtures("small_pieces")
def test_what_a_killed_pull_of_another_table_has_left_is_not_taken(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "one", "abc", seed=1)
    held = saved_table(tmp_path / "two", "a", seed=2)
    push(tmp_path / "one", f"{url}/1")
    push(tmp_path / "two", f"{url}/2")
    monkeypatch.setattr(
        "oneemb.storage.objects.pull.backup_folder", lambda *args, **more: (_ for _ in ()).throw(Killed)
    )
    with pytest.raises(Killed):
        pull(f"{url}/1", tmp_path / "copy")
    monkeypatch.undo()
    pull(f"{url}/2", tmp_path / "copy", ["a"])
    assert held_at(tmp_path / "copy")["a"] == held["a"]


def test_a_folder_that_another_pull_removes_as_this_one_begins_is_made_again(tmp_path, url, monkeypatch):
    held = saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    make, new, removed = LocalFileSystem.make_directories, tmp_path / "copy.pull", []

    def made(fs, path):
        make(fs, path)
        if path == str(new) and not removed:
            removed.append(path)
            os.rmdir(path)

    monkeypatch.setattr(LocalFileSystem, "make_directories", made)
    pull(url, tmp_path / "copy")
    assert removed and held_at(tmp_path / "copy") == held and not new.exists()


@pytest.mark.parametrize("before", ["a pull", "a pull of another table"])
def test_a_pull_that_is_killed_while_it_removes_its_files_is_continued(tmp_path, url, monkeypatch, before):
    held = saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    if before == "a pull of another table":
        saved_table(tmp_path / "other", "b", seed=1)
        push(tmp_path / "other", f"{url}.other")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(pull_module, "backup_folder", lambda *args, **more: (_ for _ in ()).throw(Killed))
            pull(f"{url}.other", tmp_path / "copy")
    removed, calls = [], [(os, "remove"), (os, "unlink"), (os, "rmdir")]

    def killing(call, stop):
        def remove(path, *args, **more):
            if (".pull" in str(path) or "dir_fd" in more) and len(removed) == stop:
                raise Killed
            removed.append(path)
            return call(path, *args, **more)

        return remove

    for stop in itertools.count():
        removed.clear()
        with monkeypatch.context() as patch:
            for module, name in calls:
                patch.setattr(module, name, killing(getattr(os, name), stop))
            try:
                pull(url, tmp_path / "copy")
                break
            except Killed:
                pass
    assert stop > 3
    assert held_at(tmp_path / "copy") == held and not (tmp_path / "copy.pull").exists()


def test_a_folder_of_the_users_own_beside_the_target_is_left_alone(tmp_path, url):
    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    (tmp_path / "copy.pull").mkdir()
    (tmp_path / "copy.pull/mine").write_text("rows")
    with pytest.raises(StorageError, match="must be a new folder, or one that a pull has left"):
        pull(url, tmp_path / "copy")
    assert (tmp_path / "copy.pull/mine").read_text() == "rows"


def test_one_pull_at_a_time_and_none_into_a_table_in_use(tmp_path, url):
    from oneemb.storage.fs import LocalFileSystem

    saved_table(tmp_path / "live", "a")
    push(tmp_path / "live", url)
    pull(url, tmp_path / "copy")
    with open_table(tmp_path / "copy"), pytest.raises(LockedError, match="must not be in use"):
        pull(url, tmp_path / "copy")
    (tmp_path / "copy.pull").mkdir(exist_ok=True)
    fs = LocalFileSystem()
    lock = fs.lock(str(tmp_path / "copy.pull"))
    with pytest.raises(LockedError, match="one pull at a time"):
        pull(url, tmp_path / "copy")
    fs.unlock(lock)
    pull(url, tmp_path / "copy")


def test_snapshots_of_another_table_do_not_mix(tmp_path, url):
    saved_table(tmp_path / "one", "a", seed=1)
    held = saved_table(tmp_path / "two", "b", seed=2)
    push(tmp_path / "one", url)
    with pytest.raises(StorageError, match="a copy of another table"):
        pull(url, tmp_path / "two")
    assert held_at(tmp_path / "two") == held


def test_snapshots_of_two_branches_of_a_job_come_together(tmp_path, url):
    embedding, ids = embedding_at(tmp_path / "job"), torch.arange(300)
    for name, until in (("a", 100), ("b", 300)):
        train(embedding, ids[:until], 1.0)
        embedding.save_snapshot(name)
        push(tmp_path / "job", url)
    rows = {"b": embedding(ids).detach().clone()}
    embedding.load_snapshot("a")
    train(embedding, ids[:50], 2.0)
    embedding.save_snapshot("c")
    rows["c"] = embedding(ids[:100]).detach().clone()
    embedding.close()
    push(tmp_path / "job", url)
    pull(url, tmp_path / "copy")
    copy = embedding_at(tmp_path / "copy")
    for name in "cb":
        copy.load_snapshot(name)
        assert torch.equal(copy(ids[: len(rows[name])]), rows[name])
    copy.close()


@pytest.mark.parametrize("what", ["chunks/*.rows", "snapshots/b.snapshot"])
def test_a_damaged_snapshot_is_not_pushed_and_the_others_are(tmp_path, url, what):
    held = saved_table(tmp_path / "live", "ab")
    newest = max((tmp_path / "live").glob(what))
    data = bytearray(newest.read_bytes())
    data[-20] ^= 1  # In a row, or in the snapshot's list of rows.
    newest.write_bytes(data)
    result = push(tmp_path / "live", url)
    assert set(result.damaged) == {"b"} and "checksum" in result.damaged["b"]
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == {"a": held["a"]}


@pytest.mark.usefixtures("small_pieces")
def test_a_push_beside_a_job_that_saves_and_deletes(tmp_path, url):
    rows, rng, saved, failed = {}, np.random.default_rng(0), {}, []
    with open_table(tmp_path / "live") as table:
        put_random(table, rows, rng, 300)
        table.save_snapshot("s0", {})
        saved["s0"] = dict(rows)

        def job():
            try:
                for n in range(1, 25):
                    put_random(table, rows, rng, 100)
                    saved[f"s{n}"] = dict(rows)
                    table.save_snapshot(f"s{n}", {})
                    if n > 2:
                        table.delete_snapshot(f"s{n - 3}")
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=job)
        thread.start()
        while thread.is_alive():
            push(tmp_path / "live", url)
        thread.join()
        push(tmp_path / "live", url)
    assert not failed
    pull(url, tmp_path / "copy")
    found = held_at(tmp_path / "copy")
    assert {"s22", "s23", "s24"} <= found.keys()
    assert all(rows == saved[name] for name, rows in found.items())


def test_a_snapshot_that_is_deleted_while_its_file_is_read_is_gone(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "live", "ab")
    original = push_module.copied

    def deleted(fs, path, *args):
        if path.endswith("b.snapshot"):
            (tmp_path / "live/snapshots/b.snapshot").unlink()
        return original(fs, path, *args)

    monkeypatch.setattr(push_module, "copied", deleted)
    result = push(tmp_path / "live", url)
    assert result.gone == ["b"] and result.snapshots == ["a"] and result.damaged == {}


@pytest.mark.parametrize("name", [".", "..", "a/b", "x y%2E", "ü~1"])
def test_names_of_any_letters_keep_their_own_place(tmp_path, url, name):
    try:
        held = saved_table(tmp_path / "live", [name, "plain"])
    except ValueError:
        pytest.skip("no snapshot may have this name")
    push(tmp_path / "live", url)
    assert names_in(ObjectStore(url)) == sorted([name, "plain"])
    pull(url, tmp_path / "copy", [name])
    assert held_at(tmp_path / "copy") == {name: held[name]}


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ("nowhere://x", ValueError, "url must be one that fsspec knows"),
        ("sftp://ada:secret@host/x", ValueError, "url must hold no password, .* got one in 'sftp://ada@host/x'"),
        ("s3://bucket/x", ImportError, "needs a package"),
    ],
)
def test_urls_that_nothing_can_read_are_told(tmp_path, wrong, error, words, monkeypatch):
    saved_table(tmp_path / "live", "a")
    if error is ImportError:
        monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(error, match=words):
        push(tmp_path / "live", wrong)


def test_the_commands_do_it(tmp_path, url):
    from click.testing import CliRunner

    from oneemb.cli.commands import oneemb as command

    def run(*arguments):
        result = CliRunner().invoke(command, [*map(str, arguments), "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    held = saved_table(tmp_path / "live", "ab")
    if url.startswith("memory"):
        pytest.skip("the memory of this process is enough for the calls above")
    assert run("push", tmp_path / "live", url, "--snapshot", "a")["pushed"] == ["a"]
    assert run("stored", "list", url)["snapshots"] == ["a"]
    assert run("push", tmp_path / "live", url)["pushed"] == ["b"]
    assert run("stored", "delete", url, "a", "-y")["deleted"] == "a"
    assert run("stored", "clean", url, "--older-than-hours", "0")["objects"] > 0
    assert run("pull", url, tmp_path / "copy")["pulled"] == ["b"]
    assert held_at(tmp_path / "copy") == {"b": held["b"]}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"names": "base"}, TypeError, "names must be a list of names of snapshots, .* got str 'base'"),
        ({"names": [3]}, TypeError, r"names must be a list .* got list \[3\]"),
        ({"names": 3}, TypeError, "names must be a list .* got int 3"),
        ({"url": None}, TypeError, "url must be a str, .* got NoneType None"),
        ({"url": b"file:///x"}, TypeError, "url must be a str, .* got bytes"),
        ({"url": ""}, ValueError, "url must say where the snapshots lie"),
        ({"path": None}, TypeError, "path must be that of a table's folder, got NoneType"),
        ({"path": 0}, TypeError, "path must be that of a table's folder, got int 0"),
        ({"options": "key"}, TypeError, "options must be a dict of arguments .* got str"),
        ({"options": {1: 2}}, TypeError, "options must be a dict of arguments .* got dict"),
    ],
)
def test_arguments_of_wrong_types_are_named_and_write_nothing(tmp_path, monkeypatch, arguments, error, says):
    saved_table(tmp_path / "live", ["base"])
    monkeypatch.chdir(tmp_path)
    for call in push, pull:
        given = {"url": f"file://{tmp_path}/objects", "path": tmp_path / "live", **arguments}
        with pytest.raises(error, match=says):
            call(**given)
    assert [entry.name for entry in tmp_path.iterdir()] == ["live"]


def test_paths_may_be_bytes_and_urls_of_folders_may_be_paths(tmp_path):
    held = saved_table(tmp_path / "live")
    push(bytes(tmp_path / "live"), tmp_path / "objects")
    pull(tmp_path / "objects", bytes(tmp_path / "copy"))
    assert held_at(tmp_path / "copy") == held


def test_snapshots_of_two_jobs_behind_one_url_are_pulled_by_their_names(tmp_path, url):
    held = {name: saved_table(tmp_path / name, [name], seed=seed) for seed, name in enumerate("ab")}
    for name in "ab":
        push_of_writer(ObjectStore(url), str(tmp_path / name), name, "save", 0)
    with pytest.raises(
        StorageError, match="must be of one table, but two of them .* pull the snapshots of each job by"
    ):
        pull(url, tmp_path / "both")
    for name in "ab":
        pull(url, tmp_path / f"only-{name}", [name])
        assert held_at(tmp_path / f"only-{name}") == held[name]


@pytest.mark.parametrize("longer", ["there", "here"])
def test_a_push_of_another_table_to_the_same_url_is_refused(tmp_path, url, longer):
    held = saved_table(tmp_path / "one", "a", seed=1, size=900 if longer == "there" else 300)
    saved_table(tmp_path / "two", "b", seed=2, size=600)
    push(tmp_path / "one", url)
    before = set(ObjectStore(url).keys(""))
    with pytest.raises(StorageError, match="must have snapshots of one table, but its chunk 1 has other keys .*two"):
        push(tmp_path / "two", url)
    assert set(ObjectStore(url).keys("")) == before
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == held


def test_a_table_that_was_set_back_and_one_that_was_copied_are_pushed_on(tmp_path, url):
    saved_table(tmp_path / "live", "abc", size=300)
    push(tmp_path / "live", url)
    pull(url, tmp_path / "moved", ["a"])
    for path in ("live", "moved"):
        with open_table(tmp_path / path) as table:
            for name in {info.name for info in table.snapshots()} - {"a"}:
                table.delete_snapshot(name)
            table.load_snapshot("a")
            if path == "live":
                put_random(table, {}, np.random.default_rng(9), 50)
                table.save_snapshot("d", {})
        push(tmp_path / path, url)
    assert names_in(ObjectStore(url)) == ["a", "b", "c", "d"]


def test_the_newest_snapshot_is_named_and_a_deleted_one_is_not(tmp_path, url):
    saved_table(tmp_path / "live", "abc")
    store = ObjectStore(url)
    push(tmp_path / "live", url, ["b"])
    push(tmp_path / "live", url, ["a"])
    assert newest_in(store)[0] == "b"
    push(tmp_path / "live", url)
    assert newest_in(store)[0] == "c"
    for name, newest in (("c", "b"), ("a", "b"), ("b", None)):
        delete_stored(url, name)
        found = newest_in(store)
        assert (found and found[0]) == newest


@pytest.mark.usefixtures("small_pieces")
def test_cleaning_is_refused_beside_a_push_and_removes_nothing_that_the_push_counts_on(tmp_path, url, monkeypatch):
    held = saved_table(tmp_path / "live", "ab")
    with monkeypatch.context() as patch:
        patch.setattr(push_module, "put_part", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            push(tmp_path / "live", url)  # has left objects, which the next push counts on
    put, tried = ObjectStore.put, []

    def cleaned(store, data):
        found = put(store, data)
        with pytest.raises(LockedError, match="must not be cleaned while a push writes there, and pushing/"):
            clean_store(url, 0)
        tried.append(found)
        return found

    monkeypatch.setattr(ObjectStore, "put", cleaned)
    push(tmp_path / "live", url)
    assert tried and not any(is_new for _, is_new in tried[:1])
    monkeypatch.undo()
    pull(url, tmp_path / "copy")
    assert held_at(tmp_path / "copy") == held
    assert clean_store(url, 0).objects == 0


def test_a_push_waits_until_cleaning_has_ended(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "live", "a")
    store, waits = ObjectStore(url), []
    with Cleaning(store):

        def waited(seconds):
            waits.append(store.size_of("pushing/x-0.json"))
            store.remove("cleaning.json")

        monkeypatch.setattr(marks.time, "sleep", waited)
        push(tmp_path / "live", url)
    assert len(waits) == 1 and names_in(store) == ["a"]


def test_marks_of_killed_processes_count_until_they_are_old(tmp_path, url, monkeypatch):
    saved_table(tmp_path / "live", "a")
    store = ObjectStore(url)
    store.put_text("pushing/killed.json", {"version": 1, "writer": ""})
    with pytest.raises(LockedError, match="if it was killed, 10 minutes later"):
        clean_store(url, 0)
    assert store.size_of("cleaning.json") is None
    monkeypatch.setattr(marks, "ALIVE_S", -1.0)
    clean_store(url, 0)
    store.put_text("cleaning.json", {"version": 1, "writer": ""})
    assert push(tmp_path / "live", url).pushed == ["a"]


def test_marks_do_not_age_by_the_clock_of_this_machine(url, monkeypatch):
    store, real = ObjectStore(url), time.time
    store.put_text("pushing/alive.json", {"version": 1, "writer": ""})
    monkeypatch.setattr(object_store.time, "time", lambda: real() + 3600)
    with pytest.raises(LockedError, match="pushing/alive.json says"):
        clean_store(url, 0)


@pytest.mark.parametrize("place", [".", "snapshots"])
def test_objects_do_not_lie_among_the_files_of_a_table(tmp_path, place):
    saved_table(tmp_path / "in" / "live")
    before = sorted(tmp_path.rglob("*"))
    for call in push, pull:
        with pytest.raises(ValueError, match="url must be a folder outside of the table's"):
            call(url=f"file://{tmp_path / 'in' / 'live' / place}", path=tmp_path / "in" / "live")
    assert sorted(tmp_path.rglob("*")) == before
