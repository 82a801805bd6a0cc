"""Reads and pools read-only rows.  S rows, N ids, D weights of a row, X values of a row as it is stored, M other rows.

    read_row    out_ND[n] = the weights of a row
    pool_bag    out_RX[r, column : column + D] = the sum or mean of the rows of a bag

Rows are float32 weights, the bits of float16 or bfloat16, or quantized bytes (`kernels/quantize_rows.py`), with scale
and low behind the bytes or in an array of their own. The caller gives the place of each id, the number of its row.
Below 0 are PADDING and MISSING (no row), which are read as zeros; `pool_bag` adds row m of `other_MX` for place OTHER -
m.

A sum runs in batch order, in float32, from zero. With a `factor` it has the same bits as `kernels/pool.py`: each term
is multiplied, rounded and added. With a `divisor` it has the bits of torch's embedding_bag: a weighted term is added
with one rounding, a fused multiply-add, and the sum is divided at the end.

Reference: torch.nn.functional.embedding_bag.
"""

from typing import NamedTuple, Self

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, part
from oneemb.kernels.jit_code import as_stored, from_float32, keep_rolled, to_float32
from oneemb.kernels.jit_lanes import (
    LANES,
    copy_lanes,
    load_bytes,
    load_lanes,
    load_nibbles,
    load_pairs,
    multiply_add,
    same_lanes,
    store_lanes,
)
from oneemb.kernels.quantize_rows import dequantize_row, integer_at, scale_and_low

PADDING = -1
MISSING = OTHER = -2


class RowArrays(NamedTuple):
    """Arrays of rows as loops take them: weights, or bytes of quantized weights."""

    weight_SX: np.ndarray | None
    """float32, uint16 (float16) or int16 (bfloat16); None = rows are bytes."""
    byte_SX: np.ndarray | None
    """uint8; None = rows are weights."""
    scale_S2: np.ndarray | None
    """Scale and low of each row of bytes, float32 or uint16 (float16); None = they are in byte_SX."""
    bits: int
    """Bits of one quantized weight; 0 = rows are weights."""

    @classmethod
    def of(cls, row_SX: np.ndarray, bits: int, scale_S2: np.ndarray | None = None) -> Self:
        """Rows of weights if `bits` is 0, otherwise rows of bytes with `bits` bits for each weight."""
        return cls(None, row_SX, scale_S2, bits) if bits else cls(row_SX, None, None, 0)


# One of weight_SX and byte_SX is None. Each has an `if` of its own below: the compiler drops the branch of the None.


@part
def read_row(
    weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, place: Number, out_ND: Array, n: Number
) -> None:
    """out_ND[n] = the weights of row `place`; zeros if `place` is negative."""
    dim = out_ND.shape[1]
    if place < 0:
        for d in range(dim):
            out_ND[n, d] = 0
        return
    if weight_SX is not None:
        for d in range(0, dim - LANES + 1, LANES):
            keep_rolled()
            copy_lanes(out_ND, n, d, weight_SX, place, d)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = as_stored(weight_SX[place, d], out_ND[n, d])
    if byte_SX is not None:
        dequantize_row(byte_SX, scale_S2, place, bits, out_ND, n)


@part
def _added(sum: Number, x: Number, n: Number, scale_N: Array, factor: Number) -> Number:
    """sum + x, where x is first scaled as id n says. `sum` and `x` are numbers or lanes."""
    if factor is not None:
        return sum + x * (factor if scale_N is None else scale_N[n])
    if scale_N is None:
        return sum + x
    return multiply_add(x, scale_N[n], sum)


@part
def pool_bag(
    first: Number, last: Number, place_N: Array, weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number,
    other_MX: Array, scale_N: Array, factor: Number, divisor: Number, out_RX: Array, r: Number, column: Number,
    dim: Number,
) -> None:  # fmt: skip
    """out_RX[r, column : column + dim] = the pooled rows of ids first to last - 1.

    Args:
        scale_N: factor of each id; None = `factor` for all of them, or 1.
        factor, divisor: exactly one of the two is None; the file's first lines say what each gives.
    """
    for d in range(0, dim - LANES + 1, LANES):
        sum = same_lanes(np.float32(0))
        for n in range(first, last):
            keep_rolled()
            place = place_N[n]
            if place >= 0:
                if weight_SX is not None:
                    sum = _added(sum, load_lanes(weight_SX, place, d), n, scale_N, factor)
                if byte_SX is not None:
                    # Each branch adds its own rows: a vector that several branches set would go through memory.
                    if bits == 8:
                        by, low = scale_and_low(byte_SX, scale_S2, place, 8, dim)
                        sum = _added(sum, load_bytes(byte_SX, place, d) * by + low, n, scale_N, factor)
                    elif bits == 4:
                        by, low = scale_and_low(byte_SX, scale_S2, place, 4, dim)
                        sum = _added(sum, load_nibbles(byte_SX, place, d >> 1) * by + low, n, scale_N, factor)
                    else:
                        by, low = scale_and_low(byte_SX, scale_S2, place, 2, dim)
                        sum = _added(sum, load_pairs(byte_SX, place, d >> 2) * by + low, n, scale_N, factor)
            elif place <= OTHER:
                sum = _added(sum, load_lanes(other_MX, OTHER - place, d), n, scale_N, factor)
        if divisor is not None:
            sum = sum / divisor if divisor != np.float32(1) else sum
        store_lanes(out_RX, r, column + d, sum)
    for d in range(dim - dim % LANES, dim):
        number = np.float32(0)
        for n in range(first, last):
            keep_rolled()
            place = place_N[n]
            if place >= 0:
                if weight_SX is not None:
                    number = _added(number, to_float32(weight_SX[place, d]), n, scale_N, factor)
                if byte_SX is not None:
                    by, low = scale_and_low(byte_SX, scale_S2, place, bits, dim)
                    number = _added(number, integer_at(byte_SX, place, d, bits) * by + low, n, scale_N, factor)
            elif place <= OTHER:
                number = _added(number, to_float32(other_MX[OTHER - place, d]), n, scale_N, factor)
        pooled = number if divisor is None else number / divisor
        out_RX[r, column + d] = from_float32(pooled, out_RX[r, column + d])


def share_min(dim: int) -> int:
    """Least number of keys that is worth waking a thread for. Finding a key takes as long as reading 32 weights."""
    return max(256, (1 << 17) // (dim + 32))


def bags_min(dim: int, bags: int, ids: int) -> int:
    """Least number of bags that is worth waking a thread for, if `bags` bags have `ids` ids in all."""
    return max(1, share_min(dim) * bags // max(ids, 1))
