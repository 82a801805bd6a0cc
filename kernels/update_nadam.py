"""NAdam row update: Adam with Nesterov momentum.  U unique rows, D weights a row; state: m [D], then v [D].

    g' = g + weight_decay * w                or, decoupled, w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - lr / (sqrt(v' / (1 - beta2^step)) + eps) * (  (1 - mu(step)) / (1 - product(step)) * g'
                                                         + mu(step + 1) / (1 - product(step + 1)) * m' )

    mu(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)        product(t) = mu(1) * ... * mu(t)

`step` is the global one: a row that sits out some steps is neither decayed nor moved meanwhile. The product is of all
steps with the beta1 and momentum_decay of this one, which therefore must not change.

Reference: Dozat. ICLR Workshop 2016, in the form and operation order of torch.optim.NAdam.
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

__all__ = ["nadam", "update_nadam"]


@rule
def nadam(
    w: Number, m: Number, v: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, correction: Number, from_g: Number, from_momentum: Number,
) -> tuple:  # fmt: skip
    """from_g, from_momentum: the rates of g' and of m'. Returns w', m', v'."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    root = math.sqrt(v / correction) + eps
    w = w - from_g * g / root
    return w - from_momentum * m / root, m, v


@cpu
def _nadam_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, correction: Number, from_g: Number, from_momentum: Number,
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
                w, m_D[d], v_D[d] = nadam(
                    to_float32(w_D[d]), m_D[d], v_D[d], g_RD[r, d],
                    from_m, pull, beta2, beta2_rest, weight_decay, shrink, eps, correction, from_g, from_momentum,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


def _mu_product(step: int, beta1: float, momentum_decay: float) -> float:
    # Every factor is at most beta1: where some are left out the product is below 2^-60, too little for 1 - product.
    terms = min(step, 1 + int(42 / (1 - beta1)))
    return float(np.prod(beta1 * (1 - 0.5 * 0.96 ** (np.arange(1, terms + 1) * momentum_decay))))


def update_nadam(
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
    momentum_decay: float,
    decoupled_weight_decay: bool,
    loops: Loops,
) -> None:
    """One step of NAdam, in place, on the rows of slot_U; `step` counts from 1 over the whole run.

    A new row's state is zeros.
    """
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product = _mu_product(step, beta1, momentum_decay)
    loops.update_rows(
        _nadam_cpu, element_update(nadam, states=2), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        *lerp_scalars(1 - beta1), np.float32(beta2), np.float32(1 - beta2),
        *map(np.float32, decay_scalars(lr, weight_decay, decoupled_weight_decay)), np.float32(eps),
        np.float32(1 - beta2**step), np.float32(lr * (1 - mu) / (1 - product)),
        np.float32(lr * mu_next / (1 - product * mu_next)),
        state_width=2 * grad_UD.shape[1],
    )  # fmt: skip
