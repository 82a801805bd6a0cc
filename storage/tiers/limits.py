"""Limits and counters of a tier in memory: numbers of rows that fit, that may exist, and that were found, made and
moved."""

import weakref
from collections.abc import Sized
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oneemb.storage.errors import StoreFullError
from oneemb.storage.row_store import RowStore
from oneemb.storage.tiers.reservation import mebibytes


@dataclass(frozen=True)
class Limits:
    """Limits of a tier's rows.

    Args:
        name: the tier, in errors.
        slots: maximum number of rows in the tier.
        slot_bytes: bytes of a slot: the row, its key in the index, score, pins and dirty bit.
        resident: whether the tier must hold all rows.
        row_limit: maximum number of rows in this tier and the stores below together; None = no limit.
        get_memory: weak method of a resident tier: get_memory(rows) gets memory for `rows` rows in all, or raises
            `StoreFullError`; None = the tier has the memory of all its slots.
    """

    name: str
    slots: int
    slot_bytes: int
    resident: bool
    row_limit: int | None
    get_memory: "weakref.WeakMethod[Any] | None" = None

    def check_fits(self, more: int, held: int) -> None:
        """Get memory for `more` rows beside the `held` rows: all rows of a resident tier, the pinned rows of a cache.
        Raises StoreFullError if they do not fit."""
        if held + more <= self.slots:
            self._get_memory(held + more)
            return
        how = "taken" if self.resident else "in use by this step"
        raise (StoreFullError if self.resident else StoreFullError.of_pins)(
            f"the {self.name} tier has {self.slots} slots; {held} of them are {how} and {more} more rows were asked"
            f" for, {held + more} in all; give the tier at least {self.mebibytes(held + more)} MiB, or use fewer ids a"
            " step"
        )

    def unknown(self, below: RowStore | None, table_U: np.ndarray, id_U: np.ndarray, new: np.ndarray) -> int | None:
        """Number of keys, at the positions `new`, that have no row in the store below either; None = not counted, since
        there is no row limit."""
        if self.resident or below is None or len(new) == 0:
            return len(new)
        if self.row_limit is None:
            return None
        return len(new) - int(np.count_nonzero(below.contains(table_U[new], id_U[new])))

    def check_new(self, more: int, tier: Sized, first_table: int) -> None:
        """Raise `StoreFullError` if the tier's rows and `more` new ones would exceed the row limit."""
        if self.row_limit is None or more == 0 or (known := len(tier)) + more <= self.row_limit:
            return
        raise StoreFullError(
            f"capacity is {self.row_limit} rows; {known} are kept and {more} new ones were asked for (the first of"
            f" table {first_table}); give a capacity of at least {known + more} rows, or None"
        )

    def check_holds(self, rows: int) -> None:
        """Get memory for `rows` rows in all. Raises StoreFullError if they exceed the row limit, or the slots of a
        resident tier."""
        if self.row_limit is not None and rows > self.row_limit:
            raise StoreFullError(
                f"capacity is {self.row_limit} rows, {rows} are to be loaded; give a capacity of at least {rows} rows,"
                " or None"
            )
        if self.resident and rows > self.slots:
            raise StoreFullError(
                f"the {self.name} tier has {self.slots} slots and must hold all of {rows} rows; give it at least"
                f" {self.mebibytes(rows)} MiB"
            )
        self._get_memory(rows)

    def _get_memory(self, rows: int) -> None:
        if self.resident and self.get_memory is not None and (get_memory := self.get_memory()) is not None:
            get_memory(rows)

    def mebibytes(self, rows: int) -> int:
        """MiB that `rows` slots take, rounded up."""
        return mebibytes(rows * self.slot_bytes)


@dataclass
class Counters:
    """Numbers of rows that a tier has found, made and moved since it was made."""

    hits: int = 0
    misses: int = 0
    new_rows: int = 0
    evicted: int = 0
    written_down: int = 0

    def stats(self) -> dict[str, Any]:
        """The counters as entries of `RowStore.stats`."""
        return asdict(self)
