"""Which ops are legal at each stage of a graph of lookups, checked after every pass.

    recorded  torch's functions of the batch, and calls of embedding modules
    lowered   calls of embedding modules are ops
    prepare   the half that may run ahead of its step, on any thread
    lookup    the other half

A pass that breaks a rule is a bug of ours, so the check asserts.
"""

from collections.abc import Container

from torch import fx

from oneemb.graph.ops import OPS
from oneemb.graph.ops.op import Op

READS = {function for function, op in OPS.items() if "lookup" in op.stages and "prepare" not in op.stages}
"""Ops that insert, move or read rows; they stay in the step itself."""

STAGES: dict[str, set[object]] = {
    stage: {function for function, op in OPS.items() if stage in op.stages}
    for stage in ("recorded", "lowered", "prepare", "lookup")
}
"""The legal ops of each stage, beside torch's functions."""


def check_stage(graph: fx.Graph, stage: str, embeddings: Container[str]) -> None:
    """Assert that a graph is well-formed and keeps the rules of its stage."""
    graph.lint()
    for node in graph.nodes:
        if node.op == "call_module":
            assert stage == "recorded" and str(node.target) in embeddings, f"{node.format_node()}: a call at {stage}"
        if (op := _op_of(node)) is not None:
            assert node.target in STAGES[stage], f"{node.format_node()}: not legal at stage {stage}"
            _check_arguments(node, op)


def _check_arguments(node: fx.Node, op: Op) -> None:
    for argument, what in zip(node.args, op.takes, strict=False):
        if what == "store":
            assert isinstance(argument, fx.Node) and argument.op == "get_attr", node.format_node()
        if what in ("keys", "lease"):
            found = isinstance(argument, fx.Node) and (_gives(argument, what) or argument.op == "placeholder")
            assert found, f"{node.format_node()}: {argument} is no {what}"


def _gives(node: fx.Node, kind: str) -> bool:
    return (op := _op_of(node)) is not None and op.gives == kind


def _op_of(node: fx.Node) -> Op | None:
    return OPS.get(node.target) if callable(node.target) else None
