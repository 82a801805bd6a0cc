"""Looks up rows in a read-only file of rows.  N ids, S slots, B blocks, D weights of a row, P bags, T tables.

    serve_rows    place_N[n] = slot of key n; MISSING for a key without a row, PADDING for the padding id
                  out_ND[n] = weights of key n; zeros for a key without a row
    pool_rows     out_PD[p] = sum of the weights of bag p, whose rows are pooled while they are found

`kernels/perfect_hash.py` gives the slot of a key. A slot holds a record: float32 weights, the bits of float16 or
bfloat16 weights, or bytes from `kernels/quantize_rows.py`; then zeros; and the id in the last 8 bytes. If the record
has another id, the key has no row.

Ids are looked up in groups: while the records of one group are read, those of the next group are prefetched, and so are
the pilots of the group after that.

A block of records is compared with its checksum when one of its records is read for the first time, and is then marked
in seen_B. Several threads may compare a block at the same time, with the same result.

A file may have layers, which hold newer rows of some keys (`kernels/serve_layers.py`). The arrays of records and pilots
then cover the file and its layers. The blocks of a layer were compared when the layer was opened.

Invariant: a lookup reads nothing, not even an id, from a block that has not been compared. A damaged block ends the
share of work, and its number is written to damage_1.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.checksum import block_sum
from oneemb.kernels.frozen_rows import MISSING, OTHER, PADDING, RowArrays, bags_min, pool_bag, read_row, share_min
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import keep_rolled, natural, prefetch, prefetch_row
from oneemb.kernels.perfect_hash import FIRST_SLOT, PARTS, SEED, SLOTS, bucket_of, hash_id, slot_in_table
from oneemb.kernels.serve_layers import RING, RING_IDS, Layers, match_layers
from oneemb.kernels.threads import Threads

BLOCK_BYTES = 4096
"""Size of a page: checking a block for the first time reads no more of the file than the system loads anyway."""

_BLOCK_WORDS = np.int64(BLOCK_BYTES // 8)
_BLOCK_SHIFT = np.uint64(12)
_GROUP = RING_IDS // 4
"""Ids of a group, 32: enough to hide a read from memory. Three groups are in progress."""
_SLOTS = 1 << 14  # slots that one iteration of `_keys_cpu` looks through


def record_bytes(row_bytes: int) -> int:
    """Bytes of a record for a row of `row_bytes` bytes."""
    return -(-row_bytes // 8) * 8 + 8


@part
def _hash_ids(
    begin: Number, end: Number, table_N: Array, id_N: Array, region_T6: Array, pilot_B: Array, hash_R: Array,
    bucket_R: Array,
) -> None:  # fmt: skip
    """Write the hashes and buckets of ids begin to end - 1 to hash_R and bucket_R, and prefetch their pilots."""
    for n in range(natural(begin), natural(max(begin, end))):
        t, r = natural(table_N[n]), n & RING
        hash = hash_id(np.int64(id_N[n]), region_T6[t, SEED])
        bucket = bucket_of(hash, region_T6, t)
        hash_R[r], bucket_R[r] = hash, bucket
        prefetch(pilot_B, bucket)


@part
def _find_slots(
    begin: Number, end: Number, table_N: Array, region_T6: Array, pilot_B: Array, hash_R: Array, bucket_R: Array,
    record_SW: Array, place_N: Array,
) -> None:  # fmt: skip
    """Write the slots of ids, whose buckets are in bucket_R, to place_N, and prefetch their records."""
    for n in range(natural(begin), natural(max(begin, end))):
        keep_rolled()
        r = n & RING
        place = slot_in_table(hash_R[r], pilot_B[natural(bucket_R[r])], region_T6, natural(table_N[n]))
        place_N[n] = place
        prefetch_row(record_SW, place, 0, record_SW.shape[1])


@part
def _is_compared(first: Number, last: Number, word_X: Array, sum_B: Array, seen_B: Array, damage_1: Array) -> Number:
    """Compare those of the blocks first to last that are not marked in seen_B. Returns False if one is damaged."""
    for b in range(first, natural(np.int64(last) + 1)):
        if not seen_B[b]:
            if block_sum(word_X, np.int64(b), _BLOCK_WORDS) != sum_B[b]:
                damage_1[0] = b
                return False
            seen_B[b] = True
    return True


@part
def _match(
    begin: Number, end: Number, table_N: Array, id_N: Array, padded: Number, padding_id: Number, region_T6: Array,
    record_SW: Array, blocks: tuple, place_N: Array,
) -> Number:  # fmt: skip
    """place_N = MISSING for ids whose slot has another id's record, PADDING for the padding id; other places stay.
    Returns False if a block is damaged."""
    word_X, sum_B, seen_B, damage_1 = blocks
    words = record_SW.shape[1]
    row_bytes = natural(8 * words)
    for n in range(natural(begin), natural(max(begin, end))):
        keep_rolled()
        place, id = natural(place_N[n]), np.int64(id_N[n])
        if len(sum_B) != 0:
            first = (place * row_bytes) >> _BLOCK_SHIFT
            last = (place * row_bytes + row_bytes - np.uint64(1)) >> _BLOCK_SHIFT
            if not (seen_B[first] & seen_B[last] & (last - first < 2)):
                if not _is_compared(first, last, word_X, sum_B, seen_B, damage_1):
                    return False
        is_there = (record_SW[place, words - 1] == id) & (region_T6[natural(table_N[n]), SLOTS] != 0)
        found = np.int64(place) if is_there else np.int64(MISSING)
        place_N[n] = np.int64(PADDING) if padded and id == padding_id else found
    return True


@cpu
def _serve_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, blocks: tuple, weight_SX: Array, byte_SX: Array,
    scale_S2: Array, bits: Number, out_ND: Array,
) -> None:  # fmt: skip
    table_N, id_N, padded, padding_id, region_T6, pilot_B, record_SW, layers = keys
    hash_R, bucket_R = np.empty(RING_IDS, np.uint64), np.empty(RING_IDS, np.int64)
    for first in range(begin - 2 * _GROUP, end, _GROUP):
        now, next = max(first, begin), max(first + _GROUP, begin)
        then, last = max(first + 2 * _GROUP, begin), min(first + _GROUP, end)
        _hash_ids(
            then, min(first + 3 * _GROUP, end), table_N, id_N, region_T6, pilot_B, hash_R, bucket_R
        )  # fmt: skip
        _find_slots(
            next, min(first + 2 * _GROUP, end), table_N, region_T6, pilot_B, hash_R, bucket_R, record_SW, place_N
        )
        if not _match(now, last, table_N, id_N, padded, padding_id, region_T6, record_SW, blocks, place_N):
            return
        match_layers(now, last, table_N, id_N, hash_R, layers, pilot_B, record_SW, place_N)
        for n in range(now, last):
            keep_rolled()
            read_row(weight_SX, byte_SX, scale_S2, bits, place_N[natural(n)], out_ND, n)


@part
def _has_other(first: Number, last: Number, place_N: Array) -> Number:
    for n in range(first, last):
        if place_N[n] <= OTHER:
            return True
    return False


@part
def _pool(
    p: Number, place_N: Array, weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number, other_MX: Array,
    offset_P1: Array, scale_N: Array, is_mean: Number, out_PX: Array,
) -> None:  # fmt: skip
    first, last = natural(offset_P1[p]), natural(offset_P1[p + 1])
    factor, count = np.float32(1), 0
    if is_mean:
        for n in range(first, last):
            count += place_N[n] != PADDING
        factor = np.float32(1) / np.float32(max(count, 1))
    pool_bag(
        first, last, place_N, weight_SX, byte_SX, scale_S2, bits, other_MX, scale_N, factor, None, out_PX, p, 0,
        out_PX.shape[1],
    )  # fmt: skip


@cpu
def _pool_cpu(
    begin: Number, end: Number, keys: tuple, place_N: Array, blocks: tuple, weight_SX: Array, byte_SX: Array,
    scale_S2: Array, bits: Number, other_MX: Array, offset_P1: Array, scale_N: Array, is_mean: Number,
    missing_1: Array, out_PX: Array,
) -> None:  # fmt: skip
    table_N, id_N, padded, padding_id, region_T6, pilot_B, record_SW, layers = keys
    # These calls repeat those of _serve_cpu: with one function for the three calls, a lookup takes a tenth more time.
    hash_R, bucket_R = np.empty(RING_IDS, np.uint64), np.empty(RING_IDS, np.int64)
    id_begin, id_end, p = offset_P1[begin], offset_P1[end], begin
    for first in range(id_begin - 2 * _GROUP, id_end, _GROUP):
        now, next = max(first, id_begin), max(first + _GROUP, id_begin)
        then, last = max(first + 2 * _GROUP, id_begin), min(first + _GROUP, id_end)
        _hash_ids(
            then, min(first + 3 * _GROUP, id_end), table_N, id_N, region_T6, pilot_B, hash_R, bucket_R
        )  # fmt: skip
        _find_slots(
            next, min(first + 2 * _GROUP, id_end), table_N, region_T6, pilot_B, hash_R, bucket_R, record_SW, place_N
        )
        if not _match(now, last, table_N, id_N, padded, padding_id, region_T6, record_SW, blocks, place_N):
            return
        match_layers(now, last, table_N, id_N, hash_R, layers, pilot_B, record_SW, place_N)
        if _has_other(natural(now), natural(max(now, last)), place_N):
            missing_1[0] = 1
        # Pool each bag whose ids have all been found; empty bags too. The rows of a bag are in the cache now, unless
        # the bag is long.
        while p < end and offset_P1[p + 1] <= last:
            _pool(p, place_N, weight_SX, byte_SX, scale_S2, bits, other_MX, offset_P1, scale_N, is_mean, out_PX)
            p += 1


@cpu
def _pool_again_cpu(
    begin: Number, end: Number, place_N: Array, weight_SX: Array, byte_SX: Array, scale_S2: Array, bits: Number,
    other_MX: Array, offset_P1: Array, scale_N: Array, is_mean: Number, out_PX: Array,
) -> None:  # fmt: skip
    """Pool those of the bags begin to end - 1 that have ids without a row."""
    for p in range(begin, end):
        keep_rolled()
        if _has_other(natural(offset_P1[p]), natural(offset_P1[p + 1]), place_N):
            _pool(p, place_N, weight_SX, byte_SX, scale_S2, bits, other_MX, offset_P1, scale_N, is_mean, out_PX)


@dataclass(frozen=True)
class ServedRows:
    """The arrays of a file of rows. Whoever makes one has checked that each slot that can follow from `region_T6` has a
    record, and each bucket a pilot.

    Args:
        region_T6, pilot_B: the perfect hash of the keys (`kernels/perfect_hash.py`); at least one pilot.
        record_SW: int64, the records; at least one.
        weights: dtype of the rows: float32, uint16 (float16), int16 (bfloat16), or uint8 (quantized).
        bits: bits of a quantized weight, 8 or 4; 0 = the rows are not quantized.
        sum_B: uint32, checksum of each block; empty = all blocks have been compared already.
        seen_B: bool, whether each block has been compared.
        word_X: uint64, the same memory as record_SW, up to the end of the last block.
        layers: newer rows of some keys; None = there are none. Loops are compiled without layers, and with them.
    """

    region_T6: np.ndarray
    pilot_B: np.ndarray
    record_SW: np.ndarray
    weights: np.dtype
    bits: int
    sum_B: np.ndarray
    seen_B: np.ndarray
    word_X: np.ndarray
    layers: Layers | None = None
    row_SX: np.ndarray = field(init=False)
    """`record_SW` seen as numbers of dtype `weights`: row s, then the rest of its record."""
    arrays: RowArrays = field(init=False)
    """`row_SX` as loops take it. Scale and low of quantized rows are in the rows."""

    def __post_init__(self) -> None:
        # Made here once, since making them takes as long as a short lookup.
        row_SX = self.record_SW.view(self.weights)
        object.__setattr__(self, "row_SX", row_SX)
        object.__setattr__(self, "arrays", RowArrays.of(row_SX, self.bits))

    @classmethod
    def unchecked(
        cls, region_T6: np.ndarray, pilot_B: np.ndarray, record_SW: np.ndarray, weights: np.dtype, bits: int
    ) -> Self:
        """Rows of arrays whose blocks have all been compared before."""
        return cls(
            region_T6, pilot_B, record_SW, weights, bits, np.empty(0, np.uint32), np.empty(0, np.bool_),
            np.empty(0, np.uint64),
        )  # fmt: skip

    def arguments(
        self, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None
    ) -> tuple[tuple, np.ndarray, tuple, np.ndarray]:
        """Arguments of loops: (keys, place_N to be filled, blocks, damage_1 for the number of a damaged block)."""
        damage_1 = np.empty(1, np.int64)
        damage_1[0] = -1
        padded = padding_id is not None
        keys = (table_N, id_N, padded, padding_id or 0, self.region_T6, self.pilot_B, self.record_SW, self.layers)
        return keys, np.empty(len(id_N), np.int64), (self.word_X, self.sum_B, self.seen_B, damage_1), damage_1


def serve_rows(
    served: ServedRows, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, out_ND: np.ndarray, *,
    threads: Threads,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Write the weights of each key to `out_ND`; zeros for a key without a row.

    Args:
        table_N, id_N: the keys: int32, below T; int32 or int64.
        padding_id: id that has no row in any table; None = there is no such id.
        out_ND: float32, or the format of the rows; float32 if the rows are quantized.

    Returns:
        place_N, int64: slot of each key, or MISSING or PADDING. And the number of a damaged block, or -1; if a block is
        damaged, places and weights are invalid.
    """
    keys, place_N, blocks, damage_1 = served.arguments(table_N, id_N, padding_id)
    threads.run(
        _serve_cpu, len(id_N), keys, place_N, blocks, *served.arrays, out_ND, share_min=share_min(out_ND.shape[1])
    )  # fmt: skip
    return place_N, int(damage_1[0])


