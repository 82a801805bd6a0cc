"""Counts the reads of a persistent table, and measures how fast the disk makes such reads with nothing else to do."""

import os
import time
from pathlib import Path

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.table.aio_reader import open_reader
from oneemb.storage.table.block_reader import ReadPlan
from oneemb.storage.table.chunk_files import ROWS_BEGIN
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.persistent_table import PersistentTable

__all__ = ["TableDisk", "limit_ms"]


class TableDisk:
    """The disk below a persistent table.

    Args:
        folder: folder of the table.
        reads: number of random reads of one measurement.
    """

    def __init__(self, table: PersistentTable, folder: str, reads: int = 16_384):
        stats = table.stats()
        self._table, self._chunks, self._reads = table, Path(folder, "chunks"), reads
        self._geometry = Geometry(table.row_width, stats["physical_block_size"], 64)
        self._fs, self._rng = LocalFileSystem(), np.random.default_rng(0)
        self._reader = open_reader(stats["io"], self._fs, str(self._chunks), stats["physical_block_size"], Threads())

    @property
    def requests(self) -> int:
        """Number of reads that the table has made. One read takes a block, or blocks that lie near each other."""
        return self._table.stats()["read_requests"]

    def rate(self) -> float:
        """Reads a second of random blocks of the table, by a reader of the table's kind at the table's depth, without
        checks and copies. 0 if no block is on disk."""
        self._table.flush()  # Else the table might still be writing.
        files = [self._fs.open(str(path), direct=self._reader.direct) for path in sorted(self._chunks.glob("*.rows"))]
        try:
            return self._rate(np.array(files, np.int64))
        finally:
            for file in files:
                self._fs.close(file)

    def _rate(self, file_F: np.ndarray) -> float:
        size = self._geometry.block_bytes
        blocks_F = np.array([max(0, os.fstat(file).st_size - ROWS_BEGIN) // size for file in file_F], np.int64)
        end_F = np.cumsum(blocks_F)
        if not blocks_F.any():
            return 0.0
        block_Q = np.unique(self._rng.integers(0, end_F[-1], self._reads))
        f_Q = np.searchsorted(end_F, block_Q, side="right")
        offset_Q = ROWS_BEGIN + (block_Q - (end_F - blocks_F)[f_Q]) * size
        many, nothing = len(block_Q), np.empty(0, np.int64)
        # A plan without places: the reader delivers no row, so it needs no checksums and no output.
        plan = ReadPlan(
            self._geometry, nothing, nothing, block_Q, np.ones(many, np.int64), np.zeros(many + 1, np.int64)
        )
        begin = time.perf_counter()
        self._reader.read(plan, file_F[f_Q], offset_Q, np.empty(1, np.uint32), np.empty((1, 1), np.float32))
        return many / (time.perf_counter() - begin)

    def close(self) -> None:
        self._reader.close()


def limit_ms(compute_ms: float, requests: float, rate: float) -> float:
    """Least time of a step that computes and reads at once: the longer of both, in milliseconds."""
    return max(compute_ms, 1e3 * requests / rate if requests else 0.0)
