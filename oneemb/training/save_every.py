"""`SaveEvery`: saves of a graph that recur by steps, by time, or by the times of the data."""

import math
import pickle
import time
from collections.abc import Callable
from numbers import Real
from typing import Any

from oneemb.checkpoints.checkpoint import ranks_of_graph
from oneemb.checkpoints.checkpoint_snapshots import check_keep
from oneemb.checkpoints.state_bytes import hash_of
from oneemb.embeddings.embedding import embeddings_of
from oneemb.flags import check_flags
from oneemb.graph.ranks import together
from oneemb.storage.fs import AnyPath, file_path
from oneemb.training.train_graph import TrainGraph


class SaveEvery:
    """Saves a graph to one path again and again: a save is due when any of the given limits is reached.

        save = oneemb.SaveEvery(graph, "job.pt", steps=1000, seconds=60)
        for loss in graph.run(loader, save=save):
            ...

    In a loop without `graph.run`, call `save()` after each step, and `save.finish()` at the end. While micro-batches
    wait for their update, no call saves.

    With ranks (`process_group`), every rank makes an equal object and the same calls. The ranks compare limits of time
    together, seldom at first and more often near the limit, so a save may come some steps late.

    Args:
        graph: graph to save. Make this object after `graph.load`.
        path: path or URL of the checkpoint, as for `TrainGraph.save`.
        steps: save when `graph.steps` is a multiple of this number, so that a resumed job saves at the same steps.
        seconds: save so many seconds after the end of the last save.
        event_seconds: save when the data is so many seconds newer than at the last save.
        event_time: function of the argument of a call, which in `graph.run` is the result of `build`: time of the data
            that was trained last, in seconds. None = the argument is the time.
        delta, keep, keep_deltas: arguments of `TrainGraph.save`.

    Raises:
        TypeError: `graph` is no TrainGraph, `path` no path, or another argument is of a wrong type.
        ValueError: no limit is given, or one is not above 0; or `event_time` is given without `event_seconds`.

    Example:
        >>> import tempfile, torch, oneemb
        >>> class Graph(oneemb.TrainGraph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = oneemb.MultiTableEmbedding(
        ...             "rows", 8, torch.float32, torch.int64, [oneemb.make_table()],
        ...             oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        ...         self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))
        ...     def build(self, ids):
        ...         self.rows(ids).sum().backward()
        >>> graph = Graph()
        >>> save = oneemb.SaveEvery(graph, tempfile.mkdtemp() + "/job.pt", steps=3)
        >>> for batch in torch.arange(8).view(8, 1):
        ...     graph(batch)
        ...     print(graph.steps, save())
        1 False
        2 False
        3 True
        4 False
        5 False
        6 True
        7 False
        8 False
        >>> save.finish()
        True
    """

    def __init__(
        self,
        graph: TrainGraph,
        path: AnyPath,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        event_seconds: float | None = None,
        event_time: Callable[[Any], Any] | None = None,
        delta: bool = True,
        keep: int | None = 2,
        keep_deltas: bool = True,
    ):
        if not isinstance(graph, TrainGraph):
            raise TypeError(f"graph must be a TrainGraph, got {type(graph).__name__} {graph!r:.100}")
        limits = {"steps": steps, "seconds": seconds, "event_seconds": event_seconds}
        for name, limit in limits.items():
            _check_limit(name, limit, int if name == "steps" else Real)
        if all(limit is None for limit in limits.values()):
            raise ValueError("SaveEvery must have a limit, got none; give steps, seconds or event_seconds")
        if event_time is not None and event_seconds is None:
            raise ValueError("event_time must come with event_seconds, got None; give the seconds between two saves")
        if event_time is not None and not callable(event_time):
            got = f"{type(event_time).__name__} {event_time!r:.100}"
            raise TypeError(f"event_time must be a function of the result of build, or None, got {got}")
        check_flags(delta=delta, keep_deltas=keep_deltas)
        check_keep(keep)
        self.graph, self.path, self._ranks = graph, file_path(path, "the file to write"), ranks_of_graph(graph)
        self._steps, self._seconds, self._event_seconds, self._event_time = steps, seconds, event_seconds, event_time
        self._how: dict[str, Any] = {"delta": delta, "keep": keep, "keep_deltas": keep_deltas}
        self._newest: float | None = None
        """Time of the newest data; None = no call has had a time."""
        self._event_begin: float | None = None
        """Time of the newest data at the last save; before a save, time of the first data."""
        self._begin()

    def _begin(self) -> None:
        """Begin to count, after a save."""
        self._steps_begin = self._next_look = self.graph.steps
        self._state_begin, self._event_begin, self._time_begin = self.graph.loader_state, self._newest, time.monotonic()

    def __call__(self, result: Any = None) -> bool:
        """Save if a save is due. Returns whether it has saved.

        Args:
            result: argument of `event_time`.
        """
        graph = self.graph
        if graph.steps < self._steps_begin:  # An older checkpoint was loaded.
            self._newest = None
            self._begin()
            self._steps_begin -= 1
        if graph.waiting_batches:
            return False
        by_time = self._seconds is not None or self._event_seconds is not None
        if self._ranks.alone or not by_time:
            progress = self._progress(result)
        elif graph.steps < self._next_look:
            return False
        else:
            progress = max(self._of_all(lambda: self._progress(result)))
        if progress >= 1:
            self._save()
            return True
        made = graph.steps - self._steps_begin
        left = int(made * (1 - progress) / progress / 2) if progress > 0 else 0
        self._next_look = graph.steps + max(1, min(made, left))
        return False

    def finish(self) -> bool:
        """Save if there was a step since the last save, or the loader has another state. Returns whether it has saved.
        `graph.run` calls this method at the end of the loader."""
        graph = self.graph
        if graph.waiting_batches:
            return False
        changed = any(self._of_all(self._has_changed))
        if changed:
            self._save()
        return changed

    def _has_changed(self) -> bool:
        """Whether the graph has made a step, or its loader another state, since the last save."""
        before, now = self._state_begin, self.graph.loader_state
        if self.graph.steps != self._steps_begin or now is before:
            return self.graph.steps != self._steps_begin
        try:
            return hash_of(now) != hash_of(before)
        except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError):
            return False  # A checkpoint cannot hold the state.

    def _save(self) -> None:
        self.graph.save(self.path, **self._how)
        self._begin()

    def _of_all(self, mine: Callable[[], Any]) -> list[Any]:
        """Results of `mine` on all ranks."""
        ranks, what = self._ranks, f"look whether a save to {self.path!r} is due"
        stores = [embedding.store for embedding in embeddings_of(self.graph).values()]
        return together(ranks, stores, "save", what, lambda: ranks.all_gather(what, mine))

    def _progress(self, result: Any) -> float:
        """Progress to the next save, by the limit that comes first: 0 = just saved, 1 or more = a save is due."""
        now, shares = self.graph.steps, [0.0]
        if self._steps is not None and now > self._steps_begin:
            due = (self._steps_begin // self._steps + 1) * self._steps
            shares.append((now - self._steps_begin) / (due - self._steps_begin))
        if self._seconds is not None:
            shares.append((time.monotonic() - self._time_begin) / self._seconds)
        if self._event_seconds is not None:
            at = float(result if self._event_time is None else self._event_time(result))
            if not math.isfinite(at):
                raise ValueError(f"event_time must give a finite number of seconds, got {at}; leave such data out")
            self._newest = at if self._newest is None else max(at, self._newest)
            self._event_begin = self._newest if self._event_begin is None else self._event_begin
            shares.append((self._newest - self._event_begin) / self._event_seconds)
        return max(shares)


def _check_limit(name: str, limit: object, kind: type) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, kind):
        words = "an int" if kind is int else "a number"
        raise TypeError(f"{name} must be {words} above 0, or None, got {type(limit).__name__} {limit!r:.100}")
    if not 0 < limit < float("inf"):  # type: ignore[operator]
        raise ValueError(f"{name} must be above 0 and finite, or None, got {limit}")
