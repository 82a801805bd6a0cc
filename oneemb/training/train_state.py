"""State of a training graph from call to call beside its modules: optimizers, scaler, calls since the last update."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from oneemb.graph import ops
from oneemb.training.eager import Optimizer


class LearningRateScheduler(Protocol):
    """Interface of a scheduler, as a graph uses it; those of torch.optim.lr_scheduler have it."""

    def step(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class TrainState:
    """The optimizers of a graph, in the order in which they step, and how far training has come."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.steppers: list[torch.optim.Optimizer] = []
        """The optimizers, and the torch optimizer of each."""
        self.lr_schedulers: list[LearningRateScheduler | None] = []
        """One for each optimizer."""
        self.max_norms: list[float | None] = []
        """Norm to which each optimizer's gradients are clipped; None = they are not clipped."""
        self.scaler: torch.amp.GradScaler | None = None
        self.micro_batches = 0
        """Calls since the last update."""
        self.scaled_by: torch.amp.GradScaler | None = None
        """The scaler that has scaled the losses since the last update."""
        self.steps = 0
        """Updates made or skipped."""

    def add(self, optimizer: Optimizer, lr_scheduler: LearningRateScheduler | None, max_norm: float | None) -> None:
        """Let this optimizer step after those there are."""
        self.optimizers.append(optimizer)
        self.steppers += (optimizer, optimizer.optimizer)
        self.lr_schedulers.append(lr_scheduler)
        self.max_norms.append(max_norm)

    def move_dense_states(self) -> None:
        """Move the optimizers' states of dense parameters to the devices of the parameters."""
        for joined in self.optimizers:
            for group in joined.param_groups:
                steps_move = group.get("capturable") or group.get("fused")  # Others keep what counts steps on the CPU.
                for parameter in group["params"]:
                    state = joined.optimizer.state.get(parameter, {})
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor) and (name not in ("step", "mu_product") or steps_move):
                            state[name] = value.to(parameter.device)

    def updates_made(self) -> int:
        """Updates that optimizers have made; those that were skipped do not count."""
        made = 0
        for optimizer in self.optimizers:
            made += optimizer.row_step.taken
        return made

    def drop_gradients(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """Drop every gradient that no update has used, of rows and dense parameters, of all micro-batches so far;
        `scalers` may have unscaled them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for scaler in scalers:
                ops.forget_unscaled(scaler, optimizer)
        self.scaled_by = None
        self.micro_batches = 0
