"""What stands in the place of functions while `build` is traced: it records calls that torch.fx would miss, or refuses
what would be lost, with the user's line and what works instead. `tracer.py` lists both.
"""

import builtins
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from oneemb.graph import ops
from oneemb.graph.build_error import BuildError, user_line
from oneemb.graph.fx_tracer import BuildTracer
from oneemb.graph.math_functions import in_place_of_math
from oneemb.graph.modules import build_of
from oneemb.graph.patches import Replacement

__all__ = ["replacements"]

# Functions of numbers, which may be traced: torch reads their arguments before anyone may record the call.
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip

_IN_A_MODULE = "put it inside a module that holds no embedding, around its forward"
_THE_GRAPH_DOES = "leave it out: the graph steps after build"

Record = Callable[..., fx.Proxy]
"""`BuildTracer.record`."""


def replacements(tracer: BuildTracer, steppers: Sequence[object]) -> list[Replacement]:
    """Everything that is recorded or refused beside torch functions. Called while originals are in place.

    Args:
        steppers: the graph's optimizers and schedulers, whose `step` is not for `build` to call.
    """
    return [
        *_contexts(tracer.record),
        *_functions(tracer.record),
        *_gradients(tracer),
        *_refused(steppers),
        *_of_other_modules(tracer),
        *_of_torch_modules(tracer),
    ]


def _contexts(record: Record) -> list[Replacement]:
    """Blocks that become a pair of ops."""
    autocast, label = torch.amp.autocast_mode.autocast, torch.autograd.profiler.record_function
    grad_mode = torch.autograd.grad_mode
    return [
        (autocast, "__enter__", lambda self: _enter_autocast(self, record)),
        (autocast, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.no_grad, "__enter__", lambda self: _enter_grad(self, False, record)),
        (grad_mode.no_grad, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.enable_grad, "__enter__", lambda self: _enter_grad(self, True, record)),
        (grad_mode.enable_grad, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.set_grad_enabled, "__init__", lambda self, mode: _enter_grad(self, mode, record)),
        (grad_mode.set_grad_enabled, "__enter__", lambda self: None),
        (grad_mode.set_grad_enabled, "__exit__", lambda self, *error: _leave(self, record)),
        (label, "__enter__", lambda self: _enter_record_function(self, record)),
        (label, "__exit__", lambda self, *error: _leave(self, record)),
    ]


# Contexts are objects of torch's. Each is given `_oneemb`, the ops that have entered it, the innermost last: hence Any.


def _enter_autocast(autocast: Any, record: Record) -> Any:
    options = {"dtype": autocast.fast_dtype, "enabled": autocast._enabled, "cache_enabled": autocast._cache_enabled}
    autocast._oneemb = [*getattr(autocast, "_oneemb", ()), record(ops.enter_autocast, autocast.device, **options)]
    return autocast


def _enter_record_function(block: Any, record: Record) -> Any:
    block._oneemb = [*getattr(block, "_oneemb", ()), record(ops.enter_record_function, block.name, block.args)]
    return block


def _enter_grad(context: Any, mode: bool, record: Record) -> None:
    # torch's clipping functions run in a block of their own, which is part of them.
    inside_torch = sys._getframe(3).f_code.co_filename.endswith("clip_grad.py")
    entered = None if inside_torch else record(ops.enter_grad_mode, mode)
    context._oneemb = [*getattr(context, "_oneemb", ()), entered]


def _leave(context: Any, record: Record) -> None:
    *context._oneemb, entered = context._oneemb
    if entered is not None:
        record(ops.exit_context, entered)


def _functions(record: Record) -> list[Replacement]:
    """Functions that are recorded though no traced value, or no torch function, need go into them."""
    original_print, torch_backward, torch_grad = builtins.print, torch.autograd.backward, torch.autograd.grad

    def print_(*args: object, **kwargs: object) -> None:
        record(original_print, *args, **kwargs)

    def backward(tensors: object, *args: object, **kwargs: object) -> None:
        record(torch_backward, tensors, *args, **kwargs)

    return [
        (builtins, "print", print_),
        (torch.autograd, "backward", backward),
        (torch.autograd, "grad", lambda *args, **kwargs: record(torch_grad, *args, **kwargs)),
        *((torch, name, functools.partial(record, getattr(torch, name))) for name in _FACTORIES),
    ]


