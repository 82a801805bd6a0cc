"""RAdam rows against torch.optim.RAdam on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_radam import update_radam
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

OPTIONS = dict(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False)


def kernel(**options):
    return partial(update_radam, **{**OPTIONS, **options})


def oracle(**options):
    options = {**OPTIONS, **options}
    options["betas"] = options.pop("beta1"), options.pop("beta2")
    return TorchOracle(lambda params: torch.optim.RAdam(params, **options), ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_radam_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), np.zeros(2 * dim), dtype, dim, threads)


@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.1),
        dict(weight_decay=0.1, decoupled_weight_decay=True),
        dict(eps=0.1),
        dict(beta1=0.0),
        dict(beta1=0.5, beta2=0.5),  # never rectified
        dict(beta1=0.3, beta2=0.9, weight_decay=0.01),
        dict(lr=0.0),
    ],
    ids=str,
)
def test_radam_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), np.zeros(130), "float32", 65, 1)


def radam_float64(w, state, g, step, *, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay):
    m, v = np.split(state, 2, axis=1)
    if decoupled_weight_decay:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat, bias2 = m / (1 - beta1**step), 1 - beta2**step
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / bias2
    if rho > 5:
        r = np.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        m_hat = m_hat * r * np.sqrt(bias2) / (np.sqrt(v) + eps)
    return w - lr * m_hat, np.concatenate([m, v], axis=1)


def test_radam_equals_the_formula_in_float64():
    options = {**OPTIONS, "weight_decay": 0.1, "decoupled_weight_decay": True}
    check_update(kernel(**options), Float64Oracle(partial(radam_float64, **options)), np.zeros(128), "float32", 64, 1)


@pytest.mark.parametrize("options", [dict(beta2=0.9991), dict(eps=1e-4), dict(lr=0.05001)], ids=str)
def test_the_oracle_notices_a_wrong_update(options):
    with pytest.raises(AssertionError, match="apart"):
        check_update(kernel(**options), oracle(), np.zeros(14), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), np.zeros(32))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), np.zeros(38))
