"""Adadelta row update.  U unique rows, D weights a row; state: v [D] of squared gradients, then acc [D] of moves.

    g'    = g + weight_decay * w
    v'    = rho * v + (1 - rho) * g' * g'
    delta = sqrt(acc + eps) / sqrt(v' + eps) * g'
    acc'  = rho * acc + (1 - rho) * delta * delta
    w'    = w - lr * delta

Reference: Zeiler. ADADELTA: An Adaptive Learning Rate Method (arXiv:1212.5701), in the form and operation order of
torch.optim.Adadelta.
"""

import math

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def adadelta(
    w: Number, v: Number, acc: Number, g: Number,
    lr: Number, rho: Number, rho_rest: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', v', acc'."""
    g = l2_grad(w, g, weight_decay)
    v = v * rho + rho_rest * g * g
    delta = math.sqrt(acc + eps) / math.sqrt(v + eps) * g
    return w - lr * delta, v, acc * rho + rho_rest * delta * delta


_LOOPS = element_loops(adadelta)


@row_update
def update_adadelta(step: int, *, lr: float, rho: float, eps: float, weight_decay: float) -> tuple[RowLoops, tuple]:
    """One step of Adadelta. A new row's state is zeros."""
    return _LOOPS, (lr, rho, 1 - rho, eps, weight_decay)
