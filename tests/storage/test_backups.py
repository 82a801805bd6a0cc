"""A folder is copied while a job saves to it: by `oneemb backup`, or by cp, in the order that docs/backups.md names."""

import errno
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import oneemb
from oneemb.kernels.owner import owner_of
from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.new_files import NewFile
from oneemb.storage.snapshots.backup import backup_folder
from oneemb.storage.snapshots.part_folders import check_parts
from oneemb.storage.table.check import check_table
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.storage import test_persistent_table_crash as crash
from tests.storage.test_persistent_table import open_table
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.table_model import check, put_random, scanned

CHUNKS, SNAPSHOTS = "chunks", "snapshots"
RIGHT = [CHUNKS, SNAPSHOTS, CHUNKS]


def link(fs, source, target):
    """As `cp -al`: both are one file, which grows for both."""
    fs.entries[target] = fs.entries[source]


def copy(fs, source, target):
    """As rsync: what is there now, in place of what was copied before."""
    fs.entries[target] = type(fs.entries[source])(bytes(fs.entries[source].now))


class Vanished(Exception):
    """A snapshot has gone since its folder was listed, which cp and rsync say: the copy is made anew."""


def backed_up(order, put, change, at):
    """A copy of a table, made file by file, with the change before the file of this number.

    Returns:
        The disk with the copy, what each save held, and whether there was such a file.
    """
    fs = FaultyFileSystem()
    world = crash.World(fs)
    world.delete("a")
    saved = dict(world.saved.values())
    for folder in (CHUNKS, SNAPSHOTS):
        fs.make_directories(f"/copy/{folder}")
    done = 0
    for folder in order:
        for name in sorted(fs.names(f"/t/{folder}")):
            if done == at:
                change(world)
                saved |= dict(world.saved.values())
            done += 1
            if f"/t/{folder}/{name}" in fs.entries:
                put(fs, f"/t/{folder}/{name}", f"/copy/{folder}/{name}")
            elif folder == SNAPSHOTS:
                raise Vanished
    for _ in range(2):  # The job goes on.
        world.put(170)
        world.save("b", overwrite=True)
    return fs, saved, done > at


def replace(world):
    """Other rows in other chunks, in place of the snapshot."""
    for _ in range(3):
        world.put(170)
    world.save("b", overwrite=True)


def save_and_delete(world):
    """As a graph that keeps one: a new one is saved, then the former one is deleted."""
    for _ in range(3):
        world.put(170)
    world.save("c")
    world.delete("b")


def wrong_in(fs, saved):
    """What is wrong with a copy: what `check` says, or what is loaded from it."""
    problems = check_table("/copy", fs=fs).problems
    if problems:
        return problems
    disk = FaultyFileSystem()
    for folder in (CHUNKS, SNAPSHOTS):
        disk.make_directories(f"/t/{folder}")
        for name in fs.names(f"/copy/{folder}"):
            content = bytes(fs.entries[f"/copy/{folder}/{name}"].now)
            disk.entries[f"/t/{folder}/{name}"] = type(fs.entries[f"/copy/{folder}/{name}"])(content)
    with crash.open_table(disk) as table:
        names = [info.name for info in table.snapshots()]
        sound = names and all(saved[table.load_snapshot(name)["n"]] == scanned(table) for name in names)
    return [] if sound else [f"other rows, or none: {names}"]


def wrongs(order, put, change):
    """What is wrong with the copies, wherever the change comes."""
    found, at, more = [], 0, True
    while more:
        try:
            fs, saved, more = backed_up(order, put, change, at)
            found += [f"before file {at}: {wrong}" for wrong in wrong_in(fs, saved)]
        except Vanished:
            assert change is save_and_delete
        at += 1
    assert at > 5
    return found


@pytest.mark.parametrize("change", [replace, save_and_delete])
@pytest.mark.parametrize("put", [link, copy])
def test_a_copy_of_chunks_then_snapshots_then_chunks_is_whole_wherever_a_save_comes(put, change):
    assert wrongs(RIGHT, put, change) == []


def test_the_commands_of_the_docs_copy_the_tables_below_a_folder(tmp_path):
    *_, commands = re.findall(r"```sh\n(.*?)```", (Path(__file__).parents[2] / "docs" / "backups.md").read_text(), re.S)
    live, held = tmp_path / "live", {}
    for folder in (live, live / "rank-0-of-2"):
        with open_table(folder) as table:
            put_random(table, held.setdefault(folder, {}), np.random.default_rng(len(held)), 100)
            table.save_snapshot("a", {})
    commands = commands.replace("/data/items.copy", f"{tmp_path}/copy").replace("/data/items", f"{live}")
    subprocess.run(["bash", "-e", "-c", commands.replace("oneemb check", "true")], check=True)
    for folder, rows in held.items():
        its = tmp_path / "copy" / folder.relative_to(live)
        assert check_table(its).problems == [] and sorted(os.listdir(its / CHUNKS)) == sorted(
            os.listdir(folder / CHUNKS)
        )
        assert not (its / "LOCK").exists()
        with open_table(its) as table:
            assert table.recovery.lost == [] and table.recovery.kept == []
            table.load_snapshot("a")
            check(table, rows)


