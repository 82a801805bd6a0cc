"""The calls of one plugin's instance: who waits for them, for how long, and what stays in memory until they have ended.

A call has ended when the plugin's function has returned and the plugin has answered, in whichever order. What must
stay true:
- the functions run on one thread, one after the other: the caller waits beside it, no longer than the timeout;
- a plugin is told a number, not an address, as its context: an answer to a call that has ended reaches nothing;
- an answer is taken with the call's lock held, and not after the caller has left: nothing is written behind its back;
- what a call was made with stays in memory until the call has ended, and for good if it never does; a call that the
  plugin has not seen yet when its caller leaves is not made any more;
- nothing is raised into a plugin's code: what goes wrong in an answer is raised by the caller that waits for it.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from oneemb.storage.remote.parameter_server import ServerError, ServerTimeoutError

# Calls that plugins may still answer, by the numbers that plugins know them by.
unanswered: dict[int, "Call"] = {}
_numbers = itertools.count(1)


def fetched(number: int | None, n: int, p: int, data: int | None, size: int) -> None:
    """Take a value from a plugin. Plugins call this from any thread."""
    call = unanswered.get(number or 0)
    if call is not None:
        call.take(n, p, data, size)


def answered(number: int | None) -> None:
    """Note that a plugin has done a call. Plugins call this from any thread."""
    call = unanswered.get(number or 0)
    if call is not None:
        call.answer()


class Kept(Protocol):
    """Arguments of a call, kept until the plugin has answered."""

    nbytes: int


class Call:
    """One call of a plugin's function.

    Args:
        what: the call, for errors.
        kept: what the plugin may read until the call has ended; None = it gives no answer but its return.
        take: takes a value: (offset, part, address or None, bytes).
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
        """Whether it is made even after its caller has left."""
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
        except BaseException as failure:  # It was never made: ctypes could not pass what was given.
            result, error = None, failure
        with self._lock:
            self.result, self.error = result, self.error or error
            self._returned, self._answered = True, self._answered or error is not None
            self._end()

    def take(self, n: int, p: int, data: int | None, size: int) -> None:
        """A value, from any thread."""
        with self._lock:
            if self._left or self._answered or self.error is not None or self._take is None:
                return
            try:
                self._take(n, p, data, size)
            except BaseException as error:
                self.error = error

    def answer(self) -> None:
        """The plugin says that it is done, from any thread; once more means nothing."""
        with self._lock:
            self._answered = True
            self._end()

    def leave(self) -> bool:
        """Wait no longer: nothing is taken from here on. Returns whether the call has ended."""
        with self._lock:
            self._left = True
            if not self._begun and not self.late:
                self._forget()
            return self.ended.is_set()

    @property
    def open(self) -> bool:
        """Whether the plugin has begun it and not ended it."""
        return self._begun and not self.ended.is_set()

    def _end(self) -> None:
        if self._returned and self._answered:
            self._forget()
            self.ended.set()

    def _forget(self) -> None:
        unanswered.pop(self.number, None)
        self.kept = self.function = self._take = None


class Calls:
    """Calls of one instance; see the head of this file.

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
        """Whether this is a child of the process that has the thread."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise ServerError in a forked child."""
        if self.forked:
            raise ServerError(
                f"{self._name} was opened by process {self._pid}, and this is a forked child of it, {os.getpid()},"
                " which has none of the plugin's threads; open the server in the child"
            )

    def run(self, what: str, function: Callable[[], Any], *, late: bool = False) -> Any:
        """Run a function that has no answer, and return its result; `late`: also when the caller waits no more."""
        call = Call(what, None, None)
        call.late = late
        self.ask(call, function)
        return call.result

    def ask(self, call: Call, function: Callable[[], Any]) -> None:
        """Make a call and wait for its end. ServerError if the answer is wrong, ServerTimeoutError if it is late."""
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
        """Calls whose callers have left and that the plugin has not ended."""
        return [call for call in self._left if call.open]

    def wait_for_answers(self) -> None:
        """Give calls whose callers have left the rest of their time."""
        for call in self.still_open():
            call.ended.wait(max(0.0, call.deadline - time.monotonic()))

    def stop(self) -> None:
        """End the thread when all that was asked for has returned."""
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
        call = None  # so that nothing of it is kept while the next one is waited for
