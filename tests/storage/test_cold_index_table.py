"""A table whose index is on disk: crashes, failed calls, damage, forks, interrupts, and the same rows as any table."""

import concurrent.futures
import errno
import shutil
import threading
from functools import partial

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage import cold_index
from oneemb.storage.errors import ForkedProcessError, StorageError
from oneemb.storage.table import cold_file, pending_keys
from oneemb.storage.table.cold_file import ColdFile
from oneemb.storage.table.persistent_table import PersistentTable
from tests.storage import test_persistent_table_crash as crash, test_persistent_table_faults as faults
from tests.storage.test_persistent_table_interrupts import check_stopped
from tests.support.cold_shards import keep_index_on_disk, make_shards_small
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.inside import check_chunk_totals
from tests.support.interrupts import WAYS
from tests.support.pairwise import diagonal
from tests.support.table_model import check, got, note, put_random, random_keys, random_rows

open_cold = partial(PersistentTable.open, row_width=40, chunk_bytes=1, index_memory_bytes=1)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    make_shards_small(monkeypatch, overlay=150)


def filled(path, rows, size=3000, **options):
    """A table with rows, whose index is on disk."""
    table = open_cold(path, threads=Threads(1), **options)
    for _ in range(4):
        put_random(table, rows, np.random.default_rng(len(rows)), size, ids=size)
    check(table, rows)
    assert table.stats()["index_disk_bytes"] > 0
    return table


# ---- crashes and failed calls ---------------------------------------------------------------------------------------


class World(crash.World):
    """The table that loses power has its index on disk; who opens it then need not have it there."""

    def __init__(self, fs):
        with pytest.MonkeyPatch.context() as patch:
            keep_index_on_disk(patch, overlay=150)
            super().__init__(fs)


def test_keys_wait_in_lists_while_the_index_is_on_disk(monkeypatch):
    """Tests of crashes and failed calls would otherwise not meet both together."""
    world, noted, real = World(FaultyFileSystem()), [], pending_keys.PendingKeys.note

    def note(self, *keys):
        noted.append("/t/index.cold" in world.fs.entries)
        return real(self, *keys)

    monkeypatch.setattr(pending_keys.PendingKeys, "note", note)
    for operation in crash.OPERATIONS[:5]:
        world.put(100)
        operation(world)
    assert len(noted) > 10 and all(noted)


@pytest.mark.slow
@pytest.mark.parametrize("operation", crash.OPERATIONS, ids=lambda o: o.__name__)
def test_power_loss_at_any_call_of_any_operation_leaves_every_snapshot_whole(operation, monkeypatch):
    monkeypatch.setattr(crash, "World", World)
    found, _ = crash.failures(operation)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize(
    "operation, code, until_freed, first, every",
    [
        (faults.put, errno.EIO, False, 0, 131),
        (faults.put, errno.ENOSPC, True, 5, 181),
        (faults.load, errno.EIO, False, 1, 241),
        (faults.load, errno.ENOSPC, True, 28, 301),
        (faults.compact, errno.ENOSPC, True, 2, 241),
    ],
    ids=lambda its: getattr(its, "__name__", str(its)),
)  # fmt: skip
def test_a_failed_call_harms_nothing(operation, code, until_freed, first, every, monkeypatch):
    keep_index_on_disk(monkeypatch, overlay=150)
    assert faults.check_failures(operation, code, until_freed, first, every)


@pytest.mark.slow
@pytest.mark.parametrize("code, until_freed", [(errno.EIO, False), (errno.ENOSPC, True)], ids=str)
@pytest.mark.parametrize("operation", faults.OPERATIONS, ids=lambda o: o.__name__)
def test_any_failed_call_harms_nothing(operation, code, until_freed, monkeypatch):
    keep_index_on_disk(monkeypatch, overlay=150)
    assert faults.check_failures(operation, code, until_freed, 0, 1)


