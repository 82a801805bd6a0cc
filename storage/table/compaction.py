"""Frees disk: moves the live rows of chunks that are mostly garbage to the end of the log, and removes these chunks.

A version of a row on disk is live, or only snapshots need it, or it is garbage. A chunk that a snapshot needs is
**held**: after its live rows have moved, it is removed only with the last snapshot that needs it. Other chunks are
**loose**: moving their rows frees disk at once. With live = bytes of live rows, saved = sum over all kept snapshots of
the bytes of their rows, a = `max_space_amplification` and g = min(0.3, a - 1):

    bytes on disk <= max(a * live, (1 + g) * live + saved) + 2 chunks + 1 chunk for each kept snapshot

A save in the background counts as a kept snapshot. A chunk has a sixteenth of the live rows, or the smallest size. If
snapshots are deleted oldest first, a table with one kept snapshot takes at most max(a, 2 + g) times the live rows, and
each further snapshot at most its own rows. If a snapshot between others is deleted, garbage of up to h times the rows
of its neighbours may stay until they are deleted, with h = max(g, a - 2) - s and the s of the proof: 0.24 where a is at
most 2.3. A load, a clear or an erasure lowers `live` at once; up to h times the rows of the snapshots may then stay as
garbage until the snapshots are deleted, and loose garbage of an erasure until the next put or save.

Proof. Loose garbage can always be removed; garbage in held chunks cannot, and every live row may be overwritten before
the next save. So a save cleans the chunks before it holds them, until they have at most g - s bytes of garbage for each
live byte, with s = g / 5; the same then holds for all held chunks together. So (1 + g) * live + saved leaves at least
s * live for loose garbage in the worst case. A put is cut into pieces of at most half a chunk, and before each piece
loose chunks are cleaned until there is room for the piece. While there is no room, less than 1 / (1 + s) of the loose
chunks is live, so the same holds for a sealed loose chunk: moving its rows frees disk, and the loop ends. The bound has
2 chunks more for the chunk that is being written and the chunk that is being moved. Files are removed beside the calls:
a move and a put wait, one removal at a time, until they leave room for the rows that they write within the bound. The
bound has 1 chunk more for each snapshot, because a snapshot that holds the chunk being written also holds the rows that
are appended to it later. A save that replaces a snapshot needs the chunks of both for a while; the bound allows this,
since every row is then counted once as live and once as saved.

Pace. The excess is the disk use in chunks, less the bound, plus 1 chunk: the bound holds while excess <= 1. While a
chunk is moved in the background, the part that has been moved counts as freed already, and a put waits while the
excess, so counted, is above a half. So no put waits for a whole chunk, and puts at full speed go on at the rate at
which chunks are freed. The other half of a chunk is room for files that are still being removed. Rows that a move has
written are in the table twice until the move ends: they are the second chunk of the bound.

Cost. The chunk with the smallest live fraction u is cleaned first: u / (1 - u) rows move for each row that is freed. So
a row is written at most 1 + 1 / s times, 17 at a = 2, and far fewer times where chunks differ. Writes for each row that
was put, at a = 2 with one kept snapshot: 1.6 if the share of the table that is overwritten between saves, and
the order, are drawn anew each time. Rows overwritten at random: 1.5 to 1.9 if half the table or more is overwritten
between saves, 2.4 at a fifth, 2.9 at a twentieth. Rows overwritten in order: 1.1. Random order cannot cost less: held
chunks may have g - s of garbage, and a log of 1.3 times its live rows that is overwritten at random writes each row 2.4
times. With more disk, a = 2.5, the last two are 1.7 and 1.9.
After many puts a save cleans more chunks than it must, by up to a share of the rows put. This leaves more room for
loose garbage until the next save, which is far away if many puts lie between saves.

Invariant: a row that was put again or erased since its chunk was read is not moved.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.threads import not_run, start
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import StoreLock
from oneemb.storage.table.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.table.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.row_writer import RowWriter
from oneemb.storage.table.snapshot_store import SnapshotStore


class Background:
    """Runs one job at a time, each in a new thread. An error of a job is kept until `raise_error` raises it. `name`
    stands in the texts of errors."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run the job in the background, or not at all if no thread can be started. No other job may be running."""
        assert not self.busy
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"oneemb-{self._name}", daemon=True)
        try:
            start(self._thread)
        except RuntimeError as error:
            if not not_run(error):
                raise

    def raise_error(self) -> None:
        """Raise the error with which a job ended, as a StorageError, if it was not raised yet."""
        error, self._error = self._error, None
        if isinstance(error, StorageError):
            raise error
        if error is not None:
            raise StorageError(f"{self._name} in the background failed: {error!r}") from error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error


