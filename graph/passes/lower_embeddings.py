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
    After:   keys = unique_keys(ids, ...);  lease = acquire(store, keys);  rows = gather(lease, weight)

    An embedding in eval mode inserts nothing, nor does any if `inserts` is off:

    After:   keys = unique_keys(ids, ...);  rows = peek(store, keys)

    Of bags the keys know the offsets, and `gather` and `peek` are told how to pool. What they could refuse is checked
    before any row is inserted:

    After:   keys = unique_keys(ids, ...);  check_pooling(keys, weights, "sum");  lease = acquire(store, keys) ...
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in embeddings:
            continue
        module = embeddings[node.target]
        ids, table_ids, offsets, *pooled = _lookup_arguments(*node.args, **node.kwargs)
        with inserting_for(graph, node):
            store = graph.get_attr(f"{node.target}.store")
            key_arguments = [ids, table_ids, module.num_tables, module.key_type, module.padding_idx]
            per_sample_weights, pooling = pooled
            if offsets is not None:
                key_arguments.append(offsets)
            elif per_sample_weights is None and pooling in ("sum", "mean"):
                pooled = []
            keys = graph.call_function(ops.unique_keys, tuple(key_arguments))
            if inserts and module.training:
                if per_sample_weights is not None or pooling not in ("sum", "mean"):
                    graph.call_function(ops.check_pooling, (keys, per_sample_weights, pooling))
                lease = graph.call_function(ops.acquire, (store, keys))
                rows = graph.call_function(ops.gather, (lease, graph.get_attr(f"{node.target}.weight"), *pooled))
            else:
                rows = graph.call_function(ops.peek, (store, keys, *pooled))
        node.replace_all_uses_with(rows)
        graph.erase_node(node)
    return graph


def _lookup_arguments(
    ids: Any, table_ids: Any = None, offsets: Any = None, per_sample_weights: Any = None, pooling: str = "sum"
) -> tuple[Any, ...]:
    """Those of the module's `forward`."""
    return ids, table_ids, offsets, per_sample_weights, pooling
