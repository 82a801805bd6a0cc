"""From a torch optimizer to the update of an embedding's rows.

    row_optimizer_of(torch.optim.Adam(...), group)  ->  RowOptimizer "adam"

A RowOptimizer says how many state values a row carries after its weights, what they are in a new row, and how the
rows of one step are updated. Rates, betas and the like are read from the param group at every step, so that a
learning rate scheduler works; what decides the width of a row (the class, whether there is momentum) is fixed.

Invariant: an option that changes what the optimizer computes is either followed or refused by name, in every
torch version and whenever it changes: rows and dense parameters never step by different options.
Invariant: an optimizer class is known by itself, never through a base class whose step it may override.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.loops import Loops, Segments
from oneemb.kernels.update_adadelta import update_adadelta
from oneemb.kernels.update_adagrad import update_adagrad
from oneemb.kernels.update_adam import update_adam, update_sparse_adam
from oneemb.kernels.update_adamax import update_adamax
from oneemb.kernels.update_ftrl import update_ftrl
from oneemb.kernels.update_lamb import update_lamb
from oneemb.kernels.update_lars import update_lars
from oneemb.kernels.update_nadam import update_nadam
from oneemb.kernels.update_partial_row_wise_adam import update_partial_row_wise_adam
from oneemb.kernels.update_radam import update_radam
from oneemb.kernels.update_rmsprop import update_rmsprop
from oneemb.kernels.update_row_wise_adagrad import update_row_wise_adagrad
from oneemb.kernels.update_sgd import update_sgd, update_sgd_momentum
from oneemb.kernels.update_smart_decay_adam import update_smart_decay_adam

__all__ = [
    "SAME_STATE",
    "RowOptimizer",
    "ftrl_rows",
    "lamb_rows",
    "lars_rows",
    "partial_row_wise_adam_rows",
    "row_optimizer_of",
    "row_wise_adagrad_rows",
    "smart_decay_adam_rows",
]

Group = dict[str, Any]
"""A param group; torch types its options so."""

SAME_STATE = ("adam", "adamw", "sparse_adam")
"""Row optimizers whose state is the same two values for each weight: the moments of its gradient."""

SUPPORTED = (
    "torch.optim.SGD, Adagrad, Adam, AdamW, SparseAdam, NAdam, RAdam, Adamax, Adadelta, RMSprop; oneemb.optim.Ftrl, "
    "Lamb, Lars, PartialRowWiseAdam, RowWiseAdagrad, SmartDecayAdam"
)

# Options that only choose among torch's own implementations of the same step.
_IMPLEMENTATION = {"foreach", "fused", "capturable"}


class RunUpdate(Protocol):
    """Steps rows in place; see `RowOptimizer.update`, whose arguments it has."""

    def __call__(self, *rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
        """`rows` are weight_SX, row_SW, slot_U and grad_UD, the last an array or segments."""


@dataclass(frozen=True)
class RowOptimizer:
    """The update of an embedding's rows by one optimizer.

    Args:
        name: of the class in small letters, "row_wise_adagrad", with the options that make its rows wider:
            "sgd_momentum", "adam_amsgrad". Rows on disk are known by it.
        weight_state: for each state value that every weight has, what it is in a new row.
        row_state: the same for the values that a row has once; they lie after the others.
        run: steps the rows.
        check: raises ValueError where the group's options have changed into what the rows cannot follow. Called for
            every row optimizer of a step before any of them runs.
        fixed: options that must stay as they are, with their values; rows with other values are stepped separately.
    """

    name: str
    weight_state: tuple[float, ...]
    row_state: tuple[float, ...]
    run: RunUpdate
    check: Callable[[Group], None] = lambda group: None
    fixed: tuple[tuple[str, Any], ...] = ()

    def state_width(self, dim: int) -> int:
        """Float32 values of state in a row of `dim` weights."""
        return len(self.weight_state) * dim + len(self.row_state)

    def initial_state(self, dim: int) -> np.ndarray:
        """The state of a new row: float32 [state_width(dim)]."""
        weight_state = np.repeat(np.asarray(self.weight_state, np.float32), dim)
        return np.concatenate([weight_state, np.asarray(self.row_state, np.float32)])

    def update(
        self,
        weight_SX: Array,
        row_SW: Array,
        slot_U: Array,
        grad_UD: Array | Segments,
        *,
        state_begin: int,
        group: Group,
        step: int,
        loops: Loops,
    ) -> None:
        """Step the rows in slot_U, in place.

        Args:
            weight_SX, row_SW, slot_U, grad_UD: as in oneemb.kernels.row_update.
            state_begin: word of a row at which its state begins.
            group: the optimizer's param group as it is now.
            step: the optimizer's global step, from 1.
            loops: what the update runs on.

        Raises:
            ValueError: the group's options changed into what these rows cannot follow.
        """
        self.check(group)
        self.run(weight_SX, row_SW, slot_U, grad_UD, state_begin=state_begin, group=group, step=step, loops=loops)


def row_optimizer_of(optimizer: torch.optim.Optimizer, group: Group) -> RowOptimizer:
    """The row optimizer that does what `optimizer` does to the parameters of `group`, one of its param_groups.

    Besides the classes of torch.optim it takes any optimizer whose own class defines
    `row_optimizer(self, group) -> RowOptimizer`, as those of oneemb.optim do.

    Raises:
        ValueError: an option is set that embedding rows do not support; the message names it.
        TypeError: the optimizer is of another class, or of a subclass of a supported one.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> adam = torch.optim.Adam([weight])
        >>> row_optimizer_of(adam, adam.param_groups[0]).state_width(dim=16)
        32
    """
    cls = type(optimizer)
    own = vars(cls).get("row_optimizer")
    if own is not None:
        return own(optimizer, group)
    if cls not in _TORCH:
        raise TypeError(
            f"embedding rows cannot be stepped by {cls.__module__}.{cls.__qualname__}; supported are {SUPPORTED}, "
            "those classes themselves and not subclasses, which may step differently"
        )
    rows = _TORCH[cls](optimizer, group)
    known = rows.options | set(rows.wider) | set(rows.fixed) | _IMPLEMENTATION | {"maximize"}
    check = _Check(
        cls.__name__,
        refused=tuple(option for option in optimizer.defaults if option not in known),
        without=tuple(option for option in rows.wider if _is_off(group.get(option))),
        fixed={option: group[option] for option in rows.fixed},
    )
    check({**optimizer.defaults, **group})
    wider = [option for option in rows.wider if option not in check.without]
    run = partial(_run_signed, rows.run) if "maximize" in optimizer.defaults else rows.run
    fixed = tuple((option, _plain(group[option])) for option in rows.fixed)
    return RowOptimizer("_".join([rows.name, *wider]), rows.state + (0.0,) * len(wider), (), run, check, fixed)


class _TorchRows(NamedTuple):
    """How rows follow the options of a class of torch.optim. `maximize` is followed for every class that has it.

    Args:
        name: of the row optimizer, to which those options of `wider` are added that are on.
        options: those that `run` reads at every step.
        run: steps the rows.
        state: for each state value that every weight has, what it is in a new row.
        wider: options each of which gives every weight one state value more, 0 in a new row, in this order. None can be
            turned on later. `run` reads them too; one that is turned off must not move the state of others.
        fixed: options that must stay as they are.
    """

    name: str
    options: set[str]
    run: RunUpdate
    state: tuple[float, ...] = ()
    wider: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Check:
    """Raises where a group of a class of torch.optim asks for what its rows cannot follow.

    Args:
        cls: the name of the class.
        refused: options that must be off.
        without: options that must stay off, since the rows have no room for their state.
        fixed: options that must keep these values.
    """

    cls: str
    refused: tuple[str, ...]
    without: tuple[str, ...]
    fixed: Group

    def __call__(self, group: Group) -> None:
        for option in self.refused:
            if not _is_off(group.get(option)):
                raise ValueError(
                    f"torch.optim.{self.cls}({option}={group[option]!r}) is not supported on embedding rows; "
                    f"leave {option} at its default"
                )
        for option in self.without:
            if not _is_off(group.get(option)):
                raise ValueError(
                    f"{option} is now {group[option]}, but it was off when the rows were laid out and they have no "
                    f"room for its state; construct torch.optim.{self.cls} with {option}={group[option]!r}"
                )
        for option, value in self.fixed.items():
            if _plain(group[option]) != _plain(value):
                raise ValueError(
                    f"{option} must stay {value!r}, which it was when the rows were laid out, got {group[option]!r}; "
                    f"set it back, or construct torch.optim.{self.cls} with {option}={group[option]!r}"
                )


def _run_signed(
    run: RunUpdate,
    weight_SX: Array,
    row_SW: Array,
    slot_U: Array,
    grad_UD: Array | Segments,
    *,
    state_begin: int,
    group: Group,
    step: int,
    loops: Loops,
) -> None:
    """Steps rows up their gradients where the group says `maximize`, whatever the optimizer."""
    if group.get("maximize", False):
        grad_UD = loops.negated(grad_UD)
    run(weight_SX, row_SW, slot_U, grad_UD, state_begin=state_begin, group=group, step=step, loops=loops)


def _is_off(value: object) -> bool:
    """Whether an option with this value asks for nothing."""
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _plain(value: Any) -> Any:
    """An option's value to compare: state dicts may hold a list for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _number(group: Group, option: str) -> float:
    """The option as a Python float; torch allows tensors of one element for some."""
    return float(group[option])


