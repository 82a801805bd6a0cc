"""Rows prefetched ahead of their lookup: nothing of it can be seen but its speed."""

import tempfile
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.store_rows import erase_rows
from oneemb.storage.tiers.hot_rows import RowsReadAhead
from tests.support.keys import distinct


def make_store(kind="ssd", capacity=None, cache_mb=1, dim=8):
    path = tempfile.mkdtemp()
    if kind == "ssd":
        options = oneemb.make_cached_ssd_store_options(cache_mb, path, capacity=capacity)
    elif kind == "host":
        options = oneemb.make_cached_host_mem_store_options(cache_mb, path, capacity=capacity or 10**6)
    else:
        options = oneemb.make_device_mem_store_options(path, capacity=capacity or 10**5)
    embedding = oneemb.MultiTableEmbedding("e", dim, torch.float32, torch.int64, [oneemb.make_table()], options)
    embedding.store.build()
    return embedding.store


def keys(begin, end):
    return distinct(np.zeros(end - begin), np.arange(begin, end))


def cache_slots(store):
    return store.stats()["device"]["slots"]


@pytest.mark.parametrize("kind", ["ssd", "host", "device"])
def test_prefetching_begins_no_row_and_changes_no_count(kind):
    store = make_store(kind)
    store.release(store.acquire(keys(0, 100))[0])
    before = store.stats()["rows"], store.changes, store.step
    prefetched = store.prefetch(keys(50, 150))
    assert (prefetched.slot_U[:50] >= 0).all() and (prefetched.slot_U[50:] == -1).all()
    assert (store.stats()["rows"], store.changes, store.step) == before
    store.unprefetch(prefetched)
    store.unprefetch(prefetched)
    assert store.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("kind", ["ssd", "host", "device"])
def test_acquisition_of_prefetched_keys_gives_the_rows_that_plain_acquisition_gives(kind):
    plain, ahead = make_store(kind), make_store(kind)
    for begin, end in [(0, 3000), (1000, 9000), (500, 40000), (0, 2000), (30000, 50000), (0, 10)]:
        if end - begin > cache_slots(plain):
            continue
        a = plain.acquire(keys(begin, end))[0]
        b = ahead.acquire(keys(begin, end), ahead.prefetch(keys(begin, end)))[0]
        assert np.array_equal(plain.row_SW[a], ahead.row_SW[b])
        for store, slot in ((plain, a), (ahead, b)):
            store.row_SW[slot] += 1
            store.mark_dirty(None, slot)
            store.release(slot)
        assert ahead.stats()["device"]["pinned"] == 0
        assert plain.stats()["rows"] == ahead.stats()["rows"]
        assert plain.changes == ahead.changes


def test_prefetched_rows_give_way_to_a_step_that_needs_their_slots():
    store = make_store()
    slots = cache_slots(store)
    half = slots * 2 // 3
    store.release(store.acquire(keys(0, half))[0])
    prefetched = store.prefetch(keys(0, half))
    now = store.acquire(keys(half, 2 * half))[0]
    assert not prefetched.held
    store.release(now)
    later = store.acquire(keys(0, half), prefetched)[0]
    assert store.stats()["device"]["pinned"] == half
    store.release(later)


