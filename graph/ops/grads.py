"""Gradients of rows: summed for each key, and whether they are finite."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oneemb.graph.ops.op import UPDATE, op
from oneemb.kernels.arrays import Array, Terms
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.loops import Segments
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore

__all__ = ["NonFiniteGradientError", "RowGrads", "check_finite", "over_passes", "reduce_grads", "reduce_lease"]

if TYPE_CHECKING:
    from oneemb.graph.ops.leases import Lease
    from oneemb.graph.ops.update import StepOptimizer


class NonFiniteGradientError(ArithmeticError):
    """A gradient holds NaN or infinity. Nothing was updated, no weight, state or count. Ids that lookups of the step
    have inserted stay, with their initial values."""


@dataclass(frozen=True, init=False)
class RowGrads:
    """Gradients of U unique keys of one store, for the rows in slot_U: given summed, or as segments to be summed.

    The store may be several, merged: `stores` are those whose lookups got a gradient.

    Sums of segments are made when something asks for them; an update takes the segments as they are, to the same bits.
    """

    store: EmbeddingStore | MergedStore
    generation: int
    table_U: Array
    id_U: Array
    slot_U: Array
    segments: Segments | None
    stores: tuple[EmbeddingStore, ...]

    def __init__(
        self,
        store: EmbeddingStore | MergedStore,
        generation: int,
        table_U: Array,
        id_U: Array,
        slot_U: Array,
        grad_UD: Array | None = None,
        finite_U: Array | None = None,
        segments: Segments | None = None,
        stores: tuple[EmbeddingStore, ...] | None = None,
    ):
        given: dict[str, Any] = dict(store=store, generation=generation, table_U=table_U, id_U=id_U, slot_U=slot_U)
        given |= dict(stores=store.members if stores is None else stores)
        if grad_UD is not None:
            given |= dict(sums=(grad_UD, finite_U), segments=None)
        else:
            given |= dict(segments=segments)
        self.__dict__.update(given)

    @functools.cached_property
    def sums(self) -> tuple[Array, Array]:
        """grad_UD, float32 [U, D], and finite_U, bool [U]: whether a row's sum is finite throughout."""
        assert self.segments is not None
        return self.store.loops.sum_segments(self.segments)

    @property
    def grad_UD(self) -> Array:
        return self.sums[0]

    @property
    def finite_U(self) -> Array:
        return self.sums[1]

    @property
    def terms(self) -> Terms:
        """What the sums are made of."""
        if self.segments is None:
            return Terms(self.grad_UD, None, 1)
        return Terms(self.segments.grad_NX, self.segments.scale_N, len(self.segments.order_N))

    def with_sums(self, grad_UD: Array) -> "RowGrads":
        """The same rows with other sums."""
        keys = self.table_U, self.id_U, self.slot_U
        loops = self.store.loops
        finite_U = loops.array(torch.isfinite(loops.tensor(grad_UD)).all(1))
        return RowGrads(self.store, self.generation, *keys, grad_UD, finite_U, stores=self.stores)


def _measure_reduce(args: Any, grads: Any) -> tuple[int, int]:
    # The sums themselves are made by whoever reads them: an update, row by row, or clipping.
    return (0, 0) if grads is None else (len(grads.slot_U), 0)


@op(UPDATE, takes=("leases",), measure=_measure_reduce)
def reduce_grads(leases: Sequence["Lease"]) -> RowGrads | None:
    """Sum the gradients of equal keys over all lookups of one store in a step. None if no lookup got a gradient.

    The sum runs in float32: over the backward passes of an id in the order they came, over the ids of a lookup in batch
    order, then over lookups in the order they were made.
    """
    parts = [lease.reduce() for lease in sorted(leases, key=lambda lease: lease.order) if lease.grads]
    if len(parts) < 2:
        return parts[0] if parts else None
    store, stores = parts[0].store, tuple({member: None for part in parts for member in part.stores})
    loops = store.loops
    table_N, id_N, slot_N, grad_ND = (
        loops.array(torch.cat([loops.tensor(getattr(part, name)) for part in parts]))
        for name in ("table_U", "id_U", "slot_U", "grad_UD")
    )
    unique = loops.counted(loops.unique_keys(table_N, id_N, tables=TABLE_MAX + 1, padding_id=None, check=None))
    return RowGrads(
        store, parts[0].generation, unique.table_U, unique.id_U, slot_N[unique.head_U],
        segments=loops.segments(unique, None, grad_ND, None), stores=stores,
    )  # fmt: skip


def over_passes(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of the ids of a lookup, [N, D], summed over its backward passes in float32; of one, as they are."""
    if len(grads) == 1:
        return grads[0].contiguous()
    total = grads[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for grad in grads[1:]:
        total += grad
    return total


def reduce_lease(lease: "Lease") -> RowGrads:
    grad_ND = over_passes(lease.grads)
    keys, loops = lease.keys, lease.store.loops
    lease.check_generation()
    segments = loops.segments(keys.unique, keys.bags, loops.array(grad_ND), lease.scale_N)
    unique = keys.unique
    return RowGrads(lease.store, lease.generation, unique.table_U, unique.id_U, lease.slot_U, segments=segments)


@op(UPDATE, takes=("optimizers", "list of grads"), gives="go")
def check_finite(optimizers: Sequence["StepOptimizer"], grads: Sequence[RowGrads | None], scaler: Any = None) -> bool:
    """Whether every gradient of the step is finite, those of dense parameters too, so that the step may be taken.

    Args:
        scaler: the torch.amp.GradScaler that scaled the losses: a step that overflows is then left out.

    Raises:
        NonFiniteGradientError: one is not, and its optimizer was not told to skip such steps.
        ValueError: an optimizer's options have changed into what its rows cannot follow; no weight, state or
            count has changed.
    """
    for optimizer in optimizers:
        for grad in grads:
            rows = optimizer.rows_of(grad.stores[0]) if grad is not None else None
            if rows is not None:
                rows[0].check(rows[1])
    found = None if _surely_finite(optimizers, grads) else _find_nonfinite(optimizers, grads)
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


def _surely_finite(optimizers: Sequence["StepOptimizer"], grads: Sequence[RowGrads | None]) -> bool:
    """Whether all gradients are so small that every sum must be finite. A GPU is waited for once."""
    places: dict[str, list[RowGrads]] = {}
    for grad in grads:
        if grad is not None:
            places.setdefault(grad.store.loops.place, []).append(grad)
    dense = [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    for some in places.values():
        if not some[0].store.loops.surely_finite([grad.terms for grad in some], dense):
            return False
        dense = []  # The first has looked at them.
    return bool(places)


def _find_nonfinite(optimizers: Sequence["StepOptimizer"], grads: Sequence[RowGrads | None]) -> str | None:
    for grad in grads:
        if grad is None:
            continue
        finite_U = grad.store.loops.tensor(grad.finite_U).cpu().numpy()
        if not finite_U.all():
            u = int(np.argmin(finite_U))
            count = int(np.count_nonzero(~finite_U))
            key = grad.store.describe_key(int(grad.table_U[u]), int(grad.id_U[u]))
            return f"the gradients of {count} of {len(finite_U)} rows are not finite, the first of them that of {key}"
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                # A sum is finite only if its terms are, and costs one pass; a finite overflow is told apart below.
                grad = parameter.grad
                if grad is not None and not torch.isfinite(grad.sum()) and not torch.isfinite(grad).all():
                    return f"the gradient of parameter {p} {list(parameter.shape)} of group {g} is not finite"
    return None
