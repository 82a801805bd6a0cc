"""Looks rows up in a file of rows that nobody changes.  N ids, S rows, C cells, B blocks, D weights.

    find_rows     place_N[n] = the row of key n; MISSING where there is none; PADDING where the id is the padding
    serve_rows    the same, and out_ND[n] = its weights, zeros where there is no row
    pool_rows     out_PD[p] = the sum of the weights of bag p, whose rows are pooled while they are read

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
from oneemb.kernels.hash_index import PLACE_BITS, SHARD_ROOM, shard_find
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import as_stored, from_float32, keep_rolled, natural, prefetch_row, to_float32
from oneemb.kernels.jit_lanes import (
    LANES,
    copy_lanes,
    float_within,
    half_within,
    load_bytes,
    load_lanes,
    load_nibbles,
    same_lanes,
    store_lanes,
)
from oneemb.kernels.quantize_rows import dequantize_row, dequantized
from oneemb.kernels.threads import Threads

__all__ = [
    "BLOCK_BYTES", "MISSING", "OTHER", "PADDING", "ServedRows", "check_cells", "find_rows", "keys_of_cells",
    "pool_rows", "serve_rows",
]  # fmt: skip

BLOCK_BYTES = 4096
"""A page: a first touch reads no more of the file than the system does."""

MISSING = -1
PADDING = -2
OTHER = -3

_BLOCK_WORDS = np.int64(BLOCK_BYTES // 8)
_CHUNK = 64  # keys that are found before their rows are read
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
def _located(begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple, home_2K: Array) -> Number:
    """Find the rows of keys and compare their blocks; False if one is not as it was written."""
    address, cells, table_N, id_N, padded, padding_id = keys
    row_bytes, word_X, sum_B, seen_B, damage_1 = rows
    shard_find(begin, end, address, cells, table_N, id_N, place_N, home_2K)
    if padded:
        for n in range(natural(begin), natural(end)):
            if id_N[n] == padding_id:
                place_N[n] = PADDING
    return _compare(begin, end, place_N, row_bytes, word_X, sum_B, seen_B, damage_1)


# Of the two arrays of rows one is None. Each is asked for by itself: the compiler drops what would read the other one.


@part
def _prefetch(weight_SX: Array, byte_SX: Array, place: Number) -> None:
    if weight_SX is not None:
        prefetch_row(weight_SX, max(place, 0), 0, weight_SX.shape[1])
    if byte_SX is not None:
        prefetch_row(byte_SX, max(place, 0), 0, byte_SX.shape[1])


@part
def _read_row(weight_SX: Array, byte_SX: Array, bits: Number, place: Number, out_ND: Array, n: Number) -> None:
    dim = out_ND.shape[1]
    if place < 0:
        for d in range(dim):
            out_ND[n, d] = 0
        return
    if weight_SX is not None:
        for d in range(0, dim - LANES + 1, LANES):
            keep_rolled()
            copy_lanes(out_ND, n, d, weight_SX, place, d)
        for d in range(dim - dim % LANES, dim):
            out_ND[n, d] = as_stored(weight_SX[place, d], out_ND[n, d])
    if byte_SX is not None:
        dequantize_row(byte_SX, place, bits, out_ND, n)


@cpu
def _serve_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple, weight_SX: Array, byte_SX: Array,
    bits: Number, out_ND: Array,
) -> None:  # fmt: skip
    home_2K = np.empty(SHARD_ROOM, np.int64)
    # The rows of a chunk come from memory while the keys of the next one are found.
    for first in range(begin - _CHUNK, end, _CHUNK):
        last = min(first + _CHUNK, end)
        later = min(last + _CHUNK, end)
        if not _located(last, later, keys, place_N, rows, home_2K):
            return
        for n in range(natural(last), natural(later)):
            keep_rolled()
            _prefetch(weight_SX, byte_SX, place_N[n])
        for n in range(max(first, begin), last):
            keep_rolled()
            _read_row(weight_SX, byte_SX, bits, place_N[natural(n)], out_ND, n)


@cpu
def _find_cpu(begin: Number, end: Number, keys: tuple, place_N: Array, rows: tuple) -> None:
    _located(begin, end, keys, place_N, rows, np.empty(SHARD_ROOM, np.int64))


@cpu
def _pool_cpu(
    begin: Number, end: Number, place_N: Array, weight_SX: Array, byte_SX: Array, bits: Number, other_MX: Array,
    offset_P1: Array, scale_N: Array, is_mean: Number, out_PX: Array,
) -> None:  # fmt: skip
    dim, final = out_PX.shape[1], len(place_N) - 1
    for p in range(begin, end):
        first, last = natural(offset_P1[p]), natural(offset_P1[p + 1])
        factor, count = np.float32(1), 0
        for n in range(first, last):
            keep_rolled()
            _prefetch(weight_SX, byte_SX, place_N[natural(min(np.int64(n) + _AHEAD, final))])
            count += place_N[n] != PADDING
        if is_mean:
            factor = np.float32(1) / np.float32(max(count, 1))
        size, half = dim, (dim + 1) >> 1
        for d in range(0, dim - LANES + 1, LANES):
            sum = same_lanes(np.float32(0))
            for n in range(first, last):
                keep_rolled()
                place = place_N[n]
                scale = factor if scale_N is None else scale_N[n]
                if place <= OTHER:
                    sum = sum + load_lanes(other_MX, OTHER - place, d) * scale
                if place >= 0:
                    if weight_SX is not None:
                        sum = sum + load_lanes(weight_SX, place, d) * scale
                    if byte_SX is not None:
                        if bits == 8:
                            by, low = float_within(byte_SX, place, size), float_within(byte_SX, place, size + 4)
                            sum = sum + (load_bytes(byte_SX, place, d) * by + low) * scale
                        else:
                            by, low = half_within(byte_SX, place, half), half_within(byte_SX, place, half + 2)
                            sum = sum + (load_nibbles(byte_SX, place, d >> 1) * by + low) * scale
            store_lanes(out_PX, p, d, sum)
        for d in range(dim - dim % LANES, dim):
            number = np.float32(0)
            for n in range(first, last):
                keep_rolled()
                place = place_N[n]
                scale = factor if scale_N is None else scale_N[n]
                if place <= OTHER:
                    number += to_float32(other_MX[OTHER - place, d]) * scale
                if place >= 0:
                    if weight_SX is not None:
                        number += to_float32(weight_SX[place, d]) * scale
                    if byte_SX is not None:
                        number += dequantized(byte_SX, place, d, bits, dim) * scale
            out_PX[p, d] = from_float32(number, out_PX[p, d])


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
    address: int = field(init=False)
    row_bytes: int = field(init=False)
    arrays: tuple[np.ndarray | None, np.ndarray | None, int] = field(init=False)
    """weight_SX or byte_SX, the other one None, and `bits`."""

    def __post_init__(self) -> None:
        # Once, since reading them takes as long as a short lookup.
        object.__setattr__(self, "address", self.cell_C2.ctypes.data)
        object.__setattr__(self, "row_bytes", self.row_SX.strides[0] if len(self.sum_B) else 0)  # 0: in no block
        arrays = (None, self.row_SX, self.bits) if self.bits else (self.row_SX, None, 0)
        object.__setattr__(self, "arrays", arrays)

    @classmethod
    def unchecked(cls, cell_C2: np.ndarray, row_SX: np.ndarray, bits: int) -> Self:
        """Of arrays that were compared before."""
        return cls(cell_C2, row_SX, bits, np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.bool_))

    def arguments(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None
    ) -> tuple[tuple, np.ndarray, tuple, np.ndarray]:
        """What loops take: keys, room for places, rows, and where the number of a damaged block is left."""
        damage_1 = np.empty(1, np.int64)
        damage_1[0] = -1
        keys = (self.address, len(self.cell_C2), table_N, id_N, padding_id is not None, padding_id or 0)
        rows = (self.row_bytes, self.word_X, self.sum_B, self.seen_B, damage_1)
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
    threads.run(
        _serve_cpu, len(id_N), keys, place_N, rows, *served.arrays, out_ND, share_min=_share_min(out_ND.shape[1])
    )  # fmt: skip
    return place_N, int(damage_1[0])


def find_rows(
    served: ServedRows, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, *, threads: Threads
) -> tuple[np.ndarray, int]:
    """As `serve_rows`, without weights."""
    keys, place_N, rows, damage_1 = served.arguments(table_N, id_N, padding_id)
    threads.run(_find_cpu, len(id_N), keys, place_N, rows, share_min=_share_min(0))
    return place_N, int(damage_1[0])


def pool_rows(
    served: ServedRows, place_N: np.ndarray, other_MX: np.ndarray, offset_P1: np.ndarray, scale_N: np.ndarray | None,
    is_mean: bool, out_PX: np.ndarray, *, threads: Threads,
) -> None:  # fmt: skip
    """out_PX[p] = the sum or mean of bag p, as `kernels/pool.py` makes it.

    Args:
        place_N: of `find_rows`; OTHER - m is row m of `other_MX`, none is MISSING.
        other_MX: weights of ids that have no row, in one of the formats of weights.
        offset_P1: int64, as in `Bags`.
        scale_N: float32; None = 1, or for a mean 1 / (ids of the bag that are not padding).
        out_PX: in the format of the rows, or float32.
    """
    ids, bags = len(place_N), len(out_PX)
    share_min = max(1, _share_min(out_PX.shape[1]) * bags // max(ids, 1))
    threads.run(
        _pool_cpu, bags, place_N, *served.arrays, other_MX, offset_P1, scale_N, is_mean, out_PX, share_min=share_min
    )


def _share_min(dim: int) -> int:
    """The fewest keys worth waking a thread for: one is found in about the time in which 32 weights are read."""
    return max(256, (1 << 17) // (dim + 32))


def keys_of_cells(cell_C2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """table_S int32, id_S int64 and place_S int64: the keys that cells hold, and the row of each."""
    cell_S2 = cell_C2[cell_C2[:, 1] != 0]
    word_S = cell_S2[:, 1]
    return (word_S >> _PLACE_BITS).astype(np.int32), cell_S2[:, 0], (word_S & _PLACE_MASK) - 1


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
