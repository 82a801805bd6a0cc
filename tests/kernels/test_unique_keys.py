"""Unique keys against a dict: order of first occurrence, inverse, and where each key occurs; table by table too."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_by_table import unique_keys_by_table
from oneemb.kernels.unique_keys import occurrences, unique_keys, unique_keys_of_columns

INT64 = np.iinfo(np.int64)
INT32 = np.iinfo(np.int32)


def unique_python(table_N, id_N, padding_id=None):
    """{key: [its places in the batch]} in order of first occurrence."""
    places = {}
    for n, key in enumerate(zip(table_N.tolist(), id_N.tolist(), strict=True)):
        if key[1] != padding_id:
            places.setdefault(key, []).append(n)
    return places


def check(table_N, id_N, padding_id=None, find=unique_keys):
    found = find(table_N, id_N, padding_id=padding_id)
    places = unique_python(table_N, id_N, padding_id)
    assert list(zip(found.table_U.tolist(), found.id_U.tolist(), strict=True)) == list(places)
    inverse_N = np.full(len(id_N), -1)
    order_N, begin_U1, _ = found.occurrences()
    assert order_N.dtype == begin_U1.dtype == np.int32 and len(begin_U1) == len(places) + 1
    for u, at in enumerate(places.values()):
        inverse_N[at] = u
        assert found.head_U[u] == at[0]
        assert order_N[begin_U1[u] : begin_U1[u + 1]].tolist() == at, f"the occurrences of key {u}"
    assert found.inverse_N.tolist() == inverse_N.tolist()
    assert [array.dtype for array in found[:4]] == [np.int32, np.int64, np.int32, np.int32]
    return found


def batch(*keys, dtype=np.int64):
    return np.array([t for t, _ in keys], np.int32), np.array([i for _, i in keys], dtype)


def test_the_example_of_the_file_head():
    found = check(*batch((0, 7), (0, 9), (0, 7), (1, 7), (0, 5)), padding_id=5)
    assert found.inverse_N.tolist() == [0, 1, 0, 2, -1]


def test_every_int64_is_a_key():
    ids = [0, -1, 1, INT64.min, INT64.max, INT64.min + 1, 2**32, -(2**32), 2**31]
    check(*batch(*[(t, i) for t in (0, 1, 2**22) for i in ids], *[(1, i) for i in reversed(ids)]))


def test_equal_ids_of_two_tables_are_two_keys():
    assert len(check(*batch((0, 3), (1, 3), (0, 3), (1, 3))).id_U) == 2


def test_an_empty_batch_has_no_keys():
    assert len(check(*batch()).id_U) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_batch_of_one_key(size):
    found = check(*batch(*[(2, -9)] * size))
    assert len(found.id_U) == 1


@pytest.mark.parametrize("padding_id", [0, -1, INT64.min, INT64.max])
def test_padding_is_left_out_of_every_table(padding_id):
    found = check(*batch((0, padding_id), (1, padding_id), (0, 4), (3, padding_id)), padding_id=padding_id)
    assert found.id_U.tolist() == [4]


def test_a_batch_of_padding_has_no_keys():
    assert len(check(*batch((0, 5), (1, 5)), padding_id=5).id_U) == 0


@pytest.mark.parametrize("ids", ["sorted", "reversed", "strided", "random", "zipf", "all new"])
def test_large_batches(ids):
    print("seed 0")
    rng = np.random.default_rng(0)
    id_N = {
        "sorted": np.arange(20_000) // 3,
        "reversed": np.arange(20_000, 0, -1),
        "strided": np.arange(20_000) << 40,
        "random": rng.integers(INT64.min, INT64.max, 20_000),
        "zipf": rng.zipf(1.1, 20_000).astype(np.int64),
        "all new": rng.permutation(20_000).astype(np.int64),
    }[ids]
    check(rng.integers(0, 3, len(id_N)).astype(np.int32), id_N.astype(np.int64))


def test_int32_ids_give_int64_keys():
    ids = [0, -1, INT32.min, INT32.max, -1, 0]
    check(*batch(*[(0, i) for i in ids], dtype=np.int32))
    check(*batch(*[(0, i) for i in ids], dtype=np.int32), padding_id=-1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3) | st.integers(INT64.min, INT64.max)), max_size=60),
    st.none() | st.integers(-3, 3),
)
def test_any_batch_agrees_with_a_dict(keys, padding_id):
    check(*batch(*keys), padding_id=padding_id)


def check_samples(samples, tables, id_N, padding_id=None, threads=1):
    def find(table_N, id_N, padding_id):
        return unique_keys_of_columns(tables, id_N, padding_id=padding_id, threads=Threads(threads))

    return check(np.tile(np.arange(tables, dtype=np.int32), samples), id_N, padding_id, find)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("samples, tables", [(5000, 7), (9000, 1), (2, 9000)])
def test_keys_of_columns_are_those_of_their_ids_one_by_one(samples, tables, dtype, threads):
    print("seed 0")
    id_N = np.random.default_rng(0).zipf(1.2, samples * tables).clip(max=5000).astype(dtype)
    check_samples(samples, tables, id_N, threads=threads)
    check_samples(samples, tables, id_N, padding_id=1, threads=threads)


@given(st.integers(1, 4), st.none() | st.integers(-2, 2), st.data())
def test_any_columns_agree_with_a_dict(tables, padding_id, data):
    samples = data.draw(st.integers(0, 6))
    ids = data.draw(st.lists(st.integers(-2, 2) | st.integers(INT64.min, INT64.max), min_size=samples * tables,
                             max_size=samples * tables))  # fmt: skip
    check_samples(samples, tables, np.array(ids, np.int64), padding_id)


@pytest.mark.parametrize("threads, samples, is_known, in_columns", [
    (2, 6000, True, True), (1, 6000, True, False), (2, 600, True, False), (2, 6000, False, False),
])  # fmt: skip
def test_several_threads_find_keys_column_by_column(threads, samples, is_known, in_columns, monkeypatch):
    backend, launched, run = HostBackend(Threads(threads)), [], Threads.run
    table_N = backend.tables_of_columns(samples * 6, 6)
    id_N = np.random.default_rng(0).integers(0, 500, samples * 6)

    def noted(self, loop, *args, **kwargs):
        launched.append(loop.__name__)
        run(self, loop, *args, **kwargs)

    def find(table_N, id_N, padding_id):
        return backend.unique_keys(table_N, id_N, tables=6, padding_id=padding_id, check=None)

    monkeypatch.setattr(Threads, "run", noted)
    check(table_N if is_known else table_N.copy(), id_N, find=find)
    assert ("_find_in_columns_cpu" in launched) == in_columns


def check_bags(sizes, tables, id_N, padding_id=None, threads=None):
    """Bags of these sizes, bag p of table p % tables, against a dict that is filled table by table."""
    threads = threads or Threads(1)
    offset_P1 = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    bag_N = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    scale_N = np.arange(len(id_N), dtype=np.float32)
    places = {}
    for t in range(tables):
        for p in range(t, len(sizes), tables):
            for n in range(offset_P1[p], offset_P1[p + 1]):
                if id_N[n] != padding_id:
                    places.setdefault((t, int(id_N[n])), []).append(n)
    found = unique_keys_by_table(id_N, offset_P1, tables, padding_id=padding_id, threads=threads)
    assert list(zip(found.table_U.tolist(), found.id_U.tolist(), strict=True)) == list(places)
    inverse_N = np.full(len(id_N), -1)
    order_N, begin_U1, scale_M = found.occurrences(True, scale_N, threads=threads)
    assert order_N.dtype == begin_U1.dtype == np.int32
    assert len(begin_U1) == len(places) + 1 and len(order_N) == len(scale_M) == begin_U1[-1]
    for u, at in enumerate(places.values()):
        inverse_N[at] = u
        own = slice(begin_U1[u], begin_U1[u + 1])
        assert order_N[own].tolist() == bag_N[at].tolist() and scale_M[own].tolist() == at
    assert found.inverse_N.tolist() == inverse_N.tolist()
    assert occurrences(found.inverse_N, len(found.id_U), bag_N)[0].tolist() == order_N.tolist()
    assert found.occurrences()[2] is None
    order_N, _, scale_M = found.occurrences(False, scale_N, threads=threads)
    assert order_N.tolist() == scale_M.tolist() == sum(places.values(), [])
    assert [array.dtype for array in found[:3]] == [np.int32, np.int64, np.int32]
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_bags_of_several_tables_come_table_by_table(threads, dtype):
    print("seed 0")
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 12, 3 * 3000)
    id_N = rng.zipf(1.2, sizes.sum()).clip(max=5000).astype(dtype)
    check_bags(sizes, 3, id_N, padding_id=1, threads=Threads(threads))


def test_an_id_of_two_tables_in_bags_is_two_keys():
    found = check_bags([1, 2, 1, 0], 2, np.array([7, 7, 8, 7]))
    assert found.table_U.tolist() == [0, 1, 1] and found.inverse_N.tolist() == [0, 1, 2, 0]


def test_the_example_of_keys_table_by_table():
    found = check_bags([2, 1, 2, 1], 2, np.array([7, 9, 7, 7, 7, 8]))
    assert found.table_U.tolist() == [0, 0, 1, 1] and found.id_U.tolist() == [7, 9, 7, 8]
    assert found.inverse_N.tolist() == [0, 1, 2, 0, 0, 3]


@pytest.mark.parametrize("sizes", [[], [0, 0], [0, 3], [3, 0]], ids=str)
def test_tables_may_have_no_ids(sizes):
    check_bags(sizes, 2, np.arange(sum(sizes)) % 2)


def test_bags_of_padding_have_no_keys():
    assert len(check_bags([2, 1], 2, np.array([5, 5, 5]), padding_id=5).id_U) == 0


@given(st.integers(0, 5), st.integers(1, 4), st.none() | st.integers(-2, 2), st.data())
def test_any_bags_agree_with_a_dict(samples, tables, padding_id, data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=samples * tables, max_size=samples * tables))
    ids = data.draw(st.lists(st.integers(-2, 2) | st.integers(INT64.min, INT64.max), min_size=sum(sizes),
                             max_size=sum(sizes)))  # fmt: skip
    check_bags(sizes, tables, np.array(ids, np.int64), padding_id)


def check_columns(size_CB, columns, tables, id_N, padding_id=None, threads=None):
    """Bags of these sizes, column by column, against a dict that is filled column by column."""
    threads, (count, samples) = threads or Threads(1), size_CB.shape
    offset_P1 = np.append(0, np.cumsum(size_CB)).astype(np.int64)
    column_N = np.repeat(np.repeat(np.arange(count), samples), size_CB.ravel())
    bag_P = np.tile(np.arange(samples), count) * count + np.repeat(np.arange(count), samples)
    bag_N = np.repeat(bag_P, size_CB.ravel())
    places = {}
    for n, (c, id) in enumerate(zip(column_N.tolist(), id_N.tolist(), strict=True)):
        if id != padding_id:
            places.setdefault((columns[c], id), []).append(n)
    found = unique_keys_by_table(id_N, offset_P1, tables, columns=columns, padding_id=padding_id, threads=threads)
    assert list(zip(found.table_U.tolist(), found.id_U.tolist(), strict=True)) == list(places)
    inverse_N = np.full(len(id_N), -1)
    for u, at in enumerate(places.values()):
        inverse_N[at] = u
    assert found.inverse_N.tolist() == inverse_N.tolist()
    scale_N, everywhere = np.arange(len(id_N), dtype=np.float32), sum(places.values(), [])
    order_N, begin_U1, scale_M = found.occurrences(True, scale_N, threads=threads)
    assert begin_U1.tolist() == np.append(0, np.cumsum([len(at) for at in places.values()])).tolist()
    assert order_N.tolist() == bag_N[everywhere].tolist() and scale_M.tolist() == everywhere
    assert found.occurrences(False, threads=threads)[0].tolist() == everywhere


COLUMNS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(st.integers(0, 5), COLUMNS, st.none() | st.integers(-2, 2), st.data())
def test_any_bags_column_by_column_agree_with_a_dict(samples, columns, padding_id, data):
    columns = sorted(columns)
    count = samples * len(columns)
    sizes = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), np.int64)
    total = int(sizes.sum())
    ids = data.draw(st.lists(st.integers(-2, 2) | st.integers(INT64.min, INT64.max), min_size=total, max_size=total))
    check_columns(sizes.reshape(len(columns), samples), columns, 4, np.array(ids, np.int64), padding_id)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_bags_column_by_column(threads):
    print("seed 1")
    rng = np.random.default_rng(1)
    size_CB = rng.integers(0, 9, (4, 3000))
    id_N = rng.zipf(1.2, size_CB.sum()).clip(max=5000).astype(np.int64)
    check_columns(size_CB, [0, 0, 2, 3], 4, id_N, padding_id=1, threads=Threads(threads))


def _sorted_by_id(found):
    order = np.argsort(found.id_U)
    rank = np.argsort(order)
    inverse_N = np.where(found.inverse_N < 0, -1, rank[found.inverse_N]).astype(np.int32)
    return found._replace(
        table_U=found.table_U[order], id_U=found.id_U[order], head_U=found.head_U[order], inverse_N=inverse_N
    )


@pytest.mark.parametrize(
    "spoil",
    [
        _sorted_by_id,
        lambda found: found._replace(head_U=found.head_U + 2),
        lambda found: found._replace(inverse_N=np.zeros_like(found.inverse_N)),
    ],
    ids=["order", "first occurrence lost", "inverse"],
)
def test_the_oracle_notices_a_wrong_answer(spoil):
    with pytest.raises(AssertionError):
        check(*batch((0, 9), (0, 7), (0, 9)), find=lambda *args, **kwargs: spoil(unique_keys(*args, **kwargs)))
