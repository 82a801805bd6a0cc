"""FTRL-Proximal rows against the published algorithm in float64."""

from functools import partial

import numpy as np
import pytest

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.update_ftrl import update_ftrl
from tests.support.row_updates import CASES, THREADS, Float64Oracle, Slab, check_not_finite, check_threads, check_update

OPTIONS = dict(lr=0.5, lr_power=-0.5, lambda1=0.0, lambda2=0.0, beta=0.0, weight_decay=0.0)
REGULARIZED = dict(lambda1=1.5, lambda2=0.3, beta=1.0)


def kernel(**options):
    return partial(update_ftrl, **{**OPTIONS, **options})


def ftrl_float64(w, state, g, step, *, lr, lr_power, lambda1, lambda2, beta, weight_decay):
    """Algorithm 1 of the paper, whose weight of step t is computed at the end of step t - 1; alpha = lr."""
    n, z = np.split(state, 2, axis=1)
    g = g + weight_decay * w
    sigma = ((n + g * g) ** -lr_power - n**-lr_power) / lr
    z = z + g - sigma * w
    n = n + g * g
    rate = 1 / ((beta + n**-lr_power) / lr + lambda2)
    return np.where(np.abs(z) > lambda1, -rate * (z - np.sign(z) * lambda1), 0.0), np.concatenate([n, z], axis=1)


def oracle(**options):
    return Float64Oracle(partial(ftrl_float64, **{**OPTIONS, **options}))


def state(dim, n=0.1):
    return np.repeat([n, 0.0], dim)


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_ftrl_equals_the_paper_in_float64(dtype, dim, threads):
    check_update(kernel(**REGULARIZED), oracle(**REGULARIZED), state(dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(lr_power=-0.75),  # a power that is no square root has a loop of its own
        dict(lr_power=0.0, lambda2=0.1),  # the rate stays what it was
        dict(weight_decay=0.1),
        dict(lambda1=0.5),
        dict(lambda2=2.0),
    ],
    ids=str,
)
def test_ftrl_options_equal_the_paper_in_float64(options):
    check_update(kernel(**options), oracle(**options), state(65), "float32", 65, 1)


def test_ftrl_starts_from_an_accumulator_of_zero():
    check_update(kernel(), oracle(), state(7, n=0.0), "float32", 7, 1)


def test_lambda1_makes_weights_exactly_zero():
    slab = Slab(64, "float32", state(64), seed=1)
    slot_U = np.arange(8, dtype=np.int64)
    slab.weight_SX[:, :64] = 0
    grad_UD = np.random.default_rng(2).normal(0, 1, (8, 64)).astype(np.float32)
    kernel(lambda1=1.0)(
        slab.weight_SX,
        slab.row_SW,
        slot_U,
        grad_UD,
        state_begin=slab.state_begin,
        step=1,
        backend=HostBackend(THREADS[1]),
    )
    assert ((slab.weight_SD[:8] == 0) == (np.abs(grad_UD) <= 1)).all()


@pytest.mark.parametrize(
    "options", [dict(lr_power=0.5), dict(lambda2=0.6), dict(beta=1.0001), dict(lambda1=1.5001)], ids=str
)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**{**REGULARIZED, **options}), oracle(**REGULARIZED), state(7), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(**REGULARIZED), state(16))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(**REGULARIZED), state(19))
