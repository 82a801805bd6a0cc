"""Unique keys of a batch on the GPU: the same keys in the same order as oneemb.kernels.unique_keys.

Keys claim cells of a scratch table by compare-and-swap. A cell holds the first occurrence of its key in the batch, and
keys are compared by reading the batch there: so every int64 is a legal id, and one atomic write publishes a cell.
Ranking the first occurrences gives the unique keys in batch order, in whatever order the threads ran.

The occurrences of key u, in batch order:  order_N[begin_U1[u]], ..., order_N[begin_U1[u + 1] - 1]

The arrays of unique keys have room for N. Their number, and whether the tables of ids are valid, lie on the device
(`size_2`), so that the next loops need not wait for the host.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index_cuda import home
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.launch import Gpu

TABLES_MAX = 1 << 23
"""Tables that the index can tell apart."""

_EMPTY = 1 << 62


class DeviceKeys(NamedTuple):
    """The unique keys of N ids, on the device."""

    table_U: torch.Tensor
    """int32, as many as there are ids; the first U count, here and below"""
    id_U: torch.Tensor
    """int64"""
    head_U: torch.Tensor
    """int64: the first occurrence of each key"""
    size_2: torch.Tensor
    """int64 [2]: U, and 1 if tables, or offsets of bags, are not valid"""
    inverse_N: torch.Tensor
    """int64 [N]: the unique key of each id; -1 for padding"""
    check: Callable[[], object] | None = None
    """Raises what is wrong with tables and offsets; None = nothing can be wrong."""
    exact: bool = False
    """Whether the arrays are as long as there are keys, and tables and offsets are valid."""

    def cut(self, size: int) -> "DeviceKeys":
        """The same with the room beyond the U = `size` keys cut off."""
        return self._replace(table_U=self.table_U[:size], id_U=self.id_U[:size], head_U=self.head_U[:size], exact=True)


@cuda
def claim_loop(
    table_N: Array, id_N: Array, tables: Number, padded: Number, padding_id: Number, cell_C: Array, cell_N: Array,
    size_2: Array,
) -> None:  # fmt: skip
    """cell_N[n] = the cell of the key of id n, -1 for padding; cell_C[c] = its least n.

    size_2[1] turns 1 where a table is not one of `tables`.
    """
    cells = cell_C.shape[0]
    n = cuda.grid(1)
    while n < id_N.shape[0]:
        if table_N[n] < 0 or table_N[n] >= tables:
            size_2[1] = 1
        if padded and id_N[n] == padding_id:
            cell_N[n] = -1
        else:
            c = home(table_N[n], id_N[n], cells)
            while True:
                # Read first: most ids of a batch belong to a few keys, and swaps of one cell by many threads are slow.
                m = cell_C[c]
                if m == _EMPTY:
                    m = cuda.atomic.cas(cell_C, c, _EMPTY, n)
                if m == _EMPTY:
                    break
                if id_N[m] == id_N[n] and table_N[m] == table_N[n]:
                    if n < m:
                        cuda.atomic.min(cell_C, c, n)
                    break
                c += 1
                if c == cells:
                    c = 0
            cell_N[n] = c
        n += cuda.gridsize(1)


@cuda
def first_loop(cell_C: Array, cell_N: Array, first_N: Array) -> None:
    """first_N[n] = 1 where id n is the first of its key, else 0."""
    n = cuda.grid(1)
    while n < cell_N.shape[0]:
        first_N[n] = 1 if cell_N[n] >= 0 and cell_C[cell_N[n]] == n else 0
        n += cuda.gridsize(1)


@cuda
def collect_loop(
    table_N: Array, id_N: Array, cell_C: Array, cell_N: Array, rank_N: Array, table_U: Array, id_U: Array,
    head_U: Array, size_2: Array, inverse_N: Array,
) -> None:  # fmt: skip
    """Write each key at its rank, and each id's key."""
    n = cuda.grid(1)
    while n < cell_N.shape[0]:
        if cell_N[n] < 0:
            inverse_N[n] = -1
        else:
            first = cell_C[cell_N[n]]
            u = rank_N[first] - 1
            inverse_N[n] = u
            if first == n:
                table_U[u] = table_N[n]
                id_U[u] = id_N[n]
                head_U[u] = n
        if n == cell_N.shape[0] - 1:
            size_2[0] = rank_N[n]
        n += cuda.gridsize(1)


@cuda
def begin_loop(sorted_N: Array, begin_U1: Array) -> None:
    """begin_U1[u] = the first place of u in sorted_N, and N for all after the last u."""
    size = sorted_N.shape[0]
    n = cuda.grid(1)
    while n < size:
        u = sorted_N[n]
        if u >= 0 and (n == 0 or sorted_N[n - 1] != u):
            begin_U1[u] = n
        n += cuda.gridsize(1)
    beyond = sorted_N[size - 1] + 1 + cuda.grid(1)
    while beyond < begin_U1.shape[0]:
        begin_U1[beyond] = size
        beyond += cuda.gridsize(1)


def unique_keys_cuda(
    table_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    tables: int = TABLES_MAX,
    padding_id: int | None = None,
    size_2: torch.Tensor | None = None,
    gpu: Gpu,
) -> DeviceKeys:
    """The unique keys among (table_N int32, id_N int32 or int64), leaving out ids that equal `padding_id`. `size_2` is
    zeros, or the errors found before; an id of another table than of `tables` is noted there."""
    size = id_N.shape[0]
    cell_C = gpu.full(2 * size + 1, value=_EMPTY, dtype=torch.int64)
    cell_N, first_N, head_U, id_U, inverse_N = gpu.empty(5, size, dtype=torch.int64).unbind()
    table_U = gpu.empty(size, dtype=torch.int32)
    size_2 = gpu.zeros(2) if size_2 is None else size_2
    gpu.run(claim_loop, size, table_N, id_N, tables, padding_id is not None, padding_id or 0, cell_C, cell_N, size_2)
    gpu.run(first_loop, size, cell_C, cell_N, first_N)
    rank_N = first_N.cumsum(0)
    gpu.run(
        collect_loop, size, table_N, id_N, cell_C, cell_N, rank_N, table_U, id_U, head_U, size_2, inverse_N
    )  # fmt: skip
    return DeviceKeys(table_U, id_U, head_U, size_2, inverse_N)


def occurrences(inverse_N: torch.Tensor, keys: int, *, gpu: Gpu) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of each of `keys` keys in batch order: order_N int64 [N], begin_U1 int64 [U + 1]."""
    # The sort is stable, so that ids of one key stay in batch order; padding, -1, comes first and is in no range.
    narrow = torch.int32 if keys < 2**31 else torch.int64
    sorted_N, order_N = torch.sort(inverse_N.to(narrow), stable=True)
    begin_U1 = gpu.empty(keys + 1, dtype=torch.int64)
    gpu.run(begin_loop, inverse_N.shape[0], sorted_N, begin_U1)
    return order_N, begin_U1
