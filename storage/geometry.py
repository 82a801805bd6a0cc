"""How rows lie in blocks and blocks in chunks. All live chunks of a table share one geometry."""

from dataclasses import dataclass

__all__ = ["Geometry", "make_geometry"]

# Rows of a chunk at most: the keys of one chunk are read in one piece.
_CHUNK_ROWS_MAX = 1 << 22
# Blocks of a chunk are a multiple of this, so that each chunk begins at a whole word of the table's bits.
_BLOCKS_MULTIPLE = 64
PHYSICAL_BLOCK_SIZES = (512, 4096)


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from the row and the device.

    Args:
        row_width: 32-bit words of a row, W.
        physical_block_size: bytes the device reads at once, 512 or 4096.
        blocks_per_chunk: blocks of a full chunk, a multiple of 64.
    """

    row_width: int
    physical_block_size: int
    blocks_per_chunk: int

    @property
    def row_bytes(self) -> int:
        return self.row_width * 4

    @property
    def block_bytes(self) -> int:
        """Bytes of a logical block: the physical one, or as many of them as one row needs."""
        return -(-self.row_bytes // self.physical_block_size) * self.physical_block_size

    @property
    def block_words(self) -> int:
        """64-bit words of a block."""
        return self.block_bytes // 8

    @property
    def rows_per_block(self) -> int:
        return self.block_bytes // self.row_bytes

    @property
    def rows_per_chunk(self) -> int:
        return self.rows_per_block * self.blocks_per_chunk

    @property
    def disk_bytes_per_row(self) -> float:
        """Bytes on disk of one row in a full block: its share of the block, its key and its share of the checksum."""
        return (self.block_bytes + 4) / self.rows_per_block + 12

    @property
    def chunk_bytes(self) -> int:
        """Bytes on disk of a full chunk, rows and keys."""
        return int(self.rows_per_chunk * self.disk_bytes_per_row)


def make_geometry(row_width: int, physical_block_size: int, chunk_bytes: int) -> Geometry:
    """The geometry of a table whose chunks have about `chunk_bytes` of rows.

    Raises:
        ValueError: an argument is out of its range.
    """
    if row_width < 1:
        raise ValueError(f"row_width must be at least 1 word of 4 bytes, got {row_width}")
    if physical_block_size not in PHYSICAL_BLOCK_SIZES:
        raise ValueError(f"physical_block_size must be 512 or 4096 bytes, got {physical_block_size}")
    one = Geometry(row_width, physical_block_size, 1)
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    blocks = min(chunk_bytes // one.block_bytes, _CHUNK_ROWS_MAX // one.rows_per_block)
    blocks = max(1, blocks // _BLOCKS_MULTIPLE) * _BLOCKS_MULTIPLE
    return Geometry(row_width, physical_block_size, blocks)
