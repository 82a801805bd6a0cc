"""Base of the formats of files of rows: columns of keys, values, tables and state, read in batches.

    tables  int32 [N]      which table a key is of          values  float [N, D]     the weights
    keys    int64 [N]                                       state   float32 [N, Z]   the optimizer's state

Invariants:
- the batches of a reader have been checked: integers that fit, as many rows in each column, no missing values;
- a file that is written takes its path by a rename, when it is complete; an existing one is untouched until then.
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
"""Name of a file's note, the description of its rows as JSON."""

_READ_ERRORS = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, TypeError)

_COPY_BYTES = 1 << 20


class Batch(NamedTuple):
    """Consecutive rows of a file."""

    table_N: np.ndarray | None
    """int32 [N]; None where the file has no tables"""
    id_N: np.ndarray
    """int64 [N]"""
    weight_ND: np.ndarray
    """floating-point [N, D]"""
    state_NZ: np.ndarray | None
    """float32 [N, Z]; None where it is not wanted"""

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that there are, by their roles."""
        named = {"keys": self.id_N, "values": self.weight_ND, "tables": self.table_N, "state": self.state_NZ}
        return {role: column for role, column in named.items() if column is not None}


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns.

    Args:
        keys: None = the keys are the numbers of the rows.
        values: one column of vectors; in Parquet also several of numbers.
        tables: None = "tables" if the file has such a column.
        state: None = it is not wanted.
    """

    keys: str | None
    values: str | tuple[str, ...]
    tables: str | None
    state: str | None


class RowFile(Protocol):
    """A file of rows, open for reading."""

    note: SnapshotRows | None
    """Note of `export_rows` on the rows; None = another program wrote the file."""
    dtype: str
    """Dtype of weights: "float32", "float16" or "bfloat16"; wider ones are read as float32."""
    dim: int
    """Weights of a row."""
    state_width: int
    """Values of state of a row, 0 where it is not wanted."""
    size: int | None
    """Rows in all; None = not known."""

    def scan(self, batch: int) -> Iterator[Batch]:
        """All rows, at most so many at a time; an iterable of batches keeps its own sizes."""

    def close(self) -> None: ...


class RowFileWriter(Protocol):
    """A file of rows, being written."""

    def write(self, batch: Batch) -> None: ...

    def finish(self) -> None:
        """Let the complete file take its path."""

    def abandon(self) -> None:
        """Leave nothing behind. After `finish` it does nothing."""


