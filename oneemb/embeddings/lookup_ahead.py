"""Lookups between ranks in two halves: keys go to their owners ahead of a step, rows come in it.

    lookup = LookupAhead(embedding, connections, arguments)
    lookup.send_keys()        on a thread of its own; owners read the rows that they know, and pin them
    rows = lookup.rows()      in the step, after the updates before it

Every rank makes both calls, in the order in which the others make them. No number depends on how far ahead keys go.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from oneemb.embeddings.embedding import TableEmbedding, keys_of
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup
from oneemb.graph.ranks import Ranks
from oneemb.storage.errors import StorageError
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = ["LookupAhead"]


class LookupAhead:
    """One lookup of an embedding whose rows ranks own together.

    Args:
        embedding: whose rows they are; with a `process_group`.
        connections: what `Ranks.again` gave, for the thread that sends keys.
        arguments: gives the arguments of the lookup, as `forward` takes them; what it raises is raised by `send_keys`,
            on every rank.
        later: has its argument called outside of everything else, as what is dropped may be dropped anywhere.
    """

    def __init__(
        self,
        embedding: TableEmbedding,
        connections: Ranks,
        arguments: Callable[[], Mapping[str, Any]],
        later: Callable[[Callable[[], None]], object],
    ):
        assert embedding.asked_ranks is not None
        self._embedding, self._ranks = embedding, embedding.asked_ranks
        self._connections, self._later = connections, later
        self._lookup = Lookup(None)
        self._failed: list[Exception] = []
        try:
            given = arguments()
            self._lookup = Lookup(**{**given, "pooling": given.get("pooling") or "sum"})
        except Exception as error:
            self._failed.append(error)
        self._inserts, self._again = embedding.training, ops.in_backward()
        self._what = ops.lookup_of(embedding.name, self._inserts, self._ranks, self._again)
        self._routed: ops.Routed | None = None
        self._prefetched: Prefetched | None = None

    def send_keys(self) -> None:
        """Send the unique keys to their owners.

        Raises:
            RankError: another rank has failed.
            What `arguments` raises, or a lookup with these arguments.
        """
        store, ranks = self._embedding.store, self._ranks.over(self._connections)
        self._routed = ops.shuffle_keys(ranks, self._what, self._keys, store, self._lookup.sums_bags)
        if self._inserts:
            with suppress(StorageError):  # It will be met again by the lookup, which tells the ranks.
                self._prefetched = store.prefetch(self._routed.asked.keys.unique)

    def _keys(self) -> ops.Keys:
        if self._failed:
            raise self._failed.pop()
        return keys_of(self._embedding, self._lookup, self._inserts)

    def rows(self) -> torch.Tensor:
        """Result of `embedding(...)`. Call this once.

        Raises:
            RankError: another rank has failed.
            StoreFullError: as a lookup.
        """
        assert self._routed is not None
        embedding, scales = self._embedding, self._lookup.per_sample_weights
        prefetched, self._prefetched = self._prefetched, None
        has_gradient = torch.is_grad_enabled() and (
            embedding.is_trained or (scales is not None and scales.requires_grad)
        )
        lease = ops.lease_on_ranks(
            self._ranks,
            self._what,
            embedding.store,
            self._routed,
            inserts=self._inserts,
            prefetched=prefetched,
            again=self._again,
        )
        if not has_gradient:
            lease.unpin()
        rows = ops.gather(lease, scales, self._lookup.pooling)
        return ops.with_grad(rows, lease, embedding.weights, scales, self._ranks) if has_gradient else rows

    def __del__(self) -> None:
        prefetched: Prefetched | None = getattr(self, "_prefetched", None)
        if prefetched is not None:
            self._later(functools.partial(self._embedding.store.unprefetch, prefetched))
