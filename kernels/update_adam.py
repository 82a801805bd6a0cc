"""Adam, AdamW and SparseAdam row updates.  U unique rows, D weights a row; state: m [D], then v [D].

    Adam    g' = g + weight_decay * w        AdamW    w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - rate * m' / (sqrt(v') / correction + eps)

                   rate                                           correction
    Adam, AdamW    lr / (1 - beta1^step)                          sqrt(1 - beta2^step)
    SparseAdam     lr * sqrt(1 - beta2^step) / (1 - beta1^step)   1: eps is added before the correction

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile.

Reference: Kingma, Ba. ICLR 2015; Loshchilov, Hutter. ICLR 2019; in the form and operation order of
torch.optim.Adam, AdamW and SparseAdam.
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

__all__ = ["adam", "update_adam", "update_sparse_adam"]


@rule
def adam(
    w: Number, m: Number, v: Number, g: Number, rate: Number, correction: Number, from_m: Number, pull: Number,
    beta2: Number, beta2_rest: Number, eps: Number, weight_decay: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """from_m, pull: m' = m + pull * (g - m), or else g + pull * (g - m); see `_lerp`. Returns w', m', v'."""
    w = w * shrink
    g = l2_grad(w, g, weight_decay)
    m = (m if from_m else g) + pull * (g - m)
    v = v * beta2 + beta2_rest * g * g
    return w - rate * m / (math.sqrt(v) / correction + eps), m, v


@cpu
def _adam_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    rate: Number, correction: Number, from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, eps: Number,
    weight_decay: Number, shrink: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            m_D = row_SW[s, state_begin : state_begin + dim]
            v_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            for d in range(dim):
                w, m_D[d], v_D[d] = adam(
                    to_float32(w_D[d]), m_D[d], v_D[d], g_RD[r, d],
                    rate, correction, from_m, pull, beta2, beta2_rest, eps, weight_decay, shrink,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def update_adam(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    loops: Loops,
) -> None:
    """One step of Adam, or of AdamW with decoupled_weight_decay, in place, on the rows of slot_U.

    `step` counts from 1 over the whole run. A new row's state is zeros.
    """
    _update(
        weight_SX, row_SW, slot_U, grad_UD, state_begin, beta1, beta2, eps, loops,
        rate=lr / (1 - beta1**step),
        correction=(1 - beta2**step) ** 0.5,
        weight_decay=0.0 if decoupled_weight_decay else weight_decay,
        shrink=1 - lr * weight_decay if decoupled_weight_decay else 1.0,
    )  # fmt: skip


def update_sparse_adam(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    loops: Loops,
) -> None:
    """One step of SparseAdam, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    _update(
        weight_SX, row_SW, slot_U, grad_UD, state_begin, beta1, beta2, eps, loops,
        rate=lr * math.sqrt(1 - beta2**step) / (1 - beta1**step), correction=1.0, weight_decay=0.0, shrink=1.0,
    )  # fmt: skip


def _update(
    weight_SX: Array, row_SW: Array, slot_U: Array, grad_UD: Array | Segments, state_begin: int, beta1: float,
    beta2: float, eps: float, loops: Loops, *, rate: float, correction: float, weight_decay: float, shrink: float,
) -> None:  # fmt: skip
    loops.update_rows(
        _adam_cpu, element_update(adam, states=2), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(rate), np.float32(correction), *_lerp(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        np.float32(eps), np.float32(weight_decay), np.float32(shrink),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip


def _lerp(share: float) -> tuple[bool, np.float32]:
    """How torch.lerp goes `share` of the way from m to g: it starts from the nearer of the two."""
    pull = np.float32(share)
    from_m = bool(pull < np.float32(0.5))
    return from_m, pull if from_m else pull - np.float32(1)
