"""The hash index against a dict: keys of any kind, in any order, put, found, erased, and listed."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oneemb.kernels.hash_index import (
    PLACE_MAX,
    TABLE_MAX,
    cells_erase,
    cells_find,
    cells_items,
    cells_put,
    count_keys,
    hash_key,
    order_keys,
)
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex

INT64 = np.iinfo(np.int64)
U64 = 2**64


# ---- the hash -------------------------------------------------------------------------------------------------------


def mix(x):
    """splitmix64's finaliser in whole numbers of any size."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % U64
    return x ^ x >> 31


def hash_python(table, id, salt):
    return mix(mix((salt + (table + 1) * 0x9E3779B97F4A7C15) % U64) ^ id % U64)


@pytest.mark.parametrize("salt", [0, 64, 12345])
def test_the_hash_is_splitmix64_twice(salt):
    for table, id in [(0, 0), (0, -1), (1, INT64.min), (2**22, INT64.max), (3, 10**12)]:
        assert int(hash_key(np.int64(table), np.int64(id), np.int64(salt))) == hash_python(table, id, salt)


def test_neighbouring_keys_spread_over_all_buckets():
    for make in (lambda n: (0, n), lambda n: (n, 0), lambda n: (0, n << 32), lambda n: (0, -n)):
        buckets = np.bincount(
            [int(hash_key(np.int64(t), np.int64(i), np.int64(0))) >> 56 for t, i in map(make, range(16384))],
            minlength=256,
        )
        # 64 a bucket on average; the chance that one of 256 lies this far off is below 1e-9.
        assert 12 < buckets.min() and buckets.max() < 130


# ---- the cells, at sizes and loads that an index never has ----------------------------------------------------------


