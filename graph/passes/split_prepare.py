"""Splits a graph of lookups into a half that may run ahead of its step and a half that runs in the step."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.ops.op import reads_rows
from oneemb.graph.passes import output_of


def split_prepare(graph: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """(graph to run ahead, which has the inputs of `graph`; graph for the step, which takes the results of the first).

    Before:   keys = unique_keys(ids, ...);  reserved = reserve(store, keys) ...
    Prepare:  keys = unique_keys(ids, ...);  prefetched = prefetch(store, keys);  return (keys, prefetched)
    Lookup:   reserved = reserve(store, keys, prefetched=prefetched) ...

    No bit changes: prepared values are a function of the batch alone, and `prefetch` changes no row. Rows are inserted
    and read in the second half or after it, when the updates of all earlier steps are done.
    """
    reads: set[fx.Node] = set()
    for node in graph.nodes:
        if reads_rows(node) or any(used in reads for used in node.all_input_nodes):
            reads.add(node)
    stores = {node for node in graph.nodes if node.op == "get_attr" and all(user in reads for user in node.users)}
    prepare, lookup = fx.Graph(), fx.Graph()
    first: dict[fx.Node, fx.Node] = {}
    second: dict[fx.Node, fx.Node] = {}
    prefetched: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in reads and node not in stores:
            first[node] = prepare.node_copy(node, first.__getitem__)
    for node in graph.nodes:
        if node.target is ops.reserve:
            store, keys = node.args
            prefetched[node] = prepare.call_function(ops.prefetch, (prepare.get_attr(store.target), first[keys]))
    handed_on = [node for node in first if any(user in reads or user.op == "output" for user in node.users)]
    prepare.output([*(first[node] for node in handed_on), *prefetched.values()])

    for node in handed_on:
        second[node] = lookup.placeholder(node.name)
    taken_over = {node: lookup.placeholder(value.name) for node, value in prefetched.items()}
    for node in graph.nodes:
        if node in stores or node in reads and node.op != "output":
            second[node] = lookup.node_copy(node, second.__getitem__)
            if node in taken_over:
                second[node].kwargs = {**second[node].kwargs, "prefetched": taken_over[node]}
    lookup.output(fx.node.map_arg(output_of(graph).args[0], second.__getitem__))
    return prepare, lookup
