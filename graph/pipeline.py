"""The whole compilation, as one ordered list of passes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from oneemb.graph.passes.drop_training import drop_training
from oneemb.graph.passes.insert_updates import insert_updates
from oneemb.graph.passes.lower_embeddings import lower_embeddings
from oneemb.graph.tracer import BuildError, embeddings_in, trace_build

__all__ = ["compile_graph"]


def compile_graph(root: torch.nn.Module, optimizers: Sequence[tuple[Any, Any]]) -> fx.GraphModule:
    """Compile `root.build`, for training or, where `root` is in eval mode, for evaluation.

    Args:
        optimizers: (StepOptimizer, lr_scheduler or None) in the order in which they step.

    Raises:
        BuildError: `build` cannot be traced, never calls backward, or trains an embedding that has no optimizer.
    """
    embeddings = embeddings_in(root)
    graph = trace_build(root)
    names = [(f"optimizer_{i}", f"lr_scheduler_{i}" if sch else None) for i, (_, sch) in enumerate(optimizers)]
    if root.training:
        _check_trains(graph, embeddings, optimizers)
        passes = (
            lambda graph: lower_embeddings(graph, embeddings),
            lambda graph: insert_updates(graph, names),
        )
    else:
        passes = (
            lambda graph: lower_embeddings(graph, embeddings),
            drop_training,
        )
    for run in passes:
        graph = run(graph)
        graph.lint()
    objects = {f"optimizer_{i}": optimizer for i, (optimizer, _) in enumerate(optimizers)}
    objects |= {f"lr_scheduler_{i}": scheduler for i, (_, scheduler) in enumerate(optimizers)}
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    return fx.GraphModule({name: _find(root, objects, name) for name in targets}, graph, type(root).__name__)


def _find(root: torch.nn.Module, objects: Mapping[str, Any], name: str) -> Any:
    found: Any = objects.get(name, root)
    if found is root:
        for part in name.split("."):
            found = getattr(found, part)
    return found


def _check_trains(graph: fx.Graph, embeddings: Mapping[str, Any], optimizers: Sequence[tuple[Any, Any]]) -> None:
    backward = any(node.op == "call_method" and node.target == "backward" for node in graph.nodes)
    if optimizers and not backward:
        raise BuildError("build must call loss.backward(), since the graph has an optimizer; add it, or call eval()")
    for node in graph.nodes:
        module = embeddings.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not backward or not module.training or not module.weight.requires_grad:
            continue
        if not any(optimizer.rows_of(module.store) for optimizer, _ in optimizers):
            raise BuildError(
                f"embedding {module.name!r} is looked up in build and no optimizer of the graph trains it; give its"
                " parameters to add_optimizer, or freeze it with requires_grad_(False)"
            )
