"""Adagrad row update.  U unique rows, D weights a row; state: the sum of squares [D].

    g'   = g + weight_decay * w
    acc' = acc + g' * g'
    w'   = w - clr * g' / (sqrt(acc') + eps)             clr = lr / (1 + (step - 1) * lr_decay)

Reference: Duchi, Hazan, Singer. JMLR 12 (2011), in the form and operation order of torch.optim.Adagrad.
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

__all__ = ["adagrad", "update_adagrad"]


@rule
def adagrad(w: Number, acc: Number, g: Number, clr: Number, eps: Number, weight_decay: Number) -> tuple:
    """Returns w', acc'."""
    g = l2_grad(w, g, weight_decay)
    acc = acc + g * g
    return w - clr * g / (math.sqrt(acc) + eps), acc


@cpu
def _adagrad_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    clr: Number, eps: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            acc_D = row_SW[s, state_begin : state_begin + dim]
            for d in range(dim):
                w, acc_D[d] = adagrad(to_float32(w_D[d]), acc_D[d], g_RD[r, d], clr, eps, weight_decay)
                w_D[d] = from_float32(w, w_D[d])


def update_adagrad(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    step: int,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of Adagrad, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state holds the initial accumulator value.
    """
    loops.update_rows(
        _adagrad_cpu, element_update(adagrad, states=1), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr / (1 + (step - 1) * lr_decay)), np.float32(eps), np.float32(weight_decay),
        state_width=grad_UD.shape[1],
    )  # fmt: skip