def home(table, id, cells):
    x = (hash_python(table, id, 0) + cells * 0x9E3779B97F4A7C15) % U64
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % U64
    return (((x ^ x >> 32) * 0xD6E8FEB86659FD93 % U64) * (cells // 4) >> 64) * 4


def empty_cells(cells):
    """Cells as an index has them: whole lines of the cache."""
    cell_C2 = np.zeros((cells + 3, 2), np.int64)
    skip = -(cell_C2.ctypes.data // 16) % 4
    return cell_C2[skip : skip + cells]


def shard(cell_C2):
    """An index of one shard, in the form in which loops take it."""
    return np.array([cell_C2.ctypes.data]), np.array([len(cell_C2)])


def keys_at_home(cell, cells, count, table=0):
    """The first ids whose home is this cell."""
    ids, id = [], 0
    while len(ids) < count:
        if home(table, id, cells) == cell:
            ids.append(id)
        id += 1
    return ids


def arrays(keys):
    return np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)


def find(cell_C2, keys):
    table_U, id_U = arrays(keys)
    place_U = np.empty(len(keys), np.int64)
    cells_find(0, len(keys), *shard(cell_C2), table_U, id_U, place_U)
    return place_U.tolist()


def put(cell_C2, keys, places):
    table_U, id_U = arrays(keys)
    place_U, shard_U, order_U, old_U = np.array(places), *(np.empty(len(keys), np.int64) for _ in range(3))
    count_11, next_11, size_1 = (np.zeros(shape, np.int64) for shape in [(1, 1), (1, 1), 1])
    cell_U2 = np.empty((len(keys), 2), np.int64)
    count_keys(0, 1, table_U, id_U, shard_U, count_11)
    assert not shard_U.any() and count_11 == len(keys)
    order_keys(0, 1, table_U, id_U, place_U, shard_U, next_11, order_U, cell_U2)
    cells_put(0, 1, *shard(cell_C2), size_1, np.array([0, len(keys)]), order_U, cell_U2, old_U)
    return size_1[0], old_U.tolist()


def erase(cell_C2, keys):
    table_U, id_U = arrays(keys)
    old_U = np.empty(len(keys), np.int64)
    size_1 = np.zeros(1, np.int64)
    cells_erase(0, 1, 0, *shard(cell_C2), size_1, np.zeros(len(id_U), np.uint8), table_U, id_U, old_U)
    assert -size_1[0] == (old_U >= 0).sum()
    return old_U.tolist()


def put_new(cell_C2, places):
    assert put(cell_C2, list(places), list(places.values())) == (len(places), [-1] * len(places))


@pytest.mark.parametrize("cell", [0, 4, 12, 16])
def test_a_run_of_keys_with_one_home_wraps_around_the_end(cell):
    cells = 20
    cell_C2 = empty_cells(cells)
    keys = [(0, id) for id in keys_at_home(cell, cells, 14)]
    put_new(cell_C2, {key: n for n, key in enumerate(keys)})
    taken = {(cell + n) % cells for n in range(14)}
    assert {c for c in range(cells) if cell_C2[c, 1]} == taken
    assert find(cell_C2, keys) == list(range(14))


def test_erasing_any_key_of_neighbouring_runs_leaves_the_others_findable():
    # Three runs that meet, one of them across the end; every key of them erased first, then all the others.
    cells = 16
    keys = [(0, id) for cell in (8, 12, 0) for id in keys_at_home(cell, cells, 5)]
    for first in range(len(keys)):
        cell_C2 = empty_cells(cells)
        places = {key: n for n, key in enumerate(keys)}
        put_new(cell_C2, places)
        for key in [keys[first], *keys[:first], *keys[first + 1 :]]:
            assert erase(cell_C2, [key]) == [places.pop(key)]
            assert find(cell_C2, keys) == [places.get(k, -1) for k in keys]
        assert not cell_C2[:, 1].any()


def check_lines(cell_C2):
    """Raise unless the taken cells of a line are its first ones, and lines from a key's home to its own are full."""
    cells, taken_C = len(cell_C2), cell_C2[:, 1] != 0
    full_L = taken_C.reshape(-1, 4).all(1)
    assert (np.sort(~taken_C.reshape(-1, 4), axis=1) == ~taken_C.reshape(-1, 4)).all()
    for c in np.flatnonzero(taken_C).tolist():
        line = home(int(cell_C2[c, 1]) >> 40, int(cell_C2[c, 0]), cells) // 4
        while line != c // 4:
            assert full_L[line], "a search for this key ends before it"
            line = (line + 1) % (cells // 4)


@pytest.mark.parametrize("cells", [4, 8, 20, 32])
def test_lines_stay_as_searches_need_them_whatever_is_erased_at_any_load(cells):
    print("seed 0")
    rng = np.random.default_rng(0)
    for _ in range(40):
        crowded = [keys_at_home(int(line) * 4, cells, cells // 2) for line in rng.integers(0, cells // 4, 2)]
        pool = list(dict.fromkeys([*((0, id) for ids in crowded for id in ids), *((1, id) for id in range(cells))]))
        cell_C2, model = empty_cells(cells), Dict()
        for _ in range(12):
            keys = [pool[n] for n in rng.permutation(len(pool))]
            new = [key for key in keys if key not in model.places][: cells - 1 - len(model.places)]
            if new:
                places = rng.integers(0, 99, len(new)).tolist()
                assert put(cell_C2, new, places) == (len(new), model.put(new, places))
            gone = keys[: int(rng.integers(1, len(keys)))]
            assert erase(cell_C2, gone + gone[:2]) == model.erase(gone + gone[:2])
            check_lines(cell_C2)
            assert find(cell_C2, pool) == [model.places.get(key, -1) for key in pool]


def test_an_index_with_one_empty_cell_still_ends_its_search():
    cells = 8
    cell_C2 = empty_cells(cells)
    keys = [(0, id) for id in keys_at_home(4, cells, 9)]
    put_new(cell_C2, {key: n for n, key in enumerate(keys[:7])})
    assert find(cell_C2, keys) == [*range(7), -1, -1]
    assert erase(cell_C2, keys[7:]) == [-1, -1]


def test_probes_that_leave_their_first_line_are_found_in_batches_of_any_size():
    # Far more keys of one home than a line has cells, among keys that end in their first.
    cells = 1024
    long = [(0, id) for id in keys_at_home(512, cells, 40)]
    keys = [key for n, other in enumerate(range(10**6, 10**6 + 400)) for key in [*long[n : n + 1], (1, other)]]
    cell_C2 = empty_cells(cells)
    put_new(cell_C2, {key: n for n, key in enumerate(keys)})
    for size in (1, 63, 64, 65, 129, len(keys)):
        asked = [*keys[:size], (2, 5)]
        assert find(cell_C2, asked) == [*range(size), -1]


def test_the_largest_place_and_table_are_kept():
    cell_C2 = empty_cells(12)
    places = {(TABLE_MAX, INT64.min): PLACE_MAX, (0, INT64.min): 0, (TABLE_MAX, INT64.max): PLACE_MAX - 1}
    put_new(cell_C2, places)
    assert find(cell_C2, list(places)) == list(places.values())
    table_N, id_N, place_N = np.empty(9, np.int32), np.empty(9, np.int64), np.empty(9, np.int64)
    assert cells_items(*shard(cell_C2), 0, 0, table_N, id_N, place_N) == (3, 1, 0)
    keys = zip(table_N[:3].tolist(), id_N[:3].tolist(), strict=True)
    assert dict(zip(keys, place_N[:3].tolist(), strict=True)) == places


def test_of_equal_keys_in_one_put_the_last_counts():
    cell_C2 = empty_cells(8)
    assert put(cell_C2, [(0, 4), (0, 4), (1, 4)], [5, 6, 7]) == (2, [-1, 5, -1])
    assert find(cell_C2, [(0, 4), (1, 4)]) == [6, 7]


# ---- the index ------------------------------------------------------------------------------------------------------


class Dict:
    """What an index must answer, kept in a dict."""

    def __init__(self):
        self.places = {}

    def put(self, keys, places):
        old = []
        for key, place in zip(keys, places, strict=True):
            old.append(self.places.get(key, -1))
            self.places[key] = place
        return old

    def erase(self, keys):
        return [self.places.pop(key, -1) for key in keys]


def check_same(index, model, absent=()):
    keys = [*model.places, *absent]
    assert len(index) == len(model.places)
    assert index.find(*arrays(keys)).tolist() == [*model.places.values(), *[-1] * len(absent)]
    listed = {}
    for table_N, id_N, place_N in index.items(batch=7):
        assert 0 < len(id_N) <= 7
        for t, i, p in zip(table_N.tolist(), id_N.tolist(), place_N.tolist(), strict=True):
            assert (t, i) not in listed, "listed twice"
            listed[t, i] = p
    assert listed == model.places


def put_both(index, model, keys, places):
    assert index.put(*arrays(keys), np.array(places, np.int64)).tolist() == model.put(keys, places)


@pytest.mark.parametrize("count", [1, 2])
def test_one_put_of_many_keys_keeps_their_order(count):
    # Many blocks of keys, put by several threads; keys come again, and the last place of each is what counts.
    print("seed 0")
    rng = np.random.default_rng(0)
    table_U, id_U = rng.integers(0, 3, 50_000).astype(np.int32), rng.integers(0, 9000, 50_000)
    index, model = HashIndex(Threads(count)), Dict()
    put_both(index, model, list(zip(table_U.tolist(), id_U.tolist(), strict=True)), list(range(50_000)))
    check_same(index, model)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ids", ["ends of int64", "sorted", "reversed", "strided", "random"])
def test_keys_of_any_kind_are_found_while_the_index_grows(ids, count):
    print("seed 0")
    rng = np.random.default_rng(0)
    size = 5000
    many = {
        "ends of int64": [
            *range(INT64.min, INT64.min + 999),
            *range(-999, 999),
            *range(INT64.max - 999, INT64.max + 1),
        ],
        "sorted": list(range(size)),
        "reversed": list(range(size, 0, -1)),
        "strided": [n << 32 for n in range(size)],
        "random": rng.integers(INT64.min, INT64.max, size).tolist(),
    }[ids]
    index, model = HashIndex(Threads(count)), Dict()
    keys = list(dict.fromkeys((n % 3, id) for n, id in enumerate(many)))
    for begin in range(0, len(keys), 700):
        put_both(index, model, keys[begin : begin + 700], list(range(begin, begin + len(keys[begin : begin + 700]))))
    check_same(index, model, absent=[(7, id) for id in many[:50]])
    gone = keys[::3]
    assert index.erase(*arrays(gone)).tolist() == model.erase(gone)
    assert index.erase(*arrays(gone)).tolist() == [-1] * len(gone)
    check_same(index, model, absent=gone)


def test_keys_read_from_one_index_do_not_pile_up_in_another():
    # In the order of cells, keys arrive at a shard of another size in the order of its cells too, unless the size takes
    # part in the hash; then each would walk the run of all before it, a thousand times the work below.
    source = HashIndex(Threads(1))
    ids = np.arange(200_000)
    source.put(np.zeros(len(ids), np.int32), ids, ids)
    target = HashIndex(Threads(1), expected=400_000)
    for table_N, id_N, place_N in source.items():
        target.put(table_N, id_N, place_N)
    assert (target.find(np.zeros(len(ids), np.int32), ids) == ids).all()


_KEYS = st.tuples(st.integers(0, 2), st.integers(-4, 4) | st.sampled_from([INT64.min, INT64.max]) | st.integers(0, 200))
_CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "erase", "reserve", "clear", "find"]), st.lists(_KEYS, max_size=40)),
    max_size=12,
)


def check_calls(calls):
    index, model, place = HashIndex(Threads(1)), Dict(), 0
    for call, keys in calls:
        if call == "put":
            put_both(index, model, keys, list(range(place, place + len(keys))))
            place += len(keys)
        elif call == "erase":
            assert index.erase(*arrays(keys)).tolist() == model.erase(keys)
        elif call == "reserve":
            index.reserve(100 * len(keys))
        elif call == "clear":
            index.clear()
            model.places.clear()
        assert index.find(*arrays(keys)).tolist() == [model.places.get(key, -1) for key in keys]
    check_same(index, model)


@given(_CALLS)
def test_any_calls_answer_as_a_dict_does(calls):
    check_calls(calls)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=False)
