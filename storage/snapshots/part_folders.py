"""Removes, makes, sweeps and checks parts of snapshots in the folders of several tables.

Ranks remove a snapshot in steps, and wait for each other after each step:

with PartRemoval(parts, {}) as removal:     takes the locks of the folders
    removal.mark()                          marks the parts: from here on, a part without the others is a leftover
    removal.remove()
    removal.unmark()
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import NamedTuple

from oneemb.kernels.threads import Threads
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.errors import SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem
from oneemb.storage.snapshots.snapshot_parts import (
    FoundParts,
    Part,
    find_parts,
    incomplete_text,
    leftover_text,
    look_at,
    missing_shards,
    unmade_at,
)
from oneemb.storage.snapshots.unfinished import drop_unwritten, mark, marks_at, unmark
from oneemb.storage.table.check import CheckResult, SnapshotCheck, check_table
from oneemb.storage.table.delta import Delta
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader


class _Snapshot(NamedTuple):
    """A table's snapshot that is to be removed."""

    folder: str
    name: str
    identity: str | None
    """Identity that the mark names; None = no mark, since the snapshot has this part only or cannot be read."""


def to_remove(found: FoundParts, name: str) -> list[list[_Snapshot]]:
    """The tables' snapshots that have to be removed for the snapshot of this name, damaged ones included: first those
    of older snapshots of the same name, then the others. Raises SnapshotNotFoundError, which names the existing
    snapshots, if there are none."""
    parts = sorted(found.parts_of(name), key=lambda part: part.info.sequence)
    older = [part for part in parts if part.group != parts[-1].group]
    rest = [part for part in parts if part.group == parts[-1].group]
    damaged = [_Snapshot(one.folder, one.name, None) for one in found.damaged_of(name)]
    if not rest and not damaged:
        found.get(name)
    return [_snapshots(older), _snapshots(rest) + damaged]


def _snapshots(parts: Iterable[Part]) -> list[_Snapshot]:
    return [
        _Snapshot(part.folder, part.info.name, part.info.identity if part.whole.shards > 1 else None) for part in parts
    ]


class PartRemoval:
    """Removes snapshots of tables; see the file's first lines. Raises LockedError if another process uses a table.

    Args:
        open_tables: {folder of a table that this process has open: function that deletes a snapshot of the table}.
    """

    def __init__(
        self, snapshots: Iterable[_Snapshot], open_tables: Mapping[str, Callable[[str], None]],
        fs: FileSystem | None = None,
    ):  # fmt: skip
        self._fs = fs or LocalFileSystem()
        self._snapshots = list(snapshots)
        self._delete = dict(open_tables)
        self._opened = ExitStack()
        try:
            for snapshot in self._snapshots:
                if snapshot.folder not in self._delete:
                    table = self._opened.enter_context(open_anew(snapshot.folder, self._fs))
                    self._delete[snapshot.folder] = table.delete_snapshot
        except BaseException:
            self._opened.close()
            raise

    def mark(self) -> None:
        """Mark the snapshots, so that parts which a kill leaves count as leftovers. On a full disk snapshots are
        deleted without marks; the parts that a kill leaves then have to be deleted again."""
        for folder, identities in self._identities():
            try:
                mark(self._fs, folder, identities)
            except StorageError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
                    raise

    def remove(self) -> None:
        """Delete the snapshots of the tables, durably."""
        for snapshot in self._snapshots:
            with suppress(SnapshotNotFoundError):  # An earlier try has deleted it.
                self._delete[snapshot.folder](snapshot.name)

    def __call__(self) -> None:
        """Do all steps, without a wait for other ranks."""
        self.mark()
        self.remove()
        self.unmark()

    def unmark(self) -> None:
        """Remove the marks, after all snapshots are deleted. A mark that cannot be removed does no harm."""
        for folder, identities in self._identities():
            with suppress(StorageError):
                unmark(self._fs, folder, identities)

    def _identities(self) -> list[tuple[str, set[str]]]:
        by_folder: dict[str, set[str]] = {}
        for snapshot in self._snapshots:
            if snapshot.identity is not None:
                by_folder.setdefault(snapshot.folder, set()).add(snapshot.identity)
        return list(by_folder.items())

    def __enter__(self) -> "PartRemoval":
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()


