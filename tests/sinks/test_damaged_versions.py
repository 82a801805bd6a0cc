"""Damaged snapshots of a job: an older one keeps neither a sink nor a server on its version; a newest one is an error
that names the file, and the version before stays. The oracle is a dict of rows for each version."""

import errno
import os
import shutil
import threading
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import oneemb
from oneemb.serving.stored_rows import StoredCopy
from oneemb.sinks import Changes
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.objects import pull, push
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.table.chunk_files import chunk_paths
from oneemb.storage.table.snapshot_reader import SnapshotReader
from tests.support.published import Job, Place, publishing

KINDS = ["function", "redis", "parquet", "table", "faiss", "server"]
PLACES = [0.0, 0.5, 1.0]
"""Places of flipped bytes, as shares of a file."""


class Server:
    """A server that follows a job, as a `Place`. `make` opens it."""

    def __init__(self, job, folder):
        self._job, self._folder = job, folder
        self.served = None

    def open(self, name):
        self.served = oneemb.InferenceEmbedding.open(self._job.folder, name, absent="zeros", folder=self._folder)

    def check(self, job, name):
        check_served(self.served, job, name)


def check_served(served, job, name):
    """Compare all rows of a server, which gives zeros for ids without a row, with those of a version."""
    assert served.version.name == name
    keys = sorted({key for rows in job.rows.values() for key in rows})
    tables, ids = (torch.tensor(column) for column in zip(*keys, strict=True))
    rows = served(ids, tables).numpy()
    zeros = bytes(rows[0].nbytes)
    assert all(row.tobytes() == job.rows[name].get(key, zeros) for key, row in zip(keys, rows, strict=True))


class Shown:
    """A sink or a server of a kind, which shows v1."""

    def __init__(self, kind, job, folder, redis_server):
        self._job, self.is_server = job, kind == "server"
        self._place = Server(job, folder) if self.is_server else Place(kind, folder, redis_server)
        if self.is_server:
            self._place.open("v1")
            return
        self._publisher = publishing(job, self._place.make(), version="v1")
        self._publisher.flush()

    def bring(self):
        """Show the newest version. Returns the sink's figure `damaged`; None for a server."""
        if self.is_server:
            self._place.served.refresh()
            return None
        self._publisher.show(None)
        return self._publisher.stats().popitem()[1]["damaged"]

    def unread(self):
        """The figure of a snapshot that cannot be read and may be newer."""
        return self._place.served.error if self.is_server else self._publisher.stats().popitem()[1]["unread"]

    def check(self, name):
        self._place.check(self._job, name)

    def close(self):
        (self._place.served if self.is_server else self._publisher).close()


