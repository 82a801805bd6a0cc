"""Whether the gradients of a step are finite."""

from collections.abc import Sequence

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.update import StepOptimizer


class NonFiniteGradientError(ArithmeticError):
    """A gradient holds NaN or infinity. Nothing was updated, no weight, state or count. Ids that lookups of the step
    have inserted stay, with their initial values."""


def check_finite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None]) -> str | None:
    """Which gradient of the step is not finite, those of dense parameters too, in words; None = all are. Who watches
    the rows is then told that they are about to change.

    Raises:
        ValueError: an optimizer's options have changed into what its rows cannot follow; no weight, state or
            count has changed.
        StorageError: there is no room for the averages of rows (`oneemb.AveragedEmbedding`); nothing has changed.
    """
    present = list(filter(None, grads))
    for optimizer in optimizers:
        for grad in present:
            rows = optimizer.rows_of(grad.stores[0])
            if rows is not None:
                row_optimizer, groups = rows
                for group in groups:
                    if group is not None:
                        row_optimizer.check(group)
    found = None if _surely_finite(optimizers, present) else _find_nonfinite(optimizers, present)
    if found is None:
        for grad in present:
            grad.before_change()
    return found


def may_step(
    found: str | None, optimizers: Sequence[StepOptimizer], scaler: torch.amp.GradScaler | None = None
) -> bool:
    """Whether the step may be taken, given what `check_finite` has found.

    Args:
        scaler: the GradScaler that scaled the losses: a step that overflows is then left out.

    Raises:
        NonFiniteGradientError: one is not finite, and not every optimizer of the step was told to skip such steps.
    """
    if found is None:
        return True
    if scaler is None and not all(optimizer.skip_nonfinite for optimizer in optimizers):
        raise NonFiniteGradientError(
            f"{found}; nothing was updated. Lower the learning rate or clip the gradients, or pass"
            " skip_nonfinite=True to leave out such steps"
        )
    for optimizer in optimizers:
        optimizer.skipped += 1
    return False


def _surely_finite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads]) -> bool:
    """Whether all gradients are so small that every sum must be finite. A GPU is waited for once."""
    by_place: dict[str, list[RowGrads]] = {}
    for grad in grads:
        by_place.setdefault(grad.store.loops.place, []).append(grad)
    dense: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                if (grad_of := parameter.grad) is not None:
                    dense.append(grad_of)
    for there in by_place.values():
        if not there[0].store.loops.surely_finite([grad.terms for grad in there], dense):
            return False
        dense = []  # The first place has looked at them.
    return bool(by_place)


def _find_nonfinite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads]) -> str | None:
    """First number that is not finite, in words; None = all are."""
    for row_grads in grads:
        finite_U = row_grads.store.loops.tensor(row_grads.finite_U).cpu().numpy()
        if not finite_U.all():
            u = int(np.argmin(finite_U))
            count = int(np.count_nonzero(~finite_U))
            key = row_grads.store.describe_key(int(row_grads.table_U[u]), int(row_grads.id_U[u]))
            return f"the gradients of {count} of {len(finite_U)} rows are not finite, the first of them that of {key}"
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                # A sum is finite only if its terms are, and costs one pass; a finite overflow is told apart after it.
                grad = parameter.grad
                if grad is not None and not torch.isfinite(grad.sum()) and not torch.isfinite(grad).all():
                    return f"the gradient of parameter {p} {list(parameter.shape)} of group {g} is not finite"
    return None
