"""Choice of the rows that leave a cache: a clock over the shards of the cache's index.

All rows are in the 256 shards of an index, by their keys' hashes: a shard is a random sample of the rows. A round looks
at the rows of some shards, and those of least score leave; the next round looks at the next shards. The number of
shards follows from the number of slots that are needed now, so the time of a round does not grow with the cache, and
every shard gives up the same share of its rows by the time that each had its turn. A small cache is one round.

Invariants:
- which rows leave depends on the index, scores and pins, and on the rounds before, never on the number of threads;
- a round looks at no more rows than `_LOOKED` times the slots that are needed, or `_ROUND_ROWS`, and one shard.

S slots, N rows of a round, V rows that leave.
"""

import math
from typing import NamedTuple

import numpy as np

from oneemb.kernels.shard_rows import keys_in_cells, least_of, rows_of_shards
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import SHARDS, HashIndex

# Rows that a round looks at for each one that leaves, and the fewest that it looks at.
_LOOKED = 16
_ROUND_ROWS = 1 << 15


class Victims(NamedTuple):
    """Rows that are to leave, shard by shard."""

    table_V: np.ndarray
    id_V: np.ndarray
    slot_V: np.ndarray


class VictimClock:
    """Choice of rows that a cache of at most `slots` rows evicts, those of least score first; `index` has the slot of
    each."""

    def __init__(self, index: HashIndex, slots: int, threads: Threads):
        self._index, self._slots, self._threads = index, slots, threads
        self._shard = 0  # where the next round begins

    def choose(self, need: int, score_S: np.ndarray, pin_S: np.ndarray) -> Victims:
        """The rows to evict in one round: `need` or more, unless the round comes to the last shard before; none if all
        are pinned.

        Args:
            score_S: float64, 0 or more.
            pin_S: int32; rows in slots above 0 stay.
        """
        looked = max(_ROUND_ROWS, _LOOKED * need)
        many = min(SHARDS, math.ceil(SHARDS * looked / max(self._slots, 1)))
        if many == SHARDS:
            self._shard = 0
        for _ in range(SHARDS // many + 2):
            shards = slice(self._shard, min(self._shard + many, SHARDS))
            part = (shards.stop - shards.start) / many
            self._shard = shards.stop % SHARDS
            share = self._slots * (shards.stop - shards.start) // (SHARDS * _LOOKED)
            victims = self._least(shards, max(math.ceil(need * part), share), score_S, pin_S)
            if len(victims.slot_V):
                return victims
        return victims

    def _least(self, shards: slice, count: int, score_S: np.ndarray, pin_S: np.ndarray) -> Victims:
        """The `count` rows of least score in these shards, or all; of equal ones those in lower slots."""
        address_P, cells_P = (array[shards] for array in self._index.shards)
        score_S2 = score_S.view(np.uint32).reshape(-1, 2)  # The bits of such numbers are in the numbers' order.
        cell_N, score_N = rows_of_shards(address_P, cells_P, score_S2, 0, pin_S, threads=self._threads)
        chosen = least_of(score_N, count, lambda place_E: keys_in_cells(cell_N[place_E])[2])
        return Victims(*keys_in_cells(cell_N[np.sort(chosen)]))

    def restart(self) -> None:
        """Begin at the first shard again."""
        self._shard = 0
