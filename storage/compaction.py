"""Frees disk: live rows of chunks that are mostly garbage move to the end of the log, and the chunks go.

A chunk that a snapshot needs is `held`: moving its rows would free nothing, so it is left alone and counted to the
snapshots. For the others, the loose ones:

    bytes of loose chunks <= max_space_amplification * bytes of live rows + 2 chunks

Why that holds: a put goes in pieces of half a chunk at most, and before a piece loose chunks are brought down to
`amplification * live + 1 chunk`; a chunk that is being moved adds at most its own live rows for a while. While loose
chunks are above that, some sealed one is less than `(1 + 1 / amplification) / 2` live, so each move frees disk and the
loop ends; while none is, sealed chunks have at most `amplification` bytes for a live one, and the rest is one chunk.

Invariant: a row that has changed since its chunk was read is not moved: its newer version is elsewhere.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oneemb.storage.background import Background
from oneemb.storage.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import FileSystem
from oneemb.storage.live_rows import LiveRows
from oneemb.storage.row_writer import RowWriter

__all__ = ["CompactionResult", "Compactor"]

_PIECE_ROWS = 4096
# Loose chunks above amplification * live + this much of a chunk are compacted in the background, before it is urgent.
_EARLY = 0.25
# On demand, a chunk whose live rows fill this much of it is left as it is.
_FULL_ENOUGH = 0.95


@dataclass
class CompactionResult:
    """What compaction did.

    Args:
        chunks: chunks that were emptied.
        rows_moved: live rows that were written again.
        bytes_freed: disk space that became free, less what the rows took elsewhere.
    """

    chunks: int = 0
    rows_moved: int = 0
    bytes_freed: int = 0


class Compactor:
    """Compacts one `LiveRows`; a table makes a new one when it replaces its rows.

    Args:
        fs: where the chunks are.
        live: the rows.
        writer: appends to the log of these rows.
        files: the chunks.
        guard: held by every call that looks at the rows; `move` lets go of it while it reads.
        max_space_amplification: above 1.
        background: None = compaction happens in puts only.
    """

    def __init__(
        self, fs: FileSystem, live: LiveRows, writer: RowWriter, files: ChunkFiles, guard: threading.Condition,
        max_space_amplification: float, background: Background | None,
    ):  # fmt: skip
        self._fs, self._live, self._writer, self._files, self._guard = fs, live, writer, files, guard
        self._max_space_amplification = max_space_amplification
        self._background = background
        self._stopping = False
        self._moving: ChunkFile | None = None
        self._damaged: set[ChunkFile] = set()
        self.done = CompactionResult()

    @property
    def piece_rows(self) -> int:
        """Rows that may be put between two calls of `make_room`."""
        return max(1, self._live.geometry.rows_per_chunk // 2)

    def loose_bytes(self) -> int:
        """Bytes of chunks that no snapshot needs."""
        return sum(chunk.nbytes for _, chunk in self._live.slots() if not chunk.snapshots)

    def live_bytes(self) -> int:
        """Bytes that the live rows need; less than that while keys are not settled."""
        return int(len(self._live.index) * self._live.geometry.disk_bytes_per_row)

    def settle(self) -> None:
        """Take in the keys that were noted, and let go of chunks without live rows, but for the one being written.

        Raises:
            MemoryError: the index cannot grow; the keys are still noted.
        """
        self._live.settle()
        for slot in np.flatnonzero(self._live.live_S == 0).tolist():
            if self._live.chunk_S[slot] is not None and slot != self._writer.slot:
                self._live.remove(slot)

    def make_room(self) -> None:
        """Keep the bound for the next piece, here if it is urgent, else in the background. The guard is held.

        Raises:
            StorageError: rows could not be moved; nothing is lost.
        """
        # Keys that are not settled can only lower the excess, so where it is small they need not be.
        if self._excess() <= (1 if self._background is None else _EARLY) or not any(self._candidates()):
            return
        self.settle()
        while self._excess() > 1:
            if self._moving is not None:
                self._guard.wait()
                self._raise_error()
                self.settle()
            elif not self._compact_one():
                break
        if self._background is not None and not self._background.busy and self._excess() > _EARLY:
            if self._victim() is not None:
                self._background.start(self._run)

    def compact(self) -> CompactionResult:
        """Move the rows of every loose chunk that has garbage. The guard is held."""
        before = self.done
        self.done = CompactionResult()
        try:
            self._writer.seal()
            disk = self._disk_bytes()
            chunks = list(self._live.slots())
            for slot, chunk in chunks:
                there = self._live.chunk_S[slot] is chunk and not chunk.snapshots
                if there and self._fill(slot, chunk) < _FULL_ENOUGH:
                    self.move(slot, chunk)
            self._writer.write_out()
            self.done.bytes_freed = disk - self._disk_bytes()
            return self.done
        finally:
            self.done = CompactionResult(*(getattr(before, f) + getattr(self.done, f) for f in _FIELDS))

    def move(self, slot: int, chunk: ChunkFile) -> None:
        """Move the live rows of a sealed chunk to the end of the log, and let go of it. The guard is held once, and
        free while the chunk is read."""
        while self._moving is not None:
            self._guard.wait()
        self.settle()
        if self._live.chunk_S[slot] is not chunk:
            return
        geometry, part = self._live.geometry, self._live.part(slot)
        self._moving = chunk
        self._files.hold(chunk)
        try:
            with _Released(self._guard):
                keys = read_keys(self._fs, chunk.keys_path, geometry, part)
                pieces = scan_rows(
                    self._fs, chunk.rows_path, geometry, part.number, keys, live_rows(part.bit_N), _PIECE_ROWS
                )
                for table_N, id_N, row_NW in pieces:
                    with self._guard:
                        if self._stopping:
                            break
                        self.settle()
                        if self._live.chunk_S[slot] is not chunk:
                            break
                        place_N = self._live.index.find(table_N, id_N)
                        here = np.flatnonzero(place_N // geometry.rows_per_chunk == slot)
                        self._append(table_N[here], id_N[here], row_NW[here])
            if self._live.chunk_S[slot] is chunk and self._live.live_S[slot] == 0:
                self._live.remove(slot)
                self.done.chunks += 1
        except CorruptTableError:
            self._damaged.add(chunk)  # It would fail again each time; its sound rows stay where they are.
            raise
        finally:
            self._moving = None
            self._files.release(chunk)
            self._guard.notify_all()

    def stop(self) -> None:
        """End what runs in the background. The guard is held, and let go of meanwhile."""
        self._stopping = True
        while self._moving is not None:
            self._guard.wait()

    def _append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        if len(id_N):
            place_N = self._writer.append(table_N, id_N, row_NW)
            self._live.put(table_N, id_N, place_N)
            self.done.rows_moved += len(id_N)

    def _run(self) -> None:
        with self._guard:
            while not self._stopping and self._moving is None:
                self.settle()
                if self._excess() <= _EARLY or not self._compact_one():
                    break

    def _compact_one(self) -> bool:
        slot = self._victim()
        if slot is None:
            return False
        chunk = self._live.chunk_S[slot]
        assert chunk is not None
        self.move(slot, chunk)
        return True

    def _victim(self) -> int | None:
        """The loose sealed chunk with the least live rows for its size, where moving it is worth while."""
        full = (1 + 1 / self._max_space_amplification) / 2
        fill, slot = min(((self._fill(slot, chunk), slot) for slot, chunk in self._candidates()), default=(full, -1))
        return slot if fill < full else None

    def _candidates(self) -> Iterator[tuple[int, ChunkFile]]:
        """The loose sealed chunks that can be read."""
        for slot, chunk in self._live.slots():
            if not chunk.snapshots and chunk is not self._writer.chunk and chunk not in self._damaged:
                yield slot, chunk

    def _fill(self, slot: int, chunk: ChunkFile) -> float:
        return int(self._live.live_S[slot]) * self._live.geometry.disk_bytes_per_row / chunk.nbytes

    def _excess(self) -> float:
        """By how many chunks the loose ones are above what the live rows allow, the next piece included."""
        geometry = self._live.geometry
        piece = self.piece_rows * geometry.disk_bytes_per_row
        allowed = self._max_space_amplification * self.live_bytes()
        return (self.loose_bytes() + piece - allowed) / geometry.chunk_bytes

    def _disk_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._files.chunks.values())

    def _raise_error(self) -> None:
        if self._background is not None:
            self._background.raise_error()


_FIELDS = ("chunks", "rows_moved", "bytes_freed")


class _Released:
    """Lets go of a condition's lock, held once, for a while."""

    def __init__(self, guard: threading.Condition):
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.release()

    def __exit__(self, *exception: object) -> None:
        self._guard.acquire()
