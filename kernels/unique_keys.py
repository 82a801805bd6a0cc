"""Unique keys of a batch, in the order in which they first occur.  N ids, U unique keys.

    table_N  0 0 0 1 0            table_U  0 0 1         inverse_N  0 1 0 2 -1
    id_N     7 9 7 7 5 (padding)  id_U     7 9 7

`occurrences` lists where each key occurs, key by key in batch order, so that its gradients can be summed in one walk
and always in the same order:

    order_N  0 2 1 3              begin_U1  0 2 3 4

Ids of different tables have no key in common. `unique_keys_by_table`, for bags of ids, which are many, takes one table
after the other: each is the work of one thread, in memory that stays in its cache. J counts ids table by table, in
batch order within a table; keys come in the same order.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import cpu, prefetch
from oneemb.kernels.threads import Threads

__all__ = ["ByTable", "UniqueKeys", "occurrences", "unique_keys", "unique_keys_by_table"]

# Ids whose cells are asked for ahead of the one at work.
_AHEAD = 16

# Ids that are worth waking a thread for, and those whose hashes alone are.
_SHARE_MIN = 4096
_HASH_SHARE_MIN = 1 << 16

_ONE_THREAD = Threads(1)


class ByTable(NamedTuple):
    """Where the ids of a batch lie table by table."""

    place_N: np.ndarray
    """int32 [N]: j, the place of each id"""
    begin_T1: np.ndarray
    """int64 [T + 1]: the ids of table t have the places from begin_T1[t] to begin_T1[t + 1] - 1"""
    bag_J: np.ndarray
    """int32 [N]: the bag of each id"""


class UniqueKeys(NamedTuple):
    """The unique keys of N ids."""

    table_U: np.ndarray
    """int32 [U]"""
    id_U: np.ndarray
    """int64 [U]"""
    inverse_N: np.ndarray
    """int32 [N]: the unique key of each id; -1 for padding"""
    head_U: np.ndarray | None
    """int32 [U]: the first occurrence of each key; None if they were found table by table"""
    by_table: ByTable | None = None
    key_J: np.ndarray | None = None
    """int32 [N]: `inverse_N`, table by table"""
    key_T1: np.ndarray | None = None
    """int64 [T + 1]: the keys of table t are key_T1[t] to key_T1[t + 1] - 1"""

    def occurrences(
        self,
        bag_N: np.ndarray | None = None,
        scale_N: np.ndarray | None = None,
        *,
        threads: Threads = _ONE_THREAD,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """order_N, begin_U1, scale_N: where each key occurs; see the function of this name."""
        if self.by_table is None:
            return occurrences(self.inverse_N, len(self.id_U), bag_N, scale_N)
        return _occurrences_by_table(self, scale_N, threads)


@cpu
def _hash_keys_cpu(begin, end, table_N, id_N, hash_N):
    # A loop of its own: nothing in it branches, so that it runs on whole vectors.
    for n in range(begin, end):
        hash_N[n] = hash_key(np.int64(table_N[n]), np.int64(id_N[n]), np.int64(0))


@cpu
def _unique_keys_cpu(table_N, id_N, hash_N, padded, padding_id, cell_C, table_U, id_U, inverse_N, head_U):
    mask = np.uint64(len(cell_C) - 1)
    size = 0
    for n in range(len(id_N)):
        if n + _AHEAD < len(id_N):
            prefetch(cell_C, np.int64(hash_N[n + _AHEAD] & mask))
        id = np.int64(id_N[n])
        if padded and id == padding_id:
            inverse_N[n] = -1
            continue
        table = table_N[n]
        c = np.int64(hash_N[n] & mask)
        while True:
            u = np.int64(cell_C[c]) - 1
            if u < 0:
                u = np.int64(size)
                size += 1
                cell_C[c] = size
                table_U[u] = table
                id_U[u] = id
                head_U[u] = n
                break
            if id_U[u] == id and table_U[u] == table:
                break
            c = np.int64((np.uint64(c) + np.uint64(1)) & mask)
        inverse_N[n] = u
    return size


def unique_keys(
    table_N: np.ndarray, id_N: np.ndarray, *, padding_id: int | None = None, threads: Threads = _ONE_THREAD
) -> UniqueKeys:
    """The unique keys among (table_N int32, id_N int32 or int64), leaving out ids that equal `padding_id`."""
    size = len(id_N)
    assert size < 2**31
    hash_N = np.empty(size, np.uint64)
    threads.run(_hash_keys_cpu, size, table_N, id_N, hash_N, share_min=_HASH_SHARE_MIN)
    cell_C = np.zeros(1 << max(1, (2 * size - 1).bit_length()), np.int32)
    table_U, id_U = np.empty(size, np.int32), np.empty(size, np.int64)
    inverse_N, head_U = np.empty(size, np.int32), np.empty(size, np.int32)
    unique = _unique_keys_cpu(
        table_N, id_N, hash_N, padding_id is not None, 0 if padding_id is None else padding_id,
        cell_C, table_U, id_U, inverse_N, head_U,
    )  # fmt: skip
    return UniqueKeys(table_U[:unique], id_U[:unique], inverse_N, head_U[:unique])


@cpu
def _place_ids_cpu(begin, end, id_N, place_N, id_J):
    for n in range(begin, end):
        id_J[place_N[n]] = id_N[n]


@cpu
def _unique_of_tables_cpu(begin, end, id_J, begin_T1, padded, padding_id, id_V, key_J, size_T):
    """Find the keys of tables begin to end - 1, counted from 0 in each; those of table t are at id_V[begin_T1[t]:]."""
    longest = 1
    for t in range(begin, end):
        longest = max(longest, begin_T1[t + 1] - begin_T1[t])
    cells = 2
    while cells < 2 * longest:
        cells *= 2
    cell_C, hash_K = np.empty(cells, np.int32), np.empty(longest, np.uint64)
    for t in range(begin, end):
        first, ids = begin_T1[t], begin_T1[t + 1] - begin_T1[t]
        cells = 2
        while cells < 2 * ids:
            cells *= 2
        mask = np.uint64(cells - 1)
        cell_C[:cells] = 0
        for k in range(ids):
            hash_K[k] = hash_key(np.int64(t), id_J[first + k], np.int64(0))
        size = 0
        for k in range(ids):
            if k + _AHEAD < ids:
                prefetch(cell_C, np.int64(hash_K[k + _AHEAD] & mask))
            id = id_J[first + k]
            if padded and id == padding_id:
                key_J[first + k] = -1
                continue
            c = np.int64(hash_K[k] & mask)
            while True:
                u = np.int64(cell_C[c]) - 1
                if u < 0:
                    u = np.int64(size)
                    size += 1
                    cell_C[c] = size
                    id_V[first + u] = id
                    break
                if id_V[first + u] == id:
                    break
                c = np.int64((np.uint64(c) + np.uint64(1)) & mask)
            key_J[first + k] = u
        size_T[t] = size


@cpu
def _close_up_cpu(begin, end, begin_T1, key_T1, id_V, table_U, id_U, key_J):
    """Put the keys of tables begin to end - 1 where they belong among all, and count them from there."""
    for t in range(begin, end):
        for u in range(key_T1[t + 1] - key_T1[t]):
            table_U[key_T1[t] + u] = t
            id_U[key_T1[t] + u] = id_V[begin_T1[t] + u]
        for j in range(begin_T1[t], begin_T1[t + 1]):
            key_J[j] += np.int32(key_T1[t]) if key_J[j] >= 0 else np.int32(0)


@cpu
def _inverse_cpu(begin, end, place_N, key_J, inverse_N):
    for n in range(begin, end):
        inverse_N[n] = key_J[place_N[n]]


def unique_keys_by_table(
    by_table: ByTable, id_N: np.ndarray, *, padding_id: int | None = None, threads: Threads = _ONE_THREAD
) -> UniqueKeys:
    """The unique keys among ids of several tables, int32 or int64 [N], leaving out those that equal `padding_id`."""
    (place_N, begin_T1, _), size = by_table, len(id_N)
    assert size < 2**31
    tables = len(begin_T1) - 1
    share_min = 1 + _SHARE_MIN * tables // (size + 1)
    id_J, id_V, key_J = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int32)
    size_T = np.empty(tables, np.int64)
    threads.run(_place_ids_cpu, size, id_N, place_N, id_J, share_min=_SHARE_MIN)
    threads.run(
        _unique_of_tables_cpu, tables, id_J, begin_T1, padding_id is not None, 0 if padding_id is None else padding_id,
        id_V, key_J, size_T, share_min=share_min,
    )  # fmt: skip
    key_T1 = np.append(0, np.cumsum(size_T))
    table_U, id_U = np.empty(key_T1[-1], np.int32), np.empty(key_T1[-1], np.int64)
    threads.run(_close_up_cpu, tables, begin_T1, key_T1, id_V, table_U, id_U, key_J, share_min=share_min)
    inverse_N = np.empty(size, np.int32)
    threads.run(_inverse_cpu, size, place_N, key_J, inverse_N, share_min=_SHARE_MIN)
    return UniqueKeys(table_U, id_U, inverse_N, None, by_table, key_J, key_T1)


@cpu
def _occurrences_cpu(inverse_N, bag_N, scale_N, order_N, end_U1, scale_M):
    for u in inverse_N:
        if u >= 0:
            end_U1[u + 1] += 1
    for u in range(1, len(end_U1)):
        end_U1[u] += end_U1[u - 1]
    # Counted from the end of each key's segment down, ends turn into begins.
    for n in range(len(inverse_N) - 1, -1, -1):
        u = inverse_N[n]
        if u >= 0:
            end_U1[u + 1] -= 1
            order_N[end_U1[u + 1]] = n if bag_N is None else bag_N[n]
            if scale_N is not None:
                scale_M[end_U1[u + 1]] = scale_N[n]


def occurrences(
    inverse_N: np.ndarray, keys: int, bag_N: np.ndarray | None = None, scale_N: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Where each key occurs, in batch order: order_N[begin_U1[u]], ..., order_N[begin_U1[u + 1] - 1].

    Args:
        inverse_N: the key of each id, 0 to keys - 1; -1 for padding, which is left out.
        bag_N: int32 [N]; `order_N` then holds the bag of each occurrence in place of the occurrence itself.
        scale_N: float32 [N]; it comes back in the order of `order_N`.

    Returns:
        order_N int32 [ids that are not padding], begin_U1 int32 [keys + 1], scale_N or None.
    """
    begin_U1 = np.zeros(keys + 2, np.int32)
    order_N = np.empty(len(inverse_N), np.int32)
    scale_M = None if scale_N is None else np.empty(len(inverse_N), np.float32)
    _occurrences_cpu(inverse_N, bag_N, scale_N, order_N, begin_U1, scale_M)
    return order_N[: begin_U1[-1]], begin_U1[1:], scale_M


