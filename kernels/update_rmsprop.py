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

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32, to_float32
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad, lerp, lerp_scalars
from oneemb.kernels.row_update_cuda import element_update

__all__ = ["rmsprop", "rmsprop_centered", "rmsprop_momentum", "rmsprop_momentum_centered", "update_rmsprop"]


@rule
def rmsprop_momentum_centered(
    w: Number, v: Number, mean: Number, buf: Number, g: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> tuple:  # fmt: skip
    """from_mean, pull: see `lerp`. Returns w', v', mean', buf'; what is not used, mean or buf, stays as it is."""
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
    """`rmsprop_momentum_centered` with neither. Returns w', v'."""
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
    """The same with momentum. Returns w', v', buf'."""
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
    """The same centered. Returns w', v', mean'."""
    w, v, mean, _ = rmsprop_momentum_centered(
        w, v, mean, g, g, lr, alpha, alpha_rest, from_mean, pull, eps, weight_decay, momentum, centered
    )
    return w, v, mean


@cpu
def _rmsprop_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    lr: Number, alpha: Number, alpha_rest: Number, from_mean: Number, pull: Number, eps: Number, weight_decay: Number,
    momentum: Number, centered: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    no_state_SD = np.zeros((2, dim), np.float32)  # what the rule gives back as it was
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            v_D = row_SW[s, state_begin : state_begin + dim]
            next_begin = state_begin + dim
            mean_D, buf_D = no_state_SD[0], no_state_SD[1]
            if centered:
                mean_D = row_SW[s, next_begin : next_begin + dim]
                next_begin += dim
            if momentum > 0:
                buf_D = row_SW[s, next_begin : next_begin + dim]
            for d in range(dim):
                w, v_D[d], mean_D[d], buf_D[d] = rmsprop_momentum_centered(
                    to_float32(w_D[d]), v_D[d], mean_D[d], buf_D[d], g_RD[r, d],
                    lr, alpha, alpha_rest, from_mean, pull, eps, weight_decay, momentum, centered,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


_ON_CUDA = {
    (False, False): (rmsprop, 1),
    (False, True): (rmsprop_momentum, 2),
    (True, False): (rmsprop_centered, 2),
    (True, True): (rmsprop_momentum_centered, 3),
}


def update_rmsprop(
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    centered: bool,
    loops: Loops,
) -> None:
    """One step of RMSprop, in place, on the rows of slot_U. A new row's state is zeros.

    With momentum 0 no buffer is read or written, whether rows have one or not.
    """
    optimizer, states = _ON_CUDA[bool(centered), momentum > 0]
    loops.update_rows(
        _rmsprop_cpu, element_update(optimizer, states), weight_SX, row_SW, slot_U, grad_UD, state_begin,
        np.float32(lr), np.float32(alpha), np.float32(1 - alpha), *lerp_scalars(1 - alpha), np.float32(eps),
        np.float32(weight_decay), np.float32(momentum), bool(centered),
        state_width=states * grad_UD.shape[1],
    )  # fmt: skip