def test_a_copy_of_links_and_the_table_are_cut_back_without_each_other(tmp_path):
    rows, earlier = {}, {}
    with open_table(tmp_path / "live") as table:
        for name, held in (("a", earlier), ("b", rows)):
            put_random(table, rows, np.random.default_rng(0 if name == "a" else 1), 100)
            held |= rows
            table.save_snapshot(name, {})
    for folder in (CHUNKS, SNAPSHOTS):
        (tmp_path / "copy" / folder).mkdir(parents=True)
        for file in (tmp_path / "live" / folder).iterdir():
            os.link(file, tmp_path / "copy" / folder / file.name)
    with open_table(tmp_path / "live") as table:
        table.delete_snapshot("b")
    with open_table(tmp_path / "live") as table:  # It needs less of its chunks now.
        table.load_snapshot("a")
        check(table, earlier)
    assert check_table(tmp_path / "copy").problems == []
    with open_table(tmp_path / "copy") as table:
        table.load_snapshot("b")
        check(table, rows)
        table.delete_snapshot("a")
    shutil.rmtree(tmp_path / "live")
    with open_table(tmp_path / "copy") as table:
        table.delete_snapshot("b")
    assert not any((tmp_path / "copy" / CHUNKS).iterdir())


@pytest.mark.parametrize("order", [[CHUNKS, SNAPSHOTS], [SNAPSHOTS, CHUNKS]], ids=str)
def test_a_copy_of_each_once_is_damaged_where_a_save_comes_between(order):
    assert wrongs(order, link, replace) and wrongs(order, copy, save_and_delete)


# ---- oneemb backup ---------------------------------------------------------------------------------------------------


def held_at(path):
    """{snapshot: its rows} of a table."""
    found = {}
    for info in read_snapshot_info(path):
        with SnapshotReader.open(path, info.name) as reader:
            found[info.name] = scanned(reader)
    return found


@pytest.mark.parametrize("how", [{"link": True}, {}], ids=str)
def test_a_backup_has_every_snapshot_and_the_next_one_only_adds(tmp_path, how):
    rows, rng = {}, np.random.default_rng(0)
    with open_table(tmp_path / "live") as table:
        for name in ("a", "b", "c"):
            put_random(table, rows, rng, 400)
            table.save_snapshot(name, {})
            result = backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), **how)
            assert result.copied == [name] and name in result.snapshots and not result.gone
            assert held_at(tmp_path / "copy") == held_at(tmp_path / "live")
        assert backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), **how).bytes_written == 0
        table.delete_snapshot("a")
        put_random(table, rows, rng, 400)
        table.save_snapshot("b", {}, overwrite=True)
        result = backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), **how)
        assert result.copied == ["b"] and held_at(tmp_path / "copy").keys() == {"a", "b", "c"}
        assert held_at(tmp_path / "copy")["b"] == held_at(tmp_path / "live")["b"] == rows
    with open_table(tmp_path / "copy") as table:
        table.load_snapshot("b")
        check(table, rows)


def save_parts(path, version):
    """A snapshot of two ranks, as two tables."""
    keys = np.zeros(200, np.int32), np.arange(200)
    writers = oneemb.make_persistent_table_writer(
        [str(path / f"rank-{rank}-of-2") for rank in range(2)], f"v{version}", "int64", "float32", 4
    )
    with writers as writer:
        writer.write(keys[1], np.full((200, 4), version, np.float32), keys[0])
    assert set(owner_of(*keys, 2).tolist()) == {0, 1}


@pytest.mark.parametrize("parts", [1, 2])
def test_a_backup_that_is_stopped_anywhere_leaves_whole_snapshots_and_is_continued(tmp_path, monkeypatch, parts):
    live, rows = tmp_path / "live", {}
    for version in range(2):
        if parts == 2:
            save_parts(live, version)
        else:
            with open_table(live) as table:
                put_random(table, rows, np.random.default_rng(version), 300)
                table.save_snapshot(f"v{version}", {})
    original, stopped, left = NewFile.put_in_place, 0, [0]

    def put_in_place(self):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(NewFile, "put_in_place", put_in_place)
    while True:
        copy = tmp_path / f"copy-{stopped}"
        left[0] = stopped + 1
        try:
            backup_folder(str(live), str(copy), verify=False)
            break
        except KeyboardInterrupt:
            stopped += 1
        if (copy / "snapshots").exists() or (copy / "rank-1-of-2" / "snapshots").exists():
            assert check_parts(str(copy)).problems == []
        left[0] = 0
        assert len(backup_folder(str(live), str(copy)).snapshots) == 2
        assert check_parts(str(copy)).snapshots == ["v0", "v1"]
    assert stopped >= 4 * parts


