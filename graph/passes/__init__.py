"""Passes: each a pure function from graph to graph, in a file of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

__all__ = ["copy_graph", "inserting_for", "store_of"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy to work on, so that a pass leaves its input as it was."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, values)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    copy.output(result, type_expr=output.type)
    return copy


def store_of(node: fx.Node) -> str:
    """What names the store of a lookup."""
    store: Any = node.args[0]
    return store.target


@contextmanager
def inserting_for(graph: fx.Graph, node: fx.Node) -> Iterator[None]:
    """New nodes go before `node` and stand for the same line of the user's."""
    before = set(graph.nodes)
    with graph.inserting_before(node):
        yield
    for new in set(graph.nodes) - before:
        new.meta.setdefault("line", node.meta.get("line", ""))
