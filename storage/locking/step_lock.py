"""The lock of a store's training steps, which saves, loads and evaluations of other threads take too.

A step computes on rows in the hot tier and changes them there without the store lock (store_lock.py), so that other
threads can prepare batches at the same time. Calls that read or replace all rows (save, export, load, import, clear, an
`EvalGraph`) have to run between two steps, so they take the step lock, as a step does.

Invariants:
- a thread takes several step locks in one call, which sorts them, so that two threads cannot wait for each other. Step
  locks are taken before any store lock and any `signals_deferred` block, since a fork waits for store locks and blocks;
- a lock is free again when its block ends, at whatever line an interrupt comes.
"""

import collections
import operator
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import CommitBlock
from oneemb.storage.locking.store_lock import StoreLock

T = TypeVar("T")

# Seconds that `between_steps_now` waits for the step of another thread.
_PATIENCE = 1.0

# Largest number of naps of `waiting_first`, of 20 microseconds each.
_NAPS_MAX = 500

_STEPPING = operator.attrgetter("stepping")
_ACQUIRE, _RELEASE = operator.methodcaller("acquire"), operator.methodcaller("release")


class StepLock:
    """The lock of one store's steps."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), signals.process
        self.waiting: set[int] = set()
        """Threads that wait for the lock."""
        self.stepping = False
        """Whether the holder is in the middle of a step."""
        self.late_check: Any = None
        """Checks of steps of which the host does not know yet whether a GPU has made them (`LateCheck` of graph/ops);
        None = there are none. Any, since this package does not import graph."""

    def warn_of_late_error(self) -> None:
        """Warn if a GPU has left out a step and no call has raised the error yet: for a call that must not fail."""
        if self.late_check is not None:
            try:
                self.late_check.resolve()
            except ArithmeticError as error:  # NonFiniteGradientError
                warnings.warn(str(error), stacklevel=4)

    @property
    def lock(self) -> Any:
        """The inner lock, a context manager (type Any, since threading.RLock is not a type in Python 3.11). A child of
        fork gets a new lock, since the old lock may be held by a thread that the child does not have."""
        if self._pid != signals.process:
            self._lock, self._pid, self.waiting = threading.RLock(), signals.process, set()
        return self._lock


def alone(locks: Iterable[StepLock], call: Callable[[], T]) -> T:
    """Run `call` with these locks held. Returns its result. Raises an error of an earlier step that the host has not
    heard of, with nothing done."""
    locks = sorted(locks, key=id)

    def run() -> T:
        for lock in locks:
            if lock.late_check is not None:
                lock.late_check.resolve()
        return call()

    return while_held(_inner_locks(locks), run)


def in_step(locks: Iterable[StepLock], step: Callable[[], T], block: CommitBlock | None = None) -> T:
    """Run a training step with these locks held. Returns the step's result. Until the step ends, `between_steps` raises
    RuntimeError on this thread.

    Args:
        block: begun before the step, with the locks held. The caller ends it, so that handlers of signals that came in
            the step run between two steps, and may save.
    """
    locks = tuple(locks)
    if len(locks) == 1:
        return _in_step_of_one(locks[0], step, block)

    def run() -> T:
        if block is not None:
            block.begin()
        before = list(map(_STEPPING, locks))
        try:
            for lock in locks:
                lock.stepping = True
            return step()
        finally:
            for lock, stepping in zip(locks, before, strict=True):
                lock.stepping = stepping

    return while_held(_inner_locks(sorted(locks, key=id)), run)


def _in_step_of_one(one: StepLock, step: Callable[[], T], block: CommitBlock | None) -> T:
    """`in_step` with one lock, in fewer calls: most models have one embedding."""
    lock, me = one.lock, threading.get_ident()
    owned = lock._is_owned()
    before = owned and one.stepping  # An interrupt may have ended a step before the step could reset this.
    if one.waiting and not owned:
        waiting_first(one)
    try:
        one.waiting.add(me)
        with lock:
            one.waiting.discard(me)
            if block is not None:
                block.begin()
            try:
                one.stepping = True
                return step()
            finally:
                one.stepping = before
    finally:
        one.waiting.discard(me)


def between_steps(locks: Iterable[StepLock], what: str, call: Callable[[], T]) -> T:
    """Run `call` with these locks held, while no thread is in a step. Returns its result. Raises RuntimeError, before
    `call`, if this thread is in a step, so that a hook, a scheduler or a signal handler must have called."""

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
    """Run `call` with this lock held, between two steps. Returns its result, or None, without a call, if this thread is
    in a step or another thread's step takes longer than a second. The wait is bounded since callers may hold other
    locks: an unbounded wait could deadlock."""
    lock = one.lock
    owned = lock._is_owned()
    if not lock.acquire(timeout=_PATIENCE):
        return None
    try:
        one.stepping = one.stepping and owned
        return None if one.stepping else call()
    finally:
        lock.release()


def waiting_first(lock: StepLock | StoreLock) -> None:
    """Let threads that already wait for a lock take the lock first, which Python's locks do not ensure. Wait for
    `_NAPS_MAX` naps at most."""
    naps = 0
    while lock.waiting and naps < _NAPS_MAX:
        time.sleep(2e-5)
        naps += 1


def _inner_locks(locks: Iterable[StepLock]) -> Iterator[Any]:
    """Yield the inner lock of each step lock; the caller takes a lock before it asks for the next one. Threads that
    wait already go first."""
    me = threading.get_ident()
    for one in locks:
        lock = one.lock
        owned = lock._is_owned()
        if one.waiting and not owned:
            waiting_first(one)
        try:
            one.waiting.add(me)
            yield lock
            one.waiting.discard(me)
        finally:
            one.waiting.discard(me)  # Once more, since an interrupt may come before the line above.
        if not owned:
            one.stepping = False  # An interrupt may have ended a step before the step could reset this.


def while_held(locks: Iterable[Any], call: Callable[[], T]) -> T:
    """Run `call` with these locks held. Returns its result.

    Interrupts come only between instructions of Python. `extend` takes each lock and records it in one instruction, and
    `deque` releases all locks in one. With an ExitStack an interrupt could leave a lock taken, and a thousand nested
    `with` blocks overflow Python's stack. For a list of one lock a `with` block is enough.
    """
    if isinstance(locks, list) and len(locks) == 1:
        with locks[0]:
            return call()
    held: list[Any] = []
    giving_back = map(_RELEASE, held)
    try:
        held.extend(filter(_ACQUIRE, locks))
        return call()
    finally:
        collections.deque(giving_back, 0)
