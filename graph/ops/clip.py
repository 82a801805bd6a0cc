"""Loss scales and clipping: what is done to gradients before the step.

Invariant: what clips or unscales the summed gradients of rows leaves its input as it was and gives new ones, so a
step that is then refused has changed no row.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.op import BUILD, UPDATE, Op
from oneemb.graph.ops.update import StepOptimizer

__all__ = ["clip_grad_norm", "clip_grad_value", "scale_loss", "unscale", "update_scale"]


Grads = list[RowGrads | None]
Losses = torch.Tensor | Iterable[torch.Tensor]


@Op(BUILD)
def scale_loss(scaler: torch.amp.GradScaler, loss: Losses) -> Losses:
    """The loss, or losses, times the scaler's scale."""
    return scaler.scale(loss)


@Op(UPDATE)
def unscale(
    scaler: torch.amp.GradScaler, optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None]
) -> Grads:
    """Divide gradients by the scale: those of dense parameters in place. Gives those of rows."""
    if not scaler.is_enabled():
        return list(grads)
    for optimizer in optimizers:
        scaler.unscale_(optimizer.optimizer)
    scale = scaler.get_scale()
    return [_multiplied(grad, np.float32(1.0 / scale)) for grad in grads]


@Op(UPDATE)
def update_scale(scaler: torch.amp.GradScaler, go: bool) -> None:
    """Let the scaler grow its scale, or shrink it after a step that overflowed."""
    if not scaler.is_enabled():
        return
    states = scaler._per_optimizer_states
    for state in states.values():
        # One answer for the whole step: rows may have overflowed where no dense gradient did, or there are none.
        state["found_inf_per_device"] = {torch.device("cpu"): torch.full((), 0.0 if go else 1.0)}
    scaler.update()


@Op(UPDATE)
def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | StepOptimizer,
    grads: Sequence[RowGrads | None],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> tuple[Grads, torch.Tensor]:
    """Scale gradients down so that their norm, dense parameters and rows taken as one vector, is at most `max_norm`.

    Args:
        parameters: the dense parameters, or the optimizer that holds them.
        grads: summed gradients of rows.
        max_norm, norm_type, error_if_nonfinite, foreach: as in torch.nn.utils.clip_grad_norm_.

    Returns:
        The gradients of rows, scaled; and the norm as it was.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is on; no gradient has been scaled.

    Reference: torch.nn.utils.clip_grad_norm_; that the norm covers rows is OneFlow's.
    """
    dense = [parameter for parameter in _parameters(parameters) if parameter.grad is not None]
    dense_grads = [parameter.grad for parameter in dense if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(dense_grads, norm_type, False, foreach)
    row_norms = [norm for grad in grads if grad is not None for norm in _row_norms(grad, float(norm_type))]
    row_norms.sort()  # so that the norm does not depend on which stores are merged
    if row_norms:
        norm = torch.linalg.vector_norm(torch.tensor([float(norm), *row_norms], dtype=torch.float64), float(norm_type))
        norm = norm.to(torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so it cannot be clipped; pass"
            " error_if_nonfinite=False to have the step refused or skipped as other steps that are not finite"
        )
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm, foreach)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [_multiplied(grad, np.float32(float(factor))) for grad in grads], norm


@Op(UPDATE)
def clip_grad_value(
    parameters: Iterable[torch.Tensor], grads: Sequence[RowGrads | None], clip_value: float, foreach: bool | None = None
) -> Grads:
    """Clamp each value of the gradients: those of dense parameters in place, those of rows after they are summed.

    Reference: torch.nn.utils.clip_grad_value_.
    """
    clip_value = float(clip_value)
    dense = [parameter for parameter in _parameters(parameters) if parameter.grad is not None]
    if dense:
        torch.nn.utils.clip_grad_value_(dense, clip_value, foreach)
    bound = np.float32(clip_value)
    return [None if grad is None else grad.with_sums(grad.grad_UD.clip(-bound, bound)) for grad in grads]


def _row_norms(grads: RowGrads, norm_type: float) -> list[float]:
    """The norm of the rows of each store."""
    store, parts = grads.store, [grads.grad_UD]
    if len(store.members) > 1:
        member_U = store.members_of(grads.table_U)
        parts = [grads.grad_UD[member_U == m] for m in np.unique(member_U).tolist()]
    return [store.loops.norm(part, norm_type) for part in parts]


def _parameters(parameters: Iterable[torch.Tensor] | StepOptimizer) -> list[torch.Tensor]:
    if isinstance(parameters, Iterable):
        return list(parameters)
    return [parameter for group in parameters.optimizer.param_groups for parameter in group["params"]]


def _multiplied(grads: RowGrads | None, factor: np.float32) -> RowGrads | None:
    if grads is None or factor == 1:
        return grads
    with np.errstate(invalid="ignore", over="ignore"):
        return grads.with_sums(grads.grad_UD * factor)
