"""Leaves out what nothing reads."""

from torch import fx

from oneemb.graph.passes import copy_graph
from oneemb.graph.spec import is_pure

__all__ = ["remove_dead"]


def remove_dead(graph: fx.Graph) -> fx.Graph:
    """Leave out nodes that only compute a value, if nothing reads it.

    Before:  x = ids.float();  lease = acquire(store, keys);  rows = gather(lease, weight);  release([lease]);  return y
    After:   lease = acquire(store, keys);  release([lease]);  return y

    An update is always kept, and so is an acquisition: the ids it inserts are there afterwards. So is every op that
    this compiler does not know: it might draw random numbers or print.
    """
    graph = copy_graph(graph)
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node):
            graph.erase_node(node)
    return graph
