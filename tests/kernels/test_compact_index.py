"""The compact index against a dict, and its cells against what their bits say: any keys, full blocks, equal hashes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oneemb.kernels.compact_index import BLOCK_BYTES, compact_erase, compact_find, compact_put
from oneemb.kernels.hash_index import PLACE_MAX, TABLE_MAX
from oneemb.kernels.threads import Threads
from oneemb.storage import compact_index
from oneemb.storage.compact_index import BlockMemory, CompactIndex
from oneemb.storage.errors import IndexMemoryError
from oneemb.storage.hash_index import HashIndex
from tests.kernels.test_hash_index import Dict, arrays, hash_python
from tests.support.pairwise import covering

INT64 = np.iinfo(np.int64)
U64 = 2**64
INVERSE = [pow(factor, -1, U64) for factor in (0x94D049BB133111EB, 0xBF58476D1CE4E5B9)]


def unmix(x):
    """The inverse of splitmix64's finaliser."""
    x ^= x >> 31 ^ x >> 62
    x = x * INVERSE[0] % U64
    x ^= x >> 27 ^ x >> 54
    x = x * INVERSE[1] % U64
    return x ^ x >> 30 ^ x >> 60


def id_with(hash, table=0):
    """The id whose key has this hash."""
    id = unmix(hash) ^ unmix(hash_python(table, 0, 0))
    id -= U64 if id >= 2**63 else 0
    assert hash_python(table, id, 0) == hash
    return id


# ---- the cells of one shard of few blocks ---------------------------------------------------------------------------


