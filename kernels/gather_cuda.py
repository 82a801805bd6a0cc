"""Copies rows between a slab and batch arrays on the GPU.  S slots, N ids, U keys, D weights.

Copies move bits, 16 bytes at a time where every row is aligned to that. A group of threads shares a row.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from oneemb.kernels.arrays import Array, vector_width
from oneemb.kernels.hash_index_cuda import PLACE_MASK, seek
from oneemb.kernels.init_rows_cuda import ListedSlots
from oneemb.kernels.jit import cuda, move
from oneemb.kernels.launch import Gpu, Loops

if TYPE_CHECKING:
    from oneemb.kernels.later import Later
    from oneemb.kernels.unique_keys_cuda import DeviceKeys

V = 1  # elements a thread takes at a time; `at(V=...)` sets it


@cuda
def gather_loop(weight_SX: Array, slot_U: Array, inverse_N: Array, out_ND: Array) -> None:
    """out_ND[n] = weights in slot slot_U[inverse_N[n]], zeros for padding."""
    dim = out_ND.shape[1]
    n = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while n < inverse_N.shape[0]:
        u = inverse_N[n]
        d = cuda.threadIdx.x * V
        while d < dim:
            if u < 0:
                for i in range(V):
                    out_ND[n, d + i] = 0
            else:
                move(out_ND, n, d, weight_SX, slot_U[u], d)
            d += cuda.blockDim.x * V
        n += cuda.gridDim.x * cuda.blockDim.y


@cuda
def look_up_loop(
    cell_C2: Array, weight_SX: Array, table_U: Array, id_U: Array, head_U: Array, size_2: Array, inverse_N: Array,
    inserted_2: Array, out_ND: Array, count_5: Array, absent_R: Array, key_R: Array,
) -> None:  # fmt: skip
    """out_ND[n] = weights of key u = inverse_N[n], zeros for padding. u = n if the length of inverse_N is 0.

    An id whose key has no row is listed, in any order: its place n in absent_R, u in key_R.
    count_5: number of ids that are listed, counted up from 0; then four numbers as count_4 of `acquire_loop`, where a
    key without a row counts once if head_U says where each key is first, else at each of its ids.
    """
    dim = out_ND.shape[1]
    n = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if n == 0 and cuda.threadIdx.x == 0:
        count_5[2] = size_2[0]
        count_5[3] = size_2[1]
        count_5[4] = inserted_2[1]
    while n < out_ND.shape[0]:
        u = inverse_N[n] if inverse_N.shape[0] > 0 else np.int64(n)
        c = seek(cell_C2, table_U[u], id_U[u]) if u >= 0 else np.int64(-1)
        if c >= 0:
            s = (cell_C2[c, 1] & PLACE_MASK) - 1
            d = cuda.threadIdx.x * V
            while d < dim:
                move(out_ND, n, d, weight_SX, s, d)
                d += cuda.blockDim.x * V
        elif u < 0:
            d = cuda.threadIdx.x * V
            while d < dim:
                for i in range(V):
                    out_ND[n, d + i] = 0
                d += cuda.blockDim.x * V
        elif cuda.threadIdx.x == 0:
            r = cuda.atomic.add(count_5, 0, 1)
            absent_R[r] = n
            key_R[r] = u
            if head_U.shape[0] == 0 or head_U[u] == n:
                cuda.atomic.add(count_5, 1, 1)
        n += cuda.gridDim.x * cuda.blockDim.y


def look_up_cuda(
    cell_C2: torch.Tensor, weight_SX: torch.Tensor, keys: "DeviceKeys", inserted_2: torch.Tensor, out_ND: torch.Tensor,
    later: "Later", *, gpu: Gpu,
) -> ListedSlots:  # fmt: skip
    """Write the weights of each id of a batch into out_ND, zeros for padding, from the rows that an index finds.
    Returns the rows of out_ND whose keys have no row: `init_rows_cuda` writes them, and its loop tells `later` count_5
    of `look_up_loop`."""
    size, dim = out_ND.shape
    absent_R, key_R = gpu.empty(2, size, dtype=torch.int64).unbind()
    count_5 = gpu.filled(5)
    v, head_U, inverse_N = vector_width(dim, weight_SX, out_ND), keys.head_U, keys.inverse_N
    gpu.run_rows(
        look_up_loop.at(V=v), size, dim // v, cell_C2, weight_SX, keys.table_U, keys.id_U, head_U, keys.size_2,
        inverse_N, inserted_2, out_ND, count_5, absent_R, key_R,
        shapes=(
            cell_C2.shape, weight_SX.shape, weight_SX.dtype, keys.id_U.shape, head_U.shape, inverse_N.shape, dim
        ),
    )  # fmt: skip
    return ListedSlots(absent_R, key_R, count_5, later.told_X)


def _gather_loops(size: int, dim: int, weight_SX: torch.Tensor, gpu: Gpu) -> Loops:
    v = vector_width(dim, weight_SX)
    return ((gather_loop.at(V=v), gpu.grid_of_rows(size, dim // v)),)


def gather_cuda(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, inverse_N: torch.Tensor, out_ND: torch.Tensor, *, gpu: Gpu
) -> None:
    """out_ND[n] = the weights in slot `slot_U[inverse_N[n]]`, zeros where `inverse_N[n]` is -1. out_ND: rows from
    the beginning of memory that torch has allocated, which is aligned."""
    size, dim = out_ND.shape
    if size > 0:
        gpu.run_in_turn(
            lambda: _gather_loops(size, dim, weight_SX, gpu), (weight_SX, slot_U, inverse_N, out_ND),
            shapes=(
                gather_loop, size, dim, weight_SX.shape, weight_SX.dtype, weight_SX.data_ptr() % 16,
                slot_U.numel(), inverse_N.dtype,
            ),
        )  # fmt: skip


@cuda
def copy_out_loop(row_SW: Array, slot_U: Array, out_UW: Array) -> None:
    """out_UW[u] = the row in slot slot_U[u]; a slab's rows may be wider."""
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0]:
        w = cuda.threadIdx.x * V
        while w < out_UW.shape[1]:
            move(out_UW, u, w, row_SW, slot_U[u], w)
            w += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


