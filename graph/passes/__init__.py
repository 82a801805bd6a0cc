"""Passes: each a pure function from graph to graph, in a file of its own."""

from collections.abc import Sequence
from typing import cast

from torch import fx

from oneemb.graph.arguments import Planned

__all__ = ["copy_graph", "node_of", "output_of", "planned_in", "store_of"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy to work on, so that a pass leaves its input as it was."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, values)
    copy.output(result, type_expr=output_of(graph).type)
    return copy


def output_of(graph: fx.Graph) -> fx.Node:
    """The node that returns."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def planned_in(graph: fx.Graph) -> Sequence[Planned]:
    """The lookups that a graph returns."""
    return cast("Sequence[Planned]", output_of(graph).args[0])


def node_of(argument: fx.node.Argument) -> fx.Node:
    """An argument that is another node's value."""
    assert isinstance(argument, fx.Node), argument
    return argument


def store_of(node: fx.Node) -> str:
    """The name of a lookup's store."""
    return str(node_of(node.args[0]).target)
