"""Rows in and out of snapshots as NumPy arrays, without an embedding: for pretrained vectors, serving, analysis."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.storage.persistent_table import PersistentTable
from oneemb.storage.row_layout import RowLayout
from oneemb.storage.row_store import StorageError
from oneemb.storage.snapshot_reader import SnapshotReader
from oneemb.storage.snapshot_rows import SnapshotRows

__all__ = [
    "PersistentTableReader",
    "PersistentTableWriter",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
]

_Paths = str | os.PathLike | Sequence[str | os.PathLike]


class PersistentTableReader:
    """Iterates over the rows of a snapshot. Made by `make_persistent_table_reader`."""

    def __init__(
        self, readers: list[SnapshotReader], rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype,
        with_tables: bool, batch_size: int,
    ):  # fmt: skip
        self._readers = readers
        self._rows = rows
        self._key_dtype = key_dtype
        self._value_dtype = value_dtype
        self._with_tables = with_tables
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Rows in all."""
        return sum(len(reader) for reader in self._readers)

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for reader in self._readers:
            for table_N, id_N, row_NW in reader.scan(self._batch_size):
                keys, values = _keys_as(id_N, self._key_dtype), self._values(row_NW)
                yield (table_N, keys, values) if self._with_tables else (keys, values)

    def _values(self, row_NW: np.ndarray) -> np.ndarray:
        layout = self._rows.layout
        weights_ND = np.ascontiguousarray(layout.weights(row_NW)[:, : layout.dim])
        if layout.dtype == "float16":
            weights_ND = weights_ND.view(np.float16)
        elif layout.dtype == "bfloat16":
            weights_ND = (weights_ND.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        values = np.empty((len(row_NW), layout.storage_dim), self._value_dtype)
        values[:, : layout.dim] = weights_ND
        values[:, layout.dim :] = row_NW[:, layout.state_begin :]
        return values

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> "PersistentTableReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_persistent_table_reader(
    paths: _Paths,
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    *,
    with_tables: bool = False,
    batch_size: int = 65536,
) -> PersistentTableReader:
    """Read the rows of a snapshot, a batch at a time in constant memory, beside a job that writes.

    Args:
        paths: the table's folder, or those of a sharded one.
        snapshot_name: which snapshot.
        key_type: int64 or int32, of torch or NumPy.
        value_type: float32, of torch or NumPy; or float16 for float16 rows without optimizer state.
        storage_dim: values of a row, weights and state; None = as the snapshot says.
        physical_block_size: taken from the table; here because OneFlow's function has it.
        with_tables: give (table_ids, keys, values) in place of (keys, values).
        batch_size: rows a batch at most.

    Returns:
        An iterable, and context manager, of keys [n] and values [n, storage_dim]: the weights, then the state.

    Raises:
        StorageError: a path has no snapshot of this name, or not with this storage_dim; while reading, a file is not
            what was written, or a key does not fit in int32.
        TypeError: key_type or value_type is none of these.
    """
    key_dtype, value_dtype = _dtype("key_type", key_type, "int64", "int32"), _dtype("value_type", value_type, *_VALUES)
    readers = [SnapshotReader.open(path, snapshot_name) for path in _as_list(paths)]
    rows = SnapshotRows.of_meta(readers[0].info.meta, snapshot_name)
    for reader, path in zip(readers, _as_list(paths), strict=True):
        layout = SnapshotRows.of_meta(reader.info.meta, snapshot_name).layout
        if layout != rows.layout or storage_dim not in (None, layout.storage_dim):
            raise StorageError(
                f"snapshot {snapshot_name!r} in {path} has storage_dim {layout.storage_dim} ({layout.dim}"
                f" {layout.dtype} weights, {layout.state_width} of state), asked for"
                f" {storage_dim or rows.layout.storage_dim}; give {layout.storage_dim}, or leave it out"
            )
    if value_dtype == np.float16 and (rows.layout.dtype != "float16" or rows.layout.state_width):
        raise TypeError("value_type float16 would round these rows, read them as float32")
    return PersistentTableReader(readers, rows, key_dtype, value_dtype, with_tables, batch_size)


