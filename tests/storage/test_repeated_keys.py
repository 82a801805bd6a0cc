"""Keys that are given twice are found, and no others. The oracle is a dict."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oneemb.storage.table import repeated_keys as module
from oneemb.storage.table.repeated_keys import repeated_keys

INT64 = np.iinfo(np.int64)
KEY = st.tuples(st.integers(0, 3), st.integers(-4, 4) | st.integers(INT64.min, INT64.max))


def arrays(keys):
    return np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)


def expected(batches):
    """(number of a batch, position) of each key that was there before."""
    seen, found = set(), []
    for number, batch in enumerate(batches):
        found += [(number, n) for n, key in enumerate(batch) if key in seen or key in batch[:n]]
        seen |= set(batch)
    return found


@pytest.mark.parametrize("keys_max", [1 << 27, 3], ids=["at once", "in passes"])
def test_keys_that_come_again_are_found(keys_max, monkeypatch):
    monkeypatch.setattr(module, "_KEYS_MAX", keys_max)
    monkeypatch.setattr(module, "_COMPARED", 4)

    @given(st.lists(st.lists(KEY, max_size=12), max_size=6))
    def finds_them(batches):
        found = repeated_keys(lambda: map(arrays, batches), sum(map(len, batches)))
        assert [(number, n) for number, n_N in found for n in n_N.tolist()] == expected(batches)

    finds_them()


def test_hashes_that_are_equal_by_chance_are_no_equal_keys(monkeypatch):
    monkeypatch.setattr(module, "hash_keys", lambda table_N, id_N: np.full(len(id_N), 5, np.uint64))
    keys = [(0, 1), (1, 1), (0, 2), (1, 1), (0, 3)]
    assert [(number, n.tolist()) for number, n in repeated_keys(lambda: iter([arrays(keys)]), 5)] == [(0, [3])]


def test_keys_are_read_once_where_none_is_repeated_and_a_hash_of_each_is_enough():
    reads = []

    def batches():
        reads.append(1)
        yield np.zeros(1000, np.int32), np.arange(1000)

    assert list(repeated_keys(batches, 1000)) == [] and len(reads) == 1
