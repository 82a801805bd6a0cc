"""Makes calls on an object atomic: one at a time, and whole in spite of signals, unforeseen errors and forks.

A thread in a block of `with store_lock:` has the object for itself. The lock is reentrant, and also handles

    signals     Python's signal handlers (Ctrl-C raises KeyboardInterrupt) run before a block or after it:
                `signals_deferred` holds signals back while a block runs, and handles them when it has ended
    errors      an error within a block of `changing`, where the object is half changed, and an error that no code
                raises on purpose, leave the object *broken*: it raises BrokenStoreError until its rows are new
    forks       a child process has a copy of the object and shares its files: it may read, not change. A fork waits
                for the `signals_deferred` blocks of other threads, so that the copy is whole; each block of the lock
                is one

Invariants:
- no signal handler of Python runs between the first and the last line of a block in the main thread, but where the
  block lets it (`signals_deferred.raise_interrupt`);
- a broken object gives out no row.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from oneemb.storage.errors import BrokenStoreError, ForkedProcessError, StorageError
from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import WAIT_SLICE, forked_objects, signals_deferred

# Errors that calls raise on purpose, or that the system raises in them, where nothing is half changed.
_FORESEEN = (StorageError, MemoryError, ValueError, TypeError, OSError)


class StoreLock:
    """`with store_lock:` gives the object to the thread that runs it; blocks of one thread may be nested.

    Args:
        what, mend: the object, and what to do when it is broken, for errors.
        rank: objects of lower rank are locked first by a thread that locks several.
    """

    def __init__(self, what: str, mend: str, rank: int):
        self.lock = threading.Condition(threading.RLock())
        self.rank = rank
        self.waiting = 0
        """Number of threads that wait for the lock; not exact."""
        self.before_fork: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns a function to call under the lock before a fork, so that a child can read without threads."""
        self._what, self._mend = what, mend
        self._broken: str | None = None
        self._pid = os.getpid()
        self.torn = False
        """Whether this process is a child that got no whole copy of the object."""
        with signals_deferred:  # No fork comes while the set is half changed.
            forked_objects.add(self)

    def __enter__(self) -> None:
        if self.torn and self.forked:
            self.check(changes=False)  # The lock belongs to a thread that is not there.
        signals_deferred.__enter__()
        try:
            if not self.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            signals_deferred.__exit__()
            raise

    def _wait(self) -> None:
        """Take the lock when others let go of it. Ctrl-C ends that, where nothing has begun."""
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
        """Within the outermost block of this lock: let others have the lock during a block."""
        self.lock.release()
        try:
            with signals_deferred.forks_allowed():
                yield
        finally:
            self.lock.acquire()

    def note(self, error: BaseException | None) -> None:
        """Note the end of a call. An error that left the object half changed (`changing`), or that no code raises on
        purpose, breaks the object."""
        if error is None or error is signals.interrupt:
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
        """Raise BrokenStoreError if a call was cut short, ForkedProcessError if this process is a child that may not
        read, or not change, the object."""
        if self._broken is not None:
            raise BrokenStoreError(
                f"{self._what} is of no use since a call on it was cut short by {self._broken}: what it holds in memory"
                f" may be wrong. Its snapshots are whole; {self._mend}"
            )
        if os.getpid() == self._pid:
            return
        if changes or self.torn:
            raise ForkedProcessError(
                f"{self._what} belongs to process {self._pid}, and this is a child of it, process {os.getpid()}, which"
                f" {'got no whole copy of it' if self.torn else 'may read its rows, not change, save or load them'}."
                " Look ids up with gradients in the process that made the embedding: return ids from data loader"
                " workers, or start them with multiprocessing_context='spawn' and let each make what it needs"
            )

    def mended(self) -> None:
        """Mark the object whole again: what it holds is new."""
        self._broken = None

    def get_ready_for_fork(self) -> bool:
        """Whether a child's copy of the object is whole. Called under the lock."""
        try:
            get_ready = self.before_fork()
            if get_ready is not None and not self.broken and not self.forked:
                get_ready()
        except StorageError:
            return True  # It says the same to whoever calls it next.
        except BaseException:
            return False
        return True


class _Changing:
    """`with changing:` marks lines between which an object is half changed. Any error that leaves the block, other than
    that of `raise_interrupt`, breaks each object whose lock is held."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and error is not signals.interrupt:
            error.left_half_changed = True  # type: ignore[attr-defined]


changing = _Changing()


class whole:
    """`with whole(objects):` defers signals, and an unforeseen error breaks these objects: for changes of several
    objects together, or without their locks. Errors that leave everything in order may leave the block."""

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
