"""Functions that read, write or erase rows of a store by key, or copy or visit all rows."""

from dataclasses import replace

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Keys
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.store_part import no_step, reading, with_store_lock
from oneemb.storage.tiered_rows import ChangeRows, TieredRows


@no_step("copy_to")
def copy_rows(
    store: EmbeddingStore, other: EmbeddingStore, *, with_state: bool, change: ChangeRows | None = None
) -> None:
    """Copy all rows as they are now, and the step, into another store, whose tiers are not made yet.

    Args:
        with_state: if True, copy the optimizer state too; if False, rows get the state of new rows, and the step is 0.
        change: function that changes the copied rows in place before they are stored.

    Raises:
        StorageError: the path of `other` is in use or unusable, or has no room for the rows.
    """
    with store.store_lock, other.store_lock:
        store.store_lock.check(changes=True)
        store.check_open()
        if not store.built:
            return
        _fill(other.rows, store.rows, with_state, change)
        with changing:  # Rows that are missing in the usage index would never be evicted.
            other.step = store.step if with_state else 0
            if other.engine is not None:
                clock = None if store.engine is None else store.engine.usage.counted()
                other.engine.read_rows(store.format, clock, store.step, other.step)
                if store.engine is not None:
                    other.engine.admission = other.engine.loaded_admission(store.engine.to_arrays(), "of the other")
            other.changes += 1
        other.replicas.add(store.replicas.keys())


def _fill(rows: TieredRows, source: TieredRows, with_state: bool, change: ChangeRows | None) -> None:
    """Make the tiers of `rows`, which are not made yet, and copy all rows of `source` into them."""
    format = replace(source.format, usage_words=rows.format.usage_words)
    rows.build(format if with_state else format.with_state(None, np.empty(0, np.float32)))
    assert rows.bottom_store is not None
    for tier in rows.tiers:
        tier.check_holds(len(source))
    for table_N, id_N, row_NW in source.hot.scan():
        signals_deferred.raise_interrupt()
        row_NW = rows.format.converted(row_NW, source.format, with_state=with_state)
        if change is not None:
            change(table_N, id_N, row_NW)
        rows.bottom_store.put(table_N, id_N, row_NW)
    rows.reload()


@no_step("a call that reads all rows")
@reading
def visit_rows(store: EmbeddingStore, call: ChangeRows) -> None:
    """Call `call(table_N, id_N, row_NW)` for batches of all rows. The function must neither change the rows nor use the
    store."""
    store.check_open()
    if store.built:
        for table_N, id_N, row_NW in store.hot.scan():
            signals_deferred.raise_interrupt()
            call(table_N, id_N, row_NW)


@no_step("put")
@with_store_lock
def set_rows(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
    """Write rows, or the first X words of rows, at these keys, which may be new; usage metadata are not written. Raises
    StoreFullError, with nothing changed, if a tier is too small for U rows at a time, or capacity is reached."""
    put = store.backend.put
    slot_U, keys = store.acquire(store.backend.distinct_keys(put(table_U), put(id_U)), admits=True)
    try:
        if store.watchers:
            store.before_change(keys.table_U, keys.id_U, store.weights_in(slot_U))
        format = store.format
        with store.writing:
            words = slice(0, min(format.usage_begin, row_UX.shape[1]))
            store.row_SW[slot_U, words] = put(row_UX[:, words])
            words = slice(format.state_begin, row_UX.shape[1])  # Usage metadata belong to the policy.
            if words.start < words.stop:
                store.row_SW[slot_U, words] = put(row_UX[:, words])
        store.mark_dirty(keys.table_U, slot_U)
    finally:
        store.release(slot_U)


@reading
def gather_rows(store: EmbeddingStore, keys: Keys, out_ND: Array) -> bool:
    """Write the weights of each id of the batch of `keys` into out_ND without a wait for a GPU, zeros for padding; ids
    without a row read as in `read`. False where that is not possible: nothing is written then."""
    store.check_open()
    new_rows = store.rows.new_rows
    return store.built and store.hot.gather(keys, store.format.weights, new_rows.absent_weights, out_ND)


@reading
def contains_rows(store: EmbeddingStore, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """Whether keys, which may repeat, have rows: bool [N]."""
    store.check_open()
    if not store.built or not len(id_N):
        return np.zeros(len(id_N), np.bool_)
    tables, table_of_n = np.unique(table_N, return_inverse=True)
    found_N = np.zeros(len(id_N), np.bool_)
    for t, table in enumerate(tables.tolist()):
        n = np.flatnonzero(table_of_n == t)
        id_U, u_of_n = np.unique(id_N[n], return_inverse=True)
        found_N[n] = store.hot.contains(np.full(len(id_U), table, np.int32), id_U)[u_of_n]
    return found_N


@no_step("erase")
@with_store_lock
def erase_rows(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
    """Erase the rows of these keys in every tier; snapshots keep their rows. Returns whether each key had a row: bool
    [U]. Raises StorageError, with nothing changed, if a lookup before its step has pinned one of the rows."""
    store.check_open()
    if not store.built:
        return np.zeros(len(id_U), np.bool_)
    store.pins.release_abandoned()
    own = np.flatnonzero(owner_of(table_U, id_U, store.plan.owners) == store.plan.owner)
    store.journal.erase(table_U[own], id_U[own])  # First, so that no delta restores an erased row.
    erased_U = store.pins.erase(table_U, id_U)
    with changing:
        store.replicas.forget(table_U, id_U)
        if store.engine is not None:
            store.engine.forget(table_U, id_U, erased_U)
        store.changes += bool(erased_U.any())
    return erased_U


@with_store_lock
def check_free(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> None:
    """Raise StorageError if a lookup before its step has pinned the row of one of these keys."""
    if not store.built:
        return
    store.pins.release_abandoned()
    if in_use := store.pins.in_use(table_U, id_U):
        raise StorageError(f"{in_use} of the rows to erase are in use by a lookup; erase them between two steps")
