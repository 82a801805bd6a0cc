"""Lookups ahead, of ids that a later step, or `build`, is expected to look up.

    prefetched = prefetch(store, keys)                ahead of the step: reads the known rows, and pins them
    reserved = reserve(store, keys, prefetched)       in the step, before `build`
    lease = reserved.acquire()                        once `build` makes the lookup

Unknown keys are inserted by the last. Between ranks (lookup_ahead.py) keys go to their owners first; each owner's part
is one of these.
"""

from collections.abc import Iterable
from typing import Any

from oneemb.graph.ops.keys import Keys
from oneemb.graph.ops.lookup import Lease, acquire
from oneemb.graph.ops.merged import MergedKeys, MergedReserved, MergedRows
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ops.reading import check_place
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedPrefetched
from oneemb.storage.tiers.hot_rows import Prefetched


class Reserved:
    """A lookup that a step is expected to make. Nothing is inserted before it does."""

    inserts = True
    """Whether unknown keys are inserted by the lookup, and not by the step that trains them."""

    def __init__(self, store: EmbeddingStore, keys: Keys, prefetched: Prefetched | None = None, *, again: bool = False):
        self._store, self._keys, self._prefetched, self._again = store, keys, prefetched, again
        self._lease: Lease | None = None

    def prefetch(self) -> None:
        """Read the rows of known keys and pin them, as far as there is room; `drop` or `acquire` ends that."""
        self._prefetched = self._store.prefetch(self._keys.unique)

    def acquire(self) -> Lease:
        """The rows, pinned; unknown keys are inserted.

        Raises:
            StoreFullError: they do not fit; nothing is inserted.
        """
        if self._lease is None:
            self._lease = acquire(self._store, self._keys, self._prefetched, again=self._again)
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


@Op(LOOKUP, takes=("store", "keys"))
def reserve(store: Any, keys: Keys | MergedKeys, prefetched: Any = None) -> Reserved | MergedReserved:
    """A lookup, or several, that `build` is expected to make: `acquire` of the result makes it.

    Args:
        store, keys: an `EmbeddingStore` and `Keys`, or a `MergedStore` and `MergedKeys`, of which rows of known keys
            are pinned at once.
        prefetched: result of `prefetch` for these keys.

    Raises:
        ValueError: the ids are not where the embedding is.
    """
    check_place(store, keys.backend)
    if not store.built:
        store.build()
    if isinstance(keys, Keys):
        return Reserved(store, keys, prefetched)
    return MergedReserved(MergedRows(store, keys), prefetched)


def _measure_prefetch(args: object, prefetched: Prefetched | MergedPrefetched) -> tuple[int, int]:
    return len(prefetched.slot_U), len(prefetched.slot_U) * (4 + 8 + 8)


@Op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
def prefetch(store: Any, keys: Keys | MergedKeys) -> Prefetched | MergedPrefetched:
    """Read the known rows of a coming lookup and pin them, as far as there is room. Insert none.

    Any thread may call it. The result is for the `acquire` of the same keys, or for `unprefetch`.
    """
    its: Prefetched | MergedPrefetched
    if isinstance(keys, Keys):
        its = store.prefetch(keys.unique)
    else:
        its = store.prefetch(keys.unique, MergedRows(store, keys).begin_M1)
    return its


def unprefetch(values: Iterable[object]) -> None:
    """Unpin the rows of those values that `prefetch` gave and no lookup has taken over."""
    for value in values:
        if isinstance(value, Prefetched):
            value.store.unprefetch(value)
        elif isinstance(value, MergedPrefetched):
            value.store.unprefetch(value)
