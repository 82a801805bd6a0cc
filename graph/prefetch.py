"""Prepares coming batches on a thread while the loop computes.

    worker    load 0, prepare 0 | load 1, prepare 1 | load 2, prepare 2 | ...
    loop                        | compute 0         | compute 1         | ...

A second thread may read further batches for their ids alone (read_ahead.py). On a GPU the worker has a stream of its
own (streams.py), so that preparing and computing overlap there too.

Invariants:
- the result of a step does not depend on whether, or how far ahead, its batch was prepared;
- batch t + depth is taken from the loader after the rows of batch t have been acquired, not before, unless a thread
  reads ahead;
- an error of the loader, or of a preparation, is raised at the step of the same batch, with its traceback;
- when `prefetch` is closed, as by leaving a for loop, no row is pinned and the thread has ended; if the loader is
  stuck, the thread ends when the loader returns;
- the thread unpins rows that were prefetched but never acquired as its last act.
"""

import math
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from oneemb.graph import ops
from oneemb.graph.loaders import LoaderPosition
from oneemb.graph.plan import LookupPlan
from oneemb.graph.read_ahead import ReadAhead
from oneemb.graph.streams import Ahead, Mark, capture_gate
from oneemb.kernels.threads import start, within_thread_code
from oneemb.storage.coming_batches import ComingBatches

# Seconds that closing a loop waits for its loader. The wait has a limit since the loader may wait for the closing
# thread: the garbage collector closes a forgotten loop on any thread, whatever locks that thread holds.
_PATIENCE_S = 30.0
# Longest delay of a signal while its thread waits for a batch, in seconds.
_SLICE_S = 0.1


Batch = TypeVar("Batch")
Result = TypeVar("Result")

Follow = Callable[[object], None]
"""See `Ahead.follow`."""


@dataclass
class Prepared:
    """A batch, with the values that were computed from it ahead of its step."""

    batch: Any
    """Batch for `compute`, as `prepare` has made it from the loader's batch."""
    plan: LookupPlan | None = None
    """Plan by which the batch was prepared; None = not prepared."""
    values: Sequence[Any] | None = None
    """Results of the first half of the plan."""
    versions: list[tuple[int, int]] | None = None
    """Result of `LookupPlan.versions` when the batch was prepared."""
    found: Sequence[Any] | None = None
    """Keys of the batch, results of `LookupPlan.find_keys`, if they were found before the batch was prepared."""
    coming: Sequence[tuple[ComingBatches, int]] = ()
    """Number of the batch in each store that was told its keys."""
    announced: ops.Announced = ops.NOTHING_ANNOUNCED
    """The lookups of the batch that ranks have announced."""
    position: LoaderPosition | None = None
    """Position of the loop that read the batch; None = the batch came from a call, not from a loop."""
    error: BaseException | None = None
    """Error of the loader or of the preparation, in place of a batch."""
    last: bool = False
    """Whether the loader has ended: there is no batch."""
    mark: Mark = field(default_factory=list)
    """Events after which batch and values are complete, on GPUs."""

    def trained(self, updated: bool = True) -> None:
        """Note that the call for the batch is made; see `LoaderPosition.trained`."""
        if self.position is not None:
            self.position.trained(updated)

    def reach(self) -> None:
        """Tell the stores that the rows of the batch are acquired."""
        for part, number in self.coming:
            part.reach(number)
        self.coming = ()

    def drop(self) -> None:
        """Unpin the rows that were prefetched but not acquired."""
        ops.unprefetch(self.values or ())
        self.announced.drop()
        self.values = None


