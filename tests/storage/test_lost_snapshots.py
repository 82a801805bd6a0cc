"""Somebody removes a table's snapshot files: its rows stay on the disk until somebody gives them up."""

import json
import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from oneemb.cli.commands import oneemb as command
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.table_info import table_info
from oneemb.storage.table.writer_lock import KnownSnapshots, WriterLock, known_snapshots
from tests.storage.test_persistent_table import open_table
from tests.storage.test_persistent_table_crash import (
    World,
    clear_and_save,
    compact,
    delete,
    open_table as open_faulty,
    overwrite,
    put,
    recover,
    save,
)
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.power_losses import power_losses
from tests.support.table_model import check, put_random, scanned


def files(path):
    return {file.name: file.read_bytes() for file in sorted((path / "chunks").iterdir())}


def make_table(path, names=("a", "b")):
    """A table whose snapshots share no chunk; returns what each of them holds."""
    rng, saved = np.random.default_rng(0), {}
    with open_table(path) as table:
        for name in names:
            table.clear()
            put_random(table, rows := {}, rng, 500)
            table.save_snapshot(name, {})
            saved[name] = rows
    return saved


def loaded(path, name, rows):
    with open_table(path) as table:
        table.load_snapshot(name)
        check(table, rows)


def run(*arguments, code=0):
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("lost", [("a",), ("b",), ("a", "b")], ids="".join)
def test_rows_of_snapshots_that_somebody_removed_stay_whatever_opens_the_table(tmp_path, lost):
    saved = make_table(tmp_path)
    before = files(tmp_path)
    for name in lost:
        shutil.move(tmp_path / f"snapshots/{name}.snapshot", tmp_path / f"{name}.kept")
    assert table_info(tmp_path).lost == list(lost)
    rng = np.random.default_rng(1)
    for n in range(3):
        with open_table(tmp_path) as table:
            assert table.recovery.lost == list(lost) and table.recovery.kept and not table.recovery.removed
            assert f"snapshots {', '.join(map(repr, lost))} are gone" in str(table.recovery)
            # Work goes on, and what it leaves behind is freed as ever.
            put_random(table, rows := {}, rng, 500)
            table.save_snapshot("new", {"n": n}, overwrite=True)
            table.clear()
        loaded(tmp_path, "new", rows)
        assert before.items() <= files(tmp_path).items()
        assert len(files(tmp_path)) == len(before) + 2 * len({name[:12] for name in files(tmp_path)} - {
            name[:12] for name in before
        })  # fmt: skip
    info = table_info(tmp_path)
    assert info.lost == list(lost) and info.kept
    assert [text for text in check_table(tmp_path).problems if "are gone" in text and str(tmp_path) in text]
    # Whoever has a copy of the snapshot's file puts it back.
    for name in lost:
        shutil.move(tmp_path / f"{name}.kept", tmp_path / f"snapshots/{name}.snapshot")
    for name, rows in saved.items():
        loaded(tmp_path, name, rows)
    assert not table_info(tmp_path).lost and not table_info(tmp_path).kept
    assert check_table(tmp_path).problems == []
    with open_table(tmp_path) as table:
        for name in ("a", "b", "new"):
            table.delete_snapshot(name)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("lock", ["missing", "empty", "nonsense", "of an earlier release"])
def test_without_a_record_of_the_snapshots_nothing_is_removed(tmp_path, lock):
    make_table(tmp_path)
    before = files(tmp_path)
    shutil.rmtree(tmp_path / "snapshots")
    content = {
        "empty": b"",
        "nonsense": b"\xff" * 5000,
        "of an earlier release": b'{"pid": 1, "host": "h", "since": 0}',
    }
    (tmp_path / "LOCK").unlink()
    if lock != "missing":
        (tmp_path / "LOCK").write_bytes(content[lock])
    for _ in range(3):
        with open_table(tmp_path) as table:
            assert len(table.recovery.kept) == len(before) and not table.recovery.removed
            assert "it is not known which snapshots there were" in str(table.recovery)
        assert files(tmp_path) == before
    assert len(table_info(tmp_path).kept) == len(before)


