"""SmartDecayAdam row update.  U unique rows, D weights a row; state: m [D], v [D], then the row's last step [1].

With k = step - last step, the row catches up with the steps at which it had no gradient:

    g' = g + weight_decay * w
    m' = beta1^k * m + (1 - beta1) * g'
    v' = beta2^k * v + (1 - beta2) * g' * g'
    w' = w - lr * (m' + m * catch_up) / (sqrt(v') + eps)     catch_up = beta1 * (1 - beta1^(k-1)) / (1 - beta1)

m * catch_up is the sum of the momenta that the skipped steps would have applied. There is no bias correction.
The last step is an int32 whose bits lie in a float32 word; it is moved as bits and never takes part in float
arithmetic. A new row's is 0, and since its m and v are 0 as well, its first k does not matter.

beta^k is computed in float64: float32 loses three digits of 0.999^10000.

Reference: SmartDecaySparseAdam of Caffe2 (caffe2/sgd/adam_op.h), which OneFlow's SmartDecayAdam follows on
embedding rows.
"""

import math
from math import pow as power  # not math.pow, which torch replaces while any thread exports a program

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, cuda, load, rule, store
from oneemb.kernels.jit_code import float_bits, from_float32, to_float32, uint_as_float
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.reduce_grads import ROWS, row_grads
from oneemb.kernels.row_update import l2_grad
from oneemb.kernels.row_update_cuda import given as gradient

__all__ = ["STEP_MAX", "smart_decay", "smart_decay_adam", "update_smart_decay_adam"]

STEP_MAX = (1 << 31) - 1


@rule
def smart_decay(skipped: Number, beta1: Number, beta2: Number) -> tuple:
    """beta1^k, beta2^k and catch_up for k = skipped, in float32. The betas are float64."""
    # A snapshot may hold rows of a later step than that of a run which counts from 1 again: k is at least 1.
    k = max(skipped, 1)
    catch_up = beta1 * (1 - power(beta1, k - 1)) / (1 - beta1)
    return np.float32(power(beta1, k)), np.float32(power(beta2, k)), np.float32(catch_up)


@rule
def smart_decay_adam(
    w: Number, m: Number, v: Number, g: Number, decay1: Number, decay2: Number, catch_up: Number, beta1_rest: Number,
    beta2_rest: Number, lr: Number, eps: Number, weight_decay: Number,
) -> tuple:  # fmt: skip
    """Returns w', m', v'."""
    g = l2_grad(w, g, weight_decay)
    owed = m * catch_up
    m = decay1 * m + beta1_rest * g
    v = decay2 * v + beta2_rest * g * g
    return w - lr * (m + owed) / (math.sqrt(v) + eps), m, v


@cpu
def _smart_decay_adam_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, grads: tuple, state_begin: Number,
    step: Number, beta1: Number, beta2: Number, beta1_rest: Number, beta2_rest: Number, lr: Number, eps: Number,
    weight_decay: Number,
) -> None:  # fmt: skip
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
            w_D = weight_SX[s, :dim]
            m_D = row_SW[s, state_begin : state_begin + dim]
            v_D = row_SW[s, state_begin + dim : state_begin + 2 * dim]
            step_1 = row_SW[s, state_begin + 2 * dim : state_begin + 2 * dim + 1]
            decay1, decay2, catch_up = smart_decay(step - np.int64(float_bits(step_1[0])), beta1, beta2)
            step_1[0] = uint_as_float(np.uint32(step))
            for d in range(dim):
                w, m_D[d], v_D[d] = smart_decay_adam(
                    to_float32(w_D[d]), m_D[d], v_D[d], g_RD[r, d],
                    decay1, decay2, catch_up, beta1_rest, beta2_rest, lr, eps, weight_decay,
                )  # fmt: skip
                w_D[d] = from_float32(w, w_D[d])


V = 1


@rule
def _as_step(x: Number) -> Number:
    return np.int64(float_bits(x))


@rule
def _as_word(step: Number) -> Number:
    return uint_as_float(np.uint32(step))


@cuda
def smart_decay_adam_loop(
    weight_SX: Array, row_SW: Array, slot_U: Array, grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array,
    part_U1: Array, part_PD: Array, go_1: Array, state_begin: Number, scalars: tuple,
) -> None:  # fmt: skip
    step, beta1, beta2, beta1_rest, beta2_rest, lr, eps, weight_decay = scalars
    w_V = cuda.local.array(V, np.float32)
    g_V = cuda.local.array(V, np.float32)
    m_V = cuda.local.array(V, np.float32)
    v_V = cuda.local.array(V, np.float32)
    dim = grad_NX.shape[1]
    lane, lanes, groups = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockDim.y
    # All threads of a block make the same number of turns, since they wait for each other.
    first = cuda.blockIdx.x * groups
    while first < slot_U.shape[0] and go_1[0] != 0:
        u = first + cuda.threadIdx.y
        if u < slot_U.shape[0]:
            s = slot_U[u]
            last = _as_step(row_SW[s, state_begin + 2 * dim])
            decay1, decay2, catch_up = smart_decay(step - last, beta1, beta2)
            d = lane * V
            while d < dim:
                load(w_V, weight_SX, s, d)
                load(m_V, row_SW, s, state_begin + d)
                load(v_V, row_SW, s, state_begin + dim + d)
                gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U1, part_PD, u, d)
                for i in range(V):
                    w_V[i], m_V[i], v_V[i] = smart_decay_adam(
                        w_V[i], m_V[i], v_V[i], g_V[i],
                        decay1, decay2, catch_up, beta1_rest, beta2_rest, lr, eps, weight_decay,
                    )  # fmt: skip
                store(weight_SX, s, d, w_V)
                store(row_SW, s, state_begin + d, m_V)
                store(row_SW, s, state_begin + dim + d, v_V)
                d += lanes * V
        cuda.syncthreads()  # the row's last step has been read by all
        if u < slot_U.shape[0] and lane == 0:
            row_SW[slot_U[u], state_begin + 2 * dim] = _as_word(step)
        first += cuda.gridDim.x * groups


def update_smart_decay_adam(
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
    """One step of SmartDecayAdam, in place, on the rows of slot_U; `step` counts from 1, up to STEP_MAX."""
    assert 1 <= step <= STEP_MAX
    loops.update_rows(
        _smart_decay_adam_cpu, smart_decay_adam_loop, weight_SX, row_SW, slot_U, grad_UD, state_begin,
        step, float(beta1), float(beta2), np.float32(1 - beta1), np.float32(1 - beta2),
        np.float32(lr), np.float32(eps), np.float32(weight_decay),
        state_width=2 * grad_UD.shape[1] + 1,
    )  # fmt: skip
