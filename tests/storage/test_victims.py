"""The clock that chooses the rows that leave a cache, against a sort of all rows; and caches of many shards."""

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import SHARDS, HashIndex
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.victims import VictimClock, tie_numbers
from tests.support.keys import distinct

MANY = 200_000
"""Slots of a cache of which a round looks at a part."""

KEYS = 3 * MANY // 2


class Cached:
    """Keys of a cache that is full, with scores of which many are equal, and pins."""

    def __init__(self, slots, pinned=0.2, threads=1, seed=0):
        self.rng, self.slots = np.random.default_rng(seed), slots
        self.index = HashIndex(Threads(threads))
        self.table_N = self.rng.integers(0, 3, slots).astype(np.int32)
        self.id_N = self.rng.permutation(10 * slots)[:slots]
        self.slot_N = self.rng.permutation(slots)
        self.index.put(self.table_N, self.id_N, self.slot_N)
        self.tie_S = np.empty(slots, np.uint64)
        self.tie_S[self.slot_N] = tie_numbers(self.table_N, self.id_N)
        self.score_S = self.rng.integers(0, 50, slots) * 0.5
        self.pin_S = (self.rng.random(slots) < pinned).astype(np.int32) * 2
        self.clock = VictimClock(self.index, slots, Threads(threads))

    def choose(self, need):
        """Choose and erase; slots of the victims in their order."""
        table_V, id_V, slot_V = self.clock.choose(need, self.score_S, self.pin_S)
        assert (self.index.erase(table_V, id_V) == slot_V).all() and (self.pin_S[slot_V] == 0).all()
        return slot_V

    def shards(self):
        """The shard of the key in each slot."""
        shard_S = np.empty(self.slots, np.int64)
        shard_S[self.slot_N] = self.index.shards_of(self.table_N, self.id_N)
        return shard_S


