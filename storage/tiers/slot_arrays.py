"""The slot arrays of a host tier: rows, dirty bits, pins and scores.

The arrays of a resident tier grow with its rows, within the memory that reservation.py grants. The arrays of a cache
have all slots from the beginning.
"""

import contextlib

import numpy as np

from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers.growing_array import GrowingArray
from oneemb.storage.tiers.reservation import Reservation, mebibytes

# Additional slots when arrays grow: this share of the slots that were asked for, and slots of this many bytes.
_MORE = 1 / 32
_MORE_BYTES = 1 << 18


class SlotArrays:
    """Arrays of S slots, zeros at first. Raises StoreFullError if the system gives no address space for the slots of a
    cache.

    Args:
        slots: largest number of slots that the tier may ever have.
        slot_bytes: bytes of a slot, its key included.
        resident: whether the tier holds all rows.
        expected: number of slots for which a resident tier reserves memory at construction, if that fits.
    """

    def __init__(self, name: str, row_width: int, slots: int, slot_bytes: int, resident: bool, expected: int):
        self._name, self._slot_bytes = name, slot_bytes
        self._reserved = Reservation(name, 0 if resident else slots * slot_bytes)
        try:
            row = GrowingArray(slots, (row_width,), np.float32)
            self._row: GrowingArray | None = row
            self._dirty = GrowingArray(slots, (), np.bool_)
            self._pin = GrowingArray(slots, (), np.int32)
            self._score = GrowingArray(slots, (), np.float64)  # stays empty in a resident tier, which evicts no row
        except MemoryError as error:
            raise self._no_memory(slots, error) from error
        self.most = min(slots, row.most, self._dirty.most, self._pin.most, self._score.most)
        """Largest number of slots that the tier may ever have."""
        self._scores = not resident
        if not resident:
            self._grow(self.most)
        elif expected:
            with contextlib.suppress(StoreFullError):  # It does not fit now: the tier reserves memory as rows come.
                self._reserved.raise_to(expected * slot_bytes)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """dirty_S bool, pin_S int32, score_S float64 and row_SW float32. score_S is empty in a resident tier. Arrays
        that were taken before the tier grew share their memory."""
        assert self._row is not None
        return self._dirty.array, self._pin.array, self._score.array, self._row.array

    @property
    def reserved(self) -> Reservation:
        """Memory that is reserved for the arrays."""
        return self._reserved

    def make_room(self, slots: int) -> None:
        """Make room for at least `slots` slots. Raises StoreFullError, with nothing changed, if there is no memory."""
        more = slots + int(slots * _MORE) + _MORE_BYTES // self._slot_bytes
        try:
            self._reserve_and_grow(min(more, self.most))
        except StoreFullError:
            self._reserve_and_grow(slots)

    def release(self) -> None:
        """End the reservation and drop the rows. Their memory is freed once no array refers to it."""
        self._reserved.release()
        self._row = None

    def _reserve_and_grow(self, slots: int) -> None:
        before = self._reserved.bytes
        self._reserved.raise_to(slots * self._slot_bytes)
        try:
            self._grow(slots)
        except BaseException:
            self._reserved.lower_to(before)
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
        return StoreFullError(
            f"the {self._name} tier needs address space for {slots} rows ({mebibytes(slots * self._slot_bytes)} MiB),"
            f" and {error}; raise the limit of the process (ulimit -v), or give the embedding a smaller"
            " cache_budget_mb or capacity"
        )