class Shard:
    """Shard 0 with this many blocks, and a spill of `spill` keys."""

    def __init__(self, blocks=1, tables=8, spill=1000):
        self.lines, self.low, self.tables = 64 * blocks, 56 + 1 - (64 * blocks).bit_length(), tables
        memory = np.zeros((blocks + 1) * BLOCK_BYTES, np.uint8)
        begin = -memory.ctypes.data % BLOCK_BYTES
        self.byte_N = memory[begin : begin + blocks * BLOCK_BYTES]
        self.block_B = self.byte_N.ctypes.data + BLOCK_BYTES * np.arange(blocks)
        self.shard_P4 = np.zeros((256, 4), np.int64)
        self.shard_P4[0] = self.block_B.ctypes.data, self.lines, self.low, tables
        self.spill = HashIndex(Threads(1))
        need_P = np.zeros(256, np.int64)
        need_P[0] = spill
        self.spill.grow(need_P)
        self.size_P = np.zeros(256, np.int64)

    def put(self, keys, places):
        table_U, id_U = arrays(keys)
        cell_U2 = np.stack([id_U, (table_U.astype(np.int64) << 40) | (np.array(places) + 1)], axis=1)
        next_P, end_P, old_U = np.zeros(256, np.int64), np.zeros(256, np.int64), np.full(len(keys), -7)
        end_P[0] = len(keys)
        args = self.shard_P4, *self.spill.arrays, self.size_P, next_P, end_P, np.empty(0, np.int64), cell_U2, old_U
        compact_put(0, 1, *args)
        return old_U.tolist()[: next_P[0]]

    def find(self, keys):
        place_U = np.empty(len(keys), np.int64)
        compact_find(0, len(keys), self.shard_P4, *self.spill.shards, *arrays(keys), place_U)
        return place_U.tolist()

    def erase(self, keys):
        old_U, shard_U = np.empty(len(keys), np.int64), np.zeros(len(keys), np.uint8)
        compact_erase(0, 1, 0, self.shard_P4, *self.spill.arrays, self.size_P, shard_U, *arrays(keys), old_U)
        return old_U.tolist()

    def check(self, places):
        """Raise unless the bits of all cells and heads say these places, as `kernels/compact_index.py` describes."""
        found, taken_L, moved_L = {}, [0] * self.lines, [0] * self.lines
        bits = self.low + self.tables
        for n in range(self.lines):
            line_N = self.byte_N[64 * n : 64 * n + 64]
            word_6, half_6 = line_N[:48].view(np.uint64).tolist(), line_N[48:60].view(np.uint16).tolist()
            empty = [place == 0 for place in self._places(word_6, half_6)]
            assert empty == sorted(empty), "taken cells come first"
            taken_L[n] = empty.count(False)
            for word, place in zip(word_6, self._places(word_6, half_6), strict=True):
                if place == 0:
                    assert word == 0
                    continue
                table, low = word >> self.low & ((1 << self.tables) - 1), word & ((1 << self.low) - 1)
                home = n
                if word >> bits & 1:
                    home ^= (low & 0xFFFF) * 63 // 65536 + 1
                    moved_L[home] += 1
                hash = -(-(home << 32) // self.lines) << 24
                hash += (low - hash) % (1 << self.low)
                assert ((hash >> 24) * self.lines) >> 32 == home
                key = table, id_with(hash, table)
                assert key not in found
                found[key] = place - 1
        for n in range(self.lines):
            head = int(self.byte_N[64 * n + 60 : 64 * n + 64].view(np.uint32)[0])
            assert (head & 7, head >> 3 & 1023) == (taken_L[n], moved_L[n])
        for table_N, id_N, place_N in self.spill.items():
            for table, id, place in zip(table_N.tolist(), id_N.tolist(), place_N.tolist(), strict=True):
                assert (table, id) not in found
                found[table, id] = place
        assert found == places and self.size_P[0] == len(places)

    def _places(self, word_6, half_6):
        return [word >> self.low + self.tables + 1 << 16 | half for word, half in zip(word_6, half_6, strict=True)]


def keys_in_shard_0(rng, count, tables=1):
    tables = rng.integers(0, tables, count).tolist()
    return [(t, id_with(int(rng.integers(0, 1 << 56)), t)) for t in tables]


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 64, 100])
def test_cells_say_whose_they_are_at_any_size_and_load(blocks):
    print("seed", blocks)
    rng, shard, model = np.random.default_rng(blocks), Shard(blocks), Dict()
    keys = keys_in_shard_0(rng, min(384 * blocks - 3, 3000), 255)
    for begin in range(0, len(keys), 100):
        part = keys[begin : begin + 100]
        places = rng.integers(0, 1 << 20, len(part)).tolist()
        assert shard.put(part, places) == model.put(part, places)
    shard.check(model.places)
    assert shard.find(keys) == [model.places[key] for key in keys]
    strangers = keys_in_shard_0(rng, 300, 255)
    assert shard.find(strangers) == [-1] * 300
    for begin in range(0, len(keys), 170):
        part = keys[begin : begin + 90]
        assert shard.erase(part) == model.erase(part)
        again = part[::2] + strangers[begin % 200 : begin % 200 + 20]
        assert shard.put(again, range(len(again))) == model.put(again, range(len(again)))
    shard.check(model.places)
    assert shard.find(keys) == [model.places.get(key, -1) for key in keys]
    assert shard.erase(keys + strangers) == model.erase(keys + strangers)
    shard.check({})


def test_a_block_takes_nearly_as_many_keys_as_it_has_cells():
    rng, shard = np.random.default_rng(0), Shard(1)
    keys = keys_in_shard_0(rng, 384)
    shard.put(keys, range(384))
    assert len(shard.spill) <= 4
    shard.check({key: n for n, key in enumerate(keys)})


@pytest.mark.parametrize("apart", [1, 1 << 20])
def test_keys_of_one_line_beyond_its_cells_are_in_the_spill(apart):
    # With equal low bits the keys have one other line, with unequal ones many.
    shard, model = Shard(2), Dict()
    keys = [(0, id_with((1 << 54) + n * apart)) for n in range(900)]
    for begin in range(0, len(keys), 64):
        part = keys[begin : begin + 64]
        assert shard.put(part, range(begin, begin + len(part))) == model.put(part, range(begin, begin + len(part)))
    assert len(shard.spill) >= 900 - 384
    shard.check(model.places)
    for part in (keys[::3], keys[::7], keys):
        assert shard.find(keys) == [model.places.get(key, -1) for key in keys]
        assert shard.erase(part) == model.erase(part)
        shard.check(model.places)


