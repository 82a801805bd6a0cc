"""Storage of the usage metadata of rows: a separate array (`OwnPlaces`), or the records of rows with stable slots
(`SlotPlaces`).

A place is the number of a row in this storage. The metadata of the row at place p is `word_PX[p, first : first +
USAGE_WORDS]`. Its score is also `score_P[p]`: evictions read many scores, so scores are stored side by side.

Invariant: `index` has the key of each row in the usage index, with the row's place, and no other key.

Shape letters: N rows, P places, X words of a place, V evicted rows, S slots, W words of a row.
"""

import os
from typing import Protocol

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.growing_array import GrowingArray

USAGE_WORDS = 4
"""Words of usage metadata in a row's record: two words of score, lower half first, then the step and the second of the
last use, or, with timestamps, the time of the last use in two words, lower half first."""

# Arrays of more places would not fit in the machine's memory. Only pages that are written take memory; but where
# growing_array.py finds no free addresses, it maps all places at once.
_PLACE_BYTES = 4 * USAGE_WORDS + 4 + 1
_PLACES_MAX = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _PLACE_BYTES
_MORE_BITS = 5  # arrays grow by 1 / 2 ** 5 of their length, at least


class StableRows(Protocol):
    """The rows of a resident tier with stable slots: one slab and its index."""

    row_SW: np.ndarray
    """float32 [S, W]; it grows in place."""
    slots: int
    """Most rows that the slab may ever have."""

    @property
    def index(self) -> HashIndex:
        """Finds each key's slot."""


class OwnPlaces:
    """Usage metadata in separate arrays, which grow in place, with an index from keys to places.

    Attributes:
        word_PX: uint32 [P, USAGE_WORDS].
        table_P: int32 [P], the table of each row.
        held_P: bool [P], whether a row must not be evicted; set only during a choice of rows, otherwise all False.
    """

    first = 0

    def __init__(self, threads: Threads):
        self._threads = threads
        self.index = HashIndex(threads)
        shapes = ((USAGE_WORDS,), np.uint32), ((), np.int32), ((), np.bool_)
        self._arrays = [GrowingArray(_PLACES_MAX, shape, dtype) for shape, dtype in shapes]
        self._free = FreeSlots()
        self._have(0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.index.nbytes + self._free.used * _PLACE_BYTES

    @property
    def score_P(self) -> np.ndarray:
        """Score of each place, uint64 [P]: a view of `word_PX`."""
        return self.word_PX.view(np.uint64)[:, 0]

    @property
    def score_PX(self) -> np.ndarray:
        """An array with the scores as uint32 in its first two columns."""
        return self.word_PX

    def reserve(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Reserve memory for these new keys. IndexMemoryError or MemoryError if memory does not suffice."""
        self.index.reserve_keys(table_N, id_N)
        need = self._free.used + self._free.fresh(len(id_N))
        if need > len(self.held_P):
            self._have(max(need, min(len(self.held_P) + (len(self.held_P) >> _MORE_BITS), _PLACES_MAX)))

    def add(self, table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray | None) -> np.ndarray:
        """Add these new keys to the index. Returns their places: int64 [N]."""
        self.reserve(table_N, id_N)
        place_N = self._free.reserve(len(id_N), len(self.held_P))
        self.table_P[place_N] = table_N
        self.index.put(table_N, id_N, place_N)
        self._free.commit(len(id_N))
        return place_N

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, erased_V: np.ndarray | None) -> np.ndarray:
        """Remove these keys. Returns bool [V]: whether the key was in the index."""
        place_V = self.index.erase(table_V, id_V)
        with changing:
            known_V = place_V >= 0
            self._free.give_back(place_V[known_V])
        return known_V

    def cleared(self) -> "OwnPlaces":
        """An empty set of places of the same kind."""
        return OwnPlaces(self._threads)

    def _have(self, places: int) -> None:
        """Grow the arrays to this many places. After a MemoryError or an interrupt a further call succeeds."""
        if places > min(array.most for array in self._arrays):
            raise MemoryError(f"no address space is left for the usage metadata of {places} rows")
        for array in self._arrays:
            array.grow(places)
        # `held_P` comes last: its length says whether the arrays must grow.
        self.word_PX, self.table_P, self.held_P = (array.array for array in self._arrays)


class SlotPlaces:
    """Usage metadata in the records of rows with stable slots: the place of a row is its slot. The hot tier puts keys
    into the index before `add`, and erases them before `forget`.

    Args:
        rows: the hot tier with the rows.
        first: number of the record's word at which the metadata begins.
    """

    def __init__(self, rows: StableRows, first: int):
        self._rows, self.first = rows, first
        self._arrays = [GrowingArray(rows.slots, (), dtype) for dtype in (np.bool_, np.int32, np.uint64)]
        self._have(len(rows.row_SW))
        for table_N, _, slot_N in rows.index.items():
            self.table_P[slot_N] = table_N
            score_N2 = np.ascontiguousarray(self.word_PX[slot_N, first : first + 2])
            self.score_P[slot_N] = score_N2.view(np.uint64)[:, 0]

    @property
    def index(self) -> HashIndex:
        """The index of the rows' tier."""
        return self._rows.index

    @property
    def word_PX(self) -> np.ndarray:
        """uint32 [S, W], the slab."""
        return self._rows.row_SW.view(np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return len(self.index) * (1 + 4 + 8)

    @property
    def score_PX(self) -> np.ndarray:
        """The scores as uint32 [P, 2]."""
        return self.score_P.view(np.uint32).reshape(-1, 2)

    def reserve(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        self.index.reserve_keys(table_N, id_N)
        self._have(min(len(self._rows.row_SW) + len(id_N), self._rows.slots))

    def add(self, table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray | None) -> np.ndarray:
        place_N = self.index.find(table_N, id_N) if slot_N is None else slot_N
        try:
            self._have(len(self._rows.row_SW))
        except MemoryError:  # The slab has more slots than rows: grow only to the last used slot.
            self._have(int(place_N.max(initial=-1)) + 1)
        self.table_P[place_N] = table_N
        return place_N

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, erased_V: np.ndarray | None) -> np.ndarray:
        assert erased_V is not None
        return erased_V

    def cleared(self) -> "SlotPlaces":
        """The same places: the owner of the rows clears them."""
        return self

    def _have(self, slots: int) -> None:
        """Grow the arrays to this many slots."""
        for array in self._arrays:
            array.grow(slots)
        self.held_P, self.table_P, self.score_P = (array.array for array in self._arrays)
