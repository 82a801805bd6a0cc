"""Keys on their way into an index, which takes many at once for half of what they cost one batch after the other.

Two lists of keys take turns: one fills while the index takes in the other, beside the caller where that can be.

Invariants:
- the index has room for all keys of a list before the first of them is noted, so taking them in needs no memory for
  cells, and cannot fail for want of it;
- a key that was noted is in a list until the index has taken it in: what fails is tried again by the next call;
- keys go in by the order in which they were noted, so of equal keys the last one counts;
- nothing runs beside the caller but for a list that was full.

That room is beyond what the keys need, so a list is as long as a small part of what the index holds. When the index has
taken in a list beside the caller, it also grows for the two that follow: the caller finds the room there.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

import numpy as np

from oneemb.kernels.threads import submit
from oneemb.storage.hash_index import HashIndex

__all__ = ["PendingKeys"]

# Keys of a list at most: with more of them a key costs little less, and whoever waits for them waits for longer.
_LIST_MAX = 1 << 17
# A list is at most this part of the keys that the index has room for: room that it may have to spare twice.
_LISTS_MIN = 32
# An index too small for lists of so many keys takes keys in at once: they lie in near caches, and cost little.
_LIST_MIN = 1 << 10

_Put = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class _List:
    """Room for keys and their places, 20 bytes each."""

    def __init__(self, room: int) -> None:
        self.size, self.room = 0, room
        self.table_K, self.id_K = np.empty(room, np.int32), np.empty(room, np.int64)
        self.place_K = np.empty(room, np.int64)

    def give(self, put: _Put) -> None:
        """Empty the list into the index; if that raises, all keys stay in it."""
        put(self.table_K[: self.size], self.id_K[: self.size], self.place_K[: self.size])
        self.size = 0


class PendingKeys:
    """Keys that were noted, with the places of their rows.

    `put` of the calls below takes keys, tables and places into the index, which has room for them; if it raises, it has
    changed nothing.

    Args:
        index: is asked for room.
        beside: runs `put` for full lists; None = the caller's thread does.
    """

    def __init__(self, index: HashIndex, beside: Executor | None):
        self._index, self._beside = index, beside
        # What each shard of the index holds when all lists but the filling one are in; and what that adds, and the next
        # keys do.
        self._settled_P = index.sizes_P
        self._noted_P = self._next_P = np.zeros_like(self._settled_P)
        # Memory is taken when the first keys come: an index that is only read has none.
        self._filling: _List | None = None
        self._spare: _List | None = None
        # The list before, while the index has not taken it in; without a future the next call has to see to it.
        self._full: _List | None = None
        self._given: Future[None] | None = None

    def make_room(self, table_U: np.ndarray, id_U: np.ndarray, put: _Put) -> bool:
        """Whether these keys can be noted, once: that cannot fail then, nor can taking them in. A list that is too full
        for them is given to `put`.

        Raises:
            MemoryError: there is no memory for a list, or for cells for all of its keys; nothing has changed.
        """
        # Keys come in any order, those of one shard after another too: what each shard is to hold is counted.
        size, self._next_P = len(id_U), self._index.key_counts(table_U, id_U)
        fits = self._filling is not None and 0 < self._filling.size and self._filling.size + size <= self._filling.room
        if fits and self._index.has_room(self._settled_P + self._noted_P + self._next_P):
            return True
        # From here on nothing runs beside, so the index may be asked, and may grow.
        self._finish(put)
        if fits:
            self._settled_P = self._index.sizes_P
            self._index.grow(self._settled_P + self._noted_P + self._next_P)
            return True
        if self._beside is None:
            self.settle(put)
        room = _list_room(self._index)
        if size > room:
            return False
        begun, spare = self._filling, self._spare
        if begun is not None and begun.size == 0:
            begun, spare = None, begun
        self._index.reserve(room + (begun.size if begun is not None else 0))
        begun_P = self._noted_P if begun is not None else np.zeros_like(self._noted_P)
        settled_P = self._index.sizes_P + begun_P
        self._index.grow(settled_P + self._next_P)
        self._settled_P, self._noted_P = settled_P, np.zeros_like(begun_P)
        self._filling = spare if spare is not None and spare.room == room else _List(room)
        if begun is not None:
            assert self._beside is not None
            self._full, self._spare = begun, None
            self._given = submit(self._beside, self._give, begun, put)
        return True

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """Add keys, as many as there is room for."""
        filling = self._filling
        assert filling is not None
        begin, end = filling.size, filling.size + len(id_U)
        filling.table_K[begin:end], filling.id_K[begin:end], filling.place_K[begin:end] = table_U, id_U, place_U
        filling.size = end
        self._noted_P = self._noted_P + self._next_P

    def settle(self, put: _Put) -> None:
        """Return when the index has taken in every key."""
        self._finish(put)
        if self._filling is not None and self._filling.size:
            self._filling.give(put)
            self._noted_P = np.zeros_like(self._noted_P)

    def wait(self) -> None:
        """Return when nothing runs beside the caller. How it has ended is for the next call to say."""
        if self._given is not None:
            wait([self._given])

    def _give(self, full: _List, put: _Put) -> None:
        """Let the index take in a full list, and grow for the two that follow it."""
        full.give(put)
        try:
            self._index.reserve(2 * _list_room(self._index))
        except MemoryError:
            pass  # The caller asks again, when it begins a list, and tells.

    def _finish(self, put: _Put) -> None:
        """Return when the index has taken in the list before."""
        if self._full is None:
            return
        self.wait()
        given, self._given = self._given, None
        if given is None:
            self._full.give(put)
        else:
            given.result()
        self._full, self._spare = None, self._full


def _list_room(index: HashIndex) -> int:
    """Keys of the next list: a power of two, so that it seldom changes; 0 if keys had better be put at once."""
    room = min(_LIST_MAX, index.capacity // _LISTS_MIN)
    return 1 << (room.bit_length() - 1) if room >= _LIST_MIN else 0
