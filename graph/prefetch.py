"""Prepares coming batches on a thread while the loop computes.

    worker    load 0, prepare 0 | load 1, prepare 1 | load 2, prepare 2 | ...
    loop                        | compute 0         | compute 1         | ...

On a GPU the worker has a stream of its own (see streams.py), so that this holds there too.

Invariants:
- what a step gives does not depend on whether, or how far ahead, its batch was prepared;
- batch t + depth is loaded once the rows of batch t have been admitted, not before;
- an error of the loader, or of a preparation, is raised by the step whose batch it was, with its traceback;
- when `prefetch` is closed, which leaving a for loop does, nothing is pinned and the thread has ended.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from oneemb.graph.streams import Ahead, alone
from oneemb.storage.embedding_store import Staged
from oneemb.storage.merged_store import MergedStaged

__all__ = ["Prepared", "prefetch"]


@dataclass
class Prepared:
    """A batch, with what was made of it ahead of its step."""

    batch: Any
    plan: Any = None
    """What prepared it; None = it is not prepared."""
    values: list[Any] | None = None
    versions: list[tuple[int, int]] | None = None
    """What `Plan.buffer_versions` said when it was prepared."""
    error: BaseException | None = None
    last: bool = False
    mark: Any = None
    """When all of it is there, on a GPU."""

    def drop(self) -> None:
        """Unpin what was staged and never admitted."""
        for value in self.values or ():
            if isinstance(value, Staged | MergedStaged):
                store: Any = value.store
                store.unstage(value)
        self.values = None


class _Worker:
    """The thread, and the hand-over of batches."""

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Prepared], depth: int):
        self._batches: Iterable[Any] | None = batches
        self._prepare = prepare
        self._ready: deque[Prepared] = deque()
        self._changed = threading.Condition()
        self._permits = depth
        self._ahead = Ahead()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="oneemb-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._ahead.working():
            self._load()

    def _load(self) -> None:
        try:
            iterator = iter(self._batches or ())
            self._batches = None
            while self._wait_for_permit():
                with alone.working():
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        self._hand_over(Prepared(None, last=True))
                        return
                    prepared = self._prepare(batch)
                    prepared.mark = self._ahead.mark()
                self._hand_over(prepared)
        except BaseException as error:
            self._hand_over(Prepared(None, error=error))

    def _wait_for_permit(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._permits > 0 or self._closed)
            self._permits -= 1
            return not self._closed

    def _hand_over(self, prepared: Prepared) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append(prepared)
                self._changed.notify_all()
                return
        prepared.drop()

    def next(self) -> Prepared:
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            prepared = self._ready.popleft()
        self._ahead.take_over(prepared.mark, (prepared.batch, prepared.values))
        return prepared

    def admitted(self) -> None:
        """The rows of a batch are admitted: one more may be prepared."""
        with self._changed:
            self._permits += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._ready = list(self._ready), deque()
            self._changed.notify_all()
        for prepared in left:
            prepared.drop()
        if threading.current_thread() is not self._thread:  # The collector may close a forgotten loop on any thread.
            self._thread.join()


def prefetch(
    batches: Iterable[Any],
    prepare: Callable[[Any], Prepared],
    compute: Callable[[Prepared, Callable[[], None]], Any],
    depth: int,
) -> Generator[Any, None, None]:
    """What `compute` gives for each batch, the batches being loaded and prepared up to `depth` ahead on a thread.

    Args:
        compute: runs a step; it calls its second argument once its rows are admitted.
    """
    worker = _Worker(batches, prepare, depth)
    # From here on only the thread holds the loader's iterator.
    del batches
    try:
        while True:
            prepared = worker.next()
            if prepared.error is not None:
                raise prepared.error
            if prepared.last:
                return
            told = [False]

            def admitted(told: list[bool] = told) -> None:
                if not told[0]:
                    told[0] = True
                    worker.admitted()

            try:
                result = compute(prepared, admitted)
            finally:
                prepared.drop()
            admitted()
            del prepared
            yield result
            del result
    finally:
        worker.close()