@given(_CALLS)
def test_any_calls_answer_as_a_dict_does_at_length(calls):
    check_calls(calls)


def test_reserved_room_is_used_without_growing():
    index = HashIndex(Threads(1), expected=1000)
    size = index.nbytes
    ids = np.arange(1000)
    index.put(np.zeros(1000, np.int32), ids, ids)
    assert index.nbytes == size
    index.put(np.zeros(1, np.int32), np.array([-1]), np.array([0]))
    for n in range(1, 10):
        index.put(np.zeros(1000, np.int32), ids - 1000 * n, ids)
    assert index.nbytes > size


@pytest.mark.parametrize("growth, most", [(1.4, 24), (2.2, 32)])
def test_memory_a_key_is_bounded_and_grows_in_small_steps(growth, most):
    index = HashIndex(Threads(2), growth=growth)
    before, batch = 0, 20_000
    for begin in range(0, 1_000_000, batch):
        ids = np.arange(begin, begin + batch)
        index.put(np.zeros(batch, np.int32), ids, ids)
        assert len(index) == begin + batch and (begin < 100_000 or index.nbytes < most * len(index))
        # A share of the shards grew, not all at once: what one step adds is of the order of what came in.
        assert begin < 100_000 or index.nbytes - before < most * 3 * batch
        before = index.nbytes
    ids = np.arange(1_000_000)
    assert (index.find(np.zeros(len(ids), np.int32), ids) == ids).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index, model: index.erase(*arrays([(0, 3)])),
        lambda index, model: index.put(*arrays([(0, 3)]), np.array([99])),
        lambda index, model: index.put(*arrays([(5, 3)]), np.array([3])),
    ],
    ids=["a key lost", "a place changed", "a key too many"],
)
def test_the_comparison_notices(spoil):
    index, model = HashIndex(Threads(1)), Dict()
    put_both(index, model, [(0, id) for id in range(20)], list(range(20)))
    check_same(index, model)
    spoil(index, model)
    with pytest.raises(AssertionError):
        check_same(index, model)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 700, 30_000])