class PrefetchWorker(Generic[Batch]):
    """The thread that prepares batches, and the hand-over of batches to the loop.

    An interrupt may come at any line of the loop's thread, and the garbage collector may close a loop on any thread, in
    the middle of any call. So queues only signal, and hold no batch: a batch is in `made` from the end of its
    preparation until its step is over, or until the thread has dropped it.
    """

    def __init__(
        self, batches: Iterable[Batch], prepare: Callable[[Batch, Follow], Prepared], depth: int,
        devices: Iterable[torch.device], at_end: Callable[[], object], stop: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self._at_end, self._stop = at_end, stop
        self._batches: list[Iterable[Batch]] = [batches]  # empty once the thread iterates over the batches
        self._reader = batches if isinstance(batches, ReadAhead) else None
        self._prepare = prepare
        self.made: deque[Prepared] = deque()
        self._ready: SimpleQueue[None] = SimpleQueue()  # one element for each batch in `made` that the loop has to take
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._permits.put(None)
        self._ahead = Ahead(devices)
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._patience_s = _PATIENCE_S
        self._closed = self._gone = False
        self._process: int | None = None  # process in which the thread runs; None = it has not begun
        self._thread = threading.Thread(target=self._run, name="oneemb-prefetch", daemon=True)

    def start(self) -> None:
        start(self._thread)

    def _run(self) -> None:
        self._process = os.getpid()
        try:
            with self._ahead.working():
                try:
                    self._load()
                finally:
                    if self._reader is not None:
                        self._reader.close()
                    self._at_end()
                while not self._closed:
                    self._permits.get()
                while self.made:
                    self.made.popleft().drop()
        finally:
            self._gone = True
            self._ended.put(None)

    def _load(self) -> None:
        try:
            iterator = iter(self._batches.pop())
            while self._wait_for_permit():
                with capture_gate.preparing():
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        self._hand_over(Prepared(None, last=True))
                        return
                    prepared = self._prepare(batch, self._ahead.follow)
                    prepared.mark = self._ahead.mark((prepared.batch, prepared.values))
                self._hand_over(prepared)
        except BaseException as error:
            self._hand_over(Prepared(None, error=error))

    def _wait_for_permit(self) -> bool:
        self._permits.get()
        return not self._closed

    def _hand_over(self, prepared: Prepared) -> None:
        self.made.append(prepared)
        self._ready.put(None)

    def next(self) -> Prepared:
        """The next batch, which stays in `made` until its step is over."""
        _get(self._ready)
        prepared = self.made[0]
        self._ahead.take_over(prepared.mark, (prepared.batch, prepared.values))
        return prepared

    def step(self, prepared: Prepared, compute: Callable[[Prepared, Callable[[], None]], Result]) -> Result:
        """Result of `compute` for a batch. Once the batch's rows are acquired, one more batch may be prepared."""
        permitted = False

        def acquired() -> None:
            nonlocal permitted
            if not permitted:
                permitted = True
                self._permits.put(None)

        try:
            result = compute(prepared, acquired)
        finally:
            prepared.drop()
        acquired()
        return result

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the thread. If an interrupt ends this call early, it may be called again."""
        self._closed = True
        self._permits.put(None)
        self._stop()
        if self._reader is not None:
            self._reader.close()
        # Do not wait for a thread that has not begun, in a forked child (which has no such thread), or when the
        # interpreter ends and no thread runs any more.
        if self._process is None:
            self._at_end()
        here = not is_finalizing() and self._process == os.getpid()  # At exit names of modules may be None.
        if here and self._thread is not threading.current_thread():
            self._wait()
        self._ahead.leave()

    def _wait(self) -> None:
        # `join` or `is_alive` would not do alone: after an interrupt in one of them the thread counts as ended.
        try:
            if not self._gone:
                _get(self._ended, self._patience_s)
            if not within_thread_code():  # otherwise `join` could hang; the thread ends by itself a moment later
                self._thread.join()
            if self._reader is not None and not self._reader.wait(self._patience_s):
                raise Empty
        except Empty:
            if self._patience_s:
                self._patience_s = 0.0
                warnings.warn(
                    f"the loop was left {_PATIENCE_S:g} s ago, and its loader has given no batch since; the loop's"
                    " thread ends, and unpins its rows, when the loader gives a batch or ends",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _get(queue: "SimpleQueue[None]", patience_s: float = math.inf) -> None:
    """Wait for an element, as `queue.get`, in short waits: a signal that comes just before a wait is handled after it.

    Raises:
        Empty: no element has come within `patience_s` seconds.
    """
    end = time.monotonic() + patience_s
    while True:
        rest = end - time.monotonic()
        try:
            return queue.get(timeout=max(0.0, min(_SLICE_S, rest)))
        except Empty:
            if rest <= _SLICE_S:
                raise


def prefetch(
    batches: Iterable[Batch],
    prepare: Callable[[Batch, Follow], Prepared],
    compute: Callable[[Prepared, Callable[[], None]], Result],
    depth: int,
    devices: Iterable[torch.device] = (),
    at_end: Callable[[], object] = lambda: None,
    failing: Callable[[], AbstractContextManager[object]] = nullcontext,
    waited: Callable[[int], object] = lambda ns: None,
    stop: Callable[[], object] = lambda: None,
) -> Generator[Result, None, None]:
    """Yield the result of `compute` for each batch; a thread loads and prepares up to `depth` batches ahead.

    Args:
        batches: the loader.
        prepare: prepares a batch. It calls its second argument with the versions of the buffers that it will read.
        compute: runs the step of a batch. It calls its second argument once the rows are acquired.
        devices: GPUs on which `prepare` works, in addition to the current GPU.
        at_end: called when the thread loads no more batches, also if the thread never runs; perhaps called twice.
        failing: returns a context manager for the loop, which sees the loop's errors before the thread has ended.
        waited: called with the nanoseconds that the loop has waited for each batch.
        stop: called when no more batches are needed; the loader may wait for data then. Perhaps called twice.
    """
    worker = PrefetchWorker(batches, prepare, depth, devices, at_end, stop)
    # From here on only the thread holds the loader's iterator.
    del batches
    try:
        try:
            with failing():  # entered before the thread starts: it compares errors with the moment of its entry
                worker.start()
                while True:
                    begin = time.perf_counter_ns()
                    if (prepared := worker.next()).last:
                        break
                    waited(time.perf_counter_ns() - begin)
                    if prepared.error is not None:
                        raise prepared.error
                    result = worker.step(prepared, compute)
                    del prepared
                    worker.made.popleft()
                    yield result
                    del result
        finally:
            worker.close()
    finally:
        worker.close()  # An interrupt may have prevented or ended the first `close`.
