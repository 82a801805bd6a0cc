"""Lists of keys that are put into an index later, many at once: this costs half as much as putting them batch by batch.

There are two lists: one fills while the other is put into the index, in a background thread if there is one. Shape
letters: K keys of a list, P shards (partitions) of the index.

Invariants:
- the index has room for all keys of a list before the first key is noted, so putting the keys cannot fail for lack of
  memory;
- a noted key stays in a list until the index holds it: if a put fails, the next call tries again;
- keys are put in the order in which they were noted, so the last of equal keys counts;
- the background thread puts full lists only.

The room in the index stays unused until a list is put, so a list is short compared with the index. After the background
thread has put a list, it also grows the index for the next two lists, so that the caller need not wait for this.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

import numpy as np

from oneemb.kernels.threads import submit
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.hash_index import HashIndex

# Most keys of a list: a longer list would save little for each key, and callers would wait longer for it.
_LIST_MAX = 1 << 17
# A list has at most 1 / _LISTS_MIN of the keys for which the index has room: the index may keep room for two lists.
_LISTS_MIN = 32
# If an index is too small for lists of this many keys, keys are put at once: the index fits into the CPU's cache.
_LIST_MIN = 1 << 10

_Index = HashIndex | CompactIndex | ColdIndex
_Put = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class _List:
    """List of up to `room` keys with the places of their rows, 20 bytes for each key."""

    def __init__(self, room: int) -> None:
        self.size, self.room = 0, room
        self.table_K, self.id_K = np.empty(room, np.int32), np.empty(room, np.int64)
        self.place_K = np.empty(room, np.int64)

    def give(self, put: _Put) -> None:
        """Put all keys into the index and empty the list. If `put` raises, the list keeps all keys."""
        put(self.table_K[: self.size], self.id_K[: self.size], self.place_K[: self.size])
        self.size = 0


class PendingKeys:
    """Noted keys with the places of their rows, until they are put into the index.

    Methods take a function `put(table_K, id_K, place_K)` that puts keys into the index, which has room for them. If
    `put` raises, it must have changed nothing. beside: runs `put` for full lists; None = the caller's thread does.
    """

    def __init__(self, index: _Index, beside: Executor | None):
        self._index, self._beside = index, beside
        # Number of keys in each shard of the index after all lists but the filling one are put; number of keys of each
        # shard in the filling list; and in the next `note`.
        self._put_P = index.sizes_P
        self._noted_P = self._next_P = np.zeros_like(self._put_P)
        # Lists are made when the first keys come: an index that is only read needs none.
        self._filling: _List | None = None
        self._spare: _List | None = None
        # The full list, until the index holds its keys, and the future of its put; None = the next call has to put it.
        self._full: _List | None = None
        self._putting: Future[None] | None = None

    def make_room(self, table_U: np.ndarray, id_U: np.ndarray, put: _Put) -> bool:
        """Make room for these keys. Returns True if they may be noted, once: neither `note` nor the put can then fail
        for lack of memory. If the filling list has too little room, it is handed to `put` and a new list begins. After
        a MemoryError nothing has changed."""
        # All keys may belong to one shard, so the keys of each shard are counted.
        size, self._next_P = len(id_U), self._index.key_counts(table_U, id_U)
        fits = self._filling is not None and 0 < self._filling.size and self._filling.size + size <= self._filling.room
        if fits and self._index.has_room(self._put_P + self._noted_P + self._next_P):
            return True
        # From here on the background thread is idle, so the index may be read and may grow.
        self._finish(put)
        if fits:
            self._put_P = self._index.sizes_P
            self._index.grow(self._put_P + self._noted_P + self._next_P)
            return True
        if self._beside is None:
            self.put_pending(put)
        room = _list_room(self._index)
        if size > room:
            return False
        begun, spare = self._filling, self._spare
        if begun is not None and begun.size == 0:
            begun, spare = None, begun
        self._index.reserve(room + (begun.size if begun is not None else 0))
        begun_P = self._noted_P if begun is not None else np.zeros_like(self._noted_P)
        put_P = self._index.sizes_P + begun_P
        self._index.grow(put_P + self._next_P)
        self._put_P, self._noted_P = put_P, np.zeros_like(begun_P)
        self._filling = spare if spare is not None and spare.room == room else _List(room)
        if begun is not None:
            assert self._beside is not None
            self._full, self._spare = begun, None
            self._putting = submit(self._beside, self._give, begun, put)
        return True

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """Add keys for which `make_room` returned True."""
        filling = self._filling
        assert filling is not None
        begin, end = filling.size, filling.size + len(id_U)
        noted_P = self._noted_P + self._next_P
        filling.table_K[begin:end], filling.id_K[begin:end], filling.place_K[begin:end] = table_U, id_U, place_U
        filling.size, self._noted_P = end, noted_P

    def put_pending(self, put: _Put) -> None:
        """Wait until the index holds every noted key."""
        self._finish(put)
        if self._filling is not None and self._filling.size:
            self._filling.give(put)
            self._noted_P = np.zeros_like(self._noted_P)

    def wait(self) -> None:
        """Wait until the background thread is idle. If it has failed, the next call raises the error."""
        if self._putting is not None:
            wait([self._putting])

    def forget_error(self) -> None:
        """Wait until the background thread is idle, and forget its error. The next call puts the keys that the thread
        could not put."""
        self.wait()
        if self._putting is not None and self._putting.exception() is not None:
            self._putting = None

    def _give(self, full: _List, put: _Put) -> None:
        """Put a full list into the index, and grow the index for the next two lists."""
        full.give(put)
        try:
            self._index.reserve(2 * _list_room(self._index))
        except MemoryError:
            pass  # `make_room` reserves again when it begins a list, and raises the error there.

    def _finish(self, put: _Put) -> None:
        """Wait until the index holds the keys of the full list, if there is any."""
        if self._full is None:
            return
        self.wait()
        putting, self._putting = self._putting, None
        if putting is None:
            self._full.give(put)
        else:
            putting.result()
        self._full, self._spare = None, self._full


def _list_room(index: _Index) -> int:
    """Number of keys of the next list: a power of two, so that it seldom changes; 0 = put keys at once."""
    room = min(_LIST_MAX, index.capacity // _LISTS_MIN)
    return 1 << (room.bit_length() - 1) if room >= _LIST_MIN else 0
