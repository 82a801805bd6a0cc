"""Runs one CPU loop on several cores, without the interpreter lock: its range is split into a few shares per thread.

Threads take shares as they become free. The calling thread works too, and waits for no thread that has not begun: if
other programs use the cores, a thread that does not get to run costs no time.

Invariant: the shares depend on the range and the number of threads only, and a loop writes nothing that another share
reads; so results do not depend on scheduling. Loops are written so that results do not depend on the shares either.

Linux tends to wake a thread that has slept for some milliseconds on the core of the thread that wakes it, and leaves
both there for as long as a loop takes; so the threads are kept off the core of the caller.

numba's own parallel loops are not used: with numba's default threading layer, two Python threads that enter such a loop
at the same time abort the process; other layers are not installed on every machine; and compiling takes three times as
long. torch's OpenMP threads are not used: the caller waits until each of them has begun, however long that takes.
"""

import _thread
import ctypes
import mmap
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, Protocol, TypeVar

import numpy as np

from oneemb.kernels.jit import CpuLoop
from oneemb.kernels.jit_team import TEAM_WORDS, begin_team, end_team, launcher, serve

_T = TypeVar("_T")

# Least size of a share that is worth waking a thread for, which costs about 10 microseconds.
_SHARE_MIN = 2048

SHARES = 8
"""Largest number of shares for each thread. Several shares balance cores of different speed."""


def available_cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_core() -> Callable[[], int] | None:
    """Function that returns the number of the core on which it is called. None if the system has no such function, or
    does not let threads choose their cores."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.PyDLL(None).sched_getcpu
    except AttributeError:
        return None


_core = _find_core()


class Threads:
    """A fixed number of threads that run CPU loops, the calling thread included; None = one for each available core.
    Raises TypeError or ValueError if the number is not an int or is below 1."""

    def __init__(self, count: int | None = None):
        if count is None:
            count = available_cores()
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_threads must be an int, or None for all cores, got {type(count).__name__} {count!r}")
        if count < 1:
            raise ValueError(f"num_threads: the number of threads must be at least 1, got {count}")
        self.count = count
        self._team: _Team | None = None
        self._closed = False

    def run(self, loop: CpuLoop, size: int, *args: Any, share_min: int = _SHARE_MIN) -> None:
        """Call `loop(begin, end, *args)` for shares that together cover 0 to `size` exactly once. Raises MemoryError,
        after all shares have ended, if a loop could not allocate memory."""
        if size < 2 * share_min or (shares := self.shares_of(size, share_min)) == 1:
            loop(0, size, *args)
            return
        team = self._team
        if team is None or team.process != os.getpid():
            # Two threads that come here at once make two teams; one of the teams ends with its call.
            team = self._team = _Team(self.count - 1)
        team.keep_off_this_core()
        launch: CpuLoop = getattr(loop, "launcher", None) or launcher(loop)
        launch(team.address, min(self.count, shares) - 1, shares, size, *args)

    def shares_of(self, size: int, share_min: int) -> int:
        """Number of shares into which `run` divides a range."""
        if size < 2 * share_min or self.count == 1 or self._closed:
            return 1
        return min(self.count * SHARES, size // share_min)

    def close(self) -> None:
        """End the threads. Loops run on the calling thread afterwards."""
        self._closed = True
        if self._team is not None:
            self._team.close()


class _Team:
    """The helping threads of one process. A child of fork has none of its parent's threads, and sees the memory that
    they share as it was at the fork."""

    def __init__(self, helpers: int):
        words = np.zeros(TEAM_WORDS + 8, np.int64)
        self.address = -(-words.ctypes.data // 64) * 64
        self.process = os.getpid()
        begin_team(self.address)
        self.thread_ids: list[int] = []
        self.kept_off: tuple[int, int] | None = None  # the core, and the number of threads kept off it
        self._end = weakref.finalize(self, _end, words, self.address, self.process)
        self._end.atexit = False  # The program's exit functions may still run loops.
        self.threads = list[threading.Thread]()
        for _ in range(helpers):
            # The target must not refer to this object, since the thread ends when the object is garbage collected.
            thread = threading.Thread(
                target=_serve, args=(words, self.address, self.thread_ids), name="oneemb-kernel", daemon=True
            )
            try:
                start(thread)
            except RuntimeError:  # No thread can be started: the existing ones do all the work.
                break
            self.threads.append(thread)

    def keep_off_this_core(self) -> None:
        if _core is None:
            return
        now = _core(), len(self.thread_ids)
        cores = os.sched_getaffinity(0) - {now[0]} if now != self.kept_off else None
        if not cores:
            return
        for thread_id in self.thread_ids[: now[1]]:
            try:
                os.sched_setaffinity(thread_id, cores)
            except OSError:  # the thread has ended, or may not choose: it runs where it is put
                pass
        self.kept_off = now

    def close(self) -> None:
        if self.process == os.getpid():
            self._end()
            for thread in self.threads:
                thread.join()


def _serve(words: np.ndarray, address: int, thread_ids: list[int]) -> None:
    """Work as a helper until the team ends. `words`, the team's memory, stays allocated as long as the thread runs."""
    thread_ids.append(threading.get_native_id())
    serve(address)
    del words


