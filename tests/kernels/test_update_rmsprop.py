"""RMSprop rows, centered or with momentum or both, against torch.optim.RMSprop on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_rmsprop import update_rmsprop
from tests.support.pairwise import diagonal
from tests.support.row_updates import (
    DIMS,
    DTYPES,
    Float64Oracle,
    TorchOracle,
    check_not_finite,
    check_threads,
    check_update,
)

OPTIONS = dict(lr=0.05, alpha=0.9, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False)
# At the first step of a row a centered root is a cancelled difference, whatever rounds it; eps keeps it from zero.
FORMS = [
    dict(),
    dict(momentum=0.8, lr=0.01),
    dict(centered=True, eps=0.01),
    dict(centered=True, momentum=0.8, lr=0.01, eps=0.01),
]


def kernel(**options):
    return partial(update_rmsprop, **{**OPTIONS, **options})


def keys(centered=False, momentum=0.0, **_):
    return ["square_avg"] + ["grad_avg"] * centered + ["momentum_buffer"] * (momentum > 0)


def zeros(dim, **options):
    return np.zeros(len(keys(**options)) * dim)


def oracle(**options):
    return TorchOracle(lambda params: torch.optim.RMSprop(params, **{**OPTIONS, **options}), keys(**options))


@pytest.mark.parametrize("form, dtype, dim, threads", diagonal(FORMS, list(DTYPES), DIMS, (1, 2)), ids=str)
def test_rmsprop_equals_torch_on_the_touched_rows(form, dtype, dim, threads):
    check_update(kernel(**form), oracle(**form), zeros(dim, **form), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [dict(weight_decay=0.1), dict(eps=0.1), dict(alpha=0.7, eps=0.1, weight_decay=0.01), dict(lr=0.0)],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rmsprop_options_equal_torch(form, options):
    options = {**form, **options}
    check_update(kernel(**options), oracle(**options), zeros(65, **form), "float32", 65, 1)


def rmsprop_float64(w, state, g, step, *, lr, alpha, eps, weight_decay, momentum, centered):
    v, *rest = np.split(state, 1 + centered + (momentum > 0), axis=1)
    g = g + weight_decay * w
    v = alpha * v + (1 - alpha) * g**2
    new, variance = [v], v
    if centered:
        new.append(alpha * rest.pop(0) + (1 - alpha) * g)
        variance = v - new[-1] ** 2
    move = g / (np.sqrt(variance) + eps)
    if momentum > 0:
        move = momentum * rest.pop(0) + move
        new.append(move)
    return w - lr * move, np.concatenate(new, axis=1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rmsprop_equals_the_formula_in_float64(form):
    options = {**OPTIONS, **form, "weight_decay": 0.05}
    reference = Float64Oracle(partial(rmsprop_float64, **options))
    check_update(kernel(**options), reference, zeros(64, **form), "float32", 64, 1)


@pytest.mark.parametrize("options", [dict(alpha=0.91), dict(eps=1e-4), dict(lr=0.05001), dict(momentum=1e-4)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), np.zeros(14), "float32", 7, 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(form):
    check_threads(kernel(weight_decay=0.01, **form), zeros(16, **form))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_that_are_not_finite_spoil_their_own_rows_only(form):
    check_not_finite(kernel(**form), zeros(19, **form))
