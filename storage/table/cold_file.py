"""File of the blocks of an index that exceed its limit of memory. The file belongs to one open table: the table makes
it when the first blocks are written, and removes it when the table is closed. No snapshot needs the file, and it is not
synced; the next open removes what a killed process or a loss of power has left.

Blocks are read like blocks of rows; the checksums of all blocks are in memory. E extents, K blocks.

Invariant: a caller gets no block that was not compared with its checksum.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.cold_blocks import EXTENT_BLOCKS, blocks_copy
from oneemb.kernels.compact_index import BLOCK_BYTES
from oneemb.kernels.threads import Threads
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import ForkedProcessError, StorageError
from oneemb.storage.fs import FileSystem, aligned_bytes, doing, storage_error
from oneemb.storage.table.aio_reader import open_reader
from oneemb.storage.table.block_reader import BlockReader, DamagedBlock, plan_reads
from oneemb.storage.table.geometry import Geometry

_GEOMETRY = Geometry(BLOCK_BYTES // 4, BLOCK_BYTES, 64)
# Most neighbouring extents that are written at once.
_RUN_EXTENTS = 64


def cold_path(path: str) -> str:
    """Path of the file of the table at a path."""
    return f"{path}/index.cold"


def index_maker(
    fs: FileSystem, path: str, io: str, threads: Threads, index_bytes: int | None
) -> tuple[Callable[[int], CompactIndex | ColdIndex], "ColdFile | None"]:
    """(function, file): the function makes an empty index with room for a number of keys, for the table at a path; the
    file is that of its indexes, None = indexes are in memory. Removes a file that a killed process has left there.
    Arguments are those of `PersistentTable.open`."""
    with doing("remove the part of an index that was left at", cold_path(path)):
        try:
            fs.remove(cold_path(path))
        except FileNotFoundError:
            pass
    if index_bytes is not None and index_bytes < 1:
        raise ValueError(f"index_memory_bytes must be at least 1, or None for no limit, got {index_bytes}")
    if index_bytes is None:
        return partial(CompactIndex, threads), None
    file = ColdFile(fs, path, open_reader(io, fs, f"{path}/chunks", BLOCK_BYTES, threads), threads)
    return partial(ColdIndex, threads, file, index_bytes), file


class ColdFile:
    """A `BlockFile` of the table at a path. `reader` reads its blocks, for this object only."""

    def __init__(self, fs: FileSystem, path: str, reader: BlockReader, threads: Threads):
        self._fs, self._table, self._path = fs, path, cold_path(path)
        self._reader, self._threads = reader, threads
        self._file: int | None = None
        self._pid = os.getpid()
        self._free_E = np.empty(0, np.int64)
        self._sum_K = np.empty(0, np.uint32)
        self._byte_N = np.empty(0, np.uint8)  # Buffer of writes.
        self.blocks_read = 0
        self.damaged = False
        """Whether a block has other bytes than were written. The table makes its index anew then."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, beside those of the reader."""
        return self._sum_K.nbytes + self._free_E.nbytes + len(self._byte_N)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the extents in use."""
        return int(len(self._sum_K) - len(self._free_E) * EXTENT_BLOCKS) * BLOCK_BYTES

    def write(self, address_B: np.ndarray) -> np.ndarray:
        """See `BlockFile`."""
        if self._file is None:
            with doing("make the file for a part of the index at", self._path):
                self._file = self._fs.create(self._path, direct=self._reader.direct)
        file = self._file
        extent_E = self._take(-(-len(address_B) // EXTENT_BLOCKS))
        try:
            # Neighbouring extents are written together.
            ends = [*(np.flatnonzero(np.diff(extent_E) != 1) + 1).tolist(), len(extent_E)]
            begin = 0
            for end in ends:
                for first in range(begin, end, _RUN_EXTENTS):
                    last = min(first + _RUN_EXTENTS, end)
                    self._write(file, int(extent_E[first]), address_B[first * EXTENT_BLOCKS : last * EXTENT_BLOCKS])
                begin = end
        except BaseException:
            self.free(extent_E)
            raise
        return extent_E

    def read(self, block_K: np.ndarray, byte_N: np.ndarray) -> None:
        """See `BlockFile`."""
        assert self._file is not None
        n = np.arange(len(block_K))
        plan = plan_reads(_GEOMETRY, block_K, n)
        file_Q = np.full(len(plan.block_Q), self._file)
        offset_Q = plan.block_Q * BLOCK_BYTES
        try:
            self._reader.read(plan, file_Q, offset_Q, self._sum_K, byte_N.view(np.float32).reshape(len(block_K), -1))
        except DamagedBlock as damage:
            block = int(plan.place_P[damage.p])
            if os.getpid() != self._pid:
                raise ForkedProcessError(
                    f"the process that made the table at {self._table} has changed its index on disk since this child"
                    " of it was forked; fork anew, or read a snapshot with SnapshotReader"
                ) from None
            self.damaged = True
            raise StorageError(
                f"{self._path} at offset {block * BLOCK_BYTES}: a block of the index must have the checksum"
                f" {int(self._sum_K[block]):08x}, has other bytes; no row is lost: the file holds none, and the next"
                " call on the table makes the index anew from the keys files; call again, and check the disk"
            ) from None
        except OSError as error:
            q = error.filename if isinstance(error.filename, int) else 0
            at = f"{self._path} at offset {int(offset_Q[q])}"
            raise storage_error(error, "read a part of the index from", at) from error
        self.blocks_read += len(block_K)

    def free(self, extent_E: np.ndarray) -> None:
        """See `BlockFile`."""
        self._free_E = np.concatenate([self._free_E, extent_E])

    def close(self) -> None:
        """Close and remove the file. The object cannot be used any more."""
        self._reader.close()
        file, self._file = self._file, None
        if file is not None:
            with doing("remove the part of the index at", self._path):
                self._fs.close(file)
                with suppress(FileNotFoundError):  # The folder of a closed table may be gone.
                    self._fs.remove(self._path)

    def _take(self, extents: int) -> np.ndarray:
        """Numbers of free extents, ascending: int64 [extents]. If there are too few, the file grows."""
        more = extents - len(self._free_E)
        if more > 0:
            old = len(self._sum_K) // EXTENT_BLOCKS
            more = max(more, old // 16)
            grown = np.zeros((old + more) * EXTENT_BLOCKS, np.uint32)
            grown[: len(self._sum_K)] = self._sum_K
            self._free_E, self._sum_K = np.concatenate([self._free_E, np.arange(old, old + more)]), grown
        free_E = np.sort(self._free_E)
        taken_E, self._free_E = free_E[:extents].copy(), free_E[extents:].copy()
        return taken_E

    def _write(self, file: int, extent: int, address_B: np.ndarray) -> None:
        """Write blocks to neighbouring extents, from this one on."""
        if len(self._byte_N) == 0:
            try:
                self._byte_N = aligned_bytes(_RUN_EXTENTS * EXTENT_BLOCKS * BLOCK_BYTES)
            except OSError as error:
                raise MemoryError("the system gives no memory for a buffer of writes") from error
        byte_N = self._byte_N[: len(address_B) * BLOCK_BYTES]
        to_B = byte_N.ctypes.data + np.arange(len(address_B)) * BLOCK_BYTES
        self._threads.run(blocks_copy, len(address_B), address_B, to_B, share_min=64)
        first = extent * EXTENT_BLOCKS
        sum_B = self._sum_K[first : first + len(address_B)]
        blocks_sum(0, len(address_B), byte_N.view(np.uint64), BLOCK_BYTES // 8, sum_B)
        with doing("write a part of the index to", self._path):
            self._fs.write(file, byte_N, first * BLOCK_BYTES)
