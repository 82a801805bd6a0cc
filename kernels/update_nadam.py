"""NAdam row update: Adam with Nesterov momentum.  U unique rows, D weights a row; state: m [D], then v [D].

    g' = g + weight_decay * w                or, decoupled, w <- w * (1 - lr * weight_decay)
    m' = m + (1 - beta1) * (g' - m)
    v' = beta2 * v + (1 - beta2) * g' * g'
    w' = w - lr / (sqrt(v' / (1 - beta2^step)) + eps) * (  (1 - mu(step)) / (1 - product(step)) * g'
                                                         + mu(step + 1) / (1 - product(step + 1)) * m' )

    mu(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)        product(t) = mu(1) * ... * mu(t)

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient. The product runs over
all steps, with the current beta1 and momentum_decay, so these two must not change during training.

Reference: Dozat. ICLR Workshop 2016, in the form and operation order of torch.optim.NAdam.
"""

import math

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import lerp_scalars
from oneemb.kernels.rule_loops import element_loops, row_update
from oneemb.kernels.update_adam import decay_scalars, moments


@rule
def nadam(
    w: Number, m: Number, v: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, beta2_rest: Number, weight_decay: Number, shrink: Number,
    eps: Number, correction: Number, from_g: Number, from_momentum: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'. from_g, from_momentum: the rates of g' and of m'."""
    w, g, m, v = moments(w, m, v, g, from_m, pull, beta2, beta2_rest, weight_decay, shrink)
    root = math.sqrt(v / correction) + eps
    w = w - from_g * g / root
    return w - from_momentum * m / root, m, v


_LOOPS = element_loops(nadam)


def _mu_product(step: int, beta1: float, momentum_decay: float) -> float:
    # Every factor is at most beta1. Factors are left out only if the product is below 2^-60 without them, which does
    # not change 1 - product.
    terms = min(step, 1 + int(42 / (1 - beta1)))
    return float(np.prod(beta1 * (1 - 0.5 * 0.96 ** (np.arange(1, terms + 1) * momentum_decay))))


@row_update
def update_nadam(
    step: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    momentum_decay: float,
    decoupled_weight_decay: bool,
) -> tuple[RowLoops, tuple]:
    """One step of NAdam. A new row's state is zeros."""
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product = _mu_product(step, beta1, momentum_decay)
    return _LOOPS, (
        *lerp_scalars(1 - beta1), beta2, 1 - beta2, *decay_scalars(lr, weight_decay, decoupled_weight_decay), eps,
        1 - beta2**step, lr * (1 - mu) / (1 - product), lr * mu_next / (1 - product * mu_next),
    )  # fmt: skip
