"""Caches of a store as a snapshot stores them, and as a load fills them again.

A load keeps the lists of the snapshot. The first training lookup after the load fills the caches, so a job that only
reads rows does not wait for them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from oneemb.storage.errors import StorageError
from oneemb.storage.tiers.cached_rows import CachedRows, array_name
from oneemb.storage.tiers.hot_rows import Tier
from oneemb.storage.tiers.memory_tier import MemoryTier
from oneemb.storage.tiers.stack import StorePlan

Lists = dict[str, CachedRows]
"""{name of a cache: keys and scores of its rows}."""


def cached_arrays(tiers: Sequence[Tier], waiting: Lists) -> dict[str, np.ndarray]:
    """Arrays of the caches among these tiers for a snapshot: {name: array}. `waiting`: lists of caches that are not
    filled yet."""
    lists = {tier.name: tier.cached() for tier in _caches(tiers) if tier.name not in waiting} | waiting
    return {array_name(name): rows.to_array() for name, rows in lists.items() if len(rows.id_N)}


def load_lists(plan: StorePlan, arrays: Mapping[str, np.ndarray], name: str) -> Lists:
    """The lists of a plan's caches in the arrays of snapshot `name`. CorruptTableError if such an array is invalid."""
    found = [cache for cache in plan.caches if array_name(cache) in arrays]
    return {cache: CachedRows.of_array(arrays[array_name(cache)], name) for cache in found}


def fill_caches(tiers: Sequence[Tier], lists: Lists) -> None:
    """Read the listed rows into the caches among these tiers, as far as they fit, and clear `lists`. A row that cannot
    be read is left out: a lookup that needs the row raises the error."""
    caches = [tier for tier in _caches(tiers) if tier.name in lists]
    try:
        with ExitStack() as reading:
            for tier in reversed(caches):
                tier.warm(lists[tier.name])
                reading.enter_context(tier.keeping_no_reads())
        for tier in caches[1:]:  # Reads of the cache above have changed the scores.
            tier.warm(lists[tier.name])
    except (StorageError, MemoryError):
        pass
    lists.clear()


def _caches(tiers: Sequence[Tier]) -> list[MemoryTier]:
    return [tier for tier in tiers if isinstance(tier, MemoryTier) and tier.is_cache]
