"""Finds snapshots whose parts are in several tables: one part for each rank, or for each path of a writer.

    <path>                  a table: of an embedding without ranks, or of one path of several
    <path>/rank-1-of-4      the table of rank 1 of 4

Each part is a snapshot of one table. Its meta says which part of which snapshot it is; its identity is that of the
whole snapshot. A snapshot with one part is that part.

Invariants:
- a snapshot exists if and only if all its parts exist: the rename of the last part creates it, the removal of the first
  part ends it. If several snapshots have the same name, the one that was saved last counts;
- a part is removed as a leftover only if its snapshot is incomplete and its save has never returned, or if a complete
  snapshot of the same name has replaced it.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from oneemb.kernels.owner import owners_share_keys
from oneemb.storage.errors import (
    CorruptTableError,
    FormatVersionError,
    OtherSnapshotError,
    SnapshotNeededError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.fs import FileSystem, LocalFileSystem
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows, part_of, shard_of
from oneemb.storage.snapshots.unfinished import marks_at
from oneemb.storage.table.delta import Delta, chain_of, deltas_since, in_chain_text, rows_of
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.table_info import need_table

_RANK_FOLDER = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})")
_IDENTITY_DIGITS = 8
_LOOKS = 2


def rank_folder_name(rank: int, ranks: int) -> str:
    """Name of the folder of one rank, in the folder that all ranks share."""
    return f"rank-{rank}-of-{ranks}"


def folders_at(paths: Iterable[str]) -> list[str]:
    """Folders of tables at these paths: the paths themselves and the folders of ranks in them, each once."""
    found: dict[str, str] = {}
    for path in paths:
        for folder in [path, *_rank_folders(path)]:
            if _has_table(folder):
                found.setdefault(os.path.realpath(folder), folder)
    return list(found.values())


def unmade_at(path: str) -> list[str]:
    """Folders of ranks in a path that have no table: a job or a reshard has just made them, or was killed just then."""
    return [folder for folder in _rank_folders(path) if not _has_table(folder)]


def _has_table(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "snapshots"))


def _rank_folders(path: str) -> list[str]:
    ranked = []
    try:
        for name in os.listdir(path):
            match = _RANK_FOLDER.fullmatch(name)
            if match and int(match[1]) < int(match[2]):
                ranked.append((int(match[2]), int(match[1]), os.path.join(path, name)))
    except OSError:
        pass  # There is no such folder.
    return [folder for _, _, folder in sorted(ranked)]


@dataclass(frozen=True)
class Part:
    """A table's snapshot as a part of a whole snapshot.

    Args:
        folder: folder of the table.
        info: description of the table's snapshot.
        whole: which part of which snapshot this is.
        identity: identity of the whole snapshot; "" if an early release wrote it, which gave each part its own.
        marked: whether the part is marked as unfinished, so that it may be removed if other parts are missing.
    """

    folder: str
    info: SnapshotInfo
    whole: PartOf
    identity: str
    marked: bool

    @property
    def group(self) -> tuple[str, str, int]:
        """Key that is equal for all parts of a snapshot."""
        return self.whole.name, self.identity, self.whole.shards


@dataclass(frozen=True)
class PartedSnapshot:
    """A snapshot whose parts all exist. `parts`: the parts in order. `before`: if it is a delta, its ancestors,
    beginning with the one that is no delta (table/delta.py)."""

    parts: tuple[Part, ...]
    before: tuple["PartedSnapshot", ...] = ()

    @property
    def name(self) -> str:
        return self.parts[0].whole.name

    @property
    def identity(self) -> str:
        """Identity of the whole snapshot, as in `info`."""
        return self._filled[0].info.identity

    @property
    def sequence(self) -> int:
        """Number greater than that of any snapshot that existed when this one was saved."""
        return max(part.info.sequence for part in self.parts)

    @cached_property
    def info(self) -> SnapshotInfo:
        """Description of the whole snapshot. The format is that of a part with rows, since a part without rows may not
        know the optimizer's state yet. Raises CorruptTableError if parts have rows of different formats."""
        first = self._filled[0].info
        _check_kind(f"snapshot {self.name!r}", self._filled)
        meta, delta = first.meta, Delta.of_meta(first.meta, first.name)
        if delta is not None:
            deltas = [Delta.of_meta(part.info.meta, part.info.name) or delta for part in self.parts]
            rows, inserted = sum(one.rows for one in deltas), sum(one.inserted for one in deltas)
            meta = meta | replace(delta, rows=rows, inserted=inserted).to_meta()
        return replace(
            first, name=self.name, meta=meta, rows=sum(rows_of(part.info) for part in self.parts),
            bytes=sum(part.info.bytes for part in self.parts), created=self.parts[0].info.created,
            sequence=self.sequence,
        )  # fmt: skip

    @property
    def _filled(self) -> list[Part]:
        """The parts with rows; the first part if there are none."""
        return [part for part in self.parts if part.info.rows] or [self.parts[0]]

    def part_in(self, folder: str, shard: int, shards: int) -> Part | None:
        """The part that shard `shard` of `shards` has saved in `folder`. None if there is no such part, of this
        snapshot and of each ancestor, or if its rows have another format than the snapshot."""
        if any(link.part_in(folder, shard, shards) is None for link in self.before):
            return None
        for part in self.parts:
            if (part.folder, part.whole.shard, part.whole.shards) == (folder, shard, shards):
                format = SnapshotRows.of_meta(self.info.meta, self.name).format
                return part if SnapshotRows.of_meta(part.info.meta, self.name).format.same_words(format) else None
        return None

    def parts_for(self, owner: int, owners: int) -> list[Part]:
        """The parts that may hold keys of owner `owner` of `owners`."""
        return [part for part in self.parts if owners_share_keys(owner, owners, part.whole.shard, part.whole.shards)]


