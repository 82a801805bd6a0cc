"""Adadelta row update.  U unique rows, D weights a row; state: v [D], of gradients, then acc [D], of moves.

    g'    = g + weight_decay * w
    v'    = rho * v + (1 - rho) * g' * g'
    delta = sqrt(acc + eps) / sqrt(v' + eps) * g'
    acc'  = rho * acc + (1 - rho) * delta * delta
    w'    = w - lr * delta

Reference: Zeiler. ADADELTA: An Adaptive Learning Rate Method (arXiv:1212.5701), in the form and operation order of
torch.optim.Adadelta.
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

__all__ = ["adadelta", "update_adadelta"]


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


@cpu
def _adadelta_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, rho: Number, rho_rest: Number, eps: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            v_D = row_SW[s, state_begin : state_begin + dim]
            acc_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            for d in range(dim):
                w, v_D[d], acc_D[d] = adadelta(
                    to_float32(w_D[d]), v_D[d], acc_D[d], g_RD[r, d],
                    lr, rho, rho_rest, eps, weight_decay,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def update_adadelta(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of Adadelta, in place, on the rows of slot_U. A new row's state is zeros."""
    loops.update_rows(
        _adadelta_cpu, element_update(adadelta, states=2), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(rho), np.float32(1 - rho), np.float32(eps), np.float32(weight_decay),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
