"""The hot tier against a dict: alone, as a cache, on a cache, on files; evicting, pinned, full, and over a store that
fails at any call."""

import math
import tempfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import IndexMemoryError, StorageError, StoreFullError
from oneemb.storage.remote.servers import MemoryServer
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.tiers import hot_tier
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.remote_tier import RemoteTier
from oneemb.storage.tiers.victims import tie_numbers
from tests.support.keys import distinct
from tests.support.resources import resident_bytes
from tests.support.row_store_suite import SUITE, DictStore, FailingStore, keys_of
from tests.support.table_model import check, got, note, put_random, random_rows, scanned

W = 5
THREADS = Threads(2)


def cache(below, slots, name="device", **options):
    return HotTier(name, row_width=W, slots=slots, below=below, resident=False, threads=THREADS, **options)


def resident(below=None, slots=3000, name="device", **options):
    return HotTier(name, row_width=W, slots=slots, below=below, resident=True, threads=THREADS, **options)


def remote(below=None, server=None):
    return RemoteTier(server or MemoryServer({}), "t", row_width=W, below=below, threads=THREADS)


def persistent(path):
    return PersistentTable.open(path, row_width=W, physical_block_size=512, chunk_bytes=64 * 512, threads=THREADS)


# ---- the conformance suite on every store and composition ------------------------------------------------------------

STORES = {
    "dict": lambda path: DictStore(W),
    "resident": lambda path: resident(),
    "resident over dict": lambda path: resident(DictStore(W)),
    "cache that holds all": lambda path: cache(DictStore(W), 3000),
    "cache over dict": lambda path: cache(DictStore(W), 40),
    "cache that evicts by age": lambda path: cache(DictStore(W), 40, policy="lru"),
    "cache of one slot": lambda path: cache(DictStore(W), 1),
    "cache over resident host": lambda path: cache(resident(name="host"), 40),
    "cache over host cache": lambda path: cache(cache(DictStore(W), 150, "host"), 40),
    "cache over smaller host cache": lambda path: cache(cache(DictStore(W), 20, "host"), 90),
    "persistent table": persistent,
    "cache over persistent table": lambda path: cache(persistent(path), 40),
    "cache over host cache over persistent table": lambda path: cache(cache(persistent(path), 150, "host"), 40),
    "resident over persistent table": lambda path: resident(persistent(path)),
    "remote": lambda path: remote(),
    "remote over dict": lambda path: remote(DictStore(W)),
    "cache over remote over persistent table": lambda path: cache(remote(persistent(path)), 40),
}


@pytest.mark.parametrize("check_store", SUITE, ids=lambda check_store: check_store.__name__)
@pytest.mark.parametrize("kind", STORES)
def test_a_store_keeps_the_contract(kind, check_store, tmp_path):
    opened = []

    def open_store():
        store = STORES[kind](tmp_path / str(len(opened)))
        opened.append(store)
        return store

    try:
        check_store(open_store)
    finally:
        for store in opened:
            store.close()
    if kind == "cache over dict" and check_store.__name__ == "many_calls_in_any_order_agree_with_a_dict":
        assert opened[0].stats()["evicted"] > 100


class _Saboteur(DictStore):
    """A store with one fault; the suite must find it."""

    def __init__(self, fault):
        super().__init__(W)
        self.fault = fault

    def get(self, table_U, id_U, out_UW, to_U=None):
        if self.fault == "get writes missing rows":
            out_UW[:] = 0
        if self.fault == "get passes over places":
            to_U = None
        missing_U = super().get(table_U, id_U, out_UW, to_U)
        if self.fault == "get quiets NaNs" and len(out_UW):
            bits_UW = out_UW.view(np.uint32)
            bits_UW[np.isnan(out_UW)] |= 0x00400000
        return missing_U

    def put(self, table_U, id_U, row_UW):
        if self.fault == "put loses the last row":
            table_U, id_U, row_UW = table_U[:-1], id_U[:-1], row_UW[:-1]
        if self.fault == "ids are 32 bits wide":
            id_U = id_U.astype(np.int32).astype(np.int64)
            _, first = np.unique(np.stack([table_U, id_U]), axis=1, return_index=True)
            table_U, id_U, row_UW = table_U[first], id_U[first], row_UW[first]
        if self.fault == "tables are mixed":
            table_U = np.zeros_like(table_U)
            _, first = np.unique(id_U, return_index=True)
            table_U, id_U, row_UW = table_U[first], id_U[first], row_UW[first]
        if self.fault == "put keeps the old row":
            new_U = ~self.contains(table_U, id_U)
            table_U, id_U, row_UW = table_U[new_U], id_U[new_U], row_UW[new_U]
        super().put(table_U, id_U, np.ascontiguousarray(row_UW))

    def scan(self, batch=65536):
        for part in super().scan(batch):
            yield part
            if self.fault == "scan repeats itself":
                yield part

    def clear(self):
        if self.fault != "clear does nothing":
            super().clear()

    def erase(self, table_U, id_U):
        erased_U = super().erase(table_U, id_U)
        if self.fault == "erase says what it was asked for":
            return np.ones(len(id_U), np.bool_)
        if self.fault == "erase takes other tables" and len(id_U):
            super().erase(1 - table_U, id_U)
        return erased_U

    def flush(self):
        if self.fault == "flush drops a row" and self.rows:
            self.rows.popitem()

    def __len__(self):
        return super().__len__() + (self.fault == "len is one too many")


