"""LARS row update: SGD with a rate for each row.  U unique rows, D weights a row; state: buf [D].

    rate = lr * eta * |w| / (|g| + weight_decay * |w|)         |.| = the root of the sum of squares over the row
    buf' = momentum * buf + rate * (g + weight_decay * w)
    w'   = w - buf'

The rate is 0 if it would be 0 / 0. A row of zeros stays zero as long as its buffer is 0.

`rule_loops` says in which order sums over a row run on the CPU. On the GPU each thread of the row's group sums its own
weights, and then these sums are added in the order of threads. The relative difference is at most D * 2^-23.

Reference: You, Gitman, Ginsburg. Large Batch Training of Convolutional Networks (arXiv:1708.03888); FBGEMM's LARS_SGD,
whose rate without a gradient and without decay is NaN.
"""

import math

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import row_loops, row_update


@rule
def lars_squares(w: Number, g: Number, lr_eta: Number, momentum: Number, weight_decay: Number) -> tuple:
    """The terms that one weight adds to the row's two sums."""
    return w * w, g * g


@rule
def lars_rate(
    w_square_sum: Number, g_square_sum: Number, dim: Number, row_state: Number,
    lr_eta: Number, momentum: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns row_state, which LARS does not use, and the rate of the row. lr_eta is lr * eta."""
    w_norm = math.sqrt(w_square_sum)
    norm = math.sqrt(g_square_sum) + weight_decay * w_norm
    return row_state, lr_eta * w_norm / norm if norm != 0 else norm


@rule
def lars(
    w: Number, buf: Number, g: Number, rate: Number, lr_eta: Number, momentum: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """The step of one weight: returns w', buf'. `rate` is the row's rate, which `lars_rate` has computed; lr_eta, of
    which the rate is made, is not used any more."""
    buf = momentum * buf + rate * l2_grad(w, g, weight_decay)
    return w - buf, buf


_LOOPS = row_loops(lars, lars_rate, shares=lars_squares)


@row_update
def update_lars(step: int, *, lr: float, eta: float, momentum: float, weight_decay: float) -> tuple[RowLoops, tuple]:
    """One step of LARS. A new row's state is zeros."""
    return _LOOPS, (lr * eta, momentum, weight_decay)
