"""Row-wise Adagrad update: one accumulator a row.  U unique rows, D weights a row; state: the accumulator [1].

    g'   = g + weight_decay * w
    acc' = acc + mean over d of g' * g'
    w'   = w - lr / (sqrt(acc') + eps) * g'

The mean is summed in float32. On the CPU in 16 lanes: lane l takes d = l, l + 16, ..., the lanes are added as
`sum_lanes` does it, and then come the last D % 16 weights. On the GPU by each thread of the row's group over its own
weights and then over the threads, in that order, so that acc' differs by at most D * 2^-23 of itself.

Reference: Mudigere et al. Software-Hardware Co-design for Fast and Scalable Training of Deep Learning
Recommendation Models. ISCA 2022 (arXiv:2104.05158); FBGEMM's EXACT_ROWWISE_ADAGRAD.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, cuda, load, rule, store
from oneemb.kernels.jit_code import from_float32, keep_rolled, to_float32
from oneemb.kernels.jit_lanes import LANES, load_lanes, same_lanes, store_lanes, sum_lanes
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.reduce_grads_cuda import plus
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.row_update_cuda import given as gradient

__all__ = ["row_wise_rate", "row_wise_square", "row_wise_step", "update_row_wise_adagrad"]


@rule
def row_wise_square(w: Number, g: Number, weight_decay: Number) -> Number:
    """One weight's share of the row's sum of squares."""
    g = l2_grad(w, g, weight_decay)
    return g * g


@rule
def row_wise_rate(acc: Number, square_sum: Number, dim: Number, lr: Number, eps: Number) -> tuple:
    """Returns acc' and the row's rate."""
    acc = acc + square_sum / dim
    return acc, lr / (math.sqrt(acc) + eps)


@rule
def row_wise_step(w: Number, g: Number, rate: Number, weight_decay: Number) -> Number:
    return w - rate * l2_grad(w, g, weight_decay)


@cpu
def _row_wise_adagrad_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, eps: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    rest = dim - dim % LANES
    g_RD, rate_R = np.empty((ROWS, dim), np.float32), np.empty(ROWS, np.float32)
    for first in range(begin, end, ROWS):
        rows = row_grads(grads, first, end, row_SW, slot_U, g_RD)
        for r in range(rows):
            keep_rolled()
            s = slot_U[first + r]
            squares = same_lanes(np.float32(0))
            for d in range(0, rest, LANES):
                keep_rolled()
                squares = squares + row_wise_square(load_lanes(weight_SX, s, d), load_lanes(g_RD, r, d), weight_decay)
            square_sum = sum_lanes(squares)
            for d in range(rest, dim):
                square_sum += row_wise_square(to_float32(weight_SX[s, d]), g_RD[r, d], weight_decay)
            acc, rate_R[r] = row_wise_rate(row_SW[s, state_begin], square_sum, np.float32(dim), lr, eps)
            row_SW[s, state_begin] = acc
        for r in range(rows):
            keep_rolled()
            s = slot_U[first + r]
            for d in range(0, rest, LANES):
                keep_rolled()
                w = row_wise_step(load_lanes(weight_SX, s, d), load_lanes(g_RD, r, d), rate_R[r], weight_decay)
                store_lanes(weight_SX, s, d, w)
            for d in range(rest, dim):
                w = row_wise_step(to_float32(weight_SX[s, d]), g_RD[r, d], rate_R[r], weight_decay)
                weight_SX[s, d] = from_float32(w, weight_SX[s, d])


V = 1
_BLOCK_MAX = 256


@cuda
def row_wise_adagrad_loop(
    weight_SX: Array, row_SW: Array, slot_U: Array, grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array,
    part_U1: Array, part_PD: Array, go_1: Array, state_begin: Number, scalars: tuple,
) -> None:  # fmt: skip
    lr, eps, weight_decay = scalars
    share = cuda.shared.array(_BLOCK_MAX, np.float32)  # each thread's share of its row's sum
    w_V = cuda.local.array(V, np.float32)
    g_V = cuda.local.array(V, np.float32)
    dim = grad_NX.shape[1]
    lane, lanes, groups = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockDim.y
    # All threads of a block make the same number of turns, since they wait for each other.
    first = cuda.blockIdx.x * groups
    while first < slot_U.shape[0] and go_1[0] != 0:
        u = first + cuda.threadIdx.y
        own = cuda.threadIdx.y * lanes
        if u < slot_U.shape[0]:
            share_sum = np.float32(0)
            d = lane * V
            while d < dim:
                load(w_V, weight_SX, slot_U[u], d)
                gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U1, part_PD, u, d)
                for i in range(V):
                    share_sum = plus(share_sum, row_wise_square(w_V[i], g_V[i], weight_decay))
                d += lanes * V
            share[own + lane] = share_sum
        cuda.syncthreads()
        if u < slot_U.shape[0]:
            s = slot_U[u]
            square_sum = np.float32(0)
            for k in range(lanes):
                square_sum = plus(square_sum, share[own + k])
            acc, rate = row_wise_rate(row_SW[s, state_begin], square_sum, np.float32(dim), lr, eps)
            d = lane * V
            while d < dim:
                load(w_V, weight_SX, s, d)
                gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U1, part_PD, u, d)
                for i in range(V):
                    w_V[i] = row_wise_step(w_V[i], g_V[i], rate, weight_decay)
                store(weight_SX, s, d, w_V)
                d += lanes * V
        cuda.syncthreads()  # the old accumulator has been read by all, and so have the shares
        if u < slot_U.shape[0] and lane == 0:
            row_SW[slot_U[u], state_begin] = acc
        first += cuda.gridDim.x * groups


def update_row_wise_adagrad(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    eps: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of row-wise Adagrad, in place, on the rows of slot_U.

    A new row's state holds the initial accumulator value.
    """
    loops.update_rows(
        _row_wise_adagrad_cpu, row_wise_adagrad_loop, weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(eps), np.float32(weight_decay),
        state_width=1,
    )  # fmt: skip
