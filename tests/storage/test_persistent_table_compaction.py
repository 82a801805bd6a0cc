"""Disk use stays bounded however long a table is trained, and compaction never changes what is read."""

import errno
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.table import compaction
from oneemb.storage.table.compaction import Compactor
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.inside import check_choices, meanwhile
from tests.support.pairwise import diagonal
from tests.support.table_model import check, got, put, put_random, random_rows

THREADS = Threads(1)


def open_table(path, **options):
    options = dict(row_width=16, physical_block_size=512, chunk_bytes=64 * 512, threads=THREADS) | options
    return PersistentTable.open(path, **options)


def file_bytes(path):
    return sum(f.stat().st_size for f in (path / "chunks").iterdir())


def excess(table, amplification=2.0):
    """Bytes above what is allowed, headers of files not counted."""
    stats = table.stats()
    headers = (4096 + 128) * (stats["chunks"] + 2)
    return stats["loose_bytes"] - headers - amplification * stats["live_bytes"] - 2 * stats["chunk_bytes"]


def train(table, steps, keys, share, flush_every=7):
    """Steps that update a share of the keys, hot ones more often than cold ones; yields after each."""
    rng = np.random.default_rng(1)
    put(table, {}, np.zeros(keys, np.int32), np.arange(keys), random_rows(rng, keys, table.row_width))
    for step in range(steps):
        id_U = np.unique((keys * rng.random(int(keys * share)) ** 3).astype(np.int64))
        table.put(np.zeros(len(id_U), np.int32), id_U, np.full((len(id_U), table.row_width), step, np.float32))
        if step % flush_every == 0:
            table.flush()
        yield step


@pytest.mark.parametrize(("amplification", "background"), diagonal([1.2, 2.0, 4.0], [False, True]))
@pytest.mark.parametrize("steps", [500, pytest.param(20000, marks=pytest.mark.slow)])
def test_disk_use_stays_bounded_over_a_year_of_training(tmp_path, background, amplification, steps):
    with open_table(tmp_path, max_space_amplification=amplification, background=background) as table:
        for step in train(table, steps, 3000, 0.1):
            assert excess(table, amplification) <= 0, f"step {step}: {table.stats()}"
            if step % 100 == 0 and not background:
                assert file_bytes(tmp_path) == table.stats()["disk_bytes"]
        stats = table.stats()
        assert stats["rows_moved"] > 0 and stats["bytes_removed"] > 5 * stats["disk_bytes"]


