"""The arrays that a tier on the host has of its slots: the rows, and beside them dirty bits, pins and scores.

In a tier that holds all rows they grow with the rows, as far as the book of reservations lets them; a cache has all of
its slots at once.
"""

import contextlib

import numpy as np

from oneemb.storage.row_store import StoreFullError
from oneemb.storage.tiers.growing_array import GrowingArray
from oneemb.storage.tiers.reservation import Reservation

__all__ = ["SlotArrays"]

# Slots that are made beyond those asked for: a share of them, and memory for some more.
_MORE = 1 / 32
_MORE_BYTES = 1 << 18


class SlotArrays:
    """Arrays of S slots, zeros at first.

    Args:
        name: what errors call the tier.
        row_width: 32-bit words of a row.
        slots: that there may come to be.
        slot_bytes: memory of one, with its key.
        resident: whether the tier holds all rows.
        expected: slots to reserve memory for at once, if it is there, in a tier that holds all rows.

    Raises:
        StoreFullError: the system gives no address space for the slots of a cache.
    """

    def __init__(self, name: str, row_width: int, slots: int, slot_bytes: int, resident: bool, expected: int):
        self._name, self._slot_bytes = name, slot_bytes
        self._reserved = Reservation(name, 0 if resident else slots * slot_bytes)
        try:
            row = GrowingArray(slots, (row_width,), np.float32)
            self._row: GrowingArray | None = row
            self._dirty = GrowingArray(slots, (), np.bool_)
            # Nobody asks for scores where no row is evicted.
            self._pin, self._score = GrowingArray(slots, (), np.int32), GrowingArray(slots, (), np.float64)
        except MemoryError as error:
            raise self._no_memory(slots, error) from error
        self.most = min(slots, row.most, self._dirty.most, self._pin.most, self._score.most)
        """Slots that there may come to be."""
        self._scores = not resident
        if not resident:
            self._grow(self.most)
        elif expected:
            with contextlib.suppress(StoreFullError):  # Other tiers have it now: rows take what there is as they come.
                self._reserved.raise_to(expected * slot_bytes)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """dirty_S bool, pin_S int32, score_S float64 and row_SW float32, as many slots each, but for scores, which
        only a cache has. Those of before hold the same memory."""
        assert self._row is not None
        return self._dirty.array, self._pin.array, self._score.array, self._row.array

    def have(self, slots: int) -> None:
        """Have so many slots at least.

        Raises:
            StoreFullError: there is no memory for them; nothing has changed.
        """
        more = slots + int(slots * _MORE) + _MORE_BYTES // self._slot_bytes
        try:
            self._reserve_and_grow(min(more, self.most))
        except StoreFullError:
            self._reserve_and_grow(slots)

    def release(self) -> None:
        """Count nothing as reserved any more, and have no rows: their memory is free when nobody looks at it."""
        self._reserved.release()
        self._row = None

    def _reserve_and_grow(self, slots: int) -> None:
        before = self._reserved.bytes
        self._reserved.raise_to(slots * self._slot_bytes)
        try:
            self._grow(slots)
        except BaseException:
            self._reserved.bytes = before
            raise

    def _grow(self, slots: int) -> None:
        assert self._row is not None
        arrays = [self._dirty, self._pin, self._row, *([self._score] if self._scores else [])]
        try:
            for array in arrays:
                array.grow(slots)
        except MemoryError as error:
            raise self._no_memory(slots, error) from error
        finally:
            self._reserved.mapped = sum(array.mapped for array in arrays)

    def _no_memory(self, slots: int, error: MemoryError) -> StoreFullError:
        mebibytes = -(-slots * self._slot_bytes // 2**20)
        return StoreFullError(
            f"the {self._name} tier needs address space for {slots} rows ({mebibytes} MiB), and {error}; raise the"
            " limit of the process (ulimit -v), or give the embedding a smaller cache_budget_mb or capacity"
        )
