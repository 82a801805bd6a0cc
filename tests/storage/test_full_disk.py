"""A disk is full to the last byte: a table on it opens, is looked at, and is freed with its own tool."""

import os
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner

from oneemb.cli.commands import oneemb as command
from oneemb.storage.errors import StorageError
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from oneemb.storage.table.table_info import table_info
from tests.storage.test_persistent_table import open_table
from tests.storage.test_persistent_table_crash import open_table as open_faulty
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.table_model import check, put_random

SIZE = 16 << 20


def mounted(kind, folder):
    """Mount a small file system of this kind on the folder; says why not, if it cannot be."""
    folder.mkdir()
    if kind == "tmpfs":
        steps = [["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "oneemb", str(folder)]]
    else:
        image = folder.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(SIZE)
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", str(image)]
        steps = [make, ["mount", "-o", "loop", str(image), str(folder)]]
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True)
        except FileNotFoundError:
            return f"there is no {step[0]}"
        if done.returncode:
            return done.stderr
    return None


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A folder on a small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    obstacle = mounted(request.param, tmp_path / "disk")
    if obstacle is not None:
        pytest.skip(f"{request.param} cannot be mounted here: {obstacle}")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


def fill(disk):
    """Take every byte that is free."""
    left = open(disk / "left", "wb", buffering=0)
    try:
        while True:
            left.write(b"x" * 65536)
    except OSError:
        pass
    try:
        while True:
            left.write(b"x")
    except OSError:
        pass
    try:
        for n in range(100_000):
            (disk / f"small-{n}").write_bytes(b"x")
    except OSError:
        (disk / f"small-{n}").unlink(missing_ok=True)
    assert os.statvfs(disk).f_bavail == 0
    left.close()


def make_table(path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(path) as table:
        for n in range(3):
            put_random(table, rows, rng, 2000, ids=1000)
            table.save_snapshot(f"s{n}", {})
    return rows


def run(*arguments):
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("lock", ["as it was left", "of a dead holder", "empty", "missing"])
def test_a_snapshot_on_a_full_disk_is_deleted_and_frees_it(disk, lock):
    rows = make_table(disk / "t")
    if lock == "of a dead holder":
        (disk / "t/LOCK").write_bytes(b'{"pid": 1, "host": "h", "since": 0}')
    if lock == "empty":  # As an earlier release leaves it.
        (disk / "t/LOCK").write_bytes(b"")
    if lock == "missing":
        (disk / "t/LOCK").unlink()
    fill(disk)
    assert "s0" in run("inspect", disk / "t") and run("snapshot", "list", disk / "t") == "s0\ns1\ns2\n"
    if lock == "missing":
        # A file system may have no room for a name. The one byte that makes room is the user's.
        (disk / "small-0").unlink(missing_ok=True)
        (disk / "left").write_bytes(b"")
    for name in ("s0", "s1"):
        run("snapshot", "delete", disk / "t", name, "-y")
    assert lock == "missing" or os.statvfs(disk).f_bavail > 0
    run("check", disk / "t")
    (disk / "left").unlink()
    # Without LOCK's records nobody knows whose the chunks of the deleted snapshots may be beside.
    run("compact", disk / "t", *([] if lock == "as it was left" else ["--remove-orphans"]))
    with open_table(disk / "t") as table:
        table.load_snapshot("s2")
        check(table, rows)


def test_a_table_on_a_full_disk_opens_and_loads_and_says_what_is_full(disk):
    rows = make_table(disk / "t")
    fill(disk)
    with open_table(disk / "t") as table:
        assert table.load_snapshot("s2") == {} and table.stats()["io"] == "pread"
        check(table, rows)
        with pytest.raises(StorageError, match="ENOSPC"):
            for _ in range(100):
                put_random(table, {}, np.random.default_rng(0), 2000, ids=1000)
                table.save_snapshot("s3", {})
        with pytest.raises(StorageError, match="held by process"):
            open_table(disk / "t")
    assert table_info(disk / "t").damaged == {}


def test_a_lock_that_has_no_room_for_its_holders_name_is_held_all_the_same():
    fs = FaultyFileSystem()

    def full(call, path):
        if call == "write":
            raise OSError(28, "No space left on device")

    fs.fail = full
    table = open_faulty(fs)
    fs.entries["/t/LOCK"].now[:] = b""  # Not even half of the name.
    with pytest.raises(StorageError, match="held by a process that did not leave its name"):
        open_faulty(fs)
    fs.fail = None
    put_random(table, rows := {}, np.random.default_rng(0), 100)
    table.save_snapshot("s", {})
    table.close()
    with open_faulty(fs) as table:
        assert table.recovery.stale_lock is None
        table.load_snapshot("s")
        check(table, rows)


def test_a_snapshot_is_deleted_where_even_overwriting_needs_room():
    fs = FaultyFileSystem()
    with open_faulty(fs) as table:
        for name in ("a", "b"):
            put_random(table, {}, np.random.default_rng(0), 100)
            table.save_snapshot(name, {})

    def full(call, path):
        if call in ("write", "create") and not freed():
            raise OSError(28, "No space left on device")

    def freed():
        return "/t/snapshots/a.snapshot" not in fs.entries

    fs.fail = full
    with open_faulty(fs) as table:
        table.delete_snapshot("a")
    with open_faulty(fs) as table:
        assert table.recovery.snapshots == ["b"] and not table.recovery.lost and not table.recovery.kept
    assert [info.name for info in read_snapshot_info("/t", fs=fs)] == ["b"]
