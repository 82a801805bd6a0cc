"""Release of rows that `prefetch` and `announce` have pinned."""

from collections.abc import Iterable

from oneemb.graph.ops.announce import Announced
from oneemb.storage.merged_store import MergedPrefetched
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = ["unprefetch"]


def unprefetch(values: Iterable[object]) -> None:
    """Unpin, for those of these values that an op has prefetched, what no lookup has taken over."""
    for value in values:
        if isinstance(value, Prefetched):
            value.store.unprefetch(value)
        elif isinstance(value, MergedPrefetched):
            value.store.unprefetch(value)
        elif isinstance(value, Announced):
            value.drop()
