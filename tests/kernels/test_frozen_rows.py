"""Rows of tensors against NumPy and torch's embedding_bag: the same bits."""

import numpy as np
import pytest
import torch

from oneemb.kernels.frozen_rows import OTHER, RowArrays
from oneemb.kernels.indexed_rows import RowIndex, cells_for, pool_indexed, put_cells, read_indexed
from oneemb.storage.fs import aligned_bytes
from tests.kernels.test_reduce_grads import TORCH, float32_of
from tests.support.pairwise import covering
from tests.support.row_updates import SmallShares, to_bits

ROWS, TABLES = 300, 3
KINDS = [*TORCH, 8, 4, 2]
EXTREMES = [-(2**63), -1, 0, 1, 2**62, 2**63 - 1]


def arrays_of(kind, dim, rng, scale_dtype=np.float16):
    """Rows of a kind, a dtype or bits of a weight, and their weights, float32 [S, D]."""
    if isinstance(kind, int):
        each = 8 // kind
        byte_SX = rng.integers(0, 256, (ROWS, -(-dim // each)), dtype=np.uint8)
        q_SX = np.stack([byte_SX >> kind * k & ((1 << kind) - 1) for k in range(each)], 2).reshape(ROWS, -1)
        scale_S2 = rng.normal(0, 1, (ROWS, 2)).astype(scale_dtype)
        by_S2 = scale_S2.astype(np.float32)
        weight_SD = q_SX[:, :dim].astype(np.float32) * by_S2[:, :1] + by_S2[:, 1:]
        return (None, byte_SX, scale_S2.view(np.uint16) if scale_dtype == np.float16 else scale_S2, kind), weight_SD
    weight_SX = to_bits(rng.normal(0, 1, (ROWS, dim)).astype(np.float32), kind)
    return (weight_SX, None, None, 0), float32_of(weight_SX, kind)


class Split(SmallShares):
    """Splits a range whatever a loop says of its least share."""

    def run(self, loop, size, *args, share_min):
        super().run(loop, size, *args)


class Case:
    def __init__(self, kind, dim, **more):
        print("seed 0")
        self.rng = rng = np.random.default_rng(0)
        self.rows, self.weight_SD = arrays_of(kind, dim, rng, **more)
        self.table_S = rng.integers(0, TABLES, ROWS).astype(np.int32)
        self.id_S = np.append(2 + rng.choice(10 * ROWS, ROWS - len(EXTREMES), replace=False), EXTREMES)
        cells = cells_for(ROWS)
        self.cell_C2 = aligned_bytes(cells * 16)[: cells * 16].view(np.int64).reshape(cells, 2)
        place_S = rng.permutation(ROWS)
        put_cells(self.cell_C2, self.table_S[place_S], self.id_S[place_S], place_S)
        self.frozen = RowIndex(self.cell_C2.ctypes.data, cells, RowArrays(*self.rows))
        self.place = {key: s for s, key in enumerate(zip(self.table_S.tolist(), self.id_S.tolist(), strict=True))}

    def places(self, table_N, id_N):
        return np.array([self.place.get(key, -1) for key in zip(table_N.tolist(), id_N.tolist(), strict=True)], int)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 3, 16, 83])
def test_rows_are_read_and_others_are_zeros(kind, dim):
    case = Case(kind, dim)
    table_N = np.repeat(np.arange(TABLES, dtype=np.int32), ROWS)
    id_N = np.tile(case.id_S, TABLES)
    expected_N = case.places(table_N, id_N)
    assert (expected_N >= 0).sum() == ROWS
    for count in (1, 2):
        out_ND, threads = np.full((len(id_N), dim), 7, np.float32), Split(count)
        assert np.array_equal(read_indexed(case.frozen, table_N, id_N, out_ND, threads=threads), expected_N)
        assert np.array_equal(out_ND, np.where(expected_N[:, None] >= 0, case.weight_SD[expected_N], 0))
        assert count == 1 or threads.shares > 1
    assert len(read_indexed(case.frozen, table_N[:0], id_N[:0], np.empty((0, dim), np.float32), threads=threads)) == 0


def bags_of(case, features, samples, *, missing):
    """Bags of up to 8 ids, some empty and one long, of features of tables in any order."""
    table_F = case.rng.integers(0, TABLES, features)
    size_P = case.rng.integers(0, 9, features * samples)
    size_P[[0, len(size_P) // 2]] = 0, 90
    offset_P1 = np.append(0, np.cumsum(size_P))
    table_N = table_F.repeat(size_P.reshape(features, samples).sum(1)).astype(np.int32)
    place_N = np.array([case.rng.choice(np.flatnonzero(case.table_S == table)) for table in table_N])
    id_N = case.id_S[place_N]
    if missing:
        id_N[case.rng.random(len(id_N)) < 0.2] += 1 << 50
    return table_F, table_N, id_N, offset_P1


def embedding_bag(row_ND, offset_P1, scale_N, means):
    rows = torch.from_numpy(row_ND)
    return torch.nn.functional.embedding_bag(
        torch.arange(len(rows)), rows, torch.from_numpy(offset_P1), mode="mean" if means else "sum",
        include_last_offset=True, per_sample_weights=None if scale_N is None else torch.from_numpy(scale_N),
    ).numpy()  # fmt: skip


@pytest.mark.parametrize("kind, dim, how", covering(KINDS, (1, 3, 16, 83), ("sum", "mean", "weighted")))
def test_bags_have_the_bits_of_torchs_embedding_bag(kind, dim, how):
    case, features, samples = Case(kind, dim), 5, 13
    other_TD = case.rng.normal(0, 1, (TABLES, dim)).astype(np.float32)
    column_F = case.rng.permutation(features + 1)[:features] * dim
    for missing in (False, True):
        table_F, table_N, id_N, offset_P1 = bags_of(case, features, samples, missing=missing)
        scale_N = case.rng.normal(0, 1, len(id_N)).astype(np.float32) if how == "weighted" else None
        place_N = case.places(table_N, id_N)
        row_ND = np.where(place_N[:, None] >= 0, case.weight_SD[place_N], other_TD[table_N])
        expected_FBD = embedding_bag(row_ND, offset_P1, scale_N, how == "mean").reshape(features, samples, dim)
        for count in (1, 2, 3):
            out_BE, threads = np.full((samples, (features + 1) * dim), 7, np.float32), Split(count)
            its = table_F, column_F, id_N, offset_P1, scale_N, how == "mean"
            found = pool_indexed(case.frozen, *its, other_TD, out_BE, threads=threads)
            for f, column in enumerate(column_F):
                assert np.array_equal(out_BE[:, column : column + dim], expected_FBD[f])
            assert (out_BE == 7).sum() == samples * dim  # a column that no feature has
            assert (found is not None) is missing and (count == 1 or threads.shares > 1)
            if missing:
                assert np.array_equal(found[0], table_N) and np.array_equal(found[1] < 0, place_N < 0)
                absent_M = np.flatnonzero(place_N < 0)
                found[1][absent_M] = OTHER - np.arange(len(absent_M))
                again_BE = np.full_like(out_BE, 7)
                pool_indexed(case.frozen, *its, row_ND[absent_M], again_BE, threads=threads, known=found)
                assert np.array_equal(again_BE, out_BE)


def test_scales_may_be_of_32_bits():
    case = Case(8, 19, scale_dtype=np.float32)
    out_ND = np.empty((ROWS, 19), np.float32)
    read_indexed(case.frozen, case.table_S, case.id_S, out_ND, threads=Split(1))
    assert np.array_equal(out_ND, case.weight_SD)


def test_no_bags_and_no_ids():
    case = Case("float32", 16)
    other_TD, out_BE = np.ones((TABLES, 16), np.float32), np.full((2, 16), 7, np.float32)
    its = np.array([0]), np.array([0]), np.empty(0, np.int64)
    assert pool_indexed(case.frozen, *its, np.array([0]), None, False, other_TD, out_BE[:0], threads=Split(2)) is None
    pool_indexed(case.frozen, *its, np.array([0, 0, 0]), None, True, other_TD, out_BE, threads=Split(2))
    assert not out_BE.any()


def test_many_keys_are_put_in_several_turns_and_a_quarter_of_cells_is_left():
    rows = 70_000
    cell_C2 = aligned_bytes(cells_for(rows) * 16)[: cells_for(rows) * 16].view(np.int64).reshape(-1, 2)
    put_cells(cell_C2, np.zeros(rows, np.int32), np.arange(rows), np.arange(rows)[::-1].copy())
    word_C = cell_C2[:, 1]
    assert (word_C != 0).sum() == rows and rows * 24 >= cell_C2.nbytes
    taken_C2 = cell_C2[word_C != 0]
    assert np.array_equal(taken_C2[:, 0] + taken_C2[:, 1] - 1, np.full(rows, rows - 1))
