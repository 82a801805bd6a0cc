"""Records what a `build` method does, as a torch.fx graph.

A module that holds no embedding is a leaf: its code may be any Python. Modules that hold one, and `build` itself, are
traced through. What plain fx tracing would run once, while tracing, and then forget is recorded here or refused with
the user's line and what works instead:

    recorded   functions of no traced value or of sizes (`torch.rand`, `torch.tensor`), functions of `math`, autocast,
               no_grad and record_function blocks, clip_grad_norm_, clip_grad_value_, zero_grad, GradScaler.scale,
               torch.autograd.backward, print, assert
    named      tensors, arrays and generators that are no part of the module: each call reads them as they then are
    refused    if, for and float() on traced values, f-strings of them, optimizer.step, setting attributes of
               modules, reading .grad, inference_mode, saved tensor hooks, random seeds and states, device blocks,
               changing a named tensor in place, modules and parameters that are no part of the graph

Invariant: nothing of this module is in place once `trace` has returned or raised.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from oneemb.graph.build_error import BuildError, user_line
from oneemb.graph.fx_tracer import BuildTracer, RecordFunctions
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.modules import build_of
from oneemb.graph.patches import Here, call_replaced
from oneemb.graph.spec import is_inplace
from oneemb.graph.tracer_replacements import replacements
from oneemb.kernels.jit import get_ready_to_compile

__all__ = ["Trace", "trace"]

# What to do in place of what torch.fx cannot trace, by a part of what it says.
_INSTEAD = {
    "does not support item assignment": "A traced value takes no x[i] = y: use torch.where, index_put or scatter",
    "must be real number": "A function of math cannot be followed that is imported within a function, or kept in a"
    " default argument, a table or a functools.partial: import it at the head of the module and call it by its name",
    "cannot be interpreted as an integer": "How large a batch is, is not known while it is traced: use torch functions"
    " of whole tensors in place of range and the like",
    "cannot be iterated": "How many values come is not known while they are traced: take them by number, x[0] and x[1],"
    " or use torch functions of whole tensors in place of the loop",
    "<class 'function'>": "A function is no part of a graph: put hooks on parameters, before training",
}
_INSTEAD_OF_BRANCHES = (
    "What it does must not depend on values of tensors, nor of numbers and strings that come in a batch: use"
    " torch.where or a mask in place of if"
)


@dataclass(frozen=True)
class Trace:
    """What `build` does."""

    graph: fx.Graph
    objects: dict[str, object]
    """What the graph names that is no part of the module: a GradScaler, a tensor."""


def trace(root: torch.nn.Module, structure: Structure | None = None, steppers: Sequence[object] = ()) -> Trace:
    """Trace `root.build`, called with values in this structure; None = one for each parameter without a default.

    Args:
        steppers: the graph's optimizers and schedulers, whose `step` is not for `build` to call.

    Raises:
        BuildError: `build` branches on the value of a tensor, or uses something that tracing would lose.
    """
    if any(isinstance(mode, RecordFunctions) for mode in torch.overrides._get_current_function_mode_stack()):
        raise BuildError(f"build compiles a graph{user_line()} while it is traced itself; compile that one before")
    signature = Signature(build_of(root))
    # What looks up functions of others once, and keeps them, has to have found the originals.
    get_ready_to_compile()
    _fill_tables_of_torch()
    tracer = BuildTracer(root, signature, structure or signature.default_structure(), Here())
    try:
        graph = call_replaced(tracer.here, functools.partial(replacements, tracer, steppers), tracer.trace_build)
    except BuildError:
        raise
    except Exception as error:
        if not _is_of_tracing(error):
            raise
        message = str(error)
        advice = next((instead for part, instead in _INSTEAD.items() if part in message), _INSTEAD_OF_BRANCHES)
        reason = message.split(" This can be attempted", 1)[0].rstrip(".")  # What follows is for users of torch.fx.
        raise BuildError(
            f"build cannot be traced{user_line(error)}: {reason}. {advice}, or move the code into a module of its own"
            " that holds no embedding"
        ) from error
    _check_constants(graph, tracer.objects)
    return Trace(graph, tracer.objects)


def _fill_tables_of_torch() -> None:
    """Let torch.overrides find the functions of torch, which it does when it is first asked."""
    for table in (torch.overrides.get_ignored_functions, torch.overrides.get_testing_overrides):
        table()
    torch.overrides.get_overridable_functions()


def _is_of_tracing(error: Exception) -> bool:
    """Whether an error comes of a traced value, which some function took for a real one."""
    if isinstance(error, fx.proxy.TraceError):
        return True
    kinds = (TypeError, NotImplementedError, RuntimeError, ValueError)
    words = ("Proxy", "argument of type: ", "argument of type '", "dynamo-optimized")
    return isinstance(error, kinds) and any(word in str(error) for word in words)


def _check_constants(graph: fx.Graph, objects: Mapping[str, object]) -> None:
    """Refuse changes in place of what has no name in the module.

    Whether `build` makes such a tensor anew at each call, or the tensor outlives a call, cannot be told.
    """
    for node in graph.nodes:
        if not is_inplace(node):
            continue
        changed = node.kwargs.get("out", node.args[0] if node.args else None)
        while isinstance(changed, fx.Node) and changed.op != "get_attr" and _may_be_a_view(changed):
            changed = changed.args[0]
        if isinstance(changed, fx.Node) and changed.op == "get_attr" and changed.target in objects:
            raise BuildError(
                f"build changes a tensor in place that is neither traced nor a part of the graph"
                f"{node.meta.get('line', '')}; keep it in a buffer (self.register_buffer), or make it in build with"
                " torch functions"
            )


_VIEWS = frozenset(
    "as_tensor asarray chunk contiguous data detach diagonal double expand expand_as flatten float from_numpy getattr"
    " getitem half movedim narrow permute ravel reshape select split squeeze swapaxes T t to transpose unbind"
    " unflatten unfold unsqueeze view view_as".split()
)


def _may_be_a_view(node: fx.Node) -> bool:
    """Whether a value may share memory with the first argument it is made of."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.args) and name.strip("_") in _VIEWS
