"""Row optimizers: the state in a row and the update of rows that belong to a torch optimizer.

    row_optimizer_of(torch.optim.Adam(...), group)  ->  RowOptimizer "adam"

A RowOptimizer holds the number of state values of a row, their values in a new row, and the function that updates the
rows of one step. Learning rates, betas and the like are read from the param group at every step, so learning rate
schedulers work. The width of a row depends on the class and on options that cannot change, such as momentum.

Invariant: an option that changes what the optimizer computes is either followed or refused by name, in every
torch version and whenever the option changes: rows and dense parameters never step with different options.
Invariant: an optimizer class is found by its own name, never by a base class, since it may override the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Backend
from oneemb.kernels.rule_loops import RowUpdate
from oneemb.kernels.update_adadelta import update_adadelta
from oneemb.kernels.update_adagrad import update_adagrad
from oneemb.kernels.update_adam import update_adam, update_sparse_adam
from oneemb.kernels.update_adamax import update_adamax
from oneemb.kernels.update_ftrl import update_ftrl
from oneemb.kernels.update_lamb import update_lamb
from oneemb.kernels.update_lars import update_lars
from oneemb.kernels.update_lion import update_lion
from oneemb.kernels.update_nadam import update_nadam
from oneemb.kernels.update_partial_row_wise_adam import update_partial_row_wise_adam
from oneemb.kernels.update_radam import update_radam
from oneemb.kernels.update_rmsprop import update_rmsprop
from oneemb.kernels.update_row_wise_adagrad import update_row_wise_adagrad
from oneemb.kernels.update_sgd import update_sgd
from oneemb.kernels.update_smart_decay_adam import update_smart_decay_adam

Group = dict[str, Any]
"""Param group of a torch optimizer. Any: as torch types the options."""

SAME_STATE = ("adam", "adamw", "sparse_adam")
"""Names of the row optimizers that share one state layout: the two moments of the gradient of each weight."""

# Options that only choose among torch's implementations of the same step.
_IMPLEMENTATION = {"foreach", "fused", "capturable"}


class RunUpdate(Protocol):
    """Function that steps rows."""

    def __call__(self, *rows: Array, state_begin: int, group: Group, step: int, backend: Backend) -> None:
        """Step the rows in slot_U, in place.

        Args:
            rows: weight_SX, row_SW, slot_U, and grad_UD as an array or segments; as in oneemb.kernels.row_update.
            state_begin: index of the first state word of a row.
            group: the optimizer's current param group, which `RowOptimizer.check` has checked.
            step: the optimizer's global step, from 1.
            backend: backend of the device of the rows.
        """


@dataclass(frozen=True)
class RowOptimizer:
    """The update of an embedding's rows by one optimizer.

    Args:
        name: class name in small letters ("row_wise_adagrad"), with the options that make rows wider ("sgd_momentum",
            "adam_amsgrad"). Files on disk name the state of their rows by it.
        weight_state: for each state value that every weight has, its value in a new row.
        row_state: the same for each state value that a row has once; these lie behind `weight_state`.
        run: steps the rows.
        check: raises ValueError if options of the group have changed in a way that rows cannot follow. Called for
            every row optimizer of a step before any of them runs.
        fixed: (option, value) of each option that must not change; rows with different values are stepped apart.
        counts_steps: whether an update with the options of a group depends on the number of earlier steps.
    """

    name: str
    weight_state: tuple[float, ...]
    row_state: tuple[float, ...]
    run: RunUpdate
    check: Callable[[Group], None] = lambda group: None
    fixed: tuple[tuple[str, Any], ...] = ()
    counts_steps: Callable[[Group], bool] = lambda group: False

    @cached_property
    def has_own_update(self) -> bool:
        """Whether `run` is a function of the user's, rather than an update of `kernels`."""
        return not isinstance(getattr(self.run, "__self__", None), _KnownUpdate)

    def state_width(self, dim: int) -> int:
        """Number of float32 state values in a row of `dim` weights."""
        return len(self.weight_state) * dim + len(self.row_state)

    def initial_state(self, dim: int) -> np.ndarray:
        """The state of a new row: float32 [state_width(dim)]."""
        weight_state = np.repeat(np.asarray(self.weight_state, np.float32), dim)
        return np.concatenate([weight_state, np.asarray(self.row_state, np.float32)])


def row_optimizer_of(optimizer: torch.optim.Optimizer, group: Group) -> RowOptimizer:
    """The row optimizer that updates rows as `optimizer` updates the parameters of `group`, one of its param_groups.

    Supported are the classes in OPTIMIZERS, and any class that itself defines
    `row_optimizer(self, group) -> RowOptimizer`.

    Raises:
        ValueError: an option is set that embedding rows do not support; the message names it.
        TypeError: the optimizer's class is not supported; a subclass of a supported class is not.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> adam = torch.optim.Adam([weight])
        >>> row_optimizer_of(adam, adam.param_groups[0]).state_width(dim=16)
        32
    """
    own = vars(type(optimizer)).get("row_optimizer")
    return rows_of_class(type(optimizer), optimizer, group) if own is None else own(optimizer, group)


