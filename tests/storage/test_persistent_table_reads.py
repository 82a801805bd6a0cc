"""Every way of reading brings the same rows, reads no block twice, and tells a damaged or shortened file."""

import os
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, ForkedProcessError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking import signals_deferred
from oneemb.storage.table.aio_reader import AioReader, open_reader
from oneemb.storage.table.block_reader import PreadReader, plan_reads
from oneemb.storage.table.geometry import Geometry, make_geometry
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.inside import chunk_files_of
from tests.support.table_model import check, got, put, put_random, random_rows

THREADS = Threads(2)


def aio_works(path):
    try:
        open_reader("aio", LocalFileSystem(), str(path), 512, THREADS).close()
        return True
    except StorageError:
        return False


@pytest.fixture(params=["aio", "pread"])
def io(request, tmp_path):
    if request.param == "aio" and not aio_works(tmp_path):
        pytest.skip("this file system has no direct reads by Linux AIO")
    return request.param


def open_table(path, **options):
    options = dict(row_width=30, physical_block_size=512, chunk_bytes=64 * 512, threads=THREADS) | options
    return PersistentTable.open(path, **options)


@pytest.mark.parametrize("physical_block_size", [512, 4096])
@pytest.mark.parametrize("row_width", [1, 30, 128, 1500, 20000])
def test_each_way_of_reading_brings_the_rows(tmp_path, io, row_width, physical_block_size):
    rng, rows = np.random.default_rng(0), {}
    size = 3000 if row_width < 1000 else 40
    with open_table(tmp_path, io=io, row_width=row_width, physical_block_size=physical_block_size) as table:
        for _ in range(3):
            put_random(table, rows, rng, size, ids=2 * size)
        table.flush()
        check(table, rows)
        stats = table.stats()
        assert stats["io"] == io and stats["bytes_read"] > 0
        table.save_snapshot("s", {})
        table.load_snapshot("s")
        check(table, rows)


def test_auto_takes_the_first_way_that_works(tmp_path):
    expected = "aio" if aio_works(tmp_path) else "pread"
    with open_table(tmp_path) as table:
        assert table.stats()["io"] == expected
    with open_table("/t", fs=FaultyFileSystem()) as table:
        assert table.stats()["io"] == "pread"


def test_a_way_that_does_not_work_is_refused_when_forced():
    with pytest.raises(StorageError, match="io='aio' does not work in /t/chunks.*io='pread'"):
        open_table("/t", fs=FaultyFileSystem(), io="aio")
    with pytest.raises(ValueError, match="'auto', 'aio' or 'pread', got 'mmap'"):
        open_table("/t", fs=FaultyFileSystem(), io="mmap")


def test_the_probe_leaves_nothing_behind(tmp_path):
    open_table(tmp_path).close()
    assert os.listdir(tmp_path / "chunks") == []
    (tmp_path / "chunks" / "probe.tmp").write_bytes(b"left by a crash")
    open_table(tmp_path).close()
    assert os.listdir(tmp_path / "chunks") == []


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_damage_is_told_by_each_way_of_reading(tmp_path, io, how):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, io=io) as table:
        put_random(table, rows, rng, 700)
        table.save_snapshot("s", {})
    path = tmp_path / "chunks" / "000000000001.rows"
    with open_table(tmp_path, io=io) as table:
        table.load_snapshot("s")
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[4096 + 512 * 9 + 17] ^= 64
            path.write_bytes(data)
        elif how == "short":
            path.write_bytes(data[: 4096 + 512 * 9 + 100])
        else:
            os.rename(path, tmp_path / "elsewhere")
        with pytest.raises(CorruptTableError, match=str(path)) as raised:
            got(table, rows)
        if how != "gone":
            assert f"block 9 at offset {4096 + 512 * 9}" in str(raised.value)
        # Mended, everything is read again: no read was left in flight, no memory spoiled.
        if how == "gone":
            os.rename(tmp_path / "elsewhere", path)
        else:
            data[4096 + 512 * 9 + 17] ^= 64 if how == "flipped" else 0
            path.write_bytes(data)
        check(table, rows)


