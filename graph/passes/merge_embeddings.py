"""Makes one lookup of those of several embeddings."""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, node_of, store_of
from oneemb.graph.passes.split_prepare import ancestors, movable_nodes
from oneemb.graph.spec import CHECKS, CONTEXTS, is_backward, is_inplace, is_pure, is_training_only

__all__ = ["Member", "merge_embeddings"]


@dataclass(frozen=True)
class Member:
    """Where a store is merged."""

    merged: str
    """What names the merged store."""
    first_table: int
    """The merged table at which the store's tables begin."""


@dataclass(eq=False)
class _Group:
    """Lookups to merge, of a store each."""

    first: fx.Node
    prepared: bool
    alone: bool
    acquires: list[fx.Node] = field(default_factory=list)
    hoisted: set[fx.Node] = field(default_factory=set)


def merge_embeddings(
    graph: fx.Graph, members: Mapping[str, Member], *, buffers: Collection[str] = (), every: bool = False
) -> fx.Graph:
    """Look up and, after it, update the rows of several stores at once. `members` says which are merged in what.

    Args:
        buffers: as in `split_prepare`: what can be prepared ahead is not merged with what cannot.
        every: go through merged stores also where no two lookups can be merged, so that lookups of several graphs
            are of the same stores.

    Before:  u1 = unique_keys(x, ...);  lease1 = acquire(a.store, u1);  rows1 = gather(lease1, a.weight)
             u2 = unique_keys(y, ...);  lease2 = acquire(b.store, u2);  rows2 = gather(lease2, b.weight)
    After:   keys = unique_merged_keys(((0, x, ...), (1, y, ...)), ...);  lease = acquire(merged, keys)
             rows = gather_merged(lease, ((0, a.weight, ...), (1, b.weight, ...)));  rows1 = rows[0];  rows2 = rows[1]

    Exact: a key occurs in one lookup only, so nothing is summed in another order. Lookups whose ids are scaled by what
    may get a gradient are left alone: theirs would be added to others in another order.

    A lookup is made where the first of its group is, if all it needs can be computed there, and no op lies between that
    may change its ids in place, that takes gradients, or that begins or ends autocast or a grad mode. A store has one
    lookup in a group at most; its lookups keep their order.
    """
    graph = copy_graph(graph)
    groups = _groups(graph, members, movable_nodes(graph, buffers))
    for merged, its_groups in groups.items():
        if every or any(len(group.acquires) > 1 for group in its_groups):
            for group in its_groups:
                _merge(graph, merged, group, members)
    return graph


def _groups(graph: fx.Graph, members: Mapping[str, Member], movable: set[fx.Node]) -> dict[str, list[_Group]]:
    """The groups of each merged store, in the order in which they are looked up."""
    groups: dict[str, list[_Group]] = {}
    closed: dict[str, int] = {}  # the groups of each merged store that no further lookup may join
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if is_inplace(node) or is_backward(node) or is_training_only(node) or node.target in CONTEXTS:
            closed = {merged: len(its_groups) for merged, its_groups in groups.items()}
        if node.target is not ops.acquire or store_of(node) not in members:
            continue
        merged = members[store_of(node)].merged
        its_groups = groups.setdefault(merged, [])
        after_own = [
            i + 1 for i, group in enumerate(its_groups) if any(store_of(a) == store_of(node) for a in group.acquires)
        ]
        needed = ancestors(set(_inputs(node)))
        prepared = node.args[1] in movable
        alone = any(scales not in movable for scales in _scales(node))
        for group in its_groups[max([closed.get(merged, 0), *after_own]) :]:
            late = {used for used in needed if place[used] >= place[group.first]}
            if not (alone or group.alone) and group.prepared == prepared and all(map(is_pure, late)):
                break
        else:
            group, late = _Group(node, prepared, alone), set()
            its_groups.append(group)
        group.acquires.append(node)
        group.hoisted |= late
    return groups


def _inputs(acquire: fx.Node) -> list[fx.Node]:
    """What a lookup is made of, as it is merged: the arguments of its keys, and what scales its ids."""
    return [*node_of(acquire.args[1]).all_input_nodes, *_scales(acquire)]


def _scales(acquire: fx.Node) -> list[fx.Node]:
    """By what the ids of a lookup are multiplied."""
    return [scales for gather in acquire.users for scales in gather.args[2:] if isinstance(scales, fx.Node)]


def _merge(graph: fx.Graph, merged: str, group: _Group, members: Mapping[str, Member]) -> None:
    acquires = sorted(group.acquires, key=lambda acquire: members[store_of(acquire)].first_table)
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(group.first) :]:
        if node in group.hoisted:
            group.first.prepend(node)
    lookups, read, gathers, lines = [], [], [], {}
    for p, acquire in enumerate(acquires):
        ids, table_ids, num_tables, key_type, padding_idx, *offsets = node_of(acquire.args[1]).args
        first_table = members[store_of(acquire)].first_table
        lookups.append((first_table, ids, table_ids, num_tables, offsets[0] if offsets else None))
        lines[first_table] = acquire.meta.get("line", "")
        for gather in acquire.users:
            _, weight, *pooled = gather.args
            read.append((p, node_of(weight), *(pooled or (None, "sum"))))
            gathers.append(gather)
    with graph.inserting_before(group.first):
        keys = graph.call_function(ops.unique_merged_keys, (tuple(lookups), key_type, padding_idx))
        checked = tuple((p, scales, pooling) for p, _, scales, pooling in read if scales is not None)
        new = [keys]
        if checked:
            new.append(graph.call_function(ops.check_merged_pooling, (keys, checked)))
        lease = graph.call_function(ops.acquire, (graph.get_attr(merged), keys))
        new.append(lease)
        if read:
            of_graph = [(p, graph.get_attr(weight.target), *pooled) for p, weight, *pooled in read]
            rows = graph.call_function(ops.gather_merged, (lease, tuple(of_graph)))
            new.append(rows)
            for i, gather in enumerate(gathers):
                own_rows = graph.call_function(operator.getitem, (rows, i))
                own_rows.meta["line"] = gather.meta.get("line", "")
                gather.replace_all_uses_with(own_rows)
        for node in new:
            node.meta["line"], node.meta["lines"] = group.first.meta.get("line", ""), lines
    for gather in gathers:
        graph.erase_node(gather)
    for acquire in group.acquires:
        keys = node_of(acquire.args[1])
        graph.erase_node(acquire)
        if all(user.target in CHECKS for user in keys.users):
            for user in [*keys.users, keys]:
                graph.erase_node(user)
