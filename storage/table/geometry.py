"""Arrangement of rows in blocks and of blocks in chunks. All live chunks of a table share one geometry.

A chunk is full when it holds a sixteenth of the table's rows; the next rows begin a new chunk. Compaction may leave a
few chunks of garbage, so a small table has small chunks. The room for a chunk is a whole number of **extents**, of
about 1 MiB each.
"""

from dataclasses import dataclass
from functools import cached_property

# Most rows of a chunk. It bounds memory: all keys of a chunk are read at once.
_CHUNK_ROWS_MAX = 1 << 22
# The number of blocks in an extent, or in a chunk, is a multiple of 64, so that each begins at a whole word of the
# table's bits.
_BLOCKS_MULTIPLE = 64
# Approximate size of an extent. A chunk has at least one extent.
_EXTENT_BYTES = 1 << 20
# A chunk holds at most 1 / _CHUNKS_MIN of the live rows.
_CHUNKS_MIN = 16
PHYSICAL_BLOCK_SIZES = (512, 4096)
# Most words of a row, one GiB: larger than any row in use, and small enough that products of sizes stay below 2^63.
ROW_WIDTH_MAX = 1 << 28


@dataclass(frozen=True)
class Geometry:
    """Sizes of blocks, extents and chunks, computed from the size of a row and of a device's block.

    Args:
        row_width: 32-bit words of a row, W.
        physical_block_size: number of bytes that the device reads at once, 512 or 4096.
        blocks_per_chunk: number of blocks in the largest chunk, a multiple of 64.
    """

    row_width: int
    physical_block_size: int
    blocks_per_chunk: int

    @property
    def row_bytes(self) -> int:
        return self.row_width * 4

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a logical block: one row's bytes rounded up to whole physical blocks."""
        return -(-self.row_bytes // self.physical_block_size) * self.physical_block_size

    @property
    def block_words(self) -> int:
        """64-bit words of a block."""
        return self.block_bytes // 8

    @cached_property
    def rows_per_block(self) -> int:
        return self.block_bytes // self.row_bytes

    @property
    def blocks_per_extent(self) -> int:
        blocks = max(1, _EXTENT_BYTES // (self.block_bytes * _BLOCKS_MULTIPLE)) * _BLOCKS_MULTIPLE
        return min(self.blocks_per_chunk, blocks)

    @property
    def rows_per_extent(self) -> int:
        return self.rows_per_block * self.blocks_per_extent

    @property
    def rows_per_chunk(self) -> int:
        return self.rows_per_block * self.blocks_per_chunk

    @property
    def disk_bytes_per_row(self) -> float:
        """Bytes on disk of one row in a full block: its share of the block, its key and its share of the checksum."""
        return (self.block_bytes + 4) / self.rows_per_block + 12

    def chunk_blocks(self, rows: int) -> int:
        """Most blocks of a new chunk in a table with this many rows."""
        extents = max(1, rows // (_CHUNKS_MIN * self.rows_per_extent))
        return min(self.blocks_per_chunk, extents * self.blocks_per_extent)

    def disk_bytes(self, blocks: int) -> int:
        """Bytes on disk of a chunk with this many full blocks: rows and keys."""
        return int(blocks * self.rows_per_block * self.disk_bytes_per_row)


def make_geometry(row_width: int, physical_block_size: int, chunk_bytes: int) -> Geometry:
    """The geometry of a table whose largest chunks have about `chunk_bytes` of rows. ValueError if an argument is
    invalid."""
    problem = geometry_problem(row_width, physical_block_size, _BLOCKS_MULTIPLE)
    if problem is not None:
        raise ValueError(problem)
    smallest = Geometry(row_width, physical_block_size, 1)
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    blocks = min(chunk_bytes // smallest.block_bytes, _CHUNK_ROWS_MAX // smallest.rows_per_block)
    blocks = max(1, blocks // _BLOCKS_MULTIPLE) * _BLOCKS_MULTIPLE
    return Geometry(row_width, physical_block_size, blocks)


def geometry_problem(row_width: object, physical_block_size: object, blocks_per_chunk: object) -> str | None:
    """Text of the reason why these numbers are invalid for a geometry; None if they are valid."""
    if type(row_width) is not int or not 1 <= row_width <= ROW_WIDTH_MAX:
        return f"row_width must be at least 1 word of 4 bytes and at most {ROW_WIDTH_MAX}, got {row_width!r}"
    if type(physical_block_size) is not int or physical_block_size not in PHYSICAL_BLOCK_SIZES:
        return f"physical_block_size must be 512 or 4096 bytes, got {physical_block_size!r}"
    blocks_max = max(_BLOCKS_MULTIPLE, _CHUNK_ROWS_MAX // Geometry(row_width, physical_block_size, 1).rows_per_block)
    whole = type(blocks_per_chunk) is int and blocks_per_chunk % _BLOCKS_MULTIPLE == 0
    if not whole or not 1 <= blocks_per_chunk <= blocks_max:  # type: ignore[operator]
        return (
            f"blocks_per_chunk must be a multiple of {_BLOCKS_MULTIPLE} and at most {blocks_max}, "
            f"got {blocks_per_chunk!r}"
        )
    return None
