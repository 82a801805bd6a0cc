"""Reads the keys and the rows of one chunk in file order: for scans, loads, compaction, and readers beside a writer.

Shape letters: N rows of a chunk, B blocks of a chunk. Invariant: every key and row that is returned has been compared
with a checksum.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oneemb.kernels.checksum import Buffer, xxh64
from oneemb.kernels.row_blocks import bits_rows, rows_deliver
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem, aligned_bytes, doing
from oneemb.storage.hash_index import check_tables
from oneemb.storage.table.chunk_files import ROWS_BEGIN
from oneemb.storage.table.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, read_header
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.snapshot_manifest import ChunkPart

RUN = struct.Struct("<3Q")
"""Begin of a run of keys: its first block, its rows, its blocks."""
_READ_BYTES = 1 << 20
# Direct reads are longer: the system does not read ahead.
_DIRECT_READ_BYTES = 4 << 20
_KEYS_WINDOW_BYTES = 1 << 20


@dataclass
class ChunkKeys:
    """The table and the id of each row of a chunk, and the checksum of each block. At the end of a run's last block,
    rows that hold nothing have table 0 and id 0."""

    table_N: np.ndarray
    id_N: np.ndarray
    sum_B: np.ndarray

    @classmethod
    def empty(cls, geometry: Geometry, blocks: int) -> "ChunkKeys":
        """Arrays of the size that the keys of `blocks` blocks need, not initialized."""
        rows = blocks * geometry.rows_per_block
        return cls(np.empty(rows, np.int32), np.empty(rows, np.int64), np.empty(blocks, np.uint32))

    def first(self, geometry: Geometry, blocks: int) -> "ChunkKeys":
        """Keys of the first `blocks` blocks: views."""
        rows = blocks * geometry.rows_per_block
        return ChunkKeys(self.table_N[:rows], self.id_N[:rows], self.sum_B[:blocks])

    def of(self, row_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tables and ids of rows `row_N` of the chunk."""
        return self.table_N[row_N], self.id_N[row_N]


def live_rows(bit_N: np.ndarray) -> np.ndarray:
    """Numbers of the rows whose bits are set in the bytes `bit_N`, ascending, int64."""
    row_N = np.empty(8 * len(bit_N) + 1, np.int64)
    return row_N[: bits_rows(bit_N, row_N)]


class KeysRun(NamedTuple):
    """A run of a keys file: its offset in the file, its first block, its rows and blocks, and its bytes, uint8."""

    offset: int
    block: int
    rows: int
    blocks: int
    byte_N: np.ndarray


def read_keys(fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart) -> ChunkKeys:
    """Read the keys of the rows of a part from the keys file at `path`. CorruptTableError if a checksum, or the part's
    checksum, does not match."""
    ((_, keys),) = key_pieces(fs, path, geometry, part, part.blocks)
    return keys


def key_pieces(
    fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart, blocks: int
) -> Iterator[tuple[int, ChunkKeys]]:
    """Yield the keys of a part's rows piece by piece: (first block of the piece, keys of its blocks). A piece has at
    most `blocks` blocks, or those of one run. Each run is checked as it is read, and all runs against the part's
    checksum before the last yield; raises as `read_keys`."""
    keys, first, end = ChunkKeys.empty(geometry, 0), 0, 0
    with opened(fs, path, "read the keys") as file:
        for run in _runs(fs, file, path, geometry, part):
            if run.block + run.blocks > first + len(keys.sum_B):
                if end:
                    yield first, keys.first(geometry, end - first)
                first = run.block
                keys = ChunkKeys.empty(geometry, max(run.blocks, min(blocks, part.blocks - first)))
            try:
                put_run(keys, geometry, run.byte_N, run.block - first, run.rows, run.blocks)
            except ValueError as error:
                raise _damaged(path, run.offset, f"holds an invalid table: {error}") from error
            end = run.block + run.blocks
        yield first, keys.first(geometry, end - first)


