"""Pins of rows in the hot tier, and their owners: lookups in progress, and prefetches of coming lookups.

Nothing here is thread-safe. `EmbeddingStore` calls methods under its lock, unless a method says that it needs no lock.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Keys
from oneemb.storage.errors import StoreFullError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.tiered_rows import TieredRows
from oneemb.storage.tiers.hot_rows import Prefetched, fill_pinned

_NOWHERE: tuple[Array | None, np.ndarray, Array | None] = None, np.empty(0, np.int64), None


class Pins(weakref.ref):
    """Pins of one lookup. If their owner is dropped before it has released them, they are put on a list to be released.
    Python calls a weak reference's callback without running a line of Python code, so no interrupt can lose pins."""

    __slots__ = ("generation", "place_U", "released", "slot_U", "temporary_M")
    slot_U: Array
    generation: int
    temporary_M: Array | None
    """Slots of temporary rows among `slot_U`; None = no row is temporary."""
    place_U: np.ndarray
    """Places of the rows in the usage index; empty if there is no usage index."""
    released: threading.Lock
    """Lock that the thread which releases the pins takes for good, so that they are released once."""


class PinBook:
    """Pins of the hot tier and their owners.

    Args:
        placed: whether the rows of every lookup have places in a usage index, which `note_places` records.
    """

    def __init__(self, rows: TieredRows, *, placed: bool):
        self._rows, self._placed = rows, placed
        self.abandoned: deque[Pins] = deque()
        """Pins of lookups that were dropped unfinished; `release_abandoned` releases them."""
        self.prefetched: set[Prefetched] = set()
        """Rows that are pinned for coming lookups."""
        self._pins: dict[int, Pins] = {}
        self._released: deque[Pins] = deque()
        """Released pins whose temporary rows are not freed yet."""
        self._places = _NOWHERE

    # ---- of lookups -------------------------------------------------------------------------------------------------

    def own(self, owner: object, slot_U: Array) -> Pins:
        """Make an object the owner of the pins of these slots, before the store lock is released under which they were
        pinned. When the object is dropped, its pins are released; if this call raises, they are released at once."""
        (of_slots, place_U, temporary_M), self._places = self._places, _NOWHERE
        assert not self._placed or of_slots is slot_U, "pins are owned under the lock under which they were made"
        try:
            pins = Pins(owner, self.abandoned.append)
            pins.slot_U, pins.generation, pins.released = slot_U, self._rows.generation, threading.Lock()
            pins.place_U, pins.temporary_M = place_U, temporary_M
            self._pins[id(pins)] = pins
        except BaseException:
            self.give_back(slot_U, temporary_M)
            raise
        return pins

    def give_back(self, slot_U: Array, temporary_M: Array | None = None) -> None:
        """Unpin slots that have no owner, and free those of temporary rows."""
        with signals_deferred:
            self._rows.hot.release(slot_U)
        if temporary_M is not None:
            self._rows.hot.free_temporary(temporary_M)

    def note_places(self, slot_U: Array, place_U: np.ndarray, temporary_M: Array | None) -> None:
        """Record for the next call of `own`: the places in the usage index of these slots' rows, and temporary rows."""
        self._places = slot_U, place_U, temporary_M

    def release(self, pins: Pins, *, dropped: bool = False) -> None:
        """Release pins, unless they are released already or their slots hold other rows now. Needs no store lock."""
        with signals_deferred:
            if not pins.released.acquire(blocking=False):
                return
            # Release first: a row that is pinned but not in `_pins` would count as evictable.
            if pins.generation == self._rows.generation:
                self._rows.hot.release(pins.slot_U, elsewhere=dropped)
                if pins.temporary_M is not None:
                    self._released.append(pins)
            self._pins.pop(id(pins), None)

    def release_abandoned(self) -> None:
        """Release the pins of dropped lookups and reclaim the slots of temporary rows."""
        while self.abandoned:
            self.release(self.abandoned.popleft(), dropped=True)
        while self._released:
            pins = self._released.popleft()
            if pins.temporary_M is not None and pins.generation == self._rows.generation:
                self._rows.hot.free_temporary(pins.temporary_M)

    def _owned(self) -> Iterator[Pins]:
        # `list` copies in one step of the interpreter; another thread may release pins at the same time.
        return (pins for pins in list(self._pins.values()) if pins.generation == self._rows.generation)

    def owners(self) -> list[object]:
        """Objects that own pins now."""
        return [owner for pins in self._owned() if (owner := pins()) is not None]

    def places(self) -> list[np.ndarray]:
        """Positions of pinned rows in the usage index, one array for each lookup in progress."""
        return [pins.place_U for pins in self._owned()]

    def temporary(self) -> np.ndarray:
        """Slots of temporary rows, int64."""
        slots = [
            self._rows.backend.tensor(pins.temporary_M).cpu().numpy()
            for pins in self._owned()
            if pins.temporary_M is not None
        ]
        return np.concatenate([np.empty(0, np.int64), *slots])

    def in_use(self, table_U: np.ndarray, id_U: np.ndarray) -> int:
        """Number of rows of these keys that lookups hold."""
        slot_U = self._slots_here(table_U, id_U)
        held = [self._rows.backend.tensor(pins.slot_U) for pins in self._owned()]
        return int(torch.isin(slot_U, torch.cat(held)).sum()) if held else 0

    # ---- of coming lookups ------------------------------------------------------------------------------------------

    def take(self, prefetched: Prefetched) -> bool:
        """Hand the pins of a prefetch over to the caller. Returns False if it holds none any more, or if the slots hold
        other rows now."""
        valid = prefetched.held and prefetched.generation == self._rows.generation
        prefetched.held = False
        self.prefetched.discard(prefetched)
        return valid

    def cancel(self, prefetched: Prefetched) -> None:
        """Cancel a prefetch, unless a lookup has taken its pins over."""
        if self.take(prefetched):
            with signals_deferred:
                self._rows.hot.release(prefetched.slot_U, elsewhere=True)

    def cancel_prefetches(self) -> None:
        """Cancel all prefetches: a step needs the slots."""
        for prefetched in list(self.prefetched):
            self.cancel(prefetched)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def acquire(self, keys: Keys, prefetched: Prefetched | None = None) -> tuple[Array, Keys]:
        """Pin the rows of keys; see `HotRows.acquire`. If there is no room, cancel all prefetches and try again."""
        hot = self._rows.hot
        if prefetched is not None and self.take(prefetched):
            with suppress(StoreFullError):
                if prefetched.missing:
                    hot.acquire_rest(prefetched.keys, prefetched.slot_U)
                return prefetched.slot_U, prefetched.keys
        try:
            return hot.acquire(keys)
        except StoreFullError:
            if not self.prefetched:
                raise
        self.cancel_prefetches()
        return hot.acquire(keys)

    def pin_with_room(self, keys: Keys, prefetched: Prefetched | None, leaving: int) -> Array:
        """Pin those rows of these keys that are in the hot tier. Returns their slots, -1 for the other keys. Raises
        StoreFullError, with nothing pinned, if the other rows do not fit even after `leaving` rows are evicted."""
        hot, backend = self._rows.hot, self._rows.backend
        if prefetched is not None and self.take(prefetched):
            slot_U = prefetched.slot_U
        else:
            prefetched, (slot_U, _, missing) = None, hot.pin_resident(keys)
        try:
            if prefetched is not None:
                missing = backend.array((backend.tensor(slot_U) < 0).nonzero().view(-1))
                if len(missing):  # Lookups since the prefetch may have brought some of these rows in.
                    missing_keys = backend.distinct_keys(keys.table_U[missing], keys.id_U[missing])
                    slot_M, _, still_missing = hot.pin_resident(missing_keys)
                    fill_pinned(slot_U, missing, slot_M, hot.release)
                    missing = still_missing
            try:
                hot.check_room(len(missing), leaving)
            except StoreFullError:
                self.cancel_prefetches()
                hot.check_room(len(missing), leaving)
        except BaseException:
            self.give_back(slot_U)
            raise
        return slot_U

    def erase(self, table_V: np.ndarray, id_V: np.ndarray) -> np.ndarray:
        """Erase the rows of these keys, which no lookup may hold, and cancel prefetches of them. Returns whether each
        row existed, bool [V]."""
        if self.prefetched:
            slot_V = self._slots_here(table_V, id_V)
            for held in list(self.prefetched):
                if bool(torch.isin(self._rows.backend.tensor(held.slot_U), slot_V).any()):
                    self.cancel(held)
        return self._rows.hot.erase(table_V, id_V)

    def _slots_here(self, table_V: np.ndarray, id_V: np.ndarray) -> torch.Tensor:
        """Slots of the rows of these keys that are in the hot tier."""
        hot, backend = self._rows.hot, self._rows.backend
        found_V, *_ = hot.pin_resident(backend.distinct_keys(backend.put(table_V), backend.put(id_V)))
        with signals_deferred:
            hot.release(found_V)
        slot_V = backend.tensor(found_V)
        return slot_V[slot_V >= 0]
