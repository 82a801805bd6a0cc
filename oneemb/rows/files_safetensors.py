"""Rows in safetensors: a tensor a column; bfloat16 and float16 stay what they are.

The library holds all that it saves in memory, so files are written here: eight bytes, the length of the header; the
header, JSON padded with spaces to a multiple of 8; the tensors, one after the other.

Reference: Hugging Face, the safetensors format.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from oneemb.kernels.extras import need
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
from oneemb.rows.values import array_of
from oneemb.storage.new_files import new_files
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

_NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint16": "BF16"}


class SafetensorsRows:
    """Rows of a safetensors file."""

    def __init__(self, path: str, columns: Columns):
        library = need("safetensors", "a file of rows in safetensors", "safetensors")
        if not isinstance(columns.values, str):
            raise ValueError(f"{path}: values must name one tensor [N, D], got {columns.values}")
        self._error = library.SafetensorError
        with reading(path, "a safetensors file", self._error):
            # As tensors of torch, since NumPy has no bfloat16.
            self._file: Any = library.safe_open(path, framework="pt")
        self._path = path
        self.note = read_note(path, (self._file.metadata() or {}).get(NOTE, "{}"))
        self._columns = pick_columns(sorted(self._file.keys()), columns, path, self.note)
        roles = ("keys", "values", "tables", "state")
        self._slice = {
            role: self._file.get_slice(name) for role in roles if (name := getattr(self._columns, role)) is not None
        }
        values = self._slice["values"]
        shape = values.get_shape()
        if len(shape) != 2:
            raise ValueError(f"{path}: values must be floating-point [N, D], got {values.get_dtype()} {shape}")
        for role, tensor in self._slice.items():
            if tensor.get_shape()[:1] != shape[:1]:
                raise ValueError(
                    f"{path}: {role} must have a row for each of the {shape[0]} values, has the shape"
                    f" {tensor.get_shape()}"
                )
        self.size: int | None = shape[0]
        self.dim = shape[1]
        self.dtype = {"F16": "float16", "BF16": "bfloat16"}.get(values.get_dtype(), "float32")
        state_shape = self._slice["state"].get_shape() if "state" in self._slice else []
        self.state_width = state_shape[1] if len(state_shape) == 2 else 0

    def scan(self, batch: int) -> Iterator[Batch]:
        for begin in range(0, self.size or 0, batch):
            with reading(self._path, "a safetensors file", self._error):
                part = {role: array_of(tensor[begin : begin + batch]) for role, tensor in self._slice.items()}
            yield checked_batch(
                self._path, begin, part.get("keys"), part["values"], part.get("tables"), part.get("state")
            )

    def close(self) -> None:
        self._slice, self._file = {}, None


class SafetensorsWriter:
    """Writes a safetensors file of keys, values, tables and state, the latter two where there are any.

    Weights of bfloat16 rows, which come as float32, are written as bfloat16.
    """

    def __init__(self, path: str, rows: SnapshotRows):
        self._path, self._rows = path, rows
        self._columns = ColumnFiles(path)

    def write(self, batch: Batch) -> None:
        columns = {"keys": batch.id_N, "values": batch.weight_ND}
        if self._rows.format.dtype == "bfloat16":
            # The weights are exact in bfloat16: the lower half of their bits is zero.
            weight_ND = np.ascontiguousarray(batch.weight_ND)
            columns["values"] = (weight_ND.view(np.uint32) >> 16).astype(np.uint16)
        if batch.table_N is not None:
            columns["tables"] = batch.table_N
        if batch.state_NZ is not None:
            columns["state"] = batch.state_NZ
        self._columns.write(columns)

    def finish(self) -> None:
        columns = self._columns
        # Wide numbers first, so that each tensor begins at a multiple of its numbers' size.
        names = sorted(columns.shape, key=lambda name: -columns.dtype[name].itemsize)
        header: dict[str, Any] = {"__metadata__": {NOTE: write_note(self._rows)}}
        offset = 0
        for name in names:
            size = int(np.prod(columns.shape[name])) * columns.dtype[name].itemsize
            header[name] = {
                "dtype": _NAMES[columns.dtype[name].name],
                "shape": list(columns.shape[name]),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with new_files(self._path) as (file,):
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                columns.copy(name, file)
        self.abandon()

    def abandon(self) -> None:
        self._columns.remove()
