"""Calls on the rows of a store, by their keys or all of them: written, erased, copied, visited."""

from dataclasses import replace

import numpy as np

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
    """Copy all rows as they are now, and the step, into another store, which is new.

    Args:
        with_state: copy the optimizer's state too; off, rows begin with that of new ones, at step 0.
        change: changes rows in place on their way.

    Raises:
        StorageError: the other's path is in use or unusable, or has no room for them.
    """
    with store.store_lock, other.store_lock:
        store.store_lock.check(changes=True)
        store.check_open()
        if not store.built:
            return
        _fill(other.rows, store.rows, with_state, change)
        with changing:  # Until the usage index has the rows: others would never be evicted.
            other.step = store.step if with_state else 0
            if other.engine is not None:
                clock = None if store.engine is None else store.engine.usage.counted()
                other.engine.read_rows(store.format, clock, store.step, other.step)
                if store.engine is not None:
                    other.engine.admission = other.engine.loaded_admission(store.engine.to_arrays(), "of the other")
            other.changes += 1
        other.replicas.add(store.replicas.keys())


def _fill(rows: TieredRows, source: TieredRows, with_state: bool, change: ChangeRows | None) -> None:
    """Make the tiers of `rows`, which has none, and copy all rows of `source` into them."""
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


@no_step("visit")
def visit_rows(store: EmbeddingStore, call: ChangeRows) -> None:
    """Give every row, as tables, ids and rows, some at a time, to a function, which must neither change them nor use
    the store."""
    with store.store_lock:
        store.store_lock.check(changes=True)
        store.check_open()
        if store.built:
            for table_N, id_N, row_NW in store.hot.scan():
                signals_deferred.raise_interrupt()
                call(table_N, id_N, row_NW)


@no_step("put")
@with_store_lock
def set_rows(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
    """Give keys, known or not, these rows, or the first words of them. StoreFullError, with nothing changed, if a tier
    is too small for so many rows at a time, or capacity is reached."""
    put = store.backend.put
    slot_U, keys = store.acquire(store.backend.distinct_keys(put(table_U), put(id_U)), admits=True)
    try:
        if store.watchers:
            store.before_change(keys.table_U, keys.id_U, store.weights_in(slot_U))
        format = store.format
        with store.writing:
            its = slice(0, min(format.usage_begin, row_UX.shape[1]))
            store.row_SW[slot_U, its] = put(row_UX[:, its])
            its = slice(format.state_begin, row_UX.shape[1])  # What a policy notes is not the caller's.
            if its.start < its.stop:
                store.row_SW[slot_U, its] = put(row_UX[:, its])
        store.mark_dirty(keys.table_U, slot_U)
    finally:
        store.release(slot_U)


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
    """Erase the rows of these keys in every tier; snapshots keep theirs. Returns which existed, bool [U]. StorageError,
    with nothing changed, if a lookup whose step is still to come holds one."""
    store.check_open()
    if not store.built:
        return np.zeros(len(id_U), np.bool_)
    store.pins.release_abandoned()
    own = np.flatnonzero(owner_of(table_U, id_U, store.plan.owners) == store.plan.owner)
    store.journal.erase(table_U[own], id_U[own])  # First: no delta brings back what is gone.
    erased_U = store.pins.erase(table_U, id_U)
    with changing:
        store.replicas.forget(table_U, id_U)
        if store.engine is not None:
            store.engine.forget(table_U, id_U, erased_U)
        store.changes += bool(erased_U.any())
    return erased_U


@with_store_lock
def check_free(store: EmbeddingStore, table_U: np.ndarray, id_U: np.ndarray) -> None:
    """Raise StorageError if a lookup whose step is still to come holds the row of one of these keys."""
    if not store.built:
        return
    store.pins.release_abandoned()
    if in_use := store.pins.in_use(table_U, id_U):
        raise StorageError(f"{in_use} of the rows to erase are in use by a lookup; erase them between two steps")
