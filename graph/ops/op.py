"""What the compiler knows of an op, written above the op's function.

    @Op(LOOKUP, takes=("store", "keys"), gives="lease", measure=_measure_acquire)
    def acquire(store, keys): ...

The checks of graphs (`oneemb.graph.spec`), the executor and the recorder read it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["BUILD", "LOOKUP", "OPS", "PREPARE", "UPDATE", "Measure", "Op"]

Function = TypeVar("Function", bound=Callable[..., object])

Measure = Callable[[Any, Any], tuple[int, int]]
"""(rows, bytes) of a call, from its arguments and its result. Any: each op has arguments and a result of its own."""

# Stages of a graph's compilation at which an op is legal; oneemb.graph.spec says what they are.
PREPARE = frozenset({"prepare"})
LOOKUP = frozenset({"lowered", "trained", "compute"})
BUILD = LOOKUP | {"traced"}
UPDATE = frozenset({"trained", "compute"})


@dataclass(frozen=True)
class Op:
    """The description of an op; used as a decorator, it adds the op to `OPS`.

    Args:
        stages: at which it is legal.
        takes: what its leading arguments are: "store", "optimizer" (objects that the graph names); "keys", "lease",
            "go" (given by an op that gives them); "leases" (a list of them); or a word for people.
        gives: "keys", "lease" or "go", for ops that take them.
        pure: whether all it does is compute its result, so that it may be left out, moved or shared.
        checks: whether all it does is raise what is wrong with its arguments.
        context: "enter" or "exit", of a block of `build`.
        ends: which of its arguments is a list of leases that it releases or keeps for another step.
        commits: whether what it changes has to be changed as a whole.
        measure: rows and bytes of a call, for statistics.
    """

    stages: frozenset[str]
    takes: tuple[str, ...] = ()
    gives: str | None = None
    pure: bool = False
    checks: bool = False
    context: str | None = None
    ends: int | None = None
    commits: bool = False
    measure: Measure | None = None

    def __call__(self, function: Function) -> Function:
        OPS[function] = self
        return function


OPS: dict[Callable[..., object], Op] = {}
"""Every op by its function."""
