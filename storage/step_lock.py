"""The lock of a store's training steps, which saves, loads and evaluations of other threads take too.

A step computes on rows in the hot tier and changes them there without holding a turn (storage/turns.py), so that other
threads can prepare batches meanwhile. What reads or replaces all rows (save, export, load, import, clear, an
`EvalGraph`) has to run between two steps: it holds this lock, as a step does.

Invariants:
- several locks are taken in one call, which sorts them: so two threads cannot wait for each other. They are taken
  before any turn and any `undisturbed` block, since a fork waits for those;
- a lock is free again when its block ends, whatever line an interrupt comes at.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

__all__ = ["StepLock", "alone", "between_steps", "in_step", "while_held"]

T = TypeVar("T")

# Naps of 20 microseconds at most, in which a thread that takes a lock lets waiting ones go first.
_NAPS_MAX = 500


class StepLock:
    """The lock of one store's steps."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self.waiting: set[int] = set()
        self.stepping = False
        """Whether who holds it is in the middle of a step."""

    @property
    def lock(self) -> Any:
        """A context manager; Any, since threading.RLock is no type in Python 3.11. A child of fork gets a new lock: the
        old one may be held by a thread that is not there."""
        if self._pid != os.getpid():
            self._lock, self._pid, self.waiting = threading.RLock(), os.getpid(), set()
        return self._lock


def alone(locks: Iterable[StepLock], call: Callable[[], T]) -> T:
    """Run `call` with these locks held; returns what it gives."""
    return _alone(sorted(locks, key=id), call)


def in_step(locks: Iterable[StepLock], step: Callable[[], T]) -> T:
    """Run a training step with these locks held; returns what it gives. Until it ends, `between_steps` on this thread
    raises."""
    locks = tuple(locks)

    def run() -> T:
        before = [lock.stepping for lock in locks]
        try:
            for lock in locks:
                lock.stepping = True
            return step()
        finally:
            for lock, stepping in zip(locks, before, strict=True):
                lock.stepping = stepping

    return alone(locks, run)


def between_steps(locks: Iterable[StepLock], what: str, call: Callable[[], T]) -> T:
    """Run `call` with these locks held and no step under way on any thread; returns what it gives.

    Raises:
        RuntimeError: it is asked for in the middle of a step of this very thread, by a hook, a scheduler or a handler
            of a signal; nothing has been done.
    """

    def run() -> T:
        if any(lock.stepping for lock in locks):
            raise RuntimeError(
                f"{what} comes in the middle of a step, by a hook, a scheduler or a handler of a signal, where rows and"
                " parameters are of no one moment; do it between two steps: let the handler set a flag, and look at"
                " it after each call"
            )
        return call()

    locks = tuple(locks)
    return alone(locks, run)


def _alone(locks: Sequence[StepLock], call: Callable[[], T]) -> T:
    if not locks:
        return call()
    first, me = locks[0], threading.get_ident()
    lock = first.lock
    owned = lock._is_owned()
    naps = 0
    # Python's locks are not fair: a thread that takes it again and again would leave others waiting.
    while first.waiting and not owned and naps < _NAPS_MAX:
        time.sleep(2e-5)
        naps += 1
    try:
        first.waiting.add(me)
        # `with` on the lock itself: no interrupt can come between taking it and the block.
        with lock:
            first.waiting.discard(me)
            if not owned:
                first.stepping = False  # An interrupt may have ended a step before it could say so.
            return _alone(locks[1:], call)
    finally:
        first.waiting.discard(me)


def while_held(locks: Sequence[Any], call: Callable[[], T]) -> T:
    """Run `call` with these locks held; returns what it gives. Not an ExitStack: an interrupt within its own code would
    leave a lock taken."""
    if not locks:
        return call()
    with locks[0]:
        return while_held(locks[1:], call)
