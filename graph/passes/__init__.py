"""Passes: each a pure function from graph to graph, in a file of its own."""

from torch import fx

__all__ = ["copy_graph"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy to work on, so that a pass leaves its input as it was."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, values)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    copy.output(result, type_expr=output.type)
    return copy
