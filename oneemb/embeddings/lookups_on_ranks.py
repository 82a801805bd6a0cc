"""Lookups of an embedding whose rows ranks own together. Every rank makes each, with ids of its own.

    lookups.look_up(embedding, lookup, ...)    at once

    ahead = RowsAhead(...)     or in two halves:
    ahead.send_keys()          on a thread of its own; owners read the rows that they know, and pin them
    ahead.rows()               in the step, after the updates before it

`LookupsHere` (embedding.py) has the same calls, for an embedding that asks no rank.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Never

import torch

from oneemb.embeddings.lookup_keys import keys_of
from oneemb.embeddings.snapshot_calls import SnapshotCalls
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup
from oneemb.graph.ops.reading import ReadRows
from oneemb.graph.ranks import Ranks


class LookupsOnRanks:
    """How such an embedding looks ids up.

    Args:
        ranks: who own the rows.
    """

    asks_ranks = True

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def look_up(self, embedding: SnapshotCalls, lookup: Lookup, inserts: bool, has_gradient: bool) -> torch.Tensor:
        """The rows, from their owners."""
        lease = ops.look_up_on_ranks(
            self.ranks, embedding.store, embedding.name, functools.partial(keys_of, embedding, lookup, inserts),
            inserts=inserts, has_gradient=has_gradient, sums_bags=lookup.sums_bags, again=ops.in_backward(),
        )  # fmt: skip
        return _rows_of(lease, embedding, lookup, has_gradient, self.ranks)

    def peek(
        self, embedding: SnapshotCalls, source: ReadRows, lookup: Lookup, keys: Callable[[], ops.Keys]
    ) -> torch.Tensor:
        """Read rows from `source`, by the embedding's keys."""
        lease = ops.look_up_on_ranks(
            self.ranks, embedding.store, embedding.name, keys, source=source, sums_bags=lookup.sums_bags
        )
        return ops.gather(lease, lookup.per_sample_weights, lookup.pooling)

    def refuse(self, embedding: SnapshotCalls, failure: Exception) -> Never:
        """Raise the error of a lookup on all ranks, in place of the exchange of its keys, in which the others wait."""

        def fail() -> Never:
            raise failure

        self.ranks.agree(ops.lookup_of(embedding.name, embedding.training, self.ranks, ops.in_backward()), fail)
        raise AssertionError("ranks have agreed on a lookup that has failed")


def _rows_of(
    lease: ops.Lease, embedding: SnapshotCalls, lookup: Lookup, has_gradient: bool, ranks: Ranks
) -> torch.Tensor:
    rows = ops.gather(lease, lookup.per_sample_weights, lookup.pooling)
    if not has_gradient:
        return rows
    return ops.with_grad(rows, lease, embedding.weights, lookup.per_sample_weights, ranks)


class RowsAhead:
    """Rows of one lookup whose keys go to their owners ahead of the step. No number depends on how far ahead they go.

    Args:
        embedding: whose rows they are; it asks ranks.
        connections: what `Ranks.again` gave, for the thread that sends keys.
        arguments: gives the arguments of the lookup, as `forward` takes them; what it raises is raised by `send_keys`,
            on every rank.
        later: has its argument called outside of everything else, as what is dropped may be dropped anywhere.
    """

    def __init__(
        self,
        embedding: SnapshotCalls,
        connections: Ranks,
        arguments: Callable[[], Mapping[str, Any]],
        later: Callable[[Callable[[], None]], object],
    ):
        assert not embedding.ranks.alone
        self._embedding, self._ranks = embedding, embedding.ranks
        self._connections, self._later = connections, later
        self._lookup = Lookup(None)
        self._failed: list[Exception] = []
        try:
            given = arguments()
            self._lookup = Lookup(**{**given, "pooling": given.get("pooling") or "sum"})
        except Exception as error:
            self._failed.append(error)
        self._inserts, self._again = embedding.training, ops.in_backward()
        self._ahead: ops.LookupAhead | None = None

    def send_keys(self) -> None:
        """Send the unique keys to their owners.

        Raises:
            RankError: another rank has failed.
            What `arguments` raises, or a lookup with these arguments.
        """
        self._ahead = ops.begin_lookup(
            self._ranks, self._embedding.store, self._embedding.name, self._keys, inserts=self._inserts,
            sums_bags=self._lookup.sums_bags, again=self._again, connections=self._connections,
        )  # fmt: skip
        self._ahead.prefetch()

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
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        embedding, scales = self._embedding, self._lookup.per_sample_weights
        has_gradient = torch.is_grad_enabled() and (
            embedding.is_trained or (scales is not None and scales.requires_grad)
        )
        lease = ahead.acquire()
        if not has_gradient:
            lease.unpin()
        return _rows_of(lease, embedding, self._lookup, has_gradient, self._ranks)

    def __del__(self) -> None:
        ahead: ops.LookupAhead | None = getattr(self, "_ahead", None)
        if ahead is not None:
            self._later(ahead.drop)
