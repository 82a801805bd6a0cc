"""Which ops a graph may hold at each stage of its compilation, and what every op is given: as a check that runs.

    traced    lookups are calls of embedding modules; what build does is as it was written
    lowered   lookups are ops
    trained   the update follows build
    prepare   the half of a step that may run ahead of it, on any thread
    compute   the other half

A pass that breaks a rule is a bug of ours, so the check asserts.

`is_pure` says which nodes may be left out, moved or shared: those of the ops that are listed here by name. Any other op
might change something, draw random numbers or print.
"""

import operator
from collections.abc import Container

import torch
from torch import fx

from oneemb.graph import ops
from oneemb.graph.ops import OPS
from oneemb.graph.ops.op import Op

__all__ = [
    "CHECKS",
    "CONTEXTS",
    "LEASES",
    "STAGES",
    "UNIQUE",
    "check_stage",
    "is_backward",
    "is_inplace",
    "is_pure",
    "is_training_only",
]

UNIQUE = {function for function, op in OPS.items() if op.gives == "keys" and "prepare" in op.stages}
LEASES = {function for function, op in OPS.items() if op.gives == "lease"}
CHECKS = {function for function, op in OPS.items() if op.checks}
CONTEXTS = {function for function, op in OPS.items() if op.context} - {ops.enter_record_function}
"""Ops that begin or end a block that changes numbers: autocast, grad mode."""
_CLIP = {torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_}
_STAGES_OF_CLIP = {"traced", "lowered"}

STAGES: dict[str, set[object]] = {
    stage: {function for function, op in OPS.items() if stage in op.stages}
    | (_CLIP if stage in _STAGES_OF_CLIP else set())
    for stage in ("traced", "lowered", "trained", "prepare", "compute")
}
"""The legal ops of each stage, beside what build itself calls."""


def check_stage(graph: fx.Graph, stage: str, embeddings: Container[str]) -> None:
    """Assert that a graph is well-formed and keeps the rules of its stage."""
    graph.lint()
    released: dict[fx.Node, int] = {}
    updating = False
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in embeddings:
            assert stage == "traced", f"{node.format_node()}: a lookup that is not lowered, at stage {stage}"
        if node.op == "call_function" and (node.target in OPS or node.target in _CLIP):
            assert node.target in STAGES[stage], f"{node.format_node()}: not legal at stage {stage}"
            _check_arguments(node)
        if is_backward(node):
            assert not updating, f"{node.format_node()}: gradients that come after they were summed are lost"
        updating |= node.target is ops.reduce_grads
        for lease in _ended_leases(node):
            released[lease] = released.get(lease, 0) + 1
    if stage in ("trained", "compute"):
        for node in graph.nodes:
            if _gives(node, "lease"):
                assert released.get(node) == 1, f"{node.format_node()}: released {released.get(node, 0)} times"


def _check_arguments(node: fx.Node) -> None:
    takes = op.takes if (op := _op_of(node)) else ()
    for argument, what in zip(node.args, takes, strict=False):
        if what in ("store", "optimizer"):
            assert isinstance(argument, fx.Node) and argument.op == "get_attr", node.format_node()
        if what in ("keys", "lease", "go"):
            found = isinstance(argument, fx.Node) and (_gives(argument, what) or argument.op == "placeholder")
            assert found, f"{node.format_node()}: {argument} is no {what}"
        if what == "leases" and not isinstance(argument, fx.Node):
            assert isinstance(argument, list | tuple), node.format_node()
            assert all(isinstance(lease, fx.Node) and _gives(lease, "lease") for lease in argument), node.format_node()


def _gives(node: fx.Node, kind: str) -> bool:
    return (op := _op_of(node)) is not None and op.gives == kind


def _op_of(node: fx.Node) -> Op | None:
    return OPS.get(node.target) if callable(node.target) else None


def _ended_leases(node: fx.Node) -> list[fx.Node]:
    """The leases that this node releases, or keeps for another step."""
    op = _op_of(node)
    if op is None or op.ends is None:
        return []
    leases = node.args[op.ends]
    assert isinstance(leases, list | tuple)
    return list(leases)


def is_backward(node: fx.Node) -> bool:
    """Whether the node makes gradients."""
    if node.op == "call_method":
        return node.target == "backward"
    return node.op == "call_function" and node.target in (torch.autograd.backward, torch.Tensor.backward)


def is_training_only(node: fx.Node) -> bool:
    """Whether the node has no place in evaluation."""
    return is_backward(node) or node.op == "call_function" and node.target in _CLIP


_PURE_FUNCTIONS = (
    {
        getattr(operator, name)
        for name in (
            "add sub mul truediv floordiv mod and_ or_ xor lshift rshift neg invert eq ne lt le gt ge getitem".split()
        )
    }
    | {getattr}
    | {function for function, op in OPS.items() if op.pure}
)
_PURE_NAMES = frozenset(
    "abs add all any bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool cat"
    " chunk clamp clone concat contiguous cumsum detach dim div eq expand expand_as flatten flip float floor_divide"
    " full_like ge gt hstack int le logical_and logical_not logical_or long lt masked_fill max min mul ne neg numel"
    " ones_like permute remainder reshape roll select shape size split squeeze stack sub sum t tile to transpose type"
    " unbind unflatten unsqueeze view view_as vstack where zeros_like".split()
)


def is_pure(node: fx.Node) -> bool:
    """Whether all a node does is give its value, so that it may be left out or moved."""
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return node.target in _PURE_NAMES
    if node.op != "call_function":
        return False
    if node.target in _PURE_FUNCTIONS:
        return True
    of_torch = (getattr(node.target, "__module__", None) or "torch").startswith("torch")
    return of_torch and getattr(node.target, "__name__", "") in _PURE_NAMES and "out" not in node.kwargs


_INPLACE_OPERATORS = {
    getattr(operator, f"i{name}")
    for name in "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
}


def is_inplace(node: fx.Node) -> bool:
    """Whether a node may change a tensor that it is given."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__") or name == "__setitem__"
    if node.op != "call_function" or node.target in OPS or node.target in _CLIP:
        return False
    inplace = name.endswith("_") and not name.endswith("__") or "out" in node.kwargs or node.kwargs.get("inplace")
    return bool(inplace or name in ("setitem", "__setitem__") or node.target in _INPLACE_OPERATORS)
