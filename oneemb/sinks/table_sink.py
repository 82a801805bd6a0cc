"""Sink of rows in another table on disk, whose snapshots servers and jobs read."""

from collections.abc import Sequence

from oneemb.kernels.threads import Threads
from oneemb.rows.values import encode_rows
from oneemb.sinks.changes import Changes
from oneemb.sinks.version import TableVersion, choice_of
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows, without_part
from oneemb.storage.table.delta import number_of, without_delta
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import read_snapshot_info


class TableSink:
    """Another table, with a snapshot for each version, of the same name and identity. `oneemb.InferenceEmbedding`
    serves it, and an embedding loads it. The sink holds the table open, with its index in memory.

    Args:
        folder: folder of the table; one publisher at a time writes to it.
        tables: numbers of the tables to publish; None = all.
        with_state: if True, publish the optimizer state too, so that a job can go on from a snapshot.
        keep: number of snapshots that stay.
        max_rows: largest number of rows, of these tables together; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.
    """

    wants_whole = False

    def __init__(
        self, folder: AnyPath, *, tables: Sequence[int] | None = None, with_state: bool = False, keep: int = 2,
        max_rows: int | None = None,
    ):  # fmt: skip
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be a number of snapshots, 1 or more, got {keep!r}")
        self.name = self._folder = absolute_path(folder)
        self._choice, self.max_rows = choice_of(tables, with_state, max_rows), max_rows
        self._tables, self._with_state, self._keep = self._choice["tables"], with_state, keep
        self._table: PersistentTable | None = None

    def version(self) -> TableVersion | None:
        newest = self._newest()
        if newest is None or newest.meta.get("choice", self._choice) != self._choice:
            return None  # A snapshot of another choice lacks rows.
        return TableVersion.of_info(newest, newest.meta.get("history", ""))

    def apply(self, changes: Changes) -> None:
        rows = changes.with_state() if self._with_state else changes.without_state()
        try:
            table = self._opened(rows)
            if changes.is_whole:
                table.clear()
            for batch in changes.batches(tables=self._tables, with_state=self._with_state):
                assert batch.table_N is not None
                table.put(batch.table_N, batch.id_N, encode_rows(rows.format, batch.weight_ND, batch.state_NZ))
            table.erase(*changes.gone(tables=self._tables))
            info = changes.snapshot.info
            meta = without_part(without_delta(info.meta, number_of(info)))
            meta |= rows.to_meta(info.meta.get("embedding") or {}) | {"choice": self._choice}
            meta |= {"history": changes.version.history}
            table.save_snapshot(
                changes.version.name, meta, overwrite=True, identity=changes.version.identity,
                sequence=changes.version.sequence,
            )  # fmt: skip
            for old in table.snapshots()[: -self._keep]:
                table.delete_snapshot(old.name)
        except BaseException:
            self.close()  # The table has some of the new rows: the next call loads the snapshot before.
            raise

    def close(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()

    def _newest(self) -> SnapshotInfo | None:
        try:
            found = read_snapshot_info(self._folder)
        except StorageError:
            return None  # There is no folder yet.
        return found[-1] if found else None

    def _opened(self, rows: SnapshotRows) -> PersistentTable:
        """The table with the rows of its newest snapshot."""
        if self._table is None:
            self._table = PersistentTable.open(self._folder, row_width=rows.format.row_width, threads=Threads(1))
            newest = self._newest()
            if newest is not None and newest.row_width == rows.format.row_width:
                self._table.load_snapshot(newest.name)
        return self._table
