"""Shares the unique keys of equal ids between lookups."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph


def share_unique(graph: fx.Graph) -> fx.Graph:
    """Compute the unique keys of the same ids once, also for lookups of several embeddings.

    Before:  u1 = unique_keys(ids, None, 2, int64, None);  u2 = unique_keys(ids, None, 2, int64, None)
    After:   u1 = unique_keys(ids, None, 2, int64, None);  every user of u2 reads u1

    No bit changes: keys are a function of the arguments alone.
    """
    graph = copy_graph(graph)
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not ops.unique_keys and node.target is not ops.unique_merged_keys:
            continue
        shared = first.setdefault((node.target, node.args), node)
        if shared is not node:
            node.replace_all_uses_with(shared)
            graph.erase_node(node)
    return graph
