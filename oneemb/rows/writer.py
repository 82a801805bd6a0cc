"""Writer of snapshots from NumPy arrays, without an embedding, for pretrained vectors.

Invariant: a snapshot in several paths is complete or does not exist, even if the process is killed.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from oneemb.foreign.oneflow_table import is_oneflow_table, oneflow_owner_of
from oneemb.foreign.oneflow_writer import OneFlowWriter
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.rows.arguments import VALUES, AnyDtype, Format, Paths, as_list, check_format, dtype_of, name_of
from oneemb.rows.values import encode_rows
from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.rows.row_format import WEIGHTS, RowFormat
from oneemb.storage.snapshots.part_folders import NewParts, sweep_folder
from oneemb.storage.snapshots.snapshot_parts import FoundParts, find_parts, folders_at, table_name_of
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows
from oneemb.storage.table.persistent_table import PersistentTable


class PersistentTableWriter:
    """Writes rows and saves them as a snapshot at `close`. Made by `make_persistent_table_writer`."""

    def __init__(
        self, sinks: Sequence["_Sink"], parts: NewParts, owner_of: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
        rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype, with_tables: bool,
    ):  # fmt: skip
        self._sinks, self._parts = sinks, parts
        self._owner_of = owner_of
        self._rows = rows
        self._key_dtype = key_dtype
        self._value_dtype = value_dtype
        self._with_tables = with_tables
        self._closed = False

    def write(self, keys: np.ndarray, values: np.ndarray, table_ids: np.ndarray | None = None) -> None:
        """Add rows, or replace rows of keys that were written before. Call it with thousands of rows at once.

        Args:
            keys: [n] of the writer's key_type. If a key occurs several times, its last row counts.
            values: [n, storage_dim] of the writer's value_type: weights, then state.
            table_ids: table of each key, integers [n]; None = table 0.

        Raises:
            TypeError, ValueError: an array is not as above, or a weight does not fit in the rows' dtype; nothing was
                added.
            StorageError: the disk fails, or the writer is closed.
        """
        row_format = self._rows.format
        keys, values = np.asarray(keys), np.asarray(values)
        if keys.dtype != self._key_dtype or keys.ndim != 1:
            raise TypeError(f"keys must be {self._key_dtype} of shape [n], got {keys.dtype} {list(keys.shape)}")
        if values.dtype != self._value_dtype or values.shape != (len(keys), row_format.storage_dim):
            raise TypeError(
                f"values must be {self._value_dtype} of shape [{len(keys)}, {row_format.storage_dim}], got"
                f" {values.dtype} {list(values.shape)}"
            )
        table_N = np.zeros(len(keys), np.int32)
        if table_ids is not None:
            tables = np.asarray(table_ids)
            if tables.shape != keys.shape or tables.dtype.kind not in "iu":
                raise TypeError(f"table_ids must be integers of shape [{len(keys)}], got {tables.dtype} {tables.shape}")
            if len(tables) and (tables.min() < 0 or tables.max() > TABLE_MAX):
                raise ValueError(f"table_ids must be from 0 to {TABLE_MAX}, got {tables.min()} to {tables.max()}")
            table_N = tables.astype(np.int32)
            if not self._with_tables and table_N.any():
                raise ValueError(
                    f"table_ids must be 0 for OneFlow, got {table_N.max()}; write another folder for each table"
                )
        self.put(
            table_N,
            keys.astype(np.int64),
            encode_rows(row_format, values[:, : row_format.dim], values[:, row_format.dim :]),
        )

    def put(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        """Do as `write`, with rows as words of their format: `row_NW` float32 [n, W]."""
        if self._closed:
            raise StorageError("the writer is closed, and its snapshot is saved; make another writer with another name")
        unique = unique_keys(table_N, id_N)
        last_U = np.empty(len(unique.id_U), np.int64)
        last_U[unique.inverse_N.astype(np.int64)] = np.arange(len(id_N))
        owner_U = self._owner_of(unique.table_U, unique.id_U, len(self._sinks))
        for s, sink in enumerate(self._sinks):
            owned = np.flatnonzero(owner_U == s)
            if len(owned):
                sink.put(unique.table_U[owned], unique.id_U[owned], row_NW[last_U[owned]])

    def close(self) -> None:
        """Save the snapshot, durably, and close the files. May be called again.

        Raises:
            StorageError: the snapshot could not be saved, and exists in none of the paths.
        """
        if self._closed:
            return
        with signals_deferred:  # A save allows Ctrl-C only before its first change.
            try:
                with self._parts:
                    for sink in self._sinks:
                        sink.save(self._parts)
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close the files without saving a snapshot."""
        with signals_deferred:
            if not self._closed:
                self._closed = True
                for sink in self._sinks:
                    sink.close()

    def __enter__(self) -> "PersistentTableWriter":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def make_persistent_table_writer(
    paths: Paths,
    snapshot_name: str,
    key_type: AnyDtype,
    value_type: AnyDtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    embedding_dim: int | None = None,
    weight_type: "AnyDtype | None" = None,
    format: Format = "oneemb",
) -> PersistentTableWriter:
    """Writer of rows that saves them as a snapshot when it is closed, for an embedding to load.

    Args:
        paths: folder of the table, or folders of a sharded table, in which each key belongs to one folder.
        snapshot_name: name of the snapshot to save.
        key_type: dtype of keys: int64 or int32, of torch or NumPy.
        value_type: dtype of the values to write: float32, or float16 for rows without state; of torch or NumPy.
        storage_dim: number of values of a row: weights, then optimizer state if there is any.
        physical_block_size: bytes of a disk block, 512 or 4096.
        embedding_dim: number of weights of a row; None = all values.
        weight_type: dtype of the embedding that will load the rows: float32, float16 or bfloat16. Weights are rounded
            to it; None = value_type.
        format: "oneemb"; or "oneflow", for OneFlow's one_embedding to read: float32 rows of one table, each `write`
            on new blocks.

    Returns:
        A writer with `write(keys, values, table_ids=None)`. As a context manager it saves the snapshot at the end of
        the block, or none if the block raises. It needs 20 to 30 bytes of memory for each key.

    Raises:
        StorageError: a path is in use or cannot be written to, or has a snapshot of this name.
        TypeError, ValueError: an argument is not as above.

    Reference: OneFlow's one_embedding.make_persistent_table_writer.
    """
    key_dtype = dtype_of("key_type", key_type, "int64", "int32")
    value_dtype = dtype_of("value_type", value_type, *VALUES)
    if not isinstance(snapshot_name, str):
        raise TypeError(f"snapshot_name must be a str, got {type(snapshot_name).__name__} {snapshot_name!r}")
    if not hasattr(storage_dim, "__index__"):
        raise TypeError(f"storage_dim must be an int, got {type(storage_dim).__name__} {storage_dim!r}")
    dim = storage_dim if embedding_dim is None else embedding_dim
    if not 1 <= dim <= storage_dim:
        raise ValueError(f"embedding_dim must be from 1 to storage_dim={storage_dim}, got {dim}")
    weights = value_dtype.name if weight_type is None else name_of(weight_type)
    if weights not in WEIGHTS:
        raise TypeError(f"weight_type must be {', '.join(WEIGHTS)} or None, got {weight_type}")
    if value_dtype == np.float16 and storage_dim > dim:
        raise TypeError("value_type must be float32 if rows have state; for float16 weights, give weight_type float16")
    if check_format(format) == "oneflow":
        if (value_dtype.name, weights) != ("float32", "float32"):
            raise TypeError(
                f"value_type and weight_type must be float32 for OneFlow, got {value_dtype.name}, {weights}"
            )
        return _oneflow_writer(as_list(paths), snapshot_name, key_dtype, storage_dim, physical_block_size)
    rows = SnapshotRows(RowFormat(dim, weights, None, (0.0,) * (storage_dim - dim)), 0)
    return open_writer(as_list(paths), snapshot_name, rows, key_dtype, value_dtype, physical_block_size)


