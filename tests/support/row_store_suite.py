"""What every `RowStore` must do, as checks that run on any of them, and stores that only tests have.

A new store is done when each check of SUITE passes on it, and on a HotTier over it. A check takes `open_store`, which
gives a new, empty store each time; the oracle is a dict.
"""

import numpy as np

from oneemb.storage.errors import StorageError
from tests.support.table_model import check, note, put, put_random, random_keys, random_rows, scanned

INT64 = np.iinfo(np.int64)
SUITE = []


def _in_suite(function):
    SUITE.append(function)
    return function


def keys_of(keys):
    """(table_U, id_U) of a list of (table, id)."""
    keys = list(keys)
    return np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], np.int64)


# ---- stores that only tests have ------------------------------------------------------------------------------------


class DictStore:
    """A RowStore in a dict: as plain as can be."""

    def __init__(self, row_width):
        self.row_width = row_width
        self.rows = {}

    def __len__(self):
        return len(self.rows)

    def get(self, table_U, id_U, out_UW, to_U=None):
        missing_U = ~self.contains(table_U, id_U)
        for u, key in enumerate(zip(table_U.tolist(), id_U.tolist(), strict=True)):
            if not missing_U[u]:
                out_UW[u if to_U is None else to_U[u]] = np.frombuffer(self.rows[key], np.float32)
        return missing_U

    def put(self, table_U, id_U, row_UW):
        assert row_UW.dtype == np.float32 and row_UW.shape == (len(id_U), self.row_width)
        assert table_U.dtype == np.int32 and id_U.dtype == np.int64 and row_UW.flags.c_contiguous
        assert len(set(zip(table_U.tolist(), id_U.tolist(), strict=True))) == len(id_U), "keys must be unique"
        note(self.rows, table_U, id_U, row_UW)

    def contains(self, table_U, id_U):
        return np.array([key in self.rows for key in zip(table_U.tolist(), id_U.tolist(), strict=True)], np.bool_)

    def erase(self, table_U, id_U):
        erased_U = self.contains(table_U, id_U)
        for key in zip(table_U.tolist(), id_U.tolist(), strict=True):
            self.rows.pop(key, None)
        return erased_U

    def scan(self, batch=65536):
        keys = list(self.rows)
        for n in range(0, len(keys), batch):
            row_NW = np.frombuffer(b"".join(self.rows[key] for key in keys[n : n + batch]), np.float32)
            yield *keys_of(keys[n : n + batch]), row_NW.reshape(-1, self.row_width).copy()

    def clear(self):
        self.rows.clear()

    def flush(self):
        pass

    def stats(self):
        return {"rows": len(self.rows)}

    def close(self):
        pass


class DictBottom:
    """A `Bottom` whose stores are those of `make(row_width)`, made once a width; without snapshots."""

    name = "a dict"

    def __init__(self, make=DictStore):
        self.make, self.stores = make, {}

    def open(self, row_width):
        if row_width not in self.stores:
            self.stores[row_width] = self.make(row_width)
        return self.stores[row_width]

    def snapshots(self):
        return []

    def snapshot(self, name):
        raise StorageError("a dict cannot keep snapshots")

    read = chain = arrays = snapshot


