"""The lock of a store's training steps, which saves, loads and evaluations of other threads take too.

A step computes on rows in the hot tier and changes them there without the store lock (store_lock.py), so that other
threads can prepare batches meanwhile. What reads or replaces all rows (save, export, load, import, clear, an
`EvalGraph`) has to run between two steps: it holds this lock, as a step does.

Invariants:
- several locks are taken in one call, which sorts them: so two threads cannot wait for each other. They are taken
  before any store lock and any `signals_deferred` block, since a fork waits for those;
- a lock is free again when its block ends, whatever line an interrupt comes at.
"""

import collections
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# How long `between_steps_now` waits for the step of another thread, in seconds.
_PATIENCE = 1.0

# Naps of 20 microseconds at most, in which a thread that takes a lock lets waiting ones go first.
_NAPS_MAX = 500

_STEPPING = operator.attrgetter("stepping")
_ACQUIRE, _RELEASE = operator.methodcaller("acquire"), operator.methodcaller("release")


class StepLock:
    """The lock of one store's steps."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self.waiting: set[int] = set()
        self.stepping = False
        """Whether the holder is in the middle of a step."""

    @property
    def lock(self) -> Any:
        """The lock, a context manager. Any, since threading.RLock is no type in Python 3.11. A child of fork gets a new
        lock: a thread that the child lacks may hold the old one."""
        if self._pid != os.getpid():
            self._lock, self._pid, self.waiting = threading.RLock(), os.getpid(), set()
        return self._lock


def alone(locks: Iterable[StepLock], call: Callable[[], T]) -> T:
    """Run `call` with these locks held; returns what it gives."""
    return while_held(_taking_turns(sorted(locks, key=id)), call)


def in_step(locks: Iterable[StepLock], step: Callable[[], T]) -> T:
    """Run a training step with these locks held; returns what it gives. Until it ends, `between_steps` on this thread
    raises."""
    locks = tuple(locks)

    def run() -> T:
        before = list(map(_STEPPING, locks))
        try:
            for lock in locks:
                lock.stepping = True
            return step()
        finally:
            for lock, stepping in zip(locks, before, strict=True):
                lock.stepping = stepping

    return while_held(_taking_turns(sorted(locks, key=id)), run)


def between_steps(locks: Iterable[StepLock], what: str, call: Callable[[], T]) -> T:
    """Run `call` with these locks held and no step under way on any thread; returns its result. Raises RuntimeError,
    with nothing done, if this thread is in a step: a hook, a scheduler or a signal handler calls."""

    def run() -> T:
        if any(lock.stepping for lock in locks):
            raise RuntimeError(
                f"{what} was called in the middle of a step, from a hook, a scheduler or a signal handler, when some"
                " rows and parameters are updated and others are not; call it between two steps: a signal handler can"
                " set a flag that the training loop checks after each step"
            )
        return call()

    locks = tuple(locks)
    return alone(locks, run)


def between_steps_now(one: StepLock, call: Callable[[], T]) -> T | None:
    """Run `call` with this lock held, between steps. Returns its result; None = a step is under way on this thread, or
    another thread's takes longer than a second: the wait is bounded, so that callers with other locks cannot
    deadlock."""
    lock = one.lock
    owned = lock._is_owned()
    if not lock.acquire(timeout=_PATIENCE):
        return None
    try:
        one.stepping = one.stepping and owned
        return None if one.stepping else call()
    finally:
        lock.release()


def _taking_turns(locks: Iterable[StepLock]) -> Iterator[Any]:
    """Yield the inner lock of each step lock; the caller takes it before it asks for the next one. Waiting threads go
    first: Python's locks are not fair."""
    me = threading.get_ident()
    for one in locks:
        lock = one.lock
        owned = lock._is_owned()
        naps = 0
        while one.waiting and not owned and naps < _NAPS_MAX:
            time.sleep(2e-5)
            naps += 1
        try:
            one.waiting.add(me)
            yield lock
            one.waiting.discard(me)
        finally:
            one.waiting.discard(me)  # Again: an interrupt may come before either line.
        if not owned:
            one.stepping = False  # An interrupt may have ended a step before it could say so.


def while_held(locks: Iterable[Any], call: Callable[[], T]) -> T:
    """Run `call` with these locks held. Returns its result.

    Interrupts come between instructions of Python only: `extend` takes each lock and notes it in one, `deque` releases
    all in one. An ExitStack would leave a lock taken, and nested `with` blocks overflow Python's stack with a thousand
    locks.
    """
    held: list[Any] = []
    giving_back = map(_RELEASE, held)
    try:
        held.extend(filter(_ACQUIRE, locks))
        return call()
    finally:
        collections.deque(giving_back, 0)
