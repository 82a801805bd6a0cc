"""Passes: pure functions from graph to graph, one in each file."""

from collections.abc import Sequence
from typing import cast

from torch import fx

from oneemb.graph.arguments import Planned

__all__ = ["copy_graph", "node_of", "output_of", "planned_in", "store_of"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy of a graph. A pass changes the copy and leaves its input as it was."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, values)
    copy.output(result, type_expr=output_of(graph).type)
    return copy


def output_of(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def planned_in(graph: fx.Graph) -> Sequence[Planned]:
    """The lookups that a graph returns."""
    return cast("Sequence[Planned]", output_of(graph).args[0])


def node_of(argument: fx.node.Argument) -> fx.Node:
    """`argument`, which must be a node."""
    assert isinstance(argument, fx.Node), argument
    return argument


def store_of(node: fx.Node) -> str:
    """Name in the graph of the store that a lookup reads."""
    return str(node_of(node.args[0]).target)
