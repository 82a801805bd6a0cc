"""Adamax row update: Adam with the infinity norm.  U unique rows, D weights a row; state: m [D], then u [D].

    g' = g + weight_decay * w
    m' = m + (1 - beta1) * (g' - m)
    u' = max(beta2 * u, |g'| + eps)
    w' = w - lr / (1 - beta1^step) * m' / u'

`step` is the global step. A row is neither decayed nor moved in steps that give it no gradient.

Reference: Kingma, Ba. ICLR 2015, section 7.1, in the form and operation order of torch.optim.Adamax.
"""

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars, maximum
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def adamax(
    w: Number, m: Number, u: Number, g: Number,
    from_m: Number, pull: Number, beta2: Number, eps: Number, rate: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', u'. from_m, pull: scalars of `lerp`."""
    g = l2_grad(w, g, weight_decay)
    m = lerp(m, g, from_m, pull)
    u = maximum(u * beta2, abs(g) + eps)
    return w - rate * m / u, m, u


_LOOPS = element_loops(adamax)


@row_update
def update_adamax(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of Adamax. A new row's state is zeros."""
    return _LOOPS, (*lerp_scalars(1 - beta1), beta2, eps, lr / (1 - beta1**step), weight_decay)