def rows_of_class(cls: type, optimizer: torch.optim.Optimizer, group: Group) -> RowOptimizer:
    """The row optimizer of class `cls`, a class in OPTIMIZERS, for an optimizer of `cls` or of a subclass with the same
    step. Errors are those of `row_optimizer_of`."""
    known = OPTIMIZERS.get(_name_of(cls))
    if known is None:
        raise TypeError(
            f"embedding rows cannot be stepped by {cls.__module__}.{cls.__qualname__}; supported are {SUPPORTED}, "
            "but no subclasses of these, which may step differently"
        )
    wider = [option for option in known.wider if not _is_off(group.get(option))]
    check = known.check
    if check is None:
        followed = known.options | set(known.wider) | _IMPLEMENTATION | {"maximize"}
        check = _Check(
            cls.__name__,
            refused=tuple(option for option in optimizer.defaults if option not in followed),
            without=tuple(option for option in known.wider if option not in wider),
            fixed={option: group[option] for option in known.fixed},
        ).check
        check({**optimizer.defaults, **group})
    options = {**known.absent, **group}
    name = next((name for option, name in known.renamed.items() if options[option]), known.name)
    # torch's classes begin the state of every group with the value that the constructor got, not the group's own.
    initial = optimizer.defaults if cls.__module__.startswith("torch.") else group
    return RowOptimizer(
        "_".join([name, *wider]),
        tuple(_begin(state, initial) for state in known.state) + (0.0,) * len(wider),
        tuple(_begin(state, initial) for state in known.row_state),
        _KnownUpdate(
            known.update, "maximize" in optimizer.defaults, {option: options[option] for option in known.absent}
        ).run,
        check,
        tuple((option, _plain(group[option])) for option in known.fixed),
        known.counts_steps,
    )


def _name_of(cls: type) -> str:
    """The key of OPTIMIZERS for a class."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _begin(state: float | str, options: Mapping[str, Any]) -> float:
    return float(options[state]) if isinstance(state, str) else state


@dataclass(frozen=True)
class _KnownUpdate:
    """Update of rows by an optimizer class of OPTIMIZERS.

    Args:
        signed: whether the class has the option `maximize`, which negates gradients.
        absent: options, with values, that the optimizer's class lacks in this version of torch.
    """

    update: RowUpdate
    signed: bool
    absent: Group

    def run(self, *rows: Array, state_begin: int, group: Group, step: int, backend: Backend) -> None:
        """Step rows with the options of a group; see `RunUpdate`."""
        weight_SX, row_SW, slot_U, grads = rows
        if self.signed and group.get("maximize", False):
            grads = backend.negated(grads)
        options = {**self.absent, **group} if self.absent else group
        loops, scalars = self.update.plan_of_group(step, options)
        backend.update_rows(loops, scalars, weight_SX, row_SW, slot_U, grads, state_begin)


@dataclass(frozen=True)
class _Check:
    """Check that rows can follow the options of a group of a class of torch.optim.

    Args:
        cls: name of the class.
        refused: names of options that must be off.
        without: names of options that must stay off, since the rows have no room for their state.
        fixed: {option: value that it must keep}.
    """

    cls: str
    refused: tuple[str, ...]
    without: tuple[str, ...]
    fixed: Group

    def check(self, group: Group) -> None:
        """Raise ValueError if rows cannot follow the options of a group."""
        # Most options are False, which needs no call.
        for option in self.refused:
            if (value := group.get(option)) is not False and not _is_off(value):
                raise ValueError(
                    f"torch.optim.{self.cls}({option}={group[option]!r}) is not supported on embedding rows; "
                    f"leave {option} at its default"
                )
        for option in self.without:
            if (value := group.get(option)) is not False and not _is_off(value):
                raise ValueError(
                    f"{option} must stay off, since the rows have no room for its state, got {group[option]}; set it "
                    f"back, or construct torch.optim.{self.cls} with {option}={group[option]!r}"
                )
        for option, value in self.fixed.items():
            if _plain(group[option]) != _plain(value):
                raise ValueError(
                    f"{option} must stay {value!r}, as the state of the rows needs, got {group[option]!r}; set it "
                    f"back, or construct torch.optim.{self.cls} with {option}={group[option]!r}"
                )


def _is_off(value: object) -> bool:
    """Whether an option with this value has no effect."""
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _plain(value: Any) -> Any:
    """An option's value for comparisons: state dicts may hold a list in place of a tuple."""
    return tuple(value) if isinstance(value, list) else value


