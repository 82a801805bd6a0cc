"""Describes the snapshots and the disk use of a table's folder, without its lock and without reading rows."""

from dataclasses import dataclass

import numpy as np

from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, storage_error
from oneemb.storage.table.chunk_files import EVERY_NUMBER, chunk_numbers, chunk_paths
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.recovery import Recovery, find_lost, needed_bytes, read_snapshots
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import SnapshotInfo, SnapshotRecord
from oneemb.storage.table.writer_lock import known_snapshots, lock_holder


@dataclass
class TableInfo:
    """Snapshots and files of a table.

    Args:
        snapshots: descriptions of the snapshots, oldest first.
        damaged: {name of a snapshot whose file cannot be read: reason}.
        holder: the holder of the writer's lock, in words; None = the lock is free.
        chunks: number of chunks; a chunk is two files.
        disk_bytes: bytes of all files.
        unsaved_bytes: bytes that no snapshot needs; a writer uses them or has left them.
        missing: {path of a file: number of bytes that snapshots need and that are missing}.
        live_bytes: bytes of the rows of all snapshots; a row that several snapshots share counts once.
        garbage_bytes: upper bound of the bytes that compaction could free; it includes headers and padding.
        lost, lost_more: names of snapshots that something other than oneemb has removed; number of further ones.
        kept: paths of files that no snapshot needs and that the next open of the table does not remove.
    """

    snapshots: list[SnapshotInfo]
    damaged: dict[str, str]
    holder: str | None
    chunks: int
    disk_bytes: int
    unsaved_bytes: int
    missing: dict[str, int]
    live_bytes: int
    garbage_bytes: int
    lost: list[str]
    lost_more: int
    kept: list[str]


def table_info(path: AnyPath, fs: FileSystem | None = None) -> TableInfo:
    """Snapshots and files of the table at a path. A writer may go on at the same time. Raises StorageError if there is
    no table, or its files cannot be listed."""
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    info = _look(fs, path)
    # A writer may have deleted a snapshot and its chunks after `_look` had read the snapshot, so look again.
    return _look(fs, path) if info.missing else info


def _look(fs: FileSystem, path: str) -> TableInfo:
    files, records, damaged = _snapshots(fs, path)
    live: dict[int, int] = {}
    try:
        for number, (geometry, bit_N) in live_bits(files, records).items():
            live[number] = int(np.unpackbits(bit_N).sum() * geometry.disk_bytes_per_row)
    except StorageError as error:
        damaged[""] = str(error)
    needed = needed_bytes(records)
    missing = {record.path: record.info.bytes - chunk_bytes_of([record]) for record in records}
    for number, sizes in needed.items():
        missing |= zip(chunk_paths(f"{path}/chunks", number), sizes, strict=True)
    disk = unsaved = 0
    chunks: dict[int, int] = {}
    for directory in ("chunks", "snapshots"):
        for name in _names(fs, f"{path}/{directory}"):
            file = f"{path}/{directory}/{name}"
            try:
                size = fs.size(file)
            except FileNotFoundError:
                continue  # A writer has removed the file since it was listed.
            disk += size
            unsaved += max(0, size - missing.get(file, 0))
            missing[file] = max(0, missing.get(file, 0) - size)
            if directory == "chunks":
                for number in chunk_numbers([name]).values():
                    chunks[number] = chunks.get(number, 0) + size
    missing = {file: size for file, size in missing.items() if size}
    garbage = disk - sum(min(size, chunks.get(number, 0)) for number, size in live.items())
    holder = lock_holder(fs, f"{path}/LOCK")
    lost, lost_more, kept = lost_and_kept(fs, path, files, needed, holder is not None)
    return TableInfo(
        [record.info for record in records], damaged, holder, len(chunks), disk, unsaved, missing, sum(live.values()),
        garbage, lost, lost_more, kept,
    )  # fmt: skip


