"""Lion row update: steps by the sign of a momentum.  U unique rows, D weights a row; state: m [D].

    w' = w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)                        sign(NaN) = 0
    m' = beta2 * m + (1 - beta2) * g

Reference: Chen et al. Symbolic Discovery of Optimization Algorithms. NeurIPS 2023, Algorithm 2, in the operation order
of the authors' code for PyTorch.
"""

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def lion(
    w: Number, m: Number, g: Number,
    lr: Number, beta1: Number, beta1_rest: Number, beta2: Number, beta2_rest: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """Returns w', m'."""
    w = w * shrink
    pull = m * beta1 + beta1_rest * g
    return w - (lr if pull > 0 else -lr if pull < 0 else np.float32(0)), m * beta2 + beta2_rest * g


_LOOPS = element_loops(lion)


@row_update
def update_lion(step: int, *, lr: float, beta1: float, beta2: float, weight_decay: float) -> tuple[RowLoops, tuple]:
    """One step of Lion. A new row's state is zeros."""
    return _LOOPS, (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay)
