"""Reads snapshots without the writer's lock: beside a live writer, from several processes, on read-only files.

Invariant: nothing is written; memory does not grow with the number of rows, except for the index that `get` makes.
"""

from collections.abc import Callable, Iterator
from typing import overload

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path
from oneemb.storage.hash_index import check_tables
from oneemb.storage.table.block_reader import PreadReader, RowReader
from oneemb.storage.table.chunk_files import EVERY_NUMBER, ChunkFiles, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, live_rows, read_keys, scan_rows
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_load import load_live_rows
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotInfo, SnapshotRecord

Keep = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""keep(table_N, id_N) tells which of these keys are meant: bool [N]."""


@overload
def read_snapshot_info(path: AnyPath, name: str, fs: FileSystem | None = None) -> SnapshotInfo: ...
@overload
def read_snapshot_info(path: AnyPath, name: None = None, fs: FileSystem | None = None) -> list[SnapshotInfo]: ...


def read_snapshot_info(
    path: AnyPath, name: str | None = None, fs: FileSystem | None = None
) -> SnapshotInfo | list[SnapshotInfo]:
    """The description of a snapshot at a path; without a name, of all that can be read, oldest first. Takes no lock.

    Raises:
        SnapshotNotFoundError: there is none of that name.
        CorruptTableError: the named snapshot's file is damaged.
        FormatVersionError: another release wrote it.
    """
    files = SnapshotFiles(fs or LocalFileSystem(), f"{absolute_path(path)}/snapshots")
    if name is not None:
        return files.read(name).info
    found = []
    for snapshot in files.names():
        try:
            found.append(files.read(snapshot).info)
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
        """A reader of a snapshot of the table at `path`; SnapshotNotFoundError if there is none, CorruptTableError if
        damaged."""
        fs, path = fs or LocalFileSystem(), absolute_path(path)
        return cls(fs, path, SnapshotFiles(fs, f"{path}/snapshots").read(name))

    def __len__(self) -> int:
        return self.info.rows

    @property
    def row_width(self) -> int:
        return self.info.row_width

    def scan(self, batch: int = 65536, keep: Keep | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every row once, or those that `keep` keeps, as (table_N int32, id_N int64, row_NW float32), at most `batch`
        at a time. CorruptTableError if files are damaged, or a writer has removed the snapshot meanwhile."""
        geometry = self._record.geometry
        for part in self._record.parts:
            rows, rows_path, keys = self._part(part)
            if keep is not None:
                rows = rows[keep(*keys.of(rows))]
            yield from scan_rows(self._fs, rows_path, geometry, part.number, keys, rows, batch)

    def count(self, keep: Keep) -> int:
        """Number of rows that `keep` keeps. Reads keys only; raises as `scan`."""
        return sum(len(id_N) for _, id_N in self.keys(keep))

    def keys(self, keep: Keep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The keys of the rows that are kept, (table_N int32, id_N int64), chunk by chunk; raises as `scan`."""
        for part in self._record.parts:
            rows, _, keys = self._part(part)
            table_N, id_N = keys.of(rows)
            kept = np.flatnonzero(keep(table_N, id_N))
            yield table_N[kept], id_N[kept]

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        """Copy the rows of these keys into `out_XW`, see `RowSource.get`; raises as `scan`, and ValueError for an
        invalid table. The first call makes an index of all keys: 20 to 30 bytes a row."""
        check_tables(table_U)
        live = self._find_keys()
        place_U = live.index.find(table_U, id_U)
        u = np.flatnonzero(place_U >= 0)
        if len(u):
            self._rows.read(live, table_U[u], id_U[u], place_U[u], u if to_U is None else to_U[u], out_XW)
        return place_U < 0

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Whether each key has a row: bool [U]. Makes the index as `get` does, and raises as it does."""
        check_tables(table_U)
        return self._find_keys().index.find(table_U, id_U) >= 0

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays that the snapshot holds beside its rows."""
        return list(self._record.arrays)

    def array(self, name: str) -> np.ndarray:
        """An array that the snapshot holds beside its rows; raises as `scan`."""
        return self._files.read_array(self._record, name)

    def _find_keys(self) -> LiveRows:
        if self._live is None:
            self._live = load_live_rows(self._fs, self._files, self._chunks, [self._record], Threads(1))
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

    def _part(self, part: ChunkPart) -> tuple[np.ndarray, str, ChunkKeys]:
        """The rows of the snapshot in a chunk, the path of their file and the chunk's keys."""
        rows_path, keys_path = chunk_paths(self._chunks.directory, part.number)
        rows = live_rows(self._files.read_bits(self._record, part))
        return rows, rows_path, read_keys(self._fs, keys_path, self._record.geometry, part)
