"""Which numbers of many are the least."""

import math

import numpy as np

__all__ = ["least_of"]

_SAMPLE = 16


def least_of(number_N: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the numbers are that are below the one of rank `count`, from 1 to N, in ascending order; and where those
    are that equal it: int64, ascending.

    A sample says below what these surely are, and only those are looked at closely. So numbers lie best in an order
    that says nothing of them.
    """
    near, near_M = None, number_N
    sample_X = number_N[::_SAMPLE]
    rank = count // _SAMPLE + 4 * math.isqrt(count) + 4
    if rank < len(sample_X):
        some = np.flatnonzero(number_N <= np.partition(sample_X, rank)[rank])
        if len(some) >= count:
            near, near_M = some, number_N[some]
    bound = np.partition(near_M, count - 1)[count - 1]
    below, equal = np.flatnonzero(near_M < bound), np.flatnonzero(near_M == bound)
    return (below, equal) if near is None else (near[below], near[equal])
