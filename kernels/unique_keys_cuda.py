"""Unique keys of a batch on the GPU: the same keys in the same order as oneemb.kernels.unique_keys.

Keys claim cells of a scratch table by compare-and-swap. A cell holds the first occurrence of its key in the batch, and
keys are compared by reading the batch there: so every int64 is a legal id, and one atomic write publishes a cell.
Ranking the first occurrences gives the unique keys in batch order, in whatever order the threads ran.

A cell of the scratch table belongs to the batch whose number is in its upper bits. The table is kept for the batches
that follow, in which cells of earlier batches are free, so that it is not filled for each batch.

The arrays of unique keys have room for N. Their number, and whether the tables of ids are valid, lie on the device
(`size_2`), so that the next loops need not wait for the host.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import BLOCK_MAX, Array
from oneemb.kernels.hash_index_cuda import home
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.launch import BLOCK_BITS, SHARES_MAX, Gpu
from oneemb.kernels.ranks_cuda import rank_in_block, ranks_of_shares

TABLES_MAX = 1 << 23
"""Tables that the index can tell apart."""

_IDS_MAX = (1 << 30) - 1  # so that numbers of ids and of cells are int32
_PLACE_BITS = 32
_PLACE_MASK = (1 << 32) - 1
_BATCHES_MAX = (1 << 31) - 1

# Number of sizes of batches for which views of the arrays are kept.
_SIZES_MAX = 16


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
    """int32 [N]: the unique key of each id; -1 for padding"""
    check: Callable[[], object] | None = None
    """Raises what is wrong with tables and offsets; None = nothing can be wrong."""
    exact: bool = False
    """Whether the arrays are as long as there are keys, and tables and offsets are valid."""

    def cut(self, size: int) -> "DeviceKeys":
        """The same with the room beyond the U = `size` keys cut off."""
        return self._replace(table_U=self.table_U[:size], id_U=self.id_U[:size], head_U=self.head_U[:size], exact=True)


@cuda
def claim_loop(
    table_N: Array, id_N: Array, tables: Number, padded: Number, padding_id: Number, batch: Number, cell_C: Array,
    cell_N: Array, size_2: Array,
) -> None:  # fmt: skip
    """cell_N[n] = the cell of the key of id n, -1 for padding; cell_C[c] = batch + its least n.

    `batch`: number of the batch, in the upper bits. size_2[1] turns 1 where a table is not one of `tables`.
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
                held = cell_C[c]
                if held < batch:
                    held = cuda.atomic.cas(cell_C, c, held, batch + n)
                if held < batch:  # It was free, and is the key's now.
                    break
                m = held & _PLACE_MASK
                if id_N[m] == id_N[n] and table_N[m] == table_N[n]:
                    if n < m:
                        cuda.atomic.min(cell_C, c, batch + n)
                    break
                c += 1
                if c == cells:
                    c = 0
            cell_N[n] = c
        n += cuda.gridsize(1)


@cuda
def first_loop(cell_C: Array, cell_N: Array, batch: Number, bits: Number, rank_N: Array, count_B: Array) -> None:
    """rank_N[n] = how many ids before n, in its share, are the first of their keys; count_B[b] = how many in the share.
    A thread takes 2 ** bits ids."""
    count_T = cuda.shared.array(BLOCK_MAX, np.int32)
    begin = np.int64(cuda.grid(1)) << bits
    end = min(begin + (1 << bits), cell_N.shape[0])
    count = 0
    for n in range(begin, end):
        rank_N[n] = count
        if cell_N[n] >= 0 and cell_C[cell_N[n]] == batch + n:
            count += 1
    rank = rank_in_block(count_T, count)
    for n in range(begin, end):
        rank_N[n] += rank
    if cuda.threadIdx.x == 0:
        count_B[cuda.blockIdx.x] = count_T[cuda.blockDim.x - 1]


