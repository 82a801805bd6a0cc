"""The owner of a key among R owners, which are ranks or the paths of a sharded table.

Invariant: the owner is a pure function of (table, id, R), the same in every version of oneemb, since snapshots depend
on it.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import mul_high

# The salt differs from those of hash indexes, which are small numbers, so that the keys of one owner spread over the
# owner's whole index.
_SALT = np.uint64(0x6F776E6572730001)


@cpu
def _owner_of_cpu(table_N: Array, id_N: Array, owners: Number, owner_N: Array) -> None:
    for n in range(len(id_N)):
        owner_N[n] = mul_high(hash_key(table_N[n], id_N[n], _SALT), np.uint64(owners))


def owner_of(table_N: np.ndarray, id_N: np.ndarray, owners: int) -> np.ndarray:
    """Owner of each key (table_N int32, id_N int64), a number from 0 to owners - 1: int64 [N]."""
    owner_N = np.empty(len(id_N), np.int64)
    _owner_of_cpu(table_N, id_N, owners, owner_N)
    return owner_N


def owners_share_keys(owner: int, owners: int, other: int, others: int) -> bool:
    """Whether any key belongs both to owner `owner` of `owners` and to owner `other` of `others`. Owner r of n owns the
    part of the hashes from r/n to (r + 1)/n."""
    return owner * others < (other + 1) * owners and other * owners < (owner + 1) * others
