"""Runs a compiled graph, op by op.

An executor replaces the code that torch.fx generates, since it unpins rows after an error, and counts and times ops.

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
"""The values of a run; a value's place is its index. Any: ops take and return values of every type."""

_Get = Callable[[_Env], Sequence[Any]]
"""Function that returns some values of a run: an `itemgetter`, since in a graph of many small ops Python code would
spend as much time on arguments as on the ops."""

_Built = tuple[int, Callable[[Any], Any], _Get]
"""An argument that a run builds from several values, such as a list of results: (its place, function that builds it,
getter of the values)."""

Find = Callable[[str], Any]
"""Function that returns the object with a name in the graph. Any: objects have many classes."""


@dataclass
class _Step:
    label: str
    call: Callable[..., Any]
    built: Sequence[_Built]
    """Arguments that the run builds just before it calls the op."""
    args: _Get
    """Getter of the positional arguments."""
    names: tuple[str, ...]
    """Names of the keyword arguments."""
    named: _Get
    """Getter of the keyword arguments."""
    place: int
    """Place of the result."""
    dropped: tuple[int, ...]
    """Places of the values that nothing uses after this op."""
    measure: Measure | None
    stats: OpStats


class Executor:
    """A graph that can be called.

    Args:
        graph: the graph to run. Its inputs come in the order of the placeholders.
        find: returns the object that a `get_attr` node names; called at every run.
        half: the half of a step that this graph is, "prepare" or "compute"; a profile lists the ops under this name.
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
            built: list[_Built] = []
            args, named = layout.arguments(given, built), layout.arguments(node.kwargs.values(), built)
            dropped += tuple(place for place, *_ in built)
            measure = op.measure if (op := op_of(node)) is not None else None
            step = _Step(
                node_label(node), call, built, args, tuple(node.kwargs), named, places[node], dropped, measure,
                OpStats(),
            )  # fmt: skip
            self._steps.append(step)
        self._built: list[_Built] = []
        self._result = layout.arguments(output_of(graph).args[:1], self._built)
        self._initial = layout.initial

    def stats(self) -> list[tuple[str, OpStats]]:
        """(label, counts and times since compilation) of each op, in the order in which ops run."""
        return [(step.label, step.stats) for step in self._steps]

    def __call__(self, values: Sequence[Any], profile: Profile | None = None) -> Any:
        """Result of the graph for the inputs `values`. Each op is noted in `profile`, if given."""
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
            for place, make, get in step.built:
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
        for place, make, get in self._built:
            env[place] = make(get(env))
        return self._result(env)[0]


def _call_of(node: fx.Node, find: Find) -> tuple[Callable[..., Any], Sequence[object]]:
    """(function that a node calls, positional arguments)."""
    if node.op == "get_attr":
        return find, (str(node.target),)
    if node.op == "call_method":
        return functools.partial(_call_method, str(node.target)), node.args
    assert callable(node.target)
    return node.target, node.args


class _Layout:
    """Places of a run's values: results of nodes, constants, and arguments that are built from several values."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.place = {node: i for i, node in enumerate(nodes)}
        self.initial: _Env = [None] * len(self.place)
        """The values before the first op: constants, and None elsewhere."""

    def arguments(self, values: Iterable[object], built: list[_Built]) -> _Get:
        """Function that takes the values of a run (`_Env`) and returns the arguments `values` of an op, as a tuple or
        list. Arguments that the run must build before it calls this function are appended to `built`, in the order in
        which they must be built."""
        places = [self._place_of(value, built) for value in values]
        if len(places) > 1:
            return itemgetter(*places)
        return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))

    def _place_of(self, value: object, built: list[_Built]) -> int:
        """Place of an argument. If the run must build it, it is appended to `built`."""
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
        get = self.arguments(parts, built)
        place = self._new(None)
        built.append((place, make, get))
        return place

    def _new(self, value: object) -> int:
        self.initial.append(value)
        return len(self.initial) - 1


def _is_constant(value: object) -> bool:
    """Whether all runs may use the same object: it contains no node, list or dict."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    if isinstance(value, slice):
        return _is_constant((value.start, value.stop, value.step))
    return not isinstance(value, fx.Node | list | dict)


def _call_method(name: str, owner: object, *args: object, **kwargs: object) -> object:
    return getattr(owner, name)(*args, **kwargs)