FAULTS = [
    "get writes missing rows", "get quiets NaNs", "put loses the last row", "ids are 32 bits wide", "tables are mixed",
    "put keeps the old row", "scan repeats itself", "clear does nothing", "flush drops a row", "len is one too many",
    "erase says what it was asked for", "erase takes other tables", "get passes over places",
]  # fmt: skip


def faults_found(open_store):
    found = []
    for check_store in SUITE:
        try:
            check_store(open_store)
        except AssertionError:
            found.append(check_store.__name__)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_finds_a_faulty_store(fault):
    assert faults_found(lambda: _Saboteur(fault))
    assert not faults_found(lambda: _Saboteur(None))


@pytest.mark.parametrize("fault", ["get quiets NaNs", "put loses the last row", "put keeps the old row"])
def test_the_suite_finds_a_fault_through_a_cache(fault):
    assert faults_found(lambda: cache(_Saboteur(fault), 40))


def test_a_store_below_that_is_far_away_is_not_asked_what_nobody_has_to_know():
    class Remote(FailingStore):
        def __len__(self):
            raise AssertionError("counting may take long")

        def contains(self, table_U, id_U):
            raise AssertionError("a question for every put")

    below = Remote(DictStore(W))
    tier = cache(cache(below, 12, name="host"), 8)
    for n in range(0, 40, 4):
        tier.release(acquire(tier, ids(*range(n, n + 4))))
    tier.erase(*keys_of(ids(0, 39)))
    tier.flush()
    assert set(below.store.rows) == set(ids(*range(1, 39)))


@pytest.mark.parametrize("make", [lambda: resident(slots=9), lambda: cache(DictStore(W), 9)], ids=["all", "cache"])
def test_rows_in_use_are_not_erased(make):
    tier = make()
    slot_U = acquire(tier, ids(1, 2, 3))
    before = state(tier)
    with pytest.raises(StorageError, match="2 of the rows to erase are in use by a lookup"):
        tier.erase(*keys_of(ids(2, 3, 4)))
    assert state(tier) == before
    tier.release(slot_U)
    assert tier.erase(*keys_of(ids(2, 3, 4))).tolist() == [True, True, False]
    check(tier, rows_of(ids(1)))
    assert len(set(acquire(tier, ids(*range(1, 10))).tolist())) == 9, "their slots are used again"


def test_an_erasure_that_fails_below_changes_nothing():
    below = FailingStore(DictStore(W))
    tier = cache(below, 9)
    tier.release(acquire(tier, ids(1, 2, 3)))
    before = state(tier)
    below.fail_at = below.calls + 1
    with pytest.raises(OSError):
        tier.erase(*keys_of(ids(1, 2)))
    below.fail_at = None
    assert state(tier) == before


# ---- acquiring, evicting, pinning ------------------------------------------------------------------------------------


def initial_row(table, id):
    """The row that `begin` gives a key: a function of the key."""
    return np.array([table, id % 2**31, id >> 31, 7, -0.0], np.int64).astype(np.float32)


def beginner(begun=None):
    def begin(row_SW, slot_M, table_M, id_M):
        for slot, table, id in zip(slot_M.tolist(), table_M.tolist(), id_M.tolist(), strict=True):
            row_SW[slot] = initial_row(table, id)
            if begun is not None:
                begun.append((table, id))

    return begin


def acquire(tier, keys, begun=None):
    tier.init_rows = beginner(begun)
    return tier.acquire(distinct(*keys_of(keys)))[0]


def rows_of(keys):
    return {key: initial_row(*key).tobytes() for key in keys}


def ids(*numbers):
    return [(0, n) for n in numbers]


def test_new_rows_are_begun_once_and_found_again():
    tier, begun = resident(slots=10), []
    slots = acquire(tier, ids(1, 2, 3), begun)
    again = acquire(tier, ids(3, 4, 1), begun)
    assert begun == ids(1, 2, 3, 4)
    assert again.tolist()[::2] == [slots[2], slots[0]]
    assert tier.pinned == 4 and tier.stats()["new_rows"] == 4
    check(tier, rows_of(ids(1, 2, 3, 4)))


def test_evicted_dirty_row_is_read_back_bit_for_bit():
    rng, below = np.random.default_rng(0), DictStore(W)
    tier = cache(below, 4)
    slot_U = acquire(tier, ids(1, 2))
    tier.row_SW[slot_U] = row_UW = random_rows(rng, 2, W)
    tier.mark_dirty(slot_U)
    tier.release(slot_U)
    for n in range(10, 30, 4):
        tier.release(acquire(tier, ids(*range(n, n + 4))))
    assert set(ids(1, 2)) <= set(below.rows) and tier.stats()["evicted"] >= 16
    slot_U = acquire(tier, ids(2, 1))
    assert tier.row_SW[slot_U].tobytes() == row_UW[::-1].tobytes()


