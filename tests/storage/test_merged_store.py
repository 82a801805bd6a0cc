"""Several stores taken as one: rows, pins, marks and errors are those of each."""

import numpy as np
import pytest

from oneemb.storage.merged_store import MergedStore
from oneemb.storage.row_store import StoreFullError
from tests.support.graph_models import make_embedding
from tests.support.keys import distinct, limit_rows, read_rows


def merged_of(stores=("device", "ssd", "host"), tables=(2, 1, 3), **kwargs):
    embeddings = [
        make_embedding(f"e{m}", 5, count, store, seed=m, **kwargs)
        for m, (store, count) in enumerate(zip(stores, tables, strict=True))
    ]
    merged = MergedStore([one.store for one in embeddings], tables, [one.name for one in embeddings])
    merged.build()
    return merged


def keys_of(merged, ids=40, seed=0):
    """(table_U, id_U, begin_M1): some keys of each member, in its order."""
    rng = np.random.default_rng(seed)
    keys = sorted({(int(rng.integers(merged.first_table_M1[-1])), int(rng.integers(-50, 50))) for _ in range(ids)})
    table_U, id_U = np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)
    return table_U, id_U, np.searchsorted(table_U, merged.first_table_M1)


def pinned(merged):
    return [store.stats()["device"]["pinned"] for store in merged.members]


@pytest.mark.parametrize("prefetched", [False, True])
def test_merged_slots_are_the_rows_of_each_member(prefetched):
    merged = merged_of()
    for seed in range(4):
        table_U, id_U, begin_M1 = keys_of(merged, seed=seed)
        ahead = merged.prefetch(distinct(table_U, id_U), begin_M1) if prefetched else None
        slot_U, slots = merged.acquire(distinct(table_U, id_U), begin_M1, ahead)
        assert pinned(merged) == np.diff(begin_M1).tolist()
        row_VW = merged.row_SW
        for u, (table, id) in enumerate(zip(table_U.tolist(), id_U.tolist(), strict=True)):
            m = int(np.searchsorted(merged.first_table_M1, table, side="right")) - 1
            local = np.array([table - merged.first_table_M1[m]], np.int32)
            row_W = read_rows(merged.members[m], local, [id])[0]
            np.testing.assert_array_equal(row_VW[slot_U[u]], row_W)
            assert merged.members_of(table_U[u : u + 1]).tolist() == [m]
        row_VW[slot_U, 0] = np.arange(len(slot_U))
        merged.mark_dirty(table_U, slot_U)
        for m, store in enumerate(merged.members):
            some = slice(begin_M1[m], begin_M1[m + 1])
            assert store.hot.dirty_S[slots[m]].all()
            read = read_rows(store, table_U[some] - merged.first_table_M1[m], id_U[some])[:, 0]
            np.testing.assert_array_equal(read, np.arange(begin_M1[m], begin_M1[m + 1]))
            store.release(slots[m])
        assert pinned(merged) == [0, 0, 0]


def test_what_was_prefetched_and_never_acquired_is_given_back():
    merged = merged_of()
    table_U, id_U, begin_M1 = keys_of(merged)
    for store, slot_U in zip(merged.members, merged.acquire(distinct(table_U, id_U), begin_M1)[1], strict=True):
        store.release(slot_U)
    prefetched = merged.prefetch(distinct(table_U, id_U), begin_M1)
    assert pinned(merged) == np.diff(begin_M1).tolist()
    merged.unprefetch(prefetched)
    assert pinned(merged) == [0, 0, 0] and not any(store._prefetched for store in merged.members)


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_full_member_leaves_no_pin_in_any_and_is_named(prefetched):
    merged = merged_of()
    limit_rows(merged.members[1], 3)
    table_U, id_U, begin_M1 = keys_of(merged)
    ahead = merged.prefetch(distinct(table_U, id_U), begin_M1) if prefetched else None
    with pytest.raises(StoreFullError, match="capacity is 3 rows") as caught:
        merged.acquire(distinct(table_U, id_U), begin_M1, ahead)
    assert caught.value.__notes__ == ["in embedding 'e1'"] and caught.value.first_table == 2
    assert pinned(merged) == [0, 0, 0] and not any(store._prefetched for store in merged.members)


def test_a_slab_made_anew_is_seen():
    merged = merged_of(("device", "device"), (1, 1))
    table_U, id_U, begin_M1 = np.array([0, 1], np.int32), np.array([7, 7]), np.array([0, 1, 2])
    merged.acquire(distinct(table_U, id_U), begin_M1)
    generation = merged.generation
    merged.members[0]._rows.dismantle()
    merged.build()
    assert merged.generation > generation
    slot_U, _ = merged.acquire(distinct(table_U, id_U), begin_M1)
    for m, store in enumerate(merged.members):
        np.testing.assert_array_equal(merged.row_SW[slot_U[m]], read_rows(store, [0], id_U[:1])[0])


def test_keys_are_named_as_their_members_count_them():
    assert merged_of().describe_key(4, -9) == "id -9 in table 1 of embedding 'e2'"
