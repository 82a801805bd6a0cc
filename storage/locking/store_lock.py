"""Makes calls on an object atomic: one call at a time, and complete in spite of signals, unforeseen errors and forks.

A thread in a block of `with store_lock:` has the object for itself. The lock is reentrant, and also handles

    signals     Python's signal handlers (Ctrl-C raises KeyboardInterrupt) run before a block or after it:
                `signals_deferred` defers signals while a block runs
    errors      an error within a block of `changing`, where the object is half changed, and an error that no code
                raises on purpose, leave the object *broken*: calls raise BrokenStoreError until all its rows are
                replaced
    forks       a child process has a copy of the object and shares its files, so it may read but not change. Each block
                of the lock is a `signals_deferred` block, and a fork waits for such blocks of other threads, so that
                the child's copy is complete

Invariants:
- between the first and the last line of a block in the main thread no signal handler of Python runs, except where the
  block calls `signals_deferred.raise_interrupt`;
- a broken object returns no row.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from oneemb.storage.errors import BrokenStoreError, ForkedProcessError, StorageError
from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import WAIT_SLICE, forked_objects, signals_deferred

# Errors that calls raise on purpose, or that the system raises, at points where nothing is half changed.
_FORESEEN = (StorageError, MemoryError, ValueError, TypeError, OSError)


class StoreLock:
    """`with store_lock:` gives the object to the thread that runs the block. Blocks of one thread may be nested.

    Args:
        what, mend: words for errors: the object, and what to do if it is broken.
        rank: a thread that locks several objects locks those of lower rank first.
    """

    def __init__(self, what: str, mend: str, rank: int):
        self.lock = threading.Condition(threading.RLock())
        self.rank = rank
        self.waiting = 0
        """Number of threads that wait for the lock; not exact."""
        self.before_fork: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns the function, or None, to call under the lock before a fork, so that a child can read without
        threads."""
        self._what, self._mend = what, mend
        self._broken: str | None = None
        self._pid = signals.process
        self.torn = False
        """Whether this process is a child that got no complete copy of the object."""
        with signals_deferred:  # No fork happens while the set is half changed.
            forked_objects.add(self)

    def __enter__(self) -> None:
        if self.torn and self.forked:
            self.check(changes=False)  # Raises: the lock belongs to a thread that this process does not have.
        signals_deferred.__enter__()
        try:
            if not self.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            signals_deferred.__exit__()
            raise

    def _wait(self) -> None:
        """Take the lock once other threads have released it. Ctrl-C ends the wait, unless this is a nested block."""
        self.waiting += 1
        try:
            while not self.lock.acquire(timeout=WAIT_SLICE):
                if signals_deferred.outermost:
                    signals_deferred.raise_interrupt()
        finally:
            self.waiting -= 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.note(error)
        self.lock.release()
        signals_deferred.__exit__()

    @contextmanager
    def others_allowed(self) -> Iterator[None]:
        """Release the lock while `with ... .others_allowed():` runs, within the outermost block of this lock."""
        with self.threads_allowed(), signals_deferred.forks_allowed():
            yield

    @contextmanager
    def threads_allowed(self) -> Iterator[None]:
        """Release the lock as `others_allowed` does, but let forks wait."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def note(self, error: BaseException) -> None:
        """Mark the object as broken if a call has ended with an error that left the object half changed (`changing`),
        or that no code raises on purpose."""
        if error is signals.interrupt:
            return
        if not (isinstance(error, _FORESEEN) or _says_memory_ran_out(error)) or hasattr(error, "left_half_changed"):
            self.cut_short(error)

    def cut_short(self, error: BaseException) -> None:
        """Mark the object as broken: this error has ended a call half way, so the object's rows may be wrong."""
        self._broken = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the object. The answer comes from the system, since a
        finalizer may ask in a child before our hook there has set `signals.process`."""
        return os.getpid() != self._pid

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def check(self, *, changes: bool) -> None:
        """Raise BrokenStoreError if the object is broken; ForkedProcessError if this process is a child of fork and
        `changes`, or if the child has no complete copy."""
        if self._broken is not None:
            raise BrokenStoreError(
                f"{self._what} cannot be used any more: a call on it was cut short by {self._broken}, so its rows in"
                f" memory may be wrong. Its snapshots are complete; {self._mend}"
            )
        if signals.process == self._pid:
            return
        if changes or self.torn:
            raise ForkedProcessError(
                f"{self._what} belongs to process {self._pid}, and this is a child of it, process {signals.process},"
                f" which {'got no complete copy' if self.torn else 'may read its rows, not change, save or load them'}."
                " Look ids up with gradients in the process that made the embedding: return ids from data loader"
                " workers, or start the workers with multiprocessing_context='spawn' and make an embedding in each"
            )

    def mended(self) -> None:
        """Mark the object as no longer broken, after all its rows have been replaced."""
        self._broken = None

    def get_ready_for_fork(self) -> bool:
        """Prepare for a fork, under the lock. Returns whether a child's copy of the object is complete."""
        try:
            get_ready = self.before_fork()
            if get_ready is not None and not self.broken and not self.forked:
                get_ready()
        except StorageError:
            return True  # The object is consistent: its next call raises the same error, in the child too.
        except BaseException:
            return False
        return True


class _Changing:
    """`with changing:` marks lines in which an object is half changed. Any error that leaves the block, except that of
    `raise_interrupt`, breaks each object whose lock is held."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and error is not signals.interrupt:
            error.left_half_changed = True  # type: ignore[attr-defined]


changing = _Changing()


class whole:
    """`with whole(objects):` defers signals, and breaks these objects if an unforeseen error leaves the block. For
    changes of several objects together, or without their locks. Errors that calls raise on purpose break nothing."""

    def __init__(self, objects: Iterable[StoreLock]):
        self._objects = objects

    def __enter__(self) -> None:
        signals_deferred.__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                for store_lock in self._objects:
                    store_lock.note(error)
        finally:
            signals_deferred.__exit__()


def _says_memory_ran_out(error: BaseException) -> bool:
    """Whether torch raised this error because memory ran out, on a GPU or on the host. torch is not imported."""
    return (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, RuntimeError)
        and ("DefaultCPUAllocator: can't allocate memory" in str(error))
    )