class NewParts:
    """Parts of a snapshot that is being saved. In a `with` block, all parts are saved or none. Ranks, each of which
    saves one part, call `finish` or `take_back` instead, once they know whether all parts are saved.

    While a save runs, each part has a mark in its folder, which says that the part is useless without the others: if
    the save is killed, the next save removes the part. A snapshot of one part gets no mark, since that part is complete
    as soon as it exists.

    Args:
        identity: identity of the snapshot.
        count: number of its parts, over all ranks.
    """

    def __init__(self, identity: str, count: int, fs: FileSystem | None = None):
        self._identity, self._count, self._fs = identity, count, fs or LocalFileSystem()
        self._begun: list[tuple[str, str, Callable[[str], None] | None]] = []

    def begin(self, folder: str, table_name: str, delete: Callable[[str], None] | None = None) -> None:
        """Record a part, and mark it, before it is saved in the table of this folder, which is open.

        Args:
            table_name: name of the part as a snapshot of its table.
            delete: function that deletes a snapshot of the table; None = the table is closed before `take_back`.
        """
        self._begun.append((folder, table_name, delete))
        if self._count > 1:
            mark(self._fs, folder, [self._identity])

    def finish(self) -> None:
        """Remove the marks, after all parts are saved. A mark that cannot be removed does no harm."""
        for folder, _, _ in self._begun:
            self._unmark(folder)

    def take_back(self) -> None:
        """Delete all parts that have been saved. A part that cannot be deleted now stays as a leftover."""
        for folder, table_name, delete in self._begun:
            with suppress(StorageError), ExitStack() as opened:
                if delete is None:
                    delete = opened.enter_context(open_anew(folder, self._fs)).delete_snapshot
                with suppress(SnapshotNotFoundError):
                    delete(table_name)
                self._unmark(folder)

    def _unmark(self, folder: str) -> None:
        if self._count > 1:
            with suppress(StorageError):
                unmark(self._fs, folder, [self._identity])

    def __enter__(self) -> "NewParts":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.take_back()


_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_anew(folder: str, fs: FileSystem | None = None) -> PersistentTable:
    """Open the table in a folder to delete snapshots. No rows are loaded, so the row width does not matter."""
    return PersistentTable.open(folder, row_width=1, threads=Threads(1), background=False, fs=fs)


def sweep_folder(
    folder: str, found: FoundParts, delete: Callable[[str], None] | None = None, fs: FileSystem | None = None
) -> None:
    """Remove leftovers and stale marks from a table's folder. Those that cannot be removed now stay until the next
    sweep.

    Args:
        delete: function that deletes a snapshot of the table, which this process has open. None = open the table here,
            unless it is in use; this also removes temporary snapshots and files of killed processes.
    """
    fs = fs or LocalFileSystem()
    if delete is None:
        with suppress(StorageError), open_anew(folder, fs) as table:
            for info in table.snapshots():
                if info.name.startswith(EXPORTED):
                    table.delete_snapshot(info.name)
            sweep_folder(folder, found, table.delete_snapshot, fs)
        return
    for part in [part for part in found.leftovers() if part.folder == folder]:
        with suppress(StorageError):
            delete(part.info.name)
    drop_unwritten(fs, folder)
    with suppress(StorageError):
        # Marks of parts that no longer exist, and of complete snapshots, which a kill has left, are stale.
        there = {part.info.identity: part for part in find_parts([folder], fs).parts}
        marks = marks_at(fs, folder)
        unmark(fs, folder, {one for one in marks if one not in there or found.has_all_of(there[one])})


# ---- check -----------------------------------------------------------------------------------------------------------


