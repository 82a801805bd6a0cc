"""What every tier in memory counts and refuses: how many rows fit, how many there may be, what calls have found."""

import weakref
from collections.abc import Sized
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oneemb.storage.row_store import RowStore, StoreFullError
from oneemb.storage.tiers.reservation import mebibytes

__all__ = ["Counters", "Limits"]


@dataclass(frozen=True)
class Limits:
    """How many rows a tier may hold.

    Args:
        name: what errors call the tier.
        slots: rows that fit.
        slot_bytes: memory of one, with all that is kept beside the row.
        resident: whether all rows have to be here.
        row_limit: rows that may be known to this tier and those below together; None = no limit.
        have_memory: method of a resident tier that gets memory for so many rows in all or raises `StoreFullError`;
            None = nothing is to be asked. Weak, since the tier refers to this object.
    """

    name: str
    slots: int
    slot_bytes: int
    resident: bool
    row_limit: int | None
    have_memory: "weakref.WeakMethod[Any] | None" = None

    def check_fits(self, more: int, held: int) -> None:
        """Make room for so many more rows beside those held: all rows of a resident tier, the pinned ones of a cache.

        Raises:
            StoreFullError: there is no room.
        """
        if held + more <= self.slots:
            self._have(held + more)
            return
        how = "taken" if self.resident else "in use by this step"
        raise (StoreFullError if self.resident else StoreFullError.of_pins)(
            f"the {self.name} tier has {self.slots} slots; {held} of them are {how} and {more} more rows were asked"
            f" for, {held + more} in all; give it at least {self.mebibytes(held + more)} MiB, or use fewer ids a step"
        )

    def unknown(self, below: RowStore | None, table_U: np.ndarray, id_U: np.ndarray, new: np.ndarray) -> int | None:
        """How many of the `new` keys the store below lacks too; None if no limit needs it."""
        if self.resident or below is None or len(new) == 0:
            return len(new)
        if self.row_limit is None:
            return None
        return len(new) - int(np.count_nonzero(below.contains(table_U[new], id_U[new])))

    def check_new(self, more: int, tier: Sized, first_table: int) -> None:
        """Raise `StoreFullError` if `more` new rows would exceed the row limit, beside those that the tier knows."""
        if self.row_limit is None or more == 0 or (known := len(tier)) + more <= self.row_limit:
            return
        raise StoreFullError(
            f"capacity is {self.row_limit} rows; {known} are kept and {more} new ones were asked for (the first of"
            f" table {first_table}); give a capacity of at least {known + more}, or None"
        )

    def check_holds(self, rows: int) -> None:
        """Make room for so many rows in all.

        Raises:
            StoreFullError: the tier may not know, or cannot hold, so many.
        """
        if self.row_limit is not None and rows > self.row_limit:
            raise StoreFullError(
                f"capacity is {self.row_limit} rows, {rows} are to be loaded; give at least {rows}, or None"
            )
        if self.resident and rows > self.slots:
            raise StoreFullError(
                f"the {self.name} tier has {self.slots} slots and must hold all of {rows} rows; give it at least"
                f" {self.mebibytes(rows)} MiB"
            )
        self._have(rows)

    def _have(self, rows: int) -> None:
        if self.resident and self.have_memory is not None and (have := self.have_memory()) is not None:
            have(rows)

    def mebibytes(self, rows: int) -> int:
        """MiB for so many rows, rounded up."""
        return mebibytes(rows * self.slot_bytes)


@dataclass
class Counters:
    """What a tier has done since it was made, in rows."""

    hits: int = 0
    misses: int = 0
    new_rows: int = 0
    evicted: int = 0
    written_down: int = 0

    def stats(self) -> dict[str, Any]:
        """As `RowStore.stats` has them."""
        return asdict(self)
