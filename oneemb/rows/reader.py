"""Reader of the rows of a snapshot as NumPy arrays, without an embedding, for serving and analysis.

Invariant: a reader reads only complete snapshots: missing paths of a sharded snapshot are an error.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from oneemb.foreign.oneflow_reader import OneFlowReader
from oneemb.foreign.oneflow_table import is_oneflow_table
from oneemb.rows.arguments import VALUES, AnyDtype, Format, Paths, as_list, check_format, dtype_of, keys_as
from oneemb.rows.values import state_of, weights_of
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.hash_index import TABLE_MAX
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.snapshot_parts import folders_at, look_at
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import SnapshotReader

_Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


class PersistentTableReader:
    """Iterates over the rows of a snapshot. Made by `make_persistent_table_reader`."""

    def __init__(
        self, sources: Sequence["_Source"], rows: SnapshotRows, key_dtype: np.dtype, value_dtype: np.dtype,
        with_tables: bool, batch_size: int,
    ):  # fmt: skip
        self.rows = rows
        """Format of the rows, including the optimizer whose state they hold."""
        self._sources = sources
        self._key_dtype = key_dtype
        self._value_dtype = value_dtype
        self._with_tables = with_tables
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Number of rows of the snapshot."""
        return sum(len(source) for source in self._sources)

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for table_N, id_N, row_NW in self.scan():
            keys, values = keys_as(id_N, self._key_dtype), self._values(row_NW)
            yield (table_N, keys, values) if self._with_tables else (keys, values)

    def scan(self) -> Iterator[_Batch]:
        """Batches (table_N, int32; id_N, int64; row_NW, float32: words of the rows in `rows.format`)."""
        for source in self._sources:
            yield from source.scan(self._batch_size)

    def _values(self, row_NW: np.ndarray) -> np.ndarray:
        row_format = self.rows.format
        values = np.empty((len(row_NW), row_format.storage_dim), self._value_dtype)
        values[:, : row_format.dim] = weights_of(row_format, row_NW)
        values[:, row_format.dim :] = state_of(row_format, row_NW)
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
    paths: Paths,
    snapshot_name: str,
    key_type: AnyDtype,
    value_type: AnyDtype,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    *,
    with_tables: bool = False,
    batch_size: int = 65536,
    embedding_dim: int | None = None,
    format: Format = "oneemb",
) -> PersistentTableReader:
    """Read the rows of a snapshot in batches, with constant memory. A job may write to the same table meanwhile.

    Args:
        paths: folder of the table, or the folder with the folders of ranks, or the folders of a sharded table in any
            order.
        snapshot_name: name of the snapshot.
        key_type: int64 or int32, of torch or NumPy. For OneFlow's tables it must be as wide as the keys; unsigned keys
            are read as signed keys with the same bits.
        value_type: float32, of torch or NumPy; or float16 for float16 rows without optimizer state.
        storage_dim: number of values of a row, weights and state, to be checked; None = any.
        physical_block_size: ignored, since the table knows it; OneFlow's function has this argument.
        with_tables: if True, yield (table_ids, keys, values) in place of (keys, values). Rows of OneFlow's tables have
            table 0.
        batch_size: largest number of rows of a batch.
        embedding_dim: number of weights of a row, for OneFlow's tables, which do not know it; None = all values.
        format: "oneemb", or "oneflow" for a table that OneFlow's one_embedding has written.

    Returns:
        An iterable, and context manager, of keys [n] and values [n, storage_dim]: the weights, then the state.

    Raises:
        StorageError: a path has no snapshot of this name, or the snapshot has another storage_dim, or paths of a
            sharded snapshot are missing; while reading, a file is damaged, or a key does not fit in int32.
        TypeError, ValueError: an argument is not as above.

    Reference: OneFlow's one_embedding.make_persistent_table_reader.
    """
    key_dtype = dtype_of("key_type", key_type, "int64", "int32")
    value_dtype = dtype_of("value_type", value_type, *VALUES)
    check_format(format)
    if not isinstance(snapshot_name, str):
        raise TypeError(f"snapshot_name must be a str, got {type(snapshot_name).__name__} {snapshot_name!r}")
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
            raise ValueError("embedding_dim is only for tables of OneFlow; leave it out: this table knows it")
        sources = _snapshot_sources(path_list, snapshot_name)
    rows = sources[0].rows
    for source in sources:
        row_format = source.rows.format
        if not row_format.same_words(rows.format) or storage_dim not in (None, row_format.storage_dim):
            raise StorageError(
                f"storage_dim of snapshot {snapshot_name!r} in {source.path} is {row_format.storage_dim}"
                f" ({row_format.dim} {row_format.dtype} weights, {row_format.state_width} values of state), got"
                f" {storage_dim or rows.format.storage_dim}; give {row_format.storage_dim}, or leave it out"
            )
    if value_dtype == np.float16 and (rows.format.dtype != "float16" or rows.format.state_width):
        raise TypeError("value_type float16 would round these rows; give value_type float32")
    return PersistentTableReader(sources, rows, key_dtype, value_dtype, with_tables, batch_size)


