"""Defers the signals of the main thread while an object is half changed, and handles them afterwards.

Python's signal handlers (Ctrl-C raises KeyboardInterrupt) run between any two lines of the main thread. From
`signals.hold()` until `signals.let_come()` each signal is only recorded; its handler runs when the outermost block has
ended.

Signals may come at any line of this file too. An error that a handler raises there, or a call that it makes, leaves the
state in order: outside of blocks, this object's handler passes a signal on to the user's handler at once.
"""

# The functions of `signal` without the conversion to enums, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from oneemb.kernels.jit import around_compiling

# Signals that programs may handle in Python, Ctrl-C first: all but the real-time signals. SIGCHLD is among them: its
# handler in torch's data loader raises an error when a worker has died.
_NUMBERS = sorted({int(number) for number in signal.valid_signals() if number < 32}, key=lambda n: n != signal.SIGINT)


class _Signals:
    """State of deferred signals."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of nested blocks that defer signals."""
        self.main = threading.main_thread().ident
        """The thread in which Python runs signal handlers."""
        self.process = os.getpid()
        """Number of this process: an attribute takes less time to read than `os.getpid()`, and every step reads it."""
        self.held: dict[int, FrameType | None] = {}
        """{number of a signal that has come: frame for its handler}."""
        self.interrupt: BaseException | None = None
        """The KeyboardInterrupt that `raise_interrupt` has raised in a block."""
        self._found: list[Any] = [None] * len(_NUMBERS)
        """Handler of each of `_NUMBERS` when the last block began. Most blocks find the same handlers."""
        self._handled: list[int] = []
        """Numbers of the signals whose handlers are Python functions."""
        self._handlers: dict[int, Any] = {}
        """{number of a signal: its handler when the block began}."""
        self._note: Callable[[int, FrameType | None], None] = self._hold

    def hold(self) -> None:
        """In the main thread, defer signals until `let_come` or `come_later` has been called once for each `hold`."""
        if threading.get_ident() != self.main:
            return
        if self.depth:
            self.depth += 1
            return
        try:
            self.depth = 1  # Blocks that handlers or the garbage collector begin from here on are nested in this one.
            found = list(map(_signal.getsignal, _NUMBERS))
            if found != self._found:
                self._handled = [n for n, handler in zip(_NUMBERS, found, strict=True) if callable(handler)]
                self._found = found
            for number in self._handled:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not self._note:
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self.end()
            raise

    def let_come(self) -> None:
        """End one `hold`. The outermost one runs the handlers of deferred signals."""
        if threading.get_ident() == self.main:
            if self.depth > 1:
                self.depth -= 1
            elif self.depth == 1:
                self.end()

    def come_later(self) -> None:
        """End one `hold`; deferred signals are sent again a moment later. For hooks, since Python drops a hook's
        errors."""
        if threading.get_ident() == self.main and self.depth == 1 and self.held:
            held = dict(self.held)
            self.held.clear()
            try:
                threading.Timer(0.01, _send_again, (list(held),)).start()
            except BaseException:  # No thread could be started.
                self.held.update(held)
                self.let_come()
                raise
        self.let_come()

    def end(self) -> None:
        """End the outermost block, in the main thread."""
        self.depth = 0
        self.interrupt = None
        try:
            self._put_back()
        finally:
            if self.held:
                self._handle()

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was deferred, unless the user has installed a handler for it: the handler
        still waits, since it may call an object that is half changed."""
        number = int(signal.SIGINT)
        if number in self.held and threading.get_ident() == self.main:
            if self._handlers[number] is signal.default_int_handler:
                del self.held[number]
                self.interrupt = KeyboardInterrupt()
                raise self.interrupt

    def start_anew(self) -> None:
        """In a child process: forget deferred signals and restore the handlers."""
        self.main = threading.main_thread().ident  # Python's own fork hook, which sets it, has run before ours.
        self.process = os.getpid()
        self.depth = 0
        self.held.clear()
        self._put_back()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.depth:
            self.held[number] = frame
        else:  # The signal came while a block ended, or code that read this handler in a block has installed it again.
            self._put_back()
            self._handlers[number](number, frame)

    def _put_back(self) -> None:
        for number in reversed(self._handled):  # SIGINT is restored last, as it may raise at once.
            if _signal.getsignal(number) is self._note:
                _signal.signal(number, self._handlers[number])

    def _handle(self) -> None:
        """Call the handler of each deferred signal once, also of those after a handler that raises."""
        if self.held:
            number, frame = self.held.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle()


def _send_again(numbers: list[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


signals = _Signals()
around_compiling.begin, around_compiling.end = signals.hold, signals.let_come
