"""The device tier: the stores' contract, and acquisition that evicts by the policy and never what is pinned."""

import inspect
from collections import Counter

import numpy as np
import pytest
import torch

from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers import device_memory, device_slots
from oneemb.storage.tiers.device_tier import DeviceTier
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.warm_caches import fill_caches
from tests.support.row_store_suite import SUITE, DictStore, FailingStore, keys_of
from tests.support.table_model import check, put_random

W = 5


@pytest.fixture
def tier(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "_BUFFER_BYTES", 7 * 4 * W)  # so that rows cross the bus in several parts

    def make(below=None, slots=3000, **options):
        return DeviceTier(
            "device", row_width=W, slots=slots, below=below, resident=options.pop("resident", below is None),
            init=None, backend=CudaBackend(gpu), **options,
        )  # fmt: skip

    return make


def host(below, slots):
    return HotTier("host", row_width=W, slots=slots, below=below, resident=below is None, threads=Threads(1))


STORES = {
    "resident": lambda tier: tier(),
    "resident over dict": lambda tier: tier(DictStore(W), resident=True),
    "cache over dict": lambda tier: tier(DictStore(W), 40),
    "cache of one slot": lambda tier: tier(DictStore(W), 1),
    "cache over host cache": lambda tier: tier(host(DictStore(W), 150), 40),
    "least recently used": lambda tier: tier(DictStore(W), 40, policy="lru"),
}


@pytest.mark.parametrize("check_store", SUITE, ids=lambda check_store: check_store.__name__)
@pytest.mark.parametrize("kind", STORES)
def test_a_device_tier_keeps_the_contract(tier, kind, check_store):
    check_store(lambda: STORES[kind](tier))


def test_a_new_cache_counts_the_rows_of_the_store_below(tier):
    below = DictStore(W)
    table_U, id_U = keys_of((0, i) for i in range(7))
    below.put(table_U, id_U, np.ones((7, W), np.float32))
    assert len(tier(below, 40)) == 7
    assert len(tier(below, 40, resident=True)) == 0  # It has the rows after `reload`.


class Model:
    """A tier whose rows say which key they belong to, and what acquisition must do to it."""

    def __init__(self, tier, gpu):
        self.tier, self.gpu, self.rows, self.pins, self.begun = tier, gpu, {}, Counter(), []
        tier.init_rows = self.begin

    def begin(self, row_SW, slot_M, table_M, id_M):
        self.begun += zip(table_M.tolist(), id_M.tolist(), strict=True)
        rows = np.stack([row_of(t, i) for t, i in self.begun[-len(slot_M) :]]) if len(slot_M) else np.empty((0, W))
        row_SW[slot_M, :W] = self.gpu.put(rows.astype(np.float32))

    def acquire(self, keys):
        slot_U, _ = self.tier.acquire(self.distinct(keys))
        self.pins.update(keys)
        return slot_U

    def distinct(self, keys):
        return CudaBackend(self.gpu).distinct_keys(*map(self.gpu.put, keys_of(keys)))

    def release(self, keys, slot_U):
        self.tier.release(slot_U)
        self.pins.subtract(keys)

    def here(self, keys):
        return [key for key, slot in zip(keys, self.slots(keys), strict=True) if slot >= 0]

    def slots(self, keys):
        return self.tier._index.find(*map(self.gpu.put, keys_of(keys))).tolist()


def row_of(table, id):
    return np.array([table, id % 1000, 1, 2, 3], np.float32)


