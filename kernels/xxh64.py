"""XXH64 of each of N 64-bit words, as 8 little-endian bytes: how OneFlow spreads keys over ranks and paths.

    xxh64_words(key_N, seed) % paths  ->  the path of each key, with seed 1

Reference: Collet, xxHash fast digest algorithm, version 0.1.1; OneFlow's one_embedding, whose seed for sharding is 1.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.checksum import sum_words
from oneemb.kernels.jit import Number, cpu


@cpu
def _xxh64_words_cpu(word_N: Array, seed: Number, sum_N: Array) -> None:
    for n in range(len(word_N)):
        sum_N[n] = sum_words(word_N, n, n + 1, seed)


def xxh64_words(word_N: np.ndarray, seed: int) -> np.ndarray:
    """The XXH64 of the 8 bytes of each word: uint64 [N].

    Args:
        word_N: uint64 or int64; a 32-bit key is widened with zeros first, `key.view(np.uint32).astype(np.uint64)`.
        seed: 64 bits.
    """
    sum_N = np.empty(len(word_N), np.uint64)
    _xxh64_words_cpu(np.ascontiguousarray(word_N).view(np.uint64), np.uint64(seed), sum_N)
    return sum_N
