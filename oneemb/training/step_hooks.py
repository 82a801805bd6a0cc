"""Lets torch's own optimizers train rows: hooks around every `optimizer.step()` of the process.

    before   the optimizer's own hooks run, which see the gradients of rows; then these are taken out of `weight.grad`,
             which torch's step must not see; embeddings without an optimizer are attached to this one; what is not
             finite is refused
    after    the rows are updated, with the options that the step was made with, and the gradients are put back

A step that raises in between gives the weights their gradients back, as soon as its error is dropped; if that is kept
until the next step, they are gone, with a warning. `oneemb.Optimizer` puts them back at once.
"""

import functools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from oneemb.graph import ops
from oneemb.graph.building import building_now
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.recorder import UNCOUNTED
from oneemb.graph.tape import version_of
from oneemb.graph.tracers import uncompiled
from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.row_step import RowStep, embedding_of, row_weights, rows_to_owners


class _Hooked(RowStep):
    """A step between the two hooks. Dropped without `end`, it has raised: the gradients stay for another one."""

    _reduced: Sequence[ops.RowGrads] = ()
    _go = True
    _handle: RemovableHandle | None = None

    def begin_after_hooks(self) -> None:
        """Begin once the optimizer's own hooks have run, which may change gradients and options."""
        # The optimizer, which keeps its hooks, must not keep the step.
        self._handle = self.optimizer.register_step_pre_hook(functools.partial(_begin, weakref.ref(self)))

    @uncompiled
    def begin(self) -> None:
        """Take the gradients, and check them."""
        ranks = rows_to_owners([row_weights(self.optimizer)])
        try:
            ops.may_step(self._ready() if ranks.alone else self._agree(ranks), [self])
        except BaseException:
            self.put_back()
            raise
        self._options = ops.options_of(self.optimizer)

    def _agree(self, ranks: AnyRanks) -> str | None:
        """Result of `_ready` of the ranks together. After this exchange the other ranks make the step, so a Ctrl-C that
        came during the wait is raised a moment later, as if it had come in the middle of torch's step."""
        signals.hold()
        try:
            found: str | None = ranks.agree(f"step by {type(self.optimizer).__name__}", self._ready)
            return found
        finally:
            signals.come_later()

    def _ready(self) -> str | None:
        self.take_grads()
        self._follow_scaler()
        if not self.grads or not self._go:
            return None
        self._reduced = self.reduce(UNCOUNTED)
        return ops.check_finite([self], self._reduced)

    def _follow_scaler(self) -> None:
        """Do what a GradScaler asks of an optimizer that unscales gradients itself, as torch's fused ones do."""
        overflowed, scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        self._go = overflowed is None or not float(overflowed)
        if self._go and scale is not None:
            for _, grad in self.grads:
                grad.div_(float(scale))

    def end(self) -> None:
        """Update the rows."""
        locks = [embedding.store.step_lock for embedding in self.embeddings]
        with signals_deferred:
            try:
                in_step(locks, self._update_rows)
            finally:
                self._give_back()

    def _update_rows(self) -> None:
        try:
            if any(grads.generation != grads.store.generation for grads in self._reduced):
                self._reduced = self.reduce(UNCOUNTED)  # A hook, or another thread, has moved or replaced the rows.
            self.update(self._reduced, self._go, self._options, UNCOUNTED)
        except Exception as error:
            name = type(self.optimizer).__name__
            ops.add_note(error, f"{name}.step() has stepped the dense parameters, not all rows")
            raise

    def drop(self) -> None:
        """Forget the gradients of a step that has raised, whose error is kept: they may have been zeroed since."""
        if self.grads:
            names = ", ".join(repr(embedding.name) for embedding in self.embeddings)
            warnings.warn(
                f"the step of {type(self.optimizer).__name__} before this one has raised; the gradients of rows that it"
                f" had taken, of {names}, are dropped, since its error is still kept: they may have been zeroed since",
                stacklevel=4,
            )
        for _, grad in self.grads:
            grad.unpin()
        self.grads, self._spent = [], []
        self._leave()

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _give_back(self) -> None:
        for _, grad in self.grads:
            grad.unpin()
        self.put_back()
        self._leave()

    def __del__(self) -> None:
        if hasattr(self, "_options"):  # the last that __init__ sets: otherwise an interrupt came in it
            self._give_back()


class _Arguments(tuple[Any, ...]):
    """Arguments of a step. They are freed with it, or with an error of it that nobody keeps."""

    step: _Hooked


_begun: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[_Hooked]]" = weakref.WeakKeyDictionary()
rows_stepped: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers in the middle of a step that leaves rows to the caller, who has taken their gradients."""


def _steps_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps others, which have steps of their own, as TorchRec's CombinedOptimizer does."""
    return getattr(optimizer, "steps_rows_itself", False) or hasattr(optimizer, "optimizers")


# torch.compile leaves the hooks below uncompiled, as it does lookups.


@uncompiled
def _begin(waiting: weakref.ref[_Hooked], *_: object) -> None:
    if (step := waiting()) is not None:
        step.begin()


@uncompiled
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (building := building_now()) is not None:
        building.check_step(optimizer)
    if optimizer in rows_stepped or _steps_others(optimizer):
        return None
    left = _begun.pop(optimizer, None)
    if left is not None and (raised := left()) is not None:
        raised.drop()
    step = _Hooked(optimizer)
    _begun[optimizer] = weakref.ref(step)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        step.begin_after_hooks()
    else:  # Gradients come in the closure, which the step calls first.

        def closure_and_rows() -> Any:
            loss = closure()
            step.begin()
            return loss

        if len(args) > 1:
            args = (args[0], closure_and_rows, *args[2:])
        else:
            kwargs = {**kwargs, "closure": closure_and_rows}
    held = _Arguments(args)
    held.step = step
    return held, kwargs


@uncompiled
def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    begun = _begun.pop(optimizer, None)
    step = None if begun is None else begun()
    if step is not None:
        step.end()
    has_rows = False
    for _, weight, _ in row_weights(optimizer):
        # Tools step with gradients of zeros to make an optimizer's state, which writes to what stands for rows.
        weight.stepped_version = version_of(weight)  # type: ignore[attr-defined]
        has_rows = True
    if has_rows and not hasattr(optimizer, "names_rows") and not _steps_others(optimizer):
        optimizer.names_rows = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_name_rows)
        optimizer.register_load_state_dict_post_hook(_forget_state)
        _forget_state(optimizer)


def _name_rows(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Give weights that stand for rows an empty state in a state dict, if other parameters have one there: the tools of
    torch.distributed.checkpoint refuse a parameter without an entry."""
    state, groups = state_dict["state"], zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    if state:
        for group, packed in groups:
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                if embedding_of(parameter) is not None:
                    state.setdefault(number, {})


def _forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state that a load has given weights that stand for rows."""
    if not isinstance(optimizer, torch.optim.Adagrad):  # Adagrad needs the state that it made at first.
        for _, weight, _ in row_weights(optimizer):
            optimizer.state.pop(weight, None)


def _is_torchs(step: Any) -> bool:
    """Whether a function and all that it wraps are of torch.optim: a wrapper takes the name of what it wraps."""
    while step is not None:
        if not step.__code__.co_filename.startswith(_TORCH_OPTIM):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def steps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` would change nothing, and no hook would see it.

    So it is where an optimizer trains rows alone: no parameter has a gradient.
    """
    if (
        not hasattr(optimizer, "names_rows")  # `_after` has seen no step yet
        or "step" in vars(optimizer)  # a scheduler's, which counts
        or not _is_torchs(type(optimizer).step)  # others may count
        or torch.autograd._profiler_enabled()  # whose records name steps
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks) > len(_HOOKS)
    ):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return False
    return True


_TORCH_OPTIM = os.path.dirname(torch.optim.__file__)
_HOOKS = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)