def test_a_batch_that_cannot_be_prefetched_whole_is_prefetched_in_part_and_acquired_later():
    store = make_store()
    slots = cache_slots(store)
    store.release(store.acquire(keys(0, slots))[0])
    now = store.acquire(keys(slots, slots + slots // 2))[0]
    prefetched = store.prefetch(keys(0, slots))
    assert store.stats()["device"]["pinned"] <= slots
    store.release(now)
    store.release(store.acquire(keys(0, slots), prefetched)[0])
    assert store.stats()["device"]["pinned"] == 0
    with pytest.raises(StoreFullError):
        store.acquire(keys(0, slots + 1), store.prefetch(keys(0, slots + 1)))[0]
    assert store.stats()["device"]["pinned"] == 0


def test_prefetching_before_clear_is_forgotten():
    store = make_store()
    store.release(store.acquire(keys(0, 10))[0])
    prefetched = store.prefetch(keys(0, 10))
    store.clear()
    slot = store.acquire(keys(0, 10), prefetched)[0]
    assert store.stats()["device"]["pinned"] == 10
    store.release(slot)
    store.unprefetch(prefetched)
    assert store.stats()["device"]["pinned"] == 0


def test_prefetching_beside_training_reads_no_stale_row():
    store = make_store(dim=64)
    slots = cache_slots(store)
    size, batches = slots // 3, 60
    rng = np.random.default_rng(0)
    batch = [np.unique(rng.integers(0, 4 * slots, size)) for _ in range(batches)]
    count = np.zeros(4 * slots, np.int64)
    prefetched, ready, acquired, errors = {}, threading.Semaphore(0), threading.Semaphore(1), []

    def work():
        try:
            for t, id_U in enumerate(batch):
                acquired.acquire()
                prefetched[t] = store.prefetch(distinct(np.zeros(len(id_U)), id_U))
                ready.release()
        except BaseException as error:
            errors.append(error)
            ready.release()

    thread = threading.Thread(target=work)
    thread.start()
    for t, id_U in enumerate(batch):
        assert ready.acquire(timeout=600) and not errors
        slot_U = store.acquire(distinct(np.zeros(len(id_U)), id_U), prefetched.pop(t))[0]
        acquired.release()
        fresh = count[id_U] == 0
        store.row_SW[slot_U[fresh]] = 0
        assert np.array_equal(store.row_SW[slot_U], np.repeat(count[id_U], 64).reshape(-1, 64))
        store.row_SW[slot_U] += 1
        store.mark_dirty(None, slot_U)
        count[id_U] += 1
        store.release(slot_U)
    thread.join()
    assert store.stats()["device"]["pinned"] == 0 and store.stats()["device"]["evicted"] > 0


def test_rows_that_a_step_brings_in_while_they_are_prefetched_are_those_of_the_step(monkeypatch):
    store = make_store("host")
    store.release(store.acquire(keys(0, 100))[0])
    store.hot.flush()
    store.hot.reload()  # all rows are below, none in the cache
    look, steps = store.hot.pin_resident, []

    def look_and_be_overtaken(*some):
        found = look(*some)
        if not steps:  # a step acquires the same rows, and changes them, before they are read ahead
            steps.append(store.acquire(keys(10, 20))[0])
            store.row_SW[steps[0]] = 7
            store.mark_dirty(None, steps[0])
            store.release(steps[0])
        return found

    monkeypatch.setattr(store.hot, "pin_resident", look_and_be_overtaken)
    slot_U = store.acquire(keys(0, 30), store.prefetch(keys(0, 30)))[0]
    assert steps and (store.row_SW[slot_U[10:20]] == 7).all() and (slot_U[10:20] == steps[0]).all()
    store.release(slot_U)
    assert store.stats()["device"]["pinned"] == 0 and store.stats()["rows"] == 100


@pytest.fixture
def while_reading(monkeypatch):
    """Has a function called by another thread, between a read of rows ahead and their way into the cache."""
    calls = []

    def read(ahead):
        real(ahead)
        if calls:
            thread = threading.Thread(target=calls.pop())
            thread.start()
            thread.join(600)
            assert not thread.is_alive(), "it waits for the read"

    real = RowsReadAhead.read
    monkeypatch.setattr(RowsReadAhead, "read", read)
    return calls.append


def below(store, count):
    """Write rows 0 to count, all ones, and move them out of the cache."""
    slot_U = store.acquire(keys(0, count))[0]
    store.row_SW[slot_U] = 1
    store.mark_dirty(None, slot_U)
    store.release(slot_U)
    store.hot.flush()
    store.hot.reload()


def test_rows_that_are_trained_and_evicted_while_they_are_read_ahead_are_read_once_more(while_reading):
    store = make_store()
    slots = cache_slots(store)
    below(store, 100)

    def train_and_evict():
        slot_U = store.acquire(keys(10, 20))[0]
        store.row_SW[slot_U] = 7
        store.mark_dirty(None, slot_U)
        store.release(slot_U)
        for begin in range(1000, 1000 + 4 * slots, slots // 2):
            store.release(store.acquire(keys(begin, begin + slots // 2))[0])
        assert (store.hot.slots_of(keys(10, 20).table_U, keys(10, 20).id_U) < 0).all(), "they have left the cache"

    while_reading(train_and_evict)
    prefetched = store.prefetch(keys(0, 100))
    assert prefetched.missing == 0
    slot_U = store.acquire(keys(0, 100), prefetched)[0]
    expected = np.ones(100)
    expected[10:20] = 7
    assert (store.row_SW[slot_U] == expected[:, None]).all()


def test_rows_that_are_erased_while_they_are_read_ahead_begin_anew(while_reading):
    store = make_store()
    below(store, 100)
    gone = keys(10, 20)
    while_reading(lambda: erase_rows(store, gone.table_U, gone.id_U))
    slot_U = store.acquire(keys(0, 100), store.prefetch(keys(0, 100)))[0]
    assert (store.row_SW[slot_U[:10]] == 1).all() and (store.row_SW[slot_U[20:]] == 1).all()
    assert (store.row_SW[slot_U[10:20]] != 1).any(), "an erased row came back"
    assert store.stats()["rows"] == 100


def test_what_was_read_ahead_before_a_load_is_forgotten(while_reading):
    store = make_store()
    below(store, 50)
    store.snapshots.save("half", {})
    below(store, 100)
    while_reading(lambda: store.snapshots.load("half"))
    prefetched = store.prefetch(keys(0, 100))
    assert store.stats()["device"]["pinned"] == 0 and prefetched.missing == 100
    store.release(store.acquire(keys(0, 100), prefetched)[0])
    assert store.stats()["rows"] == 100 and store.stats()["device"]["new_rows"] >= 50


@pytest.mark.parametrize("change", ["clear", "close"])
def test_a_store_that_is_emptied_or_closed_while_rows_are_read_ahead(change, monkeypatch):
    store = make_store()
    below(store, 100)
    real = RowsReadAhead.read

    def read(ahead):
        getattr(store, change)()
        real(ahead)

    monkeypatch.setattr(RowsReadAhead, "read", read)
    prefetched = store.prefetch(keys(0, 100))
    assert prefetched.missing == 100 and (prefetched.slot_U == -1).all()
    if change == "close":
        with pytest.raises(StorageError, match="closed"):
            store.acquire(keys(0, 100), prefetched)
        return
    store.release(store.acquire(keys(0, 100), prefetched)[0])
    assert store.stats()["device"]["new_rows"] == 200 and store.stats()["device"]["pinned"] == 0


def test_a_row_read_ahead_is_read_again_only_if_a_row_of_its_table_has_changed():
    reads = []

    class Below:
        row_width = 2

        def get(self, table_U, id_U, out_UW, to_U=None):
            reads.append(list(zip(table_U.tolist(), id_U.tolist(), strict=True)))
            return np.zeros(len(id_U), bool)

    ahead = RowsReadAhead(Below(), distinct([0, 0, 1], [5, -6, 5]), np.arange(3))
    ahead.read()
    ahead.note_change(np.array([2, 1]), np.array([-6, -6]))
    ahead.known(np.arange(3))
    assert len(reads) == 1
    ahead.note_change(np.array([1, 3]), np.array([5, -6]))
    ahead.known(np.arange(3))
    assert reads[1:] == [[(1, 5)]]
