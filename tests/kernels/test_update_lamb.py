"""LAMB rows against float64."""

from functools import partial

import numpy as np
import pytest

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.update_lamb import update_lamb
from tests.support.row_updates import (
    CASES,
    THREADS,
    Float64Oracle,
    check_not_finite,
    check_threads,
    check_update,
)

OPTIONS = dict(lr=0.02, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


def kernel(**options):
    return partial(update_lamb, **{**OPTIONS, **options})


def lamb_float64(w, state, g, step, *, lr, beta1, beta2, eps, weight_decay):
    m, v = np.split(state, 2, axis=1)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    r = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps) + weight_decay * w
    w_norm, r_norm = (np.linalg.norm(x, axis=1, keepdims=True) for x in (w, r))
    return w - lr * w_norm / r_norm * r, np.concatenate([m, v], axis=1)


def oracle(**options):
    return Float64Oracle(partial(lamb_float64, **{**OPTIONS, **options}))


def initial(dim):
    return np.zeros(2 * dim)


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_lamb_equals_the_formula_in_float64(dtype, dim, threads):
    check_update(kernel(), oracle(), initial(dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [dict(weight_decay=0.1), dict(eps=0.1), dict(beta1=0.3, beta2=0.4, weight_decay=0.01), dict(lr=0.0)],
    ids=str,
)
def test_lamb_options_equal_the_formula_in_float64(options):
    check_update(kernel(**options), oracle(**options), initial(65), "float32", 65, 1)


def one_row(weight, grad, **options):
    """The weights of a row of two after a step."""
    row_SW = np.concatenate([np.asarray(weight, np.float32), initial(2)]).astype(np.float32)[None]
    kernel(**options)(
        row_SW, row_SW, np.zeros(1, np.int64), np.asarray([grad], np.float32),
        state_begin=2, step=1, backend=HostBackend(THREADS[1]),
    )  # fmt: skip
    return row_SW[0, :2].tolist()


def test_a_row_without_gradient_and_decay_stays_as_it_is():
    assert one_row([1.0, 2.0], [0.0, 0.0]) == [1.0, 2.0] and one_row([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize("options", [dict(eps=1e-3), dict(lr=0.02001), dict(weight_decay=1e-3)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), initial(7), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), initial(16))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), initial(19))
