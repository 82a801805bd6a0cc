"""Rows staged ahead of their lookup: nothing of it can be seen but its speed."""

import tempfile
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.row_store import StoreFullError


def make_store(kind="ssd", capacity=None, cache_mb=1, dim=8):
    path = tempfile.mkdtemp()
    if kind == "ssd":
        options = oneemb.make_cached_ssd_store_options(cache_mb, path, capacity=capacity)
    elif kind == "host":
        options = oneemb.make_cached_host_mem_store_options(cache_mb, path, capacity=capacity or 10**6)
    else:
        options = oneemb.make_device_mem_store_options(path, capacity=capacity or 10**5)
    embedding = oneemb.MultiTableEmbedding("e", dim, torch.float32, torch.int64, [oneemb.make_table()], options)
    embedding.store.build(None, np.empty(0, np.float32))
    return embedding.store


def keys(begin, end):
    return np.zeros(end - begin, np.int32), np.arange(begin, end, dtype=np.int64)


def cache_slots(store):
    return store.stats()["device"]["slots"]


@pytest.mark.parametrize("kind", ["ssd", "host", "device"])
def test_staging_begins_no_row_and_changes_no_count(kind):
    store = make_store(kind)
    store.release(store.admit(*keys(0, 100)))
    before = store.stats()["rows"], store.changes, store.step
    staged = store.stage(*keys(50, 150))
    assert (staged.slot_U[:50] >= 0).all() and (staged.slot_U[50:] == -1).all()
    assert (store.stats()["rows"], store.changes, store.step) == before
    store.unstage(staged)
    store.unstage(staged)
    assert store.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("kind", ["ssd", "host", "device"])
def test_admission_of_staged_keys_gives_the_rows_that_plain_admission_gives(kind):
    plain, ahead = make_store(kind), make_store(kind)
    for begin, end in [(0, 3000), (1000, 9000), (500, 40000), (0, 2000), (30000, 50000), (0, 10)]:
        if end - begin > cache_slots(plain):
            continue
        a = plain.admit(*keys(begin, end))
        b = ahead.admit(*keys(begin, end), ahead.stage(*keys(begin, end)))
        assert np.array_equal(plain.row_SW[a], ahead.row_SW[b])
        for store, slot in ((plain, a), (ahead, b)):
            store.row_SW[slot] += 1
            store.mark_dirty(slot)
            store.release(slot)
        assert ahead.stats()["device"]["pinned"] == 0
        assert plain.stats()["rows"] == ahead.stats()["rows"]
        assert plain.changes == ahead.changes


def test_staged_rows_give_way_to_a_step_that_needs_their_slots():
    store = make_store()
    slots = cache_slots(store)
    half = slots * 2 // 3
    store.release(store.admit(*keys(0, half)))
    staged = store.stage(*keys(0, half))
    now = store.admit(*keys(half, 2 * half))
    assert not staged.held
    store.release(now)
    later = store.admit(*keys(0, half), staged)
    assert store.stats()["device"]["pinned"] == half
    store.release(later)


def test_a_batch_that_cannot_be_staged_whole_is_staged_in_part_and_admitted_later():
    store = make_store()
    slots = cache_slots(store)
    store.release(store.admit(*keys(0, slots)))
    now = store.admit(*keys(slots, slots + slots // 2))
    staged = store.stage(*keys(0, slots))
    assert store.stats()["device"]["pinned"] <= slots
    store.release(now)
    store.release(store.admit(*keys(0, slots), staged))
    assert store.stats()["device"]["pinned"] == 0
    with pytest.raises(StoreFullError):
        store.admit(*keys(0, slots + 1), store.stage(*keys(0, slots + 1)))
    assert store.stats()["device"]["pinned"] == 0


def test_staging_before_clear_is_forgotten():
    store = make_store()
    store.release(store.admit(*keys(0, 10)))
    staged = store.stage(*keys(0, 10))
    store.clear()
    slot = store.admit(*keys(0, 10), staged)
    assert store.stats()["device"]["pinned"] == 10
    store.release(slot)
    store.unstage(staged)
    assert store.stats()["device"]["pinned"] == 0


def test_staging_beside_training_reads_no_stale_row():
    store = make_store(dim=64)
    slots = cache_slots(store)
    size, batches = slots // 3, 60
    rng = np.random.default_rng(0)
    batch = [np.unique(rng.integers(0, 4 * slots, size)) for _ in range(batches)]
    count = np.zeros(4 * slots, np.int64)
    staged, ready, admitted, errors = {}, threading.Semaphore(0), threading.Semaphore(1), []

    def work():
        try:
            for t, id_U in enumerate(batch):
                admitted.acquire()
                staged[t] = store.stage(np.zeros(len(id_U), np.int32), id_U)
                ready.release()
        except BaseException as error:
            errors.append(error)
            ready.release()

    thread = threading.Thread(target=work)
    thread.start()
    for t, id_U in enumerate(batch):
        assert ready.acquire(timeout=60) and not errors
        slot_U = store.admit(np.zeros(len(id_U), np.int32), id_U, staged.pop(t))
        admitted.release()
        fresh = count[id_U] == 0
        store.row_SW[slot_U[fresh]] = 0
        assert np.array_equal(store.row_SW[slot_U], np.repeat(count[id_U], 64).reshape(-1, 64))
        store.row_SW[slot_U] += 1
        store.mark_dirty(slot_U)
        count[id_U] += 1
        store.release(slot_U)
    thread.join()
    assert store.stats()["device"]["pinned"] == 0 and store.stats()["device"]["evicted"] > 0


def test_rows_that_a_step_brings_in_while_they_are_staged_are_those_of_the_step(monkeypatch):
    store = make_store("host")
    store.release(store.admit(*keys(0, 100)))
    store._tiers[0].flush()
    store._tiers[0].reload()  # all rows are below, none in the cache
    look, steps = store._tiers[0].pin_resident, []

    def look_and_be_overtaken(*some):
        slot_U = look(*some)
        if not steps:  # a step admits the same rows, and changes them, before they are read ahead
            steps.append(store.admit(*keys(10, 20)))
            store.row_SW[steps[0]] = 7
            store.mark_dirty(steps[0])
            store.release(steps[0])
        return slot_U

    monkeypatch.setattr(store._tiers[0], "pin_resident", look_and_be_overtaken)
    slot_U = store.admit(*keys(0, 30), store.stage(*keys(0, 30)))
    assert steps and (store.row_SW[slot_U[10:20]] == 7).all() and (slot_U[10:20] == steps[0]).all()
    store.release(slot_U)
    assert store.stats()["device"]["pinned"] == 0 and store.stats()["rows"] == 100
