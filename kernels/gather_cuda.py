"""Copies rows between a slab and batch arrays on the GPU.  S slots, N ids, U keys, D weights.

Copies move bits, 16 bytes at a time where every row is aligned to that. A group of threads shares a row.
"""

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import cuda, move
from oneemb.kernels.launch import Gpu, vector_width

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
def gather_or_loop(weight_SX: Array, slot_U: Array, other_UX: Array, inverse_N: Array, out_ND: Array) -> None:
    """out_ND[n] = the weights of key u = inverse_N[n] in slot slot_U[u], or those in other_UX[u] where that is -1;
    zeros for padding. u = n if the length of inverse_N is 0."""
    dim = out_ND.shape[1]
    n = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while n < out_ND.shape[0]:
        u = inverse_N[n] if inverse_N.shape[0] > 0 else np.int64(n)
        s = slot_U[u] if u >= 0 else u
        d = cuda.threadIdx.x * V
        while d < dim:
            if u < 0:
                for i in range(V):
                    out_ND[n, d + i] = 0
            elif s < 0:
                move(out_ND, n, d, other_UX, u, d)
            else:
                move(out_ND, n, d, weight_SX, s, d)
            d += cuda.blockDim.x * V
        n += cuda.gridDim.x * cuda.blockDim.y


def gather_or_cuda(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, other_UX: torch.Tensor, inverse_N: torch.Tensor,
    out_ND: torch.Tensor, *, gpu: Gpu,
) -> None:  # fmt: skip
    """Like `gather_cuda`, with row u of `other_UX`, [U, X], as the weights of a key u without a slot (-1). inverse_N of
    length 0: id n is key n."""
    size, dim = out_ND.shape
    v = vector_width(dim, weight_SX, other_UX, out_ND)
    gpu.run_rows(gather_or_loop.at(V=v), size, dim // v, weight_SX, slot_U, other_UX, inverse_N, out_ND)


def gather_cuda(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, inverse_N: torch.Tensor, out_ND: torch.Tensor, *, gpu: Gpu
) -> None:
    """out_ND[n] = the weights in slot `slot_U[inverse_N[n]]`, zeros where `inverse_N[n]` is -1."""
    size, dim = out_ND.shape
    v = vector_width(dim, weight_SX, out_ND)
    gpu.run_rows(gather_loop.at(V=v), size, dim // v, weight_SX, slot_U, inverse_N, out_ND)


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
