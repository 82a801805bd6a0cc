"""Disk use of a job that trains and saves: bounded at every moment, for a bounded price in writes.

The oracle is an array of versions: a row holds its key and how often it was put. What is on disk is what was written to
files, counted by the file system, at its peak within each operation too.
"""

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis.stateful import invariant

from oneemb.kernels.threads import Threads
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.table import geometry
from oneemb.storage.table.chunk_files import ChunkFiles
from oneemb.storage.table.compaction import Compactor
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.persistent_table import PersistentTable
from tests.storage.test_persistent_table_states import TableMachine, run
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.inside import chunk_files_of
from tests.support.pairwise import diagonal
from tests.support.table_model import check

THREADS = Threads(1)
WIDTH, BLOCK = 16, 512
ROWS_A_BLOCK = BLOCK // (4 * WIDTH)
ROW_BYTES = (BLOCK + 4) / ROWS_A_BLOCK + 12
EXTENT_BYTES = 64 * BLOCK
HEADERS_BYTES = 4096 + 128


class CountedDisk(FaultyFileSystem):
    """Knows the bytes of all chunk files, their peak, and what was written to them."""

    def __init__(self):
        super().__init__()
        self.bytes_of, self.path_of, self.written, self.now, self.peak = {}, {}, 0, 0, 0

    def create(self, path, *, direct=False):
        file = super().create(path, direct=direct)
        if "/chunks/" in path and path.endswith((".rows", ".keys")):
            # Of a chunk's two files, as many bytes are not counted as its headers have.
            self.path_of[file], self.bytes_of[path] = path, -4096 if path.endswith(".rows") else -128
            self.now += self.bytes_of[path]
        return file

    def write(self, file, data, offset):
        super().write(file, data, offset)
        path = self.path_of.get(file)
        if path is not None:
            size = memoryview(data).nbytes
            header = 4096 if path.endswith(".rows") else 128
            with self._guard:
                more = max(0, offset + size - header - self.bytes_of[path])
                self.bytes_of[path] += more
                self.now += more
                self.written += size
                self.peak = max(self.peak, self.now)

    def take_peak(self):
        """Most bytes since the last call."""
        with self._guard:
            peak, self.peak = self.peak, self.now
            return peak

    def close(self, file):
        super().close(file)
        self.path_of.pop(file, None)

    def sync(self, file):
        super().sync(file)
        self.calls.clear()

    def remove(self, path):
        super().remove(path)
        with self._guard:
            self.now -= self.bytes_of.pop(path, 0)


class SlowRemovals(CountedDisk):
    """Takes longer to remove a file than to write one."""

    def remove(self, path):
        time.sleep(0.02)
        super().remove(path)


