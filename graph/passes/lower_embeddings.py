"""Turns calls of embedding modules into ops."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, inserting_for

__all__ = ["lower_embeddings"]


def lower_embeddings(graph: fx.Graph, embeddings: Mapping[str, Any], *, inserts: bool = True) -> fx.Graph:
    """Say each lookup in the op vocabulary. `embeddings` maps the targets of calls to embedding modules.

    Before:  rows = embedding(ids)
    After:   keys = unique_keys(ids, ...);  lease = admit(store, keys);  rows = gather(lease, weight)

    An embedding in eval mode inserts nothing, nor does any if `inserts` is off:

    After:   keys = unique_keys(ids, ...);  rows = peek(store, keys)
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in embeddings:
            continue
        module = embeddings[node.target]
        ids, table_ids = _lookup_arguments(*node.args, **node.kwargs)
        with inserting_for(graph, node):
            store = graph.get_attr(f"{node.target}.store")
            key_arguments = (ids, table_ids, module.num_tables, module.key_type, module.padding_idx)
            keys = graph.call_function(ops.unique_keys, key_arguments)
            if inserts and module.training:
                lease = graph.call_function(ops.admit, (store, keys))
                rows = graph.call_function(ops.gather, (lease, graph.get_attr(f"{node.target}.weight")))
            else:
                rows = graph.call_function(ops.peek, (store, keys))
        node.replace_all_uses_with(rows)
        graph.erase_node(node)
    return graph


def _lookup_arguments(ids: Any, table_ids: Any = None) -> tuple[Any, Any]:
    return ids, table_ids
