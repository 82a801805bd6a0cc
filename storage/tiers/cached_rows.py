"""The rows that a cache holds, as keys and scores: snapshots store them, so that a job that continues has a full cache.

A score is relative to a use at the time of the save, so that scores of several caches can be compared:
- "lfu": uses, each worth half after a half-life; 1 = one use now;
- "lru": number of calls since the last use.

N rows, in the order in which they lie in the store below, if it has one (`KeepsNeighbours`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.storage.errors import CorruptTableError

POLICIES = ("lru", "lfu")

_PREFIX = "cached rows of "

_SHARDS_MAX = 256


def array_name(tier: str) -> str:
    """Name of the array with the rows that this tier holds."""
    return f"{_PREFIX}{tier}"


class CachedRows(NamedTuple):
    """Rows of a cache: tables int32, ids int64 and scores float32, each [N], and where its clock of victims stands."""

    policy: str
    shard: int
    table_N: np.ndarray
    id_N: np.ndarray
    score_N: np.ndarray

    def to_array(self) -> np.ndarray:
        """The array of a snapshot: uint32 [N + 1, 4], 16 bytes a row."""
        word_N4 = np.empty((len(self.id_N) + 1, 4), np.uint32)
        word_N4[0] = POLICIES.index(self.policy), self.shard, 0, 0
        word_N4[1:, 0] = self.table_N
        word_N4[1:, 1:3] = np.ascontiguousarray(self.id_N).view(np.uint32).reshape(-1, 2)
        word_N4[1:, 3] = self.score_N.view(np.uint32)
        return word_N4

    @classmethod
    def of_array(cls, word_N4: np.ndarray, name: str) -> "CachedRows":
        """The rows in an array of snapshot `name`. CorruptTableError if the array is invalid."""
        if word_N4.dtype == np.uint32 and word_N4.ndim == 2 and word_N4.shape[1] == 4 and len(word_N4):
            policy, shard = word_N4[0, :2].tolist()
            body_N4 = word_N4[1:]
            score_N = np.ascontiguousarray(body_N4[:, 3]).view(np.float32)
            with np.errstate(invalid="ignore"):
                valid = (body_N4[:, 0] <= TABLE_MAX).all() and (np.isfinite(score_N) & (score_N >= 0)).all()
            if policy < len(POLICIES) and shard < _SHARDS_MAX and valid:
                id_N = np.ascontiguousarray(body_N4[:, 1:3]).view(np.int64).reshape(-1)
                return cls(POLICIES[policy], shard, body_N4[:, 0].astype(np.int32), id_N, score_N)
        raise CorruptTableError(
            f"snapshot {name!r}: its array of cached rows must be uint32 of shape [N, 4] with a policy, tables and"
            f" scores in their ranges, it is {word_N4.dtype} {list(word_N4.shape)}; restore its file from a copy, or"
            " load another snapshot"
        )

    def hottest(self, count: int) -> "CachedRows":
        """The `count` rows that the cache would evict last, or all rows if there are fewer; their order stays."""
        if len(self.id_N) <= count:
            return self
        ranked_N = self.score_N if self.policy == "lru" else -self.score_N
        return self.of(np.sort(np.argpartition(ranked_N, count)[:count]))

    def of(self, n: np.ndarray | slice) -> "CachedRows":
        """The rows at these positions."""
        return self._replace(table_N=self.table_N[n], id_N=self.id_N[n], score_N=self.score_N[n])


def joined_rows(
    parts: Sequence[Mapping[str, np.ndarray]], is_own: Callable[[np.ndarray, np.ndarray], np.ndarray], name: str
) -> dict[str, np.ndarray]:
    """Join the arrays of cached rows of the parts of a snapshot for one rank: {name: array of the rank's own rows}.

    Args:
        parts: for each part, {name: array}, all arrays of the part.
        is_own: function of table_N and id_N; returns bool [N], whether the rank owns the key.
        name: name of the snapshot, for errors.
    """
    joined = {}
    for array in dict.fromkeys(array for part in parts for array in part if array.startswith(_PREFIX)):
        rows = [CachedRows.of_array(part[array], name) for part in parts if array in part]
        rows = [one for one in rows if one.policy == rows[0].policy]
        own = [one.of(np.flatnonzero(is_own(one.table_N, one.id_N))) for one in rows]
        table_N, id_N, score_N = (np.concatenate([one[n] for one in own]) for n in (2, 3, 4))
        shard = rows[0].shard if len(rows) == 1 else 0
        joined[array] = CachedRows(rows[0].policy, shard, table_N, id_N, score_N).to_array()
    return joined
