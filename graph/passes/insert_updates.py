"""Ends a training graph with the update of rows and the step of dense parameters."""

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from oneemb.graph import ops
from oneemb.graph.passes import copy_graph, inserting_for, node_of, output_of, store_of
from oneemb.graph.spec import LEASES

__all__ = ["insert_updates"]

_CLIPS: dict[object, Callable[..., object]] = {
    torch.nn.utils.clip_grad_norm_: ops.clip_grad_norm,
    torch.nn.utils.clip_grad_value_: ops.clip_grad_value,
}


def insert_updates(
    graph: fx.Graph,
    optimizers: Sequence[tuple[str, str | None]],
    *,
    trains: Mapping[str, str] | None = None,
    max_norms: Mapping[str, float] | None = None,
    held: str | None = None,
    merged: Mapping[str, str] | None = None,
) -> fx.Graph:
    """After the whole of `build`, update what it took gradients of. `optimizers` names (optimizer, lr_scheduler).

    Args:
        trains: the optimizer that trains each store; None = the op asks.
        max_norms: what the norm of all gradients that an optimizer uses is clipped to, for those that clip.
        held: where lookups of earlier micro-batches are kept.
        merged: what a store is merged in, for those that are.

    Before:  rows = gather(lease, weight) ...  loss.backward();  return loss
    After:   rows = gather(lease, weight) ...  loss.backward()
             grads = reduce_grads([lease]);  go = check_finite([optimizer], [grads])
             groups = step(optimizer, go);  update(optimizer, grads, go, groups);  release([lease])
             advance([optimizer], [lr_scheduler], go);  return loss

    Lookups of one embedding are reduced together: a row that several of them read is updated once. Where `build`
    clips, gradients are reduced before, and those of rows are clipped with those of dense parameters:

    Before:  loss.backward();  clip_grad_norm_([mlp.weight, embedding.weight], 1.0)
    After:   loss.backward();  grads = reduce_grads([lease])
             clipped, norm = clip_grad_norm([mlp.weight], [grads], 1.0)
    """
    graph = copy_graph(graph)
    leases: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in LEASES:
            leases.setdefault(store_of(node), []).append(node)
    clips = [node for node in graph.nodes if node.op == "call_function" and node.target in _CLIPS]
    scaled = next((node for node in graph.nodes if node.target is ops.scale_loss), None)
    scaler: fx.Node | None = None
    output = output_of(graph)
    with inserting_for(graph, clips[0] if clips else output):
        names = {name: graph.get_attr(name) for name, _ in optimizers}
        grads: dict[str, fx.Node] = {}
        for store, group in leases.items():
            taken = _take(graph, held, store, group) if held else group
            grads[store] = graph.call_function(ops.reduce_grads, (taken,))
        if scaled is not None:
            scaler = graph.get_attr(str(node_of(scaled.args[0]).target))
            unscaled = graph.call_function(ops.unscale, (scaler, list(names.values()), list(grads.values())))
            grads = _unpack(graph, unscaled, grads)
    for clip in clips:
        with inserting_for(graph, clip):
            grads = _clip(graph, clip, grads, merged or {})
        graph.erase_node(clip)
    with graph.inserting_before(output):
        for name, max_norm in (max_norms or {}).items():
            own = {store: grad for store, grad in grads.items() if trains is None or trains.get(store) == name}
            clipped = graph.call_function(ops.clip_grad_norm, (names[name], list(own.values()), max_norm))
            grads |= _unpack(graph, graph.call_function(operator.getitem, (clipped, 0)), own)
        arguments = [list(names.values()), list(grads.values())]
        go = graph.call_function(ops.check_finite, (*arguments, *([scaler] if scaler is not None else [])))
        # What runs code of the user's comes before rows are updated, or after all that belongs to the step.
        groups = {name: graph.call_function(ops.step, (names[name], go)) for name, _ in optimizers}
        for name, _ in optimizers:
            for store, grad in grads.items():
                if trains is None or trains.get(store) == name:
                    graph.call_function(ops.update, (names[name], grad, go, groups[name]))
        if scaler is not None:
            graph.call_function(ops.update_scale, (scaler, go))
        if held:
            graph.call_function(ops.drop, (graph.get_attr(held),))
        else:
            graph.call_function(ops.release, ([lease for group in leases.values() for lease in group],))
        schedulers = [graph.get_attr(scheduler) if scheduler else None for _, scheduler in optimizers]
        graph.call_function(ops.advance, (list(names.values()), schedulers, go))
    return graph


def _take(graph: fx.Graph, held: str, store: str, group: list[fx.Node]) -> fx.Node:
    return graph.call_function(ops.take, (graph.get_attr(held), graph.get_attr(store), group))


def _unpack(graph: fx.Graph, grads: fx.Node, stores: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    return {store: graph.call_function(operator.getitem, (grads, i)) for i, store in enumerate(stores)}


def _clip(graph: fx.Graph, clip: fx.Node, grads: dict[str, fx.Node], merged: Mapping[str, str]) -> dict[str, fx.Node]:
    """The gradients of rows after a clip of `build`, which names rows by the weight that stands for them."""
    parameters, *rest = clip.args
    assert isinstance(parameters, list | tuple)
    own: dict[str, fx.Node] = {}
    dense: list[fx.Node] = []
    for parameter in map(node_of, parameters):
        store = f"{str(parameter.target).removesuffix('weight')}store"
        store = store if store in grads else merged.get(store, store)
        if store in grads:
            own[store] = grads[store]
        else:
            dense.append(parameter)
    clipped = graph.call_function(_CLIPS[clip.target], (dense, list(own.values()), *rest), dict(clip.kwargs))
    if clip.target is torch.nn.utils.clip_grad_value_:
        return grads | _unpack(graph, clipped, own)
    if clip.users:
        clip.replace_all_uses_with(graph.call_function(operator.getitem, (clipped, 1)))
    return grads | _unpack(graph, graph.call_function(operator.getitem, (clipped, 0)), own)
