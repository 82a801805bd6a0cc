"""Quantizes rows to integers of 8 or 4 bits, with a scale and a lowest value (`low`) for each row.

N rows, D weights of a row, B bytes of a quantized row.

    8 bits    D bytes, then scale and low as float32         q = round((x - low) * 255 / (high - low + 1e-8))
    4 bits    (D + 1) // 2 bytes, the weight of even place in the lower half of a byte, then scale and low as float16
                                                             q = round((x - low) / scale), cut to 0 to 15
    reading gives q * scale + low, rounded twice

Rounding is to nearest, ties to even; all arithmetic is float32. With 4 bits, the scale is 1 if all weights of a row are
equal, or if the scale would be 0 in float16.

TorchRec also has rows of 8 and of 2 bits whose scale and low are float16, in an array of their own. This file reads
such rows and does not make them.

`quantize_rows` says which rows cannot be quantized: rows with a NaN or an infinity, and rows whose scale or low is out
of the range of its type.

Reference: FBGEMM's fused row-wise formats; torch.ops.quantized.embedding_bag_byte_prepack and _4bit_prepack.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, part, rule
from oneemb.kernels.jit_code import float_bits, from_float32, to_float32
from oneemb.kernels.jit_lanes import LANES, float_within, half_within, load_bytes, load_nibbles, load_pairs, store_lanes
from oneemb.kernels.threads import Threads

_EPSILON = np.float32(1e-8)
_EXPONENT = np.uint32(0x7F800000)
_SHARE_MIN = 256


def quantized_bytes(dim: int, bits: int) -> int:
    """Bytes of a quantized row of `dim` weights: with 8 bits `dim + 8`, with 4 `(dim + 1) // 2 + 4`."""
    return dim + 8 if bits == 8 else (dim + 1) // 2 + 4


@rule
def _is_finite(x: Number) -> Number:
    return (float_bits(x) & _EXPONENT) != _EXPONENT


@rule
def _nearest(x: Number, most: Number) -> Number:
    """x rounded to nearest, ties to even, and limited to 0 to `most`. x must not be NaN."""
    return np.uint8(min(max(np.rint(x), np.float32(0)), np.float32(most)))


@rule
def scale_of_8(low: Number, high: Number) -> Number:
    """Scale of a row of 8 bits, and the inverse by which the row's weights are multiplied."""
    span = high - low
    return span / np.float32(255), np.float32(255) / (span + _EPSILON)


@rule
def scale_of_4(low: Number, high: Number) -> Number:
    """Scale of a row of 4 bits and its inverse. The scale is rounded to float16, as `low` has been before."""
    span = high - low
    scale = to_float32(from_float32(np.float32(1) if span == 0 else span / np.float32(15), np.uint16(0)))
    if scale == 0:
        scale = np.float32(1)
    return scale, np.float32(1) / scale


@part
def _put_word(row_NB: Array, n: Number, at: Number, bits: Number, size: Number) -> None:
    for i in range(size):
        row_NB[n, at + i] = np.uint8((bits >> np.uint32(8 * i)) & np.uint32(255))


@part
def scale_and_low(byte_SX: Array, scale_S2: Array, s: Number, bits: Number, dim: Number) -> Number:
    """Scale and low of the quantized row s, float32: from `scale_S2`, or, if that is None, from behind the weights."""
    if scale_S2 is not None:
        return to_float32(scale_S2[s, 0]), to_float32(scale_S2[s, 1])
    if bits == 8:
        return float_within(byte_SX, s, dim), float_within(byte_SX, s, dim + 4)
    size = (dim + 1) >> 1
    return half_within(byte_SX, s, size), half_within(byte_SX, s, size + 2)


@part
def integer_at(byte_SX: Array, s: Number, d: Number, bits: Number) -> Number:
    """Stored integer of weight d of the quantized row s, from 0 to 255, 15 or 3; returned as float32."""
    if bits == 8:
        return np.float32(byte_SX[s, d])
    if bits == 4:
        return np.float32((byte_SX[s, d >> 1] >> np.uint8(4 * (d & 1))) & np.uint8(15))
    return np.float32((byte_SX[s, d >> 2] >> np.uint8(2 * (d & 3))) & np.uint8(3))


