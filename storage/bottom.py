"""Store below an embedding's tiers: a `RowStore` that is opened once the width of a row is known.

`TableBottom` is a persistent table in a folder. Any other `RowStore` can be used. A store without snapshots
(`oneemb.storage.row_store.Snapshots`) refuses to save and load, and the width of its rows cannot change.
"""

import os
import weakref
from contextlib import suppress
from typing import Protocol

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.row_store import RowStore
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.table.delta import chain_of
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from oneemb.storage.table.writer_lock import Holder
from oneemb.storage.tiers.stack import StorePlan

EXPORTED = "rows-on-their-way-to-a-file-"
"""Prefix of the names of temporary snapshots: each holds the rows of an embedding while they are written to a file."""

RESCUED = "rows-before-a-relayout-"
"""Prefix of the names of snapshots that hold rows while their width changes."""

NOT_SAVED = (EXPORTED, RESCUED)
"""Prefixes of the names of snapshots that no user has saved: they are neither served nor published as the newest."""


class Bottom(Protocol):
    """Opens the store at the bottom. Reads the store's snapshots without opening it."""

    name: str
    """Name of the store in errors."""

    def open(self, row_width: int) -> RowStore:
        """Open the store for rows of `row_width` words; the open store has no rows yet. Raises StorageError if it
        cannot be opened."""

    def snapshots(self) -> list[SnapshotInfo]:
        """Descriptions of all snapshots, oldest first; an empty list if the store keeps no snapshots."""

    def snapshot(self, name: str) -> SnapshotInfo:
        """Description of a snapshot. Raises SnapshotNotFoundError if no snapshot has this name, StorageError if it
        cannot be read or the store keeps no snapshots."""

    def chain(self, name: str) -> list[SnapshotInfo]:
        """Descriptions of a snapshot and its ancestors, the whole snapshot first and the named one last; raises as
        `snapshot`."""

    def read(self, name: str) -> LinkedRows:
        """All rows of a snapshot; for a delta, the changed rows and the unchanged rows of its ancestors. Raises as
        `snapshot`."""

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """{name: array} of the arrays that a snapshot holds beside its rows; raises as `snapshot`."""


class TableBottom:
    """A persistent table in the folder of a plan. Makes a missing folder; raises StorageError if that fails.

    Args:
        mend: advice in the errors that a table raises after a call on it was cut short.
        holder: the object that other objects of the process ask to free the folder; weakly referenced.
        refusal: the text of the error that `open` raises; the folder is then neither made nor locked. "" = the table
            is opened.
    """

    def __init__(self, plan: StorePlan, threads: Threads, mend: str, holder: Holder, refusal: str = ""):
        self.name, self._refusal = plan.persistent_path, refusal
        self._holder = weakref.ref(holder)
        self._plan = plan
        self._threads = threads
        self._mend = mend
        self._swept = False
        if not refusal:
            _check_writable(self.name)

    def open(self, row_width: int) -> PersistentTable:
        if self._refusal:
            raise StorageError(self._refusal)
        table = PersistentTable.open(
            self.name,
            row_width=row_width,
            physical_block_size=self._plan.physical_block_size,
            max_space_amplification=self._plan.max_space_amplification,
            expected_rows=self._plan.expected_rows,
            index_memory_bytes=self._plan.index_memory_bytes,
            threads=self._threads,
            mend=self._mend,
            holder=self._holder(),
        )
        try:
            self._sweep(table)
        except BaseException:
            table.close()
            raise
        return table

    def _sweep(self, table: PersistentTable) -> None:
        """Delete the `EXPORTED` snapshots that killed processes have left; only the first time the table is opened."""
        for info in () if self._swept else table.snapshots():
            if info.name.startswith(EXPORTED):
                with suppress(StorageError):
                    table.delete_snapshot(info.name)
        self._swept = True

    def snapshots(self) -> list[SnapshotInfo]:
        return read_snapshot_info(self.name)

    def snapshot(self, name: str) -> SnapshotInfo:
        return read_snapshot_info(self.name, name)

    def chain(self, name: str) -> list[SnapshotInfo]:
        return chain_of(self.snapshot(name), self.snapshots, lambda info: info)

    def read(self, name: str) -> LinkedRows:
        return LinkedRows([[SnapshotReader.open(self.name, info.name)] for info in self.chain(name)])

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with self.read(name) as reader:
            return reader.arrays()


def _check_writable(path: str) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise StorageError(f"persistent_path must be a folder, got the file {path}; give the path of a folder")
    try:
        LocalFileSystem().make_directories(path)
    except OSError as error:
        raise StorageError(
            f"persistent_path {path} cannot be made: {error.strerror}; give a folder that can"
        ) from error
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"persistent_path {path} cannot be written to; give a folder that can, or change its mode")