def pool_rows(
    served: ServedRows, table_N: np.ndarray, id_N: np.ndarray, padding_id: int | None, bags: tuple, out_PX: np.ndarray,
    *, threads: Threads,
) -> tuple[np.ndarray, bool, int]:  # fmt: skip
    """out_PX[p] = the sum or mean of bag p, as `kernels/pool.py` computes it; an id without a row counts as zeros.

    Args:
        table_N, id_N, padding_id: as in `serve_rows`.
        bags: (offset_P1, scale_N, is_mean). offset_P1: int64, as in `Bags`. scale_N: float32; None = 1, or, for a mean,
            1 / (ids of the bag that are not padding).
        out_PX: in the format of the rows, or float32.

    Returns:
        place_N, as in `serve_rows`; whether any id has no row; and the number of a damaged block, or -1.
    """
    keys, place_N, blocks, damage_1 = served.arguments(table_N, id_N, padding_id)
    missing_1 = np.zeros(1, np.int64)
    offset_P1, scale_N, is_mean = bags
    threads.run(
        _pool_cpu, len(out_PX), keys, place_N, blocks, *served.arrays, np.zeros((1, out_PX.shape[1]), out_PX.dtype),
        offset_P1, scale_N, is_mean, missing_1, out_PX, share_min=bags_min(out_PX.shape[1], len(out_PX), len(place_N)),
    )  # fmt: skip
    return place_N, bool(missing_1[0]), int(damage_1[0])