@cuda
def collect_loop(
    table_N: Array, id_N: Array, cell_C: Array, cell_N: Array, bits: Number, rank_N: Array, count_B: Array,
    table_U: Array, id_U: Array, head_U: Array, size_2: Array, inverse_N: Array,
) -> None:  # fmt: skip
    """Write each key at its rank, and each id's key."""
    count_T = cuda.shared.array(BLOCK_MAX, np.int32)
    rank_B = cuda.shared.array(SHARES_MAX, np.int32)
    size = ranks_of_shares(count_B, count_T, rank_B)
    n = cuda.grid(1)
    if n == 0:
        size_2[0] = size
    while n < cell_N.shape[0]:
        u = -1
        if cell_N[n] >= 0:
            first = cell_C[cell_N[n]] & _PLACE_MASK
            u = rank_B[first >> (bits + BLOCK_BITS)] + rank_N[first]
            if first == n:
                table_U[u] = table_N[n]
                id_U[u] = id_N[n]
                head_U[u] = n
        inverse_N[n] = u
        n += cuda.gridsize(1)


class _Scratch:
    """Arrays of the loops above, for batches of at most `ids` ids."""

    def __init__(self, ids: int, gpu: Gpu):
        self.ids = ids
        self._batches, self._gpu = 0, gpu
        self._of_sizes: dict[int, tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._cell_C = gpu.kept(gpu.full(2 * ids + 1, value=0, dtype=torch.int64))
        self._number_X = gpu.empty(2 * ids + SHARES_MAX, dtype=torch.int32)

    def next_batch(self, size: int) -> tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the next batch, of `size` ids: its number, in the upper bits; bits of the number of ids of a thread;
        cell_C, and cell_N, rank_N and count_B."""
        if self._batches == _BATCHES_MAX:
            self._cell_C.zero_()
            self._batches = 0
        self._batches += 1
        found = self._of_sizes.get(size)
        if found is None:
            if len(self._of_sizes) >= _SIZES_MAX:
                self._of_sizes.clear()
            blocks, bits = self._gpu.shares(size)
            parts = torch.split(self._number_X[: 2 * size + blocks], [size, size, blocks])
            cell_N, rank_N, count_B = map(self._gpu.kept, parts)
            found = self._of_sizes[size] = bits, self._cell_C, cell_N, rank_N, count_B
        return self._batches << _PLACE_BITS, *found


def _more_scratch(ids: int, gpu: Gpu) -> _Scratch:
    gpu.scratch.pop(_Scratch, None)  # Its memory is freed before more is allocated.
    with torch.inference_mode(False):
        found = gpu.scratch[_Scratch] = _Scratch(1 << max(0, ids - 1).bit_length(), gpu)
    return found


def unique_keys_cuda(
    table_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    tables: int = TABLES_MAX,
    padding_id: int | None = None,
    size_2: torch.Tensor | None = None,
    check: Callable[[], object] | None = None,
    gpu: Gpu,
) -> DeviceKeys:
    """The unique keys among (table_N int32, id_N int32 or int64), leaving out ids that equal `padding_id`. `size_2` is
    zeros, or the errors found before; an id of another table than of `tables` is noted there. For `check` see
    `DeviceKeys`.

    Raises:
        ValueError: there are 2^30 ids or more.
    """
    size = id_N.numel()
    if size > _IDS_MAX:
        raise ValueError(f"a lookup on a GPU must have at most {_IDS_MAX} ids, got {size}; divide the batch")
    # To make an array takes the host less time than to make a view, and `empty_like` takes less than `empty`.
    table_U = torch.empty(size, dtype=torch.int32, device=gpu.device)
    id_U = torch.empty(size, dtype=torch.int64, device=gpu.device)
    head_U, inverse_N = torch.empty_like(id_U), torch.empty_like(table_U)
    size_2 = gpu.filled(2) if size_2 is None else size_2
    if size > 0:
        scratch: _Scratch | None = gpu.scratch.get(_Scratch)
        if scratch is None or scratch.ids < size:
            scratch = _more_scratch(size, gpu)
        batch, bits, cell_C, cell_N, rank_N, count_B = scratch.next_batch(size)
        padded = padding_id is not None
        gpu.run_in_turn(
            lambda: (
                (claim_loop, gpu.grid(size)), (first_loop, gpu.grid_of_shares(count_B.shape[0])),
                (collect_loop, gpu.grid(size)),
            ),
            (table_N, id_N, tables, padded, padding_id or 0, batch, cell_C, cell_N, size_2),
            (cell_C, cell_N, batch, bits, rank_N, count_B),
            (table_N, id_N, cell_C, cell_N, bits, rank_N, count_B, table_U, id_U, head_U, size_2, inverse_N),
            shapes=(claim_loop, size, scratch.ids, id_N.dtype),
        )  # fmt: skip
    return DeviceKeys(table_U, id_U, head_U, size_2, inverse_N, check)
