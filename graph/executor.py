"""Runs a compiled graph, op by op.

It takes the place of the code that torch.fx generates: after an error it unpins the rows that it holds, and it counts
and times each op.

Invariants: a run that raises leaves nothing pinned; a value is dropped after its last use.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from oneemb.graph import ops
from oneemb.graph.ops import OPS
from oneemb.graph.ops.op import Measure
from oneemb.graph.passes import output_of
from oneemb.graph.recorder import OpStats, Profile
from oneemb.graph.text import node_label
from oneemb.storage.locking.turns import undisturbed

__all__ = ["Executor", "Find"]

_Env = list[Any]
"""The values of a run, each at its node's place. Any: ops take and give values of every kind."""

Find = Callable[[str], Any]
"""Gives the object that a node names, of whatever class."""


@dataclass
class _Step:
    label: str
    call: Callable[[_Env], Any]
    place: int
    dropped: tuple[int, ...]
    measured: tuple[Measure, Callable[[_Env], Any]] | None
    """How to measure the op, and how to make the arguments for that."""
    stats: OpStats


class Executor:
    """A graph that can be called.

    Args:
        graph: what to run; its inputs are given in the order of its placeholders.
        find: the object that a `get_attr` node names, asked at every run.
        half: "prepare" or "compute": the row of profiles in which its ops are shown.
    """

    def __init__(self, graph: fx.Graph, find: Find, half: str = "compute"):
        self.graph = graph
        self.half = half
        places: dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        last_use: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for used in node.all_input_nodes:
                last_use[used] = node
        self._inputs = [places[node] for node in graph.nodes if node.op == "placeholder"]
        self._steps: list[_Step] = []
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            dropped = tuple(places[used] for used in node.all_input_nodes if last_use[used] is node)
            dropped += () if node.users else (places[node],)
            op = OPS.get(node.target) if node.op == "call_function" else None
            measured = None
            if op is not None and op.measure is not None:
                measured = op.measure, _value_of(node.args, places)
            call = _call_of(node, places, find)
            self._steps.append(_Step(node_label(node), call, places[node], dropped, measured, OpStats()))
        self._result = _value_of(output_of(graph).args[0], places)
        self._size = len(places)

    def stats(self) -> list[tuple[str, OpStats]]:
        """Each op with its counts and times since it was compiled, in the order they run."""
        return [(step.label, step.stats) for step in self._steps]

    def __call__(self, values: Sequence[Any], profile: Profile | None = None) -> Any:
        """Run the graph.

        Args:
            values: its inputs.
            profile: where to note each op.

        Returns:
            What the graph returns.
        """
        env: _Env = [None] * self._size
        for place, value in zip(self._inputs, values, strict=True):
            env[place] = value
        reserved: list[ops.Reserved | ops.MergedReserved] = []
        try:
            return self._run(env, reserved, profile)
        except BaseException:
            with undisturbed:
                ops.unprefetch(env)
                for lookup in reserved:
                    lookup.drop()
            raise

    def _run(self, env: _Env, reserved: list[ops.Reserved | ops.MergedReserved], profile: Profile | None) -> Any:
        for step in self._steps:
            begin = time.perf_counter_ns()
            result = step.call(env)
            end = time.perf_counter_ns()
            if isinstance(result, ops.Reserved | ops.MergedReserved):
                reserved.append(result)
            rows = size = 0
            if step.measured is not None:
                measure, args = step.measured
                rows, size = measure(args(env), result)
            stats = step.stats
            stats.calls += 1
            stats.ns += end - begin
            stats.rows += rows
            stats.bytes += size
            if profile is not None:
                profile.note(self.half, step.label, begin, end)
            env[step.place] = result
            for place in step.dropped:
                env[place] = None
        return self._result(env)


def _call_of(node: fx.Node, places: dict[fx.Node, int], find: Find) -> Callable[[_Env], Any]:
    target = node.target
    if node.op == "get_attr":
        name = str(target)
        return lambda env: find(name)
    constants: list[object] = []
    args = [_expression(argument, places, constants) for argument in node.args]
    args += [f"**{_expression(node.kwargs, places, constants)}"] if node.kwargs else []
    if node.op == "call_method":
        return _compiled(f"getattr({args[0]}, target)({', '.join(args[1:])})", constants, target=target)
    return _compiled(f"target({', '.join(args)})", constants, target=target)


def _value_of(argument: object, places: dict[fx.Node, int]) -> Callable[[_Env], Any]:
    """How to make an argument of a node, nested as it may be, from the values there are."""
    constants: list[object] = []
    return _compiled(_expression(argument, places, constants), constants)


def _compiled(expression: str, constants: list[object], **names: object) -> Callable[[_Env], Any]:
    # As code, since a graph of many small ops would spend as long on their arguments as on the ops.
    return eval(f"lambda env: {expression}", {"constant": constants, **names})


def _expression(argument: object, places: dict[fx.Node, int], constants: list[object]) -> str:
    """An argument as Python: `env` holds the values there are, `constant` what is the same in every run."""

    def text(value: object) -> str:
        return _expression(value, places, constants)

    if isinstance(argument, fx.Node):
        return f"env[{places[argument]}]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{text(key)}: {text(value)}" for key, value in argument.items()) + "}"
    if isinstance(argument, tuple | list):
        inside = "".join(f"{text(element)}, " for element in argument)
        if hasattr(argument, "_fields"):
            return f"{text(type(argument))}({inside})"
        return f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
    if isinstance(argument, slice):
        return f"slice({text(argument.start)}, {text(argument.stop)}, {text(argument.step)})"
    if argument is None or type(argument) in (bool, int):
        return f"({argument!r})"
    constants.append(argument)
    return f"constant[{len(constants) - 1}]"
