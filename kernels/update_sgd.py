"""SGD row update, plain and with momentum.  U unique rows, D weights a row; state: none, or the buffer [D].

    g'   = g + weight_decay * w
    buf' = momentum * buf + (1 - dampening) * g'         (first step: buf' = g')
    w'   = w - lr * buf'                                 (nesterov: w' = w - lr * (g' + momentum * buf'))

Reference: Sutskever, Martens, Dahl, Hinton. ICML 2013, in the form and operation order of torch.optim.SGD.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.row_update_cuda import element_update

__all__ = ["momentum_sgd", "sgd", "update_sgd", "update_sgd_momentum"]


@rule
def sgd(w: Number, g: Number, lr: Number, weight_decay: Number) -> Number:
    return w - lr * l2_grad(w, g, weight_decay)


@rule
def momentum_sgd(
    w: Number, buf: Number, g: Number, lr: Number, momentum: Number, keep: Number, share: Number, nesterov: Number,
    weight_decay: Number,
) -> tuple:  # fmt: skip
    """keep, share = momentum, 1 - dampening; or 0, 1 at the first step. Returns w', buf'."""
    g = l2_grad(w, g, weight_decay)
    buf = buf * keep + share * g
    return w - lr * (g + momentum * buf if nesterov else buf), buf


@cpu
def _sgd_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            w_D = weight_SX[slot_U[first + r], :dim]
            for d in range(dim):
                w_D[d] = from_float32(sgd(to_float32(w_D[d]), g_RD[r, d], lr, weight_decay), w_D[d])


@cpu
def _sgd_momentum_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, momentum: Number, keep: Number, share: Number, nesterov: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            buf_D = row_SW[s, state_begin : state_begin + dim]
            for d in range(dim):
                w, buf_D[d] = momentum_sgd(
                    to_float32(w_D[d]), buf_D[d], g_RD[r, d], lr, momentum, keep, share, nesterov, weight_decay
                )
                w_D[d] = from_float32(w, w_D[d])


def update_sgd(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of SGD without momentum, in place, on the rows of slot_U. It keeps no state and reads none."""
    loops.update_rows(
        _sgd_cpu, element_update(sgd, states=0), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(weight_decay),
        state_width=0,
    )  # fmt: skip


def update_sgd_momentum(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    loops: Loops,
) -> None:
    """One step of SGD with momentum, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A row that appears after the first step starts from a buffer of zeros, as a row of a dense parameter does that
    has had no gradient yet.
    """
    keep, share = (0.0, 1.0) if step == 1 else (momentum, 1 - dampening)
    loops.update_rows(
        _sgd_momentum_cpu, element_update(momentum_sgd, states=1), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(momentum), np.float32(keep), np.float32(share), bool(nesterov),
        np.float32(weight_decay),
        state_width=grad_UD.shape[1],
    )  # fmt: skip
