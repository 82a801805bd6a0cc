"""The lookup of a batch of ids: its unique keys, a lease on their rows, and the rows read.

    keys  = unique_keys(ids, ...)
    lease = acquire(store, keys)       or, for a lookup that is only expected, reserve(store, keys).acquire()
    rows  = gather(lease)

    lease = acquire(store, keys, again=True)     the same lookup once more, in the backward pass of a checkpoint

    rows  = peek(store, keys)          without a lease
    rows  = read_ids(store, ids, ...)  without unique keys either

N ids, U unique keys, P bags, B samples, T tables, D weights of a row, W words of a row.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

from oneemb.graph.ops import batch_ids
from oneemb.graph.ops.asking import Asking, CutBags
from oneemb.graph.ops.grads import RowGrads, Summed, add_sums, nowhere, sum_over_passes
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ranks import Ranks
from oneemb.kernels import loops as kernels
from oneemb.kernels.arrays import Array, Bags, RowsOfIds
from oneemb.kernels.host_loops import OPENMP_MIN, HostLoops
from oneemb.kernels.loops import Loops
from oneemb.kernels.places import loops_of
from oneemb.kernels.threads import Threads
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.locking.pins import Pins
from oneemb.storage.locking.turns import undisturbed
from oneemb.storage.merged_store import MergedPrefetched, MergedStore
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = [
    "DTYPES", "Keys", "Lease", "REPLACED", "Remote", "Reserved", "acquire", "acquire_later",
    "check_pooling", "equal", "free_failed_passes", "full", "full_of", "gather", "in_backward", "keep",
    "measure_gather", "measure_unique_keys", "peek", "prefetch", "read_ids", "reserve", "spread_max_grads",
    "unique_keys", "with_room",
]  # fmt: skip

_T = TypeVar("_T")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Up to this many ids one thread copies in less time than it costs to wait for a core on which torch's threads spin.
_NUMPY_MAX = 1 << 20

_ONE_THREAD = Threads(1)
_NO_LOOPS = HostLoops(_ONE_THREAD)

next_order = itertools.count().__next__
"""Gives numbers that grow from lookup to lookup."""


REPLACED = (
    "the rows of a lookup were replaced since (load_snapshot, clear, close, another device); look the ids up again"
)
"""Text of the error for a lookup whose slots have other rows now."""


# ---- ids -------------------------------------------------------------------------------------------------------------


@Op(PREPARE)
def keep(value: Any) -> Any:
    """A copy of a batch's value that nobody else has: of a tensor, array or list. Any: other values are themselves."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return torch.from_numpy(value.numpy().copy()) if _on_one_thread(value) else value.clone()
    return value.copy() if isinstance(value, np.ndarray | list) else value


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal` of tensors of one dtype on one device."""
    if _on_one_thread(one) and _on_one_thread(other):
        return np.array_equal(one.numpy(), other.numpy())
    return torch.equal(one, other)


def _on_one_thread(ids: torch.Tensor) -> bool:
    """Whether NumPy copies and compares these ids. torch does so on several OpenMP threads, which go on spinning for
    some milliseconds, on the cores that the lookup's own threads are to use."""
    is_host = ids.device.type == "cpu" and ids.dtype in (torch.int64, torch.int32) and ids.is_contiguous()
    return is_host and OPENMP_MIN <= ids.numel() <= _NUMPY_MAX and type(ids) is torch.Tensor


# ---- keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The unique keys of a batch of ids and the shape the ids had."""

    shape: torch.Size
    """Shape of the ids; with bags, [B, T] or [P]."""
    unique: kernels.Keys
    bags: Bags | None
    loops: Loops
    """Loops that work where the ids are."""
    uses_U: np.ndarray | None = None
    """int64: number of ids in the ranks' batches that each key has, for policies; None = the number in `unique`."""

    def prefetch(self, store: EmbeddingStore) -> Prefetched:
        """See the op."""
        return store.prefetch(self.unique)

    def reserve(self, store: EmbeddingStore, prefetched: Prefetched | None) -> "Reserved":
        """See the op."""
        return Reserved(store, self, prefetched)


def measure_unique_keys(args: object, keys: Any) -> tuple[int, int]:
    """Ids and bytes. Any: the keys are `Keys` or, from another file, `MergedKeys`."""
    ids, unique = len(keys.unique.inverse_N), len(keys.unique.id_U)
    return ids, ids * (8 + 8 + 8) + unique * (4 + 8 + 8)


@Op(PREPARE, gives="keys", measure=measure_unique_keys)
def unique_keys(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
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
        columns: the table of each of C columns, none below the one before: bags are those of C columns one after
            another, P = C * B, bag p of column p // B. They give [B, C].
        threads: runs the loops on the CPU.

    Raises:
        TypeError, ValueError: dtype, device, shape or range is not as above.
    """
    loops = loops_of(ids, threads) if isinstance(ids, torch.Tensor) else _NO_LOOPS  # which is refused just below
    if offsets is None:
        if columns is not None:
            batch_ids.check_no_columns(columns)
        batch_ids.check_ids(ids, table_ids, num_tables, key_type)
        table_N, id_N, check = batch_ids.tables_and_ids(ids, table_ids, num_tables, loops)
        unique = loops.unique_keys(table_N, id_N, tables=num_tables, padding_id=padding_idx, check=check)
        return Keys(ids.shape, unique, None, loops)
    shape, offset_P1, table_P, check_bags = batch_ids.bags_of_ids(
        ids, table_ids, num_tables, key_type, offsets, columns, loops
    )
    id_N = loops.array(ids.detach().contiguous())
    unique, bags = loops.unique_keys_of_bags(
        id_N, loops.array(offset_P1), None if table_P is None else loops.array(table_P), tables=num_tables,
        columns=columns, padding_id=padding_idx, check=check_bags,
    )  # fmt: skip
    return Keys(shape, unique, bags, loops)


def in_backward() -> bool:
    """Whether this thread runs a backward pass. A lookup there repeats one of the forward pass, since activation
    checkpointing recomputes it."""
    return bool(torch._C._current_graph_task_id() >= 0)


# ---- leases ----------------------------------------------------------------------------------------------------------


class SharedRows(Protocol):
    """The rows of several lookups, that of a lease among them."""

    store: MergedStore

    def own_keys(self, p: int) -> Keys:
        """The keys of lookup p, as if it were alone."""


@dataclass(frozen=True)
class Remote:
    """Rows of a lookup that other ranks own."""

    ranks: Ranks
    weight_SX: Array
    """Weights of the rows, as they came; where owners sum parts of bags, the sums."""
    slot_U: Array
    """int64: place in `weight_SX` of each unique key, or of each part."""
    owned: "Lease | None"
    """The rows that ranks have asked this one for; None = they are not pinned."""
    asking: Asking
    """This rank's request."""
    asked: object
    """Request of all ranks to this one, a `shuffle.Asked`."""


class Lease:
    """Rows of a lookup: resident in the hot tier and pinned, from `pin` to `unpin`.

    A lease that is dropped (a forward pass without a step) is unpinned by the next `acquire`.

    With `remote` they are copies of rows that other ranks own. Nothing is pinned for them here, and their gradients go
    to the owners before anything is done with them (`settle` in settle.py).

    Args:
        store: whose rows they are.
        keys: of the lookup; None = those that `shared` gives.
        slot_U: where the rows are, pinned; None = they are not pinned yet.
        shared: (rows, p): of a merged lookup, the rows of all and which of them this is.
        remote: where the weights are, of rows that other ranks own.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        keys: Keys | None,
        slot_U: Array | None = None,
        shared: tuple[SharedRows, int] | None = None,
        remote: Remote | None = None,
    ):
        self.store = store
        self.slot_U = slot_U
        self.shared = shared
        self.remote = remote
        self.generation = -1
        """`generation` of the store when the rows were pinned."""
        self.scale_N: Array | None = None
        """Factor of each id in its bag; None = 1."""
        self.pooling = "sum"
        """Pooling of a bag: one of `batch_ids.POOLINGS`."""
        self.argmax_PD: Array | None = None
        """For bags pooled by their maximum: place in the bag of the id that gave each number, see `Loops.pool_max`."""
        self.has_grad = False
        """Whether a gradient has come."""
        self.lookups = 1
        """Number of lookups whose rows the lease holds; above 1 by `of_keys` alone."""
        self.order = next_order()
        """Grows from lookup to lookup: gradients of a row are summed in the order in which lookups were made."""
        self._keys = keys
        self._replaced = store.replaced
        self._pins: Pins | None = None
        self._reduced: tuple[list[torch.Tensor | Summed], Array | None, RowGrads] | None = None
        if slot_U is not None:
            self._pins, self.generation = store.pins.own(self, slot_U), store.generation

    @property
    def keys(self) -> Keys:
        """The keys of the lookup."""
        if self._keys is None:
            assert self.shared is not None
            rows, p = self.shared
            self._keys = rows.own_keys(p)
        return self._keys

    @classmethod
    def of_keys(cls, store: EmbeddingStore, table_U: Array, id_U: Array, lookups: int = 1) -> "Lease":
        """A pinned lease of distinct keys, in place of the leases of so many lookups."""
        unique = store.loops.distinct_keys(table_U, id_U)
        lease = cls(store, Keys(torch.Size((len(id_U),)), unique, None, store.loops))
        lease.lookups = lookups
        lease.pin(again=True)
        return lease

    def use(self) -> "Lease | None":
        """Let a policy count the uses in `uses_U` of the keys; keys without a row that are used get one.

        Returns:
            A pinned lease on the used rows; None = no row is used, or they were counted already.

        Raises:
            As `pin`.
        """
        keys, loops = self.keys, self.store.loops
        if keys.uses_U is None or not keys.uses_U.any():
            return None
        used = np.flatnonzero(keys.uses_U)
        at = loops.array(torch.from_numpy(used).to(loops.device))
        unique = loops.distinct_keys(keys.unique.table_U[at], keys.unique.id_U[at])
        lease = Lease(self.store, Keys(torch.Size((len(used),)), unique, None, loops, keys.uses_U[used]))
        lease.pin()
        self._keys = dataclasses.replace(keys, uses_U=None)
        return lease

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are in their slots."""
        return self._pins is not None and self.generation == self.store.generation

    inserts = False
    """See `Reserved.inserts`: the step that trains unknown keys inserts them."""
    repeated_by = -1
    """Number of the backward pass that repeated the lookup last; -1 = none has."""

    def acquire(self) -> "Lease":
        """This lease. The lookup counts as made now; see `order`."""
        self.order = next_order()
        return self

    def drop(self) -> None:
        """Unpin the rows."""
        self.unpin()

    def forget(self) -> None:
        """See `Reserved`; it holds no other."""

    @property
    def is_valid(self) -> bool:
        """Whether the rows that were looked up can still be read."""
        return self._replaced == self.store.replaced and (self.slot_U is None or self.is_pinned)

    def pool_by(self, keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str) -> None:
        """Set how `read` pools bags; see `gather`. `keys` are the lookup's own, or its part of merged ones."""
        sums = per_sample_weights is None and pooling == "sum"
        self.scale_N = None if sums else _scales_of(keys, per_sample_weights, pooling, self.store)
        self.pooling = pooling

    def pin(self, prefetched: Prefetched | None = None, *, again: bool = False) -> None:
        """Make the rows resident and pin them, if they are not; unknown ones are inserted.

        Args:
            again: whether policies count no new use of the rows. They never do if the lease has pinned them before.

        Raises:
            StoreFullError: they do not fit.
            StorageError: they were replaced since the lookup.
        """
        if self._pins is not None and self.generation == self.store.generation:
            return
        self.check_not_replaced()
        with_room(self.store, functools.partial(self._pin, prefetched, again))

    def _pin(self, prefetched: Prefetched | None, again: bool) -> None:
        # In one turn, so that what is pinned has an owner. The turn is the outermost block: Ctrl-C ends a wait for it.
        store, keys = self.store, self.keys
        with store.turns:
            again = again or self.generation != -1
            self.slot_U, unique = store.acquire(keys.unique, prefetched, again=again, uses_U=keys.uses_U)
            if unique is not keys.unique:
                self._keys = dataclasses.replace(keys, unique=unique)
            self.generation, self._pins = store.generation, store.pins.own(self, self.slot_U)

    def unpin(self) -> None:
        """Let the rows be evicted; `pin` brings them back."""
        if self.remote is not None and self.remote.owned is not None:
            self.remote.owned.unpin()
        # Given up first: pins that an interrupt leaves in between are released when this object is dropped.
        pins, self._pins = self._pins, None
        if pins is not None:
            self.slot_U = None
            self.store.pins.release(pins)

    def sum_now(self, grad_NX: torch.Tensor) -> Summed | None:
        """Sums per unique key of the lookup's only backward pass, with the bits of `reduce`, in place of a copy of the
        gradient. None = the gradient is to be kept and summed later."""
        if self.has_grad or self.remote is not None or self.shared is not None or self.argmax_PD is not None:
            return None
        keys, loops = self.keys, self.store.loops
        if not loops.sum_costs_less(keys.unique, len(grad_NX)):
            return None
        return Summed(*loops.sum_segments(loops.segments(keys.unique, keys.bags, loops.array(grad_NX), self.scale_N)))

    def reduce(self, grads: Sequence[torch.Tensor | Summed]) -> RowGrads:
        """Gradients of unique keys, from one gradient of the lookup for each backward pass; sums are made later, unless
        `sum_now` has made them."""
        unique, loops = self.keys.unique, self.store.loops
        slot_U = nowhere(loops, len(unique.id_U)) if self.slot_U is None else self.slot_U
        keys = self.store, self.generation, unique.table_U, unique.id_U, slot_U
        if isinstance(grads[0], Summed):
            return RowGrads(*keys, sums=add_sums(cast("Sequence[Summed]", grads), loops))
        grad_NX = loops.array(self.sum_passes(cast("Sequence[torch.Tensor]", grads)).contiguous())
        bags = self.keys.bags if self.argmax_PD is None else None
        return RowGrads(*keys, segments=loops.segments(unique, bags, grad_NX, self.scale_N))

    def reduce_once(self, grads: Sequence[torch.Tensor | Summed]) -> RowGrads:
        """Result of `reduce`, kept for a next call with the same gradients."""
        if self._reduced is not None:
            before, slot_U, reduced = self._reduced
            same = len(before) == len(grads) and all(one is two for one, two in zip(before, grads, strict=True))
            if same and slot_U is self.slot_U and reduced.generation == self.generation:
                return reduced
        reduced = self.reduce(grads)
        self._reduced = list(grads), self.slot_U, reduced
        return reduced

    def sum_passes(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradients of ids, [N, D], or of bags that gave a sum, [P, D], summed over backward passes; perhaps in
        strides."""
        grad_NX = sum_over_passes(grads)
        if self.argmax_PD is None:
            return grad_NX
        return spread_max_grads(self.keys, self.argmax_PD, grad_NX.contiguous(), self.store.loops)

    def read(self) -> torch.Tensor:
        """The weights of each id, or of each bag, as they are now."""
        store, slot_U = self.store, self.slot_U
        if self.remote is not None:
            if self.remote.asking.cut is not None:
                return self._sum_parts(self.remote, self.remote.asking.cut)
            return self._read(self.remote.weight_SX, self.remote.slot_U)
        if slot_U is None:
            row_UW, unique = store.read(self.keys.unique)
            self._keys = dataclasses.replace(self.keys, unique=unique)
            return self._read(store.format.weights(row_UW), store.loops.arange(len(row_UW)))
        weight_SX = store.weight_SX
        if self.generation != store.generation:
            self.check_generation()  # Another thread may have closed the store; the slab taken before stays what it is.
        with undisturbed, store.writing:  # undisturbed, so that a fork finds no lock held
            return self._read(weight_SX, slot_U)

    def _read(self, weight_SX: Array, slot_U: Array) -> torch.Tensor:
        out, self.argmax_PD = _read(self.store, weight_SX, slot_U, self.keys, self.scale_N, self.pooling)
        return out

    def _sum_parts(self, remote: Remote, cut: CutBags) -> torch.Tensor:
        """The sum of each bag, or its mean, from what the owners of its parts have summed."""
        store, loops = self.store, self.store.loops
        order_S, offset_P1 = cut.of_bags()
        scale_S = loops.array(cut.scale_S[order_S].to(loops.device)) if self.pooling == "mean" else None
        part_S = loops.array(order_S.to(loops.device))
        out = torch.empty(*self.keys.shape, store.format.dim, dtype=DTYPES[store.format.dtype], device=loops.device)
        rows = RowsOfIds(remote.weight_SX, remote.slot_U, part_S)
        bags = Bags(loops.array(offset_P1.to(loops.device)))
        loops.pool(rows, bags, scale_S, loops.array(out.view(-1, out.shape[-1])))
        return out

    def grad_of_scales(self, grad_PD: torch.Tensor) -> torch.Tensor:
        """The gradient of `per_sample_weights`, float32 [N], from that of bags."""
        store, keys, loops = self.store, self.keys, self.store.loops
        assert keys.bags is not None
        if self.slot_U is None:
            remote = self.remote
            if remote is None:
                weight_UX = store.format.weights(store.read(keys.unique)[0])
                rows = RowsOfIds(weight_UX, loops.arange(len(weight_UX)), keys.unique.inverse_N)
            else:
                rows = RowsOfIds(remote.weight_SX, remote.slot_U, keys.unique.inverse_N)
            return loops.tensor(loops.scale_grads(rows, keys.bags.bag_N, loops.array(grad_PD.contiguous())))
        with undisturbed, store.writing:
            rows = RowsOfIds(store.weight_SX, self.slot_U, keys.unique.inverse_N)
            return loops.tensor(loops.scale_grads(rows, keys.bags.bag_N, loops.array(grad_PD.contiguous())))

    def check_generation(self) -> None:
        """Raise StorageError if the slots mean nothing any more."""
        if self.generation != self.store.generation:
            raise StorageError(REPLACED)

    def check_not_replaced(self) -> None:
        """Raise StorageError if other rows have taken the place of those that were looked up."""
        if self._replaced != self.store.replaced:
            raise StorageError(REPLACED)


def with_room(store: EmbeddingStore, pin: Callable[[], _T]) -> _T:
    """Call `pin`, which pins rows, and return its result. Without room, unpin the rows that only failed backward passes
    hold, and call it again: see `free_failed_passes`.

    Raises:
        StoreFullError: there is no room.
    """
    try:
        return pin()
    except StoreFullError as error:
        if not error.pinned or not free_failed_passes(store):
            raise
    return pin()


def free_failed_passes(store: EmbeddingStore) -> bool:
    """Drop gradients of failed backward passes of this thread. torch keeps them in the thread's queue until its next
    backward pass, and so long their rows stay pinned.

    Returns:
        Whether pinned rows of the store have lost their owner.
    """
    if in_backward():
        return False
    # Hidden from torch's modes: a tape would record it, and a graph would take it for a backward pass of `build`.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        nothing = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward([nothing.clone()])
    return bool(store.pins.abandoned)


def full_of(store: EmbeddingStore, error: StoreFullError) -> StoreFullError:
    """The error of a lookup without room; see `full`."""
    return full(error, sum(one.lookups for one in store.pins.owners() if isinstance(one, Lease) and one.has_grad))


def full(error: StoreFullError, waiting: int) -> StoreFullError:
    """The same error; if pinned rows leave no room, one that says how many lookups wait for `zero_grad()`.

    Args:
        waiting: the number of lookups whose gradients are kept.
    """
    if not error.pinned or waiting == 0:
        return error
    return StoreFullError(
        f"{waiting} lookups wait for zero_grad(): their gradients are kept, and all their rows have to be in memory at"
        " a time; call step() and zero_grad() after each batch. If the gradients of several batches are to be summed,"
        f" {error}"
    )


class LeaseAgain(Lease):
    """Lease of a lookup that the backward pass repeats; policies do not count it as a use of its rows.

    The rows are read at the slots of the first lookup's lease, if it is still pinned: an id that got no row in the
    forward pass may have got one by another lookup since.
    """

    def read(self) -> torch.Tensor:
        """See `Lease`."""
        backward, own_U = torch._C._current_graph_task_id(), self.slot_U
        leases = [one for one in self.store.pins.owners() if isinstance(one, Lease) and self._repeats(one)]
        # Lookups of the same ids are repeated in the order in which they were made, each once.
        first = min(leases, key=lambda one: (one.repeated_by == backward, one.order), default=self)
        first.repeated_by, self.slot_U = backward, first.slot_U
        try:
            return super().read()
        finally:
            self.slot_U = own_U

    def _repeats(self, first: Lease) -> bool:
        """Whether `first` is the lease of a first lookup of the same keys."""
        if isinstance(first, LeaseAgain) or first.slot_U is None or len(first.slot_U) != len(self.keys.unique.id_U):
            return False
        tensor, one, other = self.store.loops.tensor, self.keys.unique, first.keys.unique
        return torch.equal(tensor(one.id_U), tensor(other.id_U)) and torch.equal(
            tensor(one.table_U), tensor(other.table_U)
        )


class Reserved:
    """A lookup that a step is expected to make. Nothing is inserted before it does."""

    inserts = True
    """Whether unknown keys are inserted by the lookup, and not by the step that trains them."""

    def __init__(self, store: EmbeddingStore, keys: Keys, prefetched: Prefetched | None):
        self._store, self._keys, self._prefetched = store, keys, prefetched
        self._lease: Lease | None = None

    def acquire(self) -> Lease:
        """The rows, pinned; unknown keys are inserted.

        Raises:
            StoreFullError: they do not fit; nothing is inserted.
        """
        if self._lease is None:
            self._lease = acquire(self._store, self._keys, self._prefetched)
        return self._lease

    def forget(self) -> None:
        """Hold the lease no more."""
        self._lease = self._prefetched = None

    def drop(self) -> None:
        """Unpin the rows."""
        if self._lease is not None:
            self._lease.unpin()
        elif self._prefetched is not None:
            self._store.unprefetch(self._prefetched)


# `Keys` are of an `EmbeddingStore`, `MergedKeys` of a `MergedStore`.
_Store = TypeVar("_Store", EmbeddingStore, MergedStore)
_StoreOfKeys = TypeVar("_StoreOfKeys", EmbeddingStore, MergedStore, contravariant=True)
_Prefetched = TypeVar("_Prefetched", Prefetched, MergedPrefetched)
_Reserved = TypeVar("_Reserved", covariant=True)


class AnyKeys(Protocol[_StoreOfKeys, _Prefetched, _Reserved]):
    """Interface of `Keys` and `MergedKeys`."""

    @property
    def loops(self) -> Loops:
        """Loops that work where the ids are."""

    def reserve(self, store: _StoreOfKeys, prefetched: _Prefetched | None) -> _Reserved:
        """See the op."""

    def prefetch(self, store: _StoreOfKeys) -> _Prefetched:
        """See the op."""


def _measure_prefetch(args: object, prefetched: Prefetched | MergedPrefetched) -> tuple[int, int]:
    return len(prefetched.slot_U), len(prefetched.slot_U) * (4 + 8 + 8)


def acquire(
    store: EmbeddingStore, keys: Keys, prefetched: Prefetched | None = None, *, again: bool = False
) -> Lease:  # fmt: skip
    """Make the rows of these keys resident and pin them; unknown keys are inserted with their initial values.

    Args:
        prefetched: what `prefetch` gave for these keys.
        again: whether the lookup was made before, see `in_backward`.

    Raises:
        StoreFullError: a tier is too small for the step, or capacity is reached; nothing of this lookup is inserted.
        ValueError: the ids are not where the embedding is.
    """
    _check_place(store, keys.loops)
    if not store.built:
        store.build()
    lease = LeaseAgain(store, keys) if again else Lease(store, keys)
    try:
        lease.pin(prefetched, again=again)
    except StoreFullError as error:
        raise full_of(store, error) from None
    return lease


@Op(LOOKUP, takes=("store", "keys"))
def reserve(
    store: _Store, keys: AnyKeys[_Store, _Prefetched, _Reserved], prefetched: _Prefetched | None = None
) -> _Reserved:
    """A lookup, or several, that `build` is expected to make: `acquire` of what this gives makes it.

    Args:
        store, keys: an `EmbeddingStore` and `Keys`, or a `MergedStore` and `MergedKeys`, of which rows of known keys
            are pinned at once.
        prefetched: what `prefetch` gave for these keys.

    Raises:
        ValueError: the ids are not where the embedding is.
    """
    _check_place(store, keys.loops)
    if not store.built:
        store.build()
    return keys.reserve(store, prefetched)


@Op(LOOKUP, takes=("store", "keys"), gives="lease")
def acquire_later(store: EmbeddingStore, keys: Keys) -> Lease:
    """The lookup of an embedding in eval mode that may get a gradient: rows are read as they are, unknown ones as they
    begin, and acquired by the step that trains them.

    Raises:
        ValueError: the ids are not where the embedding is.
    """
    _check_place(store, keys.loops)
    # On a GPU tables and offsets are checked here, before anything uses them.
    return Lease(store, dataclasses.replace(keys, unique=keys.loops.counted(keys.unique)))


@Op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
def prefetch(store: _Store, keys: AnyKeys[_Store, _Prefetched, object]) -> _Prefetched:
    """Read the known rows of a coming lookup and pin them, as far as there is room. Insert none.

    Any thread may call it. What it gives is for the `acquire` of the same keys, or for `unprefetch`.
    """
    return keys.prefetch(store)


class ReadRows(Protocol):
    """Interface of a store that can be read without a lease."""

    @property
    def format(self) -> RowFormat:
        """Format of a row."""

    @property
    def loops(self) -> Loops:
        """Loops that work where the rows are."""

    def read(self, keys: kernels.Keys) -> tuple[Array, kernels.Keys]:
        """The rows of these keys; see `EmbeddingStore.read`."""


def _check_place(store: ReadRows | MergedStore, loops: Loops) -> None:
    if loops.place != store.loops.place:
        raise ValueError(
            f"ids must be on {store.loops.place}, where the embedding is, got {loops.place};"
            f" call ids.to({str(store.loops.device)!r})"
        )


# ---- rows ------------------------------------------------------------------------------------------------------------


def measure_gather(args: object, rows: torch.Tensor) -> tuple[int, int]:
    return rows.numel() // max(1, rows.shape[-1]), 2 * rows.numel() * rows.element_size()


@Op(LOOKUP, takes=("lease",), measure=measure_gather)
def gather(lease: Lease, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum") -> torch.Tensor:
    """The weights of each id, zeros for padding: [*shape of ids, D], of the store's dtype; of bags, those pooled.

    They have no gradient: see `with_grad`. Rows that are not pinned are read as they are.

    Args:
        per_sample_weights: float32 [N], by what the weights of each id are multiplied before a sum.
        pooling: "sum", "mean" or elementwise "max", what a bag gives. The gradient of a maximum is that of the id that
            gave it, the first of several; a NaN is one where the first id of the bag has it.

    Raises:
        TypeError, ValueError: `per_sample_weights` is not as above, or given for another pooling or ids in no bags.
    """
    lease.pool_by(lease.keys, per_sample_weights, pooling)
    return lease.read()


def _read(
    store: ReadRows, weight_SX: Array, slot_U: Array, keys: Keys, scale_N: Array | None, pooling: str
) -> tuple[torch.Tensor, Array | None]:
    """The weights of each id, or of each bag, from the rows in slot_U; and the `argmax_PD` of a maximum."""
    loops, layout, rows = store.loops, store.format, RowsOfIds(weight_SX, slot_U, keys.unique.inverse_N)
    dim = layout.dim
    out = torch.empty(*keys.shape, dim, dtype=DTYPES[layout.dtype], device=loops.device)
    out_ND = loops.array(out.view(-1, dim))
    argmax_PD = None
    if keys.bags is None:
        loops.gather(rows, out_ND)
    elif pooling == "max":
        argmax_PD = loops.array(torch.empty(out_ND.shape, dtype=torch.int32, device=loops.device))
        loops.pool_max(rows, keys.bags, out_ND, argmax_PD)
    else:
        loops.pool(rows, keys.bags, scale_N, out_ND)
    return out, argmax_PD


def spread_max_grads(keys: Keys, argmax_PD: Array, grad_PD: torch.Tensor, loops: Loops) -> torch.Tensor:
    """The gradients of ids, [N, D], from those of their bags' maxima: each number goes to the id that gave it."""
    assert keys.bags is not None
    grad_ND = grad_PD.new_empty(len(keys.unique.inverse_N), grad_PD.shape[1])
    loops.spread_max_grads(keys.bags, argmax_PD, loops.array(grad_PD), loops.array(grad_ND))
    return grad_ND


@Op(PREPARE, takes=("keys",))
def check_pooling(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str) -> None:
    """Check the arguments of a coming `gather`.

    Raises:
        TypeError, ValueError: it would refuse it.
    """
    if pooling not in batch_ids.POOLINGS:
        raise ValueError(f'pooling must be "sum", "mean" or "max", got {pooling!r}')
    if per_sample_weights is None:
        return
    if keys.bags is None or pooling != "sum":
        raise ValueError('per_sample_weights are for bags that are summed; pass offsets, and pooling="sum"')
    ids = len(keys.unique.inverse_N)
    is_tensor = isinstance(per_sample_weights, torch.Tensor)
    if not is_tensor or per_sample_weights.dtype != torch.float32 or per_sample_weights.shape != (ids,):
        got = (per_sample_weights.dtype, list(per_sample_weights.shape)) if is_tensor else type(per_sample_weights)
        raise TypeError(f"per_sample_weights must be float32, one for each of {ids} ids, got {got}")
    device = keys.loops.device
    if per_sample_weights.device != device:
        raise ValueError(f"per_sample_weights must be on {device}, where ids are, got {per_sample_weights.device}")


def _scales_of(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str, store: ReadRows) -> Array | None:
    """Factor of each id in its bag: float32 [N]; None = 1.

    Raises:
        TypeError, ValueError: as `check_pooling`.
    """
    check_pooling(keys, per_sample_weights, pooling)
    if per_sample_weights is not None:
        # A copy: the caller may change it before the backward pass, which reads it again.
        return store.loops.array(per_sample_weights.detach().clone(memory_format=torch.contiguous_format))
    if keys.bags is None or pooling != "mean":
        return None
    return store.loops.mean_scales(keys.bags.offset_P1, keys.unique.inverse_N)


@Op(LOOKUP, takes=("store", "keys"), measure=measure_gather)
def peek(
    store: ReadRows, keys: Keys, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """Read the weights of each id, or bag, without a gradient and without inserting; else as `gather`.

    An unknown id reads as its initial value.

    Raises:
        TypeError, ValueError: as `gather`; or the ids are not where the embedding is.
    """
    _check_place(store, keys.loops)
    row_UW, unique = store.read(keys.unique)  # on a GPU tables and offsets are checked here, before anything uses them
    keys = dataclasses.replace(keys, unique=unique)
    sums = per_sample_weights is None and pooling == "sum"
    scale_N = None if sums else _scales_of(keys, per_sample_weights, pooling, store)
    weight_UX, slot_U = store.format.weights(row_UW), store.loops.arange(len(row_UW))
    return _read(store, weight_UX, slot_U, keys, scale_N, pooling)[0]


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
    """The weights of ids that are in no bags, without a gradient; None where they cannot be read in this way.

    Each row is read in its place, without unique keys and pins. That needs rows that lie still, on the host.

    Args:
        inserts: insert unknown ids, as `gather` does; off, they read as their initial values, as with `peek`.

    Raises:
        TypeError, ValueError, StoreFullError: as `unique_keys` and `acquire`.
    """
    if not store.reads_in_place or inserts and store.kept is not None:  # A policy counts unique keys.
        return None
    batch_ids.check_ids(ids, table_ids, num_tables, key_type)
    loops = loops_of(ids, store.threads)
    if loops.place != store.loops.place:
        return None
    table_N, id_N, check = batch_ids.tables_and_ids(ids, table_ids, num_tables, loops)
    if check is not None:
        check()
    layout = store.format
    out = torch.empty(*ids.shape, layout.dim, dtype=DTYPES[layout.dtype], device="cpu")
    out_ND = loops.array(out.view(-1, layout.dim))
    with store.turns:  # Nothing is pinned: the rows must be there until they are read.
        slot_N = store.slots_of(table_N, id_N)
        if slot_N is None:
            return None
        missing = (slot_N < 0).nonzero()[0]
        if padding_idx is not None:
            missing = missing[id_N[missing] != padding_idx]
            slot_N[id_N == padding_idx] = -1  # a snapshot of another embedding may have brought it
        if len(missing) and inserts:
            unique = loops.unique_keys(table_N[missing], id_N[missing], tables=num_tables, padding_id=None, check=None)
            slot_U, _ = store.acquire(unique)
            store.release(slot_U)
            slot_N[missing] = slot_U.take(unique.inverse_N)
        with store.writing:
            loops.gather(RowsOfIds(store.weight_SX, None, slot_N), out_ND)
        if len(missing) and not inserts:
            row_MW, _ = store.read(loops.distinct_keys(table_N[missing], id_N[missing]))
            out_ND[missing] = layout.weights(row_MW)[:, : layout.dim]
    return out
