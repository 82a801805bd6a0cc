"""The persistent table beside RocksDB and LMDB, and beside the disk itself.

    python benchmarks/bench_persistent_table.py [--rows 4000000] [--path DIR] [--blocks 512 4096] [--peers rocksdb lmdb]

Rows of 64 floats, batches of 8,192 different keys out of all of them in random order. Every round runs each system
and the raw disk in turn, so a slow moment of the machine hurts all of them. Figures are medians over the rounds.

    append               every row once, to a table on disk that is flushed and synced at the end, all keys in its index
    read                 get a batch; the files were pushed out of the page cache before each round of each system
    read-modify-append   get a batch, add one, put it
    save, load           a snapshot; its raw limit is to write (and sync), and to read, as many bytes as its index has
                         (keys files and snapshot file) in one run; loads are over loaded rows, files out of the cache
    load, processor      seconds of all cores for a million rows
    index                bytes of memory a key, at rest and at the peak of a load over loaded rows
    choice of a chunk    milliseconds in which compaction chooses the chunk that it moves next, among 8,192 chunks of
                         a table with 1 TiB of live rows, without reading or writing
    put                  20,000 different keys, drawn anew for each put, while compaction makes room: median, 99th
                         percentile and longest of the puts, alone and with gets of a batch beside them; and of the gets

With `--former`, or a file of earlier results at its default, figures stand beside the former ones.

With `--limit-mb N` nothing is compared: the program writes the rows and reads a tenth of them, each checked, and may
allocate N MiB beyond what Python and compiled code take (RLIMIT_DATA). 100 million rows, 28 GB of disk:

    python benchmarks/bench_persistent_table.py --rows 100000000 --limit-mb 2048

With `--index-memory-mb N` the index of oneemb's table may take N MiB, and the rest of the index is on the disk; a
case says how many blocks of the index are read for a row.

With `--index-sizes N ...` nothing is compared either: the program fills an index that is wholly on the disk with each
number of keys, without rows, and prints bytes of memory and disk a key, bytes read and written for each key that was
put, and blocks read for a known and an unknown key.

The raw disk: sequential direct writes of 4 MiB; direct reads of the same block size at the same depth, 128, by the
same Linux AIO calls without checks and copies: as many different blocks a batch as it has rows, drawn beforehand from
as many as the table has, one batch after the other.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from _machine import interleaved, load_results, machine, save_results, table

from oneemb.kernels.aio import AIO_NUMBERS
from oneemb.kernels.compact_index import BLOCK_BYTES
from oneemb.kernels.threads import Threads
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.fs import LocalFileSystem, aligned_bytes
from oneemb.storage.table.aio_reader import AioReader, open_reader
from oneemb.storage.table.block_reader import ReadPlan
from oneemb.storage.table.chunk_files import ChunkFile
from oneemb.storage.table.cold_file import ColdFile
from oneemb.storage.table.compaction import Compactor
from oneemb.storage.table.geometry import Geometry, make_geometry
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.row_writer import RowWriter

WIDTH, BATCH, DEPTH, RUN_BYTES = 64, 8192, 128, 4 << 20
BATCHES_A_ROUND = 4
PUT_ROWS = 20_000
FORMER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "persistent_table.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--path", default="bench_persistent_table.tmp", help="a directory on the disk to measure")
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 4096], choices=[512, 4096])
    parser.add_argument("--peers", nargs="*", default=["rocksdb", "lmdb"], choices=["rocksdb", "lmdb"])
    parser.add_argument(
        "--puts", type=int, default=600, help="puts over all rows, alone and again with gets beside them"
    )
    parser.add_argument("--limit-mb", type=int, help="write and read rows with so much memory, and compare nothing")
    parser.add_argument("--index-memory-mb", type=int, help="memory of the index; the rest of it is on the disk")
    parser.add_argument("--index-sizes", type=int, nargs="+", help="numbers of keys of an index on the disk")
    parser.add_argument("--out", help="file of the results")
    parser.add_argument("--former", default=FORMER, help="file of earlier results")
    arguments = parser.parse_args()
    former = read_former(arguments.former)  # Before `--out` takes its place.
    print(json.dumps({"machine": machine(), "rows": arguments.rows, "row_bytes": WIDTH * 4}), flush=True)
    shutil.rmtree(arguments.path, ignore_errors=True)
    os.makedirs(arguments.path)
    cases = []
    try:
        if arguments.limit_mb is not None:
            print(json.dumps(limited(arguments.path, arguments.rows, arguments.limit_mb, _bytes(arguments))))
            return
        for keys in arguments.index_sizes or ():
            print(json.dumps(index_on_disk(arguments.path, keys, _bytes(arguments))), flush=True)
        if arguments.index_sizes:
            return
        for block in arguments.blocks:
            cases += measure(arguments, block)
    finally:
        shutil.rmtree(arguments.path, ignore_errors=True)
    save_results(arguments.out, machine() | {"rows": arguments.rows, "row_bytes": WIDTH * 4}, cases)
    head = ["block", "case", "oneemb", "former", "times as good", "raw disk", "of raw", *arguments.peers]
    print(table(head, [line(case, former, arguments.peers) for case in cases]))


def _bytes(arguments: argparse.Namespace) -> int | None:
    """`--index-memory-mb` in bytes."""
    return None if arguments.index_memory_mb is None else arguments.index_memory_mb << 20


def index_on_disk(path: str, keys: int, limit_bytes: int | None) -> dict[str, float]:
    """Put so many keys into an index, and find some. Returns what that took."""
    threads = Threads()
    file = ColdFile(
        LocalFileSystem(), path, open_reader("auto", LocalFileSystem(), path, BLOCK_BYTES, threads), threads
    )
    index, begun, table_N = ColdIndex(threads, file, limit_bytes or 1), time.process_time(), np.zeros(1 << 17, np.int32)
    peak, before = 0, file.blocks_read
    for begin in range(0, keys, len(table_N)):
        id_N = np.arange(begin, min(begin + len(table_N), keys)) * 7919
        index.put(table_N[: len(id_N)], id_N, id_N // 7919)
        peak = max(peak, index.nbytes)
    result = {
        "keys": keys, "index_bytes_a_key": index.nbytes / keys, "peak_bytes_a_key": peak / keys,
        "disk_bytes_a_key": file.disk_bytes / keys, "cpu_s_a_million_puts": (time.process_time() - begun) / keys * 1e6,
        "bytes_read_a_put": (file.blocks_read - before) * BLOCK_BYTES / keys,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for name, step in (("known", 7919), ("unknown", 7919 << 30)):
        id_N, before = (rng.choice(keys, 50_000) + 1) * step - (7919 if step == 7919 else 0), file.blocks_read
        assert ((index.find(table_N[:50_000], id_N) >= 0) == (step == 7919)).all()
        result[f"blocks_read_for_a_{name}_key"] = (file.blocks_read - before) / 50_000
    file.close()
    return result


def limited(path: str, rows: int, limit_mb: int, index_bytes: int | None) -> dict[str, float]:
    """Write rows and read a tenth of them with at most `limit_mb` MiB of memory. Returns what that took."""
    begun = time.perf_counter()

    def run(path: str, rows: int) -> dict[str, float]:
        rng = np.random.default_rng(0)
        with PersistentTable.open(path, row_width=WIDTH, threads=Threads(), index_memory_bytes=index_bytes) as table:
            for begin in range(0, rows, PUT_ROWS):
                id_N = np.arange(begin, min(begin + PUT_ROWS, rows)) * 7919
                row_NW = np.broadcast_to((id_N % 9973)[:, None].astype(np.float32), (len(id_N), WIDTH))
                table.put(np.zeros(len(id_N), np.int32), id_N, np.ascontiguousarray(row_NW))
            table.flush()
            out_UW = np.empty((BATCH, WIDTH), np.float32)
            for _ in range(-(-rows // (10 * BATCH))):
                id_U = rng.integers(0, 2 * rows, BATCH) * 7919  # Half of them are unknown.
                missing_U = table.get(np.zeros(BATCH, np.int32), id_U, out_UW)
                assert np.array_equal(missing_U, id_U >= rows * 7919)
                assert (out_UW[~missing_U] == (id_U[~missing_U] % 9973)[:, None]).all()
            stats = table.stats()
            return {
                name: stats[name] for name in ("rows", "index_bytes", "index_disk_bytes", "memory_bytes", "disk_bytes")
            }

    run(f"{path}/small", PUT_ROWS)  # Compiles the loops.
    before = _status("VmData"), _status("VmRSS")
    limit = before[0] + (limit_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    result = run(f"{path}/large", rows)
    return result | {
        "limit_mb": limit_mb, "index_bytes_a_key": result["index_bytes"] / rows,
        "peak_mb_beyond_start": (_status("VmHWM") - before[1]) / 2**20, "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def _status(name: str) -> int:
    """Bytes of a line of this process's /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))


