"""State that a training graph keeps between calls, besides its modules: optimizers, scaler, counts of calls."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from oneemb.graph import ops
from oneemb.training.eager import Optimizer


class LearningRateScheduler(Protocol):
    """Interface of the schedulers that a graph uses; schedulers in torch.optim.lr_scheduler implement it."""

    def step(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class TrainState:
    """The optimizers of a graph, in the order of their steps, with schedulers, scaler and counts."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.steppers: list[torch.optim.Optimizer] = []
        """Each optimizer and its torch optimizer, which `build` must not step."""
        self.lr_schedulers: list[LearningRateScheduler | None] = []
        """Scheduler of each optimizer; None = no scheduler."""
        self.max_norms: list[float | None] = []
        """Norm to which each optimizer's gradients are clipped; None = not clipped."""
        self.scaler: torch.amp.GradScaler | None = None
        """Scaler of `set_grad_scaler`."""
        self.micro_batches = 0
        """Number of calls since the last update."""
        self.scaled_by: torch.amp.GradScaler | None = None
        """Scaler that has scaled the losses since the last update; None = no scaler."""
        self.steps = 0
        """Number of updates made or skipped."""

    def add(self, optimizer: Optimizer, lr_scheduler: LearningRateScheduler | None, max_norm: float | None) -> None:
        """Add an optimizer, which steps after the earlier ones."""
        self.optimizers.append(optimizer)
        self.steppers += (optimizer, optimizer.optimizer)
        self.lr_schedulers.append(lr_scheduler)
        self.max_norms.append(max_norm)

    def move_dense_states(self) -> None:
        """Move optimizer states of dense parameters to the devices of the parameters."""
        for joined in self.optimizers:
            for group in joined.param_groups:
                steps_move = group.get("capturable") or group.get("fused")  # Other groups keep step counts on the CPU.
                for parameter in group["params"]:
                    state = joined.optimizer.state.get(parameter, {})
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor) and (name not in ("step", "mu_product") or steps_move):
                            state[name] = value.to(parameter.device)

    def updates_made(self) -> int:
        """Number of updates that all optimizers together have made, without skipped updates."""
        made = 0
        for optimizer in self.optimizers:
            made += optimizer.row_step.taken
        return made

    def drop_gradients(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """Drop all gradients of rows and dense parameters, of all micro-batches since the last update. `scalers`:
        GradScalers that may have unscaled them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for scaler in scalers:
                ops.forget_unscaled(scaler, optimizer)
        self.scaled_by = None
        self.micro_batches = 0
