"""The op vocabulary: what a training step is made of, as plain functions. The living definition of each op.

    keys  = unique_keys(ids, table_ids, ...)       which rows, each once
    lease = acquire(store, keys)                   make them resident and pin them
    rows  = gather(lease, weight)                  their weights, differentiable
    ...                                            dense forward, loss.backward()
    grads = reduce_grads([lease, ...])             sum over equal keys
    go    = check_finite([optimizer], [grads])     whether to take the step
    groups = step(optimizer, go)                   the dense parameters' optimizer, with its hooks
    update(optimizer, grads, go, groups)           the rows' optimizer, in place
    release([lease, ...])                          unpin
    advance([optimizer], [lr_scheduler], go)       the step is made; rates of the next one

    rows  = peek(store, keys)                      in place of acquire and gather: reads, inserts nothing
    rows  = read_ids(store, ids, ...)              eager, in place of all that: a lookup that leaves no gradient
    prefetched = prefetch(store, keys)             ahead of acquire(store, keys, prefetched=prefetched): inserts nothing

`batch_ids.py` holds what ids, tables and offsets must be, `step_ops.py` what a step does beside its lookups: contexts,
clipping, loss scales, accumulation. `merged_ops.py` makes one lookup of those of several embeddings, `shuffle_ops.py`
holds what runs between ranks.
Eager mode calls them in this order; the compiler only reorders, merges, fuses and overlaps them, so "compiled equals
eager" is one comparison.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from oneemb.graph import batch_ids
from oneemb.kernels import loops as kernels
from oneemb.kernels.bags import Bags
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.loops import Array, Loops, Segments, Terms, loops_of
from oneemb.kernels.threads import Threads
from oneemb.storage.embedding_store import EmbeddingStore, Pins
from oneemb.storage.merged_store import MergedPrefetched, MergedStore
from oneemb.storage.row_store import StorageError
from oneemb.storage.tiers.hot_rows import Prefetched
from oneemb.storage.turns import undisturbed, whole

if TYPE_CHECKING:
    from oneemb.graph.row_optimizers import RowOptimizer

__all__ = [
    "Keys", "Lease", "NonFiniteGradientError", "RowGrads", "StepOptimizer", "acquire", "advance", "check_finite",
    "check_pooling", "gather", "lookup", "over_passes", "peek", "prefetch", "read_ids", "reduce_grads", "release",
    "step", "unique_keys", "update",
]  # fmt: skip

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ORDER = itertools.count()
T = TypeVar("T")
_ONE_THREAD = Threads(1)


class NonFiniteGradientError(ArithmeticError):
    """A gradient holds NaN or infinity. Nothing was updated, no weight, state or count. Ids that lookups of the step
    have inserted stay, with their initial values."""


@dataclass(frozen=True)
class Keys:
    """The unique keys of a batch of ids and the shape the ids had."""

    shape: torch.Size
    """That of the ids; of bags, [B, T] or [P]."""
    unique: kernels.Keys
    bags: Bags | None
    loops: Loops
    """Those that work where the ids are."""

    def acquire(self, store: EmbeddingStore, pending: "list[Lease] | None", prefetched: Prefetched | None) -> "Lease":
        """See the op."""
        slot_U, unique = store.acquire(self.unique, prefetched)
        return Lease(store, dataclasses.replace(self, unique=unique), slot_U, store.generation, pending)

    def prefetch(self, store: EmbeddingStore) -> Prefetched:
        """See the op."""
        return store.prefetch(self.unique)


_NO_KEYS: Any = Keys(torch.Size(()), None, None, None)  # type: ignore[arg-type]


@dataclass(eq=False)
class Lease:
    """Rows of a batch: resident in the hot tier and pinned, until `release`.

    A lease that is dropped unreleased (a forward pass without a step) is released by the next `acquire`. A released one
    holds nothing: a loss that is kept keeps none of a batch's arrays.
    """

    store: EmbeddingStore
    keys: Keys
    slot_U: Array
    generation: int
    pending: list["Lease"] | None = None
    """Where the lease reports that a gradient has come, for eager mode."""
    grads: list[torch.Tensor] = field(default_factory=list)
    """d loss / d rows, [N, D] or, of bags, [P, D] each, one for each backward pass."""
    scale_N: Array | None = None
    """By what each id was multiplied on its way into its bag; None = 1."""
    order: int = field(default_factory=lambda: next(_ORDER))
    """Grows from lookup to lookup."""

    def __post_init__(self) -> None:
        self._pins: Pins | None = self.store.pin_for(self, self.slot_U)

    @property
    def released(self) -> bool:
        return self._pins is None

    def reduce(self) -> "RowGrads":
        """The gradients that have come, each key's to be summed."""
        return _reduce(self)

    def release(self) -> None:
        """Unpin the rows, and drop them and the gradients."""
        with undisturbed:
            if self._pins is not None:
                self.store.release_pins(self._pins)
            self._pins = self.slot_U = self.scale_N = self.pending = None
            self.keys = _NO_KEYS
            self.grads.clear()

    def check_held(self) -> None:
        """Raise RuntimeError if the rows are held no more, so that no gradient can be left with them."""
        if self._pins is None:
            raise RuntimeError(
                "backward through a lookup of an embedding that is over: a step has updated its rows, or zero_grad has"
                " dropped them, and other rows may have taken their place. Run every backward pass of a step before"
                " the step, or look the ids up again"
            )
        self.check_generation()

    def check_generation(self) -> None:
        """Raise StorageError if the slots mean nothing any more."""
        if self.generation != self.store.generation:
            raise StorageError(
                "the rows of a lookup were replaced since (load_snapshot, clear, close, another device); look the ids"
                " up again"
            )


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
        finite_U = self.store.loops.finite_rows(grad_UD)
        return RowGrads(self.store, self.generation, *keys, grad_UD, finite_U, stores=self.stores)


