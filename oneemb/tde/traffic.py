"""Queue of calls of parameter servers, which any thread may make.

Invariants:
- calls are made one at a time, in the order in which they were added, so a pull of an id finds the row of an earlier
  push;
- a failed call stays first in the queue: the next `wait` for this call or a later one raises its error, with the
  traceback; the `wait` after that makes the call again.
"""

import threading
from collections import deque
from collections.abc import Callable


class ServerCalls:
    """Queue of calls of servers."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._added = self._made = 0
        self._failed: BaseException | None = None
        self._one_at_a_time = threading.Lock()

    def add(self, call: Callable[[], None]) -> int:
        """Add a call, and return its ticket for `wait`. A call that fails is made again."""
        self._calls.append(call)
        self._added += 1
        return self._added

    @property
    def last_ticket(self) -> int:
        """Ticket of the call that was added last."""
        return self._added

    def run_ahead(self, until: int) -> None:
        """Make the calls up to the ticket `until`. For a background thread: `wait` raises the errors."""
        while True:
            with self._one_at_a_time:
                if self._made >= until or self._failed is not None:
                    return
                try:
                    self._make_next()
                except BaseException as error:
                    self._failed = error

    def wait(self, ticket: int) -> None:
        """Return once all calls up to the ticket are made. Makes those that no other thread has made."""
        while True:
            with self._one_at_a_time:
                if self._made >= ticket:
                    return
                if self._failed is not None:
                    error, self._failed = self._failed, None
                    try:
                        raise error
                    finally:
                        del error  # its traceback keeps this frame
                self._make_next()

    def _make_next(self) -> None:
        self._calls[0]()
        self._calls.popleft()
        self._made += 1