def test_random_acquisition_agrees_with_a_dict_and_keeps_what_is_pinned(tier, gpu):
    print("seed 1")
    rng = np.random.default_rng(1)
    below = DictStore(W)
    model = Model(tier(below, 24), gpu)
    expected, leases = {}, []
    for _ in range(60):
        keys = [(int(i) % 2, int(i)) for i in rng.choice(70, int(rng.integers(1, 9)), replace=False)]
        slot_U = model.acquire(keys)
        for key in keys:
            expected.setdefault(key, row_of(*key))
        found = model.tier.row_SW[slot_U, :W].cpu().numpy()
        assert found.tolist() == [expected[key].tolist() for key in keys]
        if rng.random() < 0.7:  # kernels change the rows in place
            for key, slot in zip(keys, slot_U.tolist(), strict=True):
                expected[key] = expected[key] + np.float32(0.5)
                model.tier.row_SW[slot, :W] += 0.5
            model.tier.mark_dirty(slot_U)
        leases.append((keys, slot_U))
        if len(leases) > 2:
            model.release(*leases.pop(int(rng.integers(0, 2))))
        for keys, slot_U in leases:
            assert model.slots(keys) == slot_U.tolist(), "a pinned row has moved or left"
    while leases:
        model.release(*leases.pop())
    stats = model.tier.stats()
    assert stats["pinned"] == 0 and stats["evicted"] > 50 and stats["written_down"] > 20
    assert len(model.begun) == len(set(model.begun)) == len(expected), "each row begins once"
    check(model.tier, {key: row.tobytes() for key, row in expected.items()})


def test_tiers_of_the_device_and_of_the_host_evict_alike_unless_told_otherwise():
    policies = {inspect.signature(kind).parameters["policy"].default for kind in (DeviceTier, HotTier)}
    assert policies == {"lfu"}


def test_the_least_recently_used_leave_first(tier, gpu):
    model = Model(tier(DictStore(W), 8, policy="lru"), gpu)
    for i in range(8):
        model.release([(0, i)], model.acquire([(0, i)]))
    model.release([(0, 0)], model.acquire([(0, 0)]))
    model.acquire([(0, 100), (0, 101)])
    assert model.here([(0, i) for i in range(8)]) == [(0, i) for i in (0, 3, 4, 5, 6, 7)]


def test_the_least_often_used_leave_first(tier, gpu):
    model = Model(tier(DictStore(W), 4, policy="lfu"), gpu)
    keys = [(0, i) for i in range(4)]
    for key, uses in zip(keys, [5, 4, 9, 2], strict=True):
        for _ in range(uses):
            model.release([key], model.acquire([key]))
    model.acquire([(0, 50)])
    assert model.here(keys) == [(0, 0), (0, 1), (0, 2)]
    model.acquire([(0, 51)])
    assert model.here(keys) == [(0, 0), (0, 2)]


@pytest.mark.parametrize("step", [1 << 20, 4], ids=["scores as they are", "scores brought down often"])
def test_what_was_used_often_leaves_once_other_rows_are(tier, gpu, step, monkeypatch):
    monkeypatch.setattr(device_slots, "_SCORE_STEP", step)
    model = Model(tier(DictStore(W), 4, policy="lfu"), gpu)

    def use(*numbers):
        keys = [(0, n) for n in numbers]
        model.release(keys, model.acquire(keys))

    for _ in range(10):
        use(0, 1)
    use(2)
    use(3)
    use(4)  # one row leaves for it
    assert model.here([(0, 0), (0, 1)]) == [(0, 0), (0, 1)], "rows used once push out no row that is used often"
    for _ in range(60):
        use(4, 5)
    use(6, 7)
    assert model.here([(0, n) for n in range(8)]) == [(0, n) for n in (4, 5, 6, 7)]


def test_what_is_pinned_stays_whatever_its_score(tier, gpu):
    model = Model(tier(DictStore(W), 4), gpu)
    slot_U = model.acquire([(0, 0), (0, 1)])
    for i in range(2, 12):
        model.release([(0, i)], model.acquire([(0, i)]))
    assert model.slots([(0, 0), (0, 1)]) == slot_U.tolist()
    twice_U = model.acquire([(0, 0)])
    model.release([(0, 0), (0, 1)], slot_U)
    model.acquire([(0, i) for i in (20, 21, 22)])
    assert model.slots([(0, 0)]) == twice_U.tolist(), "pinned twice, released once"