class StepOptimizer(Protocol):
    """What ops ask of an optimizer: `oneemb.Optimizer` is one."""

    optimizer: torch.optim.Optimizer
    skip_nonfinite: bool
    skipped: int
    taken: int

    def rows_of(self, store: EmbeddingStore) -> tuple["RowOptimizer", dict[str, Any]] | None:
        """The row optimizer of a store and its parameter group now; None where the store is not its own."""


def unique_keys(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
    *,
    threads: Threads = _ONE_THREAD,
) -> Keys:
    """The unique (table, id) pairs of a batch, in order of first occurrence, padding left out.

    Of bags, where no `table_ids` are given, they come table by table on the CPU.

    Args:
        ids: [B, T] of `key_type`: column t is looked up in table t. With one table, or with `table_ids`, any shape.
        table_ids: integers from 0 to T-1 of a shape that broadcasts to that of `ids`: the table of each id.
        offsets: integers [P + 1] from 0 to N, none below the one before: `ids` is [N] and bag p holds the ids from
            offsets[p] to offsets[p + 1] - 1. `table_ids` then says the table of each bag, [P], or of all; without it
            bags are those of B samples one after another, P = B * T, bag p of table p % T.
        threads: runs the loops on the CPU.

    Raises:
        TypeError, ValueError: dtype, device, shape or range is not as above.
    """
    loops = loops_of(ids, threads) if isinstance(ids, torch.Tensor) else HostLoops(threads)
    if offsets is not None:
        return _unique_keys_of_bags(ids, table_ids, num_tables, key_type, padding_idx, offsets, loops)
    table_N, id_N, check = _tables_and_ids(ids, table_ids, num_tables, key_type, loops)
    unique = loops.unique_keys(table_N, id_N, tables=num_tables, padding_id=padding_idx, check=check)
    return Keys(ids.shape, unique, None, loops)