def read_former(path: str) -> dict[tuple[int, str], float]:
    """{(block, case): figure} of a file of earlier results; empty if there is none."""
    if not os.path.exists(path):
        return {}
    return {(case["block"], case["case"]): case["oneemb"] for case in load_results(path)}


def line(case: dict[str, Any], former: dict[tuple[int, str], float], columns: list[str]) -> list[str]:
    unit, before = case["unit"], former.get((case["block"], case["case"]))
    than_before = ["-", "-"]
    if before:
        times = case["oneemb"] / before if unit.endswith("/s") else before / case["oneemb"]
        than_before = [f"{before:,.5g} {unit}", f"{times:.2f}"]
    peers = [f"{case['peers'][peer]:,.5g} {unit}" if peer in case["peers"] else "-" for peer in columns]
    raw = f"{case['raw']:,.5g} {unit}" if case["raw"] else "-"
    of_raw = f"{case['of_raw']:.2f}" if case["raw"] else "-"
    return [str(case["block"]), case["case"], f"{case['oneemb']:,.5g} {unit}", *than_before, raw, of_raw, *peers]


def measure(arguments: argparse.Namespace, block: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    id_N = rng.permutation(arguments.rows).astype(np.int64) * 7919
    disk = RawDisk(arguments.path, block)
    systems: dict[str, Any] = {"oneemb": Oneemb(arguments.path, block, _bytes(arguments))}
    for name in arguments.peers:
        try:
            systems[name] = PEERS[name](arguments.path, arguments.rows)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    cases: list[dict[str, Any]] = []

    def case(name: str, unit: str, value: dict[str, float], raw_value: float | None, **more: Any) -> None:
        peers = {peer: value[peer] for peer in systems if peer != "oneemb" and peer in value}
        faster = unit.endswith("/s")
        of_raw = value["oneemb"] / raw_value if raw_value else None
        ratios = {peer: value["oneemb"] / other if faster else other / value["oneemb"] for peer, other in peers.items()}
        cases.append(
            {"block": block, "case": name, "unit": unit, "oneemb": value["oneemb"], "raw": raw_value, "of_raw": of_raw,
             "peers": peers, "times_as_fast_as": ratios, **more}
        )  # fmt: skip
        print(json.dumps(cases[-1]), flush=True)

    # Appending fills each system once, in slices. The raw disk's take turns with oneemb's; peers come after, because
    # they go on writing behind their own slices.
    slices = np.array_split(id_N, arguments.rounds)
    for name, known in (("append, rows known beforehand", True), ("append", False)):
        one = systems["oneemb"] = systems["oneemb"].again(arguments.rows if known else 0)
        spent = interleaved(
            {
                "raw": lambda n: disk.append(len(slices[n]) * WIDTH * 4),
                "oneemb": lambda n, s=one: s.append(slices[n], last=n == len(slices) - 1),
            },
            len(slices), warm=0,
        )  # fmt: skip
        if not known:
            for peer, system in systems.items():
                if peer != "oneemb":
                    spent[peer] = [seconds_of(lambda s=system, ids=ids: s.append(ids)) for ids in slices]
        rates = {name: arguments.rows / sum(seconds) for name, seconds in spent.items()}
        case(name, "rows/s", rates, rates["raw"])

    def batches() -> list[np.ndarray]:
        return [rng.choice(id_N, BATCH, replace=False) for _ in range(BATCHES_A_ROUND)]

    def rate(spent: dict[str, list[float]]) -> dict[str, float]:
        return {name: BATCHES_A_ROUND * BATCH / statistics.median(seconds) for name, seconds in spent.items()}

    for name, update in (("read", False), ("read-modify-append", True)):
        blocks_before, got_before = (one.table.stats()[name] for name in ("index_blocks_read", "rows_got"))
        rounds = [batches() for _ in range(arguments.rounds + 1)]
        table_blocks = arguments.rows * WIDTH * 4 // block
        raw_rounds = [[disk.blocks(table_blocks) for _ in range(BATCHES_A_ROUND)] for _ in rounds]
        calls: dict[str, Callable[[int], Any]] = {
            "raw": lambda n, r=raw_rounds: [disk.read(block_Q) for block_Q in r[n]]
        }
        for peer, system in systems.items():
            calls[peer] = lambda n, s=system, r=rounds, u=update: [s.step(batch, u) for batch in r[n]]
        for system in systems.values():
            system.put_pending()
        spent = cold(arguments.path, calls, arguments.rounds)
        rates = rate(spent)
        of_raw = statistics.median(raw / ours for raw, ours in zip(spent["raw"], spent["oneemb"], strict=True))
        case(name, "rows/s", rates, rates["raw"], of_raw_by_round=of_raw)
        if arguments.index_memory_mb is not None:
            stats = one.table.stats()
            blocks = (stats["index_blocks_read"] - blocks_before) / (stats["rows_got"] - got_before)
            case(f"{name}, blocks of the index", "a row", {"oneemb": blocks}, None)
        if not update:
            again = [rounds[0]] * 4
            calls = {p: lambda n, s=system, r=again: [s.step(b, False) for b in r[n]] for p, system in systems.items()}
            case("read the same again", "rows/s", rate(interleaved(calls, 3, warm=1)), None)

    one = systems["oneemb"]
    saves, raw_writes, loads, raw_reads, processor, growths = [], [], [], [], [], []
    for n in range(arguments.rounds):
        one.step(batches()[0], True)
        saves.append(seconds_of(lambda n=n: one.table.save_snapshot(f"s{n}", {})))
        index_bytes = one.index_bytes(f"s{n}")
        raw_writes.append(seconds_of(lambda size=index_bytes: disk.write_synced(size)))
        drop_from_cache(arguments.path)
        processor_before, resident_before = time.process_time(), one.reset_peak()
        loads.append(seconds_of(lambda n=n: one.table.load_snapshot(f"s{n}")))
        processor.append(time.process_time() - processor_before)
        growths.append(one.peak_bytes() - resident_before)
        raw_reads.append(seconds_of(disk.read_written))
        one.table.delete_snapshot(f"s{n}")
    more = {"index_bytes": index_bytes}
    case("save", "s", {"oneemb": statistics.median(saves)}, statistics.median(raw_writes), **more)
    case("load", "s", {"oneemb": statistics.median(loads)}, statistics.median(raw_reads), **more)
    million_rows = arguments.rows / 1e6
    case("load, processor", "s/million rows", {"oneemb": statistics.median(processor) / million_rows}, None)
    stats = one.table.stats()
    at_rest = stats["index_bytes"] / stats["rows"]
    case("index", "bytes/key", {"oneemb": at_rest}, None, io=stats["io"], depth=stats["read_depth"])
    peak = at_rest + statistics.median(growths) / stats["rows"]
    case("index, peak of a load", "bytes/key", {"oneemb": peak}, None)
    case("choice of a chunk", "ms", {"oneemb": 1e3 * statistics.median(one.choices(8192, arguments.rounds))}, None)
    for beside in (False, True):
        put_ms, get_ms = one.overwrite(id_N, arguments.puts, beside)
        for what, spent_ms in (("put beside gets" if beside else "put", put_ms), ("get beside puts", get_ms)):
            if spent_ms:
                for name, value in _spread(spent_ms).items():
                    case(f"{what}, {name}", "ms", {"oneemb": value}, None)
    for system in systems.values():
        system.close()
    return cases


def _spread(spent: list[float]) -> dict[str, float]:
    """Median, 99th percentile and longest."""
    return {"median": float(np.median(spent)), "p99": float(np.percentile(spent, 99)), "longest": max(spent)}


def cold(path: str, calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn, with the files of all systems out of the page cache before each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(-1, rounds):
        for name, call in calls.items():
            drop_from_cache(path)
            spent = seconds_of(lambda call=call, n=n: call(n + 1))
            if n >= 0:
                seconds[name].append(spent)
    return seconds


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def drop_from_cache(path: str) -> None:
    """Push every file below a path out of the system's cache."""
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                file = os.open(os.path.join(folder, name), os.O_RDONLY)
            except FileNotFoundError:
                continue  # a system that compacts in the background has just removed it
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class RawDisk:
    """What the disk does when nobody checks, copies or looks anything up."""

    def __init__(self, path: str, block: int):
        self.fs, self.block, self.path = LocalFileSystem(), block, path
        self.file = self.fs.create(f"{path}/raw-{block}", direct=True)
        self.small = f"{path}/raw-small-{block}"
        self.size = 0
        self.data = aligned_bytes(RUN_BYTES)
        self.data[:] = np.random.default_rng(0).integers(0, 256, RUN_BYTES, dtype=np.uint8)
        self.rng = np.random.default_rng(1)
        self.reader = AioReader(DEPTH)

    def append(self, size: int) -> None:
        end = self.size + size
        while self.size < end:
            self.fs.write(self.file, self.data, self.size)
            self.size += RUN_BYTES
        self.fs.sync(self.file)

    def blocks(self, of: int) -> np.ndarray:
        """The different blocks of one batch, in order."""
        return np.sort(self.rng.choice(of, BATCH, replace=False))

    def read(self, block_Q: np.ndarray) -> None:
        assert AIO_NUMBERS is not None
        size = len(block_Q)
        nothing = np.zeros(0, np.int64)
        geometry = Geometry(self.block // 4, self.block, 64)
        ones = np.ones(size, np.int64)
        plan = ReadPlan(geometry, nothing, nothing, block_Q, ones, np.zeros(size + 1, np.int64))
        out_UW, sum_B = np.empty((1, 1), np.float32), np.empty(1, np.uint32)
        self.reader.read(plan, np.full(size, self.file), block_Q * self.block, sum_B, out_UW)

    def write_synced(self, size: int) -> None:
        if os.path.exists(self.small):
            os.remove(self.small)
        file = os.open(self.small, os.O_WRONLY | os.O_CREAT)
        for begin in range(0, size, RUN_BYTES):
            os.write(file, self.data[: min(RUN_BYTES, size - begin)])
        os.fsync(file)
        os.close(file)

    def read_written(self) -> None:
        file = os.open(self.small, os.O_RDONLY)
        while os.readv(file, [self.data]):
            pass
        os.close(file)


class Oneemb:
    def __init__(self, path: str, block: int, index_bytes: int | None, expected_rows: int = 0):
        self.path, self.block, self.index_bytes_max = path, block, index_bytes
        self.table = PersistentTable.open(
            f"{path}/oneemb-{block}", row_width=WIDTH, physical_block_size=block, threads=Threads(),
            expected_rows=expected_rows, index_memory_bytes=index_bytes,
        )  # fmt: skip
        self.out_UW = np.empty((BATCH, WIDTH), np.float32)
        self.table_U = np.zeros(BATCH, np.int32)

    def append(self, id_N: np.ndarray, last: bool = True) -> None:
        rows = np.ones((BATCH, WIDTH), np.float32)
        for begin in range(0, len(id_N), BATCH):
            id_U = id_N[begin : begin + BATCH]
            self.table.put(self.table_U[: len(id_U)], id_U, rows[: len(id_U)])
        self.put_pending()
        if last:
            len(self.table)  # The index takes in keys that are still on their way.

    def step(self, id_U: np.ndarray, update: bool) -> None:
        missing = self.table.get(self.table_U, id_U, self.out_UW)
        assert not missing.any()
        if update:
            self.out_UW += 1
            self.table.put(self.table_U, id_U, self.out_UW)

    def overwrite(self, id_N: np.ndarray, puts: int, gets_beside: bool) -> tuple[list[float], list[float]]:
        """Milliseconds of each of `puts` puts, and of each get that a thread makes meanwhile."""
        rng, ended = np.random.default_rng(2), threading.Event()
        # Drawn beforehand: a draw in one thread would make the other wait.
        puts_U = [np.unique(rng.choice(id_N, PUT_ROWS)) for _ in range(puts)]
        gets_U = itertools.cycle([rng.choice(id_N, BATCH, replace=False) for _ in range(20 * gets_beside)])
        table_U, row_UW = np.zeros(PUT_ROWS, np.int32), np.ones((PUT_ROWS, WIDTH), np.float32)

        def get() -> list[float]:
            ms = []
            while gets_beside and not ended.is_set():
                ms.append(1e3 * seconds_of(partial(self.step, next(gets_U), False)))
            return ms

        with ThreadPoolExecutor(1) as beside:
            get_ms = beside.submit(get)
            try:
                put_ms = [
                    1e3 * seconds_of(partial(self.table.put, table_U[: len(id_U)], id_U, row_UW[: len(id_U)]))
                    for id_U in puts_U
                ]
            finally:
                ended.set()
        return put_ms, get_ms.result()

    def choices(self, chunks: int, rounds: int) -> list[float]:
        """Seconds of each choice of the next chunk to move, among so many full chunks that are half live."""
        # A table of its own: compaction of this one would count the chunks.
        path = f"{self.path}/choices-{self.block}"
        with PersistentTable.open(path, row_width=WIDTH, threads=Threads()) as table:
            geometry, files = make_geometry(WIDTH, self.block, 256 << 20), table._files
            live = LiveRows(geometry, files, partial(CompactIndex, Threads()))
            live._grow(chunks * geometry.blocks_per_chunk // geometry.blocks_per_extent)
            writer = RowWriter(live, files, Threads(), None)
            compactor = Compactor(files._fs, live, writer, table._store, table._store_lock, 2.0, None)
            for n in range(chunks):
                chunk = ChunkFile(1 << 40 | n, geometry, "", "")
                chunk.runs_bytes = geometry.disk_bytes(geometry.blocks_per_chunk)
                live.add(chunk, geometry.blocks_per_chunk)
            live.live_E[:] = np.random.default_rng(0).integers(0, geometry.rows_per_extent, len(live.live_E))
            seconds = [seconds_of(compactor._least_loose) for _ in range(rounds)]
        shutil.rmtree(path)
        return seconds

    def reset_peak(self) -> int:
        """Let the peak of this process's memory begin anew. Returns the bytes that are resident now."""
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return self.peak_bytes()

    def peak_bytes(self) -> int:
        with open("/proc/self/status") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

    def put_pending(self) -> None:
        self.table.flush()
        self.table._files.sync_all(self.table._files.chunks.values())

    def again(self, expected_rows: int) -> "Oneemb":
        """An empty table in place of this one, its loops compiled and loaded."""
        self.table.close()
        other = Oneemb(self.path, self.block, self.index_bytes_max, expected_rows)
        other.append(np.arange(BATCH))
        other.table.clear()
        return other

    def index_bytes(self, name: str) -> int:
        keys = sum(chunk.keys_bytes for chunk in self.table._files.chunks.values() if chunk.snapshots)
        return keys + os.path.getsize(self.table._store.files.path(name))

    def close(self) -> None:
        self.table.close()


class Rocks:
    def __init__(self, path: str, rows: int):
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.increase_parallelism(os.cpu_count())
        options.set_write_buffer_size(64 << 20)
        table_options = rocksdict.BlockBasedOptions()
        table_options.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table_options)
        self.rocksdict, self.path = rocksdict, f"{path}/rocksdb-{time.monotonic_ns()}"
        self.db = rocksdict.Rdict(self.path, options)

    def append(self, id_N: np.ndarray) -> None:
        row = np.ones(WIDTH, np.float32).tobytes()
        for begin in range(0, len(id_N), BATCH):
            self._write(id_N[begin : begin + BATCH], [row] * BATCH)
        self.db.flush()

    def step(self, id_U: np.ndarray, update: bool) -> None:
        keys = [key.tobytes() for key in id_U]
        rows = np.frombuffer(b"".join(self.db[keys]), np.float32).reshape(-1, WIDTH)
        if update:
            self._write(id_U, [row.tobytes() for row in rows + 1])

    def put_pending(self) -> None:
        self.db.flush()

    def close(self) -> None:
        self.db.close()

    def _write(self, id_U: np.ndarray, rows: list[bytes]) -> None:
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(id_U, rows, strict=False):
            batch.put(key.tobytes(), row)
        self.db.write(batch)


class Lmdb:
    def __init__(self, path: str, rows: int):
        import lmdb

        size = max(1 << 30, rows * WIDTH * 4 * 6)
        self.db = lmdb.open(f"{path}/lmdb-{time.monotonic_ns()}", map_size=size, sync=False, readahead=False)

    def append(self, id_N: np.ndarray) -> None:
        row = np.ones(WIDTH, np.float32).tobytes()
        for begin in range(0, len(id_N), BATCH):
            with self.db.begin(write=True) as transaction:
                transaction.cursor().putmulti([(key.tobytes(), row) for key in id_N[begin : begin + BATCH]])
        self.db.sync(True)

    def step(self, id_U: np.ndarray, update: bool) -> None:
        with self.db.begin(write=update, buffers=True) as transaction:
            got = transaction.cursor().getmulti([key.tobytes() for key in id_U])
            rows = np.frombuffer(b"".join(row for _, row in got), np.float32).reshape(-1, WIDTH)
            if update:
                keys = [bytes(key) for key, _ in got]
                transaction.cursor().putmulti(zip(keys, (row.tobytes() for row in rows + 1), strict=True))

    def put_pending(self) -> None:
        self.db.sync(True)

    def close(self) -> None:
        self.db.close()


PEERS: dict[str, Callable[[str, int], Any]] = {"rocksdb": Rocks, "lmdb": Lmdb}


if __name__ == "__main__":
    main()
