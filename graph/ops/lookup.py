"""The lookup of a batch of ids: a lease on the rows of the unique keys, and the weights read from these rows.

    keys  = unique_keys(ids, ...)      keys.py
    lease = acquire(store, keys)       or, for a lookup that is only expected, reserve(store, keys).acquire()
    rows  = gather(lease)

    lease = acquire(store, keys, again=True)     the same lookup once more, in the backward pass of a checkpoint

N ids, U unique keys, P bags, D weights of a row, W words of a row.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads, Summed, nowhere, sum_over_passes
from oneemb.graph.ops.keys import DTYPES, BatchKeys
from oneemb.graph.ops.op import LOOKUP, Op
from oneemb.graph.ops.reading import check_place, gathered, measure_gather, read_rows, scales_of, spread_max_grads
from oneemb.graph.ops.requests import CutBags, Request, Requested
from oneemb.graph.ranks import Ranks
from oneemb.kernels.arrays import Array, Bags, RowsOfIds
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.locking.pins import Pins
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.tiers.hot_rows import Prefetched

next_order = itertools.count().__next__
"""Returns a number greater than all that it has returned before: the place of a lookup in the order of lookups."""


REPLACED = (
    "the rows of a lookup were replaced since (load_snapshot, clear, close, another device); look the ids up again"
)
"""Text of the error for a lookup whose slots have other rows now."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass. Activation checkpointing recomputes a forward pass in it, so a lookup
    there repeats an earlier lookup."""
    return _pass_now() >= 0


_pass_now: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs; -1 = none."""


# ---- leases ----------------------------------------------------------------------------------------------------------


class SharedRows(Protocol):
    """Interface of the rows of several merged lookups. Each lookup has a `Lease` of its own."""

    store: MergedStore

    def own_keys(self, p: int) -> BatchKeys:
        """The keys of lookup `p`, as an unmerged lookup would have them."""


@dataclass(frozen=True)
class Remote:
    """Copies of a lookup's rows, as the owners have sent them."""

    ranks: Ranks
    weight_SX: Array
    """[S, X]: weights of the received rows; if owners sum parts of bags, the received sums."""
    slot_U: Array
    """int64: index in `weight_SX` of each unique key, or of each part."""
    owned: "Lease | None"
    """Lease on the rows that all ranks have requested from this rank; None = these rows are not pinned."""
    request: Request
    """Request of this rank to the others."""
    requested: Requested
    """Request of all ranks to this one."""