_Piece = tuple[np.ndarray, np.ndarray, np.ndarray]

_PIECE_ROWS = 4096
# Compaction begins in the background when the disk use exceeds the bound by this many chunks.
_EARLY = 0.25
# Room that puts leave while a chunk is being moved, as a number of chunks.
_NOT_AT_ONCE = 0.5
# `compact` skips a chunk whose live rows take at least this share of its bytes.
_FULL_ENOUGH = 0.95
# The largest g of the docstring above, and s / g: the part of the garbage that a save leaves to loose chunks.
_GARBAGE_MAX = 0.3
_LOOSE_PART = 0.2
# With p rows put since the last save and n live rows, a save may move `_MOVED_SHARE * (p - n / 2)` rows beyond need.
_MOVED_SHARE = 0.4
_MOVED_FILL_MAX = 0.98


@dataclass
class CompactionResult:
    """Result of a compaction: number of chunks that were emptied, number of live rows that were written again, and
    bytes of disk that became free, less the bytes that the moved rows take."""

    chunks: int = 0
    rows_moved: int = 0
    bytes_freed: int = 0


class Compactor:
    """Compacts the chunks of one `LiveRows`. A table makes a new compactor when it replaces its rows.

    Args:
        store: the snapshots, and the files of all chunks.
        store_lock: the lock that every call holds while it uses the rows, "the guard" below; `move` releases the lock
            while it reads a chunk.
        max_space_amplification: the number a of the file's docstring, above 1.
        background: runs compactions in a thread; None = only puts and saves compact.
    """

    def __init__(
        self, fs: FileSystem, live: LiveRows, writer: RowWriter, store: SnapshotStore, store_lock: StoreLock,
        max_space_amplification: float, background: Background | None,
    ):  # fmt: skip
        self._fs, self._live, self._writer, self._store = fs, live, writer, store
        self._store_lock, self._guard = store_lock, store_lock.lock
        self._files: ChunkFiles = store.chunk_files
        self._max_space_amplification = max_space_amplification
        self._garbage_max = min(_GARBAGE_MAX, max_space_amplification - 1)
        self._background = background
        self._stopping = False
        self._moving: ChunkFile | None = None
        # Of the move in progress: the share of the chunk's rows that have been looked at, and how many were written.
        self._moved, self._rewritten = 0.0, 0
        self._damaged: set[ChunkFile] = set()
        self._rows_since_save = 0
        self.done = CompactionResult()

    @property
    def chunk_bytes(self) -> int:
        """Size in bytes that a chunk would get if it were created now."""
        geometry = self._live.geometry
        return geometry.disk_bytes(geometry.chunk_blocks(len(self._live.index)))

    @property
    def piece_rows(self) -> int:
        """Most rows that may be put between two calls of `make_room`: half a chunk."""
        geometry = self._live.geometry
        return max(1, geometry.chunk_blocks(len(self._live.index)) * geometry.rows_per_block // 2)

    def loose_bytes(self) -> int:
        """Bytes of the chunks that no snapshot needs: without headers, and with the rows that are still in memory."""
        return self._bytes_of(self._files.loose)

    def live_bytes(self) -> int:
        """Bytes on disk that the live rows need. The number is too small before `put_pending`."""
        return int(len(self._live.index) * self._live.geometry.disk_bytes_per_row)

    def put_pending(self) -> None:
        """Put pending keys into the index, and release the chunks without live rows that are not being written."""
        self._live.put_pending()
        if self._live.emptied:
            self._live.emptied = False
            for chunk in self._live.dead_chunks():
                if self._writer.writes_to(chunk):
                    self._live.emptied = True
                else:
                    self._live.remove(chunk)

    def make_room(self, rows: int) -> None:
        """Compact until there is room for `rows` more rows: in this call if the bound is exceeded, else in the
        background. Requires the guard. After a StorageError rows could not be moved, and no row is lost."""
        # Putting pending keys can only lower the excess, so it is not needed while the excess is small.
        if self._excess() > (1 if self._background is None else _EARLY) and any(map(self._may_move, self._files.loose)):
            self.put_pending()
            while self._must_wait() and not self._stopping:
                if self._moving is not None:
                    self._guard.wait()
                    self._raise_error()
                    self.put_pending()
                elif self._excess() <= 1:
                    self.finish_removals(1)
                elif not self._compact_one():
                    break
            if self._background is not None and not self._background.busy and self._excess() > _EARLY:
                if self._least_loose() is not None:
                    self._background.start(self._run)
        else:
            while self._removals_in_the_way(None) and not self._stopping:
                self.finish_removals(1)
        self._rows_since_save += rows

    def clean_for_save(self, name: str) -> None:
        """Move rows until the chunks that a new snapshot `name` would hold have no more garbage than a save allows.
        Requires the guard, and releases it while chunks are read. Raises as `make_room`."""
        moved_before = self.done.rows_moved
        while (chunk := self._next_for_save(name, self.done.rows_moved - moved_before)) is not None:
            signals_deferred.raise_interrupt()
            self.move(chunk)
            if chunk in self._live:
                break
        self._rows_since_save = 0

    def compact(self) -> CompactionResult:
        """Move the live rows out of every loose chunk with garbage. Requires the guard."""
        before = self.done
        self.done = CompactionResult()
        try:
            self._writer.seal()
            disk = self._disk_bytes()
            for chunk in self._live.chunks():
                if chunk in self._live and not chunk.snapshots and self._fill(chunk) < _FULL_ENOUGH:
                    signals_deferred.raise_interrupt()
                    self.move(chunk)
            if not self._stopping:  # Else other rows may have replaced these, or the table may be closed.
                self._writer.write_out()
            self.finish_removals()
            self.done.bytes_freed = disk - self._disk_bytes()
            return self.done
        finally:
            self.done = CompactionResult(*(getattr(before, f) + getattr(self.done, f) for f in _FIELDS))

    def move(self, chunk: ChunkFile) -> None:
        """Move the live rows of a chunk to the end of the log, and release the chunk, which must not be being written.
        Requires the guard, held once, and releases it while the chunk is read."""
        while self._moving is not None or chunk in self._live and self._removals_in_the_way(chunk):
            if self._moving is not None:
                self._guard.wait()
            else:
                self.finish_removals(1)
            if self._stopping:
                return
        self.put_pending()
        if chunk not in self._live:
            return
        geometry, part = self._live.geometry, self._live.part(chunk)
        self._moving = chunk
        self._moved, self._rewritten, looked_at = 0.0, 0, 0
        self._files.hold(chunk)
        try:
            with self._store_lock.others_allowed():
                keys = read_keys(self._fs, chunk.keys_path, geometry, part)
                pieces = scan_rows(
                    self._fs, chunk.rows_path, geometry, part.number, keys, live_rows(part.bit_N), _PIECE_ROWS,
                    direct=self._files.direct,
                )  # fmt: skip
            # All pieces are moved in the block of this call, which lets others in only while a piece is read. While a
            # fork waits, no new block begins; and the put for which the fork waits may wait for these pieces.
            while (piece := self._read_piece(pieces)) is not None and not self._stopping:
                table_N, id_N, row_NW = piece
                self.put_pending()
                if chunk not in self._live:
                    break
                here = np.flatnonzero(self._live.has_place(chunk, self._live.index.find(table_N, id_N)))
                self._append(table_N[here], id_N[here], row_NW[here])
                looked_at += len(id_N)
                self._moved = looked_at / part.rows
                self._rewritten += len(here)
                self._guard.notify_all()  # A put that waits may have room now.
            if chunk in self._live and self._live.live_of(chunk) == 0:
                self._live.remove(chunk)
                self.done.chunks += 1
        except CorruptTableError:
            self._damaged.add(chunk)  # Not tried again: each try would fail. Its sound rows stay where they are.
            raise
        finally:
            self._moving = None
            self._files.release(chunk)
            self._guard.notify_all()

    def _read_piece(self, pieces: Iterator[_Piece]) -> _Piece | None:
        """Read the next rows of a chunk, with the guard released; None = there are no more."""
        with self._store_lock.others_allowed():
            return next(pieces, None)

    def finish_removals(self, most: int | None = None) -> None:
        """Wait until the files of released chunks are removed, or of the `most` that were released first. Requires the
        guard, and releases it."""
        with self._store_lock.others_allowed():
            self._files.finish_removals(most)

    def stop(self) -> None:
        """Stop background compaction and wait until it has ended. Requires the guard, and releases it while waiting."""
        self.stop_soon()
        while self._moving is not None:
            self._guard.wait()

    def stop_soon(self) -> None:
        """Tell background compaction to stop, without waiting."""
        self._stopping = True

    def resume(self) -> None:
        """Allow background compaction again after `stop`."""
        self._stopping = False

    def _must_wait(self) -> bool:
        """Whether a put must wait: the bound leaves no room, or puts have taken more room than a move has made."""
        chunk, excess, room = self._moving, self._excess(), 1.0
        if chunk is not None and not chunk.snapshots:
            room -= _NOT_AT_ONCE
            if chunk in self._live:
                # The end of the move frees the chunk. Each part of the move counts as if it freed its part at once.
                rewritten, to_move = self._chunks_of(self._rewritten), self._to_move(chunk)
                room += rewritten + self._moved * (chunk.runs_bytes / self.chunk_bytes - rewritten - to_move)
                room = min(room, 2 - to_move)
        return excess > room or self._removals_in_the_way(chunk)

    def _removals_in_the_way(self, chunk: ChunkFile | None) -> bool:
        """Whether chunks whose files are being removed take the room for the live rows of a chunk that is moved."""
        removing = self._files.removing_bytes / self.chunk_bytes
        to_move = self._to_move(chunk) if chunk is not None and chunk in self._live else 0.0
        return removing > 0 and self._excess() + removing + to_move > 2

    def _to_move(self, chunk: ChunkFile) -> float:
        """Size of a chunk's live rows, as a number of chunks."""
        return self._chunks_of(self._live.live_of(chunk))

    def _chunks_of(self, rows: int) -> float:
        return rows * self._live.geometry.disk_bytes_per_row / self.chunk_bytes

    def _append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        if len(id_N):
            place_N = self._writer.append(table_N, id_N, row_NW)
            self._live.put(table_N, id_N, place_N)
            self.done.rows_moved += len(id_N)

    def _run(self) -> None:
        with self._store_lock:
            while not self._stopping and not self._store_lock.broken and self._moving is None:
                self.put_pending()
                if self._excess() <= _EARLY or not self._compact_one():
                    break

    def _compact_one(self) -> bool:
        chunk = self._least_loose()
        if chunk is None:
            return False
        self.move(chunk)
        return True

    def _next_for_save(self, name: str, moved: int) -> ChunkFile | None:
        """The next chunk whose live rows must move before snapshot `name` is saved; None = no more. `moved` rows have
        been moved for this save so far."""
        self.put_pending()
        live, loose_garbage = self.live_bytes(), self._garbage_max * _LOOSE_PART
        full = 1 / (1 + loose_garbage)
        held_max = (1 + self._garbage_max - loose_garbage) * live
        spare = (self._max_space_amplification - 1 - loose_garbage) * live
        replaced, kept_rows_bytes = self._store.replaced_by(name)

        def kept(chunk: ChunkFile) -> bool:
            return chunk.snapshots > (chunk in replaced)

        def fresh(chunk: ChunkFile) -> bool:
            # Moving rows out of a chunk that another snapshot needs too would increase the bytes of held chunks.
            return self._may_move(chunk) and not kept(chunk)

        chunks, byte_C, fill_C = self._fills()
        own_bytes = int(byte_C.sum()) + self._writer.bytes_to_write(self._live)
        held_bytes = self._files.needed_bytes + self._writer.bytes_to_write(self._live)
        held_bytes -= sum(chunk.runs_bytes for chunk in replaced if chunk.snapshots == 1 and chunk not in self._live)
        for chunk in self._damaged:
            if chunk in self._live:
                own_bytes -= chunk.runs_bytes
                held_bytes -= 0 if kept(chunk) else chunk.runs_bytes
        # Rows that the replaced snapshot needs too exist twice during the save: room for them is made first.
        chosen = _least(chunks, fill_C, self._may_move_loose, full) if self._excess() > 0 else None
        if chosen is None and held_bytes > max(spare, held_max + kept_rows_bytes):
            chosen = _least(chunks, fill_C, fresh, full)
        if chosen is None and own_bytes > max(spare, held_max):
            chosen = _least(chunks, fill_C, self._may_move, full)
        if chosen is None:
            chosen = _least(chunks, fill_C, fresh, _MOVED_FILL_MAX)
            many = self._rows_since_save - len(self._live.index) / 2
            if chosen is not None and moved + self._live.live_of(chosen) > _MOVED_SHARE * many:
                chosen = None
        return chosen

    @property
    def _full(self) -> float:
        """A put does not move the rows of chunks that are filled at least this far; see the file's docstring."""
        if self._store.rows_bytes():
            return 1 / (1 + self._garbage_max * _LOOSE_PART)
        return (1 + 1 / self._max_space_amplification) / 2

    def _may_move(self, chunk: ChunkFile) -> bool:
        # A compactor whose rows a load or a clear has replaced moves no chunk of the new rows.
        return chunk in self._live and not (self._writer.writes_to(chunk) or chunk in self._damaged)

    def _may_move_loose(self, chunk: ChunkFile) -> bool:
        return not chunk.snapshots and self._may_move(chunk)

    def _least_loose(self) -> ChunkFile | None:
        """The chunk that a put moves next: no snapshot needs it. None = there is none."""
        chunks, _, fill_C = self._fills()
        return _least(chunks, fill_C, self._may_move_loose, self._full)

    def _fills(self) -> tuple[list[ChunkFile], np.ndarray, np.ndarray]:
        """The chunks, and of each the bytes on disk, int64 [C], and the live share of these bytes, float64 [C]."""
        chunks, live_C = self._live.live_counts()
        byte_C = np.fromiter((chunk.runs_bytes for chunk in chunks), np.int64, len(chunks))
        return chunks, byte_C, live_C * self._live.geometry.disk_bytes_per_row / np.maximum(byte_C, 1)

    def _fill(self, chunk: ChunkFile) -> float:
        return self._live.live_of(chunk) * self._live.geometry.disk_bytes_per_row / max(1, self._bytes_of([chunk]))

    def _excess(self) -> float:
        """Bytes by which the disk use, with the next piece of a put, exceeds the bound, as a number of chunks."""
        geometry = self._live.geometry
        piece = self.piece_rows * geometry.disk_bytes_per_row
        live = self.live_bytes()
        with_snapshots = (1 + self._garbage_max) * live + self._store.rows_bytes()
        allowed = max(self._max_space_amplification * live, with_snapshots)
        disk = self._files.needed_bytes + self._writer.bytes_to_write(self._live)
        return (disk + piece - allowed) / self.chunk_bytes

    def _bytes_of(self, chunks: Collection[ChunkFile]) -> int:
        """Bytes of these chunks: without headers, and with the rows that are still in memory."""
        return sum(chunk.runs_bytes for chunk in chunks) + self._writer.bytes_to_write(chunks)

    def _disk_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._files.chunks.values())

    def _raise_error(self) -> None:
        if self._background is not None:
            self._background.raise_error()


def _least(
    chunks: list[ChunkFile], fill_C: np.ndarray, may: Callable[[ChunkFile], bool], full: float
) -> ChunkFile | None:
    """The least filled chunk, the oldest of equals, among chunks that are filled below `full` and for which `may`
    returns True; None = there is none."""
    below = np.flatnonzero(fill_C < full)
    number_C = np.fromiter((chunks[c].number for c in below), np.int64, len(below))
    return next((chunks[c] for c in below[np.lexsort((number_C, fill_C[below]))] if may(chunks[c])), None)


_FIELDS = ("chunks", "rows_moved", "bytes_freed")