def test_more_chunks_than_open_files_are_read_in_one_call(tmp_path, io):
    rng, rows = np.random.default_rng(0), {}
    with open_table(tmp_path, io=io, max_space_amplification=100.0) as table:
        chunk_files_of(table).files_open_max = 3
        for _ in range(6):
            put_random(table, rows, rng, 900)
        table.flush()
        assert table.stats()["chunks"] > 12
        check(table, rows)
        assert len(chunk_files_of(table).open_rows_files) <= 3


def test_no_block_is_asked_for_twice_and_neighbours_go_together():
    geometry = make_geometry(30, 512, 1 << 20)
    rng = np.random.default_rng(0)
    place_N = rng.choice(geometry.rows_per_chunk * 3, 4000, replace=False)
    plan = plan_reads(geometry, place_N, np.arange(4000))
    asked = [
        block for first, size in zip(plan.block_Q, plan.blocks_Q, strict=True) for block in range(first, first + size)
    ]
    assert len(asked) == len(set(asked)) and set(place_N // geometry.rows_per_block) <= set(asked)
    served = [p for q in range(len(plan.block_Q)) for p in range(plan.first_Q[q], plan.first_Q[q + 1])]
    assert served == list(range(4000)) and (np.sort(place_N) == plan.place_P).all()
    ends = plan.block_Q + plan.blocks_Q
    assert (plan.blocks_Q * 512 <= 64 << 10).all()
    same_chunk = plan.block_Q // geometry.blocks_per_chunk == (ends - 1) // geometry.blocks_per_chunk
    assert same_chunk.all(), "a request lies in one file"


def test_an_error_of_the_system_names_the_request(tmp_path):
    if not aio_works(tmp_path):
        pytest.skip("this file system has no direct reads by Linux AIO")
    geometry = Geometry(128, 512, 64)
    plan = plan_reads(geometry, np.arange(0, 2000, 50), np.arange(40))
    out_UW, sum_B = np.zeros((40, 128), np.float32), np.zeros(2000, np.uint32)
    for reader in (AioReader(), PreadReader(LocalFileSystem(), THREADS)):
        for _ in range(2):
            with pytest.raises(OSError) as raised:
                reader.read(plan, np.full(40, 999999), np.zeros(40, np.int64), sum_B, out_UW)
            assert raised.value.errno == 9 and 0 <= raised.value.filename < 40
        reader.close()


class StoppedGets(LocalFileSystem):
    """The disk answers reads of a `get` only while `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def read_into(self, file, out, offset):
        if threading.current_thread().name.startswith(("oneemb-read", "getter")):
            self.reading.set()
            assert self.go_on.wait(600)
        return super().read_into(file, out, offset)


@contextmanager
def get_in_progress(table, fs, rows):
    """Within the block the disk reads for a `get` of all rows, in another thread. Yields the results of the `get`,
    which are there after the block."""
    results = []
    fs.reading.clear()
    fs.go_on.clear()
    thread = threading.Thread(target=lambda: results.append(got(table, rows)), name="getter", daemon=True)
    thread.start()
    assert fs.reading.wait(600)
    try:
        yield results
        assert not results
    finally:
        fs.go_on.set()
        thread.join(600)


def overwrite(table, rows, rng):
    """Put new rows for all keys of a table, until no chunk has a row of before."""
    for _ in range(3):
        keys = list(rows)
        table_U, id_U = np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys])
        put(table, rows, table_U, id_U, random_rows(rng, len(keys), table.row_width))
    table.flush()


MEANWHILE = {
    "put": lambda table, rows, rng: overwrite(table, rows, rng),
    "erase": lambda table, rows, rng: table.erase(*keys_of(rows)),
    "clear": lambda table, rows, rng: table.clear(),
    "compact": lambda table, rows, rng: (put_random(table, dict(rows), rng, 700), table.compact()),
    "load": lambda table, rows, rng: table.load_snapshot("empty"),
    "save": lambda table, rows, rng: (overwrite(table, rows, rng), table.save_snapshot("t", {})),
}  # fmt: skip


def keys_of(rows):
    return np.array([t for t, _ in rows], np.int32), np.array([i for _, i in rows])


@pytest.mark.parametrize(
    "background, synced, files_open", [(False, True, 9), (True, False, 9), (True, True, 9), (True, False, 1)]
)
@pytest.mark.parametrize("call", MEANWHILE)
def test_a_get_brings_the_rows_of_its_begin_whatever_other_threads_do_meanwhile(
    tmp_path, call, background, synced, files_open
):
    rng, rows, fs = np.random.default_rng(0), {}, StoppedGets()
    with open_table(tmp_path, io="pread", fs=fs, background=background) as table:
        chunk_files_of(table).files_open_max = files_open
        table.save_snapshot("empty", {})
        put_random(table, rows, rng, 900)
        table.flush()
        if synced:  # Files are closed by those who wrote them.
            table.save_snapshot("s", {})
            table.delete_snapshot("s")
        begun, now = dict(rows), dict(rows)
        with get_in_progress(table, fs, begun) as results:
            MEANWHILE[call](table, now, rng)
            overwrite(table, now, rng)  # Extents are used again.
        assert results == [list(begun.values())]
        if call != "compact":
            check(table, now)
        table.clear()
        for info in table.snapshots():
            table.delete_snapshot(info.name)
        assert os.listdir(tmp_path / "chunks") == []


def waits_for_reads(thread):
    """Whether the thread waits until the read of another thread has ended."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("block_reader.py"):
            return True
        frame = frame.f_back
    return False


def started(call, name):
    """A thread that runs a call, which waits for the read of another thread."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    while not waits_for_reads(thread):
        assert thread.is_alive()
        time.sleep(0.001)
    return thread


def test_a_close_waits_for_the_disk(tmp_path):
    rng, rows, fs = np.random.default_rng(0), {}, StoppedGets()
    table = open_table(tmp_path, io="pread", fs=fs)
    put_random(table, rows, rng, 900)
    table.flush()
    with get_in_progress(table, fs, rows) as results:
        thread = started(table.close, "closer")
    thread.join(600)
    assert results == [list(rows.values())]
    with pytest.raises(StorageError, match="closed"):
        got(table, rows)


def test_a_thread_that_reads_again_and_again_lets_others_read(tmp_path):
    rng, rows, fs, order = np.random.default_rng(0), {}, StoppedGets(), []

    def get(times, name):
        for _ in range(times):
            table.get(table_U, id_U, np.empty((len(id_U), table.row_width), np.float32))
            order.append(name)

    with open_table(tmp_path, io="pread", fs=fs) as table:
        put_random(table, rows, rng, 900)
        table.flush()
        table_U, id_U = keys_of(rows)
        fs.go_on.clear()
        often = threading.Thread(target=lambda: get(10, "often"), name="getter", daemon=True)
        often.start()
        assert fs.reading.wait(600)
        once = started(lambda: get(1, "once"), "getter, too")
        fs.go_on.set()
        often.join(600)
        once.join(600)
        assert order.index("once") == 1


def test_a_thread_that_lets_others_go_first_goes_on_though_they_read_nothing(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    absent, out_1W = (np.zeros(1, np.int32), np.full(1, -1)), np.empty((1, 30), np.float32)
    with open_table(tmp_path, io="pread") as table:
        put_random(table, rows, rng, 900)
        table.flush()
        keys, out_UW = keys_of(rows), np.empty((len(rows), 30), np.float32)
        often = threading.Thread(target=lambda: [table.get(*keys, out_UW) for _ in range(1000)], daemon=True)
        often.start()
        for _ in range(6000):  # A call here seldom comes just where it matters.
            if not often.is_alive():
                break
            table.get(*absent, out_1W)
            time.sleep(0.0003)
        often.join(30)
        assert not often.is_alive()


def test_a_child_of_a_fork_that_did_not_wait_for_a_read_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(signals_deferred, "_FORK_PATIENCE", 0.1)
    rng, rows, fs = np.random.default_rng(0), {}, StoppedGets()
    with open_table(tmp_path, io="pread", fs=fs) as table:
        put_random(table, rows, rng, 900)
        table.flush()
        with get_in_progress(table, fs, rows) as results:
            child = in_child(lambda: "got no complete copy" in error_of(lambda: got(table, rows)))
            assert ended_well(child) is True
        assert results == [list(rows.values())]


def error_of(call):
    try:
        call()
    except ForkedProcessError as error:
        return str(error)
