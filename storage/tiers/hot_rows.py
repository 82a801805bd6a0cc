"""The contract of the hot tier: loops read and write its rows in place.

    slot_U, keys = tier.acquire(keys)         rows are in memory and pinned; new rows are initialized
    ...                                       loops on tier.row_SW[slot_U]
    tier.mark_dirty(slot_U)
    tier.release(slot_U)

A hot tier is a `RowStore` too. Keys and slots are arrays of the tier's `Backend`.

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

_ODD = np.uint64(0x9E3779B97F4A7C15)


class RowsReadAhead:
    """Rows that one thread reads from the store below a cache while other threads use the cache. M keys to read.

    `read` runs beside other calls of the cache. During that time the cache reports each key whose row below changes
    (`note_change`), and `known` reads those rows once more. wanted_M, ascending: positions in `keys` of the keys to
    read.
    """

    def __init__(self, below: RowSource, keys: Keys, wanted_M: np.ndarray):
        self.wanted_M = wanted_M
        self._below, self._table_M, self._id_M = below, keys.table_U[wanted_M], keys.id_U[wanted_M]
        self.row_MW = np.empty((len(wanted_M), below.row_width), np.float32)
        self._missing_M = np.ones(len(wanted_M), np.bool_)
        self._word_M = _words(self._table_M, self._id_M)
        self._changed: list[np.ndarray] = []

    def read(self) -> None:
        """Read the rows. Needs no lock."""
        self._missing_M = self._below.get(self._table_M, self._id_M, self.row_MW)

    def note_change(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Record keys whose rows below are about to change. Called under the store lock."""
        self._changed.append(_words(table_N, id_N))

    def known(self, wanted: np.ndarray) -> np.ndarray:
        """Positions in `wanted_M` of the `wanted` keys that have rows below. Reads changed rows again, so that `row_MW`
        has the present rows. Call after `read`, under the store lock."""
        m = np.searchsorted(self.wanted_M, wanted)
        if self._changed:
            again = m[np.isin(self._word_M[m], np.concatenate(self._changed))]
            if len(again):
                self._missing_M[again] = self._below.get(self._table_M[again], self._id_M[again], self.row_MW, again)
        return m[~self._missing_M[m]]


