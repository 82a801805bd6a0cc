"""Imports rows from files of other tools, arrays and readers into an embedding, or into a new snapshot.

Invariants:
- rows are read in batches, so memory does not grow with the number of rows, in any format;
- a call that raises leaves no new snapshot, unless Ctrl-C comes after the snapshot is complete; an embedding keeps the
  rows that were imported before the error.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.owner import owner_of
from oneemb.kernels.unique_keys import unique_keys
from oneemb.rows.arguments import AnyDtype, Paths, as_embedding, as_list, check_batches, name_of
from oneemb.rows.files import (
    SUFFIXES,
    Columns,
    Progress,
    RowFile,
    RowsOfFile,
    RowsToOpen,
    checked_batch,
    suffix_of,
    whole_batches,
)
from oneemb.rows.files_numpy import NpzRows, array_rows, npy_rows
from oneemb.rows.files_parquet import ParquetRows
from oneemb.rows.files_safetensors import SafetensorsRows
from oneemb.rows.reader import PersistentTableReader
from oneemb.rows.values import array_of, encode_rows, state_of, weights_of
from oneemb.rows.writer import PersistentTableWriter, open_writer
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.rows.row_format import WEIGHTS, RowFormat
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.store_rows import set_rows

if TYPE_CHECKING:
    # They take a second to import, which an import into a folder does not need.
    import torch

    from oneemb.embeddings.embedding import TableEmbedding

_Arrays: TypeAlias = "Sequence[np.ndarray | torch.Tensor]"
Source: TypeAlias = "AnyPath | Sequence[AnyPath] | PersistentTableReader | RowsToOpen | _Arrays | Iterable[_Arrays]"


def import_rows(
    target: "TableEmbedding | Paths",
    source: Source,
    *,
    snapshot: str | None = None,
    keys: str | None = "keys",
    values: str | Sequence[str] = "values",
    tables: str | None = None,
    state: str = "state",
    table: int = 0,
    with_state: bool = False,
    allow_nonfinite: bool = False,
    dtype: "AnyDtype | None" = None,
    physical_block_size: int = 4096,
    batch_size: int = 65536,
    progress: Progress | None = None,
) -> int:
    """Import rows into an embedding, or into a new snapshot for an embedding to load.

    With ranks, every rank makes the call with the same source, and keeps the rows that it owns.

    In an embedding, imported weights replace the weights of existing rows. Other rows and the optimizer state of
    existing rows stay; new rows get the state of new rows. If a key occurs several times, its last row counts.

    Args:
        target: an embedding; or, for a new snapshot, the folder of a persistent table or the folders of a sharded
            table.
        source: one of
            - a file `.npz`, `.parquet` or `.safetensors` with columns keys [N] and values [N, D];
            - files `.npy`: (keys, values), (keys, values, tables) or (keys, values, tables, state); or a single file
              of values, whose row numbers are the keys;
            - arrays or tensors in memory, in the order of files `.npy`;
            - a `PersistentTableReader`;
            - an iterable of batches: (keys, values) or (tables, keys, values) arrays.
        snapshot: name of the new snapshot, if `target` is a folder.
        keys: name of the column of keys in a file; None = a row's number is its key.
        values: name of the column of weights; or, in Parquet, names of the columns of single weights.
        tables: name of the column of table numbers; None = "tables" if the file has such a column.
        state: name of the column of optimizer state, which is read if `with_state`.
        table: table of all rows, if the source has no table numbers.
        with_state: if True, import the optimizer state too. The embedding must have the same optimizer; if it has not
            trained yet, it continues from the step count of the source.
        allow_nonfinite: if True, import infinite or NaN weights and state unchanged. If False, they are an error, since
            a single such weight makes every loss that it is part of NaN.
        dtype: dtype of the rows in a new snapshot: float32, float16 or bfloat16; None = dtype of the source. An
            embedding keeps its own dtype. Weights are rounded to nearest even.
        physical_block_size: bytes of a disk block for a new snapshot, 512 or 4096.
        batch_size: number of rows read at a time.
        progress: called with (rows done, rows in all or None) after each batch.

    Returns:
        Number of rows read. Rows whose id is the embedding's `padding_idx` are not imported, since they read as zeros.

    Raises:
        ImportError: the format needs a library that is not installed; the message names it.
        TypeError, ValueError: an argument is not as above, or rows of the source do not fit: another width, a key or
            table that the target cannot have, a weight too large for the dtype, or a weight that is not finite.
        StorageError: the target's path is in use, has a snapshot of this name, or fails; or there is no room.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "words", 2, torch.float32, torch.int64, [oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> oneemb.import_rows(embedding, (torch.tensor([7, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
        2
        >>> embedding(torch.tensor([8])).tolist()
        [[3.0, 4.0]]
    """
    check_batches(batch_size, progress, with_state=with_state, allow_nonfinite=allow_nonfinite)
    for argument, name in {"keys": keys, "tables": tables, "state": state}.items():
        if not isinstance(name, str) and (name is not None or argument == "state"):
            raise TypeError(f"{argument} must be the name of a column, got {type(name).__name__} {name!r}")
    if not hasattr(table, "__index__"):
        raise TypeError(f"table must be an int, got {type(table).__name__} {table!r}")
    if not isinstance(values, str | list | tuple):
        raise TypeError(f"values must be the name of a column or a list of names, got {type(values).__name__}")
    if not 0 <= table <= TABLE_MAX:
        raise ValueError(f"table must be from 0 to {TABLE_MAX}, got {table}")
    names = values if isinstance(values, str) else tuple(values)
    columns = Columns(keys, names, tables, state if with_state else None)
    embedding = as_embedding(target)
    is_path = isinstance(source, str | bytes | os.PathLike)
    if not is_path or suffix_of(absolute_path(cast(AnyPath, source))) == ".npy":
        _refuse_names(
            source, keys=keys == "keys" or keys is None and is_path, values=names == "values", tables=tables is None,
            state=state == "state",
        )  # fmt: skip
    swapped = embedding is None and hasattr(source, "store")
    if swapped or embedding is None and not isinstance(target, str | bytes | os.PathLike | list | tuple):
        raise TypeError(
            f"target must be an embedding or the folder of a table, got {type(target).__name__}; pass the target first"
            " and the source second: import_rows(embedding, (ids, vectors))"
        )
    if embedding is not None and (snapshot is not None or dtype is not None):
        raise ValueError("snapshot and dtype are only for a folder, but the target is an embedding; leave them out")
    if embedding is None and not snapshot:
        raise ValueError("snapshot must be given if the target is a folder; give snapshot=..., the name of the new one")

    def read() -> int:
        with closing(_open_source(source, columns, with_state)) as rows:
            return bring(rows)

    def bring(rows: RowFile) -> int:
        description = _description_of(rows, with_state)
        weight_dtype = description.format.dtype if dtype is None else name_of(dtype)
        if weight_dtype not in WEIGHTS:
            raise TypeError(f"dtype must be {', '.join(WEIGHTS)} or None, got {dtype}")
        done = 0
        with ExitStack() as opened:
            sink: _IntoEmbedding | _IntoSnapshot
            if embedding is not None:
                sink = opened.enter_context(_IntoEmbedding(embedding, description, with_state))
            else:
                paths = as_list(cast(Paths, target))
                with signals_deferred:  # The sink locks the paths, so no interrupt may come before its context begins.
                    sink = _IntoSnapshot(paths, str(snapshot), description, weight_dtype, physical_block_size)
                    opened.enter_context(sink)
            for batch in rows.scan(batch_size):
                signals_deferred.raise_interrupt()
                if batch.table_N is None:
                    batch = batch._replace(table_N=np.full(len(batch.id_N), table, np.int32))
                if not allow_nonfinite:
                    _check_finite(batch, names, state)
                sink.put(batch)
                done += len(batch.id_N)
                if progress is not None:
                    progress(done, rows.size)
        return done

    if embedding is None:
        return read()
    snapshots, counts = embedding.rank_snapshots, list[int]()
    what = snapshots.words("import_rows")

    def bring_on_ranks() -> None:
        try:
            snapshots.ranks.agree(what, lambda: counts.append(read()))
        except BaseException:
            snapshots.replicas.even_out(what)  # Copies of rows of replicated tables may differ between ranks.
            raise

    snapshots.together("import_rows", bring_on_ranks)
    return counts[0]


def _refuse_names(source: Source, **are_left_out: bool) -> None:
    """Raise ValueError if a column is named for a source without names. `are_left_out`: {argument: whether it has its
    default}."""
    for argument, is_left_out in are_left_out.items():
        if not is_left_out:
            what = ".npy" if isinstance(source, str | bytes | os.PathLike) else type(source).__name__
            raise ValueError(
                f"{argument} must only be given for a file .npz, .parquet or .safetensors, got a {what}, whose columns"
                f" have no names; leave {argument} out"
            )


def _open_source(source: Source, columns: Columns, with_state: bool) -> RowFile:
    if isinstance(source, PersistentTableReader):
        return _ReaderRows(source, with_state)
    if isinstance(source, RowsToOpen):
        return source.open()
    if isinstance(source, str | bytes | os.PathLike):
        path = absolute_path(source)
        if os.path.isdir(path):
            raise ValueError(
                f"{path} is a folder; to import a snapshot of a table, give make_persistent_table_reader({path!r}, ...)"
            )
        match suffix_of(path):
            case ".npz":
                return NpzRows(path, columns)
            case ".parquet":
                return ParquetRows(path, columns)
            case ".safetensors":
                return SafetensorsRows(path, columns)
            case ".npy":
                if with_state:
                    raise ValueError(
                        "with_state=True needs files (keys, values, tables, state), got one file of values"
                    )
                return npy_rows([path], with_state)
        raise ValueError(f"source must end in {', '.join(SUFFIXES)} or .npy, got {path!r}")
    if isinstance(source, list | tuple) and source:
        if all(isinstance(item, str | bytes | os.PathLike) for item in source):
            return npy_rows(as_list(cast(Sequence[AnyPath], source)), with_state)
        if all(isinstance(item, np.ndarray) or hasattr(item, "detach") for item in source):
            return array_rows([array_of(array) for array in cast(_Arrays, source)], with_state)
    if not isinstance(source, Iterable):
        raise TypeError(
            f"source must be a file, arrays, a reader or an iterable of batches, got {type(source).__name__}"
        )
    if with_state:
        raise ValueError("with_state=True is for files, arrays and readers; batches hold only weights")
    return _BatchRows(cast(Iterable[_Arrays], source))


class _ReaderRows:
    """Rows of a persistent table's reader, with the interface `RowFile`."""

    def __init__(self, reader: PersistentTableReader, with_state: bool):
        self._reader, self._with_state = reader, with_state
        row_format = reader.rows.format
        self.note: SnapshotRows | None = reader.rows
        self.dim, self.dtype = row_format.dim, row_format.dtype
        self.state_width = row_format.state_width if with_state else 0
        self.size: int | None = len(reader)

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        row_format = self._reader.rows.format
        for table_N, id_N, row_NW in whole_batches(self._reader.scan(), batch):
            state_NZ = state_of(row_format, row_NW) if self.state_width else None
            yield RowsOfFile(table_N, id_N, weights_of(row_format, row_NW), state_NZ)

    def close(self) -> None:
        pass  # The caller closes the reader.


