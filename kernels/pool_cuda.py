"""Pools the weights of bags of ids on the GPU, to the bits of oneemb.kernels.pool.  N ids, P bags, D weights, V weights
that a thread handles at once, X values of a row as it is stored.

In every loop that takes row_P, row row_P[p] of the output and of its gradient belongs to bag p, or row p if row_P is
empty (`row_of_bag`). An id n of padding has inverse_N[n] = -1 and is left out.

The rows of the ids are not copied: a group of threads walks a bag in batch order, 16 bytes of a row at a time. The
device also checks offsets and tables. Nothing here waits for the result: it lies beside the number of unique keys, and
the acquisition reads both in one go.
"""

import numpy as np
import torch

from oneemb.kernels.arrays import Array, Bags, vector_width
from oneemb.kernels.jit import Number, cuda, load, rule, store
from oneemb.kernels.launch import Gpu
from oneemb.kernels.reduce_grads_cuda import plus

V = 1  # elements a thread takes at a time; `at(V=...)` sets it

# Sums kept apart for each id by `scale_grads`, as on the CPU, and all those of a block.
_LANES = 16
_BLOCK_LANES = 256


@rule
def weighed(sum: Number, scale: Number, x: Number) -> Number:
    return sum + scale * x


@rule
def mean_scale(count: Number) -> Number:
    """The scale that makes the sum of a bag with this many ids the mean."""
    return np.float32(1) / np.float32(max(count, 1))


@rule
def row_of_bag(row_P: Array, p: Number) -> Number:
    """Row of the output, and of its gradient, that belongs to bag p: row_P[p], or p if row_P is empty."""
    return row_P[p] if row_P.shape[0] > 0 else p


@cuda.inner
def bag_of(offset_P1: Array, i: Number) -> Number:
    """The bag that holds id i: the last p with offset_P1[p] <= i."""
    low = 0
    high = offset_P1.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if offset_P1[middle] <= i:
            low = middle
        else:
            high = middle
    return low


@cuda
def bags_loop(
    offset_P1: Array, table_P: Array, row_P: Array, tables: Number, bag_N: Array, table_N: Array, size_2: Array
) -> None:
    """bag_N, table_N = the row of the bag of each id, and the table: table_P[p] for an id of bag p, or p % `tables` if
    table_P is empty.

    size_2[1] turns 1 if offsets do not begin with 0, decrease, or do not end with N, or if a table is not from 0 to
    `tables` - 1.
    """
    ids = bag_N.shape[0]
    bags = offset_P1.shape[0] - 1
    i = cuda.grid(1)
    while i < ids or i <= bags:
        if i < ids:
            p = bag_of(offset_P1, i)
            bag_N[i] = row_of_bag(row_P, p)
            table_N[i] = table_P[p] if table_P.shape[0] > 0 else p % tables
        if i <= bags:
            if offset_P1[i] < (offset_P1[i - 1] if i > 0 else 0) or (i == 0 and offset_P1[0] != 0):
                size_2[1] = 1
            if i == bags and offset_P1[bags] != ids:
                size_2[1] = 1
            if i < table_P.shape[0] and (table_P[i] < 0 or table_P[i] >= tables):
                size_2[1] = 1
        i += cuda.gridsize(1)


