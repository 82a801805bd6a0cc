"""Servers of rows in an object store: they take over whole snapshots, and download only what is new."""

import os
import shutil
import threading
import uuid
from unittest.mock import Mock

import fsspec
import pytest
import torch

import oneemb
from oneemb.serving import build, stored_rows
from oneemb.storage.errors import CorruptTableError, LockedError, OtherTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.objects import pull, push as push_module
from oneemb.storage.objects.deletion import delete_stored
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.push import push, push_of_writer
from oneemb.storage.objects.transfers import THREADS
from oneemb.storage.table.snapshot_file import SnapshotFiles
from tests.serving.test_following import wait_for
from tests.storage.test_objects import Killed, embedding_at, train
from tests.support.waits import came, ended

IDS = torch.arange(400)


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 3000)
    monkeypatch.setattr("oneemb.storage.objects.object_store._WAIT_S", 0)
    return f"memory://{uuid.uuid4().hex}/items"


class Job:
    """A job that trains, saves a snapshot and pushes it."""

    def __init__(self, path, url):
        self.embedding, self.path, self.url, self.rows = embedding_at(path), path, url, {}

    def save(self, name, ids=IDS, since=None):
        train(self.embedding, ids, 0.5)
        self.embedding.save_snapshot(name) if since is None else self.embedding.save_delta(name, since=since)
        self.rows[name] = self.embedding.read(IDS).clone()
        self.uploaded = push(self.path, self.url, [name]).bytes_uploaded
        return self


@pytest.fixture
def job(tmp_path, url):
    job = Job(tmp_path / "job", url).save("a")
    yield job
    job.embedding.close()


def test_a_server_follows_the_newest_snapshot_of_a_store(tmp_path, job, url):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        assert torch.equal(served(IDS), job.rows["a"]) and not served.refresh()
        job.save("b")
        served.follow(0.01)
        assert wait_for(lambda: served.version.name == "b") and served.error is None
        assert torch.equal(served(IDS), job.rows["b"])
        job.save("c", IDS[:5], since="b")
        assert wait_for(lambda: served.version.name == "c")
        assert torch.equal(served(IDS), job.rows["c"])
        served.rollback("a")
        assert torch.equal(served(IDS), job.rows["a"])
        served.load_state_dict(job.embedding.state_dict())
        assert served.version.name == "c"
    with oneemb.InferenceEmbedding.open(url, "b", folder=tmp_path / "serving") as served:
        assert torch.equal(served(IDS), job.rows["b"])


@pytest.mark.parametrize("place", ["find_snapshot", "make_file"])
def test_a_rollback_pulls_again_what_a_follower_of_the_copy_has_removed(tmp_path, job, url, monkeypatch, place):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        job.save("b")
        served.refresh()
        for old in (tmp_path / "serving").glob("*.serving"):
            old.unlink()
        copy, left = stored_rows.StoredCopy(ObjectStore(url), str(tmp_path / "serving/rows")), [1]
        call = getattr(build, place)

        def after_a_follower(*args, **options):
            if left:
                left.clear()
                copy.pull(None, lambda: False)
            return call(*args, **options)

        monkeypatch.setattr(build, place, after_a_follower)
        served.rollback("a")
        assert torch.equal(served(IDS), job.rows["a"]) and not left


def test_a_poll_reads_one_object_and_lists_nothing(tmp_path, job, url, monkeypatch):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        read, kind = [], type(fsspec.filesystem("memory"))
        original = kind.cat_file
        monkeypatch.setattr(kind, "cat_file", lambda fs, path, *args: read.append(path) or original(fs, path, *args))
        monkeypatch.setattr(kind, "find", lambda *args: pytest.fail("a poll lists objects"))
        assert not served.refresh()
        assert len(read) == 2 and read[0].endswith("newest.json") and read[1].endswith("a/current.json")


def test_a_takeover_of_a_delta_reads_no_text_of_its_ancestors(tmp_path, job, url, monkeypatch):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        get, read = ObjectStore.get_text, []
        monkeypatch.setattr(ObjectStore, "get_text", lambda store, key: read.append(key) or get(store, key))
        for n in range(1, 5):
            job.save(str(n), IDS[n : n + 9], since="a" if n == 1 else str(n - 1))
            read.clear()
            assert served.refresh() and torch.equal(served(IDS), job.rows[str(n)])
            assert {key.split("/")[1] for key in read if key != "newest.json"} == {str(n)}
            assert len([key for key in read if not key.endswith(("newest.json", "current.json"))]) == 1


def test_texts_are_read_once_while_another_process_pulls(tmp_path, job, url, monkeypatch):
    original, read, locked = pull.backup_folder, [], iter(range(5))

    def backup(*args, **options):
        if next(locked, None) is not None:
            raise LockedError("another pull is at work")
        return original(*args, **options)

    get = pull.get_part
    job.save("b", IDS[:9], since="a")
    monkeypatch.setattr(stored_rows, "_LOOK_S", 0)
    monkeypatch.setattr(pull, "backup_folder", backup)
    monkeypatch.setattr(pull, "get_part", lambda *args: read.append(args[1]) or get(*args))
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        assert torch.equal(served(IDS), job.rows["b"])
    assert sorted(read) == ["a", "b"]