def test_replace_tells_the_places_that_a_put_tells_in_any_order(size, count):
    print("seed 0")
    rng = np.random.default_rng(0)
    index, model = HashIndex(Threads(count)), Dict()
    for round in range(4):
        keys = list(zip(rng.integers(0, 3, size).tolist(), rng.integers(-9000, 9000, size).tolist(), strict=True))
        places = rng.integers(0, 1 << 39, size)
        old = index.replace(*arrays(keys), places)
        assert sorted(old.tolist()) == sorted(model.put(keys, places.tolist())), round
        check_same(index, model)


@pytest.mark.parametrize("count", [1, 2])
def test_put_new_names_a_key_that_is_not_new(count):
    index, model = HashIndex(Threads(count)), Dict()
    ends = [(2, INT64.min), (0, INT64.max), (TABLE_MAX, -1), (0, 0)]
    for begin in (0, 20_000):
        keys = [(n % 5, n) for n in range(begin + 1, begin + 20_000)] + (ends if begin == 0 else [])
        places = list(range(begin, begin + len(keys)))
        assert index.put_new(*arrays(keys), np.array(places)) is None
        model.put(keys, places)
        check_same(index, model)
    for key in [*ends, (3, 3), (4, 39_999)]:
        assert index.put_new(*arrays([(1, -5), key]), np.array([7, 8])) == key
        index.erase(*arrays([(1, -5)]))
    assert index.put_new(*arrays([(6, 1), (6, 2), (6, 1)]), np.array([1, 2, 3])) == (6, 1)
    assert index.find(*arrays([(6, 1)])).tolist() == [3]
