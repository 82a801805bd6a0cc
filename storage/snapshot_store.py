"""The snapshots of an open table: which there are, and which chunks they hold.

Invariant: a chunk is held for a snapshot from before the snapshot's file appears until its removal is certain to
outlive a loss of power.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from oneemb.storage.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles
from oneemb.storage.errors import SnapshotExistsError
from oneemb.storage.fs import FileSystem
from oneemb.storage.geometry import Geometry
from oneemb.storage.recovery import Recovery, needed_bytes, read_snapshots, remove_orphans
from oneemb.storage.snapshot_file import ChunkPart, RenameUncertainError, SnapshotFiles, SnapshotInfo, SnapshotRecord

__all__ = ["Cut", "SnapshotStore"]


@dataclass
class Cut:
    """The rows on disk at one moment: for each chunk its live rows; the chunks are held until `release`."""

    geometry: Geometry
    parts: list[ChunkPart]
    chunks: list[ChunkFile]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks' files that the cut needs."""
        block_bytes = self.geometry.block_bytes
        return sum(ROWS_BEGIN + part.blocks * block_bytes + part.keys_bytes for part in self.parts)

    def release(self, files: ChunkFiles) -> None:
        for chunk in self.chunks:
            files.release(chunk)
        self.chunks = []


class SnapshotStore:
    """Reads the snapshots at a path and frees what they do not need.

    Args:
        fs: where they are.
        path: of the table, whose writer's lock is held.
        direct: whether chunks are read and written past the system's cache.
        recovery: is told what was found and removed.
    """

    def __init__(self, fs: FileSystem, path: str, direct: bool, recovery: Recovery):
        self._fs, self._chunks_path, self._recovery = fs, f"{path}/chunks", recovery
        self.files = SnapshotFiles(fs, f"{path}/snapshots")
        records = read_snapshots(self.files, recovery)
        next_number = remove_orphans(fs, self._chunks_path, self.files, needed_bytes(records), recovery)
        self.chunk_files = ChunkFiles(fs, self._chunks_path, next_number, direct)
        self.chunk_files.keep_below = next_number if recovery.damaged else 0
        self._held: dict[str, tuple[SnapshotRecord, list[ChunkFile]]] = {}
        self._uncertain: list[list[ChunkFile]] = []
        for record in records:
            self._held[record.info.name] = record, [self._adopt(record, part) for part in record.parts]
        self._sequence = max((record.info.sequence for record in records), default=0)

    def infos(self) -> list[SnapshotInfo]:
        """Oldest first."""
        return [record.info for record, _ in self._held.values()]

    def exists(self, name: str) -> bool:
        return name in self._held or name in self._recovery.damaged

    def must_not_exist(self, name: str) -> None:
        if self.exists(name):
            raise SnapshotExistsError(
                f"there is a snapshot named {name!r} already, at {self.files.path(name)}; pass overwrite=True to "
                f"replace it, or delete it, or choose another name"
            )

    def describe(self, name: str, cut: Cut, meta: dict[str, Any], created: float) -> SnapshotRecord:
        """The record of a snapshot to be written."""
        try:
            meta = json.loads(json.dumps(meta))
        except (TypeError, ValueError) as error:
            raise TypeError(f"meta must be a dict that JSON can hold: {error}; got {meta!r}") from error
        self._sequence += 1
        geometry = cut.geometry
        info = SnapshotInfo(
            name=name, rows=cut.rows, bytes=cut.nbytes, row_width=geometry.row_width,
            physical_block_size=geometry.physical_block_size, created=created, sequence=self._sequence, meta=meta,
            format_version=1,
        )  # fmt: skip
        return SnapshotRecord(info, geometry, cut.parts, self.files.path(name))

    def make_durable(self, record: SnapshotRecord, cut: Cut) -> None:
        """Steps 2 to 7 of a save. May run beside a writer that appends to the chunks.

        Raises:
            StorageError: the snapshot is not there.
            RenameUncertainError: it is there, and may yet go.
        """
        for chunk in cut.chunks:
            self.chunk_files.sync(chunk)  # 2.
        self.chunk_files.sync_names()  # 3.
        self.files.write(record)  # 4. to 7.

    def hold(self, cut: Cut) -> None:
        """Count the chunks of a cut to the snapshots, for one that is being saved."""
        for chunk in cut.chunks:
            chunk.snapshots += 1

    def enter(self, record: SnapshotRecord, cut: Cut, error: BaseException | None) -> None:
        """A save has ended with this error, or without: the snapshot holds the cut's chunks, or nothing does."""
        name = record.info.name
        for part in record.parts:
            part.bit_N = np.empty(0, np.uint8)
        if error is None:
            self._settle()
            self._forget(name)
        elif isinstance(error, RenameUncertainError):
            self._leave(name)
        else:
            self._release(cut.chunks)
            return
        self._held[name] = record, cut.chunks

    def delete(self, name: str) -> None:
        """Remove a snapshot and let its chunks go."""
        if not self.exists(name):
            raise self.files.not_found(name)
        try:
            self.files.remove(name)
        except RenameUncertainError:
            self._leave(name)
            raise
        self._settle()
        self._forget(name)

    def _adopt(self, record: SnapshotRecord, part: ChunkPart) -> ChunkFile:
        chunk = self.chunk_files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
        chunk.snapshots += 1
        return chunk

    def _leave(self, name: str) -> None:
        """There is no snapshot of this name, but a loss of power may bring it back: its chunks stay held."""
        if name in self._held:
            self._uncertain.append(self._held.pop(name)[1])

    def _forget(self, name: str) -> None:
        """There is no snapshot of this name any more, for certain."""
        if name in self._held:
            self._release(self._held.pop(name)[1])
        if self._recovery.damaged.pop(name, None) is not None and not self._recovery.damaged:
            self.chunk_files.keep_below = 0
            in_use = dict.fromkeys(self.chunk_files.chunks, (1 << 62, 1 << 62))
            remove_orphans(self._fs, self._chunks_path, self.files, in_use, self._recovery)

    def _settle(self) -> None:
        """The names of the snapshots are on the device: nothing that was removed can come back."""
        for chunks in self._uncertain:
            self._release(chunks)
        self._uncertain = []

    def _release(self, chunks: list[ChunkFile]) -> None:
        for chunk in chunks:
            chunk.snapshots -= 1
            self.chunk_files.release(chunk)
