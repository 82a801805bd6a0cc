"""`FolderHolder`: lets other objects of the process ask a store to close and free its folder, or force it to."""

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
        """Number of all rows, if no snapshot holds them as they are now; else 0."""

    def say_closed(self, advice: str) -> None:
        """Set the advice that the closed store's errors give."""


class FolderHolder:
    """Closes a store, or its owner, to free the store's folder; both are weakly referenced. A `Holder` of
    storage/table/writer_lock.py.

    Args:
        what: name of the owner in errors, such as "embedding 'users'".
        owners: number of ranks among which the rows are divided.
    """

    def __init__(self, store: _Holds, what: str, owners: int):
        self._store, self.what, self._owners = weakref.ref(store), what, owners
        self.owner: Callable[[], _Closes | None] = self._store
        """Returns the object to close in order to free the folder."""
        self.is_forced = False
        """True once `force_close` has begun: its caller reports the lost rows, so `close` does not."""

    def close_for(self, other: str) -> str:
        """Close, if no row is lost. Returns "", or the reason why the store stays open; see `Holder.close_for`."""
        if (store := self._store()) is None:
            return ""
        if self._owners > 1:  # Other ranks may have unsaved rows, and a save takes all ranks.
            return "whose ranks close together: make this call on all of them"
        why = between_steps_now(store.step_lock, lambda: self._close_for(store, other))
        return "which is in the middle of a step, a save or a load" if why is None else why

    def _close_for(self, store: _Holds, other: str) -> str:
        if lost := self._lost(store):
            return f"whose {lost:,} rows no snapshot holds as they are now"
        store.say_closed(
            f"{other} of this process has taken over its folder: make graphs and optimizers again with the new one; to"
            " use both, give each embedding a folder of its own"
        )
        self._close(store)
        return ""

    def force_close(self) -> int:
        """Close, and return the number of lost rows; see `Holder.force_close`. Raises RuntimeError in a step of this
        thread."""
        store = self._store()
        if store is None:
            return 0
        return between_steps((store.step_lock,), "oneemb.release", lambda: self._force_close(store))

    def _force_close(self, store: _Holds) -> int:
        lost = self._lost(store)
        self.is_forced = True
        self._close(store)
        return lost

    def _lost(self, store: _Holds) -> int:
        return 0 if self.owner() is None else store.unsaved()

    def _close(self, store: _Holds) -> None:
        (self.owner() or store).close()  # The embedding may be gone while a loss that is kept refers to its store.
