"""Appends rows to the newest chunk: gathers them in memory and writes them in long runs.

Each run has a buffer: one buffer fills while the full buffers before it are written in the background, in order. There
are more than two buffers, so that neither the disk nor the caller has to wait when the other one is slow for a moment.

Invariants:
- a row has its place, and can be read, as soon as it is appended;
- after a failed write the rows stay in memory, and the next call writes them to the same blocks;
- after a failed `append` none of its rows is in the table. Rows that are on disk already stay there as garbage, because
  no key points to them;
- runs are written in order, across chunks too: after a failed run no later run is written;
- a run becomes part of its chunk (`ChunkFiles.append`) in the caller's thread only.
"""

from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import Executor, Future, wait

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.row_blocks import rows_into_blocks, rows_out_of_blocks
from oneemb.kernels.threads import Threads, submit
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import aligned_bytes
from oneemb.storage.table.chunk_files import ChunkEnd, ChunkFile, ChunkFiles, key_record
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.live_rows import LiveRows

_RUN_BYTES = 4 << 20
# Blocks of a run's first buffer: few, because many tables are small.
_BLOCKS_MIN = 16
# Most full runs that wait for the disk. One more run fills.
_RUNS_SEALED_MAX = 3
# Least bytes that each thread copies; for fewer bytes it is not worth waking a thread.
_SHARE_BYTES_MIN = 2 << 20