class _BatchRows:
    """Gives an iterable of batches of rows the interface `RowFile`."""

    def __init__(self, batches: Iterable[_Arrays]):
        self.note: SnapshotRows | None = None
        self.size: int | None = None
        self.state_width = 0
        self._batches = self._checked(batches)
        self._first = next(self._batches, None)
        weight_ND = np.empty((0, 1), np.float32) if self._first is None else self._first.weight_ND
        self.dim = weight_ND.shape[1]
        self.dtype = "float16" if weight_ND.dtype == np.float16 else "float32"

    def _checked(self, batches: Iterable[_Arrays]) -> Iterator[RowsOfFile]:
        row = 0
        for n, batch in enumerate(batches):
            if not isinstance(batch, list | tuple) or len(batch) not in (2, 3):
                raise TypeError(
                    f"batch {n} must be (keys, values) or (tables, keys, values), got {type(batch).__name__}"
                )
            *tables, keys, values = (array_of(array) for array in batch)
            yield checked_batch(f"batch {n}", row, keys, values, tables[0] if tables else None, None)
            row += len(keys)

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        if self._first is not None:
            yield self._first
            yield from self._batches

    def close(self) -> None:
        pass


def _description_of(rows: RowFile, with_state: bool) -> SnapshotRows:
    """Description of a source's rows: from the source's note, or made from its dtype and widths."""
    known = rows.note
    dtype = known.format.dtype if known else rows.dtype
    if known and with_state:
        if known.format.state_width != rows.state_width:
            raise ValueError(
                f"state must have {known.format.state_width} values a row, as the note of the source says, got"
                f" {rows.state_width}"
            )
        return replace(known, format=replace(known.format, dim=rows.dim, usage_words=0))
    return SnapshotRows(RowFormat(rows.dim, dtype, None, (0.0,) * rows.state_width), 0)


