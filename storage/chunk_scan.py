"""Reads the rows of one chunk in the order they lie: for scans, loads, compaction and readers beside a writer.

Invariant: nothing is yielded that has not been compared with its checksum.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.checksum import xxh64
from oneemb.kernels.row_blocks import rows_deliver
from oneemb.storage.chunk_files import ROWS_BEGIN
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, read_header
from oneemb.storage.fs import FileSystem, aligned_bytes, storage_error
from oneemb.storage.geometry import Geometry
from oneemb.storage.snapshot_file import ChunkPart

__all__ = ["ChunkKeys", "block_damage", "live_rows", "read_keys", "scan_rows"]

_RUN = struct.Struct("<3Q")
_READ_BYTES = 1 << 20


@dataclass
class ChunkKeys:
    """The keys of a chunk's rows, by row, and the checksums of its blocks. A row that no run has filled has key 0."""

    table_N: np.ndarray
    id_N: np.ndarray
    sum_B: np.ndarray

    def of(self, row_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tables and ids of these rows."""
        return self.table_N[row_N], self.id_N[row_N]


def live_rows(bit_N: np.ndarray) -> np.ndarray:
    """The rows whose bit is set, ascending: int64."""
    return np.flatnonzero(np.unpackbits(bit_N, bitorder="little"))


def read_keys(fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart) -> ChunkKeys:
    """The keys of the part's rows, checked against the sum that the part carries.

    Raises:
        CorruptTableError: the file is not what was written.
    """
    data = np.empty(part.keys_bytes // 8, np.uint64)
    try:
        file = fs.open(path)
        try:
            size = fs.read_into(file, memoryview(data).cast("B"), 0)
        finally:
            fs.close(file)
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except OSError as error:
        raise storage_error(error, "read the keys", path) from error
    byte_N = data.view(np.uint8)
    check_header(byte_N[:size], KEYS_MAGIC, path, part.number, geometry)
    keys_sum = xxh64(byte_N[:HEADER_BYTES])
    rows_max = part.blocks * geometry.rows_per_block
    table_N, id_N = np.zeros(rows_max, np.int32), np.zeros(rows_max, np.int64)
    sum_B = np.zeros(part.blocks, np.uint32)
    offset, block = HEADER_BYTES, 0
    while offset < part.keys_bytes:
        first, rows, blocks = _RUN.unpack_from(byte_N, offset) if offset + _RUN.size <= size else (block, 0, 0)
        run_bytes = _RUN.size + -(-(rows * 12 + blocks * 4) // 8) * 8
        fits = blocks > 0 and block + blocks <= part.blocks and rows <= blocks * geometry.rows_per_block
        if first != block or not fits or offset + run_bytes + 8 > min(size, part.keys_bytes):
            raise _damaged(path, offset, f"must hold the keys of block {block}, holds {blocks} blocks from {first}")
        keys_sum = xxh64(byte_N[offset : offset + run_bytes], keys_sum)
        expected = int(byte_N[offset + run_bytes : offset + run_bytes + 8].view(np.uint64)[0])
        if keys_sum != expected:
            raise _damaged(path, offset, f"has checksum {keys_sum:016x}, written as {expected:016x}")
        row = block * geometry.rows_per_block
        at = offset + _RUN.size
        id_N[row : row + rows] = byte_N[at : at + 8 * rows].view(np.int64)
        at += 8 * rows
        table_N[row : row + rows] = byte_N[at : at + 4 * rows].view(np.int32)
        at += 4 * rows
        sum_B[block : block + blocks] = byte_N[at : at + 4 * blocks].view(np.uint32)
        block += blocks
        offset += run_bytes + 8
    if block != part.blocks or keys_sum != part.keys_sum:
        raise CorruptTableError(
            f"{path}: the keys up to offset {part.keys_bytes} are not those that the snapshot was saved with: "
            f"{block} blocks with checksum {keys_sum:016x}, must be {part.blocks} with {part.keys_sum:016x}; run "
            f"`oneemb check` on the table"
        )
    return ChunkKeys(table_N, id_N, sum_B)


def scan_rows(
    fs: FileSystem, path: str, geometry: Geometry, number: int, keys: ChunkKeys, row_N: np.ndarray, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The rows `row_N` of one chunk, ascending, as (table_N, id_N, row_NW), at most `batch` at a time.

    Raises:
        CorruptTableError: a block is not what was written.
    """
    if len(row_N) == 0:
        return
    try:
        file = fs.open(path)
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except OSError as error:
        raise storage_error(error, "open the rows", path) from error
    try:
        yield from _scan_open(fs, file, path, geometry, number, keys, row_N, batch)
    except OSError as error:
        raise storage_error(error, "read the rows", path) from error
    finally:
        fs.close(file)


def _scan_open(fs, file, path, geometry, number, keys, row_N, batch):
    header = bytearray(HEADER_BYTES)
    size = fs.read_into(file, memoryview(header), 0)
    check_header(header[:size], ROWS_MAGIC, path, number, geometry)
    buffer_blocks = max(1, _READ_BYTES // geometry.block_bytes)
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
        size = fs.read_into(file, memoryview(buffer)[:want], offset)
        if size != want:
            raise CorruptTableError(
                f"{path}: the blocks from offset {offset} on must have {want} bytes, the file ends after {size} of "
                f"them; restore the file from a copy, or delete the snapshots that need it"
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
    """The error for a block that is not what was written, found when the row of (table, id) was read."""
    offset = ROWS_BEGIN + block * geometry.block_bytes
    actual = xxh64(data) & 0xFFFFFFFF
    return CorruptTableError(
        f"{path}: block {block} at offset {offset}, which holds the row of table {table}, id {id}, has checksum "
        f"{actual:08x}, written as {expected:08x}; run `oneemb check` on the table, and load a sound snapshot"
    )


def check_header(header, magic: bytes, path: str, number: int, geometry: Geometry) -> None:
    """Raise unless this is the header of that chunk."""
    expected = (number, geometry.row_width, geometry.physical_block_size, geometry.blocks_per_chunk)
    found = read_header(bytes(header[:HEADER_BYTES]), magic, path)
    if found != expected:
        raise CorruptTableError(
            f"{path}: the header at offset 0 must name (chunk, row width, block size, blocks a chunk) {expected}, it "
            f"names {found}; the file was swapped with that of another chunk or table"
        )


def missing_file(path: str) -> CorruptTableError:
    return CorruptTableError(
        f"{path} is missing, though a snapshot needs it; restore {os.path.basename(path)} from a copy, or delete the "
        f"snapshots that need it. A reader beside a writer sees this when the writer deletes or overwrites the snapshot"
    )


def _damaged(path: str, offset: int, what: str) -> CorruptTableError:
    return CorruptTableError(f"{path}: the run of keys at offset {offset} {what}; run `oneemb check` on the table")