class PersistentTableWriter:
    """Writes rows and saves them as a snapshot at `close`. Made by `make_persistent_table_writer`."""

    def __init__(self, tables: list[PersistentTable], name: str, rows: SnapshotRows, key_dtype: np.dtype):
        self._tables = tables
        self._name = name
        self._rows = rows
        self._key_dtype = key_dtype

    def write(self, keys: np.ndarray, values: np.ndarray, table_ids: np.ndarray | None = None) -> None:
        """Add rows, or replace those of keys already written.

        Args:
            keys: [n] of the writer's key_type; of equal keys the last one counts.
            values: [n, storage_dim] of the writer's value_type, weights then state.
            table_ids: integers [n], the table of each key; None = table 0.

        Raises:
            TypeError, ValueError: an array is not as above.
            StorageError: the disk fails.
        """
        layout = self._rows.layout
        keys, values = np.asarray(keys), np.asarray(values)
        if keys.dtype != self._key_dtype or keys.ndim != 1:
            raise TypeError(f"keys must be {self._key_dtype} of shape [n], got {keys.dtype} {list(keys.shape)}")
        if values.dtype != layout.dtype or values.shape != (len(keys), layout.storage_dim):
            raise TypeError(
                f"values must be {layout.dtype} of shape [{len(keys)}, {layout.storage_dim}], got {values.dtype}"
                f" {list(values.shape)}"
            )
        table_N = np.zeros(len(keys), np.int32)
        if table_ids is not None:
            given = np.asarray(table_ids)
            if given.shape != keys.shape or given.dtype.kind not in "iu":
                raise TypeError(f"table_ids must be integers of shape [{len(keys)}], got {given.dtype} {given.shape}")
            table_N = given.astype(np.int32)
            if len(given) and (given.min() < 0 or given.max() > np.iinfo(np.int32).max):
                raise ValueError(f"table_ids must be 0 or more, got {given.min()} to {given.max()}")
        id_N = keys.astype(np.int64)
        row_NW = np.zeros((len(keys), layout.row_width), np.float32)
        row_NW.view(layout.dtype)[:, : layout.storage_dim] = values
        unique = unique_keys(table_N, id_N)
        last = np.zeros(len(unique.id_U), np.int64)
        np.maximum.at(last, unique.inverse_N, np.arange(len(keys)))
        owner = owner_of(unique.table_U, unique.id_U, len(self._tables))
        for t, table in enumerate(self._tables):
            own = np.flatnonzero(owner == t)
            table.put(unique.table_U[own], unique.id_U[own], row_NW[last[own]])

    def close(self) -> None:
        """Save the snapshot, durably, and close the files. Closing twice is fine."""
        tables, self._tables = self._tables, []
        try:
            for table in tables:
                table.save_snapshot(self._name, self._rows.to_meta({}))
        finally:
            for table in tables:
                table.close()

    def abandon(self) -> None:
        """Close the files and leave no snapshot."""
        tables, self._tables = self._tables, []
        for table in tables:
            table.close()

    def __enter__(self) -> "PersistentTableWriter":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def make_persistent_table_writer(
    paths: _Paths,
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    embedding_dim: int | None = None,
) -> PersistentTableWriter:
    """Write rows to a folder and save them as a snapshot at `close`, for an embedding to load.

    Args:
        paths: the table's folder, or those of a sharded one: a key goes to the path that owns it.
        snapshot_name: the snapshot to save.
        key_type: int64 or int32, of torch or NumPy.
        value_type: float32, or float16 for rows without state; of torch or NumPy.
        storage_dim: values of a row: weights, then optimizer state if there is any.
        physical_block_size: bytes of the disk's block, 512 or 4096.
        embedding_dim: how many of them are weights; None = all.

    Returns:
        A writer with `write(keys, values, table_ids=None)`; as a context manager it saves the snapshot at the end of
        the block, and none if the block raises.

    Raises:
        StorageError: a path is in use or cannot be written to, or has a snapshot of this name.
        TypeError, ValueError: an argument is not as above.
    """
    key_dtype, value_dtype = _dtype("key_type", key_type, "int64", "int32"), _dtype("value_type", value_type, *_VALUES)
    dim = storage_dim if embedding_dim is None else embedding_dim
    if not 1 <= dim <= storage_dim:
        raise ValueError(f"embedding_dim must be from 1 to storage_dim={storage_dim}, got {dim}")
    layout = RowLayout(dim, value_dtype.name, storage_dim - dim)
    if value_dtype == np.float16 and layout.state_width:
        raise TypeError("optimizer state is float32: write rows that have state as float32")
    rows = SnapshotRows(layout, None, (0.0,) * layout.state_width, 0)
    tables: list[PersistentTable] = []
    try:
        for path in _as_list(paths):
            table = PersistentTable.open(
                path, row_width=layout.row_width, physical_block_size=physical_block_size, threads=Threads(1)
            )
            tables.append(table)
            if any(info.name == snapshot_name for info in table.snapshots()):
                raise StorageError(f"{path} has a snapshot {snapshot_name!r} already; delete it, or take another name")
    except BaseException:
        for table in tables:
            table.close()
        raise
    return PersistentTableWriter(tables, snapshot_name, rows, key_dtype)


_VALUES = ("float32", "float16")


def _as_list(paths: _Paths) -> list[str]:
    return [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]


def _dtype(what: str, given: Any, *allowed: str) -> np.dtype:
    name = str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else np.dtype(given).name
    if name not in allowed:
        raise TypeError(f"{what} must be {' or '.join(allowed)}, got {given}")
    return np.dtype(name)


def _keys_as(id_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.int32 and len(id_N) and not -(2**31) <= id_N.min() <= id_N.max() < 2**31:
        raise StorageError(f"keys from {id_N.min()} to {id_N.max()} do not fit in int32; read them as int64")
    return id_N.astype(dtype)
