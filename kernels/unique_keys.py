"""Unique keys of a batch, in the order in which they first occur.  N ids, U unique keys.

    table_N  0 0 0 1 0            table_U  0 0 1         inverse_N  0 1 0 2 -1
    id_N     7 9 7 7 5 (padding)  id_U     7 9 7

The occurrences of a key are chained in batch order, so that its gradients can be summed in one walk and always in
the same order:  n = head_U[u], next_N[n], next_N[next_N[n]], ... until -1.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import cpu

__all__ = ["UniqueKeys", "unique_keys"]


class UniqueKeys(NamedTuple):
    """The unique keys of N ids."""

    table_U: np.ndarray
    """int32 [U]"""
    id_U: np.ndarray
    """int64 [U]"""
    inverse_N: np.ndarray
    """int64 [N]: the unique key of each id; -1 for padding"""
    head_U: np.ndarray
    """int64 [U]: the first occurrence of each key"""
    next_N: np.ndarray
    """int64 [N]: the next occurrence of the same key; -1 after the last one, and for padding"""


@cpu
def _unique_keys_cpu(table_N, id_N, padded, padding_id, cell_C, table_U, id_U, inverse_N, head_U, tail_U, next_N):
    mask = np.uint64(len(cell_C) - 1)
    size = 0
    for n in range(len(id_N)):
        id = np.int64(id_N[n])
        next_N[n] = -1
        if padded and id == padding_id:
            inverse_N[n] = -1
            continue
        table = table_N[n]
        c = hash_key(table, id, 0) & mask
        while True:
            u = np.int64(cell_C[c]) - 1
            if u < 0:
                u = size
                size += 1
                cell_C[c] = size
                table_U[u] = table
                id_U[u] = id
                head_U[u] = n
                break
            if id_U[u] == id and table_U[u] == table:
                next_N[tail_U[u]] = n
                break
            c = (c + np.uint64(1)) & mask
        tail_U[u] = n
        inverse_N[n] = u
    return size


def unique_keys(table_N: np.ndarray, id_N: np.ndarray, *, padding_id: int | None = None) -> UniqueKeys:
    """The unique keys among (table_N int32, id_N int32 or int64), leaving out ids that equal `padding_id`."""
    size = len(id_N)
    cell_C = np.zeros(1 << (2 * size).bit_length(), np.int64)
    table_U = np.empty(size, np.int32)
    id_U, inverse_N, head_U, tail_U, next_N = (np.empty(size, np.int64) for _ in range(5))
    unique = _unique_keys_cpu(
        table_N, id_N, padding_id is not None, 0 if padding_id is None else padding_id,
        cell_C, table_U, id_U, inverse_N, head_U, tail_U, next_N,
    )  # fmt: skip
    return UniqueKeys(table_U[:unique], id_U[:unique], inverse_N, head_U[:unique], next_N)