def test_a_backup_beside_a_job_that_saves_and_deletes(tmp_path):
    saved, done, failed = {}, threading.Event(), []

    def job():
        try:
            rows, rng = {}, np.random.default_rng(0)
            with open_table(tmp_path / "live") as table:
                for n in range(60):
                    put_random(table, rows, rng, 300, ids=600)
                    saved[f"s{n}"] = dict(rows)
                    table.save_snapshot(f"s{n}", {})
                    if n >= 2:
                        table.delete_snapshot(f"s{n - 2}")
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=job)
    thread.start()
    copies = 0
    try:
        while not done.is_set():
            if (tmp_path / "live" / "snapshots").exists():
                backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), verify=False)
                copies += 1
    finally:
        thread.join()
    assert not failed and copies
    backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    found = held_at(tmp_path / "copy")
    assert {"s58", "s59"} <= found.keys() and all(rows == saved[name] for name, rows in found.items())


def test_a_backup_of_another_table_into_the_same_folder_is_refused(tmp_path):
    for n, name in enumerate(("one", "two")):
        with open_table(tmp_path / name) as table:
            put_random(table, {}, np.random.default_rng(n), 300)
            table.save_snapshot(name, {})
    backup_folder(str(tmp_path / "one"), str(tmp_path / "copy"))
    with pytest.raises(StorageError, match="must begin with .*give a new folder"):
        backup_folder(str(tmp_path / "two"), str(tmp_path / "copy"))
    assert check_table(tmp_path / "copy").problems == [] and held_at(tmp_path / "copy").keys() == {"one"}
    with pytest.raises(StorageError, match="must be outside"):
        backup_folder(str(tmp_path / "one"), str(tmp_path / "one" / "copy"))


def saved_table(path):
    with open_table(path) as table:
        put_random(table, {}, np.random.default_rng(0), 300)
        table.save_snapshot("a", {})


def test_one_backup_at_a_time_writes_to_a_folder(tmp_path):
    saved_table(tmp_path / "live")
    second = []

    def progress(read, total):
        if not second:
            second.append(backup_folder(str(tmp_path / "live"), str(tmp_path / "copy")))  # The first only reads now.

    assert backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), progress=progress).copied == ["a"]
    assert second[0].snapshots == ["a"] and second[0].copied == []
    fs = LocalFileSystem()
    lock = fs.lock(str(tmp_path / "copy"))
    with pytest.raises(LockedError, match="copy must have one writer, another backup writes there; wait"):
        backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    fs.unlock(lock)
    assert backup_folder(str(tmp_path / "live"), str(tmp_path / "copy")).snapshots == ["a"]


def test_no_backup_goes_to_a_copy_that_a_job_uses(tmp_path):
    saved_table(tmp_path / "live")
    backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    before = held_at(tmp_path / "copy")
    with open_table(tmp_path / "copy"), pytest.raises(LockedError, match="copy of .*live, must not be in use"):
        backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    assert held_at(tmp_path / "copy") == before


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM])
def test_links_that_the_file_system_refuses_are_an_error_with_a_way_out(tmp_path, monkeypatch, number):
    saved_table(tmp_path / "live")

    def refused(source, target):
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(StorageError, match=r"must be on a file system that can link .* leave out --link"):
        backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"), link=True)
    monkeypatch.undo()
    assert backup_folder(str(tmp_path / "live"), str(tmp_path / "copy")).copied == ["a"]
    assert check_table(tmp_path / "copy").problems == []


def test_a_chunk_number_does_not_come_back_with_other_rows(tmp_path):
    """A job deletes its newest snapshot, ends, and saves other rows; the copy keeps the first ones."""
    saved, rng = {}, np.random.default_rng(0)
    for n in range(6):
        with open_table(tmp_path / "live") as table:
            if n:
                table.load_snapshot("base")
            rows = dict(saved.get("base", {}))
            put_random(table, rows, rng, 400 + 100 * n)
            name = f"s{n}" if n else "base"
            saved[name] = rows
            table.save_snapshot(name, {})
        backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
        if n:
            with open_table(tmp_path / "live") as table:
                if n % 2:
                    table.delete_snapshot(name)
                else:  # In place of the newest one, with chunks of the oldest.
                    table.load_snapshot("base")
                    table.save_snapshot(name, {}, overwrite=True)
                    saved[name] = saved["base"]
    assert held_at(tmp_path / "copy") == saved


