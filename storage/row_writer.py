"""Rows on their way to the end of the newest chunk: gathered in memory, written in long runs.

Two runs of memory take turns: one is written beside the caller while the other fills.

Invariants:
- a row has its place, and can be read, from the moment it is appended;
- a failed write loses nothing: the rows stay in memory, and the next call writes them to the same blocks;
- a failed `append` takes its own rows back. Those of them that a run has already brought to disk stay there as
  garbage, because nothing points at them;
- a chunk counts a run as its own (`ChunkFiles.append`) in the caller's thread only.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, Future

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.row_blocks import rows_into_blocks, rows_out_of_blocks
from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import ChunkFile, ChunkFiles, WrittenRun
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import aligned_bytes
from oneemb.storage.geometry import Geometry
from oneemb.storage.live_rows import LiveRows

__all__ = ["RowWriter"]

_RUN_BYTES = 4 << 20


class _Run:
    """Memory for one run, and the rows in it, which begin at block `block` of the chunk in slot `slot`."""

    def __init__(self, geometry: Geometry, blocks: int):
        self.geometry, self.blocks_max = geometry, blocks
        self.byte_N = aligned_bytes(blocks * geometry.block_bytes)
        self.word_N = self.byte_N.view(np.uint32)
        self.table_N = np.empty(blocks * geometry.rows_per_block, np.int32)
        self.id_N = np.empty(blocks * geometry.rows_per_block, np.int64)
        self.rows = self.block = 0
        self.slot = -1

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.geometry.rows_per_block)

    @property
    def first_place(self) -> int:
        return self.slot * self.geometry.rows_per_chunk + self.block * self.geometry.rows_per_block

    @property
    def room(self) -> int:
        """Rows that still fit into the run and into its chunk."""
        blocks = min(self.blocks_max, self.geometry.blocks_per_chunk - self.block)
        return blocks * self.geometry.rows_per_block - self.rows

    def take(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> np.ndarray:
        """Copy rows in; returns their places."""
        first, self.rows = self.rows, self.rows + len(id_N)
        self.table_N[first : self.rows] = table_N
        self.id_N[first : self.rows] = id_N
        rows_into_blocks(
            0, len(id_N), row_NW.view(np.uint32), self.word_N, first, self.geometry.rows_per_block,
            self.geometry.block_bytes // 4,
        )  # fmt: skip
        return np.arange(self.first_place + first, self.first_place + self.rows)

    def read(self, place_N: np.ndarray, out_UW: np.ndarray, to_N: np.ndarray) -> None:
        rows_out_of_blocks(
            0, len(place_N), self.word_N, place_N - self.first_place, out_UW.view(np.uint32), to_N,
            self.geometry.rows_per_block, self.geometry.block_bytes // 4,
        )  # fmt: skip

    def seal(self, threads: Threads) -> np.ndarray:
        """Zero what the last block has room for; returns the checksums of the blocks."""
        words = self.geometry.block_bytes // 4
        rest = self.rows - (self.blocks - 1) * self.geometry.rows_per_block
        self.word_N[(self.blocks - 1) * words + rest * self.geometry.row_width : self.blocks * words] = 0
        sum_B = np.empty(self.blocks, np.uint32)
        threads.run(blocks_sum, self.blocks, self.byte_N.view(np.uint64), self.geometry.block_words, sum_B)
        return sum_B


class RowWriter:
    """Appends rows to the chunks of one `LiveRows`.

    Args:
        live: gets the slots of new chunks and the checksums of blocks.
        files: makes and writes the chunks.
        threads: runs the checksums.
        beside: writes runs; None = the caller's thread does.
    """

    def __init__(self, live: LiveRows, files: ChunkFiles, threads: Threads, beside: Executor | None):
        geometry = live.geometry
        self._live, self._files, self._threads, self._beside = live, files, threads, beside
        blocks = min(geometry.blocks_per_chunk, max(1, _RUN_BYTES // geometry.block_bytes))
        self._filling, self._spare = _Run(geometry, blocks), _Run(geometry, blocks)
        self._sealed: _Run | None = None  # Is being written, or could not be.
        self._sum_B = np.empty(0, np.uint32)
        self._written: Future[WrittenRun] | None = None
        self.chunk: ChunkFile | None = None

    @property
    def slot(self) -> int:
        """The slot of the chunk that is being written, -1 without one."""
        return self._filling.slot if self.chunk is not None else -1

    def append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> np.ndarray:
        """Take rows in; returns their places, int64 [N].

        Raises:
            StorageError: a run could not be written, and no row of this call is in.
        """
        place_N = np.empty(len(id_N), np.int64)
        first_run, block, rows = self._filling, self._filling.block, self._filling.rows
        try:
            done = 0
            while done < len(id_N):
                if self.chunk is None or self._filling.room == 0:
                    self._make_room()
                n = slice(done, min(done + self._filling.room, len(id_N)))
                place_N[n] = self._filling.take(table_N[n], id_N[n], row_NW[n])
                done = n.stop
        except BaseException:
            same = self._filling is first_run and first_run.block == block and rows <= first_run.rows
            self._filling.rows = rows if same else 0
            raise
        return place_N

    def write_out(self) -> None:
        """Write all rows in memory to the chunk. What the last block has room for stays empty for ever.

        Raises:
            StorageError: they are still in memory; call again.
        """
        self._finish()
        if self._filling.rows:
            self._start()
            self._finish()

    def seal(self) -> None:
        """Write the rows in memory, and let the next ones begin a new chunk."""
        self.write_out()
        if self.chunk is not None:
            self._files.seal(self.chunk)
            self.chunk = None

    def drop(self) -> None:
        """Forget the rows in memory and the chunk."""
        try:
            self._finish()
        except StorageError:
            self._sealed = None
        self._filling.rows = 0
        self.seal()

    def in_memory(self, place_N: np.ndarray) -> np.ndarray:
        """Whether each place is of a row that `read` brings: bool [N]. True until another call is made."""
        if self._written is not None and self._written.done() and self._written.exception() is None:
            self._finish()
        found = np.zeros(len(place_N), bool)
        for run in self._runs():
            found |= (place_N >= run.first_place) & (place_N < run.first_place + run.rows)
        return found

    def read(self, place_N: np.ndarray, out_UW: np.ndarray, to_N: np.ndarray) -> None:
        """out_UW[to_N[n]] = the row in memory at place_N[n]."""
        for run in self._runs():
            n = np.flatnonzero((place_N >= run.first_place) & (place_N < run.first_place + run.rows))
            run.read(place_N[n], out_UW, to_N[n])

    def copy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The rows in memory: their places, tables, ids and weights."""
        runs = list(self._runs())
        places = [np.arange(run.first_place, run.first_place + run.rows) for run in runs]
        place_N = np.concatenate([np.empty(0, np.int64), *places])
        row_NW = np.empty((len(place_N), self._live.geometry.row_width), np.float32)
        self.read(place_N, row_NW, np.arange(len(place_N)))
        table_N = np.concatenate([np.empty(0, np.int32), *(run.table_N[: run.rows] for run in runs)])
        id_N = np.concatenate([np.empty(0, np.int64), *(run.id_N[: run.rows] for run in runs)])
        return place_N, table_N, id_N, row_NW

    def _runs(self) -> Iterator[_Run]:
        if self._sealed is not None:
            yield self._sealed
        if self._filling.rows:
            yield self._filling

    def _make_room(self) -> None:
        """Let the next rows go to an empty run, of a new chunk where this one is full."""
        if self._filling.rows:
            self._finish()
            self._start()
        if self.chunk is not None and self._filling.room == 0:
            self.seal()
        if self.chunk is None:
            self._finish()
            chunk = self._files.create(self._live.geometry)
            self._filling.slot, self._filling.block = self._live.add(chunk), 0
            self.chunk = chunk

    def _start(self) -> None:
        """Begin to write the filling run; the spare one fills next."""
        assert self._sealed is None and self.chunk is not None
        run = self._sealed = self._filling
        self._sum_B = run.seal(self._threads)
        begin = run.slot * run.geometry.blocks_per_chunk + run.block
        self._live.sum_B[begin : begin + run.blocks] = self._sum_B
        self._filling, self._spare = self._spare, run
        self._filling.slot, self._filling.block, self._filling.rows = run.slot, run.block + run.blocks, 0
        if self._beside is not None:
            self._written = self._beside.submit(self._write)

    def _finish(self) -> None:
        """Return when the sealed run, if any, is on disk.

        Raises:
            StorageError: it is not; the next call tries again.
        """
        if self._sealed is None:
            return
        assert self.chunk is not None
        written, self._written = self._written, None
        run = self._write() if written is None else written.result()
        self._files.append(self.chunk, run)
        self._sealed.rows, self._sealed = 0, None

    def _write(self) -> WrittenRun:
        run = self._sealed
        assert run is not None and self.chunk is not None
        data = run.byte_N[: run.blocks * run.geometry.block_bytes]
        return self._files.write(self.chunk, data, run.table_N[: run.rows], run.id_N[: run.rows], self._sum_B)
