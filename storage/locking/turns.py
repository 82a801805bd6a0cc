"""Makes calls on an object atomic: one at a time, and whole in spite of signals, unforeseen errors and forks.

A *turn* is the time in which one thread has the object for itself: `with turns:`, a reentrant lock that also handles

    signals     Python's signal handlers (Ctrl-C raises KeyboardInterrupt) run before a turn or after it: `undisturbed`
                holds signals back while a block runs, and handles them when it has ended
    errors      an error within a block of `changing`, where the object is half changed, and an error that no code
                raises on purpose, leave the object *broken*: it raises BrokenStoreError until its rows are new
    forks       a child process has a copy of the object and shares its files: it may read, not change. A fork waits
                for the `undisturbed` blocks of other threads, so that the copy is whole; each turn is such a block

Invariants:
- no signal handler of Python runs between the first and the last line of a turn in the main thread, but where the turn
  lets it (`undisturbed.raise_interrupt`);
- a broken object gives out no row.
"""

# The functions of `signal` without its enums, which take ten times as long.
import _signal  # type: ignore[import-not-found]

# Imported first, so that their fork hooks are registered before ours and run after them: the locks they hold during a
# fork must be free while ours wait for other threads.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import operator
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from oneemb.kernels.jit import around_compiling, compiling
from oneemb.storage.errors import BrokenStoreError, ForkedProcessError, StorageError

__all__ = ["CommitBlock", "Turns", "changing", "undisturbed", "whole"]

# Signals that programs may handle in Python, Ctrl-C first: all but those that real-time programs define. One of them is
# SIGCHLD: its handler in torch's data loader raises when a worker has died.
_NUMBERS = sorted({int(number) for number in signal.valid_signals() if number < 32}, key=lambda n: n != signal.SIGINT)

# Errors that calls raise on purpose, or that the system raises in them, where nothing is half changed.
_FORESEEN = (StorageError, MemoryError, ValueError, TypeError, OSError)

# How long a fork waits for a call that is under way, in seconds. A child's copy of an object whose turn it did not get
# is of no use, and says so.
_FORK_PATIENCE = 60.0

# How long a thread waits for its turn before it looks whether Ctrl-C came, in seconds.
_SLICE = 0.05


