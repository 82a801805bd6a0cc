"""Looks rows up in a file of rows that nobody changes.  N ids, S rows, C cells, B blocks, D weights.

    serve_rows    place_N[n] = the row of key n; MISSING where there is none; PADDING where the id is the padding
                  out_ND[n] = its weights, zeros where there is no row

Cells are those of `kernels/hash_index.py`, one shard of them. Rows are float32 weights, the bits of narrower ones, or
bytes as `kernels/quantize_rows.py` makes them.

A block of the rows is compared with its checksum when a row of it is first read, and then noted in seen_B. Several
threads may do that at the same time, with the same result.

Invariant: no row is read from a block that has not been compared. A block that is not as it was written ends the share,
and its number is left in damage_1.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.checksum import block_sum
from oneemb.kernels.hash_index import PLACE_BITS, cells_find
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import from_float32, keep_rolled, natural, prefetch_row, to_float32
from oneemb.kernels.jit_lanes import LANES, load_lanes, move_lanes, store_lanes
from oneemb.kernels.quantize_rows import dequantize_row
from oneemb.kernels.threads import Threads

__all__ = ["BLOCK_BYTES", "MISSING", "PADDING", "ServedRows", "check_cells", "serve_rows"]

BLOCK_BYTES = 4096
"""A page: a first touch reads no more of the file than the system does."""

MISSING = -1
PADDING = -2

_BLOCK_WORDS = np.int64(BLOCK_BYTES // 8)
_CELLS = 1 << 12  # cells that are checked in one turn
_AHEAD = 16
_PLACE_BITS = np.int64(PLACE_BITS)
_PLACE_MASK = np.int64((1 << PLACE_BITS) - 1)


@part
def _compare(
    begin: Number, end: Number, place_N: Array, row_bytes: Number, word_X: Array, sum_B: Array, seen_B: Array,
    damage_1: Array,
) -> Number:  # fmt: skip
    """Compare the blocks of these rows that have not been; False if one is not as it was written."""
    for n in range(natural(begin), natural(end)):
        keep_rolled()
        place = place_N[n]
        if place < 0:
            continue
        first, last = place * row_bytes // BLOCK_BYTES, ((place + 1) * row_bytes - 1) // BLOCK_BYTES
        for b in range(first, last + 1):
            if not seen_B[natural(b)]:
                if block_sum(word_X, b, _BLOCK_WORDS) != sum_B[natural(b)]:
                    damage_1[0] = b
                    return False
                seen_B[natural(b)] = True
    return True


@part
def _located(begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple) -> Number:
    """Find the rows of keys and compare their blocks; False if one is not as it was written."""
    address_1, cells_1, table_N, id_N, padded, padding_id = keys
    row_bytes, word_X, sum_B, seen_B, damage_1 = rows
    cells_find(begin, end, address_1, cells_1, table_N, id_N, place_N)
    if padded:
        for n in range(natural(begin), natural(end)):
            if id_N[n] == padding_id:
                place_N[n] = PADDING
    return _compare(begin, end, place_N, row_bytes, word_X, sum_B, seen_B, damage_1)


@part
def _place_of(place_N: Array, n: Number, end: Number, row_SX: Array) -> Number:
    """The row of key n; also prefetches that of a later one."""
    prefetch_row(row_SX, max(place_N[natural(min(n + _AHEAD, end - 1))], 0), 0, row_SX.shape[1])
    return place_N[natural(n)]


@part
def _clear(out_ND: Array, n: Number) -> None:
    for d in range(out_ND.shape[1]):
        out_ND[n, d] = 0


@part
def _read_same(begin: Number, end: Number, row_SX: Array, place_N: Array, out_ND: Array) -> None:
    dim = out_ND.shape[1]
    for n in range(begin, end):
        keep_rolled()
        place = _place_of(place_N, n, end, row_SX)
        if place < 0:
            _clear(out_ND, n)
        else:
            for d in range(0, dim - LANES + 1, LANES):
                keep_rolled()
                move_lanes(out_ND, n, d, row_SX, place, d)
            for d in range(dim - dim % LANES, dim):
                out_ND[n, d] = row_SX[place, d]


@part
def _read_other(begin: Number, end: Number, row_SX: Array, place_N: Array, out_ND: Array) -> None:
    dim = out_ND.shape[1]
    for n in range(begin, end):
        keep_rolled()
        place = _place_of(place_N, n, end, row_SX)
        if place < 0:
            _clear(out_ND, n)
        else:
            for d in range(0, dim - LANES + 1, LANES):
                keep_rolled()
                store_lanes(out_ND, n, d, load_lanes(row_SX, place, d))
            for d in range(dim - dim % LANES, dim):
                out_ND[n, d] = from_float32(to_float32(row_SX[place, d]), out_ND[n, d])


@part
def _read_quantized(begin: Number, end: Number, row_SX: Array, place_N: Array, bits: Number, out_ND: Array) -> None:
    for n in range(begin, end):
        keep_rolled()
        place = _place_of(place_N, n, end, row_SX)
        if place < 0:
            _clear(out_ND, n)
        else:
            dequantize_row(row_SX, place, bits, out_ND, n)


@cpu
def _serve_same_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple, row_SX: Array, out_ND: Array
) -> None:
    if _located(begin, end, keys, place_N, rows):
        _read_same(begin, end, row_SX, place_N, out_ND)


@cpu
def _serve_other_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple, row_SX: Array, out_ND: Array
) -> None:
    if _located(begin, end, keys, place_N, rows):
        _read_other(begin, end, row_SX, place_N, out_ND)


@cpu
def _serve_quantized_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple, row_SX: Array, bits: Number, out_ND: Array
) -> None:
    if _located(begin, end, keys, place_N, rows):
        _read_quantized(begin, end, row_SX, place_N, bits, out_ND)


@dataclass(frozen=True)
class ServedRows:
    """The arrays of a file of rows. Whoever makes one has seen that cells name rows that are there, and that one cell
    or more is empty.

    Args:
        cell_C2: int64 [C, 2], aligned to a line of the cache.
        row_SX: [S, X], X >= D: float32, uint16 (float16), int16 (bfloat16), or uint8 of quantized rows.
        bits: of a quantized weight, 8 or 4; 0 = the rows are not quantized.
        word_X: the rows as uint64, up to the end of the last block.
        sum_B: uint32, the checksum of each block; empty where whoever made the arrays has compared them all.
        seen_B: bool, which have been compared.
    """

    cell_C2: np.ndarray
    row_SX: np.ndarray
    bits: int
    word_X: np.ndarray
    sum_B: np.ndarray
    seen_B: np.ndarray
    address_1: np.ndarray = field(init=False)
    cells_1: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address_1", np.array([self.cell_C2.ctypes.data], np.int64))
        object.__setattr__(self, "cells_1", np.array([len(self.cell_C2)], np.int64))

    @classmethod
    def unchecked(cls, cell_C2: np.ndarray, row_SX: np.ndarray, bits: int) -> Self:
        """Of arrays that were compared before."""
        return cls(cell_C2, row_SX, bits, np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.bool_))

    def arguments(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None
    ) -> tuple[tuple, np.ndarray, tuple, np.ndarray]:
        """What loops take: keys, room for places, rows, and where the number of a damaged block is left."""
        damage_1 = np.full(1, -1)
        keys = (self.address_1, self.cells_1, table_N, id_N, padding_id is not None, padding_id or 0)
        row_bytes = self.row_SX.strides[0] if len(self.sum_B) else 0  # A row without bytes lies in no block.
        rows = (row_bytes, self.word_X, self.sum_B, self.seen_B, damage_1)
        return keys, np.empty(len(id_N), np.int64), rows, damage_1


def serve_rows(
    served: ServedRows, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, out_ND: np.ndarray, *,
    threads: Threads,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Write the weights of each key to `out_ND`, zeros where it has no row.

    Args:
        table_N, id_N: int32, and int32 or int64.
        padding_id: an id that has no row; None = there is none.
        out_ND: float32, or bits of the rows' own format; of quantized rows float32.

    Returns:
        place_N int64, the row of each key, MISSING or PADDING where there is none; and the number of a block that is
        not as it was written, -1 if there is none: else places and weights mean nothing.
    """
    keys, place_N, rows, damage_1 = served.arguments(table_N, id_N, padding_id)
    if served.bits:
        threads.run(_serve_quantized_cpu, len(id_N), keys, place_N, rows, served.row_SX, served.bits, out_ND)
    else:
        same = served.row_SX.dtype == out_ND.dtype
        loop = _serve_same_cpu if same else _serve_other_cpu
        threads.run(loop, len(id_N), keys, place_N, rows, served.row_SX, out_ND)
    return place_N, int(damage_1[0])


@cpu
def _check_cells_cpu(begin: Number, end: Number, cell_C2: Array, rows: Number, tables: Number, found_K2: Array) -> None:
    for k in range(begin, end):
        taken, wrong = 0, np.int64(-1)
        for c in range(natural(k * _CELLS), natural(min((k + 1) * _CELLS, len(cell_C2)))):
            word = cell_C2[c, 1]
            if word != 0:
                taken += 1
                place = (word & _PLACE_MASK) - 1
                if (place < 0) | (place >= rows) | (word < 0) | ((word >> _PLACE_BITS) >= tables):
                    wrong = np.int64(c)
        found_K2[k, 0], found_K2[k, 1] = taken, wrong


def check_cells(cell_C2: np.ndarray, rows: int, tables: int, *, threads: Threads) -> tuple[int, int]:
    """How many cells are taken, and one that names no row from 0 to `rows` - 1 or no table below `tables`; -1 = none
    does."""
    found_K2 = np.empty((-(-len(cell_C2) // _CELLS), 2), np.int64)
    threads.run(_check_cells_cpu, len(found_K2), cell_C2, rows, tables, found_K2, share_min=16)
    return int(found_K2[:, 0].sum()), int(found_K2[:, 1].max(initial=-1))
