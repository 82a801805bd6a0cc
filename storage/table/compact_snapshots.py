"""Frees disk in a table's folder that no job uses: moves the rows that snapshots need out of chunks that are mostly
garbage, and removes these chunks.

A running job cannot remove chunks that snapshots need, even if they are mostly garbage. This module compacts them. A
row that several snapshots share is moved once and stays shared.

    1. take the lock, remove files that no snapshot needs    4. replace each snapshot file by a new one
    2. write the rows of sparse chunks to new chunks         5. remove the chunks that no snapshot needs any more
    3. sync the new chunks and the folder `chunks`

Comments in the code name these steps.

Invariant: each snapshot file is replaced atomically, and the old chunks are kept until all snapshot files are new. So a
crash at any moment leaves every snapshot with its rows.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, aligned_bytes
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles, chunk_paths, key_record
from oneemb.storage.table.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.table.compaction import CompactionResult
from oneemb.storage.table.file_header import HEADER_BYTES
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.recovery import Recovery, lost_text, needed_bytes
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord
from oneemb.storage.table.snapshot_store import SnapshotStore
from oneemb.storage.table.table_info import chunk_bytes_of, live_bits, need_table
from oneemb.storage.table.writer_lock import WriterLock

# A chunk whose needed rows take at least this share of its bytes is not compacted.
_FULL_ENOUGH = 0.95
_RUN_BYTES = 1 << 22
# Most bytes of a run in the keys file beside keys and checksums of blocks: three numbers, a checksum, padding.
_RUN_OVERHEAD_BYTES = 48


def compact_snapshots(
    path: AnyPath,
    *,
    remove_orphans: bool = False,
    fs: FileSystem | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CompactionResult:
    """Free the disk space of a table's folder that no snapshot needs.

    Args:
        path: the table's folder. Its disk needs free space for a second copy of the rows that move.
        remove_orphans: also remove files that only lost snapshots may need. A snapshot is lost if something other than
            oneemb has removed it. False = such files stay, and a lost snapshot is an error.
        progress: called with (rows moved so far, most rows that will move).

    Raises:
        LockedError: a job uses the table.
        CorruptTableError: a snapshot is not what was written; nothing has changed.
        StorageError: the disk fails or is full; every snapshot is still whole. Or a snapshot is lost and
            `remove_orphans` is False; nothing has changed.
    """
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    need_table(fs, path)
    lock = WriterLock(fs, f"{path}/LOCK")
    try:
        recovery = Recovery()
        store = SnapshotStore(fs, path, False, recovery, lock, remove_lost=remove_orphans)
        try:
            for name, reason in recovery.damaged.items():
                raise CorruptTableError(f"snapshot {name!r} is damaged: {reason}; nothing was compacted")
            if recovery.kept or recovery.lost or recovery.lost_more:
                raise StorageError(
                    f"{path}: {lost_text(recovery.lost, recovery.lost_more, len(recovery.kept))}; nothing was compacted"
                )
            result = _compact(fs, path, store.files, store.chunk_files, progress)
        except BaseException:
            store.chunk_files.close()
            with suppress(StorageError):
                # Removes the chunks that this failed compaction has written, as every opening of the table does.
                SnapshotStore(fs, path, False, Recovery(), lock).chunk_files.close()
            raise
        store.chunk_files.close()
        after = Recovery()
        SnapshotStore(fs, path, False, after, lock).chunk_files.close()  # Step 5: opening removes them.
        result.bytes_freed += recovery.removed_bytes + after.removed_bytes
        return result
    finally:
        lock.release()


def _compact(
    fs: FileSystem, path: str, files: SnapshotFiles, chunks: ChunkFiles, progress: Callable[[int, int], None] | None
) -> CompactionResult:
    records = sorted((files.read(name) for name in files.names()), key=lambda record: record.info.sequence)
    live, size = live_bits(files, records), needed_bytes(records)
    sparse: dict[Geometry, list[int]] = {}
    rows_to_move = 0
    for number, (geometry, bit_N) in sorted(live.items()):
        count = len(live_rows(bit_N))
        if count * geometry.disk_bytes_per_row < _FULL_ENOUGH * (sum(size[number]) - ROWS_BEGIN - HEADER_BYTES):
            sparse.setdefault(geometry, []).append(number)
            rows_to_move += count
    longest: dict[int, ChunkPart] = {}
    for record in records:
        for part in record.parts:
            if part.number not in longest or part.keys_bytes > longest[part.number].keys_bytes:
                longest[part.number] = part
    result = CompactionResult()
    for geometry, numbers in sparse.items():
        bits = {number: live[number][1] for number in numbers}
        count = sum(len(live_rows(bit_N)) for bit_N in bits.values())
        if _bytes_max(geometry, count) > _FULL_ENOUGH * sum(sum(size[number]) for number in numbers):
            continue
        log = _Log(chunks, geometry)
        for number in numbers:  # Step 2.
            rows_path, keys_path = chunk_paths(f"{path}/chunks", number)
            keys, rows = read_keys(fs, keys_path, geometry, longest[number]), live_rows(bits[number])
            for table_N, id_N, row_NW in scan_rows(fs, rows_path, geometry, number, keys, rows, 65536):
                log.put(table_N, id_N, row_NW)
                result.rows_moved += len(id_N)
                if progress is not None:
                    progress(result.rows_moved, rows_to_move)
            result.chunks += 1
        log.end()
        for chunk in log.chunks:  # Step 3.
            chunks.sync(chunk)
        chunks.sync_names()
        for record in records:
            if record.geometry == geometry and any(part.number in bits for part in record.parts):
                new = _moved(files, record, bits, log)
                files.write(new)  # Step 4.
                own = (record.info.bytes - chunk_bytes_of([record]), new.info.bytes - chunk_bytes_of([new]))
                result.bytes_freed += own[0] - own[1]
        result.bytes_freed -= sum(chunk.nbytes for chunk in log.chunks)
    return result


def _bytes_max(geometry: Geometry, rows: int) -> int:
    """Upper bound on the bytes of the new chunks for `rows` rows."""
    chunks = -(-rows // geometry.rows_per_chunk)
    runs = rows * geometry.row_bytes // _RUN_BYTES + chunks + 1
    gaps = chunks * (ROWS_BEGIN + HEADER_BYTES + geometry.block_bytes) + runs * _RUN_OVERHEAD_BYTES
    return int(rows * geometry.disk_bytes_per_row) + gaps


def _moved(files: SnapshotFiles, record: SnapshotRecord, bits: dict[int, np.ndarray], log: "_Log") -> SnapshotRecord:
    """Return the record of a snapshot with the new places of the rows that have moved.

    Args:
        bits: {number of an old chunk: bits of its rows that have moved}. The log has their rows in this order.
    """
    of_part = {part.number: part for part in record.parts}
    parts = [replace(part, bit_N=files.read_bits(record, part)) for part in record.parts if part.number not in bits]
    # A byte for each row of the log: whether the snapshot has the row.
    own_N, begin = np.zeros(sum(log.rows), np.bool_), 0
    for number, moved_N in bits.items():
        is_moved_N = np.unpackbits(moved_N, bitorder="little").view(np.bool_)
        end = begin + int(np.count_nonzero(is_moved_N))
        if number in of_part:
            is_own_N = np.unpackbits(files.read_bits(record, of_part[number]), bitorder="little").view(np.bool_)
            n = is_moved_N[: len(is_own_N)]
            own_N[begin : begin + int(np.count_nonzero(n))] = is_own_N[n]
        begin = end
    begin = 0
    for chunk, rows in zip(log.chunks, log.rows, strict=True):
        is_live_N = np.zeros(-(-chunk.blocks * record.geometry.rows_per_block // 64) * 64, np.bool_)
        is_live_N[:rows] = own_N[begin : begin + rows]
        begin += rows
        if live := int(np.count_nonzero(is_live_N)):
            bit_N = np.packbits(is_live_N, bitorder="little")
            parts.append(ChunkPart(chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum, live, bit_N=bit_N))
    arrays = {name: replace(array, data=files.read_array(record, name)) for name, array in record.arrays.items()}
    new = replace(record, parts=parts, info=replace(record.info), arrays=arrays)
    new.info.bytes = chunk_bytes_of([new])
    return new


class _Log:
    """A sequence of new chunks, each filled before the next is created. The n-th row that is put is row n of the
    log."""

    def __init__(self, files: ChunkFiles, geometry: Geometry):
        self._files, self._geometry = files, geometry
        self._kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._size = 0
        self.chunks: list[ChunkFile] = []
        self.rows: list[int] = []
        """Number of rows in each chunk."""

    def put(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        """Append rows to the log. Rows wait in memory until they fill a run."""
        self._kept.append((table_N, id_N, row_NW))
        self._size += len(id_N)
        if self._size * self._geometry.row_bytes >= _RUN_BYTES:
            self._write(self._size // self._geometry.rows_per_block * self._geometry.rows_per_block)

    def end(self) -> None:
        """Write the rows that are still in memory, and seal all chunks."""
        self._write(self._size)
        for chunk in self.chunks:
            self._files.seal(chunk)

    def _write(self, size: int) -> None:
        """Write the first `size` rows that wait in memory. They fill whole blocks, except at the end of the log."""
        geometry = self._geometry
        if self._size == 0:
            return
        table_N, id_N, row_NW = (np.concatenate(column) for column in zip(*self._kept, strict=True))
        begin = 0
        while begin < size:
            if not self.chunks or self.chunks[-1].full:
                self.chunks.append(self._files.create(geometry))
                self.rows.append(0)
            room = (geometry.blocks_per_chunk - self.chunks[-1].blocks) * geometry.rows_per_block
            end = min(begin + room, size)
            self._append(table_N[begin:end], id_N[begin:end], row_NW[begin:end])
            begin = end
        self._kept = [(table_N[size:], id_N[size:], row_NW[size:])]
        self._size -= size

    def _append(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        geometry = self._geometry
        blocks = -(-len(id_N) // geometry.rows_per_block)
        byte_N = aligned_bytes(blocks * geometry.block_bytes)
        # Copied as uint32, so that no NaN pattern is changed.
        whole_RW = np.zeros((blocks * geometry.rows_per_block, geometry.row_width), np.uint32)
        whole_RW[: len(id_N)] = row_NW.view(np.uint32)
        used = geometry.rows_per_block * geometry.row_width
        byte_N.view(np.uint32).reshape(blocks, -1)[:, :used] = whole_RW.reshape(blocks, -1)
        sum_B = np.empty(blocks, np.uint32)
        blocks_sum(0, blocks, byte_N.view(np.uint64), geometry.block_words, sum_B)
        chunk = self.chunks[-1]
        record_N, end = key_record(chunk.end, table_N, id_N, sum_B)
        self._files.write(chunk, chunk.end, byte_N, record_N)
        self._files.append(chunk, end)
        self.rows[-1] += len(id_N)
