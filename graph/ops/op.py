"""Properties of an op for the compiler, written above the op's function. An op that no graph holds has none.

    @Op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
    def prefetch(store, keys): ...

The checks of graphs (`oneemb.graph.spec`) and the executor read it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

Measure = Callable[[Any, Any], tuple[int, int]]
"""(rows, bytes) of a call, from its arguments and its result. Any: each op has arguments and a result of its own."""

# Stages of a graph's compilation at which an op is legal; oneemb.graph.spec says what they are.
LOOKUP = frozenset({"lowered", "lookup"})
PREPARE = frozenset({"lowered", "prepare"})


@dataclass(frozen=True)
class Op:
    """The description of an op; used as a decorator, it adds the op to `OPS`.

    Args:
        stages: at which it is legal.
        takes: what its leading arguments are: "store" (an object that the graph names); "keys", "lease" (given by an
            op that gives them); or a word for people.
        gives: "keys" or "lease", for ops that take them.
        measure: rows and bytes of a call, for statistics.
    """

    stages: frozenset[str]
    takes: tuple[str, ...] = ()
    gives: str | None = None
    measure: Measure | None = None

    def __call__(self, function: Function) -> Function:
        OPS[function] = self
        return function


OPS: dict[Callable[..., object], Op] = {}
"""Every op of graphs by its function."""
