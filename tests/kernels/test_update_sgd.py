"""SGD rows, plain and with momentum, against torch.optim.SGD on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.update_sgd import update_sgd
from tests.support.row_updates import (
    CASES,
    THREADS,
    Float64Oracle,
    TorchOracle,
    check_not_finite,
    check_threads,
    check_update,
)

MOMENTUM = dict(lr=0.05, momentum=0.9, dampening=0.0, nesterov=False, weight_decay=0.0)


update_plain = partial(update_sgd, **{**MOMENTUM, "momentum": 0.0})


def kernel(**options):
    return partial(update_sgd, **{**MOMENTUM, **options})


def oracle(**options):
    return TorchOracle(lambda params: torch.optim.SGD(params, **{**MOMENTUM, **options}), ("momentum_buffer",))


def plain_oracle(**options):
    return TorchOracle(lambda params: torch.optim.SGD(params, **{"lr": 0.05, **options}), ())


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_sgd_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(update_plain, plain_oracle(), [], dtype, dim, threads)


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_momentum_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), np.zeros(dim), dtype, dim, threads)


def test_sgd_weight_decay_equals_torch():
    check_update(partial(update_plain, weight_decay=0.1), plain_oracle(weight_decay=0.1), [], "float32", 65, 1)


@pytest.mark.parametrize(
    "options",
    [
        dict(nesterov=True),
        dict(dampening=0.3),  # the first step takes the gradient whole all the same
        dict(weight_decay=0.1),
        dict(nesterov=True, weight_decay=0.1),
        dict(lr=0.0, dampening=0.5, weight_decay=0.01),
    ],
    ids=str,
)
def test_momentum_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), np.zeros(65), "float32", 65, 1)


def momentum_float64(w, buf, g, step, *, lr, momentum, dampening, nesterov, weight_decay):
    g = g + weight_decay * w
    buf = g if step == 1 else momentum * buf + (1 - dampening) * g
    return w - lr * (g + momentum * buf if nesterov else buf), buf


@pytest.mark.parametrize("options", [dict(dampening=0.25), dict(nesterov=True, weight_decay=0.05)], ids=str)
def test_momentum_equals_the_formula_in_float64(options):
    # A rate at which the weights stay near 1: the sum of 50 roundings grows with what is rounded.
    options = {**MOMENTUM, "lr": 0.01, **options}
    reference = Float64Oracle(partial(momentum_float64, **options))
    check_update(kernel(**options), reference, np.zeros(64), "float32", 64, 1)


def later(*rows, step, **kwargs):
    kernel(dampening=0.3)(*rows, step=step + 1, **kwargs)


@pytest.mark.parametrize(
    "wrong",
    [kernel(dampening=0.3001), kernel(dampening=0.3, momentum=0.9001), kernel(dampening=0.3, nesterov=True), later],
    ids=["dampening", "momentum", "nesterov", "first step"],
)
def test_the_oracle_notices_a_wrong_update(wrong):
    with pytest.raises(AssertionError, match="apart"):
        check_update(wrong, oracle(dampening=0.3), np.zeros(7), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(update_plain, [])
    check_threads(kernel(nesterov=True), np.zeros(16))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(update_plain, [])
    check_not_finite(kernel(), np.zeros(19))


def test_an_infinite_weight_stays_infinite_without_weight_decay():
    row_SW = np.array([[np.inf, 1.0]], np.float32)
    grad_UD = np.ones((1, 2), np.float32)
    update_plain(row_SW, row_SW, np.zeros(1, np.int64), grad_UD, state_begin=2, step=1, backend=HostBackend(THREADS[1]))
    assert row_SW.tolist() == [[np.inf, np.float32(1) - np.float32(0.05)]]