def pool_rows_again(
    served: ServedRows, place_N: np.ndarray, other_MX: np.ndarray, bags: tuple, out_PX: np.ndarray, *, threads: Threads
) -> None:
    """Pool those bags again that have ids without a row, now with other rows for such ids. Place OTHER - m in
    `place_N`, the result of `pool_rows`, stands for row m of `other_MX`, in one of the formats of weights."""
    threads.run(
        _pool_again_cpu, len(out_PX), place_N, *served.arrays, other_MX, *bags, out_PX,
        share_min=bags_min(out_PX.shape[1], len(out_PX), len(place_N)),
    )  # fmt: skip


@cpu
def _keys_cpu(
    begin: Number, end: Number, table: Number, first: Number, last: Number, region_T6: Array, pilot_B: Array,
    record_SW: Array, is_row_S: Array,
) -> None:  # fmt: skip
    words = record_SW.shape[1]
    for k in range(begin, end):
        for s in range(natural(first + k * _SLOTS), natural(min(first + (k + 1) * _SLOTS, last))):
            hash = hash_id(record_SW[s, words - 1], region_T6[table, SEED])
            pilot = pilot_B[natural(bucket_of(hash, region_T6, table))]
            is_row_S[s - natural(first)] = slot_in_table(hash, pilot, region_T6, table) == np.int64(s)


