"""Sums the gradients of each unique key.  N ids, U unique keys, P bags, D weights.

    sum over the occurrences n of key u, in float32, in batch order:     grad_NX[n]
    where ids were pooled into bags (see oneemb.kernels.pool):           scale_N[n] * grad_PX[bag_N[n]]

`Segments` are gradients that are not summed yet. Row updates take them as they are and walk each key's occurrences
once, on the way into the optimizer, so that sums are written nowhere; `reduce_grads` is for those who want to see them.

Invariant: the order of the sum is that of the batch, so the result depends on no number of threads.
"""

from dataclasses import dataclass

import numpy as np

from oneemb.kernels.jit import cpu, float_bits, prefetch, rule, to_float32
from oneemb.kernels.threads import Threads

__all__ = ["BLOCK", "Segments", "block_grads", "largest_magnitude", "reduce_grads", "sum_segments"]

_EXPONENT = np.uint32(0x7F800000)

BLOCK = 16
"""Rows summed at a time: few enough to stay in the first cache until the optimizer has read them, and enough for one
call, whose many arrays take as long to pass as a row to sum."""

# Gradients asked for ahead of the one at work.
_AHEAD = 12

# Bytes of a cache line.
_LINE = 64

# Values of which one share finds the largest, and all bits but the sign for each format.
_BLOCK = 1 << 15
_MAGNITUDE = {"float32": np.uint32(0x7FFFFFFF), "uint16": np.uint16(0x7FFF), "int16": np.uint16(0x7FFF)}


@dataclass(frozen=True)
class Segments:
    """Gradients of N ids that are still to be summed over the occurrences of each of U unique keys.

    Args:
        grad_NX: [N, D], or [P, D] of bags; C-contiguous, bits of float32, float16 (uint16) or bfloat16 (int16).
        order_N, begin_U1: for each key the rows of `grad_NX` to sum, as `occurrences` in oneemb.kernels.unique_keys
            gives them; with bags, a row may come more than once.
        scale_N: float32, by what each is multiplied, in the order of `order_N`; None = 1.
    """

    grad_NX: np.ndarray
    order_N: np.ndarray
    begin_U1: np.ndarray
    scale_N: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """U, D: that of the gradients once they are summed."""
        return len(self.begin_U1) - 1, self.grad_NX.shape[1]

    def arrays(self) -> tuple:
        """What `block_grads` reads."""
        return self.grad_NX, self.order_N, self.begin_U1, self.scale_N


@rule
def _prefetch_row(array_NX, n):
    # Every line of it: the processor's own prefetcher starts too late for a short run.
    row_X = array_NX[n]
    for x in range(0, len(row_X), _LINE // row_X.itemsize):
        prefetch(row_X, x)


@rule
def _block_grads(grad_NX, order_N, begin_U1, scale_N, first, last, sum_BD, row_SW, slot_U):
    dim = sum_BD.shape[1]
    for u in range(first, last):
        if row_SW is not None:
            _prefetch_row(row_SW, slot_U[u])
        if order_N is None:
            for d in range(dim):
                sum_BD[u - first, d] = to_float32(grad_NX[u, d])
            continue
        begin = begin_U1[u]
        for i in range(begin, begin_U1[u + 1]):
            if i + _AHEAD < len(order_N):
                _prefetch_row(grad_NX, order_N[i + _AHEAD])
            n = order_N[i]
            scale = np.float32(1) if scale_N is None else scale_N[i]
            if i == begin:
                for d in range(dim):
                    sum_BD[u - first, d] = to_float32(grad_NX[n, d]) * scale
            else:
                for d in range(dim):
                    sum_BD[u - first, d] += to_float32(grad_NX[n, d]) * scale


@rule
def block_grads(grads, first, last, sum_BD, row_SW, slot_U):
    """sum_BD = the gradients of rows first to last - 1, at most BLOCK of them.

    `grads` is `Segments.arrays()`, or (grad_UD, None, None, None) for gradients that are summed already. The
    cache is asked for the rows that the gradients are of, so that they are there when the sums are; row_SW None = no
    rows are read next.
    """
    _block_grads(grads[0], grads[1], grads[2], grads[3], first, last, sum_BD, row_SW, slot_U)


@cpu
def _reduce_grads_cpu(begin, end, grads, grad_UD, finite_U):
    dim = grad_UD.shape[1]
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        block_grads(grads, first, last, grad_UD[first:last], None, None)
        for u in range(first, last):
            bad = np.uint32(0)
            for d in range(dim):
                bad |= np.uint32((float_bits(grad_UD[u, d]) & _EXPONENT) == _EXPONENT)
            finite_U[u] = bad == 0


def sum_segments(segments: Segments, *, threads: Threads) -> tuple[np.ndarray, np.ndarray]:
    """Sum gradients of equal keys.

    Returns:
        grad_UD float32 [U, D] and finite_U bool [U]: whether every value of the row's sum is finite.
    """
    grad_UD = np.empty(segments.shape, np.float32)
    finite_U = np.empty(len(grad_UD), np.bool_)
    threads.run(_reduce_grads_cpu, len(grad_UD), segments.arrays(), grad_UD, finite_U)
    return grad_UD, finite_U


def reduce_grads(
    grad_NX: np.ndarray,
    order_N: np.ndarray,
    begin_U1: np.ndarray,
    scale_N: np.ndarray | None = None,
    *,
    threads: Threads,
) -> tuple[np.ndarray, np.ndarray]:
    """`sum_segments` of `Segments` made of these."""
    return sum_segments(Segments(grad_NX, order_N, begin_U1, scale_N), threads=threads)


@cpu
def _largest_cpu(begin, end, bits_V, magnitude, largest_K):
    for k in range(begin, end):
        largest = largest_K[k]
        for bits in bits_V[k * _BLOCK : (k + 1) * _BLOCK]:
            masked = np.uint32(bits & magnitude)
            if masked > largest:
                largest = masked
        largest_K[k] = largest


def largest_magnitude(values: np.ndarray, *, threads: Threads) -> float:
    """The largest absolute value of a C-contiguous array of weights' bits; not finite where one of them is not.

    One pass at the speed of memory: magnitudes are ordered as their bits are, NaN above infinity.
    """
    bits_V = values.reshape(-1).view(np.uint32 if values.dtype == np.float32 else np.uint16)
    largest_K = np.zeros(-(-len(bits_V) // _BLOCK), np.uint32)
    threads.run(_largest_cpu, len(largest_K), bits_V, _MAGNITUDE[values.dtype.name], largest_K, share_min=2)
    bits = largest_K.max(initial=0)
    if values.dtype == np.int16:
        return float((np.uint32(bits) << np.uint32(16)).view(np.float32))
    return float(bits.astype(bits_V.dtype).view(np.float32 if values.dtype == np.float32 else np.float16))
