"""Holder of a store's folder, as other objects of the process see it: asked to close, or closed by force."""

import weakref
from collections.abc import Callable
from typing import Protocol

from oneemb.storage.locking.step_lock import StepLock, between_steps, between_steps_now


class _Closes(Protocol):
    def close(self) -> None: ...


class _Holds(_Closes, Protocol):
    """A store that holds a folder."""

    step_lock: StepLock

    def unsaved(self) -> int:
        """Number of rows that no snapshot holds as they are now."""

    def say_closed(self, advice: str) -> None:
        """Let the error of a closed store give this advice."""


class FolderHolder:
    """A store and its owner, both weakly referenced; a `Holder` of storage/table/writer_lock.py.

    Args:
        what: the object that users know, in words.
        owners: number of stores that have the rows together.
    """

    def __init__(self, store: _Holds, what: str, owners: int):
        self._store, self.what, self._owners = weakref.ref(store), what, owners
        self.owner: Callable[[], _Closes | None] = self._store
        """Returns the object to close in order to free the folder."""

    def close_for(self, other: str) -> str:
        """Close, if no row is lost; see `Holder.close_for`."""
        if (store := self._store()) is None:
            return ""
        if self._owners > 1:  # Other ranks may have unsaved rows, and a save takes all ranks.
            return "whose ranks close together: make this call on all of them"
        why = between_steps_now(store.step_lock, lambda: self._close_for(store, other))
        return "which is in the middle of a step, a save or a load" if why is None else why

    def _close_for(self, store: _Holds, other: str) -> str:
        if lost := self._lost(store):
            return f"whose {lost:,} rows no snapshot holds as they are now"
        store.say_closed(f"{other} of this process has taken over its folder: give each embedding one of its own")
        self._close(store)
        return ""

    def force_close(self) -> int:
        """Close, and return the number of lost rows; see `Holder.force_close`. RuntimeError within a step of this
        thread."""
        store = self._store()
        if store is None:
            return 0
        return between_steps((store.step_lock,), "oneemb.release", lambda: self._force_close(store))

    def _force_close(self, store: _Holds) -> int:
        lost = self._lost(store)
        self._close(store)
        return lost

    def _lost(self, store: _Holds) -> int:
        return 0 if self.owner() is None else store.unsaved()

    def _close(self, store: _Holds) -> None:
        (self.owner() or store).close()  # The embedding may be gone while a loss that is kept refers to its store.