def open_writer(
    paths: list[str], name: str, rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype,
    physical_block_size: int = 4096,
) -> PersistentTableWriter:  # fmt: skip
    """Writer of rows whose format and step are given by `rows`, such as rows of another snapshot."""

    for path in paths:
        if is_oneflow_table(path):
            raise StorageError(f'{path} holds a table of OneFlow; choose another folder, or give format="oneflow"')
    found, identity = find_parts(folders_at(paths)), uuid.uuid4().hex
    if taken := found.folders_with(name):
        raise SnapshotExistsError(
            f"{', '.join(taken)} has a snapshot {name!r} already; delete it, or give another name"
        )

    def sink(shard: int, path: str) -> _Sink:
        part = PartOf(name, shard, len(paths))
        return _TableSink(path, found, part, identity, rows, physical_block_size)

    sinks, parts = _open_all(sink, paths), NewParts(identity, len(paths))
    return PersistentTableWriter(sinks, parts, owner_of, rows, key_dtype, value_dtype, True)


def _oneflow_writer(
    paths: list[str], name: str, key_dtype: np.dtype, storage_dim: int, physical_block_size: int
) -> PersistentTableWriter:
    def sink(shard: int, path: str) -> _Sink:
        return _OneFlowSink(
            OneFlowWriter(
                path, name, key_bytes=key_dtype.itemsize, value_bytes=4 * storage_dim,
                physical_block_size=physical_block_size,
            )
        )  # fmt: skip

    def owner_of_key(table_U: np.ndarray, id_U: np.ndarray, owners: int) -> np.ndarray:
        return oneflow_owner_of(id_U, key_dtype.itemsize, owners)

    rows = SnapshotRows(RowFormat(storage_dim, "float32"), 0)
    sinks = _open_all(sink, paths)
    parts = NewParts("", 1)  # OneFlow's files do not name the snapshot of all paths, so no part is marked.
    return PersistentTableWriter(sinks, parts, owner_of_key, rows, key_dtype, np.dtype(np.float32), False)


