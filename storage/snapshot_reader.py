"""Reads snapshots without the writer's lock: beside a live writer, from several processes, on read-only files.

Invariant: nothing is written, and memory does not grow with the rows, except for the index that `get` makes.
"""

import os
from collections.abc import Iterator
from typing import overload

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import chunk_paths
from oneemb.storage.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.snapshot_file import ChunkPart, SnapshotFiles, SnapshotInfo, SnapshotRecord

__all__ = ["SnapshotReader", "read_snapshot_info"]


@overload
def read_snapshot_info(path: str | os.PathLike[str], name: str, fs: FileSystem | None = None) -> SnapshotInfo: ...
@overload
def read_snapshot_info(
    path: str | os.PathLike[str], name: None = None, fs: FileSystem | None = None
) -> list[SnapshotInfo]: ...


def read_snapshot_info(
    path: str | os.PathLike[str], name: str | None = None, fs: FileSystem | None = None
) -> SnapshotInfo | list[SnapshotInfo]:
    """What a snapshot at a path is; without a name, what all of them are, oldest first. Takes no lock.

    Raises:
        SnapshotNotFoundError: there is none of that name.
        CorruptTableError: a snapshot's file is not what was written.
    """
    files = SnapshotFiles(fs or LocalFileSystem(), f"{os.fspath(path)}/snapshots")
    if name is not None:
        return files.read(name).info
    return sorted((files.read(each).info for each in files.names()), key=lambda info: info.sequence)


class SnapshotReader:
    """The rows of one snapshot. Make one with `open`."""

    def __init__(self, fs: FileSystem, path: str, record: SnapshotRecord):
        self._fs, self._path, self._record = fs, path, record
        self._files = SnapshotFiles(fs, f"{path}/snapshots")
        self._index: HashIndex | None = None
        self.info = record.info

    @classmethod
    def open(cls, path: str | os.PathLike[str], name: str, *, fs: FileSystem | None = None) -> "SnapshotReader":
        """A reader of the snapshot `name` of the table at `path`.

        Raises:
            SnapshotNotFoundError: there is none of that name.
            CorruptTableError: its file is not what was written.
        """
        fs = fs or LocalFileSystem()
        return cls(fs, os.fspath(path), SnapshotFiles(fs, f"{os.fspath(path)}/snapshots").read(name))

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
        """
        geometry = self._record.geometry
        if self._index is None:
            self._index = self._make_index()
        place_U = self._index.find(table_U, id_U)
        for p in np.unique(place_U[place_U >= 0] // geometry.rows_per_chunk).tolist():
            u = np.flatnonzero((place_U >= 0) & (place_U // geometry.rows_per_chunk == p))
            u = u[np.argsort(place_U[u])]
            _, rows_path, keys = self._part(self._record.parts[p])
            begin = 0
            rows = np.unique(place_U[u] - p * geometry.rows_per_chunk)
            row_u = np.searchsorted(rows, place_U[u] - p * geometry.rows_per_chunk)
            for _, _, row_NW in scan_rows(
                self._fs, rows_path, geometry, self._record.parts[p].number, keys, rows, len(rows)
            ):
                here = (row_u >= begin) & (row_u < begin + len(row_NW))
                out_UW[u[here]] = row_NW[row_u[here] - begin]
                begin += len(row_NW)
        return place_U < 0

    def close(self) -> None:
        """Free the index. No file is open between calls."""
        self._index = None

    def __enter__(self) -> "SnapshotReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _part(self, part: ChunkPart):
        rows_path, keys_path = chunk_paths(f"{self._path}/chunks", part.number)
        rows = live_rows(self._files.read_bits(self._record, part))
        if len(rows) != part.rows:
            raise CorruptTableError(
                f"{self._record.path}: chunk {part.number} must have {part.rows} rows, its list has {len(rows)}"
            )
        return rows, rows_path, read_keys(self._fs, keys_path, self._record.geometry, part)

    def _make_index(self) -> HashIndex:
        index = HashIndex(Threads(1), self.info.rows)
        for p, part in enumerate(self._record.parts):
            rows, _, keys = self._part(part)
            index.put(keys.table_N[rows], keys.id_N[rows], p * self._record.geometry.rows_per_chunk + rows)
        if len(index) != self.info.rows:
            raise StorageError(f"{self._record.path}: must have {self.info.rows} keys, has {len(index)}")
        return index