def _gradients(tracer: BuildTracer) -> list[Replacement]:
    """What is done to gradients: scaled, clipped and dropped."""

    def scale(self: object, loss: object) -> fx.Proxy:
        return tracer.record(ops.scale_loss, tracer.name_object("grad_scaler", self), loss)

    def zero_grad(self: object, *args: object, **kwargs: object) -> None:
        if any(node.op == "call_method" and node.target == "backward" for node in tracer.graph.nodes):
            raise BuildError(
                f"zero_grad after backward in build{user_line()} would drop the gradients that the graph is about to"
                " update with; leave it out: the graph drops gradients after each update"
            )
        # Before backward there is no gradient: the graph dropped those of the step before.

    made: list[Replacement] = [
        (torch.amp.grad_scaler.GradScaler, "scale", scale),
        (torch.optim.Optimizer, "zero_grad", zero_grad),
        (torch.nn.Module, "zero_grad", zero_grad),
    ]
    for clip in (torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_):
        # What torch has wrapped, so that it is replaced by whatever name it has been imported.
        wrapper: Any = clip  # which typeshed gives neither of the attributes
        inside = next(cell for cell in wrapper.__closure__ if cell.cell_contents is wrapper.__wrapped__)
        made.append((inside, None, functools.partial(_clip, tracer.record, clip)))
    return made


def _clip(record: Record, clip: Callable[..., object], parameters: Any, *args: object, **kwargs: object) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor | fx.Proxy) else list(parameters)
    recorded = record(clip, parameters, *args, **kwargs)
    return recorded if clip is torch.nn.utils.clip_grad_norm_ else None


def _refused(steppers: Sequence[object]) -> list[Replacement]:
    """What would be lost by tracing."""
    scaler, anomaly_mode = torch.amp.grad_scaler.GradScaler, torch.autograd.anomaly_mode
    before_the_loop = "call it before the loop"
    kept = "return the value from build, or keep it in a buffer that is changed in place"
    unscales = "leave it out: the graph unscales before it clips"
    refused: list[tuple[object, str, str, str]] = [
        (torch.autograd.grad_mode.inference_mode, "__enter__", "torch.inference_mode",
         f"use torch.no_grad, or {_IN_A_MODULE}"),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", "saved_tensors_hooks", _IN_A_MODULE),
        (anomaly_mode.set_detect_anomaly, "__init__", "set_detect_anomaly", "set it outside"),
        (anomaly_mode.detect_anomaly, "__init__", "detect_anomaly", "put it around the call"),
        (DeviceContext, "__init__", "a torch.device block", "give device= to each call"),
        (TorchFunctionMode, "__enter__", "a torch function mode", _IN_A_MODULE),
        (TorchDispatchMode, "__enter__", "a torch dispatch mode", _IN_A_MODULE),
        (torch, "manual_seed", "torch.manual_seed", before_the_loop),
        (torch, "set_rng_state", "torch.set_rng_state", before_the_loop),
        (torch.random, "fork_rng", "torch.random.fork_rng", _IN_A_MODULE),
        (torch.nn.Module, "__setattr__", "setting an attribute of a module", kept),
        (scaler, "unscale_", "GradScaler.unscale_", unscales),
        (scaler, "step", "GradScaler.step", _THE_GRAPH_DOES),
        (scaler, "update", "GradScaler.update", _THE_GRAPH_DOES),
        *((stepper, "step", f"{type(stepper).__name__}.step", _THE_GRAPH_DOES) for stepper in steppers),
    ]  # fmt: skip
    return [(owner, name, functools.partial(_refuse, what, instead)) for owner, name, what, instead in refused]


def _refuse(what: str, instead: str, /, *args: object, **kwargs: object) -> None:
    raise BuildError(f"{what} in build would be lost by tracing{user_line()}; {instead}")


def _of_other_modules(tracer: BuildTracer) -> list[Replacement]:
    """Functions of `math` and those that `torch.fx.wrap` was told of, wherever a Python module names them."""
    traced = [build_of(tracer.root)]
    traced += [module.forward for module in tracer.paths if not tracer.is_leaf_module(module, "")]
    made: list[Replacement] = list(in_place_of_math(traced, tracer.here, tracer.record))
    for (_, name), scope in list(getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", {}).items()):
        function = scope[name] if name in scope else getattr(builtins, name)
        made.append((scope, name, functools.partial(_record_if_traced, tracer.record, function)))
    return made


def _record_if_traced(record: Record, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        return record(function, *args, **kwargs)
    return function(*args, **kwargs)


def _of_torch_modules(tracer: BuildTracer) -> list[Replacement]:
    """The calls of torch modules and the reads of their attributes, as torch.fx follows them."""
    tracer.call_original, tracer.read_original = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    made: list[Replacement] = [
        (torch.nn.Module, "__call__", tracer.called),
        (torch.nn.Module, "__getattr__", tracer.attribute),
    ]
    if hasattr(fx._symbolic_trace, "_is_fx_tracing_flag"):
        # torch.compile asks for it, to say that what it has compiled cannot be traced.
        made.append((fx._symbolic_trace, "_is_fx_tracing_flag", tracer.here))
    return made