def _tables_and_ids(
    ids: torch.Tensor, table_ids: torch.Tensor | None, num_tables: int, key_type: torch.dtype, loops: Loops
) -> tuple[Array, Array, Callable[[], None] | None]:
    """table_N, id_N and what checks the values of `table_ids`."""
    batch_ids.check_ids(ids, table_ids, num_tables, key_type)
    id_N = loops.array(ids.detach().reshape(-1).contiguous())
    if table_ids is None:
        return loops.tables_of_columns(len(id_N), num_tables), id_N, None
    check = functools.partial(
        batch_ids.check_tables, table_ids if ids.numel() else table_ids.reshape(-1)[:0], num_tables
    )
    table_N = loops.tables(table_ids, num_tables).expand(ids.shape).reshape(-1).contiguous()
    return loops.array(table_N), id_N, check


def _unique_keys_of_bags(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor,
    loops: Loops,
) -> Keys:
    shape, offset_P1, table_P, check = batch_ids.bags_of_ids(ids, table_ids, num_tables, key_type, offsets, loops)
    id_N = loops.array(ids.detach().contiguous())
    unique, bags = loops.unique_keys_of_bags(
        id_N, loops.array(offset_P1), None if table_P is None else loops.array(table_P), tables=num_tables,
        padding_id=padding_idx, check=check,
    )  # fmt: skip
    return Keys(shape, unique, bags, loops)


def prefetch(store: EmbeddingStore | MergedStore, keys: Any) -> Prefetched | MergedPrefetched:
    """Read known rows of a coming lookup and pin them, as far as there is room, on any thread; insert nothing."""
    return keys.prefetch(store)


def acquire(
    store: EmbeddingStore | MergedStore, keys: Any, pending: list[Lease] | None = None, prefetched: Any = None
) -> Any:
    """Make the rows of these keys resident and pin them; unknown keys are inserted with their initial values.

    Args:
        store, keys: an `EmbeddingStore` and `Keys`, which give a `Lease`; or a `MergedStore` and `MergedKeys`, which
            give a `MergedLease` (see oneemb.graph.merged_ops).
        pending: where the lease reports that a gradient has come, for eager mode.
        prefetched: what `prefetch` gave for these keys.

    Raises:
        StoreFullError: a tier is too small for the step, or capacity is reached; nothing of this lookup is inserted.
    """
    _check_place(store, keys)
    if not store.built:
        store.build(None, np.empty(0, np.float32))
    # The turn first, where it is one: Ctrl-C ends a wait for it. Merged stores take theirs in an order of their own.
    turns = [store.members[0].turns] if len(store.members) == 1 else []

    def acquire_whole() -> Any:
        with whole(member.turns for member in store.members):  # so that what is pinned has an owner
            return keys.acquire(store, pending, prefetched)

    return _holding(turns, acquire_whole)


def _check_place(store: EmbeddingStore | MergedStore, keys: Any) -> None:
    if keys.loops.place != store.loops.place:
        raise ValueError(
            f"ids must be on {store.loops.place}, where the embedding is, got {keys.loops.place};"
            f" call ids.to({str(store.loops.device)!r})"
        )


def lookup(
    store: EmbeddingStore,
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
) -> Lease:
    """`unique_keys` and `acquire` in one."""
    keys = unique_keys(ids, table_ids, num_tables, key_type, padding_idx, offsets, threads=store.threads)
    return acquire(store, keys)


