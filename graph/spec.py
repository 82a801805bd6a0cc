"""Which ops a graph may hold at each stage of its compilation, and what every op is given: as a check that runs.

    traced    lookups are calls of embedding modules; what build does is as it was written
    lowered   lookups are ops
    trained   the update follows build
    prepare   the half of a step that may run ahead of it, on any thread
    compute   the other half

A pass that breaks a rule is a bug of ours, so the check asserts.

`is_pure` says which nodes may be left out, moved or shared. It knows by name what it says yes to: an op that it does
not know might change something, draw random numbers or print.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from oneemb.graph import merged_ops, ops, shuffle_ops, step_ops

__all__ = [
    "CHECKS",
    "CONTEXTS",
    "STAGES",
    "UNIQUE",
    "check_stage",
    "is_backward",
    "is_inplace",
    "is_pure",
    "is_training_only",
]

UNIQUE = {ops.unique_keys, merged_ops.unique_merged_keys}
CHECKS = {ops.check_pooling, merged_ops.check_merged_pooling}
_LOOKUP = {ops.acquire, ops.gather, merged_ops.gather_merged, ops.peek, ops.lookup} | UNIQUE | CHECKS
_LOOKUP |= {shuffle_ops.shuffle_keys, shuffle_ops.shuffle_rows}
CONTEXTS = {step_ops.enter_autocast, step_ops.enter_grad_mode, step_ops.enter_record_function}
_BUILD = {step_ops.exit_context, step_ops.scale_loss} | CONTEXTS
_CLIP = {torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_}
_UPDATE = {
    ops.reduce_grads, ops.check_finite, ops.step, ops.update, ops.advance, ops.release, step_ops.unscale,
    step_ops.clip_grad_norm, step_ops.clip_grad_value, step_ops.update_scale, step_ops.hold, step_ops.take,
    step_ops.drop,
}  # fmt: skip
_OURS = _LOOKUP | _BUILD | _CLIP | _UPDATE | {ops.prefetch}

STAGES: dict[str, set[Any]] = {
    "traced": _BUILD | _CLIP,
    "lowered": _BUILD | _CLIP | _LOOKUP,
    "trained": _BUILD | _LOOKUP | _UPDATE,
    "prepare": UNIQUE | {ops.prefetch},
    "compute": _BUILD | _LOOKUP | _UPDATE,
}
"""The legal ops of each stage, beside what build itself calls."""

# What the leading arguments of an op are: the op that gives each, or what it is.
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    ops.prefetch: ("store", "keys"),
    ops.acquire: ("store", "keys"),
    ops.peek: ("store", "keys"),
    ops.lookup: ("store",),
    ops.gather: ("lease", "weight"),
    merged_ops.gather_merged: ("lease",),
    shuffle_ops.shuffle_keys: ("keys",),
    shuffle_ops.shuffle_rows: ("keys",),
    ops.check_pooling: ("keys",),
    merged_ops.check_merged_pooling: ("keys",),
    ops.reduce_grads: ("leases",),
    ops.check_finite: ("optimizers", "grads_list"),
    ops.update: ("optimizer", "grads", "go"),
    ops.release: ("leases",),
}
_GIVES: dict[str, set[Any]] = {
    "keys": UNIQUE | {shuffle_ops.shuffle_keys},
    "lease": {ops.acquire, ops.lookup},
    "go": {ops.check_finite},
}


def check_stage(graph: fx.Graph, stage: str, embeddings: Mapping[str, Any]) -> None:
    """Assert that a graph is well-formed and keeps the rules of its stage."""
    graph.lint()
    released: dict[fx.Node, int] = {}
    updating = False
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in embeddings:
            assert stage == "traced", f"{node.format_node()}: a lookup that is not lowered, at stage {stage}"
        if node.op == "call_function" and node.target in _OURS:
            assert node.target in STAGES[stage], f"{node.format_node()}: not legal at stage {stage}"
            _check_arguments(node)
        if is_backward(node):
            assert not updating, f"{node.format_node()}: gradients that come after they were summed are lost"
        updating |= node.target is ops.reduce_grads
        for given in _leases_given(node):
            released[given] = released.get(given, 0) + 1
    if stage in ("trained", "compute"):
        for node in graph.nodes:
            if node.target in (ops.acquire, ops.lookup):
                assert released.get(node) == 1, f"{node.format_node()}: released {released.get(node, 0)} times"


def _check_arguments(node: fx.Node) -> None:
    arguments: Any = node.args
    for argument, what in zip(arguments, _ARGUMENTS.get(node.target, ()), strict=False):
        if what in ("store", "optimizer"):
            assert isinstance(argument, fx.Node) and argument.op == "get_attr", node.format_node()
        if what in _GIVES:
            given = isinstance(argument, fx.Node) and (argument.target in _GIVES[what] or argument.op == "placeholder")
            assert given, f"{node.format_node()}: {argument} is no {what}"
        if what == "leases" and not isinstance(argument, fx.Node):
            assert all(one.target in _GIVES["lease"] for one in argument), node.format_node()


def _leases_given(node: fx.Node) -> list[fx.Node]:
    """The leases that this node ends, or hands on to another step."""
    arguments: Any = node.args
    places: dict[Any, int] = {ops.release: 0, step_ops.hold: 1, step_ops.take: 2}
    place = places.get(node.target)
    return [] if place is None else list(arguments[place])


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
    | {getattr, ops.gather, merged_ops.gather_merged, ops.peek}
    | UNIQUE
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
    if node.op != "call_function" or node.target in _OURS:
        return False
    inplace = name.endswith("_") and not name.endswith("__") or "out" in node.kwargs or node.kwargs.get("inplace")
    return bool(inplace or name in ("setitem", "__setitem__") or node.target in _INPLACE_OPERATORS)
