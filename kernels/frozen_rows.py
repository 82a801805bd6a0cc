"""Finds and reads rows of tables that are kept as tensors.  N ids, S rows, F features, B samples, C cells, D weights.

    read_frozen     out_ND[n] = the weights of key n, zeros where it has no row
    pool_frozen     out_BE[b, column_F[f] : column_F[f] + D] = the sum or mean of bag f * B + b, pooled while it is read

Cells are those of `kernels/hash_index.py`, one shard of them. Rows are float32 or the bits of float16 or bfloat16; or
bytes with weights of 8, 4 or 2 bits, the first in the lowest, whose scale and low lie apart from them.

A bag has the bits that torch's embedding_bag makes of its rows: the sum runs in batch order, in float32, from zero; a
weighted term is added with one rounding, a fused multiply-add; a mean is the sum divided by the number of ids. A weight
q of a row of bytes is q * scale + low, rounded twice.

Reference: torch.nn.functional.embedding_bag.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import LINE, PLACE_BITS, SHARD_ROOM, cells_put, shard_find
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import as_stored, keep_rolled, natural, prefetch_row, to_float32
from oneemb.kernels.jit_lanes import (
    LANES,
    copy_lanes,
    load_bytes,
    load_lanes,
    load_nibbles,
    load_pairs,
    multiply_add,
    same_lanes,
    store_lanes,
)
from oneemb.kernels.threads import Threads

__all__ = ["FrozenArrays", "cells_for", "pool_frozen", "put_cells", "read_frozen"]

_AHEAD = 16  # rows that are prefetched before they are read
_PUT = 1 << 16  # keys that are put at a time


class FrozenArrays(NamedTuple):
    """The arrays of rows. Whoever makes one has seen that cells name rows that are there, and that one cell or more is
    empty."""

    address: int
    """Address of cells, int64 [C, 2], aligned to a line of the cache."""
    cells: int
    weight_SX: np.ndarray | None
    """float32, uint16 or int16 [S, D]; None = rows are bytes."""
    byte_SX: np.ndarray | None
    """uint8 [S, X]"""
    scale_S2: np.ndarray | None
    """Scale and low of bytes, float32 or uint16 (float16)."""
    bits: int
    """Bits of a weight of bytes."""


# Of the two arrays of rows one is None. Each is asked for by itself: the compiler drops what would read the other one.


@part
def _prefetch(weight_SX: Array, byte_SX: Array, scale_S2: Array, place: Number) -> None:
    place = max(place, 0)
    if weight_SX is not None:
        prefetch_row(weight_SX, place, 0, weight_SX.shape[1])
    if byte_SX is not None:
        prefetch_row(byte_SX, place, 0, byte_SX.shape[1])
        prefetch_row(scale_S2, place, 0, 2)


@part
def _dequantized(byte_SX: Array, s: Number, d: Number, bits: Number) -> Number:
    """Weight d of row s, as it is kept, float32."""
    if bits == 8:
        return np.float32(byte_SX[s, d])
    if bits == 4:
        return np.float32((byte_SX[s, d >> 1] >> np.uint8(4 * (d & 1))) & np.uint8(15))
    return np.float32((byte_SX[s, d >> 2] >> np.uint8(2 * (d & 3))) & np.uint8(3))


@part
def _dequantized_lanes(byte_SX: Array, s: Number, d: Number, bits: Number) -> Number:
    """16 weights of row s from d on, as they are kept, float32."""
    if bits == 8:
        return load_bytes(byte_SX, s, d)
    if bits == 4:
        return load_nibbles(byte_SX, s, d >> 1)
    return load_pairs(byte_SX, s, d >> 2)


@part
def _read_row(
    weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, place: Number, out_ND: Array, n: Number
) -> None:
    dim = out_ND.shape[1]
    if place < 0:
        for d in range(dim):
            out_ND[n, d] = 0
        return
    if weight_SX is not None:
        for d in range(0, dim - LANES + 1, LANES):
            keep_rolled()
            copy_lanes(out_ND, n, d, weight_SX, place, d)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = as_stored(weight_SX[place, d], out_ND[n, d])
    if byte_SX is not None:
        by, low = to_float32(scale_S2[place, 0]), to_float32(scale_S2[place, 1])
        for d in range(0, dim - LANES + 1, LANES):
            store_lanes(out_ND, n, d, _dequantized_lanes(byte_SX, place, d, bits) * by + low)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = _dequantized(byte_SX, place, d, bits) * by + low


@cpu
def _read_cpu(
    begin: Number, end: Number, address: Number, cells: Number, table_N: Array, id_N: Array, place_N: Array,
    weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, out_ND: Array,
) -> None:  # fmt: skip
    shard_find(begin, end, address, cells, table_N, id_N, place_N, np.empty(SHARD_ROOM, np.int64))
    for n in range(begin, end):
        keep_rolled()
        _prefetch(weight_SX, byte_SX, scale_S2, place_N[natural(min(n + _AHEAD, end - 1))])
        _read_row(weight_SX, byte_SX, scale_S2, bits, place_N[natural(n)], out_ND, n)


@part
def _added(sum: Number, x: Number, n: Number, scale_N: Array) -> Number:
    """The sum with a term more: number n, or lanes of such numbers."""
    if scale_N is None:
        return sum + x
    return multiply_add(x, scale_N[n], sum)


@part
def _find_bags(
    begin: Number, end: Number, address: Number, cells: Number, id_N: Array, table_F: Array, offset_P1: Array,
    samples: Number, table_N: Array, place_N: Array, missing_1: Array,
) -> None:  # fmt: skip
    """Find the rows of the ids of bags begin to end - 1."""
    first, last = offset_P1[begin], offset_P1[end]
    for f in range(begin // samples, len(table_F)):
        its_first, its_last = max(offset_P1[f * samples], first), min(offset_P1[(f + 1) * samples], last)
        for n in range(natural(its_first), natural(max(its_first, its_last))):
            table_N[n] = table_F[f]
    shard_find(first, last, address, cells, table_N, id_N, place_N, np.empty(SHARD_ROOM, np.int64))
    for n in range(natural(first), natural(last)):
        if place_N[n] < 0:
            missing_1[0] = 1
            place_N[n] = -1 - np.int64(table_N[n])


@cpu
def _pool_cpu(
    begin: Number, end: Number, address: Number, cells: Number, id_N: Array, table_F: Array, column_F: Array,
    offset_P1: Array, scale_N: Array, is_mean: Number, finds: Number, table_N: Array, place_N: Array, missing_1: Array,
    weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, other_MD: Array, out_BE: Array,
) -> None:  # fmt: skip
    dim, samples = other_MD.shape[1], len(out_BE)
    if finds:
        _find_bags(
            begin, end, address, cells, id_N, table_F, offset_P1, samples, table_N, place_N, missing_1
        )  # fmt: skip
    final = offset_P1[end] - 1
    f = begin // samples
    row = begin - f * samples - 1
    for p in range(begin, end):
        row += 1
        if row == samples:
            row, f = 0, f + 1
        column = column_F[natural(f)]
        first, last = natural(offset_P1[p]), natural(offset_P1[p + 1])
        for n in range(first, last):
            keep_rolled()
            _prefetch(weight_SX, byte_SX, scale_S2, place_N[natural(min(np.int64(n) + _AHEAD, final))])
        count = np.float32(max(last - first, natural(1))) if is_mean else np.float32(1)
        for d in range(0, dim - LANES + 1, LANES):
            sum = same_lanes(np.float32(0))
            for n in range(first, last):
                keep_rolled()
                place = place_N[n]
                if place < 0:
                    sum = _added(sum, load_lanes(other_MD, -1 - place, d), n, scale_N)
                else:
                    if weight_SX is not None:
                        sum = _added(sum, load_lanes(weight_SX, place, d), n, scale_N)
                    if byte_SX is not None:
                        by, low = to_float32(scale_S2[place, 0]), to_float32(scale_S2[place, 1])
                        sum = _added(sum, _dequantized_lanes(byte_SX, place, d, bits) * by + low, n, scale_N)
            store_lanes(out_BE, row, column + d, sum / count if is_mean else sum)
        for d in range(dim - dim % LANES, dim):
            number = np.float32(0)
            for n in range(first, last):
                keep_rolled()
                place = place_N[n]
                if place < 0:
                    number = _added(number, other_MD[-1 - place, d], n, scale_N)
                else:
                    if weight_SX is not None:
                        number = _added(number, to_float32(weight_SX[place, d]), n, scale_N)
                    if byte_SX is not None:
                        by, low = to_float32(scale_S2[place, 0]), to_float32(scale_S2[place, 1])
                        number = _added(number, _dequantized(byte_SX, place, d, bits) * by + low, n, scale_N)
            out_BE[row, column + d] = number / count if is_mean else number


def read_frozen(
    frozen: FrozenArrays, table_N: np.ndarray, id_N: np.ndarray, out_ND: np.ndarray, *, threads: Threads
) -> np.ndarray:
    """Write the weights of each key to `out_ND`, zeros where it has no row.

    Args:
        table_N, id_N: int32 and int64.
        out_ND: float32.

    Returns:
        place_N int64, the row of each key, -1 where there is none.
    """
    place_N = np.empty(len(id_N), np.int64)
    threads.run(
        _read_cpu, len(id_N), *frozen[:2], table_N, id_N, place_N, *frozen[2:], out_ND,
        share_min=_share_min(out_ND.shape[1]),
    )  # fmt: skip
    return place_N


def pool_frozen(
    frozen: FrozenArrays, table_F: np.ndarray, column_F: np.ndarray, id_N: np.ndarray, offset_P1: np.ndarray,
    scale_N: np.ndarray | None, is_mean: bool, other_TD: np.ndarray, out_BE: np.ndarray, *, threads: Threads,
    known: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Write the sums or means of bags to columns of `out_BE`.

    Args:
        table_F: int32, the table of each feature; features of one table have rows of one table.
        column_F: int64, where each begins in `out_BE`.
        id_N: int64.
        offset_P1: int64, F * B + 1, from 0 to N: where the ids of each bag begin, feature by feature.
        scale_N: float32, by which ids are multiplied; None = by nothing.
        other_TD: float32, what ids without a row read as, of each table.
        out_BE: float32.
        known: tables and places of ids, that were given before: place -1 - m is row m of `other_TD`, which then has
            any rows.

    Returns:
        table_N and place_N if there are ids without a row, whose places are below 0; None = each has one.
    """
    ids, bags, missing_1 = len(id_N), len(offset_P1) - 1, np.zeros(1, np.int64)
    table_N, place_N = (np.empty(ids, np.int32), np.empty(ids, np.int64)) if known is None else known
    share_min = max(1, _share_min(other_TD.shape[1]) * bags // max(ids, 1))
    threads.run(
        _pool_cpu, bags, *frozen[:2], id_N, table_F, column_F, offset_P1, scale_N, is_mean, known is None, table_N,
        place_N, missing_1, *frozen[2:], other_TD, out_BE, share_min=share_min,
    )  # fmt: skip
    return (table_N, place_N) if missing_1[0] else None


def _share_min(dim: int) -> int:
    """The fewest keys worth waking a thread for: one is found in about the time in which 32 weights are read."""
    return max(256, (1 << 17) // (dim + 32))


def cells_for(rows: int) -> int:
    """C for so many rows: a quarter of the cells, and one more, are empty."""
    return -(-(rows * 4 // 3 + 1) // LINE) * LINE


def put_cells(cell_C2: np.ndarray, table_S: np.ndarray, id_S: np.ndarray, place_S: np.ndarray) -> None:
    """Put different keys into cells that are zeros, `cells_for` as many.

    Args:
        cell_C2: aligned to a line of the cache.
        table_S, id_S, place_S: int32, int64 and int64.
    """
    address_1, cells_1, size_1 = (np.array([number]) for number in (cell_C2.ctypes.data, len(cell_C2), 0))
    no_order_U = np.empty(0, np.int64)
    for begin in range(0, len(id_S), _PUT):
        its = slice(begin, begin + _PUT)
        cell_U2 = np.stack([id_S[its], table_S[its].astype(np.int64) << PLACE_BITS | place_S[its] + 1], 1)
        begin_P1 = np.array([0, len(cell_U2)])
        cells_put(
            0, 1, address_1, cells_1, size_1, begin_P1, no_order_U, cell_U2, np.empty(len(cell_U2), np.int64)
        )  # fmt: skip
