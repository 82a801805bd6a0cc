"""Merges the lookups of several embeddings into one."""

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, node_of, output_of, planned_in, store_of


@dataclass(frozen=True)
class Member:
    """Place of a store in a merged store."""

    merged: str
    """Name of the merged store in the graph."""
    first_table: int
    """Number that table 0 of the store has among the merged tables."""


def merge_embeddings(graph: fx.Graph, members: Mapping[str, Member]) -> fx.Graph:
    """Merge lookups of several stores, so that their rows are looked up, and later updated, at once. `members` maps the
    name of a store to its place in a merged store.

    Before:  u1 = unique_keys(x, ...);  reserved1 = reserve(a.store, u1)
             u2 = unique_keys(y, ...);  reserved2 = reserve(b.store, u2)
             return (Planned("a", Lookup(x), reserved=reserved1, origin=x), ...)
    After:   keys = unique_merged_keys((MergedLookup(0, x, ...), ...), ...);  reserved = reserve(merged, keys)
             reserved1 = part_of(reserved, 0);  reserved2 = part_of(reserved, 1)
             rows = gather_merged(reserved, ((0, None, "sum"), (1, None, "sum")));  rows1 = rows[0];  rows2 = rows[1]
             return (Planned("a", Lookup(x), reserved=reserved1, rows=rows1, origin=x), ...)

    No bit changes: a key occurs in one lookup only, so no gradients are summed in another order.

    A group of merged lookups takes the place of its last lookup. A group has at most one lookup of each store, so the
    lookups of a store keep their order.
    """
    graph = copy_graph(graph)
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    lookups: dict[str, int] = {}  # {store: number of its lookups so far}
    for node in graph.nodes:
        if node.target is ops.reserve and (store := store_of(node)) in members:
            groups.setdefault((members[store].merged, lookups.get(store, 0)), []).append(node)
            lookups[store] = lookups.get(store, 0) + 1
    for (merged, _), reserves in groups.items():
        if len(reserves) > 1:
            _merge(graph, merged, reserves, members)
    return graph


def _merge(graph: fx.Graph, merged: str, reserves: list[fx.Node], members: Mapping[str, Member]) -> None:
    made = list(planned_in(graph))
    place = {planned.reserved: i for i, planned in enumerate(made)}
    last = reserves[-1]
    reserves = sorted(reserves, key=lambda reserve: members[store_of(reserve)].first_table)
    looked_up: list[Any] = []
    checked: list[fx.node.Argument] = []
    read: list[fx.node.Argument] = []
    for p, reserve in enumerate(reserves):
        keys = node_of(reserve.args[1])
        _, _, num_tables, key_type, padding_idx, *_ = keys.args
        lookup = made[place[reserve]].lookup
        of_keys: Any = num_tables, lookup.ids, lookup.table_ids, lookup.offsets, lookup.columns
        looked_up.append(ops.MergedLookup(members[store_of(reserve)].first_table, *of_keys))
        for check in [user for user in keys.users if user.target is ops.check_pooling]:
            checked.append((p, *check.args[1:]))
            graph.erase_node(check)
        if lookup.pooling is not None:
            read.append((p, lookup.per_sample_weights, lookup.pooling))
    with graph.inserting_before(last):
        keys = graph.call_function(ops.unique_merged_keys, (tuple(looked_up), key_type, padding_idx))
        if checked:
            graph.call_function(ops.check_merged_pooling, (keys, tuple(checked)))
        together = graph.call_function(ops.reserve, (graph.get_attr(merged), keys))
        parts = [graph.call_function(ops.part_of, (together, p)) for p in range(len(reserves))]
        rows = graph.call_function(ops.gather_merged, (together, tuple(read))) if read else None
        number = itertools.count()
        for reserve, part in zip(reserves, parts, strict=True):
            i = place[reserve]
            made[i] = made[i]._replace(reserved=part)
            if made[i].lookup.pooling is not None:
                made[i] = made[i]._replace(rows=graph.call_function(operator.getitem, (rows, next(number))))
    output_of(graph).args = (tuple(made),)
    for reserve in reserves:
        arguments = [node_of(argument) for argument in reserve.args]
        graph.erase_node(reserve)
        for unused in arguments:
            if not unused.users:
                graph.erase_node(unused)
