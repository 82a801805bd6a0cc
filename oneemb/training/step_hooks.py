"""Hooks around every `optimizer.step()` of the process, which let torch's own optimizers train rows.

    before   the user's pre-step hooks run, and may read the gradients of rows; then these gradients are taken out of
             `weight.grad`, since torch's step must not see them; embeddings without an optimizer are attached to this
             one; a gradient that is not finite raises
    after    the rows are updated, with the options of the step, and the gradients are put back

If the step raises in between, the gradients are put back as soon as the error object is freed. If the error is kept
until the next step, the gradients are dropped with a warning. `oneemb.Optimizer` puts them back at once.
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

from oneemb.embeddings.weight_of_rows import unattached, warn_of_untrained
from oneemb.graph import ops
from oneemb.graph.build_error import warn_user
from oneemb.graph.building import building_now
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.recorder import UNCOUNTED
from oneemb.graph.tape import version_of
from oneemb.graph.tracers import uncompiled
from oneemb.kernels.compile_notice import compile_notice
from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.row_step import RowStep, WeightInGroup, embedding_of, row_weights, rows_to_owners


class _Hooked(RowStep):
    """A step between the two hooks. If it is freed without a call of `end`, the step has raised, and the gradients are
    put back."""

    _reduced: Sequence[ops.RowGrads] = ()
    _go = True
    _handle: RemovableHandle | None = None

    def begin_after_hooks(self) -> None:
        """Call `begin` after the user's pre-step hooks, which may change gradients and options."""
        # A weak reference, since the optimizer keeps its hooks and must not keep the step.
        self._handle = self.optimizer.register_step_pre_hook(functools.partial(_begin, weakref.ref(self)))

    @uncompiled
    def begin(self) -> None:
        """Take the gradients out of the weights, and check them."""
        ranks = rows_to_owners([row_weights(self.optimizer)])
        try:
            ops.may_step(self._ready() if ranks.alone else self._agree(ranks), [self])
        except BaseException:
            self.put_back()
            raise
        self._options = ops.options_of(self.optimizer)

    def _agree(self, ranks: AnyRanks) -> str | None:
        """Result of `_ready` on all ranks. After this exchange the other ranks make the step, so a Ctrl-C during the
        wait is raised a moment later, as if it had come in the middle of torch's step."""
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
        """Skip the step or divide gradients, as a GradScaler requests by attributes of an optimizer that unscales its
        own gradients, such as torch's fused optimizers."""
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
                self._reduced = self.reduce(UNCOUNTED)  # A hook or another thread has moved or replaced the rows.
            ops.check_options(self, self._reduced, self._options)
            self.update(self._reduced, self._go, self._options, UNCOUNTED)
        except Exception as error:
            name = type(self.optimizer).__name__
            ops.add_note(error, f"{name}.step() has stepped the dense parameters, but not all rows")
            raise

    def drop(self) -> None:
        """Drop the gradients of a step that has raised and whose error is still kept: the user may have zeroed them."""
        if self.grads:
            names = ", ".join(repr(embedding.name) for embedding in self.embeddings)
            warnings.warn(
                f"the last step of {type(self.optimizer).__name__} has raised, and its error object is still kept; the"
                f" gradients of rows that it has taken, of {names}, are dropped, since they may have been zeroed since",
                stacklevel=4,
            )
        for _, grad in self.grads:
            grad.unpin()
        self.grads, self._spent, self._taken = [], [], {}
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
        if hasattr(self, "_options"):  # the last attribute of __init__; without it, an interrupt ended __init__
            self._give_back()


class _Arguments(tuple[Any, ...]):
    """Arguments of a call of `step`, which also hold the `_Hooked` step: both are freed when the call has ended, or
    when its error is freed."""

    step: _Hooked


_begun: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[_Hooked]]" = weakref.WeakKeyDictionary()
rows_stepped: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers in the middle of a step whose caller, `step_together`, has taken the gradients of rows."""


def _steps_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer only calls the steps of other optimizers, as TorchRec's CombinedOptimizer does."""
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
    else:  # The closure computes the gradients; torch's step calls it first.

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
    note_step(optimizer, row_weights(optimizer))


def note_step(optimizer: torch.optim.Optimizer, weights: Sequence[WeightInGroup]) -> None:
    """Note that an optimizer has stepped. `weights`: result of `row_weights`."""
    if compile_notice.unreported:
        compile_notice.report()
    if unattached:
        warn_of_untrained(warn_user)
    for _, weight, _ in weights:
        # Tools step with gradients of zeros to create an optimizer's state; that writes to the weight.
        weight.stepped_version = version_of(weight)  # type: ignore[attr-defined]
    if weights and not hasattr(optimizer, "names_rows") and not _steps_others(optimizer):
        optimizer.names_rows = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_name_rows)
        optimizer.register_load_state_dict_post_hook(_forget_state)
        _forget_state(optimizer)


def _name_rows(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Add an empty state for weights that stand for rows to a state dict that has states of other parameters: tools of
    torch.distributed.checkpoint refuse a parameter without an entry."""
    state, groups = state_dict["state"], zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    if state:
        for group, packed in groups:
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                if embedding_of(parameter) is not None:
                    state.setdefault(number, {})


def _forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state of weights that stand for rows, which a load or a step has made."""
    if not isinstance(optimizer, torch.optim.Adagrad):  # Adagrad needs the state that its constructor has made.
        for _, weight, _ in row_weights(optimizer):
            optimizer.state.pop(weight, None)


@functools.lru_cache(maxsize=64)
def _is_torchs(step: Any) -> bool:
    """Whether a function and all functions that it wraps are defined in torch.optim. (A wrapper takes the name of the
    wrapped function, so names do not tell.)"""
    while step is not None:
        if not step.__code__.co_filename.startswith(_TORCH_OPTIM):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook, other than those of this file, or a profiler would see a step of the optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks) > len(_HOOKS)
        or torch.autograd._profiler_enabled()
        or torch.autograd.profiler._is_profiler_enabled  # by any thread, which may record the steps of all threads
    )


def steps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` would change nothing and no hook would see it: no parameter has a gradient, as for an
    optimizer that trains only rows."""
    if (
        not hasattr(optimizer, "names_rows")  # `_after` has not run yet
        or "step" in vars(optimizer)  # a scheduler has wrapped it to count steps
        or not _is_torchs(type(optimizer).step)  # another class may count steps
        or is_observed(optimizer)
    ):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return False
    return True


_TORCH_OPTIM = os.path.dirname(torch.optim.__file__)
_HOOKS = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)
