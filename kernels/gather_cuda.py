"""Copies rows between a slab and batch arrays on the GPU, and pools them.  S slots, N ids, U keys, P bags, D weights.

Copies move bits, 16 bytes at a time where every row is aligned to that. A group of threads shares a row.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from oneemb.kernels.jit import cuda, load, move, rule, store

if TYPE_CHECKING:
    from oneemb.kernels.launch import Gpu

__all__ = ["copy_rows_in_cuda", "copy_rows_out_cuda", "gather_cuda", "pool_cuda"]

V = 1  # elements a thread takes at a time; `at(V=...)` sets it


@cuda
def gather_loop(weight_SX, slot_U, inverse_N, out_ND):
    """out_ND[n] = weights in slot slot_U[inverse_N[n]], zeros for padding."""
    dim = out_ND.shape[1]
    n = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while n < inverse_N.shape[0]:
        u = inverse_N[n]
        for d in range(cuda.threadIdx.x * V, dim, cuda.blockDim.x * V):
            if u < 0:
                for i in range(V):
                    out_ND[n, d + i] = 0
            else:
                move(out_ND, n, d, weight_SX, slot_U[u], d)
        n += cuda.gridDim.x * cuda.blockDim.y


def gather_cuda(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, inverse_N: torch.Tensor, out_ND: torch.Tensor, *, gpu: "Gpu"
) -> None:
    """out_ND[n] = the weights in slot `slot_U[inverse_N[n]]`, zeros where `inverse_N[n]` is -1."""
    from oneemb.kernels.launch import vector_width

    size, dim = out_ND.shape
    v = vector_width(dim, weight_SX, out_ND)
    gpu.run_rows(gather_loop.at(V=v), size, dim // v, weight_SX, slot_U, inverse_N, out_ND)


@cuda
def copy_out_loop(row_SW, slot_U, out_UW):
    """out_UW[u] = the row in slot slot_U[u]; a slab's rows may be wider."""
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0]:
        for w in range(cuda.threadIdx.x * V, out_UW.shape[1], cuda.blockDim.x * V):
            move(out_UW, u, w, row_SW, slot_U[u], w)
        u += cuda.gridDim.x * cuda.blockDim.y


@cuda
def copy_in_loop(row_SW, slot_U, row_UW):
    """The row in slot slot_U[u] = row_UW[u]."""
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0]:
        for w in range(cuda.threadIdx.x * V, row_UW.shape[1], cuda.blockDim.x * V):
            move(row_SW, slot_U[u], w, row_UW, u, w)
        u += cuda.gridDim.x * cuda.blockDim.y


def copy_rows_out_cuda(row_SW: torch.Tensor, slot_U: torch.Tensor, width: int, *, gpu: "Gpu") -> torch.Tensor:
    """The first `width` words of the rows in these slots: float32 [U, W], on the device."""
    from oneemb.kernels.launch import vector_width

    out_UW = gpu.empty(len(slot_U), width, dtype=torch.float32)
    v = vector_width(width, row_SW, out_UW)
    # As integers, so that no bit is taken for a number.
    gpu.run_rows(
        copy_out_loop.at(V=v), len(slot_U), width // v, row_SW.view(torch.int32), slot_U, out_UW.view(torch.int32)
    )
    return out_UW


def copy_rows_in_cuda(row_SW: torch.Tensor, slot_U: torch.Tensor, row_UW: torch.Tensor, *, gpu: "Gpu") -> None:
    """Put rows, float32 [U, W] on the device, into distinct slots of a slab at least as wide."""
    from oneemb.kernels.launch import vector_width

    width = row_UW.shape[1]
    v = vector_width(width, row_SW, row_UW)
    gpu.run_rows(
        copy_in_loop.at(V=v), len(slot_U), width // v, row_SW.view(torch.int32), slot_U, row_UW.view(torch.int32)
    )


@rule
def _weighed(sum, weight, x):
    return sum + weight * x


@rule
def _mean(sum, count):
    return sum / np.float32(count)


@cuda
def pool_loop(weight_SX, slot_U, inverse_N, begin_P1, scale_N, mean, out_PD):
    """out_PD[p] = sum of scale_N[n] * weights of id n over n in begin_P1[p] .. begin_P1[p + 1], in that order, float32.

    scale_N of length 0 stands for ones. `mean` divides by the number of ids that are not padding.
    """
    sum_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    dim = out_PD.shape[1]
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < begin_P1.shape[0] - 1:
        for d in range(cuda.threadIdx.x * V, dim, cuda.blockDim.x * V):
            for i in range(V):
                sum_V[i] = 0
            count = 0
            for n in range(begin_P1[p], begin_P1[p + 1]):
                u = inverse_N[n]
                if u >= 0:
                    count += 1
                    load(x_V, weight_SX, slot_U[u], d)
                    scale = scale_N[n] if scale_N.shape[0] > 0 else np.float32(1)
                    for i in range(V):
                        sum_V[i] = _weighed(sum_V[i], scale, x_V[i])
            if mean and count > 0:
                for i in range(V):
                    sum_V[i] = _mean(sum_V[i], count)
            store(out_PD, p, d, sum_V)
        p += cuda.gridDim.x * cuda.blockDim.y


def pool_cuda(
    weight_SX: torch.Tensor,
    slot_U: torch.Tensor,
    inverse_N: torch.Tensor,
    begin_P1: torch.Tensor,
    scale_N: torch.Tensor | None,
    out_PD: torch.Tensor,
    *,
    mean: bool,
    gpu: "Gpu",
) -> None:
    """The rows of each bag summed in float32, in the order of its ids, rounded once to the dtype of `out_PD`.

    Args:
        inverse_N: int64 [N], the key of each id; -1, padding, counts for nothing.
        begin_P1: int64 [P + 1], where each bag begins among the ids.
        scale_N: float32 [N], what each row is multiplied with; None = 1.
        out_PD: [P, D], bits of float32, float16 or bfloat16, of the dtype of `weight_SX`.
        mean: divide by the number of ids; a bag without any is zeros.
    """
    from oneemb.kernels.launch import vector_width

    bags, dim = out_PD.shape
    v = vector_width(dim, weight_SX, out_PD)
    scale_N = gpu.empty(0, dtype=torch.float32) if scale_N is None else scale_N
    gpu.run_rows(
        pool_loop.at(V=v), bags, dim // v, weight_SX, slot_U, inverse_N, begin_P1, scale_N, mean, out_PD
    )  # fmt: skip
