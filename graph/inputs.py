"""What `build` is called with: nested arguments as a flat list of values and the structure they lie in.

    build(self, batch, scale=None)   called with   ({"ids": a, "label": b},)
    values     [a, b]
    structure  batch = {"ids": value, "label": value}, scale = None

Tensors, numbers and whatever else is not below are values, which may differ from call to call. Tuples, lists and
dicts, and None, True, False and strings, are structure: `build` may branch on them, and is compiled anew when they
change. A variable batch size changes no structure.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Signature", "Structure"]

_CONSTANTS = (type(None), bool, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Structure:
    """The nesting of a call's arguments; hashable.

    Args:
        kind: "value", "constant", "sequence" or "dict".
        what: a value's name, the constant, the class of a sequence, or the class and keys of a dict.
        parts: what is nested in it.
    """

    kind: str
    what: Any
    parts: tuple["Structure", ...] = ()

    def names(self) -> Iterator[str]:
        """The names of the values, in order."""
        if self.kind == "value":
            yield self.what
        for part in self.parts:
            yield from part.names()

    def fill(self, values: Iterator[Any]) -> Any:
        """The nested arguments, with these values in them."""
        if self.kind == "value":
            return next(values)
        if self.kind == "constant":
            return self.what[1]
        parts = [part.fill(values) for part in self.parts]
        if self.kind == "dict":
            return dict(zip(self.what[1], parts, strict=True))
        return self.what(*parts) if hasattr(self.what, "_fields") else self.what(parts)


class Signature:
    """How `build` takes its arguments."""

    def __init__(self, build: Callable[..., Any]):
        self._signature = inspect.signature(build)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Structure]:
        """(values, structure) of a call.

        Raises:
            TypeError: these are not arguments of `build`.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _flatten_arguments(bound.arguments)

    def default_structure(self) -> Structure:
        """The structure of a call that gives a value to every parameter that must be given, and no other."""
        arguments: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments[name] = ()
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments[name] = {}
            else:
                arguments[name] = object() if parameter.default is parameter.empty else parameter.default
        return _flatten_arguments(arguments)[1]

    def call(self, structure: Structure, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) to call `build` with."""
        bound = inspect.BoundArguments(self._signature, structure.fill(iter(values)))
        return bound.args, bound.kwargs

    def spread(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for a batch of a loader: a tuple or list is `build`'s arguments, a dict its arguments by
        name, where `build` can be called so; anything else is its one argument."""
        if isinstance(batch, tuple | list) and self._binds(*batch):
            return tuple(batch), {}
        if isinstance(batch, dict) and all(isinstance(key, str) for key in batch) and self._binds(**batch):
            return (), dict(batch)
        return (batch,), {}

    def _binds(self, *args: Any, **kwargs: Any) -> bool:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True


def _flatten_arguments(arguments: Mapping[str, Any]) -> tuple[list[Any], Structure]:
    values: list[Any] = []
    parts = tuple(_flatten(argument, name, values) for name, argument in arguments.items())
    return values, Structure("dict", (dict, tuple(arguments)), parts)


def _flatten(argument: Any, name: str, values: list[Any]) -> Structure:
    if isinstance(argument, _CONSTANTS):
        # With its class: True and 1 are equal, and are not the same to build.
        return Structure("constant", (type(argument), argument))
    if type(argument) in (tuple, list) or isinstance(argument, tuple) and hasattr(argument, "_fields"):
        names = getattr(argument, "_fields", range(len(argument)))
        parts = tuple(_flatten(one, f"{name}_{i}", values) for i, one in zip(names, argument, strict=True))
        return Structure("sequence", type(argument), parts)
    if isinstance(argument, dict) and all(isinstance(key, str | int) for key in argument):
        parts = tuple(_flatten(one, f"{name}_{key}", values) for key, one in argument.items())
        return Structure("dict", (dict, tuple(argument)), parts)
    values.append(argument)
    return Structure("value", name)
