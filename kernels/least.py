"""Which of many rows are chosen to leave: those of the least numbers."""

import math
from collections.abc import Callable

import numpy as np

_SAMPLE = 16


def least_of(number_N: np.ndarray, count: int, tie_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Where the `count` least numbers are, or all: int64 [count].

    A sample says below what these surely are, and only those are looked at closely. So numbers lie best in an order
    that says nothing of them.

    Args:
        tie_of: a number for each of some places; of equal numbers, those at the places of the least are chosen.
    """
    if count >= len(number_N):
        return np.arange(len(number_N))
    if count <= 0:
        return np.empty(0, np.int64)
    near, near_M = None, number_N
    sample_X = number_N[::_SAMPLE]
    rank = count // _SAMPLE + 4 * math.isqrt(count) + 4
    if rank < len(sample_X):
        some = np.flatnonzero(number_N <= np.partition(sample_X, rank)[rank])
        if len(some) >= count:
            near, near_M = some, number_N[some]
    bound = np.partition(near_M, count - 1)[count - 1]
    below, equal = np.flatnonzero(near_M < bound), np.flatnonzero(near_M == bound)
    if near is not None:
        below, equal = near[below], near[equal]
    if len(equal) > (more := count - len(below)):
        tie_E = tie_of(equal)
        chosen = np.argpartition(tie_E, more - 1)[:more]
        equal = equal[chosen[np.argsort(tie_E[chosen])]]
    return np.concatenate([below, equal])
