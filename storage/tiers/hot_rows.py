"""The contract of the hot tier: rows that loops read and write where they are.

    slot_U, keys = tier.acquire(keys)         in memory and pinned, unknown ones begun
    ...                                       loops on tier.row_SW[slot_U]
    tier.mark_dirty(slot_U)
    tier.release(slot_U)

A hot tier is a `RowStore` as well, so that others can stand on it. Keys and slots are arrays of the tier's `Backend`.

Invariants:
- a slot that is pinned is neither evicted nor moved;
- a row that differs from the store below, or that the store below does not have, is dirty;
- a call that raises has changed no row, no pin and no count, unless it says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Keys
from oneemb.storage.row_store import RowSource, RowStore

InitRows = Callable[[Array, Array, Array, Array], None]
"""init(row_SW, slot_M, table_M, id_M) writes the initial rows of keys into these slots of an array of rows."""


class RowsReadAhead:
    """Rows that one thread reads from the store below a cache while others use the cache. M keys, W words of a row.

    `read` runs beside other calls of the cache, which names each key whose row below changes meanwhile (`note_change`);
    `known` reads those rows once more. wanted_M, ascending, says which of a lookup's keys are read.
    """

    def __init__(self, below: RowSource, keys: Keys, wanted_M: np.ndarray):
        self.wanted_M = wanted_M
        self._below, self._table_M, self._id_M = below, keys.table_U[wanted_M], keys.id_U[wanted_M]
        self.row_MW = np.empty((len(wanted_M), below.row_width), np.float32)
        self._missing_M = np.ones(len(wanted_M), np.bool_)
        self._changed: list[np.ndarray] = []

    def read(self) -> None:
        """Read the rows. Needs no lock."""
        self._missing_M = self._below.get(self._table_M, self._id_M, self.row_MW)

    def note_change(self, id_N: np.ndarray) -> None:
        """Note, under the store lock, ids of keys whose rows below are about to change."""
        self._changed.append(id_N)

    def known(self, wanted: np.ndarray) -> np.ndarray:
        """The `wanted` keys that have rows, as places in `wanted_M`; `row_MW` has their rows as they are now.
        Under the store lock, after `read`."""
        m = np.searchsorted(self.wanted_M, wanted)
        if self._changed:
            again = m[np.isin(self._id_M[m], np.concatenate(self._changed))]
            self._missing_M[again] = self._below.get(self._table_M[again], self._id_M[again], self.row_MW, again)
        return m[~self._missing_M[m]]


class Tier(RowStore, Protocol):
    """Rows above a store that has them too, or some of them."""

    name: str
    """Name of the tier in errors and statistics."""

    def check_holds(self, rows: int) -> None:
        """Get memory for `rows` rows in all. Raises `StoreFullError` if the tier may not know or cannot hold them."""

    def check_slots(self) -> list[str]:
        """One text for each fault: slots that were lost, slots with several rows. Empty if each used slot is in the
        index, free, or of a temporary row."""

    def reload(self) -> None:
        """Forget every row here and start from those of the store below. A call that raises leaves the tier empty."""

    def only_read(self) -> None:
        """In a child of fork: keep no row of those that are read."""


class HotRows(Tier, Protocol):
    """Rows that loops compute on, in place."""

    row_SW: Array
    """float32 [S, at least W]. Read it anew for every use: it moves."""

    stable_slots: bool
    """Whether rows stay in their slots without a pin, so that `slots_of` says where to read them."""

    @property
    def begun(self) -> int:
        """Rows that `acquire` has begun since the tier was made."""

    @property
    def pinned(self) -> int:
        """Slots that are pinned now."""

    def acquire(self, keys: Keys) -> tuple[Array, Keys]:
        """Make the rows of these keys resident, beginning unknown ones, and pin each once more.

        Returns:
            slot_U, int64 [U], good until it is released; and the keys, cut to as many as there are.

        Raises:
            StoreFullError: the rows do not fit beside those that are pinned, or there would be too many.
        """

    def acquire_rest(self, keys: Keys, slot_U: Array) -> None:
        """Acquire those keys that have no slot yet in slot_U, a result of `pin_resident`. After a StoreFullError its
        pins are gone too."""

    def pin_resident(self, keys: Keys) -> tuple[Array, Keys, Array]:
        """Add a pin to each row of these keys that is resident. Returns slot_U, -1 for absent ones; the keys, cut to as
        many as there are; and which of them are absent."""

    def rows_ahead(self, keys: Keys, wanted: Array) -> RowsReadAhead | None:
        """Rows below of the `wanted` keys, to be read without the store lock and then brought by `bring_known`; None
        where the store below may be read under it only, or not all of them would find room now."""

    def bring_known(self, keys: Keys, slot_U: Array, wanted: Array, ahead: RowsReadAhead | None = None) -> int:
        """Fetch and pin the rows of the `wanted` keys that a store below has; begin none. Returns how many got a slot.

        Args:
            wanted: int64, which of the keys; none of them has a slot in slot_U, which gets those of the rows brought.
            ahead: rows of these keys, and perhaps of more, that were read already; None = this call reads them.

        Raises:
            StoreFullError: the rows do not fit beside those that are pinned. None was brought.
        """

    def read(self, keys: Keys) -> tuple[Array, Keys]:
        """Copies of the rows of these keys, float32 [U, at least W], an unknown key's initial row for it; and the keys,
        cut to as many as there are."""

    def slots_of(self, table_N: Array, id_N: Array) -> Array:
        """The slots of rows with stable slots, to be read in place without a pin: int64 [N], -1 for an absent key. Keys
        may repeat."""

    def make_temporary(self, table_M: Array, id_M: Array) -> Array:
        """Slots with temporary rows, of keys that get no row: int64 [M], in no index. Each is pinned twice: for the
        lookup that releases it, and until `free_temporary`. StoreFullError if they do not fit beside those that are
        pinned."""

    def free_temporary(self, slot_M: Array) -> None:
        """Free slots of temporary rows that their lookup has released."""

    def release(self, slot_U: Array, *, elsewhere: bool = False) -> None:
        """Unpin slots, once each; -1 is none. `elsewhere`: they may have been pinned on another of a GPU's streams."""

    def mark_dirty(self, slot_U: Array) -> None:
        """Note that loops have changed the rows in these slots."""

    def check_room(self, more: int, leaving: int) -> None:
        """Get memory for `more` rows beside the pinned ones, once `leaving` of the others have been erased. Raises
        `StoreFullError` if they do not fit."""


@dataclass(eq=False)
class Prefetched:
    """Rows of a coming lookup that are in the hot tier and pinned, until its `acquire` takes them over."""

    store: Any
    """The `EmbeddingStore` whose rows they are; Any, since that class imports this one."""
    keys: Keys
    slot_U: Array
    """int64 [U]: -1 for a row that is not there yet."""
    generation: int
    missing: int
    """How many are not there yet."""
    held: bool = True
    """Whether the pins are still there."""

    @property
    def valid(self) -> bool:
        """Whether the pins are there and their slots have the same rows."""
        return self.held and self.generation == self.store.generation


def fill_pinned(slot_U: Array, at: Array, slot_M: Array, release: Callable[[Any], object]) -> None:
    """Write pinned slots into an array, slot_U[at] = slot_M; where that fails for want of memory, release them."""
    try:
        slot_U[at] = slot_M
    except BaseException:
        release(slot_M)
        raise
