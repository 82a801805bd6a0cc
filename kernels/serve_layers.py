"""Finds keys in layers: small files of rows that are newer than those of a served file.  L layers, N ids, F words.

    match_layers    place_N[n] = place of key n in the newest layer that has the key; MISSING if that layer says that
                    the key has no row any more; keys in no layer keep their place

A layer is a file with a perfect hash of its own (`kernels/perfect_hash.py`). Files of T tables have layers of 2 T
tables: keys of table T + t are those of table t that have no row any more. All files lie in one array of records and
one of pilots, so the numbers of a layer's tables, region_LT6[l], say where its buckets and slots are in these arrays.
The newest layer is the first.

Most keys are in no layer. Each key of a layer has two bits in one word of filter_F, from the hash by which the file
itself finds the key. Only a key whose two bits are set is looked up in the layers. With two bytes a key, two of a
hundred keys that are in no layer pass the filter.
"""

from typing import NamedTuple

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.frozen_rows import MISSING, PADDING
from oneemb.kernels.jit import Number, cpu, part, rule
from oneemb.kernels.jit_code import keep_rolled, mul_high, natural
from oneemb.kernels.perfect_hash import SEED, SLOTS, bucket_of, hash_id, slot_in_table
from oneemb.kernels.threads import Threads

RING_IDS = 128
"""Length of the arrays that hold hashes of ids in progress."""
RING = np.uint64(RING_IDS - 1)
"""Mask of an index into such an array."""

_WORD_KEYS = 4  # keys of a word of the filter, on average
_BIT = np.uint64(63)


class Layers(NamedTuple):
    """Arrays of layers."""

    region_LT6: np.ndarray
    """uint64, the numbers of the layers' tables, 2 T for each layer."""
    filter_F: np.ndarray
    """uint64, bits of the keys of all layers."""


@rule
def _bits_of(hash: Number) -> Number:
    """The two bits of a hash in its word of the filter, which follows from the upper bits of the hash."""
    return (np.uint64(1) << (hash & _BIT)) | (np.uint64(1) << ((hash >> np.uint64(6)) & _BIT))


@part
def _place(table: Number, id: Number, region_LT6: Array, pilot_B: Array, record_SW: Array, other: Number) -> Number:
    """Place of a key in the newest layer that has it; `other` if no layer has it."""
    last, tables = record_SW.shape[1] - 1, region_LT6.shape[1] // 2
    for layer in range(region_LT6.shape[0]):
        region_T6 = region_LT6[layer]
        for is_gone in range(2):
            t = natural(table + is_gone * tables)
            if region_T6[t, SLOTS] != 0:
                hash = hash_id(id, region_T6[t, SEED])
                pilot = pilot_B[natural(bucket_of(hash, region_T6, t))]
                place = slot_in_table(hash, pilot, region_T6, t)
                if record_SW[natural(place), last] == id:
                    return np.int64(MISSING) if is_gone else place
    return np.int64(other)


@part
def match_layers(
    begin: Number, end: Number, table_N: Array, id_N: Array, hash_R: Array, layers: tuple | None, pilot_B: Array,
    record_SW: Array, place_N: Array,
) -> None:  # fmt: skip
    """Change place_N as above, for ids begin to end - 1, whose hashes are in hash_R. Places that are PADDING stay.
    `layers`: `Layers`, or None."""
    if layers is not None:  # The compiler drops the branch of None.
        region_LT6, filter_F = layers
        for n in range(natural(begin), natural(max(begin, end))):
            keep_rolled()
            hash = hash_R[n & RING]
            bits = _bits_of(hash)
            if filter_F[natural(mul_high(hash, np.uint64(len(filter_F))))] & bits == bits:
                if place_N[n] != PADDING:
                    table, id, place = np.int64(table_N[n]), np.int64(id_N[n]), place_N[n]
                    place_N[n] = _place(table, id, region_LT6, pilot_B, record_SW, place)


@cpu
def _filter_cpu(begin: Number, end: Number, table_N: Array, id_N: Array, region_T6: Array, filter_F: Array) -> None:
    for n in range(begin, end):
        hash = hash_id(id_N[n], region_T6[natural(table_N[n]), SEED])
        filter_F[natural(mul_high(hash, np.uint64(len(filter_F))))] |= _bits_of(hash)


def filter_of(table_N: np.ndarray, id_N: np.ndarray, region_T6: np.ndarray, *, threads: Threads) -> np.ndarray:
    """Filter of the keys of layers, over a file whose tables have these numbers: table_N int32 below T, id_N int64."""
    filter_F = np.zeros(1 + len(id_N) // _WORD_KEYS, np.uint64)
    # One share of work: two threads that set bits of one word would lose bits.
    threads.run(_filter_cpu, len(id_N), table_N, id_N, region_T6, filter_F, share_min=len(id_N) + 1)
    return filter_F
