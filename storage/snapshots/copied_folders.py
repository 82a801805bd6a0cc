"""Copies of a folder with the tables of an embedding: what can be read of a damaged one, as a new folder.

A new folder appears by a rename, so it has everything or does not exist.
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import LocalFileSystem, doing
from oneemb.storage.new_files import begin, remove_unfinished
from oneemb.storage.snapshots.part_folders import add_lost_parents, add_to_whole
from oneemb.storage.snapshots.snapshot_parts import (
    FoundParts,
    Part,
    find_parts,
    folders_at,
    look_at,
    missing_shards,
    rank_folder_name,
)
from oneemb.storage.table.check import SnapshotCheck
from oneemb.storage.table.salvage import SalvageResult, salvage_table
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import SnapshotInfo, SnapshotRecord
from oneemb.storage.table.writer_lock import lock_holder

_DIGITS = 16


def salvage_folder(
    path: str, to: str, progress: Callable[[int, int], None] | None = None, unlisted: str | None = None
) -> SalvageResult:
    """Write all that can be read of the table at `path`, or of the tables of ranks there, into a new folder `to`; see
    `salvage_table`. Where the part of a rank is lost, an empty part takes its place, so that the others can be loaded.

    Args:
        unlisted: name of a further snapshot, of the newest version of every row, whether a snapshot lists it or not.

    Raises:
        LockedError: a job uses a table.
        StorageError: `to` exists and is not an empty folder, there is no table, or a file call fails in a way that
            does not show damage to the tables.
    """
    fs, path, to = LocalFileSystem(), os.path.realpath(path), os.path.realpath(to)
    if os.path.exists(to) and not (os.path.isdir(to) and not os.listdir(to)):
        raise StorageError(f"{to} must be a new or an empty folder, it has files; give the path of a new folder")
    if os.path.commonpath([path, to]) == path:
        raise StorageError(f"{to} must be outside of {path}, the damaged folder; give a path beside it")
    found = look_at([path])
    for folder in found.folders:
        if (holder := lock_holder(fs, f"{folder}/LOCK")) is not None:
            raise LockedError(
                f"{folder} must not be in use, it is held by {holder}; end that job, or use `oneemb backup`"
            )
    with doing("make the folder", to):
        fs.make_directories(os.path.dirname(to))
        remove_unfinished(fs, os.path.dirname(to), re.escape(os.path.basename(to)), _DIGITS, shutil.rmtree)
        new, lock = begin(fs, to, _DIGITS, os.mkdir)
    try:
        result = _salvage(found, path, new, progress, unlisted)
        with doing("rename to its name", to):
            with suppress(FileNotFoundError):
                os.rmdir(to)
            fs.rename(new, to)
            fs.sync_directory(os.path.dirname(to))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        fs.unlock(lock)
    return result


def _salvage(
    found: FoundParts, path: str, new: str, progress: Callable[[int, int], None] | None, unlisted: str | None
) -> SalvageResult:  # fmt: skip
    result, identity = SalvageResult(), uuid.uuid4().hex
    if unlisted is not None and (found.parts_of(unlisted) or found.damaged_of(unlisted)):
        raise ValueError(f"the name of the snapshot of all rows must be new, {unlisted!r} exists; give another name")
    left = {(part.folder, part.info.name) for part in found.leftovers()}
    # An empty part of a delta would bring back the rows of its parent, as if they were the delta's.
    deltas = [parts for parts in found.incomplete() if "delta" in parts[0].info.meta]
    left |= {(part.folder, part.info.name) for parts in deltas for part in parts}
    for folder in found.folders:
        target = os.path.join(new, os.path.relpath(folder, path))
        leave_out = {name for one, name in left if one == folder}
        one = salvage_table(
            folder, os.path.normpath(target), leave_out=leave_out, progress=progress,
            unlisted=None if unlisted is None else (unlisted, identity, _meta_for(found, folder)),
        )  # fmt: skip
        result.problems += one.problems
        add_to_whole(found, folder, one.by_snapshot, result.by_snapshot)
    for parts in found.incomplete():
        for shard in missing_shards(parts):
            if parts not in deltas:
                _put_empty_part(parts[0], shard, new)
            report = result.by_snapshot.setdefault(parts[0].whole.name, SnapshotCheck())
            report.whole = False
            report.unreadable = [what for what in report.unreadable if what != "file"] + [f"part {shard}"]
            report.unreadable += ["file"] if parts in deltas else []
    add_lost_parents(found, result.by_snapshot)
    if unlisted is not None:
        _put_missing_parts(unlisted, new)
    return result


def _put_missing_parts(name: str, new: str) -> None:
    """Save empty parts of the snapshot of all rows for ranks that have no chunk."""
    parts = find_parts(folders_at([new])).parts_of(name)
    for shard in missing_shards(parts) if parts else ():
        _put_empty_part(parts[0], shard, new)


def _meta_for(found: FoundParts, folder: str) -> dict[str, Any]:
    """Meta that a snapshot of a rank's folder may have, by that of another rank; {} if there is none."""
    for shards in {part.whole.shards for part in found.parts}:
        for shard in range(shards):
            if os.path.basename(folder) == rank_folder_name(shard, shards):
                newest = max((part.info for part in found.parts if part.whole.shards == shards), key=_sequence)
                return newest.meta | {"shard": [shard, shards]}
    return {}


def _sequence(info: SnapshotInfo) -> int:
    return info.sequence


def _put_empty_part(other: Part, shard: int, new: str) -> None:
    """Save a part without rows, of the snapshot of `other`, for the rank whose part is lost."""
    fs = LocalFileSystem()
    folder = os.path.join(new, rank_folder_name(shard, other.whole.shards))
    for name in ("chunks", "snapshots"):
        fs.make_directories(f"{folder}/{name}")
    files = SnapshotFiles(fs, f"{folder}/snapshots")
    record = SnapshotFiles(fs, f"{other.folder}/snapshots").read(other.info.name)
    meta = record.info.meta | {"shard": [shard, other.whole.shards], "salvaged": {"part": shard}}
    info = replace(record.info, rows=0, bytes=0, meta=meta)
    files.write(SnapshotRecord(info, record.geometry, [], files.path(info.name), {}))
