"""Places of rows that lie shard by shard, so that those of some shards are read in the order of memory.

Places come in blocks of `BLOCK`, each of one shard; the free ones of a shard are a list: `head_S` says the first, and
each holds the next in the word that has the id of a row.  P places, B blocks, S shards, N rows.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.threads import Threads

__all__ = ["BLOCK", "free_rows", "give_back", "open_blocks", "rows_of_blocks", "take"]

BLOCK = 16
"""Places of a block."""

_NONE = -1

# The fewest blocks that are worth waking a thread for.
_SHARE_MIN = 1 << 10


@cpu
def _open_blocks_cpu(
    begin: Number, end: Number, shard_B: Array, head_S: Array, free_S: Array, table_P: Array, id_P: Array
) -> None:
    for b in range(begin, end):
        shard = shard_B[b]
        for p in range((b + 1) * BLOCK - 1, b * BLOCK - 1, -1):
            table_P[p] = _NONE
            id_P[p] = head_S[shard]
            head_S[shard] = p
        free_S[shard] += BLOCK


@cpu
def _take_cpu(shard_N: Array, head_S: Array, free_S: Array, id_P: Array, place_N: Array) -> None:
    for n in range(len(shard_N)):
        shard = shard_N[n]
        p = head_S[shard]
        place_N[n] = p
        head_S[shard] = id_P[p]
        free_S[shard] -= 1


@cpu
def _give_back_cpu(place_V: Array, shard_B: Array, head_S: Array, free_S: Array, table_P: Array, id_P: Array) -> None:
    for v in range(len(place_V)):
        p = place_V[v]
        if p >= 0:
            shard = shard_B[p // BLOCK]
            table_P[p] = _NONE
            id_P[p] = head_S[shard]
            head_S[shard] = p
            free_S[shard] += 1


@cpu
def _rows_of_blocks_cpu(block_L: Array, table_P: Array, place_N: Array) -> Number:
    size = 0
    for l in range(len(block_L)):
        for p in range(block_L[l] * BLOCK, (block_L[l] + 1) * BLOCK):
            if table_P[p] >= 0:
                place_N[size] = p
                size += 1
    return size


@cpu
def _free_rows_cpu(
    begin: Number, end: Number, block_L: Array, table_P: Array, id_P: Array, held_P: Array, score_P2: Array,
    table_N: Array, id_N: Array, score_N: Array, size_L: Array,
) -> None:  # fmt: skip
    for l in range(begin, end):
        n = l * BLOCK
        for p in range(block_L[l] * BLOCK, (block_L[l] + 1) * BLOCK):
            if table_P[p] >= 0 and not held_P[p]:
                table_N[n] = table_P[p]
                id_N[n] = id_P[p]
                score_N[n] = score_P2[p, 0]
                n += 1
        size_L[l] = n - l * BLOCK


@cpu
def _close_up_cpu(size_L: Array, table_N: Array, id_N: Array, score_N: Array) -> Number:
    size = 0
    for l in range(len(size_L)):
        for n in range(l * BLOCK, l * BLOCK + size_L[l]):
            table_N[size] = table_N[n]
            id_N[size] = id_N[n]
            score_N[size] = score_N[n]
            size += 1
    return size


def open_blocks(
    begin: int, end: int, shard_B: np.ndarray, head_S: np.ndarray, free_S: np.ndarray, table_P: np.ndarray,
    id_P: np.ndarray,
) -> None:  # fmt: skip
    """Make the places of these blocks free ones of their shards."""
    _open_blocks_cpu(begin, end, shard_B, head_S, free_S, table_P, id_P)


def take(shard_N: np.ndarray, head_S: np.ndarray, free_S: np.ndarray, id_P: np.ndarray) -> np.ndarray:
    """A free place of each of these shards, which have enough: int64 [N]."""
    place_N = np.empty(len(shard_N), np.int64)
    _take_cpu(shard_N, head_S, free_S, id_P, place_N)
    return place_N


def give_back(
    place_V: np.ndarray, shard_B: np.ndarray, head_S: np.ndarray, free_S: np.ndarray, table_P: np.ndarray,
    id_P: np.ndarray,
) -> None:  # fmt: skip
    """These places, int64, are free again; -1 is none."""
    _give_back_cpu(place_V, shard_B, head_S, free_S, table_P, id_P)


def rows_of_blocks(block_L: np.ndarray, table_P: np.ndarray) -> np.ndarray:
    """The places of the rows in these blocks: int64."""
    place_N = np.empty(len(block_L) * BLOCK, np.int64)
    return place_N[: _rows_of_blocks_cpu(block_L, table_P, place_N)]


def free_rows(
    block_L: np.ndarray, table_P: np.ndarray, id_P: np.ndarray, held_P: np.ndarray, mark_P4: np.ndarray,
    *, threads: Threads,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """The rows in these blocks that are not held, and their scores: int32, int64 and uint64 [N]."""
    rows = len(block_L) * BLOCK
    table_N, id_N, score_N = np.empty(rows, np.int32), np.empty(rows, np.int64), np.empty(rows, np.uint64)
    size_L = np.empty(len(block_L), np.int64)
    threads.run(
        _free_rows_cpu, len(block_L), block_L, table_P, id_P, held_P, mark_P4.view(np.uint64), table_N, id_N, score_N,
        size_L, share_min=_SHARE_MIN,
    )  # fmt: skip
    size = _close_up_cpu(size_L, table_N, id_N, score_N)
    return table_N[:size], id_N[:size], score_N[:size]
