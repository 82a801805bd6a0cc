"""A thread that makes calls one after another, in the order in which they were submitted."""

import functools
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

_JOIN_S = 10.0


class Worker:
    """Thread that makes calls in order. It ends when this object is collected, after the calls that were submitted
    before.

    Args:
        name: name of the thread.
        dropped: beginning of the warning for an error in a call of `later`.
    """

    def __init__(self, name: str, dropped: str = ""):
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.ended = False
        """Whether `end` or `stop` was called."""
        args = self._calls, self._stopping, dropped
        self._thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def later(self, call: Callable[[], object]) -> None:
        """Make a call on the thread; an error in the call becomes a warning. Safe inside a finalizer."""
        self._calls.put(call)

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Make a call on the thread; returns a future of its result or error."""
        future: Future[_T] = Future()
        answer = functools.partial(_answer, call, future)
        if self._thread.is_alive():
            self.later(answer)
        else:  # A child of fork has no thread: make the call here.
            answer()
        return future

    def end(self) -> None:
        """End the thread after all submitted calls."""
        self.ended = True
        self._calls.put(None)

    def stop(self) -> None:
        """End the thread after its current call, and wait for that at most 10 seconds."""
        self._stopping.set()
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


def _work(calls: "queue.SimpleQueue[Callable[[], object] | None]", stopping: threading.Event, dropped: str) -> None:
    while (call := calls.get()) is not None and not stopping.is_set():
        try:
            call()
        except Exception as error:
            warnings.warn(f"{dropped}: {error}", stacklevel=1)
        del call  # The waiting loop must keep nothing alive.


def _answer(call: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        found = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)
    finally:
        del call, future  # An error's traceback keeps this frame, which must keep nothing else alive.
