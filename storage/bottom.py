"""Store below an embedding's tiers: a `RowStore` that is opened once the width of a row is known.

`TableBottom` is a persistent table in a folder. Any other `RowStore` will do: one that has no snapshots (see
`oneemb.storage.row_store.Snapshots`) refuses to save and load, and rows in it keep the width with which they began.
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

EXPORTED = "rows-on-their-way-to-a-file-"
"""How the name of a snapshot begins that holds the rows of an embedding while they are written to a file."""


class Bottom(Protocol):
    """Opens the store at the bottom, and reads the snapshots it keeps without opening it."""

    name: str
    """Name of the store in errors."""

    def open(self, row_width: int) -> RowStore:
        """The store for rows of this width, without a row. Raises StorageError if it cannot be opened."""

    def snapshots(self) -> list[SnapshotInfo]:
        """Snapshots, oldest first; empty if the store keeps none."""

    def snapshot(self, name: str) -> SnapshotInfo:
        """Description of a snapshot. Raises SnapshotNotFoundError if there is none of that name, StorageError if it
        cannot be read or the store keeps none."""

    def chain(self, name: str) -> list[SnapshotInfo]:
        """A snapshot and, before it, its ancestors, the whole one first; raises as `snapshot`."""

    def read(self, name: str) -> LinkedRows:
        """The rows of a snapshot, those of a delta with the unchanged ones; raises as `snapshot`."""

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Arrays of a snapshot beside its rows, by name; raises as `snapshot`."""


class TableBottom:
    """A persistent table in a folder, which is made if it is not there; StorageError if it cannot be.

    Args:
        mend: advice after a call on the table was cut short, for errors.
        holder: object that owns the rows, weakly referenced.
    """

    def __init__(self, path: str, physical_block_size: int, threads: Threads, mend: str, holder: Holder):
        self.name = path
        self._holder = weakref.ref(holder)
        self._physical_block_size = physical_block_size
        self._threads = threads
        self._mend = mend
        self._swept = False
        _check_writable(path)

    def open(self, row_width: int) -> PersistentTable:
        table = PersistentTable.open(
            self.name,
            row_width=row_width,
            physical_block_size=self._physical_block_size,
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
        """Delete exports left by processes that died, the first time this process holds the table's lock."""
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
            return reader.arrays()[0]


def _check_writable(path: str) -> None:
    try:
        LocalFileSystem().make_directories(path)
    except OSError as error:
        raise StorageError(
            f"persistent_path {path} cannot be made: {error.strerror}; give a folder that can"
        ) from error
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"persistent_path {path} cannot be written to; give a folder that can, or change its mode")
