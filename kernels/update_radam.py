"""RAdam row update: Adam whose first steps have no second moment.  U unique rows, D weights a row; state: m [D], v [D].

    g' = g + weight_decay * w                or, decoupled, w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - lr * m' / (1 - beta1^step) * rect * sqrt(1 - beta2^step) / (sqrt(v') + eps)        where rho > 5
    w' = w - lr * m' / (1 - beta1^step)                                                         where not

    rho_inf = 2 / (1 - beta2) - 1            rho = rho_inf - 2 * step * beta2^step / (1 - beta2^step)
    rect = sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile, and one that appears
late is rectified at once.

Reference: Liu et al. On the Variance of the Adaptive Learning Rate and Beyond. ICLR 2020, in the form and operation
order of torch.optim.RAdam.
"""

import math

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import lerp_scalars
from oneemb.kernels.row_update_cuda import element_update
from oneemb.kernels.update_adam import decay_scalars, moments

__all__ = ["radam", "update_radam"]


@rule
def radam(
    w: Number, m: Number, v: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, lr: Number, correction1: Number, correction2: Number, rectified: Number, rect: Number,
) -> tuple:  # fmt: skip
    """correction1, correction2: 1 - beta1^step, sqrt(1 - beta2^step). Returns w', m', v'."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    move = m / correction1 * lr
    return w - (move * (correction2 / (math.sqrt(v) + eps)) * rect if rectified else move), m, v


@cpu
def _radam_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, lr: Number, correction1: Number, correction2: Number, rectified: Number, rect: Number,
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
                w, m_D[d], v_D[d] = radam(
                    to_float32(w_D[d]), m_D[d], v_D[d], g_RD[r, d],
                    from_m, pull, beta2, beta2_rest, weight_decay, shrink, eps,
                    lr, correction1, correction2, rectified, rect,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def update_radam(
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
    """One step of RAdam, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    correction2 = 1 - beta2**step
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / correction2
    rectified = rho > 5
    rect = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5 if rectified else 1.0
    loops.update_rows(
        _radam_cpu, element_update(radam, states=2), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        *lerp_scalars(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        *map(np.float32, decay_scalars(lr, weight_decay, decoupled_weight_decay)), np.float32(eps),
        np.float32(lr), np.float32(1 - beta1**step), np.float32(correction2**0.5), rectified, np.float32(rect),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
