"""Rows in NumPy files: columns in one .npz file, or one .npy file for each column; or arrays in memory.

Arrays of any size are read and written in pieces. Pickled objects are refused.
"""

import math
import os
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from tokenize import TokenError
from typing import IO, TypeVar

import numpy as np

from oneemb.rows.files import (
    NOTE,
    ROLES,
    ArrayRows,
    Columns,
    ColumnWriter,
    FileColumn,
    RowsOfFile,
    pick_columns,
    read_note,
    reading,
    write_note,
)
from oneemb.storage.new_files import new_files
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

T = TypeVar("T")


class _NpyColumn:
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
            raise ValueError(f"{path} must be in C order, and is in Fortran order; save np.ascontiguousarray(array)")
        # A damaged header may have any shape, so compare it with the bytes of the file.
        row_bytes, left = math.prod(self.shape[1:]) * self.dtype.itemsize, size - file.tell()
        if min(self.shape, default=0) < 0 or math.prod(self.shape) * self.dtype.itemsize > left:
            raise ValueError(
                f"{path} must have {self.shape} values of {self.dtype}, but ends before row"
                f" {left // max(1, row_bytes) + 1}; it is cut short or damaged"
            )

    def read(self, begin: int, end: int) -> np.ndarray:
        shape = (end - begin, *self.shape[1:])
        size = math.prod(shape) * self.dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"{self._path} must have {self.shape} values of {self.dtype}, but ends before row {end}")
        return np.frombuffer(data, self.dtype).reshape(shape)


class _ArrayColumn:
    def __init__(self, array: np.ndarray):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._array[begin:end]


def array_rows(arrays: Sequence[np.ndarray], with_state: bool) -> ArrayRows:
    """Rows of (keys, values), (keys, values, tables) or (keys, values, tables, state) in memory."""
    return ArrayRows({role: _ArrayColumn(array) for role, array in _roles(arrays, with_state)}, "the arrays given")


def npy_rows(paths: Sequence[str], with_state: bool) -> ArrayRows:
    """Rows of .npy files: a single file of values, whose row numbers are the keys; or (keys, values), (keys, values,
    tables) or (keys, values, tables, state)."""
    roles = [("values", paths[0])] if len(paths) == 1 else _roles(paths, with_state)
    with ExitStack() as stack:
        arrays: dict[str, FileColumn] = {}
        for role, path in roles:
            with reading(path, "an .npy file of numbers"):
                file = stack.enter_context(open(path, "rb"))
                arrays[role] = _NpyColumn(file, path, os.fstat(file.fileno()).st_size)
        return ArrayRows(arrays, ", ".join(path for _, path in roles), files=stack)


def _roles(items: Sequence[T], with_state: bool) -> list[tuple[str, T]]:
    """[(role, item)] for items in the order of `ROLES`."""
    if not 2 <= len(items) <= 4:
        raise ValueError(f"give (keys, values), (keys, values, tables) or (keys, values, tables, state), got {items}")
    if with_state and len(items) < 4:
        raise ValueError("with_state=True needs a fourth array or file, the state; leave it out to import only weights")
    return list(zip(ROLES, items, strict=False))[: 4 if with_state else 3]


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
            arrays: dict[str, FileColumn] = {}
            for role in ROLES:
                if (name := getattr(columns, role)) is not None:
                    with reading(path, "an .npz file"):
                        member = stack.enter_context(archive.open(f"{name}.npy"))
                        size = archive.getinfo(f"{name}.npy").file_size
                        arrays[role] = _NpyColumn(member, f"{path}:{name}", size)
            super().__init__(arrays, path, note, files=stack)


# ---- writing --------------------------------------------------------------------------------------------------------


class _NumpyWriter(ColumnWriter):
    def _write_npy(self, name: str, out: IO[bytes]) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype[name])
        header = {"descr": descr, "fortran_order": False, "shape": self.shape[name]}
        np.lib.format.write_array_header_1_0(out, header)
        self.copy(name, out)


class NpzWriter(_NumpyWriter):
    """Writes an .npz file with one uncompressed array for each column."""

    def __init__(self, path: str, rows: SnapshotRows):
        super().__init__(path)
        self._path, self._rows = path, rows

    def finish(self) -> None:
        with new_files(self._path) as (file,), zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in self.shape:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    self._write_npy(name, member)
            with archive.open(f"{NOTE}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(write_note(self._rows)), allow_pickle=False)
        self.abandon()


class NpyWriter(_NumpyWriter):
    """Writes one .npy file for each column. `paths`: files of keys and values, perhaps of tables and of state."""

    def __init__(self, paths: Sequence[str]):
        super().__init__(paths[0])
        self._paths = dict(zip(ROLES, paths, strict=False))

    def write(self, batch: RowsOfFile) -> None:
        if "tables" not in self._paths:
            if batch.table_N is not None and batch.table_N.any():
                raise ValueError(
                    f"target must have a third file, for the tables, beside {self._paths['keys']}, since rows are not"
                    f" all of table 0; or give table=... to export one table"
                )
            batch = batch._replace(table_N=None)
        super().write(batch)

    def finish(self) -> None:
        with new_files(*self._paths.values()) as files:
            for role, file in zip(self._paths, files, strict=True):
                self._write_npy(role, file)
        self.abandon()
