"""FTRL-Proximal row update.  U unique rows, D weights a row; state: n [D], the sum of squares, then z [D].

    g' = g + weight_decay * w
    n' = n + g' * g'
    z' = z + g' - (n'^p - n^p) / lr * w                  p = -lr_power, 0.5 as published
    w' = (sign(z') * lambda1 - z') / ((beta + n'^p) / lr + lambda2)   where |z'| > lambda1, else 0

A new row has z = 0, which stands for the weight 0, and n = the initial accumulator value: its initial weight
counts in the first step only, through the term with w. lambda2 is the published one; TensorFlow's l2 is half of it.

Reference: McMahan et al. Ad Click Prediction: a View from the Trenches. KDD 2013, Algorithm 1; lr_power,
initial_accumulator_value and z = 0 for any first weight as in TensorFlow's Ftrl.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.row_update_cuda import element_update

__all__ = ["ftrl", "update_ftrl"]


@rule
def _raised(n: Number, power: Number) -> Number:
    """n^power; power None is one half, and compiles to a square root, which vectorises."""
    if power is None:
        return math.sqrt(n)
    return n**power


@rule
def ftrl(
    w: Number, n: Number, z: Number, g: Number, lr: Number, power: Number, lambda1: Number, lambda2: Number,
    beta: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', n', z'."""
    g = l2_grad(w, g, weight_decay)
    n_before, n = n, n + g * g
    n_power = _raised(n, power)
    z = z + g - (n_power - _raised(n_before, power)) / lr * w
    w = ((lambda1 if z > 0 else -lambda1) - z) / ((beta + n_power) / lr + lambda2)
    # The comparison is this way round so that NaN stays NaN.
    return np.float32(0) if abs(z) <= lambda1 else w, n, z


@rule
def _published(
    w: Number, n: Number, z: Number, g: Number, lr: Number, lambda1: Number, lambda2: Number, beta: Number,
    weight_decay: Number,
) -> Number:  # fmt: skip
    """`ftrl` with power None, which cannot be an argument of a launch."""
    return ftrl(w, n, z, g, lr, None, lambda1, lambda2, beta, weight_decay)


@cpu
def _ftrl_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, power: Number, lambda1: Number, lambda2: Number, beta: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            n_D = row_SW[s, state_begin : state_begin + dim]
            z_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            for d in range(dim):
                w, n_D[d], z_D[d] = ftrl(
                    to_float32(w_D[d]), n_D[d], z_D[d], g_RD[r, d], lr, power, lambda1, lambda2, beta, weight_decay
                )
                w_D[d] = from_float32(w, w_D[d])


def update_ftrl(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    lr_power: float,
    lambda1: float,
    lambda2: float,
    beta: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of FTRL-Proximal, in place, on the rows of slot_U. `lr` must be above 0."""
    assert lr > 0
    power = None if lr_power == -0.5 else np.float32(-lr_power)
    loops.update_rows(
        _ftrl_cpu, element_update(_published if power is None else ftrl, states=2),
        weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), power, np.float32(lambda1), np.float32(lambda2),
        np.float32(beta), np.float32(weight_decay),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
