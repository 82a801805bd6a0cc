"""Opening of a table: finds the snapshots that are whole, and removes every file that no snapshot needs.

Invariants:
- while a snapshot cannot be read, no file is removed, because the files that the snapshot needs are not known;
- if something other than oneemb has removed a snapshot (the snapshot is *lost*), all files that are there when this is
  found are kept until the snapshot is back, or until a user calls `compact_snapshots(remove_orphans=True)`;
- files with names that no release of oneemb uses are left alone;
- a file with another hard link is not truncated: a backup that consists of hard links may need all of it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from oneemb.storage.errors import SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_numbers, chunk_paths
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import SnapshotRecord
from oneemb.storage.table.writer_lock import KnownSnapshots


@dataclass
class Recovery:
    """Result of the last open of a table: what was found and what was removed.

    Args:
        snapshots: names of the snapshots that are whole.
        damaged: {name of a snapshot that cannot be read: reason}; snapshots of a later format are among them.
        lost, lost_more: names of lost snapshots; number of further lost snapshots, whose names are not known.
        kept: paths of files that no existing snapshot needs, but that a lost snapshot may need.
        removed, truncated: paths of files that were removed, or truncated to the bytes that snapshots need.
        removed_bytes: bytes of disk that became free.
        stale_lock: text that names the last holder of the lock, if it ended without releasing the lock.
    """

    snapshots: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    lost_more: int = 0
    kept: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    removed_bytes: int = 0
    stale_lock: str | None = None

    def __str__(self) -> str:
        parts = [f"snapshots: {', '.join(map(repr, self.snapshots)) or 'none'}"]
        if self.damaged:
            parts.append(f"damaged snapshots: {', '.join(map(repr, self.damaged))}; nothing was removed")
        if self.lost or self.lost_more or self.kept:
            parts.append(lost_text(self.lost, self.lost_more, len(self.kept)))
        if self.removed or self.truncated:
            parts.append(
                f"removed {len(self.removed)} files and cut back {len(self.truncated)} that no snapshot needs: "
                f"{self.removed_bytes} bytes"
            )
        if self.stale_lock:
            parts.append(f"took over the lock of {self.stale_lock}, which has ended")
        return "; ".join(parts)


def find_lost(known: KnownSnapshots | None, there: Collection[str], next_number: int) -> tuple[list[str], int, int]:
    """Return the names of lost snapshots, the number of lost snapshots without a known name, and the chunk number below
    which no file may be removed, since lost snapshots may need the files.

    Args:
        known: the record of snapshots in LOCK; None = LOCK has no record.
        there: names of all existing snapshots, damaged ones included.
        next_number: greater than the number of any existing chunk.
    """
    if known is None:
        return [], 0, next_number
    lost, more = known.gone(there)
    newly = more > known.lost_more or not set(known.lost).issuperset(lost)
    return lost, more, next_number if newly else known.keep_below


def lost_text(lost: list[str], lost_more: int, kept: int) -> str:
    """Text about lost snapshots and the number of files that are kept for them."""
    names = [*map(repr, lost), *([f"{lost_more} more"] if lost_more else [])]
    gone = f"snapshots {', '.join(names)} are gone" if names else "it is not known which snapshots there were"
    return (
        f"{gone}: {kept} files that no snapshot needs are kept; restore the snapshots' files from a copy, or free the "
        f"disk with `oneemb compact --remove-orphans`"
    )


def read_snapshots(files: SnapshotFiles, recovery: Recovery) -> list[SnapshotRecord]:
    """Records of all snapshots that can be read, oldest first. The other snapshots are added to `recovery.damaged`."""
    records = []
    for name in files.names():
        try:
            records.append(files.read(name))
        except SnapshotNotFoundError:
            continue  # A writer has removed the snapshot meanwhile, or the file is a dangling link.
        except StorageError as error:
            recovery.damaged[name] = str(error)
    records.sort(key=lambda record: record.info.sequence)
    recovery.snapshots = [record.info.name for record in records]
    return records


def remove_orphans(
    fs: FileSystem, directory: str, files: SnapshotFiles, needed: dict[int, tuple[int, int]], keep_below: int,
    recovery: Recovery,
) -> None:  # fmt: skip
    """Remove the files, or the ends of files, that no snapshot needs, except in chunks with a number below
    `keep_below`. needed: {number of a chunk: bytes that snapshots need of its rows file and of its keys file}."""
    path = directory
    try:
        numbers = chunk_numbers(fs.names(directory))
        if recovery.damaged:
            return
        for path in files.leftovers():
            _remove(fs, path, recovery)
        for name, number in sorted(numbers.items()):
            path = f"{directory}/{name}"
            size = needed[number][path == chunk_paths(directory, number)[1]] if number in needed else 0
            try:
                excess = fs.size(path) - size
            except FileNotFoundError:
                continue  # A link to nowhere.
            if excess <= 0 and number in needed:
                continue
            if number < keep_below:
                recovery.kept.append(path)
            elif number not in needed:
                _remove(fs, path, recovery)
            elif not fs.is_linked(path):
                fs.truncate(path, size)
                recovery.truncated.append(path)
                recovery.removed_bytes += excess
    except OSError as error:
        raise storage_error(error, "remove what no snapshot needs:", path) from error


def needed_bytes(records: list[SnapshotRecord]) -> dict[int, tuple[int, int]]:
    """{number of a chunk: bytes that snapshots need of its rows file and of its keys file}."""
    needed: dict[int, tuple[int, int]] = {}
    for record in records:
        for part in record.parts:
            rows_bytes = ROWS_BEGIN + part.blocks * record.geometry.block_bytes
            known = needed.get(part.number, (0, 0))
            needed[part.number] = (max(known[0], rows_bytes), max(known[1], part.keys_bytes))
    return needed


def _remove(fs: FileSystem, path: str, recovery: Recovery) -> None:
    size = fs.size(path)
    try:
        fs.remove(path)
    except (IsADirectoryError, PermissionError):
        return  # A folder, which oneemb does not make, or a file of another user: left alone.
    recovery.removed.append(path)
    recovery.removed_bytes += size
