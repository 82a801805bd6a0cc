"""Sums the gradients of each unique key.  N ids, U unique keys, P bags, D weights.

    sum over the occurrences n of key u, in float32, in batch order:     grad_NX[n]
    where ids were pooled into bags (see oneemb.kernels.pool):           scale_N[n] * grad_PX[bag_N[n]]

`Segments` are gradients that are not summed yet. A row update sums each key's gradients itself, just before it uses the
sum, so that sums are not written to memory; `sum_segments` is for callers that need them.

Invariant: sums run in batch order, so the result does not depend on the number of threads.
"""

from dataclasses import dataclass

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import float_bits, from_float32, keep_rolled, natural, prefetch, prefetch_row, to_float32
from oneemb.kernels.jit_lanes import LANES, WIDE, load_lanes, load_wide, same_lanes, same_wide, store_lanes
from oneemb.kernels.threads import Threads

_EXPONENT = np.uint32(0x7F800000)

ROWS = 16
"""Number of rows whose gradients are summed before the first of the rows is updated. With one row at a time, the update
would wait for a long chain of operations or for memory, and delay the sum of the next row."""

# Terms of sums, and rows, that are prefetched ahead of the current one. More would exceed what the CPU can have
# pending.
_AHEAD = np.uint64(12)
_ROWS_AHEAD = 8

# Number of values of which one iteration finds the largest; for each format, a mask of all bits but the sign.
_BLOCK = 1 << 15
_MAGNITUDE = {
    np.dtype(np.float32): np.uint32(0x7FFFFFFF),
    np.dtype(np.uint16): np.uint16(0x7FFF),
    np.dtype(np.int16): np.uint16(0x7FFF),
}


@dataclass(frozen=True)
class Segments:
    """Gradients of N ids, grouped by unique key and not summed yet.

    Args:
        grad_NX: [N, D], or [P, D] of bags; C-contiguous, bits of float32, float16 (uint16) or bfloat16 (int16).
        order_N, begin_U1: key u sums the rows order_N[begin_U1[u] : begin_U1[u + 1]] of `grad_NX`; see `occurrences` in
            oneemb.kernels.unique_keys. With bags, a row may occur more than once.
        scale_N: float32, factor of each row, in the order of `order_N`; None = 1.
    """

    grad_NX: np.ndarray
    order_N: np.ndarray
    begin_U1: np.ndarray
    scale_N: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(U, D): the shape of the summed gradients."""
        return len(self.begin_U1) - 1, self.grad_NX.shape[1]

    def arrays(self) -> tuple:
        """The arrays as `row_grads` takes them."""
        return self.grad_NX, self.order_N, self.begin_U1, self.scale_N


@part
def row_of(row_NX: Array, slot_U: Array, order_N: Array, i: Number, last: Number, d: Number, columns: Number) -> Number:
    """Row of term i of a sum; -1 = the term is left out. Also prefetches `columns` columns, from d on, of the row of a
    later term."""
    ahead = np.int64(order_N[min(i + _AHEAD, last)])
    n = np.int64(order_N[i])
    if slot_U is None:
        prefetch_row(row_NX, ahead, d, columns)
        return n
    prefetch(slot_U, max(np.int64(order_N[min(i + _AHEAD + _AHEAD, last)]), 0))
    prefetch_row(row_NX, slot_U[natural(max(ahead, 0))], d, columns)
    return slot_U[natural(n)] if n >= 0 else n


@part
def sum_rows(
    to_PX: Array, p: Number, zero: Number, row_NX: Array, slot_U: Array, order_N: Array, begin: Number, end: Number,
    last: Number, scale_N: Array,
) -> None:  # fmt: skip
    """to_PX[p] = zero + the sum over i from begin to end - 1 of scale_N[i] * row_NX[slot_U[order_N[i]]].

    slot_U = None: `order_N` holds the rows. scale_N = None: 1. A term with order_N[i] = -1 is left out. The sum runs in
    float32, in this order, and is rounded once to the format of `to_PX`. Adding a `zero` of -0.0 changes no number, not
    even -0.0. The arrays hold terms up to `last`, which may be prefetched.
    """
    dim = to_PX.shape[1]
    begin, end, last = natural(begin), natural(end), natural(last)
    for d in range(0, dim - WIDE + 1, WIDE):
        wide = same_wide(zero)
        for i in range(begin, end):
            keep_rolled()
            s = row_of(row_NX, slot_U, order_N, i, last, d, WIDE)
            if s >= 0:
                wide = wide + load_wide(row_NX, s, d) * (np.float32(1) if scale_N is None else scale_N[i])
        store_lanes(to_PX, p, d, wide)
    for d in range(dim - dim % WIDE, dim - LANES + 1, LANES):
        lanes = same_lanes(zero)
        for i in range(begin, end):
            keep_rolled()
            s = row_of(row_NX, slot_U, order_N, i, last, d, LANES)
            if s >= 0:
                lanes = lanes + load_lanes(row_NX, s, d) * (np.float32(1) if scale_N is None else scale_N[i])
        store_lanes(to_PX, p, d, lanes)
    for d in range(dim - dim % LANES, dim):
        number = zero
        for i in range(begin, end):
            keep_rolled()
            s = row_of(row_NX, slot_U, order_N, i, last, d, 1)
            if s >= 0:
                number += to_float32(row_NX[s, d]) * (np.float32(1) if scale_N is None else scale_N[i])
        to_PX[p, d] = from_float32(number, to_PX[p, d])


@part
def _row_grad(
    grad_NX: Array, order_N: Array, begin_U1: Array, scale_N: Array, u: Number, sum_RD: Array, r: Number
) -> None:
    if order_N is None:
        for d in range(sum_RD.shape[1]):
            sum_RD[r, d] = to_float32(grad_NX[u, d])
    else:
        sum_rows(
            sum_RD, np.int64(r), np.float32(-0.0), grad_NX, None, order_N, begin_U1[u], begin_U1[u + 1],
            len(order_N) - 1, scale_N,
        )  # fmt: skip


@part
def row_grads(grads: tuple, first: Number, end: Number, row_SW: Array, slot_U: Array, sum_RD: Array) -> Number:
    """sum_RD[r] = the gradient of row first + r, for the next ROWS rows before `end`. Also prefetches the rows for the
    update. Returns the number of rows.

    `grads` is `Segments.arrays()`, or (grad_UD, None, None, None) for gradients that are summed already.
    """
    grad_NX, order_N, begin_U1, scale_N = grads
    rows = min(np.int64(ROWS), end - first)
    for r in range(rows):
        keep_rolled()
        prefetch_row(row_SW, slot_U[min(first + r + _ROWS_AHEAD, end - 1)], 0, row_SW.shape[1])
        _row_grad(grad_NX, order_N, begin_U1, scale_N, first + r, sum_RD, r)
    return rows


@cpu
def _reduce_grads_cpu(begin: Number, end: Number, grads: tuple, grad_UD: Array, finite_U: Array) -> None:
    grad_NX, order_N, begin_U1, scale_N = grads
    for u in range(begin, end):
        _row_grad(grad_NX, order_N, begin_U1, scale_N, u, grad_UD, u)
        bad = np.uint32(0)
        for d in range(grad_UD.shape[1]):
            bad |= np.uint32((float_bits(grad_UD[u, d]) & _EXPONENT) == _EXPONENT)
        finite_U[u] = bad == 0


def sum_segments(segments: Segments, *, threads: Threads) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the gradients of each key, float32 [U, D]; and whether all values of a sum are finite, bool [U]."""
    grad_UD = np.empty(segments.shape, np.float32)
    finite_U = np.empty(len(grad_UD), np.bool_)
    threads.run(_reduce_grads_cpu, len(grad_UD), segments.arrays(), grad_UD, finite_U)
    return grad_UD, finite_U