class FailingStore:
    """Passes every call on, and raises at the n-th from now on; a put that fails keeps the first half of its rows if
    `half`. `calls` counts those made."""

    def __init__(self, store, half=False):
        self.store, self.half, self.calls, self.fail_at = store, half, 0, None
        self.row_width = store.row_width

    def _count(self):
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError("the store below has failed")

    def __len__(self):
        return len(self.store)

    def get(self, table_U, id_U, out_UW, to_U=None):
        self._count()
        return self.store.get(table_U, id_U, out_UW, to_U)

    def put(self, table_U, id_U, row_UW):
        try:
            self._count()
        except OSError:
            if self.half and len(id_U):
                size = -(-len(id_U) // 2)
                self.store.put(table_U[:size], id_U[:size], row_UW[:size].copy())
            raise
        self.store.put(table_U, id_U, row_UW)

    def contains(self, table_U, id_U):
        self._count()
        return self.store.contains(table_U, id_U)

    def erase(self, table_U, id_U):
        self._count()
        return self.store.erase(table_U, id_U)

    def scan(self, batch=65536):
        self._count()
        yield from self.store.scan(batch)

    def clear(self):
        self._count()
        self.store.clear()

    def flush(self):
        self._count()
        self.store.flush()

    def stats(self):
        return self.store.stats()

    def close(self):
        self.store.close()


# ---- the suite ------------------------------------------------------------------------------------------------------


def erase(store, rows, table_U, id_U):
    """Erase keys in a store and in its model."""
    keys = list(zip(table_U.tolist(), id_U.tolist(), strict=True))
    assert store.erase(table_U, id_U).tolist() == [key in rows for key in keys]
    for key in keys:
        rows.pop(key, None)


@_in_suite
def a_new_store_is_empty(open_store):
    check(open_store(), {})


@_in_suite
def rows_come_back_bit_for_bit(open_store):
    print("seed 0")
    rng, rows, store = np.random.default_rng(0), {}, open_store()
    for size in (1, 2, 300, 0, 700, 77):
        put_random(store, rows, rng, size)
        check(store, rows)


@_in_suite
def every_int64_is_an_id_in_every_table(open_store):
    rng, rows, store = np.random.default_rng(1), {}, open_store()
    ids = [0, -1, 1, INT64.min, INT64.max, INT64.min + 1, INT64.max - 1, 2**32, -(2**32)]
    keys = [(t, i) for t in (0, 1, 2, 1000) for i in ids]
    put(store, rows, *keys_of(keys), random_rows(rng, len(keys), store.row_width))
    check(store, rows)


@_in_suite
def a_put_takes_the_place_of_the_row_before(open_store):
    rng, rows, store = np.random.default_rng(2), {}, open_store()
    keys = keys_of([(0, 5), (1, 5), (0, -5)])
    for _ in range(3):
        put(store, rows, *keys, random_rows(rng, 3, store.row_width))
        check(store, rows)
    assert len(store) == 3


@_in_suite
def contains_tells_keys_that_are_there(open_store):
    rng, rows, store = np.random.default_rng(3), {}, open_store()
    put_random(store, rows, rng, 200, ids=300, tables=1)
    table_U, id_U = random_keys(rng, 300, ids=300, tables=1)
    here_U = store.contains(table_U, id_U)
    assert here_U.dtype == bool and here_U.tolist() == [(0, i) in rows for i in id_U.tolist()]
    assert 0 < here_U.sum() < 300


@_in_suite
def erased_rows_are_gone_and_no_others(open_store):
    print("seed 11")
    rng, rows, store = np.random.default_rng(11), {}, open_store()
    put_random(store, rows, rng, 300, ids=400, tables=2)
    store.flush()
    put_random(store, rows, rng, 100, ids=400, tables=2)  # some on their way down, some on both levels
    for _ in range(3):
        keys = random_keys(rng, 80, ids=400, tables=2)
        erase(store, rows, *keys)
        check(store, rows)
        assert not store.erase(*keys).any(), "they are gone"
    store.flush()
    check(store, rows)


@_in_suite
def an_erased_key_may_come_back_with_another_row(open_store):
    rng, rows, store = np.random.default_rng(12), {}, open_store()
    keys = keys_of([(0, i) for i in range(40)])
    for flushes in (False, True):
        put(store, rows, *keys, random_rows(rng, 40, store.row_width))
        if flushes:
            store.flush()
        erase(store, rows, *keys)
        check(store, {})
        put(store, rows, *keys, random_rows(rng, 40, store.row_width))
        check(store, rows)


@_in_suite
def calls_without_keys_do_nothing(open_store):
    rng, rows, store = np.random.default_rng(4), {}, open_store()
    none, nothing = keys_of([]), np.empty((0, store.row_width), np.float32)
    for _ in range(2):
        store.put(*none, nothing)
        assert store.get(*none, nothing).shape == store.contains(*none).shape == store.erase(*none).shape == (0,)
        check(store, rows)
        put_random(store, rows, rng, 20)


@_in_suite
def scans_give_each_row_once_in_batches_of_any_size(open_store):
    rng, rows, store = np.random.default_rng(5), {}, open_store()
    put_random(store, rows, rng, 500)
    for batch in (1, 7, 499, 500, 10**6):
        assert scanned(store, batch) == rows


@_in_suite
def what_is_given_and_taken_is_a_copy(open_store):
    rng, rows, store = np.random.default_rng(6), {}, open_store()
    table_U, id_U = random_keys(rng, 50)
    row_UW = random_rows(rng, 50, store.row_width)
    put(store, rows, table_U, id_U, row_UW)
    row_UW[:] = 1
    check(store, rows)
    out_UW = np.empty_like(row_UW)
    store.get(table_U, id_U, out_UW)
    out_UW[:] = 2
    check(store, rows)
    for table_N, id_N, row_NW in store.scan(10):
        table_N[:], id_N[:], row_NW[:] = 9, 9, 3
    check(store, rows)


@_in_suite
def a_flush_changes_no_row(open_store):
    rng, rows, store = np.random.default_rng(7), {}, open_store()
    store.flush()
    for _ in range(3):
        put_random(store, rows, rng, 300)
        store.flush()
        check(store, rows)


@_in_suite
def a_cleared_store_is_as_new(open_store):
    rng, rows, store = np.random.default_rng(8), {}, open_store()
    put_random(store, {}, rng, 300)
    store.flush()
    put_random(store, {}, rng, 300)
    store.clear()
    check(store, {})
    put_random(store, rows, rng, 100)
    check(store, rows)


@_in_suite
def closing_twice_is_fine(open_store):
    store = open_store()
    put_random(store, {}, np.random.default_rng(9), 10)
    store.close()
    store.close()


@_in_suite
def many_calls_in_any_order_agree_with_a_dict(open_store):
    print("seed 10")
    rng, rows, store = np.random.default_rng(10), {}, open_store()
    for step in range(120):
        table_U, id_U = random_keys(rng, int(rng.integers(0, 60)), ids=200, tables=2)
        keys = list(zip(table_U.tolist(), id_U.tolist(), strict=True))
        call = rng.choice(["put", "put", "get", "contains", "flush", "scan", "erase"])
        if call == "erase":
            erase(store, rows, table_U, id_U)
        elif call == "put":
            put(store, rows, table_U, id_U, random_rows(rng, len(id_U), store.row_width))
        elif call == "get":
            slab_SW = np.zeros((len(id_U) + 9, store.row_width), np.float32)
            in_slots = bool(rng.integers(2))
            to_U = rng.permutation(len(slab_SW))[: len(id_U)] if in_slots else np.arange(len(id_U))
            missing_U = store.get(table_U, id_U, slab_SW, to_U if in_slots else None)
            out_UW, slab_SW[to_U] = slab_SW[to_U], 0
            assert not slab_SW.any(), f"step {step}"
            assert missing_U.tolist() == [key not in rows for key in keys], f"step {step}"
            zeros = bytes(4 * store.row_width)
            assert [row.tobytes() for row in out_UW] == [rows.get(key, zeros) for key in keys], f"step {step}"
        elif call == "contains":
            assert store.contains(table_U, id_U).tolist() == [key in rows for key in keys], f"step {step}"
        elif call == "flush":
            store.flush()
        else:
            assert scanned(store, 50) == rows
        assert len(store) == len(rows), f"step {step}"
    check(store, rows)
    assert isinstance(store.stats(), dict)
