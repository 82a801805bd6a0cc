"""NAdam rows against torch.optim.NAdam on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_nadam import update_nadam
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

OPTIONS = dict(
    lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, momentum_decay=4e-3, decoupled_weight_decay=False
)


def kernel(**options):
    return partial(update_nadam, **{**OPTIONS, **options})


def oracle(**options):
    options = {**OPTIONS, **options}
    options["betas"] = options.pop("beta1"), options.pop("beta2")
    return TorchOracle(lambda params: torch.optim.NAdam(params, **options), ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_nadam_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), np.zeros(2 * dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.1),
        dict(weight_decay=0.1, decoupled_weight_decay=True),
        dict(eps=0.1),
        dict(beta1=0.0),
        dict(beta1=0.3, beta2=0.4, momentum_decay=0.5, weight_decay=0.01),
        dict(momentum_decay=0.0),
        dict(lr=0.0),
    ],
    ids=str,
)
def test_nadam_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), np.zeros(130), "float32", 65, 1)


def nadam_float64(w, state, g, step, *, lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled_weight_decay):
    m, v = np.split(state, 2, axis=1)
    if decoupled_weight_decay:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    mus = [beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in range(1, step + 2)]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat = mus[-1] * m / (1 - np.prod(mus)) + (1 - mus[-2]) * g / (1 - np.prod(mus[:-1]))
    return w - lr * m_hat / (np.sqrt(v / (1 - beta2**step)) + eps), np.concatenate([m, v], axis=1)


@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_a_step_far_on_is_that_of_the_whole_product(beta1):
    options = {**OPTIONS, "beta1": beta1, "weight_decay": 0.1}
    reference = Float64Oracle(partial(nadam_float64, **options))
    reference.step = lambda step, *rows: Float64Oracle.step(reference, step + 1000, *rows)

    def update(*rows, step, **kwargs):
        kernel(**options)(*rows, step=step + 1000, **kwargs)

    check_update(update, reference, np.zeros(14), "float32", 7, 1)


def test_nadam_equals_the_formula_in_float64():
    options = {**OPTIONS, "weight_decay": 0.1, "decoupled_weight_decay": True}
    check_update(kernel(**options), Float64Oracle(partial(nadam_float64, **options)), np.zeros(128), "float32", 64, 1)


@pytest.mark.parametrize("options", [dict(momentum_decay=5e-3), dict(eps=1e-4), dict(lr=0.05001)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), np.zeros(14), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), np.zeros(32))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), np.zeros(38))
