"""Lookups of micro-batches, kept for the update to come."""

from collections.abc import Sequence

from oneemb.graph.ops.leases import Lease, release
from oneemb.graph.ops.op import UPDATE, op
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.row_store import StorageError

__all__ = ["Held", "drop", "hold", "take"]


class Held:
    """Lookups of micro-batches whose update is still to come."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []


@op(UPDATE, ends=1)
def hold(held: Held, leases: Sequence[Lease]) -> None:
    """Keep these lookups for the update to come."""
    held.leases.extend(leases)


@op(UPDATE, ends=2)
def take(held: Held, store: EmbeddingStore | MergedStore, leases: Sequence[Lease]) -> list[Lease]:
    """The lookups kept of this store, and these, all in `held` until they are released.

    Raises:
        StorageError: rows of a lookup that is kept, of any store, were replaced or moved since.
    """
    hold(held, leases)
    for lease in held.leases:
        if lease.grads and lease.generation != lease.store.generation:
            raise StorageError(
                "the rows of a lookup were replaced or moved before its update; finish the accumulated steps first"
            )
    return [lease for lease in held.leases if lease.store is store]


@op(UPDATE)
def drop(held: Held) -> None:
    """Release every lookup that is kept."""
    release(held.leases)
    held.leases.clear()