def test_a_sound_table_of_an_earlier_release_is_opened_without_a_word(tmp_path):
    saved = make_table(tmp_path)
    (tmp_path / "LOCK").write_bytes(b"")
    table = open_table(tmp_path)
    assert not table.recovery.kept and not table.recovery.lost
    put_random(table, {}, np.random.default_rng(0), 2000)
    table.flush()
    before = files(tmp_path)
    del table  # No close: the process is as good as dead.
    with open_table(tmp_path) as table:
        assert table.recovery.removed and not table.recovery.kept
    assert len(files(tmp_path)) < len(before)
    for name, rows in saved.items():
        loaded(tmp_path, name, rows)


def test_a_job_that_dies_before_its_first_snapshot_leaves_nothing(tmp_path):
    table = open_table(tmp_path)
    put_random(table, {}, np.random.default_rng(0), 3000)
    table.flush()
    assert files(tmp_path)
    del table
    with open_table(tmp_path) as table:
        assert table.recovery.removed and not table.recovery.kept and files(tmp_path) == {}


def test_the_tool_says_what_is_lost_and_removes_it_when_asked(tmp_path):
    saved = make_table(tmp_path)
    before = files(tmp_path)
    (tmp_path / "snapshots/a.snapshot").unlink()
    assert "lost: snapshots 'a' are gone" in run("inspect", tmp_path) and "--remove-orphans" in run("inspect", tmp_path)
    assert json.loads(run("inspect", tmp_path, "--json"))["lost"] == ["a"]
    assert "snapshots 'a' are gone" in run("check", tmp_path, code=1)
    said = run("compact", tmp_path, code=2)
    assert "snapshots 'a' are gone" in said and "--remove-orphans" in said and files(tmp_path) == before
    assert json.loads(run("compact", tmp_path, "--remove-orphans", "--json"))["bytes_freed"] > 0
    assert len(files(tmp_path)) == len(before) // 2
    assert "lost" not in run("inspect", tmp_path) and "are gone" not in run("check", tmp_path)
    loaded(tmp_path, "b", saved["b"])
    run("compact", tmp_path)


def test_what_is_damaged_is_not_given_up_with_what_is_lost(tmp_path):
    make_table(tmp_path)
    before = files(tmp_path)
    (tmp_path / "snapshots/a.snapshot").unlink()
    (tmp_path / "snapshots/b.snapshot").write_bytes(b"")
    with pytest.raises(StorageError, match="'b' is damaged"):
        compact_snapshots(tmp_path, remove_orphans=True)
    with open_table(tmp_path) as table:
        assert table.recovery.lost == ["a"]
        table.delete_snapshot("b")
    assert files(tmp_path) == before


def test_a_chunk_that_a_lost_snapshot_shared_outlives_the_others(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 500)
        for name in ("a", "b"):
            table.save_snapshot(name, {})
    before = files(tmp_path)
    shutil.move(tmp_path / "snapshots/a.snapshot", tmp_path / "a.kept")
    with open_table(tmp_path) as table:
        assert table.recovery.lost == ["a"]
    with open_table(tmp_path) as table:
        table.delete_snapshot("b")
    with open_table(tmp_path):
        assert files(tmp_path) == before
    shutil.move(tmp_path / "a.kept", tmp_path / "snapshots/a.snapshot")
    loaded(tmp_path, "a", rows)


def test_snapshots_beyond_those_that_lock_can_name_are_counted(tmp_path):
    names = [f"snapshot-with-a-long-name-{n:04d}" for n in range(150)]
    with open_table(tmp_path) as table:
        put_random(table, {}, np.random.default_rng(0), 50)
        for name in names:
            table.save_snapshot(name, {})
    known = known_snapshots(LocalFileSystem(), f"{tmp_path}/LOCK")
    assert known.count == 150 and 20 < len(known.names) < 150 and os.path.getsize(tmp_path / "LOCK") == 4096
    with open_table(tmp_path) as table:
        assert not table.recovery.lost and table.recovery.lost_more == 0
    for name in (names[0], names[-1]):
        (tmp_path / f"snapshots/{name}.snapshot").unlink()
    with open_table(tmp_path) as table:
        assert (table.recovery.lost, table.recovery.lost_more) == ([names[0]], 1)
        assert "and 1 more" in str(table.recovery) or ", 1 more" in str(table.recovery)