def test_a_cache_full_of_pins_says_what_it_needs_and_changes_nothing(tier, gpu):
    model = Model(tier(DictStore(W), 4), gpu)
    slot_U = model.acquire([(0, 0), (0, 1), (0, 2)])
    pins = model.tier.pin_S.tolist()
    with pytest.raises(StoreFullError, match="4 slots; 3 of them are in use by this step and 2 more rows"):
        model.acquire([(0, 0), (0, 8), (0, 9)])
    assert model.tier.pin_S.tolist() == pins and len(model.tier) == 3
    model.release([(0, 0), (0, 1), (0, 2)], slot_U)
    assert model.tier.pinned == 0


@pytest.mark.parametrize("options", [dict(row_limit=3), dict(slots=3)], ids=str)
def test_a_full_resident_tier_says_so_and_changes_nothing(tier, gpu, options):
    model = Model(tier(**options), gpu)
    model.acquire([(0, 0), (0, 1)])
    with pytest.raises(StoreFullError):
        model.acquire([(0, 1), (0, 2), (0, 3)])
    assert len(model.tier) == 2 and model.tier.pinned == 2
    with pytest.raises(StoreFullError):
        model.tier.check_holds(4)
    model.acquire([(0, 2)])


def test_a_new_row_that_cannot_begin_leaves_no_trace(tier, gpu):
    model = Model(tier(DictStore(W), 4), gpu)

    def fail(*_):
        raise RuntimeError("no row")

    model.tier.init_rows = fail
    with pytest.raises(RuntimeError, match="no row"):
        model.acquire([(0, 1), (0, 2)])
    model.tier.init_rows = model.begin
    assert len(model.tier) == 0 and model.tier.pinned == 0 and model.here([(0, 1)]) == []
    model.acquire([(0, i) for i in range(4)])


def test_a_store_below_that_fails_while_rows_leave_loses_none(tier, gpu):
    below = FailingStore(DictStore(W))
    model = Model(tier(below, 4), gpu)
    keys = [(0, i) for i in range(4)]
    model.release(keys, model.acquire(keys))
    below.fail_at = below.calls + 1  # the put
    with pytest.raises(OSError):
        model.acquire([(0, 9)])
    below.fail_at = None
    assert model.here(keys) == keys and model.tier.pinned == 0
    model.acquire([(0, 9)])
    check(model.tier, {key: row_of(*key).tobytes() for key in [*keys, (0, 9)]})


def test_rows_survive_a_reload_from_below(tier, gpu):
    for resident in (True, False):
        below, rows = DictStore(W), {}
        store = tier(below, 60 if resident else 20, resident=resident)
        put_random(store, rows, np.random.default_rng(2), 50)
        store.flush()
        store.reload()
        check(store, rows)
        assert len(below.rows) == 50


def test_a_device_out_of_memory_says_what_was_asked_for_and_what_would_fit(tier, gpu, monkeypatch):
    model = Model(tier(), gpu)
    slot_U = model.acquire([(0, 1)])
    limit_memory(model.tier, 1500, monkeypatch)
    with pytest.raises(StoreFullError, match="device tier must have memory for 2001 rows .* cache_budget_mb"):
        model.acquire([(0, i) for i in range(2, 2002)])
    assert len(model.tier) == 1 and model.tier.pinned == 1
    assert model.tier.row_SW[slot_U, :W].tolist() == [row_of(0, 1).tolist()]
    model.acquire([(0, i) for i in range(2, 200)])


def limit_memory(tier, slots, monkeypatch):
    """Let the device have memory for this many slots of the tier's."""
    enlarged = device_memory._enlarged

    def limited(array, size, device):
        if len(tier.row_SW) + size > slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return enlarged(array, size, device)

    monkeypatch.setattr(device_memory, "_enlarged", limited)


def test_a_slab_grows_by_way_of_the_host_where_the_device_has_no_room_for_both(tier, gpu, monkeypatch):
    model = Model(tier(), gpu)
    keys = [(0, i) for i in range(1000)]
    model.release(keys, model.acquire(keys))
    for memory, more, slots in [(2200, 1800, 2048), (2900, 2800, 2800)]:  # to twice as many, and to as many as needed
        limit_memory(model.tier, memory, monkeypatch)
        keys = [(0, i) for i in range(more)]
        slot_U = model.acquire(keys)
        assert len(model.tier.row_SW) == slots
        found = model.tier.row_SW[slot_U, :W].cpu().numpy()
        assert found.tolist() == [row_of(*key).tolist() for key in keys]
        model.release(keys, slot_U)
        monkeypatch.undo()
    assert len(model.begun) == 2800 and model.tier.pinned == 0


