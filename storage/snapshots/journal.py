"""Finds the changes of a store's rows since its last snapshots, for deltas.

A point is a snapshot that the store has saved or loaded, with the places that all rows had then. A row that was written
since has another place; a key that had a place then and has no row now is gone. So nothing has to be recorded when rows
are trained, initialized or evicted. Only keys that users erase are recorded, since readers that keep evicted rows must
drop erased rows all the same.

Nothing here is thread-safe: `EmbeddingStore` calls it under the store lock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import SnapshotNeededError, StorageError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.replicas import Replicas
from oneemb.storage.row_store import Places
from oneemb.storage.table.delta import Delta, chain_of, deltas_since, gone_array, in_chain_text, number_of
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiered_rows import TieredRows

POINTS_MAX = 4
"""Largest number of points. A point takes one bit for each row."""

ERASED_MAX = 1 << 24
"""Largest number of erased keys that are recorded between two points."""

# Largest number of arrays of erased keys before they are joined into one.
_ARRAYS_MAX = 256


@dataclass
class Point:
    """A snapshot that the store has saved or loaded."""

    name: str
    info: SnapshotInfo
    rows: int
    """Number of rows of the store at that time."""
    loaded: int
    """Largest number of rows that a reader has after a load: more than `rows` if deltas left evicted keys out."""
    places: Places
    opened: int
    """Value of `TieredRows.opened` at that time."""
    exact: bool = True
    """Whether a load gives exactly the rows that the store had; False if a delta has left evicted keys out."""
    erased: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Keys that users have erased between this point and the next one; a key may occur twice."""
    erased_count: int = 0
    erased_too_many: bool = False

    @property
    def number(self) -> int:
        """Number of the snapshot in its chain of deltas."""
        return number_of(self.info)


class Journal:
    """The last points of a store, oldest first."""

    def __init__(self, rows: TieredRows, replicas: Replicas, threads: Threads):
        self._rows, self._replicas, self._threads = rows, replicas, threads
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)

    def add(self, name: str, info: SnapshotInfo, rows: int, loaded: int, *, exact: bool = True) -> None:
        """Add a point: the rows now are those of this snapshot, which has replaced any of the same name. `Point`
        explains the arguments."""
        for n in [n for n, point in enumerate(self._points) if point.name == name]:
            self._drop(n)
        self._points.append(Point(name, info, rows, loaded, self._rows.places, self._rows.opened, exact))

    def forget(self, table_name: str) -> None:
        """Remove the point of the table's snapshot of this name, which has been deleted."""
        for n in [n for n, point in enumerate(self._points) if point.info.name == table_name]:
            self._drop(n)

    def _drop(self, n: int) -> None:
        if n:  # The point before needs the keys that were erased since.
            self._points[n - 1].erased += self._points[n].erased
            self._points[n - 1].erased_count += self._points[n].erased_count
            self._points[n - 1].erased_too_many |= self._points[n].erased_too_many
        del self._points[n]

    def clear(self) -> None:
        """Forget all points, after all rows of the store have been replaced."""
        self._points.clear()

    def erase(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Record keys that a user has erased, whether they had rows or not."""
        if self._points:
            last = self._points[-1]
            last.erased.append((table_N.copy(), id_N.copy()))
            last.erased_count += len(id_N)
            if len(last.erased) > _ARRAYS_MAX:
                last.erased = [_joined(last.erased)]
            if last.erased_count > ERASED_MAX:
                last.erased, last.erased_too_many = [], True

    def check_not_needed(self, name: str, done: str) -> None:
        """Raise SnapshotNeededError if the table's snapshot of this name is the parent of deltas. `done`: what is about
        to happen to the snapshot, "replaced" or "deleted"."""
        infos = self._rows.snapshots()
        for info in infos:
            if info.name == name and (deltas := deltas_since(info.identity, infos)):
                raise SnapshotNeededError(in_chain_text(name, done, deltas))

    def parent(self, since: str, keep_evicted: bool) -> Point:
        """The point of snapshot `since`, the parent of a delta. Raises StorageError if there is no such point, or if
        the snapshot has been deleted."""
        point = self._since(since)
        if not (point.exact or keep_evicted):
            raise StorageError(
                f"{since!r} was saved with keep_evicted=True, so it is not known which rows its readers have that are"
                " gone here; save this delta with keep_evicted=True too, or save it since another snapshot"
            )
        if all(info.identity != point.info.identity for info in self._rows.snapshots()):
            raise StorageError(f"snapshot {since!r} is not there any more; save a whole snapshot")
        return point

    def chain(self, since: str) -> list[SnapshotInfo]:
        """Descriptions of the table's snapshots from a whole one to snapshot `since`. Raises as `parent`."""
        return chain_of(self.parent(since, keep_evicted=False).info, self._rows.snapshots, lambda info: info)

    def delta(self, since: str, rows: int, keep_evicted: bool) -> tuple[Places, np.ndarray, Delta]:
        """Contents of a delta since this snapshot. StorageError if the snapshot is not known, or has been deleted.

        Args:
            rows: number of rows now.
            keep_evicted: leave evicted keys out of the keys that are gone; see `StoreSnapshots.save`.

        Returns:
            Places of the rows at the parent, the keys that are gone since (from `gone_array`), and the description.
        """
        point = self.parent(since, keep_evicted)
        table_N, id_N = self._rows.gone_since(point.places)
        counted = np.flatnonzero(self._replicas.are_counted(table_N, id_N))
        table_N, id_N = table_N[counted], id_N[counted]
        inserted = max(rows - point.rows + len(id_N), 0)
        table_E, id_E = _joined([keys for later in self._from(point) for keys in later.erased])
        if keep_evicted:  # Evicted keys are left out, erased ones are not.
            by_hand = HashIndex(self._threads)
            by_hand.put(table_E, id_E, np.zeros(len(id_E), np.int64))
            erased = np.flatnonzero(by_hand.find(table_N, id_N) >= 0)
            table_N, id_N = table_N[erased], id_N[erased]
        loaded = point.loaded + inserted - len(id_N)
        if len(id_E):  # Erased keys that had no row here are added too: readers may have kept rows for them.
            absent_E = ~self._rows.hot.contains(table_E, id_E) & self._replicas.are_counted(table_E, id_E)
            table_N, id_N = np.append(table_N, table_E[absent_E]), np.append(id_N, id_E[absent_E])
        delta = Delta(point.name, point.info.identity, point.number, point.number + 1, loaded, inserted)
        return point.places, gone_array(table_N, id_N), delta

    def _since(self, name: str) -> Point:
        known = [point for point in self._points if point.opened == self._rows.opened]
        for point in known:
            if point.name == name:
                if any(later.erased_too_many for later in self._from(point)):
                    raise StorageError(
                        f"more than {ERASED_MAX} keys were erased since {name!r}, too many for a delta; save a whole"
                        " snapshot"
                    )
                return point
        names = ", ".join(repr(point.name) for point in known) or "none, save a whole one first"
        raise StorageError(
            f"a delta must be since one of the last {POINTS_MAX} snapshots that were saved here, or loaded by as many"
            f" ranks as saved them, with rows of the same form: {names}; got {name!r}"
        )

    def _from(self, point: Point) -> list[Point]:
        points = list(self._points)
        return points[next(n for n, other in enumerate(points) if other is point) :]


def _joined(erased: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    tables, ids = [table_N for table_N, _ in erased], [id_N for _, id_N in erased]
    return np.concatenate([np.empty(0, np.int32), *tables]), np.concatenate([np.empty(0, np.int64), *ids])
