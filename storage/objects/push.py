"""Copies snapshots of a folder into an object store, while a job may write to the folder.

Files are cut into pieces of 16 MiB, which several threads upload. A piece that the store has is not uploaded, so the
next push continues one that was killed. A chunk that an earlier snapshot in the store has is not even read.

Invariants:
- the folder is only read, and no lock is taken;
- the description of a part is written after its pieces, and only if the folder still has the part;
- chunks and files of snapshots are compared with their checksums before they are uploaded;
- a push by a user adds no snapshot of another table: two chunks of one number would then have different rows, and a
  pull of all snapshots would fail.
"""

import os
import struct
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from oneemb.storage.errors import CorruptTableError, OtherTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.objects.manifests import (
    StoredFile,
    StoredPart,
    current_of,
    get_part,
    has_part,
    part_keys_in,
    put_part,
)
from oneemb.storage.objects.marks import Pushing
from oneemb.storage.objects.object_store import ObjectStore, Piece, object_key, store_beside
from oneemb.storage.objects.transfers import Progress, Progressing, in_order
from oneemb.storage.snapshots.snapshot_parts import FoundParts, Part, look_at, rank_folder_name
from oneemb.storage.table.chunk_damage import check_chunk
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_paths
from oneemb.storage.table.delta import Delta
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.salvage import copied
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart

_PIECE_BYTES = 16 << 20
_SUM = struct.Struct("<Q")


@dataclass
class PushResult:
    """Result of a push.

    Args:
        snapshots: names of the snapshots of which the store has all parts, pushed by this call or earlier.
        pushed: names of the snapshots of which this call has written a part.
        waiting: names of the snapshots of which other ranks have parts that are not in the store yet.
        gone: names of the snapshots that the job has deleted or replaced during the call.
        damaged: {name of a snapshot that was not pushed: reason}.
        bytes_uploaded: bytes of the objects that were written.
    """

    snapshots: list[str] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    bytes_uploaded: int = 0


def push(
    path: str | os.PathLike[str], url: str, names: Collection[str] | None = None, *,
    options: dict[str, Any] | None = None, progress: Progress | None = None,
) -> PushResult:  # fmt: skip
    """Copy snapshots of the table at `path`, or of the tables of ranks there, to an object store.

    Each rank may push the parts that are on its own disk. A snapshot is in the store when all its parts are.

    Args:
        url: where the snapshots of this table lie, such as `s3://bucket/items`.
        names: names of the snapshots; parents of deltas are pushed too. None = all.
        options: arguments for the file system of fsspec.
        progress: called with (bytes done, bytes to do).

    Raises:
        SnapshotNotFoundError: there is no snapshot of one of the names.
        OtherTableError: the store has snapshots of another table.
        StorageError: there is no table, or the store or a file cannot be used.
        TypeError: an argument is of a wrong type.
        ValueError, ImportError: fsspec does not know the URL, or it is a folder in the table's; or a package is
            missing.
    """
    store, folder = store_beside(url, path, names, options)
    work = _Push(store, folder, progress, Pushing(store))
    work.run(names)
    return work.result


def push_of_writer(store: ObjectStore, folder: str, name: str, writer: str, rank: int) -> PushResult:
    """Push the part of a snapshot that is in the table of `folder`, for a writer whose store may have snapshots of
    several tables, such as those of jobs that went on from an older checkpoint. No two snapshots of such a store are
    pulled into one folder.

    Args:
        writer, rank: as for `Pushing`.
    """
    work = _Push(store, folder, None, Pushing(store, writer, rank), any_table=True)
    work.run([name])
    return work.result


