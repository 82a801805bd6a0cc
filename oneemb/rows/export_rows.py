"""Writes the rows of an embedding or a snapshot to files for other tools.

Invariants:
- rows are written in batches, so memory does not grow with the number of rows, in any format;
- a call that raises leaves no new file, and does not change the file that it was to replace.
"""

import os
import uuid
from dataclasses import replace
from typing import cast

import numpy as np

from oneemb.embeddings.embedding import TableEmbedding
from oneemb.rows.arguments import Paths, as_embedding, check_batches
from oneemb.rows.files import SUFFIXES, Progress, RowFileWriter, RowsOfFile, RowTarget, suffix_of, whole_batches
from oneemb.rows.files_numpy import NpyWriter, NpzWriter
from oneemb.rows.files_parquet import ParquetWriter
from oneemb.rows.files_safetensors import SafetensorsWriter
from oneemb.rows.reader import PersistentTableReader, make_persistent_table_reader
from oneemb.rows.values import state_of, weights_of
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.fs import absolute_path, storage_error
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows


def export_rows(
    source: TableEmbedding | Paths,
    target: Paths,
    *,
    snapshot: str | None = None,
    table: int | None = None,
    with_state: bool = False,
    overwrite: bool = False,
    batch_size: int = 65536,
    progress: Progress | None = None,
) -> int:
    """Write the rows of an embedding, or of a snapshot, to a file.

    The file has columns `keys`, `values` and `tables`, and a note with the optimizer and dtype of the rows, so that
    `import_rows` restores the same rows. bfloat16 weights in NumPy files, and bfloat16 and float16 weights in Parquet
    files, are written as float32 with the same values.

    Args:
        source: an embedding, whose current rows are exported; or the folder of a persistent table, or the folder with
            the folders of ranks, or the list of folders of a sharded table. With ranks, every rank makes the call; the
            first rank writes the rows of all ranks and must see their folders, while the others wait. If that takes
            longer than the timeout of the process group, export a snapshot in another process.
        target: a file `.npz`, `.parquet` or `.safetensors`; or files `.npy`: (keys, values), (keys, values, tables)
            or (keys, values, tables, state).
        snapshot: name of the snapshot to export, if `source` is a folder.
        table: number of the only table to export, without a column `tables`; None = all tables. A snapshot must have
            rows of the table; an embedding may have none.
        with_state: if True, write the optimizer state too, as a column `state`.
        overwrite: if True, replace an existing file when the new file is complete.
        batch_size: number of rows written at a time.
        progress: called with (rows done, rows in all) after each batch.

    Returns:
        Number of rows written.

    Raises:
        ImportError: the format needs a library that is not installed; the message names it.
        FileExistsError: the target exists, and `overwrite` is False.
        ValueError: an argument is not as above.
        StorageError: there is no such snapshot, or its files are damaged.

    Example:
        >>> import tempfile, numpy, torch, oneemb
        >>> folder = tempfile.mkdtemp()
        >>> with oneemb.make_persistent_table_writer(folder, "vectors", torch.int64, torch.float32, 2) as writer:
        ...     writer.write(numpy.array([7]), numpy.array([[1, 2]], numpy.float32))
        >>> oneemb.export_rows(folder, folder + "/vectors.npz", snapshot="vectors")
        1
        >>> numpy.load(folder + "/vectors.npz")["values"]
        array([[1., 2.]], dtype=float32)
    """
    check_batches(batch_size, progress, with_state=with_state, overwrite=overwrite)
    for argument, value in (("source", source), ("target", target)):
        each = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, str | bytes | os.PathLike) for one in each) and (
            argument == "target" or as_embedding(source) is None
        ):
            what = "an embedding or the folder of a table" if argument == "source" else "a file, or files .npy"
            raise TypeError(
                f"{argument} must be {what}, got {type(value).__name__}; pass the source first and the file second:"
                " export_rows(embedding, path)"
            )
    paths = _target_paths(target, table, with_state)
    files = RowTarget(paths[0], lambda: check_targets(paths, overwrite), lambda rows: _open_target(paths, rows))
    return write_rows(
        source, files, snapshot=snapshot, table=table, with_state=with_state, batch_size=batch_size, progress=progress
    )


def write_rows(
    source: TableEmbedding | Paths,
    target: RowTarget,
    *,
    snapshot: str | None,
    table: int | None,
    with_state: bool,
    batch_size: int,
    progress: Progress | None,
) -> int:
    """Write rows as `export_rows` does, to files of any format; the other arguments are those of `export_rows`."""
    if table is not None and (isinstance(table, bool) or not isinstance(table, int | np.integer)):
        raise TypeError(f"table must be the number of a table, or None for all, got {type(table).__name__} {table!r}")
    embedding = as_embedding(source)
    if embedding is None or embedding.ranks.alone:
        target.check()

    def export(folders: Paths, name: str) -> int:
        return _export(folders, name, target, table, with_state, batch_size, progress)

    if embedding is None:
        if snapshot is None:
            raise ValueError("snapshot must be given if the source is a folder; give snapshot=..., the name to export")
        return export(cast(Paths, source), snapshot)
    if snapshot is not None:
        raise ValueError("snapshot is only for the folder of a table, but the source is an embedding; leave it out")
    if table is not None and not 0 <= table < embedding.num_tables:
        raise ValueError(
            f"table must be from 0 to {embedding.num_tables - 1}, a table of {embedding.name!r}, got {table}"
        )
    store, name = embedding.store, f"{EXPORTED}{uuid.uuid4().hex[:8]}"
    if not embedding.ranks.alone:
        first = embedding.ranks.first

        def export_first(folders: list[str], name: str) -> int:
            return export(folders, name) if first else 0

        def check_first() -> None:
            if first:
                target.check()

        return embedding.rank_snapshots.export(name, check_first, export_first)
    try:
        try:
            store.snapshots.save(name, {})
            return export(store.plan.persistent_path, name)
        finally:
            _delete_if_there(store, name)
    finally:
        _delete_if_there(store, name)  # Ctrl-C may have prevented or ended the first call.


