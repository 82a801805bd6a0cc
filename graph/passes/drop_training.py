"""Takes the training out of a graph, for calls in eval mode."""

from torch import fx

from oneemb.graph.passes import copy_graph

__all__ = ["drop_training"]


def drop_training(graph: fx.Graph) -> fx.Graph:
    """Leave out backward passes.

    Before:  loss = ...;  loss.backward();  return loss
    After:   loss = ...;  return loss
    """
    graph = copy_graph(graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_method" and node.target == "backward" and not node.users:
            graph.erase_node(node)
    return graph
