"""Rows on their way to the end of the newest chunk: gathered in memory, written in long runs.

Invariants:
- a row has its place, and can be read, from the moment it is appended;
- a failed write loses nothing: the rows stay in memory, and the next call writes them to the same blocks;
- a failed `append` takes its own rows back. Those of them that a run has already brought to disk stay there as
  garbage, because nothing points at them.
"""

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.row_blocks import rows_into_blocks, rows_out_of_blocks
from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.fs import aligned_bytes
from oneemb.storage.live_rows import LiveRows

__all__ = ["RowWriter"]

_RUN_BYTES = 4 << 20


class RowWriter:
    """Appends rows to the chunks of one `LiveRows`.

    Args:
        live: gets the slots of new chunks and the checksums of blocks.
        files: makes and writes the chunks.
        threads: runs the copies.
    """

    def __init__(self, live: LiveRows, files: ChunkFiles, threads: Threads):
        geometry = live.geometry
        self._live, self._files, self._threads = live, files, threads
        self._run_blocks = min(geometry.blocks_per_chunk, max(1, _RUN_BYTES // geometry.block_bytes))
        self._byte_N = aligned_bytes(self._run_blocks * geometry.block_bytes)
        self._block_N = self._byte_N.view(np.uint32)
        self._table_N = np.empty(self._run_blocks * geometry.rows_per_block, np.int32)
        self._id_N = np.empty(self._run_blocks * geometry.rows_per_block, np.int64)
        self._chunk: ChunkFile | None = None
        self._rows = 0
        self.slot = -1

    @property
    def chunk(self) -> ChunkFile | None:
        """The chunk that is being written, if any."""
        return self._chunk

    @property
    def rows(self) -> int:
        """Rows that are in memory only."""
        return self._rows

    def append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> np.ndarray:
        """Take rows in; returns their places, int64 [N].

        Raises:
            StorageError: a run could not be written, and no row of this call is in.
        """
        place_N = np.empty(len(id_N), np.int64)
        chunk, blocks, rows = self._chunk, self._chunk.blocks if self._chunk else 0, self._rows
        try:
            done = 0
            while done < len(id_N):
                room = self._room()
                if room == 0:
                    self._make_room()
                    room = self._room()
                size = min(room, len(id_N) - done)
                self._copy_in(table_N[done : done + size], id_N[done : done + size], row_NW[done : done + size])
                first = self._first_place() + self._rows - size
                place_N[done : done + size] = np.arange(first, first + size)
                done += size
        except BaseException:
            same_run = self._chunk is chunk and chunk is not None and chunk.blocks == blocks
            self._rows = rows if same_run else 0
            raise
        return place_N

    def write_out(self) -> None:
        """Write the rows in memory to the chunk. What the last block has room for stays empty for ever.

        Raises:
            StorageError: they are still in memory; call again.
        """
        if self._rows == 0:
            return
        assert self._chunk is not None
        geometry = self._live.geometry
        blocks = -(-self._rows // geometry.rows_per_block)
        rest = self._rows - (blocks - 1) * geometry.rows_per_block
        block_words = geometry.block_bytes // 4
        self._block_N[(blocks - 1) * block_words + rest * geometry.row_width : blocks * block_words] = 0
        sum_B = np.empty(blocks, np.uint32)
        word_X = self._byte_N.view(np.uint64)
        self._threads.run(blocks_sum, blocks, word_X, geometry.block_words, sum_B)
        data = self._byte_N[: blocks * geometry.block_bytes]
        first = self._chunk.blocks
        self._files.append(self._chunk, data, self._table_N[: self._rows], self._id_N[: self._rows], sum_B)
        begin = self.slot * geometry.blocks_per_chunk + first
        self._live.sum_B[begin : begin + blocks] = sum_B
        self._rows = 0

    def seal(self) -> None:
        """Write the rows in memory, and let the next ones begin a new chunk."""
        self.write_out()
        if self._chunk is not None:
            self._files.seal(self._chunk)
            self._chunk, self.slot = None, -1

    def drop(self) -> None:
        """Forget the rows in memory and the chunk."""
        self._rows = 0
        self.seal()

    def in_memory(self, place_N: np.ndarray) -> np.ndarray:
        """Whether each place is of a row that is in memory only: bool [N]."""
        if self._rows == 0:
            return np.zeros(len(place_N), bool)
        first = self._first_place()
        return (place_N >= first) & (place_N < first + self._rows)

    def read(self, place_N: np.ndarray, out_UW: np.ndarray, to_N: np.ndarray) -> None:
        """out_UW[to_N[n]] = the row in memory at place_N[n]."""
        rows_out_of_blocks(
            0, len(place_N), self._block_N, place_N - self._first_place(), out_UW.view(np.uint32), to_N,
            self._live.geometry.rows_per_block, self._live.geometry.block_bytes // 4,
        )  # fmt: skip

    def copy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The rows in memory: their places, tables, ids and weights."""
        place_N = np.arange(self._rows, dtype=np.int64)
        row_NW = np.empty((self._rows, self._live.geometry.row_width), np.float32)
        if self._rows:
            place_N += self._first_place()
            self.read(place_N, row_NW, np.arange(self._rows))
        return place_N, self._table_N[: self._rows].copy(), self._id_N[: self._rows].copy(), row_NW

    def _room(self) -> int:
        if self._chunk is None:
            return 0
        blocks = min(self._run_blocks, self._live.geometry.blocks_per_chunk - self._chunk.blocks)
        return blocks * self._live.geometry.rows_per_block - self._rows

    def _make_room(self) -> None:
        self.write_out()
        if self._chunk is not None and self._chunk.full:
            self.seal()
        if self._chunk is None:
            chunk = self._files.create(self._live.geometry)
            self.slot, self._chunk = self._live.add(chunk), chunk

    def _copy_in(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        first, end = self._rows, self._rows + len(id_N)
        self._table_N[first:end] = table_N
        self._id_N[first:end] = id_N
        geometry = self._live.geometry
        rows_into_blocks(
            0, len(id_N), row_NW.view(np.uint32), self._block_N, first, geometry.rows_per_block,
            geometry.block_bytes // 4,
        )  # fmt: skip
        self._rows = end

    def _first_place(self) -> int:
        """The place of the first row in memory."""
        assert self._chunk is not None
        geometry = self._live.geometry
        return self.slot * geometry.rows_per_chunk + self._chunk.blocks * geometry.rows_per_block
