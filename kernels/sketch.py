"""A count-min sketch of ids: counts that may be too large and are never too small.  R rows of S counts, N ids."""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.threads import Threads

_SALT = np.uint64(0x736B65746368_0000)
_MOST = np.uint64(0xFFFFFFFF)
_SHARE_MIN = 1 << 12


@cpu
def _read_cpu(begin: Number, end: Number, count_RS: Array, id_N: Array, count_N: Array) -> None:
    for n in range(begin, end):
        least = _MOST
        for r in range(count_RS.shape[0]):
            s = hash_key(np.int64(0), id_N[n], _SALT + np.uint64(r)) % np.uint64(count_RS.shape[1])
            least = min(least, np.uint64(count_RS[r, s]))
        count_N[n] = least


@cpu
def _add_cpu(count_RS: Array, id_N: Array, more_N: Array) -> None:
    for n in range(len(id_N)):
        for r in range(count_RS.shape[0]):
            s = hash_key(np.int64(0), id_N[n], _SALT + np.uint64(r)) % np.uint64(count_RS.shape[1])
            count_RS[r, s] = min(np.uint64(count_RS[r, s]) + np.uint64(more_N[n]), _MOST)


def read_sketch(count_RS: np.ndarray, id_N: np.ndarray, *, threads: Threads) -> np.ndarray:
    """Count of each of these ids: int64 [N]."""
    count_N = np.empty(len(id_N), np.int64)
    threads.run(_read_cpu, len(id_N), count_RS, id_N, count_N, share_min=_SHARE_MIN)
    return count_N


def add_to_sketch(count_RS: np.ndarray, id_N: np.ndarray, more_N: np.ndarray) -> None:
    """Add more_N[n], int64, to the count of id n. Counts are uint32 and stop at their largest value."""
    _add_cpu(count_RS, id_N, more_N)
