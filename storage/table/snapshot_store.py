"""The snapshots of an open table, and the chunks that they hold.

Invariants:
- a snapshot holds its chunks from before its file appears until a loss of power can no longer undo its removal;
- no two snapshots of a table get the same sequence, even if one is deleted before the other is saved: the sequence of
  the record in LOCK is at least that of every snapshot that has been deleted;
- LOCK names a snapshot only while the snapshot survives a loss of power: from after step 7 of its save until before its
  removal begins. So a missing snapshot that LOCK names was removed by something other than oneemb.
"""

import errno
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.fs import FileSystem, doing, storage_error
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles, chunk_numbers
from oneemb.storage.table.chunk_scan import live_rows
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.json_lists import from_json, to_json
from oneemb.storage.table.recovery import Recovery, find_lost, needed_bytes, read_snapshots, remove_orphans
from oneemb.storage.table.snapshot_file import RenameUncertainError, SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotInfo, SnapshotRecord
from oneemb.storage.table.writer_lock import KnownSnapshots, WriterLock


@dataclass
class HeldRows:
    """The live rows that were on disk at one moment, chunk by chunk. Their chunk files are not deleted until
    `release`."""

    geometry: Geometry
    parts: list[ChunkPart]
    chunks: list[ChunkFile]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Number of bytes of chunk files that these rows need."""
        block_bytes = self.geometry.block_bytes
        return sum(ROWS_BEGIN + part.blocks * block_bytes + part.keys_bytes for part in self.parts)

    def release(self, files: ChunkFiles) -> None:
        for chunk in self.chunks:
            files.release(chunk)
        self.chunks = []

    def leave_out(self, then: Mapping[int, ChunkPart], files: ChunkFiles) -> None:
        """Leave out rows that are at the same places as in `then`, {chunk number: rows that were live earlier}, and
        release chunks of which no row is left."""
        parts_and_chunks = zip(self.parts, self.chunks, strict=True)
        kept = [(rows_not_in(part, then.get(part.number)), chunk) for part, chunk in parts_and_chunks]
        for part, chunk in kept:
            if not part.rows:
                files.release(chunk)
        self.parts = [part for part, _ in kept if part.rows]
        self.chunks = [chunk for part, chunk in kept if part.rows]


def rows_not_in(part: ChunkPart, other: ChunkPart | None) -> ChunkPart:
    """The rows of a part that are not in `other`, an earlier part of the same chunk; None = all rows."""
    if other is None:
        return part
    bit_N, size = part.bit_N.copy(), min(len(part.bit_N), len(other.bit_N))
    bit_N[:size] &= ~other.bit_N[:size]
    return replace(part, bit_N=bit_N, rows=len(live_rows(bit_N)))


class SnapshotStore:
    """The snapshots of an open table. Making this object reads all snapshots and removes files that none of them needs.

    Args:
        direct: whether chunks are read and written past the system's cache.
        recovery: object that records which snapshots were found and which files were removed.
        lock: the writer's lock, held, with the record of the snapshots.
        remove_lost: whether to remove also the files that only lost snapshots may need (see `Recovery`).

    Raises:
        StorageError: the folder no longer belongs to the writer, or its directories cannot be read.
    """

    def __init__(
        self, fs: FileSystem, path: str, direct: bool, recovery: Recovery, lock: WriterLock, remove_lost: bool = False
    ):
        lock.check()  # Files that are removed below must belong to this writer.
        self._fs, self._chunks_path, self._recovery, self._lock = fs, f"{path}/chunks", recovery, lock
        self.files = SnapshotFiles(fs, f"{path}/snapshots")
        records = read_snapshots(self.files, recovery)
        needed = needed_bytes(records)
        with doing("read the directories of the table at", path):
            # A writer may have ended between a rename and the sync of the folder; a loss of power could undo the
            # rename.
            fs.sync_directory(self.files.directory)
            next_number = max([*chunk_numbers(fs.names(self._chunks_path)).values(), *needed, 0]) + 1
        recorded = 0 if lock.known is None else lock.known.next_chunk
        next_number = max(next_number, recorded)
        self._chunk_max = max([*needed, recorded - 1])
        """Greatest number of a chunk that a snapshot has or has had."""
        self._sequence = max([lock.sequence, *(record.info.sequence for record in records)])
        self._durable = {*recovery.snapshots, *recovery.damaged}
        """Names of the snapshots that survive a loss of power."""
        self._keep_below = 0
        if not remove_lost or recovery.damaged:
            found = find_lost(lock.known, self._durable, next_number)
            recovery.lost, recovery.lost_more, self._keep_below = found
        remove_orphans(fs, self._chunks_path, self.files, needed, self._keep_below, recovery)
        if lock.keeps_records and not (recovery.kept or recovery.lost or recovery.damaged):
            self._keep_below = recovery.lost_more = 0
        self._held: dict[str, tuple[SnapshotRecord, list[ChunkFile]]] = {
            record.info.name: (record, []) for record in records
        }
        self._saving: list[tuple[SnapshotRecord, list[ChunkFile]]] = []
        self._record_if_possible()
        self.chunk_files = ChunkFiles(fs, self._chunks_path, next_number, direct, lock)
        self.chunk_files.keep_below = next_number if recovery.damaged else self._keep_below
        self._removed: list[tuple[SnapshotRecord, list[ChunkFile]]] = []
        """Removed snapshots that a loss of power may bring back, so that they still hold their chunks."""
        for record in records:
            self._held[record.info.name] = record, [self._adopt(record, part) for part in record.parts]

    def infos(self) -> list[SnapshotInfo]:
        """The snapshots, oldest first."""
        return [record.info for record, _ in self._held.values()]

    def exists(self, name: str) -> bool:
        return name in self._held or name in self._recovery.damaged

    def may_save(self, name: str, overwrite: bool) -> None:
        """Raise SnapshotExistsError if there is a snapshot of this name that must not be overwritten; ValueError if no
        snapshot may have the name."""
        self.files.path(name)
        if self.exists(name) and not overwrite:
            raise SnapshotExistsError.named(name, f"at {self.files.path(name)}")

    def describe(
        self, name: str, rows: HeldRows, meta: dict[str, Any], created: float, identity: str | None, sequence: int
    ) -> SnapshotRecord:
        """The record of a new snapshot of these rows. Raises TypeError if JSON cannot hold `meta`."""
        try:
            meta = from_json(to_json(meta))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"meta must be a dict that JSON can hold: {error}; got {meta!r}") from error
        if not isinstance(meta, dict):
            raise TypeError(f"meta must be a dict, got {meta!r}")
        self._sequence = max(self._sequence + 1, sequence)
        geometry = rows.geometry
        info = SnapshotInfo(
            name=name, rows=rows.rows, bytes=rows.nbytes, row_width=geometry.row_width,
            physical_block_size=geometry.physical_block_size, created=created, sequence=self._sequence, meta=meta,
            format_version=1, identity=identity or uuid.uuid4().hex,
            saved_by=f"process {os.getpid()} on host {socket.gethostname()}",
        )  # fmt: skip
        return SnapshotRecord(info, geometry, rows.parts, self.files.path(name))

    def save(self, record: SnapshotRecord, rows: HeldRows) -> None:
        """Do steps 2 to 7 of a save (see FORMAT.md). From then on the snapshot holds the chunks of `rows`. After a
        RenameUncertainError the snapshot exists, but a loss of power may undo that; after any other StorageError it
        does not exist, and the chunks are released."""
        for chunk in rows.chunks:
            self.chunk_files.need(chunk, snapshots=1)
        self._saving.append((record, rows.chunks))
        try:
            self._make_durable(record, rows)
        except BaseException as error:
            self._end_save(record, rows, error)
            raise
        self._end_save(record, rows, None)

    def _make_durable(self, record: SnapshotRecord, rows: HeldRows) -> None:
        signals_deferred.raise_interrupt()  # Nothing of the snapshot exists yet.
        self._lock.check()
        self.chunk_files.sync_all(rows.chunks)  # Step 2.
        self.chunk_files.sync_names()  # Step 3.
        self.files.write(record)  # Steps 4 to 7.
        self._durable |= {record.info.name, *self._held}
        self._record_if_possible()

    def rows_bytes(self) -> int:
        """Bytes on disk of the rows of all snapshots that hold chunks, those being saved included."""
        return sum(_rows_bytes(record) for record, _ in [*self._held.values(), *self._removed, *self._saving])

    def replaced_by(self, name: str) -> tuple[set[ChunkFile], int]:
        """(chunks of the snapshot `name`, bytes on disk of the rows of all other snapshots)."""
        if name not in self._held:
            return set(), self.rows_bytes()
        record, chunks = self._held[name]
        return set(chunks), self.rows_bytes() - _rows_bytes(record)

    def _end_save(self, record: SnapshotRecord, rows: HeldRows, error: BaseException | None) -> None:
        """End a save. Without an error, or if only the rename may be undone by a loss of power, the snapshot holds the
        chunks of `rows`; after any other error the chunks are released."""
        name = record.info.name
        self._saving = [saving for saving in self._saving if saving[0] is not record]
        for part in record.parts:
            part.bit_N = np.empty(0, np.uint8)
        for array in record.arrays.values():
            array.data = None
        if error is None:
            self._release_removed()
            self._forget(name)
        elif isinstance(error, RenameUncertainError):
            self._keep_held(name)
        else:
            self._release(rows.chunks)
            return
        self._held[name] = record, rows.chunks

    def delete(self, name: str) -> None:
        """Remove a snapshot, durably, and release its chunks."""
        if not self.exists(name):
            raise self.files.not_found(name)
        self._lock.check()
        durable = self._durable
        self._durable = durable - {name}
        try:
            self._record()
        except OSError as error:
            # On a full disk remove the snapshot's file first, which makes room, and overwrite LOCK afterwards: some
            # file systems need free space even to overwrite.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._durable = durable
                raise storage_error(error, "write down which snapshots there are in", self._lock.path) from error
        try:
            self.files.remove(name)
        except RenameUncertainError:
            self._keep_held(name)
            raise
        except StorageError:
            self._durable = durable
            raise
        self._release_removed()
        self._forget(name)
        self._record_if_possible()

    def _record(self) -> None:
        """Write the record of the snapshots to LOCK, durably, unless it is up to date."""
        lost, more = self._recovery.lost, self._recovery.lost_more
        names = tuple(sorted(self._durable))
        known = KnownSnapshots(names, len(names), tuple(lost), more, self._keep_below, self._next_chunk())
        if known != self._lock.known:
            self._lock.record(known, at_least=self._sequence)

    def _next_chunk(self) -> int:
        """`next_chunk` of the record: a number that was given once is not given again, since a copy of the folder may
        have the other chunk of that number."""
        records = [record for name, (record, _) in self._held.items() if name in self._durable]
        saving = {record.info.name: record for record, _ in self._saving}
        records = [record for record in records if record.info.name not in saving] + list(saving.values())
        present = max((part.number for record in records for part in record.parts), default=0)
        self._chunk_max = max(self._chunk_max, present)
        recorded = 0 if self._lock.known is None else self._lock.known.next_chunk
        return recorded if present == self._chunk_max else max(recorded, self._chunk_max + 1)

    def _record_if_possible(self) -> None:
        try:
            self._record()
        except OSError:
            pass  # The record in LOCK is old but not wrong; the next save or open writes a new one.

    def _adopt(self, record: SnapshotRecord, part: ChunkPart) -> ChunkFile:
        chunk = self.chunk_files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
        self.chunk_files.need(chunk, snapshots=1)
        return chunk

    def _keep_held(self, name: str) -> None:
        """Keep holding the chunks of a removed snapshot, since a loss of power may bring it back."""
        if name in self._held:
            self._removed.append(self._held.pop(name))

    def _forget(self, name: str) -> None:
        """Release the chunks of a snapshot whose removal is durable."""
        if name in self._held:
            self._release(self._held.pop(name)[1])
        if self._recovery.damaged.pop(name, None) is not None and not self._recovery.damaged:
            self.chunk_files.keep_below = self._keep_below
            in_use = dict.fromkeys(self.chunk_files.chunks, (1 << 62, 1 << 62))
            remove_orphans(self._fs, self._chunks_path, self.files, in_use, self._keep_below, self._recovery)

    def _release_removed(self) -> None:
        """Release the chunks of removed snapshots. Call it once the folder has been synced: before that, a loss of
        power could bring a removed snapshot back."""
        for _, chunks in self._removed:
            self._release(chunks)
        self._removed = []

    def _release(self, chunks: list[ChunkFile]) -> None:
        for chunk in chunks:
            self.chunk_files.need(chunk, snapshots=-1)
            self.chunk_files.release(chunk)


def _rows_bytes(record: SnapshotRecord) -> int:
    return int(record.info.rows * record.geometry.disk_bytes_per_row)
