"""Adamax row update: Adam with the infinity norm.  U unique rows, D weights a row; state: m [D], then u [D].

    g' = g + weight_decay * w
    m' = m + (1 - beta1) * (g' - m)
    u' = max(beta2 * u, |g'| + eps)
    w' = w - lr / (1 - beta1^step) * m' / u'

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile.

Reference: Kingma, Ba. ICLR 2015, section 7.1, in the form and operation order of torch.optim.Adamax.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars, maximum
from oneemb.kernels.row_update_cuda import element_update

__all__ = ["adamax", "update_adamax"]


@rule
def adamax(
    w: Number, m: Number, u: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, eps: Number, rate: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """from_m, pull: see `lerp`. Returns w', m', u'."""
    g = l2_grad(w, g, weight_decay)
    m = lerp(m, g, from_m, pull)
    u = maximum(u * beta2, abs(g) + eps)
    return w - rate * m / u, m, u


@cpu
def _adamax_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    from_m: Number, pull: Number, beta2: Number, eps: Number, rate: Number, weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            m_D = row_SW[s, state_begin : state_begin + dim]
            u_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            for d in range(dim):
                w, m_D[d], u_D[d] = adamax(
                    to_float32(w_D[d]), m_D[d], u_D[d], g_RD[r, d],
                    from_m, pull, beta2, eps, rate, weight_decay,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def update_adamax(
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
    loops: Loops,
) -> None:
    """One step of Adamax, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    loops.update_rows(
        _adamax_cpu, element_update(adamax, states=2), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        *lerp_scalars(1 - beta1), np.float32(beta2), np.float32(eps), np.float32(lr / (1 - beta1**step)),
        np.float32(weight_decay),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