# ---- supported optimizers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownOptimizer:
    """Properties of a class of optimizers. `maximize` is followed for every class that has it.

    Args:
        name: name of the row optimizer, without the options of `wider` that are on.
        update: function that steps the rows. Its options have the names of the class's options, except beta1 and beta2
            (`betas`).
        state: for each state value that every weight has: its value in a new row, or the option that holds this value.
        row_state: the same for each state value that a row has once.
        wider: options each of which adds one state value to every weight, 0 in a new row, in this order. They cannot be
            turned on later. An option that is turned off later must not move the state of the others.
        fixed: names of options that must not change.
        absent: {option that some versions of the class lack: value with the same effect as the lacking option}.
        renamed: {option: name of the row optimizer if the option is on}.
        check: raises ValueError if rows cannot follow the options of a group; None = check the names of the options.
        counts_steps: whether an update with the options of a group depends on the number of earlier steps.
        fbgemm: values of FBGEMM's EmbOptimType for this optimizer; the last one is the usual value.
        fbgemm_options: options of FBGEMM's optimizer, by their names in the class.
        torchrec: name of the class in torchrec.optim for FBGEMM's optimizer.
        names: {library: its names of the parts of the state}, `state` first and `row_state` last. A library that is
            missing has no such optimizer, or keeps other numbers than the rows.
    """

    name: str
    update: RowUpdate
    state: tuple[float | str, ...] = ()
    row_state: tuple[float | str, ...] = ()
    wider: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    absent: Group = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Group], None] | None = None
    counts_steps: Callable[[Group], bool] = lambda group: False
    fbgemm: tuple[str, ...] = ()
    fbgemm_options: tuple[str, ...] = ()
    torchrec: str | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def options(self) -> set[str]:
        """Names of the class's options that rows follow."""
        names = {"betas" if name in ("beta1", "beta2") else name for name in self.update.options}
        return names | {state for state in self.state + self.row_state if isinstance(state, str)}


def _check_ftrl(group: Group) -> None:
    lr = float(group["lr"])
    if not lr > 0:
        raise ValueError(f"Ftrl divides by lr, so lr must be above 0, got {lr}; let the scheduler end above 0")


def _always(group: Group) -> bool:
    return True


