"""Checks the tables at a path, and that the snapshots that they hold together are whole."""

from collections.abc import Callable

from oneemb.storage.errors import StorageError
from oneemb.storage.fs import FileSystem
from oneemb.storage.snapshots.snapshot_parts import FoundParts, incomplete_text, leftover_text, look_at, unmade_at
from oneemb.storage.table.check import CheckResult, check_table
from oneemb.storage.table.delta import GONE, gone_keys
from oneemb.storage.table.snapshot_reader import SnapshotReader


def check_parts(
    path: str, *, fs: FileSystem | None = None, progress: Callable[[int, int], None] | None = None
) -> CheckResult:
    """Check as `check_table` does, in a folder and in those of ranks within; raises as it does."""
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
    result.left_over = [leftover_text(part) for part in found.leftovers()] + left_over
    result.problems += [incomplete_text(parts) for parts in found.incomplete()]
    result.problems += [one for one in _broken_chains(found, fs) if one not in result.problems]
    result.snapshots = [snapshot.name for snapshot in found.snapshots()]
    return result


def _broken_chains(found: FoundParts, fs: FileSystem | None) -> list[str]:
    """Problems of chains of deltas: snapshots or rows that they lack."""
    broken = found.broken()
    problems = list(broken.values())
    for snapshot in [one for one in found.snapshots() if one.name not in broken]:
        try:
            for part in snapshot.parts:
                with SnapshotReader.open(part.folder, part.info.name, fs=fs) as reader:
                    gone_keys(reader.array(GONE) if GONE in reader.arrays else None, part.info.name)
        except StorageError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