class Lease:
    """Rows of a lookup: resident in the hot tier and pinned, from `pin` to `unpin`.

    If nobody holds the lease any more (a forward pass without a step), the next `acquire` unpins its rows.

    With `remote`, the rows are copies of rows that other ranks own. The lease itself then pins nothing, and gradients
    go to the owners before anything else is done with them (`reduce_to_owners` in owner_grads.py).

    Args:
        store: the store of the rows.
        keys: the keys of the lookup; None = `shared` gives them.
        slot_U: the slots of the rows, which are pinned; None = the rows are not pinned yet.
        shared: for one of several merged lookups: (the rows of all these lookups, number of this lookup).
        remote: copies of the rows that other ranks own; None = the rows are in `store`.
    """

    generation = -1
    """`generation` of the store when the rows were pinned."""
    scale_N: Array | None = None
    """Factor of each id in its bag; None = 1."""
    pooling = "sum"
    """Pooling of a bag: one of `POOLINGS`."""
    argmax_PD: Array | None = None
    """For bags pooled by their maximum: the id of the bag that gave each value, see `Backend.pool_max`."""
    has_grad = False
    """Whether a backward pass has given the lookup a gradient."""
    lookups = 1
    """Number of lookups whose rows the lease holds; above 1 only for a lease that `of_keys` has made."""
    _pins: Pins | None = None
    _reduced: tuple[list[torch.Tensor | Summed], Array | None, RowGrads] | None = None

    def __init__(
        self,
        store: EmbeddingStore,
        keys: BatchKeys | None,
        slot_U: Array | None = None,
        shared: tuple[SharedRows, int] | None = None,
        remote: Remote | None = None,
    ):
        self.store = store
        self.slot_U = slot_U
        self.shared = shared
        self.remote = remote
        self.order = next_order()
        """Number that grows from lookup to lookup. Gradients of a row are summed in this order."""
        if keys is not None:
            self.keys = keys
        self._replaced = store.replaced
        if slot_U is not None:
            self._pins, self.generation = store.pins.own(self, slot_U), store.generation

    @functools.cached_property
    def keys(self) -> BatchKeys:
        """The keys of the lookup."""
        assert self.shared is not None
        rows, p = self.shared
        return rows.own_keys(p)

    @classmethod
    def of_keys(cls, store: EmbeddingStore, table_U: Array, id_U: Array, lookups: int = 1) -> "Lease":
        """A pinned lease on distinct keys, which takes the place of the leases of `lookups` lookups."""
        unique = store.backend.distinct_keys(table_U, id_U)
        lease = cls(store, BatchKeys(torch.Size((len(id_U),)), unique, None, store.backend))
        lease.lookups = lookups
        lease.pin(again=True)
        return lease

    def use(self) -> "Lease | None":
        """Let the policies count `keys.uses_U` as uses, and insert used keys that have no row. Returns a pinned lease
        on the used rows; None = no key is used, or the uses were counted already. Raises as `pin`."""
        keys, backend = self.keys, self.store.backend
        if keys.uses_U is None or not keys.uses_U.any():
            return None
        used = np.flatnonzero(keys.uses_U)
        at = backend.array(torch.from_numpy(used).to(backend.device))
        unique = backend.distinct_keys(keys.unique.table_U[at], keys.unique.id_U[at])
        lease = Lease(self.store, BatchKeys(torch.Size((len(used),)), unique, None, backend, keys.uses_U[used]))
        lease.pin()
        self.keys = dataclasses.replace(keys, uses_U=None)
        return lease

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are pinned, in the slots `slot_U`."""
        return self._pins is not None and self.generation == self.store.generation

    inserts = False
    """False: the step that trains unknown keys inserts them, not `acquire` (compare `Reserved.inserts`)."""
    repeated_by = -1
    """Number of the backward pass that repeated the lookup last; -1 = no backward pass has."""

    def acquire(self) -> "Lease":
        """Return this lease, with the `order` of a lookup that is made now."""
        self.order = next_order()
        return self

    def drop(self) -> None:
        """Unpin the rows."""
        self.unpin()

    def forget(self) -> None:
        """Do nothing: a lease holds no other lease (compare `Reserved.forget`)."""

    @property
    def is_valid(self) -> bool:
        """Whether the rows that were looked up can still be read."""
        return self._replaced == self.store.replaced and (self.slot_U is None or self.is_pinned)

    def pool_by(
        self, per_sample_weights: torch.Tensor | None, pooling: str, keys: BatchKeys | None = None
    ) -> None:  # fmt: skip
        """Set how `read` pools bags, with arguments as for `gather`. `keys`: merged keys of the lookup; None = its
        own."""
        sums = per_sample_weights is None and pooling == "sum"
        self.scale_N = None if sums else scales_of(keys or self.keys, per_sample_weights, pooling, self.store)
        self.pooling = pooling

    def pin(self, prefetched: Prefetched | None = None, *, again: bool = False) -> None:
        """Make the rows resident and pin them, unless they are pinned. Unknown keys are inserted.

        Args:
            prefetched: result of `prefetch` for these keys.
            again: if True, policies do not count this as a use of the rows. They count only the first pin of a lease.

        Raises:
            StoreFullError: the rows do not fit.
            StorageError: the rows were replaced since the lookup.
        """
        store = self.store
        if self._pins is not None and self.generation == store.generation:
            return
        self.check_not_replaced()
        keys, again = self.keys, again or self.generation != -1
        while True:
            try:
                # Under the store lock, so that all pins have an owner. The lock is the outermost block: Ctrl-C ends its
                # wait.
                with store.store_lock:
                    slot_U, unique = store.acquire_locked(keys.unique, prefetched, again, False, keys.uses_U)
                    self.slot_U = slot_U
                    if unique is not keys.unique:
                        self.keys = dataclasses.replace(keys, unique=unique)
                    self.generation, self._pins = store.generation, store.pins.own(self, slot_U)
                    return
            except StoreFullError as error:
                make_room(store, error)

    def unpin(self) -> None:
        """Let the rows be evicted; `pin` brings them back."""
        if self.remote is not None and self.remote.owned is not None:
            self.remote.owned.unpin()
        # `_pins` is cleared first: pins that an interrupt leaves here are released when `pins` has no holder.
        pins, self._pins = self._pins, None
        if pins is not None:
            self.slot_U = None
            self.store.pins.release(pins)

    def sum_now(self, grad_NX: torch.Tensor) -> Summed | None:
        """Sum the gradient of the lookup's only backward pass by unique key, with the same bits as `reduce`, so that
        the gradient need not be copied. None = the caller must keep the gradient, which is summed later."""
        if self.has_grad or self.remote is not None or self.shared is not None or self.argmax_PD is not None:
            return None
        keys, backend = self.keys, self.store.backend
        if keys.bags is not None and keys.unique.id_U.shape[0] > grad_NX.shape[0]:
            return None
        return Summed(*backend.sum_grads(keys.unique, keys.bags, backend.array(grad_NX), self.scale_N))

    def reduce(self, grads: Sequence[torch.Tensor | Summed]) -> RowGrads:
        """Group the gradients of the lookup by unique key. The sums are made later, by the update, unless `sum_now` has
        made them. `grads` has one gradient of the lookup for each backward pass."""
        unique, backend = self.keys.unique, self.store.backend
        slot_U = nowhere(backend, len(unique.id_U)) if self.slot_U is None else self.slot_U
        keys = self.store, self.generation, unique.table_U, unique.id_U, slot_U
        if isinstance(grads[0], Summed):
            grad_UD, finite_X = grads[0]
            if grad_UD.shape[0] > slot_U.shape[0]:  # `pin` has cut the keys since the backward pass.
                grad_UD = grad_UD[: slot_U.shape[0]]
            summed = RowGrads(*keys, sums=(grad_UD, finite_X), unique=unique)
            return summed if len(grads) == 1 else summed.plus(cast("Sequence[Summed]", grads[1:]))
        grad_NX = backend.array(self.sum_passes(cast("Sequence[torch.Tensor]", grads)).contiguous())
        bags = self.keys.bags if self.argmax_PD is None else None
        return RowGrads(*keys, segments=backend.segments(unique, bags, grad_NX, self.scale_N), unique=unique)

    def reduce_once(self, grads: Sequence[torch.Tensor | Summed]) -> RowGrads:
        """Result of `reduce`. The lease keeps it, and returns it again for the same gradients."""
        if self._reduced is not None:
            before, slot_U, reduced = self._reduced
            same = len(before) == len(grads) and all(one is two for one, two in zip(before, grads, strict=True))
            if same and slot_U is self.slot_U and reduced.generation == self.generation:
                return reduced
        reduced = self.reduce(grads)
        self._reduced = list(grads), self.slot_U, reduced
        return reduced

    def sum_passes(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of `grads` over backward passes: gradients of ids, [N, D], or of bags pooled by sum or mean, [P, D]. The
        tensor may be non-contiguous."""
        grad_NX = sum_over_passes(grads)
        if self.argmax_PD is None:
            return grad_NX
        return spread_max_grads(self.keys, self.argmax_PD, grad_NX.contiguous(), self.store.backend)

    def read(self) -> torch.Tensor:
        """The current weights of each id, or the pooled weights of each bag."""
        store, slot_U = self.store, self.slot_U
        if self.remote is not None:
            if self.remote.request.cut is not None:
                return self._sum_parts(self.remote, self.remote.request.cut)
            return self._read(self.remote.weight_SX, self.remote.slot_U)
        if slot_U is None:
            if (found := gathered(store, self.keys)) is not None:
                return found
            row_UW, unique = store.read(self.keys.unique)
            self.keys = dataclasses.replace(self.keys, unique=unique)
            return self._read(store.format.weights(row_UW), store.backend.arange(len(row_UW)))
        weight_SX = store.weight_SX
        # Another thread may have closed the store. `weight_SX`, read before this check, stays allocated.
        if self.generation != store.generation:
            raise StorageError(REPLACED)
        if store.backend.waits:  # A GPU reads and writes rows in the order of launches, whatever the host locks.
            out, self.argmax_PD = read_rows(store, weight_SX, slot_U, self.keys, self.scale_N, self.pooling)
            return out
        with signals_deferred, store.writing:  # signals deferred, so that a fork finds no lock held
            return self._read(weight_SX, slot_U)

    def _read(self, weight_SX: Array, slot_U: Array) -> torch.Tensor:
        out, self.argmax_PD = read_rows(self.store, weight_SX, slot_U, self.keys, self.scale_N, self.pooling)
        return out

    def _sum_parts(self, remote: Remote, cut: CutBags) -> torch.Tensor:
        """The sum or the mean of each bag, computed from the sums of its parts, which owners have sent."""
        store, backend = self.store, self.store.backend
        order_S, offset_P1 = cut.of_bags()
        scale_S = backend.array(cut.scale_S[order_S].to(backend.device)) if self.pooling == "mean" else None
        part_S = backend.array(order_S.to(backend.device))
        out = torch.empty(*self.keys.shape, store.format.dim, dtype=DTYPES[store.format.dtype], device=backend.device)
        rows = RowsOfIds(remote.weight_SX, remote.slot_U, part_S)
        bags = Bags(backend.array(offset_P1.to(backend.device)))
        backend.pool(rows, bags, scale_S, backend.array(out.view(-1, out.shape[-1])))
        return out

    def grad_of_scales(self, grad_PD: torch.Tensor) -> torch.Tensor:
        """The gradient of `per_sample_weights`, float32 [N], computed from `grad_PD`, the gradient of the bags."""
        store, keys, backend = self.store, self.keys, self.store.backend
        assert keys.bags is not None
        if self.slot_U is None:
            remote = self.remote
            if remote is None:
                weight_UX = store.format.weights(store.read(keys.unique)[0])
                rows = RowsOfIds(weight_UX, backend.arange(len(weight_UX)), keys.unique.inverse_N)
            else:
                rows = RowsOfIds(remote.weight_SX, remote.slot_U, keys.unique.inverse_N)
            return backend.tensor(backend.scale_grads(rows, keys.bags.bag_N, backend.array(grad_PD.contiguous())))
        with signals_deferred, store.writing:
            rows = RowsOfIds(store.weight_SX, self.slot_U, keys.unique.inverse_N)
            return backend.tensor(backend.scale_grads(rows, keys.bags.bag_N, backend.array(grad_PD.contiguous())))

    def check_not_replaced(self) -> None:
        """Raise StorageError if the rows of the lookup were replaced since."""
        if self._replaced != self.store.replaced:
            raise StorageError(REPLACED)


