"""Perfect hashes against the formula in plain Python, where parts and buckets begin, with keys made to harm."""

import numpy as np
import pytest

from oneemb.kernels import perfect_hash
from oneemb.kernels.perfect_hash import DuplicateKeyError, PerfectHash, parts_and_buckets, regions, slots_of
from oneemb.kernels.threads import Threads
from tests.support.served_reader import slot_of

THREADS = Threads(2)
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31 - 1, -(2**31)]


def made_of(ids_of_tables):
    """The keys of tables, {table: ids}, shuffled, and their perfect hash."""
    table_N = np.repeat(np.array(list(ids_of_tables), np.int32), [len(ids) for ids in ids_of_tables.values()])
    id_N = np.concatenate([np.asarray(ids, np.int64) for ids in ids_of_tables.values()])
    order_N = np.random.default_rng(1).permutation(len(id_N))
    table_N, id_N = table_N[order_N], id_N[order_N]
    return table_N, id_N, PerfectHash.of_keys(table_N, id_N, max(ids_of_tables) + 1, threads=THREADS)


def slots_in_python(table_N, id_N, made, first):
    """The slots of the first keys of all."""
    count_T = np.bincount(table_N, minlength=len(made.slots_T)).tolist()
    counts, slots = dict(enumerate(count_T)), dict(enumerate(made.slots_T.tolist()))
    pilots = made.pilot_B.tolist()
    keys = zip(table_N[:first].tolist(), id_N[:first].tolist(), strict=True)
    return [slot_of(table, id, counts, slots, made.salt, pilots) for table, id in keys]


@pytest.mark.parametrize(
    "sizes",
    [
        {0: 1}, {0: 2}, {0: 3}, {0: 4}, {0: 5}, {3: 1}, {0: 1, 1: 0, 2: 1}, {0: 0, 1: 7, 2: 0, 5: 1000}, {2: 5, 40: 6},
        {0: 65535}, {0: 65536}, {0: 65537}, {0: 131072, 1: 3, 2: 131073}, {7: 300_000},
    ],
    ids=str,
)  # fmt: skip
def test_each_key_has_a_slot_of_its_own_which_is_that_of_the_formula(sizes):
    random = np.random.default_rng(0)
    ids = {t: random.choice(1 << 40, size, replace=False) - (1 << 39) for t, size in sizes.items()}
    table_N, id_N, made = made_of(ids)
    slot_N = slots_of(table_N, id_N, made.region_T6, made.pilot_B, threads=THREADS)
    assert len(np.unique(slot_N)) == len(id_N) and 0 <= slot_N.min() and slot_N.max() < made.slots
    assert slot_N[:5000].tolist() == slots_in_python(table_N, id_N, made, 5000)
    assert made.slots <= len(id_N) * 1.15 + len(sizes)


def test_slots_are_in_the_order_of_tables_and_no_slot_of_one_is_anothers():
    table_N, id_N, made = made_of({0: range(900), 1: range(900), 4: range(70_000)})
    others = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    begins = np.concatenate([[0], np.cumsum(np.array([1, 1, 0, 0, 2]) * made.slots_T)])
    for pilot_B in (made.pilot_B, made.pilot_B * 0 + 0xFFFF, np.random.default_rng(0).permutation(made.pilot_B)):
        for t in (0, 1, 4):
            table_M = np.full(len(others), t, np.int32)
            slot_M = slots_of(table_M, others, made.region_T6, pilot_B, threads=THREADS)
            assert begins[t] <= slot_M.min() and slot_M.max() < begins[t + 1]


def test_extreme_ids_and_runs_of_ids():
    for ids in (EXTREMES, range(-1000, 1000), range(0, 1 << 62, 1 << 50), [id << 48 for id in range(-30_000, 30_000)]):
        table_N, id_N, made = made_of({0: ids, 1: ids})
        slot_N = slots_of(table_N, id_N, made.region_T6, made.pilot_B, threads=THREADS)
        assert len(np.unique(slot_N)) == len(id_N)
        assert slot_N[:300].tolist() == slots_in_python(table_N, id_N, made, 300)


def test_no_keys_at_all():
    made = PerfectHash.of_keys(np.empty(0, np.int32), np.empty(0, np.int64), 3, threads=THREADS)
    assert made.slots == 0 and not made.region_T6.any() and len(made.pilot_B) == 1


