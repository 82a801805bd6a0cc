"""Rows in NumPy's files: columns of one .npz, or an .npy file for each; or arrays in memory.

Arrays are read and written in pieces, whatever their size; pickled objects are refused.
"""

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from tokenize import TokenError
from typing import IO, Protocol, TypeVar

import numpy as np

from oneemb.rows.files import (
    NOTE,
    Batch,
    ColumnFiles,
    Columns,
    checked_batch,
    pick_columns,
    read_note,
    reading,
    write_note,
)
from oneemb.storage.new_files import new_files
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

T = TypeVar("T")

_ROLES = ("keys", "values", "tables", "state")


class _Stream(Protocol):
    """An array that is read from its first row to its last."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, begin: int, end: int) -> np.ndarray: ...


class _NpyStream:
    """An .npy file of `size` bytes, read from its first row to its last."""

    def __init__(self, file: IO[bytes], path: str, size: int):
        self._file, self._path = file, path
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0
            }[version]  # fmt: skip
            self.shape, fortran, self.dtype = read_header(file)
        except (ValueError, KeyError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
            raise ValueError(f"{path} is not an .npy file of numbers: {error}") from error
        if self.dtype.hasobject:
            raise ValueError(f"{path} holds pickled Python objects, which are never loaded; save an array of numbers")
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{path} lies column after column; save np.ascontiguousarray(array)")
        # A damaged header may say any shape: it is believed only if the file has as many bytes.
        row_bytes, left = math.prod(self.shape[1:]) * self.dtype.itemsize, size - file.tell()
        if min(self.shape, default=0) < 0 or math.prod(self.shape) * self.dtype.itemsize > left:
            raise ValueError(
                f"{path} must have {self.shape} values of {self.dtype}, it ends before row"
                f" {left // max(1, row_bytes) + 1}; it is cut short or damaged"
            )

    def read(self, begin: int, end: int) -> np.ndarray:
        shape = (end - begin, *self.shape[1:])
        size = math.prod(shape) * self.dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"{self._path} must have {self.shape} values of {self.dtype}, it ends before row {end}")
        return np.frombuffer(data, self.dtype).reshape(shape)


class _ArrayStream:
    def __init__(self, array: np.ndarray):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._array[begin:end]


class ArrayRows:
    """Rows whose columns are arrays, in memory or in files.

    Args:
        streams: the arrays by role: "values", and those there are of "keys", "tables" and "state".
        path: names them in errors.
        files: open files that they lie in; `close` closes them. If this raises, they stay the caller's.
    """

    def __init__(
        self, streams: dict[str, _Stream], path: str, note: SnapshotRows | None = None, files: ExitStack | None = None
    ):
        self.note = note
        self._streams, self._path = streams, path
        values = streams["values"]
        if len(values.shape) != 2:
            raise ValueError(f"{path}: values must be floating-point [N, D], got {values.dtype} {list(values.shape)}")
        for role, stream in streams.items():
            if stream.shape[:1] != values.shape[:1]:
                raise ValueError(
                    f"{path}: {role} must have a row for each of the {values.shape[0]} values, has the shape"
                    f" {list(stream.shape)}"
                )
        self.size: int | None = values.shape[0]
        self.dim = values.shape[1]
        self.dtype = "float16" if values.dtype == np.float16 else "float32"
        self.state_width = streams["state"].shape[1] if "state" in streams and len(streams["state"].shape) == 2 else 0
        self._files = ExitStack() if files is None else files.pop_all()

    def scan(self, batch: int) -> Iterator[Batch]:
        size = self._streams["values"].shape[0]
        for begin in range(0, size, batch):
            end = min(begin + batch, size)
            with reading(self._path, "a file of rows"):
                part = {role: stream.read(begin, end) for role, stream in self._streams.items()}
            yield checked_batch(
                self._path, begin, part.get("keys"), part["values"], part.get("tables"), part.get("state")
            )

    def close(self) -> None:
        self._files.close()


def array_rows(arrays: Sequence[np.ndarray], with_state: bool) -> ArrayRows:
    """Rows of (keys, values), (keys, values, tables) or (keys, values, tables, state) in memory."""
    return ArrayRows({role: _ArrayStream(array) for role, array in _roles(arrays, with_state)}, "the arrays given")


def npy_rows(paths: Sequence[str], with_state: bool) -> ArrayRows:
    """Rows of .npy files: one file of values whose row numbers are the keys, or (keys, values, ...) as above."""
    roles = [("values", paths[0])] if len(paths) == 1 else _roles(paths, with_state)
    with ExitStack() as stack:
        streams: dict[str, _Stream] = {}
        for role, path in roles:
            with reading(path, "an .npy file of numbers"):
                file = stack.enter_context(open(path, "rb"))
                streams[role] = _NpyStream(file, path, os.fstat(file.fileno()).st_size)
        return ArrayRows(streams, ", ".join(path for _, path in roles), files=stack)


def _roles(items: Sequence[T], with_state: bool) -> list[tuple[str, T]]:
    """Each item with what it holds."""
    if not 2 <= len(items) <= 4:
        raise ValueError(f"give (keys, values), (keys, values, tables) or (keys, values, tables, state), got {items}")
    if with_state and len(items) < 4:
        raise ValueError("with_state=True needs a fourth array or file, the state; leave it out to import weights")
    return list(zip(_ROLES, items, strict=False))[: 4 if with_state else 3]


class NpzRows(ArrayRows):
    """Rows of the arrays of an .npz file."""

    def __init__(self, path: str, columns: Columns):
        with ExitStack() as stack:
            with reading(path, "an .npz file"):
                archive = stack.enter_context(zipfile.ZipFile(path))
            there = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            if not isinstance(columns.values, str):
                raise ValueError(f"{path}: values must name one array [N, D], got {columns.values}")
            note: SnapshotRows | None = None
            if NOTE in there:
                with reading(path, "an .npz file"), archive.open(f"{NOTE}.npy") as member:
                    text = str(np.lib.format.read_array(member, allow_pickle=False))
                note = read_note(path, text)
            columns = pick_columns([name for name in there if name != NOTE], columns, path, note)
            streams: dict[str, _Stream] = {}
            for role in _ROLES:
                if (name := getattr(columns, role)) is not None:
                    with reading(path, "an .npz file"):
                        member = stack.enter_context(archive.open(f"{name}.npy"))
                        size = archive.getinfo(f"{name}.npy").file_size
                        streams[role] = _NpyStream(member, f"{path}:{name}", size)
            super().__init__(streams, path, note, files=stack)


# ---- writing --------------------------------------------------------------------------------------------------------


class _NumpyWriter:
    def __init__(self, target: str):
        self._columns = ColumnFiles(target)

    def write(self, batch: Batch) -> None:
        columns = {"keys": batch.id_N, "values": batch.weight_ND}
        if batch.table_N is not None:
            columns["tables"] = batch.table_N
        if batch.state_NZ is not None:
            columns["state"] = batch.state_NZ
        self._columns.write(columns)

    def _write_npy(self, name: str, out: IO[bytes]) -> None:
        shape, dtype = self._columns.shape[name], self._columns.dtype[name]
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        self._columns.copy(name, out)

    def abandon(self) -> None:
        self._columns.remove()


class NpzWriter(_NumpyWriter):
    """Writes an .npz file: an array a column, not compressed."""

    def __init__(self, path: str, rows: SnapshotRows):
        super().__init__(path)
        self._path, self._rows = path, rows

    def finish(self) -> None:
        with new_files(self._path) as (file,), zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in self._columns.shape:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    self._write_npy(name, member)
            with archive.open(f"{NOTE}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(write_note(self._rows)), allow_pickle=False)
        self.abandon()


class NpyWriter(_NumpyWriter):
    """Writes an .npy file for each column: keys, values, and tables and state if there are paths for them."""

    def __init__(self, paths: Sequence[str]):
        super().__init__(paths[0])
        self._paths = dict(zip(_ROLES, paths, strict=False))

    def write(self, batch: Batch) -> None:
        if "tables" not in self._paths:
            if batch.table_N is not None and batch.table_N.any():
                raise ValueError(
                    f"rows of more tables than table 0 need a third file, of the tables, beside {self._paths['keys']};"
                    f" or give table=... to export one table"
                )
            batch = batch._replace(table_N=None)
        super().write(batch)

    def finish(self) -> None:
        with new_files(*self._paths.values()) as files:
            for role, file in zip(self._paths, files, strict=True):
                self._write_npy(role, file)
        self.abandon()
