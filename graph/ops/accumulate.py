"""Lookups of micro-batches, kept for the update to come."""

from collections.abc import Sequence

from oneemb.graph.ops.grads import AnyLease
from oneemb.graph.ops.lookup import release
from oneemb.graph.ops.op import UPDATE, Op
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.row_store import StorageError

__all__ = ["Held", "drop", "hold", "take"]


class Held:
    """Lookups of micro-batches whose update is still to come."""

    def __init__(self) -> None:
        self.leases: list[AnyLease] = []


@Op(UPDATE, ends=1)
def hold(held: Held, leases: Sequence[AnyLease]) -> None:
    """Keep these lookups for the update to come."""
    held.leases.extend(leases)


@Op(UPDATE, ends=2)
def take(held: Held, store: EmbeddingStore | MergedStore, leases: Sequence[AnyLease]) -> list[AnyLease]:
    """The lookups of this store that were kept, and these. All are in `held` until they are released.

    Raises:
        StorageError: rows of a lookup that is kept, of any store, were replaced or moved since.
    """
    hold(held, leases)
    for lease in held.leases:
        if lease.has_grads and lease.generation != lease.store.generation:
            raise StorageError(
                "the rows of a lookup were replaced or moved before its update; finish the accumulated steps first"
            )
    return [lease for lease in held.leases if lease.store is store]


@Op(UPDATE)
def drop(held: Held) -> None:
    """Release every lookup that is kept."""
    release(held.leases)
    held.leases.clear()