def test_evicted_clean_rows_are_not_written_again():
    below = FailingStore(DictStore(W))
    tier = cache(below, 4)
    tier.release(acquire(tier, ids(1, 2, 3, 4)))
    tier.flush()
    written = tier.stats()["written_down"]
    for n in range(20):
        tier.get(*keys_of(ids(1 + n % 4)), np.empty((1, W), np.float32))
        tier.release(acquire(tier, ids(100)))
    tier.release(acquire(tier, ids(1, 2, 3, 4)))
    assert tier.stats()["written_down"] - written == 1 and below.store.rows[0, 100] == initial_row(0, 100).tobytes()


def test_the_least_recently_used_row_is_evicted():
    below = FailingStore(DictStore(W))
    tier = cache(below, 4, policy="lru")
    for key in (1, 2, 3, 4, 1):
        tier.release(acquire(tier, ids(key)))
    tier.release(acquire(tier, ids(5)))  # takes the slot of 2
    below.fail_at = below.calls + 1  # from here on, a miss would ask the store below
    tier.release(acquire(tier, ids(1, 3, 4, 5)))
    with pytest.raises(OSError):
        acquire(tier, ids(2))


class PolicyModel:
    """Which rows a cache with a policy holds, from the definitions: every use of every row is kept, with its time."""

    def __init__(self, slots, policy):
        self.slots, self.policy = slots, policy
        self.uses, self.time = {}, 0.0

    def score(self, key):
        ages = [(self.time - time) / (8 * self.slots) for time in self.uses[key]]
        return -min(ages) if self.policy == "lru" else math.fsum(2.0**-age for age in ages)

    def use(self, keys):
        for key in keys:
            self.uses.setdefault(key, []).append(self.time)
        self.time += len(keys)

    def acquire(self, keys, pinned):
        """Returns the keys that leave."""
        hits = [key for key in keys if key in self.uses]
        misses = [key for key in keys if key not in self.uses]
        short = len(misses) - (self.slots - len(self.uses))
        leaving = []
        if short > 0:
            evictable = list(self.uses.keys() - pinned - set(hits))
            tie = dict(zip(evictable, tie_numbers(*keys_of(evictable)).tolist(), strict=True))
            least_first = sorted(evictable, key=lambda key: (round(self.score(key), 9), tie[key]))
            leaving = least_first[: max(short, self.slots // 16)]
            for key in leaving:
                del self.uses[key]
        self.use(misses)
        self.use(hits)
        return leaving


def zipf_keys(rng, size, ids):
    """Distinct keys of ids that Zipf's law (1.05) gives `size` draws."""
    weight_V = np.arange(1, ids + 1) ** -1.05
    return [(0, int(id)) for id in np.unique(rng.choice(ids, size, p=weight_V / weight_V.sum()))]


@pytest.mark.parametrize("step", [2.0**500, 2.0**3], ids=["scores as they are", "scores brought down often"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_rows_that_leave_are_those_the_policy_says(policy, step, monkeypatch):
    monkeypatch.setattr("oneemb.storage.tiers.hot_tier._SCORE_STEP", step)
    rng, left = np.random.default_rng(0), 0
    tier, model = cache(DictStore(W), 48, policy=policy), PolicyModel(48, policy)
    held = []
    for _ in range(400):
        keys = zipf_keys(rng, int(rng.integers(1, 9)), 300)
        rng.shuffle(keys)
        slot_U = acquire(tier, keys)
        left += len(model.acquire(keys, {key for other, _ in held for key in other}))
        here = tier.index.find(*keys_of(ids(*range(300)))) >= 0
        assert np.flatnonzero(here).tolist() == sorted(id for _, id in model.uses)
        held.append((keys, slot_U))
        while held and (len(held) > 3 or rng.random() < 0.5):
            tier.release(held.pop(0)[1])
    assert left == tier.stats()["evicted"] > 200


def test_the_model_tells_the_policies_apart():
    rng, models = np.random.default_rng(0), [PolicyModel(48, "lru"), PolicyModel(48, "lfu")]
    for _ in range(100):
        keys = zipf_keys(rng, 8, 300)
        for model in models:
            model.acquire(keys, set())
    assert models[0].uses.keys() != models[1].uses.keys()


def test_lfu_misses_less_than_lru_on_zipfs_law():
    misses = {}
    for policy in ("lru", "lfu"):
        rng, tier = np.random.default_rng(0), cache(DictStore(W), 500, policy=policy)
        for step in range(300):
            tier.release(acquire(tier, zipf_keys(rng, 128, 20_000)))
            if step == 100:
                before = tier.stats()["misses"]
        misses[policy] = tier.stats()["misses"] - before
    assert misses["lfu"] < 0.9 * misses["lru"]


def test_rows_used_once_push_out_no_row_that_is_used_often():
    tier = cache(DictStore(W), 64)
    often = ids(*range(20))
    for _ in range(10):
        tier.release(acquire(tier, often))
    for begin in range(100, 300, 10):
        tier.release(acquire(tier, ids(*range(begin, begin + 10))))
    assert (tier.index.find(*keys_of(often)) >= 0).all()


def test_rows_that_were_frequent_leave_when_others_are():
    tier = cache(DictStore(W), 64)
    for _ in range(500):
        tier.release(acquire(tier, ids(*range(40))))
    rng = np.random.default_rng(0)
    for _ in range(800):
        tier.release(acquire(tier, ids(*(100 + rng.permutation(60)[:20]).tolist())))
    misses = tier.stats()["misses"]
    tier.release(acquire(tier, ids(*range(100, 160))))
    assert tier.stats()["misses"] - misses < 5


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_scores_stay_numbers_however_long_a_cache_is_used(policy):
    tier = cache(DictStore(W), 2, policy=policy)
    for n in range(600):
        if policy == "lfu" and n % 150 == 0:
            tier.use_score *= 2.0**490  # What 490 half-lives, nearly 4,000 more calls, would make it.
        tier.release(acquire(tier, ids(n % 3, 3)))
    assert np.isfinite(tier.score_S).all() and 0 < tier.use_score < 2.0**501
    assert 3 in {id for _, id in (key for key in ids(0, 1, 2, 3) if tier.index.find(*keys_of([key]))[0] >= 0)}


def test_pinned_rows_are_neither_evicted_nor_moved():
    rng, tier = np.random.default_rng(0), cache(DictStore(W), 8)
    slot_U = acquire(tier, ids(1, 2, 3))
    for n in range(50):
        tier.row_SW[slot_U] = row_UW = random_rows(rng, 3, W)
        tier.release(acquire(tier, ids(*range(10 + 5 * n, 15 + 5 * n))))
        out_UW = np.empty((20, W), np.float32)
        tier.get(*keys_of(ids(*range(20, 40))), out_UW)
        assert tier.row_SW[slot_U].tobytes() == row_UW.tobytes()
        assert acquire(tier, ids(1, 2, 3)).tolist() == slot_U.tolist()
        tier.release(slot_U)
    assert tier.pinned == 3


def test_a_row_pinned_twice_stays_until_it_is_released_twice():
    tier = cache(DictStore(W), 2)
    slot_U = acquire(tier, ids(1))
    acquire(tier, ids(1))
    tier.release(slot_U)
    with pytest.raises(StoreFullError):
        acquire(tier, ids(2, 3))
    tier.release(slot_U)
    assert len(acquire(tier, ids(2, 3))) == 2


@pytest.mark.parametrize("slots", [1, 2, 3, 16, 33])
def test_a_cache_takes_as_many_rows_at_once_as_it_has_slots(slots):
    tier = cache(DictStore(W), slots)
    for begin in (0, 1, slots, slots // 2):
        keys = ids(*range(begin, begin + slots))
        slot_U = acquire(tier, keys)
        assert sorted(slot_U.tolist()) == list(range(slots))
        assert [tier.row_SW[slot].tobytes() for slot in slot_U] == list(rows_of(keys).values())
        tier.release(slot_U)


def test_get_and_contains_insert_nothing():
    tier = cache(DictStore(W), 4)
    assert got(tier, ids(1, 2)) == [None, None] and not tier.contains(*keys_of(ids(1, 2))).any()
    assert len(tier) == 0 and tier.stats()["rows"] == 0


# ---- full -----------------------------------------------------------------------------------------------------------


def state(tier):
    """Everything about a tier that a failed call must leave as it was."""
    stats = {name: tier.stats()[name] for name in ("rows", "slots", "pinned", "new_rows")}
    return stats, len(tier), scanned(tier), tier.pin_S.tolist()


def check_refused(tier, keys, match):
    before = state(tier)
    with pytest.raises(StoreFullError, match=match):
        acquire(tier, keys)
    assert state(tier) == before


def test_a_cache_full_of_pins_names_the_size_that_works():
    tier = cache(DictStore(W), 4)
    held = acquire(tier, ids(1, 2, 3))
    check_refused(
        tier,
        ids(2, 3, 4, 5),
        "device tier has 4 slots; 3 of them are in use by this step and 2 more .* 5 in all.* 1 MiB",
    )
    assert acquire(tier, ids(2, 3, 4)).tolist()[:2] == held.tolist()[1:]


def test_more_rows_than_a_cache_has_slots_are_refused():
    tier = cache(DictStore(W), 4)
    check_refused(tier, ids(*range(5)), "4 slots; 0 of them .* 5 more rows were asked for")
    tier.release(acquire(tier, ids(1, 2, 3, 4)))
    check_refused(tier, ids(*range(5)), "4 slots")
    check(tier, rows_of(ids(1, 2, 3, 4)))


def test_a_full_resident_tier_refuses_new_rows_and_keeps_serving_old_ones():
    tier = resident(slots=3)
    tier.release(acquire(tier, ids(1, 2)))
    check_refused(tier, ids(2, 3, 4), "3 slots; 2 of them are taken and 2 more")
    tier.release(acquire(tier, ids(2, 3)))
    check_refused(tier, ids(4), "3 slots")
    before = state(tier)
    with pytest.raises(StoreFullError):
        tier.put(*keys_of(ids(1, 4)), np.ones((2, W), np.float32))
    assert state(tier) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: resident(slots=5, row_limit=5),
        lambda: resident(slots=50, row_limit=5),
        lambda: cache(DictStore(W), 50, row_limit=5),
        lambda: cache(DictStore(W), 3, row_limit=5),
        lambda: cache(cache(DictStore(W), 2, "host"), 3, row_limit=5),
    ],
    ids=["resident, as many slots", "resident", "cache", "small cache", "small cache over cache"],
)
def test_capacity_counts_every_row_known_wherever_it_is(make):
    tier = make()
    tier.release(acquire(tier, [(0, 1), (1, 1), (0, 3)]))
    tier.put(*keys_of([(2, 4)]), np.full((1, W), 2, np.float32))
    full = r"capacity is 5 rows; 4 are kept and 2 new ones .* \(the first of table 3\).*at least 6 rows, or None"
    check_refused(tier, [(0, 1), (3, 1), (4, 1)], full)
    tier.release(acquire(tier, [(3, 1)]))
    tier.release(acquire(tier, [(0, 1), (2, 4), (3, 1)]))
    check_refused(tier, [(0, 1), (9, 9)], "capacity is 5 rows; 5 are kept and 1 new")
    with pytest.raises(StoreFullError, match="capacity"):
        tier.put(*keys_of([(9, 9)]), np.ones((1, W), np.float32))
    assert len(tier) == 5
    tier.clear()
    acquire(tier, ids(7, 8))


def test_a_beginning_that_fails_changes_nothing():
    for make in (lambda: resident(slots=9), lambda: cache(DictStore(W), 9)):
        tier = make()
        tier.release(acquire(tier, ids(1, 2, 3, 4)))
        before = state(tier)

        def begin(row_SW, slot_M, table_M, id_M):
            raise KeyboardInterrupt

        tier.init_rows = begin
        for _ in range(20):  # A slot lost each time would show.
            with pytest.raises(KeyboardInterrupt):
                tier.acquire(distinct(*keys_of(ids(1, 5, 6))))
            assert state(tier) == before
        assert len(acquire(tier, ids(*range(11, 20)) if tier.name != "device" else ids(5, 6, 7, 8, 9))) == 5
        check(tier, rows_of(ids(1, 2, 3, 4, 5, 6, 7, 8, 9)))


def test_no_memory_for_the_index_changes_nothing(monkeypatch):
    tier = cache(DictStore(W), 500)
    tier.release(acquire(tier, ids(*range(40))))
    before = state(tier)

    def no_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("oneemb.storage.hash_index.np.zeros", no_memory)
        with pytest.raises(MemoryError):
            acquire(tier, ids(*range(30, 300)))
        assert state(tier) == before
    with monkeypatch.context() as patch:
        patch.setattr("oneemb.storage.hash_index._new_cells", no_memory)
        with pytest.raises(IndexMemoryError, match=r"holds 40 keys in \d+ bytes and must allocate \d+ more"):
            acquire(tier, ids(*range(30, 490)))
        assert state(tier) == before
    tier.release(acquire(tier, ids(*range(30, 300))))
    check(tier, rows_of(ids(*range(300))))


# ---- loading and clearing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [resident, lambda below: cache(below, 7)], ids=["resident", "cache"])
def test_a_reloaded_tier_holds_what_the_store_below_holds(make):
    rng, below, rows = np.random.default_rng(0), DictStore(W), {}
    tier = make(below)
    acquire(tier, ids(1, 2, 3))
    put_random(below, rows, rng, 100)
    tier.reload()
    check(tier, rows)
    assert tier.pinned == 0 and tier.stats()["dirty"] == 0
    put_random(tier, rows, rng, 60)
    tier.flush()
    assert below.rows == rows


@pytest.mark.parametrize("make", [resident, lambda below: cache(below, 7)], ids=["resident", "cache"])
def test_a_tier_that_is_made_over_rows_knows_them_once_it_is_loaded(make):
    rng, below, rows = np.random.default_rng(0), DictStore(W), {}
    put_random(below, rows, rng, 30)
    tier = make(below)
    tier.reload()
    check(tier, rows)


def test_a_flush_writes_dirty_rows_once():
    rng, below, rows = np.random.default_rng(0), DictStore(W), {}
    tier = resident(below)
    put_random(tier, rows, rng, 100)
    tier.flush()
    assert below.rows == rows and tier.stats()["written_down"] == 100
    tier.flush()
    assert tier.stats()["written_down"] == 100
    slot_U = acquire(tier, list(rows)[:3])
    tier.row_SW[slot_U] = 5
    tier.mark_dirty(slot_U)
    note(rows, *keys_of(list(rows)[:3]), np.full((3, W), 5, np.float32))
    tier.flush()
    assert below.rows == rows and tier.stats()["written_down"] == 103


def test_a_reload_that_fails_leaves_no_part_of_the_rows():
    class Broken(DictStore):
        def scan(self, batch=65536):
            yield next(super().scan(3))
            raise OSError("a block is damaged")

    rng, below = np.random.default_rng(0), Broken(W)
    put_random(below, {}, rng, 10)
    tier = resident(below)
    acquire(tier, ids(1, 2))
    with pytest.raises(OSError, match="damaged"):
        tier.reload()
    check(tier, {})
    assert tier.pinned == 0


def test_check_holds_says_what_a_snapshot_needs():
    resident(slots=10).check_holds(10)
    cache(DictStore(W), 2).check_holds(10**9)
    with pytest.raises(StoreFullError, match="10 slots and must hold all of 11 rows"):
        resident(slots=10).check_holds(11)
    with pytest.raises(StoreFullError, match="capacity is 10 rows, 11 are to be loaded"):
        cache(DictStore(W), 2, row_limit=10).check_holds(11)


# ---- a store below that fails ----------------------------------------------------------------------------------------


class FailingServer(MemoryServer):
    """Raises at the n-th call from now on, of which a push keeps the first half if `half`; see `FailingStore`."""

    def __init__(self, half):
        super().__init__({})
        self.half, self.calls, self.fail_at, self.store = half, 0, None, None

    def pull(self, table, id_N, widths):
        self._count()
        return super().pull(table, id_N, widths)

    def push(self, table, id_N, parts):
        size = len(id_N)
        if self.half and self.calls + 1 == self.fail_at:
            size = -(-size // 2)
            super().push(table, id_N[:size], [part[:size] for part in parts])
        self._count()
        super().push(table, id_N, parts)

    def _count(self):
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError("the server has failed")


def failing_compositions(half):
    def over(make):
        below = FailingStore(DictStore(W), half)
        return make(below), below

    def between():
        below = FailingStore(cache(DictStore(W), 6, "host"), half)
        return cache(below, 4), below

    def server():
        below = FailingServer(half)
        below.store = remote(server=below)
        return cache(below.store, 4), below

    return {
        "cache over remote whose server fails": server,
        "cache": lambda: over(lambda below: cache(below, 4)),
        "cache with a limit": lambda: over(lambda below: cache(below, 4, row_limit=14)),
        "cache over cache": lambda: over(lambda below: cache(cache(below, 6, "host"), 4)),
        "failure between caches": between,
        "resident": lambda: over(lambda below: resident(below, slots=40)),
        "cache over remote": lambda: over(lambda below: cache(remote(below), 4)),
    }


def play(tier, attempt):
    """A fixed scene of every call; `attempt(call)` makes each. The rows that must be there at its end."""
    rng, rows = np.random.default_rng(3), {}

    def train(*numbers):
        slot_U = attempt(lambda: acquire(tier, ids(*numbers)))
        tier.row_SW[slot_U] = row_UW = random_rows(rng, len(numbers), W)
        tier.mark_dirty(slot_U)
        tier.release(slot_U)
        note(rows, *keys_of(ids(*numbers)), row_UW)

    def store(*numbers):
        row_UW = random_rows(rng, len(numbers), W)
        attempt(lambda: tier.put(*keys_of(ids(*numbers)), row_UW))
        note(rows, *keys_of(ids(*numbers)), row_UW)

    def read(*numbers):
        expected = [rows.get(key) for key in ids(*numbers)]
        assert attempt(lambda: got(tier, ids(*numbers))) == expected

    train(1, 2, 3)
    train(3, 4, 5, 6)
    store(1, 7, 8, 9, 10)
    read(1, 2, 3, 4, 5, 99)
    train(2, 9, 11)
    attempt(tier.flush)
    store(5, 12)
    read(12, 11, 10, 9, 8)
    train(1, 5, 8, 13)
    assert attempt(lambda: tier.contains(*keys_of(ids(1, 14)))).tolist() == [True, False]
    assert attempt(lambda: scanned(tier, 3)) == rows
    return rows


@pytest.mark.parametrize("half", [False, True], ids=["whole call fails", "half of a put is kept"])
@pytest.mark.parametrize("kind", failing_compositions(False))
def test_a_failing_store_below_loses_nothing(kind, half):
    tier, below = failing_compositions(half)[kind]()
    rows, calls = play(tier, lambda call: call()), below.calls
    check(tier, rows)
    assert calls >= (15 if kind not in ("resident", "cache over remote") else 2)
    for n in range(1, calls + 1):
        tier, below = failing_compositions(half)[kind]()
        below.fail_at = n
        failures = []

        def attempt(call, tier=tier, failures=failures):
            pins = tier.pin_S.tolist()
            try:
                return call()
            except OSError as error:
                failures.append(error)
                assert tier.pin_S.tolist() == pins
                return call()  # The store below works again: so does the call.

        rows = play(tier, attempt)
        check(tier, rows)
        tier.flush()
        assert len(failures) == 1 and scanned(below.store) == rows and len(tier) == len(rows) == 13


def test_the_scene_notices_a_store_that_drops_rows():
    class Dropping(DictStore):
        def put(self, table_U, id_U, row_UW):
            super().put(table_U[1:], id_U[1:], row_UW[1:])

    with pytest.raises(AssertionError):
        tier = cache(Dropping(W), 4)
        check(tier, play(tier, lambda call: call()))


# ---- any calls in any order ------------------------------------------------------------------------------------------

_KEYS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 11) | st.sampled_from([-1, 2**63 - 1, -(2**63)])),
    max_size=9,
    unique=True,
)


class TierMachine(RuleBasedStateMachine):
    """Compares a tier with a dict. `rows` holds what each known key's row must be."""

    SLOTS, LIMIT = 8, 14

    @initialize(
        kind=st.sampled_from(["resident", "cache", "limited", "host between", "host holds all"]), half=st.booleans()
    )
    def start(self, kind, half):
        self.folder = tempfile.TemporaryDirectory() if kind == "persistent" else None
        self.below = FailingStore(persistent(self.folder.name) if self.folder else DictStore(W), half)
        self.limit = self.slots = None
        if kind == "resident":
            self.tier, self.slots = resident(self.below, slots=20), None
        elif kind == "limited":
            self.tier = cache(self.below, self.SLOTS, row_limit=self.LIMIT, reads_ahead=True)
            self.slots = self.SLOTS
            self.limit = self.LIMIT
        else:
            between = {
                "cache": self.below,
                "persistent": cache(self.below, 5, "host"),
                "host between": cache(self.below, 5, "host"),
                "host holds all": resident(self.below, 100, "host"),
            }[kind]
            self.tier, self.slots = cache(between, self.SLOTS, reads_ahead=True), self.SLOTS
        self.capacity = 20 if kind == "resident" else self.limit
        self.rows, self.leases, self.aheads, self.count = {}, [], [], 0

    def fits(self, keys):
        if self.capacity is not None and len(self.rows.keys() | set(keys)) > self.capacity:
            return False
        return self.slots is None or len({key for lease, _ in self.leases for key in lease} | set(keys)) <= self.slots

    def attempt(self, call, *args):
        """Make a call; when the store below fails, make it again."""
        pins = self.tier.pin_S.tolist()
        try:
            return call(*args)
        except OSError:
            self.below.fail_at = None
            assert self.tier.pin_S.tolist() == pins
            return call(*args)

    @rule(keys=_KEYS)
    def acquire(self, keys):
        if not self.fits(keys):
            before = self.tier.pinned, self.known()
            with pytest.raises(StoreFullError):
                self.attempt(acquire, self.tier, keys)
            assert (self.tier.pinned, self.known()) == before
            return
        slot_U = self.attempt(acquire, self.tier, keys)
        for key in keys:
            self.rows.setdefault(key, initial_row(*key).tobytes())
        self.leases.append((keys, slot_U))

    @rule(keys=_KEYS)
    def prefetch(self, keys):
        """Pin what is here and bring what is below, as far as there is room; begin nothing."""
        slot_U, known, away = self.tier.pin_resident(distinct(*keys_of(keys)))
        assert away.tolist() == np.flatnonzero(slot_U < 0).tolist()
        self.leases.append(([key for key, slot in zip(keys, slot_U, strict=True) if slot >= 0], slot_U[slot_U >= 0]))
        some = [keys[n] for n in away]
        try:
            brought = self.attempt(self.tier.bring_known, known, slot_U, away)
        except StoreFullError:
            return
        slot_M = slot_U[away]
        assert [slot >= 0 for slot in slot_M] == [key in self.rows for key in some]
        assert brought == np.count_nonzero(slot_M >= 0)
        self.leases.append(([key for key in some if key in self.rows], slot_M[slot_M >= 0]))

    @rule(keys=_KEYS)
    def read_ahead(self, keys):
        """Read rows below, to be brought in later, whatever has become of them by then."""
        slot_U, known, away = self.tier.pin_resident(distinct(*keys_of(keys)))
        self.tier.release(slot_U)
        ahead = self.tier.rows_ahead(known, away)
        if ahead is not None:
            self.attempt(ahead.read)
            self.aheads.append((keys, known, away, ahead))

    @precondition(lambda self: self.aheads)
    @rule(data=st.data())
    def bring(self, data):
        keys, known, away, ahead = self.aheads.pop(data.draw(st.integers(0, len(self.aheads) - 1)))
        away = away[self.tier.slots_of(known.table_U[away], known.id_U[away]) < 0]
        slot_U = np.full(len(keys), -1)
        try:
            self.attempt(self.tier.bring_known, known, slot_U, away, ahead)
        except StoreFullError:
            return
        some = [keys[n] for n in away]
        assert [slot >= 0 for slot in slot_U[away]] == [key in self.rows for key in some]
        self.leases.append(([key for key in some if key in self.rows], slot_U[slot_U >= 0]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        _, slot_U = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.tier.release(slot_U)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def update(self, data):
        keys, slot_U = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        self.tier.row_SW[slot_U] = row_UW = self.new_rows(len(keys))
        self.tier.mark_dirty(slot_U)
        note(self.rows, *keys_of(keys), row_UW)

    @rule(keys=_KEYS)
    def put(self, keys):
        if self.capacity is not None and len(self.rows.keys() | set(keys)) > self.capacity:
            with pytest.raises(StoreFullError):
                self.attempt(self.tier.put, *keys_of(keys), self.new_rows(len(keys)))
            return
        row_UW = self.new_rows(len(keys))
        self.attempt(self.tier.put, *keys_of(keys), row_UW)
        note(self.rows, *keys_of(keys), row_UW)

    @rule(keys=_KEYS)
    def erase(self, keys):
        held = {key for some, _ in self.leases for key in some}
        if held & set(keys):
            with pytest.raises(StorageError):
                self.attempt(self.tier.erase, *keys_of(keys))
            return
        assert self.attempt(self.tier.erase, *keys_of(keys)).tolist() == [key in self.rows for key in keys]
        for key in keys:
            self.rows.pop(key, None)

    @rule(keys=_KEYS)
    def get(self, keys):
        assert self.attempt(got, self.tier, keys) == [self.rows.get(key) for key in keys]

    @rule(keys=_KEYS)
    def contains(self, keys):
        assert self.attempt(self.tier.contains, *keys_of(keys)).tolist() == [key in self.rows for key in keys]

    @rule()
    def flush(self):
        self.attempt(self.tier.flush)
        assert scanned(self.below.store) == self.rows

    @rule(batch=st.sampled_from([1, 3, 100]))
    def scan(self, batch):
        assert self.attempt(scanned, self.tier, batch) == self.rows

    @rule()
    def clear(self):
        self.attempt(self.tier.clear)
        self.rows.clear()
        self.leases.clear()
        self.aheads.clear()

    @rule()
    def flush_and_reload(self):
        self.attempt(self.tier.flush)
        self.below.fail_at = None
        for tier in (self.tier._below, self.tier):
            if isinstance(tier, HotTier):
                tier.reload()
        self.leases.clear()
        self.aheads.clear()

    @rule(n=st.integers(1, 4))
    def let_a_call_below_fail(self, n):
        self.below.fail_at = self.below.calls + n

    def new_rows(self, size):
        self.count += 1
        return random_rows(np.random.default_rng(self.count), size, W)

    def known(self):
        """How many rows the tier knows of. It may ask the store below, which fails in calls of rules alone."""
        calls, fail_at = self.below.calls, self.below.fail_at
        self.below.fail_at = None
        try:
            return len(self.tier)
        finally:
            self.below.calls, self.below.fail_at = calls, fail_at

    @invariant()
    def rows_and_pins_are_where_they_should_be(self):
        if not hasattr(self, "tier"):
            return
        assert self.known() == len(self.rows)
        pins = Counter()
        for keys, slot_U in self.leases:
            pins.update(slot_U.tolist())
            assert [self.tier.row_SW[slot].tobytes() for slot in slot_U] == [self.rows[key] for key in keys]
        assert self.tier.pinned == len(pins)

    def teardown(self):
        if hasattr(self, "tier"):
            self.below.fail_at = None
            check(self.tier, self.rows)
            self.tier.flush()
            assert scanned(self.below.store) == self.rows
            self.tier.close()
            self.below.close()
            if self.folder:
                self.folder.cleanup()


def test_any_calls_in_any_order_agree_with_a_dict():
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=80, stateful_step_count=30))


@pytest.mark.slow
def test_any_calls_in_any_order_agree_with_a_dict_at_length():
    run_state_machine_as_test(
        TierMachine, settings=settings(max_examples=3000, stateful_step_count=60, derandomize=False)
    )


def test_the_machine_finds_an_eviction_of_pinned_rows():
    class Careless(HotTier):
        def release(self, slot_U):
            self.pin_S[slot_U] = 0

    class Machine(TierMachine):
        def start(self, kind, half):
            super().start(kind, half)
            self.tier.__class__ = Careless

    Machine.start = initialize(kind=st.just("cache"), half=st.just(False))(Machine.start)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=300, stateful_step_count=30, phases=[Phase.generate])
        )


