"""SmartDecayAdam rows against the formula in float64, and against the Adam steps that a row sat out."""

from functools import partial

import numpy as np
import pytest

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.update_smart_decay_adam import STEP_MAX, update_smart_decay_adam
from tests.support.row_updates import (
    CASES,
    DTYPES,
    THREADS,
    Float64Oracle,
    Slab,
    assert_close,
    check_not_finite,
    check_threads,
    check_update,
)

OPTIONS = dict(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)


def kernel(**options):
    return partial(update_smart_decay_adam, **{**OPTIONS, **options})


def smart_decay_float64(w, state, g, step, *, lr, beta1, beta2, eps, weight_decay):
    m, v, last = np.split(state, [w.shape[1], 2 * w.shape[1]], axis=1)
    k = step - last
    g = g + weight_decay * w
    m_new = beta1**k * m + (1 - beta1) * g
    v_new = beta2**k * v + (1 - beta2) * g**2
    momentum_owed = m * beta1 * (1 - beta1 ** (k - 1)) / (1 - beta1)
    w = w - lr * (m_new + momentum_owed) / (np.sqrt(v_new) + eps)
    return w, np.concatenate([m_new, v_new, np.full_like(last, step)], axis=1)


def oracle(**options):
    return Float64Oracle(partial(smart_decay_float64, **{**OPTIONS, **options}))


def check(update, reference, dtype, dim, threads):
    """The last word of the state is compared as the integer it is, by the test below."""
    check_update(update, reference, np.zeros(2 * dim + 1), dtype, dim, threads, close=slice(0, 2 * dim))


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_smart_decay_adam_equals_the_formula_in_float64(dtype, dim, threads):
    check(kernel(), oracle(), dtype, dim, threads)


@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.1), dict(eps=0.1), dict(beta1=0.0), dict(beta1=0.3, beta2=0.999)], ids=str
)
def test_smart_decay_adam_options_equal_the_formula_in_float64(options):
    check(kernel(**options), oracle(**options), "float32", 65, 1)


def run(slab, slots, grad_UD, step, **options):
    kernel(**options)(
        slab.weight_SX, slab.row_SW, np.asarray(slots, np.int64), grad_UD,
        state_begin=slab.state_begin, step=step, backend=HostBackend(THREADS[1]),
    )  # fmt: skip


def test_a_row_keeps_the_step_of_its_last_update_as_an_integer():
    slab = Slab(3, "float16", np.zeros(7), seed=1)
    for step, slots in [(1, [0, 1, 2]), (2, [1]), (7, [2, 3]), (STEP_MAX, [3])]:
        run(slab, slots, np.ones((len(slots), 3), np.float32), step)
    assert slab.state_SK[:5, 6].view(np.int32).tolist() == [1, 2, 7, STEP_MAX, 0]


def test_skipped_steps_decay_as_steps_without_a_gradient_would():
    """m and v after k - 1 skipped steps and one gradient are those of k steps, all but the last with gradient 0."""
    skipping, stepping = (Slab(16, "float32", np.zeros(33), seed=3) for _ in range(2))
    grad_UD = np.random.default_rng(4).normal(0, 1, (2, 1, 16)).astype(np.float32)
    for slab in (skipping, stepping):
        run(slab, [0], grad_UD[0], step=1)
    for step in range(2, 30):
        run(stepping, [0], np.zeros((1, 16), np.float32), step)
    for slab in (skipping, stepping):
        run(slab, [0], grad_UD[1], step=30)
    assert_close(skipping.state_SK[:1, :32], stepping.state_SK[:1, :32], DTYPES["float32"], "m and v")


@pytest.mark.parametrize("k", [2, 1000, 1_000_000])
def test_the_decay_of_many_skipped_steps_is_exact(k):
    slab = Slab(1, "float32", np.zeros(3), seed=5)
    run(slab, [0], np.ones((1, 1), np.float32), step=1, beta2=0.999)
    first = slab.state_SK[0, 1]
    run(slab, [0], np.zeros((1, 1), np.float32), step=1 + k, beta2=0.999)
    assert slab.state_SK[0, 1] == pytest.approx(first * 0.999**k, rel=1e-6, abs=0)


def test_a_row_of_a_later_step_counts_as_one_of_the_step_before():
    early, late = (Slab(3, "float32", np.zeros(7), seed=6) for _ in range(2))
    grad_UD = np.ones((1, 3), np.float32)
    run(early, [0], grad_UD, step=4)
    run(late, [0], grad_UD, step=9)
    for slab in (early, late):
        run(slab, [0], grad_UD, step=5)
    assert early.row_SW.tobytes() == late.row_SW.tobytes()


@pytest.mark.parametrize(
    "sabotage",
    [dict(beta1=0.9001), dict(beta2=0.9901), dict(eps=1e-3), dict(weight_decay=1e-3)],
    ids=str,
)
def test_the_oracle_notices_a_wrong_update(sabotage):
    with pytest.raises(AssertionError, match="apart"):
        check(kernel(**sabotage), oracle(), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(), np.zeros(33))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), np.zeros(39))