class _Undisturbed:
    """`with undisturbed:` holds signals back, and forks by other threads; may be nested.

    Signals may come at any line of this class too, and what they raise or begin there leaves it in order: while no
    block is under way, a handler that is still this object's hands each signal on at once.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._main = threading.main_thread().ident
        self._found: list[Any] = [None] * len(_NUMBERS)
        """Handler of each of `_NUMBERS` when the last block began; most blocks find the same."""
        self._handled: list[int] = []
        """Numbers of the signals whose handlers are Python functions."""
        self._handlers: dict[int, Any] = {}
        """Handler of each signal when a block began, by the signal's number."""
        self._held: dict[int, FrameType | None] = {}
        self._note: Callable[[int, FrameType | None], None] = self._hold
        self.interrupt: BaseException | None = None
        """The KeyboardInterrupt that `raise_interrupt` has raised in a block."""
        self._inside: dict[int, int] = {}  # number of nested blocks that a thread is in, by the thread
        self._forking: int | None = None  # the thread that is about to fork
        self._forks_now = False
        self._forked = threading.Event()
        self._one_fork = threading.Lock()

    # A step has a dozen blocks: most of them end in these lines, without calls of other methods.

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._depth and me == self._main:
            self._depth += 1
        else:
            self.hold_signals()
        try:
            self._inside[me] = depth = self._inside.get(me, 0) + 1  # Write, then read: see `_hold_forks`.
            if depth == 1 and self._forking is not None:
                del self._inside[me]
                self._hold_forks(interruptible=True)
        except BaseException:
            self._let_signals_come()
            raise

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        if depth > 1:
            self._inside[me] = depth - 1
        elif depth == 1:
            del self._inside[me]
        if me == self._main:
            if self._depth > 1:
                self._depth -= 1
            elif self._depth == 1:
                self._end()

    def _let_forks_come(self) -> None:
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        if depth > 1:
            self._inside[me] = depth - 1
        elif depth == 1:
            del self._inside[me]

    @property
    def outermost(self) -> bool:
        """Whether this thread is in exactly one block."""
        return self._inside.get(threading.get_ident()) == 1

    def close_for_fork(self) -> None:
        """Begin a block before a fork. Only one thread forks at a time."""
        self.hold_signals()
        self._hold_forks()
        with self.forks_allowed():
            self._one_fork.acquire()
        self._forked.clear()
        self._forking = threading.get_ident()

    def wait_for_others(self, end: float) -> None:
        """Wait until no other thread is in a block or compiles, or until the time `end`; then no other thread may begin
        a block.

        Until then a thread that compiles may begin one: the garbage collector may close a table in the middle of it.
        """
        while True:
            self._forks_now = True
            free = compiling._lock.acquire(blocking=False)
            if free:
                compiling._lock.release()
            if free and all(thread == self._forking for thread in list(self._inside)) or time.monotonic() > end:
                return
            self._forks_now = False
            time.sleep(1e-4)

    def open_after_fork(self) -> None:
        """End the block that `close_for_fork` began. Held signals come a moment later: see `signals_come_later`."""
        self._forking, self._forks_now = None, False
        self._forked.set()
        self._one_fork.release()
        self._let_forks_come()
        self.signals_come_later()

    @contextmanager
    def forks_allowed(self) -> Iterator[None]:
        """Within a block, at a point where its data is consistent: other threads may fork. Does nothing in a nested
        block."""
        me = threading.get_ident()
        if self._inside.get(me) != 1:
            yield
            return
        del self._inside[me]
        try:
            yield
        finally:
            self._hold_forks(goes_on=True)

    def _hold_forks(self, *, goes_on: bool = False, interruptible: bool = False) -> None:
        """Wait for a fork that is under way, and make the next one wait. A block that goes on (`goes_on`) does not wait
        until the fork really begins: other threads may be waiting for it."""
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        # Write, then read; a fork does the same, so at least one of the two sees the other.
        self._inside[me] = depth + 1
        while depth == 0 and self._forking not in (None, me):
            if not self._forks_now and (goes_on or compiling.is_locked()):  # by this thread
                break
            del self._inside[me]
            self._forked.wait(_SLICE)
            if interruptible:
                self.raise_interrupt()
            self._inside[me] = 1

    def hold_signals(self) -> None:
        """In the main thread, hold signals back until as many calls of `signals_come_later`."""
        if threading.get_ident() != self._main:
            return
        if self._depth:
            self._depth += 1
            return
        try:
            self._depth = 1  # What handlers and the garbage collector begin meanwhile is within this block.
            found = list(map(_signal.getsignal, _NUMBERS))
            if not all(map(operator.is_, found, self._found)):
                self._handled = [n for n, handler in zip(_NUMBERS, found, strict=True) if callable(handler)]
                self._found = found
            for number in self._handled:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not self._note:
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self._end()
            raise

    def _let_signals_come(self) -> None:
        if threading.get_ident() == self._main:
            if self._depth > 1:
                self._depth -= 1
            elif self._depth == 1:
                self._end()

    def signals_come_later(self) -> None:
        """End `hold_signals`; held signals come a moment later. For hooks, since Python drops their errors."""
        if threading.get_ident() == self._main and self._depth == 1 and self._held:
            held = dict(self._held)
            self._held.clear()
            try:
                threading.Timer(0.01, _send_again, (list(held),)).start()
            except BaseException:  # No thread could be started.
                self._held.update(held)
                self._let_signals_come()
                raise
        self._let_signals_come()

    def _end(self) -> None:
        self._depth = 0
        self.interrupt = None
        try:
            self._put_back()
        finally:
            if self._held:
                self._handle()

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was held back. Called where an interrupt does no harm.

        Handlers that the user has installed still wait: they may call an object that is half changed.
        """
        number = int(signal.SIGINT)
        if number in self._held and threading.get_ident() == self._main:
            if self._handlers[number] is signal.default_int_handler:
                del self._held[number]
                self.interrupt = KeyboardInterrupt()
                raise self.interrupt

    def start_anew(self) -> None:
        """In a child process, whose only thread is the one that forked: forget what was held back."""
        self._inside = {}
        self._main = threading.main_thread().ident  # in Python too: its hook comes before ours
        self._forking, self._forks_now = None, False
        self._forked, self._one_fork = threading.Event(), threading.Lock()
        self._depth = 0
        self._held.clear()
        self._put_back()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._held[number] = frame
        else:  # It came while a block ended, or whoever asked for the handler within a block has put this one back.
            self._put_back()
            self._handlers[number](number, frame)

    def _put_back(self) -> None:
        for number, handler in reversed(self._handlers.items()):  # SIGINT, which came first, is the last to raise
            if _signal.getsignal(number) is self._note:
                _signal.signal(number, handler)

    def _handle(self) -> None:
        """Call the handler of each signal that came, once; the others too where one raises."""
        if self._held:
            number, frame = self._held.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle()


def _send_again(numbers: list[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


undisturbed = _Undisturbed()
around_compiling.begin, around_compiling.end = undisturbed.hold_signals, undisturbed._let_signals_come


class CommitBlock:
    """`with CommitBlock() as block:` From `block.begin()` to the end of the block signals wait.

    An exception that another thread puts into the first line of `__exit__` leaves them waiting, as for `undisturbed`:
    no Python code can rule that out.
    """

    _begun = False

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Hold signals back."""
        self._begun = undisturbed.__enter__() is None  # type: ignore[func-returns-value]

    def __exit__(self, *error: object) -> None:
        if self._begun:
            undisturbed.__exit__()


