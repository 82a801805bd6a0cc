"""Interrupts at a chosen line: counts the lines of oneemb that a call runs, and stops it at any of them.

Two ways to be stopped:
    signal    SIGINT arrives before the line: what Ctrl-C does
    raise     an exception appears at the line, as other threads may put one there; nothing can hold it back
"""

import functools
import gc
import linecache
import os
import random
import signal
import sys
import threading

from oneemb.storage.locking.signals import signals

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = f"{ROOT}/oneemb/"
WAYS = ("signal", "raise")
DECIDING = tuple(f"/storage/locking/{name}.py" for name in ("store_lock", "signals_deferred", "signals"))


class Interrupted(BaseException):
    """What appears at a line. No code handles it."""


def interrupt_soon(seconds=0.2):
    """Send Ctrl-C to this process a moment after the call. Call it within `pytest.raises`."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


class AtLine:
    """`with AtLine(k, way):` stops this thread before the k-th line of oneemb that it runs; `lines` counts them.

    Args:
        number: of the signal.
        files: what the paths of the files begin with whose lines count.
        functions: names of those whose lines count; None = all.

    Where a `with` block ends, Python comes back to its line before it calls `__exit__`: what is raised there by a trace
    would skip the call, which no signal and no other thread can bring about; the same holds of a `finally` that is one
    instruction, which gives locks back (storage/locking/step_lock.py); where a `try` begins, it is in no block for a
    moment. Those lines do not count, nor do, for what is raised, those of `DECIDING`, which decide about such errors,
    and those of finalizers.
    """

    def __init__(self, at=None, way="signal", *, number=signal.SIGINT, files=(PACKAGE,), functions=None):
        self.at, self.way, self.number, self.files, self.functions = at, way, number, tuple(files), functions
        self.lines, self.place, self._seen = 0, None, {}

    def __enter__(self):
        # Finalizers would run where the collector likes, and what is raised in one, Python drops.
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if self.functions is not None and frame.f_code.co_name not in self.functions:
            return None
        if self.way == "raise" and _in_finalizer(frame):
            return None

        def local(frame, event, argument):
            if event == "line":
                file, line = frame.f_code.co_filename, frame.f_lineno
                text = linecache.getline(file, line).strip()
                if text == "try:" or text.startswith("collections.deque("):
                    return local
                if text.startswith("with ") and frame.f_lasti != _first_instruction(frame.f_code, line):
                    return local
                if self.way == "raise" and file.endswith(DECIDING):
                    return local
                self.lines += 1
                self._seen.setdefault((file, line), []).append(self.lines)
                if self.lines == self.at:
                    self.place = f"{os.path.relpath(file, ROOT)}:{line}, in {frame.f_code.co_name}"
                    if self.way == "raise":
                        raise Interrupted
                    signal.raise_signal(self.number)
            return local

        return local


def in_no_block():
    """Whether no block that defers signals is open."""
    return signals.depth == 0


def holds_no_signal():
    """Whether no deferred signal waits for the end of its block."""
    return not signals.held


def interrupted(call, at, way, **which):
    """Whether the call was stopped before its line number `at`, and the line; None where it has no such line."""
    line = AtLine(at, way, **which)
    try:
        with line:
            call()
        stopped = False
    except (KeyboardInterrupt, Interrupted):
        assert threading.current_thread() is threading.main_thread()
        stopped = True
    # Nobody waits for a block that will not end, and Ctrl-C is the program's again.
    assert in_no_block() and holds_no_signal(), line.place
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line.place
    return stopped, line.place


def count_lines(call, way, **which):
    with AtLine(way=way, **which) as line:
        call()
    return line.lines


def each_line(call, way):
    """The number of each line of code that a call runs when it runs first, and when it runs last."""
    with AtLine(way=way) as line:
        call()
    return sorted({number for numbers in line._seen.values() for number in (numbers[0], numbers[-1])})


@functools.cache
def _first_instruction(code, line):
    """Offset of the first instruction of a line: where a `with` block begins, not where Python comes back to end it."""
    return min(start for start, _, number in code.co_lines() if number == line)


def _in_finalizer(frame):
    """Whether Python would drop what is raised here."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def some_lines(lines, number, seed=0):
    """This many of a call's lines, spread evenly and shifted at random."""
    if number >= lines:
        return range(1, lines + 1)
    shift = random.Random(seed).random()
    return sorted({1 + int((i + shift) * lines / number) for i in range(number)})
