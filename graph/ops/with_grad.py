"""`with_grad`: makes the rows of a lookup differentiable; a backward pass gives the weight a `RowGrad`."""

from collections.abc import Sequence
from typing import Any

import torch

from oneemb.graph.one_rank import ALONE
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.ops.owner_grads import Pass
from oneemb.graph.ops.row_grad import RowGrad
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.tape import version_of
from oneemb.graph.tracers import uncompiled


def with_grad(
    rows: torch.Tensor, lease: Lease, weights: Sequence[torch.Tensor], per_sample_weights: torch.Tensor | None = None,
    ranks: AnyRanks = ALONE,
) -> torch.Tensor:  # fmt: skip
    """Result of `gather`, made differentiable: a backward pass through it gives each weight a `RowGrad`.

    The rows need not be pinned: the step that trains rows of an embedding in eval mode inserts them.

    Args:
        weights: one weight that stands for all rows, or one for each table.
        ranks: ranks that own the rows.
    """
    # The rows are in a tuple, which hides them from autograd: the output could not be changed in place if autograd knew
    # the same tensor as an input.
    return _apply(per_sample_weights, lease, (rows,), ranks, *weights)


def _owns_memory(grad: torch.Tensor) -> bool:
    """Whether a gradient from autograd is the only tensor on its memory, so that it need not be copied.

    Another parameter's gradient may be a view of the same memory, which torch clips and accumulates in place: for
    example the gradient of `positions` in `embedding(ids)[None] + positions[None]`, or of a tensor that rows were
    concatenated with. torch's reference counts tell; without them the answer is False. They do not count Python
    references to the same object (a hook that keeps it): `Pass.checked` finds changes made through these.
    """
    tensor_uses, storage_uses = getattr(grad, "_use_count", None), getattr(torch._C, "_storage_Use_Count", None)
    if tensor_uses is None or storage_uses is None or tensor_uses() != 1:
        return False
    if not grad.is_contiguous() or grad.untyped_storage().nbytes() != grad.nbytes:
        return False
    # If the gradient is a view, its base and every holder of the base have the memory too.
    base: torch.Tensor | None = grad._base
    views = 0 if base is None else 1
    # One more reference to the storage, and one to the base, belong to the Python objects that this function makes.
    return bool(
        storage_uses(grad.untyped_storage()._cdata) == 2 + views and (base is None or base._use_count() == 2)  # type: ignore[attr-defined]  # torch's stubs lack it
    )


class _WithGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scales: torch.Tensor | None, lease: Lease, rows: tuple[torch.Tensor], ranks: AnyRanks,
        *weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.lease, ctx.ranks = lease, ranks
        ctx.at_once = True
        for weight in weights:
            if not getattr(weight, "is_stepped_in_backward", False):
                ctx.at_once = False
        return rows[0]

    @staticmethod
    @uncompiled  # torch.compile stays out of it, as out of a lookup
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        owns_memory = _owns_memory(*grads)
        of_scales, _, _, _, *of_weights = ctx.needs_input_grad
        lease, (grad,) = ctx.lease, grads
        if lease is None:
            raise RuntimeError(
                "backward must run only once through a lookup of an embedding, whose rows are released after the first"
                " backward pass; pass retain_graph=True to the first pass, or look the ids up again"
            )
        again, is_trained = torch.is_grad_enabled(), True in of_weights
        if again and is_trained:
            raise RuntimeError(
                "embedding.weight.grad cannot be differentiated again: leave out create_graph=True, or differentiate"
                " with respect to the tensor that the lookup returned:"
                " torch.autograd.grad(loss, rows, create_graph=True)"
            )
        lease.check_not_replaced()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.lease = None  # A loss that is kept keeps none of the lookup's arrays.
        flat = grad.detach() if again else grad
        # `view` takes less time than `reshape`.
        flat = flat.view(-1, flat.shape[-1]) if flat.is_contiguous() else flat.reshape(-1, flat.shape[-1])
        row_grads: list[RowGrad | None] = [None] * len(of_weights)
        if is_trained:
            # No copy is needed if `reshape` has made one, or if rows are updated within this backward pass. A later
            # change in place raises.
            as_is = owns_memory or flat.data_ptr() != grad.data_ptr() or ctx.at_once and flat.is_contiguous()
            # Sums by key are less to write than a copy. They need a graph that autograd frees now: the gradient of
            # another pass would have to be added for each id, before the sum.
            sums = not as_is and flat.is_contiguous() and ctx.lease is None
            if sums and (summed := lease.sum_now(flat)) is not None:
                one = Pass(lease, summed, 0)
            else:
                grad_NX = flat if as_is else lease.store.backend.copy(flat)
                one = Pass(lease, grad_NX, version_of(grad_NX))
            for t, needed in enumerate(of_weights):
                if needed:
                    tables = None if len(of_weights) == 1 else frozenset([t])
                    row_grads[t] = RowGrad.of(lease.store, [one], ranks=ctx.ranks, tables=tables)
        lease.has_grad = True
        return lease.grad_of_scales(flat) if of_scales else None, None, None, None, *row_grads


# `_WithGrad.apply` without the calls in which torch looks for transforms of torch.func: lookups refuse these.
_apply: Any = super(torch.autograd.Function, _WithGrad).apply
