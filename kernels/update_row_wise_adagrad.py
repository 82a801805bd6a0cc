"""Row-wise Adagrad update: one accumulator a row.  U unique rows, D weights a row; state: the accumulator [1].

    g'   = g + weight_decay * w
    acc' = acc + mean over d of g' * g'
    w'   = w - lr / (sqrt(acc') + eps) * g'

The mean is summed from d = 0 up, in float32.

Reference: Mudigere et al. Software-Hardware Co-design for Fast and Scalable Training of Deep Learning
Recommendation Models. ISCA 2022 (arXiv:2104.05158); FBGEMM's EXACT_ROWWISE_ADAGRAD.
"""

import math

import numpy as np

from oneemb.kernels.jit import cpu, from_float32, rule, to_float32
from oneemb.kernels.row_update import AHEAD, l2_grad, prefetch_row, run_row_update
from oneemb.kernels.threads import Threads

__all__ = ["row_wise_rate", "row_wise_square", "row_wise_step", "update_row_wise_adagrad"]


@rule
def row_wise_square(w, g, weight_decay):
    """One weight's share of the row's sum of squares."""
    g = l2_grad(w, g, weight_decay)
    return g * g


@rule
def row_wise_rate(acc, square_sum, dim, lr, eps):
    """Returns acc' and the row's rate."""
    acc = acc + square_sum / dim
    return acc, lr / (math.sqrt(acc) + eps)


@rule
def row_wise_step(w, g, rate, weight_decay):
    return w - rate * l2_grad(w, g, weight_decay)


@cpu
def _row_wise_adagrad_cpu(begin, end, weight_SX, row_SW, slot_U, grad_UD, state_begin, lr, eps, weight_decay):
    dim = grad_UD.shape[1]
    for u in range(begin, end):
        if u + AHEAD < end:
            prefetch_row(row_SW, slot_U[u + AHEAD])
        s = slot_U[u]
        w_D, g_D = weight_SX[s, :dim], grad_UD[u]
        square_sum = np.float32(0)
        for d in range(dim):
            square_sum += row_wise_square(to_float32(w_D[d]), g_D[d], weight_decay)
        row_SW[s, state_begin], rate = row_wise_rate(row_SW[s, state_begin], square_sum, np.float32(dim), lr, eps)
        for d in range(dim):
            w_D[d] = from_float32(row_wise_step(to_float32(w_D[d]), g_D[d], rate, weight_decay), w_D[d])


def update_row_wise_adagrad(
    weight_SX: np.ndarray,
    row_SW: np.ndarray,
    slot_U: np.ndarray,
    grad_UD: np.ndarray,
    *,
    state_begin: int,
    lr: float,
    eps: float,
    weight_decay: float,
    threads: Threads,
) -> None:
    """One step of row-wise Adagrad, in place, on the rows of slot_U.

    A new row's state holds the initial accumulator value.
    """
    run_row_update(
        _row_wise_adagrad_cpu, weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(eps), np.float32(weight_decay),
        state_width=1, threads=threads,
    )  # fmt: skip
