"""Row-wise Adagrad update: one accumulator a row.  U unique rows, D weights a row; state: the accumulator [1].

    g'   = g + weight_decay * w
    acc' = acc + mean over d of g' * g'
    w'   = w - lr / (sqrt(acc') + eps) * g'

The mean is summed in float32. On the CPU, lane l of 16 adds the squares d = l, l + 16, ...; `sum_lanes` adds the lanes;
then the squares of the last D % 16 weights are added. On the GPU each thread of the row's group sums its own weights,
and then these sums are added in the order of threads. The relative difference of acc' is at most D * 2^-23.

Reference: Mudigere et al. Software-Hardware Co-design for Fast and Scalable Training of Deep Learning
Recommendation Models. ISCA 2022 (arXiv:2104.05158); FBGEMM's EXACT_ROWWISE_ADAGRAD.
"""

import math

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import row_loops, row_update


@rule
def row_wise_square(w: Number, g: Number, lr: Number, eps: Number, weight_decay: Number) -> tuple:
    """The terms that one weight adds to the row's two sums. The first sum is not used."""
    g = l2_grad(w, g, weight_decay)
    return np.float32(0), g * g


@rule
def row_wise_rate(
    unused: Number, square_sum: Number, dim: Number, acc: Number, lr: Number, eps: Number, weight_decay: Number
) -> tuple:
    """Returns acc' and the row's rate."""
    acc = acc + square_sum / dim
    return acc, lr / (math.sqrt(acc) + eps)


@rule
def row_wise_step(w: Number, g: Number, rate: Number, lr: Number, eps: Number, weight_decay: Number) -> Number:
    return w - rate * l2_grad(w, g, weight_decay)


_LOOPS = row_loops(row_wise_step, row_wise_rate, shares=row_wise_square, has_row_state=True)


@row_update
def update_row_wise_adagrad(step: int, *, lr: float, eps: float, weight_decay: float) -> tuple[RowLoops, tuple]:
    """One step of row-wise Adagrad. A new row's state holds the initial accumulator value."""
    return _LOOPS, (lr, eps, weight_decay)
