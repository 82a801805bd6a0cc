"""A file of rows that is only read, mapped into memory. FORMAT.md has the bytes.

Invariants:
- no number of the file is used before it has been compared with its checksum and its range, and no row is given out
  before its block has been compared;
- memory of a process does not grow with the rows, but for one byte a block: the file's pages are shared.
"""

import json
import mmap
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oneemb.kernels.checksum import blocks_sum, xxh64
from oneemb.kernels.hash_index import PLACE_BITS, TABLE_MAX, cells_find
from oneemb.kernels.quantize_rows import quantized_bytes
from oneemb.kernels.serve_rows import BLOCK_BYTES, ServedRows, check_cells, find_rows, keys_of_cells, serve_rows
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import AnyPath, absolute_path, storage_error
from oneemb.storage.row_format import BITS, WEIGHTS
from oneemb.storage.table.file_header import HEADER_BYTES, read_header

__all__ = ["MANIFEST_MAX", "QUANTIZED", "SERVED_MAGIC", "ServedFile", "ServedInfo", "is_served_file", "row_bytes_of"]

SERVED_MAGIC = b"oneembSV"
QUANTIZED = {"int8": 8, "int4": 4}
"""Bits of a weight."""

_SUM = struct.Struct("<Q")
_CELL_BYTES = 16
MANIFEST_MAX = 1 << 24
"""Bytes of a manifest: JSON takes some thirty times as much memory while it is read."""

_CHECKED = 1 << 14  # blocks that are compared before progress is told


