"""Lookups ahead: lookups that a later step, or `build`, is expected to make.

    prefetched = prefetch(store, keys)                ahead of the step: reads the known rows, and pins them
    reserved = reserve(store, keys, prefetched)       in the step, before `build`
    lease = reserved.acquire()                        once `build` makes the lookup

Only `acquire` inserts unknown keys. Between ranks (lookup_ahead.py) keys go to their owners first; each owner has a
`Reserved` for the rows that ranks request from it.
"""

from collections.abc import Iterable
from typing import Any

from oneemb.graph.ops.keys import BatchKeys
from oneemb.graph.ops.lookup import Lease, acquire
from oneemb.graph.ops.merged import MergedKeys, MergedReserved, MergedRows
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ops.reading import check_place
from oneemb.storage.coming_batches import ComingBatches
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedPrefetched, MergedStore
from oneemb.storage.tiers.hot_rows import Prefetched


class Reserved:
    """A lookup that a step is expected to make. Nothing is inserted before the step makes it."""

    inserts = True
    """Whether the lookup inserts unknown keys. False = the step that trains the rows inserts them."""

    def __init__(
        self, store: EmbeddingStore, keys: BatchKeys, prefetched: Prefetched | None = None, *, again: bool = False
    ):
        self._store, self._keys, self._prefetched, self._again = store, keys, prefetched, again
        self._lease: Lease | None = None

    def prefetch(self) -> None:
        """Read the rows of known keys and pin them, as far as there is room. `acquire` takes over these pins, `drop`
        unpins."""
        self._prefetched = self._store.prefetch(self._keys.unique)

    def acquire(self) -> Lease:
        """Lease on the pinned rows; unknown keys are inserted.

        Raises:
            StoreFullError: the rows do not fit; nothing is inserted.
        """
        if self._lease is None:
            self._lease = acquire(self._store, self._keys, self._prefetched, again=self._again)
        return self._lease

    def forget(self) -> None:
        """Drop the reference to the lease, without unpinning its rows."""
        self._lease = self._prefetched = None

    def drop(self) -> None:
        """Unpin the rows."""
        if self._lease is not None:
            self._lease.unpin()
        elif self._prefetched is not None:
            self._store.unprefetch(self._prefetched)


@Op(LOOKUP, takes=("store", "keys"))
def reserve(store: Any, keys: BatchKeys | MergedKeys, prefetched: Any = None) -> Reserved | MergedReserved:
    """A lookup, or several merged ones, that `build` is expected to make: `acquire` of the result makes it.

    Args:
        store, keys: an `EmbeddingStore` and `BatchKeys`; or a `MergedStore` and `MergedKeys`: then the rows of each
            lookup whose keys are all known are pinned at once.
        prefetched: result of `prefetch` for these keys.

    Raises:
        ValueError: the ids are not on the device of the embedding.
    """
    check_place(store, keys.backend)
    if not store.built:
        store.build()
    if isinstance(keys, BatchKeys):
        return Reserved(store, keys, prefetched)
    return MergedReserved(MergedRows(store, keys), prefetched)


def _measure_prefetch(args: object, prefetched: Prefetched | MergedPrefetched) -> tuple[int, int]:
    return len(prefetched.slot_U), len(prefetched.slot_U) * (4 + 8 + 8)


@Op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
def prefetch(store: Any, keys: BatchKeys | MergedKeys) -> Prefetched | MergedPrefetched:
    """Read the known rows of a coming lookup and pin them, as far as there is room. Nothing is inserted.

    Any thread may call it. Pass the result to `acquire` of the same keys, or to `unprefetch`.
    """
    prefetched: Prefetched | MergedPrefetched
    if isinstance(keys, BatchKeys):
        prefetched = store.prefetch(keys.unique)
    else:
        prefetched = store.prefetch(keys.unique, MergedRows(store, keys).begin_M1)
    return prefetched


def add_coming(store: EmbeddingStore | MergedStore, keys: BatchKeys | MergedKeys) -> list[tuple[ComingBatches, int]]:
    """Tell a store the keys of a batch that a loop has read ahead. Returns the number of the batch in each store that
    uses the keys: the store, or members of a merged one."""
    if isinstance(store, MergedStore):
        assert isinstance(keys, MergedKeys)
        return store.add_coming(keys.unique, MergedRows(store, keys).begin_M1)
    return [(store.coming, store.coming.add(keys.unique))] if store.coming.are_useful else []


def unprefetch(values: Iterable[object]) -> None:
    """Unpin the rows of each value that is a result of `prefetch` and that no lookup has taken over."""
    for value in values:
        if isinstance(value, Prefetched):
            value.store.unprefetch(value)
        elif isinstance(value, MergedPrefetched):
            value.store.unprefetch(value)