def test_the_numbers_of_a_table_without_keys_are_zeros_wherever_it_is():
    region_T6 = regions(np.arange(4), np.array([0, 9, 0, 0]), np.array([0, 10, 0, 0]), 0, threads=THREADS)
    assert not region_T6[[0, 2, 3]].any() and region_T6[1].all(where=[True, True, True, False, True, False])


def test_parts_and_buckets_are_those_of_the_format():
    count_T = np.array([0, 1, 4, 5, 65536, 65537, 10**7])
    parts_T, buckets_T = parts_and_buckets(count_T)
    assert parts_T.tolist() == [0, 1, 1, 1, 1, 2, 153]
    assert buckets_T.tolist() == [0, 1, 1, 2, 16384, 2 * 8193, 153 * 16340]


@pytest.mark.parametrize("size", [2, 100, 70_000])
@pytest.mark.parametrize("times", [2, 3, 60])
def test_a_key_that_comes_twice_is_named(size, times):
    ids = np.random.default_rng(0).permutation(size)
    id_N = np.concatenate([ids, np.full(times - 1, ids[1])])
    table_N = np.zeros(len(id_N), np.int32)
    with pytest.raises(DuplicateKeyError) as error:
        PerfectHash.of_keys(table_N, id_N, 1, threads=THREADS)
    assert id_N[error.value.n] == ids[1]
    table_N[size:] = np.arange(1, times)  # The same id of other tables is another key.
    PerfectHash.of_keys(table_N, id_N, times, threads=THREADS)


def ids_of_hashes(hash_N, table, salt):
    """The ids of a table that have these hashes: the mixing backwards."""
    seed = int(regions(np.array([table]), np.array([1]), np.array([2]), salt, threads=THREADS)[0, perfect_hash.SEED])
    inverse = pow(0xD6E8FEB86659FD93, -1, 1 << 64)
    found = []
    for hash in hash_N:
        x = hash ^ hash >> 32
        for _ in range(2):
            x = x * inverse & (1 << 64) - 1
            x ^= x >> 32
        found.append(x ^ seed)
    return np.array(found, np.uint64).view(np.int64)


@pytest.mark.parametrize(
    "hashes",
    [
        range(400, 2000),  # one bucket: no pilot gives all of them slots
        range(400_000),  # one too: to compare each with each would take minutes
        [n << 40 for n in range(1, 2000)],  # an eighth of the buckets
        [n << 46 for n in range(80_000)],  # the first part of two alone: most slots would be empty
        [(n << 48) + k for n in range(0, 65536, 64) for k in range(4)],
    ],
    ids=["a bucket", "a large bucket", "few buckets", "a part", "groups"],
)
def test_keys_that_are_chosen_to_lie_together_get_slots_with_another_salt(hashes):
    id_N = ids_of_hashes(hashes, 0, 0)
    table_N = np.zeros(len(id_N), np.int32)
    made = PerfectHash.of_keys(table_N, id_N, 1, threads=THREADS)
    slot_N = slots_of(table_N, id_N, made.region_T6, made.pilot_B, threads=THREADS)
    assert len(np.unique(slot_N)) == len(id_N) and made.slots < 1.15 * len(id_N)
    assert slot_N[:100].tolist() == slots_in_python(table_N, id_N, made, 100)


def test_keys_that_are_chosen_to_lie_together_with_every_salt_that_can_be_foreseen_get_slots():
    id_N = np.concatenate([ids_of_hashes(range(n << 32, (n << 32) + 50), 0, n) for n in range(30)])
    made = PerfectHash.of_keys(np.zeros(len(id_N), np.int32), id_N, 1, threads=THREADS)
    slot_N = slots_of(np.zeros(len(id_N), np.int32), id_N, made.region_T6, made.pilot_B, threads=THREADS)
    assert len(np.unique(slot_N)) == len(id_N)


def test_keys_for_which_no_salt_will_do_are_an_error(monkeypatch):
    monkeypatch.setattr(perfect_hash, "_TRIES", 1)
    id_N = ids_of_hashes(range(2000), 0, 0)
    with pytest.raises(ValueError, match="no perfect hash of 2000 keys"):
        PerfectHash.of_keys(np.zeros(2000, np.int32), id_N, 1, threads=THREADS)


def test_threads_change_no_number():
    random = np.random.default_rng(3)
    table_N, id_N = random.integers(0, 3, 250_000).astype(np.int32), random.permutation(250_000)
    one, four = (PerfectHash.of_keys(table_N, id_N, 3, threads=Threads(threads)) for threads in (1, 4))
    assert np.array_equal(one.pilot_B, four.pilot_B) and np.array_equal(one.region_T6, four.region_T6)
