"""LAMB row update: Adam, with a step as long as the row.  U unique rows, D weights a row; state: m [D], then v [D].

    m' = beta1 * m + (1 - beta1) * g
    v' = beta2 * v + (1 - beta2) * g * g
    r  = m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps) + weight_decay * w
    w' = w - lr * |w| / |r| * r                                |.| = the root of the sum of squares over the row

If r is 0, the row does not change. A row of zeros stays zero for ever.

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient.

`rule_loops` says in which order sums over a row run on the CPU. On the GPU each thread of the row's group sums its own
weights, and then these sums are added in the order of threads. The relative difference is at most D * 2^-23.

Reference: You et al. Large Batch Optimization for Deep Learning. ICLR 2020; FBGEMM's LAMB, where
a row whose r is 0 becomes NaN.
"""

import math

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.rule_loops import row_loops, row_update


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
    w: Number, r: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """The terms that one weight adds to the row's two sums."""
    return w * w, r * r


@rule
def lamb_rate(
    w_square_sum: Number, r_square_sum: Number, dim: Number, row_state: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns row_state, which LAMB does not use, and the rate of the row."""
    r_norm = math.sqrt(r_square_sum)
    return row_state, lr * (math.sqrt(w_square_sum) / r_norm) if r_norm != 0 else r_norm


@rule
def lamb(
    w: Number, g: Number, rate: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, correction1: Number,
    correction2: Number, eps: Number, weight_decay: Number,
) -> Number:  # fmt: skip
    """The step of one weight: returns w'. `rate` is the row's rate, which `lamb_rate` has computed, and g the direction
    r of the weight."""
    return w - rate * g


_LOOPS = row_loops(lamb, lamb_rate, shares=lamb_squares, direction=lamb_direction)


@row_update
def update_lamb(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of LAMB. A new row's state is zeros."""
    return _LOOPS, (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta1**step, 1 - beta2**step, eps, weight_decay)
