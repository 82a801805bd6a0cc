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

import ast
import builtins
import functools
import itertools
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from oneemb.graph import ops
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.math_functions import in_place_of_math
from oneemb.graph.patches import Here, call_replaced
from oneemb.graph.spec import is_inplace
from oneemb.kernels.jit import get_ready_to_compile
from oneemb.storage.embedding_store import EmbeddingStore

__all__ = [
    "REGISTER", "BuildError", "Trace", "embeddings_in", "modules_kept_plainly", "say_not_registered",
    "trace",
]  # fmt: skip

# Elements of a list or dict that are searched for modules: one that holds data may be long.
_LOOKED_THROUGH = 1000
REGISTER = (
    "assign it to the module, self.name = ..., and keep lists and dicts of modules in torch.nn.ModuleList and"
    " ModuleDict"
)
_HERE = os.path.dirname(os.path.abspath(__file__))
_NOT_THE_USERS = (os.path.dirname(torch.__file__), _HERE, os.path.dirname(os.__file__) + "/contextlib")


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message says what, where, and what works."""


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
    objects: dict[str, Any]
    """What the graph names that is no part of the module: a GradScaler, a tensor."""


def embeddings_in(module: torch.nn.Module) -> dict[str, Any]:
    """The embedding modules below a module, by qualified name, each once."""
    return {name: one for name, one in module.named_modules() if _is_embedding(one)}


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("store"), EmbeddingStore)


def trace(root: torch.nn.Module, structure: Structure | None = None, steppers: Sequence[Any] = ()) -> Trace:
    """Trace `root.build`, called with values in this structure; None = one for each parameter without a default.

    Args:
        steppers: the graph's optimizers and schedulers, whose `step` is not for `build` to call.

    Raises:
        BuildError: `build` branches on the value of a tensor, or uses something that tracing would lose.
    """
    if any(isinstance(mode, _RecordFunctions) for mode in torch.overrides._get_current_function_mode_stack()):
        raise BuildError(f"build compiles a graph{_user_line()} while it is traced itself; compile that one before")
    signature = Signature(root.build)  # type: ignore[arg-type]
    # What looks at functions of others once, and keeps what it found, has to have looked.
    get_ready_to_compile()
    _fill_tables_of_torch()
    tracer = _Tracer(root, signature, structure or signature.default_structure(), Here())
    try:
        graph = call_replaced(tracer.here, functools.partial(_replacements, tracer, steppers), tracer.record)
    except BuildError:
        raise
    except Exception as error:
        kinds = (TypeError, NotImplementedError, RuntimeError, ValueError)
        words = ("Proxy", "argument of type: ", "argument of type '", "dynamo-optimized")
        ours = isinstance(error, kinds) and any(word in str(error) for word in words)
        if not ours and not isinstance(error, fx.proxy.TraceError):
            raise
        advice = next((say for what, say in _INSTEAD.items() if what in str(error)), _INSTEAD_OF_BRANCHES)
        said = str(error).split(" This can be attempted", 1)[0].rstrip(".")  # Advice of torch.fx for its own users.
        raise BuildError(
            f"build cannot be traced{_user_line(error)}: {said}. {advice}, or move the code into a module of its own"
            " that holds no embedding"
        ) from error
    _check_constants(graph, tracer.objects)
    return Trace(graph, tracer.objects)


def _fill_tables_of_torch() -> None:
    """What torch.overrides knows of torch's functions it finds out when it is first asked."""
    for table in (torch.overrides.get_ignored_functions, torch.overrides.get_testing_overrides):
        table()
    torch.overrides.get_overridable_functions()


