"""Reads snapshots without the writer's lock: beside a live writer, from several processes, on read-only files.

Invariant: nothing is written, and memory does not grow with the rows, except for the index that `get` makes.
"""

from collections.abc import Iterator
from typing import overload

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path
from oneemb.storage.hash_index import check_tables
from oneemb.storage.table.block_reader import PreadReader
from oneemb.storage.table.chunk_files import EVERY_NUMBER, ChunkFiles, chunk_paths
from oneemb.storage.table.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.row_reader import RowReader
from oneemb.storage.table.snapshot_file import ChunkPart, SnapshotFiles, SnapshotInfo, SnapshotRecord
from oneemb.storage.table.snapshot_load import load_live_rows

__all__ = ["SnapshotReader", "read_snapshot_info"]


@overload
def read_snapshot_info(path: AnyPath, name: str, fs: FileSystem | None = None) -> SnapshotInfo: ...
@overload
def read_snapshot_info(path: AnyPath, name: None = None, fs: FileSystem | None = None) -> list[SnapshotInfo]: ...


def read_snapshot_info(
    path: AnyPath, name: str | None = None, fs: FileSystem | None = None
) -> SnapshotInfo | list[SnapshotInfo]:
    """What a snapshot at a path is; without a name, what all are that can be read, oldest first. Takes no lock.

    Raises:
        SnapshotNotFoundError: there is none of that name.
        CorruptTableError: the named snapshot's file is not what was written.
        FormatVersionError: another release wrote it.
    """
    files = SnapshotFiles(fs or LocalFileSystem(), f"{absolute_path(path)}/snapshots")
    if name is not None:
        return files.read(name).info
    found = []
    for each in files.names():
        try:
            found.append(files.read(each).info)
        except StorageError:
            continue  # `table_info` names those that cannot be read, with the reason.
    return sorted(found, key=lambda info: info.sequence)


class SnapshotReader:
    """The rows of one snapshot. Make one with `open`."""

    def __init__(self, fs: FileSystem, path: str, record: SnapshotRecord):
        self._fs, self._path, self._record = fs, path, record
        self._files = SnapshotFiles(fs, f"{path}/snapshots")
        self._live: LiveRows | None = None
        self._chunks = ChunkFiles(fs, f"{path}/chunks", next_number=0, direct=False)
        self._chunks.keep_below = EVERY_NUMBER  # A reader removes nothing.
        self._rows = RowReader(PreadReader(fs, Threads(1)), self._chunks)
        self.info = record.info

    @classmethod
    def open(cls, path: AnyPath, name: str, *, fs: FileSystem | None = None) -> "SnapshotReader":
        """A reader of the snapshot `name` of the table at `path`.

        Raises:
            SnapshotNotFoundError: there is none of that name.
            CorruptTableError: its file is not what was written.
        """
        fs, path = fs or LocalFileSystem(), absolute_path(path)
        return cls(fs, path, SnapshotFiles(fs, f"{path}/snapshots").read(name))

    def __len__(self) -> int:
        return self.info.rows

    @property
    def row_width(self) -> int:
        return self.info.row_width

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every row once as (table_N int32, id_N int64, row_NW float32), at most `batch` at a time.

        Raises:
            CorruptTableError: the files are not what was written, or a writer has removed the snapshot meanwhile.
        """
        geometry = self._record.geometry
        for part in self._record.parts:
            rows, rows_path, keys = self._part(part)
            yield from scan_rows(self._fs, rows_path, geometry, part.number, keys, rows, batch)

    def get(self, table_U: np.ndarray, id_U: np.ndarray, out_UW: np.ndarray) -> np.ndarray:
        """Copy the rows of these keys into `out_UW`, and return missing_U. The first call makes an index of all keys:
        20 to 30 bytes a row.

        Raises:
            CorruptTableError: as for `scan`.
            ValueError: a table is out of the range of tables.
        """
        check_tables(table_U)
        live = self._find_keys()
        place_U = live.index.find(table_U, id_U)
        to_N = np.flatnonzero(place_U >= 0)
        if len(to_N):
            self._rows.read(live, table_U, id_U, place_U[to_N], to_N, out_UW)
        return place_U < 0

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Whether each key has a row: bool [U]. Makes the index as `get` does, and raises as it does."""
        check_tables(table_U)
        return self._find_keys().index.find(table_U, id_U) >= 0

    def _find_keys(self) -> LiveRows:
        if self._live is None:
            self._live = load_live_rows(self._fs, self._files, self._chunks, self._record, Threads(1))
        return self._live

    def close(self) -> None:
        """Free the index and close the files."""
        self._live = None
        self._rows.close()
        self._chunks.close()

    def __enter__(self) -> "SnapshotReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _part(self, part: ChunkPart):
        rows_path, keys_path = chunk_paths(self._chunks.directory, part.number)
        rows = live_rows(self._files.read_bits(self._record, part))
        return rows, rows_path, read_keys(self._fs, keys_path, self._record.geometry, part)
