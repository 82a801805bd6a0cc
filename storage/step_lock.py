"""One step at a time: who trains rows, and who wants them as they are between two steps.

A step computes with rows that lie in memory, and changes them there, without a turn (storage/turns.py): others find and
bring rows meanwhile. What takes all rows as they are, or puts others in their place, waits for the step of another
thread, and the next step waits for it. So does an `EvalGraph` that shares an embedding with it.

Invariants:
- who holds several locks has taken them in one call, or else others in no other order; and before any turn and any
  `undisturbed` block, for which a fork would wait;
- a lock is free again when its block ends, at whatever line an interrupt comes.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

__all__ = ["StepLock", "alone", "between_steps", "in_step", "while_held"]

T = TypeVar("T")

# How long who takes a lock often gives way to others that wait for it, in naps of 20 microseconds.
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
        """To be held with `with`. A child of fork has its own: the other may be held by a thread that is not there."""
        if self._pid != os.getpid():
            self._lock, self._pid, self.waiting = threading.RLock(), os.getpid(), set()
        return self._lock


def alone(locks: Iterable[StepLock], call: Callable[[], T]) -> T:
    """What `call` gives, while no other thread holds one of these locks."""
    return _alone(sorted(locks, key=id), call)


def in_step(locks: Iterable[StepLock], step: Callable[[], T]) -> T:
    """What `step` gives: as `alone`, and until it ends nothing on this thread is between two steps."""
    locks = tuple(locks)

    def run() -> T:
        before = [one.stepping for one in locks]
        try:
            for one in locks:
                one.stepping = True
            return step()
        finally:
            for one, stepping in zip(locks, before, strict=True):
                one.stepping = stepping

    return alone(locks, run)


def between_steps(locks: Iterable[StepLock], what: str, call: Callable[[], T]) -> T:
    """What `call` gives, between two steps of every thread.

    Raises:
        RuntimeError: it is asked for in the middle of a step of this very thread, by a hook, a scheduler or a handler
            of a signal; nothing has been done.
    """

    def run() -> T:
        if any(one.stepping for one in locks):
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
    one, me = locks[0], threading.get_ident()
    lock = one.lock
    owned = lock._is_owned()
    naps = 0
    while one.waiting and not owned and naps < _NAPS_MAX:  # They would hardly get it from who has it often.
        time.sleep(2e-5)
        naps += 1
    try:
        one.waiting.add(me)
        # The lock itself, not a function of ours: between taking it and its block no interrupt can come.
        with lock:
            one.waiting.discard(me)
            if not owned:
                one.stepping = False  # An interrupt may have ended a step before it could say so.
            return _alone(locks[1:], call)
    finally:
        one.waiting.discard(me)


def while_held(locks: Sequence[Any], call: Callable[[], T]) -> T:
    """What `call` gives with these locks held. Not an ExitStack: an exception that comes within its code would leave
    one locked."""
    if not locks:
        return call()
    with locks[0]:
        return while_held(locks[1:], call)