@dataclass(frozen=True)
class ServedInfo:
    """What a file holds; FORMAT.md says what each of these is."""

    name: str
    identity: str
    sequence: int
    trained: str
    weights: str
    dim: int
    row_bytes: int
    rows: int
    cells: int
    num_tables: int
    tables: tuple[int, ...]
    rows_of_tables: tuple[int, ...]
    embedding: dict[str, Any]
    error_max: float
    error_rms: float
    sums: str

    @property
    def row_blocks(self) -> int:
        return -(-self.rows * self.row_bytes // BLOCK_BYTES)

    @property
    def cell_blocks(self) -> int:
        return self.cells * _CELL_BYTES // BLOCK_BYTES

    @property
    def sums_begin(self) -> int:
        return BLOCK_BYTES * (1 + self.row_blocks + self.cell_blocks)

    @property
    def manifest_begin(self) -> int:
        return self.sums_begin + -(-4 * (self.row_blocks + self.cell_blocks) // 8) * 8

    def packed(self) -> bytes:
        """The manifest and its checksum."""
        body = json.dumps(asdict(self)).encode()
        body += b" " * (-len(body) % 8)
        return body + _SUM.pack(xxh64(body))


def row_bytes_of(weights: str, dim: int) -> int:
    """Bytes of a row, a multiple of 4."""
    size = quantized_bytes(dim, QUANTIZED[weights]) if weights in QUANTIZED else dim * np.dtype(BITS[weights]).itemsize
    return -(-size // 4) * 4


def is_served_file(path: AnyPath) -> bool:
    """Whether a file is there that begins as one of these does."""
    try:
        with open(absolute_path(path), "rb") as file:
            return file.read(len(SERVED_MAGIC)) == SERVED_MAGIC
    except OSError:
        return False


class ServedFile:
    """An open file. Its memory is unmapped when nobody refers to it any more.

    Args:
        path: of the file.
        threads: compare cells.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptTableError: it is not what was written; the message names file and offset.
        FormatVersionError: another release wrote it.
    """

    def __init__(self, path: AnyPath, *, threads: Threads):
        self.path = absolute_path(path)
        self._threads = threads
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, "open", self.path) from error
        try:
            self.info = self._read_manifest(file, os.fstat(file).st_size)
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise storage_error(error, "read", self.path) from error
        finally:
            os.close(file)
        self.rows = self._checked(np.frombuffer(memory, np.uint8))

    def _read_manifest(self, file: int, size: int) -> ServedInfo:
        begin, length, whole, zero = read_header(os.pread(file, HEADER_BYTES, 0), SERVED_MAGIC, self.path)
        if whole != size or zero:
            raise self._damage(f"the file must have {whole} bytes, it has {size}", min(whole, size))
        if not (BLOCK_BYTES <= begin and 8 <= length <= MANIFEST_MAX and begin + length + 8 == size):
            raise self._damage(f"a manifest of {length} bytes at {begin} does not end the file of {size}", 40)
        bytes_ = os.pread(file, length + 8, begin)
        if len(bytes_) < length + 8 or length % 8:
            raise self._damage("the manifest is cut short", begin)
        (expected,) = _SUM.unpack(bytes_[length:])
        if xxh64(bytes_[:length]) != expected:
            raise self._damage("the manifest is damaged", begin)
        try:
            info = _info_of(json.loads(bytes_[:length]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damage(f"the manifest is wrong: {str(error)[:200]}", begin) from error
        if info.manifest_begin != begin:
            raise self._damage(f"what the manifest says takes {info.manifest_begin} bytes, not {begin}", begin)
        return info

    def _checked(self, byte_X: np.ndarray) -> ServedRows:
        info = self.info
        blocks = info.row_blocks + info.cell_blocks
        sums = byte_X[info.sums_begin : info.manifest_begin]
        if f"{xxh64(sums):016x}" != info.sums:
            raise self._damage("the checksums of blocks are damaged", info.sums_begin)
        sum_B = sums[: 4 * blocks].view(np.uint32)
        cells_begin = BLOCK_BYTES * (1 + info.row_blocks)
        cell_bytes = byte_X[cells_begin : info.sums_begin]
        wrong = self._wrong_block(cell_bytes, sum_B[info.row_blocks :])
        if wrong >= 0:
            raise self._damage("a block of cells is damaged", cells_begin + wrong * BLOCK_BYTES)
        cell_C2 = cell_bytes.view(np.int64).reshape(-1, 2)
        taken, cell = check_cells(cell_C2, info.rows, info.num_tables, threads=self._threads)
        if cell >= 0 or taken != info.rows:
            raise self._damage(
                f"cells must name {info.rows} rows, {taken} are taken, and cell {cell} names none",
                cells_begin + max(cell, 0) * _CELL_BYTES,
            )
        row_X = byte_X[BLOCK_BYTES:cells_begin]
        row_SX = row_X[: info.rows * info.row_bytes].reshape(info.rows, info.row_bytes)
        if info.weights not in QUANTIZED:
            row_SX = row_SX.view(BITS[info.weights])
        return ServedRows(
            cell_C2, row_SX, QUANTIZED.get(info.weights, 0), row_X.view(np.uint64), sum_B[: info.row_blocks],
            np.zeros(info.row_blocks, np.bool_),
        )  # fmt: skip

    def _wrong_block(self, byte_X: np.ndarray, sum_B: np.ndarray) -> int:
        found_B = np.empty(len(sum_B), np.uint32)
        self._threads.run(
            blocks_sum, len(sum_B), byte_X.view(np.uint64), BLOCK_BYTES // 8, found_B, share_min=64
        )  # fmt: skip
        wrong = np.flatnonzero(found_B != sum_B)
        return int(wrong[0]) if len(wrong) else -1

    def read(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, out_ND: np.ndarray, *, threads: Threads
    ) -> np.ndarray:
        """Write the weights of keys to `out_ND`, zeros where there is no row, and return place_N; see `serve_rows`.

        Raises:
            CorruptTableError: a row that is needed lies in a damaged block.
        """
        place_N, block = serve_rows(self.rows, table_N, id_N, padding_id, out_ND, threads=threads)
        self._check_block(block)
        return place_N

    def find(self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, *, threads: Threads) -> np.ndarray:
        """place_N of keys, for `pool_rows`; see `find_rows`.

        Raises:
            CorruptTableError: a row that is needed lies in a damaged block.
        """
        place_N, block = find_rows(self.rows, table_N, id_N, padding_id, threads=threads)
        self._check_block(block)
        return place_N

    def _check_block(self, block: int) -> None:
        if block >= 0:
            raise self._damage("a block of rows is damaged", BLOCK_BYTES * (1 + block))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare all blocks of rows, and find every key where lookups look for it.

        Raises:
            CorruptTableError: something is not as it was written.
        """
        rows, blocks = self.rows, self.info.row_blocks
        for begin in range(0, blocks, _CHECKED):
            end = min(begin + _CHECKED, blocks)
            word_X = rows.word_X[begin * BLOCK_BYTES // 8 : end * BLOCK_BYTES // 8]
            wrong = self._wrong_block(word_X.view(np.uint8), rows.sum_B[begin:end])
            if wrong >= 0:
                self._check_block(begin + wrong)
            rows.seen_B[begin:end] = True
            if progress is not None:
                progress(end * BLOCK_BYTES, blocks * BLOCK_BYTES)
        begin = BLOCK_BYTES * (1 + blocks)
        address_1, cells_1 = np.array([rows.address]), np.array([self.info.cells])
        for first in range(0, self.info.cells, _CHECKED * 16):
            table_K, id_K, place_K = keys_of_cells(rows.cell_C2[first : first + _CHECKED * 16])
            found_K = np.empty(len(id_K), np.int64)
            self._threads.run(cells_find, len(id_K), address_1, cells_1, table_K, id_K, found_K)
            if (found_K != place_K).any():
                raise self._damage("a key is not where lookups find it", begin + first * _CELL_BYTES)

    def _damage(self, what: str, offset: int) -> CorruptTableError:
        return CorruptTableError(
            f"{self.path}: {what}, at offset {offset}; remove the file and make it anew from its snapshot"
        )


def _info_of(found: Any) -> ServedInfo:
    """What a manifest says, every number in its range; ValueError, TypeError or KeyError if it is wrong."""
    info = ServedInfo(**found)

    def need(right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"{what} is out of range")

    def number(value: object, least: int, most: int) -> bool:
        return type(value) is int and least <= value <= most

    need(isinstance(info.name, str) and isinstance(info.identity, str), "name")
    need(isinstance(info.sums, str) and isinstance(info.embedding, dict), "sums")
    need(number(info.sequence, 0, 1 << 62), "sequence")
    need(info.trained in WEIGHTS and info.weights in (*WEIGHTS, *QUANTIZED), "weights")
    need(number(info.dim, 1, 1 << 28) and info.row_bytes == row_bytes_of(info.weights, info.dim), "dim")
    need(number(info.rows, 0, (1 << PLACE_BITS) - 2), "rows")
    need(number(info.cells, 1, 1 << 42) and info.cells % (BLOCK_BYTES // _CELL_BYTES) == 0, "cells")
    need(info.cells > info.rows, "cells")
    need(number(info.num_tables, 1, TABLE_MAX + 1), "num_tables")
    tables, rows_of_tables = list(info.tables), list(info.rows_of_tables)
    need(all(number(t, 0, info.num_tables - 1) for t in tables) and len(set(tables)) == len(tables) > 0, "tables")
    need(len(rows_of_tables) == len(tables) and all(number(n, 0, info.rows) for n in rows_of_tables), "rows_of_tables")
    need(sum(rows_of_tables) == info.rows, "rows_of_tables")
    for error in (info.error_max, info.error_rms):
        need(type(error) in (int, float) and 0 <= error <= sys.float_info.max, "error")
    return ServedInfo(**{**found, "tables": tuple(tables), "rows_of_tables": tuple(rows_of_tables)})
