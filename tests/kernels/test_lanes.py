"""Lanes against NumPy and torch, number by number: any bits in, the same bits out."""

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError

from oneemb.kernels.jit import cpu
from oneemb.kernels.jit_lanes import (
    LANES,
    WIDE,
    load_lanes,
    load_nibbles,
    load_pairs,
    load_wide,
    move_lanes,
    multiply_add,
    same_lanes,
    same_wide,
    store_lanes,
    sum_lanes,
)  # fmt: skip

FORMATS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@cpu
def _convert(from_SX, to_SX):
    for s in range(len(from_SX)):
        for x in range(0, from_SX.shape[1], LANES):
            store_lanes(to_SX, s, x, load_lanes(from_SX, s, x))


@cpu
def _compute(x_SX, y_SX, scale, out_KSX):
    for s in range(len(x_SX)):
        for d in range(0, x_SX.shape[1], LANES):
            x, y = load_lanes(x_SX, s, d), load_lanes(y_SX, s, d)
            store_lanes(out_KSX[0], s, d, x + y)
            store_lanes(out_KSX[1], s, d, x - y)
            store_lanes(out_KSX[2], s, d, x * y)
            store_lanes(out_KSX[3], s, d, x / y)
            store_lanes(out_KSX[4], s, d, scale - x * scale + same_lanes(scale) / x)


@cpu
def _convert_wide(from_SX, to_SX):
    for s in range(len(from_SX)):
        for x in range(0, from_SX.shape[1], WIDE):
            store_lanes(to_SX, s, x, load_wide(from_SX, s, x))


@cpu
def _compute_wide(x_SX, y_SX, scale, out_SX):
    for s in range(len(x_SX)):
        for d in range(0, x_SX.shape[1], WIDE):
            store_lanes(out_SX, s, d, same_wide(scale) - load_wide(x_SX, s, d) * scale / load_wide(y_SX, s, d))


@cpu
def _mix_kinds(x_SX):
    store_lanes(x_SX, 0, 0, load_wide(x_SX, 0, 0) + load_lanes(x_SX, 0, 0))


@cpu
def _sum(x_SX, out_S):
    for s in range(len(x_SX)):
        out_S[s] = sum_lanes(load_lanes(x_SX, s, np.int64(0)))


@cpu
def _unpack(byte_SX, out_KSD):
    for s in range(len(byte_SX)):
        for d in range(0, out_KSD.shape[2], LANES):
            store_lanes(out_KSD[0], s, d, load_nibbles(byte_SX, s, d >> 1))
            store_lanes(out_KSD[1], s, d, load_pairs(byte_SX, s, d >> 2))


@cpu
def _multiply_add(x_SX, scale, out_KSX):
    for s in range(len(x_SX)):
        for d in range(0, x_SX.shape[1], LANES):
            x = load_lanes(x_SX, s, d)
            store_lanes(out_KSX[0], s, d, multiply_add(x, scale, load_lanes(out_KSX[0], s, d)))
        for d in range(x_SX.shape[1]):
            out_KSX[1, s, d] = multiply_add(x_SX[s, d], scale, out_KSX[1, s, d])


@cpu
def _move(from_SX, from_row, from_column, to_SX, to_row, to_column):
    move_lanes(to_SX, to_row, to_column, from_SX, from_row, from_column)