def test_an_open_removes_what_a_killed_process_has_left_of_an_index():
    fs, rows = FaultyFileSystem(), {}
    filled("/t", rows, fs=fs).save_snapshot("a", {})
    for _, disk in fs.survivors():
        with PersistentTable.open("/t", row_width=40, threads=Threads(1), fs=disk) as table:
            assert "index.cold" not in disk.names("/t")
            table.load_snapshot("a")
            check(table, rows)


# ---- damage ---------------------------------------------------------------------------------------------------------


def check_damage(table, rows, rng, flips, call):
    """Flip bytes of the index, one at a time, and call until a call fails. Returns the number of calls that did."""
    fs, errors = table[1], 0
    for _ in range(flips):
        now = fs.entries["/t/index.cold"].now
        now[rng.choice(np.flatnonzero(np.frombuffer(bytes(now), np.uint8)))] ^= 4
        for _ in range(20):
            try:
                call()
            except StorageError as error:
                assert "/t/index.cold at offset " in str(error) and "call again" in str(error)
                errors += 1
                break
        check(table[0], rows)
    return errors


def test_a_table_whose_folder_is_gone_can_be_closed(tmp_path):
    table = filled(tmp_path / "t", {})
    shutil.rmtree(tmp_path / "t")
    table.close()


@pytest.mark.parametrize("background", [False, True])
def test_an_index_with_a_flipped_byte_is_made_anew_and_no_row_is_lost(background):
    fs, rows = FaultyFileSystem(), {}
    table, rng = filled("/t", rows, 800, fs=fs, background=background), np.random.default_rng(0)

    def get():
        keys = [list(rows)[n] for n in rng.choice(len(rows), 100)]
        assert got(table, keys) == [rows[key] for key in keys]

    def put():
        keys = random_keys(rng, 60, ids=800)
        row_UW = random_rows(rng, 60, 40)
        errors = []
        while len(errors) < 3:  # A move beside puts may have met the block, too: its error is raised by a later call.
            try:
                table.put(*keys, row_UW)
                break
            except StorageError as error:
                errors.append(error)
        note(rows, *keys, row_UW)
        if errors:
            raise errors[0]

    assert check_damage((table, fs), rows, rng, 8, get) >= 4
    assert check_damage((table, fs), rows, rng, 8, put) >= 2
    table.save_snapshot("a", {})
    check_chunk_totals(table)
    table.load_snapshot("a")
    check(table, rows)
    table.close()