def test_a_part_that_is_pushed_again_in_other_pieces_is_read_again(tmp_path, job, url, monkeypatch):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        delete_stored(url, "a")
        fs, root = fsspec.core.url_to_fs(url)
        for path in fs.find(f"{root}/objects"):
            fs.rm_file(path)
        monkeypatch.setattr(push_module, "_PIECE_BYTES", 2000)
        job.save("b", IDS[:9], since="a")  # The parent goes to the store with it.
        shutil.rmtree(tmp_path / "serving" / "rows")
        with pytest.raises(CorruptTableError, match="is missing"):
            served.refresh()
        assert served.version.name == "a"
        assert served.refresh() and torch.equal(served(IDS), job.rows["b"])


def test_only_new_pieces_are_downloaded_and_the_copy_has_one_snapshot(tmp_path, job, url, monkeypatch):
    get, sizes = ObjectStore.get, []
    monkeypatch.setattr(ObjectStore, "get", lambda store, piece: sizes.append(piece[1]) or get(store, piece))
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        job.save("b", IDS[:10], since="a")
        sizes.clear()
        assert served.refresh() and 0 < sum(sizes) <= job.uploaded
        assert torch.equal(served(IDS), job.rows["b"])
        job.save("c")
        served.refresh()
    names = [path.name for path in (tmp_path / "serving/rows/snapshots").iterdir()]
    assert names == ["c.snapshot"]


def test_what_the_store_has_no_more_is_given_up_and_an_empty_store_is_told(tmp_path, job, url):
    job.save("b")
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        delete_stored(url, "b")
        assert served.refresh() and served.version.name == "a"
        assert torch.equal(served(IDS), job.rows["a"])
        delete_stored(url, "a")
        with pytest.raises(SnapshotNotFoundError, match="must have a snapshot, it has none"):
            served.refresh()
        assert torch.equal(served(IDS), job.rows["a"])


def test_a_job_that_went_on_elsewhere_is_followed(tmp_path, job, url):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        other = embedding_at(tmp_path / "other")
        train(other, IDS * 3, 0.25)
        for name in ("x", "y"):
            other.save_snapshot(name)
        push_of_writer(ObjectStore(url), str(tmp_path / "other"), "y", "save", 0)
        assert served.refresh() and served.version.name == "y"
        assert torch.equal(served(IDS * 3), other.read(IDS * 3))
        other.close()


def test_a_snapshot_that_is_replaced_while_it_is_brought_is_brought_anew(tmp_path, job, url, monkeypatch):
    original, replaced = stored_rows.pull_from, []

    def replacing(*args, **more):
        if not replaced:
            train(job.embedding, IDS, 0.5)
            job.embedding.save_snapshot("a", overwrite=True)
            push(job.path, url, ["a"])
            replaced.append(job.embedding.read(IDS).clone())
        return original(*args, **more)

    monkeypatch.setattr(stored_rows, "pull_from", replacing)
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        assert torch.equal(served(IDS), replaced[0])


def test_a_delta_whose_parent_in_the_store_is_of_another_table_is_an_error(tmp_path, job, url):
    job.save("delta", IDS[:5], since="a")
    other = embedding_at(tmp_path / "other")
    train(other, IDS * 3, 0.25)
    other.save_snapshot("more")
    other.save_snapshot("a")
    push_of_writer(ObjectStore(url), str(tmp_path / "other"), "a", "save", 0)
    other.close()
    with pytest.raises(OtherTableError, match=r"must have snapshot 'delta' and its parents from one table"):
        oneemb.InferenceEmbedding.open(url, "delta", folder=tmp_path / "serving")


def test_a_bring_that_is_killed_at_any_read_changes_nothing_and_is_continued(tmp_path, job, url, monkeypatch):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        job.save("b")
        shutil.copytree(tmp_path / "serving", tmp_path / "before")
        get = ObjectStore.get
        for at in range(100):
            calls = iter(range(1000))

            def killed(store, piece, at=at, calls=calls):
                if next(calls) >= at:
                    raise Killed
                return get(store, piece)

            monkeypatch.setattr(ObjectStore, "get", killed)
            try:
                served.refresh()
                break
            except Killed:
                assert served.version.name == "a" and torch.equal(served(IDS), job.rows["a"])
            with oneemb.InferenceEmbedding.open(url, "a", folder=tmp_path / "before") as another:
                assert torch.equal(another(IDS), job.rows["a"])
        assert at > 3 and torch.equal(served(IDS), job.rows["b"])