class _IntoSnapshot:
    """Sink of rows that writes a new snapshot."""

    def __init__(self, paths: list[str], name: str, rows: SnapshotRows, dtype: str, physical_block_size: int):
        self._rows = replace(rows, format=replace(rows.format, dtype=dtype))
        value_dtype = np.dtype(np.float32)
        self._writer: PersistentTableWriter = open_writer(
            paths, name, self._rows, np.dtype(np.int64), value_dtype, physical_block_size
        )

    def put(self, batch: RowsOfFile) -> None:
        row_format = self._rows.format
        _check_widths(batch, row_format, "the rows before it")
        assert batch.table_N is not None
        self._writer.put(batch.table_N, batch.id_N, encode_rows(row_format, batch.weight_ND, batch.state_NZ))

    def __enter__(self) -> "_IntoSnapshot":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        self._writer.__exit__(kind, *exception)


class _IntoEmbedding:
    """Sink of rows that changes an embedding."""

    def __init__(self, embedding: "TableEmbedding", rows: SnapshotRows, with_state: bool):
        self._embedding, self._store, self._rows = embedding, embedding.store, rows
        self._store.build()
        self._with_state = with_state
        if with_state:
            self._check_state()
        # At most half of the cache at once, so that the rows of a running step can stay pinned.
        self._put_max = max(1, self._store.stats()["device"]["slots"] // 2)

    def _check_state(self) -> None:
        store, rows = self._store, self._rows
        if rows.format.state_width != store.format.state_width or (
            rows.format.optimizer is not None and rows.format.optimizer != store.format.optimizer
        ):
            raise StorageError(
                f"the source must hold the state of {store.format.optimizer!r} ({store.format.state_width} values a"
                f" row), as embedding {self._embedding.name!r} does, and holds that of {rows.format.optimizer!r}"
                f" ({rows.format.state_width} values); attach {rows.format.optimizer!r} to the embedding first, or"
                " import without with_state"
            )

    def put(self, batch: RowsOfFile) -> None:
        store, embedding = self._store, self._embedding
        row_format = replace(store.format, state=self._rows.format.state if self._with_state else ())
        _check_widths(batch, row_format, f"embedding {embedding.name!r}")
        table_N, id_N = batch.table_N, batch.id_N
        assert table_N is not None
        if len(table_N) and int(table_N.max()) >= embedding.num_tables:
            raise ValueError(
                f"tables must be from 0 to {embedding.num_tables - 1}, the tables of embedding {embedding.name!r}, got"
                f" {table_N.max()}"
            )
        if str(embedding.key_type) == "torch.int32" and len(id_N) and not -(2**31) <= id_N.min() <= id_N.max() < 2**31:
            raise ValueError(
                f"ids must fit in int32, the key_type of embedding {embedding.name!r}, got {id_N.min()} to {id_N.max()}"
            )
        unique = unique_keys(table_N, id_N, padding_id=embedding.padding_idx)
        last_U = np.empty(len(unique.id_U), np.int64)
        not_padding = np.flatnonzero(unique.inverse_N >= 0)
        last_U[unique.inverse_N[not_padding].astype(np.int64)] = not_padding
        row_NW = encode_rows(row_format, batch.weight_ND, batch.state_NZ if row_format.state_width else None)
        own_U = np.flatnonzero(
            store.replicas.are_of(unique.table_U)
            | (owner_of(unique.table_U, unique.id_U, store.plan.owners) == store.plan.owner)
        )
        for begin in range(0, len(own_U), self._put_max):
            u = own_U[begin : begin + self._put_max]
            set_rows(store, unique.table_U[u], unique.id_U[u], row_NW[last_U[u]])

    def __enter__(self) -> "_IntoEmbedding":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is None and self._with_state:
            if self._store.step == 0:
                self._store.step = self._rows.step


def _check_finite(batch: RowsOfFile, values: str | tuple[str, ...], state: str) -> None:
    """Raise ValueError if a weight, or a value of the state, is infinite or NaN; the message names the first one.
    `values`, `state`: names of the columns."""
    assert batch.table_N is not None
    for column, number_NX in [(values, batch.weight_ND), (state, batch.state_NZ)]:
        if number_NX is None or np.isfinite(number_NX).all():
            continue
        n, x = np.argwhere(~np.isfinite(number_NX))[0].tolist()
        where = f"{column}[{x}]" if isinstance(column, str) else column[x]
        raise ValueError(
            f"weights must be finite, the row of table {batch.table_N[n]}, id {batch.id_N[n]} has"
            f" {number_NX[n, x]} in column {where}; correct the source, or give allow_nonfinite=True to import such"
            " weights"
        )


def _check_widths(batch: RowsOfFile, row_format: RowFormat, owner: str) -> None:
    width = 0 if batch.state_NZ is None else batch.state_NZ.shape[1]
    if batch.weight_ND.shape[1] != row_format.dim or row_format.state_width not in (0, width):
        raise ValueError(
            f"values must be [N, {row_format.dim}] and state [N, {row_format.state_width}], as in {owner}, got values"
            f" [N, {batch.weight_ND.shape[1]}] and state [N, {width}]"
        )