def test_a_spill_without_room_stops_a_put_before_any_key_that_it_cannot_take():
    shard, keys = Shard(1, spill=40), [(0, id_with((1 << 54) + n)) for n in range(100)]
    done = len(shard.put(keys, range(100)))
    assert 0 < done < 100
    shard.check({key: n for n, key in enumerate(keys[:done])})


@pytest.mark.parametrize("blocks, place", [(1, 1 << 22), (1, PLACE_MAX), (40, PLACE_MAX)])
def test_a_key_moves_to_the_spill_with_a_place_that_is_too_large_and_the_last_place_counts(blocks, place):
    shard, key, other = Shard(blocks), (3, id_with(77, 3)), (4, id_with(77, 4))
    assert shard.put([key, other], [5, 6]) == [-1, -1]
    assert shard.put([key, key], [place, 9]) == [5, place]
    shard.check({key: 9, other: 6})
    assert shard.put([key], [place]) == [9]
    shard.check({key: place, other: 6})
    assert shard.find([key, other]) == [place, 6] and shard.erase([key]) == [place]
    shard.check({other: 6})


def test_a_table_that_does_not_fit_its_cell_is_not_taken_for_another():
    shard = Shard(1)
    keys = [(table, id_with(77, table)) for table in (0, 1, 254, 255, 256, 257, 511, 512, TABLE_MAX)]
    places = {key: n for n, key in enumerate(keys)}
    for key, n in places.items():
        assert shard.find([key]) == [-1] and shard.erase([key]) == [-1]
        assert shard.put([key], [n]) == [-1]
    shard.check(places)
    assert shard.find(keys) == list(range(9))


def test_the_comparison_notices():
    shard, key = Shard(1), (3, id_with(77, 3))
    shard.put([key], [5])
    with pytest.raises(AssertionError):
        shard.check({})
    shard.byte_N[np.flatnonzero(shard.byte_N)[0]] ^= 1
    with pytest.raises(AssertionError):
        shard.check({key: 5})


# ---- the index ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 192])
def small(request, monkeypatch):
    """Most keys of a shard without lines: with 1, few keys make lines."""
    monkeypatch.setattr(compact_index, "_SMALL", request.param)


def check_same(index, model, absent=()):
    keys = [*model.places, *absent]
    assert len(index) == len(model.places) == index.sizes_P.sum()
    assert index.find(*arrays(keys)).tolist() == [*model.places.values(), *[-1] * len(absent)]


def put_both(index, model, keys, places):
    assert index.put(*arrays(keys), np.array(places, np.int64)).tolist() == model.put(keys, places)


IDS = {
    "ends of int64": [
        *range(INT64.min, INT64.min + 9999),
        *range(-9999, 9999),
        *range(INT64.max - 9999, INT64.max + 1),
    ],
    "sorted": list(range(60_000)),
    "strided": [n << 32 for n in range(60_000)],
    "of one line": [id_with((7 << 56) + n) for n in range(3000)],
    "of one line and turn": [id_with((7 << 56) + (n << 16)) for n in range(3000)],
    "of one shard": [id_with((7 << 56) + (n << 40)) for n in range(20_000)],
}


