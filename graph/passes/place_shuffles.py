"""Sends keys to the ranks that own them, and rows back."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, inserting_for

__all__ = ["place_shuffles"]


def place_shuffles(graph: fx.Graph, ranks: int) -> fx.Graph:
    """Let each of `ranks` ranks acquire and read the rows it owns, for all of them. One rank's graph stays as it is.

    Before:  keys = unique_keys(ids, ...);  lease = acquire(store, keys);  rows = gather(lease, weight)
    After:   keys = unique_keys(ids, ...);  routed = shuffle_keys(keys, ranks)
             lease = acquire(store, routed);  owned = gather(lease, weight);  rows = shuffle_rows(routed, owned)

    So for `peek`. Keys that several lookups share are sent once. Rows are pooled by the rank that looked them up;
    gradients go to the owners in the backward pass of `shuffle_rows`, which is `shuffle_grads`.
    """
    graph = copy_graph(graph)
    if ranks == 1:
        return graph
    routed: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in (ops.acquire, ops.peek):
            continue
        store, keys, *pooled = node.args
        if keys not in routed:
            with graph.inserting_after(keys):
                routed[keys] = graph.call_function(ops.shuffle_keys, (keys, ranks))
            routed[keys].meta["line"] = keys.meta.get("line", "")
        node.args = (store, routed[keys])
        reads = [(node, pooled)]
        if node.target is ops.acquire:
            reads = [(gather, list(gather.args[2:])) for gather in node.users if gather.target is ops.gather]
        for read, how in reads:
            with inserting_for(graph, read.next):
                rows = graph.call_function(ops.shuffle_rows, (routed[keys], read, *how))
            rows.meta["line"] = read.meta.get("line", "")
            read.args = read.args[:2]
            read.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)
    return graph
