"""Turns calls of embedding modules into ops."""

from typing import NamedTuple

from torch import fx

from oneemb.graph import ops
from oneemb.graph.modules import Embeddings
from oneemb.graph.passes import copy_graph, inserting_for

__all__ = ["lower_embeddings"]


def lower_embeddings(graph: fx.Graph, embeddings: Embeddings, *, inserts: bool = True) -> fx.Graph:
    """Write each lookup as ops. `embeddings` maps the targets of calls to embedding modules.

    Before:  rows = embedding(ids)
    After:   keys = unique_keys(ids, ...);  lease = acquire(store, keys);  rows = gather(lease, weight)

    An embedding in eval mode inserts nothing before the step that trains it. A frozen one never does, nor does any if
    `inserts` is off:

    After:   keys = unique_keys(ids, ...);  lease = acquire_later(store, keys);  rows = gather(lease, weight)
    After:   keys = unique_keys(ids, ...);  rows = peek(store, keys)

    The keys of bags hold their offsets, and `gather` and `peek` are told how to pool. Arguments that these could refuse
    are checked before any row is inserted:

    After:   keys = unique_keys(ids, ...);  check_pooling(keys, weights, "sum");  lease = acquire(store, keys) ...
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in embeddings:
            continue
        module = embeddings[node.target]
        call = _Call(*node.args, **node.kwargs)
        plain = call.per_sample_weights is None and call.pooling in ops.POOLINGS  # nothing that could be refused
        pooled = () if call.offsets is None and plain else (call.per_sample_weights, call.pooling)
        with inserting_for(graph, node):
            store = graph.get_attr(f"{node.target}.store")
            key_arguments = call.ids, call.table_ids, module.num_tables, module.key_type, module.padding_idx
            offsets = () if call.offsets is None else (call.offsets,)
            keys = graph.call_function(ops.unique_keys, (*key_arguments, *offsets))
            if inserts and (module.training or module.weight.requires_grad):
                if not plain:
                    graph.call_function(ops.check_pooling, (keys, call.per_sample_weights, call.pooling))
                lease = graph.call_function(ops.acquire if module.training else ops.acquire_later, (store, keys))
                rows = graph.call_function(ops.gather, (lease, graph.get_attr(f"{node.target}.weight"), *pooled))
            else:
                rows = graph.call_function(ops.peek, (store, keys, *pooled))
        node.replace_all_uses_with(rows)
        graph.erase_node(node)
    return graph


class _Call(NamedTuple):
    """The arguments of an embedding's `forward`."""

    ids: fx.node.Argument
    table_ids: fx.node.Argument = None
    offsets: fx.node.Argument = None
    per_sample_weights: fx.node.Argument = None
    pooling: fx.node.Argument = "sum"