@cuda
def copy_in_loop(row_SW: Array, slot_U: Array, row_UW: Array) -> None:
    """The row in slot slot_U[u] = row_UW[u]; slot -1 is none."""
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0]:
        w = cuda.threadIdx.x * V if slot_U[u] >= 0 else row_UW.shape[1]
        while w < row_UW.shape[1]:
            move(row_SW, slot_U[u], w, row_UW, u, w)
            w += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


def copy_rows_out_cuda(row_SW: torch.Tensor, slot_U: torch.Tensor, width: int, *, gpu: Gpu) -> torch.Tensor:
    """The first `width` words of the rows in these slots: float32 [U, W], on the device."""
    out_UW = gpu.empty(len(slot_U), width, dtype=torch.float32)
    v = vector_width(width, row_SW, out_UW)
    # As integers, so that no bit is taken for a number.
    gpu.run_rows(
        copy_out_loop.at(V=v), len(slot_U), width // v, row_SW.view(torch.int32), slot_U, out_UW.view(torch.int32)
    )
    return out_UW


def copy_rows_in_cuda(row_SW: torch.Tensor, slot_U: torch.Tensor, row_UW: torch.Tensor, *, gpu: Gpu) -> None:
    """Put rows, float32 [U, W] on the device, into distinct slots of a slab at least as wide; slot -1 is none."""
    width = row_UW.shape[1]
    v = vector_width(width, row_SW, row_UW)
    gpu.run_rows(
        copy_in_loop.at(V=v), len(slot_U), width // v, row_SW.view(torch.int32), slot_U, row_UW.view(torch.int32)
    )
