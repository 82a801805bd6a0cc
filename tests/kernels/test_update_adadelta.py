"""Adadelta rows against torch.optim.Adadelta on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_adadelta import update_adadelta
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

OPTIONS = dict(lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0)


def kernel(**options):
    return partial(update_adadelta, **{**OPTIONS, **options})


def oracle(**options):
    return TorchOracle(
        lambda params: torch.optim.Adadelta(params, **{**OPTIONS, **options}), ("square_avg", "acc_delta")
    )


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_adadelta_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), np.zeros(2 * dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.1),
        dict(eps=0.1, lr=0.3),
        dict(rho=0.5, lr=0.1, weight_decay=0.01),
        dict(rho=0.0),
        dict(lr=0.0),
    ],
    ids=str,
)
def test_adadelta_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), np.zeros(130), "float32", 65, 1)


def adadelta_float64(w, state, g, step, *, lr, rho, eps, weight_decay):
    v, acc = np.split(state, 2, axis=1)
    g = g + weight_decay * w
    v = rho * v + (1 - rho) * g**2
    delta = np.sqrt(acc + eps) / np.sqrt(v + eps) * g
    return w - lr * delta, np.concatenate([v, rho * acc + (1 - rho) * delta**2], axis=1)


def test_adadelta_equals_the_formula_in_float64():
    options = {**OPTIONS, "weight_decay": 0.1, "eps": 0.01}
    check_update(
        kernel(**options), Float64Oracle(partial(adadelta_float64, **options)), np.zeros(128), "float32", 64, 1
    )


@pytest.mark.parametrize("options", [dict(rho=0.91), dict(eps=1e-5), dict(lr=1.01)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), np.zeros(14), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), np.zeros(32))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), np.zeros(38))
