"""Half-width weights: reading and rounding agree with torch for every value there is and every tie between two."""

import numpy as np
import pytest
import torch

from oneemb.kernels.jit import cpu
from oneemb.kernels.jit_code import float_bits, from_float32, mul_high, to_float32, uint_as_float

FORMATS = {"float16": (torch.float16, np.uint16), "bfloat16": (torch.bfloat16, np.int16)}
ALL_BITS = np.arange(65536, dtype=np.uint16)


@cpu
def _read(stored_N, out_N):
    for n in range(len(stored_N)):
        out_N[n] = to_float32(stored_N[n])


@cpu
def _store(value_N, stored_N):
    for n in range(len(value_N)):
        stored_N[n] = from_float32(value_N[n], stored_N[n])


def read(bits, kind):
    out_N = np.empty(len(bits), np.float32)
    _read(bits.view(kind), out_N)
    return out_N


def store(value_N, kind):
    stored_N = np.zeros(len(value_N), kind)
    _store(value_N, stored_N)
    return stored_N.view(np.uint16)


def torch_read(bits, dtype):
    return torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()


def torch_store(value_N, dtype):
    return torch.from_numpy(value_N).to(dtype).view(torch.int16).numpy().view(np.uint16)


def assert_same_bits(found, expected, nan):
    """Bit for bit, but that any NaN is as good as another: torch's own loops do not agree on which."""
    same = (found == expected) | (nan(found) & nan(expected))
    assert same.all(), f"{np.flatnonzero(~same)[:5]}: {found[~same][:5]} where torch has {expected[~same][:5]}"


def float32_is_nan(bits):
    return np.isnan(bits.view(np.float32))


def is_nan(dtype):
    return lambda bits: np.isnan(torch_read(bits, dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_each_of_the_65536_values_reads_as_torch_reads_it(format):
    dtype, kind = FORMATS[format]
    found, expected = read(ALL_BITS, kind), torch_read(ALL_BITS, dtype)
    assert_same_bits(found.view(np.uint32), expected.view(np.uint32), float32_is_nan)


@pytest.mark.parametrize("format", FORMATS)
def test_each_of_the_65536_values_survives_reading_and_storing(format):
    dtype, kind = FORMATS[format]
    assert_same_bits(store(read(ALL_BITS, kind), kind), ALL_BITS, is_nan(dtype))


def values_to_round(dtype):
    """Every value of the format, every midpoint of two neighbours, and the float32 just beside each of those."""
    values = np.sort(torch_read(ALL_BITS, dtype)[np.isfinite(torch_read(ALL_BITS, dtype))]).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    around = np.concatenate([values, middles]).astype(np.float32)
    beside = [np.nextafter(around, np.float32(side)) for side in (-np.inf, np.inf)]
    largest = np.finfo(np.float32).max
    ends = np.array([np.inf, -np.inf, np.nan, largest, -largest, 0.0, -0.0, 65504, 65519.996, 65520, 1e-45], np.float32)
    return np.concatenate([around, *beside, ends])


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_to_nearest_ties_to_even_everywhere(format):
    dtype, kind = FORMATS[format]
    value_N = values_to_round(dtype)
    assert len(value_N) > 360_000
    assert_same_bits(store(value_N, kind), torch_store(value_N, dtype), is_nan(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_random_float32_bits_round_as_in_torch(format):
    print("seed 0")
    dtype, kind = FORMATS[format]
    value_N = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    assert_same_bits(store(value_N, kind), torch_store(value_N, dtype), is_nan(dtype))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0x7F80FFFF, 0x7FBFFFFF])
@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_stays_a_nan(format, bits):
    # A NaN whose payload lies in the bits that are cut off would turn into infinity.
    dtype, kind = FORMATS[format]
    stored = store(np.array([bits], np.uint32).view(np.float32), kind)
    assert is_nan(dtype)(stored).all()


def test_float32_weights_are_left_as_they_are():
    value_N = np.array([1.5, -0.0, np.inf, 1e-45], np.float32)
    assert read(value_N.view(np.uint32).view(np.float32), np.float32).tobytes() == value_N.tobytes()
    stored_N = np.zeros(4, np.float32)
    _store(value_N, stored_N)
    assert stored_N.tobytes() == value_N.tobytes()


def test_the_conversions_are_for_compiled_loops():
    with pytest.raises(TypeError, match="compiled loops"):
        to_float32(1.0)
    with pytest.raises(TypeError, match="compiled loops"):
        from_float32(1.0, 1.0)


def test_rounding_towards_zero_is_noticed():
    value_N = values_to_round(torch.bfloat16)
    cut_off = (value_N.view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(AssertionError, match="where torch has"):
        assert_same_bits(cut_off, torch_store(value_N, torch.bfloat16), is_nan(torch.bfloat16))


@cpu
def _bits_there_and_back(value_N, bits_N, back_N, x_N, y_N, high_N):
    for n in range(len(value_N)):
        bits_N[n] = float_bits(value_N[n])
        back_N[n] = uint_as_float(bits_N[n])
    for n in range(len(x_N)):
        high_N[n] = mul_high(x_N[n], y_N[n])


def test_bits_and_wide_products_are_those_of_numpy_and_python():
    print("seed 1")
    rng = np.random.default_rng(1)
    value_N = np.concatenate([rng.normal(size=100), [0.0, -0.0, np.inf, -np.inf, 1e-45]]).astype(np.float32)
    x_N, y_N = (np.array([0, 1, 2**63, 2**64 - 1, *rng.integers(0, 2**64, 96, np.uint64)], np.uint64) for _ in "xy")
    y_N = y_N[::-1].copy()
    bits_N, back_N, high_N = np.zeros(105, np.uint32), np.zeros(105, np.float32), np.zeros(100, np.uint64)
    _bits_there_and_back(value_N, bits_N, back_N, x_N, y_N, high_N)
    assert bits_N.tobytes() == value_N.tobytes() == back_N.tobytes()
    assert high_N.tolist() == [x * y >> 64 for x, y in zip(x_N.tolist(), y_N.tolist(), strict=True)]