def _says_memory_ran_out(error: BaseException) -> bool:
    """Whether torch raised this error because memory ran out, on a GPU or on the host. torch is not imported."""
    return (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, RuntimeError)
        and ("DefaultCPUAllocator: can't allocate memory" in str(error))
    )


class _Changing:
    """`with changing:` marks lines between which an object is half changed. Any error that leaves the block breaks each
    object whose turn is under way; an interrupt that the block lets in by `raise_interrupt` does not.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and error is not undisturbed.interrupt:
            error.left_half_changed = True  # type: ignore[attr-defined]


changing = _Changing()


class Turns:
    """`with turns:` is a turn of the thread that runs it; a turn may begin within another one of the same thread.

    Args:
        what: the object, for errors.
        mend: what to do when it is broken, for errors.
        rank: of the objects whose turns one thread takes at a time, those of lower rank come first.
    """

    def __init__(self, what: str, mend: str, rank: int):
        self.lock = threading.Condition(threading.RLock())
        self.rank = rank
        self.waiting = 0
        """Number of threads that wait for a turn; not exact."""
        self.before_fork: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns a function to call in a turn before the process forks, so that a child can read without threads."""
        self._what, self._mend = what, mend
        self._broken: str | None = None
        self._pid = os.getpid()
        self._torn = False
        with undisturbed:  # No fork comes while the set is half changed.
            _all.add(self)

    def __enter__(self) -> None:
        if self._torn and self.forked:
            self.check(changes=False)  # The turn belongs to a thread that is not there.
        undisturbed.__enter__()
        try:
            if not self.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            undisturbed.__exit__()
            raise

    def _wait(self) -> None:
        """Take the lock when others let go of it. Ctrl-C ends that, where nothing has begun."""
        self.waiting += 1
        try:
            while not self.lock.acquire(timeout=_SLICE):
                if undisturbed.outermost:
                    undisturbed.raise_interrupt()
        finally:
            self.waiting -= 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.note(error)
        self.lock.release()
        undisturbed.__exit__()

    @contextmanager
    def others_allowed(self) -> Iterator[None]:
        """Within a turn, not within one in it: let others have turns during a block."""
        self.lock.release()
        try:
            with undisturbed.forks_allowed():
                yield
        finally:
            self.lock.acquire()

    def note(self, error: BaseException | None) -> None:
        """Note the end of a call. An error that left the object half changed (`changing`), or that no code raises on
        purpose, breaks the object."""
        if error is None or error is undisturbed.interrupt:
            return
        if not (isinstance(error, _FORESEEN) or _says_memory_ran_out(error)) or hasattr(error, "left_half_changed"):
            self.cut_short(error)

    def cut_short(self, error: BaseException) -> None:
        """Mark the object broken: this error has ended a call half way, so what it holds may be wrong."""
        self._broken = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the object."""
        return os.getpid() != self._pid

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def check(self, *, changes: bool) -> None:
        """Raise unless the object can be read, or changed, in this process.

        Raises:
            BrokenStoreError: a call was cut short.
            ForkedProcessError: this process is a child.
        """
        if self._broken is not None:
            raise BrokenStoreError(
                f"{self._what} is of no use since a call on it was cut short by {self._broken}: what it holds in memory"
                f" may be wrong. Its snapshots are whole; {self._mend}"
            )
        if os.getpid() == self._pid:
            return
        if changes or self._torn:
            raise ForkedProcessError(
                f"{self._what} belongs to process {self._pid}, and this is a child of it, process {os.getpid()}, which"
                f" {'got no whole copy of it' if self._torn else 'may read its rows, not change, save or load them'}."
                " Look ids up with gradients in the process that made the embedding: return ids from data loader"
                " workers, or start them with multiprocessing_context='spawn' and let each make what it needs"
            )

    def mended(self) -> None:
        """Mark the object whole again: what it holds is new."""
        self._broken = None

    def get_ready_for_fork(self) -> bool:
        """Whether a child's copy of the object is whole. Called in a turn."""
        try:
            get_ready = self.before_fork()
            if get_ready is not None and not self.broken and not self.forked:
                get_ready()
        except StorageError:
            return True  # It says the same to whoever calls it next.
        except BaseException:
            return False
        return True