@dataclass(frozen=True)
class Damaged:
    """A table's snapshot that cannot be read. `reason`: text of the error; `newer`: whether a later release wrote it;
    `saved`: (sequence, time) of the save, as the file says; None = these bytes cannot be read either."""

    folder: str
    name: str
    reason: str
    newer: bool
    saved: tuple[int, float] | None

    def error(self) -> StorageError:
        """A new error, of the class and with the text of the one that reading the file has raised."""
        return (FormatVersionError if self.newer else CorruptTableError)(self.reason)

    def is_after(self, snapshot: PartedSnapshot) -> bool | None:
        """Whether this snapshot was saved after another one; None = unknown. A time of the file would not tell: copies
        of folders change it."""
        if self.saved is None:
            return None
        by_number, by_time = self.saved[0] > snapshot.sequence, self.saved[1] > snapshot.info.created
        return by_number if by_number == by_time else None  # Of two numbers that disagree, one is damaged.


class FoundParts:
    """Parts and damaged snapshots that were found in some folders, and the snapshots that the parts make up."""

    def __init__(self, parts: Sequence[Part], damaged: Sequence[Damaged], folders: Sequence[str]):
        self.parts, self.damaged, self.folders = parts, damaged, folders
        self._chains: dict[str, PartedSnapshot] = {}

    @classmethod
    def together(cls, found: "Sequence[FoundParts]") -> "FoundParts":
        """Join what several ranks have found, each in folders of its own."""
        parts = [part for some in found for part in some.parts]
        damaged = [one for some in found for one in some.damaged]
        return cls(parts, damaged, list(dict.fromkeys(folder for some in found for folder in some.folders)))

    @cached_property
    def _whole(self) -> dict[str, PartedSnapshot]:
        """{name: newest complete snapshot of the name}."""
        newest: dict[str, PartedSnapshot] = {}
        for group in self._groups.values():
            by_shard = {part.whole.shard: part for part in reversed(group)}
            if len(by_shard) == group[0].whole.shards:
                whole = PartedSnapshot(tuple(by_shard[shard] for shard in sorted(by_shard)))
                if whole.name not in newest or newest[whole.name].sequence < whole.sequence:
                    newest[whole.name] = whole
        return newest

    @cached_property
    def _groups(self) -> dict[tuple[str, str, int], list[Part]]:
        groups: dict[tuple[str, str, int], list[Part]] = {}
        for part in self.parts:
            groups.setdefault(part.group, []).append(part)
        return groups

    def snapshots(self) -> list[PartedSnapshot]:
        """All complete snapshots, oldest first; replaced ones are left out."""
        return sorted(self._whole.values(), key=lambda whole: (whole.sequence, whole.parts[0].info.created))

    def get(self, name: str, identity: str | None = None, named_by: str = "") -> PartedSnapshot:
        """The snapshot of this name.

        Args:
            identity: identity that the snapshot must have; None = any.
            named_by: file that names the snapshot, for errors.

        Raises:
            SnapshotNotFoundError: there is no such snapshot, or parts are missing; the message says what exists.
            OtherSnapshotError: the snapshot has another identity.
            CorruptTableError, FormatVersionError: a part of the snapshot cannot be read.
        """
        whole = self._whole.get(name)
        if whole is not None:
            if identity is not None and identity != whole.identity:
                raise OtherSnapshotError.named_by(named_by, name, identity, self._where, whole.info)
            if name not in self._chains:
                *before, last = chain_of(whole, self.snapshots, lambda one: one.parts[0].info)
                if before:
                    filled = [part for link in (*before, last) for part in link.parts if part.info.rows]
                    _check_kind(f"snapshot {name!r}, with its parents,", filled)
                self._chains[name] = replace(last, before=tuple(before))
            return self._chains[name]
        for damaged in self.damaged_of(name):
            raise damaged.error()
        begin = f"{named_by} names a snapshot that is not there: " if named_by else ""
        for parts in self.incomplete():
            if parts[0].whole.name == name:
                raise SnapshotNotFoundError(begin + incomplete_text(parts) + f"; looked in {self._where}")
        there = ", ".join(repr(other.name) for other in self.snapshots()) or "none"
        raise SnapshotNotFoundError(f"{begin}no snapshot named {name!r} in {self._where}; there are: {there}")

    @property
    def _where(self) -> str:
        return ", ".join(self.folders) or "the folders given, where there is no table"

    def going_on_from(self, name: str) -> list[str]:
        """Names of the deltas whose parent is the snapshot of this name."""
        left = {id(part) for part in self.leftovers()}
        there = [part for part in self.parts if id(part) not in left]  # parts of incomplete snapshots included
        named = {part.info.identity for part in there if part.whole.name == name}
        infos = [replace(part.info, name=part.whole.name) for part in there]
        return list(dict.fromkeys(child for identity in named for child in deltas_since(identity, infos)))

    def check_no_deltas(self, name: str, done: str) -> None:
        """Raise SnapshotNeededError if the snapshot of this name is the parent of deltas. `done`: what is about to
        happen to the snapshot, "replaced" or "deleted"."""
        if deltas := self.going_on_from(name):
            raise SnapshotNeededError(in_chain_text(name, done, deltas))

    def incomplete(self) -> list[list[Part]]:
        """Parts of each incomplete snapshot that may have been complete once: not all of its parts are marked."""
        return [
            parts for parts in self._groups.values()
            if not self._is_whole(parts) and not all(part.marked for part in parts)
        ]  # fmt: skip

    def broken(self) -> dict[str, str]:
        """{name of a complete snapshot that cannot be loaded: reason}. A reason is, for example, a missing parent."""
        reasons = {}
        for snapshot in self.snapshots():
            try:
                self.get(snapshot.name)
            except StorageError as error:
                reasons[snapshot.name] = str(error)
        return reasons

    def leftovers(self) -> list[Part]:
        """Parts that killed saves and deletes have left, and parts of snapshots that newer ones have replaced."""
        found = []
        for parts in self._groups.values():
            newest = self._whole.get(parts[0].whole.name)
            replaced = newest is not None and newest.sequence > max(part.info.sequence for part in parts)
            if replaced or not self._is_whole(parts) and all(part.marked for part in parts):
                found += parts
        return found

    def folders_with(self, name: str) -> list[str]:
        """Folders that have a part of a snapshot of this name, damaged or not. Leftovers do not count."""
        leftovers = {(part.folder, part.info.name) for part in self.leftovers()}
        parts = [part for part in self.parts_of(name) if (part.folder, part.info.name) not in leftovers]
        return list(dict.fromkeys([part.folder for part in parts] + [one.folder for one in self.damaged_of(name)]))

    def unread_after(
        self, newest: PartedSnapshot, left_out: tuple[str, ...] = ()
    ) -> tuple[StorageError | None, bool]:  # fmt: skip
        """(error of a snapshot that cannot be read and was, or may have been, saved after `newest`; whether it was
        for sure). A snapshot that was for sure comes before others. (None, False) = there is no such snapshot.
        `left_out`: prefixes of the names of snapshots that do not count."""
        is_after = [(one, one.is_after(newest)) for one in self.damaged if not one.name.startswith(left_out)]
        for one, is_sure in sorted(is_after, key=lambda each: not each[1]):
            if is_sure is not False:
                return one.error(), bool(is_sure)
        return None, False

    def damage(self) -> dict[str, str]:
        """{name of a damaged snapshot file: what is wrong with it, in every folder that has such a file}."""
        reasons: dict[str, list[str]] = {}
        for one in self.damaged:
            reasons.setdefault(one.name, []).append(one.reason)
        return {name: "; ".join(found) for name, found in reasons.items()}

    def damaged_of(self, name: str) -> list[Damaged]:
        """Damaged files that may be parts of a snapshot of this name."""
        return [one for one in self.damaged if one.name == name or one.name.startswith(f"{name}~")]

    def parts_of(self, name: str) -> list[Part]:
        """All parts of snapshots of this name, leftovers included."""
        return [part for part in self.parts if part.whole.name == name]

    def has_all_of(self, part: Part) -> bool:
        """Whether all parts of the snapshot to which this part belongs exist."""
        return part.group in self._groups and self._is_whole(self._groups[part.group])

    @property
    def next_sequence(self) -> int:
        """Number greater than the sequence number of any part."""
        return 1 + max((part.info.sequence for part in self.parts), default=0)

    @staticmethod
    def _is_whole(parts: list[Part]) -> bool:
        return len({part.whole.shard for part in parts}) == parts[0].whole.shards


