"""Scales every loss before its backward pass."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, inserting_for
from oneemb.graph.spec import is_backward

__all__ = ["scale_losses"]


def scale_losses(graph: fx.Graph, scaler: str) -> fx.Graph:
    """Let a GradScaler scale what backward is called on; `scaler` names it.

    Before:  loss.backward()
    After:   scaled = scale_loss(scaler, loss);  scaled.backward()
    """
    graph = copy_graph(graph)
    for node in list(graph.nodes):
        if not is_backward(node):
            continue
        loss, *rest = node.args
        with inserting_for(graph, node):
            scaled = graph.call_function(ops.scale_loss, (graph.get_attr(scaler), loss))
        node.args = (scaled, *rest)
    return graph
