"""Which torch optimizers step an embedding's rows, what a row then carries, and what is refused."""

import pkgutil

import numpy as np
import pytest
import torch

from oneemb.graph.row_optimizers import OPTIMIZERS as KNOWN, row_optimizer_of
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.kernels.update_adam import update_adam
from oneemb.optim import Ftrl, Lamb, Lars, PartialRowWiseAdam, RowWiseAdagrad, SmartDecayAdam
from tests.support.optimizers import OPTIMIZERS

BACKEND = HostBackend(Threads(1))


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def rows_of(cls, **options):
    optimizer = cls([parameter()], **options)
    return row_optimizer_of(optimizer, optimizer.param_groups[0]), optimizer.param_groups[0]


def step(rows, group, number=1, dim=2, weight=1.0, grad=1.0):
    """One row's weights and state after one step from its initial state."""
    row_SW = np.concatenate([np.full(dim, weight), rows.initial_state(dim)]).astype(np.float32)[None]
    rows.run(
        row_SW, row_SW, np.zeros(1, np.int64), np.full((1, dim), grad, np.float32),
        state_begin=dim, group=group, step=number, backend=BACKEND,
    )  # fmt: skip
    return row_SW[0]


@pytest.mark.parametrize(
    "cls, options, name, state",
    [
        (torch.optim.SGD, dict(lr=0.1), "sgd", []),
        (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True), "sgd_momentum", [0, 0, 0]),
        (torch.optim.Adagrad, dict(initial_accumulator_value=0.25), "adagrad", [0.25, 0.25, 0.25]),
        (torch.optim.Adam, dict(), "adam", [0] * 6),
        (torch.optim.Adam, dict(foreach=True, capturable=True), "adam", [0] * 6),
        (torch.optim.AdamW, dict(), "adamw", [0] * 6),
        (torch.optim.Adam, dict(amsgrad=True), "adam_amsgrad", [0] * 9),
        (torch.optim.AdamW, dict(amsgrad=True, maximize=True), "adamw_amsgrad", [0] * 9),
        (torch.optim.SparseAdam, dict(), "sparse_adam", [0] * 6),
        (torch.optim.NAdam, dict(), "nadam", [0] * 6),
        (torch.optim.RAdam, dict(), "radam", [0] * 6),
        (torch.optim.Adamax, dict(), "adamax", [0] * 6),
        (torch.optim.Adadelta, dict(), "adadelta", [0] * 6),
        (torch.optim.RMSprop, dict(), "rmsprop", [0] * 3),
        (torch.optim.RMSprop, dict(momentum=0.9), "rmsprop_momentum", [0] * 6),
        (torch.optim.RMSprop, dict(centered=True), "rmsprop_centered", [0] * 6),
        (torch.optim.RMSprop, dict(centered=True, momentum=0.9), "rmsprop_centered_momentum", [0] * 9),
        (RowWiseAdagrad, dict(initial_accumulator_value=0.25), "row_wise_adagrad", [0.25]),
        (Ftrl, dict(initial_accumulator_value=0.5), "ftrl", [0.5, 0.5, 0.5, 0, 0, 0]),
        (SmartDecayAdam, dict(), "smart_decay_adam", [0] * 7),
        (Lamb, dict(), "lamb", [0] * 6),
        (Lars, dict(), "lars", [0] * 3),
        (PartialRowWiseAdam, dict(), "partial_row_wise_adam", [0] * 4),
    ],
    ids=str,
)
def test_a_new_row_holds_the_optimizers_initial_state(cls, options, name, state):
    rows, _ = rows_of(cls, **options)
    initial = rows.initial_state(3)
    assert rows.name == name
    assert rows.state_width(3) == len(state) == len(initial)
    assert initial.dtype == np.float32 and initial.tolist() == state


def test_adam_with_decoupled_weight_decay_is_adamw():
    if "decoupled_weight_decay" not in torch.optim.Adam([parameter()]).defaults:
        pytest.skip("this torch has the option in AdamW only")
    assert rows_of(torch.optim.Adam, decoupled_weight_decay=True)[0].name == "adamw"


