"""Unique keys of a batch of bags, table by table.  T tables, C columns, P bags, N ids, U unique keys.

A sample has one bag for each column, and a table has one column or more. Bags are stored sample by sample or column by
column. Keys are numbered table by table, and within a table in the order of first occurrence, column by column:

    C = T = 2, offset_P1  0 2 3 5 6      table_U  0 0 1 1      inverse_N  0 1 2 0 0 3
               id_N       7 9 7 7 7 8    id_U     7 9 7 8

One thread finds all keys of a table, in memory that stays in its cache. Index j counts ids column by column, in batch
order within a column; index q counts bags column by column; place_Q1[q] is the first j of bag q.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import keep_rolled, natural, prefetch
from oneemb.kernels.threads import Threads

# Ids whose cells are prefetched ahead of the current one.
_AHEAD = 16

# Least number of ids that is worth waking a thread for.
_SHARE_MIN = 4096

_ONE_THREAD = Threads(1)


class KeysByTable(NamedTuple):
    """The unique keys of N ids in bags, table by table, with the layout of ids and keys."""

    table_U: np.ndarray
    """int32 [U]: table of each key"""
    id_U: np.ndarray
    """int64 [U]: id of each key"""
    inverse_N: np.ndarray
    """int32 [N]: number of each id's unique key; -1 for padding"""
    offset_P1: np.ndarray
    """int64 [P + 1]: bag p holds the ids from offset_P1[p] to offset_P1[p + 1] - 1"""
    place_Q1: np.ndarray
    """int64 [P + 1]: bag q has the indices j from place_Q1[q] to place_Q1[q + 1] - 1"""
    key_J: np.ndarray
    """int32 [N]: number of each id's key within its table; -1 for padding"""
    key_T1: np.ndarray
    """int64 [T + 1]: the keys of table t are key_T1[t] to key_T1[t + 1] - 1"""
    begin_U1: np.ndarray
    """int32 [U + 1]: number of ids that the keys before each key have in all"""
    column_T1: np.ndarray
    """int64 [T + 1]: the columns of table t are column_T1[t] to column_T1[t + 1] - 1"""
    step_2: tuple[int, int]
    """Distance, in bags, from one column to the next and from one sample to the next."""

    @property
    def head_U(self) -> np.ndarray:
        raise AssertionError("the first occurrences of keys are not known table by table")

    def occurrences(
        self, of_bags: bool = True, scale_N: np.ndarray | None = None, *, threads: Threads = _ONE_THREAD
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Bags (or, if not `of_bags`, ids) in which each key occurs, in the order of j; see `occurrences` in
        oneemb.kernels.unique_keys for the result. Bags are numbered sample by sample, however they are stored."""
        begin_U1, size, tables = self.begin_U1, int(self.begin_U1[-1]), len(self.key_T1) - 1
        order_N = np.empty(size, np.int32)
        scale_M = None if scale_N is None else np.empty(size, np.float32)
        threads.run(
            _occurrences_cpu, tables, self.offset_P1, self.place_Q1, self.column_T1, *self.step_2, self.key_J,
            self.key_T1, of_bags, scale_N, begin_U1[:-1].copy(), order_N, scale_M, share_min=_tables_min(tables, size),
        )  # fmt: skip
        return order_N, begin_U1, scale_M


@cpu
def _find_keys_cpu(
    begin: Number, end: Number, id_N: Array, offset_P1: Array, place_Q1: Array, column_T1: Array, step_c: Number,
    step_b: Number, padded: Number, padding_id: Number, id_V: Array, count_V: Array, key_J: Array, size_T: Array,
) -> None:  # fmt: skip
    """Find the keys of tables begin to end - 1 and number them from 0 in each table. Key u of table t is id_V[v] and
    has count_V[v] ids, where v = u + index j of the table's first id. size_T[t] = (keys, ids that are not padding)."""
    samples = (len(place_Q1) - 1) // max(column_T1[-1], 1)
    longest = np.int64(1)
    for t in range(begin, end):
        longest = max(longest, place_Q1[column_T1[t + 1] * samples] - place_Q1[column_T1[t] * samples])
    cells = 2
    while cells < 2 * longest:
        cells *= 2
    cell_C, id_K, hash_K = np.empty(cells, np.int32), np.empty(longest, np.int64), np.empty(longest, np.uint64)
    for t in range(begin, end):
        first = natural(place_Q1[column_T1[t] * samples])
        ids = place_Q1[column_T1[t + 1] * samples] - place_Q1[column_T1[t] * samples]
        k = natural(0)
        for c in range(column_T1[t], column_T1[t + 1]):
            keep_rolled()
            for b in range(samples):
                keep_rolled()
                p = c * step_c + b * step_b
                for n in range(natural(offset_P1[p]), natural(offset_P1[p + 1])):
                    keep_rolled()
                    id_K[k] = id_N[n]
                    k += natural(1)
        for k in range(ids):
            hash_K[k] = hash_key(np.int64(t), id_K[k], np.int64(0))
        cells = 2
        while cells < 2 * ids:
            cells *= 2
        mask = natural(cells - 1)
        cell_C[:cells] = 0
        size, padding = natural(0), 0
        for k in range(natural(ids)):
            keep_rolled()
            prefetch(cell_C, np.int64(hash_K[min(k + natural(_AHEAD), natural(ids - 1))] & mask))
            id = id_K[k]
            if padded and id == padding_id:
                key_J[first + k] = -1
                padding += 1
                continue
            c = hash_K[k] & mask
            while True:
                v = first + natural(cell_C[c]) - natural(1)
                if cell_C[c] == 0:
                    v = first + size
                    size += natural(1)
                    cell_C[c] = size
                    id_V[v] = id
                    count_V[v] = 0
                    break
                if id_V[v] == id:
                    break
                c = (c + natural(1)) & mask
            count_V[v] += 1
            key_J[first + k] = v - first
        size_T[t, 0] = size
        size_T[t, 1] = ids - padding


@cpu
def _close_up_cpu(
    begin: Number, end: Number, place_T: Array, key_T1: Array, id_T1: Array, id_V: Array, count_V: Array,
    table_U: Array, id_U: Array, begin_U1: Array,
) -> None:  # fmt: skip
    """Copy the keys of tables begin to end - 1 to their places among all keys; begin_U1 = running sums of their
    counts."""
    for t in range(begin, end):
        at = id_T1[t]
        for u in range(key_T1[t], key_T1[t + 1]):
            v = place_T[t] + u - key_T1[t]
            table_U[u] = t
            id_U[u] = id_V[v]
            begin_U1[u] = at
            at += count_V[v]


@cpu
def _inverse_cpu(
    begin: Number, end: Number, offset_P1: Array, place_Q1: Array, key_J: Array, key_C: Array, inverse_N: Array
) -> None:
    """Write inverse_N for the ids of samples begin to end - 1, if bags are stored sample by sample."""
    columns = len(key_C)
    samples = (len(place_Q1) - 1) // columns
    for b in range(begin, end):
        for c in range(columns):
            keep_rolled()
            p, j = b * columns + c, natural(place_Q1[c * samples + b])
            for n in range(natural(offset_P1[p]), natural(offset_P1[p + 1])):
                keep_rolled()
                inverse_N[n] = key_J[j] + key_C[c] if key_J[j] >= 0 else -1
                j += natural(1)


@cpu
def _inverse_of_columns_cpu(
    begin: Number, end: Number, place_C1: Array, key_J: Array, key_C: Array, inverse_N: Array
) -> None:
    """Write inverse_N for the ids of columns begin to end - 1, if bags are stored column by column."""
    for c in range(begin, end):
        for n in range(natural(place_C1[c]), natural(place_C1[c + 1])):
            inverse_N[n] = key_J[n] + key_C[c] if key_J[n] >= 0 else -1


@cpu
def _occurrences_cpu(
    begin: Number, end: Number, offset_P1: Array, place_Q1: Array, column_T1: Array, step_c: Number, step_b: Number,
    key_J: Array, key_T1: Array, of_bags: Number, scale_N: Array, next_U: Array, order_N: Array, scale_M: Array,
) -> None:  # fmt: skip
    """Write each id of tables begin to end - 1, or its bag, to the next place of its key in order_N."""
    columns = column_T1[-1]
    samples = (len(place_Q1) - 1) // max(columns, 1)
    for t in range(begin, end):
        for c in range(column_T1[t], column_T1[t + 1]):
            keep_rolled()
            for b in range(samples):
                keep_rolled()
                p, q, bag = c * step_c + b * step_b, c * samples + b, natural(b * columns + c)
                for j in range(natural(place_Q1[q]), natural(place_Q1[q + 1])):
                    keep_rolled()
                    if key_J[j] >= 0:
                        u = natural(key_T1[t] + key_J[j])
                        at = natural(next_U[u])
                        n = natural(offset_P1[p] + np.int64(j) - place_Q1[q])
                        order_N[at] = bag if of_bags else n
                        if scale_N is not None:
                            scale_M[at] = scale_N[n]
                        next_U[u] += 1


def unique_keys_by_table(
    id_N: np.ndarray,
    offset_P1: np.ndarray,
    tables: int,
    *,
    columns: Sequence[int] | None = None,
    padding_id: int | None = None,
    threads: Threads = _ONE_THREAD,
) -> KeysByTable:
    """The unique keys of ids, int32 or int64 [N]; ids that equal `padding_id` are left out.

    Args:
        offset_P1: int64 [P + 1], from 0 to N: first id of each bag. All columns have equally many bags.
        columns: table of each column, ascending; bags are stored column by column. None = one column for each table,
            and bags are stored sample by sample.
    """
    ids, bags, count = len(id_N), len(offset_P1) - 1, tables if columns is None else len(columns)
    assert ids < 2**31 and bags < 2**31 and bags % count == 0
    samples = bags // count
    if columns is None:
        column_T1, step_2 = np.arange(tables + 1), (1, tables)
        place_Q1 = np.append(0, np.cumsum(np.diff(offset_P1).reshape(samples, tables).T))
    else:
        column_T1, step_2 = np.searchsorted(columns, np.arange(tables + 1)), (samples, 1)
        place_Q1 = offset_P1
    id_V, count_V, key_J = np.empty(ids, np.int64), np.empty(ids, np.int32), np.empty(ids, np.int32)
    size_T = np.empty((tables, 2), np.int64)
    share_min = _tables_min(tables, ids)
    threads.run(
        _find_keys_cpu, tables, id_N, offset_P1, place_Q1, column_T1, *step_2, padding_id is not None,
        0 if padding_id is None else padding_id, id_V, count_V, key_J, size_T, share_min=share_min,
    )  # fmt: skip
    key_T1, id_T1 = (np.append(0, np.cumsum(size_T[:, i])) for i in range(2))
    unique = int(key_T1[-1])
    table_U, id_U, begin_U1 = np.empty(unique, np.int32), np.empty(unique, np.int64), np.empty(unique + 1, np.int32)
    begin_U1[-1] = id_T1[-1]
    place_T = place_Q1[column_T1 * samples]
    threads.run(
        _close_up_cpu, tables, place_T, key_T1, id_T1, id_V, count_V, table_U, id_U, begin_U1, share_min=share_min
    )
    inverse_N, key_C = np.empty(ids, np.int32), np.repeat(key_T1[:-1], np.diff(column_T1))
    if columns is None:
        threads.run(
            _inverse_cpu, samples, offset_P1, place_Q1, key_J, key_C, inverse_N, share_min=_tables_min(samples, ids)
        )
    else:
        place_C1 = np.ascontiguousarray(place_Q1[np.arange(count + 1) * samples])
        threads.run(_inverse_of_columns_cpu, count, place_C1, key_J, key_C, inverse_N, share_min=share_min)
    return KeysByTable(
        table_U, id_U, inverse_N, offset_P1, place_Q1, key_J, key_T1, begin_U1, column_T1, step_2
    )  # fmt: skip


def _tables_min(tables: int, ids: int) -> int:
    """Least number of tables (or samples) that is worth waking a thread for, if all of them have `ids` ids in all."""
    return 1 + _SHARE_MIN * tables // (ids + 1)