class _Push:
    def __init__(
        self, store: ObjectStore, path: str, progress: Progress | None, mark: Pushing, *, any_table: bool = False
    ):
        self._fs, self._store, self._path, self._moved = LocalFileSystem(), store, path, Progressing(progress)
        self._mark, self._any_table = mark, any_table
        self._known: dict[tuple[int, tuple[int, ...]], tuple[StoredFile, ...]] = {}
        self._ends: dict[tuple[str, int], dict[tuple[int, ...], StoredFile]] = {}
        """{(folder of a table in a pull, number of a chunk): {chunk's numbers: its file of keys}}."""
        self.result = PushResult()

    def run(self, names: Collection[str] | None) -> None:
        found = look_at([self._path])
        parts = self._chosen(found, names)
        left = {(part.folder, part.info.name) for part in found.leftovers()}
        parts = [part for part in parts if (part.folder, part.info.name) not in left and not part.marked]
        wanted = None if names is None else {part.whole.name for part in parts}
        for name, reason in found.damage().items():
            if wanted is None or name.partition("~")[0] in wanted:
                self.result.damaged[name] = reason
        new = [part for part in parts if not has_part(self._store, part.whole.name, _identity(part), part.whole.shard)]
        self._moved.total = sum(part.info.bytes for part in new)
        with self._mark if new else nullcontext():
            if new:
                self._remember()
            for part in sorted(parts, key=lambda part: part.info.sequence):
                self._push(part, is_new=part in new)
        for name in dict.fromkeys(part.whole.name for part in parts):
            if name in self.result.gone or name in self.result.damaged:
                continue
            newest = max((part for part in parts if part.whole.name == name), key=_sequence)
            try:
                is_complete = current_of(self._store, name)[0] == _identity(newest)
            except SnapshotNotFoundError:
                is_complete = False
            (self.result.snapshots if is_complete else self.result.waiting).append(name)

    def _chosen(self, found: FoundParts, names: Collection[str] | None) -> list[Part]:
        """The parts of these snapshots and of their ancestors; None = all parts."""
        if names is None:
            return list(found.parts)
        chosen: list[str] = []
        rest = list(names)
        while rest:
            name = rest.pop()
            if name in chosen:
                continue
            chosen.append(name)
            parts = found.parts_of(name)
            if not parts:
                found.get(name)  # raises an error that says what there is
            for part in parts:
                delta = Delta.of_meta(part.info.meta, part.info.name)
                rest += [] if delta is None else [delta.since]
        return [part for part in found.parts if part.whole.name in chosen]

    def _remember(self) -> None:
        """Note the files of chunks that the store has, so that they need not be read again."""
        there = set(self._store.keys("objects/"))
        for name, identity, shard in part_keys_in(self._store):
            try:
                part = get_part(self._store, name, identity, shard)
            except StorageError:
                continue  # A pull of this snapshot raises the error; a push need not.
            for rows, keys in zip(part.files[:-1:2], part.files[1:-1:2], strict=True):
                self._ends.setdefault((part.folder, rows.chunk[0]), {})[rows.chunk] = keys
                if all(object_key(digest) in there for digest, _ in (*rows.pieces, *keys.pieces)):
                    self._known[shard, rows.chunk] = rows, keys

    def _push(self, part: Part, *, is_new: bool) -> None:
        name = part.whole.name
        try:
            if is_new:
                stored = self._upload(part)
                if not self._is_here(part):
                    raise SnapshotNotFoundError(f"snapshot {name!r} was deleted while it was pushed")
            else:
                stored = get_part(self._store, name, _identity(part), part.whole.shard)
            put_part(self._store, stored)
        except StorageError as error:
            is_lost = isinstance(error, SnapshotNotFoundError | CorruptTableError)
            if not is_lost and not isinstance(error.__cause__, FileNotFoundError):
                raise
            if self._is_here(part):
                self.result.damaged[name] = str(error)
            elif name not in self.result.gone:
                self.result.gone.append(name)
            return
        if is_new and name not in self.result.pushed:
            self.result.pushed.append(name)

    def _is_here(self, part: Part) -> bool:
        """Whether the folder still has a part, of the same identity."""
        try:
            found = SnapshotFiles(self._fs, f"{part.folder}/snapshots").read(part.info.name)
        except SnapshotNotFoundError:
            return False
        except StorageError:
            return True
        return found.info.identity == part.info.identity

    def _upload(self, part: Part) -> StoredPart:
        """Upload the pieces of a part that the store lacks. Returns the description of the part."""
        record = SnapshotFiles(self._fs, f"{part.folder}/snapshots").read_checked(part.info.name)
        files: list[StoredFile] = []
        for chunk in record.parts:
            if not self._any_table:
                self._check_same(part, chunk)
            files += self._chunk(part, record.geometry, chunk)
        delta = Delta.of_meta(record.info.meta, record.info.name)
        try:
            size = self._fs.size(record.path)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(f"{record.path} was deleted while it was pushed") from error
        files.append(self._file(record.path, f"snapshots/{os.path.basename(record.path)}", size))
        return StoredPart(
            part.whole.name, _identity(part), part.info.name, part.whole.shard, part.whole.shards,
            record.info.sequence, record.info.rows, None if delta is None else (delta.since, delta.identity),
            tuple(files), record.info.created,
        )  # fmt: skip

    def _check_same(self, part: Part, chunk: ChunkPart) -> None:
        """Raise StorageError if the store has a chunk of this number with other keys. The last checksum of a file of
        keys covers all of it, and stays at its place when the file grows."""
        whole = part.whole
        folder = "." if whole.shards == 1 else rank_folder_name(whole.shard, whole.shards)
        path = chunk_paths(f"{part.folder}/chunks", chunk.number)[1]
        for (_, _, size, checksum), keys in self._ends.get((folder, chunk.number), {}).items():
            if size <= self._fs.size(path):
                there, here = _SUM.pack(checksum), self._bytes_of(path, size - _SUM.size)
            else:
                there, here = self._stored_bytes(keys, chunk.keys_bytes - _SUM.size), _SUM.pack(chunk.keys_sum)
            if there != here:
                raise OtherTableError(
                    f"{self._store.url} must have snapshots of one table, but its chunk {chunk.number} has other keys"
                    f" than {path}: its snapshots are of another table, or of a job that went on from an older snapshot"
                    " in another folder; push to another URL, or delete these snapshots with `oneemb stored delete`"
                )

    def _bytes_of(self, path: str, begin: int) -> bytes:
        return b"".join(bytes(one) for one in copied(self._fs, path, _SUM.size, begin))

    def _stored_bytes(self, file: StoredFile, begin: int) -> bytes:
        """The bytes of a checksum at this place of a file in the store."""
        data, at = b"", 0
        for piece in file.pieces:
            if at + piece[1] > begin and at < begin + _SUM.size:
                data += self._store.get(piece)[max(begin - at, 0) : begin + _SUM.size - at]
            at += piece[1]
        return data

    def _chunk(self, part: Part, geometry: Geometry, chunk: ChunkPart) -> Iterable[StoredFile]:
        numbers, source = (chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum), part.folder
        known = self._known.get((part.whole.shard, numbers), ())
        if len(known) == 2:
            self._moved.add(sum(file.size for file in known))
            return known
        check_chunk(self._fs, f"{source}/chunks", geometry, chunk)
        sizes = ROWS_BEGIN + chunk.blocks * geometry.block_bytes, chunk.keys_bytes
        paths = chunk_paths(f"{source}/chunks", chunk.number)
        files = tuple(
            self._file(path, f"chunks/{os.path.basename(path)}", size, numbers)
            for path, size in zip(paths, sizes, strict=True)
        )
        self._known[part.whole.shard, numbers] = files
        return files

    def _file(self, path: str, name: str, size: int, chunk: tuple[int, ...] = ()) -> StoredFile:
        """Upload the first `size` bytes of a file."""

        def upload(begin: int) -> tuple[Piece, bool]:
            data = b"".join(bytes(one) for one in copied(self._fs, path, min(_PIECE_BYTES, size - begin), begin))
            return self._store.put(data)

        pieces: list[Piece] = []
        for piece, is_new in in_order(upload, range(0, size, _PIECE_BYTES)):
            self._mark.write_again()
            pieces.append(piece)
            self.result.bytes_uploaded += piece[1] if is_new else 0
            self._moved.add(piece[1])
        return StoredFile(name, size, tuple(pieces), chunk)


def _identity(part: Part) -> str:
    return part.identity or part.info.identity


def _sequence(part: Part) -> int:
    return part.info.sequence
