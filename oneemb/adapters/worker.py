"""A thread that makes calls one after the other, in the order in which they are given."""

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
    """Thread that makes calls. It ends with this object, after the calls that it was given. `dropped` is the beginning
    of the warning that an error in a call of `later` becomes."""

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
        """Make a call on the thread; an error in it becomes a warning. The garbage collector may call this."""
        self._calls.put(call)

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """Make a call on the thread; the future has its result or error."""
        future: Future[_T] = Future()
        answer = functools.partial(_answer, call, future)
        if self._thread.is_alive():
            self.later(answer)
        else:  # In a child of fork there is no thread: the call is made here.
            answer()
        return future

    def end(self) -> None:
        """End the thread once it has made its calls."""
        self.ended = True
        self._calls.put(None)

    def stop(self) -> None:
        """End the thread after its current call; waits for that, but not for ever."""
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
        del call  # The loop waits, and must keep nothing alive.


def _answer(call: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        found = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)
    finally:
        del call, future  # An error keeps this frame, which must keep nothing alive.