def _end(words: np.ndarray, address: int, process: int) -> None:
    if process == os.getpid():
        end_team(address)
    del words


def within_thread_code() -> bool:
    """Whether this thread is inside a call of `threading` or of an executor, whose locks it may hold. The garbage
    collector may call a finalizer there; the finalizer must not wait for a thread, start a thread or end a pool."""
    frame: FrameType | None = sys._getframe(1)
    inner = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _THREAD_CODE:
            # `_bootstrap_inner` holds a lock until it calls `run`.
            begins = code.co_name == "_bootstrap_inner" and inner != "run"
            if begins or code.co_name not in _RUNS_OTHERS:
                return True
        frame, inner = frame.f_back, code.co_name
    return False


_THREAD_CODE = {sys.modules[kind.__module__].__file__ for kind in (threading.Thread, Future, ThreadPoolExecutor)}
_RUNS_OTHERS = {"_bootstrap", "_bootstrap_inner", "run", "_worker"}
"""Functions of `_THREAD_CODE` that hold no lock while they call the function that a thread was given."""


# Parts of the RuntimeErrors of a pool that takes no more work, and of a thread that cannot start, because memory is
# short or the interpreter ends.
_NOT_RUN = ("cannot schedule new futures after", "can't start new thread", "can't create new thread")


def not_run(error: RuntimeError) -> bool:
    """Whether a pool or a thread has raised this error because no thread can be started."""
    return any(reason in str(error) for reason in _NOT_RUN)


def submit(pool: Executor, function: Callable[..., _T], *args: Any) -> Future[_T]:
    """`pool.submit`, except that the caller runs the function itself if the pool cannot:

    - the interpreter is shutting down and pools accept no work, while the user's threads and exit functions still run;
    - no thread can be started: the pool may have queued the work all the same, and another of its threads may run it
      first; see `start`;
    - a signal handler has interrupted a call of a pool: the pools' locks are not reentrant.
    """
    once, done = threading.Lock(), list[Future[_T]]()

    def run() -> Future[_T]:
        with once:  # If another thread has begun the work, wait for it.
            if not done:
                done.append(_run(function, *args))
        return done[0]

    if not within_thread_code() and (_is_full(pool) or _has_room_for_thread()):
        try:
            return pool.submit(lambda: run().result())
        except RuntimeError as error:
            if not not_run(error):
                raise
    return run()


def start(thread: threading.Thread) -> None:
    """`thread.start()` that raises RuntimeError if there is too little memory for a thread. Python's own call waits for
    ever if the new thread runs out of memory before it reports that it has begun."""
    if not _has_room_for_thread():
        raise RuntimeError("can't start new thread: its stack and first objects do not fit the process's memory limit")
    thread.start()


# Beside its stack a thread allocates an arena of Python's allocator, and reserves address space for one of the C
# library.
_OBJECT_BYTES, _ARENA_BYTES = 4 << 20, 64 << 20
_STACK_BYTES = 8 << 20


def _has_room_for_thread() -> bool:
    """Whether a new thread fits the limits of address space and data, if the process has any."""
    infinity = resource.RLIM_INFINITY
    if all(resource.getrlimit(kind)[0] == infinity for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)):
        return True
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = _STACK_BYTES if stack == infinity else stack
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        with mmap.mmap(-1, stack + _OBJECT_BYTES, flags=anonymous):
            mmap.mmap(-1, _ARENA_BYTES, flags=anonymous, prot=mmap.PROT_READ).close()
    except (OSError, MemoryError):
        return False
    return True


def _is_full(executor: Executor) -> bool:
    """Whether a pool has started all its threads, so that it starts no further one."""
    return isinstance(executor, ThreadPoolExecutor) and len(executor._threads) >= executor._max_workers


def _run(function: Callable[..., _T], *args: Any) -> Future[_T]:
    """Run a function on this thread. Returns a future with its result or error, as an executor does."""
    done: Future[_T] = Future()
    try:
        done.set_result(function(*args))
    except BaseException as error:
        done.set_exception(error)
    return done


class _Closes(Protocol):
    def close(self) -> None: ...


def close_when_dropped(owner: object, closable: _Closes) -> "weakref.finalize[Any, Any]":
    """Close `closable` when `owner` is garbage collected, unless the returned finalizer is detached first. Nothing is
    closed at exit, since the system frees everything then."""
    finalizer = weakref.finalize(owner, _close, closable)
    finalizer.atexit = False
    return finalizer


def _close(closable: _Closes) -> None:
    """Close an object. The garbage collector may call this function on any thread, between any two instructions."""
    of_a_store = threading.current_thread().name.startswith("oneemb-")  # `close` may wait for this very thread.
    if of_a_store or within_thread_code():
        # A new thread closes it. `Thread.start` cannot be called here: it would wait for locks that this thread may
        # hold.
        _thread.start_new_thread(threading.Thread(target=closable.close, name="close").start, ())
        return
    try:
        closable.close()
    except KeyboardInterrupt:  # Python drops an error that a finalizer raises, so the interrupt is raised again soon.
        threading.Timer(0.01, _thread.interrupt_main).start()
