"""LARS row update: SGD at a rate of the row's own.  U unique rows, D weights a row; state: buf [D].

    rate = lr * eta * |w| / (|g| + weight_decay * |w|)         |.| = the root of the sum of squares over the row
    buf' = momentum * buf + rate * (g + weight_decay * w)
    w'   = w - buf'

The rate is 0 where it would be 0 / 0. A row of zeros stays one, as long as its buffer is 0.

Sums over a row are those of `square_sum` on the CPU; on the GPU each thread of the row's group sums its own weights and
then come the threads, in order, so that a sum differs by at most D * 2^-23 of itself.

Reference: You, Gitman, Ginsburg. Large Batch Training of Convolutional Networks (arXiv:1708.03888); FBGEMM's LARS_SGD,
whose rate without a gradient and without decay is NaN.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad, square_sum
from oneemb.kernels.row_update_cuda import row_update

__all__ = ["lars", "lars_rate", "lars_squares", "update_lars"]


@rule
def lars_squares(
    w: Number,
    g: Number,
    lr_eta: Number,
    momentum: Number,
    weight_decay: Number,
) -> tuple:
    """One weight's terms of the row's two sums."""
    return w * w, g * g


@rule
def lars_rate(
    w_square_sum: Number, g_square_sum: Number, dim: Number, row_state: Number,
    lr_eta: Number, momentum: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns row_state, which there is none of, and the row's rate."""
    w_norm = math.sqrt(w_square_sum)
    norm = math.sqrt(g_square_sum) + weight_decay * w_norm
    return row_state, lr_eta * w_norm / norm if norm != 0 else norm


@rule
def lars(
    w: Number, buf: Number, g: Number, rate: Number, lr_eta: Number, momentum: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', buf'."""
    buf = momentum * buf + rate * l2_grad(w, g, weight_decay)
    return w - buf, buf


@cpu
def _lars_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr_eta: Number, momentum: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            buf_D = row_SW[s, state_begin : state_begin + dim]
            _, rate = lars_rate(
                square_sum(weight_SX, s, dim), square_sum(g_RD, r, dim), np.float32(dim), np.float32(0),
                lr_eta, momentum, weight_decay,
            )  # fmt: skip
            for d in range(dim):
                w, buf_D[d] = lars(to_float32(w_D[d]), buf_D[d], g_RD[r, d], rate, lr_eta, momentum, weight_decay)
                w_D[d] = from_float32(w, w_D[d])


def update_lars(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    eta: float,
    momentum: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of LARS, in place, on the rows of slot_U. A new row's state is zeros."""
    loops.update_rows(
        _lars_cpu, row_update(lars_squares, lars_rate, lars, states=1, of_states=False, row_state=False),
        weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr * eta), np.float32(momentum), np.float32(weight_decay),
        state_width=grad_UD.shape[1],
    )  # fmt: skip