def full_of(store: EmbeddingStore, error: StoreFullError) -> StoreFullError:
    """`full` for a lookup in `store`: `waiting` is the number of its lookups that have a gradient."""
    return full(error, sum(one.lookups for one in store.pins.owners() if isinstance(one, Lease) and one.has_grad))


def full(error: StoreFullError, waiting: int) -> StoreFullError:
    """`error`; or, if pinned rows leave no room, an error that says that the gradients of `waiting` lookups are kept
    until `zero_grad()`."""
    if not error.pinned or waiting == 0:
        return error
    return StoreFullError(
        f"{waiting} lookups wait for zero_grad(): their gradients are kept, and all their rows have to be in memory at"
        " a time; call step() and zero_grad() after each batch. If the gradients of several batches are to be summed,"
        f" {error}"
    )


class LeaseAgain(Lease):
    """Lease of a lookup that the backward pass repeats; policies do not count it as a use of its rows.

    The rows are read at the slots of the first lookup's lease, if it is still pinned. So an id without a row in the
    forward pass reads the same weights, even if another lookup has given it a row since.
    """

    def read(self) -> torch.Tensor:
        """The current weights, as `Lease.read`, from the slots of the first lookup if these are still pinned."""
        backward, own_U = _pass_now(), self.slot_U
        leases = [one for one in self.store.pins.owners() if isinstance(one, Lease) and self._repeats(one)]
        # Several lookups of the same ids are repeated in the order in which they were made, each once.
        first = min(leases, key=lambda one: (one.repeated_by == backward, one.order), default=self)
        first.repeated_by, self.slot_U = backward, first.slot_U
        try:
            return super().read()
        finally:
            self.slot_U = own_U

    def _repeats(self, first: Lease) -> bool:
        """Whether `first` is the lease of a first lookup of the same keys."""
        if isinstance(first, LeaseAgain) or first.slot_U is None:
            return False
        backend = self.store.backend
        tensor, one, other = backend.tensor, backend.counted(self.keys.unique), backend.counted(first.keys.unique)
        if len(one.id_U) != len(other.id_U):
            return False
        return torch.equal(tensor(one.id_U), tensor(other.id_U)) and torch.equal(
            tensor(one.table_U), tensor(other.table_U)
        )


