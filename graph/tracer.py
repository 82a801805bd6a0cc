"""Records what a `build` method does, as a torch.fx graph.

A module that holds no embedding is a leaf: its code may be any Python. Modules that hold one, and `build` itself, are
traced through. What plain fx tracing would run once, while tracing, and then forget is recorded here or refused with
the user's line and what works instead:

    recorded   functions of no traced value or of sizes (`torch.rand`), autocast and no_grad blocks, clip_grad_norm_,
               clip_grad_value_, zero_grad, GradScaler.scale, torch.autograd.backward, print, assert
    refused    if, for and float() on traced values, f-strings of them, optimizer.step, setting attributes of
               modules, reading .grad, inference_mode, saved tensor hooks, torch.manual_seed

Invariant: nothing of this module is in place once `trace_build` has returned.
"""

import ast
import builtins
import functools
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from oneemb.graph import step_ops
from oneemb.graph.inputs import Signature, Structure
from oneemb.storage.embedding_store import EmbeddingStore

__all__ = ["BuildError", "LookupModule", "Trace", "embeddings_in", "trace", "trace_build"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_NOT_THE_USERS = (os.path.dirname(torch.__file__), _HERE, mock.__file__, os.path.dirname(os.__file__) + "/contextlib")


class BuildError(RuntimeError):
    """`build` does something that cannot be part of a graph. The message says what, where, and what works."""


class LookupModule(Protocol):
    """What the compiler reads of an embedding module."""

    name: str
    store: EmbeddingStore
    weight: torch.nn.Parameter
    num_tables: int
    key_type: torch.dtype
    padding_idx: int | None
    training: bool


@dataclass(frozen=True)
class Trace:
    """What `build` does."""

    graph: fx.Graph
    objects: dict[str, Any]
    """What the graph names that is no part of the module: a GradScaler."""


def embeddings_in(module: torch.nn.Module) -> dict[str, Any]:
    """The embedding modules below a module, by qualified name, each once."""
    return {name: one for name, one in module.named_modules() if _is_embedding(one)}


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("store"), EmbeddingStore)


def trace_build(root: torch.nn.Module) -> fx.Graph:
    """The graph of `root.build`: embedding lookups and leaf modules as calls of modules.

    Raises:
        BuildError: `build` branches on the value of a tensor, or uses something that tracing would lose.
    """
    return trace(root).graph


def trace(root: torch.nn.Module, structure: Structure | None = None, steppers: Sequence[Any] = ()) -> Trace:
    """Trace `root.build`, called with values in this structure; None = one for each parameter without a default.

    Args:
        steppers: the graph's optimizers and schedulers, whose `step` is not for `build` to call.

    Raises:
        BuildError: as `trace_build`.
    """
    signature = Signature(root.build)  # type: ignore[arg-type]
    tracer = _Tracer(signature, structure or signature.default_structure())
    try:
        with _recording(tracer, steppers), _RecordFunctions(tracer):
            return Trace(tracer.trace(root), tracer.objects)
    except BuildError:
        raise
    except (fx.proxy.TraceError, TypeError, NotImplementedError) as error:
        if not isinstance(error, fx.proxy.TraceError) and not any(
            word in str(error) for word in ("Proxy", "argument of")
        ):
            raise
        raise BuildError(
            f"build cannot be traced{_user_line(error)}: {error}. What it does must not depend on values of tensors:"
            " use torch.where or a mask in place of if, or move the code into a module of its own that holds no"
            " embedding"
        ) from error


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
    traced_func_name = "build"

    def __init__(self, signature: Signature, structure: Structure):
        super().__init__()
        self.signature, self.structure = signature, structure
        self.objects: dict[str, Any] = {}
        self._thread = threading.get_ident()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        values = [self.create_proxy("placeholder", name, (), {}) for name in self.structure.names()]
        args, kwargs = self.signature.call(self.structure, values)
        return lambda: root_fn(self.root, *args, **kwargs), []

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return _is_embedding(m) or not embeddings_in(m)

    # torch.fx puts itself in place of every module's calls and attributes, those of other threads too.

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

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

# Functions that take sizes and no tensor: torch reads their arguments before anyone may record the call.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros")

# Questions about a real tensor whose answers are plain values: they are asked, not recorded.
_QUESTIONS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__"})


class _RecordFunctions(TorchFunctionMode):
    """Records torch functions that no traced value goes into, in place of running them once while tracing."""

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
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves) or getattr(func, "__name__", "") in _QUESTIONS:
            return func(*args, **kwargs)
        if not hasattr(self.tracer, "graph"):
            return func(*args, **kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)


@contextmanager
def _recording(tracer: _Tracer, steppers: Sequence[Any]) -> Iterator[None]:
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
    patches: list[tuple[Any, str, Any]] = [
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
        (torch, "manual_seed", refuse("torch.manual_seed", "call it before the loop")),
        (torch.autograd, "backward", backward),
        (torch.autograd, "grad", lambda *args, **kwargs: record(torch_grad, *args, **kwargs)),
        (torch.optim.Optimizer, "zero_grad", no_backward_before),
        (torch.nn.Module, "zero_grad", no_backward_before),
        (torch.nn.Module, "__setattr__", refuse("setting an attribute of a module", kept)),
        (
            scaler,
            "scale",
            lambda self, loss: record(step_ops.scale_loss, tracer.name_object("grad_scaler", self), loss),
        ),
        (scaler, "unscale_", refuse("GradScaler.unscale_", "leave it out: the graph unscales before it clips")),
        (scaler, "step", refuse("GradScaler.step", the_graph_does)),
        (scaler, "update", refuse("GradScaler.update", the_graph_does)),
    ]
    patches += [(torch, name, functools.partial(record, getattr(torch, name))) for name in _FACTORIES]
    patches += [(one, "step", refuse(f"{type(one).__name__}.step", the_graph_does)) for one in steppers]
    clips: list[Any] = [torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, _here_only(replacement, getattr(owner, name))))
        for clip in clips:
            stack.enter_context(_replaced_inside(clip, with_parameters(clip)))
        yield


def _here_only(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for this thread; others, such as those that load data, go on as they were."""
    here = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    return run


@contextmanager
def _replaced_inside(function: Any, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let a function that torch has wrapped run something else, by whatever name it has been imported."""
    cell = next(cell for cell in function.__closure__ if cell.cell_contents is function.__wrapped__)
    original = cell.cell_contents
    cell.cell_contents = _here_only(replacement, original)
    try:
        yield
    finally:
        cell.cell_contents = original


def _enter_autocast(autocast: Any, record: Callable[..., Any]) -> Any:
    options = {"dtype": autocast.fast_dtype, "enabled": autocast._enabled, "cache_enabled": autocast._cache_enabled}
    autocast._oneemb = [*getattr(autocast, "_oneemb", ()), record(step_ops.enter_autocast, autocast.device, **options)]
    return autocast


def _enter_grad(context: Any, mode: bool, record: Callable[..., Any]) -> None:
    # torch's clipping functions run in a block of their own, which is part of them.
    inside_torch = sys._getframe(3).f_code.co_filename.endswith("clip_grad.py")
    entered = None if inside_torch else record(step_ops.enter_grad_mode, mode)
    context._oneemb = [*getattr(context, "_oneemb", ()), entered]


def _leave(context: Any, record: Callable[..., Any]) -> None:
    *context._oneemb, entered = context._oneemb
    if entered is not None:
        record(step_ops.exit_context, entered)


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
