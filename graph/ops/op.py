"""Properties of an op that the compiler needs: a decorator of the op's function. Ops that no graph holds have none.

    @Op(PREPARE, takes=("store", "keys"), measure=_measure_prefetch)
    def prefetch(store, keys): ...

Which ops are legal at each stage of a graph of lookups is checked after every pass:

    recorded  torch's functions of the batch, and calls of embedding modules
    lowered   ops in place of the calls of embedding modules
    prepare   the half of the lowered graph that may run ahead of its step, on any thread
    lookup    the half that runs in the step

A pass that breaks a rule is a bug of ours, so the check asserts.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

Function = TypeVar("Function", bound=Callable[..., object])

Measure = Callable[[Any, Any], tuple[int, int]]
"""Function of a call's arguments and result that returns (rows, bytes). Any: each op has its own types."""

LOOKUP = frozenset({"lowered", "lookup"})
PREPARE = frozenset({"lowered", "prepare"})


@dataclass(frozen=True)
class Op:
    """The description of an op; used as a decorator, it adds the op to `OPS`.

    Args:
        stages: stages at which the op is legal.
        takes: kinds of the op's first arguments: "store" (an object that the graph names), "keys" or "lease" (result of
            an op that `gives` this kind); any other word is only for readers.
        gives: kind of the result, "keys" or "lease"; None = no other op takes it as such.
        measure: function that returns rows and bytes of a call, for statistics.
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


def op_of(node: fx.Node) -> Op | None:
    """The op that a node calls; None = the node calls a function of torch, or is no call."""
    return OPS.get(node.target) if callable(node.target) else None


def reads_rows(node: fx.Node) -> bool:
    """Whether a node's op inserts, moves or reads rows, so that it stays in the step itself."""
    return (op := op_of(node)) is not None and op.stages == LOOKUP


def check_stage(graph: fx.Graph, stage: str, embeddings: Container[str]) -> None:
    """Assert that a graph is well-formed and keeps the rules of its stage."""
    graph.lint()
    for node in graph.nodes:
        if node.op == "call_module":
            assert stage == "recorded" and str(node.target) in embeddings, f"{node.format_node()}: a call at {stage}"
        if (op := op_of(node)) is not None:
            assert stage in op.stages, f"{node.format_node()}: not legal at stage {stage}"
            _check_arguments(node, op)


def _check_arguments(node: fx.Node, op: Op) -> None:
    for argument, what in zip(node.args, op.takes, strict=False):
        if what == "store":
            assert isinstance(argument, fx.Node) and argument.op == "get_attr", node.format_node()
        if what in ("keys", "lease"):
            assert isinstance(argument, fx.Node), f"{node.format_node()}: {argument} is no {what}"
            gives = (given := op_of(argument)) is not None and given.gives == what
            assert gives or argument.op == "placeholder", f"{node.format_node()}: {argument} is no {what}"