def any_bits(dtype, rows=400, seed=0):
    """Random bits, and beside them those of numbers that are special, or halfway between two of a narrower format."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype) != np.float32:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, 4 * LANES)
    bits = rng.integers(0, 1 << 32, (rows, 4 * LANES), dtype=np.uint32)
    bits[: rows // 2] &= np.uint32(0xFFFF8000)  # ties of bfloat16
    usual = 100 * rng.standard_normal((rows // 4, 4 * LANES))
    bits[rows // 2 : rows // 2 + rows // 4] = usual.astype(np.float32).view(np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 65504, 65520, 6e-8, 2.0**-25]
    special = np.array(special, np.float32)
    bits[-1, : len(special)] = special.view(np.uint32)
    return bits.view(np.float32)


def as_torch(bits, name):
    return torch.from_numpy(bits.view(np.int32 if bits.dtype == np.float32 else np.int16).copy()).view(TORCH[name])


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_loads_and_stores_convert_as_torch_does(source, to):
    given = any_bits(FORMATS[source])
    found = np.zeros(given.shape, FORMATS[to])
    _convert(given, found)
    expected, got = as_torch(given, source).float().to(TORCH[to]).float(), as_torch(found, to).float()
    nan = torch.isnan(expected)
    assert torch.equal(nan, torch.isnan(got))
    assert torch.equal(expected[~nan], got[~nan])
    assert torch.equal(torch.signbit(expected[~nan]), torch.signbit(got[~nan]))


def test_every_lane_is_computed_as_a_number():
    x_SX, y_SX, scale = any_bits(np.float32), any_bits(np.float32, seed=1), np.float32(0.3)
    out_KSX = np.zeros((5, *x_SX.shape), np.float32)
    _compute(x_SX, y_SX, scale, out_KSX)
    with np.errstate(all="ignore"):
        expected = [x_SX + y_SX, x_SX - y_SX, x_SX * y_SX, x_SX / y_SX, scale - x_SX * scale + scale / x_SX]
    for found, wanted in zip(out_KSX, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_wide_vectors_are_several_lanes(source, to):
    given = any_bits(FORMATS[source])
    found, expected = np.zeros(given.shape, FORMATS[to]), np.zeros(given.shape, FORMATS[to])
    _convert_wide(given, found)
    _convert(given, expected)
    assert found.tobytes() == expected.tobytes()


def test_wide_vectors_are_computed_as_numbers():
    x_SX, y_SX, scale = any_bits(np.float32), any_bits(np.float32, seed=1), np.float32(0.3)
    out_SX = np.zeros_like(x_SX)
    _compute_wide(x_SX, y_SX, scale, out_SX)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out_SX, scale - x_SX * scale / y_SX)
    with pytest.raises(TypingError):
        _mix_kinds(x_SX)


def test_parts_of_bytes_come_lowest_first():
    print("seed 0")
    byte_SX = np.random.default_rng(0).integers(0, 256, (50, 24), dtype=np.uint8)
    out_KSD = np.zeros((2, 50, 48), np.float32)
    _unpack(byte_SX, out_KSD)
    for found_SD, bits in zip(out_KSD, (4, 2), strict=True):
        parts = [byte_SX >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        assert np.array_equal(found_SD, np.stack(parts, 2).reshape(50, -1)[:, :48])


def test_a_fused_product_and_sum_is_rounded_once():
    # 1 + 2^-12 squared is 1 + 2^-11 + 2^-24: rounded by itself, its last term is lost.
    x = np.float32(1 + 2.0**-12)
    x_SX, out_KSX = np.full((2, 48), x), np.full((2, 2, 48), np.float32(-1 - 2.0**-11))
    _multiply_add(x_SX, x, out_KSX)
    assert (out_KSX == np.float32(2.0**-24)).all() and x * x + out_KSX.dtype.type(-1 - 2.0**-11) == 0


def test_a_sum_adds_halves():
    x_SX = np.ascontiguousarray(np.random.default_rng(0).standard_normal((500, LANES)).astype(np.float32))
    found_S = np.zeros(len(x_SX), np.float32)
    _sum(x_SX, found_S)
    rest_SX = x_SX
    while rest_SX.shape[1] > 1:
        half = rest_SX.shape[1] // 2
        rest_SX = rest_SX[:, :half] + rest_SX[:, half:]
    assert found_S.tobytes() == rest_SX[:, 0].tobytes()
    assert (found_S != x_SX.sum(1)).any()  # other orders give other numbers


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int16])
def test_a_move_keeps_every_bit_and_touches_nothing_else(dtype):
    rng = np.random.default_rng(0)
    given = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (5, 37), dtype, endpoint=True)
    found = np.full((3, 40), 7, dtype)
    _move(given, 4, 20, found, 1, 3)
    expected = np.full((3, 40), 7, dtype)
    expected[1, 3:19] = given[4, 20:36]
    assert found.tobytes() == expected.tobytes()


def test_rows_that_are_not_contiguous_are_refused():
    with pytest.raises(TypingError):
        _convert(np.zeros((2, 64), np.float32)[:, ::2], np.zeros((2, 32), np.float32))