@pytest.mark.parametrize("names", [(), ("a",), ("é" * 60, "x/y"), tuple(f"n{n}" for n in range(500))], ids=len)
def test_what_is_written_to_lock_is_read_from_it(tmp_path, names):
    fs, path = LocalFileSystem(), str(tmp_path / "LOCK")
    known = KnownSnapshots(names, len(names), names[:3], 2, 77)
    for _ in range(3):
        lock = WriterLock(fs, path)
        lock.record(known)
        lock.release()
        found = known_snapshots(fs, path)
        assert found.names == names[: len(found.names)] and (found.count, found.keep_below) == (len(names), 77)
        assert len(found.lost) + found.lost_more == len(names[:3]) + 2
        assert os.path.getsize(path) == 4096


def test_records_of_a_later_release_are_left_alone(tmp_path):
    from oneemb.kernels.checksum import xxh64

    make_table(tmp_path)
    text = json.dumps({"version": 2, "whatever": 1}).encode().ljust(1528)
    block = bytearray((tmp_path / "LOCK").read_bytes())
    block[512:2048] = text + xxh64(text).to_bytes(8, "little")
    (tmp_path / "LOCK").write_bytes(block)
    before = files(tmp_path)
    with open_table(tmp_path) as table:
        put_random(table, {}, np.random.default_rng(0), 10)
        table.save_snapshot("new", {})
        table.delete_snapshot("a")
    assert (tmp_path / "LOCK").read_bytes()[512:] == block[512:]
    assert before.items() <= files(tmp_path).items()


@pytest.mark.parametrize("operation", [save, overwrite, delete, compact, recover, put], ids=lambda o: o.__name__)
def test_a_snapshot_that_somebody_removes_after_a_crash_is_missed(operation):
    fs = FaultyFileSystem()
    world = World(fs)

    def look(disk, call, half, fate):
        del disk.entries["/t/snapshots/a.snapshot"]
        chunks = {path: bytes(disk.entries[path].now) for path in disk.entries if path.endswith((".rows", ".keys"))}
        with open_faulty(disk) as table:
            assert table.recovery.lost == ["a"], (operation, call, fate)
        kept = {path: bytes(disk.entries[path].now) for path in disk.entries if path.endswith((".rows", ".keys"))}
        assert kept == chunks, (operation, call, fate)

    assert power_losses(fs, lambda: operation(world), look, torn=1) > 4


def test_every_byte_of_lock_may_be_damaged():
    fs = FaultyFileSystem()
    world = World(fs)
    world.table.save_snapshot("end", {})
    expected = dict(world.rows)
    world.table.close()
    for offset in range(0, 4096, 37):
        disk = fs.survivors(0)[1][1]
        disk.entries["/t/LOCK"].now[offset] ^= 4
        with open_faulty(disk) as table:
            assert not table.recovery.lost and not table.recovery.damaged
            table.load_snapshot("end")
            check(table, expected)


@pytest.mark.parametrize("operation", [save, clear_and_save], ids=lambda o: o.__name__)
def test_a_kill_between_rename_and_sync_costs_no_snapshot_at_the_next_loss_of_power(operation):
    fs = FaultyFileSystem()
    world = World(fs)
    first = len(fs.calls)
    operation(world)
    rename = next(n for n in range(first, len(fs.calls)) if fs.calls[n].startswith("rename"))
    fs = FaultyFileSystem()
    world = World(fs)
    fs.crash_at = rename + 1
    with pytest.raises(PowerLoss):
        operation(world)
    fs.crash_at, fs._dead = None, False  # The process is gone, the machine goes on.
    fs.power_off()
    open_faulty(fs).close()
    for fate, disk in fs.survivors(8):
        with open_faulty(disk) as table:
            assert not table.recovery.damaged and not table.recovery.lost, fate
            for info in table.snapshots():
                table.load_snapshot(info.name)
                scanned(table)
            assert {"a", "b"} <= {info.name for info in table.snapshots()}
