"""Runs one CPU loop on several cores, without the interpreter lock: its range is split into a few shares per thread.

Threads take shares as they become free. The calling thread works too, and waits for no thread that has not begun: if
other programs use the cores, a thread that does not get to run costs no time.

Invariant: the shares depend on the range and the number of threads only, and a loop writes nothing that another share
reads; so results do not depend on scheduling. Loops are written so that results do not depend on the shares either.

Linux tends to wake a thread that has slept for some milliseconds on the core of the thread that wakes it, and leaves
both there for as long as a loop takes; so the threads are kept off the core of the caller.

Why not numba's own parallel loops: two Python threads that enter one at the same time abort the process under its
default threading layer, the other layers are not there on every machine, and compiling takes three times as long.
"""

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Threads", "available_cores", "submit", "within_thread_code"]

_T = TypeVar("_T")

# The smallest share worth waking a thread for: that costs about 20 microseconds.
_SHARE_MIN = 512

# Shares for each thread: more of them balance cores of different speed; each costs about 10 microseconds.
_SHARES = 8


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_core() -> Callable[[], int] | None:
    """A function that gives the core it is called on; None if the system has none, or lets no thread choose its
    cores."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.PyDLL(None).sched_getcpu
    except AttributeError:
        return None


_core = _find_core()


class Threads:
    """A fixed number of threads that run CPU loops.

    Args:
        count: threads in use at once, the calling one among them; None = the cores this process may run on.

    Raises:
        TypeError, ValueError: count is no int, or below 1.
    """

    def __init__(self, count: int | None = None):
        if count is None:
            count = available_cores()
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_threads must be an int, or None for all cores, got {type(count).__name__} {count!r}")
        if count < 1:
            raise ValueError(f"num_threads: the number of threads must be at least 1, got {count}")
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            self._make_pool()

    def _make_pool(self) -> ThreadPoolExecutor:
        """The threads of this process. A forked child has none of its parent's threads, and locks that they held at the
        fork stay held in it, so it makes a pool of its own."""
        self._thread_ids: list[int] = []
        self._kept_off: tuple[int, int] | None = None  # the core, and the number of threads kept off it
        # Threads must not refer to this object: they end when it is garbage collected.
        pool = ThreadPoolExecutor(
            self.count - 1, thread_name_prefix="oneemb-kernel", initializer=_note_thread, initargs=(self._thread_ids,)
        )
        self._pool, self._process = pool, os.getpid()
        return pool

    def run(self, loop: Callable[..., Any], size: int, *args: Any, share_min: int = _SHARE_MIN) -> None:
        """Call `loop(begin, end, *args)` so that the shares cover 0..size exactly once.

        An exception in any share is raised here, after all shares have ended.
        """
        pool = self._pool
        if size < 2 * share_min or self.count == 1 or pool is None:
            loop(0, size, *args)
            return
        shares = min(self.count * _SHARES, size // share_min)
        if self._process != os.getpid():
            pool = self._make_pool()
        begin = itertools.count()
        errors = []

        def work() -> None:
            while (i := next(begin)) < shares:
                try:
                    loop(size * i // shares, size * (i + 1) // shares, *args)
                except BaseException as error:
                    errors.append(error)

        self._keep_off_this_core()
        others = [submit(pool, work) for _ in range(min(self.count, shares) - 1)]
        try:
            work()
        finally:
            wait([other for other in others if not other.cancel()])
        if errors:
            raise errors[0]

    def _keep_off_this_core(self) -> None:
        if _core is None:
            return
        now = _core(), len(self._thread_ids)
        cores = os.sched_getaffinity(0) - {now[0]} if now != self._kept_off else None
        if not cores:
            return
        for thread_id in self._thread_ids[: now[1]]:
            try:
                os.sched_setaffinity(thread_id, cores)
            except OSError:  # the thread has ended, or may not choose: it runs where it is put
                pass
        self._kept_off = now

    def close(self) -> None:
        """End the threads. The object cannot run a loop on several threads afterwards."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None


def within_thread_code() -> bool:
    """Whether this thread is in the middle of a call of `threading` or of an executor, whose locks it may hold: the
    garbage collector may call a finalizer there, which must not wait for a thread, start one or end a pool.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _THREAD_CODE:
            begins = (
                code.co_name == "_bootstrap_inner" and inner != "run"
            )  # A thread that runs its function is past it.
            if begins or code.co_name not in _RUNS_OTHERS:
                return True
        frame, inner = frame.f_back, code.co_name
    return False


_THREAD_CODE = {sys.modules[kind.__module__].__file__ for kind in (threading.Thread, Future, ThreadPoolExecutor)}
_RUNS_OTHERS = {"_bootstrap", "_bootstrap_inner", "run", "_worker"}
"""What is on the stack of every thread below what it runs, and holds no lock then."""


# Messages of a pool's RuntimeErrors after which `submit` runs the work itself.
_NOT_RUN = ("cannot schedule new futures after", "can't start new thread")


class _Here(threading.local):
    submitting = False


_here = _Here()


def submit(pool: Executor, function: Callable[..., _T], *args: Any) -> Future[_T]:
    """`pool.submit`, but the caller runs the function itself where the pool cannot:

    - the interpreter is shutting down and pools accept no work, while the user's threads and exit functions still run;
    - no thread can be started: the pool has queued the work all the same, and another of its threads may run it first;
    - a signal handler has interrupted a call of this function: the pools' locks are not reentrant.
    """
    once, done = threading.Lock(), list[Future[_T]]()

    def run() -> Future[_T]:
        with once:  # Another thread that has begun is waited for.
            if not done:
                done.append(_run(function, *args))
        return done[0]

    if not _here.submitting:
        _here.submitting = True
        try:
            return pool.submit(lambda: run().result())
        except RuntimeError as error:
            if not any(reason in str(error) for reason in _NOT_RUN):
                raise
        finally:
            _here.submitting = False
    return run()


def _run(function: Callable[..., _T], *args: Any) -> Future[_T]:
    """Run a function here. Returns its result or error, as an executor does."""
    done: Future[_T] = Future()
    try:
        done.set_result(function(*args))
    except BaseException as error:
        done.set_exception(error)
    return done


def _note_thread(thread_ids: list[int]) -> None:
    thread_ids.append(threading.get_native_id())