@pytest.mark.parametrize("slots, need", [(1, 1), (50, 3), (1000, 1000), (30_000, 1), (30_000, 2500), (MANY, 13_000)])
def test_a_round_over_all_shards_takes_the_rows_of_least_score(slots, need):
    cached = Cached(slots)
    free = np.flatnonzero(cached.pin_S == 0)
    count = min(len(free), max(need, slots // 16))
    slot_V = cached.choose(need)
    least = free[np.lexsort((cached.tie_S[free], cached.score_S[free]))][:count]
    assert sorted(slot_V.tolist()) == sorted(least.tolist())
    assert (np.diff(cached.shards()[slot_V]) >= 0).all(), "victims are shard by shard"


def test_a_round_takes_the_rows_of_least_score_of_the_next_shards():
    cached = Cached(MANY)
    shard_S, here_S, first = cached.shards(), np.ones(MANY, np.bool_), 0
    for _ in range(20):
        slot_V = cached.choose(1000)
        end = min(SHARDS, first + -(-SHARDS * (1 << 15) // MANY))
        its = np.flatnonzero(here_S & (cached.pin_S == 0) & (shard_S >= first) & (shard_S < end))
        count = max(-(-1000 * (end - first) // -(-SHARDS * (1 << 15) // MANY)), MANY * (end - first) // (SHARDS * 16))
        assert sorted(slot_V.tolist()) == sorted(
            its[np.lexsort((cached.tie_S[its], cached.score_S[its]))][:count].tolist()
        )
        here_S[slot_V], first = False, end % SHARDS


@pytest.mark.parametrize("need", [1, 100, 5000])
def test_every_shard_gives_up_the_same_share_by_the_end_of_a_lap(need):
    cached = Cached(MANY, pinned=0)
    shard_S, left_P = cached.shards(), np.zeros(SHARDS)
    while (left_P == 0).any():
        slot_V = cached.choose(need)
        assert len(slot_V) <= max(2 * need, 1 << 12), "a round is bounded by what is needed"
        left_P += np.bincount(shard_S[slot_V], minlength=SHARDS)
    share_P = left_P / np.bincount(shard_S, minlength=SHARDS)
    assert 0.8 / 16 < share_P.mean() < 1.3 / 16 and share_P.max() < 2.5 / 16


def test_the_last_rows_that_are_not_pinned_are_found_and_then_none():
    cached = Cached(MANY, pinned=1)
    cached.pin_S[[5, 77_000, 199_999]] = 0
    found = {slot for _ in range(3) for slot in cached.choose(3).tolist()}
    assert found == {5, 77_000, 199_999} and len(cached.choose(1)) == 0


def test_the_rows_that_leave_do_not_depend_on_their_slots():
    one, other = Cached(MANY), Cached(MANY)
    slot_N = other.rng.permutation(MANY)
    for array in (other.score_S, other.pin_S):
        array[slot_N] = array[other.slot_N].copy()
    other.index.put(other.table_N, other.id_N, slot_N)
    for need in (1, 4000, 20, 12_000, 3):
        left = [cached.clock.choose(need, cached.score_S, cached.pin_S)[:2] for cached in (one, other)]
        assert np.array_equal(*(np.sort(table_V * (10 * MANY) + id_V) for table_V, id_V in left))
        for cached in (one, other):
            cached.index.erase(*left[0])


def test_the_rows_that_leave_do_not_depend_on_the_threads():
    one, three = Cached(MANY), Cached(MANY, threads=3)
    for need in (1, 4000, 20, 12_000, 3):
        assert one.choose(need).tolist() == three.choose(need).tolist()


# ---- in a cache ------------------------------------------------------------------------------------------------------


def filled(threads=1, slots=MANY, policy="lfu"):
    threads = Threads(threads)
    host = HotTier("host", row_width=2, slots=3 * slots, below=None, resident=True, threads=threads)
    tier = HotTier(
        "device", row_width=2, slots=slots, below=host, resident=False, threads=threads, init=begin, policy=policy
    )
    for first in range(0, slots, 20_000):
        tier.release(use(tier, np.arange(first, first + 20_000)))
    assert tier.stats()["evicted"] == 0
    return tier


def begin(row_SW, slot_M, table_M, id_M):
    row_SW[slot_M, 0], row_SW[slot_M, 1] = id_M, 0


def use(tier, id_U):
    slot_U = tier.acquire(distinct(np.zeros(len(id_U), np.int32), id_U))[0]
    assert (tier.row_SW[slot_U, 0] == id_U).all()
    return slot_U


@pytest.mark.parametrize("misses", [1, 500, 9000])
def test_a_miss_evicts_a_small_multiple_of_the_rows_that_it_needs(misses):
    tier = filled()
    for n in range(4):
        before = tier.stats()["evicted"]
        tier.release(use(tier, MANY + n * misses + np.arange(misses)))
        assert tier.stats()["evicted"] - before <= max(2 * misses, 1 << 12)
    assert not tier.check_slots()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_large_cache_holds_the_same_rows_on_every_number_of_threads(policy):
    tiers = [filled(threads, policy=policy) for threads in (1, 3)]
    rng, held, uses_K = np.random.default_rng(0), [[], []], np.zeros(KEYS)
    for _ in range(6):
        id_U = np.unique(rng.zipf(1.1, 12_000) % KEYS)
        uses_K[id_U] += 1
        for tier, its in zip(tiers, held, strict=True):
            slot_U = use(tier, id_U)
            tier.row_SW[slot_U, 1] += 1
            tier.mark_dirty(slot_U)
            its.append(slot_U)
            if len(its) > 2:
                tier.release(its.pop(0))
            assert tier.pinned == np.count_nonzero(tier.pin_S) and not tier.check_slots()
        assert tiers[0].index.find(*all_keys()).tolist() == tiers[1].index.find(*all_keys()).tolist()
    for tier in tiers:
        assert tier.stats()["evicted"] > 5000
        row_KW = np.zeros((KEYS, 2), np.float32)
        tier.get(*all_keys(), row_KW)
        assert (row_KW[:, 1] == uses_K).all()


def all_keys():
    return np.zeros(KEYS, np.int32), np.arange(KEYS)
