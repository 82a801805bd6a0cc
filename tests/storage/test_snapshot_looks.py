"""Looks at snapshots that read each description once, against looks that read every file."""

import os
import shutil

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_file import SnapshotFiles


@pytest.fixture
def table(tmp_path):
    with PersistentTable.open(str(tmp_path / "table"), row_width=4, threads=Threads(1), background=False) as table:
        yield table


def save(table, name, ids=10):
    table.put(np.zeros(ids, np.int32), np.arange(ids), np.ones((ids, 4), np.float32))
    table.save_snapshot(name, {})


def make_old(folder, seconds=100.0):
    """Set back the time of the last change of each snapshot's file."""
    for entry in os.scandir(folder / "table" / "snapshots"):
        os.utime(entry.path, ns=(time := entry.stat().st_mtime_ns - int(seconds * 1e9), time))


@pytest.fixture
def read(monkeypatch):
    """Names of the snapshots whose files are read."""
    names, real = [], SnapshotFiles.read
    monkeypatch.setattr(SnapshotFiles, "read", lambda files, name: names.append(name) or real(files, name))
    return names


def shown(found):
    damaged = [(one.name, one.reason, one.newer) for one in found.damaged]
    return [one.info for one in found.snapshots()], damaged


def check(looks, read, expected):
    """Whether a look finds what one that reads every file finds, and reads these files only."""
    del read[:]
    found = looks.look()
    assert read == expected
    assert shown(found) == shown(look_at(looks.paths))


def test_a_file_is_read_once_and_again_after_each_change(table, tmp_path, read):
    looks = SnapshotLooks([str(tmp_path / "table")])
    check(looks, read, [])
    save(table, "a")
    save(table, "b")
    make_old(tmp_path)
    check(looks, read, ["a", "b"])
    check(looks, read, [])
    save(table, "c")
    make_old(tmp_path)
    check(looks, read, ["a", "b", "c"])  # The times of a and b were changed, too.
    table.delete_snapshot("a")
    check(looks, read, [])
    table.delete_snapshot("b")
    save(table, "b", ids=20)  # Another snapshot of the name.
    check(looks, read, ["b"])


def test_a_file_that_has_just_changed_is_read_at_each_look(table, tmp_path, read):
    looks = SnapshotLooks([str(tmp_path / "table")])
    save(table, "a")
    for _ in range(3):
        check(looks, read, ["a"])


@pytest.mark.parametrize("at", [0, 40, -1])
def test_damage_is_found_and_its_mend(table, tmp_path, read, at):
    looks, path = SnapshotLooks([str(tmp_path / "table")]), tmp_path / "table" / "snapshots" / "a.snapshot"
    save(table, "a")
    make_old(tmp_path)
    check(looks, read, ["a"])
    data = path.read_bytes()
    path.write_bytes(data[:60] if at == -1 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    make_old(tmp_path)
    for _ in range(2):  # A damaged file is read at each look.
        check(looks, read, ["a"])
        assert looks.look().damaged
    path.write_bytes(data)
    make_old(tmp_path, 200.0)
    check(looks, read, ["a"])
    check(looks, read, [])


def test_a_file_of_equal_size_and_time_that_replaces_another_is_read(table, tmp_path, read):
    looks, path = SnapshotLooks([str(tmp_path / "table")]), tmp_path / "table" / "snapshots" / "a.snapshot"
    save(table, "a")
    make_old(tmp_path)
    check(looks, read, ["a"])
    data = path.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    shutil.copystat(path, other)
    os.rename(other, path)
    check(looks, read, ["a"])
    assert looks.look().damaged


def test_looks_that_find_the_same_give_one_object(table, tmp_path):
    looks = SnapshotLooks([str(tmp_path / "table")])
    save(table, "a")
    make_old(tmp_path)
    found = looks.look()
    assert looks.look() is found
    save(table, "b")
    assert looks.look() is not found
