"""SmartDecayAdam row update.  U unique rows, D weights a row; state: m [D], v [D], then the row's last step [1].

With k = step - last step, the row catches up with the steps at which it had no gradient:

    g' = g + weight_decay * w
    m' = beta1^k * m + (1 - beta1) * g'
    v' = beta2^k * v + (1 - beta2) * g' * g'
    w' = w - lr * (m' + m * catch_up) / (sqrt(v') + eps)     catch_up = beta1 * (1 - beta1^(k-1)) / (1 - beta1)

m * catch_up is the sum of the momenta that the skipped steps would have applied. There is no bias correction.
The last step is an int32 whose bits are in a float32 word; the word is copied as bits and never takes part in float
arithmetic. The last step of a new row is 0. Its first k does not matter, since its m and v are 0 as well.

beta^k is computed in float64: float32 loses three digits of 0.999^10000.

Reference: SmartDecaySparseAdam of Caffe2 (caffe2/sgd/adam_op.h), which OneFlow's SmartDecayAdam follows on
embedding rows.
"""

import math
from math import pow as power  # not math.pow, which torch replaces while any thread exports a program

import numpy as np

from oneemb.kernels.backend import RowLoops
from oneemb.kernels.jit import Number, rule
from oneemb.kernels.jit_code import float_bits, uint_as_float
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.rule_loops import row_loops, row_update

STEP_MAX = (1 << 31) - 1


@rule
def smart_decay(
    unused: Number, unused_too: Number, dim: Number, last: Number, step: Number, beta1: Number, beta2: Number,
    beta1_rest: Number, beta2_rest: Number, lr: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns the word of this step; and beta1^k, beta2^k and catch_up in float32. beta1 and beta2 are float64."""
    # k is at least 1: a row from a snapshot may have a later last step, if this run counts steps from 1 again.
    k = max(step - np.int64(float_bits(last)), 1)
    catch_up = beta1 * (1 - power(beta1, k - 1)) / (1 - beta1)
    word = uint_as_float(np.uint32(step))
    return word, np.float32(power(beta1, k)), np.float32(power(beta2, k)), np.float32(catch_up)


@rule
def smart_decay_adam(
    w: Number, m: Number, v: Number, g: Number, decay1: Number, decay2: Number, catch_up: Number, step: Number,
    beta1: Number, beta2: Number, beta1_rest: Number, beta2_rest: Number, lr: Number, eps: Number,
    weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'."""
    g = l2_grad(w, g, weight_decay)
    owed = m * catch_up
    m = decay1 * m + beta1_rest * g
    v = decay2 * v + beta2_rest * g * g
    return w - lr * (m + owed) / (math.sqrt(v) + eps), m, v


_LOOPS = row_loops(smart_decay_adam, smart_decay, has_row_state=True)


@row_update
def update_smart_decay_adam(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[RowLoops, tuple]:
    """One step of SmartDecayAdam; `step` counts up to STEP_MAX. A new row's state is zeros."""
    assert 1 <= step <= STEP_MAX
    return _LOOPS, (step, np.float64(beta1), np.float64(beta2), 1 - beta1, 1 - beta2, lr, eps, weight_decay)
