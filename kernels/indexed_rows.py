"""Reads and pools read-only rows, found by an index of their keys.

N ids, S rows, F features, B samples, C cells, D weights of a row, E columns of the output.

    read_indexed    out_ND[n] = the weights of key n, zeros where it has no row
    pool_indexed    out_BE[b, column_F[f] : column_F[f] + D] = the sum or mean of bag f * B + b, pooled while it is read

The index is one shard of `kernels/hash_index.py`; `kernels/frozen_rows.py` describes the formats of rows. A pooled bag
has the same bits as with torch's embedding_bag.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.frozen_rows import OTHER, RowArrays, bags_min, pool_bag, read_row, share_min
from oneemb.kernels.hash_index import LINE, PLACE_BITS, SHARD_ROOM, cells_put, shard_find
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import keep_rolled, natural, prefetch_row
from oneemb.kernels.threads import Threads

_AHEAD = 16  # rows that are prefetched before they are read
_PUT = 1 << 16  # keys that are put at a time


class RowIndex(NamedTuple):
    """Rows and the index of their keys. Whoever makes one has checked that cells hold numbers of existing rows and that
    at least one cell is empty."""

    address: int
    """Address of cells, int64 [C, 2], aligned to a line of the cache."""
    cells: int
    rows: RowArrays


@part
def _prefetch(weight_SX: Array, byte_SX: Array, scale_S2: Array, place: Number) -> None:
    place = max(place, 0)
    if weight_SX is not None:
        prefetch_row(weight_SX, place, 0, weight_SX.shape[1])
    if byte_SX is not None:
        prefetch_row(byte_SX, place, 0, byte_SX.shape[1])
        prefetch_row(scale_S2, place, 0, 2)


@cpu
def _read_cpu(
    begin: Number, end: Number, address: Number, cells: Number, table_N: Array, id_N: Array, place_N: Array,
    weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, out_ND: Array,
) -> None:  # fmt: skip
    shard_find(begin, end, address, cells, table_N, id_N, place_N, np.empty(SHARD_ROOM, np.int64))
    for n in range(begin, end):
        keep_rolled()
        _prefetch(weight_SX, byte_SX, scale_S2, place_N[natural(min(n + _AHEAD, end - 1))])
        read_row(weight_SX, byte_SX, scale_S2, bits, place_N[natural(n)], out_ND, n)


@part
def _find_bags(
    begin: Number, end: Number, address: Number, cells: Number, id_N: Array, table_F: Array, offset_P1: Array,
    samples: Number, table_N: Array, place_N: Array, missing_1: Array,
) -> None:  # fmt: skip
    """place_N = the rows of the ids of bags begin to end - 1; OTHER - table, and missing_1[0] = 1, for an id without a
    row."""
    first, last = offset_P1[begin], offset_P1[end]
    for f in range(begin // samples, len(table_F)):
        id_begin, id_end = max(offset_P1[f * samples], first), min(offset_P1[(f + 1) * samples], last)
        for n in range(natural(id_begin), natural(max(id_begin, id_end))):
            table_N[n] = table_F[f]
    shard_find(first, last, address, cells, table_N, id_N, place_N, np.empty(SHARD_ROOM, np.int64))
    for n in range(natural(first), natural(last)):
        if place_N[n] < 0:
            missing_1[0] = 1
            place_N[n] = OTHER - np.int64(table_N[n])


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
        pool_bag(
            first, last, place_N, weight_SX, byte_SX, scale_S2, bits, other_MD, scale_N, None, count, out_BE, row,
            column, dim,
        )  # fmt: skip


def read_indexed(
    index: RowIndex, table_N: np.ndarray, id_N: np.ndarray, out_ND: np.ndarray, *, threads: Threads
) -> np.ndarray:
    """Write the weights of each key (int32 table, int64 id) to `out_ND`, float32; zeros for a key without a row.
    Returns place_N, int64: row of each key, -1 for a key without a row."""
    place_N = np.empty(len(id_N), np.int64)
    threads.run(
        _read_cpu, len(id_N), *index[:2], table_N, id_N, place_N, *index.rows, out_ND,
        share_min=share_min(out_ND.shape[1]),
    )  # fmt: skip
    return place_N


def pool_indexed(
    index: RowIndex, table_F: np.ndarray, column_F: np.ndarray, id_N: np.ndarray, offset_P1: np.ndarray,
    scale_N: np.ndarray | None, is_mean: bool, other_TD: np.ndarray, out_BE: np.ndarray, *, threads: Threads,
    known: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Write the sums or means of bags to columns of `out_BE`.

    Args:
        table_F: int32, table of each feature; several features may share a table.
        column_F: int64, first column of each feature in `out_BE`.
        id_N: int64.
        offset_P1: int64 [F * B + 1], from 0 to N: first id of each bag, feature by feature.
        scale_N: float32, factor of each id; None = 1.
        other_TD: float32, for each table the weights as which ids without a row are read.
        out_BE: float32.
        known: table_N and place_N of an earlier call, in which the caller has set places: OTHER - m = row m of
            `other_TD`, which then may have any number of rows. None = find the places.

    Returns:
        table_N and place_N, with negative places for ids without a row; None if every id has a row.
    """
    ids, bags, missing_1 = len(id_N), len(offset_P1) - 1, np.zeros(1, np.int64)
    table_N, place_N = (np.empty(ids, np.int32), np.empty(ids, np.int64)) if known is None else known
    threads.run(
        _pool_cpu, bags, *index[:2], id_N, table_F, column_F, offset_P1, scale_N, is_mean, known is None, table_N,
        place_N, missing_1, *index.rows, other_TD, out_BE, share_min=bags_min(other_TD.shape[1], bags, ids),
    )  # fmt: skip
    return (table_N, place_N) if missing_1[0] else None


def cells_for(rows: int) -> int:
    """Number of cells for `rows` rows, such that a quarter of the cells, and one more, are empty."""
    return -(-(rows * 4 // 3 + 1) // LINE) * LINE


def put_cells(cell_C2: np.ndarray, table_S: np.ndarray, id_S: np.ndarray, place_S: np.ndarray) -> None:
    """Put distinct keys (int32 tables, int64 ids and places) into cell_C2: `cells_for` cells of zeros, aligned to a
    line of the cache."""
    address_1, cells_1, size_1 = (np.array([number]) for number in (cell_C2.ctypes.data, len(cell_C2), 0))
    no_order_U = np.empty(0, np.int64)
    for begin in range(0, len(id_S), _PUT):
        batch = slice(begin, begin + _PUT)
        cell_U2 = np.stack([id_S[batch], table_S[batch].astype(np.int64) << PLACE_BITS | place_S[batch] + 1], 1)
        begin_P1 = np.array([0, len(cell_U2)])
        cells_put(
            0, 1, address_1, cells_1, size_1, begin_P1, no_order_U, cell_U2, np.empty(len(cell_U2), np.int64)
        )  # fmt: skip
