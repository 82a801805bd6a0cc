"""Drops the copies of a batch's values."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph

__all__ = ["drop_copies"]


def drop_copies(graph: fx.Graph) -> fx.Graph:
    """Graph without the copies of the batch's values, for a lookup that runs inside `build`.

    Before:   kept = keep(ids);  keys = unique_keys(kept, ...)
    After:    keys = unique_keys(ids, ...)
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if node.target is ops.keep:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph
