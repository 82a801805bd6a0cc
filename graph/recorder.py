"""Counts and times of ops: the table that `explain` shows, and the Chrome trace of `profile`.

Bytes of an op are the rows and gradients that it must read and write, without savings of a cache and costs of a disk.
Times are elapsed times on the thread that ran the op.
"""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from oneemb.graph.ops.op import Measure
from oneemb.graph.shown import aligned, html_of_text
from oneemb.storage.fs import AnyPath, file_path

Result = TypeVar("Result")

_now_ns = time.perf_counter_ns


@dataclass
class OpStats:
    """Counters of one op since it was compiled."""

    calls: int = 0
    ns: int = 0
    rows: int = 0
    """Number of ids looked up, or of unique rows acquired, reduced or updated."""
    bytes: int = 0


def stats_table(halves: Iterable[tuple[str, Iterable[tuple[str, OpStats]]]]) -> str:
    """Text of a table with one line for each op that was called. `halves`: (name of a half, (label, counts) of its
    ops)."""
    lines = []
    total_ns = 0
    for half, stats in halves:
        for label, op in stats:
            if op.calls:
                lines.append((half, label, op))
                total_ns += op.ns
    table = [("half", "op", "calls", "rows", "MB", "ms a call", "share", "GB/s")]
    for half, label, op in lines:
        rate = f"{op.bytes / op.ns:.2f}" if op.bytes and op.ns else ""
        table.append(
            (
                half,
                _short(label),
                str(op.calls),
                f"{op.rows:,}" if op.rows else "",
                f"{op.bytes / 1e6:,.1f}" if op.bytes else "",
                f"{op.ns / op.calls / 1e6:.3f}",
                f"{op.ns / max(1, total_ns):.1%}",
                rate,
            )
        )
    return aligned(table, 2)


_PARTS = {
    "lookup": "lookup", "build": "dense", "unscale": "dense", "clip_grad_norm_": "dense", "update_scale": "dense",
    "advance": "dense", "step": "dense", "reduce_to_owners": "update", "reduce_grads": "update",
    "check_finite": "update", "update": "update",
}  # fmt: skip
"""Part of a step that an op of `StepStats` belongs to, by the op's name."""


def parts_of(stats: "StepStats", lookups: Iterable[OpStats]) -> dict[str, int]:
    """Nanoseconds in each part of the steps: "lookup", "dense" (`build`, with backward, and the step of dense
    parameters), "update" (of rows, with the sums of their gradients) and "wait" (for a loop's thread, which loads and
    prepares batches).

    Args:
        lookups: ops of the lookups that are made in steps, ahead of `build`.
    """
    parts = {"lookup": sum(op.ns for op in lookups), "dense": 0, "update": 0, "wait": stats.waited_ns}
    for label, op in stats.stats():
        parts[_PARTS[label.partition("(")[0]]] += op.ns
    return parts


def parts_table(parts: dict[str, int], steps: int) -> str:
    """Table of the parts of steps, for people: a line each."""
    whole = max(1, sum(parts.values()))
    table = [("part", "ms a step", "share")]
    table += [(part, f"{ns / max(1, steps) / 1e6:.3f}", f"{ns / whole:.1%}") for part, ns in parts.items()]
    return aligned(table)


def _short(label: str) -> str:
    return label if len(label) <= 60 else label[:57] + "..."


