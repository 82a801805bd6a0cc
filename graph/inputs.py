"""Inputs of `build`: nested arguments as a flat list of values and their structure.

    build(self, batch, scale=None)   called with   ({"ids": a, "label": b},)
    values     [a, b]
    structure  batch = {"ids": value, "label": value}, scale = None

Values may differ from call to call. They are tensors, numbers, strings inside a tuple, list or dict, and all else that
is not structure. A list or tuple of strings alone, as a collate function returns it, is one value.

`build` may make other lookups if the structure changes, so its lookups are then recorded anew. Structure is:
- tuples, lists, dicts and dataclasses, their lengths and keys; objects of classes that torch's pytrees know, with the
  context that pytrees keep beside the leaves, such as the keys of a KeyedJaggedTensor;
- None, True, False, dtypes and devices, at any depth;
- a string that is an argument itself, as in build(self, batch, mode="train");
- the default of a parameter that a call leaves out, including strings in tuples.

Another batch size is the same structure.
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
# Levels of nesting at which strings are structure: in a plain argument, in *args and **kwargs, in a default.
_ITSELF, _MEMBERS, _ALL = 1, 2, 1 << 30

_PLAIN = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)

_CONSTANTS = (type(None), bool, torch.dtype, torch.device)


class Structure(NamedTuple):
    """The nesting of a call's arguments; hashable.

    Args:
        kind: "value", "constant", "sequence", "dict" or "tree".
        what: by kind: name of a value; (class, constant); class of a sequence; (class, keys) of a dict or dataclass;
            (class, text of the pytree context) of another object that torch's pytrees know.
        parts: the nested structures.
    """

    kind: str
    what: Any  # Any: the type depends on `kind`.
    parts: tuple["Structure", ...] = ()

    def difference(self, other: "Structure", name: str = "") -> str:
        """Text about the first difference between this structure and `other`; "" = they are equal.

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
        """The names of the values, in the order of the values."""
        if self.kind == "value":
            yield self.what
        for part in self.parts:
            yield from part.names()


class Signature:
    """Signature of `build`."""

    def __init__(self, build: Callable[..., object]):
        self._signature = inspect.signature(build)
        parameters = self._signature.parameters
        self._plain = tuple(parameters) if all(parameter.kind in _PLAIN for parameter in parameters.values()) else None
        """Names of the parameters, if all may be passed by position; None = not all may."""
        self._tensors = [Structure("value", name) for name in parameters]
        """For each parameter, the structure of an argument that is a tensor."""

    def flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[list[Any], Structure]:
        """(values, structure) of the arguments of a call.

        Raises:
            TypeError: `build` cannot be called with these arguments.
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
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"build{self._signature} must be callable with the arguments of the graph: {error}; give the parts of a"
                " batch one by one, graph(*batch) or graph(**batch)"
            ) from None
        passed = set(bound.arguments)
        bound.apply_defaults()
        for name, argument in bound.arguments.items():
            # Elements of *args and **kwargs are arguments themselves.
            several = self._signature.parameters[name].kind in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)
            depth = _ALL if name not in passed else _MEMBERS if several else _ITSELF
            parts.append(_flatten(argument, name, values, depth))
        return values, Structure("dict", (dict, tuple(bound.arguments)), tuple(parts))

    def spread(self, batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for a batch of a loader. Elements of a tuple or list are positional arguments and items of a
        dict are keyword arguments, if `build` can be called so; otherwise the batch is the only argument."""
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
    """The structure of an argument. Its values are appended to `values`.

    Args:
        depth: number of levels of nesting, from this one, at which strings are structure.
    """
    if type(argument) is torch.Tensor:
        values.append(argument)
        return Structure("value", name)
    if isinstance(argument, _CONSTANTS) or depth > 0 and isinstance(argument, str):
        # With the class: True == 1, but `build` may tell them apart.
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