@cpu
def _largest_cpu(begin: Number, end: Number, bits_V: Array, magnitude: Number, largest_K: Array) -> None:
    for k in range(begin, end):
        largest = largest_K[k]
        for bits in bits_V[k * _BLOCK : (k + 1) * _BLOCK]:
            masked = np.uint32(bits & magnitude)
            if masked > largest:
                largest = masked
        largest_K[k] = largest


def largest_magnitude(values: np.ndarray, *, threads: Threads) -> float:
    """Largest absolute value of a C-contiguous array of weights' bits; NaN or infinite if any value is. The loop
    compares bits, at the speed of memory: bits of magnitudes order like the magnitudes, with NaN above infinity."""
    bits_V = values.reshape(-1).view(np.uint32 if values.dtype == np.float32 else np.uint16)
    largest_K = np.zeros(-(-len(bits_V) // _BLOCK), np.uint32)
    threads.run(_largest_cpu, len(largest_K), bits_V, _MAGNITUDE[values.dtype], largest_K, share_min=2)
    bits = largest_K.max(initial=0)
    if values.dtype == np.int16:
        return float((np.uint32(bits) << np.uint32(16)).view(np.float32))
    return float(bits.astype(bits_V.dtype).view(np.float32 if values.dtype == np.float32 else np.float16))


@cpu
def _row_parts_cpu(begin: Number, end: Number, grad_UD: Array, p: Number, part_U: Array) -> None:
    dim = grad_UD.shape[1]
    for u in range(begin, end):
        part = 0.0
        for d in range(dim):
            size = abs(np.float64(grad_UD[u, d]))
            if p == 2.0:
                part += size * size
            elif p == np.inf:
                # A NaN stays: `part >= size` is False if either is one.
                part = part if part >= size or part != part else size
            else:
                part += size**p
        part_U[u] = part


def rows_norm(grad_UD: np.ndarray, p: float, *, threads: Threads) -> float:
    """The p-norm of all values, taken as one vector (p above 0, or infinity); NaN or infinite if any value is."""
    part_U = np.empty(len(grad_UD), np.float64)
    threads.run(_row_parts_cpu, len(grad_UD), grad_UD, np.float64(p), part_U)
    if p == np.inf:
        return float(part_U.max(initial=0.0))
    return float(part_U.sum() ** (1.0 / p))