def _check_kind(what: str, parts: Sequence[Part]) -> None:
    """Raise CorruptTableError unless the rows of all these parts have the same format."""
    if len(parts) < 2:
        return
    first, *rest = [(part, SnapshotRows.of_meta(part.info.meta, part.info.name).format) for part in parts]
    for part, format in rest:
        if not format.same_words(first[1]):
            raise CorruptTableError(
                f"{what} holds rows of {first[1]} in {first[0].folder} and of {format} in {part.folder}; restore its"
                " files from a copy, or load another snapshot"
            )


def missing_shards(parts: Sequence[Part]) -> list[int]:
    """Numbers of the parts that a snapshot lacks of which only these parts exist."""
    return sorted(set(range(parts[0].whole.shards)) - {part.whole.shard for part in parts})


def incomplete_text(parts: list[Part]) -> str:
    """Text of the error for a snapshot of which only these parts exist."""
    whole = parts[0].whole
    missing = missing_shards(parts)
    there = ", ".join(f"{part.whole.shard} in {part.folder}" for part in parts)
    return (
        f"snapshot {whole.name!r} has {whole.shards} parts and is not whole: part"
        f" {', '.join(map(str, missing[:20]))}{' and more' if len(missing) > 20 else ''} of {whole.shards} is missing,"
        f" there is {there}; bring the missing folder back, give its path too, or delete the snapshot"
    )


