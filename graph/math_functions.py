"""Functions of `math` that are given traced values: what replaces them where modules name them, to record the call.

Python's functions of `math` want numbers and know nothing of torch.fx. So while a graph is traced, every module that
names `math`, or a function of it, has a replacement under that name. `math` itself stays as it is.

Invariant: a replacement behaves as the original does, except on the thread that traces, and there only in calls with a
traced value. It equals the original and has its hash. So numba, which knows functions by what they are, compiles the
same code, whichever thread asks; and tables of functions find what they hold.
"""

import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import torch
from torch import fx

from oneemb.graph.patches import Here, Replacement

__all__ = ["in_place_of_math"]

_FUNCTIONS = {id(named): named for name, named in vars(math).items() if callable(named) and not name.startswith("_")}
# Packages whose functions get no traced values but through torch's own way of recording them.
_NOT_SEARCHED = sys.stdlib_module_names - {"test"} | {"torch", "numpy", "numba", "llvmlite", "sympy", "oneemb"}


class _Function:
    """A function of math that is recorded where it is given a traced value."""

    def __init__(self, function: Callable[..., object], here: Here, record: Callable[..., fx.Proxy]):
        self.__wrapped__, self.here, self._record = function, here, record
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, "math"

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.here and any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return self._record(self.__wrapped__, *args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == other

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (math, self.__name__)


class _Math(types.ModuleType):
    """What takes the place of math in a module."""

    def __init__(self, here: Here, functions: dict[int, _Function]):
        super().__init__("math", math.__doc__)
        self.here = here
        for name, value in vars(math).items():
            setattr(self, name, functions.get(id(value), value))

    def __eq__(self, other: object) -> bool:
        return self is other or other is math

    def __hash__(self) -> int:
        return hash(math)


def in_place_of_math(
    traced: Iterable[Callable[..., object]], here: Here, record: Callable[..., fx.Proxy]
) -> Iterator[Replacement]:
    """(globals, name, what takes its place) for each name of math, or of a function of it.

    Args:
        traced: the methods that are traced through.
        record: record(function, *args, **kwargs) records a call.
    """
    functions = {number: _Function(function, here, record) for number, function in _FUNCTIONS.items()}
    like_math = _Math(here, functions)
    for scope in _scopes(traced):
        for name, value in list(scope.items()):
            if value is math:
                yield scope, name, like_math
            elif id(value) in functions:
                yield scope, name, functions[id(value)]


def _scopes(traced: Iterable[Callable[..., object]]) -> Iterable[dict[str, object]]:
    """The globals of all functions that may be traced through, each once.

    They are those of modules, and those of functions that the traced methods call, directly or through others: code
    that was made by `exec`, or loaded as a plugin, is in no module that Python knows.
    """
    found: dict[int, dict[str, object]] = {}

    def add(scope: dict[str, object]) -> bool:
        name = scope.get("__name__")
        searched = not isinstance(name, str) or name.partition(".")[0] not in _NOT_SEARCHED
        if searched:
            found[id(scope)] = scope
        return searched

    pending: list[object] = list(traced)
    for method in pending:  # whatever package they are of
        found |= {id(scope): scope for scope in [getattr(method, "__globals__", None)] if scope is not None}
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        if not add(function.__globals__) and id(function.__globals__) not in found:
            continue
        names = _names_in(function.__code__)
        for value in _values_named_by(function, names):
            if isinstance(value, types.ModuleType):
                add(vars(value))
            pending += _functions_of(value, names)
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            add(vars(module))
    return found.values()


def _names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that a function uses, and those of functions in it."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _values_named_by(function: types.FunctionType, names: set[str]) -> Iterator[object]:
    """What the names in a function stand for, as far as they do by now."""
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It is empty.
            yield cell.cell_contents


def _functions_of(value: object, names: set[str]) -> list[object]:
    """The functions that code with these names may call when it has this value: itself, or its attributes."""
    if isinstance(value, types.FunctionType | types.MethodType):
        return [value]
    owners = (value, *value.__mro__) if isinstance(value, type) else (value, *type(value).__mro__)
    spaces = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    return [space[name] for space in spaces for name in (*names, "__call__", "forward") if name in space]
