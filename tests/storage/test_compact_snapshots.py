"""Compaction of a path that no job uses: every snapshot keeps its rows, and power may be lost at every file call."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, LockedError, StorageError
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.table_info import table_info
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.power_losses import power_losses
from tests.support.table_model import put_random, scanned

THREADS = Threads(1)


def open_table(path="/t", fs=None, row_width=40):
    """A table whose saves clean nothing, so that there is something left to do."""
    table = PersistentTable.open(
        str(path), row_width=row_width, physical_block_size=512, chunk_bytes=1, threads=THREADS, background=False, fs=fs
    )
    table._contents.compactor.clean_for_save = lambda name: None
    return table


def make_table(path="/t", fs=None, saves=3, seed=5):
    """Snapshots whose chunks are half garbage, some rows shared and some not. Returns what each snapshot holds."""
    rng, rows, saved = np.random.default_rng(seed), {}, {}
    with open_table(path, fs) as table:
        for n in range(saves):
            for _ in range(4):
                put_random(table, rows, rng, 150, ids=120)
            table.save_snapshot(f"s{n}", {"n": n})
            saved[f"s{n}"] = (n, dict(rows))
        put_random(table, rows, rng, 150, ids=120)
        if saves > 1:
            table.delete_snapshot("s0")
            del saved["s0"]
    return saved


def found_in(path="/t", fs=None):
    found = {}
    with open_table(path, fs) as table:
        for info in table.snapshots():
            meta = table.load_snapshot(info.name)
            found[info.name] = (meta["n"], scanned(table))
    return found


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_every_snapshot_keeps_its_rows_and_disk_is_freed(tmp_path, saves):
    saved = make_table(tmp_path, saves=saves)
    before = table_info(tmp_path)
    result = compact_snapshots(tmp_path)
    after = table_info(tmp_path)
    assert found_in(tmp_path) == saved
    assert check_table(tmp_path).problems == []
    assert result.rows_moved > 0 and result.chunks > 0
    assert result.bytes_freed == before.disk_bytes - after.disk_bytes > 0
    assert [(i.name, i.meta, i.rows, i.sequence, i.created) for i in before.snapshots] == [
        (i.name, i.meta, i.rows, i.sequence, i.created) for i in after.snapshots
    ]
    # Chunks of 64 blocks: one may be partly filled, and headers and lists of rows are not rows.
    assert after.disk_bytes < 1.2 * after.live_bytes + 64 * 512 + 4096 * (after.chunks + 1)


def test_rows_that_snapshots_share_are_shared_again(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 2000, ids=1000)
        put_random(table, rows, rng, 1000, ids=1000)
        for name in "abcd":
            table.save_snapshot(name, {"n": 0})
    live = table_info(tmp_path).live_bytes
    compact_snapshots(tmp_path)
    after = table_info(tmp_path)
    assert after.live_bytes == live and after.disk_bytes < 1.3 * live
    assert found_in(tmp_path) == dict.fromkeys("abcd", (0, rows))


def test_a_second_run_moves_nothing(tmp_path):
    make_table(tmp_path)
    compact_snapshots(tmp_path)
    before = table_info(tmp_path)
    result = compact_snapshots(tmp_path)
    assert (result.rows_moved, result.chunks, result.bytes_freed) == (0, 0, 0)
    assert table_info(tmp_path) == before


def test_snapshots_of_rows_of_two_widths_are_compacted_side_by_side(tmp_path):
    saved = make_table(tmp_path)
    rng, rows = np.random.default_rng(1), {}
    with open_table(tmp_path, row_width=3) as table:
        for _ in range(20):
            put_random(table, rows, rng, 1000, ids=400)
        table.save_snapshot("wide", {})
    before = table_info(tmp_path).disk_bytes
    result = compact_snapshots(tmp_path)
    assert result.bytes_freed == before - table_info(tmp_path).disk_bytes > 0
    with open_table(tmp_path) as table:
        for name, (_, expected) in saved.items():
            table.load_snapshot(name)
            assert scanned(table) == expected
    with open_table(tmp_path, row_width=3) as table:
        table.load_snapshot("wide")
        assert scanned(table) == rows


def test_power_is_lost_at_every_call():
    whole = FaultyFileSystem()
    saved = make_table(fs=whole)
    begun = len(whole.calls)
    compact_snapshots("/t", fs=whole)
    calls = whole.calls[begun:]
    assert {call.split()[0] for call in calls} >= {"create", "write", "sync", "sync_directory", "rename", "remove"}
    make_table(fs=(fs := FaultyFileSystem()))

    def look(disk, call, half, fate):
        assert found_in(fs=disk) == saved, (call, (calls + ["the end"])[call - begun], half, fate)

    power_losses(fs, lambda: compact_snapshots("/t", fs=fs), look, torn=1)


def test_the_crash_test_notices_a_snapshot_that_is_renamed_before_its_chunks_are_synced(monkeypatch):
    monkeypatch.setattr("oneemb.storage.table.chunk_files.ChunkFiles.sync", lambda self, chunk: None)
    fs = FaultyFileSystem()
    saved = make_table(fs=fs)
    compact_snapshots("/t", fs=fs)
    ((fate, disk), *_) = fs.survivors()
    assert fate == "lost"
    with pytest.raises((StorageError, AssertionError)):
        assert found_in(fs=disk) == saved


def test_a_full_disk_leaves_every_snapshot(tmp_path):
    fs = FaultyFileSystem()
    saved = make_table(fs=fs)

    def full(call, path):
        if call == "write" and path.endswith(".rows"):
            raise OSError(28, "No space left on device")

    def full_late(call, path):
        if call == "create" and path.endswith(".tmp"):  # of the first snapshot, when all chunks are written
            raise OSError(28, "No space left on device")

    files = fs.names("/t/chunks"), fs.names("/t/snapshots")
    for fail in (full, full_late):
        fs.fail = fail
        with pytest.raises(StorageError, match="ENOSPC"):
            compact_snapshots("/t", fs=fs)
        fs.fail = None
        assert (fs.names("/t/chunks"), fs.names("/t/snapshots")) == files, "what it had written takes no room"
    assert found_in(fs=fs) == saved


def test_a_path_in_use_and_one_that_is_damaged_and_none_at_all(tmp_path):
    make_table(tmp_path)
    with open_table(tmp_path), pytest.raises(LockedError, match="process.*, which is this one, by the table at"):
        compact_snapshots(tmp_path)
    with pytest.raises(StorageError, match="no table of oneemb"):
        compact_snapshots(tmp_path / "none")
    path = SnapshotFiles(None, f"{tmp_path}/snapshots").path("s1")
    data = bytearray(open(path, "rb").read())
    data[200] ^= 1
    with open(path, "wb") as file:
        file.write(data)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*.*") if f.is_file()}
    with pytest.raises(CorruptTableError, match="'s1' is damaged"):
        compact_snapshots(tmp_path)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*.*") if f.is_file()} == before


def test_progress_ends_with_all_rows(tmp_path):
    make_table(tmp_path)
    told = []
    result = compact_snapshots(tmp_path, progress=lambda *now: told.append(now))
    assert told[-1] == (result.rows_moved, result.rows_moved) and told == sorted(told)
