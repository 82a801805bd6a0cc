"""An index whose shards lie in a file answers as a dict does, whatever fails meanwhile, within its limit of memory."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oneemb.kernels.hash_index import PLACE_MAX, TABLE_MAX
from oneemb.kernels.threads import Threads
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import BlockMemory
from oneemb.storage.errors import IndexMemoryError, StorageError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.block_reader import PreadReader
from oneemb.storage.table.cold_file import ColdFile
from tests.kernels.test_compact_index import IDS, INT64, check_same, put_both
from tests.kernels.test_hash_index import Dict, arrays
from tests.support.cold_shards import make_shards_small
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.pairwise import covering

PLACES = PLACE_MAX - 1


SIZES = [(1, 40), (1, 1 << 14), (192, 40)]
"""Most keys of a shard without lines, and of the overlay."""


def make_index(count=1, limit=1, fs=None, **options):
    fs = fs or FaultyFileSystem()
    fs.make_directories("/t")
    threads = Threads(count)
    file = ColdFile(fs, "/t", PreadReader(fs, threads, 1), threads)
    return ColdIndex(threads, file, limit, **options), file


@pytest.mark.parametrize(("sizes", "ids", "count", "limit"), covering(SIZES, list(IDS), [1, 2], [1, 1 << 20]), ids=str)
def test_keys_of_any_kind_are_found_while_the_index_grows(monkeypatch, sizes, ids, count, limit):
    make_shards_small(monkeypatch, *sizes)
    (index, _), model, tables = make_index(count, limit), Dict(), [0, 254, 255, TABLE_MAX]
    keys = [(tables[n % 4] if ids[:2] != "of" else 0, id) for n, id in enumerate(IDS[ids])]
    keys = list(dict.fromkeys([*keys, *((table, id) for table in tables for id in IDS[ids][:50])]))
    for begin in range(0, len(keys), 7000):
        part = keys[begin : begin + 7000]
        put_both(index, model, part, list(range(begin, begin + len(part))))
    check_same(index, model, absent=[(7, id) for id in IDS[ids][:50]])
    gone = keys[::3]
    assert index.erase(*arrays(gone)).tolist() == model.erase(gone)
    check_same(index, model, absent=gone)
    put_both(index, model, gone[::-1], list(range(len(gone))))
    check_same(index, model)


_KEYS = st.tuples(
    st.sampled_from([0, 1, 255, 256, TABLE_MAX]),
    st.integers(-4, 4) | st.sampled_from([INT64.min, INT64.max, *IDS["of one line"][:60]]) | st.integers(0, 200),
)
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put new", "big", "erase", "reserve", "grow", "replace"]),
        st.lists(_KEYS, min_size=1, max_size=60),
    ),
    max_size=12,
)  # fmt: skip


def check_calls(calls):
    (index, _), model, place = make_index(limit=1), Dict(), 0
    for call, keys in calls:
        place += len(keys)
        if call == "put":
            put_both(index, model, keys, list(range(place, place + len(keys))))
        elif call == "big":
            put_both(index, model, keys, [PLACES - place] * len(keys))
        elif call == "put new":
            new = [key for key in dict.fromkeys(keys) if key not in model.places]
            assert index.put_new(*arrays(new), np.arange(len(new))) is None
            model.put(new, list(range(len(new))))
            assert not new or index.put_new(*arrays(new[-1:]), np.array([len(new) - 1])) == new[-1]
        elif call == "erase":
            assert index.erase(*arrays(keys)).tolist() == model.erase(keys)
        elif call == "replace":
            places = list(range(place, place + len(keys)))
            assert sorted(index.replace(*arrays(keys), np.array(places))) == sorted(model.put(keys, places))
        elif call == "reserve":
            index.reserve_keys(*arrays(keys))
        else:
            index.grow(index.sizes_P + 30 * len(keys))
        assert index.find(*arrays(keys)).tolist() == [model.places.get(key, -1) for key in keys]
    check_same(index, model)


@given(_CALLS)
def test_any_calls_answer_as_a_dict_does(calls):
    with pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, 1, 30)
        check_calls(calls)


@pytest.mark.slow
@settings(max_examples=3000, derandomize=False)
@given(_CALLS, st.sampled_from([0, 5, 30, 200]))
def test_any_calls_answer_as_a_dict_does_at_length(calls, overlay):
    with pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, 1, overlay)
        check_calls(calls)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["blocks", "cells", "write", "read", "create"])
def test_a_call_that_fails_changes_nothing(what, monkeypatch):
    """Each seventh request for memory or call of the file is refused; of reads fewer, because a call makes many."""
    every = 211 if what == "read" else 7
    make_shards_small(monkeypatch, overlay=300)
    rng, fs, model, failures, calls = np.random.default_rng(0), FaultyFileSystem(), Dict(), 0, [0]
    index, _ = make_index(fs=fs)

    def refuse(error):
        calls[0] += 1
        if calls[0] % every == 1:
            raise error

    def fail(call, path):
        if call == what and path.endswith("index.cold"):
            refuse(OSError(28, "No space left on device"))

    fs.fail = fail
    for name, where, error in (("take", BlockMemory, MemoryError()), ("grow", HashIndex, IndexMemoryError("refused"))):
        if what == {"take": "blocks", "grow": "cells"}[name]:
            real = getattr(where, name)

            def refused(self, *args, real=real, error=error):
                refuse(error)
                return real(self, *args)

            monkeypatch.setattr(where, name, refused)
    for n in range(25):
        keys = [(int(t), int(i)) for t, i in zip(rng.integers(0, 3, 90), rng.integers(0, 500, 90), strict=True)]
        places, erased = list(range(n, n + 90)), n % 3 == 2
        for _ in range(500):
            try:
                if erased:
                    assert index.erase(*arrays(keys)).tolist() == model.erase(keys)
                else:
                    put_both(index, model, keys, places)
                break
            except StorageError as error:
                assert not hasattr(error, "left_half_changed")
                failures += 1
                with monkeypatch.context() as patch:
                    patch.setattr(fs, "fail", None)
                    check_same(index, model)
        else:
            raise AssertionError("a call that is tried again succeeds")
    fs.fail = None
    check_same(index, model)
    assert failures > {"create": 0, "read": 2}.get(what, 5)


# ---- reads and memory -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    """An index of a million keys, of which none are in memory, and its file."""
    index, file = make_index(2)
    for begin in range(0, 1_000_000, 100_000):
        id_U = np.arange(begin, begin + 100_000)
        index.put(np.zeros(len(id_U), np.int32), id_U, id_U)
    return index, file


def test_a_key_is_found_with_one_read_and_an_absent_key_mostly_with_none(large):
    index, file = large
    rng, table_1 = np.random.default_rng(0), np.zeros(1, np.int32)
    before, ids = file.blocks_read, rng.choice(900_000, 400, replace=False)  # The last keys may be in memory.
    for id in ids.tolist():
        assert index.find(table_1, np.array([id])).tolist() == [id]
    assert 390 <= file.blocks_read - before <= 400
    before, absent = file.blocks_read, np.arange(2_000_000, 2_020_000)
    assert (index.find(np.zeros(20_000, np.int32), absent) == -1).all()
    assert file.blocks_read - before < 0.012 * 20_000
    table_U, id_U = np.zeros(900, np.int32), rng.choice(900_000, 900, replace=False)
    index.reserve_keys(table_U, id_U)
    before = file.blocks_read
    assert (index.find(table_U, id_U) == id_U).all()
    first = file.blocks_read - before
    index.replace(table_U, id_U, id_U)
    assert first > 700 and file.blocks_read - before == first, "a put after a find reads nothing"


def test_memory_a_key_is_that_of_the_filters(large):
    index, file = large
    # Buffers take 18 MiB, and the overlay had to take 100,000 keys at once.
    assert index.nbytes - (21 << 20) < 2 * len(index)
    assert file.disk_bytes < 18 * len(index)
    index, _ = make_index(2, limit=64 << 20)
    for begin in range(0, 4_000_000, 100_000):
        id_U = np.arange(begin, begin + 100_000)
        index.put(np.zeros(len(id_U), np.int32), id_U, id_U)
        assert index.nbytes < 66 << 20
    assert (index.find(np.zeros(len(id_U), np.int32), id_U) == id_U).all()


@pytest.mark.parametrize("limit", [1, 45 << 20, 1 << 30])
def test_a_load_takes_each_key_once_whatever_the_passes(limit, monkeypatch):
    make_shards_small(monkeypatch)
    rng = np.random.default_rng(0)
    index, file = make_index(2, limit)
    id_N, table_N = rng.permutation(200_000), np.zeros(200_000, np.int32)
    passes = 0
    for n in index.loading(200_000):
        assert n == passes
        passes += 1
        for begin in range(0, 200_000, 30_000):
            k = slice(begin, begin + 30_000)
            assert index.put_new(table_N[k], id_N[k], id_N[k]) is None
    assert len(index) == 200_000 and (index.find(table_N, id_N) == id_N).all()
    assert (passes == 1) == (limit == 1 << 30) and passes <= 17
    assert (file.disk_bytes == 0) == (passes == 1)
    for _ in (again := make_index(1, limit)[0]).loading(1000):
        found = again.put_new(np.zeros(2, np.int32), np.array([5, 5]), np.array([1, 2]))
        if found is not None:
            assert found == (0, 5)
            break
    else:
        raise AssertionError("a key that is there twice is found in the pass of its shard")
