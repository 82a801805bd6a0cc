"""Makes files of read-only rows from snapshots, while the job that saves the snapshots goes on.

Invariant: if several processes need the same file, one makes it under a lock; the others wait, and then find the file.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import NamedTuple

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.serving.layers import (
    Progress,
    VersionFile,
    file_name,
    files_in,
    files_of,
    make_layer,
    open_files,
    rows_since,
    weights_in,
)
from oneemb.serving.stored_rows import StoredCopy
from oneemb.storage.bottom import NOT_SAVED
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing, is_damage, path_text
from oneemb.storage.locking.file_lock import FileLock
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.serving.room import RoomFullError
from oneemb.storage.serving.served_file import ServedInfo, row_bytes_of
from oneemb.storage.serving.served_writer import remove_unfinished_files, write_served_file
from oneemb.storage.snapshots.linked_rows import every_key
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.row_cap import KeysIn, RowCap
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

DTYPES = ("float32", "float16", "int8", "int4")
"""Formats of weights in files; "float32" keeps the weights as trained."""

_log = logging.getLogger("oneemb")

_LOOKS = 4  # looks for the newest snapshot, while each look finds a newer one

_KEPT = 2  # number of whole files of one kind that stay in a folder
_LOOK_S = 0.02  # seconds between two tries to get the lock
_TABLES_TEXT = 100  # most letters of a file's name that list tables


class Source(NamedTuple):
    """Snapshots, the folder for served files, the dtype and tables of these files, the local copy of an object store,
    if the snapshots come from one, and the cap of rows, if there is one."""

    looks: SnapshotLooks
    folder: str
    dtype: str
    tables: tuple[int, ...] | None
    stored: StoredCopy | None = None
    cap: RowCap | None = None

    @property
    def name(self) -> str:
        """The place of the snapshots, in words."""
        return ", ".join(self.looks.paths) if self.stored is None else self.stored.url

    def pull(self, name: str | None, stop: Callable[[], bool] = lambda: False) -> None:
        """Pull the snapshot of this name, or the newest one, into the local copy, if there is one."""
        if self.stored is not None:
            self.stored.pull(name, stop)


def check_formats(dtype: object, absent: str) -> str:
    """Name of `dtype`, which may be torch's; ValueError unless rows can be served in it, and ids without a row as
    `absent`."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if absent not in ("initial", "zeros"):
        raise ValueError(f'absent must be "initial" or "zeros", got {absent!r}')
    return name


def served_folder(folder: AnyPath) -> str:
    """Absolute path of a folder for served files. ValueError if `folder` is empty: that would be the current one."""
    if not path_text(folder, "a folder for served files"):
        raise ValueError("folder must name a folder for served files, got ''; leave it out, or give '.' for this one")
    return absolute_path(folder)


def source_of(paths: list[str], folder: AnyPath | None, dtype: str, tables: tuple[int, ...] | None) -> Source:
    """Source with these folders. ValueError if `folder` is one of `paths`; None = `serving` in the first path."""
    where = os.path.join(paths[0], "serving") if folder is None else served_folder(folder)
    if os.path.realpath(where) in map(os.path.realpath, paths):
        raise ValueError(
            f"folder must be for served files alone, got {where}, the path of the table, whose writer holds the"
            f" lock that making a file needs; leave it out, and files are made in {paths[0]}/serving"
        )
    return Source(SnapshotLooks(paths), where, dtype, tables)


def stored_source(store: ObjectStore, folder: AnyPath | None, dtype: str, tables: tuple[int, ...] | None) -> Source:
    """Source of the snapshots in an object store, with `folder` for their local copy and served files."""
    if folder is None:
        raise ValueError(
            f"folder must name a folder on this machine for the rows of {store.url}, got None; give one that all"
            " processes of the machine share"
        )
    where = served_folder(folder)
    rows = StoredCopy(store, os.path.join(where, "rows"))
    return Source(rows.looks, where, dtype, tables, rows)


class Version(NamedTuple):
    """Name, identity and sequence of the snapshot that lookups read."""

    name: str
    identity: str
    sequence: int


