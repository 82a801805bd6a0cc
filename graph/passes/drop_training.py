"""Takes the training out of a graph, for calls in eval mode."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph
from oneemb.graph.spec import is_training_only

__all__ = ["drop_training"]


def drop_training(graph: fx.Graph) -> fx.Graph:
    """Leave out backward passes, clipping and loss scales.

    Before:  loss = ...;  scaled = scale_loss(scaler, loss);  scaled.backward();  return loss
    After:   loss = ...;  return loss

    A norm that clipping gives is None in evaluation.
    """
    graph = copy_graph(graph)
    for node in reversed(list(graph.nodes)):
        if is_training_only(node):
            _erase(graph, node, None)
        elif node.target is ops.scale_loss:
            _erase(graph, node, node.args[1])
    return graph


def _erase(graph: fx.Graph, node: fx.Node, instead: fx.node.Argument) -> None:
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda arg: instead if arg is node else arg)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda arg: instead if arg is node else arg)
    graph.erase_node(node)
