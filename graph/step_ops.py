"""Ops of a step beside its lookups: contexts, loss scales, clipping, accumulation.

    context = enter_autocast(device, ...)           `with torch.autocast(device, ...):` begins
    context = enter_grad_mode(enabled)              `with torch.no_grad():` or `enable_grad` begins
    context = enter_record_function(name, args)     `with torch.profiler.record_function(name):` begins
    exit_context(context)                           ... and ends
    scaled = scale_loss(scaler, loss)               torch.amp.GradScaler.scale
    grads = unscale(scaler, [optimizer], [grads])   dense gradients in place, those of rows anew
    grads, norm = clip_grad_norm(parameters, [grads], max_norm, ...)     dense parameters and rows together
    grads = clip_grad_value(parameters, [grads], clip_value)
    update_scale(scaler, go)                        torch.amp.GradScaler.update
    hold(held, [lease])                             keep a micro-batch's lookups for the update to come
    leases = take(held, store, [lease])             those kept of this store, and these
    drop(held)                                      release all that are kept

Invariant: what clips or unscales the summed gradients of rows leaves its input as it was and gives new ones, so a
step that is then refused has changed no row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.graph.ops import Lease, RowGrads, StepOptimizer, release
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.row_store import StorageError

__all__ = [
    "Held", "clip_grad_norm", "clip_grad_value", "drop", "enter_autocast", "enter_grad_mode", "enter_record_function",
    "exit_context", "hold", "scale_loss", "take", "unscale", "update_scale",
]  # fmt: skip

Grads = list[RowGrads | None]


def enter_autocast(device: str, **options: Any) -> Any:
    """Enter torch.autocast."""
    context = torch.autocast(device, **options)
    context.__enter__()
    return context


def enter_grad_mode(enabled: bool) -> Any:
    """Enter torch.no_grad or torch.enable_grad."""
    context = torch.set_grad_enabled(enabled)
    context.__enter__()
    return context


def enter_record_function(name: str, args: str | None = None) -> Any:
    """Enter torch.profiler.record_function."""
    context = torch.autograd.profiler.record_function(name, args)
    context.__enter__()
    return context


def exit_context(context: Any) -> None:
    """Leave a context that was entered."""
    context.__exit__(None, None, None)


def scale_loss(scaler: Any, loss: Any) -> Any:
    """The loss, or losses, times the scaler's scale."""
    return scaler.scale(loss)


def unscale(scaler: Any, optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None]) -> Grads:
    """Divide gradients by the scale: those of dense parameters in place. Gives those of rows."""
    if not scaler.is_enabled():
        return list(grads)
    for optimizer in optimizers:
        scaler.unscale_(optimizer.optimizer)
    scale = scaler.get_scale()
    return [_multiplied(one, np.float32(1.0 / scale)) for one in grads]


def update_scale(scaler: Any, go: bool) -> None:
    """Let the scaler grow its scale, or shrink it after a step that overflowed."""
    if not scaler.is_enabled():
        return
    states = scaler._per_optimizer_states
    for state in states.values():
        # One answer for the whole step: rows may have overflowed where no dense gradient did, or there are none.
        state["found_inf_per_device"] = {torch.device("cpu"): torch.full((), 0.0 if go else 1.0)}
    scaler.update()


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
    row_norms = [norm for one in grads if one is not None for norm in _row_norms(one, float(norm_type))]
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
    return [_multiplied(one, np.float32(float(factor))) for one in grads], norm


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
    return [None if one is None else one.with_sums(one.grad_UD.clip(-bound, bound)) for one in grads]


def _row_norms(grads: RowGrads, norm_type: float) -> list[float]:
    """The norm of the rows of each store."""
    store, parts = grads.store, [grads.grad_UD]
    if len(store.members) > 1:
        member_U = store.members_of(grads.table_U)
        parts = [grads.grad_UD[member_U == m] for m in np.unique(member_U).tolist()]
    return [store.loops.norm(part, norm_type) for part in parts]


def _parameters(parameters: Any) -> list[torch.Tensor]:
    if hasattr(parameters, "rows_of"):
        return [one for group in parameters.optimizer.param_groups for one in group["params"]]
    return list(parameters)


def _multiplied(grads: RowGrads | None, factor: np.float32) -> RowGrads | None:
    if grads is None or factor == 1:
        return grads
    with np.errstate(invalid="ignore", over="ignore"):
        return grads.with_sums(grads.grad_UD * factor)


class Held:
    """Lookups of micro-batches whose update is still to come."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []


def hold(held: Held, leases: Sequence[Lease]) -> None:
    """Keep these lookups for the update to come."""
    held.leases.extend(leases)


def take(held: Held, store: EmbeddingStore | MergedStore, leases: Sequence[Lease]) -> list[Lease]:
    """The lookups kept of this store, and these, all in `held` until they are released.

    Raises:
        StorageError: rows of a lookup that is kept, of any store, were replaced or moved since.
    """
    hold(held, leases)
    for lease in held.leases:
        if lease.grads and lease.generation != lease.store.generation:
            raise StorageError(
                "the rows of a lookup were replaced or moved before its update; finish the accumulated steps first"
            )
    return [lease for lease in held.leases if lease.store is store]


def drop(held: Held) -> None:
    """Release every lookup that is kept."""
    release(held.leases)
    held.leases.clear()
