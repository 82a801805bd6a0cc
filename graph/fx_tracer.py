"""The torch.fx tracer of `build`: makes a node of each call that a traced value or a tensor goes into.

What calls without either do, `tracer_replacements.py` has recorded or refused.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from oneemb.graph.build_error import BuildError, assert_at, user_frame, user_line
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.modules import (
    REGISTER,
    build_of,
    embeddings_in,
    is_embedding,
    say_not_registered,
    unregistered_modules,
)
from oneemb.graph.patches import Here

__all__ = ["BuildTracer", "RecordFunctions"]


class _Proxy(fx.Proxy):
    """A traced value. What would need the value itself is refused."""

    def __format__(self, spec: str) -> str:
        raise BuildError(
            f"a traced value is made into text{user_line()}; it has no value while build is traced: give it to"
            " print(...) as an argument of its own, or do it with what build returns"
        )

    def __len__(self) -> int:
        raise BuildError(
            f"len() of a traced value{user_line()} has no answer while build is traced; use .shape[0], which is read"
            " at every step"
        )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise BuildError(
            f"a traced value is made into a NumPy array{user_line()}; it has no value while build is traced: use torch"
            " functions, or do it in a module of its own that holds no embedding"
        )

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        if k in ("__array_struct__", "__array_interface__"):  # NumPy asks for these before it calls __array__.
            raise AttributeError(k)
        return super().__getattr__(k)


class BuildTracer(fx.Tracer):
    """Traces `root.build`, called with values in this structure.

    Args:
        here: true on the thread that traces, as long as it does.
    """

    def __init__(self, root: torch.nn.Module, signature: Signature, structure: Structure, here: Here):
        super().__init__()
        self.root, self.signature, self.structure, self.here = root, signature, structure, here
        self.objects: dict[str, object] = {}
        """What the graph names that is no part of the module."""
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
        self.call_original: Callable[..., object] = torch.nn.Module.__call__
        self.read_original: Callable[[torch.nn.Module, str], object] = torch.nn.Module.__getattr__

    def trace_build(self) -> fx.Graph:
        """Call `build`, with everything in place that records what it does."""
        values = [self.create_proxy("placeholder", name, (), {}) for name in self.structure.names()]
        args, kwargs = self.signature.call(self.structure, values)
        with RecordFunctions(self):
            result = build_of(self.root)(*args, **kwargs)
            self.create_node("output", "output", (self.create_arg(result),), {})
        return self.graph

    def record(self, target: Callable[..., object], /, *args: object, **kwargs: object) -> fx.Proxy:
        """Make a node of a call, in place of calling."""
        return self.create_proxy("call_function", target, args, kwargs)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return is_embedding(m) or not embeddings_in(m)

    def called(self, module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        """What takes the place of a module's call."""
        if module not in self.paths:
            raise BuildError(f"build calls a module{user_line()}: {say_not_registered(self.root, module)}")
        if isinstance(vars(module).get("_signature"), Signature):
            raise BuildError(
                f"build calls a graph{user_line()}, {type(module).__name__}, which compiles and updates by itself;"
                " call its modules, or its build"
            )
        hidden = unregistered_modules(module) if self.is_leaf_module(module, "") else ()
        for where, held in hidden:
            for embedding in embeddings_in(held).values():
                raise BuildError(
                    f"build calls {self.paths[module]}{user_line()}, which keeps embedding"
                    f" {embedding.name!r} in {where}, a plain list or the like, so that the graph does not see it;"
                    f" {REGISTER}"
                )
        return self.call_module(
            module, lambda *args, **kwargs: self.call_original(module, *args, **kwargs), args, kwargs
        )

    def attribute(self, module: torch.nn.Module, name: str) -> object:
        """What takes the place of reading a parameter, buffer or submodule of a module."""
        return self.getattr(name, self.read_original(module, name), self._parameters)

    # Any: so torch.fx types what it calls these two with.
    def create_arg(self, a: Any) -> fx.node.Argument:
        if isinstance(a, torch.nn.Module) and a not in self.paths:
            raise BuildError(f"build uses a module{user_line()}: {say_not_registered(self.root, a)}")
        if isinstance(a, torch.Tensor) and not self._is_named(a):
            if a.requires_grad:
                raise BuildError(
                    f"build uses a {'parameter' if a.is_leaf else 'tensor with a gradient'} {list(a.shape)}"
                    f"{user_line()} that is no part of the graph: it would neither be saved nor trained with it;"
                    " assign it, or the module that holds it, to the graph (self.name = ...), or detach() it"
                )
            return self.create_arg(self.name_object("constant", a))
        if isinstance(a, np.ndarray | np.generic | torch.Generator) and not isinstance(a, int | float | complex):
            return self.create_arg(self.name_object("constant", a))
        return super().create_arg(a)

    def _is_named(self, tensor: torch.Tensor) -> bool:
        if tensor in self.tensor_attrs:
            return True
        return any(tensor is named for named in (*self.root.parameters(), *self.root.buffers()))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if kind not in ("placeholder", "output"):
            node.meta["line"] = user_line()
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        if message := assert_at(user_frame()):
            self.record(torch._assert, obj, message)
            return True
        return super().to_bool(obj)

    def name_object(self, kind: str, value: object) -> fx.Proxy:
        """A traced value that stands for an object which is no part of the module."""
        name = next((name for name, named in self.objects.items() if named is value), f"{kind}_{len(self.objects)}")
        self.objects[name] = value
        return self.create_proxy("get_attr", name, (), {})


_READ_GRAD = vars(torch._C.TensorBase)["grad"].__get__

# Questions about a real tensor whose answers are plain values: they are asked, not recorded.
_QUESTIONS = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__"})


class RecordFunctions(TorchFunctionMode):
    """Records torch functions that no traced value goes into, in place of running them once while tracing."""

    # While a build is traced, entering any other mode is refused.
    __enter__ = TorchFunctionMode.__enter__

    def __init__(self, tracer: BuildTracer):
        self.tracer = tracer

    # Any: torch calls it with whatever the function has been called with.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func == _READ_GRAD:
            raise BuildError(
                f"build reads .grad of a parameter{user_line()}, which is not there while it is traced; clip with"
                " torch.nn.utils.clip_grad_norm_ or clip_grad_value_, or use a hook on the parameter"
            )
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _QUESTIONS:
            answer = func(*args, **kwargs)
            if not isinstance(answer, torch.Tensor):
                return answer
            return self.tracer.record(getattr, args[0], func.__self__.__name__)
        return self.tracer.record(func, *args, **kwargs)