def test_a_tier_whose_index_has_lost_a_key_says_so_at_the_next_lookup(tier, gpu):
    model = Model(tier(), gpu)
    keys = model.distinct([(0, i) for i in range(5)])
    model.tier.acquire(keys)
    model.tier._index.inserted_2[1] = 1
    with pytest.raises(AssertionError, match="rows were lost"):
        model.tier.acquire(keys)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_cache_that_is_warmed_holds_the_rows_that_it_held_and_evicts_the_same_first(tier, gpu, policy):
    rng, below = np.random.default_rng(2), DictStore(W)
    table_N, id_N = keys_of((0, i) for i in range(90))
    below.put(table_N, id_N, np.stack([row_of(0, i) for i in range(90)]))
    models = [Model(tier(below, 40, policy=policy), gpu)]
    batches = [[(0, int(i)) for i in np.unique(rng.zipf(1.3, 12) % 90)] for _ in range(60)]
    for keys in batches[:40]:
        models[0].release(keys, models[0].acquire(keys))
    rows = models[0].tier.cached()
    assert len(rows.id_N) > 30 and (rows.score_N >= 0).all()
    models.append(Model(tier(below, 40, policy=policy), gpu))
    models[1].tier.warm(rows)
    models[1].tier.warm(rows)  # brings in nothing more
    again = models[1].tier.cached()
    assert dict(zip(again.id_N.tolist(), again.score_N.tolist(), strict=True)) == pytest.approx(
        dict(zip(rows.id_N.tolist(), rows.score_N.tolist(), strict=True)), rel=0.02, abs=0.02
    )
    stats = models[1].tier.stats()
    assert stats["misses"] == stats["pinned"] == stats["dirty"] == 0
    for keys in batches[40:]:
        for model in models:
            slot_U = model.acquire(keys)
            assert (model.tier.row_SW[slot_U, :W].cpu().numpy() == [row_of(*key) for key in keys]).all()
            model.release(keys, slot_U)
    stats = [model.tier.stats() for model in models]
    assert stats[1]["misses"] <= 1.2 * stats[0]["misses"]
    assert models[1].tier.check_slots() == [] and not models[1].begun
    smaller = tier(below, 10, policy=policy)
    smaller.warm(rows)
    order = np.argsort(rows.score_N if policy == "lru" else -rows.score_N, kind="stable")
    held = smaller.cached()
    assert len(held.id_N) == 10
    assert sorted(held.id_N.tolist()) == sorted(rows.hottest(10).id_N.tolist())
    bound = rows.score_N[order[9]]
    assert (held.score_N <= bound + 0.02).all() if policy == "lru" else (held.score_N >= bound - 0.02).all()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_cache_over_a_cache_is_warmed_as_both_were(tier, gpu, policy):
    def stack():
        host_cache = HotTier("host", row_width=W, slots=60, below=below, resident=False, threads=Threads(1),
                             policy=policy)  # fmt: skip
        return [tier(host_cache, 20, policy=policy), host_cache]

    rng, below = np.random.default_rng(3), DictStore(W)
    below.put(*keys_of((0, i) for i in range(90)), np.stack([row_of(0, i) for i in range(90)]))
    tiers = stack()
    model = Model(tiers[0], gpu)
    for _ in range(60):
        keys = [(0, int(i)) for i in np.unique(rng.zipf(1.3, 12) % 90)]
        model.release(keys, model.acquire(keys))
    lists = {one.name: one.cached() for one in tiers}
    again = stack()
    fill_caches(again, waiting := dict(lists))
    assert waiting == {}
    for one in again:
        held, was = one.cached(), lists[one.name]
        assert sorted(held.id_N.tolist()) == sorted(was.id_N.tolist())
        assert held.score_N[np.argsort(held.id_N)] == pytest.approx(was.score_N[np.argsort(was.id_N)], abs=0.02)
