"""Arrays [N] or [N, X] in files of other programs, read in pieces or by the numbers of their rows.

Invariant: a read beyond the end of a file is an error that names the file and the offset, never a short array.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from oneemb.kernels.crc32c import crc32c
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import FileSystem, doing

GAP_ROWS = 64
"""Rows between two wanted rows that are read along, since one longer read is faster than two."""
_PIECE_BYTES = 1 << 22


class RowArray(Protocol):
    """Interface of an array whose rows are read in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> "np.dtype | str": ...

    def read(self, begin: int, end: int) -> np.ndarray: ...

    def take(self, row_N: np.ndarray) -> np.ndarray:
        """Rows of these numbers, in this order."""


class FilePart(NamedTuple):
    """Consecutive rows of an array in one file."""

    path: str
    offset: int
    rows: int
    masked_crc: int | None = None
    """Checksum of the bytes as TensorFlow masks it; None = the format has none."""


class FileArray:
    """Array that lies in one file, or in several files one part after the other.

    Args:
        width: X, number of values of a row; None = the array is [N].

    Raises:
        CorruptTableError: a file ends before the last row.
    """

    def __init__(self, fs: FileSystem, parts: Sequence[FilePart], dtype: "np.dtype | str", width: int | None):
        self._fs, self._parts = fs, [part for part in parts if part.rows]
        self._stored = np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype).newbyteorder("<")
        self.dtype: np.dtype | str = "bfloat16" if dtype == "bfloat16" else self._stored.newbyteorder("=")
        self._row_bytes = self._stored.itemsize * (1 if width is None else width)
        self._begins = np.cumsum([0, *(part.rows for part in self._parts)])
        self.shape: tuple[int, ...] = (int(self._begins[-1]), *(() if width is None else (width,)))
        for part in parts:
            with doing("look at", part.path):
                size, end = fs.size(part.path), part.offset + part.rows * self._row_bytes
            if part.offset < 0 or size < end:
                raise CorruptTableError(
                    f"{part.path} must have {part.rows} rows of {self._row_bytes} bytes from offset {part.offset} on,"
                    f" to offset {end}, but ends at {size}; restore it from a copy"
                )

    def read(self, begin: int, end: int) -> np.ndarray:
        """Rows begin to end - 1."""
        out = np.empty((end - begin, *self.shape[1:]), self._stored)
        byte_X = out.reshape(-1).view(np.uint8)
        for part, first in zip(self._parts, self._begins, strict=False):
            low, high = max(begin, first), min(end, first + part.rows)
            if low < high:
                data = byte_X[(low - begin) * self._row_bytes : (high - begin) * self._row_bytes].data
                self._read(part.path, data, part.offset + int(low - first) * self._row_bytes)
        if self.dtype == "bfloat16":
            return (out.astype(np.uint32) << 16).view(np.float32)
        return out.astype(self.dtype, copy=False)

    def take(self, row_N: np.ndarray) -> np.ndarray:
        """Rows of these numbers, in this order."""
        unique_U, inverse_N = np.unique(row_N, return_inverse=True)
        if len(unique_U) == 0:
            return self.read(0, 0)
        runs = np.split(unique_U, np.flatnonzero(np.diff(unique_U) > GAP_ROWS) + 1)
        rows = np.concatenate([self.read(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs])
        return rows[inverse_N]

    def verify(self) -> None:
        """Compare the bytes with the checksums. CorruptTableError names the file and offset of a part that differs."""
        for part in self._parts:
            if part.masked_crc is None:
                continue
            crc, size = 0, part.rows * self._row_bytes
            for begin in range(0, size, _PIECE_BYTES):
                data = bytearray(min(_PIECE_BYTES, size - begin))
                self._read(part.path, memoryview(data), part.offset + begin)
                crc = crc32c(data, crc)
            if masked(crc) != part.masked_crc:
                raise CorruptTableError(
                    f"{part.path}: the {size} bytes from offset {part.offset} on must have the checksum"
                    f" {part.masked_crc:#010x}, and have {masked(crc):#010x}; restore the file from a copy"
                )

    def _read(self, path: str, data: memoryview, offset: int) -> None:
        if not len(data):
            return
        with doing("read", path):
            file = self._fs.open(path)
            try:
                size = self._fs.read_into(file, data, offset)
            finally:
                self._fs.close(file)
        if size != len(data):
            raise CorruptTableError(f"{path} became shorter while it was read, ends at offset {offset + size}")


class MemoryArray:
    """Array or tensor in memory."""

    def __init__(self, array: np.ndarray):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._array[begin:end]

    def take(self, row_N: np.ndarray) -> np.ndarray:
        return self._array[row_N]


class PickedRows:
    """Rows of another array, picked by number: row n of the result is row row_N[n]."""

    def __init__(self, array: RowArray, row_N: np.ndarray):
        self._array, self._row_N = array, row_N
        self.shape, self.dtype = (len(row_N), *array.shape[1:]), array.dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._array.take(self._row_N[begin:end])

    def take(self, row_N: np.ndarray) -> np.ndarray:
        return self._array.take(self._row_N[row_N])


def masked(crc: int) -> int:
    """The checksum as TensorFlow stores it: rotated and shifted, so that bytes with checksums in them differ."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def rows_of_sizes(
    keys: str, key_bytes: int, key_dtype: str, values: str, value_bytes: int, dim: int | None
) -> tuple[int, int]:
    """Number of rows and number of weights of a row, from the sizes of a file of keys and a file of float32 values.

    Args:
        keys, values: paths of the files.
        dim: number of weights of a row; None = not known.

    Raises:
        CorruptTableError: the sizes do not fit.
    """
    size = np.dtype(key_dtype).itemsize
    rows = key_bytes // size
    width = dim if dim is not None else max(1, value_bytes // (4 * rows)) if rows else 1
    if key_bytes % size or value_bytes != 4 * rows * width:
        raise CorruptTableError(
            f"{keys} and {values} must have a key of {key_dtype} and {width if dim else 'equally many'} float32 values"
            f" for each row, and end at offsets {key_bytes} and {value_bytes}; restore the files from a copy, or give"
            " the right embedding_dim=... and key_type=..."
        )
    return rows, width
