"""Unscaling, by a GradScaler, of the gradients of a step that several optimizers share."""

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import OptState

from oneemb.graph.ops.update import StepOptimizer


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[StepOptimizer]) -> None:
    """Divide gradients by the scale, those of dense parameters and of rows, in place; but for those that `build` has
    unscaled."""
    if not scaler.is_enabled():
        return
    for optimizer in optimizers:
        states = [scaler._per_optimizer_states.get(id(one)) for one in (optimizer, optimizer.optimizer)]
        if not any(state is not None and state["stage"] is OptState.UNSCALED for state in states):
            scaler.unscale_(optimizer.optimizer)


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: StepOptimizer) -> None:
    """Let a scaler know that the gradients which it has unscaled for an optimizer are dropped."""
    for one in (optimizer, optimizer.optimizer):
        scaler._per_optimizer_states.pop(id(one), None)


def update_scale(scaler: torch.amp.GradScaler, go: bool) -> None:
    """Let the scaler grow its scale, or shrink it after a step that overflowed."""
    if not scaler.is_enabled():
        return
    states = scaler._per_optimizer_states
    for state in states.values():
        # One answer for the whole step: one optimizer's gradients may have overflowed, or there are none.
        state["found_inf_per_device"] = {
            torch.device("cpu"): torch.full((), 0.0 if go else 1.0, dtype=torch.float32, device="cpu")
        }
    scaler.update()
