"""Copies snapshots of an object store into a folder.

A pull first writes to the folder `<target>.pull`. It downloads neither a chunk that this folder or the target has, nor
a piece of a file there that a killed pull has left unfinished, so it continues that pull. Then it backs this folder up
to the target (backup.py), by links, so that a snapshot is in the target completely or not at all.

Invariant: a piece is compared with its checksum before it is written, and every byte of the target at the end.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from oneemb.storage.errors import CorruptTableError, LockedError, OtherTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import LocalFileSystem, doing
from oneemb.storage.locking.file_lock import FileLock
from oneemb.storage.new_files import NewFile
from oneemb.storage.objects.manifests import StoredFile, StoredPart, current_of, get_part, names_in
from oneemb.storage.objects.object_store import ObjectStore, are_bytes_of, store_beside
from oneemb.storage.objects.transfers import Progress, Progressing, in_order
from oneemb.storage.snapshots.backup import backup_folder, has_links
from oneemb.storage.table.chunk_scan import read_keys
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.salvage import copied
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart

KnownParts = dict[tuple[str, str], list[StoredPart]]
"""{(name, identity) of a snapshot: its parts}."""


class PullStoppedError(Exception):
    """Raised in a pull that nobody wants any more."""


@dataclass
class PullResult:
    """Result of a pull.

    Args:
        snapshots: names of the snapshots that were asked for, and of parents of deltas; the folder has them all.
        pulled: names of the snapshots that the folder did not have before.
        bytes_downloaded: bytes of the objects that were read.
    """

    snapshots: list[str] = field(default_factory=list)
    pulled: list[str] = field(default_factory=list)
    bytes_downloaded: int = 0


def pull(
    url: str, path: str | os.PathLike[str], names: Collection[str] | None = None, *,
    options: dict[str, Any] | None = None, progress: Progress | None = None,
) -> PullResult:  # fmt: skip
    """Copy snapshots of an object store to the folder `path`, which may have snapshots of the same table.

    All parts of a snapshot come, each into the folder of its rank, so any number of ranks can load it.

    Args:
        names: names of the snapshots; parents of deltas come too. None = all.
        progress: called with (bytes done, bytes to do).

    Raises:
        SnapshotNotFoundError: the store has no snapshot of one of the names, or none at all.
        CorruptTableError: an object is missing or damaged, or the folder has been damaged.
        LockedError: another pull writes to `path`, or a job uses it.
        OtherTableError: the folder has chunks of another table.
        StorageError: the store or a file cannot be used.
        TypeError: an argument is of a wrong type.
        ValueError, ImportError: fsspec does not know the URL, or it is a folder in the table's; or a package is
            missing.
    """
    store, folder = store_beside(url, path, names, options)
    wanted = names_in(store) if names is None else sorted(names)
    if not wanted and names is None:
        raise SnapshotNotFoundError(f"{store.url} must have snapshots, it has none; push some, or correct the URL")
    return pull_from(store, folder, wanted, progress=progress)


def pull_from(
    store: ObjectStore, folder: str, names: Collection[str], *, verify: bool = True, progress: Progress | None = None,
    known: KnownParts | None = None, is_damaged: bool = False, stop: Callable[[], bool] = lambda: False,
) -> PullResult:  # fmt: skip
    """Copy the snapshots of these names to `folder`; see `pull`.

    Args:
        verify: compare every byte of the target with its checksum at the end.
        known: as for `parts_in`.
        is_damaged: whether files of `folder` are damaged. Then all its files are compared with the store's checksums,
            pieces that differ are downloaded, and each file takes the place of the one that was there, so a reader of
            `folder` finds every file whole meanwhile.
        stop: called from time to time; once it returns True, the call raises PullStoppedError when the calls of the
            store that are at work have ended. The next pull goes on from there.
    """

    def progressed(done: int, total: int) -> None:
        _check_wanted(stop)
        if progress is not None:
            progress(done, total)

    parts = parts_in(store, names, known, stop)
    new, result = f"{folder}.pull", PullResult()
    with Pull(store, new, progressed, compares=is_damaged) as work:
        work.run(parts, {part.folder: f"{folder}/{part.folder}" for part in parts})
        if parts:
            link = has_links(new)
            if is_damaged:
                _replace_files(new, folder, parts, link)
            copied = backup_folder(new, folder, link=link, verify=verify)
            if copied.incomplete:
                raise CorruptTableError(f"{new}: {next(iter(copied.incomplete.values()))}")
            result = PullResult(copied.snapshots, copied.copied, work.bytes_downloaded)
        with doing("remove", new):
            _remove(new)
    return result


def _replace_files(new: str, folder: str, parts: Sequence[StoredPart], link: bool) -> None:
    """Replace the files of these parts in `folder` by those of the pull, one by one; files of chunks come first.
    Snapshots that `folder` does not have are left to the backup."""
    for path in sorted({f"{part.folder}/{file.path}" for part in parts for file in part.files}):
        there = f"{folder}/{path}"
        is_chunk = os.path.basename(os.path.dirname(path)) == "chunks"
        is_replaced = os.path.isdir(os.path.dirname(there)) if is_chunk else os.path.exists(there)
        if is_replaced:
            with doing("replace", there):
                with suppress(FileNotFoundError):
                    os.remove(f"{there}.tmp")
                (os.link if link else shutil.copyfile)(f"{new}/{path}", f"{there}.tmp")
                os.replace(f"{there}.tmp", there)


def _check_wanted(stop: Callable[[], bool]) -> None:
    if stop():
        raise PullStoppedError


def parts_in(
    store: ObjectStore, names: Collection[str], known: KnownParts | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[StoredPart]:  # fmt: skip
    """The parts of snapshots in the store and of their ancestors, ancestors first. SnapshotNotFoundError if the store
    has no snapshot of one of the names.

    Args:
        known: parts that an earlier call has found, which are not read again; those of this call take their place.
        stop: as for `pull_from`.
    """
    known = {} if known is None else known
    parts: KnownParts = {}
    rest = [(name, "") for name in names]  # "" = the identity that the store has now
    while rest:
        _check_wanted(stop)
        name, identity = rest.pop()
        found = parts.get((name, identity)) or known.get((name, identity))
        if found is None:
            identity, shards, *_ = current_of(store, name)
            found = parts.get((name, identity)) or known.get((name, identity))
            found = found or _read_parts(store, name, identity, shards)
        if (name, identity) not in parts:
            parts[name, identity] = found
            rest += {part.since for part in found if part.since is not None}
    known.clear()
    known.update(parts)
    return sorted((part for some in parts.values() for part in some), key=lambda part: part.sequence)


def _read_parts(store: ObjectStore, name: str, identity: str, shards: int) -> list[StoredPart]:
    """All parts of a snapshot. CorruptTableError if one is missing or damaged."""
    found = [get_part(store, name, identity, shard) for shard in range(shards)]
    for part in found:
        if part.shards != shards:
            raise CorruptTableError(
                f"{store.url}: snapshot {name!r} must have {shards} parts, its part {part.shard} says {part.shards};"
                " push the snapshot again"
            )
    return found


def remove_left(new: str) -> None:
    """Remove the folder `new` if a pull that was killed has left it, and no other pull writes there."""
    if not os.path.isfile(f"{new}/url"):
        return
    lock = FileLock(LocalFileSystem(), new, exists=True)
    try:
        with suppress(OSError):
            lock.take()
            _remove(new)
    finally:
        lock.release()


def _set_aside(path: str, former: str = "") -> str:
    """Set the unfinished file aside that a killed or failed pull has left of a file, and return its path, where there
    may be none. The longest of several stays. `former`: path of a file that is set aside in place of the unfinished
    one; "" = none."""
    left, new = f"{path}.left", former or f"{path}.tmp"
    if os.path.exists(new) and not (os.path.exists(left) and os.path.getsize(left) > os.path.getsize(new)):
        os.replace(new, left)
    return left


def _remove(new: str) -> None:
    """Remove the folder of a pull."""
    _empty(new)
    os.remove(f"{new}/url")
    os.rmdir(new)


def _empty(new: str) -> None:
    """Empty the folder of a pull, except for the file `url`, which shows that a pull made the folder: if this call is
    cut short, the next pull goes on."""
    for entry in os.scandir(new):
        if entry.name != "url":
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.remove(entry.path)


class Pull:
    """A pull of files of a store to the folder `new`, which may have files that a killed pull from the same URL has
    left. In a `with` block, the folder is locked. LockedError if another pull writes there. `compares`: whether each
    piece of a file that is there already is compared with its checksum; if not, a file with the right keys is kept or
    linked as it is."""

    def __init__(self, store: ObjectStore, new: str, progress: Progress | None = None, *, compares: bool = False):
        self._fs, self._store, self._new, self._moved = LocalFileSystem(), store, new, Progressing(progress)
        self._compares, self._lock = compares, FileLock(self._fs, new, exists=True)
        # {path that this pull has written or found: part of a chunk that the file was checked for}
        self._chunk_files: dict[str, ChunkPart] = {}
        self.bytes_downloaded = 0

    def __enter__(self) -> "Pull":
        try:
            self._take()
            with doing("write", f"{self._new}/url"):
                self._keep_chunks(self._new)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _take(self) -> None:
        """Make the folder and lock it."""
        new = self._new
        while not self._lock.is_at_path:
            self._lock.release()
            with doing("make the folder", new):
                self._fs.make_directories(new)
                try:
                    self._lock.take()
                except (FileNotFoundError, IsADirectoryError):
                    continue  # Another pull has ended and removed its folder, which others may have made again.
                except BlockingIOError:
                    raise LockedError(
                        f"{new.removesuffix('.pull')} must have one pull at a time; wait until the other has ended"
                    ) from None

    def run(
        self, parts: Sequence[StoredPart], there: Mapping[str, str],
        needs_chunks: Callable[[StoredPart], bool] = lambda part: True,
    ) -> None:  # fmt: skip
        """Write the files of parts, each into its folder in the new one.

        Args:
            parts: the parts, ancestors first.
            there: {folder of a part: folder of a table that may have some of its chunks, which are linked}.
            needs_chunks: whether a part's files of chunks are needed too, or only its list of rows.
        """
        self._moved.total = sum(file.size for part in parts for file in part.files)
        for part in reversed(parts):  # The newest part has the longest files of chunks.
            self._pull(part, f"{self._new}/{part.folder}", there.get(part.folder), needs_chunks(part))

    def _keep_chunks(self, new: str) -> None:
        """Remove from the folder `new` all but the chunks that a killed pull from the same URL has left."""
        source = f"{new}/url"
        with suppress(FileNotFoundError), open(source, encoding="utf-8") as file:
            if file.read() == self._store.url:
                for path in (new, *(entry.path for entry in os.scandir(new) if entry.is_dir())):
                    for name in ("snapshots", "coming"):
                        shutil.rmtree(f"{path}/{name}", ignore_errors=True)
                return
        if os.listdir(new) and not os.path.exists(source):
            raise StorageError(
                f"{new} must be a new folder, or one that a pull has left, it has other files; move it, or pull to"
                " another path"
            )
        _empty(new)
        with open(source, "w", encoding="utf-8") as file:
            file.write(self._store.url)

    def _pull(self, part: StoredPart, folder: str, there: str | None, needs_chunks: bool) -> None:
        with doing("make the folder", folder):
            for name in ("chunks", "snapshots", "coming"):
                self._fs.make_directories(f"{folder}/{name}")
        *chunks, snapshot = part.files
        # The file of the snapshot moves to the folder of snapshots last: it makes the snapshot complete.
        beside = f"{folder}/coming/{os.path.basename(snapshot.path)}"
        self._write(snapshot, beside, [f"{there}/{snapshot.path}"] if there else [])
        record = SnapshotFiles(self._fs, f"{folder}/coming").read(part.table_name)
        geometry, known = record.geometry, {chunk.number: chunk for chunk in record.parts}
        for file in sorted(chunks, key=lambda file: not file.path.endswith(".keys")) if needs_chunks else ():
            chunk = known[file.chunk[0]]
            self._pull_chunk(file, geometry, chunk, f"{folder}/{file.path}", there and f"{there}/{file.path}")
        with doing("rename", beside):
            self._fs.rename(beside, f"{folder}/{snapshot.path}")

    def _pull_chunk(self, file: StoredFile, geometry: Geometry, chunk: ChunkPart, path: str, there: str | None) -> None:
        """Write a file of a chunk, unless the folder beside the target, or the target, has it. Keys come first."""
        for candidate in (path, there):
            if candidate is None or self._compares and candidate not in self._chunk_files:
                continue
            try:
                if self._fs.size(candidate) < file.size:
                    continue
                keys = os.path.splitext(candidate)[0] + ".keys"
                read_keys(self._fs, keys, geometry, chunk)  # raises if the file has the keys of another chunk
                if candidate == there:
                    with suppress(FileNotFoundError):
                        os.remove(path)
                    os.link(there, path)
            except (OSError, StorageError) as error:
                if candidate in self._chunk_files and isinstance(error, StorageError):
                    raise self._other_tables(chunk) from error
                continue  # The folder has another chunk of this number, or the file system has no links.
            self._chunk_files[path] = chunk
            self._moved.add(file.size)
            return
        if path.endswith(".keys"):  # The rows beside the keys that were there may be those of another table.
            rows = f"{os.path.splitext(path)[0]}.rows"
            with doing("move aside", rows), suppress(FileNotFoundError):
                _set_aside(rows, rows)
                os.remove(rows)
        self._write(file, path, [one for one in (path, there) if one is not None])
        former = self._chunk_files.get(path)
        if former is not None:  # A longer file has taken the place of one that another snapshot needs.
            try:
                read_keys(self._fs, os.path.splitext(path)[0] + ".keys", geometry, former)
            except StorageError as error:
                raise self._other_tables(chunk) from error
        self._chunk_files[path] = chunk

    def _other_tables(self, chunk: ChunkPart) -> OtherTableError:
        return OtherTableError(
            f"the snapshots that are pulled from {self._store.url} must be of one table, but two of them have different"
            f" rows in chunk {chunk.number}, so two jobs have pushed to this URL; pull the snapshots of each job by"
            " their names, into a folder for each job"
        )

    def _write(self, file: StoredFile, path: str, shorter: Sequence[str] = ()) -> None:
        """Write a file. `shorter`: files that may begin as this one does, so that less is downloaded."""
        begins = [0, *itertools.accumulate(size for _, size in file.pieces)]
        left = _set_aside(path)

        def piece_at(n: int) -> tuple[bytes, bool]:
            piece = file.pieces[n]
            for candidate in (*shorter, left):
                with suppress(StorageError, OSError):
                    data = b"".join(bytes(one) for one in copied(self._fs, candidate, piece[1], begins[n]))
                    if are_bytes_of(data, piece):
                        return data, False
            return self._store.get(piece), True

        with doing("write", path):
            new = NewFile(path, fs=self._fs)
            try:
                for data, is_downloaded in in_order(piece_at, range(len(file.pieces))):
                    new.write(data)
                    self.bytes_downloaded += len(data) if is_downloaded else 0
                    self._moved.add(len(data))
                new.sync()
            finally:
                new.close()  # The temporary file stays if there was an error: the next pull uses its pieces.
            new.put_in_place()
            with suppress(FileNotFoundError):
                os.remove(left)
        if self._fs.size(path) != file.size:
            raise CorruptTableError(f"{self._store.url}: the pieces of {file.path} have another size than the file")
