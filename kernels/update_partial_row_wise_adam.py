"""Partial row-wise Adam update: one second moment a row.  U unique rows, D weights a row; state: m [D], then v [1].

    m' = beta1 * m + (1 - beta1) * g
    v' = beta2 * v + (1 - beta2) * mean over d of g * g
    w' = w - lr * (m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps) + weight_decay * w)

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient.

`rule_loops` says in which order sums over a row run on the CPU. On the GPU each thread of the row's group sums its own
weights, and then these sums are added in the order of threads. The relative difference is at most D * 2^-23.

Reference: FBGEMM's PARTIAL_ROWWISE_ADAM.
"""

import math

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.rule_loops import row_loops, row_update


@rule
def partial_row_wise_square(
    w: Number, g: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """The terms that one weight adds to the row's two sums. The first sum is not used."""
    return np.float32(0), g * g


@rule
def partial_row_wise_root(
    unused: Number, square_sum: Number, dim: Number, v: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns v' and the divisor of the row's first moments."""
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


_LOOPS = row_loops(
    partial_row_wise_adam, partial_row_wise_root, shares=partial_row_wise_square, has_row_state=True
)  # fmt: skip


@row_update
def update_partial_row_wise_adam(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of partial row-wise Adam. A new row's state is zeros."""
    return _LOOPS, (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta1**step, 1 - beta2**step, eps, weight_decay)
