"""Ends the graph of a micro-batch, whose update comes with a later one."""

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, output_of
from oneemb.graph.spec import LEASES

__all__ = ["hold_lookups"]


def hold_lookups(graph: fx.Graph, held: str) -> fx.Graph:
    """Keep the lookups, with their gradients, for the update to come.

    Before:  lease = acquire(store, keys) ...  loss.backward();  return loss
    After:   lease = acquire(store, keys) ...  loss.backward();  hold(held, [lease]);  return loss
    """
    graph = copy_graph(graph)
    leases = [node for node in graph.nodes if node.target in LEASES]
    with graph.inserting_before(output_of(graph)):
        graph.call_function(ops.hold, (graph.get_attr(held), leases))
    return graph
