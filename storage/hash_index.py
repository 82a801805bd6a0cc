"""An index from keys to places that grows with its keys: 20 to 30 bytes a key in use.

Invariant: at most 4 of 5 cells are taken, so that a probe ends soon. A call that fails to get memory has changed
nothing.
"""

from collections.abc import Iterator

import numpy as np

from oneemb.kernels.hash_index import PLACE_MAX, cells_erase, cells_find, cells_items, cells_put
from oneemb.kernels.threads import Threads

__all__ = ["HashIndex"]

_CELLS_MIN = 64
_GROWTH = 1.5


class HashIndex:
    """Maps (table, id) to a place, an int64 from 0 to 2^40 - 2.

    Args:
        threads: runs lookups.
        expected: keys to make room for at once, so that the first of them cause no growth.
    """

    def __init__(self, threads: Threads, expected: int = 0):
        self._threads = threads
        self._size = 0
        self._cell_C2 = _empty_cells(expected)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._cell_C2.nbytes

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The place of each key, -1 for a key that is not here: int64 [U]."""
        place_U = np.empty(len(id_U), np.int64)
        self._threads.run(cells_find, len(id_U), self._cell_C2, table_U, id_U, place_U)
        return place_U

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Set the place of each key, the last one of equal keys. Returns the places they had, -1 if none: int64 [U]."""
        assert len(place_U) == 0 or 0 <= place_U.min() <= place_U.max() <= PLACE_MAX
        self.reserve(len(id_U))
        old_U = np.empty(len(id_U), np.int64)
        self._size += cells_put(self._cell_C2, table_U, id_U, place_U, old_U)
        return old_U

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Take the keys out. Returns the places they had, -1 for a key that was not here: int64 [U]."""
        old_U = np.empty(len(id_U), np.int64)
        self._size -= cells_erase(self._cell_C2, table_U, id_U, old_U)
        return old_U

    def items(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All (table_N int32, id_N int64, place_N int64), in batches. The index must not change meanwhile."""
        cell = 0
        while cell < len(self._cell_C2):
            table_N, id_N, place_N = np.empty(batch, np.int32), np.empty(batch, np.int64), np.empty(batch, np.int64)
            size, cell = cells_items(self._cell_C2, cell, table_N, id_N, place_N)
            if size:
                yield table_N[:size], id_N[:size], place_N[:size]

    def reserve(self, more: int) -> None:
        """Make room for this many keys beyond those here.

        Raises:
            MemoryError: there is no memory for the cells; the index is as it was.
        """
        if (self._size + more) * 5 <= len(self._cell_C2) * 4:
            return
        grown = HashIndex(self._threads)
        grown._cell_C2 = _empty_cells(max(self._size + more, int(len(self._cell_C2) * 0.8 * _GROWTH)))
        for table_N, id_N, place_N in self.items():
            grown._size += cells_put(grown._cell_C2, table_N, id_N, place_N, np.empty(len(id_N), np.int64))
        self._cell_C2 = grown._cell_C2

    def clear(self) -> None:
        """Forget every key."""
        self._cell_C2, self._size = _empty_cells(0), 0


def _empty_cells(keys: int) -> np.ndarray:
    return np.zeros((max(_CELLS_MIN, keys * 5 // 4 + 2), 2), np.int64)