@contextmanager
def reading(path: str, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns errors of a library for a file of another format, or a part of a file, into one that names the file.

    Args:
        path: the file.
        expected: its kind, in words.
        errors: exceptions of the library.

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
    """The note of a file of these rows."""
    return json.dumps(rows.described())


def read_note(path: str, text: str | bytes) -> SnapshotRows | None:
    """Read a note of `write_note`; None = the note is empty.

    Raises:
        ValueError: it is no note of `write_note`.
    """
    try:
        rows = json.loads(text)
        return None if rows == {} else SnapshotRows.of_meta({"rows": rows}, os.path.basename(path))
    except (ValueError, RecursionError, StorageError) as error:
        raise ValueError(
            f"{path}: its note {NOTE!r} must say what its rows are, as export_rows writes it: {error}; remove the"
            f" note, or export the rows again"
        ) from error


def pick_columns(there: Sequence[str], columns: Columns, path: str, note: SnapshotRows | None) -> Columns:
    """The columns as they are in the file, whose note may say that its rows have no state.

    Raises:
        ValueError: one is missing; the message names those there are.
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
                f"{path} has no column {name!r}; it has {', '.join(map(repr, there)) or 'none'}: name the {what} with"
                f" {what}=...{hint}"
            )
    return Columns(columns.keys, columns.values, tables, state)


def checked_batch(
    path: str, first: int, keys: np.ndarray | None, values: np.ndarray, tables: np.ndarray | None,
    state: np.ndarray | None,
) -> Batch:  # fmt: skip
    """Batch of these columns, whose first row is row `first` of the file.

    Raises:
        ValueError: they are not columns of rows.
    """
    if values.ndim != 2 or values.dtype.kind != "f" or values.shape[1] < 1:
        raise ValueError(f"{path}: values must be floating-point [N, D], got {values.dtype} {list(values.shape)}")
    if state is not None and (state.ndim != 2 or state.dtype.kind != "f"):
        raise ValueError(f"{path}: state must be float32 [N, Z], got {state.dtype} {list(state.shape)}")
    if keys is None:
        keys = np.arange(first, first + len(values))
    for name, column in [("keys", keys), ("tables", tables), ("state", state)]:
        if column is not None and len(column) != len(values):
            raise ValueError(f"{path}: {name} must have a row for each of the {len(values)} values, has {len(column)}")
    id_N = _integers(path, "keys", keys, np.iinfo(np.int64).min, np.int64)
    table_N = None if tables is None else _integers(path, "tables", tables, 0, np.int32, TABLE_MAX)
    return Batch(table_N, id_N, values, None if state is None else state.astype(np.float32, copy=False))


def _integers(
    path: str, name: str, column: np.ndarray, least: int, dtype: type[np.integer], most: int | None = None
) -> np.ndarray:
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(f"{path}: {name} must be integers [N], got {column.dtype} {list(column.shape)}")
    most = np.iinfo(dtype).max if most is None else most
    if len(column) and (int(column.min()) < least or int(column.max()) > most):
        raise ValueError(f"{path}: {name} must be from {least} to {most}, got {column.min()} to {column.max()}")
    return column.astype(dtype, copy=False)


class Column(Protocol):
    """An array that is read from its first row to its last."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype | str: ...

    def read(self, begin: int, end: int) -> np.ndarray: ...


class ArrayRows:
    """Rows whose columns are arrays, in memory or in files.

    Args:
        columns: the arrays by role: "values", and those there are of "keys", "tables" and "state".
        path: names them in errors.
        files: open files that they lie in; `close` closes them. If this raises, they stay the caller's.
        kind, errors: of the file, as for `reading`.
    """

    def __init__(
        self, columns: Mapping[str, Column], path: str, note: SnapshotRows | None = None,
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
                    f"{path}: {role} must have a row for each of the {values.shape[0]} values, has the shape"
                    f" {list(column.shape)}"
                )
        self.size: int | None = values.shape[0]
        self.dim = values.shape[1]
        self.dtype = {"float16": "float16", "F16": "float16", "BF16": "bfloat16"}.get(str(values.dtype), "float32")
        self.state_width = columns["state"].shape[1] if "state" in columns and len(columns["state"].shape) == 2 else 0
        self._files = ExitStack() if files is None else files.pop_all()

    def scan(self, batch: int) -> Iterator[Batch]:
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
    """Base of writers of formats that store columns one after the other: the columns grow side by side.

    They are raw files without a name: nothing is left of them, however the process ends.

    Args:
        target: the file that they are for; they lie on the same disk.
    """

    def __init__(self, target: str):
        self._folder = os.path.dirname(os.path.abspath(target))
        self._file: dict[str, IO[bytes]] = {}
        self.dtype: dict[str, np.dtype] = {}
        self.shape: dict[str, tuple[int, ...]] = {}

    def write(self, batch: Batch) -> None:
        for name, array in batch.columns().items():
            if name not in self._file:
                self._file[name] = tempfile.TemporaryFile(prefix=".oneemb-", dir=self._folder)
                self.dtype[name], self.shape[name] = array.dtype, (0, *array.shape[1:])
            self._file[name].write(np.ascontiguousarray(array).view(np.uint8).data)
            self.shape[name] = (self.shape[name][0] + len(array), *self.shape[name][1:])

    def copy(self, name: str, out: IO[bytes]) -> None:
        """Write all of a column."""
        self._file[name].seek(0)
        shutil.copyfileobj(self._file[name], out, _COPY_BYTES)

    def abandon(self) -> None:
        """Remove the files. Removing twice is fine."""
        for file in self._file.values():
            close_dropped(file)
        self._file = {}


# ---- what importing and exporting share -----------------------------------------------------------------------------

SUFFIXES = (".npz", ".parquet", ".safetensors")
Progress = Callable[[int, int | None], None]


def suffix_of(path: str) -> str:
    """Suffix of a path, such as ".npz"."""
    return os.path.splitext(path)[1].lower()


def whole_batches(
    pieces: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The same rows, `batch_size` at a time or nearly so."""
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
