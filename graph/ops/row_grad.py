"""The gradient of an embedding's rows, as autograd carries it: the gradient of `embedding.weight`.

A `RowGrad` has the weight's shape, [0, D], and holds the gradients of each lookup's backward passes. torch's own tools
(accumulation, zero_grad, clipping, GradScaler, autograd.grad, hooks) act on it through the few aten ops handled here,
as they would on the dense gradient of a table, which is zero except in the rows that were looked up.

    op                                 effect
    detach, clone                      returns a RowGrad with the same passes
    add                                joins the passes of two RowGrads
    zero_                              drops the passes
    norm                               sums the gradients of each row, then computes the norm
    mul, div, neg, clamp by a number   sums the gradients of each row, then changes the sums
    another op that only reads         gets the summed values, float32 [U, D], and gives a plain tensor
    anything else                      is an error that names the op
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never

import numpy as np
import torch

from oneemb.graph.one_rank import ALONE
from oneemb.graph.ops.grads import RowGrads, join_grads
from oneemb.graph.ops.lookup import Lease, full
from oneemb.graph.ops.owner_grads import Pass, by_ranks, reduce_passes, reduce_to_owners
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.tracers import uncompiled
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StoreFullError
from oneemb.storage.merged_store import MergedStore

aten = torch.ops.aten
_detach = aten.detach.default


class RowGrad(torch.Tensor):
    """The gradient of all rows of one embedding; it is zero except in rows that were looked up.

    `row_keys()` and `row_values()` return it as plain tensors. Where ranks own the rows, these are the rows that this
    rank has looked up, and after `reduce_to_owners` the rows that it owns.
    """

    store: EmbeddingStore
    passes: Sequence[Pass]
    """Gradients that backward passes have left, not summed yet."""
    summed: RowGrads | None
    """Gradients by unique key, in addition to `passes`: changed or joined gradients, or gradients from other ranks."""
    holders: Sequence[Lease]
    """Leases that pin the rows of `summed`."""
    ranks: AnyRanks
    """Ranks that own the rows."""
    at_owners: bool
    """Whether the gradients have been sent to the owners of the rows (`reduce_to_owners`)."""
    tables: frozenset[int] | None
    """Tables whose rows have the gradient; None = all tables."""
    changes: int = 0
    """Number of changes to the gradient."""
    spent: bool = False
    """Whether the rows were updated within the backward pass. The gradient is then empty, and most ops on it raise."""

    @staticmethod
    def of(
        store: EmbeddingStore,
        passes: Sequence[Pass] = (),
        summed: RowGrads | None = None,
        holders: Sequence[Lease] = (),
        ranks: AnyRanks = ALONE,
        *,
        at_owners: bool = False,
        tables: frozenset[int] | None = None,
    ) -> "RowGrad":
        """A gradient with these attributes. The sequences are not copied, and must not change."""
        shape = 0, store.format.dim
        grad = torch.Tensor._make_wrapper_subclass(RowGrad, shape, dtype=torch.float32, device=store.backend.device)
        grad.store, grad.passes = store, passes
        grad.summed, grad.holders = summed, holders
        grad.ranks, grad.at_owners, grad.tables = ranks, at_owners, tables
        return grad

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch names an argument that nobody gives
        return f"RowGrad({len(self.passes)} backward passes{', summed ones' if self.summed else ''})"

    def numel(self) -> int:
        """Number of values of the gradient, at least the width of a row: TorchRec's clipping skips a gradient without
        elements, but all ranks must take part in the exchange of a norm."""
        held = [len(lease.keys.unique.id_U) for lease, *_ in self.passes]
        held += [] if self.summed is None else [len(self.summed.id_U)]
        return self.shape[1] * max(1, sum(held))

    # ---- values -----------------------------------------------------------------------------------------------------

    def reduce(self) -> RowGrads | None:
        """The gradient of each row, still to be summed, with the slots of the lookups; None if there is no gradient."""
        of_passes = reduce_passes(self.passes, shared=self.tables is not None)
        if self.tables is not None:
            of_passes = [grads.of_tables(self.tables) for grads in of_passes]
        return join_grads(of_passes if self.summed is None else [self.summed, *of_passes])

    def row_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables, int32 [U], and ids, int64 [U], of the rows that have a gradient."""
        grads, backend = self.reduce(), self.store.backend
        if grads is None:
            return torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
        grads.counted()
        return backend.tensor(grads.table_U), backend.tensor(grads.id_U)

    def row_values(self) -> torch.Tensor:
        """Copy of the gradients of the rows in `row_keys()`: float32 [U, D]."""
        grads = self.reduce()
        if grads is None:
            return torch.empty(0, self.shape[1], device=self.device, dtype=torch.float32)
        return self.store.backend.tensor(grads.counted().grad_UD).clone()

    def acquire(self) -> RowGrads | None:
        """The gradient of each row, still to be summed, with its slot. The rows are resident, and pinned until `unpin`.

        Raises:
            StoreFullError: the rows do not fit any more; nothing has changed.
            StorageError: rows were replaced since the lookup (load_snapshot, clear).
        """
        assert self.ranks.alone or not self.passes, "what lookups have left is with the owners of rows"
        for lease in self.holders:
            lease.check_not_replaced()
        try:
            self._pin()
        except StoreFullError as error:
            lookups = sum(lease.lookups for lease in {*(lease for lease, *_ in self.passes), *self.holders})
            raise full(error, lookups if lookups > 1 else 0) from None
        return self.reduce()

    def _pin(self) -> None:
        # The summed part first: a lookup that is pinned anew, for its passes, has its rows in other slots.
        if self.summed is not None and not all(lease.is_pinned for lease in self.holders):
            used = [lease.use() for lease in self.holders]  # count uses by the ranks' lookups in eval mode
            lookups = sum(lease.lookups for lease in self.holders)
            lease = Lease.of_keys(self.store, self.summed.table_U, self.summed.id_U, lookups)
            self.summed, self.holders = self.summed.with_slots(lease.slot_U, lease.generation), (lease,)
            for used_lease in used:
                if used_lease is not None:
                    used_lease.unpin()
        for one in self.passes:
            one.lease.pin()

    def merged_in(self) -> MergedStore | None:
        """The merged store whose lookups gave the whole gradient, if their rows are still pinned; otherwise None."""
        if self.summed is not None or self.tables is not None:
            return None
        stores = set()
        for lease, *_ in self.passes:
            if lease.shared is None or not lease.is_pinned:
                return None
            stores.add(lease.shared[0].store)
        return stores.pop() if len(stores) == 1 else None

    def only_pass(self) -> Pass | None:
        """The gradient of one backward pass through a lookup whose rows are pinned, if it is the whole gradient;
        otherwise None."""
        if self.summed is not None or self.tables is not None or self.spent or len(self.passes) != 1:
            return None
        lease = self.passes[0].lease
        return self.passes[0] if lease.shared is None and lease.is_pinned else None

    def unpin(self) -> None:
        """Unpin the rows; the gradient does not change."""
        for one in self.passes:
            one.lease.unpin()
        for lease in self.holders:
            lease.unpin()

    def set_values(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the gradients of rows by the result of `change` for all of them, float32 [U, D]."""
        reduce_to_owners([self])
        grads = self.reduce()
        self.changes += 1
        if grads is not None:
            backend = self.store.backend
            grads.counted()
            with np.errstate(invalid="ignore", over="ignore"):
                self.summed = grads.with_sums(backend.array(change(backend.tensor(grads.grad_UD))))
            self.holders = tuple(dict.fromkeys([*self.holders, *(lease for lease, *_ in self.passes)]))
            self.passes = ()

    def copy_of(self) -> "RowGrad":
        copy = RowGrad.of(
            self.store, self.passes, self.summed, self.holders, self.ranks, at_owners=self.at_owners, tables=self.tables
        )
        copy.spent = self.spent
        return copy

    def __deepcopy__(self, memo: object) -> "RowGrad":
        return self.copy_of()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "the gradient of an embedding's rows cannot be pickled: pickle grad.row_keys() and grad.row_values()"
        )

    def spend(self) -> None:
        """Unpin the rows, which have been updated, and drop the gradient."""
        self.unpin()
        self.drop()
        self.spent = True

    def own(self, owned: tuple[Lease, RowGrads] | None) -> None:
        """Hold the reduced gradient of the rows that this rank owns, in place of the gradient of its own lookups."""
        for lease in dict.fromkeys(lease for lease, *_ in self.passes):
            lease.unpin()
        self.passes, self.at_owners = (), True
        if owned is not None:
            lease, grads = owned
            self.holders = *self.holders, lease
            self.summed = grads if self.summed is None else join_grads([self.summed, grads])

    def join(self, other: "RowGrad") -> None:
        """Add the gradients of `other`, in place."""
        self.changes += 1
        self.spent = self.spent and other.spent
        self.ranks = other.ranks if self.ranks.alone else self.ranks
        self.at_owners = self.at_owners and other.at_owners
        self.passes = *self.passes, *other.passes
        self.summed = join_grads([grads for grads in (self.summed, other.summed) if grads is not None])
        self.holders = *self.holders, *other.holders

    def drop(self) -> None:
        """Drop the gradient: it is zero in all rows."""
        self.changes += 1
        self.passes, self.summed, self.holders = (), None, ()
        self.at_owners = False  # Other ranks may still have gradients of rows that this rank owns.

    # ---- dispatch ---------------------------------------------------------------------------------------------------

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is of another kind
        cls, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is _detach:  # autograd does it to each gradient
            return args[0].copy_of()
        if op not in _OF_SPENT and any(isinstance(value, RowGrad) and value.spent for value in _flat(args)):
            raise RuntimeError(
                "the rows of an embedding were updated in the backward pass (fused=True), so their gradient can no"
                " longer be clipped, unscaled or read; make oneemb.Optimizer without fused"
            )
        handler = _HANDLERS.get(op)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        foreach = _FOREACH.get(op)
        if foreach is not None:
            return _each(op, foreach, *args, **(kwargs or {}))
        tensors = {id(value): value for value in (*args, *(kwargs or {}).values()) if _holds_tensor(value)}
        if not op._schema.is_mutable and len(tensors) == 1:  # perhaps twice: isfinite compares it with itself
            values = {key: grad.row_values() for key, grad in tensors.items() if isinstance(grad, RowGrad)}
            return op(*(values.get(id(value), value) for value in args), **(kwargs or {}))
        if op.namespace == "fsdp":
            raise RuntimeError(
                "an embedding must not be inside fully_shard, which would split the gradient of its rows as that of a"
                " dense parameter; shard only the dense modules, and look ids up outside of them"
            )
        raise NotImplementedError(
            f"{op} is not known on the gradient of an embedding's rows, which is no dense tensor; call it on"
            " grad.row_values(), a dense tensor of the rows in grad.row_keys(). clip_grad_norm_, clip_grad_value_,"
            " GradScaler and multiplication by a number work on the gradient itself. Compute a regulariser from the"
            " rows that a lookup returns, not from embedding.weight"
        )


def _flat(args: Iterable[Any]) -> list[Any]:
    return [part for value in args for part in (value if isinstance(value, list | tuple) else [value])]


def _holds_tensor(value: object) -> bool:
    return any(isinstance(part, torch.Tensor) for part in _flat([value]))


def refuse_dense(grad: torch.Tensor | None) -> None:
    """Hook of `embedding.weight`: raise if `grad` is dense. None is allowed: in a graph there is no gradient."""
    if grad is not None and not isinstance(grad, RowGrad):
        raise RuntimeError(
            "embedding.weight must not get a dense gradient, since it holds no row and stands for all rows; compute a"
            " regulariser from the rows that a lookup returns (embedding(ids).square().sum()), or use the optimizer's"
            " weight_decay"
        )


def _number(value: Any) -> float:
    """The factor `value`, a Python number or a tensor of one element, as a float."""
    if isinstance(value, torch.Tensor) and (isinstance(value, RowGrad) or value.numel() != 1):
        raise NotImplementedError("the gradient of an embedding's rows can be multiplied by a number, not by a tensor")
    return float(value)


def _add(left: Any, right: Any, *, alpha: float = 1) -> RowGrad:
    if not isinstance(left, RowGrad):
        left, right = right, left
    total = left.copy_of()
    return _add_(total, right, alpha=alpha)


def _add_(left: Any, right: Any, *, alpha: float = 1) -> RowGrad:
    refuse_dense(left)
    refuse_dense(right)
    left.join(right if alpha == 1 else _mul(right, alpha))
    return left


def _mul(grad: Any, factor: Any) -> RowGrad:
    if not isinstance(grad, RowGrad):
        grad, factor = factor, grad
    return _mul_(grad.copy_of(), factor)


def _mul_(grad: RowGrad, factor: Any) -> RowGrad:
    if (number := _number(factor)) != 1:
        grad.set_values(lambda grad_UD: grad_UD * np.float32(number).item())
    return grad


def _div_(grad: RowGrad, divisor: Any) -> RowGrad:
    number = _number(divisor)
    grad.set_values(lambda grad_UD: grad_UD / number)
    return grad


def _zero_(grad: RowGrad) -> RowGrad:
    grad.drop()
    return grad


def _norm(grad: RowGrad, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if dim is not None or keepdim:
        raise NotImplementedError(
            "the norm of an embedding's gradient must be of all values, without dim and keepdim; compute other norms"
            " from grad.row_values()"
        )
    return _norms([grad], ord, dtype=dtype)[0]


def _norms(row_grads: Sequence[RowGrad], ord: float = 2, *, dtype: Any = None) -> list[torch.Tensor]:
    """The norm of each gradient. Where ranks share the rows, it is the norm over the rows of all ranks."""
    if not float(ord) > 0:
        raise NotImplementedError(f"the order of the norm of an embedding's gradient must be above 0, got {ord}")
    reduce_to_owners(row_grads)
    norms = []
    for grad in row_grads:
        grads = grad.reduce()
        if grads is not None:
            grads.counted()
        if grads is not None and grad.ranks.size > 1 and grad.store.replicas:
            grads = _counted(grads, grad.store)
        norms.append(0.0 if grads is None else grad.store.backend.norm(grads.grad_UD, float(ord)))
    for ranks, group in by_ranks(row_grads):
        places = [i for i, grad in enumerate(row_grads) if any(grad is one for one in group)]
        for i, norm in zip(places, ranks.norms([norms[i] for i in places], float(ord)), strict=True):
            norms[i] = norm
    return [
        torch.tensor(norm, dtype=dtype or torch.float32, device=grad.device)
        for norm, grad in zip(norms, row_grads, strict=True)
    ]


def _counted(grads: RowGrads, store: EmbeddingStore) -> RowGrads:
    """Gradients of the rows that count in a norm on this rank: of the copies of a replicated row, only one counts."""
    backend = store.backend
    table_U, id_U = (backend.tensor(array).cpu().numpy() for array in (grads.table_U, grads.id_U))
    return grads.rows(backend.put(np.flatnonzero(store.replicas.are_counted(table_U, id_U))))


def _clamp_(grad: RowGrad, min: float | None = None, max: float | None = None) -> RowGrad:
    grad.set_values(lambda grad_UD: grad_UD.clamp(min, max))
    return grad


def _unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """The op of GradScaler.unscale_: divide by the scale, and set `found_inf` if a value is not finite."""
    dense = [grad for grad in grads if not isinstance(grad, RowGrad)]
    if dense:
        aten._amp_foreach_non_finite_check_and_unscale_(dense, found_inf, inv_scale)
    row_grads = [grad for grad in grads if isinstance(grad, RowGrad)]
    reduce_to_owners(row_grads)
    for grad in row_grads:
        if not bool(torch.isfinite(grad.row_values()).all()):
            found_inf.fill_(1.0)
        _mul_(grad, inv_scale)
    for ranks, _ in by_ranks(row_grads):
        found_inf.fill_(float(ranks.any(bool(found_inf))))


def _each(op: Any, one: Callable[..., Any], tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a `_foreach` op: `one` on each gradient of rows, `op` on all dense tensors together."""
    row_grads = [tensor for tensor in tensors if isinstance(tensor, RowGrad)]
    if one is not _zero_:
        reduce_to_owners(row_grads)
    given: list[Any] = [None] * len(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, RowGrad)]
    # An argument that is a list has one element for each tensor.
    lists = [isinstance(arg, list | tuple) for arg in args]
    if dense:
        picked = [[arg[i] for i in dense] if is_list else arg for arg, is_list in zip(args, lists, strict=True)]
        for i, result in zip(dense, op([tensors[i] for i in dense], *picked, **kwargs) or dense, strict=True):
            given[i] = result
    norms = iter(_norms(row_grads, *args, **kwargs) if one is _norm else ())
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, RowGrad):
            given[i] = (
                next(norms)
                if one is _norm
                else one(
                    tensor, *(arg[i] if is_list else arg for arg, is_list in zip(args, lists, strict=True)), **kwargs
                )
            )
    return None if op._schema.is_mutable else given


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _detach: RowGrad.copy_of,
    aten.alias.default: RowGrad.copy_of,
    aten.clone.default: lambda grad, **_: grad.copy_of(),
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div.Tensor: lambda grad, divisor: _div_(grad.copy_of(), divisor),
    aten.div.Scalar: lambda grad, divisor: _div_(grad.copy_of(), divisor),
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten.neg.default: lambda grad: _mul(grad, -1.0),
    aten.zero_.default: _zero_,
    aten.zeros_like.default: lambda grad, **_: RowGrad.of(grad.store, tables=grad.tables),
    aten.linalg_vector_norm.default: _norm,
    aten.clamp_.default: _clamp_,
    aten.clamp.default: lambda grad, min=None, max=None: _clamp_(grad.copy_of(), min, max),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
"""{op: function that does its work on a gradient of rows}."""

_OF_SPENT = {
    _detach, aten.alias.default, aten.clone.default, aten.add.Tensor, aten.add_.Tensor, aten.zero_.default,
    aten._foreach_zero_.default,
}  # fmt: skip
"""Ops allowed on a spent gradient; the next gradient replaces it."""

_FOREACH: dict[Any, Callable[..., Any]] = {
    aten._foreach_norm.Scalar: _norm,
    aten._foreach_mul.Tensor: _mul,
    aten._foreach_mul.Scalar: _mul,
    aten._foreach_mul_.Tensor: _mul_,
    aten._foreach_mul_.Scalar: _mul_,
    aten._foreach_mul_.ScalarList: _mul_,
    aten._foreach_div_.Tensor: _div_,
    aten._foreach_div_.Scalar: _div_,
    aten._foreach_clamp_min_.Scalar: lambda grad, min: _clamp_(grad, min, None),
    aten._foreach_clamp_max_.Scalar: lambda grad, max: _clamp_(grad, None, max),
    aten._foreach_zero_.default: _zero_,
}
"""{op on a list of tensors: function that does its work on one element}."""
