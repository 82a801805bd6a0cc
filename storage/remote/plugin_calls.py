"""Calls of one plugin instance: their timeouts, and the memory that stays allocated until they have ended.

A call has ended when the plugin's function has returned and the plugin has answered, in either order. Invariants:
- the functions run on one thread, one after another; callers wait for that thread, at most for the timeout;
- a plugin gets a number, not an address, as its context, so an answer to a call that has ended has no effect;
- an answer is read under the call's lock and only before the caller has left, so the caller's arrays do not change
  later;
- the arguments of a call stay in memory until the call has ended, for good if it never ends; a call that the plugin's
  thread has not begun when its caller leaves is not made any more;
- no error is raised into a plugin's code: an error in an answer is raised by the waiting caller.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from oneemb.storage.remote.parameter_server import ServerError, ServerTimeoutError

# {number that a plugin has as its context: call that it may still answer}
unanswered: dict[int, "Call"] = {}
_numbers = itertools.count(1)


def fetched(number: int | None, n: int, p: int, data: int | None, size: int) -> None:
    """Receive a value of a pull. Plugins call this function, from any thread."""
    call = unanswered.get(number or 0)
    if call is not None:
        call.take(n, p, data, size)


def answered(number: int | None) -> None:
    """Record that a plugin has answered a call. Plugins call this function, from any thread."""
    call = unanswered.get(number or 0)
    if call is not None:
        call.answer()


class Kept(Protocol):
    """Arguments of a call, which stay in memory until the plugin has answered."""

    nbytes: int


class Call:
    """One call of a plugin's function.

    Args:
        what: the call, for errors.
        kept: memory that the plugin may read until it has answered; None = the plugin answers by returning.
        take: function that receives a value: (offset, part, address or None, number of bytes).
    """

    def __init__(self, what: str, kept: Kept | None, take: Callable[[int, int, int | None, int], None] | None):
        self.what, self.kept = what, kept
        self.number = next(_numbers)
        self.deadline = 0.0
        self.ended = threading.Event()
        self.function: Callable[[], Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.late = False
        """Whether the call is made even if its caller has left."""
        self._take = take
        self._lock = threading.Lock()
        self._begun = self._left = self._returned = False
        self._answered = kept is None

    def make(self) -> None:
        """Call the function, on the instance's thread."""
        with self._lock:
            if self._left and not self.late:
                return
            self._begun, function = True, self.function
        assert function is not None
        try:
            result, error = function(), None
        except BaseException as failure:  # The function was not called: ctypes could not pass an argument.
            result, error = None, failure
        with self._lock:
            self.result, self.error = result, self.error or error
            self._returned, self._answered = True, self._answered or error is not None
            self._end()

    def take(self, n: int, p: int, data: int | None, size: int) -> None:
        """Receive a value, from any thread, unless the call has been answered or its caller has left."""
        with self._lock:
            if self._left or self._answered or self.error is not None or self._take is None:
                return
            try:
                self._take(n, p, data, size)
            except BaseException as error:
                self.error = error

    def answer(self) -> None:
        """Mark the call as answered by the plugin, from any thread. A second call has no effect."""
        with self._lock:
            self._answered = True
            self._end()

    def leave(self) -> bool:
        """Give up waiting: no value is received from here on. Returns whether the call has ended."""
        with self._lock:
            self._left = True
            if not self._begun and not self.late:
                self._forget()
            return self.ended.is_set()

    @property
    def open(self) -> bool:
        """Whether the call has begun and not ended."""
        return self._begun and not self.ended.is_set()

    def _end(self) -> None:
        if self._returned and self._answered:
            self._forget()
            self.ended.set()

    def _forget(self) -> None:
        unanswered.pop(self.number, None)
        self.kept = self.function = self._take = None


class Calls:
    """Calls of one plugin instance; see the file's first lines.

    Args:
        name: the plugin, for errors.
        timeout: seconds that a call may take.
    """

    def __init__(self, name: str, timeout: float):
        self._name, self._timeout, self._pid = name, timeout, os.getpid()
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._left: list[Call] = []
        threading.Thread(target=_work, args=(self._queue,), name="oneemb-plugin", daemon=True).start()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that has the plugin's thread."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise ServerError in a forked child."""
        if self.forked:
            raise ServerError(
                f"{self._name} was opened by process {self._pid}, and this is a forked child of it, {os.getpid()},"
                " which has none of the plugin's threads; open the server in the child"
            )

    def run(self, what: str, function: Callable[[], Any], *, late: bool = False) -> Any:
        """Run a function that answers by returning, and return its result. `late`: run it even after the timeout."""
        call = Call(what, None, None)
        call.late = late
        self.ask(call, function)
        return call.result

    def ask(self, call: Call, function: Callable[[], Any]) -> None:
        """Make a call and wait for its end. Raises ServerError for a wrong answer, ServerTimeoutError for a late
        one."""
        self.check_process()
        call.function, call.deadline = function, time.monotonic() + self._timeout
        try:
            unanswered[call.number] = call
            self._queue.put(call)
            call.ended.wait(self._timeout)
        finally:
            ended = call.leave()
            if not ended:
                self._left = [*self.still_open(), call]
        if call.error is not None:
            raise call.error
        if not ended:
            raise ServerTimeoutError(self._too_late(call))

    def still_open(self) -> list[Call]:
        """Calls whose callers have left, and which have begun and not ended."""
        return [call for call in self._left if call.open]

    def wait_for_answers(self) -> None:
        """Wait for the calls whose callers have left, each until its own deadline."""
        for call in self.still_open():
            call.ended.wait(max(0.0, call.deadline - time.monotonic()))

    def stop(self) -> None:
        """End the thread after all calls in the queue."""
        self._queue.put(None)

    def _too_late(self, call: Call) -> str:
        still_open = self.still_open()
        kept = sum(one.kept.nbytes for one in still_open if one.kept is not None)
        if call.open:
            text = f"{self._name} has not answered {call.what} within {self._timeout:g} s; it may have been done"
        else:
            text = (
                f"{self._name} has not been asked for {call.what}: for {self._timeout:g} s the plugin has not returned"
                " from an earlier call"
            )
        return (
            f"{text}. {len(still_open)} of its calls are open, whose {kept} bytes stay in memory until the plugin"
            " answers them. See why it is slow, or give register_io a longer timeout"
        )


def _work(queue: "SimpleQueue[Call | None]") -> None:
    while (call := queue.get()) is not None:
        call.make()
        call = None  # so that the call is not kept in memory while this thread waits for the next one
