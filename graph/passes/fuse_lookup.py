"""Makes one op of finding unique keys and acquiring their rows."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, inserting_for

__all__ = ["fuse_lookup"]


def fuse_lookup(graph: fx.Graph) -> fx.Graph:
    """Look up in one op the keys that no other op needs.

    Before:  keys = unique_keys(ids, ...);  lease = acquire(store, keys);  rows = gather(lease, weight)
    After:   lease = lookup(store, ids, ...);  rows = gather(lease, weight)

    Shared keys stay as they are: they are found once, which saves more. `gather` stays apart, since it is what
    autograd knows of the lookup.
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if node.target is not ops.acquire or len(node.args) != 2 or node.kwargs:
            continue
        store, keys = node.args
        if keys.target is not ops.unique_keys or len(keys.users) != 1:
            continue
        with inserting_for(graph, node):
            lease = graph.call_function(ops.lookup, (store, *keys.args), keys.kwargs)
        node.replace_all_uses_with(lease)
        graph.erase_node(node)
        graph.erase_node(keys)
    return graph
