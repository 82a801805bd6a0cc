"""Initial rows: plain Python's Philox and scipy's distributions say what they must be, a golden table that they stay.

The oracle draws weight d of (table, id) from word d % 4 of philox(id, table, d // 4) and inverts the distribution's
own function with scipy; it shares nothing with the code under test but the constants' names.
"""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from oneemb.kernels.init_rows import CONSTANT, NORMAL, TRUNC_NORMAL, UNIFORM, InitialRows, init_rows, normal_quantile
from oneemb.storage.rows.row_format import RowFormat
from tests.kernels.test_philox import philox_python
from tests.support.row_updates import SmallShares, to_bits

INT64 = np.iinfo(np.int64)
SEEDS = [0, 1, 2**64 - 1, 0x123456789ABCDEF0]

# What is drawn, its parameters as the kernel gets them, and the same distribution of scipy.
DRAWS = {
    "constant": (CONSTANT, [0.375], None),
    "uniform": (UNIFORM, [-0.25, 0.75], scipy.stats.uniform(-0.25, 1.0)),
    "normal": (NORMAL, [0.5, 0.1], scipy.stats.norm(0.5, 0.1)),
    "truncated normal": (
        TRUNC_NORMAL,
        [0.5, 0.1, 0.022750131948179195, 0.8413447460685429],  # the normal cdf of -2 and 1
        scipy.stats.truncnorm(-2.0, 1.0, 0.5, 0.1),
    ),
}


def initial_rows(seed, columns_T, end_C):
    """columns_T: for each table a list of names in DRAWS, one a column."""
    kind_TC = np.array([[DRAWS[name][0] for name in columns] for columns in columns_T], np.int64)
    param_TC4 = np.zeros((*kind_TC.shape, 4))
    for t, columns in enumerate(columns_T):
        for c, name in enumerate(columns):
            param_TC4[t, c, : len(DRAWS[name][1])] = DRAWS[name][1]
    return InitialRows(seed, kind_TC, param_TC4, np.array(end_C, np.int64))


def begin_rows(initial, table_U, id_U, *, dtype="float32", state=(), count=1):
    """Rows in a slab of other slots, written in a random order of slots."""
    layout = RowFormat(int(initial.end_C[-1]), dtype, None, tuple(state))
    slots = len(id_U) + 5
    rng = np.random.default_rng(9)
    row_SW = rng.integers(0, 2**32, (slots, layout.row_width), dtype=np.uint32).view(np.float32)
    weight_SX = layout.weights(row_SW)
    if weight_SX.dtype != np.float32:
        weight_SX[:, layout.dim : 2 * layout.state_begin] = 0
    before = row_SW.copy()
    slot_U = rng.permutation(slots)[: len(id_U)].astype(np.int64)
    threads = SmallShares(count)
    table_U, id_U = np.array(table_U, np.int32), np.array(id_U, np.int64)
    init_rows(
        weight_SX, row_SW, slot_U, table_U, id_U, initial, np.array(state, np.float32),
        state_begin=layout.state_begin, threads=threads,
    )  # fmt: skip
    assert threads.shares >= min(count, max(1, len(id_U)))
    others = np.setdiff1d(np.arange(slots), slot_U)
    assert row_SW[others].tobytes() == before[others].tobytes(), "a row that is not new was written"
    assert (row_SW[slot_U, layout.state_begin :] == np.array(state, np.float32)).all()
    return weight_SX[slot_U, : layout.dim]


def uniform_python(seed, table, id, d):
    id = id % 2**64
    words = philox_python((id % 2**32, id >> 32, table, d // 4), (seed % 2**32, seed >> 32))
    return (words[d % 4] + 0.5) / 2**32


def weight_python(name, seed, table, id, d):
    kind, params, distribution = DRAWS[name]
    return params[0] if kind == CONSTANT else distribution.ppf(uniform_python(seed, table, id, d))


KEYS = [(t, i) for t in range(3) for i in (0, -1, 1, 7, 2**31, 2**32 + 7, INT64.min, INT64.max)]
TABLES = [["uniform"], ["normal"], ["truncated normal"]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", [1, 3, 4, 5, 17])
def test_weights_are_those_of_philox_and_scipy(seed, dim):
    table_U, id_U = zip(*KEYS, strict=True)
    found = begin_rows(initial_rows(seed, TABLES, [dim]), table_U, id_U)
    expected = [[weight_python(TABLES[t][0], seed, t, i, d) for d in range(dim)] for t, i in KEYS]
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 4, 17])
def test_half_width_weights_are_the_float32_ones_rounded_once(dtype, dim):
    table_U, id_U = zip(*KEYS, strict=True)
    initial = initial_rows(3, TABLES, [dim])
    wide, narrow = (begin_rows(initial, table_U, id_U, dtype=kind) for kind in ("float32", dtype))
    assert narrow.tobytes() == to_bits(wide, dtype).tobytes()


def test_a_row_depends_on_its_key_only():
    # Neither on its place among the new rows, nor on the number of threads, nor on the state after it.
    rng = np.random.default_rng(0)
    table_U, id_U = rng.integers(0, 3, 400), rng.integers(INT64.min, INT64.max, 400)
    initial = initial_rows(5, TABLES, [13])
    one = begin_rows(initial, table_U, id_U)
    order = rng.permutation(400)
    two = begin_rows(initial, table_U[order], id_U[order], count=2, state=[0.1, 0.0])
    three = begin_rows(initial, table_U, id_U, count=3)
    assert one.tobytes() == three.tobytes() and one[order].tobytes() == two.tobytes()
    alone = [begin_rows(initial, table_U[n : n + 1], id_U[n : n + 1])[0] for n in range(10)]
    assert np.array(alone).tobytes() == one[:10].tobytes()


@pytest.mark.parametrize("end_C", [[3, 4, 9], [4, 8, 9], [1, 2, 9], [5, 6, 7, 9], [2, 9]])
def test_columns_change_the_distribution_and_not_the_draw(end_C):
    names = ["normal", "constant", "uniform", "truncated normal"][: len(end_C)]
    table_U, id_U = zip(*KEYS, strict=True)
    tables = [names, names[::-1], ["constant"] * len(end_C)]
    found = begin_rows(initial_rows(11, tables, end_C), table_U, id_U)
    column_D = np.searchsorted(end_C, np.arange(9), side="right")
    expected = [[weight_python(tables[t][column_D[d]], 11, t, i, d) for d in range(9)] for t, i in KEYS]
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("change", ["seed", "table", "id", "column"])
def test_every_part_of_the_key_changes_the_draw(change):
    def draw(seed=0, table=0, id=5, column=0):
        row = begin_rows(initial_rows(seed, [["uniform"]] * 3, [8]), [table], [id])[0]
        return row[column]

    values = [1, 2**32, 2**63] if change == "seed" else [1, 2] if change == "table" else [1, 4, 5, 7]
    values = [2**32 + 5, -5, INT64.min + 5] if change == "id" else values
    assert len({float(draw()), *(float(draw(**{change: value})) for value in values)}) == len(values) + 1


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated normal"])
def test_a_hundred_thousand_weights_have_the_distribution(name):
    distribution = DRAWS[name][2]
    found = begin_rows(initial_rows(0, [[name]], [10]), np.zeros(10_000), np.arange(10_000))
    # The seed is fixed, so this p-value is too; a draw from another distribution gives one below 1e-50.
    assert scipy.stats.kstest(found.ravel(), distribution.cdf).pvalue > 0.01
    low, high = distribution.support()
    assert low <= found.min() and found.max() <= high
    np.testing.assert_allclose(found.mean(), distribution.mean(), atol=5 * distribution.std() / math.sqrt(found.size))


def test_neighbouring_ids_columns_and_tables_are_not_correlated():
    found = np.stack(
        [begin_rows(initial_rows(0, [["normal"]] * 2, [8]), np.full(4000, t), np.arange(4000)) for t in (0, 1)]
    )
    z = (found - 0.5) / 0.1
    for x, y in [(z[:, :-1], z[:, 1:]), (z[..., :-1], z[..., 1:]), (z[0], z[1])]:
        assert abs((x * y).mean()) < 5 / math.sqrt(x.size)


def test_a_wrong_distribution_is_noticed():
    found = begin_rows(initial_rows(0, [["uniform"]], [10]), np.zeros(10_000), np.arange(10_000))
    assert scipy.stats.kstest(found.ravel(), scipy.stats.uniform(-0.25, 1.01).cdf).pvalue < 1e-9


def test_the_quantile_agrees_with_scipy_to_the_last_digits():
    p = np.concatenate(
        [
            (np.arange(2000) + 0.5) / 2000,
            [0.075, 0.925, 0.5 - 0.425, 0.5 + 0.425, math.exp(-25.0), 1 - math.exp(-25.0)],  # where formulas meet
            np.logspace(-300, -1, 600),
            1 - np.logspace(-15, -1, 100),
            [2.0**-33, 1 - 2.0**-33, np.nextafter(0.075, 0), np.nextafter(0.925, 1), 0.5],
        ]
    )
    found = np.array([normal_quantile(x) for x in p])
    np.testing.assert_allclose(found, scipy.special.ndtri(p), rtol=2e-15, atol=2e-16)


def test_the_largest_draw_of_all_is_finite():
    # The words 0 and 2^32 - 1 stand for 2^-33 from either end.
    assert normal_quantile(2.0**-33) == -normal_quantile(1 - 2.0**-33)
    assert 6.2 < normal_quantile(1 - 2.0**-33) < 6.4


def test_a_constant_is_rounded_as_the_dtype_is():
    initial = InitialRows(0, np.array([[CONSTANT]]), np.array([[[1 / 3, 0, 0, 0]]]), np.array([3], np.int64))
    for dtype, kind in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        found = begin_rows(initial, [0], [0], dtype=dtype)
        assert found.tobytes() == to_bits(torch.full((1, 3), 1 / 3, dtype=kind).float().numpy(), dtype).tobytes()


def test_no_new_rows_write_nothing():
    assert begin_rows(initial_rows(0, TABLES, [4]), [], []).shape == (0, 4)


# Initial weights for ever: tables trained with one release go on with the next. float32 bits of weights 0 to 5, which
# lie in two blocks of four, for (seed, table, id) and each of TABLES in turn.
GOLDEN = {
    (0, 0, 0): "3e189fa3 3f2169c6 3ef8af59 3eb601b8 bd918c61 be32dc77",
    (0, 0, -1): "3f33ce74 3f1fb998 3dd3e557 bdd175ed 3f3aa677 be6d8604",
    (0, 1, 0): "3f011213 3f27ba98 3eaff508 3f00feda 3f1ce75e 3f03cc88",
    (0, 1, INT64.max): "3f0ada8d 3f1bf93c 3f101b21 3f3849f7 3ed75522 3f09379c",
    (0, 2, 0): "3ea82f10 3f06e842 3ec9c058 3ef38fa2 3f00a17d 3ed8bc2f",
    (0, 2, INT64.min): "3ea71b8e 3f0e0b07 3f053a4e 3ef5a6a8 3ef99740 3f0b6f7a",
    (1, 0, 0): "3f23e806 3f250a0f 3eabe446 3eec2b54 be361047 be07ee2e",
    (2**64 - 1, 1, 123456789): "3edac896 3ef2dcfc 3f0db6a8 3f16b6e8 3eb84ee1 3e93e261",
    (0x123456789ABCDEF0, 2, -(10**18)): "3ed231bb 3f18b51b 3eee88b3 3eda9485 3eafe395 3f182677",
    (42, 0, 2**32): "3c382e2d 3e76fd78 bd80c631 3e2abc10 3cb540a4 3cd5f2ea",
    (42, 1, 1): "3ec60fca 3f3d15f2 3ebfff02 3ed970b3 3edff89f 3ebd38b6",
    (42, 2, 1): "3efdcd89 3f10f1a7 3f09b99e 3f044e6d 3ef7b92d 3f02a5c1",
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_initial_weights_never_change(key):
    seed, table, id = key
    found = begin_rows(initial_rows(seed, TABLES, [6]), [table], [id]).view(np.uint32)[0]
    assert [f"{bits:08x}" for bits in found] == GOLDEN[key].split()
