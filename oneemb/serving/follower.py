"""A thread that calls a function every so many seconds, and raises its errors in the caller of `check`.

Invariants:
- the thread keeps the function's owner not alive: it ends when the owner is gone;
- a child of fork has no thread; errors of its parent's thread are the parent's.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Follower:
    """Thread that begins with `start`: by then its owner has it, so that an interrupt leaves no thread that nobody
    stops.

    Args:
        refresh: a bound method, called with a function that says whether to give up.
        seconds: between the end of a call and the next one, above 0.
    """

    def __init__(self, refresh: Callable[[Callable[[], bool]], Any], seconds: float):
        self.seconds, self._process = seconds, os.getpid()
        self._error: BaseException | None = None
        self.ends = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(weakref.WeakMethod(refresh),), name="oneemb-follow", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def _run(self, refresh: "weakref.WeakMethod[Any]") -> None:
        while not self.ends.wait(self.seconds):
            call = refresh()
            if call is None:
                return
            try:
                call(self.ends.is_set)
            except BaseException as error:
                if not self.ends.is_set():
                    self._error = error
            del call

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a child of fork, in which the thread is not."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise the error of a call, once."""
        if self._error is not None and not self.is_of_parent:
            error, self._error = self._error, None
            if error is not None:
                raise error

    def stop(self) -> None:
        """Make the thread end soon; its current call gives up."""
        if not self.is_of_parent:  # Its thread may have held the event's lock when this process was forked.
            self.ends.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if not self.is_of_parent and self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()