class whole:
    """`with whole(objects):` Signals come before this block or after it, and an error that nobody foresaw breaks these
    objects.

    For what changes several objects together, or needs no turn. The block may let errors out that it has put in order.
    """

    def __init__(self, objects: Iterable[Turns]):
        self._objects = objects

    def __enter__(self) -> None:
        undisturbed.__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                for turns in self._objects:
                    turns.note(error)
        finally:
            undisturbed.__exit__()


# A fork is of the whole process, and signals are too: what they wait for is known here, for all objects.
_all: "weakref.WeakSet[Turns]" = weakref.WeakSet()
_held_for_fork: list[Turns] = []
_torn_for_fork: list[Turns] = []
_nobody_compiles = False


def _before_fork() -> None:
    global _nobody_compiles
    end = time.monotonic() + _FORK_PATIENCE
    undisturbed.close_for_fork()
    while True:
        undisturbed.wait_for_others(end)
        _take_turns()
        # After them, since getting ready may mean that other threads of ours compile. A child could never get it.
        _nobody_compiles = compiling._lock.acquire(blocking=False)
        if _nobody_compiles or time.monotonic() > end:
            return
        _give_turns_back()


def _take_turns() -> None:
    for turns in sorted(_all, key=lambda turns: (turns.rank, id(turns))):
        if turns._torn:
            continue
        whole_now = turns.lock.acquire(blocking=False)  # It is free, but where somebody takes too long.
        if whole_now:
            _held_for_fork.append(turns)
            whole_now = turns.get_ready_for_fork()
        if not whole_now:
            turns._torn = True
            _torn_for_fork.append(turns)


def _give_turns_back() -> None:
    while _held_for_fork:
        _held_for_fork.pop().lock.release()
    while _torn_for_fork:
        _torn_for_fork.pop()._torn = False


def _in_parent() -> None:
    _give_turns_back()
    if _nobody_compiles:
        compiling._lock.release()
    undisturbed.open_after_fork()


def _in_child() -> None:
    _torn_for_fork.clear()
    _give_turns_back()
    if _nobody_compiles:
        compiling._lock.release()
    else:
        compiling._lock = threading.RLock()  # The other is of a thread that is not there.
    undisturbed.start_anew()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