def check_parts(
    path: str, *, fs: FileSystem | None = None, progress: Callable[[int, int], None] | None = None
) -> CheckResult:
    """Check a folder, and the folders of ranks in it, as `check_table` does; raises the same errors."""
    found = look_at([path], fs)
    left_over = [
        f"{folder} has no table: a reshard or a job of that many ranks begins there, or was killed as it began; then"
        " remove the folder"
        for folder in unmade_at(path)
    ]
    if found.folders == [path]:
        result = check_table(path, fs=fs, progress=progress)
        result.problems += [one for one in _broken_chains(found, fs) if one not in result.problems]
        result.left_over = left_over
        add_lost_parents(found, result.by_snapshot)
        return result
    result = CheckResult()
    for folder in found.folders:
        left = {part.info.name for part in found.leftovers() if part.folder == folder}
        one = check_table(folder, fs=fs, progress=progress, leftovers=left)
        result.problems += one.problems
        result.rows += one.rows
        result.bytes_read += one.bytes_read
        result.unneeded += one.unneeded
        result.kept += one.kept
        result.unreadable += one.unreadable
        add_to_whole(found, folder, one.by_snapshot, result.by_snapshot)
    result.left_over = [leftover_text(part) for part in found.leftovers()] + left_over
    incomplete = found.incomplete()
    if incomplete:  # A writer may have deleted them since.
        still = {parts[0].group for parts in look_at([path], fs).incomplete()}
        incomplete = [parts for parts in incomplete if parts[0].group in still]
    for parts in incomplete:
        result.problems.append(incomplete_text(parts))
        lost = SnapshotCheck(unreadable=[f"part {shard}" for shard in missing_shards(parts)], whole=False)
        result.by_snapshot.setdefault(parts[0].whole.name, SnapshotCheck()).add(lost)
    result.problems += [one for one in _broken_chains(found, fs) if one not in result.problems]
    add_lost_parents(found, result.by_snapshot)
    result.snapshots = [snapshot.name for snapshot in found.snapshots()]
    return result


def add_to_whole(
    found: FoundParts, folder: str, by_part: Mapping[str, SnapshotCheck], by_snapshot: dict[str, SnapshotCheck]
) -> None:
    """Add what is left of each part in a folder, {name of the part: ...}, to what is left of its whole snapshot."""
    whole_name = {part.info.name: part.whole.name for part in found.parts if part.folder == folder}
    for name, report in by_part.items():
        guess = name.partition("~")[0] if len(found.folders) > 1 else name  # A file that cannot be read.
        by_snapshot.setdefault(whole_name.get(name, guess), SnapshotCheck()).add(report)


def add_lost_parents(found: FoundParts, by_snapshot: dict[str, SnapshotCheck]) -> None:
    """Note in the report of each delta that its parent, without which it cannot be loaded, is missing or is not
    whole."""
    names = {part.info.identity: part.whole.name for part in found.parts}
    for part in sorted(found.parts, key=lambda part: part.info.sequence):  # Parents come first.
        delta, report = Delta.of_meta(part.info.meta, part.info.name), by_snapshot.get(part.whole.name)
        if delta is None or report is None:
            continue
        parent = by_snapshot.get(names.get(delta.identity, ""))
        if parent is None or "file" in parent.unreadable or parent.missing_parent:
            lost = f"parent {delta.since!r}"
        elif not parent.whole:
            lost = f"rows of parent {delta.since!r}"
        else:
            continue
        report.whole = False
        if lost not in report.unreadable:
            report.unreadable.append(lost)


def _broken_chains(found: FoundParts, fs: FileSystem | None) -> list[str]:
    """Problems of deltas: snapshots that cannot be loaded, and damaged lists of keys that are gone."""
    broken = found.broken()
    if broken:  # A writer may have deleted them since.
        again = look_at(found.folders, fs).broken()
        broken = {name: reason for name, reason in broken.items() if name in again}
    problems = list(broken.values())
    for snapshot in [one for one in found.snapshots() if one.name not in broken]:
        try:
            for part in snapshot.parts:
                with SnapshotReader.open(part.folder, part.info.name, fs=fs) as reader:
                    reader.gone()
        except SnapshotNotFoundError:
            continue  # A writer has deleted the snapshot since the folder was listed; its own check names what is lost.
        except StorageError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
