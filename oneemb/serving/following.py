"""Following: a thread that takes over newer versions while calls go on with the former one."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from numbers import Real
from typing import Any, Self

_log = logging.getLogger("oneemb")

_LOOK_S = 0.05
_LATE_S = 10.0
"""Age of a call of an object store, in seconds, from which a close does not wait for it."""


class Following:
    """Base of objects that follow newer versions. A class defines `_load_newer`, `_check_open`, `close` and `_what`.

    Invariants:
    - there is never more than one follower at work;
    - a child of fork, which has no thread of its parent, makes a follower at its first call of `_check_follower`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._follower: Follower | None = None
        self._what = ""
        self.error: Exception | None = None
        """Error of the last attempt to serve the newest version; None = it is served."""
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock, self._turn, self._process = threading.Lock(), threading.RLock(), os.getpid()

    def _load_newer(self, stop: Callable[[], bool]) -> Any:
        """Take over the newest version, unless `stop()` is True, and set `error`."""
        raise NotImplementedError

    def _refresh(self, stop: Callable[[], bool]) -> None:
        """Work of the follower. An error is logged, unless it is that of the attempt before."""
        told = str(self.error)
        try:
            self._load_newer(stop)
        except Exception as error:
            if str(error) != told and not stop():
                _log.warning("%s is not served: %s: %s", self._what, type(error).__name__, error)

    def _late_call(self, seconds: float) -> str | None:
        """The call of an object store that began `seconds` ago or earlier, in words; None = there is none."""
        return None

    def _check_open(self) -> None:
        """Raise StorageError if the object is closed."""
        raise NotImplementedError

    def _check_follower(self) -> None:
        """Raise the error of the follower, once. A child of fork starts its own follower."""
        follower = self._follower
        if follower is None:
            return
        if follower.is_of_parent:
            with self._own_lock():
                if self._follower is follower:
                    self._follower = Follower(self._refresh, follower.seconds)
                    self._follower.start()
        follower.check()

    def _own_lock(self) -> threading.Lock:
        """Lock of the version and the follower. A child of fork makes a new lock, since a thread of its parent may have
        held the old one."""
        if self._process != os.getpid():
            self._make_locks()
        return self._lock

    def _own_turn(self) -> "threading.RLock":
        """Lock under which a call loads a version, for classes that load one version at a time. A call takes it before
        the lock of `_own_lock`. A child of fork makes a new lock."""
        if self._process != os.getpid():
            self._make_locks()
        return self._turn

    def follow(self, seconds: float = 10.0) -> None:
        """Take over newer versions in a thread, every `seconds` seconds, until `unfollow` or `close`.

        Raises:
            TypeError, ValueError: `seconds` is no number above 0, or more than a thread can wait.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, Real):
            raise TypeError(f"seconds must be a number above 0, got {type(seconds).__name__} {seconds!r}")
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"seconds must be above 0, and {threading.TIMEOUT_MAX:.0f} at most, got {seconds}")
        with self._own_lock():
            self._check_open()
            former = self._stopped()
            self._follower = Follower(self._refresh, seconds)
            self._follower.start()
        if former is not None:
            former.close(self._late_call)

    def unfollow(self) -> None:
        """Stop following; the current version is still served."""
        with self._own_lock():
            follower = self._stopped()
        if follower is not None:
            follower.close(self._late_call)

    def _stopped(self) -> "Follower | None":
        """Stop the follower and return it. The caller has the lock."""
        follower = self._follower
        if follower is not None:
            follower.stop()
            self._follower = None
        return follower

    def close(self) -> None:
        """Stop following, and release what is served."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Follower:
    """Thread that calls `refresh` every so many seconds, and raises its errors in the caller of `check`. `start` begins
    the thread, after the owner has stored this object, so that an interrupt leaves no thread that cannot be stopped.

    Invariants:
    - the thread does not keep the owner of `refresh` alive: it ends when the owner is collected;
    - a child of fork has no thread, and does not raise errors of its parent's thread.

    Args:
        refresh: a bound method, called with a function that returns True once the call should stop.
        seconds: time between the end of a call and the next one, above 0.
    """

    def __init__(self, refresh: Callable[[Callable[[], bool]], Any], seconds: float):
        self.seconds, self._process = seconds, os.getpid()
        self._error: BaseException | None = None
        self.ends = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(weakref.WeakMethod(refresh),), name="oneemb-follow", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def _run(self, refresh: "weakref.WeakMethod[Any]") -> None:
        while not self.ends.wait(self.seconds):
            call = refresh()
            if call is None:
                return
            try:
                call(self.ends.is_set)
            except BaseException as error:
                if not self.ends.is_set():
                    self._error = error
            del call

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a child of fork, which has no such thread."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise the error of the last failed call, once."""
        if self._error is not None and not self.is_of_parent:
            error, self._error = self._error, None
            if error is not None:
                raise error

    def stop(self) -> None:
        """Make the thread end soon; its current call stops."""
        if not self.is_of_parent:  # The thread may have held the event's lock at the fork.
            self.ends.set()

    def close(self, late_call: Callable[[float], str | None] = lambda seconds: None) -> None:
        """Stop, and wait until the thread has ended.

        Args:
            late_call: returns the call of an object store that began so many seconds ago or earlier, in words. If
                there is one, the wait ends with a warning, and the thread is left: it ends with its call, or with the
                program.
        """
        self.stop()
        if self.is_of_parent or self.thread is threading.current_thread():
            return
        while self.thread.is_alive():
            self.thread.join(_LOOK_S)
            if self.thread.is_alive() and (call := late_call(_LATE_S)) is not None:
                _log.warning(
                    "a thread is left at work, since the object store has not answered for %g s: %s; set timeouts in"
                    " the file system of fsspec", _LATE_S, call,
                )  # fmt: skip
                return
