"""Philox 4x32-10: four 32-bit random words that are a pure function of a counter and a seed.

Reference: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

import numpy as np

from oneemb.kernels.jit import Number, rule

# Multipliers of the words, and steps of the keys.
M0 = np.uint64(0xD2511F53)
M1 = np.uint64(0xCD9E8D57)
W0 = np.uint64(0x9E3779B9)
W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@rule
def philox(c0: Number, c1: Number, c2: Number, c3: Number, seed: Number) -> tuple:
    """Four random words, each in the low 32 bits of a uint64, for counter words c0..c3 and a 64-bit seed."""
    x0 = np.uint64(c0) & _LOW
    x1 = np.uint64(c1) & _LOW
    x2 = np.uint64(c2) & _LOW
    x3 = np.uint64(c3) & _LOW
    k0 = np.uint64(seed) & _LOW
    k1 = np.uint64(seed) >> _32
    for _ in range(10):
        p0 = M0 * x0
        p1 = M1 * x2
        x0 = (p1 >> _32) ^ x1 ^ k0
        x1 = p1 & _LOW
        x2 = (p0 >> _32) ^ x3 ^ k1
        x3 = p0 & _LOW
        k0 = (k0 + W0) & _LOW
        k1 = (k1 + W1) & _LOW
    return x0, x1, x2, x3