class _StoppedError(Exception):
    """Raised in a build whose result no reader wants any more."""


def find_snapshot(looks: SnapshotLooks, name: str | None) -> PartedSnapshot:
    """Snapshot with this name, or, without a name, the newest that can be read. StorageError if there is none."""
    if name is not None:
        return looks.look().get(name)
    newest = _newest(looks)
    for _ in range(_LOOKS):
        # Between the listing and the reading the job may have deleted snapshots and saved newer ones.
        former, newest = newest, _newest(looks)
        if newest.identity == former.identity:
            break
    return newest


def is_gone(looks: SnapshotLooks, served: Version) -> bool:
    """Whether a snapshot has been deleted or replaced. A snapshot that cannot be read, or lacks parts, is not gone."""
    found = looks.look()
    left = found.leftovers()
    there = [part.info.identity for part in found.parts if part not in left]
    return served.identity not in there and not found.damaged_of(served.name)


def _newest(looks: SnapshotLooks) -> PartedSnapshot:
    found = looks.look()
    names = [one.name for one in found.snapshots() if not one.name.startswith(NOT_SAVED)]
    if not names:
        raise SnapshotNotFoundError(f"no snapshot in {', '.join(looks.paths)}; save one first")
    return found.get(names[-1])


def make_file(
    path: str, snapshot: PartedSnapshot, dtype: str, tables: Sequence[int] | None, *, threads: Threads,
    progress: Progress | None = None, cap: RowCap | None = None,
) -> ServedInfo:  # fmt: skip
    """Write the file of a snapshot, in one of `DTYPES`, with the rows of these tables; None = all tables. The order of
    tables is the order of the columns of ids in lookups. `cap`: says which rows stay; None = all.

    Raises:
        ValueError: a number is not that of a table of the snapshot.
        StorageError: the snapshot is damaged or was removed meanwhile, or a row does not fit in the dtype.
    """
    meta, name = snapshot.info.meta, snapshot.name
    format = SnapshotRows.of_meta(meta, name).format
    embedding = meta.get("embedding") or {}
    weights = format.dtype if dtype == "float32" or dtype == format.dtype else dtype
    with ExitStack() as opened:
        rows = opened.enter_context(owned_rows(snapshot, 0, 1))
        every_table_N = rows.keys(every_key)[0]
        count = len(embedding.get("tables", ())) or 1 + int(every_table_N.max(initial=0))
        served = tuple(range(count)) if tables is None else tuple(tables)
        if not served or len(set(served)) < len(served) or not set(served) <= set(range(count)):
            raise ValueError(f"tables must be some of 0 to {count - 1}, each once, got {list(served)}")
        info = ServedInfo(
            name, snapshot.identity, snapshot.sequence, format.dtype, weights, format.dim,
            row_bytes_of(weights, format.dim), 0, 0, count, served, (), (), embedding, 0.0, 0.0, "",
            max_rows=0 if cap is None else cap.max_rows,
        )  # fmt: skip
        served_T = np.isin(np.arange(count), served)
        if cap is None:
            keys = rows.keys(lambda table_N, id_N: served_T.take(table_N))
            weights_of_rows = weights_in(rows, format, weights, served_T)
        else:
            keys = cap.rows_of(snapshot, served).keys
            kept = opened.enter_context(owned_rows(snapshot, 0, 1, keep=KeysIn(keys)))
            weights_of_rows = weights_in(kept, format, weights, served_T)
        return write_served_file(path, info, keys, weights_of_rows, threads=threads, progress=progress)


