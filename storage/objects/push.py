"""Copies snapshots of a folder into an object store, while a job may write to the folder.

Files are cut into pieces of 16 MiB, which several threads upload. A piece that the store has is not uploaded, so a push
that was killed goes on where it ended. The files of a chunk that an earlier snapshot in the store has are not even
read.

Invariants:
- the folder is only read, and no lock is taken;
- the text of a part is written after its pieces, and only if the folder still has the part;
- chunks are compared with their checksums before they are uploaded.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.objects.manifests import (
    StoredFile,
    StoredPart,
    age_of_part,
    current_of,
    get_part,
    has_part,
    names_in,
    part_keys_in,
    put_part,
    remove_current,
    remove_part,
)
from oneemb.storage.objects.object_store import ObjectStore, Piece, object_key
from oneemb.storage.snapshots.snapshot_parts import FoundParts, Part, look_at
from oneemb.storage.table.chunk_damage import examine_chunk
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_paths
from oneemb.storage.table.delta import Delta
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.salvage import copied
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart

_PIECE_BYTES = 16 << 20
_THREADS = 8
_DAY_S = 86400.0

_Progress = Callable[[int, int], None]


@dataclass
class PushResult:
    """Result of a push.

    Args:
        snapshots: names of the snapshots that are whole in the store now, of those that were to be pushed.
        pushed: names of those of which this call has written a part.
        waiting: names of those of which other ranks have not pushed their parts yet.
        gone: names of snapshots that the job has deleted or replaced meanwhile.
        damaged: {name of a snapshot that was not pushed: reason}.
        bytes_uploaded: bytes of the objects that were written.
    """

    snapshots: list[str] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    bytes_uploaded: int = 0


@dataclass
class CleanResult:
    """Result of `clean_store`: numbers of objects and of parts that were removed, and the bytes of the objects."""

    objects: int = 0
    parts: int = 0
    bytes: int = 0


def push(
    path: str, url: str, names: Collection[str] | None = None, *, options: dict[str, Any] | None = None,
    progress: _Progress | None = None,
) -> PushResult:  # fmt: skip
    """Copy snapshots of the table at `path`, or of the tables of ranks there, to an object store.

    Each rank may push the parts that its own disk has: a snapshot is in the store once all parts are.

    Args:
        url: where the snapshots of this table lie, such as `s3://bucket/items`.
        names: names of the snapshots; parents of deltas are pushed too. None = all.
        options: arguments for the file system of fsspec.
        progress: called with (bytes done, bytes of the parts to push).

    Raises:
        SnapshotNotFoundError: there is no snapshot of one of the names.
        StorageError: there is no table, or the store or a file cannot be used.
        ValueError, ImportError: the URL is none that fsspec knows, or a package is missing.
    """
    store = ObjectStore(url, options)
    work = _Push(store, os.path.realpath(path), progress)
    work.run(names)
    return work.result


def delete_stored(url: str, name: str, *, options: dict[str, Any] | None = None) -> None:
    """Delete a snapshot from an object store. Its objects go with `clean_store`.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        StorageError: it is the parent of deltas in the store, or the store cannot be used.
    """
    store = ObjectStore(url, options)
    identity, _ = current_of(store, name)
    children = [
        other for other, other_identity, shard in part_keys_in(store)
        if get_part(store, other, other_identity, shard).since == (name, identity)
    ]  # fmt: skip
    if children:
        raise StorageError(
            f"snapshot {name!r} in {store.url} must not be deleted before its deltas"
            f" {', '.join(sorted(set(map(repr, children))))}; delete these first"
        )
    remove_current(store, name)
    for other, other_identity, shard in part_keys_in(store):
        if other == name:
            remove_part(store, other, other_identity, shard)


def clean_store(url: str, older_than_s: float = _DAY_S, *, options: dict[str, Any] | None = None) -> CleanResult:
    """Remove what no snapshot in an object store needs: objects that killed pushes and deleted snapshots have left, and
    parts of snapshots that are not whole or were replaced.

    Args:
        older_than_s: only what was written at least this many seconds ago. No push may run meanwhile that began
            earlier, or that uses objects which an earlier one has left.
    """
    store, result = ObjectStore(url, options), CleanResult()
    current = {name: current_of(store, name)[0] for name in names_in(store)}
    needed: set[str] = set()
    for name, identity, shard in part_keys_in(store):
        if current.get(name) != identity and age_of_part(store, name, identity, shard) >= older_than_s:
            remove_part(store, name, identity, shard)
            result.parts += 1
            continue
        for file in get_part(store, name, identity, shard).files:
            needed.update(object_key(digest) for digest, _ in file.pieces)
    for key in list(store.keys("objects/")):
        if key not in needed and store.age_s(key) >= older_than_s:
            result.bytes += store.size_of(key) or 0
            store.remove(key)
            result.objects += 1
    return result


class _Push:
    def __init__(self, store: ObjectStore, path: str, progress: _Progress | None):
        self._fs, self._store, self._path, self._progress = LocalFileSystem(), store, path, progress
        self._known: dict[tuple[int, tuple[int, ...]], tuple[StoredFile, ...]] = {}
        self._done = self._total = 0
        self.result = PushResult()

    def run(self, names: Collection[str] | None) -> None:
        found = look_at([self._path])
        parts = self._chosen(found, names)
        left = {(part.folder, part.info.name) for part in found.leftovers()}
        parts = [part for part in parts if (part.folder, part.info.name) not in left and not part.marked]
        wanted = None if names is None else {part.whole.name for part in parts}
        for one in found.damaged:
            if wanted is None or one.name.partition("~")[0] in wanted:
                self.result.damaged[one.name] = one.reason
        new = [part for part in parts if not has_part(self._store, part.whole.name, _identity(part), part.whole.shard)]
        if new:
            self._remember()
        self._total = sum(part.info.bytes for part in new)
        for part in sorted(parts, key=lambda part: part.info.sequence):
            self._push(part, is_new=part in new)
        for name in dict.fromkeys(part.whole.name for part in parts):
            if name in self.result.gone or name in self.result.damaged:
                continue
            identity = max((part for part in parts if part.whole.name == name), key=_sequence)
            try:
                whole = current_of(self._store, name)[0] == _identity(identity)
            except SnapshotNotFoundError:
                whole = False
            (self.result.snapshots if whole else self.result.waiting).append(name)

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
                files = get_part(self._store, name, identity, shard).files
            except StorageError:
                continue  # The snapshot cannot be pulled, which is for a pull to say.
            for rows, keys in zip(files[:-1:2], files[1:-1:2], strict=True):
                if all(object_key(digest) in there for digest, _ in (*rows.pieces, *keys.pieces)):
                    self._known[shard, rows.chunk] = rows, keys

    def _push(self, part: Part, *, is_new: bool) -> None:
        name = part.whole.name
        try:
            if is_new:
                text = self._text(part)
                if not self._has(part):
                    raise SnapshotNotFoundError(f"snapshot {name!r} was deleted while it was pushed")
            else:
                text = get_part(self._store, name, _identity(part), part.whole.shard)
            put_part(self._store, text)
        except (SnapshotNotFoundError, CorruptTableError) as error:
            if self._has(part):
                self.result.damaged[name] = str(error)
            elif name not in self.result.gone:
                self.result.gone.append(name)
            return
        if is_new and name not in self.result.pushed:
            self.result.pushed.append(name)

    def _has(self, part: Part) -> bool:
        """Whether the folder still has a part, of the same identity."""
        try:
            found = SnapshotFiles(self._fs, f"{part.folder}/snapshots").read(part.info.name)
        except SnapshotNotFoundError:
            return False
        except StorageError:
            return True
        return found.info.identity == part.info.identity

    def _text(self, part: Part) -> StoredPart:
        """The description of a part, whose pieces have been uploaded."""
        record = SnapshotFiles(self._fs, f"{part.folder}/snapshots").read(part.info.name)
        files: list[StoredFile] = []
        for chunk in record.parts:
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
            tuple(files),
        )  # fmt: skip

    def _chunk(self, part: Part, geometry: Geometry, chunk: ChunkPart) -> Iterable[StoredFile]:
        numbers, source = (chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum), part.folder
        known = self._known.get((part.whole.shard, numbers), ())
        if len(known) == 2:
            self._move(sum(file.size for file in known))
            return known
        problems: list[StorageError] = []
        state = examine_chunk(self._fs, f"{source}/chunks", geometry, chunk, problems.append, lambda size: None)
        if not state.intact:
            raise CorruptTableError(str(problems[0]))
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
            pieces.append(piece)
            self.result.bytes_uploaded += piece[1] if is_new else 0
            self._move(piece[1])
        return StoredFile(name, size, tuple(pieces), chunk)

    def _move(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done))


def in_order(call: Callable[[int], Any], arguments: Iterable[int]) -> Iterator[Any]:
    """Results of calls in several threads, in the order of the arguments; few calls run ahead of the results taken."""
    with ThreadPoolExecutor(_THREADS, "oneemb-objects") as threads:
        running: list[Future[Any]] = []
        try:
            for argument in arguments:
                running.append(threads.submit(call, argument))
                while len(running) >= _THREADS or running and running[0].done():
                    yield running.pop(0).result()
            while running:
                yield running.pop(0).result()
        finally:
            for one in running:
                one.cancel()


def _identity(part: Part) -> str:
    return part.identity or part.info.identity


def _sequence(part: Part) -> int:
    return part.info.sequence