@cpu
def _count_ids_cpu(begin, end, begin_T1, key_J, ids_T):
    for t in range(begin, end):
        ids_T[t] = 0
        for j in range(begin_T1[t], begin_T1[t + 1]):
            ids_T[t] += key_J[j] >= 0


@cpu
def _occurrences_of_tables_cpu(
    begin, end, begin_T1, key_T1, end_T, key_J, bag_J, scale_J, order_N, end_U, scale_M
):  # fmt: skip
    """As `_occurrences_cpu`, of the keys of tables begin to end - 1, whose occurrences end before end_T[t]."""
    for t in range(begin, end):
        for u in range(key_T1[t], key_T1[t + 1]):
            end_U[u] = 0
        for j in range(begin_T1[t], begin_T1[t + 1]):
            if key_J[j] >= 0:
                end_U[key_J[j]] += 1
        at = end_T[t]
        for u in range(key_T1[t + 1] - 1, key_T1[t] - 1, -1):
            size = end_U[u]
            end_U[u] = at
            at -= size
        for j in range(begin_T1[t + 1] - 1, begin_T1[t] - 1, -1):
            u = key_J[j]
            if u >= 0:
                end_U[u] -= 1
                order_N[end_U[u]] = bag_J[j]
                if scale_J is not None:
                    scale_M[end_U[u]] = scale_J[j]


