"""Partial row-wise Adam update: one second moment a row.  U unique rows, D weights a row; state: m [D], then v [1].

    m' = beta1 * m + (1 - beta1) * g
    v' = beta2 * v + (1 - beta2) * mean over d of g * g
    w' = w - lr * (m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps) + weight_decay * w)

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile.

Sums over a row are those of `square_sum` on the CPU; on the GPU each thread of the row's group sums its own weights and
then come the threads, in order, so that a sum differs by at most D * 2^-23 of itself.

Reference: FBGEMM's PARTIAL_ROWWISE_ADAM.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import square_sum
from oneemb.kernels.row_update_cuda import row_update

__all__ = [
    "partial_row_wise_adam", "partial_row_wise_root", "partial_row_wise_square", "update_partial_row_wise_adam",
]  # fmt: skip


@rule
def partial_row_wise_square(
    w: Number, g: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """One weight's terms of two sums, of which the first is not used."""
    return np.float32(0), g * g


@rule
def partial_row_wise_root(
    unused: Number, square_sum: Number, dim: Number, v: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns v' and what the row's first moments are divided by."""
    v = beta2 * v + beta2_rest * (square_sum / dim)
    return v, math.sqrt(v / correction2) + eps


@rule
def partial_row_wise_adam(
    w: Number, m: Number, g: Number, root: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', m'."""
    m = beta1 * m + beta1_rest * g
    move = m / correction1 / root
    return w - lr * (move + weight_decay * w if weight_decay != 0 else move), m


@cpu
def _partial_row_wise_adam_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            m_D = row_SW[s, state_begin : state_begin + dim]
            row_SW[s, state_begin + dim], root = partial_row_wise_root(
                np.float32(0), square_sum(g_RD, r, dim), np.float32(dim), row_SW[s, state_begin + dim],
                lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay,
            )  # fmt: skip
            for d in range(dim):
                w, m_D[d] = partial_row_wise_adam(
                    to_float32(w_D[d]), m_D[d], g_RD[r, d], root,
                    lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def update_partial_row_wise_adam(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of partial row-wise Adam, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    on_cuda = row_update(
        partial_row_wise_square, partial_row_wise_root, partial_row_wise_adam,
        states=1, of_states=False, row_state=True,
    )  # fmt: skip
    loops.update_rows(
        _partial_row_wise_adam_cpu, on_cuda, weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        np.float32(1 - beta1**step), np.float32(1 - beta2**step), np.float32(eps), np.float32(weight_decay),
        state_width=grad_UD.shape[1] + 1,
    )  # fmt: skip