def open_snapshot(
    source: Source,
    name: str | None,
    *,
    threads: Threads,
    served: Version | None = None,
    before: LayeredFile | None = None,
    stop: Callable[[], bool] = lambda: False,
    unread: Callable[[StorageError], None] = lambda error: None,
) -> LayeredFile | None:
    """Open served files of the named snapshot, or of the newest; the call makes them if they do not exist.

    Args:
        served: the snapshot that is served now. The call returns None unless a snapshot has a greater sequence, or
            this one is gone.
        before: open files of the snapshot that is served now, with which the result shares memory.
        stop: called from time to time; once it returns True, the call stops and returns None.
        unread: called with the error of a snapshot that cannot be read, if the newest that can be read is served
            although the other is, or may be, newer.

    Raises:
        ValueError, StorageError: same as `make_file`; or, with `served`, a snapshot that cannot be read is newer than
            all others.
        CorruptTableError: a file exists and is damaged.
    """
    failed, error, tries = "", None, 0
    while True:
        source.pull(name, stop)
        if stop():
            return None
        try:
            found = find_snapshot(source.looks, name)
        except SnapshotNotFoundError:
            if source.stored is None or tries >= _LOOKS:
                raise
            tries += 1  # Another process has removed the snapshot from the copy to which both pull.
            continue
        if served is not None and (
            found.identity == served.identity or found.sequence <= served.sequence and not is_gone(source.looks, served)
        ):
            if name is None and source.stored is None:  # An object store itself says which is the newest.
                lost = source.looks.look().damaged_of(served.name)
                if found.sequence < served.sequence and lost:  # The served snapshot itself cannot be read any more.
                    raise lost[0].error()
                tell_unread(source.looks, found, unread, raises=True)
            return None
        if error is not None and found.identity == failed:
            if tries >= _LOOKS or not isinstance(error, SnapshotNotFoundError):
                raise error
        compared = 0 if source.stored is None else source.stored.compared
        try:
            made = _open_made(source, found, threads, before, stop)
            if name is None and source.stored is None:
                tell_unread(source.looks, found, unread)
            return made
        except _StoppedError:
            return None
        except StorageError as raised:  # The job may have removed or replaced the snapshot meanwhile.
            if source.stored is not None and source.stored.mend(found.identity, raised, compared):
                continue
            failed, error, tries = found.identity, raised, tries + 1


def tell_unread(
    looks: SnapshotLooks, newest: PartedSnapshot, unread: Callable[[StorageError], None], *, raises: bool = False
) -> None:
    """Call `unread` with the error of a snapshot that cannot be read and is, or may be, newer than `newest`. `raises`:
    whether the error is raised instead if the snapshot is newer for sure."""
    error, is_sure = looks.look().unread_after(newest, NOT_SAVED)
    if error is not None:
        if raises and is_sure:
            raise error
        unread(error)


def _open_made(
    source: Source, snapshot: PartedSnapshot, threads: Threads, before: LayeredFile | None, stop: Callable[[], bool]
) -> LayeredFile:
    """Open served files of this snapshot, which are made if they do not exist."""
    kind, identity = _kind(source), snapshot.identity
    made = files_of(identity, files_in(source.folder, kind))
    if made is not None:
        try:
            return _opened(made, snapshot, threads, before)
        except (FileNotFoundError, RoomFullError):
            pass  # Another process has made a newer version, and removed files of this one.
    fs = LocalFileSystem()
    lock = FileLock(fs, os.path.join(source.folder, "LOCK"))

    def progress(done: int, total: int | None) -> None:
        if stop():
            raise _StoppedError

    try:
        with doing("make files in", source.folder):
            fs.make_directories(source.folder)
            _take(lock, source.folder, stop)
        made = files_of(identity, files_in(source.folder, kind))
        if made is None:
            remove_unfinished_files(fs, source.folder)
            made = _make(source, kind, snapshot, threads, progress, before)
        try:
            return _opened(made, snapshot, threads, before)
        except RoomFullError:
            return _opened([_make_whole(source, kind, snapshot, threads, progress)], snapshot, threads, before)
    finally:
        lock.release()


