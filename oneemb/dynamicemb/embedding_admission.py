"""Admission of ids (which ids get a row), with dynamicemb's names.

DynamicEmbTableOptions(admit_strategy=FrequencyAdmissionStrategy(threshold=3), admission_counter=KVCounter(1 << 20))
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oneemb.dynamicemb.types import AdmissionStrategy, Counter, DynamicEmbInitializerArgs, MemoryType

__all__ = ["FrequencyAdmissionStrategy", "KVCounter", "MultiTableKVCounter"]


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Gives an id a row at its `threshold`-th lookup.

    Args:
        threshold: number of lookups of the id in training mode, 0 or more; 0 and 1 admit every id.
        initializer_args: values of ids without a row; None = their initial weights.

    Raises:
        ValueError: `threshold` is below 0.
    """

    def __init__(self, threshold: int, initializer_args: DynamicEmbInitializerArgs | None = None):
        if threshold < 0:
            raise ValueError(f"threshold must be 0 or more, got {threshold}")
        self.threshold = threshold
        self.initializer_args = initializer_args

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Whether each id gets a row, bool [N]. Arguments are those of `AdmissionStrategy.admit`."""
        if keys.shape[0] != frequencies.shape[0]:
            raise ValueError(f"keys and frequencies must have the same length, got {len(keys)} and {len(frequencies)}")
        return frequencies >= self.threshold


class KVCounter:
    """Bound on the number of ids of a table that are counted before they get a row.

    Args:
        capacity: largest number of ids; those whose last lookup is oldest are forgotten first.
        bucket_capacity, key_type: have no effect.
    """

    def __init__(self, capacity: int, bucket_capacity: int = 1024, key_type: torch.dtype = torch.int64):
        self.capacity = capacity
        self.bucket_capacity = bucket_capacity
        self.key_type = key_type


class IdCounts(Protocol):
    """Counts of lookups of ids that have no row, table by table."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the tables."""

    def sightings(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Counted ids of table t, in ascending order, and the count of each: int64 [N] both."""

    def add_sightings(self, t: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Add `count_N` to the counts of the ids."""

    def forget_sightings(self, t: int, id_N: np.ndarray) -> None:
        """Forget the counts of the ids."""

    @property
    def sightings_bytes(self) -> int:
        """Memory that the counts take, in bytes."""


class _OwnCounts:
    """Counts that this object stores itself, for a counter without tables."""

    def __init__(self, counters: Sequence[KVCounter]):
        if not all(isinstance(one, KVCounter) for one in counters):
            raise TypeError(f"kv_counters must be KVCounters, one for each table, got {counters!r:.200}")
        self.names = [f"t_{t}" for t in range(len(counters))]
        self._capacities = [one.capacity for one in counters]
        self._counts: list[dict[int, int]] = [{} for _ in counters]  # in the order of last lookups

    def sightings(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        id_N, count_N = (np.array(list(numbers), np.int64) for numbers in (self._counts[t], self._counts[t].values()))
        order_N = np.argsort(id_N)
        return id_N[order_N], count_N[order_N]

    def add_sightings(self, t: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        counts = self._counts[t]
        for id, count in zip(id_N.tolist(), count_N.tolist(), strict=True):
            counts[id] = counts.pop(id, 0) + count
        for id in list(counts)[: max(0, len(counts) - self._capacities[t])]:
            del counts[id]

    def forget_sightings(self, t: int, id_N: np.ndarray) -> None:
        for id in id_N.tolist():
            self._counts[t].pop(id, None)

    @property
    def sightings_bytes(self) -> int:
        return sum(map(sys.getsizeof, self._counts))


class MultiTableKVCounter(Counter):
    """Counts of lookups of ids without a row, for several tables.

    Args:
        kv_counters: either a KVCounter for each table, whose `capacity` bounds the number of ids; or existing tables,
            whose counts on this rank are then read and changed.
        device: has no effect: counts are in host memory.
    """

    def __init__(self, kv_counters: Sequence[KVCounter] | IdCounts, device: torch.device | None = None):
        self._tables: IdCounts = _OwnCounts(kv_counters) if isinstance(kv_counters, Sequence) else kv_counters
        self.score_name_ = "counter"
        self.score_names_ = [self.score_name_]

    @property
    def table_(self) -> "MultiTableKVCounter":
        """This counter; dynamicemb's counter has its hash table by this name."""
        return self

    def size(self, table_id: int | None = None) -> int:
        """Number of counted ids in one table, or, if None, in all tables."""
        tables = range(len(self._tables.names)) if table_id is None else [table_id]
        return sum(len(self._tables.sightings(t)[0]) for t in tables)

    def lookup(self, keys: torch.Tensor, table_ids: torch.Tensor, score: Any = None) -> tuple[torch.Tensor, ...]:
        """Counts of ids, int64 [N], 0 if an id is not counted; whether each id is counted, bool [N]; index of each
        counted id in `keys`, -1 for other ids."""
        id_N, count_N, found_N = keys.cpu().numpy(), np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        for t in table_ids.unique().tolist():
            place_M = (table_ids == t).nonzero().view(-1).cpu().numpy()
            id_M = id_N[place_M]
            id_C, count_C = self._tables.sightings(t)  # ids are ascending
            at_M = np.minimum(np.searchsorted(id_C, id_M), max(len(id_C) - 1, 0))
            if len(id_C):
                found_N[place_M] = id_C[at_M] == id_M
                count_N[place_M] = np.where(found_N[place_M], count_C[at_M], 0)
        counts, founds = torch.from_numpy(count_N), torch.from_numpy(found_N)
        places = torch.where(founds, torch.arange(len(keys), device="cpu"), -1)
        return counts.to(keys.device), founds.to(keys.device), places.to(keys.device)

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Add `frequencies` to the counts of distinct ids. Returns the new counts, int64 [N]."""
        for t in table_ids.unique().tolist():
            of_table = table_ids == t
            self._tables.add_sightings(t, keys[of_table].cpu().numpy(), frequencies[of_table].cpu().numpy())
        return self.lookup(keys, table_ids)[0]

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forget the counts of these ids."""
        for t in table_ids.unique().tolist():
            self._tables.forget_sightings(t, keys[table_ids == t].cpu().numpy())

    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes of memory of the given kind. Counts are in host memory only."""
        return self._tables.sightings_bytes if mem_type is MemoryType.HOST else 0

    def _batched_export_keys_scores(
        self, score_names: list[str], device: torch.device, table_id: int = 0, **_: Any
    ) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor], None]]:
        """Yield the ids of a table and their counts, in the form that dynamicemb's tools read."""
        id_N, count_N = (torch.from_numpy(array).to(device) for array in self._tables.sightings(table_id))
        yield id_N, dict.fromkeys(score_names, count_N), None

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Add the counts in two files of int64, keys and counts, for keys that this rank owns. ValueError if the files
        differ in length."""
        sizes = [os.path.getsize(path) for path in (key_file, counter_file)]
        if sizes[0] != sizes[1] or sizes[0] % 8:
            raise ValueError(
                f"{key_file} and {counter_file} must have the same number of int64 values, got {sizes} bytes"
            )
        id_N, count_N = (np.fromfile(path, "<i8") for path in (key_file, counter_file))
        self._tables.add_sightings(table_id, id_N, count_N)

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Write the ids of a table and their counts to two files of int64."""
        for path, array_N in zip((key_file, counter_file), self._tables.sightings(table_id), strict=True):
            array_N.astype("<i8").tofile(path)
