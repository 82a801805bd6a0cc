"""A read-only file of rows, mapped into memory. FORMAT.md describes its bytes.

Invariants:
- no number of the file is used before its checksum and its range have been checked, and no row is returned before its
  block has been compared with its checksum;
- a process allocates one byte for each block; everything else is pages of the file, which processes share.
"""

import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oneemb.kernels.checksum import blocks_sum, xxh64
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.perfect_hash import FIRST_SLOT, SALT_MAX, parts_and_buckets, regions
from oneemb.kernels.quantize_rows import quantized_bytes
from oneemb.kernels.serve_rows import (
    BLOCK_BYTES,
    ServedRows,
    count_rows,
    keys_of_slots,
    pool_rows,
    record_bytes,
    serve_rows,
)
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import AnyPath, absolute_path, storage_error
from oneemb.storage.rows.row_format import BITS, WEIGHTS
from oneemb.storage.table.file_header import HEADER_BYTES, read_header

SERVED_MAGIC = b"oneembSV"
QUANTIZED = {"int8": 8, "int4": 4}
"""{type of quantized weights: bits of a weight}."""

_SUM = struct.Struct("<Q")
_SLOTS_MAX = 1 << 48
MANIFEST_MAX = 1 << 24
"""Largest size of a manifest, in bytes. While JSON is read it takes about thirty times as much memory."""

_CHECKED = 1 << 14  # blocks that `verify` compares between two calls of `progress`


