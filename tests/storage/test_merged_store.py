"""Several stores taken as one: rows, pins, marks and errors are those of each."""

import numpy as np
import pytest

from oneemb.storage.errors import StoreFullError
from oneemb.storage.merged_store import MergedStore
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


def acquire(merged, table_U, id_U, begin_M1, prefetched=None):
    """The slots in each member: of those that know all their keys first, then of the others."""
    keys = distinct(table_U, id_U)
    slots = merged.acquire_found(keys, begin_M1, prefetched)
    return [
        merged.acquire_rest(m, keys, begin_M1, prefetched) if slot_U is None else slot_U
        for m, slot_U in enumerate(slots)
    ]


def pinned(merged):
    return [store.stats()["device"]["pinned"] for store in merged.members]


def held(merged):
    return [len(store.pins.prefetched) for store in merged.members]


@pytest.mark.parametrize("prefetched", [False, True])
def test_what_is_found_is_pinned_and_nothing_is_inserted(prefetched):
    merged = merged_of()
    table_U, id_U, begin_M1 = keys_of(merged)
    keys, known = distinct(table_U, id_U), merged.members[1]
    part = slice(begin_M1[1], begin_M1[2])
    known.release(known.acquire(distinct(table_U[part] - 2, id_U[part]))[0])
    ahead = merged.prefetch(keys, begin_M1) if prefetched else None
    slots = merged.acquire_found(keys, begin_M1, ahead)
    assert [slot_U is None for slot_U in slots] == [True, False, True]
    assert [len(store) for store in (store.hot for store in merged.members)] == [0, begin_M1[2] - begin_M1[1], 0]
    assert pinned(merged) == [0, begin_M1[2] - begin_M1[1], 0]
    for m in (0, 2):
        part = slice(begin_M1[m], begin_M1[m + 1])
        slot_U = merged.acquire_rest(m, keys, begin_M1, ahead)
        store, local = merged.members[m], table_U[part] - merged.first_table_M1[m]
        np.testing.assert_array_equal(store.row_SW[slot_U], read_rows(store, local, id_U[part]))
    assert pinned(merged) == np.diff(begin_M1).tolist() and not any(held(merged))


@pytest.mark.parametrize("dropped", [False, True], ids=["alone", "beside a lookup that was dropped"])
def test_a_member_without_keys_holds_nothing(dropped):
    merged = merged_of()
    if dropped:
        slot_U, _ = merged.members[0].acquire(distinct([0], [1]))
        owner = type("Owner", (), {})()
        merged.members[0].pins.own(owner, slot_U)
        del owner
        assert merged.members[0].pins.abandoned
    table_U, id_U, begin_M1 = np.array([2, 2], np.int32), np.array([5, 6]), np.array([0, 0, 2, 2])
    for _ in range(2):
        prefetched = merged.prefetch(distinct(table_U, id_U), begin_M1)
        slots = acquire(merged, table_U, id_U, begin_M1, prefetched)
        assert not any(held(merged)) and len(slots[1]) == 2
        merged.members[1].release(slots[1])


def test_pins_of_lookups_that_were_dropped_are_released_before_rows_are_found():
    merged = merged_of(("device", "device"), (1, 1))
    table_U, id_U, begin_M1 = np.array([0, 1], np.int32), np.array([7, 7]), np.array([0, 1, 2])
    slots = acquire(merged, table_U, id_U, begin_M1)
    merged.members[0].pins.own(type("Owner", (), {})(), slots[0])  # dropped at once
    merged.members[1].release(slots[1])
    found = merged.acquire_found(distinct(table_U, id_U), begin_M1)
    assert found[0] is None and found[1] is not None
    merged.acquire_rest(0, distinct(table_U, id_U), begin_M1)
    assert pinned(merged) == [1, 1]


def test_slots_prefetched_before_a_slab_was_made_anew_are_not_taken_over():
    merged = merged_of(("device", "device"), (1, 1))
    table_U, id_U, begin_M1 = np.array([0, 1], np.int32), np.array([7, 7]), np.array([0, 1, 2])
    for store, slot_U in zip(merged.members, acquire(merged, table_U, id_U, begin_M1), strict=True):
        store.release(slot_U)
    prefetched = merged.prefetch(distinct(table_U, id_U), begin_M1)
    merged.members[0].clear()
    assert [slot_U is None for slot_U in merged.acquire_found(distinct(table_U, id_U), begin_M1, prefetched)] == [
        True, False,
    ]  # fmt: skip


def test_merged_slots_are_of_the_members_asked_for():
    merged = merged_of(("device", "device", "device"), (1, 1, 1))
    table_U, id_U, begin_M1 = np.array([0, 1, 2], np.int32), np.array([3, 4, 5]), np.arange(4)
    slots = acquire(merged, table_U, id_U, begin_M1)
    every = merged.merged_slots([0, 1, 2], slots)
    assert merged.merged_slots([0, 2], [slots[0], slots[2]]).tolist() == every[[0, 2]].tolist()
    assert merged.merged_slots([1], [slots[1]]).tolist() == every[[1]].tolist()


@pytest.mark.parametrize("prefetched", [False, True])
def test_merged_slots_are_the_rows_of_each_member(prefetched):
    merged = merged_of()
    for seed in range(4):
        table_U, id_U, begin_M1 = keys_of(merged, seed=seed)
        ahead = merged.prefetch(distinct(table_U, id_U), begin_M1) if prefetched else None
        slots = acquire(merged, table_U, id_U, begin_M1, ahead)
        slot_U = merged.merged_slots(range(3), slots)
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
    for store, slot_U in zip(merged.members, acquire(merged, table_U, id_U, begin_M1), strict=True):
        store.release(slot_U)
    prefetched = merged.prefetch(distinct(table_U, id_U), begin_M1)
    assert pinned(merged) == np.diff(begin_M1).tolist()
    merged.unprefetch(prefetched)
    assert pinned(merged) == [0, 0, 0] and not any(store.pins.prefetched for store in merged.members)


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_full_member_takes_nothing(prefetched):
    merged = merged_of()
    limit_rows(merged.members[1], 3)
    table_U, id_U, begin_M1 = keys_of(merged)
    ahead = merged.prefetch(distinct(table_U, id_U), begin_M1) if prefetched else None
    slots = merged.acquire_found(distinct(table_U, id_U), begin_M1, ahead)
    with pytest.raises(StoreFullError, match="capacity is 3 rows"):
        merged.acquire_rest(1, distinct(table_U, id_U), begin_M1, ahead)
    assert slots == [None, None, None] and pinned(merged) == [0, 0, 0] and len(merged.members[1].hot) == 0


def test_a_slab_made_anew_is_seen():
    merged = merged_of(("device", "device"), (1, 1))
    table_U, id_U, begin_M1 = np.array([0, 1], np.int32), np.array([7, 7]), np.array([0, 1, 2])
    acquire(merged, table_U, id_U, begin_M1)
    generation = merged.generation
    merged.members[0].rows.dismantle()
    merged.build()
    assert merged.generation > generation
    slot_U = merged.merged_slots([0, 1], acquire(merged, table_U, id_U, begin_M1))
    for m, store in enumerate(merged.members):
        np.testing.assert_array_equal(merged.row_SW[slot_U[m]], read_rows(store, [0], id_U[:1])[0])


def test_keys_are_named_as_their_members_count_them():
    assert merged_of().describe_key(4, -9) == "id -9 in table 1 of embedding 'e2'"
