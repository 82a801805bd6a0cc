"""Rows prefetched on a GPU ahead of their step: none of it can be seen, and no row is moved that a step may use."""

import numpy as np
import pytest
import torch

from oneemb.kernels.unique_keys_cuda import unique_keys_cuda
from oneemb.storage.tiers import device_slots, device_tier
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import APART, STEPS, Graph, batches, move_to, on_gpu, train
from tests.support.forks import ended_well, in_child
from tests.support.models import make_embedding

SLOTS = 64


@pytest.fixture
def store(gpu, tmp_path, monkeypatch):
    """A cache of SLOTS slots on the GPU, with room for all of them at once, over rows 0 .. 99 in the host's memory."""
    monkeypatch.setattr(device_tier, "SLOT_OVERHEAD_BYTES", 2**20 // SLOTS - 16)
    monkeypatch.setattr(device_slots, "_SLOTS_MIN", SLOTS)
    embedding = make_embedding(tmp_path, store="host", dim=4)
    embedding.store.build()
    move_to(embedding.store, gpu)
    for begin in (0, 50):
        acquire(embedding.store, gpu, begin, begin + 50, release=True)
    assert embedding.stats()["device"]["slots"] == SLOTS
    yield embedding.store
    embedding.close()


def keys(gpu, begin, end):
    id_N = np.arange(begin, end)
    return unique_keys_cuda(gpu.put(np.zeros(len(id_N), np.int32)), gpu.put(id_N), gpu=gpu)


def acquire(store, gpu, begin, end, prefetched=None, release=False):
    slot_U, found = store.acquire(keys(gpu, begin, end), prefetched)
    assert found.id_U.tolist() == list(range(begin, end))
    if release:
        store.release(slot_U)
    return slot_U


def pinned(store):
    return store.stats()["device"]["pinned"]


def test_prefetching_begins_no_row_and_what_it_read_is_acquired_without_a_wait(store, gpu):
    before = store.stats()["rows"], store.changes, store.step
    prefetched = store.prefetch(keys(gpu, 20, 60))
    assert prefetched.missing == 0 and pinned(store) == 40
    assert (store.stats()["rows"], store.changes, store.step) == before
    expected = store.read(keys(gpu, 20, 60))[0][:, :4].cpu().numpy()
    again = keys(gpu, 20, 60)
    waits, launches = gpu.waits, gpu.launches
    slot_U, found = store.acquire(again, prefetched)
    assert gpu.waits == waits and gpu.launches == launches
    assert found.id_U.tolist() == list(range(20, 60))
    assert torch.equal(store.row_SW[slot_U, :4].cpu(), torch.from_numpy(expected))
    store.release(slot_U)
    store.unprefetch(prefetched)
    assert pinned(store) == 0


def test_unknown_rows_begin_with_their_step_and_not_before(store, gpu):
    prefetched = store.prefetch(keys(gpu, 80, 120))
    assert prefetched.missing == 20 and store.stats()["rows"] == 100 and pinned(store) == 20
    slot_U = acquire(store, gpu, 80, 120, prefetched)
    assert store.stats()["rows"] == 120 and pinned(store) == 40 and len(set(slot_U.tolist())) == 40
    store.release(slot_U)


def test_prefetched_rows_give_way_to_a_step_that_needs_their_slots(store, gpu):
    prefetched = store.prefetch(keys(gpu, 0, 40))
    now = acquire(store, gpu, 40, 90)
    assert not prefetched.held and pinned(store) == 50
    store.release(now)
    slot_U = acquire(store, gpu, 0, 40, prefetched)
    assert pinned(store) == 40
    store.release(slot_U)


def test_a_batch_with_no_room_is_prefetched_in_part_and_acquired_later(store, gpu):
    now = acquire(store, gpu, 0, 40)
    prefetched = store.prefetch(keys(gpu, 30, 80))
    assert prefetched.held and prefetched.missing > 24 and pinned(store) == 80 - prefetched.missing
    store.release(now)
    slot_U = acquire(store, gpu, 30, 80, prefetched)
    assert pinned(store) == 50
    store.release(slot_U)
    assert pinned(store) == 0


def test_rows_that_a_step_brings_in_while_they_are_prefetched_are_those_of_the_step(store, gpu, monkeypatch):
    tier, steps = store.hot, []
    acquire(store, gpu, 50, 100, release=True)  # the first of all are not here
    look = tier.pin_resident

    def look_and_be_overtaken(some):
        found = look(some)
        steps.append(acquire(store, gpu, 5, 15))
        store.row_SW[steps[0]] = 7
        store.mark_dirty(None, steps[0])
        store.release(steps[0])
        return found

    monkeypatch.setattr(tier, "pin_resident", look_and_be_overtaken)
    prefetched = store.prefetch(keys(gpu, 0, 30))
    slot_U = acquire(store, gpu, 0, 30, prefetched)
    assert (store.row_SW[slot_U[5:15]] == 7).all()
    store.release(slot_U)
    assert pinned(store) == 0 and store.stats()["rows"] == 100


def test_prefetching_takes_no_memory_while_steps_may_use_what_is_there(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(device_slots, "_SLOTS_MIN", 8)
    embedding = make_embedding(tmp_path, store="host", dim=4)
    store = embedding.store
    store.build()
    move_to(store, gpu)
    acquire(store, gpu, 0, 40, release=True)
    store.snapshots.save("rows", {})
    store.snapshots.load("rows")  # all rows are below, and the slab is empty
    slab = store.row_SW
    prefetched = store.prefetch(keys(gpu, 0, 40))
    assert prefetched.missing == 40 and store.row_SW is slab
    slot_U = acquire(store, gpu, 0, 40, prefetched)
    assert pinned(store) == 40
    store.release(slot_U)
    embedding.close()


def test_rows_of_a_lookup_that_was_dropped_are_released_after_it_on_whatever_stream(store, gpu, monkeypatch):
    tier, ordered = store.hot, []
    release = tier._release_in_order
    monkeypatch.setattr(tier, "_release_in_order", lambda slot_U: ordered.append(release(slot_U)))

    class Lookup:
        pass

    lookup = Lookup()
    store.pins.own(lookup, acquire(store, gpu, 60, 70))
    del lookup
    assert tier.pinned == 10
    slot_U = acquire(store, gpu, 60, 62)
    assert pinned(store) == 2 and len(ordered) == 1
    store.release(slot_U)


def test_a_store_that_is_loaded_anew_forgets_what_was_prefetched(store, gpu):
    store.snapshots.save("rows", {})
    prefetched = store.prefetch(keys(gpu, 0, 10))
    store.snapshots.load("rows")
    slot_U = acquire(store, gpu, 0, 10, prefetched)
    assert pinned(store) == 10
    store.release(slot_U)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["host", "ssd"])
def test_a_cache_that_evicts_while_batches_are_prefetched_changes_no_loss(gpu, kind, depth, tmp_path, monkeypatch):
    expected, _, _ = train(tmp_path / "cpu", kind, "adam")
    monkeypatch.setattr(device_tier, "SLOT_OVERHEAD_BYTES", 2**20 // 60 - 64)
    graph = Graph(tmp_path / "gpu", kind, "adam")
    with on_gpu(gpu, graph):
        # Twice through the same batches: the second time their rows are known, and most are below the cache.
        every = batches(gpu)
        first = [loss.item() for loss in graph.run(every, prefetch_depth=depth)]
        second = [loss.item() for loss in graph.run(every, prefetch_depth=depth)]
        stats = graph.embedding.stats()["device"]
        assert stats["slots"] < 70 and stats["evicted"] > 20 and stats["pinned"] == 0
    graph.embedding.close()
    np.testing.assert_allclose(first, expected[:STEPS], rtol=APART, atol=APART)
    other = Graph(tmp_path / "cpu, twice", kind, "adam")
    plain = [other(*batch).item() for batch in batches() * 2]
    np.testing.assert_allclose([*first, *second], plain, rtol=APART, atol=APART)
    other.embedding.close()


@pytest.mark.skipif(not SIMULATED, reason="a child of fork has no GPU")
def test_a_child_of_fork_may_ask_for_counts(store):
    assert ended_well(in_child(lambda: store.stats()["device"]["slots"] == SLOTS)) is True
