"""Changes of rows by their keys, whether lookups know them or not: written, erased."""

import numpy as np

from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.turns import changing
from oneemb.storage.store_part import in_turn, no_step


@no_step("put")
@in_turn
def set_rows(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
    """Give keys, known or not, these rows; or the first words of them, before those that they have.

    Raises:
        StoreFullError: a tier is too small for so many rows at a time, or capacity is reached; nothing has changed.
    """
    put = store.loops.put
    slot_U, keys = store.acquire(store.loops.distinct_keys(put(table_U), put(id_U)), admits=True)
    try:
        if store.watchers:
            store.before_change(keys.table_U, keys.id_U, store.weights_in(slot_U))
        format = store.format
        with store.writing:
            its = slice(0, min(format.mark_begin, row_UX.shape[1]))
            store.row_SW[slot_U, its] = put(row_UX[:, its])
            its = slice(format.state_begin, row_UX.shape[1])  # What a policy notes is not the caller's.
            if its.start < its.stop:
                store.row_SW[slot_U, its] = put(row_UX[:, its])
        store.mark_dirty(keys.table_U, slot_U)
    finally:
        store.release(slot_U)


@no_step("erase")
@in_turn
def erase_rows(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
    """Forget the rows of these keys, here and in every tier. Snapshots keep theirs.

    Returns:
        Which there were, bool [U].

    Raises:
        StorageError: a lookup whose step is still to come holds one; nothing has changed.
    """
    store.check_open()
    if not store.built:
        return np.zeros(len(id_U), np.bool_)
    store.pins.release_abandoned()
    own = np.flatnonzero(owner_of(table_U, id_U, store.plan.owners) == store.plan.owner)
    store.journal.erase(table_U[own], id_U[own])  # First: no delta brings back what is gone.
    erased_U = store.pins.erase(table_U, id_U)
    with changing:
        store.replicas.forget(table_U, id_U)
        if store.kept is not None:
            store.kept.forget(table_U, id_U, erased_U)
        store.changes += bool(erased_U.any())
    return erased_U


@in_turn
def check_free(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> None:
    """Raise StorageError if a lookup whose step is still to come holds the row of one of these keys."""
    if not store.built:
        return
    store.pins.release_abandoned()
    if in_use := store.pins.in_use(table_U, id_U):
        raise StorageError(f"{in_use} of the rows to erase are in use by a lookup; erase them between two steps")
