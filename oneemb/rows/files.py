"""Base of the formats of row files: columns of keys, values, tables and state, read in batches.

    tables  int32 [N]      table of each key                values  float [N, D]     weights
    keys    int64 [N]      id of each key                   state   float32 [N, Z]   optimizer state, Z values of a row

Invariants:
- batches from a reader are checked: integers fit, all columns have the same number of rows, no value is missing;
- a new file gets its path by a rename when it is complete; until then, an existing file is unchanged.
"""

import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple, Protocol

import numpy as np

from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.storage.errors import StorageError
from oneemb.storage.new_files import close_dropped
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

ROLES = ("keys", "values", "tables", "state")

NOTE = "oneemb"
"""Name of the note in a file: a description of the rows, as JSON."""

_READ_ERRORS = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, TypeError)

_COPY_BYTES = 1 << 20


class RowsOfFile(NamedTuple):
    """Consecutive rows of a file."""

    table_N: np.ndarray | None
    """int32 [N]: table of each row; None = the file has no tables."""
    id_N: np.ndarray
    """int64 [N]"""
    weight_ND: np.ndarray
    """floating-point [N, D]"""
    state_NZ: np.ndarray | None
    """float32 [N, Z]: optimizer state; None = not wanted."""

    def columns(self) -> dict[str, np.ndarray]:
        """{role: column} of the columns that are not None."""
        named = {"keys": self.id_N, "values": self.weight_ND, "tables": self.table_N, "state": self.state_NZ}
        return {role: column for role, column in named.items() if column is not None}


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns.

    Args:
        keys: column of the keys; None = a row's number in the file is its key.
        values: column of vectors; or, in Parquet, several columns of numbers.
        tables: column of table numbers; None = "tables" if the file has such a column.
        state: column of optimizer state; None = not wanted.
    """

    keys: str | None
    values: str | tuple[str, ...]
    tables: str | None
    state: str | None


class RowFile(Protocol):
    """A file of rows, open for reading."""

    note: SnapshotRows | None
    """Description of the rows, which `export_rows` has written; None = another program wrote the file."""
    dtype: str
    """Dtype of the weights: "float32", "float16" or "bfloat16"; wider dtypes are read as float32."""
    dim: int
    """Number of weights of a row."""
    state_width: int
    """Number of state values of a row; 0 = not wanted."""
    size: int | None
    """Number of rows; None = not known."""

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        """All rows, in batches of at most `batch` rows; an iterable of batches keeps its own batch sizes."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RowsToOpen:
    """Source of rows that is opened when an import begins, on each rank."""

    open: Callable[[], RowFile]


class RowFileWriter(Protocol):
    """Writer of a file of rows."""

    def write(self, batch: RowsOfFile) -> None: ...

    def finish(self) -> None:
        """Complete the file and rename it to its path."""

    def abandon(self) -> None:
        """Remove the unfinished file. Does nothing after `finish`."""


@dataclass(frozen=True)
class RowTarget:
    """Files of any format to which rows are written.

    Args:
        where: path of the first file, for errors.
        check: raises an error if the files cannot be written; called before anything is read.
        open: writer for rows of this format.
    """

    where: str
    check: Callable[[], None]
    open: Callable[[SnapshotRows], RowFileWriter]


