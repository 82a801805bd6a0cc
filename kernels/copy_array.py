"""Copies an array on a loop's threads.

torch's copies run on OpenMP threads, which go on spinning for some milliseconds after each, on the cores that the next
loops are to use.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import natural
from oneemb.kernels.jit_lanes import LANES, bypasses_caches, end_stream, stream_lanes
from oneemb.kernels.threads import Threads

# Words that one iteration copies.
_BLOCK = 1 << 13


@cpu
def _copy_cpu(begin: Number, end: Number, from_V: Array, to_V: Array) -> None:
    for i in range(begin * _BLOCK, min(end * _BLOCK, len(from_V))):
        to_V[natural(i)] = from_V[natural(i)]


@cpu
def _stream_cpu(begin: Number, end: Number, from_XL: Array, to_XL: Array) -> None:
    for x in range(begin * _BLOCK // LANES, min(end * _BLOCK // LANES, len(from_XL))):
        stream_lanes(to_XL, x, np.int64(0), from_XL, x, np.int64(0))
    end_stream()


def copy_into(to: np.ndarray, array: np.ndarray, *, threads: Threads) -> None:
    """Copy a C-contiguous array of 2 or 4 bytes a value into another one of its shape and dtype."""
    word = np.int32 if array.dtype.itemsize == 4 else np.int16
    from_V, to_V = array.reshape(-1).view(word), to.reshape(-1).view(word)
    lines = len(from_V) // LANES
    to_XL = to_V[: lines * LANES].reshape(lines, LANES)
    if bypasses_caches(to_XL):
        from_XL = from_V[: lines * LANES].reshape(lines, LANES)
        threads.run(_stream_cpu, -(-lines * LANES // _BLOCK), from_XL, to_XL, share_min=4)
        to_V[lines * LANES :] = from_V[lines * LANES :]
        return
    threads.run(_copy_cpu, -(-len(from_V) // _BLOCK), from_V, to_V, share_min=4)
