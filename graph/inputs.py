"""Inputs of `build`: nested arguments as a flat list of values and the structure they lie in.

    build(self, batch, scale=None)   called with   ({"ids": a, "label": b},)
    values     [a, b]
    structure  batch = {"ids": value, "label": value}, scale = None

Values may differ from call to call: tensors, numbers, strings inside a tuple, list or dict, and everything that is no
structure. A list or tuple of nothing but strings, as a collate function gives it, is one value.

The structure decides which lookups `build` makes; they are recorded anew when it changes:
- tuples, lists, dicts and dataclasses, their lengths and keys; classes that torch's pytrees know, and their context of
  an object beside its leaves, such as the keys of a KeyedJaggedTensor;
- None, True, False, dtypes and devices, wherever they are;
- a string that is an argument of its own, as in build(self, batch, mode="train");
- what a parameter has as its default, strings in tuples too, where a call does not give it.

A variable batch size changes no structure.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import SUPPORTED_NODES

# Any: arguments of `build`, and the values in them, may be of any type.

_Kind = inspect.Parameter
# Levels of nesting at which strings are structure: of an argument that is one, of *args and **kwargs, of a default.
_ITSELF, _MEMBERS, _ALL = 1, 2, 1 << 30

_PLAIN = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)

_CONSTANTS = (type(None), bool, torch.dtype, torch.device)


class Structure(NamedTuple):
    """The nesting of a call's arguments; hashable.

    Args:
        kind: "value", "constant", "sequence", "dict" or "tree".
        what: a value's name, the class of a constant and the constant, the class of a sequence, the class and keys of a
            dict or dataclass, or the class and context of an object that pytrees know.
        parts: the nested structures.
    """

    kind: str
    what: Any  # by kind
    parts: tuple["Structure", ...] = ()

    def difference(self, other: "Structure", name: str = "") -> str:
        """First difference of another structure from this one, as text; "" if there is none.

        >>> a, b = (Signature(lambda batch, mode="train": 0).flatten(x, {})[1] for x in ([[1, 2]], [[1, 2, 3]]))
        >>> a.difference(b)
        'batch: a list of 2, then of 3'
        """
        if (self.kind, self.what) != (other.kind, other.what) or len(self.parts) != len(other.parts):
            if self.kind == other.kind == "sequence" and self.what is other.what:
                return f"{name}: a {self.what.__name__} of {len(self.parts)}, then of {len(other.parts)}"
            return f"{name}: {self._in_words()}, then {other._in_words()}"
        keys = self.what[1] if self.kind == "dict" else range(len(self.parts))
        for key, part, other_part in zip(keys, self.parts, other.parts, strict=True):
            if difference := part.difference(other_part, f"{name}[{key!r}]" if name else str(key)):
                return difference
        return ""

    def _in_words(self) -> str:
        if self.kind == "constant":
            return repr(self.what[1])
        if self.kind == "dict":
            return f"a {self.what[0].__name__} of {', '.join(map(repr, self.what[1]))}"
        if self.kind == "tree":
            return f"a {self.what[0].__name__} of {self.what[1]}"
        return "a value" if self.kind == "value" else f"a {self.what.__name__} of {len(self.parts)}"

    def names(self) -> Iterator[str]:
        """The names of the values, in order."""
        if self.kind == "value":
            yield self.what
        for part in self.parts:
            yield from part.names()


class Signature:
    """Signature of `build`."""

    def __init__(self, build: Callable[..., object]):
        self._signature = inspect.signature(build)
        parameters = self._signature.parameters
        self._plain = tuple(parameters) if all(its.kind in _PLAIN for its in parameters.values()) else None
        """Names of the arguments, where each is one that a call may give by its place; None = others are among them."""
        self._tensors = [Structure("value", name) for name in parameters]
        """Structure of each argument where it is a tensor."""

    def flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[list[Any], Structure]:
        """(values, structure) of a call.

        Raises:
            TypeError: these are not arguments of `build`.
        """
        values: list[Any] = []
        parts: list[Structure] = []
        names = self._plain
        if names is not None and not kwargs and len(args) == len(names):
            for name, argument, of_tensor in zip(names, args, self._tensors, strict=True):
                if type(argument) is torch.Tensor:
                    values.append(argument)
                    parts.append(of_tensor)
                else:
                    parts.append(_flatten(argument, name, values, _ITSELF))
            return values, Structure("dict", (dict, names), tuple(parts))
        bound = self._signature.bind(*args, **kwargs)
        passed = set(bound.arguments)
        bound.apply_defaults()
        for name, argument in bound.arguments.items():
            # *args and **kwargs hold arguments of their own.
            several = self._signature.parameters[name].kind in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)
            depth = _ALL if name not in passed else _MEMBERS if several else _ITSELF
            parts.append(_flatten(argument, name, values, depth))
        return values, Structure("dict", (dict, tuple(bound.arguments)), tuple(parts))

    def spread(self, batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for a batch of a loader: a tuple or list is `build`'s arguments, a dict its arguments by
        name, where `build` can be called so; anything else is its one argument."""
        if isinstance(batch, tuple | list) and self._binds(*batch):
            return tuple(batch), {}
        if isinstance(batch, dict) and all(isinstance(key, str) for key in batch) and self._binds(**batch):
            return (), dict(batch)
        return (batch,), {}

    def _binds(self, *args: object, **kwargs: object) -> bool:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True


def _flatten(argument: Any, name: str, values: list[Any], depth: int) -> Structure:
    """The structure of an argument, whose values go into `values`.

    Args:
        depth: how many levels of nesting, from this one, hold strings that are structure.
    """
    if type(argument) is torch.Tensor:
        values.append(argument)
        return Structure("value", name)
    if isinstance(argument, _CONSTANTS) or depth > 0 and isinstance(argument, str):
        # With its class: True and 1 are equal, and are not the same to build.
        return Structure("constant", (type(argument), argument))
    inside = depth - 1
    if type(argument) in (tuple, list) or isinstance(argument, tuple) and hasattr(argument, "_fields"):
        if (
            inside <= 0
            and argument
            and type(argument) in (tuple, list)
            and all(isinstance(element, str) for element in argument)
        ):
            values.append(argument)
            return Structure("value", name)
        names = getattr(argument, "_fields", range(len(argument)))
        parts = tuple(
            _flatten(element, f"{name}_{i}", values, inside) for i, element in zip(names, argument, strict=True)
        )
        return Structure("sequence", type(argument), parts)
    if isinstance(argument, dict) and all(isinstance(key, str | int) for key in argument):
        parts = tuple(_flatten(element, f"{name}_{key}", values, inside) for key, element in argument.items())
        return Structure("dict", (dict, tuple(argument)), parts)
    if is_dataclass(argument) and not isinstance(argument, type):
        held = [field.name for field in fields(argument) if hasattr(argument, field.name)]  # some may not be set yet
        parts = tuple(_flatten(getattr(argument, key), f"{name}_{key}", values, inside) for key in held)
        return Structure("dict", (type(argument), tuple(held)), parts)
    tree = None if isinstance(argument, dict | list | tuple | deque) else SUPPORTED_NODES.get(type(argument))
    if tree is not None:
        leaves, context = tree.flatten_fn(argument)
        parts = tuple(_flatten(leaf, f"{name}_{i}", values, inside) for i, leaf in enumerate(leaves))
        return Structure("tree", (type(argument), repr(context)), parts)
    values.append(argument)
    return Structure("value", name)
