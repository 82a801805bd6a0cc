"""Rows in and out of snapshots as NumPy arrays, without an embedding: for pretrained vectors, serving, analysis.

Invariants:
- a snapshot written to several paths is in all of them or, unless the process ends in the middle, in none;
- a reader never gives a part of a snapshot for the whole: paths that are missing are an error.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.rows.values import encode_rows, state_of, weights_of
from oneemb.storage.errors import CorruptTableError, SnapshotExistsError, SnapshotNotFoundError
from oneemb.storage.foreign.oneflow_table import OneFlowReader, OneFlowWriter, is_oneflow_table, oneflow_owner_of
from oneemb.storage.fs import LocalFileSystem, absolute_path
from oneemb.storage.row_layout import WEIGHTS, RowLayout
from oneemb.storage.row_store import StorageError
from oneemb.storage.snapshot_rows import SnapshotRows, shard_of
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader
from oneemb.storage.table.table_info import need_table
from oneemb.storage.turns import undisturbed

__all__ = [
    "PersistentTableReader",
    "PersistentTableWriter",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
]

_Paths = str | bytes | os.PathLike | Sequence[str | bytes | os.PathLike]
_Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
FORMATS = ("oneemb", "oneflow")


# ---- reading --------------------------------------------------------------------------------------------------------


class PersistentTableReader:
    """Iterates over the rows of a snapshot. Made by `make_persistent_table_reader`."""

    def __init__(
        self, sources: Sequence["_Source"], rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype,
        with_tables: bool, batch_size: int,
    ):  # fmt: skip
        self.rows = rows
        """What the rows are: their layout, and whose optimizer state they hold."""
        self._sources = sources
        self._key_dtype = key_dtype
        self._value_dtype = value_dtype
        self._with_tables = with_tables
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Rows in all."""
        return sum(len(source) for source in self._sources)

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for table_N, id_N, row_NW in self.scan():
            keys, values = _keys_as(id_N, self._key_dtype), self._values(row_NW)
            yield (table_N, keys, values) if self._with_tables else (keys, values)

    def scan(self) -> Iterator[_Batch]:
        """The rows in the words of `rows.layout`: (table_N int32, id_N int64, row_NW float32)."""
        for source in self._sources:
            yield from source.scan(self._batch_size)

    def _values(self, row_NW: np.ndarray) -> np.ndarray:
        layout = self.rows.layout
        values = np.empty((len(row_NW), layout.storage_dim), self._value_dtype)
        values[:, : layout.dim] = weights_of(layout, row_NW)
        values[:, layout.dim :] = state_of(layout, row_NW)
        return values

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()

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
    embedding_dim: int | None = None,
    format: str = "oneemb",
) -> PersistentTableReader:
    """Read the rows of a snapshot, a batch at a time in constant memory, beside a job that writes.

    Args:
        paths: the table's folder, or those of a sharded one, in any order.
        snapshot_name: which snapshot.
        key_type: int64 or int32, of torch or NumPy. From OneFlow it must be as wide as the table's keys; unsigned keys
            come as the signed ones of the same bits.
        value_type: float32, of torch or NumPy; or float16 for float16 rows without optimizer state.
        storage_dim: values of a row, weights and state; None = as the table says.
        physical_block_size: taken from the table; here because OneFlow's function has it.
        with_tables: give (table_ids, keys, values) in place of (keys, values). All rows of OneFlow's are of table 0.
        batch_size: rows a batch at most.
        embedding_dim: how many of a row's values are weights, for OneFlow's tables, which do not say; None = all.
        format: "oneemb", or "oneflow" for a table that OneFlow's one_embedding has written.

    Returns:
        An iterable, and context manager, of keys [n] and values [n, storage_dim]: the weights, then the state.

    Raises:
        StorageError: a path has no snapshot of this name, or not with this storage_dim, or paths of a sharded snapshot
            are missing; while reading, a file is not what was written, or a key does not fit in int32.
        TypeError, ValueError: an argument is not as above.

    Reference: OneFlow's one_embedding.make_persistent_table_reader.
    """
    key_dtype, value_dtype = _dtype("key_type", key_type, "int64", "int32"), _dtype("value_type", value_type, *_VALUES)
    _check_format(format)
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    path_list = as_list(paths)
    if not path_list:
        raise ValueError("paths must name one folder or more, got none")
    sources: Sequence[_Source]
    if format == "oneflow":
        sources = [_OneFlowSource(path, snapshot_name, key_dtype, embedding_dim) for path in path_list]
    else:
        if embedding_dim is not None:
            raise ValueError("embedding_dim is for tables of OneFlow, this one says what its rows are; leave it out")
        sources = _snapshot_sources(path_list, snapshot_name)
    rows = sources[0].rows
    for source, path in zip(sources, path_list, strict=True):
        layout = source.rows.layout
        if layout != rows.layout or storage_dim not in (None, layout.storage_dim):
            raise StorageError(
                f"snapshot {snapshot_name!r} in {path} has storage_dim {layout.storage_dim} ({layout.dim}"
                f" {layout.dtype} weights, {layout.state_width} of state), asked for"
                f" {storage_dim or rows.layout.storage_dim}; give {layout.storage_dim}, or leave it out"
            )
    if value_dtype == np.float16 and (rows.layout.dtype != "float16" or rows.layout.state_width):
        raise TypeError("value_type float16 would round these rows, read them as float32")
    return PersistentTableReader(sources, rows, key_dtype, value_dtype, with_tables, batch_size)


