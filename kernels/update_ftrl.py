"""FTRL-Proximal row update.  U unique rows, D weights a row; state: n [D], the sum of squares, then z [D].

    g' = g + weight_decay * w
    n' = n + g' * g'
    z' = z + g' - (n'^p - n^p) / lr * w                  p = -lr_power, 0.5 as published
    w' = (sign(z') * lambda1 - z') / ((beta + n'^p) / lr + lambda2)   where |z'| > lambda1, else 0

A new row has n = the initial accumulator value and z = 0, which stands for the weight 0: the row's initial weight
counts only in the first step, through the term with w. lambda2 is as published; TensorFlow's l2 is half of it.

Reference: McMahan et al. Ad Click Prediction: a View from the Trenches. KDD 2013, Algorithm 1; lr_power,
initial_accumulator_value and z = 0 for any first weight as in TensorFlow's Ftrl.
"""

import math
from functools import partial

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def _raised(n: Number, power: Number) -> Number:
    """n^power. A power of None is one half; it compiles to a square root, which LLVM vectorizes."""
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
def ftrl_published(
    w: Number, n: Number, z: Number, g: Number, lr: Number, lambda1: Number, lambda2: Number, beta: Number,
    weight_decay: Number,
) -> tuple:  # fmt: skip
    """`ftrl` with the published power, one half."""
    return ftrl(w, n, z, g, lr, None, lambda1, lambda2, beta, weight_decay)


_LOOPS, _PUBLISHED = element_loops(ftrl), element_loops(ftrl_published)


@partial(row_update, forms={"ftrl": {"lr_power": -0.5}, "ftrl, another power": {}})
def update_ftrl(
    step: int, *, lr: float, lr_power: float, lambda1: float, lambda2: float, beta: float, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of FTRL-Proximal. `lr` must be above 0."""
    assert lr > 0
    loops, power = (_PUBLISHED, ()) if lr_power == -0.5 else (_LOOPS, (-lr_power,))
    return loops, (lr, *power, lambda1, lambda2, beta, weight_decay)