def _runs(fs: FileSystem, file: int, path: str, geometry: Geometry, part: ChunkPart) -> Iterator[KeysRun]:
    """Yield the runs of a part's keys. The bytes of a run are valid until the next run is asked for."""
    # `byte_N` is a window that moves through the file. It is small, so that it stays in the CPU's cache.
    byte_N, begin, size, ended = np.empty(_KEYS_WINDOW_BYTES, np.uint8), 0, 0, False

    def window(offset: int, length: int) -> np.ndarray:
        """Bytes of the part from an offset on: at least `length` bytes, or fewer if the file or the part ends
        before."""
        nonlocal byte_N, begin, size, ended
        if offset + length > begin + size and not ended:
            kept_N = byte_N[offset - begin : size]
            if length > len(byte_N):
                byte_N = np.empty(-(-length // 8) * 8, np.uint8)
            size = len(kept_N)
            byte_N[:size] = kept_N.copy()
            begin = offset
            want = min(len(byte_N), part.keys_bytes - begin) - size
            got = fs.read_into(file, byte_N.data[size : size + want], begin + size)
            size, ended = size + got, begin + size + got == part.keys_bytes or got < want
        return byte_N[offset - begin : size]

    if fs.size(path) < part.keys_bytes:
        raise _damaged(path, HEADER_BYTES, f"ends before offset {part.keys_bytes}, up to which a snapshot needs it")
    header_N = window(0, HEADER_BYTES)[:HEADER_BYTES]
    check_header(header_N, KEYS_MAGIC, path, part.number, geometry)
    keys_sum = xxh64(header_N)
    offset, block = HEADER_BYTES, 0
    run = KeysRun(0, 0, 0, 0, header_N)
    while offset < part.keys_bytes:
        run_N = window(offset, RUN.size)
        first, rows, blocks = RUN.unpack_from(run_N.data) if len(run_N) >= RUN.size else (block, 0, 0)
        run_bytes = run_size(rows, blocks)
        fits = blocks > 0 and block + blocks <= part.blocks and rows <= blocks * geometry.rows_per_block
        fits = fits and offset + run_bytes + 8 <= part.keys_bytes
        if first == block and fits:
            run_N = window(offset, run_bytes + 8)
        if first != block or not fits or len(run_N) < run_bytes + 8:
            raise _damaged(path, offset, f"must hold the keys of block {block}, holds {blocks} blocks from {first}")
        keys_sum = xxh64(run_N[:run_bytes], keys_sum)
        expected = int(run_N[run_bytes : run_bytes + 8].view(np.uint64)[0])
        if keys_sum != expected:
            raise _damaged(path, offset, f"has checksum {keys_sum:016x}, written as {expected:016x}")
        run = KeysRun(offset, block, rows, blocks, run_N)
        block += blocks
        offset += run_bytes + 8
        if offset == part.keys_bytes:
            break
        yield run
    if block != part.blocks or keys_sum != part.keys_sum:
        raise _other_keys(path, part, f"{block} blocks with checksum {keys_sum:016x}")
    yield run


def check_keys_end(fs: FileSystem, path: str, part: ChunkPart) -> None:
    """Raise CorruptTableError unless the last checksum before the part's end in the keys file at `path`, which covers
    all bytes before it, is that of the part. Reads 8 bytes."""
    sum_N = np.zeros(1, np.uint64)
    with opened(fs, path, "read the keys") as file:
        fs.read_into(file, sum_N.view(np.uint8).data, part.keys_bytes - sum_N.nbytes)
    if sum_N[0] != part.keys_sum:
        raise _other_keys(path, part, f"checksum {int(sum_N[0]):016x}")


def _other_keys(path: str, part: ChunkPart, found: str) -> CorruptTableError:
    return CorruptTableError(
        f"{path}: the keys up to offset {part.keys_bytes} are not those that the snapshot was saved with: {found}, must"
        f" be {part.blocks} blocks with {part.keys_sum:016x}; run `oneemb check` on the table"
    )


def run_size(rows: int, blocks: int) -> int:
    """Bytes of a run of keys, without its checksum."""
    return RUN.size + -(-(rows * 12 + blocks * 4) // 8) * 8


def put_run(keys: ChunkKeys, geometry: Geometry, run_N: np.ndarray, block: int, rows: int, blocks: int) -> None:
    """Write the keys and the checksums of a run into `keys`. ValueError if a table is invalid.

    Args:
        run_N: bytes from the begin of the run on, uint8.
        block, rows, blocks: first block, number of rows and number of blocks of the run.
    """
    row, end, at = block * geometry.rows_per_block, (block + blocks) * geometry.rows_per_block, RUN.size
    keys.id_N[row : row + rows] = run_N[at : at + 8 * rows].view(np.int64)
    keys.id_N[row + rows : end] = 0
    at += 8 * rows
    keys.table_N[row : row + rows] = run_N[at : at + 4 * rows].view(np.int32)
    keys.table_N[row + rows : end] = 0
    check_tables(keys.table_N[row : row + rows])
    at += 4 * rows
    keys.sum_B[block : block + blocks] = run_N[at : at + 4 * blocks].view(np.uint32)


def scan_rows(
    fs: FileSystem, path: str, geometry: Geometry, number: int, keys: ChunkKeys, row_N: np.ndarray, batch: int,
    direct: bool = False,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:  # fmt: skip
    """Yield the rows `row_N` (ascending) of the chunk `number`, whose rows file is at `path`, as (table_N, id_N,
    row_NW) of at most `batch` rows. CorruptTableError if the checksum of a block does not match. direct: whether to
    read past the system's page cache."""
    if len(row_N) == 0:
        return
    with opened(fs, path, "read the rows", direct) as file:
        header_N = aligned_bytes(ROWS_BEGIN)
        size = fs.read_into(file, header_N.data, 0)
        check_header(header_N[: min(size, HEADER_BYTES)], ROWS_MAGIC, path, number, geometry)
        end, size = ROWS_BEGIN + (int(row_N[-1]) // geometry.rows_per_block + 1) * geometry.block_bytes, fs.size(path)
        if size < end:
            raise CorruptTableError(
                f"{path}: the blocks up to offset {end} are needed, the file ends at offset {size}; restore the file"
                " from a copy, or delete the snapshots that need it"
            )
        buffer_blocks = max(1, (_DIRECT_READ_BYTES if direct else _READ_BYTES) // geometry.block_bytes)
        buffer = aligned_bytes(buffer_blocks * geometry.block_bytes)
        begin = 0
        while begin < len(row_N):
            block = int(row_N[begin]) // geometry.rows_per_block
            end_row = (block + buffer_blocks) * geometry.rows_per_block
            end = min(begin + batch, int(np.searchsorted(row_N, end_row)))
            place_N = row_N[begin:end]
            blocks = int(place_N[-1]) // geometry.rows_per_block + 1 - block
            want = blocks * geometry.block_bytes
            offset = ROWS_BEGIN + block * geometry.block_bytes
            size = fs.read_into(file, buffer.data[:want], offset)
            if size != want:
                raise CorruptTableError(
                    f"{path} is cut off: from offset {offset} on it must have {want} bytes, it has {size}"
                    "; restore the file from a copy, or delete the snapshots that need it"
                )
            row_NW = np.empty((len(place_N), geometry.row_width), np.float32)
            to_N = np.arange(len(place_N))
            bad = rows_deliver(
                buffer.view(np.uint64), 0, block, place_N, to_N, 0, len(place_N), geometry.rows_per_block,
                geometry.block_words, keys.sum_B, row_NW.view(np.uint32),
            )  # fmt: skip
            if bad < len(place_N):
                row = int(place_N[bad])
                block_bad = row // geometry.rows_per_block
                at = (block_bad - block) * geometry.block_bytes
                raise block_damage(
                    path, geometry, block_bad, buffer[at : at + geometry.block_bytes], int(keys.sum_B[block_bad]),
                    int(keys.table_N[row]), int(keys.id_N[row]),
                )  # fmt: skip
            yield keys.table_N[place_N], keys.id_N[place_N], row_NW
            begin = end


def block_damage(
    path: str, geometry: Geometry, block: int, data: np.ndarray, expected: int, table: int, id: int
) -> CorruptTableError:
    """The error for a damaged block.

    Args:
        block, data, expected: number of the block in the chunk, its bytes as read, and its checksum as written.
        table, id: key of a row in the block, for the text.
    """
    offset = ROWS_BEGIN + block * geometry.block_bytes
    actual = xxh64(data) & 0xFFFFFFFF
    return CorruptTableError(
        f"{path}: block {block} at offset {offset}, which holds the row of table {table}, id {id}, has checksum "
        f"{actual:08x}, written as {expected:08x}; run `oneemb check` on the table, and load a sound snapshot"
    )


def check_header(header: Buffer, magic: bytes, path: str, number: int, geometry: Geometry) -> None:
    """Raise CorruptTableError unless the header has this magic, chunk number and geometry."""
    expected = (number, geometry.row_width, geometry.physical_block_size, geometry.blocks_per_chunk)
    found = read_header(bytes(header[:HEADER_BYTES]), magic, path)
    if found != expected:
        raise CorruptTableError(
            f"{path}: the header at offset 0 must name (chunk, row width, block size, blocks a chunk) {expected}, it "
            f"names {found}; the file belongs to another chunk or table: restore the right one from a copy"
        )


@contextmanager
def reading(path: str, action: str = "read") -> Iterator[None]:
    """Turn an OSError of the with block into a StorageError that names action and path, or into a CorruptTableError if
    the file is missing, since a snapshot needs it."""
    try:
        with doing(action, path):
            yield
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptTableError(
                f"{path} is missing, though a snapshot needs it; restore {os.path.basename(path)} from a copy, or"
                " delete the snapshots that need it. While a writer runs, a reader gets this error if the writer"
                " deletes or overwrites the snapshot"
            ) from error.__cause__
        raise


@contextmanager
def opened(fs: FileSystem, path: str, action: str = "read", direct: bool = False) -> Iterator[int]:
    """Open a file of a chunk for the with block; errors in the block are turned into those of `reading`."""
    with reading(path, action):
        file = fs.open(path, direct=direct)
        try:
            yield file
        finally:
            fs.close(file)


def _damaged(path: str, offset: int, what: str) -> CorruptTableError:
    return CorruptTableError(f"{path}: the run of keys at offset {offset} {what}; run `oneemb check` on the table")