def _betas(group: Group) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _run_sgd(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    momentum = _number(group, "momentum")
    if momentum == 0:
        # Where there was momentum before, buffers stay as they are, as in torch.
        update_sgd(
            *rows,
            state_begin=state_begin,
            lr=_number(group, "lr"),
            weight_decay=_number(group, "weight_decay"),
            loops=loops,
        )
        return
    update_sgd_momentum(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        momentum=momentum,
        dampening=_number(group, "dampening"),
        nesterov=group["nesterov"],
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def _run_adagrad(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_adagrad(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        lr_decay=_number(group, "lr_decay"),
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def _run_adam(
    *rows: Array, state_begin: int, group: Group, step: int, loops: Loops, decoupled_weight_decay: bool = False
) -> None:
    beta1, beta2 = _betas(group)
    update_adam(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        decoupled_weight_decay=group.get("decoupled_weight_decay", decoupled_weight_decay),
        amsgrad=group["amsgrad"],
        loops=loops,
    )


def _run_nadam(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    beta1, beta2 = _betas(group)
    update_nadam(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        momentum_decay=_number(group, "momentum_decay"),
        decoupled_weight_decay=group["decoupled_weight_decay"],
        loops=loops,
    )


def _run_radam(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    beta1, beta2 = _betas(group)
    update_radam(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        decoupled_weight_decay=group["decoupled_weight_decay"],
        loops=loops,
    )


def _run_with_betas(
    update: Callable[..., None], *rows: Array, state_begin: int, group: Group, step: int, loops: Loops
) -> None:
    """For an update that has Adam's options and no other."""
    beta1, beta2 = _betas(group)
    update(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def _run_adadelta(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_adadelta(
        *rows,
        state_begin=state_begin,
        lr=_number(group, "lr"),
        rho=_number(group, "rho"),
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def _run_rmsprop(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_rmsprop(
        *rows,
        state_begin=state_begin,
        lr=_number(group, "lr"),
        alpha=_number(group, "alpha"),
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        momentum=_number(group, "momentum"),
        centered=group["centered"],
        loops=loops,
    )


def _run_sparse_adam(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    beta1, beta2 = _betas(group)
    update_sparse_adam(
        *rows,
        state_begin=state_begin,
        step=step,
        lr=_number(group, "lr"),
        beta1=beta1,
        beta2=beta2,
        eps=_number(group, "eps"),
        loops=loops,
    )


def row_wise_adagrad_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.RowWiseAdagrad."""
    initial = _number(group, "initial_accumulator_value")
    return RowOptimizer("row_wise_adagrad", (), (initial,), _run_row_wise_adagrad)


def _run_row_wise_adagrad(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_row_wise_adagrad(
        *rows,
        state_begin=state_begin,
        lr=_number(group, "lr"),
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def ftrl_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.Ftrl."""
    return RowOptimizer("ftrl", (_number(group, "initial_accumulator_value"), 0.0), (), _run_ftrl, _check_ftrl)


def _check_ftrl(group: Group) -> None:
    lr = _number(group, "lr")
    if not lr > 0:
        raise ValueError(f"Ftrl divides by lr, so lr must be above 0, got {lr}; let the scheduler end above 0")


def _run_ftrl(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_ftrl(
        *rows,
        state_begin=state_begin,
        lr=_number(group, "lr"),
        lr_power=_number(group, "lr_power"),
        lambda1=_number(group, "lambda1"),
        lambda2=_number(group, "lambda2"),
        beta=_number(group, "beta"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def smart_decay_adam_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.SmartDecayAdam."""
    run = partial(_run_with_betas, update_smart_decay_adam)
    return RowOptimizer("smart_decay_adam", (0.0, 0.0), (0.0,), run)


def lamb_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.Lamb."""
    return RowOptimizer("lamb", (0.0, 0.0), (), partial(_run_with_betas, update_lamb))


def partial_row_wise_adam_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.PartialRowWiseAdam."""
    run = partial(_run_with_betas, update_partial_row_wise_adam)
    return RowOptimizer("partial_row_wise_adam", (0.0,), (0.0,), run)


def lars_rows(group: Group) -> RowOptimizer:
    """Rows stepped by oneemb.optim.Lars."""
    return RowOptimizer("lars", (0.0,), (), _run_lars)


def _run_lars(*rows: Array, state_begin: int, group: Group, step: int, loops: Loops) -> None:
    update_lars(
        *rows,
        state_begin=state_begin,
        lr=_number(group, "lr"),
        eta=_number(group, "eta"),
        momentum=_number(group, "momentum"),
        weight_decay=_number(group, "weight_decay"),
        loops=loops,
    )


def _sgd_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    return _TorchRows("sgd", {"lr", "dampening", "nesterov", "weight_decay"}, _run_sgd, wider=("momentum",))


def _adagrad_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    # torch.optim.Adagrad fills the sums of every group with the value given to its constructor.
    initial = _number(optimizer.defaults, "initial_accumulator_value")
    options = {"lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"}
    return _TorchRows("adagrad", options, _run_adagrad, (initial,))


def _adam_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    # Since torch 2.7 AdamW is Adam with this option; before, the class alone tells.
    decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    run = partial(_run_adam, decoupled_weight_decay=decoupled)
    options = {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"}
    return _TorchRows("adamw" if decoupled else "adam", options, run, (0.0, 0.0), wider=("amsgrad",))


def _sparse_adam_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    return _TorchRows("sparse_adam", {"lr", "betas", "eps"}, _run_sparse_adam, (0.0, 0.0))


def _nadam_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    # torch multiplies a number of every step so far; rows compute it anew, which takes that those options stay.
    options = {"lr", "eps", "weight_decay", "decoupled_weight_decay"}
    return _TorchRows("nadam", options, _run_nadam, (0.0, 0.0), fixed=("betas", "momentum_decay"))


def _radam_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    options = {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"}
    return _TorchRows("radam", options, _run_radam, (0.0, 0.0))


def _adamax_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    return _TorchRows(
        "adamax", {"lr", "betas", "eps", "weight_decay"}, partial(_run_with_betas, update_adamax), (0.0, 0.0)
    )


def _adadelta_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    return _TorchRows("adadelta", {"lr", "rho", "eps", "weight_decay"}, _run_adadelta, (0.0, 0.0))


def _rmsprop_rows(optimizer: torch.optim.Optimizer, group: Group) -> _TorchRows:
    # Momentum may be turned off, since its state is the last; without `centered` it would lie elsewhere.
    options = {"lr", "alpha", "eps", "weight_decay"}
    return _TorchRows("rmsprop", options, _run_rmsprop, (0.0,), wider=("centered", "momentum"), fixed=("centered",))


_TORCH: dict[type, Callable[[torch.optim.Optimizer, Group], _TorchRows]] = {
    torch.optim.SGD: _sgd_rows,
    torch.optim.Adagrad: _adagrad_rows,
    torch.optim.Adam: _adam_rows,
    torch.optim.AdamW: _adam_rows,
    torch.optim.SparseAdam: _sparse_adam_rows,
    torch.optim.NAdam: _nadam_rows,
    torch.optim.RAdam: _radam_rows,
    torch.optim.Adamax: _adamax_rows,
    torch.optim.Adadelta: _adadelta_rows,
    torch.optim.RMSprop: _rmsprop_rows,
}
