"""Adagrad rows against torch.optim.Adagrad on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_adagrad import update_adagrad
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

ADAGRAD = dict(lr=0.1, lr_decay=0.0, eps=1e-10, weight_decay=0.0)


def kernel(**options):
    return partial(update_adagrad, **{**ADAGRAD, **options})


def oracle(**options):
    return TorchOracle(lambda params: torch.optim.Adagrad(params, **{**ADAGRAD, **options}), ("sum",))


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_adagrad_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), np.zeros(dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [dict(weight_decay=0.1), dict(eps=0.1), dict(lr_decay=0.3), dict(lr_decay=0.01, weight_decay=0.01, eps=1e-3)],
    ids=str,
)
def test_adagrad_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), np.zeros(65), "float32", 65, 1)


def test_adagrad_starts_from_the_initial_accumulator_value():
    check_update(kernel(), oracle(initial_accumulator_value=0.5), np.full(7, 0.5), "float32", 7, 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_adagrad_equals_torch_with_sparse_gradients():
    sparse = TorchOracle(lambda params: torch.optim.Adagrad(params, **ADAGRAD), ("sum",), sparse=True)
    check_update(kernel(), sparse, np.zeros(16), "float32", 16, 1)


def adagrad_float64(w, acc, g, step, *, lr, lr_decay, eps, weight_decay):
    g = g + weight_decay * w
    acc = acc + g**2
    return w - lr / (1 + (step - 1) * lr_decay) * g / (np.sqrt(acc) + eps), acc


def test_adagrad_equals_the_formula_in_float64():
    options = dict(lr=0.1, lr_decay=0.05, eps=1e-3, weight_decay=0.1)
    reference = Float64Oracle(partial(adagrad_float64, **options))
    check_update(kernel(**options), reference, np.full(64, 0.1), "float32", 64, 1)


@pytest.mark.parametrize("options", [dict(lr_decay=1e-4), dict(eps=1e-4), dict(weight_decay=1e-4)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), np.zeros(7), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(), np.zeros(16))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    # An infinite gradient makes inf / inf.
    check_not_finite(kernel(), np.zeros(19))