def acquire(
    store: EmbeddingStore, keys: BatchKeys, prefetched: Prefetched | None = None, *, again: bool = False
) -> Lease:  # fmt: skip
    """Make the rows of these keys resident and pin them; unknown keys are inserted with their initial values.

    Args:
        prefetched: result of `prefetch` for these keys.
        again: whether the lookup repeats one of the forward pass, see `in_backward`.

    Raises:
        StoreFullError: a tier is too small for the step, or capacity is reached; nothing of this lookup is inserted.
        ValueError: the ids are not on the device of the embedding.
    """
    check_place(store, keys.backend)
    if not store.rows.tiers:
        store.build()
    lease = LeaseAgain(store, keys) if again else Lease(store, keys)
    try:
        lease.pin(prefetched, again=again)
    except StoreFullError as error:
        raise full_of(store, error) from None
    return lease


@Op(LOOKUP, takes=("store", "keys"), gives="lease")
def acquire_later(store: EmbeddingStore, keys: BatchKeys) -> Lease:
    """Unpinned lease for a lookup in eval mode that may get a gradient. Unknown keys read as their initial values. The
    step that trains the rows acquires them.

    Raises:
        ValueError: the ids are not on the device of the embedding.
    """
    check_place(store, keys.backend)
    # On a GPU tables and offsets are checked here, before anything uses them.
    return Lease(store, dataclasses.replace(keys, unique=keys.backend.checked(keys.unique)))