def test_a_newer_snapshot_that_a_killed_pull_has_left_is_not_served_once_the_store_has_it_no_more(
    tmp_path, job, url, monkeypatch
):  # fmt: skip
    job.save("b")
    folder = tmp_path / "serving"
    stored_rows.StoredCopy(ObjectStore(url), str(folder / "rows")).pull(None, lambda: False)
    delete_stored(url, "b")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(stored_rows.StoredCopy, "_remove_others", Mock(side_effect=Killed))
        oneemb.InferenceEmbedding.open(url, folder=folder)
    with oneemb.InferenceEmbedding.open(url, folder=folder) as served:
        assert served.version.name == "a" and torch.equal(served(IDS), job.rows["a"])


def test_a_pull_that_nobody_wants_any_more_ends_with_the_calls_at_work(tmp_path, job, url, monkeypatch):
    for n in range(1, 4):
        job.save(str(n), IDS[:99], since="a" if n == 1 else str(n - 1))
    kind, read = type(fsspec.filesystem("memory")), []
    original = kind.cat_file
    monkeypatch.setattr(kind, "cat_file", lambda fs, path, *args: read.append(path) or original(fs, path, *args))
    copy, most = stored_rows.StoredCopy(ObjectStore(url), str(tmp_path / "copy")), []
    for wanted in range(2, 100, 3):
        read.clear()
        copy.pull(None, lambda wanted=wanted: len(read) >= wanted)
        if len(read) < wanted:
            break
        most.append(len(read) - wanted)
    assert len(most) > 1 and max(most) <= THREADS
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        assert torch.equal(served(IDS), job.rows["3"])


def test_lookups_go_on_and_nothing_is_lost_while_a_store_gives_no_answer(tmp_path, job, url, monkeypatch):
    kind, asked, answers = type(fsspec.filesystem("memory")), threading.Event(), threading.Event()
    original = kind.cat_file

    def silent(fs, path, *args):
        asked.set()
        came(answers)
        return original(fs, path, *args)

    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        job.save("b", IDS[:5], since="a")
        monkeypatch.setattr(kind, "cat_file", silent)
        served.follow(0.01)
        came(asked)
        assert torch.equal(served(IDS), job.rows["a"]) and served.version.name == "a" and served.error is None
        answers.set()
        assert wait_for(lambda: served.version.name == "b") and served.error is None
        assert torch.equal(served(IDS), job.rows["b"])


def test_a_poll_that_finds_nothing_new_reads_no_description_of_the_copy(tmp_path, job, url, monkeypatch):
    job.save("b", IDS[:5], since="a")
    read, original = [], SnapshotFiles.read
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        for path in (tmp_path / "serving/rows/snapshots").iterdir():
            os.utime(path, (path.stat().st_mtime - 100,) * 2)  # A file that has just changed is read at each look.
        assert not served.refresh()
        monkeypatch.setattr(SnapshotFiles, "read", lambda files, name: read.append(name) or original(files, name))
        assert not served.refresh() and read == []
        job.save("c", IDS[:5], since="b")
        assert served.refresh() and "c" in read


def test_a_damaged_object_is_an_error_that_names_it_and_the_version_stays(tmp_path, job, url):
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        fs, root = fsspec.core.url_to_fs(url)
        before = set(fs.find(f"{root}/objects"))
        job.save("b")
        for n, path in enumerate(sorted(set(fs.find(f"{root}/objects")) - before)):
            data = fs.cat_file(path)
            fs.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
            shutil.copytree(tmp_path / "serving", tmp_path / f"new{n}")
            with oneemb.InferenceEmbedding.open(url, "a", folder=tmp_path / f"new{n}") as another:
                with pytest.raises(CorruptTableError, match=path.rpartition("/")[2]):
                    another.refresh()
                assert another.version.name == "a" and torch.equal(another(IDS), job.rows["a"])
            fs.pipe_file(path, data)
        assert served.refresh() and torch.equal(served(IDS), job.rows["b"])


def test_processes_of_a_machine_share_one_copy(tmp_path, job, url):
    served, failed = [], []

    def opens():
        try:
            served.append(oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving"))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=opens) for _ in range(4)]
    for thread in threads:
        thread.start()
    ended(*threads)
    assert not failed
    for one in served:
        assert torch.equal(one(IDS), job.rows["a"])
        one.close()


def test_a_url_needs_a_folder_and_a_store_that_fails_is_told(tmp_path, job, url, monkeypatch):
    with pytest.raises(ValueError, match="folder must name a folder on this machine"):
        oneemb.InferenceEmbedding.open(url)
    kind = type(fsspec.filesystem("memory"))
    with oneemb.InferenceEmbedding.open(url, folder=tmp_path / "serving") as served:
        monkeypatch.setattr(kind, "cat_file", lambda *args: (_ for _ in ()).throw(TimeoutError("the network is down")))
        with pytest.raises(StorageError, match="the network is down"):
            served.refresh()
        assert torch.equal(served(IDS), job.rows["a"])
