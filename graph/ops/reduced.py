"""Gradients of rows at the begin of a step: what backward passes have left for embeddings, reduced for the update."""

from collections.abc import Sequence
from typing import cast

import torch

from oneemb.graph.ops.grads import RowGrads, join_grads
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.ops.merged import MergedRows
from oneemb.graph.ops.row_grad import RowGrad
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore


def measure_reduce(args: object, grads: Sequence[RowGrads]) -> tuple[int, int]:
    # The sums themselves are made by whoever reads them: an update, row by row, or clipping.
    rows = 0
    for grad in grads:
        rows += len(grad.slot_U)
    return rows, 0


def reduce_grads(row_grads: Sequence[RowGrad]) -> list[RowGrads]:
    """The gradients of rows, those of equal keys to be summed, with the slot of each: rows are resident and pinned
    until `unpin`. Those of embeddings whose lookups were merged are one.

    The sum runs in float32: over the backward passes of an id in the order they came, over the ids of a lookup in batch
    order, then over lookups in the order they were made.

    Args:
        row_grads: of one embedding each, or of some of its tables, which are reduced as one; trained by one group of
            one optimizer where their lookups were merged.

    Raises:
        StoreFullError: rows that were let go do not fit any more; nothing has changed.
        StorageError: rows were replaced since the lookup (load_snapshot, clear).
    """
    merged: dict[MergedStore, list[RowGrad]] = {}
    alone: list[RowGrad] = []
    for row_grad in _of_stores(row_grads):
        store = row_grad.merged_in()
        (alone if store is None else merged.setdefault(store, [])).append(row_grad)
    reduced: list[RowGrads | None] = []
    for group in merged.values():
        lookups = _merged_lookups(group)
        if lookups is None:
            alone += group
        else:
            reduced.append(join_grads([rows.reduce(grads) for rows, grads in lookups]))
    reduced += [row_grad.acquire() for row_grad in alone]
    return [grads for grads in reduced if grads is not None]


def _of_stores(row_grads: Sequence[RowGrad]) -> list[RowGrad]:
    """The gradients of each store as one: where there are several, they are of tables of their own."""
    of_store: dict[EmbeddingStore, list[RowGrad]] = {}
    for row_grad in row_grads:
        of_store.setdefault(row_grad.store, []).append(row_grad)
    return [its[0] if len(its) == 1 else _as_one(store, its) for store, its in of_store.items()]


def _as_one(store: EmbeddingStore, row_grads: Sequence[RowGrad]) -> RowGrad:
    first, its_tables = row_grads[0], frozenset[int]().union(*(grad.tables or () for grad in row_grads))
    tables = None if len(its_tables) == store.num_tables else its_tables
    left = [[id(one.grad) for one in grad.passes] for grad in row_grads]
    if all(its == left[0] for its in left) and all(grad.summed is None for grad in row_grads):
        return RowGrad(store, first.passes, tables=tables)
    # What was done to one of them has left sums in place of passes.
    parts = [grads for grad in row_grads if (grads := grad.reduce()) is not None]
    holders = dict.fromkeys(
        lease for grad in row_grads for lease in (*(one.lease for one in grad.passes), *grad.holders)
    )
    return RowGrad(store, (), join_grads(parts), holders, tables=tables)


def _merged_lookups(
    group: Sequence[RowGrad],
) -> list[tuple[MergedRows, dict[int, tuple[Lease, list[torch.Tensor]]]]] | None:
    """The gradients of each merged lookup, in the order in which each embedding's lookups were made; None if no order
    is that of all."""
    lookups: dict[MergedRows, dict[int, tuple[Lease, list[torch.Tensor]]]] = {}
    for row_grad in group:
        for one in row_grad.passes:
            assert one.lease.shared is not None
            rows, p = one.lease.shared
            assert isinstance(rows, MergedRows)
            lookups.setdefault(rows, {}).setdefault(p, (one.lease, []))[1].append(cast(torch.Tensor, one.checked()))
    in_order = sorted(lookups.items(), key=lambda lookup: min(lease.order for lease, _ in lookup[1].values()))
    latest: dict[EmbeddingStore, int] = {}
    for _, grads in in_order:
        for lease, _ in grads.values():
            if lease.order < latest.get(lease.store, -1):
                return None
            latest[lease.store] = lease.order
    return in_order
