"""Uses of rows in batches that a loop has read ahead, and what a cache evicts then."""

import random

import numpy as np
import pytest

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.storage.tiers.coming_uses import NO_USE, ComingUses
from oneemb.storage.tiers.hot_tier import HotTier

THREADS = Threads(1)
BACKEND = HostBackend(THREADS)


class EveryRow:
    """A store below that has every row, and counts those that are read."""

    row_width = 2

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 1 << 20

    def get(self, table_U, id_U, out_XW, to_U=None):
        self.read += len(id_U)
        out_XW[np.arange(len(id_U)) if to_U is None else to_U] = id_U[:, None]
        return np.zeros(len(id_U), np.bool_)

    def put(self, table_U, id_U, row_UW):
        raise AssertionError("no row is dirty")

    def contains(self, table_U, id_U):
        return np.ones(len(id_U), np.bool_)


def arrays(ids, table=0):
    return np.full(len(ids), table, np.int32), np.array(ids, np.int64)


def batches_of(count, size, ids, seed):
    draw = random.Random(seed)
    return [draw.sample(range(ids), size) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [1, 3, 40])
def test_the_next_use_of_each_key_is_the_next_batch_of_the_window_that_has_it(ahead, seed):
    batches = batches_of(40, 30, 100, seed)
    coming, added = ComingUses(THREADS), 0
    for n, batch in enumerate(batches):
        while added < min(len(batches), n + 1 + ahead):
            first = coming.add(*arrays(batches[added]))
            window = {id for one in batches[n:added] for id in one}
            assert [batches[added][i] for i in first] == [id for id in batches[added] if id not in window]
            added += 1
        table_U, id_U, next_U = coming.reach(n + 1)
        assert id_U.tolist() == batch and table_U.tolist() == [0] * len(batch)
        known = batches[n + 1 : added]
        expected = [next((n + 2 + k for k, one in enumerate(known) if id in one), NO_USE) for id in batch]
        assert next_U.tolist() == expected
    assert coming.reach(10**6) is None


def test_a_key_that_a_batch_has_twice_gets_the_next_use_of_its_last_place():
    coming = ComingUses(THREADS)
    coming.add(*arrays([7, 8, 7]))
    coming.add(*arrays([7]))
    _, id_U, next_U = coming.reach(1)
    assert dict(zip(id_U.tolist(), next_U.tolist(), strict=True)) == {7: 2, 8: NO_USE}


def test_equal_ids_of_two_tables_are_two_keys():
    coming = ComingUses(THREADS)
    coming.add(*arrays([5], table=0))
    assert coming.add(*arrays([5], table=1)).tolist() == [0]
    assert coming.reach(1)[2].tolist() == [NO_USE]


def test_batches_that_are_forgotten_are_never_reached_and_leave_no_use():
    coming = ComingUses(THREADS)
    coming.add(*arrays([1, 2]))
    coming.forget()
    assert coming.reach(10) is None and coming.reached == coming.added == 1
    assert coming.add(*arrays([2, 3])).tolist() == [0, 1]


def reads(batches, slots, ahead):
    """Rows that a cache reads from below; each row of each batch is right."""
    below = EveryRow()
    tier = HotTier(
        "cache", row_width=2, slots=slots, below=below, resident=False, init=lambda *_: None, threads=THREADS
    )
    added = 0
    for n, batch in enumerate(batches):
        while ahead and added < min(len(batches), n + 1 + ahead):
            tier.victims.add_batch(*arrays(batches[added]))
            added += 1
        slot_U, _ = tier.acquire(BACKEND.distinct_keys(*arrays(batch)))
        assert tier.row_SW[slot_U, 0].tolist() == batch
        if ahead:
            tier.victims.reach_batch(n + 1)
        tier.release(slot_U)
    return below.read


def fewest_reads(batches, slots):
    """Rows that Belady's rule reads: it evicts the row whose next use is farthest away, never one of the batch."""
    cache, read = set(), 0
    for n, batch in enumerate(batches):
        missing = [id for id in batch if id not in cache]
        read += len(missing)

        def next_use(id, n=n):
            return next((k for k in range(n, len(batches)) if id in batches[k]), len(batches))

        while len(cache) + len(missing) > slots:
            cache.remove(max(sorted(cache - set(batch)), key=next_use))
        cache |= set(missing)
    return read


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_that_knows_all_batches_reads_as_few_rows_as_beladys_rule(seed):
    batches = batches_of(200, 3, 30, seed)
    known = reads(batches, slots=12, ahead=len(batches))
    assert known == fewest_reads(batches, 12) < reads(batches, slots=12, ahead=0)


def test_the_more_batches_are_known_the_fewer_rows_are_read():
    draw = np.random.default_rng(0)
    batches = [np.unique(draw.zipf(1.3, 300) % 5000).tolist() for _ in range(300)]
    found = [reads(batches, 400, ahead) for ahead in (0, 4, 16, 64)]
    assert found == sorted(found, reverse=True) and found[2] < 0.85 * found[0], found


def test_a_window_larger_than_the_cache_does_no_harm():
    batches = batches_of(60, 50, 1000, seed=1)
    assert reads(batches, slots=64, ahead=40) <= reads(batches, slots=64, ahead=0)
