"""Holds the signals of the main thread back while an object is half changed, and handles them afterwards.

Python's signal handlers (Ctrl-C raises KeyboardInterrupt) run between any two lines of the main thread. From
`signals.hold()` until `signals.let_come()` a note is taken of each signal instead; its handler runs when the last block
has ended.

Signals may come at any line of this file too, and what they raise or begin there leaves it in order: while no block is
under way, a handler that is still this object's hands each signal on at once.
"""

# The functions of `signal` without its enums, which take ten times as long.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from oneemb.kernels.jit import around_compiling

# Signals that programs may handle in Python, Ctrl-C first: all but those that real-time programs define. One of them is
# SIGCHLD: its handler in torch's data loader raises when a worker has died.
_NUMBERS = sorted({int(number) for number in signal.valid_signals() if number < 32}, key=lambda n: n != signal.SIGINT)


class _Signals:
    """Signals that are held back."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of nested blocks that hold signals back."""
        self.main = threading.main_thread().ident
        """The thread in which Python runs signal handlers."""
        self.held: dict[int, FrameType | None] = {}
        """Signals that have come, by their numbers."""
        self.interrupt: BaseException | None = None
        """The KeyboardInterrupt that `raise_interrupt` has raised in a block."""
        self._found: list[Any] = [None] * len(_NUMBERS)
        """Handler of each of `_NUMBERS` when the last block began; most blocks find the same."""
        self._handled: list[int] = []
        """Numbers of the signals whose handlers are Python functions."""
        self._handlers: dict[int, Any] = {}
        """Handler of each signal when a block began, by the signal's number."""
        self._note: Callable[[int, FrameType | None], None] = self._hold

    def hold(self) -> None:
        """In the main thread, hold signals back until as many calls of `let_come` or `come_later`."""
        if threading.get_ident() != self.main:
            return
        if self.depth:
            self.depth += 1
            return
        try:
            self.depth = 1  # What handlers and the garbage collector begin meanwhile is within this block.
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
        """End `hold`."""
        if threading.get_ident() == self.main:
            if self.depth > 1:
                self.depth -= 1
            elif self.depth == 1:
                self.end()

    def come_later(self) -> None:
        """End `hold`; held signals come a moment later. For hooks, since Python drops their errors."""
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
        """Raise KeyboardInterrupt if Ctrl-C was deferred. Handlers that the user has installed still wait: they may
        call an object that is half changed."""
        number = int(signal.SIGINT)
        if number in self.held and threading.get_ident() == self.main:
            if self._handlers[number] is signal.default_int_handler:
                del self.held[number]
                self.interrupt = KeyboardInterrupt()
                raise self.interrupt

    def start_anew(self) -> None:
        """In a child process: forget what was held back."""
        self.main = threading.main_thread().ident  # in Python too: its hook comes before ours
        self.depth = 0
        self.held.clear()
        self._put_back()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.depth:
            self.held[number] = frame
        else:  # It came while a block ended, or whoever asked for the handler within a block has put this one back.
            self._put_back()
            self._handlers[number](number, frame)

    def _put_back(self) -> None:
        for number, handler in reversed(self._handlers.items()):  # SIGINT, which came first, is the last to raise
            if _signal.getsignal(number) is self._note:
                _signal.signal(number, handler)

    def _handle(self) -> None:
        """Call the handler of each signal that came, once; the others too where one raises."""
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
