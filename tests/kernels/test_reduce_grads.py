"""Summed gradients against a float32 sum in batch order, bit for bit, and against float64."""

import numpy as np
import pytest
import torch

from oneemb.kernels.reduce_grads import Segments, largest_magnitude, rows_norm, sum_segments
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from tests.support.row_updates import SmallShares, to_bits

DIMS = [1, 3, 16, 64, 83, 130]  # 83 weights: a wide vector, one of 16 and three numbers
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def float32_of(bits, dtype):
    """What the stored bits mean; the conversion is torch's."""
    if dtype == "float32":
        return bits
    return torch.from_numpy(bits.view(np.int16)).view(TORCH[dtype]).float().numpy()


def in_batch_order(grad_ND, inverse_N, size):
    grad_UD = np.zeros((size, grad_ND.shape[1]), np.float32)
    seen = np.zeros(size, bool)
    for n, u in enumerate(inverse_N):
        if u >= 0:
            grad_UD[u] = grad_UD[u] + grad_ND[n] if seen[u] else grad_ND[n]
            seen[u] = True
    return grad_UD


def batch(rng, size, ids, dtype, dim, padding_id=None):
    id_N = rng.integers(0, ids, size)
    unique = unique_keys(np.zeros(size, np.int32), id_N, padding_id=padding_id)
    return to_bits(rng.normal(0, 1, (size, dim)), dtype), unique


def sums_of(grad_NX, order_N, begin_U1, scale_N=None, *, threads):
    return sum_segments(Segments(grad_NX, order_N, begin_U1, scale_N), threads=threads)


def check_sums(dtype, dim, threads, sums=sums_of):
    print("seed 0")
    rng = np.random.default_rng(0)
    grad_NX, unique = batch(rng, 400, 60, dtype, dim, padding_id=7)
    grad_UD, finite_U = sums(grad_NX, *unique.occurrences(), threads=threads)
    grad_ND = float32_of(grad_NX, dtype)
    expected = in_batch_order(grad_ND, unique.inverse_N, len(unique.id_U))
    assert grad_UD.dtype == np.float32 and grad_UD.tobytes() == expected.tobytes()
    exact = np.zeros(expected.shape)
    np.add.at(exact, unique.inverse_N[unique.inverse_N >= 0], grad_ND[unique.inverse_N >= 0].astype(np.float64))
    np.testing.assert_allclose(grad_UD, exact, rtol=1e-5, atol=1e-5)
    assert finite_U.dtype == bool and finite_U.all()
    return grad_UD.tobytes()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("dim", DIMS)
def test_the_sum_runs_in_float32_and_batch_order(dtype, dim):
    one, two, three = SmallShares(1), SmallShares(2), SmallShares(3)
    assert check_sums(dtype, dim, one) == check_sums(dtype, dim, two) == check_sums(dtype, dim, three)
    assert 1 == one.shares < two.shares < three.shares


def test_a_key_that_fills_the_batch_is_summed_in_batch_order():
    # 2^24 + 1 = 2^24 in float32: a sum in another order, or in pairs, gives another number.
    grad_ND = np.array([[2.0**24]] + [[1.0]] * 1000 + [[-(2.0**24)]], np.float32)
    unique = unique_keys(np.zeros(len(grad_ND), np.int32), np.full(len(grad_ND), -5))
    grad_UD, _ = sums_of(grad_ND, *unique.occurrences(), threads=Threads(2))
    assert grad_UD.tolist() == [[0.0]]


def test_a_gradient_of_minus_zero_stays_minus_zero():
    unique = unique_keys(np.zeros(1, np.int32), np.array([1]))
    grad_UD, _ = sums_of(np.array([[-0.0]], np.float32), *unique.occurrences(), threads=Threads(1))
    assert np.signbit(grad_UD[0, 0])


def test_no_keys_give_no_sums():
    unique = unique_keys(np.zeros(3, np.int32), np.full(3, 5), padding_id=5)
    grad_UD, finite_U = sums_of(np.ones((3, 4), np.float32), *unique.occurrences(), threads=Threads(2))
    assert grad_UD.shape == (0, 4) and finite_U.shape == (0,)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("at", [0, 5, 8], ids=["first of a key", "later one", "last weight"])