def test_a_copy_that_shares_blocks_ends_where_the_snapshot_does(tmp_path, monkeypatch):
    rows = {}
    with open_table(tmp_path / "live") as table:
        put_random(table, rows, np.random.default_rng(0), 300)
        table.save_snapshot("a", {})
    for file in (tmp_path / "live" / CHUNKS).iterdir():
        with open(file, "ab") as end:
            end.write(b"what the job is about to write" * 100)

    def ioctl(target, request, source):
        os.pwrite(target.fileno(), os.pread(source, 1 << 24, 0), 0)

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    for file in (tmp_path / "copy" / CHUNKS).iterdir():
        assert file.stat().st_size < (tmp_path / "live" / CHUNKS / file.name).stat().st_size
    assert held_at(tmp_path / "copy")["a"] == rows


def test_damaged_snapshots_are_named_and_the_others_copied(tmp_path):
    live, copy = tmp_path / "live", tmp_path / "copy"
    for n, name in enumerate("abc"):
        with open_table(live) as table:
            put_random(table, {}, np.random.default_rng(n), 300)
            table.save_snapshot(name, {})
    (first, *_) = sorted((live / CHUNKS).glob("*.rows"))
    first.write_bytes(first.read_bytes()[:5000])
    file = live / SNAPSHOTS / "b.snapshot"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    (copy / CHUNKS).mkdir(parents=True)
    (copy / CHUNKS / "000000000009.rows.tmp").write_bytes(b"of a killed backup")
    result = backup_folder(str(live), str(copy))
    assert result.copied == ["c"] and result.incomplete.keys() == {"a", "b"}
    assert held_at(copy).keys() == {"c"}
    assert not list((copy / CHUNKS).glob("*.tmp"))
    (tmp_path / "link").symlink_to(live)
    with pytest.raises(StorageError, match="must be outside"):
        backup_folder(str(live), str(tmp_path / "link" / "sub"))
    with pytest.raises(StorageError, match="must be outside"):
        backup_folder(str(live), str(tmp_path / "link"))


def damage_list(path, name):
    """Change a bit in the last list of rows or array of a snapshot; the manifest before it stays sound."""
    file = path / SNAPSHOTS / f"{name}.snapshot"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("what", ["list of rows", "array"])
def test_a_snapshot_whose_list_of_rows_or_array_is_damaged_is_named_and_not_copied(tmp_path, what, verify):
    live, copy, rows = tmp_path / "live", tmp_path / "copy", {}
    with open_table(live) as table:
        for n, name in enumerate("ab"):
            put_random(table, rows, np.random.default_rng(n), 300)
            table.save_snapshot(name, {}, arrays={"of": np.arange(5)} if what == "array" else None)
    held = held_at(live)
    damage_list(live, "b")
    result = backup_folder(str(live), str(copy), verify=verify)
    assert result.copied == ["a"] and what in result.incomplete["b"]
    assert check_table(copy).problems == [] and held_at(copy) == {"a": held["a"]}


@pytest.mark.parametrize("names", ["", "ab"])
def test_a_backup_of_a_folder_without_a_sound_snapshot_names_what_is_damaged(tmp_path, names):
    with open_table(tmp_path / "live") as table:
        for name in names:
            put_random(table, {}, np.random.default_rng(0), 300)
            table.save_snapshot(name, {})
    for file in (tmp_path / "live" / SNAPSHOTS).iterdir():
        file.write_bytes(b"x" + file.read_bytes()[1:])
    result = backup_folder(str(tmp_path / "live"), str(tmp_path / "copy"))
    assert result.snapshots == [] and set(result.incomplete) == set(names)


@pytest.mark.parametrize(("suffix", "verify"), [(".rows", True), (".keys", True), (".keys", False)])
def test_a_chunk_that_is_damaged_since_the_last_backup_replaces_no_file_of_the_copy(tmp_path, suffix, verify):
    """The chunk has grown, so the copy lacks a part of it; what the copy has of it is sound."""
    live, copy, rows, rng = tmp_path / "live", tmp_path / "copy", {}, np.random.default_rng(0)
    with open_table(live) as table:
        for name in ("a", "b"):
            put_random(table, rows, rng, 40, ids=30)
            table.save_snapshot(name, {})
            if name == "a":
                backup_folder(str(live), str(copy))
        saved = held_at(live)
        (file,) = (live / CHUNKS).glob(f"*{suffix}")
        assert file.stat().st_size > (copy / CHUNKS / file.name).stat().st_size
    sound = file.read_bytes()
    at = 4096 if suffix == ".rows" else 160
    file.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    result = backup_folder(str(live), str(copy), verify=verify)
    assert result.snapshots == ["a"] and str(file) in result.incomplete["b"]
    assert check_table(copy).problems == [] and held_at(copy) == {"a": saved["a"]}
    file.write_bytes(sound)  # As from another copy.
    assert backup_folder(str(live), str(copy)).copied == ["b"]
    assert held_at(copy) == saved
