"""SGD row update, plain and with momentum.  U unique rows, D weights a row; state: none, or the buffer [D].

    g'   = g + weight_decay * w
    buf' = momentum * buf + (1 - dampening) * g'         (first step: buf' = g')
    w'   = w - lr * buf'                                 (nesterov: w' = w - lr * (g' + momentum * buf'))

Reference: Sutskever, Martens, Dahl, Hinton. ICML 2013, in the form and operation order of torch.optim.SGD.
"""

from functools import partial

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import element_loops, row_update


@rule
def sgd(w: Number, g: Number, lr: Number, weight_decay: Number) -> Number:
    return w - lr * l2_grad(w, g, weight_decay)


@rule
def momentum_sgd(
    w: Number, buf: Number, g: Number, lr: Number, momentum: Number, keep: Number, share: Number, nesterov: Number,
    weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', buf'. keep, share: momentum, 1 - dampening; in the first step 0, 1."""
    g = l2_grad(w, g, weight_decay)
    buf = buf * keep + share * g
    return w - lr * (g + momentum * buf if nesterov else buf), buf


_PLAIN, _MOMENTUM = element_loops(sgd), element_loops(momentum_sgd)


@partial(row_update, forms={"sgd": {"momentum": 0.0}, "momentum": {}})
def update_sgd(
    step: int, *, lr: float, momentum: float, dampening: float, nesterov: bool, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of SGD. Without momentum, no state is read or written, even if rows have a buffer.

    A row that appears after the first step starts with a buffer of zeros, like a row of a dense parameter that has had
    no gradient yet.
    """
    if momentum == 0:
        return _PLAIN, (lr, weight_decay)
    keep, share = (0.0, 1.0) if step == 1 else (momentum, 1 - dampening)
    return _MOMENTUM, (lr, momentum, keep, share, bool(nesterov), weight_decay)
