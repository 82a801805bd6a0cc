"""Adam, AdamW and SparseAdam row updates.  U unique rows, D weights a row; state: m [D], then v [D].

With amsgrad there is a third state, top [D], the largest v so far.

    Adam    g' = g + weight_decay * w        AdamW    w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - rate * m' / (sqrt(v') / correction + eps)            amsgrad: top' = max(top, v') in place of v'

                   rate                                           correction
    Adam, AdamW    lr / (1 - beta1^step)                          sqrt(1 - beta2^step)
    SparseAdam     lr * sqrt(1 - beta2^step) / (1 - beta1^step)   1: eps is added before the correction

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient.

Reference: Kingma, Ba. ICLR 2015; Loshchilov, Hutter. ICLR 2019; Reddi, Kale, Kumar. ICLR 2018 (amsgrad); in the form
and operation order of torch.optim.Adam, AdamW and SparseAdam.
"""

import math
from functools import lru_cache, partial

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars, maximum
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def moments(
    w: Number, m: Number, v: Number, g: Number, from_m: Number, pull: Number, beta2: Number, beta2_rest: Number,
    weight_decay: Number, shrink: Number,
) -> tuple:  # fmt: skip
    """Returns the decayed w, the gradient with L2 decay, m', v'. from_m, pull: scalars of `lerp`."""
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


_ADAM, _AMSGRAD = element_loops(adam), element_loops(amsgrad)


@partial(row_update, forms={"adam": {}, "amsgrad": {"amsgrad": True}})
def update_adam(
    step: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    amsgrad: bool = False,
) -> tuple[RowLoops, tuple]:
    """One step of Adam, or of AdamW with decoupled_weight_decay. A new row's state is zeros."""
    # `float` raises TypeError for the complex root of a negative number.
    rate, correction = lr / (1 - beta1**step), float((1 - beta2**step) ** 0.5)
    decay = decay_scalars(lr, weight_decay, decoupled_weight_decay)
    return _AMSGRAD if amsgrad else _ADAM, (rate, correction, *_same_in_each_step(beta1, beta2, eps, *decay))


@lru_cache(maxsize=64)
def _same_in_each_step(beta1: float, beta2: float, eps: float, weight_decay: float, shrink: float) -> tuple:
    """The scalars of `adam` that do not depend on the number of the step."""
    return *lerp_scalars(1 - beta1), *map(np.float32, (beta2, 1 - beta2, eps, weight_decay, shrink))


def decay_scalars(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """(weight_decay, shrink) for `moments`: L2 decay added to the gradient or, if decoupled, a factor of the weight."""
    return (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)


@row_update
def update_sparse_adam(step: int, *, lr: float, beta1: float, beta2: float, eps: float) -> tuple[RowLoops, tuple]:
    """One step of SparseAdam. A new row's state is zeros."""
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return _ADAM, (rate, 1.0, *lerp_scalars(1 - beta1), beta2, 1 - beta2, eps, 0.0, 1.0)