def _make(
    source: Source, kind: str, snapshot: PartedSnapshot, threads: Threads, progress: Progress,
    before: LayeredFile | None,
) -> list[VersionFile]:  # fmt: skip
    """Make the served files of a snapshot, and return them. Other files of the kind are removed, except the two newest
    whole files, the files from which a new layer goes on, and newer layers."""
    made: list[VersionFile] = []
    new, damage = None, None
    try:
        made, changes = rows_since(snapshot, files_in(source.folder, kind), source.looks, source.cap)
        if changes is not None:
            new = make_layer(
                source.folder, kind, snapshot, made, changes, threads=threads, progress=progress, cap=source.cap,
                before=before,
            )  # fmt: skip
    except StorageError as error:
        if not is_damage(error):
            raise
        damage = error  # If files of this snapshot itself are damaged, `_make_whole` raises the error.
    if new is None:
        new = [_make_whole(source, kind, snapshot, threads, progress)]
        if damage is not None:
            _log.warning(
                "%s: a file of all rows of %r was made, since a layer of changes could not be: %s",
                source.name, snapshot.name, damage,
            )  # fmt: skip
    files = files_in(source.folder, kind)
    kept = {*made, *new, *[one for one in files if not one.since][-_KEPT:]}
    for old in files:
        if old not in kept and not (old.since and old.sequence > snapshot.sequence):
            with suppress(FileNotFoundError):
                os.remove(old.path)
    return new


def _make_whole(
    source: Source, kind: str, snapshot: PartedSnapshot, threads: Threads, progress: Progress
) -> VersionFile:  # fmt: skip
    path = os.path.join(source.folder, file_name(snapshot.sequence, snapshot.identity, kind))
    if not os.path.exists(path):
        make_file(path, snapshot, source.dtype, source.tables, threads=threads, progress=progress, cap=source.cap)
    return VersionFile(snapshot.sequence, snapshot.identity, "", path)


def make_whole(source: Source, served: Version, threads: Threads, stop: Callable[[], bool]) -> bool:
    """Make the whole file of a snapshot that is served with layers, while lookups go on; later layers go on from this
    file. Returns False if another process makes a whole file, or `stop` returned True.

    Raises:
        ValueError, StorageError: same as `make_file`; or the snapshot is gone.
    """
    lock = FileLock(LocalFileSystem(), os.path.join(source.folder, "LOCK-whole"))

    def progress(done: int, total: int | None) -> None:
        if stop():
            raise _StoppedError

    try:
        try:
            lock.take()
        except BlockingIOError:
            return False
        found = source.looks.look().get(served.name, served.identity, "the served version")
        _make_whole(source, _kind(source), found, threads, progress)
    except _StoppedError:
        return False
    finally:
        lock.release()
    return True


def _opened(
    files: list[VersionFile], snapshot: PartedSnapshot, threads: Threads, before: LayeredFile | None
) -> LayeredFile:
    opened = open_files(files, threads=threads, before=before)
    if opened.info.identity != snapshot.identity:
        info = opened.base.info
        raise CorruptTableError(
            f"{opened.path} must have identity {snapshot.identity!r} in its manifest, at offset"
            f" {info.manifest_begin}, got {opened.info.identity!r}: it was put there under another name; remove the"
            " file, and it is made again"
        )
    return opened


def _kind(source: Source) -> str:
    """End of the names of all files with the dtype, tables and cap of `source`."""
    capped = "" if source.cap is None else f"-max-{source.cap.max_rows}"
    if source.tables is None:
        return source.dtype + capped
    tables = "-".join(map(str, source.tables))
    if len(tables) > _TABLES_TEXT:
        tables = "of-" + hashlib.sha256(tables.encode()).hexdigest()[:24]
    return f"{source.dtype}-tables-{tables}{capped}"


def _take(lock: FileLock, folder: str, stop: Callable[[], bool]) -> None:
    """Take the lock of a folder, waiting until it is free. A child of fork closes its copy of the lock."""
    while True:
        if stop():
            raise _StoppedError
        try:
            return lock.take()
        except BlockingIOError:
            if _holds_lock_already(folder):
                raise StorageError(
                    f"this thread already makes a file in {folder}, and a signal handler has interrupted it; let the"
                    " handler set a flag, and refresh when the flag is seen"
                ) from None
            time.sleep(_LOOK_S)


def _holds_lock_already(folder: str) -> bool:
    """Whether this thread holds the folder's lock in a caller of this call, so that it would wait for itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _open_made.__code__ and "lock" in frame.f_locals:
            source: Source = frame.f_locals["source"]
            lock: FileLock = frame.f_locals["lock"]
            if source.folder == folder and lock.taken:
                return True
        frame = frame.f_back
    return False
