"""Copies an array on a loop's threads.

torch's copies run on OpenMP threads, which go on spinning for some milliseconds after each, on the cores that the next
loops are to use.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import natural
from oneemb.kernels.threads import Threads

__all__ = ["copy_into"]

# Words that one iteration copies.
_BLOCK = 1 << 13


@cpu
def _copy_cpu(begin: Number, end: Number, from_V: Array, to_V: Array) -> None:
    for i in range(begin * _BLOCK, min(end * _BLOCK, len(from_V))):
        to_V[natural(i)] = from_V[natural(i)]


def copy_into(to: np.ndarray, array: np.ndarray, *, threads: Threads) -> None:
    """Copy a C-contiguous array of 2 or 4 bytes a value into another one of its shape and dtype."""
    word = np.int32 if array.dtype.itemsize == 4 else np.int16
    from_V, to_V = array.reshape(-1).view(word), to.reshape(-1).view(word)
    threads.run(_copy_cpu, -(-len(from_V) // _BLOCK), from_V, to_V, share_min=4)
