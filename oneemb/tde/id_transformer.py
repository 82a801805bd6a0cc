"""Cache ids of one table. The cache id of an id is the number of its row in the static table.

Invariants:
- every int64 is an id; no two ids have the same cache id at a time;
- a new id gets the lowest free cache id;
- a pinned cache id is never evicted;
- the same calls give the same cache ids, on every run and every rank.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from oneemb.kernels.shard_rows import least_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.kernels.use_records import use_records
from oneemb.storage.hash_index import HashIndex
from oneemb.tde.tensor_list import TensorList

__all__ = ["IDTransformer", "Moves", "TransformResult"]

_LEAST_POWER = 5
_FREE_WINDOW = 4096


class TransformResult(NamedTuple):
    """Result of `IDTransformer.transform`."""

    success: bool
    """Whether every id has a cache id."""
    ids_to_fetch: torch.Tensor
    """New ids of the table, each with its cache id: int64 [F, 2]."""


class Moves(NamedTuple):
    """Result of `IDTransformer.moves`: cache ids of a batch, and the ids that entered and left the table for it."""

    cache_U: np.ndarray
    """Cache id of each id: int64 [U]."""
    fetch_F2: np.ndarray
    """New ids of the table, each with its cache id: int64 [F, 2]."""
    evict_E2: np.ndarray
    """Evicted ids, each with its former cache id: int64 [E, 2]."""


class IDTransformer:
    """Gives the ids of one table their cache ids, and evicts ids.

    Args:
        num_embedding: number of rows of the table.
        eviction_config: rule by which ids are evicted, by default `{"type": "mixed_lru_lfu", "min_used_freq_power":
            5}`. `min_used_freq_power`, 0 to 31, is the power of use with which a new id begins.
        transform_config: `{"type": "naive"}` or `{"type": "cacheline"}`, which do the same here.

    Raises:
        ValueError: a type or an option is unknown, or a number is out of range.

    Reference: torchrec_dynamic_embedding's IDTransformer.
    """

    def __init__(
        self,
        num_embedding: int,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
    ):
        if num_embedding < 1:
            raise ValueError(f"num_embedding must be 1 or more, got {num_embedding}")
        self.num_embedding = num_embedding
        self._least_power = _least_power_of(eviction_config)
        _check_type("transform_config", transform_config or {"type": "naive"}, ("naive", "cacheline"), ())
        self._index = HashIndex(Threads(1))
        self._id_S = np.zeros(num_embedding, np.int64)
        self._record_S = np.zeros(num_embedding, np.uint32)
        self._used_S = np.zeros(num_embedding, np.bool_)  # used since the last save
        self._taken_S = np.zeros(num_embedding, np.bool_)
        self._pins_S = np.zeros(num_embedding, np.int32)
        self.ever_evicted = False
        self._free_from = 0  # a lower bound of the free cache ids

    def __len__(self) -> int:
        """Number of ids that have a cache id."""
        return len(self._index)

    def transform(self, global_ids: TensorList, cache_ids: TensorList, time: int) -> TransformResult:
        """Give every id its cache id. New ids get free cache ids while there are any.

        Args:
            global_ids: ids, int64 tensors of any shape.
            cache_ids: int64 tensors of the same number and shapes, which get the result; -1 for ids without room.
            time: number of the batch.
        """
        if [tensor.shape for tensor in global_ids] != [tensor.shape for tensor in cache_ids]:
            raise ValueError(
                f"cache_ids must have the shapes of global_ids, {[tuple(tensor.shape) for tensor in global_ids]},"
                f" got {[tuple(tensor.shape) for tensor in cache_ids]}"
            )
        flat = [tensor.reshape(-1).to("cpu", torch.int64).numpy() for tensor in global_ids]
        id_N = np.concatenate(flat) if flat else np.empty(0, np.int64)
        keys = unique_keys(np.zeros(len(id_N), np.int32), id_N)
        count_U = np.bincount(keys.inverse_N, minlength=len(keys.id_U))
        place_U = self._find(keys.id_U)
        new_K = np.flatnonzero(place_U < 0)
        come_F = new_K[: self.num_embedding - len(self)]
        place_U[come_F] = self._take(keys.id_U[come_F])
        self._use(keys.id_U, place_U, count_U, come_F, time)
        cache_N, begin = place_U.take(keys.inverse_N), 0
        for tensor in cache_ids:
            tensor.copy_(torch.from_numpy(cache_N[begin : begin + tensor.numel()]).view(tensor.shape))
            begin += tensor.numel()
        pairs = torch.from_numpy(np.stack([keys.id_U[come_F], place_U[come_F]], 1))
        return TransformResult(len(come_F) == len(new_K), pairs)

    def evict(self, num_to_evict: int) -> torch.Tensor:
        """Evict the least often used ids; of equally often used ids, those whose last use is oldest. Pinned ids stay.
        Returns the evicted ids, each with its former cache id: int64 [E, 2]."""
        return torch.from_numpy(self._evict(num_to_evict, self._taken_S & (self._pins_S == 0)))

    def save(self) -> torch.Tensor:
        """Ids that were used since the last call, each with its cache id: int64 [S, 2]."""
        pairs = self.used()
        self._used_S[pairs[:, 1]] = False
        return torch.from_numpy(pairs)

    # ---- calls of collections ---------------------------------------------------------------------------------------

    def has_room(self, id_U: np.ndarray, may_evict: bool = True) -> bool:
        """Whether `moves` would find room for these distinct ids; with `may_evict` False, room without an eviction."""
        place_U = self._find(id_U)
        known_K = place_U[place_U >= 0]
        lacking = len(id_U) - len(known_K) - (self.num_embedding - len(self))
        if lacking <= 0 or not may_evict:
            return lacking <= 0
        pinned = np.count_nonzero(self._pins_S) + np.count_nonzero(self._pins_S[known_K] == 0)
        return bool(len(self) - pinned >= lacking)

    def moves(self, id_U: np.ndarray, count_U: np.ndarray, time: int) -> Moves:
        """Give distinct ids their cache ids. A full table evicts half of its ids, or more if needed, but no pinned id
        and none of `id_U`. The caller has checked `has_room`.

        Args:
            id_U: the ids, int64 [U].
            count_U: number of uses of each id in the batch, int64 [U].
            time: number of the batch.
        """
        place_U = self._find(id_U)
        new_K = np.flatnonzero(place_U < 0)
        lacking = len(new_K) - (self.num_embedding - len(self))
        evict_E2 = np.empty((0, 2), np.int64)
        if lacking > 0:
            may_leave_S = self._taken_S & (self._pins_S == 0)
            may_leave_S[place_U[place_U >= 0]] = False
            evict_E2 = self._evict(max(self.num_embedding // 2, lacking), may_leave_S)
        place_U[new_K] = self._take(id_U[new_K])
        self._use(id_U, place_U, count_U, new_K, time)
        return Moves(place_U, np.stack([id_U[new_K], place_U[new_K]], 1), evict_E2)

    def pin(self, cache_U: np.ndarray) -> None:
        """Protect these distinct cache ids from eviction. Each `pin` needs an `unpin`."""
        self._pins_S[cache_U] += 1

    def unpin(self, cache_U: np.ndarray) -> None:
        """Undo a `pin`."""
        self._pins_S[cache_U] -= 1

    def used(self) -> np.ndarray:
        """Ids that were used since the last save, each with its cache id, int64 [S, 2], in the order of cache ids."""
        cache_S = np.flatnonzero(self._used_S)
        return np.stack([self._id_S[cache_S], cache_S], 1)

    def saved(self, cache_S: np.ndarray) -> None:
        """Record that the rows at these cache ids are saved. Pinned rows still count as used, since a step will change
        them."""
        self._used_S[cache_S[self._pins_S[cache_S] == 0]] = False

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _find(self, id_U: np.ndarray) -> np.ndarray:
        return self._index.find(np.zeros(len(id_U), np.int32), id_U)

    def _take(self, id_F: np.ndarray) -> np.ndarray:
        """Give ids that have no cache id the lowest free ones, in order. Returns these cache ids, int64 [F]."""
        found: list[np.ndarray] = []
        missing, begin, window = len(id_F), self._free_from, _FREE_WINDOW
        while missing:
            free = begin + np.flatnonzero(~self._taken_S[begin : begin + window])[:missing]
            found.append(free)
            missing -= len(free)
            begin += window
            window *= 2
        cache_F = np.concatenate(found) if found else np.empty(0, np.int64)
        self._index.put(np.zeros(len(id_F), np.int32), id_F, cache_F)
        if len(cache_F):
            self._free_from = int(cache_F[-1]) + 1
        self._taken_S[cache_F] = True
        self._id_S[cache_F] = id_F
        return cache_F

    def _use(self, id_U: np.ndarray, place_U: np.ndarray, count_U: np.ndarray, come_F: np.ndarray, time: int) -> None:
        new_U = np.zeros(len(id_U), np.bool_)
        new_U[come_F] = True
        here_U = place_U >= 0
        self._used_S[place_U[here_U]] = True
        use_records(
            self._record_S, place_U[here_U], id_U[here_U], count_U[here_U].astype(np.int64), new_U[here_U],
            time=time, least_power=self._least_power, seed=0,
        )  # fmt: skip

    def _evict(self, number: int, may_leave_S: np.ndarray) -> np.ndarray:
        cache_C = np.flatnonzero(may_leave_S)
        record_C = self._record_S[cache_C]
        chosen = least_of(record_C, number, lambda place_E: place_E)  # ties: lowest cache ids
        cache_C, record_C = cache_C[chosen], record_C[chosen]
        cache_E = cache_C[np.lexsort((cache_C, record_C))]
        id_E = self._id_S[cache_E]
        self._index.erase(np.zeros(len(id_E), np.int32), id_E)
        self._taken_S[cache_E] = False
        self._used_S[cache_E] = False
        if len(cache_E):
            self.ever_evicted = True
            self._free_from = min(self._free_from, int(cache_E.min()))
        return np.stack([id_E, cache_E], 1)


def _least_power_of(config: Mapping[str, Any] | None) -> int:
    config = config or {"type": "mixed_lru_lfu"}
    _check_type("eviction_config", config, ("mixed_lru_lfu",), ("min_used_freq_power",))
    power = config.get("min_used_freq_power", _LEAST_POWER)
    if type(power) is not int or not 0 <= power <= 31:
        raise ValueError(f"min_used_freq_power must be an int from 0 to 31, got {power!r}")
    return power


def _check_type(what: str, config: Mapping[str, Any], types: tuple[str, ...], options: tuple[str, ...]) -> None:
    unknown = set(config) - {"type", *options}
    if config.get("type") not in types or unknown:
        raise ValueError(
            f"{what} must be a type out of {', '.join(types)}"
            f"{' with the options ' + ', '.join(options) if options else ''}, got {json.dumps(dict(config))}"
        )