def check_targets(paths: list[str], overwrite: bool) -> None:
    """Raise an error if files cannot be made, or would replace others without `overwrite`."""
    for path in paths:
        if os.path.exists(path) and not overwrite:
            raise FileExistsError(f"{path} exists; give overwrite=True to replace it, or give another name")
        if os.path.isdir(path):
            raise ValueError(f"{path} is a folder; give the name of a file")
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise FileNotFoundError(f"{os.path.dirname(os.path.abspath(path))} is not a folder; make it first")


def _delete_if_there(store: EmbeddingStore, name: str) -> None:
    with signals_deferred:
        if name in store.snapshots.names():
            store.snapshots.delete(name)


def _export(
    folders: Paths, snapshot: str, target: RowTarget, table: int | None,
    with_state: bool, batch_size: int, progress: Progress | None,
) -> int:  # fmt: skip
    with make_persistent_table_reader(folders, snapshot, "int64", "float32", batch_size=batch_size) as reader:
        rows = reader.rows
        if not with_state:
            rows = SnapshotRows(replace(rows.format, optimizer=None, state=()), 0)
        with_state = rows.format.state_width > 0
        rows = replace(rows, format=replace(rows.format, usage_words=0))  # Usage metadata is not exported.
        writer: RowFileWriter | None = None
        try:
            writer = target.open(rows)
            # An empty batch first, so that a file without rows has columns, too.
            writer.write(_batch(reader, np.empty(0, np.int32), np.empty(0, np.int64), None, table, with_state))
            seen = written = 0
            tables: set[int] = set()
            for table_N, id_N, row_NW in whole_batches(reader.scan(), batch_size):
                signals_deferred.raise_interrupt()
                seen += len(id_N)
                if table is not None:
                    tables.update(np.unique(table_N).tolist())
                    wanted = table_N == table
                    table_N, id_N, row_NW = table_N[wanted], id_N[wanted], row_NW[wanted]
                if len(id_N):
                    writer.write(_batch(reader, table_N, id_N, row_NW, table, with_state))
                written += len(id_N)
                if progress is not None:
                    progress(seen, len(reader))
            if table is not None and not written and not snapshot.startswith(EXPORTED):
                present = f"rows of tables {_first_20(sorted(tables))}" if tables else "no rows"
                raise ValueError(f"snapshot {snapshot!r} has no rows of table {table}; it has {present}")
            writer.finish()
        except OSError as error:
            raise storage_error(error, "write", error.filename or target.where) from error
        finally:
            if writer is not None:
                writer.abandon()
    return written


def _first_20(numbers: list[int]) -> str:
    """Text of at most 20 of the numbers."""
    return ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")


def _batch(
    reader: PersistentTableReader, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray | None,
    table: int | None, with_state: bool,
) -> RowsOfFile:  # fmt: skip
    row_format = reader.rows.format
    if row_NW is None:
        row_NW = np.empty((0, row_format.row_width), np.float32)
    state_NZ = state_of(row_format, row_NW) if with_state else None
    return RowsOfFile(table_N if table is None else None, id_N, weights_of(row_format, row_NW), state_NZ)


def _target_paths(target: Paths, table: int | None, with_state: bool) -> list[str]:
    if isinstance(target, str | bytes | os.PathLike):
        path = absolute_path(target)
        if suffix_of(path) not in SUFFIXES:
            raise ValueError(f"target must end in {', '.join(SUFFIXES)}, or be several files .npy, got {path!r}")
        return [path]
    paths = [absolute_path(path) for path in target]
    if not 2 <= len(paths) <= 4 or any(suffix_of(path) != ".npy" for path in paths):
        raise ValueError(f"target must be 2 to 4 files .npy, of keys, values, tables and state, got {paths}")
    if with_state != (len(paths) == 4):
        raise ValueError(
            f"target must have a fourth file .npy, for the state, with with_state=True, and only with with_state=True;"
            f" got {len(paths)} files and with_state={with_state}"
        )
    if table is not None and len(paths) > 2:
        raise ValueError(
            f"target must be files of keys and values alone if one table is exported, got table={table} and"
            f" {len(paths)} files"
        )
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError(f"target must name a different file for each of keys, values, tables and state, got {paths}")
    return paths


def _open_target(paths: list[str], rows: SnapshotRows) -> RowFileWriter:
    path = paths[0]
    if len(paths) > 1:
        return NpyWriter(paths if rows.format.state_width else paths[:3])
    if suffix_of(path) == ".npz":
        return NpzWriter(path, rows)
    if suffix_of(path) == ".parquet":
        return ParquetWriter(path, rows)
    return SafetensorsWriter(path, rows)
