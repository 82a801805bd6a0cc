"""Choice of the rows that a cache evicts: a clock over the shards of the cache's index.

An index divides the rows among 256 shards by the hashes of their keys, so a shard is a random sample of the rows. A
round evicts the rows with the lowest scores in some shards; the next round looks at the next shards. The number of
shards of a round follows from the number of slots that are needed now, so the time of a round does not grow with the
cache. After all shards have had a turn, each has lost the same share of its rows. In a small cache a round looks at all
shards.

Invariants:
- the choice depends on the index, scores, pins and earlier rounds, never on the number of threads;
- a round looks at no more rows than the larger of `_LOOKED` * needed slots and `_ROUND_ROWS`, plus one shard.

S slots, N rows of a round, V rows to evict.
"""

import math
from typing import NamedTuple

import numpy as np

from oneemb.kernels.shard_rows import keys_in_cells, least_of, rows_of_shards
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import SHARDS, HashIndex

# Number of rows that a round looks at for each row that it evicts, and the least number that it looks at.
_LOOKED = 16
_ROUND_ROWS = 1 << 15


class Victims(NamedTuple):
    """Tables int32, ids int64 and slots int64, each [V], of rows to evict, ordered by shard."""

    table_V: np.ndarray
    id_V: np.ndarray
    slot_V: np.ndarray


class VictimClock:
    """Chooses the rows that a cache of at most `slots` rows evicts, lowest scores first. `index` maps keys to slots."""

    def __init__(self, index: HashIndex, slots: int, threads: Threads):
        self._index, self._slots, self._threads = index, slots, threads
        self._shard = 0  # where the next round begins

    def choose(self, need: int, score_S: np.ndarray, pin_S: np.ndarray) -> Victims:
        """Choose the rows to evict in one round: at least `need`, or fewer if the round ends at the last shard; no rows
        only if all are pinned.

        Args:
            score_S: float64, 0 or more.
            pin_S: int32, number of pins of each slot; pinned rows are not chosen.
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
        """The `count` unpinned rows with the lowest scores in these shards, or all if there are fewer. Of rows with
        equal scores, those in lower slots are chosen."""
        address_P, cells_P = (array[shards] for array in self._index.shards)
        score_S2 = score_S.view(np.uint32).reshape(-1, 2)  # Scores are 0 or more, so their bits order like the numbers.
        cell_N, score_N = rows_of_shards(address_P, cells_P, score_S2, 0, pin_S, threads=self._threads)
        chosen = least_of(score_N, count, lambda place_E: keys_in_cells(cell_N[place_E])[2])
        return Victims(*keys_in_cells(cell_N[np.sort(chosen)]))

    def restart(self) -> None:
        """Begin at the first shard again."""
        self._shard = 0
