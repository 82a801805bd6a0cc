"""Keys of a lookup and the lease on their rows: acquire, prefetch, release."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oneemb.graph.ops.grads import RowGrads, reduce_lease
from oneemb.graph.ops.op import LOOKUP, PREPARE, UPDATE, op
from oneemb.kernels import loops as kernels
from oneemb.kernels.bags import Bags
from oneemb.kernels.loops import Array, Loops
from oneemb.storage.embedding_store import EmbeddingStore, Pins
from oneemb.storage.merged_store import MergedPrefetched, MergedStore
from oneemb.storage.row_store import StorageError
from oneemb.storage.step_lock import while_held
from oneemb.storage.tiers.hot_rows import Prefetched
from oneemb.storage.turns import undisturbed, whole

__all__ = ["Keys", "Lease", "acquire", "check_place", "measure_acquire", "next_order", "prefetch", "release"]


_ORDER = itertools.count()


def next_order() -> int:
    """Grows from lookup to lookup."""
    return next(_ORDER)


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
    order: int = field(default_factory=next_order)
    """Grows from lookup to lookup."""

    def __post_init__(self) -> None:
        self._pins: Pins | None = self.store.pin_for(self, self.slot_U)

    @property
    def released(self) -> bool:
        return self._pins is None

    def reduce(self) -> "RowGrads":
        """The gradients that have come, each key's to be summed."""
        return reduce_lease(self)

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


_NO_KEYS: Any = Keys(torch.Size(()), None, None, None)  # type: ignore[arg-type]


def measure_acquire(args: Any, lease: Any) -> tuple[int, int]:
    unique = len(lease.slot_U)
    return unique, unique * (4 + 8 + 8)


def _measure_prefetch(args: Any, prefetched: Any) -> tuple[int, int]:
    return len(prefetched.slot_U), len(prefetched.slot_U) * (4 + 8 + 8)


@op(LOOKUP, takes=("store", "keys"), gives="lease", measure=measure_acquire)
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
    check_place(store, keys)
    if not store.built:
        store.build()
    # The turn first, where it is one: Ctrl-C ends a wait for it. Merged stores take theirs in an order of their own.
    turns = [store.members[0].turns] if len(store.members) == 1 else []

    def acquire_whole() -> Any:
        with whole(member.turns for member in store.members):  # so that what is pinned has an owner
            return keys.acquire(store, pending, prefetched)

    return while_held(turns, acquire_whole)


@op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
def prefetch(store: EmbeddingStore | MergedStore, keys: Any) -> Prefetched | MergedPrefetched:
    """Read known rows of a coming lookup and pin them, as far as there is room, on any thread; insert nothing."""
    return keys.prefetch(store)


@op(UPDATE, takes=("leases",), ends=0)
def release(leases: Sequence[Lease]) -> None:
    """Unpin the rows of these leases and drop their gradients."""
    for lease in leases:
        lease.release()


def check_place(store: EmbeddingStore | MergedStore, keys: Any) -> None:
    if keys.loops.place != store.loops.place:
        raise ValueError(
            f"ids must be on {store.loops.place}, where the embedding is, got {keys.loops.place};"
            f" call ids.to({str(store.loops.device)!r})"
        )
