"""Records how `build` computes the ids of lookups from a batch, so that ids of a coming batch can be looked up ahead.

    build(self, batch)                        recorded
        ids = batch["ids"][:, :2] % 1000      getitem = batch_ids[:, :2];  remainder = getitem % 1000
        rows = self.embedding(ids)            embedding = embedding(remainder)

The recording is a guess: that `build` does the same in the next step. The ids that `build` looks up are compared with
the guessed ids, so a wrong guess costs time but changes no number, and the tape may be simple. It records torch's
functions of the tensors, arrays and lists of a batch. It gives up an object that changes in place, depends on random
numbers or on a gradient, or comes from anything but the batch.
"""

import operator
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from oneemb.graph.arguments import Lookup
from oneemb.storage.locking.signals_deferred import signals_deferred

_OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, name)
    for name in "getitem add sub mul truediv floordiv mod lshift rshift neg invert eq ne lt le gt ge".split()
} | {"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor}


class _Graph(fx.Graph):
    """fx.Graph that defers signals while it makes a node: within torch's C code, Ctrl-C would become a SystemError."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        with signals_deferred:
            return super().create_node(*args, **kwargs)


class _Unknown(Exception):
    """A value that the tape does not follow."""


class Tape:
    """Records the torch functions and the lookups that are called through it.

    Args:
        values: the values of the batch.
        names: names of the values.
        left_out: names of embeddings whose lookups are not recorded.
    """

    def __init__(self, values: Sequence[object], names: Sequence[str], left_out: Collection[str] = ()):
        self.constants: dict[str, torch.Tensor] = {}
        """{name in the graph: tensor from outside the batch}."""
        self.others = 0
        """Number of lookups that are not recorded: their ids do not come from the batch alone, or they are left out."""
        self._graph = _Graph()
        self._lookups: list[fx.Node] = []
        self._known: dict[int, tuple[object, int, fx.Node]] = {}
        """{id(object): (object, its version, its node)} of the objects that are computed from the batch alone."""
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        """{id(tensor): tensor} of the tensors made during the recording that are not computed from the batch alone."""
        self._outside: dict[int, fx.Node] = {}
        """{id(tensor): its node} of the tensors in `constants`."""
        self._sizes: list[tuple[int, fx.Node]] = []
        """(number, node) of each integer of the batch, and of the batch size."""
        self._left_out = left_out
        self._paused = False
        inputs = [self._graph.placeholder(re.sub(r"\W", "_", name)) for name in names]
        for value, node in zip(values, inputs, strict=True):
            self._learn(value, node)
        first = next(
            (
                i
                for i, value in enumerate(values)
                if isinstance(value, torch.Tensor) and not value.is_nested and value.ndim
            ),
            None,
        )
        if first is not None:
            size = self._graph.call_method("size", (inputs[first], 0))
            self._sizes.append((values[first].shape[0], size))  # type: ignore[attr-defined]  # a tensor: see `first`
        self._sizes += [(value, node) for value, node in zip(values, inputs, strict=True) if type(value) is int]

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of `func`, a torch function. The call is recorded if it can be."""
        given = list(leaves((args, kwargs)))
        call = None
        if not self._paused and any(id(value) in self._known for value in given):
            with suppress(_Unknown):
                call = self._call(func, args, kwargs)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = [_version(tensor) for tensor in tensors]
        with nullcontext() if call is None else _Watch() as watch:
            result = func(*args, **kwargs)
        changed = [tensor for tensor, version in zip(tensors, before, strict=True) if _version(tensor) != version]
        self._forget([result, *changed])
        if call is not None and watch is not None and watch.pure and not changed:
            self._learn_result(call, result)
        return result

    def lookup(self, name: str, lookup: Lookup, look_up: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Result of `look_up`. The lookup is recorded if its ids come from the batch; the calls within are not.

        Args:
            name: name of the embedding.
            lookup: arguments of the lookup.
        """
        self._paused = True
        try:
            rows = look_up()
            self._note(name, lookup)
        finally:
            self._paused = False
        self._forget(rows)
        return rows

    def _note(self, name: str, lookup: Lookup) -> None:
        try:
            if name in self._left_out:
                raise _Unknown
            ids, table_ids, offsets, columns = map(self._argument, lookup[:4])
            noted = Lookup(ids, table_ids, offsets, columns, pooling=None)
        except _Unknown:
            self.others += 1
            return
        with suppress(_Unknown):  # `per_sample_weights` may not be known before `build` runs
            noted = noted._replace(per_sample_weights=self._argument(lookup.per_sample_weights), pooling=lookup.pooling)
        self._lookups.append(self._graph.call_module(name, kwargs=noted.by_name()))

    def graph(self) -> fx.Graph:
        """The recorded graph. It returns the results of the lookups, and has only calls that the lookups need."""
        self._graph.output(tuple(self._lookups))
        for node in reversed(list(self._graph.nodes)):
            if not node.users and node.op not in ("placeholder", "output"):
                self._graph.erase_node(node)
        used = {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in used}
        self._known.clear()
        self._made.clear()
        return self._graph

    # ---- objects ----------------------------------------------------------------------------------------------------

    def _learn(self, value: object, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor | np.ndarray | list):
            self._known[id(value)] = value, _version(value), node

    def _forget(self, result: object) -> None:
        for value in leaves(result):
            if isinstance(value, torch.Tensor):
                self._known.pop(id(value), None)
                self._made[id(value)] = weakref.ref(value)

    def _learn_result(self, call: tuple[str, Any, tuple[Any, ...], dict[str, Any]], result: object) -> None:
        several = isinstance(result, tuple | list) and any(isinstance(part, torch.Tensor) for part in result)
        if not several and not isinstance(result, torch.Tensor | np.ndarray | list):
            return  # a number, which is part of the graph where it is used
        node = self._graph.create_node(*call)
        self._learn(result, node)
        if several:
            for i, part in enumerate(result):  # type: ignore[arg-type,var-annotated]  # a tuple or list: see above
                self._learn(part, self._graph.call_function(operator.getitem, (node, i)))

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any, Any, Any]:
        """(kind, target, args, kwargs) of the node for a call. Raises _Unknown if the call cannot be recorded."""
        name = getattr(func, "__name__", "")
        if any(word in name for word in _GIVEN_UP) or name.endswith("_") and not name.endswith("__"):
            raise _Unknown
        arguments = self._argument(args), self._argument(kwargs)
        if name == "__get__":
            return "call_function", getattr, (arguments[0][0], func.__self__.__name__), {}  # type: ignore[attr-defined]
        if name in _OPERATORS:
            return "call_function", _OPERATORS[name], *arguments
        if getattr(torch.Tensor, name, None) is func:
            return "call_method", name, *arguments
        if not (isinstance(func, BuiltinFunctionType) or str(getattr(func, "__module__", "")).startswith("torch")):
            raise _Unknown  # a function of another library, whose effects are unknown; torch's modes see it too
        return "call_function", func, *arguments

    def _argument(self, value: Any) -> Any:
        """Node or constant that stands for a value in the graph.

        Raises:
            _Unknown: the value cannot be known before `build` runs.
        """
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise _Unknown
        if (known := self._known.get(id(value))) is not None:
            _, version, node = known
            if _version(value) != version:
                raise _Unknown
            return node
        if isinstance(value, torch.Tensor):
            made = self._made.get(id(value))
            if value.is_inference() or made is not None and made() is value:
                raise _Unknown
            if id(value) not in self._outside:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = value
                self._outside[id(value)] = self._graph.get_attr(name)
            return self._outside[id(value)]
        if isinstance(value, np.generic):
            return value.item()
        if type(value) is int:  # A number that equals the batch size most often is the batch size.
            return next((node for size, node in self._sizes if size == value), value)
        if type(value) in (tuple, torch.Size):
            return tuple(map(self._argument, value))
        if type(value) is list:
            return list(map(self._argument, value))
        if type(value) is dict:
            return {key: self._argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if value is None or isinstance(value, _CONSTANT):
            return value
        raise _Unknown


_CONSTANT = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis),
)  # fmt: skip

_GIVEN_UP = ("dropout", "batch_norm", "instance_norm")
"""Parts of the names of functions whose changes in place or random numbers `_Watch` does not see."""


class _Watch(TorchDispatchMode):
    """Mode that sets `pure` to False if a torch function within it changes a value or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pure = True

    def __torch_dispatch__(self, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # The effects of an op that torch does not define are unknown: it may draw random numbers in Python.
        torchs = op.namespace in ("aten", "prims", "prim")
        if not torchs or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
            self.pure = False
        return op(*args, **(kwargs or {}))


def version_of(tensor: torch.Tensor) -> int:
    """Number that grows when a tensor is changed in place; 0 for inference tensors, whose changes are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _version(value: object) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0


def leaves(value: object, inside: tuple[object, ...] = ()) -> Iterator[object]:
    """A value, and all values nested in it. Containers count too, since a list may be a value of a batch. `inside`: the
    containers around it; a container within itself is not entered again."""
    yield value
    if isinstance(value, tuple | list | dict):
        if not any(value is container for container in inside):
            for part in value.values() if isinstance(value, dict) else value:
                yield from leaves(part, (*inside, value))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
