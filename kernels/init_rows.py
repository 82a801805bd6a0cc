"""New rows: weights drawn from the table's initializer, state words set to the optimizer's initial state.

Invariant: a weight is a pure function of (seed, table, id, its place in the row), so it is the same in every store,
thread, rank and run. Weight d takes word d % 4 of philox(id, table, d // 4); the arithmetic is float64, rounded once.

A row is a concatenation of C columns, each with an initializer of its own:

    column c covers weights end_C[c-1] .. end_C[c];  table t fills it by kind_TC[t, c] with parameters param_TC4[t, c]
"""

import math
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import from_float32
from oneemb.kernels.philox import philox
from oneemb.kernels.threads import Threads

CONSTANT = 0
"""param 0: the value"""
UNIFORM = 1
"""params 0, 1: low, high"""
NORMAL = 2
"""params 0, 1: mean, standard deviation"""
TRUNC_NORMAL = 3
"""params 0, 1: mean, standard deviation; 2, 3: cumulative probabilities of the bounds in the untruncated
distribution"""

BY_ID = 4
"""param 0: modulus; the weight is the id modulo it, which is never negative"""

_UNIT = 2.0**-32


QUANTILE_FACTORS = (
    (
        (
            2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
            1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
        ),
        (
            5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
            5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
        ),
    ),
    (
        (
            7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
            3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
        ),
        (
            1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
            6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
        ),
    ),
    (
        (
            2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
            2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
        ),
        (
            2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
            1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
        ),
    ),
)  # fmt: skip
"""(numerator, denominator) of the three rational functions of `normal_quantile`: for the middle of the distribution,
near the middle, and far from it. The factor of the highest power comes first."""


@rule
def _polynomial(x: Number, factor_8: tuple) -> Number:
    y = factor_8[0] * x + factor_8[1]
    y = ((y * x + factor_8[2]) * x + factor_8[3]) * x + factor_8[4]
    return ((y * x + factor_8[5]) * x + factor_8[6]) * x + factor_8[7]


@rule
def normal_quantile(p: Number) -> Number:
    """The standard normal deviate below which a fraction p lies, 0 < p < 1, to about 1e-16.

    Reference: Wichura. Algorithm AS 241: the percentage points of the normal distribution. Appl. Stat. 37 (1988).
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(r, QUANTILE_FACTORS[0][0]) / _polynomial(r, QUANTILE_FACTORS[0][1])
    r = math.sqrt(-math.log(min(p, 1.0 - p)))
    if r <= 5.0:
        r -= 1.6
        top, low = _polynomial(r, QUANTILE_FACTORS[1][0]), _polynomial(r, QUANTILE_FACTORS[1][1])
    else:
        r -= 5.0
        top, low = _polynomial(r, QUANTILE_FACTORS[2][0]), _polynomial(r, QUANTILE_FACTORS[2][1])
    return -top / low if q < 0.0 else top / low


@rule
def draw(kind: Number, param_4: Array, word: Number, id: Number) -> Number:
    """One weight, float64, from 32 random bits, or from the id."""
    if kind == CONSTANT:
        return param_4[0]
    if kind == BY_ID:
        modulus = np.int64(param_4[0])
        return np.float64((np.int64(id) % modulus + modulus) % modulus)
    u = (np.float64(word) + 0.5) * _UNIT
    if kind == UNIFORM:
        return param_4[0] + (param_4[1] - param_4[0]) * u
    if kind == TRUNC_NORMAL:
        u = param_4[2] + (param_4[3] - param_4[2]) * u
    return param_4[0] + param_4[1] * normal_quantile(u)


@cpu
def _init_rows_cpu(
    begin: Number, end: Number, weight_SX: Array, row_SW: Array, slot_U: Array, table_U: Array, id_U: Array,
    seed: Number, kind_TC: Array, param_TC4: Array, end_C: Array, state: Array, state_begin: Number,
) -> None:  # fmt: skip
    for u in range(begin, end):
        s = slot_U[u]
        table = table_U[u]
        id = np.uint64(id_U[u])
        d = 0
        words = philox(0, 0, 0, 0, 0)
        for c in range(len(end_C)):
            kind = kind_TC[table, c]
            param_4 = param_TC4[table, c]
            while d < end_C[c]:
                word = d % 4
                # A column that begins inside a block of four words draws the block again, since the column before it
                # may not have drawn the block.
                if kind != CONSTANT and kind != BY_ID and (word == 0 or d == 0 or d == end_C[max(c - 1, 0)]):
                    words = philox(id, id >> np.uint64(32), table, d // 4, seed)
                x = words[0] if word == 0 else words[1] if word == 1 else words[2] if word == 2 else words[3]
                weight_SX[s, d] = from_float32(np.float32(draw(kind, param_4, x, id)), weight_SX[s, d])
                d += 1
        for w in range(len(state)):
            row_SW[s, state_begin + w] = state[w]


@dataclass(frozen=True)
class InitialRows:
    """First values of new rows of T tables.

    Args:
        seed: 64 bits.
        kind_TC: int64 [T, C], initializer of each column: CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL or BY_ID.
        param_TC4: float64 [T, C, 4], parameters of each initializer.
        end_C: int64 [C], end of each column; the last one is D.
    """

    seed: int
    kind_TC: np.ndarray
    param_TC4: np.ndarray
    end_C: np.ndarray


def init_rows(
    weight_SX: np.ndarray,
    row_SW: np.ndarray,
    slot_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    initial: InitialRows,
    state: np.ndarray,
    *,
    state_begin: int,
    threads: Threads,
) -> None:
    """Write the initial weights and state of keys (table_U int32, id_U int64) into the rows of slot_U. `weight_SX`
    (weights' bits) and `row_SW` (float32) are the same memory; `state`, float32, goes to word `state_begin` and on."""
    threads.run(
        _init_rows_cpu, len(slot_U), weight_SX, row_SW, slot_U, table_U, id_U, np.uint64(initial.seed),
        initial.kind_TC, initial.param_TC4, initial.end_C, state, state_begin,
    )  # fmt: skip