def leftover_text(part: Part) -> str:
    """Text about a part that no snapshot needs."""
    return (
        f"{part.folder} has part {part.whole.shard} of {part.whole.shards} of a snapshot {part.whole.name!r} that is"
        " not whole or was replaced: a save, a delete or a reshard goes on, or was killed; after a kill the next save,"
        " or `oneemb compact`, removes the part"
    )


def _info(files: SnapshotFiles, name: str) -> SnapshotInfo:
    return files.read(name).info


def find_parts(
    folders: Sequence[str], fs: FileSystem | None = None, read: Callable[[SnapshotFiles, str], SnapshotInfo] = _info
) -> FoundParts:
    """Find the parts in the folders of tables. Takes no lock, so a writer may go on. Raises StorageError if a folder
    cannot be listed. `read`: returns the description of a snapshot."""
    fs = fs or LocalFileSystem()
    parts, damaged = [], []
    for folder in folders:
        files, marks = SnapshotFiles(fs, f"{folder}/snapshots"), marks_at(fs, folder)
        for name in files.names():
            try:
                part = _part(folder, read(files, name), marks)
            except SnapshotNotFoundError:
                continue  # A writer has removed the snapshot since it was listed.
            except StorageError as error:
                is_newer = isinstance(error, FormatVersionError)
                damaged.append(Damaged(folder, name, str(error), is_newer, files.saved(name)))
                continue
            if part is not None:
                parts.append(part)
    return FoundParts(parts, damaged, folders)


def look_at(
    paths: Iterable[str], fs: FileSystem | None = None, read: Callable[[SnapshotFiles, str], SnapshotInfo] = _info
) -> FoundParts:
    """Find the parts at paths that a running job may use. Raises StorageError if a path has no table, or a folder
    cannot be listed. `read`: as for `find_parts`."""
    paths = list(paths)
    folders = folders_at(paths)
    for path in paths:
        if not folders_at([path]):
            need_table(fs or LocalFileSystem(), path)
    for _ in range(_LOOKS):
        found = find_parts(folders, fs, read)
        if not found.incomplete():
            break  # Otherwise the job may have saved or deleted a snapshot while folders were read.
    return found


def _part(folder: str, info: SnapshotInfo, marks: set[str]) -> Part | None:
    """A table's snapshot as a part; None for a snapshot that a rank has saved for itself alone."""
    whole, identity = part_of(info.meta, info.name), info.identity
    if whole is None:
        shard, shards = shard_of(info.meta, info.name)
        whole = PartOf(info.name, shard, shards)
        identity = "" if shards > 1 else identity
    match = _RANK_FOLDER.fullmatch(os.path.basename(folder))
    if match and (whole.shard, whole.shards) != (int(match[1]), int(match[2])):
        return None
    return Part(folder, info, whole, identity, info.identity in marks)


def table_name_of(name: str, identity: str, folder: str, fs: FileSystem | None = None) -> str:
    """Name under which a table saves a new part: the snapshot's name, or, if an older snapshot that is being replaced
    has that name, `name~identity`. Raises ValueError or TypeError if the name is invalid."""
    files = SnapshotFiles(fs or LocalFileSystem(), f"{folder}/snapshots")
    other = f"{name}~{identity[:_IDENTITY_DIGITS]}"
    files.path(other)  # Raises if the longer name is too long, before any part is saved.
    return other if name in files.names() else name
