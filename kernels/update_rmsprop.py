"""RMSprop row update.  U unique rows, D weights a row; state: v [D], if centered mean [D], with momentum buf [D].

    g'    = g + weight_decay * w
    v'    = alpha * v + (1 - alpha) * g' * g'
    mean' = mean + (1 - alpha) * (g' - mean)                     centered
    root  = sqrt(v') + eps                                       centered: sqrt(v' - mean' * mean') + eps
    w'    = w - lr * g' / root                                   momentum: buf' = momentum * buf + g' / root
                                                                           w'   = w - lr * buf'

As in torch, v' - mean' * mean' may round to below 0 for a gradient that hardly changes, and the root is then NaN.

Reference: Tieleman, Hinton. COURSERA: Neural Networks for Machine Learning, lecture 6.5 (2012); centered: Graves
(arXiv:1308.0850); in the form and operation order of torch.optim.RMSprop.
"""

import math
from functools import partial

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def rmsprop_momentum_centered(
    w: Number, v: Number, mean: Number, buf: Number, g: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> tuple:  # fmt: skip
    """Returns w', v', mean', buf'; an unused mean or buf is returned as it is. from_mean, pull: scalars of `lerp`."""
    g = l2_grad(w, g, weight_decay)
    v = v * alpha + alpha_rest * g * g
    mean = lerp(mean, g, from_mean, pull) if centered else mean
    root = math.sqrt(v - mean * mean if centered else v) + eps
    buf = buf * momentum + g / root if momentum > 0 else buf
    return w - (lr * buf if momentum > 0 else lr * g / root), v, mean, buf


@rule
def rmsprop(
    w: Number, v: Number, g: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> tuple:  # fmt: skip
    """RMSprop, neither centered nor with momentum. Returns w', v'."""
    w, v, _, _ = rmsprop_momentum_centered(
        w, v, g, g, g, lr, alpha, alpha_rest, from_mean, pull, eps, weight_decay, momentum, centered
    )
    return w, v


@rule
def rmsprop_momentum(
    w: Number, v: Number, buf: Number, g: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> tuple:  # fmt: skip
    """RMSprop with momentum. Returns w', v', buf'."""
    w, v, _, buf = rmsprop_momentum_centered(
        w, v, g, buf, g, lr, alpha, alpha_rest, from_mean, pull, eps, weight_decay, momentum, centered
    )
    return w, v, buf


@rule
def rmsprop_centered(
    w: Number, v: Number, mean: Number, g: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> tuple:  # fmt: skip
    """Centered RMSprop. Returns w', v', mean'."""
    w, v, mean, _ = rmsprop_momentum_centered(
        w, v, mean, g, g, lr, alpha, alpha_rest, from_mean, pull, eps, weight_decay, momentum, centered
    )
    return w, v, mean


_LOOPS = {
    (False, False): element_loops(rmsprop),
    (False, True): element_loops(rmsprop_momentum),
    (True, False): element_loops(rmsprop_centered),
    (True, True): element_loops(rmsprop_momentum_centered),
}


@partial(
    row_update,
    forms={
        "rmsprop, plain": {"momentum": 0.0},
        "rmsprop, momentum": {},
        "rmsprop, centered": {"momentum": 0.0, "centered": True},
        "rmsprop": {"centered": True},
    },
)
def update_rmsprop(
    step: int, *, lr: float, alpha: float, eps: float, weight_decay: float, momentum: float, centered: bool
) -> tuple[RowLoops, tuple]:
    """One step of RMSprop. A new row's state is zeros.

    With momentum 0 no buffer is read or written, even if rows have one.
    """
    return _LOOPS[bool(centered), momentum > 0], (
        lr, alpha, 1 - alpha, *lerp_scalars(1 - alpha), eps, weight_decay, momentum, bool(centered)
    )  # fmt: skip
