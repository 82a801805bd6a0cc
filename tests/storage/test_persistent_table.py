"""The persistent table against a dict: rows come back bit for bit, snapshots keep what they were saved with."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import (
    FormatVersionError,
    LockedError,
    RowWidthError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table import chunk_scan, snapshot_load
from oneemb.storage.table.check import check_table
from oneemb.storage.table.file_header import SNAPSHOT_MAGIC
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.support.inside import snapshot_path
from tests.support.table_model import check, got, put, put_random, random_keys, random_rows, scanned

ROOT = Path(__file__).parents[2]
# Row widths, block sizes: a row a block with room left, many a block, rows of several blocks, a block filled exactly.
LAYOUTS = [(1, 512), (5, 512), (64, 512), (65, 512), (128, 512), (200, 512), (64, 4096), (1025, 4096)]


def open_table(path, *, row_width=5, physical_block_size=512, chunk_bytes=64 * 512, **options):
    options.setdefault("threads", Threads(2))
    return PersistentTable.open(
        path, row_width=row_width, physical_block_size=physical_block_size, chunk_bytes=chunk_bytes, **options
    )


@pytest.mark.parametrize(("row_width", "physical_block_size"), LAYOUTS)
def test_rows_come_back_bit_for_bit(tmp_path, row_width, physical_block_size):
    rng, rows = np.random.default_rng(row_width), {}
    with open_table(tmp_path, row_width=row_width, physical_block_size=physical_block_size) as table:
        check(table, rows)
        for size in (1, 2, 300, 0, 800, 77):
            put_random(table, rows, rng, size)
            check(table, rows)
        table.flush()
        check(table, rows, batch=7)
        assert table.stats()["chunks"] >= (2 if row_width > 5 else 1)


def test_rows_in_memory_and_on_disk_are_read_in_one_call(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 500)
        table.flush()
        put_random(table, rows, rng, 500)
        check(table, rows)
        assert table.stats()["bytes_read"] > 0


def test_the_last_of_equal_keys_in_one_call_stays(tmp_path):
    with open_table(tmp_path, row_width=1) as table:
        table.put(np.zeros(3, np.int32), np.array([4, 4, 5]), np.array([[1], [2], [3]], np.float32))
        assert scanned(table) == {(0, 4): np.float32(2).tobytes(), (0, 5): np.float32(3).tobytes()}
        table.put(np.zeros(1, np.int32), np.array([4]), np.array([[9]], np.float32))
        assert got(table, [(0, 4)]) == [np.float32(9).tobytes()]


def test_clear_forgets_every_row_and_frees_the_disk(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 1000)
        table.flush()
        table.clear()
        check(table, {})
        assert os.listdir(tmp_path / "chunks") == []
        put_random(table, rows := {}, rng, 10)
        check(table, rows)


def test_a_scan_shows_the_rows_of_its_beginning(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 3000)
        then, found = dict(rows), {}
        for table_N, id_N, row_NW in table.scan(100):
            put_random(table, rows, rng, 50)
            found.update(zip(zip(table_N.tolist(), id_N.tolist(), strict=True), map(bytes, row_NW), strict=True))
        assert found == then
        check(table, rows)


def test_a_table_opens_empty_and_load_resumes(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 900)
        table.save_snapshot("first", {"step": 1, "names": ["a", None]})
    with open_table(tmp_path) as table:
        assert table.recovery.snapshots == ["first"] and table.recovery.stale_lock is None
        check(table, {})
        assert table.load_snapshot("first") == {"step": 1, "names": ["a", None]}
        check(table, rows)
        put_random(table, rows, rng, 900)
        check(table, rows)


def test_a_snapshot_keeps_its_rows_whatever_follows(tmp_path):
    rng, rows, saved = np.random.default_rng(0), {}, {}
    with open_table(tmp_path) as table:
        for n in range(6):
            put_random(table, rows, rng, 400)
            table.save_snapshot(f"s{n}", {"n": n})
            saved[f"s{n}"] = dict(rows)
        put_random(table, rows, rng, 2000)
        table.delete_snapshot("s2")
        del saved["s2"]
        check(table, rows)
        for name in ("s5", "s0", "s3"):
            table.load_snapshot(name)
            check(table, saved[name])
            put_random(table, dict(saved[name]), rng, 1000)
    with open_table(tmp_path, chunk_bytes=1 << 20, physical_block_size=4096) as table:
        for name, expected in saved.items():
            table.load_snapshot(name)
            check(table, expected)
    for name, expected in saved.items():
        with SnapshotReader.open(tmp_path, name) as reader:
            check(reader, expected)


@pytest.mark.parametrize("written", [False, True], ids=["in memory", "on disk"])
def test_erased_rows_stay_away_whatever_is_saved_loaded_and_compacted(tmp_path, written):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 2000)
        table.save_snapshot("before", {})
        before = dict(rows)
        put_random(table, rows, rng, 500)
        if written:
            table.flush()
        keys = list(rows)[::2]
        table_U, id_U = np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)
        assert table.erase(table_U, id_U).all() and not table.erase(table_U, id_U).any()
        for key in keys:
            del rows[key]
        check(table, rows)
        table.save_snapshot("after", {})
        table.compact()
        check(table, rows)
        table.load_snapshot("before")
        check(table, before)
        table.load_snapshot("after")
        check(table, rows)
        table.delete_snapshot("before")
        assert table.compact().rows_moved == 0 or table.stats()["rows"] == len(rows)
        check(table, rows)
    with open_table(tmp_path) as table:
        table.load_snapshot("after")
        check(table, rows)


@pytest.mark.parametrize(("row_width", "physical_block_size"), LAYOUTS)
def test_a_snapshot_without_some_keys_has_all_others_and_the_table_keeps_them(tmp_path, row_width, physical_block_size):
    rng, rows = np.random.default_rng(row_width), {}
    with open_table(tmp_path, row_width=row_width, physical_block_size=physical_block_size) as table:
        for n in range(4):
            put_random(table, rows, rng, 400)
            keys = list(rows)
            # Of some chunks all rows, of others some; and keys that are not there.
            without = [keys[i] for i in rng.permutation(len(keys))[: n * len(keys) // 3]] if n % 2 else keys[: 100 * n]
            asked = np.array([*without, (7, -(10**15)), (8, 10**15)], dtype=object)
            table_U, id_U = asked[:, 0].astype(np.int32), asked[:, 1].astype(np.int64)
            info = table.save_snapshot(f"{n}", {}, without=(table_U, id_U))
            check(table, rows)
            kept = {key: row for key, row in rows.items() if key not in set(without)}
            assert info.rows == len(kept)
            with SnapshotReader.open(tmp_path, f"{n}") as reader:
                assert scanned(reader) == kept
        everything = table.save_snapshot("all", {})
        assert everything.rows == len(rows)
        table.load_snapshot("3")
        rows = kept
        check(table, rows)
        put_random(table, rows, rng, 300)
        table.compact()
        check(table, rows)
    result = check_table(str(tmp_path))
    assert result.problems == [] and sorted(result.snapshots) == ["0", "1", "2", "3", "all"]


def test_a_table_of_erased_rows_frees_its_disk(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, background=False) as table:
        put_random(table, rows, rng, 20_000, ids=20_000)
        table.flush()
        table_U, id_U = (np.array(part) for part in zip(*rows, strict=True))
        table.erase(table_U.astype(np.int32), id_U)
        table.compact()
        assert table.stats()["disk_bytes"] < 10_000 and len(table) == 0


def test_snapshots_are_listed_in_the_order_of_saving(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        for name in ("z", "a", "m/é 1", ".."):
            put_random(table, rows, rng, 100)
            table.save_snapshot(name, {"is": name})
        listed = table.snapshots()
        assert [info.name for info in listed] == ["z", "a", "m/é 1", ".."]
        assert [info.meta["is"] for info in listed] == ["z", "a", "m/é 1", ".."]
        assert listed[-1].rows == len(rows) and listed[-1].row_width == 5
        assert read_snapshot_info(tmp_path) == listed
        assert read_snapshot_info(tmp_path, "a") == listed[1]
        disk = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.suffix in (".rows", ".keys"))
        name = snapshot_path(table, "..")
        assert listed[-1].bytes == disk + os.path.getsize(name)
        assert table.stats()["disk_bytes"] == disk


def test_saving_under_a_name_that_exists_needs_overwrite(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 300)
        table.save_snapshot("s", {"n": 1})
        put_random(table, rows, rng, 300)
        with pytest.raises(SnapshotExistsError, match="'s'.*overwrite=True"):
            table.save_snapshot("s", {"n": 2})
        assert table.snapshots()[0].meta == {"n": 1}
        table.save_snapshot("s", {"n": 3}, overwrite=True)
        assert [info.meta for info in table.snapshots()] == [{"n": 3}]
    assert [info.rows for info in read_snapshot_info(tmp_path)] == [len(rows)]


def test_an_unknown_snapshot_is_named_with_those_that_exist(tmp_path):
    with open_table(tmp_path) as table:
        table.save_snapshot("here", {})
        for call in (table.load_snapshot, table.delete_snapshot, lambda n: SnapshotReader.open(tmp_path, n)):
            with pytest.raises(SnapshotNotFoundError, match="'gone'.*'here'"):
                call("gone")
    with pytest.raises(SnapshotNotFoundError, match="none"):
        read_snapshot_info(tmp_path / "nowhere", "s")
    assert read_snapshot_info(tmp_path / "nowhere") == []


def test_another_row_width_is_refused_and_changes_nothing(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, row_width=5) as table:
        put_random(table, {}, rng, 100)
        table.save_snapshot("five", {})
    with open_table(tmp_path, row_width=6) as table:
        put_random(table, rows, rng, 100)
        with pytest.raises(RowWidthError, match="5 words.*6.*row_width=5"):
            table.load_snapshot("five")
        check(table, rows)


def test_deleting_the_last_snapshot_frees_its_disk(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 3000)
        table.save_snapshot("s", {})
        table.clear()
        assert table.stats()["disk_bytes"] == table.stats()["snapshot_bytes"] > 0
        table.delete_snapshot("s")
        assert table.stats()["disk_bytes"] == 0 and os.listdir(tmp_path / "chunks") == []


def test_an_empty_table_is_a_snapshot_too(tmp_path):
    with open_table(tmp_path) as table:
        table.save_snapshot("nothing", {})
        put_random(table, {}, np.random.default_rng(0), 10)
        table.load_snapshot("nothing")
        check(table, {})


def test_opening_removes_what_no_snapshot_needs(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    table = open_table(tmp_path)
    put_random(table, rows, rng, 900)
    table.save_snapshot("s", {})
    expected = dict(rows)
    kept = {f.name: f.read_bytes() for f in (tmp_path / "chunks").iterdir()}
    put_random(table, rows, rng, 3000)
    table.flush()
    (tmp_path / "snapshots" / "t.snapshot.tmp").write_bytes(b"half")
    del table  # No close: the process is as good as dead.
    with open_table(tmp_path) as table:
        assert {f.name: f.read_bytes() for f in (tmp_path / "chunks").iterdir()} == kept
        assert table.recovery.truncated and table.recovery.removed and table.recovery.removed_bytes > 0
        assert not (tmp_path / "snapshots" / "t.snapshot.tmp").exists()
        table.load_snapshot("s")
        check(table, expected)


def test_the_second_writer_is_told_who_holds_the_lock(tmp_path):
    with open_table(tmp_path):
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            open_table(tmp_path)
    open_table(tmp_path).close()


def test_the_lock_of_a_dead_process_is_taken_over_while_its_child_lives(tmp_path):
    ready, go = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        table = open_table(tmp_path)
        if os.fork() == 0:
            os.write(ready[1], b".")
            os.read(go[0], 1)
            os._exit(0)
        assert table is not None
        os._exit(0)
    os.waitpid(holder, 0)
    os.read(ready[0], 1)
    with open_table(tmp_path) as table:
        assert f"process {holder} on host" in table.recovery.stale_lock
    os.write(go[1], b".")


def test_a_closed_table_says_so_and_closes_again(tmp_path):
    table = open_table(tmp_path)
    table.close()
    table.close()
    with pytest.raises(StorageError, match="is closed"):
        table.put(*random_keys(np.random.default_rng(0), 1), np.zeros((1, 5), np.float32))


def test_rows_of_the_wrong_shape_are_refused(tmp_path):
    with open_table(tmp_path) as table, pytest.raises(ValueError, match=r"\[1, 5\].*\(1, 4\)"):
        table.put(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros((1, 4), np.float32))


def test_a_snapshot_of_a_newer_format_keeps_what_it_may_need_and_can_be_deleted(tmp_path):
    from oneemb.kernels.checksum import xxh64

    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, {}, rng, 300)
        table.save_snapshot("s", {})
        path = snapshot_path(table, "s")
        table.clear()
        put_random(table, rows, rng, 300)
        table.save_snapshot("ours", {})
    data = bytearray(open(path, "rb").read())
    assert data[:8] == SNAPSHOT_MAGIC
    data[8:12] = (2).to_bytes(4, "little")
    data[16:40] = b"oneemb 9.9.9".ljust(24, b"\0")
    data[120:128] = xxh64(bytes(data[:120])).to_bytes(8, "little")
    open(path, "wb").write(data)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    with open_table(tmp_path) as table:
        assert "format 2" in table.recovery.damaged["s"] and "oneemb 9.9.9" in table.recovery.damaged["s"]
        assert [info.name for info in table.snapshots()] == ["ours"] == [i.name for i in read_snapshot_info(tmp_path)]
        table.load_snapshot("ours")
        check(table, rows)
        for read in (table.load_snapshot, lambda name: SnapshotReader.open(tmp_path, name)):
            with pytest.raises(FormatVersionError, match="format 2.*format 1.*oneemb 9.9.9"):
                read("s")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before
    with open_table(tmp_path) as table:
        table.delete_snapshot("s")
        assert not table.recovery.damaged and len(list((tmp_path / "chunks").iterdir())) < len(before) - 2
        table.load_snapshot("ours")
        check(table, rows)


def test_names_that_cannot_be_files_are_refused(tmp_path):
    with open_table(tmp_path) as table:
        for name in ("", "x" * 300, "é" * 100):
            with pytest.raises(ValueError, match="name must have"):
                table.save_snapshot(name, {})


def test_the_index_takes_at_most_32_bytes_a_key(tmp_path):
    rows, id_N = np.zeros((5000, 1), np.float32), np.arange(200_000)
    with open_table(tmp_path, row_width=1, chunk_bytes=1 << 20) as table:
        for begin in range(0, len(id_N), 5000):
            table.put(np.zeros(5000, np.int32), id_N[begin : begin + 5000], rows)
            assert begin == 0 or table.stats()["index_bytes"] <= 32 * len(table)


def test_a_snapshot_is_read_by_other_processes_while_the_writer_goes_on(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 2000)
        table.save_snapshot("s", {"n": 1})
        saved = dict(rows)
        script = (
            "import hashlib\n"
            "from oneemb.storage.table.snapshot_reader import SnapshotReader\n"
            "from tests.support.table_model import scanned\n"
            "print('ready', flush=True)\n"
            "input()\n"
            "for _ in range(3):\n"
            f"    rows = scanned(SnapshotReader.open({str(tmp_path)!r}, 's'))\n"
            "    print(hashlib.sha256(repr(sorted(rows.items())).encode()).hexdigest())\n"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert reader.stdin is not None and reader.stdout is not None and reader.stdout.readline() == "ready\n"
        reader.stdin.write("go\n")
        reader.stdin.flush()
        while reader.poll() is None:
            put_random(table, rows, rng, 500)
            table.save_snapshot("t", {}, overwrite=True)
        expected = hashlib.sha256(repr(sorted(saved.items())).encode()).hexdigest()
        assert reader.communicate()[0].split() == [expected] * 3
        check(table, rows)


def test_places_above_two_to_the_31_are_kept(tmp_path):
    # Slots are numbered from 2^31 rows on, as in a table of that many rows; nothing of the table's arrays is touched
    # below, so the memory of the unused extents is never there.
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, row_width=1, chunk_bytes=16 << 20) as table:
        live = table._contents.live
        extents = 2**31 // live.geometry.rows_per_extent
        live.live_E = np.zeros(extents + 8, np.int64)
        live.bit_N = np.zeros((extents + 8) * live.geometry.rows_per_extent // 8, np.uint8)
        live.sum_B = np.zeros((extents + 8) * live.geometry.blocks_per_extent, np.uint32)
        live.first_E = np.array([-2] * extents + [-1] * 8)  # neither free nor a chunk's
        put_random(table, rows, rng, 2000)
        assert len(table) == len(rows)
        assert live.first_place(live.chunks()[0]) >= 2**31
        table.flush()
        put_random(table, rows, rng, 2000)
        check(table, rows)
        table.save_snapshot("s", {})
        table.load_snapshot("s")
        check(table, rows)


def test_the_manifest_is_json_that_others_can_read(tmp_path):
    with open_table(tmp_path) as table:
        put(table, {}, *random_keys(np.random.default_rng(0), 10), random_rows(np.random.default_rng(0), 10, 5))
        table.save_snapshot("s", {"k": "é"})
        data = open(snapshot_path(table, "s"), "rb").read()
    manifest = json.loads(data[128 : 128 + int.from_bytes(data[40:48], "little")])
    assert manifest["meta"] == {"k": "é"} and manifest["chunks"][0][4] == 10


@pytest.mark.parametrize("window_bytes", [128, 1024, 4096])
def test_keys_are_the_same_through_a_window_of_any_size(tmp_path, monkeypatch, window_bytes):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        for _ in range(9):
            put_random(table, rows, rng, 60, ids=300)
            table.flush()
        table.save_snapshot("s", {})
        monkeypatch.setattr(chunk_scan, "_KEYS_WINDOW_BYTES", window_bytes)
        monkeypatch.setattr(snapshot_load, "_PIECE_ROWS", 40)
        table.clear()
        table.load_snapshot("s")
        check(table, rows)


@pytest.mark.parametrize("table_number", [1 << 23, 1 << 24, 2**31 - 1, -1])
def test_tables_that_an_index_cannot_hold_are_refused(tmp_path, table_number):
    table_1, id_1, row = np.array([table_number], np.int32), np.zeros(1, np.int64), np.ones((1, 5), np.float32)
    with open_table(tmp_path) as table:
        put(table, rows := {}, np.array([0, (1 << 23) - 1], np.int32), np.zeros(2, np.int64), np.eye(2, 5, dtype="f4"))
        for call in (
            lambda: table.put(table_1, id_1, row), lambda: table.get(table_1, id_1, row),
            lambda: table.contains(table_1, id_1), lambda: HashIndex(Threads(1)).put(table_1, id_1, id_1),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"tables must be from 0 to 8388607, got {table_number}"):
                call()
        table.save_snapshot("s", {})
        table.load_snapshot("s")
        check(table, rows)
    with SnapshotReader.open(tmp_path, "s") as reader, pytest.raises(ValueError, match="tables must be"):
        reader.get(table_1, id_1, row)