def _occurrences_by_table(
    unique: UniqueKeys, scale_N: np.ndarray | None, threads: Threads
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`occurrences` of keys that were found table by table, each given as its bag."""
    assert unique.by_table is not None and unique.key_J is not None
    (place_N, begin_T1, bag_J), key_J, size = unique.by_table, unique.key_J, len(unique.inverse_N)
    tables = len(begin_T1) - 1
    share_min = 1 + _SHARE_MIN * tables // (size + 1)
    ids_T = np.empty(tables, np.int64)
    threads.run(_count_ids_cpu, tables, begin_T1, key_J, ids_T, share_min=share_min)
    end_T = np.cumsum(ids_T)
    order_N, begin_U1 = np.empty(end_T[-1], np.int32), np.empty(len(unique.id_U) + 1, np.int32)
    begin_U1[-1] = end_T[-1]
    scale_J = scale_M = None
    if scale_N is not None:
        scale_J, scale_M = np.empty(size, np.float32), np.empty(end_T[-1], np.float32)
        scale_J[place_N] = scale_N
    threads.run(
        _occurrences_of_tables_cpu, tables, begin_T1, unique.key_T1, end_T, key_J, bag_J, scale_J, order_N,
        begin_U1, scale_M, share_min=share_min,
    )  # fmt: skip
    return order_N, begin_U1, scale_M