def _snapshots(fs: FileSystem, path: str) -> tuple[SnapshotFiles, list[SnapshotRecord], dict[str, str]]:
    need_table(fs, path)
    files, recovery = SnapshotFiles(fs, f"{path}/snapshots"), Recovery()
    return files, read_snapshots(files, recovery), recovery.damaged


def lost_and_kept(
    fs: FileSystem, path: str, files: SnapshotFiles, needed: dict[int, tuple[int, int]], held: bool
) -> tuple[list[str], int, list[str]]:
    """Result of opening the table, without opening it: (names of lost snapshots, number of further ones, paths of files
    that are kept for lost snapshots). `held`: whether a writer holds the lock and may be changing the record."""
    before = {*files.names()}
    known = known_snapshots(fs, f"{path}/LOCK")
    if known is None and held:
        return [], 0, []  # The writer is of an early release, which wrote no records.
    # The names are listed before and after the record is read: a snapshot that was deleted or saved between is in one
    # list.
    lost, more, keep_below = find_lost(known, before | {*files.names()}, EVERY_NUMBER)
    numbers = chunk_numbers(_names(fs, f"{path}/chunks"))
    kept = [name for name, number in sorted(numbers.items()) if number not in needed and number < keep_below]
    return lost, more, [f"{path}/chunks/{name}" for name in kept]


@dataclass
class SnapshotDisk:
    """Disk space of a snapshot.

    Args:
        bytes: bytes of the files that it needs.
        freed: bytes that become free if it is deleted: those of files that no other snapshot needs.
    """

    bytes: int = 0
    freed: int = 0


def snapshot_disk(path: AnyPath, fs: FileSystem | None = None) -> dict[str, SnapshotDisk]:
    """{name of a snapshot: its disk space}, for the table at a path. A writer may go on at the same time. Raises
    StorageError if there is no table, or its files cannot be listed."""
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    records = _snapshots(fs, path)[1]
    users: dict[int, int] = {}
    for record in records:
        for part in record.parts:
            users[part.number] = users.get(part.number, 0) + 1
    found = {}
    for record in records:
        own = [record.path]
        for part in record.parts:
            if users[part.number] == 1:
                own += chunk_paths(f"{path}/chunks", part.number)
        found[record.info.name] = SnapshotDisk(record.info.bytes, sum(_size(fs, file) for file in own))
    return found


def _size(fs: FileSystem, path: str) -> int:
    try:
        return fs.size(path)
    except FileNotFoundError:
        return 0  # A writer has removed it, or it is missing: `table_info` says so.


def chunk_bytes_of(records: list[SnapshotRecord]) -> int:
    """Number of bytes of chunk files that these snapshots need; shared bytes count once."""
    return sum(map(sum, needed_bytes(records).values()))


def live_bits(files: SnapshotFiles, records: list[SnapshotRecord]) -> dict[int, tuple[Geometry, np.ndarray]]:
    """{number of a chunk: (its geometry, bits of the rows that belong to any of the snapshots)}. Raises
    CorruptTableError if a list of rows is damaged."""
    live: dict[int, tuple[Geometry, np.ndarray]] = {}
    for record in records:
        for part in record.parts:
            bit_N = files.read_bits(record, part)
            known = live[part.number][1] if part.number in live else np.empty(0, np.uint8)
            either = np.zeros(max(len(bit_N), len(known)), np.uint8)
            either[: len(bit_N)] |= bit_N
            either[: len(known)] |= known
            live[part.number] = (record.geometry, either)
    return live


def need_table(fs: FileSystem, path: str) -> None:
    """Raise StorageError if the path is not the folder of a table."""
    for directory in ("chunks", "snapshots"):
        try:
            fs.names(f"{path}/{directory}")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StorageError(
                f"{path} is no table of oneemb: it has no folder {directory}; give the folder of a table, which a job"
                " makes when it begins"
            ) from error
        except OSError as error:
            raise storage_error(error, "list", f"{path}/{directory}") from error


def _names(fs: FileSystem, directory: str) -> list[str]:
    try:
        return fs.names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, "list", directory) from error
