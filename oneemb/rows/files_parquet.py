"""Rows in Parquet files. `values` is a column of lists of equal length, or one column for each weight."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from oneemb.kernels.extras import need
from oneemb.rows.files import NOTE, Columns, RowsOfFile, checked_batch, pick_columns, read_note, reading, write_note
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.new_files import NewFile
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows


def _need(module: str) -> Any:
    return need(module, "a file of rows in Parquet", "parquet")


class ParquetRows:
    """Rows of a Parquet file."""

    def __init__(self, path: str, columns: Columns):
        parquet = _need("pyarrow.parquet")
        self._error = _need("pyarrow").ArrowException
        self._path = path
        self._source = open(path, "rb")  # Arrow cannot open a path that is not UTF-8.
        try:
            with reading(path, "a Parquet file", self._error):
                self._file = parquet.ParquetFile(self._source)
            self._read_schema(columns)
        except BaseException:
            self.close()
            raise

    def _read_schema(self, columns: Columns) -> None:
        schema = self._file.schema_arrow
        self.size: int | None = self._file.metadata.num_rows
        self.note = read_note(self._path, (schema.metadata or {}).get(NOTE.encode(), b"{}"))
        self._columns = pick_columns(schema.names, columns, self._path, self.note)
        first = next(self.scan(1), None)
        values = self._columns.values
        if first is not None:
            self.dim = first.weight_ND.shape[1]
        elif isinstance(values, str):
            self.dim = max(1, getattr(schema.field(values).type, "list_size", 1))
        else:
            self.dim = len(values)
        self.state_width = 0 if first is None or first.state_NZ is None else first.state_NZ.shape[1]
        self.dtype = "float16" if first is not None and first.weight_ND.dtype == np.float16 else "float32"

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        columns, row = self._columns, 0
        values = [columns.values] if isinstance(columns.values, str) else list(columns.values)
        names = [name for name in (columns.keys, columns.tables, columns.state, *values) if name is not None]
        parts = self._file.iter_batches(batch, columns=names)
        while True:
            with reading(self._path, "a Parquet file", self._error):
                part = next(parts, None)
            if part is None:
                break
            if len(part) == 0:
                continue
            keys, tables, state = (
                None if name is None else self._numbers(part, name)
                for name in (columns.keys, columns.tables, columns.state)
            )
            if isinstance(columns.values, str):
                value_ND = self._numbers(part, columns.values)
            else:
                value_ND = np.stack([self._numbers(part, name) for name in values], axis=1)
            yield checked_batch(self._path, row, keys, value_ND, tables, state)
            row += len(part)

    def close(self) -> None:
        self._source.close()

    def _numbers(self, part: Any, name: str) -> np.ndarray:
        """Array of a column: [N] for a column of numbers, [N, D] for a column of lists."""
        types = _need("pyarrow").types
        column = part.column(name)
        fixed = types.is_fixed_size_list(column.type)
        is_list = fixed or types.is_list(column.type) or types.is_large_list(column.type)
        flat = column.flatten() if is_list else column
        if column.null_count or flat.null_count:
            raise ValueError(f"{self._path}: column {name!r} has missing values; fill them, or leave their rows out")
        array = flat.to_numpy(zero_copy_only=False)
        if not is_list:
            return array
        if not fixed:
            length = column.value_lengths().to_numpy(zero_copy_only=False)
            if (length != length[0]).any():
                raise ValueError(
                    f"{self._path}: the lists of column {name!r} must have one length, got {length.min()} to"
                    f" {length.max()}"
                )
        return array.reshape(len(column), len(array) // len(column))


class ParquetWriter:
    """Writes a Parquet file with columns keys and values, and tables and state if batches have them.

    float16 and bfloat16 weights are written as float32, which every reader of Parquet knows.
    """

    def __init__(self, path: str, rows: SnapshotRows):
        self._arrow, self._parquet = _need("pyarrow"), _need("pyarrow.parquet")
        self._path, self._rows = path, rows
        self._new: NewFile | None = None
        self._writer: Any = None

    def write(self, batch: RowsOfFile) -> None:
        arrow = self._arrow
        columns = {
            role: self._vectors(column) if role in ("values", "state") else arrow.array(column)
            for role, column in batch.columns().items()
        }
        part = arrow.record_batch(list(columns.values()), list(columns))
        if self._writer is None:
            schema = part.schema.with_metadata({NOTE: write_note(self._rows)})
            with signals_deferred:
                self._new = NewFile(self._path)
            self._writer = self._parquet.ParquetWriter(self._new.stream, schema, use_dictionary=False)
        if len(part):
            self._writer.write_batch(part)

    def _vectors(self, array_ND: np.ndarray) -> Any:
        # `astype` makes a copy, since Arrow may keep the array.
        flat = self._arrow.array(array_ND.astype(np.float32).reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, array_ND.shape[1])

    def finish(self) -> None:
        assert self._new is not None
        self._writer.close()
        self._writer = None
        self._new.sync()
        self._new.put_in_place()
        self.abandon()

    def abandon(self) -> None:
        new, self._new, writer, self._writer = self._new, None, self._writer, None
        if new is None:
            return
        try:
            if writer is not None:
                writer.close()
        except OSError:
            pass  # The file is removed anyway, so an error while writing its end does not matter.
        finally:
            new.drop()