class Job:
    """A table, what it holds, and what it may cost."""

    def __init__(self, keys, amplification=2.0, background=False, disk=None):
        self.disk, self.amplification = disk or CountedDisk(), amplification
        self.table = PersistentTable.open(
            "/t", row_width=WIDTH, physical_block_size=BLOCK, chunk_bytes=1 << 24, threads=THREADS, fs=self.disk,
            max_space_amplification=amplification, background=background,
        )  # fmt: skip
        self.version_K, self.kept, self.rows_put, self.position = np.zeros(0, np.int64), {}, 0, 0
        self.grow(keys)

    def grow(self, keys):
        first = len(self.version_K)
        self.version_K = np.append(self.version_K, np.zeros(keys, np.int64))
        self.put(np.arange(first, first + keys))

    def put(self, id_N, batch=700):
        for begin in range(0, len(id_N), batch):
            id_U = np.unique(id_N[begin : begin + batch])
            self.version_K[id_U] += 1
            self.table.put(np.zeros(len(id_U), np.int32), id_U, rows_of(id_U, self.version_K[id_U]))
            self.rows_put += len(id_U)
            self.check_bound(f"put of {len(id_U)}")

    def save(self, name):
        before = dict(self.kept)
        self.table.save_snapshot(name, {}, overwrite=True)
        self.kept[name] = (len(self), self.version_K.copy())
        self.check_bound(f"save of {name}", kept=before)
        self.check_bound(f"save of {name}")

    def clear(self):
        self.table.clear()
        self.version_K = np.zeros(0, np.int64)
        self.disk.peak = self.disk.now

    def delete(self, name):
        self.table.delete_snapshot(name)
        del self.kept[name]

    def __len__(self):
        return int(np.count_nonzero(self.version_K))

    def bound(self, kept):
        garbage = min(0.3, self.amplification - 1)
        live = len(self) * ROW_BYTES
        saved = sum(rows for rows, _ in kept.values()) * ROW_BYTES
        chunk = max(1, int(live // ROW_BYTES) // (16 * 64 * ROWS_A_BLOCK)) * 64 * ROWS_A_BLOCK * ROW_BYTES
        return max(self.amplification * live, (1 + garbage) * live + saved) + (2 + len(kept)) * chunk

    def check_bound(self, what, kept=None):
        peak = self.disk.take_peak()
        bound = self.bound(self.kept if kept is None else kept)
        assert peak <= bound, f"{what}: {peak} bytes on disk, {bound} allowed; {self.table.stats()}"

    def check_rows(self, id_N):
        out_UW = np.zeros((len(id_N), WIDTH), np.float32)
        missing_U = self.table.get(np.zeros(len(id_N), np.int32), id_N, out_UW)
        assert not missing_U.any() and len(self.table) == len(self)
        assert np.array_equal(out_UW, rows_of(id_N, self.version_K[id_N]))

    def check_all(self):
        """Every row now and in every snapshot; the table holds the last one's rows afterwards."""
        self.check_rows(np.arange(len(self.version_K)))
        for name, (rows, version_K) in sorted(self.kept.items()):
            self.table.load_snapshot(name)
            self.version_K = version_K.copy()
            self.check_rows(np.arange(rows))
        self.disk.peak = self.disk.now

    def ids(self, pattern, share, rng):
        """Keys whose number is this share of all."""
        keys = len(self.version_K)
        size = int(share * keys)
        if pattern == "uniform":
            return rng.integers(0, keys, size)
        if pattern == "each once":
            return np.concatenate([rng.permutation(keys), rng.permutation(keys)])[:size]
        if pattern == "scan":
            self.position += size
            return (self.position - size + np.arange(size)) % keys
        return (keys * rng.random(size) ** 3).astype(np.int64) * 7919 % keys  # "popular"

    def write_amplification(self, since=(0, 0)):
        self.table.flush()
        return (self.disk.written - since[0]) / ((self.rows_put - since[1]) * ROW_BYTES)


PATTERNS = ["uniform", "each once", "scan", "popular"]


def rows_of(id_U, version_U):
    """Rows that tell their key and version."""
    row_UW = np.zeros((len(id_U), WIDTH), np.float32)
    row_UW[:, 0], row_UW[:, 1], row_UW[:, -1] = id_U, version_U, 1
    return row_UW


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    monkeypatch.setattr(geometry, "_EXTENT_BYTES", EXTENT_BYTES)


@pytest.mark.parametrize(("kept", "background"), diagonal([1, 3], [False, True]))
@pytest.mark.parametrize("saves", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_disk_use_stays_bounded_over_saves_of_any_pattern(saves, kept, background):
    rng = np.random.default_rng(saves + kept)
    job = Job(9000, background=background)
    for n in range(saves):
        job.put(job.ids(rng.choice(PATTERNS), rng.random(), rng))
        if n % 10 == 5:
            job.grow(500)  # a burst of new rows
        job.save(f"s{n % kept}")
        job.check_rows(rng.permutation(len(job.version_K))[:300])
        if n % 100 == 39:
            job.check_all()
    assert job.write_amplification() < 2
    assert job.table.stats()["rows_moved"] > 0
    job.check_all()
    job.table.close()


def test_puts_wait_for_removals_that_leave_no_room():
    rng, job = np.random.default_rng(0), Job(9000, background=True, disk=SlowRemovals())
    for n in range(6):
        job.put(job.ids("scan", 2.0, rng))
        job.save(f"s{n}")
        if n:
            job.delete(f"s{n - 1}")
    job.check_all()
    job.table.close()


class JobBesideSaves(Job):
    """A job whose table another thread saves while it puts. `kept` has the snapshot that is being saved, too."""

    def __init__(self, keys, **options):
        self.put_K = np.zeros(0, np.int64)
        """Versions of the rows that are in the table; `version_K` has those of a put that is under way, too."""
        self.bound_before = 0
        """Greatest bound since the last check: a save may have ended since the disk was fullest."""
        super().__init__(keys, **options)

    def bound(self, kept):
        now = super().bound(dict(kept))
        bound, self.bound_before = max(now, self.bound_before), now
        return bound

    def put(self, id_N, batch=700):
        for begin in range(0, len(id_N), batch):
            super().put(id_N[begin : begin + batch])
            self.put_K = self.version_K.copy()

    def save_often(self, saves, kept, rng):
        """Save in the calling thread, `saves` times; returns {name: (least, greatest versions of the rows)}."""
        versions = {}
        for n in range(saves):
            name, before_K = f"s{n % kept}", self.put_K
            self.kept["saving"] = (len(self.version_K), None)
            self.bound_before = max(self.bound_before, super().bound(dict(self.kept)))
            self.table.save_snapshot(name, {}, overwrite=True)
            versions[name] = before_K, self.version_K.copy()
            self.kept[name] = (len(self.version_K), None)
            del self.kept["saving"]
            time.sleep(rng.random() * 0.02)
        return versions


@pytest.mark.parametrize(
    "saves, kept", [(12, 1), *(pytest.param(500, kept, marks=pytest.mark.slow) for kept in (1, 3))]
)
def test_disk_use_stays_bounded_while_another_thread_saves(saves, kept):
    rng = np.random.default_rng(saves + kept)
    job = JobBesideSaves(9000, background=True)
    with ThreadPoolExecutor(1) as beside:
        saving = beside.submit(job.save_often, saves, kept, np.random.default_rng(kept))
        while not saving.done():
            job.put(job.ids(rng.choice(PATTERNS), rng.random(), rng))
            job.check_rows(rng.permutation(len(job.version_K))[:300])
            if rng.random() < 0.1 and len(job.version_K) < 20000:
                job.grow(500)
    job.put(job.ids("uniform", 1, rng))
    job.check_rows(np.arange(len(job.version_K)))
    assert job.table.stats()["rows_moved"] > 0
    for name, (least_K, greatest_K) in saving.result().items():
        job.table.load_snapshot(name)
        rows = len(job.table)
        out_UW = np.zeros((rows, WIDTH), np.float32)
        assert not job.table.get(np.zeros(rows, np.int32), np.arange(rows), out_UW).any()
        assert np.array_equal(out_UW, rows_of(np.arange(rows), out_UW[:, 1]))
        assert len(least_K) <= rows <= len(greatest_K)
        assert np.all(out_UW[: len(least_K), 1] >= least_K) and np.all(out_UW[:, 1] <= greatest_K[:rows])
    job.table.close()


@pytest.mark.parametrize(
    ("pattern", "share", "most"),
    [
        ("uniform", 0.05, 3.1), ("uniform", 0.2, 2.6), ("uniform", 1, 1.8), ("uniform", 4, 2.2), ("popular", 0.5, 2.2),
        ("each once", 0.2, 2.5), ("each once", 1, 1.2), ("each once", 2, 1.8), ("scan", 0.3, 1.2),
    ],
)  # fmt: skip
def test_rows_are_written_so_often_at_most(pattern, share, most):
    rng, since, saves = np.random.default_rng(0), (0, 0), max(6, int(4 / share))
    job = Job(9000)
    for n in range(saves):
        if n == saves // 3:  # The first saves find a table that never was cleaned.
            since = (job.disk.written, job.rows_put)
        job.put(job.ids(pattern, share, rng))
        job.save("s")
    assert job.write_amplification(since) < most
    job.check_all()


@pytest.mark.parametrize("amplification", [1.2, 2.0, 3.0])
def test_many_puts_after_many_small_saves_keep_the_bound(amplification):
    # Small saves leave as much garbage in the chunks they hold as they may; then every row is overwritten, many times.
    rng, job = np.random.default_rng(0), Job(9000, amplification)
    for _ in range(20):
        job.put(job.ids("uniform", 0.05, rng))
        job.save("s")
    job.put(job.ids("uniform", 5, rng))
    job.save("s")
    job.put(job.ids("each once", 2, rng))
    job.check_all()


def test_without_cleaning_at_saves_the_bound_is_broken(monkeypatch):
    monkeypatch.setattr(Compactor, "clean_for_save", lambda self, name: None)
    rng, job = np.random.default_rng(0), Job(9000)
    with pytest.raises(AssertionError, match="allowed"):
        for _ in range(60):
            job.put(job.ids("uniform", 0.2, rng))
            job.save("s")


@pytest.mark.parametrize(("amplification", "garbage"), [(2.0, 0.24), (4.0, 1.94)])
def test_a_snapshot_that_is_left_alone_holds_no_more_garbage_than_compaction_promises(amplification, garbage):
    rng, job = np.random.default_rng(0), Job(9000, amplification)
    for n in range(12):
        job.put(job.ids("uniform", 0.3, rng))
        job.save(f"s{n % 4}")
    for name in ("s1", "s2", "s3"):
        job.delete(name)
    job.clear()
    rows, _ = job.kept["s0"]
    assert job.disk.now <= ((1 + garbage) * rows + 2 * 64 * ROWS_A_BLOCK) * ROW_BYTES


def test_compacting_on_demand_frees_what_it_says_and_nothing_of_a_snapshot():
    rng, job = np.random.default_rng(0), Job(9000, amplification=4.0)
    job.save("s")
    for _ in range(3):
        job.put(job.ids("uniform", 0.5, rng))
    job.table.flush()
    before = job.table.stats()
    result = job.table.compact()
    after = job.table.stats()
    assert result.bytes_freed == before["disk_bytes"] - after["disk_bytes"] > 0
    assert after["snapshot_bytes"] == before["snapshot_bytes"]
    assert job.table.compact().bytes_freed == 0, "there is nothing left that can be freed now"
    job.check_all()


@pytest.mark.parametrize("rows", [300, 9000, 40000])
def test_chunks_are_a_sixteenth_of_the_table_and_memory_follows_what_is_on_disk(rows):
    rng, job = np.random.default_rng(0), Job(rows)
    for _ in range(4):
        job.put(job.ids("uniform", 0.7, rng))
        job.save("s")
    chunks, stats = list(chunk_files_of(job.table).chunks.values()), job.table.stats()
    most = max(64, rows // ROWS_A_BLOCK // 16)
    assert most // 2 <= max(chunk.blocks for chunk in chunks) <= most or len(chunks) == 1
    assert len(chunks) <= 5 * 16
    blocks = sum(chunk.blocks for chunk in chunks)
    # A bit a row, 4 bytes a block, 16 an extent, of removed chunks too; half of it for growth; at least 32 extents.
    bytes_a_block = ROWS_A_BLOCK / 8 + 4 + 16 / 64
    assert stats["memory_bytes"] - stats["index_bytes"] <= max(32 * 64, 1.5 * (1.5 * blocks + 2 * most)) * bytes_a_block
    job.check_all()


def test_a_table_that_shrinks_writes_smaller_chunks_again():
    rng, job = np.random.default_rng(0), Job(40000)
    job.clear()
    job.grow(2000)
    job.put(job.ids("uniform", 3, rng))
    job.table.flush()
    assert max(chunk.blocks for chunk in chunk_files_of(job.table).chunks.values()) == 64
    job.check_rows(np.arange(2000))


def test_extents_are_neighbours_of_one_chunk_and_are_used_again():
    rng, model = np.random.default_rng(0), {}
    disk = FaultyFileSystem()
    disk.make_directories("/t")
    files = ChunkFiles(disk, "/t", 0, False)
    live = LiveRows(geometry.make_geometry(WIDTH, BLOCK, 1 << 24), files, functools.partial(CompactIndex, THREADS))
    per_extent, taken = live.geometry.blocks_per_extent, []
    for _ in range(400):
        if model and rng.random() < 0.45 or len(model) > 40:
            chunk = list(model)[rng.integers(len(model))]
            taken = [extent for extent in taken if extent not in model[chunk]]
            del model[chunk]
            live.remove(chunk)
        else:
            chunk, blocks = files.create(live.geometry), int(rng.integers(1, 6 * per_extent))
            size, extents = -(-blocks // per_extent), len(live.first_E)
            fits = (n for n in range(extents) if {*range(n, n + size)}.isdisjoint(taken) and n + size <= extents)
            live.add(chunk, blocks)
            first = live.first_block(chunk) // per_extent
            assert first == next(fits, first)
            model[chunk] = set(range(first, first + size))
        taken = [extent for extents in model.values() for extent in extents]
        assert len(taken) == len(set(taken)) and set(live.dead_chunks()) == set(model)
        for chunk, extents in model.items():
            assert all(live.chunk_in(extent) is chunk for extent in extents)
    assert len(live.first_E) <= 3 * 40 * 3.5 and set(np.flatnonzero(live.first_E >= 0)) == set(taken)


def test_a_save_tells_of_a_damaged_chunk_once_and_the_next_one_is_made():
    rng, job = np.random.default_rng(0), Job(9000)
    job.save("s")
    path = sorted(p for p in job.disk.entries if p.endswith(".rows"))[0]
    job.put(job.ids("uniform", 0.7, rng))
    job.disk.entries[path].now[4096 + 63 :: BLOCK] = bytes(len(job.disk.entries[path].now[4096 + 63 :: BLOCK]))
    with pytest.raises(CorruptTableError, match=path):
        job.save("s")
    assert [info.rows for info in job.table.snapshots()] == [9000]
    job.save("s")
    job.put(job.ids("uniform", 0.1, rng))
    job.save("s")


def test_a_snapshot_of_less_of_a_chunk_than_another_has_is_loaded_and_saved_again():
    rng, job = np.random.default_rng(0), Job(40000)
    for n in range(12):
        job.put(job.ids("scan", 0.01, rng))  # A chunk has room for 2,048 rows, in 4 extents.
        job.save(f"s{n}")
    saved = {name: version_K for name, (_, version_K) in job.kept.items()}
    for n in range(12):
        job.table.load_snapshot(f"s{n}")
        job.version_K = saved[f"s{n}"].copy()
        job.table.save_snapshot("again", {}, overwrite=True)
        job.table.load_snapshot("again")
        job.check_rows(np.arange(40000))
    job.table.close()


class ManySlotsMachine(TableMachine):
    """Chunks of many extents, half as large as the table."""

    def open(self):
        self.table = PersistentTable.open(
            "/t", row_width=self.row_width, physical_block_size=self.block, chunk_bytes=1 << 22, threads=THREADS,
            background=self.beside, fs=self.fs,
        )  # fmt: skip

    @invariant()
    def holds_what_the_dict_holds(self):
        if hasattr(self, "table"):
            check(self.table, self.rows, batch=50)


def test_any_sequence_of_operations_agrees_with_a_dict_with_chunks_of_many_extents(monkeypatch):
    monkeypatch.setattr(geometry, "_EXTENT_BYTES", 1)
    monkeypatch.setattr(geometry, "_CHUNKS_MIN", 2)
    run(ManySlotsMachine, examples=25, steps=30)
