"""Runs a compiled graph, op by op.

It takes the place of the code that torch.fx generates: after an error it unpins the rows that it holds, and it counts
and times each op.

Invariants: a run that raises leaves nothing pinned; a value is dropped after its last use.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import fx

from oneemb.graph import ops
from oneemb.graph.ops.op import Measure, op_of
from oneemb.graph.passes import output_of
from oneemb.graph.recorder import OpStats, Profile
from oneemb.graph.text import node_label
from oneemb.storage.locking.signals_deferred import signals_deferred

_Env = list[Any]
"""The values of a run, each at its place. Any: ops take and give values of every kind."""

_Get = Callable[[_Env], Sequence[Any]]
"""Gets some of them: C code, since a graph of many small ops would spend as long on their arguments as on the ops."""

_Made = tuple[int, Callable[[Any], Any], _Get]
"""Place of an argument that is made of several values, the function that makes it, and the getter of the values."""

Find = Callable[[str], Any]
"""Gives the object that a node names, of whatever class."""


@dataclass
class _Step:
    label: str
    call: Callable[..., Any]
    made: Sequence[_Made]
    args: _Get
    names: tuple[str, ...]
    """Names of the arguments that are given by name."""
    named: _Get
    place: int
    dropped: tuple[int, ...]
    measure: Measure | None
    stats: OpStats


class Executor:
    """A graph that can be called.

    Args:
        graph: run with inputs in the order of its placeholders.
        find: the object that a `get_attr` node names, asked at every run.
        half: "prepare" or "compute": the row of profiles in which its ops are shown.
    """

    def __init__(self, graph: fx.Graph, find: Find, half: str = "compute"):
        self.graph = graph
        self.half = half
        layout = _Layout(graph.nodes)
        places = layout.place
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
            call, given = _call_of(node, find)
            made: list[_Made] = []
            args, named = layout.arguments(given, made), layout.arguments(node.kwargs.values(), made)
            dropped += tuple(place for place, *_ in made)
            measure = op.measure if (op := op_of(node)) is not None else None
            step = _Step(
                node_label(node), call, made, args, tuple(node.kwargs), named, places[node], dropped, measure, OpStats()
            )
            self._steps.append(step)
        self._made: list[_Made] = []
        self._result = layout.arguments(output_of(graph).args[:1], self._made)
        self._initial = layout.initial

    def stats(self) -> list[tuple[str, OpStats]]:
        """Each op with its counts and times since it was compiled, in the order they run."""
        return [(step.label, step.stats) for step in self._steps]

    def __call__(self, values: Sequence[Any], profile: Profile | None = None) -> Any:
        """Result of the graph for these inputs; each op is noted in `profile`."""
        env = self._initial.copy()
        for place, value in zip(self._inputs, values, strict=True):
            env[place] = value
        reserved: list[ops.Reserved | ops.MergedReserved] = []
        try:
            return self._run(env, reserved, profile)
        except BaseException:
            with signals_deferred:
                ops.unprefetch(env)
                for lookup in reserved:
                    lookup.drop()
            raise

    def _run(self, env: _Env, reserved: list[ops.Reserved | ops.MergedReserved], profile: Profile | None) -> Any:
        for step in self._steps:
            begin = time.perf_counter_ns()
            for place, make, get in step.made:
                env[place] = make(get(env))
            args = step.args(env)
            if step.names:
                result = step.call(*args, **dict(zip(step.names, step.named(env), strict=True)))
            else:
                result = step.call(*args)
            end = time.perf_counter_ns()
            if isinstance(result, ops.Reserved | ops.MergedReserved):
                reserved.append(result)
            rows = size = 0
            if step.measure is not None:
                rows, size = step.measure(args, result)
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
        for place, make, get in self._made:
            env[place] = make(get(env))
        return self._result(env)[0]


def _call_of(node: fx.Node, find: Find) -> tuple[Callable[..., Any], Sequence[object]]:
    """The function that a node calls, and the arguments that are given by position."""
    if node.op == "get_attr":
        return find, (str(node.target),)
    if node.op == "call_method":
        return functools.partial(_call_method, str(node.target)), node.args
    assert callable(node.target)
    return node.target, node.args


class _Layout:
    """Places of a run's values: of nodes, of constants, and of arguments that are made of several values."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.place = {node: i for i, node in enumerate(nodes)}
        self.initial: _Env = [None] * len(self.place)
        """The values before the first op: the constants."""

    def arguments(self, values: Iterable[object], made: list[_Made]) -> _Get:
        """Function that gets these arguments, as a tuple or list, once those in `made` are made, to which it adds."""
        places = [self._place_of(value, made) for value in values]
        if len(places) > 1:
            return itemgetter(*places)
        return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))

    def _place_of(self, value: object, made: list[_Made]) -> int:
        if isinstance(value, fx.Node):
            return self.place[value]
        if _is_constant(value):
            return self._new(value)
        make: Callable[[Any], object]
        if isinstance(value, dict):
            names = tuple(value)
            parts, make = list(value.values()), lambda values: dict(zip(names, values, strict=True))
        elif isinstance(value, slice):
            parts, make = [value.start, value.stop, value.step], lambda values: slice(*values)
        elif isinstance(value, tuple):
            parts, make = list(value), getattr(type(value), "_make", tuple)
        else:
            assert isinstance(value, list)
            parts, make = value, list
        get = self.arguments(parts, made)
        place = self._new(None)
        made.append((place, make, get))
        return place

    def _new(self, value: object) -> int:
        self.initial.append(value)
        return len(self.initial) - 1


def _is_constant(value: object) -> bool:
    """Whether the same object may serve every run: it has no node in it, and cannot be changed."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    if isinstance(value, slice):
        return _is_constant((value.start, value.stop, value.step))
    return not isinstance(value, fx.Node | list | dict)


def _call_method(name: str, owner: object, *args: object, **kwargs: object) -> object:
    return getattr(owner, name)(*args, **kwargs)
