"""Blocks of a compact index that lie in a file, each with a filter in memory.  U keys, P shards, B blocks of a shard,
K blocks.

A key is in one block of its shard (see `compact_index.py`), so a search reads one block at most. A block has a Bloom
filter in lines of 64 bytes, which denies nearly every absent key: the hash chooses a line and six bits of the line, and
the block may hold a key only if all six are set. One absent key in 200 passes the filter of a full block.
Reference: Putze, Sanders, Singler. Cache-, hash- and space-efficient Bloom filters (2007).

Loops take the shards as shard_P4, see `compact_index.py`, and for the shards with blocks in a file cold_P2, int64 [P,
2]: the address of the filters; the address of the numbers of the extents, each of EXTENT_BLOCKS blocks, that hold the
shard's blocks in order. An address of 0 means that the shard has no blocks in a file.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.compact_index import BLOCK_BYTES, LINES, line_of, mask_of, taken_of, turn_of
from oneemb.kernels.compact_index_move import least_hash
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import prefetch_word, set_word, word_at

FILTER_BYTES = 512
"""Bytes of the filter of a block."""

EXTENT_BLOCKS = 8
"""Blocks of an extent of the file."""

_BITS = 6
_AHEAD = 32


@rule
def _mixed(hash: Number) -> Number:
    """Bits that choose the line of a filter, and the bits of the line. The hashes of one block have equal high bits."""
    x = np.uint64(hash) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


@rule
def _line_of_filter(filter: Number, mixed: Number) -> Number:
    """Address of the line of a filter in which a key's bits are."""
    return filter + (np.int64(mixed >> np.uint64(61)) << np.int64(6))


@rule
def _may_hold(line: Number, mixed: Number) -> Number:
    for k in range(np.uint64(_BITS)):
        bit = np.int64(mixed >> (np.uint64(9) * np.uint64(k))) & np.int64(511)
        if (word_at(line, bit >> np.int64(6)) >> (bit & np.int64(63))) & np.int64(1) == 0:
            return False
    return True


@cpu
def cold_locate(
    begin: Number, end: Number, shard_P4: Array, cold_P2: Array, table_U: Array, id_U: Array, known_U: Array,
    block_U: Array, entry_U: Array,
) -> None:  # fmt: skip
    """block_U[u] = number of the file's block that may hold key u, -1 if there is none; entry_U[u] = address of the
    entry of this block in the array of the addresses of its shard's blocks. Keys with known_U[u] >= 0 need no block."""
    mixed_K, line_K = np.empty(_AHEAD, np.uint64), np.empty(_AHEAD, np.int64)
    for first in range(begin, end, _AHEAD):
        last = min(first + _AHEAD, end)
        for u in range(first, last):
            block_U[u] = np.int64(-1)
            line_K[u - first] = np.int64(0)
            hash = np.int64(hash_key(np.int64(table_U[u]), np.int64(id_U[u]), np.int64(0)))
            p = np.int64(np.uint64(hash) >> np.uint64(56))
            if cold_P2[p, 0] != 0 and known_U[u] < 0:
                b = line_of(hash, shard_P4[p, 1]) >> np.int64(6)
                mixed_K[u - first] = _mixed(hash)
                line_K[u - first] = _line_of_filter(cold_P2[p, 0] + b * np.int64(FILTER_BYTES), mixed_K[u - first])
                prefetch_word(line_K[u - first], np.int64(0))
                extent = word_at(cold_P2[p, 1], b // np.int64(EXTENT_BLOCKS))
                block_U[u] = extent * np.int64(EXTENT_BLOCKS) + b % np.int64(EXTENT_BLOCKS)
                entry_U[u] = shard_P4[p, 0] + (b << np.int64(3))
        for u in range(first, last):
            line = line_K[u - first]
            if line != 0 and not _may_hold(line, mixed_K[u - first]):
                block_U[u] = np.int64(-1)


@cpu
def overlay_changes(
    begin: Number, end: Number, old_N: Array, below_N: Array, put_N: Array, erased: Number, u_N: Array, shard_N: Array,
    old_U: Array, size_P: Array, room_P: Array,
) -> None:  # fmt: skip
    """Count keys that were put into the overlay, and write their former places, -1 for a new key, to old_U[u_N[n]].

    Args:
        old_N, below_N: what the overlay had of each key, -1 = nothing, and the place of the key below the overlay.
        put_N, erased: the places that were put; the place of an erased key.
        shard_N: the shard of each key.
        size_P, room_P: number of keys of each shard, and for how many it has room: a key takes room in the overlay.
    """
    for n in range(begin, end):
        old, p = old_N[n], np.int64(shard_N[n])
        if old < 0:
            old = below_N[n]
        if old == erased:
            old = np.int64(-1)
        old_U[u_N[n]] = old
        more = np.int64(put_N[n] != erased) - np.int64(old >= 0)
        size_P[p] += more
        room_P[p] += more - np.int64(1)


@cpu
def fill_filters(begin: Number, end: Number, shard_P4: Array, p: Number, filters: Number) -> None:
    """Compute the filters of the blocks begin to end - 1 of shard p, whose filters are at the address `filters`."""
    lines, low, tables = shard_P4[p, 1], shard_P4[p, 2], shard_P4[p, 3]
    moved = np.int64(1) << (low + tables)
    for b in range(begin, end):
        filter, block = filters + b * np.int64(FILTER_BYTES), word_at(shard_P4[p, 0], b)
        for w in range(np.int64(FILTER_BYTES // 8)):
            set_word(filter, w, np.int64(0))
        for i in range(np.int64(LINES)):
            n, line = (np.int64(b) << np.int64(6)) + i, block + (i << np.int64(6))
            for k in range(taken_of(line)):
                word = word_at(line, k)
                begins = least_hash(n ^ turn_of(word) if word & moved else n, lines)
                # The first hash from there on that ends with the bits of the cell.
                hash = (np.int64(p) << np.int64(56)) | (begins + ((word - begins) & mask_of(low)))
                mixed = _mixed(hash)
                to = _line_of_filter(filter, mixed)
                for j in range(np.uint64(_BITS)):
                    bit = np.int64(mixed >> (np.uint64(9) * np.uint64(j))) & np.int64(511)
                    at = bit >> np.int64(6)
                    set_word(to, at, word_at(to, at) | (np.int64(1) << (bit & np.int64(63))))


@cpu
def blocks_copy(begin: Number, end: Number, from_K: Array, to_K: Array) -> None:
    """Copy the blocks at the addresses from_K[begin:end] to the addresses to_K[begin:end]."""
    for k in range(begin, end):
        for w in range(np.int64(BLOCK_BYTES // 8)):
            set_word(to_K[k], w, word_at(from_K[k], w))


@cpu
def words_set(begin: Number, end: Number, address_K: Array, word_K: Array) -> None:
    """Write word_K[k] to the address address_K[k]."""
    for k in range(begin, end):
        set_word(address_K[k], np.int64(0), word_K[k])
