"""Adam, AdamW and SparseAdam rows against torch.optim on touched rows, and against float64."""

from functools import partial

import numpy as np
import pytest
import torch

from oneemb.kernels.update_adam import update_adam, update_sparse_adam
from tests.support.row_updates import CASES, Float64Oracle, TorchOracle, check_not_finite, check_threads, check_update

KEYS = ("exp_avg", "exp_avg_sq")
ADAM = dict(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
SPARSE_ADAM = dict(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8)


def kernel(**options):
    return partial(update_adam, **{**ADAM, "decoupled_weight_decay": False, **options})


def oracle(cls=torch.optim.Adam, more_keys=(), **options):
    options = {**ADAM, **options}
    options["betas"] = options.pop("beta1"), options.pop("beta2")
    return TorchOracle(lambda params: cls(params, **options), (*KEYS, *more_keys))


def sparse_oracle(**options):
    options = {**SPARSE_ADAM, **options}
    options["betas"] = options.pop("beta1"), options.pop("beta2")
    return TorchOracle(lambda params: torch.optim.SparseAdam(params, **options), KEYS, sparse=True)


def zeros(dim):
    return np.zeros(2 * dim)


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_adam_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(kernel(), oracle(), zeros(dim), dtype, dim, threads)


@pytest.mark.parametrize("dtype, dim, threads", [("float32", 7, 2), ("float32", 64, 1), ("float16", 65, 1)])
def test_adamw_equals_torch_on_the_touched_rows(dtype, dim, threads):
    check_update(
        kernel(weight_decay=0.1, decoupled_weight_decay=True),
        oracle(torch.optim.AdamW, weight_decay=0.1),
        zeros(dim), dtype, dim, threads,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.1),  # L2: the gradient is not g itself
        dict(eps=0.1),  # an eps in the wrong place shows
        dict(beta1=0.0),  # m is the gradient itself, not what is left of it after m is taken away and added back
        dict(beta1=0.5),  # where torch.lerp changes ends
        dict(beta1=0.3, beta2=0.4, weight_decay=0.01),
        dict(lr=0.0),
    ],
    ids=str,
)
def test_adam_options_equal_torch(options):
    check_update(kernel(**options), oracle(**options), zeros(65), "float32", 65, 1)


@pytest.mark.parametrize("dtype, dim, threads", [("float32", 7, 2), ("float32", 64, 1), ("float16", 65, 1)])
@pytest.mark.parametrize("decoupled", [False, True])
def test_amsgrad_equals_torch_on_the_touched_rows(decoupled, dtype, dim, threads):
    options = dict(weight_decay=0.1, beta2=0.5)  # where v falls as often as it rises
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    check_update(
        kernel(**options, amsgrad=True, decoupled_weight_decay=decoupled),
        oracle(cls, ("max_exp_avg_sq",), **options, amsgrad=True),
        np.zeros(3 * dim), dtype, dim, threads,
    )  # fmt: skip


@pytest.mark.parametrize("dtype, dim, threads", CASES)
def test_sparse_adam_equals_torch(dtype, dim, threads):
    check_update(partial(update_sparse_adam, **SPARSE_ADAM), sparse_oracle(), zeros(dim), dtype, dim, threads)


def test_sparse_adam_adds_eps_where_torch_does():
    options = dict(SPARSE_ADAM, eps=0.1)
    check_update(partial(update_sparse_adam, **options), sparse_oracle(eps=0.1), zeros(7), "float32", 7, 1)


def adam_float64(w, state, g, step, *, lr, beta1, beta2, eps, weight_decay=0.0, decoupled=False, sparse=False):
    m, v = np.split(state, 2, axis=1)
    if decoupled:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    if sparse:
        eps = eps / np.sqrt(1 - beta2**step)
    return w - lr * m_hat / (np.sqrt(v_hat) + eps), np.concatenate([m, v], axis=1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_equals_the_paper_in_float64(decoupled):
    options = dict(ADAM, weight_decay=0.1)
    reference = Float64Oracle(partial(adam_float64, **options, decoupled=decoupled))
    check_update(
        partial(update_adam, **options, decoupled_weight_decay=decoupled), reference, zeros(64), "float32", 64, 1
    )


def test_sparse_adam_equals_the_formula_in_float64():
    options = dict(SPARSE_ADAM, eps=0.01)
    reference = Float64Oracle(partial(adam_float64, **options, sparse=True))
    check_update(partial(update_sparse_adam, **options), reference, zeros(64), "float32", 64, 1)


@pytest.mark.parametrize(
    "sabotage",
    [
        lambda step, kwargs: dict(kwargs, step=step + 1),
        lambda step, kwargs: dict(kwargs, eps=1e-4),
        lambda step, kwargs: dict(kwargs, lr=0.05001),
    ],
    ids=["step", "eps", "lr"],
)
def test_the_oracle_notices_a_wrong_update(sabotage):
    def wrong(*rows, step, **kwargs):
        kernel()(*rows, **{"step": step, **sabotage(step, kwargs)})

    with pytest.raises(AssertionError, match="apart"):
        check_update(wrong, oracle(), zeros(7), "float32", 7, 1)


def test_a_stray_write_is_noticed():
    def wrong(weight_SX, row_SW, *rest, **kwargs):
        kernel()(weight_SX, row_SW, *rest, **kwargs)
        row_SW[-1, -1] = 0

    with pytest.raises(AssertionError, match="outside"):
        check_update(wrong, oracle(), zeros(7), "float32", 7, 1)


def test_bits_do_not_depend_on_the_number_of_threads():
    check_threads(kernel(weight_decay=0.01), zeros(16))
    check_threads(kernel(amsgrad=True), np.zeros(48))


def test_gradients_that_are_not_finite_spoil_their_own_rows_only():
    check_not_finite(kernel(), zeros(19))
    check_not_finite(kernel(amsgrad=True), np.zeros(57))