@pytest.mark.parametrize("reason", ["start new thread", "create new thread at interpreter shutdown"])
def test_where_no_thread_can_be_started_puts_compact(tmp_path, monkeypatch, reason):
    def start(thread):
        raise RuntimeError(f"can't {reason}")

    monkeypatch.setattr(threading.Thread, "start", start)
    with open_table(tmp_path) as table:
        for step in train(table, 200, 3000, 0.1):
            assert excess(table) <= 0, f"step {step}: {table.stats()}"
        assert table.stats()["rows_moved"] > 0
        monkeypatch.setattr(threading.Thread, "start", lambda thread: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            for _ in train(table, 200, 3000, 0.1):
                pass


def test_without_compaction_the_bound_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(Compactor, "make_room", lambda self, rows: None)
    with open_table(tmp_path) as table, pytest.raises(AssertionError, match="bound"):
        for _ in train(table, 300, 3000, 0.1):
            assert excess(table) <= 0, "bound"


def test_snapshots_count_apart_and_their_disk_comes_back(tmp_path):
    with open_table(tmp_path, background=False) as table:
        for step in train(table, 300, 3000, 0.1):
            if step % 60 == 59:
                table.save_snapshot(f"s{step}", {})
            assert excess(table) <= 0
        stats = table.stats()
        assert stats["snapshot_bytes"] > 2 * stats["live_bytes"]
        assert stats["snapshot_bytes"] + stats["loose_bytes"] >= stats["disk_bytes"]
        for info in table.snapshots():
            table.delete_snapshot(info.name)
        assert table.stats()["snapshot_bytes"] == 0
        table.put(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros((1, 16), np.float32))
        assert excess(table) <= 0


def test_compact_on_demand_leaves_live_rows_only(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, background=False, max_space_amplification=50.0) as table:
        for _ in range(40):
            put_random(table, rows, rng, 600, ids=300)
        table.flush()
        before = table.stats()["disk_bytes"]
        result = table.compact()
        stats = table.stats()
        assert result.bytes_freed == before - stats["disk_bytes"] > 0 and result.rows_moved <= len(rows)
        assert stats["disk_bytes"] <= 1.1 * stats["live_bytes"] + (4096 + 128) * stats["chunks"]
        check(table, rows)


def test_compaction_leaves_snapshots_and_rows_alone(tmp_path):
    rng, rows, saved = np.random.default_rng(0), {}, {}
    with open_table(tmp_path, background=False, max_space_amplification=1.1) as table:
        for n in range(8):
            for _ in range(6):
                put_random(table, rows, rng, 500, ids=400)
            check_choices(table, f"s{n % 3}")
            check_choices(table, "other")
            table.save_snapshot(f"s{n % 3}", {}, overwrite=True)
            saved[f"s{n % 3}"] = dict(rows)
            table.compact()
            check(table, rows)
        for name, expected in saved.items():
            table.load_snapshot(name)
            check(table, expected)


def test_compaction_chooses_the_chunks_that_its_formulas_name():
    reasons = set()
    for amplification in (1.1, 4.0):
        rng, rows = np.random.default_rng(0), {}
        options = dict(row_width=128, chunk_bytes=1, max_space_amplification=amplification)
        with open_table("/t", fs=FaultyFileSystem(), background=False, **options) as table:
            put_random(table, rows, rng, 2000, ids=1000)
            for _ in range(150):
                put_random(table, rows, rng, int(rng.integers(1, 400)), ids=1000)
                reasons |= {check_choices(table, name) for name in ["new", *(s.name for s in table.snapshots())]}
                if rng.random() < 0.15:
                    table.save_snapshot(f"s{rng.integers(4)}", {}, overwrite=True)
                if rng.random() < 0.1 and table.snapshots():
                    table.delete_snapshot(table.snapshots()[rng.integers(len(table.snapshots()))].name)
    assert reasons == {"loose", "held", "own", "beyond need", "none"}


COMPACTION = "oneemb-compaction"


class SlowReads(LocalFileSystem):
    """Lets a test act while a chunk is being moved."""

    def __init__(self):
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def read_into(self, file, out, offset):
        if threading.current_thread().name.startswith(COMPACTION):
            self.reading.set()
            self.go_on.wait(600)
        return super().read_into(file, out, offset)


def start_compaction(put_few, begun):
    """Put few rows at a time, since a put that needs more room waits for the move, until a thread has begun to move a
    chunk, which then stands still."""
    deadline = time.monotonic() + 600
    while not begun.is_set():
        assert time.monotonic() < deadline
        put_few()
        while not begun.is_set() and any(thread.name.startswith(COMPACTION) for thread in threading.enumerate()):
            time.sleep(0.001)  # A put now might move a chunk itself, or wait for the move that stands still.


@pytest.mark.parametrize("then", ["put", "load", "clear", "save", "close", "scan"])
def test_the_table_is_used_while_a_chunk_is_being_moved(tmp_path, then):
    rng, rows, fs = np.random.default_rng(0), {}, SlowReads()
    table = open_table(tmp_path, fs=fs, io="pread")
    put_random(table, rows, rng, 800, ids=300)
    table.save_snapshot("s", {})
    saved = dict(rows)
    fs.go_on.clear()
    start_compaction(lambda: put_random(table, rows, rng, 5, ids=300), fs.reading)
    if then == "put":
        keys = list(rows)[:200]
        new = random_rows(rng, len(keys), 16)
        threading.Timer(0.05, fs.go_on.set).start()  # A put of many rows waits until the move has made room.
        put(table, rows, np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys]), new)
        check(table, rows)
    elif then == "save":
        threading.Timer(0.05, fs.go_on.set).start()  # A save that moves rows itself waits for those that move.
        table.save_snapshot("t", {})
    elif then == "scan":
        first = next(table.scan(10))
        assert len(first[1]) > 0
    threading.Timer(0.05, fs.go_on.set).start()
    if then == "load":
        table.load_snapshot("s")
        rows = dict(saved)
    elif then == "clear":
        table.clear()
        rows = {}
    elif then == "close":
        table.close()
        return
    fs.go_on.set()
    for _ in range(20):
        put_random(table, rows, rng, 100, ids=300)
    check(table, rows)
    table.load_snapshot("s")
    check(table, saved)
    table.close()