def reopened(job):
    """The same job after a restart, which writes to new chunks."""
    job.close()
    again = Job(job.folder)
    again.rows = job.rows
    again.embedding.load_snapshot(list(job.rows)[-1])
    return again


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job with whole snapshots v0 and v2, and a delta v1 in chunks of which v2 has no row."""
    job = Job(tmp_path_factory.mktemp("job") / "job")
    job.train(1000, ids=10000)
    job.save("v0")
    for n in (1, 2):
        job = reopened(job)
        job.save(f"v{n}", count=200, ids=20, whole=n == 2)
    yield job
    job.close()


def file_of(job, name, file):
    """Path of the file of a snapshot, or of the keys of its last chunk."""
    if file == "snapshot":
        return Path(job.folder, "snapshots", f"{name}.snapshot")
    with SnapshotReader.open(job.folder, name) as reader:
        return Path(chunk_paths(f"{job.folder}/chunks", max(reader.parts))[1])


@contextmanager
def flipped(path, place):
    """Block in which one byte of a file is changed, and the time of its last change is not."""
    data, times = path.read_bytes(), os.stat(path)
    at = int(place * (len(data) - 1))

    def write(changed):
        path.write_bytes(changed)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.utime(path.parent)  # so that publishers look into the folder again

    write(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    try:
        yield
    finally:
        write(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_older_snapshot_keeps_no_sink_and_no_server_on_its_version(
    kind, job, tmp_path, redis_server, caplog
):  # fmt: skip
    told = []
    for file in ("snapshot", "keys"):
        for place in PLACES:
            shown = Shown(kind, job, tmp_path / f"{file} {place}", redis_server)
            shown.check("v1")
            path = file_of(job, "v1", file)
            with flipped(path, place):
                told.append(shown.bring())
            shown.check("v2")
            shown.close()
            assert told[-1] in (0, 1, None)
    assert kind == "server" or sum(told) > len(PLACES), told
    assert "could not be" in caplog.text and str(path) in caplog.text


def test_an_error_that_is_no_damage_gives_a_sink_no_rows_and_the_next_try_its_changes(
    job, tmp_path, redis_server, monkeypatch
):  # fmt: skip
    shown = Shown("parquet", job, tmp_path / "parquet", redis_server)
    with monkeypatch.context() as patched:
        failed = oneemb.StorageError("too many open files")
        failed.__cause__ = OSError(errno.EMFILE, "too many open files")
        patched.setattr("oneemb.sinks.versions.changed_rows", Mock(side_effect=failed))
        with pytest.raises(oneemb.PublishError, match="too many open files"):
            shown.bring()
    shown.check("v1")
    assert shown.bring() == 0
    shown.check("v2")
    shown.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_newest_snapshot_is_an_error_that_names_it_and_the_version_before_stays(
    kind, job, tmp_path, redis_server
):  # fmt: skip
    for file in ("snapshot", "keys"):
        path = file_of(job, "v2", file)
        for place in PLACES:
            shown, raised = Shown(kind, job, tmp_path / f"{file} {place}", redis_server), False
            with flipped(path, place):
                try:
                    shown.bring()
                except oneemb.StorageError as error:
                    assert str(path) in str(error)
                    raised = True
                shown.check("v1" if raised else "v2")  # Bytes between the parts of a file do not matter.
            shown.bring()
            shown.check("v2")
            shown.close()
            assert raised or file == "snapshot" and 0 < place < 1


@pytest.mark.parametrize("kind", ["parquet", "server"])
def test_a_version_that_is_shown_stays_though_its_snapshot_is_damaged_since(kind, job, tmp_path, redis_server):
    shown, path = Shown(kind, job, tmp_path / kind, redis_server), file_of(job, "v2", "snapshot")
    shown.bring()
    for _ in range(2):
        with flipped(path, 0.0), pytest.raises(oneemb.StorageError, match="v2.snapshot"):
            shown.bring()
        shown.check("v2")
    shown.bring()
    shown.close()


def test_open_without_a_name_says_that_a_newer_snapshot_cannot_be_read(job, tmp_path, caplog):
    path = file_of(job, "v2", "snapshot")
    with flipped(path, 0.0):
        served = oneemb.InferenceEmbedding.open(job.folder, absent="zeros", folder=tmp_path)
        check_served(served, job, "v1")
        assert str(path) in str(served.error)
        assert [str(path) in record.message and "'v1'" in record.message for record in caplog.records] == [True]
        with pytest.raises(oneemb.CorruptTableError, match="v2.snapshot"):
            served.refresh()
    assert served.refresh() and served.error is None
    check_served(served, job, "v2")
    served.close()
    with flipped(file_of(job, "v1", "snapshot"), 0.0):
        served = oneemb.InferenceEmbedding.open(job.folder, absent="zeros", folder=tmp_path)
        assert served.version.name == "v2" and served.error is None and len(caplog.records) == 1
        served.close()


@pytest.mark.parametrize("kind", ["parquet", "server"])
@pytest.mark.parametrize("left", ["all but one byte", "nothing"])
def test_a_damaged_older_snapshot_of_a_copied_folder_is_no_error_of_each_look(kind, left, job, tmp_path, caplog):
    copied = SimpleNamespace(folder=str(tmp_path / "job"), rows=job.rows)
    shutil.copytree(job.folder, copied.folder)
    shown, path = Shown(kind, copied, tmp_path / kind, None), file_of(copied, "v1", "snapshot")
    shown.bring()
    with ExitStack() as stack:
        if left == "nothing":
            path.write_bytes(b"")
        else:
            stack.enter_context(flipped(path, 0.0))
        os.utime(path)  # The damaged file has the latest time of all.
        for _ in range(3):
            shown.bring()
            shown.check("v2")
        told = [record.message for record in caplog.records if str(path) in record.message]
        assert len(told) == (left == "nothing")
        assert (str(path) in str(shown.unread())) == (left == "nothing")
    shown.close()


@pytest.mark.parametrize("kind", ["parquet", "server"])
def test_a_damaged_snapshot_that_no_user_has_saved_is_no_error(kind, job, tmp_path):
    shown, name = Shown(kind, job, tmp_path / kind, None), f"{EXPORTED}1"
    shown.bring()
    job.embedding.save_snapshot(name)
    with flipped(file_of(job, name, "snapshot"), 0.0):
        shown.bring()
        shown.check("v2")
        assert shown.unread() is None
    job.embedding.delete_snapshot(name)
    shown.close()


@pytest.mark.parametrize("kind", ["parquet", "server"])
@pytest.mark.parametrize("file", ["rows", "keys", "snapshot"])
def test_a_damaged_copy_of_an_object_store_is_mended_by_the_piece_that_differs(kind, file, job, tmp_path, monkeypatch):
    url, get, read = f"memory://{uuid.uuid4().hex}/items", ObjectStore.get, []
    monkeypatch.setattr(push, "_PIECE_BYTES", 3000)
    push.push(job.folder, url, ["v0"])
    monkeypatch.setattr(ObjectStore, "get", lambda store, piece: read.append(piece) or get(store, piece))

    def bring(name):
        """Give all rows of the copy to a new sink or a new server, and compare them."""
        if kind == "parquet":
            place = Place(kind, tmp_path / name, None)
            with oneemb.publish(url, [place.make()], folder=tmp_path / "copy/rows"):
                pass
            return place.check(job, "v0")
        with oneemb.InferenceEmbedding.open(url, absent="zeros", folder=tmp_path / "copy") as served:
            check_served(served, job, "v0")

    bring("first")
    whole = len(read)
    for path in (tmp_path / "copy").glob("*.serving"):
        path.unlink()
    path = next((tmp_path / "copy/rows").rglob(f"*.{file}"))
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    read.clear()
    bring("second")
    assert path.read_bytes() == data and len(read) == 1 < whole


@pytest.mark.parametrize("kind", ["parquet", "server"])
@pytest.mark.parametrize("damaged_first", [True, False])
def test_a_damaged_file_that_a_copy_of_an_object_store_does_not_need_is_no_error(kind, damaged_first, job, tmp_path):
    url, rows = f"memory://{uuid.uuid4().hex}/items", tmp_path / "copy/rows"
    push.push(job.folder, url, ["v1"])
    with ExitStack() as stack:
        if kind == "server":
            served = stack.enter_context(oneemb.InferenceEmbedding.open(url, absent="zeros", folder=tmp_path / "copy"))
            bring, check = served.refresh, lambda: check_served(served, job, "v2")
        else:
            place = Place(kind, tmp_path / "parquet", None)
            publisher = stack.enter_context(oneemb.publish(url, [place.make()], folder=rows, seconds=1000.0))
            publisher.flush()
            bring, check = publisher.flush, lambda: place.check(job, "v2")
        path = next(rows.rglob("v1.snapshot"))
        data = path.read_bytes()
        if damaged_first:
            path.write_bytes(data[:60])
        push.push(job.folder, url, ["v2"])
        bring()
        assert not path.exists()
        if not damaged_first:
            path.write_bytes(data[:60])
        for _ in range(2):
            bring()
            check()


def test_each_damage_of_one_copy_of_an_object_store_is_mended(job, tmp_path):
    url, folder = f"memory://{uuid.uuid4().hex}/items", tmp_path / "copy"
    push.push(job.folder, url, ["v0"])
    with oneemb.InferenceEmbedding.open(url, absent="zeros", folder=folder) as served:
        for at in (-9, -8, -7):
            for path in folder.glob("*.serving"):
                path.unlink()
            path = next((folder / "rows").rglob("*.rows"))
            data = path.read_bytes()
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            served.rollback("v0")
            check_served(served, job, "v0")
            assert path.read_bytes() == data


def test_two_sinks_that_meet_damage_of_a_copy_at_one_time_get_no_error(job, tmp_path):
    url, both = f"memory://{uuid.uuid4().hex}/items", threading.Barrier(2, timeout=600)
    push.push(job.folder, url, ["v0"])
    StoredCopy(ObjectStore(url), str(tmp_path / "copy")).pull(None, lambda: False)
    path = next((tmp_path / "copy").rglob("*.rows"))
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    def reads(changes):
        try:
            list(changes.batches())
        except oneemb.CorruptTableError:
            both.wait()  # Neither asks for the sound rows before both have met the damage.
            raise

    sinks = [reads, lambda changes: reads(changes)]
    with oneemb.publish(url, sinks, folder=tmp_path / "copy", seconds=0.01) as publisher:
        publisher.flush()
        assert [(one["errors"], one["versions"]) for one in publisher.stats().values()] == [(0, 1)] * 2
    assert path.read_bytes() == data


def test_a_process_that_mends_a_copy_is_no_error_of_others_that_read_it(job, tmp_path, monkeypatch):
    url, folder = f"memory://{uuid.uuid4().hex}/items", str(tmp_path / "copy")
    push.push(job.folder, url, ["v1"])
    first, second = (StoredCopy(ObjectStore(url), folder) for _ in range(2))  # of two processes
    first.pull(None, lambda: False)
    identity = look_at([folder]).get("v1").info.identity
    for path in Path(folder).rglob("*.rows"):
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    def rows():
        changes = Changes(look_at([folder]).get("v1"), True)
        return {
            (table, id): row.tobytes()
            for batch in changes.batches()
            for table, id, row in zip(batch.table_N.tolist(), batch.id_N.tolist(), batch.weight_ND, strict=True)
        }

    with pytest.raises(oneemb.CorruptTableError) as raised:
        rows()
    assert first.mend(identity, raised.value, 0) and second.mend(identity, raised.value, 0)
    first.pull(None, lambda: False)
    assert rows() == job.rows["v1"]
    replace, read = os.replace, []

    def replaced(*paths):
        """The other process reads between any two files that this one replaces."""
        replace(*paths)
        read.append(rows())

    backup = pull.backup_folder
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(pull, "backup_folder", lambda *args, **options: read.append(rows()) or backup(*args, **options))
    second.pull(None, lambda: False)
    assert len(read) > 1 and all(one == job.rows["v1"] for one in read)


def test_damage_that_the_object_store_has_too_is_an_error_after_one_try(job, tmp_path, monkeypatch):
    url, read = f"memory://{uuid.uuid4().hex}/items", []
    push.push(job.folder, url, ["v0"])
    mend, tried = StoredCopy.mend, []
    monkeypatch.setattr(StoredCopy, "mend", lambda *arguments: tried.append(mend(*arguments)) or tried[-1])

    def damaged(*_):
        read.append(1)
        raise oneemb.CorruptTableError("rows are damaged")

    monkeypatch.setattr(Changes, "batches", damaged)
    publisher = oneemb.publish(url, [lambda changes: list(changes.batches())], folder=tmp_path / "copy", seconds=1000.0)
    for n in (1, 2):
        with pytest.raises(oneemb.PublishError, match="rows are damaged"):
            publisher.flush()
        assert tried == [True] + [False] * n and len(read) == 1 + n
    publisher.close()


def test_a_snapshot_of_a_later_release_is_an_error_though_older_ones_can_be_read(job, tmp_path, redis_server):
    for kind in ("table", "server"):
        shown, path = Shown(kind, job, tmp_path / kind, redis_server), file_of(job, "v2", "snapshot")
        data = path.read_bytes()
        path.write_bytes(data[:8] + bytes([data[8] + 1]) + data[9:])
        with pytest.raises(oneemb.StorageError, match="v2.snapshot"):
            shown.bring()
        shown.check("v1")
        path.write_bytes(data)
        shown.bring()
        shown.check("v2")
        shown.close()
