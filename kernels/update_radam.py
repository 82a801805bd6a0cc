"""RAdam row update: Adam whose first steps have no second moment.  U unique rows, D weights a row; state: m [D], v [D].

    g' = g + weight_decay * w                or, decoupled, w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - lr * m' / (1 - beta1^step) * rect * sqrt(1 - beta2^step) / (sqrt(v') + eps)        if rho > 5
    w' = w - lr * m' / (1 - beta1^step)                                                         otherwise

    rho_inf = 2 / (1 - beta2) - 1            rho = rho_inf - 2 * step * beta2^step / (1 - beta2^step)
    rect = sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient. A row whose first
gradient comes late is rectified at once.

Reference: Liu et al. On the Variance of the Adaptive Learning Rate and Beyond. ICLR 2020, in the form and operation
order of torch.optim.RAdam.
"""

import math

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import lerp_scalars
from oneemb.kernels.rule_loops import element_loops, row_update
from oneemb.kernels.update_adam import decay_scalars, moments


@rule
def radam(
    w: Number, m: Number, v: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, lr: Number, correction1: Number, correction2: Number, rectified: Number, rect: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'. correction1, correction2: 1 - beta1^step, sqrt(1 - beta2^step)."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    move = m / correction1 * lr
    return w - (move * (correction2 / (math.sqrt(v) + eps)) * rect if rectified else move), m, v


_LOOPS = element_loops(radam)


@row_update
def update_radam(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled_weight_decay: bool
) -> tuple[RowLoops, tuple]:
    """One step of RAdam. A new row's state is zeros."""
    correction2 = 1 - beta2**step
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / correction2
    rectified = rho > 5
    rect = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5 if rectified else 1.0
    # `float` raises TypeError for the complex root of a negative number.
    return _LOOPS, (
        *lerp_scalars(1 - beta1), beta2, 1 - beta2, *decay_scalars(lr, weight_decay, decoupled_weight_decay), eps,
        lr, 1 - beta1**step, float(correction2**0.5), rectified, float(rect),
    )  # fmt: skip
