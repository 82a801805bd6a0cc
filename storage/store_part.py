"""Calls on a store and on its parts: each with the store lock, some between two steps.

A store (embedding_store.py) has parts, objects with one responsibility each: the policy engine, snapshots, replicated
tables. A part refers to its store weakly: a store that nobody has any more is gone at once, with its files and its
lock, and does not wait for the garbage collector.
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
    """An `EmbeddingStore`, as its parts use it."""

    plan: StorePlan
    store_lock: StoreLock
    step_lock: StepLock
    rows: TieredRows
    pins: PinBook
    step: int
    changes: int
    replaced: int

    @property
    def built(self) -> bool:
        """Whether the tiers are there."""

    @property
    def broken(self) -> bool:
        """Whether a call was cut short, so that there may be wrong rows."""

    def check_open(self) -> None:
        """Raise StorageError if the store is closed."""

    def check_process(self) -> None:
        """Raise ForkedProcessError if this process is a child of the one that made the store."""

    def mend(self) -> bool:
        """Let a broken store have no rows, and be sound. Returns whether it was broken."""


class StorePart:
    """A part of a store."""

    def __init__(self, store: Store):
        self._store: Store = weakref.proxy(store)

    @property
    def store_lock(self) -> StoreLock:
        """The lock of the store."""
        return self._store.store_lock

    @property
    def step_lock(self) -> StepLock:
        """The lock of the store's steps."""
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
    """Runs a method that changes the store under its lock."""

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.store_lock:
            self.store_lock.check(changes=True)
            return method(self, *args, **kwargs)

    return run


def reading(method: Method[P, R]) -> Method[P, R]:
    """Runs a method that only reads, under the lock. A child of the process that made the store may call it too."""

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.store_lock:
            self.store_lock.check(changes=False)
            if self.store_lock.forked:
                self.rows.only_read()
            return method(self, *args, **kwargs)

    return run


def no_step(what: str) -> Callable[[Method[P, R]], Method[P, R]]:
    """Runs a method, which errors call `what`, when no thread is in the middle of a step."""

    def decorate(method: Method[P, R]) -> Method[P, R]:
        @functools.wraps(method)
        def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.store_lock.forked:
                return method(self, *args, **kwargs)  # which says what a child may not
            return between_steps((self.step_lock,), what, lambda: method(self, *args, **kwargs))

        return run

    return decorate
