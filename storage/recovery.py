"""What opening a table finds, and what it removes: everything that no snapshot needs.

Invariant: while a snapshot cannot be read, nothing is removed, because nobody knows what it needs.
"""

from dataclasses import dataclass, field

from oneemb.storage.chunk_files import ROWS_BEGIN, chunk_numbers, chunk_paths
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.snapshot_file import SnapshotFiles, SnapshotRecord

__all__ = ["Recovery", "needed_bytes", "read_snapshots", "remove_orphans"]


@dataclass
class Recovery:
    """What the last open of a table found and did.

    Args:
        snapshots: names of the snapshots that are whole.
        damaged: snapshots that cannot be read, with the reason.
        removed: paths of files that nothing needed.
        truncated: paths of files that were cut back to what a snapshot needs.
        removed_bytes: how much room both gave.
        stale_lock: who held the lock last and ended without giving it back.
    """

    snapshots: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    removed_bytes: int = 0
    stale_lock: str | None = None

    def __str__(self) -> str:
        said = [f"snapshots: {', '.join(map(repr, self.snapshots)) or 'none'}"]
        if self.damaged:
            said.append(f"damaged snapshots: {', '.join(map(repr, self.damaged))}; nothing was removed")
        if self.removed or self.truncated:
            said.append(
                f"removed {len(self.removed)} files and cut back {len(self.truncated)} that no snapshot needs: "
                f"{self.removed_bytes} bytes"
            )
        if self.stale_lock:
            said.append(f"took over the lock of {self.stale_lock}, which has ended")
        return "; ".join(said)


def read_snapshots(files: SnapshotFiles, recovery: Recovery) -> list[SnapshotRecord]:
    """All snapshots that are whole, oldest first; the others go to `recovery.damaged`.

    Raises:
        FormatVersionError: a snapshot is of another format.
    """
    records = []
    for name in files.names():
        try:
            records.append(files.read(name))
        except CorruptTableError as error:
            recovery.damaged[name] = str(error)
    records.sort(key=lambda record: record.info.sequence)
    recovery.snapshots = [record.info.name for record in records]
    return records


def remove_orphans(
    fs: FileSystem, directory: str, files: SnapshotFiles, needed: dict[int, tuple[int, int]], recovery: Recovery
) -> int:
    """Remove files that no snapshot needs; `needed` maps a chunk's number to the bytes needed of its two files.

    Returns:
        A number greater than that of any chunk seen.
    """
    path = directory
    try:
        numbers = chunk_numbers(fs.names(directory))
        if not recovery.damaged:
            for path in files.leftovers():
                _remove(fs, path, recovery)
            for name, number in sorted(numbers.items()):
                path = f"{directory}/{name}"
                if number not in needed:
                    _remove(fs, path, recovery)
                    continue
                size = needed[number][path == chunk_paths(directory, number)[1]]
                excess = fs.size(path) - size
                if excess > 0:
                    fs.truncate(path, size)
                    recovery.truncated.append(path)
                    recovery.removed_bytes += excess
    except OSError as error:
        raise storage_error(error, "remove what no snapshot needs:", path) from error
    return max([*numbers.values(), *needed, 0]) + 1


def needed_bytes(records: list[SnapshotRecord]) -> dict[int, tuple[int, int]]:
    """By chunk number, the bytes of its two files that some snapshot needs."""
    needed: dict[int, tuple[int, int]] = {}
    for record in records:
        for part in record.parts:
            rows_bytes = ROWS_BEGIN + part.blocks * record.geometry.block_bytes
            known = needed.get(part.number, (0, 0))
            needed[part.number] = (max(known[0], rows_bytes), max(known[1], part.keys_bytes))
    return needed


def _remove(fs: FileSystem, path: str, recovery: Recovery) -> None:
    size = fs.size(path)
    fs.remove(path)
    recovery.removed.append(path)
    recovery.removed_bytes += size