@pytest.mark.parametrize(
    ("tables", "ids", "count"),
    covering([[0, 1, 2], [254, 255, 256, 1023, 1024], [TABLE_MAX, 0]], list(IDS), [1, 2]),
    ids=str,
)
def test_keys_of_any_kind_are_found_while_the_index_grows(small, ids, tables, count):
    index, model = CompactIndex(Threads(count)), Dict()
    keys = [(tables[n % len(tables)] if ids[:2] != "of" else 0, id) for n, id in enumerate(IDS[ids])]
    keys += [(table, id) for table in tables for id in IDS[ids][:50] if (table, id) not in keys[: 50 * len(tables)]]
    keys = list(dict.fromkeys(keys))
    for begin in range(0, len(keys), 7000):
        part = keys[begin : begin + 7000]
        put_both(index, model, part, list(range(begin, begin + len(part))))
    check_same(index, model, absent=[(7, id) for id in IDS[ids][:50]])
    gone = keys[::3]
    assert index.erase(*arrays(gone)).tolist() == model.erase(gone)
    check_same(index, model, absent=gone)
    put_both(index, model, gone[::-1], list(range(len(gone))))
    check_same(index, model)


@pytest.mark.parametrize("count", [1, 2])
def test_one_put_of_many_keys_keeps_their_order(small, count):
    print("seed 0")
    rng = np.random.default_rng(0)
    index, model = CompactIndex(Threads(count)), Dict()
    for places in (1 << 20, PLACE_MAX):
        table_U, id_U = rng.integers(0, 3, 50_000).astype(np.int32), rng.integers(0, 30_000, 50_000)
        keys = list(zip(table_U.tolist(), id_U.tolist(), strict=True))
        put_both(index, model, keys, rng.integers(0, places, 50_000).tolist())
        check_same(index, model)
        old = index.replace(*arrays(keys), np.arange(50_000))
        assert sorted(old.tolist()) == sorted(model.put(keys, list(range(50_000))))
        check_same(index, model)


def test_put_new_names_a_key_that_is_not_new(small):
    index = CompactIndex(Threads(1))
    keys = [(n % 5, n) for n in range(60_000)]
    assert index.put_new(*arrays(keys), np.arange(60_000)) is None
    assert index.put_new(*arrays([(9, 1), (4, 59_999)]), np.array([7, 8])) == (4, 59_999)
    assert index.put_new(*arrays([(6, 1), (6, 2), (6, 1)]), np.array([1, 2, 3])) == (6, 1)


_KEYS = st.tuples(
    st.sampled_from([0, 1, 255, 256, TABLE_MAX]),
    st.integers(-4, 4) | st.sampled_from([INT64.min, INT64.max, *IDS["of one line"][:60]]) | st.integers(0, 200),
)
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "big", "erase", "reserve", "grow"]), st.lists(_KEYS, min_size=1, max_size=60)
    ),
    max_size=12,
)


def check_calls(calls):
    index, model, place = CompactIndex(Threads(1)), Dict(), 0
    for call, keys in calls:
        if call in ("put", "big"):
            place += len(keys)
            first = place if call == "put" else PLACE_MAX - place
            put_both(
                index, model, keys, list(range(first, first + len(keys)) if call == "put" else [first] * len(keys))
            )
        elif call == "erase":
            assert index.erase(*arrays(keys)).tolist() == model.erase(keys)
        elif call == "reserve":
            index.reserve_keys(*arrays(keys))
        else:
            index.grow(index.sizes_P + 30 * len(keys))
        assert index.find(*arrays(keys)).tolist() == [model.places.get(key, -1) for key in keys]
    check_same(index, model)


@given(_CALLS)
def test_any_calls_answer_as_a_dict_does(calls):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_index, "_SMALL", 1)
        check_calls(calls)


@pytest.mark.slow
@settings(max_examples=3000, derandomize=False)
@given(_CALLS)
def test_any_calls_answer_as_a_dict_does_at_length(calls):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_index, "_SMALL", 1)
        check_calls(calls)