# ---- rows ------------------------------------------------------------------------------------------------------------


@Op(LOOKUP, takes=("lease",), measure=measure_gather)
def gather(lease: Lease, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum") -> torch.Tensor:
    """The weights of each id, or the pooled weights of each bag: [*shape, D] in the store's dtype; zeros for padding.

    Autograd does not know the result before `with_grad`. Rows that are not pinned are read from any tier.

    Args:
        per_sample_weights: float32 [N]: the weights of each id are multiplied by its factor before they are summed.
        pooling: "sum", "mean" or elementwise "max" of a bag. The gradient of a maximum goes to the first id that
            gave it. NaN counts as the maximum only if the first id of the bag has it.

    Raises:
        TypeError, ValueError: `per_sample_weights` is not as above, or is given without bags or with a pooling other
            than "sum".
    """
    lease.pool_by(per_sample_weights, pooling)
    return lease.read()


def make_room(store: EmbeddingStore, error: StoreFullError) -> None:
    """Unpin the rows that only failed backward passes hold. If there are no such rows, raise `error`, which said that
    there is no room."""
    if not error.pinned or not free_failed_passes(store):
        raise error


def free_failed_passes(store: EmbeddingStore) -> bool:
    """Drop the gradients of this thread's failed backward passes. torch would keep them in a queue, and their rows
    pinned, until the thread's next backward pass. Returns whether pinned rows of the store lost their owner."""
    if in_backward():
        return False
    # Hide this pass from torch's modes: a tape would record it, a graph would count it as a backward pass of `build`.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        nothing = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward([nothing.clone()])
    return bool(store.pins.abandoned)
