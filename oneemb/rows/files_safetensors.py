"""Rows in safetensors files: one tensor for each column. bfloat16 and float16 weights keep their dtype.

The library would hold all tensors in memory to save them, so this module writes the files itself: eight bytes with the
length of the header; the header, as JSON padded with spaces to a multiple of 8 bytes; the tensors, one after the other.

Reference: Hugging Face, the safetensors format.
"""

import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np

from oneemb.kernels.extras import need
from oneemb.rows.files import (
    NOTE,
    ROLES,
    ArrayRows,
    Columns,
    ColumnWriter,
    RowsOfFile,
    pick_columns,
    read_note,
    reading,
    write_note,
)
from oneemb.rows.values import array_of
from oneemb.storage.new_files import new_files
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

_NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint16": "BF16"}


class _SliceColumn:
    """Column in a file, by the library's slices. These are torch tensors, since NumPy has no bfloat16."""

    def __init__(self, tensor: Any):
        self._tensor, self.shape, self.dtype = tensor, tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, begin: int, end: int) -> np.ndarray:
        return array_of(self._tensor[begin:end])


class SafetensorsRows(ArrayRows):
    """Rows of a safetensors file."""

    def __init__(self, path: str, columns: Columns):
        library, kind = need("safetensors", "a file of rows in safetensors", "safetensors"), "a safetensors file"
        if not isinstance(columns.values, str):
            raise ValueError(f"{path}: values must name one tensor [N, D], got {columns.values}")
        with reading(path, kind, library.SafetensorError):
            self._file: Any = library.safe_open(path, framework="pt")
        note = read_note(path, (self._file.metadata() or {}).get(NOTE, "{}"))
        columns = pick_columns(sorted(self._file.keys()), columns, path, note)
        tensors = {
            role: _SliceColumn(self._file.get_slice(name))
            for role in ROLES
            if (name := getattr(columns, role)) is not None
        }
        super().__init__(tensors, path, note, kind=kind, errors=(library.SafetensorError,))

    def close(self) -> None:
        self._columns, self._file = {}, None


class SafetensorsWriter(ColumnWriter):
    """Writes a safetensors file with tensors keys and values, and tables and state if batches have them.

    Weights of bfloat16 rows are float32 in batches, and are written as bfloat16.
    """

    def __init__(self, path: str, rows: SnapshotRows):
        super().__init__(path)
        self._path, self._rows = path, rows

    def write(self, batch: RowsOfFile) -> None:
        if self._rows.format.dtype == "bfloat16":
            # The weights are bfloat16 values in float32, so the lower half of their bits is zero.
            weight_ND = np.ascontiguousarray(batch.weight_ND)
            batch = batch._replace(weight_ND=(weight_ND.view(np.uint32) >> 16).astype(np.uint16))
        super().write(batch)

    def finish(self) -> None:
        columns = {
            name: NewTensor(self.dtype[name].name, self.shape[name], partial(self.copy, name)) for name in self.shape
        }
        with new_files(self._path) as (file,):
            write_safetensors(file, columns, {NOTE: write_note(self._rows)})
        self.abandon()


class NewTensor(NamedTuple):
    """Tensor to write to a file."""

    dtype: str
    """NumPy's name; "uint16" = the bits of bfloat16."""
    shape: tuple[int, ...]
    write: Callable[[IO[bytes]], None]
    """Writes the values to the file."""


def write_safetensors(file: IO[bytes], tensors: Mapping[str, NewTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    # Wide dtypes first, so that each tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: -np.dtype(tensors[name].dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name in names:
        dtype, shape, _ = tensors[name]
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        tensors[name].write(file)
