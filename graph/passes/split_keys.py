"""Splits the half of a graph that may run ahead: first the keys of all lookups, then the prefetch of their rows."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import output_of


def split_keys(prepare: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """(graph that finds the keys, with the inputs of `prepare`; graph that takes its results and returns the results of
    `prepare`).

    Before:   keys = unique_keys(ids, ...);  prefetched = prefetch(store, keys);  return (keys, prefetched)
    Keys:     keys = unique_keys(ids, ...);  return (keys,)
    Rows:     prefetched = prefetch(store, keys);  return (keys, prefetched)

    No bit changes: the first graph reads no rows, so it may run long before the second.
    """
    results = [node for node in output_of(prepare).args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    keys, rows = fx.Graph(), fx.Graph()
    first: dict[fx.Node, fx.Node] = {}
    for node in prepare.nodes:
        if not _is_of_rows(node) and node.op != "output":
            first[node] = keys.node_copy(node, first.__getitem__)
    handed_on = [node for node in results if node in first]
    keys.output([first[node] for node in handed_on])
    second = {node: rows.placeholder(node.name) for node in handed_on}
    for node in prepare.nodes:
        if _is_of_rows(node):
            second[node] = rows.node_copy(node, second.__getitem__)
    rows.output([second[node] for node in results])
    return keys, rows


def _is_of_rows(node: fx.Node) -> bool:
    """Whether a node prefetches rows, or is a store that only such nodes use."""
    if node.op == "get_attr":
        return bool(node.users) and all(user.target is ops.prefetch for user in node.users)
    return node.target is ops.prefetch