def bags_of_cuda(
    offset_P1: torch.Tensor, table_P: torch.Tensor | None, row_P: torch.Tensor | None, tables: int, ids: int,
    size_2: torch.Tensor, *, gpu: Gpu,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The row of the bag, int64 [N], and the table, int32 [N], of each of N = `ids` ids.

    Args:
        offset_P1: int64 [P + 1].
        table_P: int32 [P], the table of each bag; None = bag p is of table p % `tables`.
        row_P: int32 [P], the row of each bag; None = row p.
        size_2: int64 [2]; its second value turns 1 where offsets or tables are invalid. The bags and tables of such ids
            are in range and mean nothing.
    """
    bag_N, table_N = gpu.empty(ids, dtype=torch.int64), gpu.empty(ids, dtype=torch.int32)
    table_P = gpu.empty(0, dtype=torch.int32) if table_P is None else table_P
    row_P = _rows(row_P, gpu)
    gpu.run(bags_loop, max(ids, len(offset_P1)), offset_P1, table_P, row_P, tables, bag_N, table_N, size_2)
    return bag_N, table_N


def _rows(row_P: torch.Tensor | None, gpu: Gpu) -> torch.Tensor:
    """The argument of a loop: an empty array for None."""
    return gpu.empty(0, dtype=torch.int32) if row_P is None else row_P


@cuda
def mean_scales_loop(offset_P1: Array, inverse_N: Array, scale_N: Array) -> None:
    """scale_N[n] = 1 / (ids of n's bag that are not padding)."""
    p = cuda.grid(1)
    while p < offset_P1.shape[0] - 1:
        count = 0
        for n in range(offset_P1[p], offset_P1[p + 1]):
            if inverse_N[n] >= 0:
                count += 1
        for n in range(offset_P1[p], offset_P1[p + 1]):
            scale_N[n] = mean_scale(count)
        p += cuda.gridsize(1)


def mean_scales_cuda(offset_P1: torch.Tensor, inverse_N: torch.Tensor, *, gpu: Gpu) -> torch.Tensor:
    """The scales that make each bag's sum the mean: float32 [N]."""
    scale_N = gpu.empty(len(inverse_N), dtype=torch.float32)
    gpu.run(mean_scales_loop, len(offset_P1) - 1, offset_P1, inverse_N, scale_N)
    return scale_N


@cuda
def pool_loop(
    weight_SX: Array, slot_U: Array, inverse_N: Array, offset_P1: Array, row_P: Array, scale_N: Array, out_PD: Array
) -> None:
    """out_PD[row_of_bag(row_P, p)] = sum of scale_N[n] * weights of id n over the ids n of bag p that are not padding,
    in batch order, in float32. If scale_N is empty, all scales are 1."""
    sum_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    dim = out_PD.shape[1]
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < offset_P1.shape[0] - 1:
        d = cuda.threadIdx.x * V
        while d < dim:
            for i in range(V):
                sum_V[i] = 0
            for n in range(offset_P1[p], offset_P1[p + 1]):
                u = inverse_N[n]
                if u >= 0:
                    load(x_V, weight_SX, slot_U[u], d)
                    scale = scale_N[n] if scale_N.shape[0] > 0 else np.float32(1)
                    for i in range(V):
                        sum_V[i] = weighed(sum_V[i], scale, x_V[i])
            store(out_PD, row_of_bag(row_P, p), d, sum_V)
            d += cuda.blockDim.x * V
        p += cuda.gridDim.x * cuda.blockDim.y


def pool_cuda(
    weight_SX: torch.Tensor,
    slot_U: torch.Tensor,
    inverse_N: torch.Tensor,
    bags: Bags,
    scale_N: torch.Tensor | None,
    out_PD: torch.Tensor,
    *,
    gpu: Gpu,
) -> None:
    """The rows of each bag summed in float32, in the order of its ids, rounded once to the dtype of `out_PD`; see
    `oneemb.kernels.pool.pool`."""
    rows, dim = out_PD.shape
    v = vector_width(dim, weight_SX, out_PD)
    scale_N = gpu.empty(0, dtype=torch.float32) if scale_N is None else scale_N
    offset_P1, row_P = bags.offset_P1, _rows(bags.row_P, gpu)
    gpu.run_rows(pool_loop.at(V=v), rows, dim // v, weight_SX, slot_U, inverse_N, offset_P1, row_P, scale_N, out_PD)


@cuda
def pool_max_loop(
    weight_SX: Array, slot_U: Array, inverse_N: Array, offset_P1: Array, row_P: Array, out_PD: Array, argmax_PD: Array
) -> None:
    """out_PD[row_of_bag(row_P, p)] = elementwise maximum of the weights of the ids of bag p that are not padding.
    argmax_PD, in the same row = position within the bag, from 0, of the id that gave each maximum; -1 for a bag that
    holds nothing but padding, whose maxima are 0.

    The first of equal weights is the maximum. A NaN of the first id is the maximum; a NaN of a later id is passed over.
    """
    max_V = cuda.local.array(V, np.float32)
    place_V = cuda.local.array(V, np.int32)
    x_V = cuda.local.array(V, np.float32)
    dim = out_PD.shape[1]
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < offset_P1.shape[0] - 1:
        begin, row = offset_P1[p], row_of_bag(row_P, p)
        d = cuda.threadIdx.x * V
        while d < dim:
            for i in range(V):
                max_V[i] = 0
                place_V[i] = -1
            for n in range(begin, offset_P1[p + 1]):
                u = inverse_N[n]
                if u >= 0:
                    load(x_V, weight_SX, slot_U[u], d)
                    for i in range(V):
                        if place_V[i] < 0 or x_V[i] > max_V[i]:
                            max_V[i] = x_V[i]
                            place_V[i] = n - begin
            store(out_PD, row, d, max_V)
            for i in range(V):
                argmax_PD[row, d + i] = place_V[i]
            d += cuda.blockDim.x * V
        p += cuda.gridDim.x * cuda.blockDim.y


def pool_max_cuda(
    weight_SX: torch.Tensor,
    slot_U: torch.Tensor,
    inverse_N: torch.Tensor,
    bags: Bags,
    out_PD: torch.Tensor,
    argmax_PD: torch.Tensor,
    *,
    gpu: Gpu,
) -> None:
    """The elementwise maximum of the rows of each bag, and its ids' places; see `oneemb.kernels.pool.pool_max`."""
    rows, dim = out_PD.shape
    v = vector_width(dim, weight_SX, out_PD)
    offset_P1, row_P = bags.offset_P1, _rows(bags.row_P, gpu)
    gpu.run_rows(
        pool_max_loop.at(V=v), rows, dim // v, weight_SX, slot_U, inverse_N, offset_P1, row_P, out_PD, argmax_PD
    )


@cuda
def spread_max_grads_loop(offset_P1: Array, row_P: Array, argmax_PD: Array, grad_PX: Array, out_NX: Array) -> None:
    """out_NX[n, d] = grad_PX[row_of_bag(row_P, p), d] if id n gave maximum d of its bag p, otherwise zero."""
    grad_V = cuda.local.array(V, np.float32)
    place_V = cuda.local.array(V, np.int32)
    x_V = cuda.local.array(V, np.float32)
    dim = grad_PX.shape[1]
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < grad_PX.shape[0]:
        begin, row = offset_P1[p], row_of_bag(row_P, p)
        d = cuda.threadIdx.x * V
        while d < dim:
            load(grad_V, grad_PX, row, d)
            for i in range(V):
                place_V[i] = argmax_PD[row, d + i]
            for n in range(begin, offset_P1[p + 1]):
                for i in range(V):
                    x_V[i] = grad_V[i] if place_V[i] == n - begin else np.float32(0)
                store(out_NX, n, d, x_V)
            d += cuda.blockDim.x * V
        p += cuda.gridDim.x * cuda.blockDim.y


def spread_max_grads_cuda(
    bags: Bags, argmax_PD: torch.Tensor, grad_PX: torch.Tensor, out_NX: torch.Tensor, *, gpu: Gpu
) -> None:
    """out_NX = gradients of ids, from the gradients grad_PX of their bags' maxima. Both hold the raw bits of float32,
    float16 or bfloat16."""
    rows, dim = grad_PX.shape
    v = vector_width(dim, grad_PX, out_NX)
    offset_P1, row_P = bags.offset_P1, _rows(bags.row_P, gpu)
    gpu.run_rows(spread_max_grads_loop.at(V=v), rows, dim // v, offset_P1, row_P, argmax_PD, grad_PX, out_NX)


@cuda
def scale_grads_loop(
    weight_SX: Array, slot_U: Array, inverse_N: Array, bag_N: Array, grad_PX: Array, out_N: Array
) -> None:
    """out_N[n] = sum over the D weights of id n, each times the number of its bag's gradient, in the CPU's order; 0 for
    padding. bag_N[n] is the row of the bag's gradient."""
    share = cuda.shared.array(_BLOCK_LANES, np.float32)
    w_V = cuda.local.array(V, np.float32)
    g_V = cuda.local.array(V, np.float32)
    dim = grad_PX.shape[1]
    groups = cuda.blockDim.y
    own = cuda.threadIdx.y * _LANES
    # All threads of a block make the same number of turns, since they wait for each other.
    first = cuda.blockIdx.x * groups
    while first < out_N.shape[0]:
        n = first + cuda.threadIdx.y
        if n < out_N.shape[0]:
            u = inverse_N[n]
            lane = cuda.threadIdx.x
            while lane < _LANES:
                lane_sum = np.float32(0)
                if u >= 0:
                    for d in range(lane, dim, _LANES):
                        load(w_V, weight_SX, slot_U[u], d)
                        load(g_V, grad_PX, bag_N[n], d)
                        lane_sum = weighed(lane_sum, w_V[0], g_V[0])
                share[own + lane] = lane_sum
                lane += cuda.blockDim.x
        cuda.syncthreads()
        if n < out_N.shape[0] and cuda.threadIdx.x == 0:
            total = np.float32(0)
            for lane in range(_LANES):
                total = plus(total, share[own + lane])
            out_N[n] = total
        cuda.syncthreads()  # the shares have been read
        first += cuda.gridDim.x * groups


def scale_grads_cuda(
    weight_SX: torch.Tensor,
    slot_U: torch.Tensor,
    inverse_N: torch.Tensor,
    bag_N: torch.Tensor,
    grad_PX: torch.Tensor,
    *,
    gpu: Gpu,
) -> torch.Tensor:
    """The gradient of scale_N: for each id its weights times its bag's gradient, summed over D. float32 [N]"""
    out_N = gpu.empty(len(inverse_N), dtype=torch.float32)
    gpu.run_rows(scale_grads_loop, len(out_N), _LANES, weight_SX, slot_U, inverse_N, bag_N, grad_PX, out_N)
    return out_N