class _Source(Protocol):
    """The rows of a snapshot in one path."""

    rows: SnapshotRows

    def __len__(self) -> int: ...

    def scan(self, batch: int) -> Iterator[_Batch]: ...

    def close(self) -> None: ...


class _SnapshotSource:
    def __init__(self, path: str, name: str):
        try:
            self._reader = SnapshotReader.open(path, name)
        except SnapshotNotFoundError as error:
            if is_oneflow_table(path):
                raise StorageError(f'{path} holds a table of OneFlow; read it with format="oneflow"') from error
            try:
                need_table(LocalFileSystem(), path)
            except StorageError as nowhere:
                raise SnapshotNotFoundError(f"no snapshot named {name!r}: {nowhere}") from error
            raise
        self.meta = self._reader.info.meta
        self.rows = SnapshotRows.of_meta(self.meta, name)
        if self.rows.layout.row_width != self._reader.row_width:
            raise CorruptTableError(
                f"snapshot {name!r} in {path} says that its rows are {self.rows.layout}, which take"
                f" {self.rows.layout.row_width} words, and has rows of {self._reader.row_width} words"
            )

    def __len__(self) -> int:
        return len(self._reader)

    def scan(self, batch: int) -> Iterator[_Batch]:
        return self._reader.scan(batch)

    def close(self) -> None:
        self._reader.close()


class _OneFlowSource:
    def __init__(self, path: str, name: str, key_dtype: np.dtype, embedding_dim: int | None):
        self._reader = OneFlowReader(path, name)
        key_bytes = self._reader.geometry.key_bytes
        if key_dtype.itemsize != key_bytes:
            raise TypeError(f"{path} has keys of {key_bytes} bytes, read them with key_type int{8 * key_bytes}")
        storage_dim = self._reader.storage_dim
        dim = storage_dim if embedding_dim is None else embedding_dim
        if not 1 <= dim <= storage_dim:
            raise ValueError(f"embedding_dim must be from 1 to {storage_dim}, the values of a row in {path}, got {dim}")
        state = (0.0,) * (storage_dim - dim)
        self.rows = SnapshotRows(RowLayout(dim, "float32", len(state)), None, state, 0)

    def __len__(self) -> int:
        return len(self._reader)

    def scan(self, batch: int) -> Iterator[_Batch]:
        for id_N, row_NW in self._reader.scan(batch):
            yield np.zeros(len(id_N), np.int32), id_N, row_NW

    def close(self) -> None:
        pass  # No file is open between batches.


def _snapshot_sources(paths: list[str], name: str) -> list[_SnapshotSource]:
    """The parts of a snapshot; an error unless these are all paths that it was written to, each once."""
    sources = [_SnapshotSource(path, name) for path in paths]
    shards = [shard_of(source.meta, name) for source in sources]
    number = shards[0][1]
    if sorted(shard for shard, of in shards if of == number) != list(range(number)):
        raise StorageError(
            f"snapshot {name!r} lies in {number} paths and each is needed once, got {len(paths)} that hold the parts"
            f" {', '.join(f'{shard} of {of}' for shard, of in shards)}: {', '.join(paths)}"
        )
    return sources


# ---- writing --------------------------------------------------------------------------------------------------------


