"""What has happened to rows since the snapshots that a store has saved or loaded last: what a delta is made of.

A point is a snapshot at which the rows here were those that it holds, and where they lay then. What was written since
lies elsewhere, and a key whose place is free, and that has none, is gone: so nothing has to be noted of rows that are
trained, begun or evicted. Keys that were erased by hand are noted, since whoever kept rows that a policy let go has to
hear of these.

Nothing here is thread-safe: `EmbeddingStore` calls it in a turn.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oneemb.storage.errors import StorageError
from oneemb.storage.row_store import Places
from oneemb.storage.table.delta import number_of
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

__all__ = ["Journal", "Point"]

POINTS_MAX = 4
"""How many snapshots are remembered: a bit for each row."""

ERASED_MAX = 1 << 24
"""Keys that may be erased by hand between two of them."""

# Calls whose keys are kept as they came, before they are put together.
_ARRAYS_MAX = 256


@dataclass
class Point:
    """A snapshot that was saved or loaded."""

    name: str
    info: SnapshotInfo
    rows: int
    """How many rows there were here."""
    loaded: int
    """How many one has at most who loads it: more, where deltas did not say which had left."""
    places: Places
    opened: int
    """Of the store at the bottom; see `TieredRows.opened`."""
    exact: bool = True
    """Whether who loads it has the rows that there were here: a delta may not say which had left."""
    erased: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Keys that were erased by hand between this and the next point, some perhaps twice."""
    erased_count: int = 0
    erased_too_many: bool = False

    @property
    def number(self) -> int:
        """Its number in a chain of deltas."""
        return number_of(self.info)


class Journal:
    """The points, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)

    def add(self, point: Point) -> None:
        """The rows are those of this snapshot now, which has replaced one of its name."""
        for n in [n for n, its in enumerate(self._points) if its.name == point.name]:
            self._drop(n)
        self._points.append(point)

    def forget(self, table_name: str) -> None:
        """The snapshot that the table had under this name is there no more."""
        for n in [n for n, its in enumerate(self._points) if its.info.name == table_name]:
            self._drop(n)

    def _drop(self, n: int) -> None:
        if n:  # Those before need what has happened since.
            self._points[n - 1].erased += self._points[n].erased
            self._points[n - 1].erased_count += self._points[n].erased_count
            self._points[n - 1].erased_too_many |= self._points[n].erased_too_many
        del self._points[n]

    def clear(self) -> None:
        """Other rows have taken the place of those that were here."""
        self._points.clear()

    def erase(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Keys were erased by hand, whether they had rows or not."""
        if self._points:
            last = self._points[-1]
            last.erased.append((table_N.copy(), id_N.copy()))
            last.erased_count += len(id_N)
            if len(last.erased) > _ARRAYS_MAX:
                last.erased = [_joined(last.erased)]
            if last.erased_count > ERASED_MAX:
                last.erased, last.erased_too_many = [], True

    def since(self, name: str, opened: int) -> Point:
        """The point at which the snapshot of this name was saved or loaded.

        Raises:
            StorageError: it is not remembered.
        """
        known = [point for point in self._points if point.opened == opened]
        for point in known:
            if point.name == name:
                if any(its.erased_too_many for its in self._from(point)):
                    raise StorageError(
                        f"more than {ERASED_MAX} keys were erased since {name!r}, too many for a delta; save a whole"
                        " snapshot"
                    )
                return point
        names = ", ".join(repr(point.name) for point in known) or "none, save a whole one first"
        raise StorageError(
            f"a delta is since one of the last {POINTS_MAX} snapshots that were saved here, or loaded as as many ranks"
            f" saved them, with rows of the same form: {names}; got {name!r}"
        )

    def erased_since(self, point: Point) -> tuple[np.ndarray, np.ndarray]:
        """The keys that were erased by hand since, table_N and id_N, some perhaps twice."""
        return _joined([keys for its in self._from(point) for keys in its.erased])

    def _from(self, point: Point) -> list[Point]:
        points = list(self._points)
        return points[next(n for n, its in enumerate(points) if its is point) :]


def _joined(erased: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    tables, ids = [table_N for table_N, _ in erased], [id_N for _, id_N in erased]
    return np.concatenate([np.empty(0, np.int32), *tables]), np.concatenate([np.empty(0, np.int64), *ids])
