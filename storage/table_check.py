"""Looks at a table from outside, without its lock and without changing it: what is there, and whether it is sound."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import chunk_numbers, chunk_paths
from oneemb.storage.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.errors import CorruptBlockError, StorageError
from oneemb.storage.file_header import FORMAT_VERSION
from oneemb.storage.fs import FileSystem, LocalFileSystem, storage_error
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.recovery import needed_bytes
from oneemb.storage.snapshot_file import ChunkPart, SnapshotFiles, SnapshotInfo, SnapshotRecord
from oneemb.storage.writer_lock import lock_holder

__all__ = ["TableInfo", "check_table", "inspect_table"]


@dataclass
class TableInfo:
    """What lies at a path.

    Args:
        path: of the table.
        format_version: of its files.
        snapshots: those that are whole, oldest first.
        damaged: those that cannot be read, with the reason.
        disk_bytes: of all files.
        live_bytes: of the rows of snapshots, each row of a chunk counted once, with its share of keys and checksums.
        garbage_bytes: of the snapshots' chunks, beside `live_bytes`.
        loose_bytes: of chunks that no snapshot needs: a live writer's, or left by one that has ended; the next open
            frees the latter.
        held_by: who writes there now, in words; None = nobody.
    """

    path: str
    format_version: int
    snapshots: list[SnapshotInfo]
    damaged: dict[str, str]
    disk_bytes: int
    live_bytes: int
    garbage_bytes: int
    loose_bytes: int
    held_by: str | None


def inspect_table(path: str | os.PathLike[str], fs: FileSystem | None = None) -> TableInfo:
    """What lies at a path. Reads no rows.

    Raises:
        StorageError: there is no table, or it cannot be read.
    """
    fs, path = fs or LocalFileSystem(), os.fspath(path)
    records, damaged = _read_snapshots(fs, path)
    files = SnapshotFiles(fs, f"{path}/snapshots")
    live: dict[int, np.ndarray] = {}
    live_bytes = 0.0
    for record in records:
        for part in record.parts:
            bit_N = files.read_bits(record, part)
            seen = live.get(part.number, np.empty(0, np.uint8))
            longer, shorter = (seen, bit_N) if len(seen) > len(bit_N) else (bit_N.copy(), seen)
            before = np.unpackbits(seen).sum(dtype=np.int64)
            longer[: len(shorter)] |= shorter
            live[part.number] = longer
            live_bytes += (np.unpackbits(longer).sum(dtype=np.int64) - before) * record.geometry.disk_bytes_per_row
    needed = {number: sum(sizes) for number, sizes in needed_bytes(records).items()}
    try:
        sizes = {name: fs.size(f"{path}/chunks/{name}") for name in chunk_numbers(fs.names(f"{path}/chunks"))}
        snapshot_bytes = sum(fs.size(files.path(record.info.name)) for record in records)
        held_by = lock_holder(fs, f"{path}/LOCK")
    except OSError as error:
        raise storage_error(error, "look at", path) from error
    chunk_bytes = sum(sizes.values())
    return TableInfo(
        path=path, format_version=FORMAT_VERSION, snapshots=[record.info for record in records], damaged=damaged,
        disk_bytes=chunk_bytes + snapshot_bytes, live_bytes=round(live_bytes),
        garbage_bytes=max(0, round(sum(needed.values()) - live_bytes)),
        loose_bytes=max(0, chunk_bytes - sum(needed.values())), held_by=held_by,
    )  # fmt: skip


def check_table(
    path: str | os.PathLike[str],
    *,
    fs: FileSystem | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Read everything that a snapshot needs and compare it with its checksum; returns what is wrong, in words.

    Blocks and keys of garbage rows are compared too. Memory: an index of the largest snapshot's keys.

    Args:
        path: of a table. A live writer may be at work; a snapshot that it removes meanwhile shows as a missing file.
        fs: where it is.
        progress: is called with bytes done and bytes in all.

    Raises:
        StorageError: there is no table, or a file cannot be read for another reason than what is in it.
    """
    fs, path = fs or LocalFileSystem(), os.fspath(path)
    records, damaged = _read_snapshots(fs, path)
    wrong = list(damaged.values())
    longest: dict[int, tuple[SnapshotRecord, ChunkPart]] = {}
    for record in records:
        for part in record.parts:
            if part.number not in longest or longest[part.number][1].blocks < part.blocks:
                longest[part.number] = record, part
    total = sum(sum(sizes) for sizes in needed_bytes(records).values())
    done = 0
    for number, (record, part) in longest.items():
        rows_path, keys_path = chunk_paths(f"{path}/chunks", number)
        geometry = record.geometry
        try:
            keys = read_keys(fs, keys_path, geometry, part)
            # One row of each block is enough: a block is compared as a whole. After a bad one the rest is read too.
            begin = 0
            while begin < part.blocks:
                first_N = np.arange(begin, part.blocks) * geometry.rows_per_block
                try:
                    for _, id_N, _ in scan_rows(fs, rows_path, geometry, number, keys, first_N, 1024):
                        begin += len(id_N)
                        if progress is not None:
                            progress(done + begin * geometry.block_bytes, total)
                except CorruptBlockError as error:
                    wrong.append(str(error))
                    begin = error.block + 1
        except StorageError as error:
            wrong.append(str(error))
        done += sum(needed_bytes([record])[number])
    for record in records:
        wrong += _check_keys(fs, path, record)
    if progress is not None:
        progress(total, total)
    return list(dict.fromkeys(wrong))


def _check_keys(fs: FileSystem, path: str, record: SnapshotRecord) -> list[str]:
    """What is wrong with a snapshot's list of rows, and with the keys of those rows."""
    files = SnapshotFiles(fs, f"{path}/snapshots")
    index, wrong = HashIndex(Threads(1), record.info.rows), []
    for part in record.parts:
        try:
            rows = live_rows(files.read_bits(record, part))
            keys = read_keys(fs, chunk_paths(f"{path}/chunks", part.number)[1], record.geometry, part)
        except StorageError as error:
            wrong.append(str(error))
            continue
        if len(rows) != part.rows:
            wrong.append(f"{record.path}: chunk {part.number} must have {part.rows} rows, its list has {len(rows)}")
        old = index.put(keys.table_N[rows], keys.id_N[rows], rows)
        for n in np.flatnonzero(old >= 0)[:10].tolist():
            key = f"table {keys.table_N[rows[n]]}, id {keys.id_N[rows[n]]}"
            wrong.append(f"{record.path}: {key} is there twice, the second time in chunk {part.number}, row {rows[n]}")
    return wrong


def _read_snapshots(fs: FileSystem, path: str) -> tuple[list[SnapshotRecord], dict[str, str]]:
    files = SnapshotFiles(fs, f"{path}/snapshots")
    try:
        fs.names(f"{path}/chunks")
    except OSError as error:
        raise storage_error(error, "find a table at", path) from error
    records, damaged = [], {}
    for name in files.names():
        try:
            records.append(files.read(name))
        except StorageError as error:
            damaged[name] = str(error)
    return sorted(records, key=lambda record: record.info.sequence), damaged