class _Sink(Protocol):
    """Interface of the target of the rows that belong to one path."""

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None: ...

    def save(self, parts: NewParts) -> None: ...

    def close(self) -> None: ...


class _TableSink:
    def __init__(
        self, path: str, found: FoundParts, part: PartOf, identity: str, rows: SnapshotRows, physical_block_size: int
    ):
        self._path, self._identity, self._sequence = path, identity, found.next_sequence
        self._table = PersistentTable.open(
            path, row_width=rows.format.row_width, physical_block_size=physical_block_size, threads=Threads(1)
        )
        try:
            sweep_folder(path, found, self._table.delete_snapshot)
            self._name = table_name_of(part.name, identity, path)
            self._meta = rows.to_meta({}) | part.to_meta(self._name)
        except BaseException:
            self._table.close()
            raise
        self.put = self._table.put
        self.close = self._table.close

    def save(self, parts: NewParts) -> None:
        parts.begin(self._path, self._name, self._table.delete_snapshot)
        self._table.save_snapshot(self._name, self._meta, identity=self._identity, sequence=self._sequence)


class _OneFlowSink:
    def __init__(self, writer: OneFlowWriter):
        self._writer = writer
        self.close = writer.close

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self._writer.put(id_U, row_UW)

    def save(self, parts: NewParts) -> None:
        self._writer.save()
        parts.begin("", "", lambda _: self._writer.remove_snapshot())


def _open_all(sink: Callable[[int, str], _Sink], paths: list[str]) -> list[_Sink]:
    if not paths or len(set(map(os.path.realpath, paths))) < len(paths):
        raise ValueError(f"paths must name one folder, or several different folders, got {paths}")
    sinks: list[_Sink] = []
    with signals_deferred:
        try:
            for shard, path in enumerate(paths):
                sinks.append(sink(shard, path))
        except BaseException:
            for opened in sinks:
                opened.close()
            raise
    return sinks