class _Gather(torch.autograd.Function):
    """Reads rows forward; backward leaves their gradient with the lease. `weight` only ties it to autograd."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, lease: Lease, scales: torch.Tensor | None) -> torch.Tensor:
        ctx.lease = lease
        store = lease.store
        weight_SX = store.weight_SX
        lease.check_generation()  # Another thread may have closed the store; the slab taken before stays what it is.
        with undisturbed, store.writing:  # undisturbed, so that a fork finds no lock held
            return _read(store, weight_SX, lease.slot_U, lease.keys, lease.scale_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        lease, (grad,) = ctx.lease, grads
        lease.check_held()
        grad_ND = grad.reshape(-1, grad.shape[-1]).contiguous()
        if ctx.needs_input_grad[0]:
            with undisturbed:
                if lease.pending is not None and not lease.grads:
                    lease.pending.append(lease)
                lease.grads.append(grad_ND)
        return None, None, _grad_of_scales(lease, grad_ND) if ctx.needs_input_grad[2] else None


def _grad_of_scales(lease: Lease, grad_PD: torch.Tensor) -> torch.Tensor:
    bags, store, loops = lease.keys.bags, lease.store, lease.store.loops
    assert bags is not None
    inverse_N, grad_PX = lease.keys.unique.inverse_N, loops.array(grad_PD)
    with undisturbed, store.writing:
        return loops.tensor(loops.scale_grads(store.weight_SX, lease.slot_U, inverse_N, bags.bag_N, grad_PX))


def _read(store: EmbeddingStore, weight_SX: Array, slot_U: Array, keys: Keys, scale_N: Array | None) -> torch.Tensor:
    """The weights of each id, or of each bag, from the rows in slot_U."""
    loops, dim, inverse_N = store.loops, store.layout.dim, keys.unique.inverse_N
    out = torch.empty(*keys.shape, dim, dtype=_DTYPES[store.layout.dtype], device=loops.device)
    out_ND = loops.array(out.view(-1, dim))
    if keys.bags is None:
        loops.gather(weight_SX, slot_U, inverse_N, out_ND)
    else:
        loops.pool(weight_SX, slot_U, inverse_N, keys.bags.offset_P1, scale_N, out_ND)
    return out


def gather(
    lease: Lease, weight: torch.Tensor, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """The weights of each id, zeros for padding: [*shape of ids, D], of the store's dtype; of bags, those pooled.

    Its gradient is left with the lease, for `reduce_grads`; `weight`, which stands for all rows, gets none.

    Args:
        per_sample_weights: float32 [N], by what the weights of each id are multiplied before a sum.
        pooling: "sum" or "mean", what a bag gives.

    Raises:
        TypeError, ValueError: `per_sample_weights` is not as above, or given for a mean or for ids in no bags.
    """
    lease.scale_N = _scales(lease.keys, per_sample_weights, pooling, lease.store)
    return _Gather.apply(weight, lease, per_sample_weights)


def check_pooling(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str) -> None:
    """Check what `gather` is going to be given.

    Raises:
        TypeError, ValueError: it would refuse it.
    """
    if pooling not in ("sum", "mean"):
        raise ValueError(f'pooling must be "sum" or "mean", got {pooling!r}')
    if per_sample_weights is None:
        return
    if keys.bags is None or pooling != "sum":
        raise ValueError('per_sample_weights are for bags that are summed; pass offsets, and pooling="sum"')
    ids = len(keys.unique.inverse_N)
    given = isinstance(per_sample_weights, torch.Tensor)
    if not given or per_sample_weights.dtype != torch.float32 or per_sample_weights.shape != (ids,):
        got = (per_sample_weights.dtype, list(per_sample_weights.shape)) if given else type(per_sample_weights)
        raise TypeError(f"per_sample_weights must be float32, one for each of {ids} ids, got {got}")
    device = keys.loops.device
    if per_sample_weights.device != device:
        raise ValueError(f"per_sample_weights must be on {device}, where ids are, got {per_sample_weights.device}")


def _scales(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str, store: EmbeddingStore) -> Array | None:
    check_pooling(keys, per_sample_weights, pooling)
    if per_sample_weights is not None:
        return store.loops.array(per_sample_weights.detach().contiguous())
    if keys.bags is None or pooling == "sum":
        return None
    return store.loops.mean_scales(keys.bags.offset_P1, keys.unique.inverse_N)


def peek(
    store: EmbeddingStore, keys: Keys, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """What `gather` gives without inserting: an unknown id reads as its initial value. It has no gradient."""
    _check_place(store, keys)
    row_UW, unique = store.read(keys.unique)  # on a GPU tables and offsets are checked here, before anything uses them
    keys = dataclasses.replace(keys, unique=unique)
    scale_N = _scales(keys, per_sample_weights, pooling, store)
    return _read(store, store.layout.weights(row_UW), store.loops.arange(len(row_UW)), keys, scale_N)


def read_ids(
    store: EmbeddingStore,
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    *,
    inserts: bool,
) -> torch.Tensor | None:
    """What `peek` gives of ids that are in no bags or, if it `inserts` unknown ones, `gather`; without a gradient.

    Where rows lie still, ids need not be made unique to be found and pinned: each is read where it is. None where rows
    do not, or are on a GPU.

    Raises:
        TypeError, ValueError, StoreFullError: as `unique_keys` and `acquire`.
    """
    if not store.reads_in_place:
        return None
    loops = loops_of(ids, store.threads) if isinstance(ids, torch.Tensor) else store.loops
    table_N, id_N, check = _tables_and_ids(ids, table_ids, num_tables, key_type, loops)
    if loops.place != store.loops.place:
        return None
    if check is not None:
        check()
    out = torch.empty(*ids.shape, store.layout.dim, dtype=_DTYPES[store.layout.dtype])
    out_ND = loops.array(out.view(-1, store.layout.dim))
    with store.turns:  # Nothing is pinned: the rows must be there until they are read.
        slot_N = store.slots_of(table_N, id_N)
        if slot_N is None:
            return None
        missing = np.flatnonzero(slot_N < 0)
        if padding_idx is not None:
            missing = missing[id_N[missing] != padding_idx]
            slot_N[id_N == padding_idx] = -1  # a snapshot of another embedding may have brought it
        if len(missing) and inserts:
            unique = loops.unique_keys(table_N[missing], id_N[missing], tables=num_tables, padding_id=None, check=None)
            slot_U, _ = store.acquire(unique)
            store.release(slot_U)
            slot_N[missing] = slot_U[unique.inverse_N]
        with store.writing:
            loops.gather(store.weight_SX, None, slot_N, out_ND)
        if len(missing) and not inserts:
            row_MW, _ = store.read(loops.distinct_keys(table_N[missing], id_N[missing]))
            out_ND[missing] = store.layout.weights(row_MW)[:, : store.layout.dim]
    return out


def reduce_grads(leases: Sequence[Lease]) -> RowGrads | None:
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
        loops.join([getattr(part, name) for part in parts]) for name in ("table_U", "id_U", "slot_U", "grad_UD")
    )
    unique = loops.counted(loops.unique_keys(table_N, id_N, tables=TABLE_MAX, padding_id=None, check=None))
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


def _reduce(lease: Lease) -> RowGrads:
    grad_ND = over_passes(lease.grads)
    keys, loops = lease.keys, lease.store.loops
    lease.check_generation()
    segments = loops.segments(keys.unique, keys.bags, loops.array(grad_ND), lease.scale_N)
    unique = keys.unique
    return RowGrads(lease.store, lease.generation, unique.table_U, unique.id_U, lease.slot_U, segments=segments)


def check_finite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None], scaler: Any = None) -> bool:
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


def _surely_finite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None]) -> bool:
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


def _find_nonfinite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None]) -> str | None:
    for grad in grads:
        if grad is None:
            continue
        finite_U = grad.store.loops.to_host(grad.finite_U)
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


Groups = dict[int, dict[str, Any]]
"""The options of param groups, by the identity of the group."""


def step(optimizer: StepOptimizer, go: bool) -> Groups:
    """Step the dense parameters. It comes before rows are updated, since it runs what may fail: hooks of the user's.

    Returns:
        The options that this step was made with, after hooks before it and before those after it, for `update`.

    Raises:
        What the optimizer or a hook of it raises; no row has been updated.
    """
    groups: Groups = {}
    if not go:
        return groups

    def keep(*_: Any) -> None:
        for group in optimizer.optimizer.param_groups:
            groups[id(group)] = {
                name: option.clone() if isinstance(option, torch.Tensor) else option
                for name, option in group.items()
                if name != "params"
            }

    handle = optimizer.optimizer.register_step_pre_hook(keep)  # after those that there are
    try:
        optimizer.optimizer.step()
    except BaseException as error:
        add_note(
            error,
            f"{type(optimizer.optimizer).__name__}.step() did not end: no row was updated, dense parameters are as far"
            " as it got",
        )
        raise
    finally:
        handle.remove()
    return groups


def update(optimizer: StepOptimizer, grads: RowGrads | None, go: bool, groups: Groups | None = None) -> None:
    """Apply the optimizer to the rows, in place.

    Args:
        groups: the options to apply it with, from `step`; None = as they are now.
    """
    # Of merged stores the first answers for all: one group of one optimizer trains them.
    rows = optimizer.rows_of(grads.stores[0]) if grads is not None else None
    if grads is None or rows is None or not go:
        return
    store, (row_optimizer, group) = grads.store, rows
    group = (groups or {}).get(id(group), group)
    for one in grads.stores:
        one.turns.check(changes=True)

    def write() -> None:
        for some, step in _by_step(grads):
            row_optimizer.update(
                store.weight_SX, store.row_SW, some.slot_U, some.segments or some.grad_UD,
                state_begin=store.layout.state_begin, group=group, step=step + 1, loops=store.loops,
            )  # fmt: skip

    with whole(one.turns for one in grads.stores):
        _holding(sorted((one.writing for one in grads.stores), key=id), write)
        for one in grads.stores:
            one.step += 1
        store.mark_dirty(grads.table_U, grads.slot_U)


def _holding(locks: Sequence[Any], call: Callable[[], T]) -> T:
    """What `call` gives, with these locks held. Not an ExitStack: an exception that comes within its code would leave
    one locked."""
    if not locks:
        return call()
    with locks[0]:
        return _holding(locks[1:], call)


def _by_step(grads: RowGrads) -> list[tuple[RowGrads, int]]:
    """The gradients and the steps that their store has made; of merged stores that are not equally far, apart."""
    steps = sorted({one.step for one in grads.stores})
    if len(steps) == 1:
        return [(grads, steps[0])]
    step_M = np.array([member.step for member in grads.store.members])
    step_U = step_M[grads.store.members_of(grads.table_U)]
    parts = []
    for step in steps:
        u = np.flatnonzero(step_U == step)
        keys = grads.table_U[u], grads.id_U[u], grads.slot_U[u]
        parts.append((RowGrads(grads.store, grads.generation, *keys, grads.grad_UD[u], grads.finite_U[u]), step))
    return parts


def advance(optimizers: Sequence[StepOptimizer], lr_schedulers: Sequence[Any], go: bool) -> None:
    """Count the step, drop the gradients of dense parameters, and step the learning rates.

    Raises:
        What a scheduler raises, once the others have been stepped; the step is made and counted.
    """
    for optimizer in optimizers:
        optimizer.taken += go
        optimizer.optimizer.zero_grad(set_to_none=True)
    failed: Exception | None = None
    for scheduler in lr_schedulers if go else ():
        try:
            if scheduler is not None:
                scheduler.step()
        except Exception as error:
            add_note(
                error,
                f"{type(scheduler).__name__}.step() failed after the update: rows and dense parameters are updated and"
                " the step is counted; its learning rate may not have moved",
            )
            failed = failed or error
    if failed is not None:
        raise failed


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note`, once."""
    if not any(note in one for one in getattr(error, "__notes__", ())):
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def release(leases: Sequence[Lease]) -> None:
    """Unpin the rows of these leases and drop their gradients."""
    for lease in leases:
        lease.release()
