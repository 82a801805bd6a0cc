"""The next uses of rows, as far as a loop has read its batches ahead: a cache evicts last the rows that come soon.

A loop adds the keys of each batch that it has read, in order, and reaches each batch in its step. So the window holds
the batches that were added and not reached. For each key of a batch, the window has the number of the next batch that
uses the key. A cache thus follows Belady's rule (evict the row whose next use is farthest away; IBM Systems Journal
5(2), 1966) as far as the window goes.

U keys of a batch, X positions of the window: each key of each batch has one.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex

NO_USE = 0
"""In place of a number of a batch: the window has no next use. Numbers of batches begin at 1."""


class _Batch(NamedTuple):
    number: int
    first: int  # position of its first key in the window
    table_U: np.ndarray
    id_U: np.ndarray


class ComingUses:
    """The window of batches that a loop has read and not reached. A batch may contain a key several times."""

    def __init__(self, threads: Threads):
        self._threads = threads
        self.added = self.reached = 0
        """Numbers of the batch added last and of the batch reached last."""
        self._batches: deque[_Batch] = deque()
        self._last = HashIndex(threads)  # from a key to the position of its last use in the window
        self._first = self._end = 0  # positions of the window: X = end - first
        self._next_X = np.zeros(1 << 12, np.int32)  # a ring: batch of the next use after each position

    def add(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Add a batch with these keys; its number is `added` + 1. Returns the places in the batch, int64, of the keys
        that no earlier batch of the window uses."""
        size = len(id_U)
        self._make_room(size)
        former_U = self._last.put(table_U, id_U, np.arange(self._end, self._end + size))
        self.added += 1
        mask = len(self._next_X) - 1
        self._next_X[former_U[former_U >= 0] & mask] = self.added
        self._next_X[np.arange(self._end, self._end + size) & mask] = NO_USE
        self._batches.append(_Batch(self.added, self._end, table_U, id_U))
        self._end += size
        return np.flatnonzero(former_U < 0)

    def reach(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Remove the oldest batch of the window if its number is at most `number`. Returns its keys and the batch of
        each key's next use, `NO_USE` if the window has none: int32, int64 and int32 [U]; None = no batch was
        removed."""
        if not self._batches or self._batches[0].number > number:
            return None
        batch = self._batches.popleft()
        size = len(batch.id_U)
        next_U = self._next_X[np.arange(batch.first, batch.first + size) & (len(self._next_X) - 1)]
        gone = np.flatnonzero(next_U == NO_USE)
        self._last.erase(batch.table_U[gone], batch.id_U[gone])
        self._first, self.reached = batch.first + size, batch.number
        return batch.table_U, batch.id_U, next_U

    def forget(self) -> None:
        """Remove all batches of the window, as when a loop is left early."""
        self._batches.clear()
        self._last = HashIndex(self._threads)
        self._first, self.reached = self._end, self.added

    def _make_room(self, more: int) -> None:
        size = self._end + more - self._first
        if size <= len(self._next_X):
            return
        next_X = np.zeros(1 << (size - 1).bit_length(), np.int32)
        place_X = np.arange(self._first, self._end)
        next_X[place_X & (len(next_X) - 1)] = self._next_X[place_X & (len(self._next_X) - 1)]
        self._next_X = next_X
