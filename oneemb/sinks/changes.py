"""Changes of a table's rows, from the version that a sink shows to the next version, read from the table's folder.

Invariants:
- the rows are those that the version's save has stored, whatever the job saves or deletes meanwhile;
- memory does not grow with the number of rows, except for the keys of a delta.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from oneemb.rows.files import RowsOfFile
from oneemb.rows.values import state_of, weights_of
from oneemb.sinks.version import TableVersion
from oneemb.storage.errors import StorageError
from oneemb.storage.snapshots.linked_rows import LinkedRows, every_key
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.row_cap import CappedChanges, KeysIn, RowCap, capped_changes
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.table.snapshot_reader import Keep

_Words = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]


class StoppedError(Exception):
    """Raised while changes are read, once the publisher is closed."""


class Changes:
    """Rows that a sink gets to show a version: the rows written since the version before, and the keys that have no row
    any more; or all rows.

    Args:
        snapshot: the version, with its ancestors.
        is_whole: whether the changes are all rows, which replace whatever the sink has.
        stop: function that returns True once nobody wants the changes any more.
        cap: says which rows stay, of the tables that are asked for; the others count as gone. None = all.
        changed: the changes, if the snapshot is no delta since the version before, and not all rows are given; None =
            the rows of the delta, or all rows.
        damage: error because of which all rows are given; None = there was none.
    """

    def __init__(
        self, snapshot: PartedSnapshot, is_whole: bool, stop: Callable[[], bool] = lambda: False,
        cap: RowCap | None = None, changed: LinkedRows | None = None, damage: StorageError | None = None,
    ):  # fmt: skip
        self.snapshot = snapshot
        """The version's snapshot in the table's folder."""
        self.version = TableVersion.of(snapshot)
        """Name, identity and sequence of the version."""
        self.is_whole = is_whole
        """Whether the changes are all rows of the version: a sink must remove all other rows."""
        self.rows = SnapshotRows.of_meta(snapshot.info.meta, snapshot.name)
        """Format of the rows, with the optimizer whose state they hold, and the step."""
        of_delta = sum(part.info.rows for part in snapshot.parts) if changed is None else len(changed)
        self.num_rows = snapshot.info.rows if is_whole else of_delta
        """Largest number of rows in `batches`; under a cap, rows that come back may exceed it."""
        if cap is not None:
            self.num_rows = min(self.num_rows, cap.max_rows)
        self.nbytes = self.num_rows * self.rows.format.row_bytes
        """Bytes of the rows, at most."""
        self.damage = damage
        """Error of reading the changes since the version before, because of which the changes are all rows."""
        self._stop, self._cap, self._changed = stop, cap, changed
        self._capped: dict[tuple[int, ...] | None, CappedChanges] = {}  # of the tables that were asked for

    def __repr__(self) -> str:
        kind = "all rows" if self.is_whole else "changes"
        return f"Changes({self.version.name!r}, {kind}, {self.num_rows} rows)"

    def batches(
        self, batch_size: int = 65536, *, tables: Sequence[int] | None = None, with_state: bool = False
    ) -> Iterator[RowsOfFile]:
        """Yield the rows of some tables, each once, in batches of at most `batch_size` rows: `table_N` int32, `id_N`
        int64, `weight_ND` float32 or float16, and, if asked for, `state_NZ` float32.

        Raises:
            StorageError: files of the version are damaged, or the job has deleted the version meanwhile.
            ValueError: the version has no table of one of these numbers.
        """
        row_format = self.rows.format
        self._check_tables(tables)
        for table_N, id_N, row_NW in self._scan(batch_size, tables):
            self.check_wanted()
            if tables is not None:
                kept = np.isin(table_N, tables)
                table_N, id_N, row_NW = table_N[kept], id_N[kept], row_NW[kept]
            if len(id_N):
                state_NZ = state_of(row_format, row_NW) if with_state else None
                yield RowsOfFile(table_N, id_N, weights_of(row_format, row_NW), state_NZ)

    def gone(self, *, tables: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Keys of some tables that had a row in the version before and have none now: table_N int32, id_N int64. No
        keys if the changes are all rows.

        Raises:
            StorageError: files of the version are damaged, or the job has deleted the version meanwhile.
        """
        if self.is_whole:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        if self._cap is not None:
            return self._capped_changes(self._cap, tables).gone
        with self._opened(False) as rows:
            table_N, id_N = rows.gone()
        if tables is not None:
            kept = np.isin(table_N, tables)
            table_N, id_N = table_N[kept], id_N[kept]
        return table_N, id_N

    def whole(self) -> "Changes":
        """All rows of the same version, for a sink that wants to be built anew."""
        return Changes(self.snapshot, True, self._stop, self._cap)

    def _check_tables(self, tables: Sequence[int] | None) -> None:
        described = (self.snapshot.info.meta.get("embedding") or {}).get("tables")
        if tables is not None and described is not None and not set(tables) <= set(range(len(described))):
            raise ValueError(
                f"tables must be some of 0 to {len(described) - 1}, the tables of {self.version.name!r}, got"
                f" {list(tables)}"
            )

    def check_wanted(self) -> None:
        """Raise StoppedError if nobody wants the changes any more, since the publisher is closed."""
        if self._stop():
            raise StoppedError

    def without_state(self) -> SnapshotRows:
        """Format of the rows without optimizer state and usage metadata."""
        return SnapshotRows(replace(self.rows.format, optimizer=None, state=(), usage_words=0), 0)

    def with_state(self) -> SnapshotRows:
        """Format of the rows with optimizer state, without usage metadata."""
        return replace(self.rows, format=replace(self.rows.format, usage_words=0))

    def _scan(self, batch_size: int, tables: Sequence[int] | None) -> _Words:
        keep, every = None, self.is_whole
        if self._cap is not None and every:
            keep = KeysIn(self._cap.rows_of(self.snapshot, tables).keys)
        elif self._cap is not None:
            capped = self._capped_changes(self._cap, tables)
            keep, every = KeysIn(capped.put), capped.comes_back
        with self._opened(every, keep) as rows:
            yield from rows.scan(batch_size)

    def _capped_changes(self, cap: RowCap, tables: Sequence[int] | None) -> CappedChanges:
        """Changes under the cap: from the rows of the version before that stayed to the rows of this one that stay."""
        chosen = None if tables is None else tuple(tables)
        if chosen not in self._capped:
            *links, before = self.snapshot.before
            kept = cap.rows_of(replace(before, before=tuple(links)), chosen)
            with self._opened(False) as rows:
                written = rows.keys(every_key)
            self._capped[chosen] = capped_changes(kept.keys, cap.rows_of(self.snapshot, chosen), written)
        return self._capped[chosen]

    def _opened(self, every: bool, keep: Keep | None = None) -> LinkedRows:
        """Reader of all rows of the version, or of its changes alone."""
        if self._changed is not None:
            return self._changed
        return owned_rows(self.snapshot if every else replace(self.snapshot, before=()), 0, 1, keep=keep)
