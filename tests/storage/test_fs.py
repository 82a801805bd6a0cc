"""The calls of the file system that promise more than one call of the system does."""

import multiprocessing
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem, absolute_path, read_file
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.storage.test_persistent_table import open_table
from tests.storage.test_persistent_table_crash import open_table as open_faulty
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.forks import ended_well, in_child
from tests.support.table_model import check, put_random


class Noting(LocalFileSystem):
    """Knows which directories were synced."""

    def __init__(self):
        super().__init__()
        self.synced = []

    def sync_directory(self, path):
        super().sync_directory(path)
        self.synced.append(path)


def test_the_directory_above_one_that_exists_is_synced(tmp_path):
    (tmp_path / "a").mkdir()
    fs = Noting()
    fs.make_directories(f"{tmp_path}/a")
    assert fs.synced == [str(tmp_path)]
    fs.make_directories(f"{tmp_path}/a/b/c")
    assert {str(tmp_path), f"{tmp_path}/a", f"{tmp_path}/a/b"} <= set(fs.synced)


@pytest.mark.parametrize("path", ["/t", "/deep/down/t"])
def test_a_process_that_dies_between_mkdir_and_sync_costs_no_later_snapshot(path):
    fs = FaultyFileSystem()
    fs.make_directories(path)
    made = [n for n, call in enumerate(fs.calls) if call.startswith("mkdir")]
    for call in made:
        fs = FaultyFileSystem()
        fs.crash_at = call + 1
        with pytest.raises(PowerLoss):
            fs.make_directories(path)
        fs.crash_at, fs._dead = None, False  # The process is gone, the machine goes on.
        fs.make_directories(path)
        for fate, disk in fs.survivors():
            assert disk.names(path) == [], fate


def test_a_table_in_a_directory_that_a_dead_process_made_survives_a_loss_of_power():
    whole = FaultyFileSystem()
    table = open_faulty(whole)
    opening = list(whole.calls)
    table.close()
    for call in range(len(opening)):
        fs = FaultyFileSystem()
        fs.crash_at = call
        with pytest.raises(PowerLoss):
            open_faulty(fs)
        fs.crash_at, fs._dead = None, False
        fs.power_off()
        with open_faulty(fs) as table:
            put_random(table, rows := {}, np.random.default_rng(0), 20)
            table.save_snapshot("s", {})
        for fate, disk in fs.survivors():
            with open_faulty(disk) as table:
                assert table.recovery.snapshots == ["s"], (opening[call], fate)
                assert not table.recovery.kept and not table.recovery.lost, (opening[call], fate)
                table.load_snapshot("s")
                check(table, rows)


class NoSyncOfWhatExists(FaultyFileSystem):
    def make_directories(self, path):
        if not self._is_directory(path):
            super().make_directories(path)


def test_directories_that_are_not_synced_because_they_exist_are_found_out():
    fs = NoSyncOfWhatExists()
    fs.crash_at = 1
    with pytest.raises(PowerLoss):
        open_faulty(fs)
    fs.crash_at, fs._dead = None, False
    with open_faulty(fs) as table:
        table.save_snapshot("s", {})
    (fate, disk), *_ = fs.survivors()
    with open_faulty(disk) as table:
        assert fate == "lost" and table.recovery.snapshots == []


# ---- paths ----------------------------------------------------------------------------------------------------------


def test_the_more_tables_a_process_has_the_fewer_files_each_keeps_open_beside_those_it_needs(tmp_path):
    fs = LocalFileSystem()
    locks = [fs.lock(str(tmp_path / "0"))]
    before = fs.spare_files()
    locks += [fs.lock(str(tmp_path / str(n))) for n in range(1, 12)]
    assert 0 < 2 * fs.spare_files() <= before <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    for lock in locks:
        fs.unlock(lock)
    assert fs.spare_files() >= before


def test_a_path_is_absolute_whatever_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert absolute_path("a/b") == absolute_path(b"a/b") == absolute_path(Path("a/b")) == f"{tmp_path}/a/b"
    assert absolute_path("~/a") == absolute_path(b"~/a") == absolute_path(Path("~/a")) == "/home/somebody/a"
    assert absolute_path("/a//b/./c/") == "/a/b/c"
    assert absolute_path("../a") == f"{tmp_path}/../a", "the directory above a link is not the one above its name"
    assert os.fsencode(absolute_path(b"/\xff")) == b"/\xff"


@pytest.mark.parametrize("given", ["t", b"t", Path("t"), "./t/"], ids=repr)
def test_a_table_stays_where_it_was_opened_when_the_job_changes_its_directory(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    rng, rows = np.random.default_rng(0), {}
    with open_table(given) as table:
        put_random(table, rows, rng, 100)
        table.save_snapshot("a", {})
        reader = SnapshotReader.open(given, "a")
        monkeypatch.chdir(tmp_path / "elsewhere")
        put_random(table, rows, rng, 3000)
        table.save_snapshot("b", {})
        table.delete_snapshot("a")
        check(table, rows)
    with reader, pytest.raises(Exception, match=f"{tmp_path}/t/"):
        list(reader.scan())
    assert os.listdir(tmp_path / "elsewhere") == []
    assert [info.name for info in read_snapshot_info("../t")] == ["b"]


def test_a_path_that_cannot_be_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    for path, advice in (
        ("/proc/none", "ENOENT.*choose another path"),
        (f"{tmp_path}/file/t", "ENOTDIR.*is a file, not a folder; choose another path"),
        (f"{tmp_path}/{'long' * 100}", "ENAMETOOLONG.*choose a shorter path"),
    ):
        with pytest.raises(StorageError, match=advice):
            open_table(path)


def test_a_child_has_no_lock_of_its_parent(tmp_path):
    fs = LocalFileSystem()
    locks = [fs.lock(f"{tmp_path}/{n}") for n in range(3)]
    fs.unlock(locks.pop())  # Nothing is left of it for the child to close.
    begin, done = multiprocessing.Event(), multiprocessing.Event()
    child = in_child(lambda: begin.set() or done.wait(600))
    try:
        assert begin.wait(600)
        while locks:
            fs.unlock(locks.pop())
        for n in range(3):
            fs.unlock(fs.lock(f"{tmp_path}/{n}"))  # BlockingIOError if the child still had it
    finally:
        done.set()
        assert ended_well(child) is True


@pytest.mark.parametrize("before, after", [(50, 40), (40, 50), (70_000, 1), (1, 70_000), (1 << 14, 0)])
def test_a_file_that_is_replaced_while_it_is_read_is_the_one_before_or_the_one_after(tmp_path, before, after):
    class Replaced(LocalFileSystem):
        def open(self, path, *, direct=False):
            file = super().open(path, direct=direct)
            (tmp_path / "new").write_bytes(b"n" * after)
            os.replace(tmp_path / "new", path)
            return file

    path = tmp_path / "file"
    path.write_bytes(b"o" * before)
    assert read_file(Replaced(), str(path)) == b"o" * before
    assert read_file(LocalFileSystem(), str(path)) == b"n" * after
