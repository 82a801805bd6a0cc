"""Choice of the rows that a cache evicts: a clock over the shards of the cache's index.

An index divides the rows among 256 shards by the hashes of their keys, so a shard is a random sample of the rows. A
round evicts the rows with the lowest scores in some shards; the next round looks at the next shards. The number of
shards of a round follows from the number of slots that are needed now, so the time of a round does not grow with the
cache. After all shards have had a turn, each has lost the same share of its rows. In a small cache a round looks at all
shards.

Rows that a batch uses which a loop has read ahead (coming_uses.py) are evicted after all other rows, the row with the
latest next use first.

Invariants:
- the choice depends on the keys, scores, pins, known uses and earlier rounds, never on the slots of the rows or on the
  number of threads;
- a round looks at no more rows than the larger of `_LOOKED` * needed slots and `_ROUND_ROWS`, plus one shard.

S slots, N rows of a round, V rows to evict.
"""

import math
from typing import NamedTuple

import numpy as np

from oneemb.kernels.shard_rows import keys_in_cells, least_of, rows_of_shards
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import SHARDS, HashIndex
from oneemb.storage.tiers.coming_uses import NO_USE, ComingUses

# Number of rows that a round looks at for each row that it evicts, and the least number that it looks at.
_LOOKED = 16
_ROUND_ROWS = 1 << 15

# A row whose next use is in batch n has this number minus n in place of its score, which is more than the bits of any
# score.
_AWAITED = np.uint64(0xFFFFFFFFFFFFFFFF)

# Odd factors that spread the bits of ids and tables.
_OF_ID, _OF_TABLE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Victims(NamedTuple):
    """Tables int32, ids int64 and slots int64, each [V], of rows to evict, ordered by shard."""

    table_V: np.ndarray
    id_V: np.ndarray
    slot_V: np.ndarray


class VictimClock:
    """Chooses the rows that a cache of at most `slots` rows evicts, lowest scores first. `index` maps keys to slots."""

    def __init__(self, index: HashIndex, slots: int, threads: Threads):
        self._index, self._slots, self._threads = index, slots, threads
        self.shard = 0
        """First shard of the next round."""
        self._coming: ComingUses | None = None  # None = no batch was ever added
        self._next_use_S = np.empty(0, np.int32)  # number of the next batch that uses each row, NO_USE if none is known

    def add_batch(self, table_U: np.ndarray, id_U: np.ndarray) -> int:
        """Add the keys of a batch that will be looked up. Returns the number of the batch."""
        if self._coming is None:
            self._coming, self._next_use_S = ComingUses(self._threads), np.zeros(self._slots, np.int32)
        first = self._coming.add(table_U, id_U)
        slot_N = self._index.find(table_U[first], id_U[first])
        self._next_use_S[slot_N[slot_N >= 0]] = self._coming.added
        return self._coming.added

    def reach_batch(self, number: int) -> None:
        """Note that the batches up to this number have pinned their rows. From now on the uses after them decide."""
        while self._coming is not None and (batch := self._coming.reach(number)) is not None:
            table_U, id_U, next_U = batch
            slot_U = self._index.find(table_U, id_U)
            found_U = slot_U >= 0
            self._next_use_S[slot_U[found_U]] = next_U[found_U]

    def forget_batches(self) -> None:
        """Forget the batches that were added and not reached: no step will look them up."""
        if self._coming is not None:
            self._coming.forget()

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
            self.shard = 0
        for _ in range(SHARDS // many + 2):
            shards = slice(self.shard, min(self.shard + many, SHARDS))
            part = (shards.stop - shards.start) / many
            self.shard = shards.stop % SHARDS
            share = self._slots * (shards.stop - shards.start) // (SHARDS * _LOOKED)
            victims = self._least(shards, max(math.ceil(need * part), share), score_S, pin_S)
            if len(victims.slot_V):
                if self._coming is not None:
                    self._next_use_S[victims.slot_V] = NO_USE
                return victims
        return victims

    def _least(self, shards: slice, count: int, score_S: np.ndarray, pin_S: np.ndarray) -> Victims:
        """The `count` unpinned rows of these shards that are evicted first, or all if there are fewer. Of rows with
        equal scores, those with the least `tie_numbers` are chosen."""
        address_P, cells_P = (array[shards] for array in self._index.shards)
        score_S2 = score_S.view(np.uint32).reshape(-1, 2)  # Scores are 0 or more, so their bits order like the numbers.
        cell_N, score_N = rows_of_shards(address_P, cells_P, score_S2, 0, pin_S, threads=self._threads)
        if self._coming is not None:
            next_use_N = self._next_use_S[keys_in_cells(cell_N)[2]]
            awaited = np.flatnonzero(next_use_N > self._coming.reached)
            score_N[awaited] = _AWAITED - next_use_N[awaited].astype(np.uint64)
        chosen = least_of(score_N, count, lambda place_E: tie_numbers(*keys_in_cells(cell_N[place_E])[:2]))
        return Victims(*keys_in_cells(cell_N[np.sort(chosen)]))

    def restart(self) -> None:
        """Begin at the first shard again. The cache has no rows any more."""
        self.shard = 0
        self._next_use_S[:] = NO_USE


def tie_numbers(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """Numbers that order rows of equal scores, uint64 [N]: neither small nor frequent ids come first."""
    mixed_N = (id_N.view(np.uint64) + table_N.astype(np.uint64) * _OF_TABLE) * _OF_ID
    return (mixed_N ^ (mixed_N >> np.uint64(32))) * _OF_ID
