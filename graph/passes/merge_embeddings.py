"""Makes one lookup of those of several embeddings."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, node_of, output_of, store_of

__all__ = ["Member", "merge_embeddings"]


@dataclass(frozen=True)
class Member:
    """Where a store is merged."""

    merged: str
    """The name of the merged store."""
    first_table: int
    """The merged table at which the store's tables begin."""


def merge_embeddings(graph: fx.Graph, members: Mapping[str, Member]) -> fx.Graph:
    """Look up and, after it, update the rows of several stores at once. `members` says which are merged in what.

    Before:  u1 = unique_keys(x, ...);  reserved1 = reserve(a.store, u1)
             u2 = unique_keys(y, ...);  reserved2 = reserve(b.store, u2)
             return (("a", x, None, None, None, reserved1, None, None, "sum", x), ...)
    After:   keys = unique_merged_keys(((0, x, ...), (1, y, ...)), ...);  reserved = reserve(merged, keys)
             reserved1 = part_of(reserved, 0);  reserved2 = part_of(reserved, 1)
             rows = gather_merged(reserved, ((0, None, "sum"), (1, None, "sum")));  rows1 = rows[0];  rows2 = rows[1]
             return (("a", x, None, None, None, reserved1, rows1, None, "sum", x), ...)

    Exact: a key occurs in one lookup only, so nothing is summed in another order.

    A lookup is made where the last of its group is. A store has one lookup in a group at most; its lookups keep their
    order.
    """
    graph = copy_graph(graph)
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    lookups: dict[str, int] = {}  # of a store so far
    for node in graph.nodes:
        if node.target is ops.reserve and (store := store_of(node)) in members:
            groups.setdefault((members[store].merged, lookups.get(store, 0)), []).append(node)
            lookups[store] = lookups.get(store, 0) + 1
    for (merged, _), reserves in groups.items():
        if len(reserves) > 1:
            _merge(graph, merged, reserves, members)
    return graph


def _merge(graph: fx.Graph, merged: str, reserves: list[fx.Node], members: Mapping[str, Member]) -> None:
    output = output_of(graph)
    made = [list(cast(tuple[fx.node.Argument, ...], lookup)) for lookup in cast(tuple[object, ...], output.args[0])]
    last = reserves[-1]
    reserves = sorted(reserves, key=lambda reserve: members[store_of(reserve)].first_table)
    looked_up: list[fx.node.Argument] = []
    checked: list[fx.node.Argument] = []
    read: list[fx.node.Argument] = []
    reads: list[list[fx.node.Argument]] = []
    for p, reserve in enumerate(reserves):
        ids, table_ids, num_tables, key_type, padding_idx, *bags = node_of(reserve.args[1]).args
        bags += [None] * (2 - len(bags))
        looked_up.append((members[store_of(reserve)].first_table, ids, table_ids, num_tables, *bags))
        for check in [user for user in node_of(reserve.args[1]).users if user.target is ops.check_pooling]:
            checked.append((p, *check.args[1:]))
            graph.erase_node(check)
        lookup = next(lookup for lookup in made if lookup[_RESERVED] is reserve)
        *_, per_sample_weights, pooling, _ = lookup
        if pooling is not None:
            read.append((p, per_sample_weights, pooling))
            reads.append(lookup)
    with graph.inserting_before(last):
        keys = graph.call_function(ops.unique_merged_keys, (tuple(looked_up), key_type, padding_idx))
        if checked:
            graph.call_function(ops.check_merged_pooling, (keys, tuple(checked)))
        together = graph.call_function(ops.reserve, (graph.get_attr(merged), keys))
        for p, reserve in enumerate(reserves):
            lookup = next(lookup for lookup in made if lookup[_RESERVED] is reserve)
            lookup[_RESERVED] = graph.call_function(ops.part_of, (together, p))
        rows = graph.call_function(ops.gather_merged, (together, tuple(read))) if read else None
        for i, lookup in enumerate(reads):
            lookup[_ROWS] = graph.call_function(operator.getitem, (rows, i))
    output.args = (tuple(map(tuple, made)),)
    for reserve in reserves:
        arguments = [node_of(argument) for argument in reserve.args]
        graph.erase_node(reserve)
        for unused in arguments:
            if not unused.users:
                graph.erase_node(unused)


_RESERVED, _ROWS = 5, 6  # of what is returned of a lookup