def _words(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """A word of each key, uint64 [N]. Equal keys have equal words; the few other keys that do cost a needless read."""
    return id_N.astype(np.uint64) ^ table_N.astype(np.uint64) * _ODD


class Tier(RowStore, Protocol):
    """A `RowStore` above another store: it holds all rows, or caches some rows of the store below."""

    name: str
    """Name of the tier in errors and statistics."""

    def check_holds(self, rows: int) -> None:
        """Get memory for `rows` rows in all. Raises `StoreFullError` if the row limit forbids them or they do not
        fit."""

    def check_slots(self) -> list[str]:
        """One text for each fault: slots that were lost, slots with several rows. Empty if each used slot is in the
        index, free, or of a temporary row."""

    def reload(self) -> None:
        """Drop all rows of this tier, then, in a resident tier, copy all rows of the store below. A call that raises
        leaves the tier empty."""

    def only_read(self) -> None:
        """In a child of fork: stop keeping rows that are read from below."""


class HotRows(Tier, Protocol):
    """The hot tier: loops compute on its rows in place."""

    row_SW: Array
    """float32 [S, at least W]. Read this attribute anew for every use, since the slab moves when it grows."""

    begun: int
    """Number that grows when `acquire` has initialized new rows, or may have."""

    stable_slots: bool
    """Whether rows stay in their slots without a pin, so that rows can be read at the slots from `slots_of`."""

    @property
    def pinned(self) -> int:
        """Number of pinned slots."""

    def acquire(self, keys: Keys) -> tuple[Array, Keys]:
        """Bring the rows of these keys into this tier, initialize new rows, and add one pin to each row.

        Returns:
            slot_U, int64 [U], valid until it is released; and the keys, cut to their actual number U. On a GPU both may
            have room for more: slots beyond the actual number are `BEYOND`, and `Backend.counted` cuts the keys.

        Raises:
            StoreFullError: the rows do not fit beside those that are pinned, or there would be too many.
        """

    def acquire_rest(self, keys: Keys, slot_U: Array) -> None:
        """Acquire the keys whose slot in `slot_U`, a result of `pin_resident`, is -1, and fill in their slots. Any
        error releases the pins of `slot_U` too."""

    def pin_resident(self, keys: Keys) -> tuple[Array, Keys, Array]:
        """Add one pin to each row of these keys that is in this tier. Returns slot_U, -1 for other keys; the keys, cut
        to their actual number U; and the positions of the keys that are not in this tier."""

    def rows_ahead(self, keys: Keys, wanted: Array) -> RowsReadAhead | None:
        """A reader of the store below for the `wanted` keys: call its `read` without the store lock, then
        `bring_known`. None if the store below may be read under the store lock only, or the rows would not all fit
        now."""

    def bring_known(self, keys: Keys, slot_U: Array, wanted: Array, ahead: RowsReadAhead | None = None) -> int:
        """Bring in and pin the rows of the `wanted` keys that exist; initialize no row. Returns the number of keys that
        got a slot.

        Args:
            wanted: int64, positions in `keys` of keys whose slot in `slot_U` is -1; this call fills in the slots of
                found rows.
            ahead: reader that has read the rows of these keys, and perhaps of more; None = this call reads the rows.

        Raises:
            StoreFullError: the rows do not fit beside the pinned ones. No row was moved from below.
        """

    def read(self, keys: Keys) -> tuple[Array, Keys]:
        """Copies of the rows of these keys, float32 [U, at least W], with the values of absent rows for keys that have
        no row; and the keys, cut to their actual number U."""

    def gather(self, keys: Keys, weights: Callable[[Array], Array], absent: InitRows, out_ND: Array) -> bool:
        """Write the weights of each id of a batch into out_ND, zeros for padding, without a wait of the host. False
        where that is not possible: nothing is written then.

        Args:
            weights: gives the bits of weights in an array of rows.
            absent: writes the bits of weights that keys without a row read as: absent(weight_UX, slots, table_U, id_U),
                where `slots` are `ListedSlots` of a GPU.
        """

    def slots_of(self, table_N: Array, id_N: Array) -> Array:
        """Slots of rows, in a tier with stable slots, which may be read in place without a pin: int64 [N], -1 for an
        absent key. Keys may repeat."""

    def make_temporary(self, table_M: Array, id_M: Array) -> Array:
        """Make temporary rows for keys that get no permanent row. Returns their slots, int64 [M], which are in no
        index. Each slot gets two pins: the lookup releases one, `free_temporary` the other. Raises StoreFullError if
        the rows do not fit beside the pinned ones."""

    def free_temporary(self, slot_M: Array) -> None:
        """Free the slots of temporary rows after their lookup has released them."""

    def release(self, slot_U: Array, *, elsewhere: bool = False) -> None:
        """Remove one pin from each slot; -1 is ignored. elsewhere: whether another stream of a GPU may have pinned the
        slots."""

    def mark_dirty(self, slot_U: Array) -> None:
        """Set the dirty bits of these slots, whose rows loops have changed."""

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
    """int64 [U]: -1 for a row that is not in the hot tier yet."""
    generation: int
    missing: int
    """Number of keys whose rows are not in the hot tier yet."""
    held: bool = True
    """Whether this object still holds the pins: neither `acquire` nor a cancel has taken them."""

    @property
    def valid(self) -> bool:
        """Whether this object holds the pins and their slots still have the same rows."""
        return self.held and self.generation == self.store.generation


def fill_pinned(slot_U: Array, at: Array, slot_M: Array, release: Callable[[Any], object]) -> None:
    """slot_U[at] = slot_M, for pinned slots. If that fails for lack of memory, release the slots."""
    try:
        slot_U[at] = slot_M
    except BaseException:
        release(slot_M)
        raise
