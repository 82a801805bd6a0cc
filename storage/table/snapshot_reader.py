"""Reads snapshots without the writer's lock: while a writer runs, in several processes, on read-only file systems.

Invariant: nothing is written, and memory does not grow with the number of rows, except for the index that `get` makes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import overload

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path
from oneemb.storage.hash_index import check_tables
from oneemb.storage.table.block_reader import PreadReader, RowReader
from oneemb.storage.table.chunk_files import EVERY_NUMBER, ChunkFiles, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, check_keys_end, live_rows, read_keys, scan_rows
from oneemb.storage.table.delta import GONE, gone_keys
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_load import load_live_rows
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotInfo, SnapshotRecord

Keep = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function keep(table_N, id_N) that chooses keys: returns bool [N], whether each key is kept."""


@overload
def read_snapshot_info(path: AnyPath, name: str, fs: FileSystem | None = None) -> SnapshotInfo: ...
@overload
def read_snapshot_info(path: AnyPath, name: None = None, fs: FileSystem | None = None) -> list[SnapshotInfo]: ...


def read_snapshot_info(
    path: AnyPath, name: str | None = None, fs: FileSystem | None = None
) -> SnapshotInfo | list[SnapshotInfo]:
    """Description of the snapshot `name` at a path; without a name, a list of the descriptions of all snapshots that
    can be read, oldest first. Takes no lock.

    Raises:
        SnapshotNotFoundError: there is no snapshot of that name.
        CorruptTableError: the file of the named snapshot is damaged.
        FormatVersionError: another release wrote the file, in a format that this one cannot read.
    """
    files = SnapshotFiles(fs or LocalFileSystem(), f"{absolute_path(path)}/snapshots")
    if name is not None:
        return files.read(name).info
    found = []
    for snapshot in files.names():
        try:
            found.append(files.read(snapshot).info)
        except StorageError:
            continue  # `table_info` lists the snapshots that cannot be read, with the reasons.
    return sorted(found, key=lambda info: info.sequence)


