"""Describes what lies at a table's path, without taking its lock and without reading rows."""

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
        snapshots: oldest first.
        damaged: the snapshots whose files cannot be read, with the reason.
        holder: the holder of the writer's lock, in words; None = nobody holds it.
        chunks: number of chunks, two files each.
        disk_bytes: bytes of all files.
        unsaved_bytes: bytes that no snapshot needs: a writer's, or left from one.
        missing: number of missing bytes of each file, by path, that a snapshot needs.
        live_bytes: bytes of the rows of snapshots; a row that several share counts once.
        garbage_bytes: the most bytes that compaction could free, with the few that files need beside rows.
        lost, lost_more: names of snapshots that are missing though they were not deleted here, and number of others.
        kept: files that no snapshot needs and that the next open of the table does not remove.
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
    """Snapshots and files of the table at a path. A live writer may go on meanwhile. StorageError if there is no table,
    or its files cannot be listed."""
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    info = _look(fs, path)
    # A writer may have deleted a snapshot and its chunks after this call had read the snapshot: look again.
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
            its = f"{path}/{directory}/{name}"
            try:
                size = fs.size(its)
            except FileNotFoundError:
                continue  # A writer has removed it meanwhile.
            disk += size
            unsaved += max(0, size - missing.get(its, 0))
            missing[its] = max(0, missing.get(its, 0) - size)
            if directory == "chunks":
                for number in chunk_numbers([name]).values():
                    chunks[number] = chunks.get(number, 0) + size
    missing = {its: size for its, size in missing.items() if size}
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
    """Names of snapshots that an open of the table would find lost, the number of others, and files it would keep.
    `held` says whether a writer holds the lock, and may be changing the record."""
    before = {*files.names()}
    known = known_snapshots(fs, f"{path}/LOCK")
    if known is None and held:
        return [], 0, []  # A writer of an earlier release, which wrote no records.
    # A snapshot that was saved or deleted meanwhile is in one of the two lists of names.
    lost, more, keep_below = find_lost(known, before | {*files.names()}, EVERY_NUMBER)
    numbers = chunk_numbers(_names(fs, f"{path}/chunks"))
    kept = [name for name, number in sorted(numbers.items()) if number not in needed and number < keep_below]
    return lost, more, [f"{path}/chunks/{name}" for name in kept]


def chunk_bytes_of(records: list[SnapshotRecord]) -> int:
    """Bytes of chunk files that these snapshots need, shared ones counted once."""
    return sum(map(sum, needed_bytes(records).values()))


def live_bits(files: SnapshotFiles, records: list[SnapshotRecord]) -> dict[int, tuple[Geometry, np.ndarray]]:
    """By chunk number: its geometry, and the bits of the rows that belong to any of the snapshots. CorruptTableError if
    a list of rows is not what was written."""
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
    """Raise StorageError unless a table lies there."""
    for directory in ("chunks", "snapshots"):
        try:
            fs.names(f"{path}/{directory}")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StorageError(
                f"{path} is no table of oneemb: it has no folder {directory}; give the folder of one"
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
