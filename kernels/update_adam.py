"""Adam, AdamW and SparseAdam row updates.  U unique rows, D weights a row; state: m [D], then v [D].

With amsgrad there is a third state, top [D], the largest v so far.

    Adam    g' = g + weight_decay * w        AdamW    w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - rate * m' / (sqrt(v') / correction + eps)            amsgrad: top' = max(top, v') in place of v'

                   rate                                           correction
    Adam, AdamW    lr / (1 - beta1^step)                          sqrt(1 - beta2^step)
    SparseAdam     lr * sqrt(1 - beta2^step) / (1 - beta1^step)   1: eps is added before the correction

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile.

Reference: Kingma, Ba. ICLR 2015; Loshchilov, Hutter. ICLR 2019; Reddi, Kale, Kumar. ICLR 2018 (amsgrad); in the form
and operation order of torch.optim.Adam, AdamW and SparseAdam.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars, maximum
from oneemb.kernels.row_update_cuda import element_update

__all__ = ["adam", "amsgrad", "decay_scalars", "moments", "update_adam", "update_sparse_adam"]


@rule
def moments(
    w: Number, m: Number, v: Number, g: Number, from_m: Number, pull: Number, beta2: Number, beta2_rest: Number,
    weight_decay: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """from_m, pull: see `lerp`. Returns the decayed w, the gradient with L2 decay, m', v'."""
    w = w * shrink
    g = l2_grad(w, g, weight_decay)
    return w, g, lerp(m, g, from_m, pull), v * beta2 + beta2_rest * g * g


@rule
def adam(
    w: Number, m: Number, v: Number, g: Number, rate: Number, correction: Number, from_m: Number, pull: Number,
    beta2: Number, beta2_rest: Number, eps: Number, weight_decay: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    return w - rate * m / (math.sqrt(v) / correction + eps), m, v


@rule
def amsgrad(
    w: Number, m: Number, v: Number, top: Number, g: Number, rate: Number, correction: Number, from_m: Number,
    pull: Number, beta2: Number, beta2_rest: Number, eps: Number, weight_decay: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v', top'."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    top = maximum(top, v)
    return w - rate * m / (math.sqrt(top) / correction + eps), m, v, top


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


@cpu
def _amsgrad_cpu(
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
            top_D = row_SW[s, state_begin + 2 * dim : state_begin + 3 * dim]
            for d in range(dim):
                w, m_D[d], v_D[d], top_D[d] = amsgrad(
                    to_float32(w_D[d]), m_D[d], v_D[d], top_D[d], g_RD[r, d],
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
    amsgrad: bool = False,
    loops: Loops,
) -> None:
    """One step of Adam, or of AdamW with decoupled_weight_decay, in place, on the rows of slot_U.

    `step` counts from 1 over the whole run. A new row's state is zeros.
    """
    weight_decay, shrink = decay_scalars(lr, weight_decay, decoupled_weight_decay)
    _update(
        weight_SX, row_SW, slot_U, grad_UD, state_begin, beta1, beta2, eps, loops,
        rate=lr / (1 - beta1**step),
        correction=(1 - beta2**step) ** 0.5,
        weight_decay=weight_decay, shrink=shrink, with_top=amsgrad,
    )  # fmt: skip


def decay_scalars(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """weight_decay and shrink of `moments`: L2 decay of the gradient, or a share of the weight itself."""
    return (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)


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
    with_top: bool = False,
) -> None:  # fmt: skip
    on_host, on_cuda = (
        (_amsgrad_cpu, element_update(amsgrad, states=3)) if with_top else (_adam_cpu, element_update(adam, states=2))
    )
    loops.update_rows(
        on_host, on_cuda, weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(rate), np.float32(correction), *lerp_scalars(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        np.float32(eps), np.float32(weight_decay), np.float32(shrink),
        state_width=(3 if with_top else 2) * grad_UD.shape[1],
    )  # fmt: skip