@dataclass
class Profile:
    """The ops of some steps, with the times at which each op began and ended.

    Args:
        steps: number of steps to note.
    """

    steps: int
    events: list[tuple[str, str, int, int, int]] = field(default_factory=list, repr=False)
    """(half, op, step, begin_ns, end_ns) of each op. The single lookup of a plan lies within `build`."""
    step: int = 0
    """Number of steps noted so far."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether all steps are noted."""
        return self.step >= self.steps

    def note(self, half: str, op: str, begin_ns: int, end_ns: int) -> None:
        """Note one op."""
        with self._lock:
            self.events.append((half, op, self.step, begin_ns, end_ns))

    def _repr_html_(self) -> str:
        return html_of_text(str(self))

    def __str__(self) -> str:
        """Text of a table with one line for each op, in the order of their first runs."""
        with self._lock:
            events = list(self.events)
        if not events:
            return (
                f"0 of {self.steps} steps noted: call the graph, or loop over graph.run(loader), after"
                f" graph.profile({self.steps}), and print then"
            )
        ns: dict[tuple[str, str], list[int]] = {}
        for half, name, step, begin, end in events:
            inside = sum(
                other_end - other_begin
                for other_half, _, other_step, other_begin, other_end in events
                if (other_half, other_step) == (half, step) and begin <= other_begin and other_end <= end
            )
            ns.setdefault((half, name), []).append(2 * (end - begin) - inside)  # `inside` includes the event itself.
        total = sum(map(sum, ns.values()))
        rows = [("half", "op", "calls", "ms a call", "ms at most", "share")]
        for (half, name), times in ns.items():
            mean, most = sum(times) / len(times) / 1e6, max(times) / 1e6
            rows.append(
                (half, _short(name), str(len(times)), f"{mean:.3f}", f"{most:.3f}", f"{sum(times) / total:.1%}")
            )
        return f"{self.step} of {self.steps} steps noted\n{aligned(rows, 2)}"

    def save(self, path: AnyPath) -> None:
        """Write a Chrome trace: open it in ui.perfetto.dev or chrome://tracing. Prepare and compute are two rows.

        Raises:
            TypeError: `path` is no path.
        """
        path = file_path(path, "the file to write")
        rows = {"compute": 0, "prepare": 1}
        process = os.getpid()
        named = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": half}}
            for half, row in rows.items()
        ]
        began = min((event[3] for event in self.events), default=0)
        events = [
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": rows[half],
                "ts": (begin - began) / 1e3,
                "dur": (end - begin) / 1e3,
                "args": {"step": step},
            }
            for half, name, step, begin, end in self.events
        ]
        with open(path, "w") as file:
            json.dump({"traceEvents": named + events, "displayTimeUnit": "ms"}, file)


class StepStats:
    """Counts and times of the parts of a step outside its graphs: `build`, and the ops of the update."""

    def __init__(self) -> None:
        self.profile: Profile | None = None
        """Profile in which each op is noted too; None = no profile."""
        self.waited_ns = 0
        """Nanoseconds in which loops waited for a batch from their thread."""
        self._stats: defaultdict[str, OpStats] = defaultdict(OpStats)

    def call(
        self, label: str, function: Callable[..., Result], /, *args: object, measure: Measure | None = None,
        **kwargs: object,
    ) -> Result:  # fmt: skip
        """Result of `function`, whose counts and times are added under `label`."""
        begin = _now_ns()
        result = function(*args, **kwargs)
        end = _now_ns()
        counted = self._stats[label]
        counted.calls += 1
        counted.ns += end - begin
        if measure is not None:
            rows, size = measure(args, result)
            counted.rows += rows
            counted.bytes += size
        if self.profile is not None:
            self.profile.note("compute", label, begin, end)
        return result

    def waited(self, ns: int) -> None:
        """Count a wait of a loop for its thread."""
        self.waited_ns += ns

    @property
    def steps(self) -> int:
        """Number of calls of `build`."""
        return self._stats["build"].calls if "build" in self._stats else 0

    def stats(self) -> list[tuple[str, OpStats]]:
        """(label, counts and times) of each op, in the order in which the ops first ended. The time of a lookup within
        `build` is not part of the time of `build`."""
        found = {label: replace(counted) for label, counted in list(self._stats.items())}
        if "build" in found and "lookup" in found:
            found["build"].ns = max(0, found["build"].ns - found["lookup"].ns)
        return list(found.items())


class _Uncounted(StepStats):
    """Calls ops without counting or timing them."""

    def call(
        self, label: str, function: Callable[..., Result], /, *args: object, measure: Measure | None = None,
        **kwargs: object,
    ) -> Result:  # fmt: skip
        """Result of `function`."""
        return function(*args, **kwargs)


UNCOUNTED = _Uncounted()
