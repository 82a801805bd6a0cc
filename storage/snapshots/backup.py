"""Copies the snapshots of a folder to another one while a job writes there.

Files of chunks only grow, and a snapshot is one file. So a snapshot is copied chunks first, and its own file last, once
it is known that the job has not deleted it meanwhile:

1. copy, clone or link the files of the chunks that the snapshot needs, as far as the copy lacks them;
2. look whether the job still has the snapshot, of the same identity; if not, leave it out;
3. copy the files of its parts.

Invariants:
- the folder that is copied is only read, and no lock is taken;
- a snapshot is in the copy completely or not at all; a killed backup is continued by the next one;
- a chunk that the copy has already is used only if its keys are those that the snapshot was saved with;
- a damaged chunk replaces no file of the copy, since a chunk is compared with its checksums before it is copied,
  unless `verify` is False;
- nothing is copied for a snapshot whose own file is damaged.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from oneemb.storage.errors import CorruptTableError, LockedError, OtherTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem, doing
from oneemb.storage.locking.file_lock import FileLock
from oneemb.storage.new_files import NewFile, new_file
from oneemb.storage.snapshots.part_folders import check_parts
from oneemb.storage.snapshots.snapshot_parts import (
    FoundParts,
    Part,
    PartedSnapshot,
    folders_at,
    incomplete_text,
    look_at,
)
from oneemb.storage.snapshots.unfinished import mark, unmark
from oneemb.storage.table.chunk_damage import check_chunk
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_numbers, chunk_paths
from oneemb.storage.table.chunk_scan import read_keys
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.salvage import copied
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord
from oneemb.storage.table.writer_lock import lock_holder

_FICLONE = 0x40049409  # of Linux: makes a file share the blocks of another


@dataclass
class BackupResult:
    """Result of a backup.

    Args:
        snapshots: names of the snapshots of the folder that the copy has now.
        copied: names of the snapshots that this call has copied.
        gone: names of snapshots that the job has deleted or replaced meanwhile.
        incomplete: {name of a snapshot that cannot be copied: reason}. Its files are damaged, or a part or the parent
            of a delta is missing.
        bytes_written: bytes of copied files, also of files that share their blocks with the original.
    """

    snapshots: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    incomplete: dict[str, str] = field(default_factory=dict)
    bytes_written: int = 0


def backup_folder(
    path: str, to: str, *, link: bool = False, verify: bool = True, progress: Callable[[int, int], None] | None = None
) -> BackupResult:
    """Copy the snapshots of the table at `path`, or of the tables of ranks there, to the folder `to`, where an earlier
    backup may be: only what it lacks is copied.

    Args:
        link: make hard links to the files of chunks, which must be on the same file system, instead of copies.
        verify: compare chunks with their checksums before they are copied, and every byte of the copy at the end.
        progress: called with (bytes of the copy read so far, bytes to read) while the copy is verified.

    Raises:
        LockedError: another backup writes to `to`, or a job uses a table there.
        StorageError: there is no table, `to` has chunks of another table, or a file call fails.
        CorruptTableError: the copy is damaged.
    """
    path, to = os.path.realpath(path), os.path.realpath(to)
    if os.path.commonpath([path, to]) in (path, to):
        raise StorageError(f"the copy must be outside of {path}, which is copied, got {to}; give another path")
    backup = _Backup(path, to, link, verify)
    with _only_writer(to):
        backup.run()
    if verify and folders_at([to]) and (problems := check_parts(to, progress=progress).problems):
        raise CorruptTableError(
            f"{to}: the copy must be sound, but {problems[0]} ({len(problems)} problems); run `oneemb check` on {path}"
            " and on the copy"
        )
    return backup.result


def link_parts(path: str, to: str) -> None:
    """Link, or copy, the parts of snapshots in the table at `path` into the table at `to`, whether or not the other
    parts of the snapshots exist. A part that has other parts is marked as unfinished.

    Raises:
        LockedError: a job uses `to`.
        StorageError: `to` has other chunks of the same numbers or other snapshots of the same names, or a file call
            fails.
    """
    backup = _Backup(path, to, has_links(path), verify=False)
    with _only_writer(to):
        backup.run_parts()


def has_links(folder: str) -> bool:
    """Whether the file system of a folder has hard links."""
    one, other = f"{folder}/link", f"{folder}/link.other"
    try:
        with open(one, "wb"):
            os.link(one, other)
        return True
    except OSError:
        return False
    finally:
        for path in (one, other):
            with suppress(FileNotFoundError):
                os.remove(path)


@contextmanager
def _only_writer(to: str) -> Iterator[None]:
    """Block in which no other backup writes to the folder `to`, which is made if it does not exist."""
    fs = LocalFileSystem()
    with doing("make the folder", to):
        fs.make_directories(to)
    lock = FileLock(fs, to)
    try:
        with doing("lock", to):
            try:
                lock.take()
            except BlockingIOError:
                raise LockedError(
                    f"{to} must have one writer, another backup writes there; wait until it has ended"
                ) from None
        yield
    finally:
        lock.release()


class _Backup:
    def __init__(self, path: str, to: str, link: bool, verify: bool):
        self._fs: FileSystem = LocalFileSystem()
        self._path, self._to, self._link, self._verify = path, to, link, verify
        self.result = BackupResult()

    def run(self) -> None:
        found = look_at([self._path])
        self.result.incomplete = found.broken() | found.damage()
        self.result.incomplete |= {parts[0].whole.name: incomplete_text(parts) for parts in found.incomplete()}
        self._check_not_in_use(found)
        for snapshot in found.snapshots():
            if snapshot.name in self.result.incomplete:
                continue
            if self._is_there(snapshot):
                self._unmark(snapshot)  # A backup that was killed may have left the marks.
                self.result.snapshots.append(snapshot.name)
                continue
            try:
                self._copy(snapshot)
            except (SnapshotNotFoundError, CorruptTableError) as error:
                if self._is_gone(snapshot):
                    self.result.gone.append(snapshot.name)
                else:
                    self.result.incomplete[snapshot.name] = str(error)
                continue
            self.result.snapshots.append(snapshot.name)
            self.result.copied.append(snapshot.name)

    def run_parts(self) -> None:
        """Copy each part by itself, and mark a part that has other parts."""
        found = look_at([self._path])
        self._check_not_in_use(found)
        for part in sorted(found.parts, key=lambda part: part.info.sequence):
            alone, target = PartedSnapshot((part,)), self._target(part.folder)
            if self._is_there(alone):
                continue
            if part.info.name in SnapshotFiles(self._fs, f"{target}/snapshots").names():
                raise StorageError(f"{target} has another snapshot named {part.info.name!r}; delete it first")
            if part.whole.shards > 1:
                mark(self._fs, target, [part.info.identity])
            self._copy(alone)

    def _check_not_in_use(self, found: FoundParts) -> None:
        """Raise LockedError if a job uses a table of the copy. Remove the files that a killed backup has left."""
        for folder in found.folders:
            target = self._target(folder)
            if (holder := lock_holder(self._fs, f"{target}/LOCK")) is not None:
                raise LockedError(
                    f"{target}, the copy of {folder}, must not be in use, it is held by {holder}; end that job, or give"
                    " another folder for the copy"
                )
            self._remove_unfinished(f"{target}/chunks")

    def _remove_unfinished(self, folder: str) -> None:
        """Remove the files that a killed backup has left."""
        with suppress(FileNotFoundError):
            for name in self._fs.names(folder):
                if name.endswith(".tmp") and chunk_numbers([name.removesuffix(".tmp")]):
                    self._fs.remove(f"{folder}/{name}")

    def _target(self, folder: str) -> str:
        return os.path.normpath(os.path.join(self._to, os.path.relpath(folder, self._path)))

    def _is_there(self, snapshot: PartedSnapshot) -> bool:
        """Whether the copy has all parts of the snapshot."""
        try:
            return all(self._has(self._target(part.folder), part) for part in snapshot.parts)
        except CorruptTableError:
            return False

    def _is_gone(self, snapshot: PartedSnapshot) -> bool:
        """Whether the job has deleted or replaced the snapshot."""
        return not all(self._has(part.folder, part) for part in snapshot.parts)

    def _has(self, folder: str, part: Part) -> bool:
        """Whether the table in a folder has a part, of the same identity."""
        try:
            return (
                SnapshotFiles(self._fs, f"{folder}/snapshots").read(part.info.name).info.identity == part.info.identity
            )
        except SnapshotNotFoundError:
            return False

    def _copy(self, snapshot: PartedSnapshot) -> None:
        records = [
            SnapshotFiles(self._fs, f"{part.folder}/snapshots").read_checked(part.info.name) for part in snapshot.parts
        ]
        targets = [self._target(part.folder) for part in snapshot.parts]
        for part, record, target in zip(snapshot.parts, records, targets, strict=True):
            for name in ("chunks", "snapshots"):
                with doing("make the folder", f"{target}/{name}"):
                    self._fs.make_directories(f"{target}/{name}")
            for chunk in record.parts:
                self._copy_chunk(part.folder, target, record.geometry, chunk)
            with doing("sync the directory", f"{target}/chunks"):
                self._fs.sync_directory(f"{target}/chunks")
        if self._is_gone(snapshot):
            raise SnapshotNotFoundError(f"snapshot {snapshot.name!r} was deleted while it was copied")
        identity = snapshot.parts[0].info.identity
        several = len(snapshot.parts) > 1
        for target in targets if several else ():
            mark(self._fs, target, [identity])
        for record, target in zip(records, targets, strict=True):
            self._copy_file(record.path, f"{target}/snapshots/{os.path.basename(record.path)}", self._size(record))
            with doing("sync the directory", f"{target}/snapshots"):
                self._fs.sync_directory(f"{target}/snapshots")
        self._unmark(snapshot)

    def _unmark(self, snapshot: PartedSnapshot) -> None:
        for part in snapshot.parts if len(snapshot.parts) > 1 else ():
            unmark(self._fs, self._target(part.folder), [part.info.identity])

    def _size(self, record: SnapshotRecord) -> int:
        try:
            return self._fs.size(record.path)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(f"{record.path} was deleted while it was copied") from error

    def _copy_chunk(self, folder: str, target: str, geometry: Geometry, part: ChunkPart) -> None:
        sources, targets = chunk_paths(f"{folder}/chunks", part.number), chunk_paths(f"{target}/chunks", part.number)
        sizes = ROWS_BEGIN + part.blocks * geometry.block_bytes, part.keys_bytes
        lacking = [files for files in zip(sources, targets, sizes, strict=True) if self._lacks(*files[1:])]
        if lacking:
            if self._verify:
                check_chunk(self._fs, f"{folder}/chunks", geometry, part)
            else:
                read_keys(self._fs, sources[1], geometry, part)
            self._check_same(sources[1], targets[1], sizes[1])
        for source, copy, size in lacking:
            self._copy_file(source, copy, size, link=self._link)
        try:
            read_keys(self._fs, targets[1], geometry, part)
        except CorruptTableError as error:
            raise _other_keys(sources[1], targets[1]) from error

    def _lacks(self, copy: str, size: int) -> bool:
        """Whether a file of the copy is missing, or shorter than `size`."""
        try:
            return self._fs.size(copy) < size
        except FileNotFoundError:
            return True

    def _check_same(self, source: str, copy: str, size: int) -> None:
        """Raise StorageError if the copy has another chunk of the same number."""
        try:
            size = min(size, self._fs.size(copy))
        except FileNotFoundError:
            return
        pieces = zip(self._pieces(source, size), copied(self._fs, copy, size), strict=True)
        if not all(np.array_equal(one, other) for one, other in pieces):
            raise _other_keys(source, copy)

    def _copy_file(self, source: str, copy: str, size: int, *, link: bool = False) -> None:
        """Replace a file of the copy by the first `size` bytes of the source, durably; or by a link to all of it."""
        if link:
            with doing("link", copy):
                with suppress(FileNotFoundError):
                    os.remove(f"{copy}.tmp")
                try:
                    os.link(source, f"{copy}.tmp")
                except FileNotFoundError as error:
                    raise CorruptTableError(f"{source} is missing, though a snapshot needs it") from error
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
                        raise
                    raise StorageError(
                        f"{copy} must be on a file system that can link it to {source}, it is not"
                        f" ({error.strerror}); leave out --link, or give a folder beside the original"
                    ) from error
                self._fs.rename(f"{copy}.tmp", copy)
            return
        with doing("write", copy), new_file(self._fs, copy) as new:
            if _cloned(source, new):
                os.ftruncate(new.stream.fileno(), size)  # Behind `size` is data that the job has not finished.
            else:
                for piece in self._pieces(source, size):
                    new.write(piece)
        self.result.bytes_written += size

    def _pieces(self, source: str, size: int) -> Iterable[np.ndarray]:
        try:
            yield from copied(self._fs, source, size)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CorruptTableError(f"{source} is missing, though a snapshot needs it") from error
            raise


def _other_keys(source: str, copy: str) -> OtherTableError:
    return OtherTableError(
        f"{copy} must begin with the bytes of {source}, it has other keys, so the folder has a copy of another table,"
        " or is damaged; give a new folder for the copy"
    )


def _cloned(source: str, new: NewFile) -> bool:
    """Let a new file share the blocks of the source, where the file system can do that."""
    try:
        with open(source, "rb") as file:
            fcntl.ioctl(new.stream, _FICLONE, file.fileno())
        return True
    except OSError:
        return False
