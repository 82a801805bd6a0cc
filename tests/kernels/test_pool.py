"""Pooled weights against sums in NumPy, one id after the other: the same bits."""

import numpy as np
import pytest

from oneemb.kernels.arrays import Bags, rows_of_columns
from oneemb.kernels.pool import pool, pool_max, spread_max_grads
from tests.kernels.test_reduce_grads import TORCH, float32_of
from tests.support.row_updates import SmallShares, to_bits


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 83, 130])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_bag_is_summed_in_float32_and_batch_order(dtype, dim, scaled):
    print("seed 0")
    rng = np.random.default_rng(0)
    weight_SX = to_bits(rng.normal(0, 1, (60, dim + 4)).astype(np.float32), dtype)
    slot_U = rng.permutation(60)[:40]
    size_P = rng.integers(0, 9, 50)
    size_P[[0, 20, 49]] = 0
    offset_P1 = np.append(0, np.cumsum(size_P))
    inverse_N = rng.integers(-1, 40, offset_P1[-1]).astype(np.int32)
    scale_N = rng.normal(0, 1, len(inverse_N)).astype(np.float32) if scaled else None
    expected_PD = np.zeros((50, dim), np.float32)
    for p in range(50):
        for n in range(offset_P1[p], offset_P1[p + 1]):
            if inverse_N[n] >= 0:
                row_D = float32_of(weight_SX, dtype)[slot_U[inverse_N[n]], :dim]
                expected_PD[p] += row_D if scale_N is None else row_D * scale_N[n]
    for count in (1, 2, 3):
        for row_P in (None, rows_of_columns(50, 5)):
            out_PX = np.full((50, dim), 7, weight_SX.dtype)
            bags, threads = Bags(offset_P1, row_P=row_P), SmallShares(count)
            pool(weight_SX, slot_U, inverse_N, bags, scale_N, out_PX, threads=threads)
            assert out_PX[np.arange(50) if row_P is None else row_P].tobytes() == to_bits(expected_PD, dtype).tobytes()


def test_bags_of_columns_give_rows_sample_by_sample():
    assert rows_of_columns(6, 2).tolist() == [0, 2, 4, 1, 3, 5]
    bags = Bags(np.array([0, 2, 3, 3, 4, 4, 5]), row_P=rows_of_columns(6, 2))
    assert bags.bag_N.tolist() == [0, 0, 2, 1, 5] and bags.bag_N.dtype == np.int32


def test_bags_of_nothing_but_padding_are_zeros():
    out_PD, argmax_PD = np.full((2, 4), 7, np.float32), np.zeros((2, 4), np.int32)
    rows = np.ones((3, 4), np.float32), np.empty(0, np.int64), np.array([-1, -1])
    pool(*rows, Bags(np.array([0, 0, 2])), None, out_PD, threads=SmallShares(1))
    assert not out_PD.any()
    out_PD[:] = 7
    pool_max(*rows, Bags(np.array([0, 0, 2])), out_PD, argmax_PD, threads=SmallShares(1))
    assert not out_PD.any() and (argmax_PD == -1).all()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 83])
def test_the_first_of_the_greatest_numbers_is_the_maximum_of_a_bag(dtype, dim):
    print("seed 1")
    rng = np.random.default_rng(1)
    # Few values, so that they come more than once.
    weight_SX = to_bits(rng.choice([-np.inf, -1.5, -0.0, 0.0, 1.0, np.nan], (60, dim + 4)).astype(np.float32), dtype)
    slot_U = rng.permutation(60)[:40]
    size_P = rng.integers(0, 9, 50)
    size_P[[0, 20, 49]] = 0
    offset_P1 = np.append(0, np.cumsum(size_P))
    inverse_N = rng.integers(-1, 40, offset_P1[-1]).astype(np.int32)
    grad_PX = to_bits(rng.normal(0, 1, (50, dim)).astype(np.float32), dtype)
    expected_PX, expected_ND = np.zeros((50, dim), weight_SX.dtype), np.zeros((len(inverse_N), dim), weight_SX.dtype)
    argmax = np.full((50, dim), -1)
    rows = float32_of(weight_SX, dtype)
    for p in range(50):
        known = [n for n in range(offset_P1[p], offset_P1[p + 1]) if inverse_N[n] >= 0]
        for d in range(dim):
            best = None
            for n in known:
                if best is None or rows[slot_U[inverse_N[n]], d] > rows[slot_U[inverse_N[best]], d]:
                    best = n
            if best is not None:
                argmax[p, d] = best - offset_P1[p]
                expected_PX[p, d] = weight_SX[slot_U[inverse_N[best]], d]
                expected_ND[best, d] = grad_PX[p, d]
    for count in (1, 2, 3):
        threads = SmallShares(count)
        for row_P in (None, rows_of_columns(50, 10)):
            bags, at = Bags(offset_P1, row_P=row_P), np.arange(50) if row_P is None else row_P
            out_PX, argmax_PD = np.full((50, dim), 7, weight_SX.dtype), np.full((50, dim), 7, np.int32)
            pool_max(weight_SX, slot_U, inverse_N, bags, out_PX, argmax_PD, threads=threads)
            assert out_PX[at].tobytes() == expected_PX.tobytes() and (argmax_PD[at] == argmax).all()
            grad_ND, its_grad_PX = np.full_like(expected_ND, 7), np.empty_like(grad_PX)
            its_grad_PX[at] = grad_PX
            spread_max_grads(bags, argmax_PD, its_grad_PX, grad_ND, threads=threads)
            assert grad_ND.tobytes() == expected_ND.tobytes()
