"""Collects the rows of some shards of a hash index, each with the number by which rows to evict are chosen.

S slots or places, P shards, G pieces of the shards' cells, N rows, W words of a record. A row's number is the uint64 in
two neighbouring words of the row's record, lower half first.
"""

import math
from collections.abc import Callable

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import PLACE_BITS
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import natural, prefetch, prefetch_row, word_at
from oneemb.kernels.threads import Threads

_PLACE_BITS = np.int64(PLACE_BITS)
_PLACE_MASK = np.int64((1 << PLACE_BITS) - 1)

# Cells of a piece, and bytes of a cell.
_PIECE = 1 << 11
_CELL_BYTES = 16

# Rows whose numbers are fetched before they are needed.
_AHEAD = 32


@cpu
def _rows_of_shards_cpu(
    begin: Number, end: Number, address_G: Array, cells_G: Array, begin_G: Array, word_SW: Array, first: Number,
    held_S: Array, cell_N: Array, number_N: Array, size_G: Array,
) -> None:  # fmt: skip
    """Write the rows in pieces begin to end - 1 that are not held to cell_N and number_N, from index begin_G[begin] on.
    size_G[begin] = how many rows these are."""
    n = begin_G[begin]
    read = kept = n
    for g in range(begin, end):
        for c in range(cells_G[g]):
            place = (word_at(address_G[g], 2 * c + 1) & _PLACE_MASK) - 1
            if place >= 0:
                prefetch(held_S, natural(place))
                prefetch_row(word_SW, natural(place), first, 2)
                cell_N[n] = address_G[g] + _CELL_BYTES * c
                n += 1
        while read < (n if g == end - 1 else n - _AHEAD):
            at = natural((word_at(cell_N[read], 1) & _PLACE_MASK) - 1)
            if not held_S[at]:
                cell_N[kept] = cell_N[read]
                number_N[kept] = np.uint64(word_SW[at, first]) | np.uint64(word_SW[at, first + 1]) << np.uint64(32)
                kept += 1
            read += 1
    size_G[begin] = kept - begin_G[begin]


@cpu
def _keys_in_cells_cpu(cell_N: Array, table_N: Array, id_N: Array, place_N: Array) -> None:
    for n in range(len(cell_N)):
        id_N[n], word = word_at(cell_N[n], 0), word_at(cell_N[n], 1)
        table_N[n], place_N[n] = word >> _PLACE_BITS, (word & _PLACE_MASK) - 1


def rows_of_shards(
    address_P: np.ndarray, cells_P: np.ndarray, word_SW: np.ndarray, first: int, held_S: np.ndarray, *,
    threads: Threads,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """All rows of some shards that are not held, and their numbers.

    Args:
        address_P, cells_P: int64, address and number of cells of each shard.
        word_SW: uint32, records of rows; a row's number begins at word `first`.
        held_S: bool or int32, whether each row is held; 0 = it is not.

    Returns:
        cell_N, int64: address of each row's cell, for `keys_in_cells`; valid until the index changes. number_N, uint64:
        number of each row.
    """
    pieces_P = -(-cells_P // _PIECE)
    shard_G = np.repeat(np.arange(len(cells_P)), pieces_P)
    skip_G = (np.arange(len(shard_G)) - (np.cumsum(pieces_P) - pieces_P)[shard_G]) * _PIECE
    cells_G = np.minimum(cells_P[shard_G] - skip_G, _PIECE)
    begin_G, size_G = np.cumsum(cells_G) - cells_G, np.zeros(len(cells_G), np.int64)
    cell_N, number_N = np.empty(int(cells_G.sum()), np.int64), np.empty(int(cells_G.sum()), np.uint64)
    threads.run(
        _rows_of_shards_cpu, len(cells_G), address_P[shard_G] + _CELL_BYTES * skip_G, cells_G, begin_G, word_SW, first,
        held_S, cell_N, number_N, size_G, share_min=2,
    )  # fmt: skip
    parts = [slice(begin_G[g], begin_G[g] + size_G[g]) for g in np.flatnonzero(size_G)]
    return (
        np.concatenate([cell_N[:0], *[cell_N[part] for part in parts]]),
        np.concatenate([number_N[:0], *[number_N[part] for part in parts]]),
    )


def keys_in_cells(cell_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contents of the cells of an index at these addresses: tables int32, ids int64 and places int64 [N]."""
    size = len(cell_N)
    table_N, id_N, place_N = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(size, np.int64)
    _keys_in_cells_cpu(cell_N, table_N, id_N, place_N)
    return table_N, id_N, place_N


_SAMPLE = 16


def least_of(number_N: np.ndarray, count: int, tie_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Indices of the `count` smallest numbers, or of all if there are fewer: int64 [count].

    A sample gives an upper bound of these, and only numbers up to the bound are compared; so it is fastest if number_N
    is in random order. `tie_of` returns a tie number for each of an array of indices: of equal numbers, those with the
    smallest tie numbers are chosen.
    """
    if count >= len(number_N):
        return np.arange(len(number_N))
    if count <= 0:
        return np.empty(0, np.int64)
    near, near_M = None, number_N
    sample_X = number_N[::_SAMPLE]
    rank = count // _SAMPLE + 4 * math.isqrt(count) + 4
    if rank < len(sample_X):
        some = np.flatnonzero(number_N <= np.partition(sample_X, rank)[rank])
        if len(some) >= count:
            near, near_M = some, number_N[some]
    bound = np.partition(near_M, count - 1)[count - 1]
    below, equal = np.flatnonzero(near_M < bound), np.flatnonzero(near_M == bound)
    if near is not None:
        below, equal = near[below], near[equal]
    if len(equal) > (more := count - len(below)):
        tie_E = tie_of(equal)
        chosen = np.argpartition(tie_E, more - 1)[:more]
        equal = equal[chosen[np.argsort(tie_E[chosen])]]
    return np.concatenate([below, equal])
