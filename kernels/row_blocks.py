"""Copies rows into and out of the blocks of a file, and keeps a bit for each live row.

    B blocks of X 64-bit words, R rows a block, W words of 32 bits a row, U keys, Q read requests, P places, E extents

Rows are copied as uint32, since a copy of a float may change its bits. A place is a row's number in the whole table.
The row is in block place // R, and the block in extent block // blocks_per_extent; blocks and extents too are numbered
through the whole table. Rows lie one after another from the first byte of a block; the rest of the block is zero.

Read request q is a run of blocks of one extent, from block block_Q[q] on. It holds the rows of the places
place_P[first_Q[q] : first_Q[q + 1]], in ascending order. sum_B[b] is the checksum of block b.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.checksum import block_sum, low_half, sum_words
from oneemb.kernels.jit import Number, cpu, rule


@rule
def _copy_words(from_N: Array, begin: Number, to_N: Array, end: Number, width: Number) -> None:
    # Indexes are unsigned: a signed index may count from the end, and with a test for that LLVM would not turn the loop
    # into a plain copy of memory.
    source, target = np.uint64(begin), np.uint64(end)
    for i in range(np.uint64(width)):
        to_N[target + np.uint64(i)] = from_N[source + np.uint64(i)]


@cpu
def rows_into_blocks(
    begin: Number, end: Number, row_NW: Array, word_X: Array, first: Number, rows_per_block: Number,
    block_words: Number, sum_B: Array,
) -> None:  # fmt: skip
    """Copy row n to row `first + n` of the blocks at word_X, and compute the checksum of each block that is full then.

    `begin` and `end` count blocks, from the block of row `first` on: two shares never write the same block, and a
    block's checksum is computed while the block is in the CPU's cache.
    """
    width = row_NW.shape[1]
    from_N, to_N = row_NW.ravel(), word_X.view(np.uint32)
    first_block = first // rows_per_block
    for b in range(first_block + begin, first_block + end):
        block_row = b * rows_per_block
        r = max(first, block_row)
        r_end = min(first + len(row_NW), block_row + rows_per_block)
        to = 2 * b * block_words + (r - block_row) * width
        _copy_words(from_N, (r - first) * width, to_N, to, (r_end - r) * width)
        if r_end == block_row + rows_per_block:
            sum_B[b] = block_sum(word_X, b, block_words)


@cpu
def rows_out_of_blocks(
    begin: Number, end: Number, block_N: Array, place_N: Array, out_UW: Array, to_N: Array, rows_per_block: Number,
    block_words: Number,
) -> None:  # fmt: skip
    """out_UW[to_N[n]] = row place_N[n] of the blocks in block_N, of `block_words` words of 32 bits each."""
    width = out_UW.shape[1]
    out_N = out_UW.ravel()
    for n in range(begin, end):
        b = place_N[n] // rows_per_block
        w = b * block_words + (place_N[n] - b * rows_per_block) * width
        _copy_words(block_N, w, out_N, to_N[n] * width, width)


@cpu
def bits_set(bit_N: Array, place_N: Array, rows_per_extent: Number, live_E: Array) -> None:
    """Set the bits of the rows at place_N, which are live now, and add the rows to live_E, the count of each extent."""
    for place in place_N:
        bit_N[place >> 3] |= np.uint8(1 << (place & 7))
        live_E[place // rows_per_extent] += 1


@cpu
def bits_clear(bit_N: Array, place_N: Array, rows_per_extent: Number, live_E: Array) -> Number:
    """Clear the bits of the rows at place_N, which are dead now, and subtract the rows from live_E, the count of each
    extent. A place of -1 is skipped. Returns how often a count became 0."""
    emptied = 0
    for place in place_N:
        if place >= 0:
            bit_N[place >> 3] &= np.uint8(0xFF ^ (1 << (place & 7)))
            live_E[place // rows_per_extent] -= 1
            emptied += live_E[place // rows_per_extent] == 0
    return emptied


@cpu
def bits_rows(bit_N: Array, row_N: Array) -> Number:
    """Write the numbers of the rows whose bit is set to row_N, ascending, and return how many they are. row_N needs
    room for one number more."""
    n = 0
    for byte in range(len(bit_N)):
        for bit in range(8):
            row_N[n] = 8 * byte + bit
            n += (bit_N[byte] >> bit) & 1
    return n


@cpu
def requests_plan(
    place_P: Array, rows_per_block: Number, blocks_per_extent: Number, blocks_max: Number, gap_max: Number,
    block_Q: Array, blocks_Q: Array, first_Q: Array,
) -> Number:  # fmt: skip
    """Group ascending places into read requests, and return the number of requests.

    One request reads blocks of an extent that are at most `gap_max` blocks apart, and at most `blocks_max` blocks.
    """
    requests = 0
    for p in range(len(place_P)):
        block = place_P[p] // rows_per_block
        if requests > 0:
            q = requests - 1
            end = block_Q[q] + blocks_Q[q]
            if block < end:
                continue
            near = block - end <= gap_max and block + 1 - block_Q[q] <= blocks_max
            if near and block // blocks_per_extent == block_Q[q] // blocks_per_extent:
                blocks_Q[q] = block + 1 - block_Q[q]
                continue
        block_Q[requests] = block
        blocks_Q[requests] = 1
        first_Q[requests] = p
        requests += 1
    first_Q[requests] = len(place_P)
    return requests


@rule
def rows_deliver(
    word_X: Array, word_begin: Number, block_first: Number, place_P: Array, to_P: Array, p: Number, p_end: Number,
    rows_per_block: Number, block_words: Number, sum_B: Array, out_UW: Array,
) -> Number:  # fmt: skip
    """Check the blocks of one request, at word_X[word_begin:], and copy the rows of places p to p_end - 1 out.

    `block_first` is the number of the request's first block. Returns the index in place_P of the first place whose
    block is damaged, or p_end.
    """
    width = out_UW.shape[1]
    checked = np.int64(-1)
    row_X = word_X.view(np.uint32)
    out_N = out_UW.ravel()
    while p < p_end:
        block = place_P[p] // rows_per_block
        begin = word_begin + (block - block_first) * block_words
        if block != checked:
            if low_half(sum_words(word_X, begin, begin + block_words, 0)) != sum_B[block]:
                return p
            checked = block
        w = 2 * begin + (place_P[p] - block * rows_per_block) * width
        _copy_words(row_X, w, out_N, to_P[p] * width, width)
        p += 1
    return p


@cpu
def requests_deliver(
    begin: Number, end: Number, word_X: Array, word_Q: Array, block_Q: Array, first_Q: Array, place_P: Array,
    to_P: Array, rows_per_block: Number, block_words: Number, sum_B: Array, out_UW: Array, bad_Q: Array,
) -> None:  # fmt: skip
    """Check and copy out the rows of requests begin to end - 1, whose blocks are at word_X[word_Q[q]:]. bad_Q[q] = the
    index in place_P of the first place whose block is damaged, or -1."""
    for q in range(begin, end):
        p_end = first_Q[q + 1]
        p = rows_deliver(
            word_X, word_Q[q], block_Q[q], place_P, to_P, first_Q[q], p_end, rows_per_block, block_words, sum_B, out_UW
        )
        bad_Q[q] = p if p < p_end else -1
