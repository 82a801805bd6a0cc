"""Blocks that signals and forks wait for: `with signals_deferred:`.

signals     are handled when the outermost block has ended, in the main thread (signals.py)
forks       a fork waits for the blocks of other threads, and for the lock of each object (store_lock.py), so that the
            child has a complete copy. After a minute the fork waits no longer: the child then has no complete copy of
            an object that is still locked, and the object is marked as torn in the child
"""

# Imported before our fork hooks are registered, so that the hooks of these modules run after ours: the locks that they
# hold during a fork must be free while our hooks wait for other threads.
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
"""Seconds that a thread waits for a lock, or for a fork, before it looks whether Ctrl-C came."""

# Seconds that a fork waits for a call of another thread. If the fork does not get an object's lock, the child's copy of
# the object is unusable, and calls on it raise an error that says so.
_FORK_PATIENCE = 60.0


class _SignalsDeferred:
    """`with signals_deferred:` defers signals, and forks by other threads. Blocks may be nested."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # {thread: number of nested blocks that it is in}
        self._forking: int | None = None  # the thread that is about to fork
        self._forks_now = False
        self._forked = threading.Event()
        self._one_fork = threading.Lock()

    # A step has a dozen blocks. For speed, most of them run only these lines and call no other method.

    def __enter__(self) -> None:
        me = threading.get_ident()
        if depth := self._inside.get(me):  # The outermost block holds signals and forks.
            self._inside[me] = depth + 1
            return
        signals.hold()
        try:
            self._inside[me] = 1  # Write, then read: see `_hold_forks`.
            if self._forking is not None:
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
            return
        if depth == 1:
            del self._inside[me]
        signals.let_come()

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was deferred. Call it at points of a block where an interrupt is
        harmless."""
        if signals.held:
            signals.raise_interrupt()

    @property
    def outermost(self) -> bool:
        """Whether this thread is in exactly one block."""
        return self._inside.get(threading.get_ident()) == 1

    @contextmanager
    def forks_allowed(self) -> Iterator[None]:
        """Let other threads fork while `with ... .forks_allowed():` runs, at a point of a block where all data is
        consistent. Does nothing in a nested block."""
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
        """Wait for a fork that is under way, and make the next fork wait. A block that continues (`goes_on`) waits only
        for a fork that no longer waits for blocks: the forking thread may be waiting for this very block."""
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        # Write, then read. A fork does the same, so at least one of the two threads sees the other.
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
        """Begin the fork of this thread, as a block. Only one thread forks at a time."""
        signals.hold()
        self._hold_forks()
        with self.forks_allowed():
            self._one_fork.acquire()
        self._forked.clear()
        self._forking = threading.get_ident()

    def wait_for_others(self, end: float) -> None:
        """Wait until no other thread is in a block or compiles, or until the time `end`; from then on no other thread
        may begin a block. Until then a thread that compiles may begin one: the garbage collector may close a table in
        the middle of a compilation."""
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
        """End the block that `close_for_fork` began. Deferred signals are sent again a moment later (`come_later`)."""
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
        """In a child process, whose only thread is the one that forked: forget blocks, forks and deferred signals."""
        self._inside = {}
        self._forking, self._forks_now = None, False
        self._forked, self._one_fork = threading.Event(), threading.Lock()
        signals.start_anew()


signals_deferred = _SignalsDeferred()


class CommitBlock:
    """`with CommitBlock() as block:` defers signals from `block.begin()` to the end of the block. If another thread
    raises an exception in the first line of `__exit__`, signals stay deferred; no Python code can prevent that."""

    _begun = False

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Defer signals from here on."""
        self._begun = signals_deferred.__enter__() is None  # type: ignore[func-returns-value]

    def __exit__(self, *error: object) -> None:
        if self._begun:
            signals_deferred.__exit__()


class _Forked(Protocol):
    """An object whose lock a fork takes."""

    lock: Any
    rank: int
    torn: bool
    """Whether a child that is being forked gets no complete copy of the object."""

    def get_ready_for_fork(self) -> bool:
        """Prepare for a fork, under the lock. Returns whether a child's copy of the object is complete."""


# A fork copies the whole process, so this module lists all objects for which a fork waits.
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
        _lock_objects()
        # numba's lock comes after the objects', since objects that get ready for a fork may compile on other threads.
        # If another thread held the lock during the fork, the child could never take it.
        _nobody_compiles = compiling._lock.acquire(blocking=False)
        if _nobody_compiles or time.monotonic() > end:
            return
        _unlock_objects()


def _lock_objects() -> None:
    for forked in sorted(forked_objects, key=lambda forked: (forked.rank, id(forked))):
        if forked.torn:
            continue
        is_complete = forked.lock.acquire(blocking=False)  # The lock is free, unless `wait_for_others` has timed out.
        if is_complete:
            _held.append(forked)
            is_complete = forked.get_ready_for_fork()
        if not is_complete:
            forked.torn = True
            _torn.append(forked)


def _unlock_objects() -> None:
    while _held:
        _held.pop().lock.release()
    while _torn:
        _torn.pop().torn = False


def _in_parent() -> None:
    _unlock_objects()
    if _nobody_compiles:
        compiling._lock.release()
    signals_deferred.open_after_fork()


def _in_child() -> None:
    _torn.clear()
    _unlock_objects()
    if _nobody_compiles:
        compiling._lock.release()
    else:
        compiling._lock = threading.RLock()  # The old lock is held by a thread that this process does not have.
    signals_deferred.start_anew()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
