"""Writes a file of rows that is only read. FORMAT.md has the bytes.

Invariants:
- the file takes its name when it is whole and durable; a call that raises leaves nothing under that name;
- memory grows with the keys alone: 12 bytes a row, twice when they are put together, and 16 a cell while the index is
  made.
"""

import math
import os
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from oneemb.kernels.checksum import blocks_sum, xxh64
from oneemb.kernels.hash_index import PLACE_BITS, cells_put
from oneemb.kernels.quantize_rows import quantize_rows
from oneemb.kernels.serve_rows import BLOCK_BYTES
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem, aligned_bytes, storage_error
from oneemb.storage.serving.served_file import MANIFEST_MAX, QUANTIZED, SERVED_MAGIC, ServedInfo
from oneemb.storage.table.file_header import pack_header

__all__ = ["remove_unfinished", "write_served_file"]

_Rows = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
_UNFINISHED = re.compile(r"(.*)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_CELLS = 256  # a block of them
_PUT = 1 << 18  # keys that are put at once
_NO_ORDER = np.empty(0, np.int64)


def write_served_file(
    path: str, info: ServedInfo, rows: _Rows, *, threads: Threads, fs: FileSystem | None = None,
    progress: Callable[[int, int | None], None] | None = None, total: int | None = None,
) -> ServedInfo:  # fmt: skip
    """Write a file, in place of one of its name.

    Args:
        info: what is known of it; rows, cells, errors and sums are filled in here.
        rows: (table_N int32, id_N int64, weight_ND): weights' bits where the file has rows as trained, else float32.
        progress: called with (rows done, `total`).

    Returns:
        What the file says.

    Raises:
        StorageError: a row cannot be written in this dtype (the message names its table and id), or the disk fails.
        CorruptTableError: a key comes twice.
    """
    # A name of its own: of two that write one file, neither may give its name to what the other has half written. Its
    # lock, which ends with the process, says that somebody writes to it.
    fs, temporary = fs or LocalFileSystem(), f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        remove_unfinished(fs, os.path.dirname(path), os.path.basename(path))
        file = fs.lock(temporary)
        while not fs.still_locks(file, temporary):  # Another has removed it before it was locked.
            fs.unlock(file)
            file = fs.lock(temporary)
        try:
            written = _Writer(fs, file, info, threads).write(rows, progress, total)
            fs.sync(file)
            fs.rename(temporary, path)
        finally:
            fs.unlock(file)
        fs.sync_directory(os.path.dirname(path))
    except OSError as error:
        raise storage_error(error, "write", path) from error
    finally:
        with suppress(OSError):
            fs.remove(temporary)
    return written


def remove_unfinished(fs: FileSystem, folder: str, name: str | None = None) -> None:
    """Remove what killed processes have left of a file of this name; without a name, of all files `*.serving`."""
    for left in fs.names(folder):
        found = _UNFINISHED.fullmatch(left)
        if found is None or (found[1] != name if name is not None else not found[1].endswith(".serving")):
            continue
        with suppress(OSError):  # BlockingIOError: somebody writes to it; or another has removed it, or may remove it.
            path = os.path.join(folder, left)
            lock = fs.lock(path)
            try:
                fs.remove(path)
            finally:
                fs.unlock(lock)


class _Writer:
    def __init__(self, fs: FileSystem, file: int, info: ServedInfo, threads: Threads):
        self._fs, self._file, self._info, self._threads = fs, file, info, threads
        self._offset = BLOCK_BYTES
        self._rest = np.empty(0, np.uint8)
        self._sums: list[np.ndarray] = []
        self._most = self._squares = 0.0

    def write(self, rows: _Rows, progress: Callable[[int, int | None], None] | None, total: int | None) -> ServedInfo:
        tables, ids, done = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 0
        for table_N, id_N, weight_ND in rows:
            self._put(self._encoded(table_N, id_N, weight_ND).reshape(-1).view(np.uint8))
            tables.append(table_N.astype(np.int32))
            ids.append(id_N.copy())
            done += len(id_N)
            if progress is not None:
                progress(done, total)
        self._flush()
        table_S, id_S = np.concatenate(tables), np.concatenate(ids)
        del tables, ids
        cell_C2 = self._cells(table_S, id_S)
        self._put(cell_C2.reshape(-1).view(np.uint8))
        self._flush()
        sum_B = np.concatenate([*self._sums, np.empty(0, np.uint32)])
        if len(sum_B) % 2:
            sum_B = np.append(sum_B, np.uint32(0))
        self._fs.write(self._file, sum_B, self._offset)
        count_T = np.bincount(table_S, minlength=self._info.num_tables)
        info = replace(
            self._info, rows=len(id_S), cells=len(cell_C2), sums=f"{xxh64(sum_B):016x}", error_max=self._most,
            rows_of_tables=tuple(int(count_T[t]) for t in self._info.tables),
            error_rms=math.sqrt(self._squares / max(1, len(id_S) * self._info.dim)),
        )  # fmt: skip
        packed = info.packed()
        if len(packed) > MANIFEST_MAX:
            raise StorageError(
                f"what there is to say of {info.num_tables} tables takes {len(packed)} bytes, and at most"
                f" {MANIFEST_MAX} are read; let fewer tables share an embedding"
            )
        self._fs.write(self._file, packed, info.manifest_begin)
        header = (info.manifest_begin, len(packed) - 8, info.manifest_begin + len(packed), 0)
        self._fs.write(self._file, pack_header(SERVED_MAGIC, header), 0)
        return info

    def _encoded(self, table_N: np.ndarray, id_N: np.ndarray, weight_ND: np.ndarray) -> np.ndarray:
        info = self._info
        row_NB = np.zeros((len(id_N), info.row_bytes), np.uint8)
        if info.weights in QUANTIZED:
            right_N, error_N2 = quantize_rows(
                np.ascontiguousarray(weight_ND), QUANTIZED[info.weights], row_NB, threads=self._threads
            )
            self._count_errors(error_N2[right_N, 0].max(initial=0), error_N2[right_N, 1].sum())
        elif weight_ND.dtype == np.float32 and info.weights == "float16":
            with np.errstate(over="ignore"):
                half_ND = weight_ND.astype(np.float16)
            right_N = np.all(np.isfinite(half_ND), axis=1)
            error_ND = np.abs(half_ND[right_N].astype(np.float64) - weight_ND[right_N])
            self._count_errors(error_ND.max(initial=0), np.square(error_ND).sum())
            row_NB[:, : 2 * info.dim].view(np.float16)[:] = half_ND
        else:
            size = info.dim * weight_ND.dtype.itemsize
            row_NB[:, :size] = np.ascontiguousarray(weight_ND).view(np.uint8)
            return row_NB
        if not right_N.all():
            n = int(np.flatnonzero(~right_N)[0])
            low, high = weight_ND[n].min(), weight_ND[n].max()
            raise StorageError(
                f"the row of id {id_N[n]} in table {table_N[n]} cannot be {info.weights}: its weights are from {low} to"
                f" {high}, and must be finite and fit; serve it as float32, or erase the row"
            )
        return row_NB

    def _count_errors(self, most: float, squares: float) -> None:
        self._most, self._squares = max(self._most, float(most)), self._squares + float(squares)

    def _cells(self, table_S: np.ndarray, id_S: np.ndarray) -> np.ndarray:
        cells = -(-(len(id_S) * 4 // 3 + 1) // _CELLS) * _CELLS
        cell_C2 = aligned_bytes(cells * 16).view(np.int64).reshape(cells, 2)
        address_1, size_1 = np.array([cell_C2.ctypes.data], np.int64), np.zeros(1, np.int64)
        for begin in range(0, len(id_S), _PUT):
            id_N, table_N = id_S[begin : begin + _PUT], table_S[begin : begin + _PUT].astype(np.int64)
            place_N = np.arange(begin, begin + len(id_N), dtype=np.int64)
            cell_N2 = np.stack([id_N, table_N << PLACE_BITS | place_N + 1], 1)
            cells_put(
                0, 1, address_1, np.array([cells], np.int64), size_1, np.array([0, len(id_N)], np.int64), _NO_ORDER,
                cell_N2, np.empty(len(id_N), np.int64),
            )  # fmt: skip
        if size_1[0] != len(id_S):
            raise CorruptTableError(
                f"snapshot {self._info.name!r} has {len(id_S) - int(size_1[0])} keys twice; run `oneemb check` on it"
            )
        return cell_C2

    def _put(self, byte_X: np.ndarray) -> None:
        """Write whole blocks, and keep what is left for the next."""
        byte_X = np.concatenate([self._rest, byte_X]) if len(self._rest) else byte_X
        whole = len(byte_X) // BLOCK_BYTES * BLOCK_BYTES
        self._rest = byte_X[whole:].copy()
        self._write_blocks(byte_X[:whole])

    def _flush(self) -> None:
        if len(self._rest):
            block = np.zeros(BLOCK_BYTES, np.uint8)
            block[: len(self._rest)] = self._rest
            self._rest = self._rest[:0]
            self._write_blocks(block)

    def _write_blocks(self, byte_X: np.ndarray) -> None:
        if byte_X.ctypes.data % 8:
            byte_X = byte_X.copy()
        sum_B = np.empty(len(byte_X) // BLOCK_BYTES, np.uint32)
        self._threads.run(blocks_sum, len(sum_B), byte_X.view(np.uint64), BLOCK_BYTES // 8, sum_B, share_min=64)
        self._fs.write(self._file, byte_X, self._offset)
        self._offset += len(byte_X)
        self._sums.append(sum_B)