@dataclass(frozen=True)
class ServedInfo:
    """Manifest of a file; FORMAT.md explains each field."""

    name: str
    identity: str
    sequence: int
    trained: str
    weights: str
    dim: int
    row_bytes: int
    rows: int
    salt: int
    num_tables: int
    tables: tuple[int, ...]
    rows_of_tables: tuple[int, ...]
    slots_of_tables: tuple[int, ...]
    embedding: dict[str, Any]
    error_max: float
    error_rms: float
    sums: str
    since: str = ""
    max_rows: int = 0

    @property
    def all_tables(self) -> int:
        """Number of tables, those of keys without a row included."""
        return self.num_tables * (2 if self.since else 1)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.row_bytes)

    @property
    def slots(self) -> int:
        """Number of slots of all tables."""
        parts = parts_and_buckets(np.array(self.rows_of_tables, np.int64))[0].tolist()
        return sum(parts * slots for parts, slots in zip(parts, self.slots_of_tables, strict=True))

    @property
    def buckets(self) -> int:
        """Number of buckets of all tables, at least 1."""
        return max(1, int(parts_and_buckets(np.array(self.rows_of_tables, np.int64))[1].sum()))

    @property
    def blocks(self) -> int:
        """Number of blocks of records; a file without slots has one record of zeros."""
        return -(-max(1, self.slots) * self.record_bytes // BLOCK_BYTES)

    @property
    def pilots_begin(self) -> int:
        return BLOCK_BYTES * (1 + self.blocks)

    @property
    def sums_begin(self) -> int:
        return self.pilots_begin + -(-2 * self.buckets // 8) * 8

    @property
    def manifest_begin(self) -> int:
        return self.sums_begin + -(-4 * self.blocks // 8) * 8

    def packed(self) -> bytes:
        """The manifest and its checksum."""
        fields = asdict(self)
        if not self.since:
            del fields["since"]
        if not self.max_rows:
            del fields["max_rows"]
        body = json.dumps(fields).encode()
        body += b" " * (-len(body) % 8)
        return body + _SUM.pack(xxh64(body))


def row_bytes_of(weights: str, dim: int) -> int:
    """Bytes of a row, a multiple of 4."""
    size = quantized_bytes(dim, QUANTIZED[weights]) if weights in QUANTIZED else dim * np.dtype(BITS[weights]).itemsize
    return -(-size // 4) * 4


def with_gone(tables: Sequence[int], num_tables: int) -> list[int]:
    """Tables of a layer: these tables, then for each of them the table of its keys that have no row any more."""
    return [*tables, *(num_tables + table for table in tables)]


def array_dtype(weights: str) -> np.dtype:
    """Dtype of arrays of rows: float32 weights, the bits of narrower weights, or bytes."""
    return np.dtype(np.uint8 if weights in QUANTIZED else BITS[weights])


def is_served_file(path: AnyPath) -> bool:
    """Whether the path is a file that begins with the magic of a served file."""
    try:
        with open(absolute_path(path), "rb") as file:
            return file.read(len(SERVED_MAGIC)) == SERVED_MAGIC
    except OSError:
        return False


class ServedFile:
    """An open file of rows, or a layer. Its memory is unmapped when no array refers to it any more.

    Args:
        memory_of: maps the open file, given its number, its manifest and its size, and returns the mapped bytes,
            uint8; None = at any address.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptTableError: the file is damaged; the message names file and offset.
        FormatVersionError: another release wrote the file in a format that this one cannot read.
    """

    def __init__(
        self, path: AnyPath, *, threads: Threads, memory_of: Callable[[int, ServedInfo, int], np.ndarray] | None = None
    ):
        self.path = absolute_path(path)
        self._threads = threads
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, "open", self.path) from error
        try:
            size = os.fstat(file).st_size
            self.info = self._read_manifest(file, size)
            byte_X = (memory_of or _mapped)(file, self.info, size)
        except OSError as error:
            raise storage_error(error, "read", self.path) from error
        finally:
            os.close(file)
        self.rows = self._checked(byte_X)

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
            raise self._damage(f"by its fields the manifest must begin at {info.manifest_begin}, not {begin}", begin)
        return info

    def _checked(self, byte_X: np.ndarray) -> ServedRows:
        info = self.info
        if byte_X[HEADER_BYTES:BLOCK_BYTES].any():
            raise self._damage("the bytes between the header and the records are not zero", HEADER_BYTES)
        if f"{xxh64(byte_X[info.pilots_begin : info.manifest_begin]):016x}" != info.sums:
            raise self._damage("the pilots or the checksums of blocks are damaged", info.pilots_begin)
        # One row for each table, though the file may serve few of many: memory that is never written is not allocated.
        region_T6 = np.zeros((info.all_tables, 6), np.uint64)
        by_table = sorted(zip(info.tables, info.rows_of_tables, info.slots_of_tables, strict=True))
        table_C, count_C, slots_C = np.array(by_table, np.int64).T.copy()
        region_T6[table_C] = regions(table_C, count_C, slots_C, info.salt, threads=self._threads)
        record_X = byte_X[BLOCK_BYTES : info.pilots_begin]
        size = info.record_bytes
        record_SW = record_X[: max(1, info.slots) * size].view(np.int64).reshape(-1, size // 8)
        pilot_B = byte_X[info.pilots_begin : info.sums_begin].view(np.uint16)[: info.buckets]
        sum_B = byte_X[info.sums_begin : info.manifest_begin].view(np.uint32)[: info.blocks]
        return ServedRows(
            region_T6, pilot_B, record_SW, array_dtype(info.weights), QUANTIZED.get(info.weights, 0), sum_B,
            np.zeros(info.blocks, np.bool_), record_X.view(np.uint64),
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
        """Write the weights of keys to `out_ND`, zeros for keys without a row, and return place_N; see `serve_rows` for
        the arguments. Raises CorruptTableError if a row is in a damaged block."""
        place_N, block = serve_rows(self.rows, table_N, id_N, padding_id, out_ND, threads=threads)
        if block >= 0:
            raise self.damaged_block(block)
        return place_N

    def pool(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, bags: tuple, out_PX: np.ndarray, *,
        threads: Threads,
    ) -> tuple[np.ndarray, bool]:  # fmt: skip
        """Write sums or means of bags to `out_PX`, and return (place_N, whether any key has no row); see `pool_rows`
        for the arguments. Raises CorruptTableError if a row is in a damaged block."""
        place_N, has_missing, block = pool_rows(self.rows, table_N, id_N, padding_id, bags, out_PX, threads=threads)
        if block >= 0:
            raise self.damaged_block(block)
        return place_N, has_missing

    def damaged_block(self, block: int) -> CorruptTableError:
        """Error of a block of rows that differs from its checksum."""
        return self._damage("a block of rows is damaged", BLOCK_BYTES * (1 + block))

    def keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables int32, ids int64 and places int64 of all rows. The caller must have called `verify`."""
        tables = sorted(table for table, count in self._counts() if count) or [self.info.tables[0]]
        found = [keys_of_slots(self.rows, table, threads=self._threads) for table in tables]
        table_S = np.repeat(np.array(tables, np.int32), [len(id_N) for id_N, _ in found])
        return table_S, np.concatenate([id_N for id_N, _ in found]), np.concatenate([place_N for _, place_N in found])

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Yield each table and its number of rows."""
        return zip(self.info.tables, self.info.rows_of_tables, strict=True)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare all blocks with their checksums, and check that lookups find every row. Raises CorruptTableError
        otherwise. `progress` is called with (bytes done, bytes)."""
        rows, info = self.rows, self.info
        for begin in range(0, info.blocks, _CHECKED):
            end = min(begin + _CHECKED, info.blocks)
            word_X = rows.word_X[begin * BLOCK_BYTES // 8 : end * BLOCK_BYTES // 8]
            wrong = self._wrong_block(word_X.view(np.uint8), rows.sum_B[begin:end])
            if wrong >= 0:
                raise self.damaged_block(begin + wrong)
            rows.seen_B[begin:end] = True
            if progress is not None:
                progress(end * BLOCK_BYTES, info.blocks * BLOCK_BYTES)
        for table, count in self._counts():
            found = count_rows(rows, table, threads=self._threads)
            if found != count:
                first = int(rows.region_T6[table, FIRST_SLOT]) * info.record_bytes
                raise self._damage(
                    f"lookups find {found} of {count} rows of table {table} in its slots", BLOCK_BYTES + first
                )

    def _damage(self, what: str, offset: int) -> CorruptTableError:
        return CorruptTableError(
            f"{self.path}: {what}, at offset {offset}; remove the file and make it again from its snapshot"
        )


def _mapped(file: int, info: ServedInfo, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)


def _info_of(found: Any) -> ServedInfo:
    """Manifest from its JSON. Raises ValueError, TypeError or KeyError if a field is missing, unknown or out of
    range."""
    info = ServedInfo(**found)

    def need(right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"{what} is out of range")

    def number(value: object, least: int, most: int) -> bool:
        return type(value) is int and least <= value <= most

    need(isinstance(info.name, str) and isinstance(info.identity, str), "name")
    need(isinstance(info.sums, str) and isinstance(info.embedding, dict), "sums")
    need(isinstance(info.since, str) and ("since" not in found or info.since != ""), "since")
    need(number(info.max_rows, 1 if "max_rows" in found else 0, _SLOTS_MAX), "max_rows")
    need(number(info.sequence, 0, 1 << 62), "sequence")
    need(info.trained in WEIGHTS and info.weights in (*WEIGHTS, *QUANTIZED), "weights")
    need(number(info.dim, 1, 1 << 28), "dim")
    row_bytes = row_bytes_of(info.weights, info.dim)
    need(number(info.row_bytes, row_bytes, row_bytes), "row_bytes")
    need(number(info.rows, 0, _SLOTS_MAX), "rows")
    need(number(info.salt, 0, SALT_MAX), "salt")
    need(number(info.num_tables, 1, TABLE_MAX + 1), "num_tables")
    tables, rows_of_tables = list(info.tables), list(info.rows_of_tables)
    need(all(number(t, 0, info.all_tables - 1) for t in tables) and len(set(tables)) == len(tables) > 0, "tables")
    need(not info.since or tables == with_gone(tables[: len(tables) // 2], info.num_tables), "tables")
    need(len(rows_of_tables) == len(tables) and all(number(n, 0, info.rows) for n in rows_of_tables), "rows_of_tables")
    need(sum(rows_of_tables) == info.rows, "rows_of_tables")
    slots = list(info.slots_of_tables)
    need(len(slots) == len(tables) and all(number(n, 0, _SLOTS_MAX) for n in slots), "slots_of_tables")
    parts = parts_and_buckets(np.array(rows_of_tables, np.int64))[0].tolist()
    each = list(zip(rows_of_tables, parts, slots, strict=True))
    need(all(p * s >= n and (n > 0 or s == 0) for n, p, s in each), "slots_of_tables")
    need(sum(p * s for _, p, s in each) <= _SLOTS_MAX, "slots_of_tables")
    for error in (info.error_max, info.error_rms):
        need(type(error) in (int, float) and 0 <= error <= sys.float_info.max, "error")
    lists = {"tables": tuple(tables), "rows_of_tables": tuple(rows_of_tables), "slots_of_tables": tuple(slots)}
    return ServedInfo(**{**found, **lists})
