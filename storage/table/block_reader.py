"""Reads scattered rows from chunk files: reads the blocks, compares their checksums, and copies the rows out of them. A
failed read raises an error that names file, block and key.

A table looks the places up under its lock and releases the lock while the disk reads, so that puts and compaction go
on. Until the read has ended, the files of its chunks stay open and the extents of removed chunks stay taken; a second
read and a close of the table wait.

One request reads a run of neighbouring blocks, and requests are sorted by place, so that no block is read twice. Shape
letters: P places of rows, Q requests, B blocks of the table, X rows of an output.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oneemb.kernels.row_blocks import requests_deliver, requests_plan
from oneemb.kernels.threads import Threads, submit
from oneemb.storage.fs import FileSystem, aligned_bytes, storage_error
from oneemb.storage.locking.store_lock import StoreLock
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles
from oneemb.storage.table.chunk_scan import block_damage, reading
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.live_rows import LiveRows

# Blocks at most this far apart are read together: one larger read costs the device less than two.
_GAP_BYTES = 4096
REQUEST_BYTES_MAX = 64 << 10
_GROUP_BYTES = 8 << 20


class DamagedBlock(Exception):
    """The block that holds row `place_P[p]` of a `ReadPlan` is damaged. `data` holds the bytes that were read: fewer
    than a block at the end of the file."""

    def __init__(self, p: int, data: np.ndarray):
        super().__init__()
        self.p, self.data = p, data


@dataclass
class ReadPlan:
    """P places of rows in ascending order, and the Q requests that read them.

    Args:
        place_P, to_P: the sorted places, and for each place the row of the output to copy the row to.
        block_Q, blocks_Q: number of each request's first block, counted in the whole table, and its number of blocks.
        first_Q: [Q + 1]; request q reads the places first_Q[q] .. first_Q[q + 1] of `place_P`.
    """

    geometry: Geometry
    place_P: np.ndarray
    to_P: np.ndarray
    block_Q: np.ndarray
    blocks_Q: np.ndarray
    first_Q: np.ndarray

    @property
    def extent_Q(self) -> np.ndarray:
        """Number of the extent from which each request reads, in ascending order (see `Geometry`)."""
        return self.block_Q // self.geometry.blocks_per_extent

    def cut(self, begin: int, end: int) -> "ReadPlan":
        """A plan with the requests begin .. end only; `place_P` and `to_P` are not cut."""
        return ReadPlan(
            self.geometry, self.place_P, self.to_P, self.block_Q[begin:end], self.blocks_Q[begin:end],
            self.first_Q[begin : end + 1],
        )  # fmt: skip


def plan_reads(geometry: Geometry, place_N: np.ndarray, to_N: np.ndarray) -> ReadPlan:
    """Plan the requests that copy the row at place_N[n] to row to_N[n] of an output."""
    order = np.argsort(place_N)
    place_P, to_P = place_N[order], to_N[order]
    size = len(place_P)
    block_Q, blocks_Q, first_Q = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size + 1, np.int64)
    blocks_max = max(1, REQUEST_BYTES_MAX // geometry.block_bytes)
    gap_max = _GAP_BYTES // geometry.block_bytes
    requests = requests_plan(
        place_P, geometry.rows_per_block, geometry.blocks_per_extent, blocks_max, gap_max, block_Q, blocks_Q, first_Q
    )
    return ReadPlan(geometry, place_P, to_P, block_Q[:requests], blocks_Q[:requests], first_Q[: requests + 1])


class BlockReader(Protocol):
    """Reads blocks from chunk files in one way: `PreadReader` or `AioReader`."""

    name: str
    direct: bool
    """Whether the files must be opened for direct reads, which pass the system's page cache."""
    depth: int
    """Most reads in flight at once."""

    def read(
        self, plan: ReadPlan, file_Q: np.ndarray, offset_Q: np.ndarray, sum_B: np.ndarray, out_UW: np.ndarray
    ) -> None:
        """Copy the rows of the plan to rows `plan.to_P` of `out_UW`, and compare each block with its checksum in
        `sum_B`. Request q reads from offset offset_Q[q] of the open file file_Q[q].

        Raises:
            DamagedBlock: the checksum of a block does not match.
            OSError: the system could not read; `error.filename` is the number of the request.
        """

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class PreadReader:
    """A `BlockReader` by ordinary reads through the system's page cache, on `depth` threads. Works on every file
    system."""

    name = "pread"
    direct = False

    def __init__(self, fs: FileSystem, threads: Threads, depth: int = 16):
        self._fs, self._threads, self.depth = fs, threads, depth
        self._begin()

    def _begin(self) -> None:
        """Make the threads and the buffer of this process. A forked child needs new ones: it has no threads, and shares
        its parent's memory."""
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self.depth, thread_name_prefix="oneemb-read") if self.depth > 1 else None
        self._byte_N = np.empty(0, np.uint8)

    def read(
        self, plan: ReadPlan, file_Q: np.ndarray, offset_Q: np.ndarray, sum_B: np.ndarray, out_UW: np.ndarray
    ) -> None:
        if self._process != os.getpid():
            self._begin()
        try:
            self._read(plan, file_Q, offset_Q, sum_B, out_UW)
        except BaseException:
            self._byte_N = np.empty(0, np.uint8)  # Threads may still be reading into the old buffer.
            raise

    def _read(
        self, plan: ReadPlan, file_Q: np.ndarray, offset_Q: np.ndarray, sum_B: np.ndarray, out_UW: np.ndarray
    ) -> None:
        geometry = plan.geometry
        end_Q = np.cumsum(plan.blocks_Q) * geometry.block_bytes
        begin, done = 0, 0
        while begin < len(end_Q):
            end = max(begin + 1, int(np.searchsorted(end_Q, done + _GROUP_BYTES, side="right")))
            part = plan.cut(begin, end)
            byte_N = self._memory(int(end_Q[end - 1]) - done)
            at_Q = end_Q[begin:end] - part.blocks_Q * geometry.block_bytes - done
            self._fill(byte_N, part, begin, file_Q[begin:end], offset_Q[begin:end], at_Q)
            bad_Q = np.empty(len(at_Q), np.int64)
            self._threads.run(
                requests_deliver, len(at_Q), byte_N.view(np.uint64), at_Q // 8, part.block_Q, part.first_Q,
                part.place_P, part.to_P, geometry.rows_per_block, geometry.block_words, sum_B,
                out_UW.view(np.uint32), bad_Q, share_min=64,
            )  # fmt: skip
            if bad_Q.max(initial=-1) >= 0:
                q = int(np.argmax(bad_Q >= 0))
                p = int(bad_Q[q])
                skip = plan.place_P[p] // geometry.rows_per_block - part.block_Q[q]
                at = int(at_Q[q] + skip * geometry.block_bytes)
                raise DamagedBlock(p, byte_N[at : at + geometry.block_bytes])
            begin, done = end, int(end_Q[end - 1])

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()

    def _memory(self, size: int) -> np.ndarray:
        if len(self._byte_N) < size:
            self._byte_N = aligned_bytes(max(size, _GROUP_BYTES))
        return self._byte_N[:size]

    def _fill(
        self, byte_N: np.ndarray, part: ReadPlan, first: int, file_Q: np.ndarray, offset_Q: np.ndarray, at_Q: np.ndarray
    ) -> None:
        view = byte_N.data
        size_Q = part.blocks_Q * part.geometry.block_bytes

        def fill(begin: int, end: int) -> None:
            for q in range(begin, end):
                at, size = int(at_Q[q]), int(size_Q[q])
                try:
                    got = self._fs.read_into(int(file_Q[q]), view[at : at + size], int(offset_Q[q]))
                except OSError as error:
                    error.filename = first + q
                    raise
                byte_N[at + got : at + size] = 0

        shares = min(self.depth, len(at_Q) // 8)
        if shares <= 1 or self._pool is None:
            fill(0, len(at_Q))
            return
        bounds = [len(at_Q) * i // shares for i in range(shares + 1)]
        for future in [submit(self._pool, fill, bounds[i], bounds[i + 1]) for i in range(shares)]:
            future.result()


class RowReader:
    """Reads rows from the chunk files by their places, with one `BlockReader`, for one thread at a time.

    Args:
        store_lock: the lock of the table, which is released while the disk reads; None = only one thread uses the rows.
    """

    def __init__(self, blocks: BlockReader, files: ChunkFiles, store_lock: StoreLock | None = None):
        self._blocks, self._files, self._store_lock = blocks, files, store_lock
        self._requests = self._bytes = 0
        self.reading = False
        """Whether a thread reads without the lock of the table."""
        self._waiting = self._reader = 0  # Number of threads that wait, and the thread that has read last.

    def wait(self) -> None:
        """Wait, under the lock of the table, until the reads of other threads have ended. Threads that wait go before
        the thread that has read last."""
        assert self._store_lock is not None
        lock, me = self._store_lock.lock, threading.get_ident()
        while self.reading or (self._waiting and self._reader == me):
            try:
                self._waiting += 1
                lock.wait()
            finally:
                self._waiting -= 1
        if self._waiting:
            lock.notify_all()  # If this thread reads nothing, no read wakes a thread that only waits for its turn.

    def read(
        self, live: LiveRows, table_N: np.ndarray, id_N: np.ndarray, place_N: np.ndarray, to_N: np.ndarray,
        out_XW: np.ndarray,
    ) -> None:  # fmt: skip
        """Copy the row at place_N[n], whose key is (table_N[n], id_N[n]), to out_XW[to_N[n]]. Keys are for error texts.
        Call `wait` under the same hold of the lock before the places are looked up.

        Raises:
            CorruptTableError: the checksum of a block does not match, or a file is missing.
            StorageError: the system could not read.
        """
        geometry = live.geometry
        plan = plan_reads(geometry, place_N, to_N)
        # First extent of the chunk that each request reads: it identifies the chunk and the place where the chunk
        # begins.
        first_Q = live.first_E[plan.extent_Q]
        offset_Q = ROWS_BEGIN + (plan.block_Q - first_Q * geometry.blocks_per_extent) * geometry.block_bytes
        firsts, begin_C, chunk_of_q = np.unique(first_Q, return_index=True, return_inverse=True)
        end_C = [*begin_C[1:].tolist(), len(first_Q)]
        chunk_C, many = [live.chunk_in(extent) for extent in firsts.tolist()], self._files.files_open_max
        with live.held(chunk_C):  # All at once: while files are read, calls of other threads may remove later ones.
            for c in range(0, len(chunk_C), many):
                begin, end = int(begin_C[c]), end_C[min(c + many, len(end_C)) - 1]
                files = [self._open(chunk) for chunk in chunk_C[c : c + many]]
                file_Q, sum_B = np.array(files, np.int64)[chunk_of_q[begin:end] - c], live.sum_B
                try:
                    with self._others_allowed():
                        self._blocks.read(plan.cut(begin, end), file_Q, offset_Q[begin:end], sum_B, out_XW)
                except DamagedBlock as damage:
                    place = int(plan.place_P[damage.p])
                    n = int(np.flatnonzero(place_N == place)[0])
                    block = place // geometry.rows_per_block
                    c = int(np.searchsorted(firsts, block // geometry.blocks_per_extent, side="right")) - 1
                    raise block_damage(
                        chunk_C[c].rows_path, geometry, block - int(firsts[c]) * geometry.blocks_per_extent,
                        damage.data, int(sum_B[block]), int(table_N[n]), int(id_N[n]),
                    ) from None  # fmt: skip
                except OSError as error:
                    q = begin + (error.filename if isinstance(error.filename, int) else 0)
                    at = f"{chunk_C[chunk_of_q[q]].rows_path} at offset {offset_Q[q]}"
                    raise storage_error(error, "read rows from", at) from error
        self._requests += len(first_Q)
        self._bytes += int(plan.blocks_Q.sum()) * geometry.block_bytes

    def stats(self) -> dict[str, Any]:
        return {
            "io": self._blocks.name,
            "read_depth": self._blocks.depth,
            "read_requests": self._requests,
            "bytes_read": self._bytes,
        }

    def close(self) -> None:
        self._blocks.close()

    @contextmanager
    def _others_allowed(self) -> Iterator[None]:
        """Release the lock of the table while the block runs, but let forks, other reads and `close` wait."""
        if self._store_lock is None:
            yield
            return
        try:
            self.reading, self._reader = True, threading.get_ident()
            with self._store_lock.threads_allowed():
                yield
        finally:
            self.reading = False
            self._store_lock.lock.notify_all()

    def _open(self, chunk: ChunkFile) -> int:
        try:
            return self._files.rows_file(chunk)
        except OSError:
            with reading(chunk.rows_path, "open"):
                raise
