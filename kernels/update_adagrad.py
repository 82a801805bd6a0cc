"""Adagrad row update.  U unique rows, D weights a row; state: the sum of squares [D].

    g'   = g + weight_decay * w
    acc' = acc + g' * g'
    w'   = w - clr * g' / (sqrt(acc') + eps)             clr = lr / (1 + (step - 1) * lr_decay)

Reference: Duchi, Hazan, Singer. JMLR 12 (2011), in the form and operation order of torch.optim.Adagrad.
"""

import math

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def adagrad(w: Number, acc: Number, g: Number, clr: Number, eps: Number, weight_decay: Number) -> tuple:
    """Returns w', acc'."""
    g = l2_grad(w, g, weight_decay)
    acc = acc + g * g
    return w - clr * g / (math.sqrt(acc) + eps), acc


_LOOPS = element_loops(adagrad)


@row_update
def update_adagrad(step: int, *, lr: float, lr_decay: float, eps: float, weight_decay: float) -> tuple[RowLoops, tuple]:
    """One step of Adagrad. A new row's state holds the initial accumulator value."""
    return _LOOPS, (lr / (1 + (step - 1) * lr_decay), eps, weight_decay)