def keys_of_slots(
    served: ServedRows, table: int, begin: int = 0, end: int | None = None, *, threads: Threads
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Ids and slots of a table's rows, id_N and place_N, int64, in the order of slots: those in the table's slots from
    `begin` to `end` - 1 (None = to the last). All blocks must have been compared before."""
    region = [int(number) for number in served.region_T6[table]]
    slots = region[PARTS] * region[SLOTS]
    first, last = region[FIRST_SLOT] + begin, region[FIRST_SLOT] + (slots if end is None else min(end, slots))
    is_row_S = np.empty(last - first, np.bool_)
    threads.run(
        _keys_cpu, -(-len(is_row_S) // _SLOTS), table, first, last, served.region_T6, served.pilot_B,
        served.record_SW, is_row_S, share_min=1,
    )  # fmt: skip
    place_N = first + np.flatnonzero(is_row_S)
    return served.record_SW[place_N, -1], place_N


def count_rows(served: ServedRows, table: int, *, threads: Threads) -> int:
    """Number of a table's rows that lookups can find, from `keys_of_slots`. Uses little memory, however many there
    are."""
    slots = int(served.region_T6[table, PARTS]) * int(served.region_T6[table, SLOTS])
    begins = range(0, slots, 64 * _SLOTS)
    return sum(len(keys_of_slots(served, table, at, at + begins.step, threads=threads)[0]) for at in begins)
