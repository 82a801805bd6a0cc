"""What the compiler knows of an op, said beside the op's function.

    @op(LOOKUP, takes=("store", "keys"), gives="lease", measure=_measure_acquire)
    def acquire(store, keys): ...

The checks of graphs (`oneemb.graph.spec`), the executor and the recorder read it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["BUILD", "LOOKUP", "OPS", "PREPARE", "UPDATE", "Op", "op"]

F = TypeVar("F", bound=Callable[..., Any])

# Stages of a graph's compilation at which an op is legal; oneemb.graph.spec says what they are.
PREPARE = frozenset({"prepare"})
LOOKUP = frozenset({"lowered", "trained", "compute"})
BUILD = LOOKUP | {"traced"}
UPDATE = frozenset({"trained", "compute"})


@dataclass(frozen=True)
class Op:
    """One op.

    Args:
        stages: at which it is legal.
        takes: what its leading arguments are: "store", "optimizer" (objects that the graph names); "keys", "lease",
            "go" (given by an op that gives them); "leases" (a list of them); or a word for people.
        gives: "keys", "lease" or "go", for ops that take them.
        pure: whether all it does is give its value, so that it may be left out, moved or shared.
        checks: whether all it does is raise what is wrong with its arguments.
        context: "enter" or "exit", of a block of `build`.
        ends: which of its arguments are leases that it ends, or hands on to another step.
        commits: whether what it changes has to be changed as a whole.
        measure: (rows, bytes) from its arguments and what it gave.
    """

    stages: frozenset[str]
    takes: tuple[str, ...] = ()
    gives: str | None = None
    pure: bool = False
    checks: bool = False
    context: str | None = None
    ends: int | None = None
    commits: bool = False
    measure: Callable[[Any, Any], tuple[int, int]] | None = None


OPS: dict[Callable[..., Any], Op] = {}
"""Every op by its function."""


def op(stages: frozenset[str], **description: Any) -> Callable[[F], F]:
    """Describe an op; see `Op`."""

    def describe(function: F) -> F:
        OPS[function] = Op(stages, **description)
        return function

    return describe