class PersistentTableWriter:
    """Writes rows and saves them as a snapshot at `close`. Made by `make_persistent_table_writer`."""

    def __init__(
        self, sinks: Sequence["_Sink"], owner_of: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
        rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype, with_tables: bool,
    ):  # fmt: skip
        self._sinks = sinks
        self._owner_of = owner_of
        self._rows = rows
        self._key_dtype = key_dtype
        self._value_dtype = value_dtype
        self._with_tables = with_tables
        self._closed = False

    def write(self, keys: np.ndarray, values: np.ndarray, table_ids: np.ndarray | None = None) -> None:
        """Add rows, or replace those of keys already written. Call it with thousands of rows at once.

        Args:
            keys: [n] of the writer's key_type; of equal keys the last one counts.
            values: [n, storage_dim] of the writer's value_type, weights then state.
            table_ids: integers [n], the table of each key; None = table 0.

        Raises:
            TypeError, ValueError: an array is not as above, or a weight does not fit in the rows' dtype; nothing was
                added.
            StorageError: the disk fails, or the writer is closed.
        """
        layout = self._rows.layout
        keys, values = np.asarray(keys), np.asarray(values)
        if keys.dtype != self._key_dtype or keys.ndim != 1:
            raise TypeError(f"keys must be {self._key_dtype} of shape [n], got {keys.dtype} {list(keys.shape)}")
        if values.dtype != self._value_dtype or values.shape != (len(keys), layout.storage_dim):
            raise TypeError(
                f"values must be {self._value_dtype} of shape [{len(keys)}, {layout.storage_dim}], got {values.dtype}"
                f" {list(values.shape)}"
            )
        table_N = np.zeros(len(keys), np.int32)
        if table_ids is not None:
            given = np.asarray(table_ids)
            if given.shape != keys.shape or given.dtype.kind not in "iu":
                raise TypeError(f"table_ids must be integers of shape [{len(keys)}], got {given.dtype} {given.shape}")
            if len(given) and (given.min() < 0 or given.max() > TABLE_MAX):
                raise ValueError(f"table_ids must be from 0 to {TABLE_MAX}, got {given.min()} to {given.max()}")
            table_N = given.astype(np.int32)
            if not self._with_tables and table_N.any():
                raise ValueError(f"a table of OneFlow has no table ids, got {table_N.max()}; write a folder for each")
        self.put(table_N, keys.astype(np.int64), encode_rows(layout, values[:, : layout.dim], values[:, layout.dim :]))

    def put(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        """`write` for rows in the words of their layout."""
        if self._closed:
            raise StorageError("the writer is closed, its snapshot is saved; make another one under another name")
        unique = unique_keys(table_N, id_N)
        last_U = np.empty(len(unique.id_U), np.int64)
        last_U[unique.inverse_N] = np.arange(len(id_N))
        owner_U = self._owner_of(unique.table_U, unique.id_U, len(self._sinks))
        for s, sink in enumerate(self._sinks):
            own = np.flatnonzero(owner_U == s)
            if len(own):
                sink.put(unique.table_U[own], unique.id_U[own], row_NW[last_U[own]])

    def close(self) -> None:
        """Save the snapshot, durably, and close the files. Closing twice is fine.

        Raises:
            StorageError: it could not be saved, and is in none of the paths.
        """
        if self._closed:
            return
        saved: list[_Sink] = []
        with undisturbed:  # A save lets Ctrl-C in, where nothing is there yet.
            try:
                for sink in self._sinks:
                    sink.save()
                    saved.append(sink)
            except BaseException:
                for sink in saved:
                    with suppress(StorageError):
                        sink.remove_snapshot()
                raise
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close the files and leave no snapshot."""
        with undisturbed:
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
    paths: _Paths,
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    embedding_dim: int | None = None,
    weight_type: Any = None,
    format: str = "oneemb",
) -> PersistentTableWriter:
    """Write rows to a folder and save them as a snapshot at `close`, for an embedding to load.

    Args:
        paths: the table's folder, or those of a sharded one: a key goes to the path that owns it.
        snapshot_name: the snapshot to save.
        key_type: int64 or int32, of torch or NumPy.
        value_type: of the values written: float32, or float16 for rows without state; of torch or NumPy.
        storage_dim: values of a row: weights, then optimizer state if there is any.
        physical_block_size: bytes of the disk's block, 512 or 4096.
        embedding_dim: how many of them are weights; None = all.
        weight_type: dtype of the embedding that will load the rows: float32, float16 or bfloat16, to which weights are
            rounded; None = value_type.
        format: "oneemb"; or "oneflow", for OneFlow's one_embedding to read: rows of one table, float32, each `write`
            on fresh blocks.

    Returns:
        A writer with `write(keys, values, table_ids=None)`; as a context manager it saves the snapshot at the end of
        the block, and none if the block raises. It keeps 20 to 30 bytes a key in memory.

    Raises:
        StorageError: a path is in use or cannot be written to, or has a snapshot of this name.
        TypeError, ValueError: an argument is not as above.

    Reference: OneFlow's one_embedding.make_persistent_table_writer.
    """
    key_dtype, value_dtype = _dtype("key_type", key_type, "int64", "int32"), _dtype("value_type", value_type, *_VALUES)
    dim = storage_dim if embedding_dim is None else embedding_dim
    if not 1 <= dim <= storage_dim:
        raise ValueError(f"embedding_dim must be from 1 to storage_dim={storage_dim}, got {dim}")
    weights = value_dtype.name if weight_type is None else _name_of(weight_type)
    if weights not in WEIGHTS:
        raise TypeError(f"weight_type must be {', '.join(WEIGHTS)} or None, got {weight_type}")
    if value_dtype == np.float16 and storage_dim > dim:
        raise TypeError("optimizer state is float32: write rows that have state as float32, with weight_type float16")
    if _check_format(format) == "oneflow":
        if (value_dtype.name, weights) != ("float32", "float32"):
            raise TypeError(f"OneFlow reads float32 values only, got {value_dtype.name} of {weights} weights")
        return _oneflow_writer(as_list(paths), snapshot_name, key_dtype, storage_dim, physical_block_size)
    state = (0.0,) * (storage_dim - dim)
    rows = SnapshotRows(RowLayout(dim, weights, len(state)), None, state, 0)
    return open_writer(as_list(paths), snapshot_name, rows, key_dtype, value_dtype, physical_block_size)


def open_writer(
    paths: list[str], name: str, rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype,
    physical_block_size: int = 4096,
) -> PersistentTableWriter:  # fmt: skip
    """A writer of rows that are known to the last word, such as those of another snapshot."""

    def sink(shard: int, path: str) -> _Sink:
        if is_oneflow_table(path):
            raise StorageError(f'{path} holds a table of OneFlow; choose another folder, or give format="oneflow"')
        meta = rows.to_meta({}) | ({"shard": [shard, len(paths)]} if len(paths) > 1 else {})
        return _TableSink(path, name, rows.layout, meta, physical_block_size)

    return PersistentTableWriter(_open_all(sink, paths), owner_of, rows, key_dtype, value_dtype, True)


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

    rows = SnapshotRows(RowLayout(storage_dim, "float32", 0), None, (), 0)
    return PersistentTableWriter(_open_all(sink, paths), owner_of_key, rows, key_dtype, np.dtype(np.float32), False)


class _Sink(Protocol):
    """Takes the rows that one path owns."""

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None: ...

    def save(self) -> None: ...

    def remove_snapshot(self) -> None: ...

    def close(self) -> None: ...


class _TableSink:
    def __init__(self, path: str, name: str, layout: RowLayout, meta: dict[str, Any], physical_block_size: int):
        self._name, self._meta = name, meta
        self._table = PersistentTable.open(
            path, row_width=layout.row_width, physical_block_size=physical_block_size, threads=Threads(1)
        )
        if any(info.name == name for info in self._table.snapshots()):
            self._table.close()
            raise SnapshotExistsError(f"{path} has a snapshot {name!r} already; delete it, or take another name")
        self.put = self._table.put
        self.close = self._table.close

    def save(self) -> None:
        self._table.save_snapshot(self._name, self._meta)

    def remove_snapshot(self) -> None:
        self._table.delete_snapshot(self._name)


class _OneFlowSink:
    def __init__(self, writer: OneFlowWriter):
        self._writer = writer
        self.save = writer.save
        self.remove_snapshot = writer.remove_snapshot
        self.close = writer.close

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self._writer.put(id_U, row_UW)


def _open_all(sink: Callable[[int, str], _Sink], paths: list[str]) -> list[_Sink]:
    if not paths or len(set(map(os.path.realpath, paths))) < len(paths):
        raise ValueError(f"paths must name one folder or several different ones, got {paths}")
    sinks: list[_Sink] = []
    with undisturbed:
        try:
            for shard, path in enumerate(paths):
                sinks.append(sink(shard, path))
        except BaseException:
            for opened in sinks:
                opened.close()
            raise
    return sinks


# ---- arguments ------------------------------------------------------------------------------------------------------

_VALUES = ("float32", "float16")


def as_list(paths: _Paths) -> list[str]:
    """The paths, absolute."""
    return [absolute_path(path) for path in ([paths] if isinstance(paths, str | bytes | os.PathLike) else paths)]


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, got {format!r}")
    return format


def _name_of(given: Any) -> str:
    """The name of a dtype of torch or NumPy. Does not load torch."""
    text = str(given)
    return text.removeprefix("torch.") if text.startswith("torch.") or text in WEIGHTS else np.dtype(given).name


def _dtype(what: str, given: Any, *allowed: str) -> np.dtype:
    name = _name_of(given)
    if name not in allowed:
        raise TypeError(f"{what} must be {' or '.join(allowed)}, got {given}")
    return np.dtype(name)


def _keys_as(id_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.int32 and len(id_N) and not -(2**31) <= id_N.min() <= id_N.max() < 2**31:
        raise StorageError(f"keys from {id_N.min()} to {id_N.max()} do not fit in int32; read them as int64")
    return id_N.astype(dtype)
