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

    They are those of modules, and those of what the traced methods name: it may have been made by `exec` or the like,
    and be in no module.
    """
    found: dict[int, dict[str, object]] = {}

    def add(scope: dict[str, object]) -> None:
        name = scope.get("__name__")
        if not isinstance(name, str) or name.partition(".")[0] not in _NOT_SEARCHED:
            found[id(scope)] = scope

    for method in traced:
        if (own := getattr(method, "__globals__", None)) is not None:
            found[id(own)] = own
        for named in _named_by(method):
            if isinstance(named, types.FunctionType):
                add(named.__globals__)
            elif isinstance(named, types.ModuleType):
                add(vars(named))
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            add(vars(module))
    return found.values()


def _named_by(method: Callable[..., object]) -> Iterator[object]:
    """What the names in a function stand for, as far as they do by now."""
    function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType):
        return
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It is empty.
            yield cell.cell_contents
