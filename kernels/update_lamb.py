"""LAMB row update: Adam, its step as long as the row.  U unique rows, D weights a row; state: m [D], then v [D].

    m' = beta1 * m + (1 - beta1) * g
    v' = beta2 * v + (1 - beta2) * g * g
    r  = m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps) + weight_decay * w
    w' = w - lr * |w| / |r| * r                                |.| = the root of the sum of squares over the row

Where r is 0 the row stays as it is. A row of zeros stays one for ever.

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile.

Sums over a row are those of `square_sum` on the CPU; on the GPU each thread of the row's group sums its own weights and
then come the threads, in order, so that a sum differs by at most D * 2^-23 of itself.

Reference: You et al. Large Batch Optimization for Deep Learning. ICLR 2020; FBGEMM's LAMB, where
a row whose r is 0 becomes NaN.
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

__all__ = ["lamb", "lamb_direction", "lamb_rate", "lamb_squares", "update_lamb"]


@rule
def lamb_direction(
    w: Number, m: Number, v: Number, g: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns r, m', v'."""
    m = beta1 * m + beta1_rest * g
    v = beta2 * v + beta2_rest * g * g
    r = m / correction1 / (math.sqrt(v / correction2) + eps)
    return r + weight_decay * w if weight_decay != 0 else r, m, v


@rule
def lamb_squares(
    w: Number, m: Number, v: Number, g: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """One weight's terms of the row's two sums."""
    r, _, _ = lamb_direction(
        w, m, v, g, lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay
    )  # fmt: skip
    return w * w, r * r


@rule
def lamb_rate(
    w_square_sum: Number, r_square_sum: Number, dim: Number, row_state: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns row_state, which there is none of, and the row's rate."""
    r_norm = math.sqrt(r_square_sum)
    return row_state, lr * (math.sqrt(w_square_sum) / r_norm) if r_norm != 0 else r_norm


@rule
def lamb(
    w: Number, m: Number, v: Number, g: Number, rate: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'."""
    r, m, v = lamb_direction(
        w, m, v, g, lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay
    )  # fmt: skip
    return w - rate * r, m, v


@cpu
def _lamb_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD, r_1D = np.empty((ROWS, dim), np.float32), np.empty((1, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            m_D = row_SW[s, state_begin : state_begin + dim]
            v_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            for d in range(dim):
                r_1D[0, d], m_D[d], v_D[d] = lamb_direction(
                    to_float32(w_D[d]), m_D[d], v_D[d], g_RD[r, d],
                    lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay,
                )  # fmt: skip
            _, rate = lamb_rate(
                square_sum(weight_SX, s, dim), square_sum(r_1D, 0, dim), np.float32(dim), np.float32(0),
                lr, beta1, beta1_rest, beta2, beta2_rest, correction1, correction2, eps, weight_decay,
            )  # fmt: skip
            for d in range(dim):
                w_D[d] = from_float32(to_float32(w_D[d]) - rate * r_1D[0, d], w_D[d])


def update_lamb(
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
    """One step of LAMB, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    loops.update_rows(
        _lamb_cpu, row_update(lamb_squares, lamb_rate, lamb, states=2, of_states=True, row_state=False),
        weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        np.float32(1 - beta1**step), np.float32(1 - beta2**step), np.float32(eps), np.float32(weight_decay),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
