"""Unique keys of a batch, in the order in which they first occur.  N ids, U unique keys.

    table_N  0 0 0 1 0            table_U  0 0 1         inverse_N  0 1 0 2 -1
    id_N     7 9 7 7 5 (padding)  id_U     7 9 7

`occurrences` lists the positions of each key in batch order, so that a key's gradients are summed in one pass and
always in the same order:

    order_N  0 2 1 3              begin_U1  0 2 3 4

Ids of different tables have no key in common. So several threads can each find the keys of some tables and then number
them in batch order: `unique_keys_of_columns`, for a batch with one id for each sample and table, sample by sample.
`oneemb.kernels.unique_by_table` is faster, for bags; it numbers keys table by table.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import keep_rolled, natural, prefetch
from oneemb.kernels.threads import Threads

# Ids whose cells are prefetched ahead of the current one.
_AHEAD = 16

# Least number of ids whose hashes are worth waking a thread for.
_HASH_SHARE_MIN = 1 << 16

# Least number of ids, and of samples, with which `unique_keys_of_columns` is faster on several threads.
_SHARED_MIN, _SAMPLES_MIN = 1 << 15, 1 << 9

# Number of ids, roughly, in a block of samples; keys are counted and numbered block by block.
_BLOCK = 1 << 12

_ONE_THREAD = Threads(1)


class UniqueKeys(NamedTuple):
    """The unique keys of N ids."""

    table_U: np.ndarray
    """int32 [U]: table of each key"""
    id_U: np.ndarray
    """int64 [U]: id of each key"""
    inverse_N: np.ndarray
    """int32 [N]: number of each id's unique key; -1 for padding"""
    head_U: np.ndarray | None
    """int32 [U]: position of each key's first occurrence; None for keys that do not come from a batch"""

    def occurrences(
        self, bag_N: np.ndarray | None = None, scale_N: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Positions, or bags, of each key; see the function `occurrences`."""
        return occurrences(self.inverse_N, len(self.id_U), bag_N, scale_N)


@cpu
def _hash_keys_cpu(begin: Number, end: Number, table_N: Array, id_N: Array, hash_N: Array) -> None:
    # The hashes have a loop of their own: LLVM vectorizes it, since it has no branches.
    for n in range(begin, end):
        hash_N[n] = hash_key(np.int64(table_N[n]), np.int64(id_N[n]), np.int64(0))


def hash_keys(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """The hash of each key (table_N int32, id_N int64): uint64 [N]. Two ids of one table never have the same hash."""
    hash_N = np.empty(len(id_N), np.uint64)
    _hash_keys_cpu(0, len(id_N), table_N, id_N, hash_N)
    return hash_N


@cpu
def _unique_keys_cpu(
    table_N: Array, id_N: Array, hash_N: Array, padded: Number, padding_id: Number, cell_C: Array, table_U: Array,
    id_U: Array, inverse_N: Array, head_U: Array,
) -> Number:  # fmt: skip
    mask = natural(len(cell_C) - 1)
    size, ids = natural(0), natural(len(id_N))
    for n in range(ids):
        prefetch(cell_C, np.int64(hash_N[min(n + natural(_AHEAD), ids - natural(1))] & mask))
        id = np.int64(id_N[n])
        if padded and id == padding_id:
            inverse_N[n] = -1
            continue
        table = table_N[n]
        c = hash_N[n] & mask
        while True:
            u = natural(cell_C[c]) - natural(1)
            if cell_C[c] == 0:
                u = size
                size += natural(1)
                cell_C[c] = size
                table_U[u] = table
                id_U[u] = id
                head_U[u] = n
                break
            if id_U[u] == id and table_U[u] == table:
                break
            c = (c + natural(1)) & mask
        inverse_N[n] = u
    return np.int64(size)


def unique_keys(
    table_N: np.ndarray, id_N: np.ndarray, *, padding_id: int | None = None, threads: Threads = _ONE_THREAD
) -> UniqueKeys:
    """The unique keys of ids (table_N int32, id_N int32 or int64); ids that equal `padding_id` are left out."""
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
def _find_in_columns_cpu(
    begin: Number, end: Number, tables: Number, id_N: Array, padded: Number, padding_id: Number, block: Number,
    head_N: Array, new_TK: Array,
) -> None:  # fmt: skip
    """For the ids of tables begin to end - 1: head_N[n] = position of the first id with the key of id n, -1 for
    padding. new_TK[t, k] = number of first occurrences in block k of samples. A table's cells stay in a core's
    cache."""
    samples = len(id_N) // tables
    cells = 2
    while cells < 2 * samples:
        cells *= 2
    mask = natural(cells - 1)
    cell_C, id_B, hash_B = np.empty(cells, np.int32), np.empty(samples, np.int64), np.empty(samples, np.uint64)
    for t in range(natural(begin), natural(end)):
        for b in range(natural(samples)):
            id_B[b] = id_N[b * natural(tables) + t]
        for b in range(natural(samples)):
            hash_B[b] = hash_key(np.int64(t), id_B[b], np.int64(0))
        cell_C[:] = 0
        for k in range(new_TK.shape[1]):
            new = 0
            for b in range(natural(k * block), natural(min((k + 1) * block, samples))):
                keep_rolled()
                prefetch(cell_C, np.int64(hash_B[min(b + natural(_AHEAD), natural(samples - 1))] & mask))
                id, n = id_B[b], b * natural(tables) + t
                if padded and id == padding_id:
                    head_N[n] = -1
                    continue
                c = hash_B[b] & mask
                while True:
                    head = natural(cell_C[c]) - natural(1)
                    if cell_C[c] == 0:
                        cell_C[c] = b + natural(1)
                        head = b
                        new += 1
                        break
                    if id_B[head] == id:
                        break
                    c = (c + natural(1)) & mask
                head_N[n] = head * natural(tables) + t
            new_TK[t, k] = new


@cpu
def _number_keys_cpu(
    begin: Number, end: Number, tables: Number, id_N: Array, head_N: Array, block: Number, first_K1: Array,
    place_N: Array, table_U: Array, id_U: Array, head_U: Array, key_N: Array,
) -> None:  # fmt: skip
    """Write the keys whose first occurrence is in blocks begin to end - 1 of samples, in batch order, from key
    first_K1[k] on.

    key_N[n] = the number of the key whose first occurrence is id n. place_N: scratch memory.
    """
    for k in range(begin, end):
        first, last = natural(k * block * tables), natural(min((k + 1) * block * tables, len(id_N)))
        size = natural(0)
        for n in range(first, last):  # Without a branch, which would be mispredicted at every other id.
            place_N[first + size] = n
            size += natural(head_N[n] == np.int64(n))
        for i in range(size):
            n, u = natural(place_N[first + i]), natural(first_K1[k]) + i
            table_U[u] = n % natural(tables)
            id_U[u] = id_N[n]
            head_U[u] = n
            key_N[n] = u


@cpu
def _keys_of_heads_cpu(begin: Number, end: Number, head_N: Array, key_N: Array, inverse_N: Array) -> None:
    for n in range(natural(begin), natural(end)):
        inverse_N[n] = key_N[natural(head_N[n])] if head_N[n] >= 0 else -1


def columns_are_faster(ids: int, tables: int) -> bool:
    """Whether several threads in `unique_keys_of_columns` find the keys of `ids` ids faster than one in
    `unique_keys`."""
    return ids >= _SHARED_MIN and tables > 1 and ids >= _SAMPLES_MIN * tables


def unique_keys_of_columns(
    tables: int, id_N: np.ndarray, *, padding_id: int | None = None, threads: Threads = _ONE_THREAD
) -> UniqueKeys:
    """Result of `unique_keys` for a batch in which id n is of table n % T: one id for each sample and table.

    Threads find the first occurrences of keys, each in tables of its own; then the keys are numbered in batch order.
    """
    size = len(id_N)
    assert size < 2**31
    samples, block = size // max(1, tables), -(-_BLOCK // max(1, tables))
    blocks = -(-samples // block)
    head_N, key_N, inverse_N = (np.empty(size, np.int32) for _ in range(3))
    new_TK = np.empty((tables, blocks), np.int64)
    share_min = 1 + _BLOCK * tables // (size + 1)
    threads.run(
        _find_in_columns_cpu, tables, tables, id_N, padding_id is not None, 0 if padding_id is None else padding_id,
        block, head_N, new_TK, share_min=share_min,
    )  # fmt: skip
    first_K1 = np.append(0, np.cumsum(new_TK.sum(0)))
    unique = int(first_K1[-1])
    table_U, id_U, head_U = np.empty(unique, np.int32), np.empty(unique, np.int64), np.empty(unique, np.int32)
    threads.run(
        _number_keys_cpu, blocks, tables, id_N, head_N, block, first_K1, inverse_N, table_U, id_U, head_U, key_N,
        share_min=2,
    )  # fmt: skip
    threads.run(_keys_of_heads_cpu, size, head_N, key_N, inverse_N, share_min=2 * _BLOCK)
    return UniqueKeys(table_U, id_U, inverse_N, head_U)


@cpu
def _occurrences_cpu(
    inverse_N: Array, bag_N: Array, scale_N: Array, order_N: Array, end_U1: Array, scale_M: Array
) -> None:
    for u in inverse_N:
        if u >= 0:
            end_U1[natural(u + 1)] += 1
    for u in range(1, len(end_U1)):
        end_U1[u] += end_U1[u - 1]
    # Filling each segment from its end turns the ends into begins.
    for k in range(natural(1), natural(len(inverse_N) + 1)):
        n = natural(len(inverse_N)) - k
        if inverse_N[n] >= 0:
            u = natural(inverse_N[n] + 1)
            end_U1[u] -= 1
            at = natural(end_U1[u])
            order_N[at] = n if bag_N is None else bag_N[n]
            if scale_N is not None:
                scale_M[at] = scale_N[n]


def occurrences(
    inverse_N: np.ndarray, keys: int, bag_N: np.ndarray | None = None, scale_N: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Positions of each key, in batch order: key u is at order_N[begin_U1[u]], ..., order_N[begin_U1[u + 1] - 1].

    Args:
        inverse_N: number of each id's key, 0 to keys - 1; -1 for padding, which is left out.
        bag_N: int32 [N]: bag of each id. If given, `order_N` holds bags instead of positions.
        scale_N: float32 [N]; it is returned in the order of `order_N`.

    Returns:
        order_N int32 [ids that are not padding], begin_U1 int32 [keys + 1], scale_N or None.
    """
    begin_U1 = np.zeros(keys + 2, np.int32)
    order_N = np.empty(len(inverse_N), np.int32)
    scale_M = None if scale_N is None else np.empty(len(inverse_N), np.float32)
    _occurrences_cpu(inverse_N, bag_N, scale_N, order_N, begin_U1, scale_M)
    return order_N[: begin_U1[-1]], begin_U1[1:], scale_M