class SnapshotReader:
    """Reads the rows of one snapshot. Make a reader with `open`. `only`: {chunk: bits of the rows that `scan` and
    `keys` read}; None = all rows of the snapshot."""

    def __init__(
        self, fs: FileSystem, path: str, record: SnapshotRecord, only: dict[int, np.ndarray] | None = None
    ):  # fmt: skip
        self._fs, self._path, self._record, self._only = fs, path, record, only
        self._files = SnapshotFiles(fs, f"{path}/snapshots")
        self._live: LiveRows | None = None
        self._chunks = ChunkFiles(fs, f"{path}/chunks", next_number=0, direct=False)
        self._chunks.keep_below = EVERY_NUMBER  # A reader removes nothing.
        self._rows = RowReader(PreadReader(fs, Threads(1)), self._chunks)
        self.info = record.info
        self.folder = path
        self.parts = {part.number: part for part in record.parts}
        """{number of a chunk: part of the chunk that the snapshot needs}."""

    @classmethod
    def open(cls, path: AnyPath, name: str, *, fs: FileSystem | None = None) -> "SnapshotReader":
        """A reader of the snapshot `name` of the table at `path`. Raises SnapshotNotFoundError if there is no such
        snapshot, CorruptTableError if its file is damaged."""
        fs, path = fs or LocalFileSystem(), absolute_path(path)
        return cls(fs, path, SnapshotFiles(fs, f"{path}/snapshots").read(name))

    def only(self, bits: dict[int, np.ndarray]) -> "SnapshotReader":
        """Another reader of the same snapshot, whose `scan` and `keys` read some rows of some chunks: {chunk: bits}."""
        return SnapshotReader(self._fs, self.folder, self._record, bits)

    def __len__(self) -> int:
        if self._only is None:
            return self.info.rows
        return sum(int(np.count_nonzero(np.unpackbits(bit_N))) for bit_N in self._only.values())

    @property
    def row_width(self) -> int:
        return self.info.row_width

    def scan(self, batch: int = 65536, keep: Keep | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each row once, or each row that `keep` keeps, in batches (table_N int32, id_N int64, row_NW float32) of
        at most `batch` rows. Raises CorruptTableError if files are damaged, or if a writer has removed the snapshot."""
        geometry = self._record.geometry
        for part in self._wanted():
            rows, rows_path, keys = self._part(part)
            if keep is not None:
                rows = rows[keep(*keys.of(rows))]
            yield from scan_rows(self._fs, rows_path, geometry, part.number, keys, rows, batch)

    def count(self, keep: Keep) -> int:
        """Number of rows that `keep` keeps. Reads only keys. CorruptTableError if files are damaged, or if a writer has
        removed the snapshot."""
        return sum(len(id_N) for _, id_N in self.keys(keep))

    def keys(self, keep: Keep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the keys of the rows that `keep` keeps, (table_N int32, id_N int64), chunk by chunk. CorruptTableError
        if files are damaged, or if a writer has removed the snapshot."""
        for part in self._wanted():
            rows, _, keys = self._part(part)
            table_N, id_N = keys.of(rows)
            kept = np.flatnonzero(keep(table_N, id_N))
            yield table_N[kept], id_N[kept]

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        """Copy the rows of these keys into `out_XW`; see `RowSource.get`. The first call makes an index of all keys, 13
        bytes for each row. CorruptTableError if files are damaged, or if a writer has removed the snapshot;
        ValueError if a table is invalid."""
        check_tables(table_U)
        live = self._find_keys()
        place_U = live.index.find(table_U, id_U)
        u = np.flatnonzero(place_U >= 0)
        if len(u):
            self._rows.read(live, table_U[u], id_U[u], place_U[u], u if to_U is None else to_U[u], out_XW)
        return place_U < 0

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Whether each key has a row: bool [U]. Makes the index that `get` makes, and raises the same errors."""
        check_tables(table_U)
        return self._find_keys().index.find(table_U, id_U) >= 0

    @property
    def arrays(self) -> list[str]:
        """Names of the arrays that the snapshot has beside its rows."""
        return list(self._record.arrays)

    def array(self, name: str) -> np.ndarray:
        """Read an array that the snapshot has beside its rows. CorruptTableError if the array is damaged,
        SnapshotNotFoundError if a writer has removed the snapshot."""
        return self._files.read_array(self._record, name)

    def gone(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys that the snapshot lists as gone, table_N int32, id_N int64: none if the snapshot is no delta. Raises as
        `array`."""
        return gone_keys(self.array(GONE) if GONE in self.arrays else None, self.info.name)

    def _find_keys(self) -> LiveRows:
        if self._live is None:
            self._live = load_live_rows(
                self._fs, self._files, self._chunks, [self._record], functools.partial(CompactIndex, Threads(1))
            )
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

    def bits(self, chunk: int) -> np.ndarray:
        """The rows of a chunk that the snapshot has: uint8, one bit for each row. Raises CorruptTableError if the list
        is damaged, SnapshotNotFoundError if a writer has removed the snapshot."""
        return self._files.read_bits(self._record, self.parts[chunk])

    def rows_of(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers, tables and ids of the rows of a chunk that the snapshot has. Raises as `keys`."""
        rows, _, keys = self._part(self.parts[chunk])
        return rows, *keys.of(rows)

    def check_keys_end(self, chunk: int) -> None:
        """Raise CorruptTableError unless the keys file of a chunk is the one with which the snapshot was saved."""
        check_keys_end(self._fs, chunk_paths(self._chunks.directory, chunk)[1], self.parts[chunk])

    def _wanted(self) -> list[ChunkPart]:
        return [part for part in self._record.parts if self._only is None or part.number in self._only]

    def _part(self, part: ChunkPart) -> tuple[np.ndarray, str, ChunkKeys]:
        """(numbers of the snapshot's rows in a chunk, path of the chunk's rows file, keys of the chunk)."""
        rows_path, keys_path = chunk_paths(self._chunks.directory, part.number)
        rows = live_rows(self._files.read_bits(self._record, part) if self._only is None else self._only[part.number])
        return rows, rows_path, read_keys(self._fs, keys_path, self._record.geometry, part)
