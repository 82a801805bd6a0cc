"""Splits a step into what may run ahead of it and the rest."""

from collections.abc import Collection

from torch import fx

from oneemb.graph import ops
from oneemb.graph.spec import UNIQUE, is_inplace, is_pure

__all__ = ["ancestors", "movable_nodes", "split_prepare"]


def split_prepare(graph: fx.Graph, buffers: Collection[str] = ()) -> tuple[fx.Graph, fx.Graph]:
    """Two graphs with this one's inputs: one to run ahead, and the rest, which takes the first one's values after them.

    Args:
        buffers: names of tensors that may be read ahead too; whoever runs the halves sees whether they have changed
            in between.

    Before:   keys = unique_keys(ids, ...);  lease = acquire(store, keys);  rows = gather(lease, weight) ...
    Prepare:  keys = unique_keys(ids, ...);  prefetched = prefetch(store, keys);  return (keys, prefetched)
    Compute:  lease = acquire(store, keys, prefetched=prefetched);  rows = gather(lease, weight) ...

    Exact: what is prepared is a function of the batch alone, and `prefetch` changes nothing that can be seen. Rows are
    inserted by `acquire` and read by `gather`, in the second half, when the updates of all steps before are done. An op
    is prepared if a lookup needs it, it does nothing but give a value, and nothing before it may have changed its
    inputs in place; so a lookup of ids that the dense part computes is not prepared.
    """
    movable = movable_nodes(graph, buffers)
    needed = ancestors({node for node in movable if node.target in UNIQUE})
    prepare, compute = fx.Graph(), fx.Graph()
    first: dict[fx.Node, fx.Node] = {}
    second: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    moved = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    for node in inputs + moved:
        first[node] = prepare.node_copy(node, first.__getitem__)
    prefetched: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.acquire and node.args[1] in first and node.args[1] in moved:
            store = prepare.get_attr(node.args[0].target)
            prefetched[node] = prepare.call_function(ops.prefetch, (store, first[node.args[1]]))
            prefetched[node].meta["line"] = node.meta.get("line", "")
    handed_on = [node for node in moved if any(user not in needed for user in node.users)]
    prepare.output([first[node] for node in handed_on] + list(prefetched.values()))

    for node in inputs:
        second[node] = compute.node_copy(node, second.__getitem__)
    for node in handed_on:
        second[node] = compute.placeholder(node.name)
    taken_over = {node: compute.placeholder(value.name) for node, value in prefetched.items()}
    for node in graph.nodes:
        if node.op == "output":
            compute.output(fx.node.map_arg(node.args[0], second.__getitem__), type_expr=node.type)
        elif node not in second and node not in needed:
            second[node] = compute.node_copy(node, second.__getitem__)
            if node in taken_over:
                second[node].kwargs = {**second[node].kwargs, "prefetched": taken_over[node]}
    return prepare, compute


def movable_nodes(graph: fx.Graph, buffers: Collection[str]) -> set[fx.Node]:
    """Inputs, and pure functions of them and of buffers that no op before may have changed in place."""
    movable: set[fx.Node] = set()
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if is_inplace(node):
            changed |= ancestors(set(node.all_input_nodes))
        changed_names = {named.target for named in changed if named.op == "get_attr"}
        if node.op == "placeholder" or node.op == "get_attr" and node.target in set(buffers) - changed_names:
            movable.add(node)
        elif node.op != "get_attr" and is_pure(node) and node.all_input_nodes:
            inputs = ancestors(set(node.all_input_nodes))
            if inputs <= movable and not inputs & changed:
                movable.add(node)
    return movable


def ancestors(nodes: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