@pytest.mark.parametrize("row_width", [1, 3, 16, 33, 1000])
def test_rows_of_one_width_lie_a_whole_number_of_rows_apart_and_cost_no_memory_unused(row_width):
    taken = []
    for _ in range(3):  # the kernel may meanwhile give whole huge pages to arrays of others that are used in part
        before = resident_bytes()
        tiers = [
            HotTier("device", row_width=row_width, slots=slots, below=None, resident=True, threads=THREADS)
            for slots in (1, 7, 2**27 // row_width)
        ]
        taken.append(resident_bytes() - before)
    assert min(taken) < 2**26
    for tier in tiers:
        tier.check_holds(tier.slots)
        assert tier.row_SW.shape == (tier.slots, row_width) and tier.row_SW.flags.c_contiguous
        assert tier.row_SW.ctypes.data % (row_width * 4) == 0
        tier.row_SW[-1] = 1.0  # the last slot too is the tier's own memory


def test_rows_that_could_not_be_copied_in_lose_no_slot(monkeypatch):
    def no_memory(*arguments, **options):
        raise MemoryError

    tier = HotTier("device", row_width=3, slots=100, below=None, resident=True, threads=Threads(1))
    its = (*keys_of([(0, 1), (0, 2)]), np.ones((2, 3), np.float32))
    monkeypatch.setattr(hot_tier, "copy_rows", no_memory)
    with pytest.raises(MemoryError):
        tier.put(*its)
    assert tier.check_slots() == [] and len(tier) == 0
    monkeypatch.undo()
    tier.put(*its)
    assert tier.check_slots() == [] and len(tier) == 2
