"""Keys on their way into an index, which takes many at once for half of what they cost one batch after the other.

Two lists of keys take turns: one fills while the index takes in the other, beside the caller where that can be.

Invariants:
- a key that was noted is in a list until the index has taken it in: what fails is tried again by the next call;
- keys go in by the order in which they were noted, so of equal keys the last one counts;
- nothing runs beside the caller but for a list that was full.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

import numpy as np

__all__ = ["PENDING_MAX", "PendingKeys"]

PENDING_MAX = 1 << 17
"""Keys of a list at most: with more of them a key costs little less, and whoever waits for them waits for longer."""

_Put = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class _List:
    """Room for `PENDING_MAX` keys and their places, 20 bytes each."""

    def __init__(self) -> None:
        self.size = 0
        self.table_K, self.id_K = np.empty(PENDING_MAX, np.int32), np.empty(PENDING_MAX, np.int64)
        self.place_K = np.empty(PENDING_MAX, np.int64)

    def give(self, put: _Put) -> None:
        """Empty the list into the index; if that raises, all keys stay in it."""
        put(self.table_K[: self.size], self.id_K[: self.size], self.place_K[: self.size])
        self.size = 0


class PendingKeys:
    """Keys that were noted, with the places of their rows.

    `put` of the calls below takes keys, tables and places into the index; if it raises, it has changed nothing.

    Args:
        beside: runs `put` for full lists; None = the caller's thread does.
    """

    def __init__(self, beside: Executor | None):
        self._beside = beside
        # Memory is taken when the first keys come: an index that is only read has none.
        self._filling: _List | None = None
        self._spare: _List | None = None
        # The list before, while the index has not taken it in; without a future the next call has to see to it.
        self._full: _List | None = None
        self._given: Future[None] | None = None

    def make_room(self, size: int, put: _Put) -> bool:
        """Whether so many keys can be noted, once: that cannot fail then. A list that is too full for them is given
        to `put`.

        Raises:
            MemoryError: there is no memory for a list, or for the index; all keys are still noted.
        """
        if size > PENDING_MAX:
            return False
        if self._filling is None:
            self._filling = _List()
        elif self._filling.size + size > PENDING_MAX:
            self._give(put)
        return True

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """Add keys, as many as there is room for."""
        filling = self._filling
        assert filling is not None
        begin, end = filling.size, filling.size + len(id_U)
        filling.table_K[begin:end], filling.id_K[begin:end], filling.place_K[begin:end] = table_U, id_U, place_U
        filling.size = end

    def settle(self, put: _Put) -> None:
        """Return when the index has taken in every key.

        Raises:
            MemoryError: there is no memory for the index; the keys are still noted.
        """
        self._finish(put)
        if self._filling is not None and self._filling.size:
            self._filling.give(put)

    def wait(self) -> None:
        """Return when nothing runs beside the caller. How it has ended is for the next call to say."""
        if self._given is not None:
            wait([self._given])

    def _give(self, put: _Put) -> None:
        """Empty the filling list, beside the caller where that can be."""
        if self._beside is None:
            self.settle(put)
            return
        self._finish(put)
        full, spare = self._filling, self._spare or _List()
        assert full is not None
        self._filling, self._full, self._spare = spare, full, None
        self._given = self._beside.submit(full.give, put)

    def _finish(self, put: _Put) -> None:
        """Return when the index has taken in the list before."""
        if self._full is None:
            return
        given, self._given = self._given, None
        if given is None:
            self._full.give(put)
        else:
            given.result()
        self._full, self._spare = None, self._full
