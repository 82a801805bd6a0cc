"""`StorePart`, base class of the parts of a store; decorators that run a method under the store lock or between steps.

A store (embedding_store.py) has parts, objects with one responsibility each: the policy engine, snapshots, replicated
tables. A part refers to its store weakly, so a store without references frees its files and its lock at once, without
the garbage collector.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from oneemb.storage.locking.pins import PinBook
from oneemb.storage.locking.step_lock import StepLock, between_steps
from oneemb.storage.locking.store_lock import StoreLock
from oneemb.storage.tiered_rows import TieredRows
from oneemb.storage.tiers.stack import StorePlan


class Store(Protocol):
    """Attributes and methods of an `EmbeddingStore` that its parts use."""

    plan: StorePlan
    store_lock: StoreLock
    step_lock: StepLock
    rows: TieredRows
    pins: PinBook
    step: int
    changes: int
    replaced: int
    looks_first: bool

    @property
    def built(self) -> bool:
        """Whether the tiers have been made."""

    @property
    def broken(self) -> bool:
        """Whether a call was cut short, so that rows may be wrong."""

    def check_open(self) -> None:
        """Raise StorageError if the store is closed."""

    def check_process(self) -> None:
        """Raise ForkedProcessError if this process is a child of the one that made the store."""

    def mend(self) -> bool:
        """Remove all rows of a broken store, after which it can be used again. Returns whether it was broken."""


class StorePart:
    """Base class of the parts of a store."""

    def __init__(self, store: Store):
        self._store: Store = weakref.proxy(store)

    @property
    def store_lock(self) -> StoreLock:
        """The lock of the store."""
        return self._store.store_lock

    @property
    def step_lock(self) -> StepLock:
        """Lock that the store's training steps hold."""
        return self._store.step_lock

    @property
    def rows(self) -> TieredRows:
        """The rows of the store."""
        return self._store.rows


P = ParamSpec("P")
R = TypeVar("R")

Method = Callable[Concatenate[Any, P], R]
"""A method of a store or of a part; or a function whose first argument is a store."""


def with_store_lock(method: Method[P, R]) -> Method[P, R]:
    """Decorator of a method that changes the store: runs it under the store lock, after a check that changes are
    allowed."""

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.store_lock:
            self.store_lock.check(changes=True)
            return method(self, *args, **kwargs)

    return run


def reading(method: Method[P, R]) -> Method[P, R]:
    """Decorator of a method that only reads the store: runs it under the store lock, in a child of fork too."""

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.store_lock:
            self.store_lock.check(changes=False)
            if self.store_lock.forked:
                self.rows.only_read()
            return method(self, *args, **kwargs)

    return run


def no_step(what: str) -> Callable[[Method[P, R]], Method[P, R]]:
    """Decorator of a method, named `what` in errors: waits until no thread is in a step, and lets none begin while the
    method runs."""

    def decorate(method: Method[P, R]) -> Method[P, R]:
        @functools.wraps(method)
        def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.store_lock.forked:
                return method(self, *args, **kwargs)  # The method raises the error for a forked child.
            return between_steps((self.step_lock,), what, lambda: method(self, *args, **kwargs))

        return run

    return decorate
