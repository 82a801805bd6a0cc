"""Lock for an object that many threads read at a time, and one changes in small steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oneemb.storage.locking.signals_deferred import WAIT_SLICE, signals_deferred


class Turns:
    """Either any number of readers, or one writer. Readers that wait while a writer works come before the next writer,
    and a writer that waits comes before readers that arrive later, so neither waits for long.

    Invariant: after an interrupt at any line no block counts as open, and a child of fork has no open block, since
    signals and forks wait for the end of a block. Ctrl-C ends only the wait for a block.
    """

    def __init__(self) -> None:
        self._monitor = threading.Condition()
        self._reading = self._readers_waiting = self._writers_waiting = 0
        self._readers_due = 0
        self._writing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Block of a reader."""
        with signals_deferred:
            with self._monitor:
                self._readers_waiting += 1
                try:
                    self._wait_for(self._may_read)
                    self._reading += 1
                finally:
                    self._readers_waiting -= 1
                    self._readers_due = max(0, self._readers_due - 1)
            try:
                yield
            finally:
                with self._monitor:
                    self._reading -= 1
                    self._monitor.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Block of a writer."""
        with signals_deferred:
            with self._monitor:
                self._writers_waiting += 1
                try:
                    self._wait_for(self._may_write)
                    self._writing = True
                finally:
                    self._writers_waiting -= 1
            try:
                yield
            finally:
                with self._monitor:
                    self._writing = False
                    self._readers_due = self._readers_waiting
                    self._monitor.notify_all()

    def _wait_for(self, may_go_on: Callable[[], bool]) -> None:
        """Wait until `may_go_on()` is True. Raises KeyboardInterrupt at Ctrl-C, unless this is a nested block."""
        while not self._monitor.wait_for(may_go_on, WAIT_SLICE):
            if signals_deferred.outermost:
                signals_deferred.raise_interrupt()

    def _may_read(self) -> bool:
        return not self._writing and (self._readers_due > 0 or not self._writers_waiting)

    def _may_write(self) -> bool:
        return not self._writing and not self._reading and not self._readers_due