def test_adagrad_starts_every_group_as_torch_does():
    """torch.optim.Adagrad gives the constructor's value to all groups, whatever a group says."""
    groups = [{"params": [parameter()], "initial_accumulator_value": 7.0}]
    optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=0.5)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["sum"].item() == 0.5
    assert row_optimizer_of(optimizer, optimizer.param_groups[0]).initial_state(1).tolist() == [0.5]


# Every optimizer of torch that is followed, with options none of which is at its default.
FOLLOWED = [
    (torch.optim.SGD, dict(lr=0.3, weight_decay=0.1)),
    (torch.optim.SGD, dict(lr=0.3, momentum=0.8, dampening=0.2, weight_decay=0.1)),
    (torch.optim.SGD, dict(lr=0.3, momentum=0.8, nesterov=True)),
    (torch.optim.Adagrad, dict(lr=0.3, lr_decay=0.5, weight_decay=0.1, initial_accumulator_value=0.2, eps=0.1)),
    (torch.optim.Adam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (torch.optim.AdamW, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (torch.optim.Adam, dict(lr=0.3, betas=(0.8, 0.4), weight_decay=0.1, amsgrad=True)),
    (torch.optim.AdamW, dict(lr=0.3, betas=(0.8, 0.4), weight_decay=0.1, amsgrad=True)),
    (torch.optim.SparseAdam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1)),
    (torch.optim.NAdam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1, momentum_decay=0.1)),
    (torch.optim.NAdam, dict(lr=0.3, weight_decay=0.1, decoupled_weight_decay=True)),
    (torch.optim.RAdam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (torch.optim.RAdam, dict(lr=0.3, betas=(0.8, 0.99), weight_decay=0.1, decoupled_weight_decay=True)),
    (torch.optim.Adamax, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (torch.optim.Adadelta, dict(lr=0.3, rho=0.8, eps=0.1, weight_decay=0.1)),
    (torch.optim.RMSprop, dict(lr=0.3, alpha=0.8, eps=0.1, weight_decay=0.1)),
    (torch.optim.RMSprop, dict(lr=0.3, alpha=0.8, eps=0.1, momentum=0.7, centered=True)),
    (RowWiseAdagrad, dict(lr=0.3, weight_decay=0.1, initial_accumulator_value=0.2, eps=0.1)),
    (Ftrl, dict(lr=0.3, lr_power=-0.6, lambda1=0.1, lambda2=0.2, beta=0.3, weight_decay=0.1)),
    (SmartDecayAdam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (Lamb, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
    (Lars, dict(lr=0.3, momentum=0.8, eta=0.5, weight_decay=0.1)),
    (PartialRowWiseAdam, dict(lr=0.3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)),
]


def test_the_list_of_optimizers_has_each_that_there_is():
    classes = {type(case([parameter()])) for case in OPTIMIZERS.values()}
    assert classes == {pkgutil.resolve_name(name) for name in KNOWN}


def rows_and_dense(cls, options, change=None, steps=7):
    """The weights of six rows and those of a dense parameter after as many steps, at the middle of which the group's
    options change; a scheduler changes the rate at each."""
    rng = np.random.default_rng(1)
    weight_SD = rng.normal(0, 1, (6, 5)).astype(np.float32)
    dense = torch.nn.Parameter(torch.from_numpy(weight_SD.copy()))
    optimizer = cls([dense], **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    group = optimizer.param_groups[0]
    rows = row_optimizer_of(optimizer, group)
    row_SW = np.concatenate([weight_SD, np.tile(rows.initial_state(5), (6, 1))], axis=1)
    slot_U = np.arange(6, dtype=np.int64)
    for number in range(1, steps + 1):
        if number == steps // 2:
            group.update(change or {})
        grad_UD = rng.normal(0, 1, (6, 5)).astype(np.float32)
        rows.run(row_SW, row_SW, slot_U, grad_UD, state_begin=5, group=group, step=number, backend=BACKEND)
        grad = torch.from_numpy(grad_UD)
        dense.grad = grad.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else grad
        optimizer.step()
        scheduler.step()
    return row_SW[:, :5], dense.detach().numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_of_each_optimizer_step_as_a_dense_parameter_does(name):
    found, expected = rows_and_dense(OPTIMIZERS[name], {})
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls, options", FOLLOWED, ids=str)
def test_rows_step_as_a_dense_parameter_does_while_a_scheduler_changes_the_rate(cls, options):
    found, expected = rows_and_dense(cls, options)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


# Options that are set in a group after its optimizer was made, and that rows follow.
CHANGES = [
    *((cls, options, dict(maximize=True)) for cls, options in FOLLOWED if cls.__module__.startswith("torch.")),
    (torch.optim.SGD, dict(lr=0.3, momentum=0.8), dict(momentum=0.0)),
    (torch.optim.SGD, dict(lr=0.3, momentum=0.8), dict(momentum=0.5, dampening=0.1, maximize=True)),
    (torch.optim.SGD, dict(lr=0.3, momentum=0.8), dict(nesterov=True)),
    (torch.optim.Adam, dict(lr=0.3, weight_decay=0.1), dict(decoupled_weight_decay=True)),
    (torch.optim.Adam, dict(lr=0.3, betas=(0.8, 0.9)), dict(betas=(0.5, 0.6), eps=0.1, weight_decay=0.1)),
    (torch.optim.Adam, dict(lr=0.3, betas=(0.8, 0.4), amsgrad=True), dict(amsgrad=False)),
    (torch.optim.AdamW, dict(lr=0.3, weight_decay=0.1), dict(decoupled_weight_decay=False)),
    (torch.optim.NAdam, dict(lr=0.3, weight_decay=0.1), dict(decoupled_weight_decay=True)),
    (torch.optim.RAdam, dict(lr=0.3, weight_decay=0.1), dict(decoupled_weight_decay=True)),
    (torch.optim.RAdam, dict(lr=0.3), dict(betas=(0.5, 0.6))),
    (torch.optim.RMSprop, dict(lr=0.3, momentum=0.8), dict(momentum=0.0)),
    (torch.optim.RMSprop, dict(lr=0.3, momentum=0.8, centered=True, eps=0.1), dict(momentum=0.0, alpha=0.8)),
]


@pytest.mark.parametrize("cls, options, change", CHANGES, ids=str)
def test_an_option_that_changes_reaches_rows_as_it_reaches_dense_parameters(cls, options, change):
    if any(option not in cls([parameter()], **options).defaults for option in change):
        pytest.skip("this torch does not have the option here")
    found, expected = rows_and_dense(cls, options, change)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(found, rows_and_dense(cls, options)[0], rtol=1e-3)


# Options for which the rows of an optimizer that was made without them have no state, or that are not for rows.
REFUSED_CHANGES = [
    (torch.optim.SGD, dict(lr=0.1), dict(momentum=0.9), "momentum must stay off, .* got 0.9"),
    (torch.optim.Adam, dict(), dict(amsgrad=True), "amsgrad must stay off, .* got True"),
    (torch.optim.AdamW, dict(), dict(amsgrad=True), "amsgrad must stay off, .* got True"),
    (torch.optim.RMSprop, dict(), dict(momentum=0.9), "momentum must stay off, .* got 0.9"),
    (torch.optim.RMSprop, dict(), dict(centered=True), "centered must stay off, .* got True"),
    (torch.optim.RMSprop, dict(centered=True), dict(centered=False), "centered must stay True"),
    (torch.optim.NAdam, dict(), dict(betas=(0.8, 0.999)), r"betas must stay \(0.9, 0.999\)"),
    (torch.optim.NAdam, dict(), dict(momentum_decay=0.1), "momentum_decay must stay 0.004"),
    (torch.optim.Adam, dict(), dict(differentiable=True), r"Adam\(differentiable=True\) is not supported"),
]


@pytest.mark.parametrize("cls, options, change, message", REFUSED_CHANGES, ids=str)
def test_an_option_that_changes_into_what_rows_cannot_follow_is_refused_before_the_step(cls, options, change, message):
    rows, group = rows_of(cls, **options)
    rows.check(group)
    group.update(change)
    with pytest.raises(ValueError, match=message):
        rows.check(group)


def test_an_option_that_only_some_classes_have_is_not_followed_where_dense_parameters_ignore_it():
    rows, group = rows_of(RowWiseAdagrad, lr=0.1)
    expected = step(rows, group)
    group["maximize"] = True
    assert step(rows, group).tolist() == expected.tolist()


def test_a_tensor_lr_is_read_as_a_number():
    for lr in (0.5, torch.tensor(0.5)):
        rows, group = rows_of(torch.optim.SGD, lr=lr)
        assert step(rows, group).tolist() == [0.5, 0.5]


def test_integers_among_options_are_read_as_floats():
    """Loops are compiled for the types of scalars, and would compute with an integer in another precision."""
    options = dict(lr=3, betas=(0.0, 0.5), eps=1, weight_decay=2)
    floats = dict(lr=3.0, betas=(0.0, 0.5), eps=1.0, weight_decay=2.0)
    found = []
    for of_group in (options, floats):
        rows, group = rows_of(torch.optim.Adam, **of_group)
        found.append(step(rows, group).tobytes())
        planned = update_adam.plan_of_group(1, group)[1]
        assert all(type(scalar) in (float, bool, np.float32) for scalar in planned), planned
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "cls, beta2, number",
    [
        (torch.optim.Adam, 1.5, 1),
        (torch.optim.AdamW, -1.5, 2),
        (torch.optim.RAdam, 1.5, 1),
        (torch.optim.RAdam, -1.5, 5),
    ],
)
def test_betas_whose_correction_is_complex_are_refused_before_a_loop_is_compiled_for_complex_numbers(
    cls, beta2, number
):
    rows, group = rows_of(cls)
    group["betas"] = (0.9, beta2)
    with pytest.raises(TypeError, match="complex"):
        step(rows, group, number)


@pytest.mark.parametrize(
    "cls, option",
    [
        (torch.optim.SGD, "differentiable"),
        (torch.optim.Adagrad, "differentiable"),
        (torch.optim.Adam, "differentiable"),
        (torch.optim.AdamW, "differentiable"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(cls, option):
    with pytest.raises(ValueError, match=rf"{cls.__name__}\({option}=True\)"):
        rows_of(cls, **{option: True})


def test_an_option_that_only_one_group_sets_is_refused_there():
    first, second = parameter(), parameter()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second], "differentiable": True}])
    assert row_optimizer_of(optimizer, optimizer.param_groups[0]).name == "adam"
    with pytest.raises(ValueError, match="differentiable"):
        row_optimizer_of(optimizer, optimizer.param_groups[1])


def test_an_option_of_a_torch_to_come_is_refused_unless_it_is_off():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    group = optimizer.param_groups[0]
    optimizer.defaults["cautious"] = group["cautious"] = False
    assert row_optimizer_of(optimizer, group).name == "sgd"
    group["cautious"] = True
    with pytest.raises(ValueError, match="cautious"):
        row_optimizer_of(optimizer, group)


def test_what_schedulers_keep_in_a_group_is_no_option():
    optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert row_optimizer_of(optimizer, optimizer.param_groups[0]).name == "sgd_momentum"


class MySGD(torch.optim.SGD):
    pass


class MyFtrl(Ftrl):
    pass


@pytest.mark.parametrize("cls", [torch.optim.Rprop, MySGD, MyFtrl])
def test_another_class_is_refused_with_the_list_of_those_supported(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__}.*SGD, Adagrad, Adam, AdamW, SparseAdam.*SmartDecayAdam"):
        rows_of(cls, lr=0.1)


def test_momentum_that_a_scheduler_turns_off_leaves_the_buffer_alone():
    rows, group = rows_of(torch.optim.SGD, lr=0.5, momentum=0.9)
    assert step(rows, group).tolist() == [0.5, 0.5, 1.0, 1.0]
    group["momentum"] = 0.0
    assert step(rows, group, number=2).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_ftrl_at_rate_zero_is_an_error():
    rows, group = rows_of(Ftrl, lr=0.1)
    group["lr"] = 0.0
    with pytest.raises(ValueError, match="lr must be above 0"):
        rows.check(group)