@contextmanager
def reading(path: str, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Block in which a library reads a file. Errors of the library become a ValueError that names the file.

    Args:
        path: the file.
        expected: text of the expected kind of file, such as "an .npz file".
        errors: exception classes of the library.

    Raises:
        ValueError: the file has another format, or is cut short or damaged.
        FileNotFoundError, PermissionError: unchanged.
    """
    caught: tuple[type[Exception], ...] = (*_READ_ERRORS, *errors)
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except caught as error:
        raise ValueError(f"{path} is not {expected}, or it is cut short or damaged: {error}") from error


def write_note(rows: SnapshotRows) -> str:
    """Text of the note for a file of `rows`."""
    return json.dumps(rows.described())


def read_note(path: str, text: str | bytes) -> SnapshotRows | None:
    """Description of rows in a note of `write_note`; None = the note is empty.

    Raises:
        ValueError: `text` is no note of `write_note`.
    """
    try:
        rows = json.loads(text)
        return None if rows == {} else SnapshotRows.of_meta({"rows": rows}, os.path.basename(path))
    except (ValueError, RecursionError, StorageError) as error:
        raise ValueError(
            f"{path}: the file's metadata entry {NOTE!r} is not what export_rows writes: {error}; remove the entry, or"
            " export the rows again"
        ) from error


def pick_columns(there: Sequence[str], columns: Columns, path: str, note: SnapshotRows | None) -> Columns:
    """The columns to read from a file: `columns`, with `tables` if the file has them, and without `state` if the note
    says that rows have no state.

    Args:
        there: names of the columns in the file.

    Raises:
        ValueError: a column is missing; the message lists the columns of the file.
    """
    tables = columns.tables or ("tables" if "tables" in there else None)
    state = None if note is not None and note.format.state_width == 0 else columns.state
    values = [columns.values] if isinstance(columns.values, str) else list(columns.values)
    for what, name in [
        ("keys", columns.keys), ("tables", tables), ("state", state), *(("values", name) for name in values)
    ]:  # fmt: skip
        if name is not None and name not in there:
            hint = "; keys=None takes the numbers of the rows as keys" if what == "keys" else ""
            raise ValueError(
                f"{path} has no column {name!r}, only {', '.join(map(repr, there)) or 'none'}; name the column of"
                f" {what} with {what}=...{hint}"
            )
    return Columns(columns.keys, columns.values, tables, state)


def checked_batch(
    path: str, first: int, keys: np.ndarray | None, values: np.ndarray, tables: np.ndarray | None,
    state: np.ndarray | None,
) -> RowsOfFile:  # fmt: skip
    """Batch of columns, after checks of shapes and dtypes. `first`: number of its first row in the file, for `keys` =
    None.

    Raises:
        ValueError: the columns have wrong shapes, dtypes or integers.
    """
    if values.ndim != 2 or values.dtype.kind != "f" or values.shape[1] < 1:
        raise ValueError(f"{path}: values must be floating-point [N, D], got {values.dtype} {list(values.shape)}")
    if state is not None and (state.ndim != 2 or state.dtype.kind != "f"):
        raise ValueError(f"{path}: state must be float32 [N, Z], got {state.dtype} {list(state.shape)}")
    if keys is None:
        keys = np.arange(first, first + len(values))
    for name, column in [("keys", keys), ("tables", tables), ("state", state)]:
        if column is not None and len(column) != len(values):
            raise ValueError(f"{path}: {name} must have a row for each of the {len(values)} values, got {len(column)}")
    id_N = _integers(path, "keys", keys, np.iinfo(np.int64).min, np.int64)
    table_N = None if tables is None else _integers(path, "tables", tables, 0, np.int32, TABLE_MAX)
    return RowsOfFile(table_N, id_N, values, None if state is None else state.astype(np.float32, copy=False))


def _integers(
    path: str, name: str, column: np.ndarray, least: int, dtype: type[np.integer], most: int | None = None
) -> np.ndarray:
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(f"{path}: {name} must be integers [N], got {column.dtype} {list(column.shape)}")
    most = np.iinfo(dtype).max if most is None else most
    if len(column) and (int(column.min()) < least or int(column.max()) > most):
        raise ValueError(f"{path}: {name} must be from {least} to {most}, got {column.min()} to {column.max()}")
    return column.astype(dtype, copy=False)


class FileColumn(Protocol):
    """Interface of an array that is read once, from its first row to its last."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype | str: ...

    def read(self, begin: int, end: int) -> np.ndarray: ...


class ArrayRows:
    """Rows whose columns are arrays, in memory or in files.

    Args:
        columns: {role: array} with the role "values", and any of "keys", "tables" and "state".
        path: name of the arrays in errors.
        note: description of the rows, as in `RowFile`.
        files: open files of the arrays, which `close` closes. If the constructor raises, the caller must close them.
        kind, errors: kind of file and exceptions, as for `reading`.
    """

    def __init__(
        self, columns: Mapping[str, FileColumn], path: str, note: SnapshotRows | None = None,
        files: ExitStack | None = None, kind: str = "a file of rows", errors: tuple[type[Exception], ...] = (),
    ):  # fmt: skip
        self.note = note
        self._columns, self._path, self._kind, self._errors = columns, path, kind, errors
        values = columns["values"]
        if len(values.shape) != 2:
            raise ValueError(f"{path}: values must be floating-point [N, D], got {values.dtype} {list(values.shape)}")
        for role, column in columns.items():
            if column.shape[:1] != values.shape[:1]:
                raise ValueError(
                    f"{path}: {role} must have a row for each of the {values.shape[0]} values, got shape"
                    f" {list(column.shape)}"
                )
        self.size: int | None = values.shape[0]
        self.dim = values.shape[1]
        self.dtype = {"float16": "float16", "F16": "float16", "BF16": "bfloat16"}.get(str(values.dtype), "float32")
        self.state_width = columns["state"].shape[1] if "state" in columns and len(columns["state"].shape) == 2 else 0
        self._files = ExitStack() if files is None else files.pop_all()

    def scan(self, batch: int) -> Iterator[RowsOfFile]:
        size = self._columns["values"].shape[0]
        for begin in range(0, size, batch):
            end = min(begin + batch, size)
            with reading(self._path, self._kind, *self._errors):
                part = {role: column.read(begin, end) for role, column in self._columns.items()}
            yield checked_batch(
                self._path, begin, part.get("keys"), part["values"], part.get("tables"), part.get("state")
            )

    def close(self) -> None:
        self._files.close()


class ColumnWriter:
    """Base of writers of formats that store one column after the other. Each column grows in a raw temporary file.

    The temporary files have no name, so nothing is left if the process ends in any way.

    Args:
        target: path of the file to write. The temporary files are on the same disk.
    """

    def __init__(self, target: str):
        self._folder = os.path.dirname(os.path.abspath(target))
        self._file: dict[str, IO[bytes]] = {}
        self.dtype: dict[str, np.dtype] = {}
        self.shape: dict[str, tuple[int, ...]] = {}

    def write(self, batch: RowsOfFile) -> None:
        for name, array in batch.columns().items():
            self.append(name, array)

    def append(self, name: str, array: np.ndarray) -> None:
        """Add rows to the column `name`."""
        if name not in self._file:
            self._file[name] = tempfile.TemporaryFile(prefix=".oneemb-", dir=self._folder)
            self.dtype[name], self.shape[name] = array.dtype, (0, *array.shape[1:])
        self._file[name].write(np.ascontiguousarray(array).view(np.uint8).data)
        self.shape[name] = (self.shape[name][0] + len(array), *self.shape[name][1:])

    def copy(self, name: str, out: IO[bytes]) -> None:
        """Write the whole column `name` to `out`."""
        self._file[name].seek(0)
        shutil.copyfileobj(self._file[name], out, _COPY_BYTES)

    def mapped(self, name: str) -> np.ndarray:
        """The whole column `name`, mapped into memory."""
        self._file[name].flush()
        if 0 in self.shape[name]:
            return np.empty(self.shape[name], self.dtype[name])
        return np.memmap(self._file[name], self.dtype[name], "r", shape=self.shape[name])

    def abandon(self) -> None:
        """Remove the temporary files. May be called again."""
        for file in self._file.values():
            close_dropped(file)
        self._file = {}


# ---- shared by import and export ------------------------------------------------------------------------------------

SUFFIXES = (".npz", ".parquet", ".safetensors")
Progress = Callable[[int, int | None], None]


def suffix_of(path: str) -> str:
    """Suffix of a path, such as ".npz"."""
    return os.path.splitext(path)[1].lower()


def whole_batches(
    pieces: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The rows of `pieces`, joined to batches of at most `batch_size` rows; a larger piece stays one batch."""
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    size = 0
    for piece in pieces:
        if kept and size + len(piece[0]) > batch_size:
            yield _joined(kept)
            kept, size = [], 0
        kept.append(piece)
        size += len(piece[0])
    if kept:
        yield _joined(kept)


def _joined(pieces: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table_N, id_N, row_NW = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return table_N, id_N, row_NW