@part
def dequantize_row(byte_SX: Array, scale_S2: Array, s: Number, bits: Number, out_ND: Array, n: Number) -> None:
    """out_ND[n] = the weights of the quantized row s, float32."""
    # One branch for a whole row, with its own loops: a vector that several branches set would go through memory.
    dim = out_ND.shape[1]
    if bits == 8:
        by, low = scale_and_low(byte_SX, scale_S2, s, 8, dim)
        for d in range(0, dim - LANES + 1, LANES):
            store_lanes(out_ND, n, d, load_bytes(byte_SX, s, d) * by + low)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = integer_at(byte_SX, s, d, 8) * by + low
    elif bits == 4:
        by, low = scale_and_low(byte_SX, scale_S2, s, 4, dim)
        for d in range(0, dim - LANES + 1, LANES):
            store_lanes(out_ND, n, d, load_nibbles(byte_SX, s, d >> 1) * by + low)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = integer_at(byte_SX, s, d, 4) * by + low
    else:
        by, low = scale_and_low(byte_SX, scale_S2, s, 2, dim)
        for d in range(0, dim - LANES + 1, LANES):
            store_lanes(out_ND, n, d, load_pairs(byte_SX, s, d >> 2) * by + low)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = integer_at(byte_SX, s, d, 2) * by + low


@cpu
def _quantize_cpu(
    begin: Number, end: Number, weight_ND: Array, bits: Number, row_NB: Array, right_N: Array, error_N2: Array
) -> None:
    dim = weight_ND.shape[1]
    size = dim if bits == 8 else (dim + 1) // 2
    read_1D = np.empty((1, dim), np.float32)
    for n in range(begin, end):
        low = high = weight_ND[n, 0]
        right = True
        for d in range(dim):
            x = weight_ND[n, d]
            right &= _is_finite(x)
            low, high = min(low, x), max(high, x)
        if bits == 8:
            scale, inverse = scale_of_8(low, high)
            right &= _is_finite(high - low)
        else:
            low = to_float32(from_float32(low, np.uint16(0)))
            scale, inverse = scale_of_4(low, high)
            right &= _is_finite(low) and _is_finite(scale)
        right_N[n] = right
        if not right:
            continue
        for b in range(row_NB.shape[1]):
            row_NB[n, b] = 0
        if bits == 8:
            for d in range(dim):
                row_NB[n, d] = _nearest((weight_ND[n, d] - low) * inverse, 255)
            _put_word(row_NB, n, size, float_bits(scale), 4)
            _put_word(row_NB, n, size + 4, float_bits(low), 4)
        else:
            for d in range(dim):
                q = _nearest((weight_ND[n, d] - low) * inverse, 15)
                row_NB[n, d // 2] |= q << np.uint8(4 * (d % 2))
            _put_word(row_NB, n, size, np.uint32(from_float32(scale, np.uint16(0))), 2)
            _put_word(row_NB, n, size + 2, np.uint32(from_float32(low, np.uint16(0))), 2)
        dequantize_row(row_NB, None, n, bits, read_1D, 0)
        most, squares = 0.0, 0.0
        for d in range(dim):
            error = abs(np.float64(read_1D[0, d]) - np.float64(weight_ND[n, d]))
            most = max(most, error)
            squares += error * error
        error_N2[n, 0], error_N2[n, 1] = most, squares


def quantize_rows(
    weight_ND: np.ndarray, bits: int, row_NB: np.ndarray, *, threads: Threads
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize float32 rows to 8 or 4 bits.

    Args:
        row_NB: uint8, B at least `quantized_bytes`; further bytes become zeros.

    Returns:
        right_N, bool: whether each row could be quantized; row_NB is undefined for rows that could not. error_N2,
        float64: largest error of a row's weights, and the sum of the squared errors.
    """
    right_N, error_N2 = np.empty(len(weight_ND), np.bool_), np.zeros((len(weight_ND), 2))
    threads.run(
        _quantize_cpu, len(weight_ND), weight_ND, bits, row_NB, right_N, error_N2, share_min=_SHARE_MIN
    )  # fmt: skip
    return right_N, error_N2