class _Proxy(fx.Proxy):
    def __format__(self, spec: str) -> str:
        raise BuildError(
            f"a traced value is made into text{_user_line()}; it has no value while build is traced: give it to"
            " print(...) as an argument of its own, or do it with what build returns"
        )

    def __len__(self) -> int:
        raise BuildError(
            f"len() of a traced value{_user_line()} has no answer while build is traced; use .shape[0], which is read"
            " at every step"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise BuildError(
            f"a traced value is made into a NumPy array{_user_line()}; it has no value while build is traced: use torch"
            " functions, or do it in a module of its own that holds no embedding"
        )

    def __getattr__(self, k: str) -> Any:
        if k in ("__array_struct__", "__array_interface__"):  # NumPy asks for these before it calls __array__.
            raise AttributeError(k)
        return super().__getattr__(k)


class _Tracer(fx.Tracer):
    def __init__(self, root: torch.nn.Module, signature: Signature, structure: Structure, here: Here):
        super().__init__()
        self.root, self.signature, self.structure, self.here = root, signature, structure, here
        self.objects: dict[str, Any] = {}
        self.graph = fx.Graph(tracer_cls=type(self))
        self.paths = {module: name for name, module in root.named_modules()}
        self.submodule_paths = self.paths
        # Tensors that are attributes of modules and neither parameters nor buffers.
        self.tensor_attrs = {
            value: f"{path}.{name}" if path else name
            for module, path in self.paths.items()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self._parameters: dict[str, fx.Proxy] = {}
        self.call, self.read = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    def record(self) -> fx.Graph:
        """Call `build`, with everything in place that records what it does."""
        values = [self.create_proxy("placeholder", name, (), {}) for name in self.structure.names()]
        args, kwargs = self.signature.call(self.structure, values)
        with _RecordFunctions(self):
            result = self.root.build(*args, **kwargs)  # type: ignore[operator]
            self.create_node("output", "output", (self.create_arg(result),), {})
        return self.graph

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return _is_embedding(m) or not embeddings_in(m)

    def called(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What takes the place of a module's call."""
        if module not in self.paths:
            raise BuildError(f"build calls a module{_user_line()}: {say_not_registered(self.root, module)}")
        if isinstance(vars(module).get("_signature"), Signature):
            raise BuildError(
                f"build calls a graph{_user_line()}, {type(module).__name__}, which compiles and updates by itself;"
                " call its modules, or its build"
            )
        hidden = modules_kept_plainly(module) if self.is_leaf_module(module, "") else ()
        for where, one in hidden:
            for embedding in embeddings_in(one).values():
                raise BuildError(
                    f"build calls {self.paths[module]}{_user_line()}, which keeps embedding"
                    f" {embedding.name!r} in {where}, a plain list or the like, so that the graph does not see it;"
                    f" {REGISTER}"
                )
        return self.call_module(module, lambda *args, **kwargs: self.call(module, *args, **kwargs), args, kwargs)

    def attribute(self, module: torch.nn.Module, name: str) -> Any:
        """What takes the place of reading an attribute of a module that is no plain one."""
        return self.getattr(name, self.read(module, name), self._parameters)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.nn.Module) and a not in self.paths:
            raise BuildError(f"build uses a module{_user_line()}: {say_not_registered(self.root, a)}")
        if isinstance(a, torch.Tensor) and not self._is_named(a):
            if a.requires_grad:
                raise BuildError(
                    f"build uses a {'parameter' if a.is_leaf else 'tensor with a gradient'} {list(a.shape)}"
                    f"{_user_line()} that is no part of the graph: it would neither be saved nor trained with it;"
                    " assign it, or the module that holds it, to the graph (self.name = ...), or detach() it"
                )
            return self.create_arg(self.name_object("constant", a))
        if isinstance(a, np.ndarray | np.generic | torch.Generator) and not isinstance(a, int | float | complex):
            return self.create_arg(self.name_object("constant", a))
        return super().create_arg(a)

    def _is_named(self, tensor: torch.Tensor) -> bool:
        if tensor in self.tensor_attrs:
            return True
        return any(tensor is one for one in (*self.root.parameters(), *self.root.buffers()))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if kind not in ("placeholder", "output"):
            node.meta["line"] = _user_line()
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        if message := _assert_at(_user_frame()):
            self.create_proxy("call_function", torch._assert, (obj, message), {})
            return True
        return super().to_bool(obj)

    def name_object(self, kind: str, value: Any) -> fx.Proxy:
        """A traced value that stands for an object which is no part of the module."""
        name = next((name for name, one in self.objects.items() if one is value), f"{kind}_{len(self.objects)}")
        self.objects[name] = value
        return self.create_proxy("get_attr", name, (), {})


_READ_GRAD = vars(torch._C.TensorBase)["grad"].__get__

# Functions of numbers, which may be traced: torch reads their arguments before anyone may record the call.
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip

# Questions about a real tensor whose answers are plain values: they are asked, not recorded.
_QUESTIONS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__"})


class _RecordFunctions(TorchFunctionMode):
    """Records torch functions that no traced value goes into, in place of running them once while tracing."""

    # While a build is traced, entering any other mode is refused.
    __enter__ = TorchFunctionMode.__enter__

    def __init__(self, tracer: _Tracer):
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _READ_GRAD:
            raise BuildError(
                f"build reads .grad of a parameter{_user_line()}, which is not there while it is traced; clip with"
                " torch.nn.utils.clip_grad_norm_ or clip_grad_value_, or use a hook on the parameter"
            )
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _QUESTIONS:
            answer = func(*args, **kwargs)
            if not isinstance(answer, torch.Tensor):
                return answer
            return self.tracer.create_proxy("call_function", getattr, (args[0], func.__self__.__name__), {})
        return self.tracer.create_proxy("call_function", func, args, kwargs)


def _replacements(tracer: _Tracer, steppers: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Everything that is recorded or refused beside torch functions."""

    def record(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", target, args, kwargs)

    def refuse(what: str, instead: str) -> Callable[..., Any]:
        def raise_error(*args: Any, **kwargs: Any) -> Any:
            raise BuildError(f"{what} in build would be lost by tracing{_user_line()}; {instead}")

        return raise_error

    def with_parameters(target: Callable[..., Any]) -> Callable[..., Any]:
        def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor | fx.Proxy) else list(parameters)
            recorded = record(target, parameters, *args, **kwargs)
            return recorded if target is torch.nn.utils.clip_grad_norm_ else None

        return run

    def no_backward_before(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(node.op == "call_method" and node.target == "backward" for node in tracer.graph.nodes):
            raise BuildError(
                f"zero_grad after backward in build{_user_line()} would drop the gradients that the graph is about to"
                " update with; leave it out: the graph drops gradients after each update"
            )
        # Before backward there is no gradient: the graph dropped those of the step before.

    print_outside = builtins.print

    def print_(*args: Any, **kwargs: Any) -> None:
        record(print_outside, *args, **kwargs)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        record(torch_backward, tensors, *args, **kwargs)

    torch_backward, torch_grad = torch.autograd.backward, torch.autograd.grad
    in_module = "put it inside a module that holds no embedding, around its forward"
    the_graph_does = "leave it out: the graph steps after build"
    kept = "return the value from build, or keep it in a buffer that is changed in place"
    scaler = torch.amp.grad_scaler.GradScaler
    grad_mode = torch.autograd.grad_mode
    made: list[tuple[Any, Any, Any]] = [
        (builtins, "print", print_),
        (torch.amp.autocast_mode.autocast, "__enter__", lambda self: _enter_autocast(self, record)),
        (torch.amp.autocast_mode.autocast, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.no_grad, "__enter__", lambda self: _enter_grad(self, False, record)),
        (grad_mode.no_grad, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.enable_grad, "__enter__", lambda self: _enter_grad(self, True, record)),
        (grad_mode.enable_grad, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.set_grad_enabled, "__init__", lambda self, mode: _enter_grad(self, mode, record)),
        (grad_mode.set_grad_enabled, "__enter__", lambda self: None),
        (grad_mode.set_grad_enabled, "__exit__", lambda self, *error: _leave(self, record)),
        (grad_mode.inference_mode, "__enter__", refuse("torch.inference_mode", "use torch.no_grad, or " + in_module)),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", refuse("saved_tensors_hooks", in_module)),
        (torch.autograd.anomaly_mode.set_detect_anomaly, "__init__", refuse("set_detect_anomaly", "set it outside")),
        (torch.autograd.anomaly_mode.detect_anomaly, "__init__", refuse("detect_anomaly", "put it around the call")),
        (DeviceContext, "__init__", refuse("a torch.device block", "give device= to each call")),
        (TorchFunctionMode, "__enter__", refuse("a torch function mode", in_module)),
        (TorchDispatchMode, "__enter__", refuse("a torch dispatch mode", in_module)),
        (torch, "manual_seed", refuse("torch.manual_seed", "call it before the loop")),
        (torch, "set_rng_state", refuse("torch.set_rng_state", "call it before the loop")),
        (torch.random, "fork_rng", refuse("torch.random.fork_rng", in_module)),
        (torch.autograd.profiler.record_function, "__enter__", lambda self: _enter_record_function(self, record)),
        (torch.autograd.profiler.record_function, "__exit__", lambda self, *error: _leave(self, record)),
        (torch.autograd, "backward", backward),
        (torch.autograd, "grad", lambda *args, **kwargs: record(torch_grad, *args, **kwargs)),
        (torch.optim.Optimizer, "zero_grad", no_backward_before),
        (torch.nn.Module, "zero_grad", no_backward_before),
        (torch.nn.Module, "__setattr__", refuse("setting an attribute of a module", kept)),
        (
            scaler,
            "scale",
            lambda self, loss: record(ops.scale_loss, tracer.name_object("grad_scaler", self), loss),
        ),
        (scaler, "unscale_", refuse("GradScaler.unscale_", "leave it out: the graph unscales before it clips")),
        (scaler, "step", refuse("GradScaler.step", the_graph_does)),
        (scaler, "update", refuse("GradScaler.update", the_graph_does)),
    ]
    made += [(torch, name, functools.partial(record, getattr(torch, name))) for name in _FACTORIES]
    made += [(one, "step", refuse(f"{type(one).__name__}.step", the_graph_does)) for one in steppers]
    for clip in (torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_):
        # What torch has wrapped, so that it is replaced by whatever name it has been imported.
        inside = next(cell for cell in clip.__closure__ if cell.cell_contents is clip.__wrapped__)  # type: ignore
        made.append((inside, None, with_parameters(clip)))
    traced = [tracer.root.build, *(one.forward for one in tracer.paths if not tracer.is_leaf_module(one, ""))]
    made += in_place_of_math(traced, tracer.here, record)
    for (_, name), scope in list(getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", {}).items()):
        function = scope[name] if name in scope else getattr(builtins, name)
        made.append((scope, name, _recorded_if_traced(function, record)))  # what torch.fx.wrap was told of
    tracer.call, tracer.read = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    made.append((torch.nn.Module, "__call__", tracer.called))
    made.append((torch.nn.Module, "__getattr__", tracer.attribute))
    if hasattr(fx._symbolic_trace, "_is_fx_tracing_flag"):
        # torch.compile asks for it, to say that what it has compiled cannot be traced.
        made.append((fx._symbolic_trace, "_is_fx_tracing_flag", tracer.here))
    return made


def _recorded_if_traced(function: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        return (functools.partial(record, function) if any(isinstance(one, fx.Proxy) for one in leaves) else function)(
            *args, **kwargs
        )

    return run


def modules_kept_plainly(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules in plain lists, tuples and dicts of a module, which torch does not know of: (where, module)."""
    known, own = set(root.modules()), vars(torch.nn.Module())
    for path, module in root.named_modules():
        for name, value in list(vars(module).items()):
            if name not in own:
                for where, one in _modules_in(value, f"{path}.{name}" if path else name):
                    if one not in known:
                        yield where, one


def _modules_in(value: Any, where: str) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield where, value
    elif isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in itertools.islice(pairs, _LOOKED_THROUGH):
            yield from _modules_in(one, f"{where}[{key!r}]")


def say_not_registered(root: torch.nn.Module, module: torch.nn.Module) -> str:
    """That a module is no part of a graph, and what to do."""
    what = f"embedding {module.name!r}" if _is_embedding(module) else type(module).__name__
    kept = [f"kept in {where}, a plain list or the like" for where, one in modules_kept_plainly(root) if one is module]
    return (
        f"{what} is no part of {type(root).__name__} ({(*kept, 'reached by a closure, a global or the like')[0]}),"
        f" which would not train, move or save it; {REGISTER}"
    )


def _check_constants(graph: fx.Graph, objects: dict[str, Any]) -> None:
    """Refuse changes in place of what has no name in the module: whether `build` makes it anew at each call, or it
    outlives a call, cannot be told."""
    for node in graph.nodes:
        changed: Any = node.kwargs.get("out", node.args[0] if node.args else None) if is_inplace(node) else None
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


def _enter_autocast(autocast: Any, record: Callable[..., Any]) -> Any:
    options = {"dtype": autocast.fast_dtype, "enabled": autocast._enabled, "cache_enabled": autocast._cache_enabled}
    autocast._oneemb = [*getattr(autocast, "_oneemb", ()), record(ops.enter_autocast, autocast.device, **options)]
    return autocast


def _enter_record_function(block: Any, record: Callable[..., Any]) -> Any:
    block._oneemb = [*getattr(block, "_oneemb", ()), record(ops.enter_record_function, block.name, block.args)]
    return block


def _enter_grad(context: Any, mode: bool, record: Callable[..., Any]) -> None:
    # torch's clipping functions run in a block of their own, which is part of them.
    inside_torch = sys._getframe(3).f_code.co_filename.endswith("clip_grad.py")
    entered = None if inside_torch else record(ops.enter_grad_mode, mode)
    context._oneemb = [*getattr(context, "_oneemb", ()), entered]


def _leave(context: Any, record: Callable[..., Any]) -> None:
    *context._oneemb, entered = context._oneemb
    if entered is not None:
        record(ops.exit_context, entered)


def _user_line(error: BaseException | None = None) -> str:
    """ " at file:line: code" of the innermost frame that is neither torch's nor ours."""
    if error is not None:
        for walked, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if _is_users(walked.f_code.co_filename):
                return _at(walked.f_code.co_filename, line)
        return ""
    frame = _user_frame()
    return _at(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _assert_at(frame: FrameType | None) -> str:
    """The text of the assert that a frame is at, if each truth value asked for there is one it needs; else ""."""
    if frame is None:
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
            sure = not any(
                isinstance(one, ast.Or | ast.Not | ast.IfExp | ast.comprehension) for one in ast.walk(node.test)
            )
            return f"{ast.unparse(node)}{_at(frame.f_code.co_filename, frame.f_lineno)}" if sure else ""
    return ""


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_USERS) and "<" not in filename


def _at(filename: str, line: int) -> str:
    return f" at {filename}:{line}: {linecache.getline(filename, line).strip()}"
