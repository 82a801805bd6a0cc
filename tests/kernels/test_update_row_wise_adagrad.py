"""Row-wise Adagrad rows against float64, and against torch.optim.Adagrad where the two are one."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_row_wise_adagrad import update_row_wise_adagrad
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

OPTIONS = dict(lr=0.1, eps=1e-8, weight_decay=0.0)


def kernel(**options):
    return partial(update_row_wise_adagrad, **{**OPTIONS, **options})


def row_wise_float64(w, acc, g, step, *, lr, eps, weight_decay):
    g = g + weight_decay * w
    acc = acc + np.mean(g**2, axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(acc) + eps), acc


def oracle(**options):
    return Float64Oracle(partial(row_wise_float64, **{**OPTIONS, **options}))


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_row_wise_adagrad_equals_the_formula_in_float64(dtype, dim, threads):
    check_update(kernel(), oracle(), [0.0], dtype, dim, threads)


@pytest.mark.parametrize(
    "options, initial",
    [(dict(weight_decay=0.1), 0.0), (dict(eps=0.1), 0.0), (dict(), 0.5), (dict(weight_decay=0.01, eps=1e-3), 0.1)],
    ids=str,
)
def test_row_wise_adagrad_options_equal_the_formula_in_float64(options, initial):
    check_update(kernel(**options), oracle(**options), [initial], "float32", 65, 1)


def test_rows_of_one_weight_are_those_of_torch_adagrad():
    torch_oracle = TorchOracle(lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-8, weight_decay=0.1), ("sum",))
    check_update(kernel(weight_decay=0.1), torch_oracle, [0.0], "float32", 1, 1)


@pytest.mark.parametrize("options", [dict(eps=1e-4), dict(lr=0.10001), dict(weight_decay=1e-4)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), [0.0], "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), [0.0])


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), [0.0])
