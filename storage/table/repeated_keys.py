"""Finds keys that occur twice, with 8 bytes of memory a key; an index of all keys would take more.

Only hashes of keys are kept. Keys whose hashes occur once are different; the few other keys go into an index.
"""

from collections.abc import Callable, Iterator

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import hash_keys
from oneemb.storage.hash_index import HashIndex

# Largest number of hashes in memory at once, about. More keys are read several times.
_KEYS_MAX = 1 << 27
_COMPARED = 1 << 20

Keys = Iterator[tuple[np.ndarray, np.ndarray]]
"""Batches of keys: table_N int32, id_N int64."""


def repeated_keys(batches: Callable[[], Keys], keys: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of a batch, positions of its keys that occur before, in the batch or in an earlier one).

    Args:
        batches: returns all keys, the same in each call. It is called once if no key is repeated and there are at
            most `_KEYS_MAX` keys.
        keys: number of keys.
    """
    passes = 1 << max(0, (keys - 1) // _KEYS_MAX).bit_length()
    hash_H = np.concatenate([_repeated_hashes(batches(), keys, p, passes) for p in range(passes)])
    if not len(hash_H):
        return
    index = HashIndex(Threads(1))
    for number, (table_N, id_N) in enumerate(batches()):
        n = np.flatnonzero(np.isin(hash_keys(table_N, id_N), hash_H))
        old_N = index.put(table_N[n], id_N[n], n)
        if (old_N >= 0).any():
            yield number, n[old_N >= 0]


def _repeated_hashes(batches: Keys, keys: int, number: int, passes: int) -> np.ndarray:
    """Hashes that two or more keys have, ascending, of the hashes that belong to a pass: uint64 [H]."""
    # A pass has a range of hashes. With several passes there is room for a sixteenth more than the mean share.
    hash_N, size = np.empty(keys if passes == 1 else keys * 17 // (16 * passes) + 1024, np.uint64), 0
    for table_N, id_N in batches:
        hash_M = hash_keys(table_N, id_N)
        if passes > 1:
            hash_M = hash_M[hash_M >> np.uint64(65 - passes.bit_length()) == number]
        if size + len(hash_M) > len(hash_N):
            hash_N = np.concatenate([hash_N, np.empty(len(hash_N) // 4 + len(hash_M), np.uint64)])
        hash_N[size : size + len(hash_M)] = hash_M
        size += len(hash_M)
    hash_N = hash_N[:size]
    hash_N.sort()
    found = [np.empty(0, np.uint64)]
    for begin in range(0, size - 1, _COMPARED):
        piece_N = hash_N[begin : begin + _COMPARED + 1]
        found.append(piece_N[1:][piece_N[1:] == piece_N[:-1]])
    return np.unique(np.concatenate(found))