# ---- forks, threads and interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_a_child_of_fork_reads_the_rows_until_the_index_on_disk_changes(tmp_path, io):
    rows = {}
    with filled(tmp_path / "t", rows, io=io) as table:
        keys = list(rows)

        def read():
            return got(table, keys) == list(rows.values())

        def read_after_changes():
            with open(tmp_path / "t/index.cold", "r+b") as file:
                size = file.seek(0, 2)
                for at in range(0, size, 4096):
                    file.seek(at)
                    file.write(b"changed ")
            try:
                got(table, keys[::-1])
            except ForkedProcessError as error:
                return "has changed its index on disk since this child" in str(error)

        assert ended_well(in_child(read)) is True
        assert ended_well(in_child(read_after_changes)) is True


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_threads_that_put_and_get_find_the_rows_of_their_own_tables(tmp_path, io):
    errors = []

    def work(table, number):
        try:
            rng, rows = np.random.default_rng(number), {}
            for _ in range(8):
                id_U = rng.choice(2000, 300, replace=False)
                row_UW = random_rows(rng, 300, 40)
                table.put(np.full(300, number, np.int32), id_U, row_UW)
                rows |= {(number, id): row.tobytes() for id, row in zip(id_U.tolist(), row_UW, strict=True)}
                gone = id_U[:20]
                assert table.erase(np.full(20, number, np.int32), gone).all()
                for id in gone.tolist():
                    del rows[number, id]
                assert got(table, list(rows)) == list(rows.values())
        except BaseException as error:
            errors.append(error)

    with open_cold(tmp_path / "t", threads=Threads(2), io=io, max_space_amplification=1.3) as table:
        threads = [threading.Thread(target=work, args=(table, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert table.stats()["index_disk_bytes"] > 0


def test_a_clear_waits_for_the_thread_that_writes_the_old_index(tmp_path, monkeypatch):
    """The old index and the new one are in one file, which takes one call at a time."""
    inside, go, busy, real, together = threading.Event(), threading.Event(), [], ColdFile.write, []

    def write(self, address_B):
        together.extend(busy)
        if not threading.current_thread().name.startswith("oneemb-index"):
            go.set()
            return real(self, address_B)
        busy.append(1)
        try:
            inside.set()
            go.wait()
            return real(self, address_B)
        finally:
            busy.clear()
            inside.clear()

    def wait(futures):
        go.set()
        concurrent.futures.wait(futures)

    monkeypatch.setattr(ColdFile, "write", write)
    monkeypatch.setattr(pending_keys, "wait", wait)
    rng, rows = np.random.default_rng(0), {}
    with open_cold(tmp_path / "t", threads=Threads(1)) as table:
        put_random(table, rows, rng, 3000, ids=3000)
        for _ in range(300):
            go.clear()
            put_random(table, rows, rng, 8, ids=3000)
            if inside.wait(0.05):
                break
        assert inside.is_set()
        table.clear()
        rows = {}
        put_random(table, rows, rng, 3000, ids=3000)
        go.set()
        check(table, rows)
        assert not together


@pytest.mark.parametrize(("way", "background"), diagonal(WAYS, [False, True]))
def test_a_put_that_is_stopped_at_some_line_has_done_all_or_nothing(tmp_path, monkeypatch, way, background):
    keep_index_on_disk(monkeypatch, overlay=150)
    check_stopped(tmp_path, "put", way, background, 4)


PARTS = {
    "merge": ("put", {"_merge", "_thaw", "_let_go"}), "write": ("put", {"write", "_write"}),
    "read": ("get", {"_read", "read"}),
}  # fmt: skip


@pytest.mark.parametrize(("part", "way"), diagonal(list(PARTS), WAYS))
def test_a_call_that_is_stopped_within_the_index_has_done_all_or_nothing(tmp_path, monkeypatch, part, way):
    call, functions = PARTS[part]
    keep_index_on_disk(monkeypatch, overlay=150)
    files = (cold_index.__file__, cold_file.__file__)
    check_stopped(tmp_path, call, way, False, 2, files=files, functions=functions)


# ---- the same rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_any_calls_give_the_same_rows_as_with_the_index_in_memory(tmp_path, io):
    rng = np.random.default_rng(0)
    options = dict(row_width=40, chunk_bytes=1 << 20, threads=Threads(2), io=io)
    with (
        PersistentTable.open(tmp_path / "memory", **options) as memory,
        open_cold(tmp_path / "disk", **options) as disk,
    ):
        for n in range(30):
            table_U, id_U = random_keys(rng, 800, ids=2000)
            row_UW, out = random_rows(rng, len(id_U), 40), []
            for table in (memory, disk):
                found_UW = np.zeros((len(id_U), 40), np.float32)
                missing_U = table.get(table_U, id_U, found_UW)
                has_U = table.contains(table_U, id_U)
                table.put(table_U, id_U, row_UW)
                erased_U = table.erase(table_U[::5], id_U[::5])
                if n == 10:
                    table.save_snapshot("a", {})
                if n == 15:
                    table.save_snapshot("b", {}, since=table.places)
                if n == 20:
                    table.load_snapshot("a", ["b"])
                if n == 25:
                    table.compact()
                out.append([missing_U, found_UW, has_U, erased_U, len(table)])
            for one, other in zip(*out, strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()  # Rows have NaN among them.
        assert disk.stats()["index_disk_bytes"] > 0 and disk.stats()["index_blocks_read"] > 0
