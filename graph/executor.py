"""Runs a compiled graph, op by op.

It takes the place of the code that torch.fx generates. After an error it leaves the contexts that the graph entered,
releases the rows that it holds and says which line of `build` the error belongs to. It counts and times each op.

Invariants: a run that raises leaves nothing pinned and no context entered; a value is dropped after its last use.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from oneemb.graph import ops
from oneemb.graph.ops import OPS
from oneemb.graph.ops.op import Measure
from oneemb.graph.passes import output_of
from oneemb.graph.recorder import OpStats, Profile
from oneemb.storage.turns import undisturbed

__all__ = ["Executor", "Find"]

_Env = list[Any]
"""The values of a run, each at its node's place. Any: ops take and give values of every kind."""

Find = Callable[[str], Any]
"""Gives the object that a node names, of whatever class."""


@dataclass
class _Step:
    node: fx.Node
    call: Callable[[_Env], Any]
    place: int
    dropped: tuple[int, ...]
    measured: tuple[Measure, Callable[[_Env], Any]] | None
    """How to measure the op, and how to make the arguments for that."""
    stats: OpStats
    context: str | None
    """"enter" or "exit" """
    commits: bool
    """Whether the op changes what has to be changed as a whole."""


class Executor:
    """A graph that can be called.

    Args:
        graph: what to run; its inputs are given in the order of its placeholders.
        find: the object that a `get_attr` or `call_module` node names, asked at every run.
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
            context = op.context if op is not None else None
            commits = op is not None and op.commits
            self._steps.append(_Step(node, call, places[node], dropped, measured, OpStats(), context, commits))
        self._result = _value_of(output_of(graph).args[0], places)
        self._size = len(places)
        prefetched = [i for i, step in enumerate(self._steps) if "prefetched" in step.node.kwargs]
        self._acquired = prefetched[-1] if prefetched else -1
        self._commits = next((i for i, step in enumerate(self._steps) if step.commits), -1)

    def stats(self) -> list[tuple[fx.Node, OpStats]]:
        """Each op with its counts and times since it was compiled, in the order they run."""
        return [(step.node, step.stats) for step in self._steps if step.node.op != "get_attr"]

    def __call__(
        self, values: Sequence[Any], on_acquired: Callable[[], None] | None = None, profile: Profile | None = None,
        committing: ExitStack | None = None,
    ) -> Any:  # fmt: skip
        """Run the graph.

        Args:
            values: its inputs.
            on_acquired: called when the rows that were prefetched for this run have been taken over.
            profile: where to note each op.
            committing: holds signals back from the first op that changes parameters or rows on, until it is closed.

        Returns:
            What the graph returns.
        """
        env: _Env = [None] * self._size
        for place, value in zip(self._inputs, values, strict=True):
            env[place] = value
        begun = _Begun(env, torch.is_grad_enabled())
        try:
            try:
                return self._run(env, begun, on_acquired, profile, committing)
            except BaseException as error:
                begun.clean_up(error)
                if begun.step is not None:
                    _add_line(error, begun.step.node)
                raise
        except BaseException as error:
            begun.clean_up(error)  # An interrupt may have come before the first time.
            raise

    def _run(
        self, env: _Env, begun: "_Begun", on_acquired: Callable[[], None] | None, profile: Profile | None,
        committing: ExitStack | None,
    ) -> Any:  # fmt: skip
        if on_acquired is not None and self._acquired < 0:
            on_acquired()
        for i, step in enumerate(self._steps):
            begun.step = step
            if i == self._commits and committing is not None:
                committing.enter_context(undisturbed)
                begun.committing = True
            node, stats = step.node, step.stats
            begin = time.perf_counter_ns()
            if step.context is None:
                result = step.call(env)
            else:
                with undisturbed:
                    result = step.call(env)
                    if step.context == "enter":
                        begun.contexts.append(result)
                    else:
                        begun.contexts.pop()
            end = time.perf_counter_ns()
            stats.calls += 1
            stats.ns += end - begin
            if isinstance(result, ops.Lease | ops.MergedLease):
                begun.leases.append(result)
            if step.measured is not None:
                measure, args = step.measured
                rows, size = measure(args(env), result)
                stats.rows += rows
                stats.bytes += size
            if profile is not None:
                profile.note(self.half, node, begin, end)
            env[step.place] = result
            for place in step.dropped:
                env[place] = None
            if i == self._acquired and on_acquired is not None:
                on_acquired()
        result = self._result(env)
        torch.set_grad_enabled(begun.grad_enabled)
        return result


class _Begun:
    """What a run has entered and acquired so far, to be undone if it fails."""

    def __init__(self, env: _Env, grad_enabled: bool):
        self.env, self.grad_enabled = env, grad_enabled
        self.contexts: list[AbstractContextManager[object]] = []
        self.leases: list[ops.Lease | ops.MergedLease] = []
        self.step: _Step | None = None
        self.committing = False

    def clean_up(self, error: BaseException) -> None:
        with undisturbed:
            if self.committing and not isinstance(error, Exception):  # It was not held back, so it may be anywhere.
                for lease in self.leases:
                    for store in lease.store.members:
                        store.turns.note(error)
            while self.contexts:
                self.contexts.pop().__exit__(None, None, None)
            torch.set_grad_enabled(self.grad_enabled)
            ops.unprefetch(self.env)
            ops.release(self.leases)


def _add_line(error: BaseException, node: fx.Node) -> None:
    """Say which line of `build` an error belongs to."""
    lines = node.meta.get("lines", {})  # of an op that stands for several, by what its errors say they are of
    line = lines.get(getattr(error, "first_table", None), node.meta.get("line", ""))
    if line:
        ops.add_note(error, f"in build{line}")


def _call_of(node: fx.Node, places: dict[fx.Node, int], find: Find) -> Callable[[_Env], Any]:
    target = node.target
    if node.op == "get_attr":
        name = str(target)
        return lambda env: find(name)
    constants: list[object] = []
    args = [_expression(argument, places, constants) for argument in node.args]
    args += [f"**{_expression(node.kwargs, places, constants)}"] if node.kwargs else []
    if node.op == "call_module":
        return _compiled(f"find(target)({', '.join(args)})", constants, find=find, target=target)
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