def test_a_value_that_is_not_finite_marks_its_key_only(value, dtype, at):
    id_N = np.array([10, 11, 12, 10, 11, 12, 13, 10, 10])
    unique = unique_keys(np.zeros(9, np.int32), id_N)
    grad_ND = np.ones((9, 5), np.float32)
    grad_ND[at, 4 if at == 8 else 2] = value
    _, finite_U = sums_of(to_bits(grad_ND, dtype), *unique.occurrences(), threads=Threads(1))
    assert (unique.id_U[~finite_U]).tolist() == [id_N[at]]


def test_a_sum_that_overflows_is_not_finite():
    unique = unique_keys(np.zeros(3, np.int32), np.array([1, 2, 1]))
    largest = np.finfo(np.float32).max
    grad_UD, finite_U = sums_of(
        np.array([[largest], [largest], [largest]], np.float32), *unique.occurrences(), threads=Threads(1)
    )
    assert finite_U.tolist() == [False, True] and np.isinf(grad_UD[0, 0])


def test_half_width_sums_do_not_overflow_where_float32_does_not():
    unique = unique_keys(np.zeros(2, np.int32), np.array([1, 1]))
    grad_NX = to_bits(np.array([[49152.0], [49152.0]]), "float16")
    grad_UD, finite_U = sums_of(grad_NX, *unique.occurrences(), threads=Threads(1))
    assert grad_UD.tolist() == [[98304.0]]
    assert finite_U.all()


def test_the_oracle_notices_another_order():
    def backwards(grad_NX, order_N, begin_U1, scale_N, threads):
        grad_UD, finite_U = sums_of(grad_NX, order_N, begin_U1, threads=threads)
        for u in range(len(grad_UD)):
            segment = order_N[begin_U1[u] : begin_U1[u + 1]]
            grad_UD[u] = np.add.accumulate(grad_NX[segment[::-1]], axis=0)[-1]
        return grad_UD, finite_U

    with pytest.raises(AssertionError):
        check_sums("float32", 16, Threads(1), sums=backwards)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [16, 83])
def test_the_gradient_of_a_bag_is_shared_by_its_ids(dtype, scaled, dim):
    print("seed 0")
    rng = np.random.default_rng(0)
    grad_PX, unique = batch(rng, 400, 60, dtype, dim, padding_id=7)
    bag_N = np.sort(rng.integers(0, 400, 400)).astype(np.int32)
    scale_N = rng.normal(0, 1, 400).astype(np.float32) if scaled else None
    grad_UD, finite_U = sum_segments(Segments(grad_PX, *unique.occurrences(bag_N, scale_N)), threads=SmallShares(2))
    grad_ND = float32_of(grad_PX, dtype)[bag_N]
    grad_ND = grad_ND if scale_N is None else grad_ND * scale_N[:, None]
    expected = in_batch_order(grad_ND, unique.inverse_N, len(grad_UD))
    assert grad_UD.tobytes() == expected.tobytes() and finite_U.all()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("size", [0, 1, 5, 40_000, 100_001])
def test_the_largest_magnitude(dtype, size):
    print("seed 0")
    values = to_bits(np.random.default_rng(0).normal(0, 1, size), dtype)
    expected = np.abs(float32_of(values, dtype)).max(initial=0)
    for count in (1, 3):
        assert largest_magnitude(values, threads=Threads(count)) == expected


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_the_largest_magnitude_is_not_finite_where_a_value_is_not(dtype, value):
    values = np.ones(100_000)
    values[77_777] = value
    assert not np.isfinite(largest_magnitude(to_bits(values, dtype), threads=Threads(2)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_norm_is_not_finite_where_a_value_is_not(value, p, at):
    grad_UD = np.ones((2, 3), np.float32)
    grad_UD[1, at] = value
    expected = float(torch.linalg.vector_norm(torch.from_numpy(grad_UD), p))
    assert np.isnan(expected) == np.isnan(value)
    np.testing.assert_equal(rows_norm(grad_UD, p, threads=Threads(1)), expected)