def test_an_error_in_the_background_is_raised_by_the_next_call_once():
    fs, rows, rng = FaultyFileSystem(), {}, np.random.default_rng(0)

    def fail(call, path):
        if threading.current_thread().name.startswith("oneemb-compaction") and call in ("read", "write", "create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_table("/t", fs=fs) as table:
        fs.fail = fail
        deadline = time.monotonic() + 600
        with pytest.raises(StorageError, match="/t/chunks/.*ENOSPC.*free space") as raised:
            while time.monotonic() < deadline:
                put_random(table, rows, rng, 100, ids=300)
        assert any("compaction.py" in str(entry.path) for entry in raised.traceback), "the original traceback is there"
        fs.fail = None
        rows = dict(zip(rows, got(table, rows), strict=True))
        for _ in range(30):
            put_random(table, rows, rng, 300, ids=300)
        check(table, rows)
        assert table.stats()["rows_moved"] > 0


def test_a_damaged_chunk_is_reported_once_and_its_sound_rows_stay():
    fs, rows, rng = FaultyFileSystem(), {}, np.random.default_rng(0)
    with open_table("/t", fs=fs, background=False, chunk_bytes=64 * 512) as table:
        put_random(table, rows, rng, 900, ids=400)
        table.flush()
        path = sorted(p for p in fs.entries if p.endswith(".rows"))[0]
        fs.entries[path].now[4096 + 100] ^= 1
        with pytest.raises(CorruptTableError, match=path):
            for _ in range(50):
                put_random(table, rows, rng, 300, ids=400)
        for _ in range(50):
            put_random(table, rows, rng, 300, ids=400)
            check_choices(table, "s")
        assert table.stats()["rows_moved"] > 0


@pytest.mark.parametrize("background", [False, True])
def test_a_put_ends_when_another_thread_clears_or_closes_the_table(tmp_path, background):
    for end in ("clear", "close"):
        table = PersistentTable.open(
            tmp_path / end, row_width=40, physical_block_size=512, chunk_bytes=1, threads=Threads(1),
            background=background,
        )  # fmt: skip
        stop, ended = threading.Event(), []

        def put(table=table, stop=stop, ended=ended):
            rng, rows = np.random.default_rng(0), {}
            try:
                while not stop.is_set():
                    put_random(table, rows, rng, 400, ids=150)
            except StorageError as error:
                ended.append(str(error))
            ended.append(None)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        for _ in range(30):
            table.clear() if end == "clear" else table.flush()
        if end == "close":
            table.close()
        else:
            stop.set()
        thread.join(600)
        stop.set()
        assert ended and (end == "clear" or "closed" in ended[0])
        table.close()


def make_others(table):
    """Replace the rows by others."""
    table.clear()
    put(table, {}, np.zeros(50, np.int32), np.arange(50), np.ones((50, 16), np.float32))


CALLS = {
    "clear": lambda table: table.clear(),
    "close": lambda table: table.close(),
    "delete": lambda table: table.delete_snapshot("s"),
    "load": lambda table: table.load_snapshot("s"),
    "overwrite": lambda table: table.save_snapshot("s", {}, overwrite=True),
    "save": lambda table: table.save_snapshot("t", {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "call, other, error, rows_left",
    [
        ("save", "close", "closed; open it again", None),
        ("save", "save", "named 't' already", 50),
        ("load", "close", "closed; open it again", None),
        ("load", "delete", "no snapshot named 's'", 50),
        ("load", "overwrite", None, 50),
        ("clear", "close", "closed; open it again", None),
        ("clear", "clear", None, 0),
    ],
)
def test_a_call_that_waits_for_a_move_goes_on_from_what_others_do_meanwhile(tmp_path, call, other, error, rows_left):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path) as table:
        put_random(table, rows, rng, 800, ids=300)
        table.save_snapshot("s", {})
        make_others(table)
        waits = "clean_for_save" if call == "save" else "stop"
        with meanwhile(table, Compactor, waits, lambda: CALLS[other](table)):
            with pytest.raises(StorageError, match=error) if error else nullcontext():
                CALLS[call](table)
        assert not table.broken and (other == "close" or len(table) == rows_left)


def test_a_move_that_begins_after_a_load_has_nothing_to_move(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, background=False) as table:
        put_random(table, rows, rng, 800, ids=300)
        table.save_snapshot("s", {})
        saved = dict(rows)

        def load():
            table.erase(np.array([t for t, _ in rows], np.int32), np.array([i for _, i in rows]))
            table.load_snapshot("s")

        for _ in range(4):
            put_random(table, rows, rng, 800, ids=300)
        with meanwhile(table, Compactor, "move", load):
            table.compact()
        check(table, saved)


def test_a_put_moves_no_chunk_of_rows_that_have_replaced_its_own(tmp_path):
    rng, table_U, id_U = np.random.default_rng(0), np.zeros(3000, np.int32), np.arange(3000)
    with open_table(tmp_path) as table:

        def replace():
            table.clear()
            for n in range(1, 4):  # More rows than the former ones leave room for.
                table.put(table_U, id_U + 3000 * n, random_rows(rng, 3000, 16))

        with meanwhile(table, Compactor, "put_pending", replace):
            for _ in range(4):  # A put that needs room begins with the pending keys.
                table.put(table_U, id_U, random_rows(rng, 3000, 16))
        assert not table.broken and len(table) == 12000


class StoppedRemovals(LocalFileSystem):
    """The disk removes files in the background only while `go_on` is set, and may be full until it has removed one."""

    def __init__(self):
        super().__init__()
        self.removing, self.go_on, self.full = threading.Event(), threading.Event(), False

    def remove(self, path):
        if threading.current_thread().name.startswith("oneemb-remove"):
            self.removing.set()
            assert self.go_on.wait(600)
        super().remove(path)
        self.full = False

    def write(self, file, data, offset):
        if self.full:
            self.go_on.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data, offset)


@pytest.mark.parametrize("full", [False, True])
def test_puts_go_on_while_files_are_removed_and_wait_for_that_on_a_full_disk(tmp_path, full):
    rng, rows, fs = np.random.default_rng(0), {}, StoppedRemovals()
    with open_table(tmp_path, fs=fs) as table:
        removed = 0  # Small puts, so that one chunk is removed: a put waits where more of them take its room.
        while not fs.removing.is_set() and removed == 0:
            put_random(table, rows, rng, 20, ids=300)
            removed = table.stats()["bytes_removed"]
        assert fs.removing.wait(600)
        for _ in range(2):
            put_random(table, rows, rng, 5, ids=300)
        assert not fs.go_on.is_set() and file_bytes(tmp_path) > table.stats()["disk_bytes"]
        fs.full = full
        table.flush()
        assert fs.go_on.is_set() is full and not fs.full
        fs.go_on.set()
        check(table, rows)
        table.compact()
        assert file_bytes(tmp_path) == table.stats()["disk_bytes"]


class CountedRemovals(LocalFileSystem):
    """The disk removes as many files in the background as `allowed` was released."""

    def __init__(self):
        super().__init__()
        self.allowed, self.removed = threading.Semaphore(0), 0

    def remove(self, path):
        if threading.current_thread().name.startswith("oneemb-remove"):
            assert self.allowed.acquire(timeout=600)
            self.removed += 1
        super().remove(path)


def test_a_put_waits_for_no_more_removals_than_give_it_room(tmp_path):
    rng, rows, fs, id_U = np.random.default_rng(0), {}, CountedRemovals(), np.arange(6000)
    with open_table(tmp_path, fs=fs, max_space_amplification=1.3) as table, ThreadPoolExecutor(2) as beside:
        put(table, rows, np.zeros(6000, np.int32), id_U, random_rows(rng, 6000, 16))
        table.save_snapshot("s", {})
        put(table, rows, np.zeros(6000, np.int32), id_U, random_rows(rng, 6000, 16))
        before = len(os.listdir(tmp_path / "chunks"))
        deletion = beside.submit(table.delete_snapshot, "s")
        while table.snapshots():
            time.sleep(0.001)
        removing = before - 2 * table.stats()["chunks"]
        assert removing > 16
        putting = beside.submit(table.put, np.zeros(9, np.int32), id_U[:9], random_rows(rng, 9, 16))
        fs.allowed.release(removing - 4)
        try:
            putting.result(60)
            assert fs.removed <= removing - 4
        finally:
            fs.allowed.release(1000)
        deletion.result()


def waits_for_room(thread):
    """Whether a put waits until compaction has moved more rows."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != "make_room":
        frame = frame.f_back
    return frame is not None


def test_puts_get_room_step_by_step_while_a_chunk_is_being_moved(tmp_path, monkeypatch):
    rng, rows, stop = np.random.default_rng(0), {}, threading.Event()
    scan, begun, pieces = compaction.scan_rows, threading.Event(), threading.Semaphore(0)

    def scan_slowly(*arguments, **options):
        for piece in scan(*arguments, **options):
            begun.set()
            assert stop.is_set() or pieces.acquire(timeout=600)
            yield piece

    monkeypatch.setattr(compaction, "scan_rows", scan_slowly)
    monkeypatch.setattr(compaction, "_PIECE_ROWS", 16)
    with open_table(tmp_path) as table:
        put(table, rows, np.zeros(6000, np.int32), np.arange(6000), random_rows(rng, 6000, 16))

        def overwrite_few():
            id_U = rng.choice(6000, 16, replace=False)
            put(table, rows, np.zeros(16, np.int32), id_U, random_rows(rng, 16, 16))

        def overwrite():
            while not stop.is_set():
                overwrite_few()

        def room():
            """Rows put, and rows moved, since the last call, once puts wait for the move."""
            waits, before = 0, room.stats
            while waits < 100:  # A put that waits for something else does not wait for so long.
                assert thread.is_alive()
                waits = waits + 1 if waits_for_room(thread) else 0
                time.sleep(0.001)
            room.stats = table.stats()
            return room.stats["rows_put"] - before["rows_put"], room.stats["rows_moved"] - before["rows_moved"]

        def step():
            pieces.release(2)
            return room()

        start_compaction(overwrite_few, begun)
        room.stats = table.stats()
        thread = threading.Thread(target=overwrite)
        thread.start()
        room()
        while step()[0] == 0:  # Puts may have taken more room before the move began.
            pass
        steps = [step() for _ in range(4)]
        stop.set()
        pieces.release()
        thread.join(600)
        assert all(0 < moved <= 32 for _, moved in steps), steps
        assert sum(put for put, _ in steps) > sum(moved for _, moved in steps), "a chunk has more dead rows than live"
        check(table, rows)


def test_a_fork_ends_while_a_put_waits_for_a_move(tmp_path, monkeypatch):
    rng, rows, fs = np.random.default_rng(0), {}, SlowReads()
    table = open_table(tmp_path, fs=fs, io="pread")
    put_random(table, rows, rng, 800, ids=300)
    fs.go_on.clear()
    start_compaction(lambda: put_random(table, rows, rng, 5, ids=300), fs.reading)
    keys = list(rows)
    new = [np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys]), random_rows(rng, len(keys), 16)]
    putting = threading.Thread(target=put, args=(table, rows, *new))
    putting.start()
    deadline = time.monotonic() + 600
    while "make_room" not in [one.name for one in traceback.extract_stack(sys._current_frames()[putting.ident])]:
        assert putting.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    wait_for_others, gave_up = signals_deferred.wait_for_others, []

    def wait(end):
        fs.go_on.set()  # The chunk is moved while the fork waits for the put.
        end = min(end, time.monotonic() + 20)
        wait_for_others(end)
        gave_up.append(time.monotonic() > end)

    monkeypatch.setattr(signals_deferred, "wait_for_others", wait)
    assert ended_well(in_child(lambda: len(got(table, [(0, 1), (1, 2)])) == 2)) and gave_up == [False]
    putting.join()
    check(table, rows)
    table.close()