_ADAM_OPTIONS = ("lr", "eps", "betas", "weight_decay")
_ACC = "initial_accumulator_value"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WIDER = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""{option of `KnownOptimizer.wider`: torch's name of its state}."""

OPTIMIZERS = {
    "torch.optim.SGD": KnownOptimizer(
        "sgd", update_sgd, wider=("momentum",),
        counts_steps=lambda group: bool(group.get("momentum")) and bool(group.get("dampening")),
        fbgemm=("sgd", "exact_sgd"), fbgemm_options=("lr",), torchrec="SGD", names={"torch": ()},
    ),
    "torch.optim.Adagrad": KnownOptimizer(
        "adagrad", update_adagrad, (_ACC,), counts_steps=lambda group: bool(group.get("lr_decay")),
        fbgemm=("adagrad", "exact_adagrad"), fbgemm_options=("lr", "eps", _ACC), torchrec="Adagrad",
        names={
            "torch": ("sum",), "torchrec": ("momentum1",), "tfra": ("accumulator",), "hugectr": ("AdaGrad.accm",)
        },
    ),
    # Since torch 2.7, AdamW is Adam with decoupled_weight_decay; earlier versions have no such option.
    "torch.optim.Adam": KnownOptimizer(
        "adam", update_adam, (0.0, 0.0), wider=("amsgrad",), absent={"decoupled_weight_decay": False},
        renamed={"decoupled_weight_decay": "adamw"}, counts_steps=_always,
        names={
            "torch": _MOMENTS, "torchrec": ("momentum1", "exp_avg_sq"), "tfra": ("m", "v"),
            "hugectr": ("Adam.m", "Adam.v"),
        },
    ),
    "torch.optim.AdamW": KnownOptimizer(  # FBGEMM's Adam decays weights apart from gradients.
        "adam", update_adam, (0.0, 0.0), wider=("amsgrad",), absent={"decoupled_weight_decay": True},
        renamed={"decoupled_weight_decay": "adamw"}, counts_steps=_always,
        fbgemm=("adam",), fbgemm_options=_ADAM_OPTIONS, torchrec="Adam",
    ),
    "torch.optim.SparseAdam": KnownOptimizer(
        "sparse_adam", update_sparse_adam, (0.0, 0.0), counts_steps=_always, names={"torch": _MOMENTS}
    ),
    # torch keeps a product over all steps so far. Rows compute it anew, which is right only with unchanged options.
    "torch.optim.NAdam": KnownOptimizer(
        "nadam", update_nadam, (0.0, 0.0), fixed=("betas", "momentum_decay"), counts_steps=_always,
        names={"torch": _MOMENTS},
    ),
    "torch.optim.RAdam": KnownOptimizer(
        "radam", update_radam, (0.0, 0.0), counts_steps=_always, names={"torch": _MOMENTS}
    ),
    "torch.optim.Adamax": KnownOptimizer(
        "adamax", update_adamax, (0.0, 0.0), counts_steps=_always, names={"torch": ("exp_avg", "exp_inf")}
    ),
    "torch.optim.Adadelta": KnownOptimizer(
        "adadelta", update_adadelta, (0.0, 0.0), names={"torch": ("square_avg", "acc_delta")}
    ),
    # Momentum may be turned off, since its state is the last. Turning off `centered` would move the momentum state.
    "torch.optim.RMSprop": KnownOptimizer(
        "rmsprop", update_rmsprop, (0.0,), wider=("centered", "momentum"), fixed=("centered",),
        names={"torch": ("square_avg",), "tfra": ("rms",)},
    ),
    "oneemb.optim.Ftrl": KnownOptimizer(
        "ftrl", update_ftrl, (_ACC, 0.0), check=_check_ftrl,
        names={"torch": ("n", "z"), "tfra": ("accumulator", "linear"), "hugectr": ("Ftrl.n", "Ftrl.z")},
    ),
    "oneemb.optim.Lamb": KnownOptimizer(
        "lamb", update_lamb, (0.0, 0.0), counts_steps=_always,
        fbgemm=("lamb",), fbgemm_options=_ADAM_OPTIONS, torchrec="LAMB",
    ),
    "oneemb.optim.Lars": KnownOptimizer(
        "lars", update_lars, (0.0,),
        fbgemm=("lars_sgd",), fbgemm_options=("lr", "momentum", "eta", "weight_decay"), torchrec="LarsSGD",
    ),
    "oneemb.optim.Lion": KnownOptimizer("lion", update_lion, (0.0,)),
    "oneemb.optim.PartialRowWiseAdam": KnownOptimizer(
        "partial_row_wise_adam", update_partial_row_wise_adam, (0.0,), (0.0,), counts_steps=_always,
        fbgemm=("partial_row_wise_adam",), fbgemm_options=_ADAM_OPTIONS, torchrec="PartialRowWiseAdam",
        names={"torch": ("m", "v"), "torchrec": ("momentum1", "exp_avg_sq")},
    ),
    "oneemb.optim.RowWiseAdagrad": KnownOptimizer(
        "row_wise_adagrad", update_row_wise_adagrad, (), (_ACC,),
        fbgemm=("row_wise_adagrad", "exact_row_wise_adagrad"), fbgemm_options=("lr", "eps", "weight_decay", _ACC),
        torchrec="RowWiseAdagrad",
        names={"torch": ("acc",), "torchrec": ("momentum1",)},
    ),
    "oneemb.optim.SmartDecayAdam": KnownOptimizer(
        "smart_decay_adam", update_smart_decay_adam, (0.0, 0.0), (0.0,), counts_steps=_always
    ),
}  # fmt: skip
"""{full name of a class: its properties}."""


class StateNames(NamedTuple):
    """Names that another library gives to the parts of the state of one row optimizer."""

    weight_state: tuple[str, ...]
    """Parts that every weight has."""
    row_state: tuple[str, ...]
    """Parts that a row has once."""
    counts_steps: bool
    """Whether every update depends on the number of earlier steps."""


def states_in(library: str) -> dict[str, StateNames]:
    """{name of a row optimizer: names of the parts of its state} for all whose state means the same in a library:
    "torch", "torchrec", "tfra" or "hugectr"."""
    found: dict[str, StateNames] = {}
    for known in OPTIMIZERS.values():
        if library not in known.names:
            continue
        names, of_weights = known.names[library], len(known.state)
        wider: list[tuple[str, ...]] = [()]
        for option in known.wider if library == "torch" else ():
            wider += [(*options, option) for options in wider]
        for name in (known.name, *known.renamed.values()):
            for options in sorted(wider, key=lambda options: [known.wider.index(option) for option in options]):
                parts = (*names[:of_weights], *(_WIDER[option] for option in options))
                found.setdefault(
                    "_".join([name, *options]), StateNames(parts, names[of_weights:], known.counts_steps({}))
                )
    if SAME_STATE[0] in found:
        found = {**dict.fromkeys(SAME_STATE, found[SAME_STATE[0]]), **found}
    return found


def _supported() -> str:
    packages: dict[str, list[str]] = {}
    for name in OPTIMIZERS:
        package, _, own = name.rpartition(".")
        packages.setdefault(package, []).append(own)
    return "; ".join(f"{package}.{', '.join(names)}" for package, names in packages.items())


SUPPORTED = _supported()
"""Names of the supported classes, for error texts."""
