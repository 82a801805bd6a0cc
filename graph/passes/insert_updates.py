"""Ends a training graph with the update of rows and the step of dense parameters."""

from collections.abc import Sequence

from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph

__all__ = ["insert_updates"]


def insert_updates(graph: fx.Graph, optimizers: Sequence[tuple[str, str | None]]) -> fx.Graph:
    """After the whole of `build`, update what it took gradients of. `optimizers` names (optimizer, lr_scheduler).

    Before:  rows = gather(lease, weight) ...  loss.backward();  return loss
    After:   rows = gather(lease, weight) ...  loss.backward()
             grads = reduce_grads([lease]);  go = check_finite([optimizer], [grads])
             update(optimizer, grads, go);  step(optimizer, lr_scheduler, go);  release([lease]);  return loss

    Lookups of one embedding are reduced together: a row that several of them read is updated once.
    """
    graph = copy_graph(graph)
    leases: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is ops.admit:
            leases.setdefault(node.args[0].target, []).append(node)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output):
        names = [(graph.get_attr(name), graph.get_attr(sch) if sch else None) for name, sch in optimizers]
        grads = [graph.call_function(ops.reduce_grads, (group,)) for group in leases.values()]
        go = graph.call_function(ops.check_finite, ([name for name, _ in names], grads))
        for name, scheduler in names:
            for grad in grads:
                graph.call_function(ops.update, (name, grad, go))
            graph.call_function(ops.step, (name, scheduler, go))
        every = [lease for group in leases.values() for lease in group]
        graph.call_function(ops.release, (every,))
    return graph
