"""Checks the tables at a path, and that the snapshots that they hold together are whole."""

from collections.abc import Callable

from oneemb.storage.fs import FileSystem
from oneemb.storage.row_store import StorageError
from oneemb.storage.snapshot_parts import FoundParts, incomplete_text, look_at
from oneemb.storage.table.check import CheckResult, check_table

__all__ = ["check_parts"]


def check_parts(
    path: str, *, fs: FileSystem | None = None, progress: Callable[[int, int], None] | None = None
) -> CheckResult:
    """Check as `check_table` does, in a folder and in those of ranks within; raises as it does."""
    found = look_at([path], fs)
    if found.folders == [path]:
        result = check_table(path, fs=fs, progress=progress)
        result.problems += _broken_chains(found)
        return result
    result = CheckResult()
    for folder in found.folders:
        one = check_table(folder, fs=fs, progress=progress)
        result.problems += one.problems
        result.rows += one.rows
        result.bytes_read += one.bytes_read
        result.unneeded += one.unneeded
        result.kept += one.kept
    result.problems += [incomplete_text(parts) for parts in found.incomplete()]
    result.problems += _broken_chains(found)
    result.snapshots = [snapshot.name for snapshot in found.snapshots()]
    return result


def _broken_chains(found: FoundParts) -> list[str]:
    """What deltas lack."""
    problems = []
    for snapshot in found.snapshots():
        try:
            found.get(snapshot.name)
        except StorageError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
