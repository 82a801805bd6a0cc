"""Lookups of an embedding whose rows are all in this process, or belong to several ranks.

lookups.look_up(embedding, lookup, ...)    a whole lookup; every rank makes each lookup, with its own ids

ahead = RowsAhead(...)     with ranks, a lookup in two halves:
ahead.send_keys()          on another thread: owners read and pin known rows
ahead.rows()               in the step, after all earlier updates
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from oneemb.embeddings.snapshot_calls import SnapshotCalls
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup
from oneemb.graph.ops.reading import ReadRows
from oneemb.graph.ranks import Ranks


def keys_of(embedding: SnapshotCalls, lookup: Lookup, inserts: bool = False) -> ops.BatchKeys:
    """The unique keys of a lookup; errors of its arguments are those of `forward`.

    Args:
        inserts: whether the lookup will insert unknown keys; `warn_if_empty` may then warn.
    """
    if inserts and embedding.may_be_empty:
        embedding.warn_if_empty()
    keys = ops.unique_keys(
        lookup.ids, lookup.table_ids, embedding.num_tables, embedding.key_type, embedding.padding_idx, lookup.offsets,
        lookup.columns, threads=embedding.store.threads,
    )  # fmt: skip
    if lookup.per_sample_weights is not None or lookup.pooling != "sum":
        ops.check_pooling(keys, lookup.per_sample_weights, lookup.pooling)
    return keys


class LocalLookups:
    """Lookups of an embedding whose rows are all in this process; the methods are those of `RankLookups`."""

    asks_ranks = False

    def look_up(self, embedding: SnapshotCalls, lookup: Lookup, inserts: bool, has_gradient: bool) -> torch.Tensor:
        """The rows of ids. They are differentiable if `has_gradient`, and unknown ids are inserted if `inserts`."""
        store, scales, pooling = embedding.store, lookup.per_sample_weights, lookup.pooling
        is_read = not has_gradient and scales is None and pooling == "sum"
        if is_read and lookup.offsets is None and lookup.columns is None:
            if inserts and embedding.may_be_empty:
                embedding.warn_if_empty()
            read = ops.read_ids(
                store, lookup.ids, lookup.table_ids, embedding.num_tables, embedding.key_type, embedding.padding_idx,
                inserts=inserts,
            )  # fmt: skip
            if read is not None:
                return read
        keys = keys_of(embedding, lookup, inserts)
        if not inserts and not has_gradient:
            return ops.peek(store, keys, scales, pooling)
        lease = ops.acquire(store, keys, again=ops.in_backward()) if inserts else ops.acquire_later(store, keys)
        rows = ops.gather(lease, scales, pooling)
        if has_gradient:
            return ops.with_grad(rows, lease, embedding.weights, scales, embedding.ranks)
        lease.unpin()
        return rows

    def peek(
        self, embedding: SnapshotCalls, source: ReadRows, lookup: Lookup, keys: Callable[[], ops.BatchKeys]
    ) -> torch.Tensor:
        """Read rows from `source`, by the embedding's keys."""
        return ops.peek(source, keys(), lookup.per_sample_weights, lookup.pooling)


class RankLookups:
    """Lookups of an embedding whose rows ranks own together."""

    asks_ranks = True

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def look_up(self, embedding: SnapshotCalls, lookup: Lookup, inserts: bool, has_gradient: bool) -> torch.Tensor:
        """The rows of ids, which their owners send; arguments as for `LocalLookups.look_up`."""
        lease = ops.look_up_on_ranks(
            self.ranks, embedding.store, embedding.name, functools.partial(keys_of, embedding, lookup, inserts),
            inserts=inserts, has_gradient=has_gradient, sums_bags=lookup.sums_bags, again=ops.in_backward(),
        )  # fmt: skip
        return _rows_of(lease, embedding, lookup, has_gradient, self.ranks)

    def peek(
        self, embedding: SnapshotCalls, source: ReadRows, lookup: Lookup, keys: Callable[[], ops.BatchKeys]
    ) -> torch.Tensor:
        """Read rows from `source`, by the embedding's keys."""
        lease = ops.look_up_on_ranks(
            self.ranks, embedding.store, embedding.name, keys, source=source, sums_bags=lookup.sums_bags
        )
        return ops.gather(lease, lookup.per_sample_weights, lookup.pooling)


def _rows_of(
    lease: ops.Lease, embedding: SnapshotCalls, lookup: Lookup, has_gradient: bool, ranks: Ranks
) -> torch.Tensor:
    rows = ops.gather(lease, lookup.per_sample_weights, lookup.pooling)
    if not has_gradient:
        return rows
    return ops.with_grad(rows, lease, embedding.weights, lookup.per_sample_weights, ranks)


class RowsAhead:
    """One lookup with ranks whose keys are sent to their owners ahead of the step. No number depends on how far ahead.

    Args:
        embedding: embedding whose rows ranks own together.
        connections: result of `Ranks.again`, for the thread that sends the keys.
        arguments: returns the arguments of the lookup, as `forward` takes them. If it raises, `send_keys` raises on
            every rank.
        later: runs a function later, outside of other calls. It unpins rows if this object is dropped, which may happen
            in the middle of any call.
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
            The error of `arguments`, or of a lookup with these arguments.
        """
        self._ahead = ops.begin_lookup(
            self._ranks, self._embedding.store, self._embedding.name, self._keys, inserts=self._inserts,
            sums_bags=self._lookup.sums_bags, again=self._again, connections=self._connections,
        )  # fmt: skip
        self._ahead.prefetch()

    def _keys(self) -> ops.BatchKeys:
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