def test_memory_a_key_is_bounded_at_rest_and_while_keys_come():
    print("seed 0")
    rng, index, batch, done = np.random.default_rng(0), CompactIndex(Threads(2)), 20_000, 0
    while done < 2_000_000:
        before = index.nbytes
        index.put(np.zeros(batch, np.int32), rng.integers(INT64.min, INT64.max, batch), np.arange(done, done + batch))
        done += batch
        assert index.nbytes < (35 if done < 400_000 else 24) * done
        assert done < 1_000_000 or index.nbytes < 16 * done
        assert done < 400_000 or index.nbytes - before < (2 << 20) + 16 * 4 * batch
    assert index.spilled < done / 1000
    sure = CompactIndex(Threads(2), expected=1_000_000)
    id_U = np.arange(1_000_000)
    sure.put(np.zeros(len(id_U), np.int32), id_U, id_U)
    assert sure.nbytes < 14 * len(id_U) and (sure.find(np.zeros(len(id_U), np.int32), id_U) == id_U).all()


def test_a_growth_that_finds_no_memory_changes_nothing(monkeypatch):
    # Refuse each request for blocks, and each one for cells of the spill, in turn.
    rng = np.random.default_rng(0)
    table_N, id_N = rng.integers(0, 3, 60_000), rng.integers(0, 1 << 60, 60_000)
    keys = list(dict.fromkeys(zip(table_N.tolist(), id_N.tolist(), strict=True)))
    refused = 0
    for where, name, refusal in ((BlockMemory, "take", MemoryError), (HashIndex, "grow", IndexMemoryError)):
        real, calls = getattr(where, name), [0]

        def grow(self, *args, real=real, calls=calls, refusal=refusal):
            calls[0] += 1
            if calls[0] % 3 == 1:
                raise refusal("refused")
            return real(self, *args)

        index, model = CompactIndex(Threads(1)), Dict()
        with monkeypatch.context() as patch:
            patch.setattr(where, name, grow)
            for begin in range(0, len(keys), 5000):
                part = keys[begin : begin + 5000]
                for _ in range(9):
                    try:
                        put_both(index, model, part, list(range(len(part))))
                        break
                    except IndexMemoryError as error:
                        assert f"it holds {len(model.places)} keys in" in str(error)
                        assert not hasattr(error, "left_half_changed")
                        refused += 1
                        check_same(index, model)
                else:
                    raise AssertionError("a put that is tried again finds memory")
        check_same(index, model)
    assert refused > 10


def test_a_put_that_ends_half_way_says_so(monkeypatch):
    # So many keys have equal hashes that the spill has to grow in the middle of the put.
    index, keys, real = CompactIndex(Threads(1)), [(0, id) for id in IDS["of one line"]], HashIndex.grow
    index.reserve(100_000)
    calls = []

    def grow(self, need_P):
        calls.append(len(index))
        if len(calls) == 2:
            raise IndexMemoryError("refused")
        real(self, need_P)

    monkeypatch.setattr(HashIndex, "grow", grow)
    with pytest.raises(IndexMemoryError) as caught:
        index.put(*arrays(keys), np.arange(len(keys)))
    assert hasattr(caught.value, "left_half_changed") and 0 == calls[0] < calls[1] < len(keys)


@pytest.mark.parametrize("table", [0, 254, 255, 1023, TABLE_MAX])
def test_a_put_of_keys_with_room_needs_no_memory(table, monkeypatch):
    index = CompactIndex(Threads(2))
    index.put(np.zeros(200_000, np.int32), np.arange(200_000), np.arange(200_000))
    table_U, id_U = np.full(20_000, table, np.int32), np.arange(1 << 40, (1 << 40) + 20_000)
    index.reserve_keys(table_U, id_U)
    real = HashIndex.grow

    def grow(self, need_P):
        assert self.has_room(need_P)
        real(self, need_P)

    monkeypatch.setattr(HashIndex, "grow", grow)
    assert (index.replace(table_U, id_U, np.arange(20_000)) == -1).all()
    assert (index.find(table_U, id_U) == np.arange(20_000)).all()
