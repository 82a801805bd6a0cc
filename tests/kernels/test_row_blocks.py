"""Rows into blocks and their checksums, in any shares, against NumPy."""

import numpy as np
import pytest

from oneemb.kernels.checksum import xxh64
from oneemb.kernels.row_blocks import rows_into_blocks


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize(
    ("width", "block_words", "first", "size"),
    [
        (16, 64, 0, 48),  # whole blocks
        (16, 64, 5, 30),  # begins and ends within a block
        (16, 64, 2, 3),  # fills no block
        (30, 64, 3, 29),  # rows leave a rest of the block
        (1, 64, 100, 700),  # rows of one word
        (128, 64, 0, 7),  # a row is a block
        (1500, 768, 1, 4),  # a row is several physical blocks
    ],
)
def test_rows_lie_one_after_the_other_and_full_blocks_have_their_checksum(width, block_words, first, size, shares):
    rng = np.random.default_rng(0)
    rows_per_block = 2 * block_words // width
    row_NW = rng.integers(0, 2**32, (size, width), dtype=np.uint32)
    blocks = -(-(first + size) // rows_per_block)
    word_X = rng.integers(0, 2**64, blocks * block_words, dtype=np.uint64)
    expected = word_X.view(np.uint32).reshape(blocks, 2 * block_words).copy()
    for n in range(size):
        b, r = divmod(first + n, rows_per_block)
        expected[b, r * width : (r + 1) * width] = row_NW[n]
    full = (first + size) // rows_per_block
    sums = [xxh64(expected[b]) & 0xFFFFFFFF if first // rows_per_block <= b < full else 7 for b in range(blocks)]
    sum_B = np.full(blocks, 7, np.uint32)
    touched = blocks - first // rows_per_block
    for s in reversed(range(shares)):
        begin, end = touched * s // shares, touched * (s + 1) // shares
        rows_into_blocks(begin, end, row_NW, word_X, first, rows_per_block, block_words, sum_B)
    assert (word_X.view(np.uint32).reshape(blocks, -1) == expected).all()
    assert sum_B.tolist() == sums