def changed_ids(paths: Paths, snapshot: str, since: str, table: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a table that deltas have changed, for example to update an index of its vectors.

    Args:
        paths: folder of the table, or the folder with the folders of ranks, or the folders of a sharded table.
        snapshot: name of a delta.
        since: name of an ancestor of the delta; the result has the changes after it.
        table: number of the table.

    Returns:
        Ids whose rows were written since, and ids that have no row any more, both int64, sorted.

    Raises:
        ValueError: `since` is no ancestor of the delta, or the snapshot has no such table.
        StorageError: there is no such snapshot, or its files are damaged.
    """
    last = look_at(as_list(paths)).get(snapshot)
    described = last.info.meta.get("embedding") or {}  # A table that only rows were imported into has no description.
    tables = len(described.get("tables", ())) or TABLE_MAX + 1
    if isinstance(table, bool) or not isinstance(table, int | np.integer) or not 0 <= table < tables:
        raise ValueError(f"table must be from 0 to {tables - 1}, the tables of snapshot {snapshot!r}, got {table!r}")
    parents = [link.name for link in last.before]
    if since not in parents:
        raise ValueError(f"since must be one of the parents of {snapshot!r}, {parents}, got {since!r}")
    changed = gone = np.empty(0, np.int64)
    for link in (*last.before, last)[parents.index(since) + 1 :]:
        written, absent = [changed[:0]], [gone[:0]]
        for part in link.parts:
            with SnapshotReader.open(part.folder, part.info.name) as reader:
                written += [id_N for _, id_N in reader.keys(lambda table_N, id_N: table_N == table)]
                table_N, id_N = reader.gone()
                absent.append(id_N[table_N == table])
        new = np.unique(np.concatenate(written))
        # A key that one delta lists both as gone and as written is written.
        left = np.setdiff1d(np.concatenate(absent), new)
        changed, gone = np.union1d(np.setdiff1d(changed, left), new), np.union1d(np.setdiff1d(gone, new), left)
    return changed, gone


class _Source(Protocol):
    """Interface of the rows of a snapshot in one path."""

    path: str
    rows: SnapshotRows

    def __len__(self) -> int: ...

    def scan(self, batch: int) -> Iterator[_Batch]: ...

    def close(self) -> None: ...


class _SnapshotSource:
    """The rows of a part of a snapshot, or the complete rows of a delta and its parents."""

    def __init__(self, path: str, reader: SnapshotReader | LinkedRows, info: SnapshotInfo):
        self.path, self._reader = path, reader
        self.rows = SnapshotRows.of_meta(info.meta, info.name)
        if self.rows.format.row_width != info.row_width:
            raise CorruptTableError(
                f"rows of snapshot {info.name!r} in {path} must have {self.rows.format.row_width} words by their format"
                f" {self.rows.format}, and have {info.row_width}; read another snapshot"
            )

    def __len__(self) -> int:
        return len(self._reader)

    def scan(self, batch: int) -> Iterator[_Batch]:
        return self._reader.scan(batch)

    def close(self) -> None:
        self._reader.close()


class _OneFlowSource:
    def __init__(self, path: str, name: str, key_dtype: np.dtype, embedding_dim: int | None):
        self.path = path
        self._reader = OneFlowReader(path, name)
        key_bytes = self._reader.geometry.key_bytes
        if key_dtype.itemsize != key_bytes:
            raise TypeError(
                f"key_type must be int{8 * key_bytes} for {path}, whose keys have {key_bytes} bytes, got {key_dtype}"
            )
        storage_dim = self._reader.storage_dim
        dim = storage_dim if embedding_dim is None else embedding_dim
        if not 1 <= dim <= storage_dim:
            raise ValueError(
                f"embedding_dim must be from 1 to {storage_dim}, the number of values of a row in {path}, got {dim}"
            )
        self.rows = SnapshotRows(RowFormat(dim, "float32", None, (0.0,) * (storage_dim - dim)), 0)

    def __len__(self) -> int:
        return len(self._reader)

    def scan(self, batch: int) -> Iterator[_Batch]:
        for id_N, row_NW in self._reader.scan(batch):
            yield np.zeros(len(id_N), np.int32), id_N, row_NW

    def close(self) -> None:
        pass  # No file is open between batches.


def _snapshot_sources(paths: list[str], name: str) -> list[_SnapshotSource]:
    """The parts of a snapshot. StorageError unless `paths` are all paths of the snapshot, each once."""
    for path in paths:
        if is_oneflow_table(path):
            raise StorageError(f'{path} holds a table of OneFlow; read it with format="oneflow"')
    try:
        found = look_at(paths)
    except StorageError as error:
        raise SnapshotNotFoundError(f"no snapshot named {name!r}: {error}") from error
    snapshot = found.get(name)
    used = {part.folder for link in (*snapshot.before, snapshot) for part in link.parts}
    for n, path in enumerate(paths):
        if path in paths[:n] or used.isdisjoint(folders_at([path])):
            raise StorageError(
                f"paths must be the {len(used)} folders of snapshot {name!r}, each once, got {path} twice or in"
                f" addition: {', '.join(paths)}"
            )
    if snapshot.before:
        return [_SnapshotSource(paths[0], owned_rows(snapshot, 0, 1), snapshot.info)]
    # A part without rows may lack the format of the state, if its rank had no rows yet.
    parts = [part for part in snapshot.parts if part.info.rows] or snapshot.parts[:1]
    return [_SnapshotSource(part.folder, SnapshotReader.open(part.folder, part.info.name), part.info) for part in parts]
