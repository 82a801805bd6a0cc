"""Storage of per-row usage metadata: an array of its own, or the records of rows with stable slots.

A place is an index into it. The metadata of the row at place p are the words `word_PX[p, first : first + USAGE_WORDS]`.
Its score is `score_P[p]` as well: a choice of rows reads many scores, which are better read where they lie together.

Invariant: `index` has the key of every row that the usage index knows, with its place, and no other.

N rows, P places, V rows that leave, S slots, W words of a row.
"""

from typing import Protocol

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.growing_array import GrowingArray

USAGE_WORDS = 4
"""Words of a row's record: its score, the lower half first, and the step and the second of its last use; or, lower half
first, the time."""


class StableRows(Protocol):
    """All rows there are, in one slab with stable slots."""

    row_SW: np.ndarray
    """float32 [S, W]; it grows in place."""
    slots: int
    """Most rows that the slab may ever have."""

    @property
    def index(self) -> HashIndex:
        """Finds each key's slot."""


class OwnPlaces:
    """Metadata in an array, with an index over it.

    Args:
        most: places for which address space is taken when the first row comes; 0 = as many as it needs.
    """

    first = 0

    def __init__(self, threads: Threads, most: int):
        self._threads, self._most = threads, most
        self.index = HashIndex(threads)
        self.word_PX = np.empty((0, USAGE_WORDS), np.uint32)
        self.held_P = np.empty(0, np.bool_)
        """Scratch bits of a choice of rows; False in between."""
        self.table_P = np.empty(0, np.int32)
        """The table of each row."""
        self._free = FreeSlots(np.arange)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.index.nbytes + self._free.used * (4 * USAGE_WORDS + 1 + 4)

    @property
    def score_P(self) -> np.ndarray:
        """uint64: those in `word_PX`."""
        return self.word_PX.view(np.uint64)[:, 0]

    @property
    def score_PX(self) -> np.ndarray:
        """The same as uint32, in the first two words."""
        return self.word_PX

    def reserve(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Reserve memory for these keys, which are not known; IndexMemoryError or MemoryError if there is none."""
        self.index.reserve_keys(table_N, id_N)
        need = self._free.used + self._free.fresh(len(id_N))
        if need > len(self.held_P):
            # What is never written takes no memory, and where `most` is known nothing is copied later.
            size = max(need, self._most, len(self.held_P) * 3 // 2)
            before = [self.word_PX, self.held_P, self.table_P]
            grown = [np.zeros((size, *array.shape[1:]), array.dtype) for array in before]  # All of them, or none.
            for array, after in zip(before, grown, strict=True):
                after[: len(array)] = array
            self.word_PX, self.held_P, self.table_P = grown

    def add(self, table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray | None) -> np.ndarray:
        """Enter these keys. Returns their places: int64 [N]."""
        self.reserve(table_N, id_N)
        place_N = self._free.reserve(len(id_N), len(self.held_P))
        self.table_P[place_N] = table_N
        self.index.put(table_N, id_N, place_N)
        self._free.commit(len(id_N))
        return place_N

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, erased_V: np.ndarray | None) -> np.ndarray:
        """Forget these keys. Returns which were known: bool [V]."""
        place_V = self.index.erase(table_V, id_V)
        with changing:
            known_V = place_V >= 0
            self._free.give_back(place_V[known_V])
        return known_V

    def cleared(self) -> "OwnPlaces":
        """An empty set of places of the same kind."""
        return OwnPlaces(self._threads, self._most)


class SlotPlaces:
    """Metadata in the records of rows with stable slots: the place of a row is its slot. Their owner puts keys into the
    index before they are entered here, and erases them before they are forgotten.

    Args:
        first: word of a record with which its metadata begins.
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
        """Theirs."""
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
        """See `OwnPlaces`."""
        return self.score_P.view(np.uint32).reshape(-1, 2)

    def reserve(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        self.index.reserve_keys(table_N, id_N)
        self._have(min(len(self._rows.row_SW) + len(id_N), self._rows.slots))

    def add(self, table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray | None) -> np.ndarray:
        place_N = self.index.find(table_N, id_N) if slot_N is None else slot_N
        try:
            self._have(len(self._rows.row_SW))
        except MemoryError:  # The slab has more slots than are used: those that were reserved for are enough.
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
        """Make room for the numbers of so many slots."""
        for array in self._arrays:
            array.grow(slots)
        self.held_P, self.table_P, self.score_P = (array.array for array in self._arrays)