class _Run:
    """Rows of one run, from block `block` of `chunk` on, in a buffer that grows with them."""

    def __init__(self, geometry: Geometry, blocks: int):
        self.geometry, self.blocks_max = geometry, blocks
        self.byte_N, self.sum_B = np.empty(0, np.uint8), np.empty(0, np.uint32)
        self.table_N, self.id_N = np.empty(0, np.int32), np.empty(0, np.int64)
        self.word_X = self.byte_N.view(np.uint64)
        self.rows = 0
        self.chunk: ChunkFile | None = None
        # The run's first block in its chunk, the most blocks of the chunk, and the chunk's first block in the table.
        self.block = self.chunk_blocks = self.chunk_begin = 0
        # Set by `seal`: the bytes of the run in the keys file, and where in the chunk the run begins and ends.
        self.record_N = np.empty(0, np.uint8)
        self.begin = self.end = ChunkEnd(0, 0, 0)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.geometry.rows_per_block)

    @property
    def first_place(self) -> int:
        return (self.chunk_begin + self.block) * self.geometry.rows_per_block

    @property
    def room(self) -> int:
        """Number of rows that still fit into the run and into its chunk."""
        blocks = min(self.blocks_max, self.chunk_blocks - self.block)
        return blocks * self.geometry.rows_per_block - self.rows

    def follow(self, run: "_Run") -> None:
        """Make this run empty, and let it begin where the other run ends."""
        self.chunk, self.chunk_blocks, self.chunk_begin = run.chunk, run.chunk_blocks, run.chunk_begin
        self.block, self.rows = run.block + run.blocks, 0

    def take(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray, threads: Threads) -> np.ndarray:
        """Copy rows into the buffer and compute the checksums of the blocks that become full. Returns the rows'
        places."""
        self._have(self.rows + len(id_N))
        first, self.rows = self.rows, self.rows + len(id_N)
        self.table_N[first : self.rows] = table_N
        self.id_N[first : self.rows] = id_N
        geometry = self.geometry
        threads.run(
            rows_into_blocks, self.blocks - first // geometry.rows_per_block, row_NW.view(np.uint32), self.word_X,
            first, geometry.rows_per_block, geometry.block_words, self.sum_B,
            share_min=-(-_SHARE_BYTES_MIN // geometry.block_bytes),
        )  # fmt: skip
        return np.arange(self.first_place + first, self.first_place + self.rows)

    def read(self, place_N: np.ndarray, out_UW: np.ndarray, to_N: np.ndarray) -> None:
        rows_out_of_blocks(
            0, len(place_N), self.word_X.view(np.uint32), place_N - self.first_place, out_UW.view(np.uint32), to_N,
            self.geometry.rows_per_block, self.geometry.block_bytes // 4,
        )  # fmt: skip

    def seal(self, begin: ChunkEnd) -> None:
        """Fill the last block with zeros and compute its checksum, and pack the keys for the keys file. `begin` is
        where the run begins in its chunk."""
        last = self.blocks - 1
        rest = self.rows - last * self.geometry.rows_per_block
        if rest < self.geometry.rows_per_block:
            words = self.geometry.block_bytes // 4
            first = last * words + rest * self.geometry.row_width
            self.word_X.view(np.uint32)[first : (last + 1) * words] = 0
            blocks_sum(last, last + 1, self.word_X, self.geometry.block_words, self.sum_B)
        table_N, id_N = self.table_N[: self.rows], self.id_N[: self.rows]
        self.begin = begin
        self.record_N, self.end = key_record(begin, table_N, id_N, self.sum_B[: self.blocks])

    def _have(self, rows: int) -> None:
        """Grow the buffer until it has room for this many rows."""
        per_block, before = self.geometry.rows_per_block, len(self.sum_B)
        if rows <= before * per_block:
            return
        blocks = min(self.blocks_max, max(-(-rows // per_block), 2 * before, _BLOCKS_MIN))
        byte_N, sum_B = aligned_bytes(blocks * self.geometry.block_bytes), np.empty(blocks, np.uint32)
        table_N, id_N = np.empty(blocks * per_block, np.int32), np.empty(blocks * per_block, np.int64)
        byte_N[: len(self.byte_N)], sum_B[:before] = self.byte_N, self.sum_B
        table_N[: self.rows], id_N[: self.rows] = self.table_N[: self.rows], self.id_N[: self.rows]
        self.byte_N, self.word_X, self.sum_B = byte_N, byte_N.view(np.uint64), sum_B
        self.table_N, self.id_N = table_N, id_N


class RowWriter:
    """Appends rows to the chunks of one `LiveRows`, creates new chunks, and stores the checksums of blocks in the
    `LiveRows`. beside: thread that writes runs; None = the caller's thread does."""

    def __init__(self, live: LiveRows, files: ChunkFiles, threads: Threads, beside: Executor | None):
        geometry = live.geometry
        self._live, self._files, self._threads, self._beside = live, files, threads, beside
        blocks = min(geometry.blocks_per_chunk, max(1, _RUN_BYTES // geometry.block_bytes))
        self._filling = _Run(geometry, blocks)
        self._spare = [_Run(geometry, blocks) for _ in range(_RUNS_SEALED_MAX)]
        # Sealed runs, oldest first, each with the future of its write; None = the next call has to write it.
        self._sealed: deque[tuple[_Run, Future[None] | None]] = deque()
        self.chunk: ChunkFile | None = None

    def writes_to(self, chunk: ChunkFile) -> bool:
        """Whether the chunk is being written and may still grow."""
        return chunk is self.chunk or any(run.chunk is chunk for run, _ in self._sealed)

    def bytes_to_write(self, chunks: Container[ChunkFile]) -> int:
        """Approximate number of bytes that rows in memory will take on disk in these chunks."""
        return self._live.geometry.disk_bytes(sum(run.blocks for run in self._runs() if run.chunk in chunks))

    def append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> np.ndarray:
        """Append rows; returns their places, int64 [N]. If a run cannot be written, raises StorageError and appends no
        row."""
        place_N = np.empty(len(id_N), np.int64)
        first_run, place, rows = self._filling, self._filling.first_place, self._filling.rows
        try:
            done = 0
            while done < len(id_N):
                if self.chunk is None or self._filling.room == 0:
                    self._make_room()
                n = slice(done, min(done + self._filling.room, len(id_N)))
                place_N[n] = self._filling.take(table_N[n], id_N[n], row_NW[n], self._threads)
                done = n.stop
        except BaseException:
            same = self._filling is first_run and first_run.first_place == place and rows <= first_run.rows
            self._filling.rows = rows if same else 0
            raise
        return place_N

    def write_out(self) -> None:
        """Write all rows in memory to the chunk. The rest of the last block stays empty. After a StorageError the rows
        are still in memory, and the call can be repeated."""
        self.finish()
        if self._filling.rows:
            self._start()
            self.finish()

    def seal(self) -> None:
        """Write the rows in memory, and let the next rows begin a new chunk."""
        self.write_out()
        self._leave()

    def drop(self) -> None:
        """Drop the rows of the filling run, and leave the chunk. Sealed runs are dropped too if they cannot be
        written."""
        try:
            self.finish()
        except StorageError:
            while self._sealed:
                self._free()
        self._filling.rows = 0
        self.seal()

    def in_memory(self, place_N: np.ndarray) -> np.ndarray:
        """Whether the row of each place is in memory and must be read by `read`: bool [N]. Valid until the next
        call."""
        while self._sealed and _is_written(self._sealed[0][1]):
            self._finish_one()
        found = np.zeros(len(place_N), bool)
        for run in self._runs():
            found |= (place_N >= run.first_place) & (place_N < run.first_place + run.rows)
        return found

    def read(self, place_N: np.ndarray, out_UW: np.ndarray, to_N: np.ndarray) -> None:
        """Copy the row in memory at place_N[n] to out_UW[to_N[n]]."""
        for run in self._runs():
            n = np.flatnonzero((place_N >= run.first_place) & (place_N < run.first_place + run.rows))
            run.read(place_N[n], out_UW, to_N[n])

    def copy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Copies of the rows in memory: place_N, table_N, id_N, row_NW."""
        table_N, id_N, place_N = self._keys()
        row_NW = np.empty((len(place_N), self._live.geometry.row_width), np.float32)
        self.read(place_N, row_NW, np.arange(len(place_N)))
        return place_N, table_N, id_N, row_NW

    def live_keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys of the live rows in memory, with the places of the rows: table_N, id_N, place_N."""
        table_N, id_N, place_N = self._keys()
        n = np.flatnonzero(self._live.bit_N[place_N >> 3] >> (place_N & 7).astype(np.uint8) & 1)
        return table_N[n], id_N[n], place_N[n]

    def _keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys of all rows in memory, with the places of the rows: table_N, id_N, place_N."""
        runs = list(self._runs())
        place_N = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(run.first_place, run.first_place + run.rows) for run in runs)]
        )
        table_N = np.concatenate([np.empty(0, np.int32), *(run.table_N[: run.rows] for run in runs)])
        id_N = np.concatenate([np.empty(0, np.int64), *(run.id_N[: run.rows] for run in runs)])
        return table_N, id_N, place_N

    def _runs(self) -> Iterator[_Run]:
        yield from (run for run, _ in self._sealed)
        if self._filling.rows:
            yield self._filling

    def _make_room(self) -> None:
        """Begin an empty run, in a new chunk if this one is full."""
        if self._filling.rows:
            # Errors of ended writes are raised here. A write in progress is waited for only if there is no spare run.
            while self._sealed and (not self._spare or _has_ended(self._sealed[0][1])):
                self._finish_one()
            self._start()
        if self.chunk is not None and self._filling.room == 0:
            self._leave()
        if self.chunk is None:
            geometry = self._live.geometry
            blocks = geometry.chunk_blocks(len(self._live.index))
            chunk = self._files.create(geometry)
            try:
                self._live.add(chunk, blocks)
            except BaseException:
                self._files.release(chunk)
                raise
            run = self._filling
            run.chunk, run.block, run.chunk_blocks = chunk, 0, blocks
            run.chunk_begin = self._live.first_block(chunk)
            self.chunk = chunk

    def _leave(self) -> None:
        """Let the next rows begin a new chunk. The present chunk is sealed once all its runs are written."""
        chunk, self.chunk = self.chunk, None
        if chunk is not None and not self.writes_to(chunk):
            self._files.seal(chunk)

    def _start(self) -> None:
        """Begin to write the filling run; a spare run becomes the filling one."""
        run, last = self._filling, self._sealed[-1][0] if self._sealed else None
        assert run.chunk is not None
        run.seal(last.end if last is not None and last.chunk is run.chunk else run.chunk.end)
        begin = run.chunk_begin + run.block
        self._live.sum_B[begin : begin + run.blocks] = run.sum_B[: run.blocks]
        self._filling = self._spare.pop()
        self._filling.follow(run)
        before = self._sealed[-1][1] if self._sealed else None
        assert before is not None or not self._sealed
        self._sealed.append((run, None))  # `finish` writes it if `submit` raises
        if self._beside is not None:
            self._sealed[-1] = run, submit(self._beside, self._write, run, before)

    def finish(self) -> None:
        """Wait until every sealed run is written. After a StorageError the next call tries again."""
        while self._sealed:
            self._finish_one()

    def _finish_one(self) -> None:
        """Wait until the oldest sealed run is written, and make it part of its chunk."""
        run, written = self._sealed[0]
        assert run.chunk is not None
        if written is not None and written.exception() is not None:
            # The writes of later runs have failed too. All runs are written again in order: the cause may be gone by
            # now.
            wait([later for _, later in self._sealed if later is not None])
            self._sealed = deque((run, None) for run, _ in self._sealed)
            written = None
        if written is None:
            self._write(run, None)
        self._files.append(run.chunk, run.end)
        self._free()

    def _free(self) -> None:
        """Make the oldest sealed run a spare one."""
        run, _ = self._sealed.popleft()
        run.rows = 0
        self._spare.append(run)
        if run.chunk is not None and not self.writes_to(run.chunk):
            self._files.seal(run.chunk)

    def _write(self, run: _Run, before: Future[None] | None) -> None:
        """Write a run after the write of the run before has succeeded. before: that write; None = there is none."""
        assert run.chunk is not None
        if before is not None:
            before.result()
        self._files.write(run.chunk, run.begin, run.byte_N[: run.blocks * run.geometry.block_bytes], run.record_N)


def _has_ended(written: Future[None] | None) -> bool:
    """Whether a write has ended, with or without an error, or was not begun."""
    return written is None or written.done()


def _is_written(written: Future[None] | None) -> bool:
    return written is not None and written.done() and written.exception() is None
