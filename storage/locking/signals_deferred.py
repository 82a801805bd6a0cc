"""Blocks that signals and forks wait for: `with signals_deferred:`.

signals     come when the outermost block has ended, in the main thread (signals.py)
forks       a fork waits for the blocks of other threads, and for the lock of each object (store_lock.py), so that the
            child's copy is whole. What takes longer than a minute is not waited for: the child has no whole copy
            of that object, which is marked as torn there
"""

# Imported first, so that their fork hooks are registered before ours and run after them: the locks they hold during a
# fork must be free while ours wait for other threads.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

from oneemb.kernels.jit import compiling
from oneemb.storage.locking.signals import signals

WAIT_SLICE = 0.05
"""How long a thread waits for a lock, or for a fork, before it looks whether Ctrl-C came, in seconds."""

# How long a fork waits for a call that is under way, in seconds. A child's copy of an object whose lock it did not get
# is of no use, and says so.
_FORK_PATIENCE = 60.0


class _SignalsDeferred:
    """`with signals_deferred:` holds signals back, and forks by other threads; may be nested."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # number of nested blocks that a thread is in, by the thread
        self._forking: int | None = None  # the thread that is about to fork
        self._forks_now = False
        self._forked = threading.Event()
        self._one_fork = threading.Lock()

    # A step has a dozen blocks: most of them end in these lines, without calls of other methods.

    def __enter__(self) -> None:
        me = threading.get_ident()
        if signals.depth and me == signals.main:
            signals.depth += 1
        else:
            signals.hold()
        try:
            self._inside[me] = depth = self._inside.get(me, 0) + 1  # Write, then read: see `_hold_forks`.
            if depth == 1 and self._forking is not None:
                del self._inside[me]
                self._hold_forks(interruptible=True)
        except BaseException:
            signals.let_come()
            raise

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        if depth > 1:
            self._inside[me] = depth - 1
        elif depth == 1:
            del self._inside[me]
        if me == signals.main:
            if signals.depth > 1:
                signals.depth -= 1
            elif signals.depth == 1:
                signals.end()

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was held back. Called in a block, where an interrupt does no harm."""
        if signals.held:
            signals.raise_interrupt()

    @property
    def outermost(self) -> bool:
        """Whether this thread is in exactly one block."""
        return self._inside.get(threading.get_ident()) == 1

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
        """Wait for a fork that is under way, and make the next one wait. A block that goes on (`goes_on`) waits only
        for a fork that has really begun: other threads may be waiting for the block."""
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        # Write, then read; a fork does the same, so at least one of the two sees the other.
        self._inside[me] = depth + 1
        while depth == 0 and self._forking not in (None, me):
            if not self._forks_now and (goes_on or compiling.is_locked()):  # by this thread
                break
            del self._inside[me]
            self._forked.wait(WAIT_SLICE)
            if interruptible:
                signals.raise_interrupt()
            self._inside[me] = 1

    # ---- for the hooks of a fork ------------------------------------------------------------------------------------

    def close_for_fork(self) -> None:
        """Begin a block before a fork. Only one thread forks at a time."""
        signals.hold()
        self._hold_forks()
        with self.forks_allowed():
            self._one_fork.acquire()
        self._forked.clear()
        self._forking = threading.get_ident()

    def wait_for_others(self, end: float) -> None:
        """Wait until no other thread is in a block or compiles, or until the time `end`; then no other thread may begin
        a block. A thread that compiles may begin one until then: the garbage collector may close a table in the
        middle of it."""
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
        """End the block that `close_for_fork` began. Held signals come a moment later: see `come_later`."""
        self._forking, self._forks_now = None, False
        self._forked.set()
        self._one_fork.release()
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        if depth > 1:
            self._inside[me] = depth - 1
        elif depth == 1:
            del self._inside[me]
        signals.come_later()

    def start_anew(self) -> None:
        """In a child process, whose only thread is the one that forked: forget what was held back."""
        self._inside = {}
        self._forking, self._forks_now = None, False
        self._forked, self._one_fork = threading.Event(), threading.Lock()
        signals.start_anew()


signals_deferred = _SignalsDeferred()


class CommitBlock:
    """`with CommitBlock() as block:` From `block.begin()` to the end of the block signals wait. An exception that
    another thread puts into the first line of `__exit__` leaves them waiting: no Python code can rule that out."""

    _begun = False

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Hold signals back."""
        self._begun = signals_deferred.__enter__() is None  # type: ignore[func-returns-value]

    def __exit__(self, *error: object) -> None:
        if self._begun:
            signals_deferred.__exit__()


class _Forked(Protocol):
    """An object whose lock a fork takes."""

    lock: Any
    rank: int
    torn: bool
    """Whether the copy of a child that is being forked is not whole."""

    def get_ready_for_fork(self) -> bool:
        """Whether a child's copy of the object is whole. Called under the lock."""


# A fork is of the whole process: what it waits for is known here, for all objects.
forked_objects: "weakref.WeakSet[_Forked]" = weakref.WeakSet()
"""Objects whose locks a fork takes."""
_held: list[_Forked] = []
_torn: list[_Forked] = []
_nobody_compiles = False


def _before_fork() -> None:
    global _nobody_compiles
    end = time.monotonic() + _FORK_PATIENCE
    signals_deferred.close_for_fork()
    while True:
        signals_deferred.wait_for_others(end)
        _take_turns()
        # After them, since getting ready may mean that other threads of ours compile. A child could never get it.
        _nobody_compiles = compiling._lock.acquire(blocking=False)
        if _nobody_compiles or time.monotonic() > end:
            return
        _give_turns_back()


def _take_turns() -> None:
    for its in sorted(forked_objects, key=lambda its: (its.rank, id(its))):
        if its.torn:
            continue
        whole_now = its.lock.acquire(blocking=False)  # It is free, but where somebody takes too long.
        if whole_now:
            _held.append(its)
            whole_now = its.get_ready_for_fork()
        if not whole_now:
            its.torn = True
            _torn.append(its)


def _give_turns_back() -> None:
    while _held:
        _held.pop().lock.release()
    while _torn:
        _torn.pop().torn = False


def _in_parent() -> None:
    _give_turns_back()
    if _nobody_compiles:
        compiling._lock.release()
    signals_deferred.open_after_fork()


def _in_child() -> None:
    _torn.clear()
    _give_turns_back()
    if _nobody_compiles:
        compiling._lock.release()
    else:
        compiling._lock = threading.RLock()  # The other is of a thread that is not there.
    signals_deferred.start_anew()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
