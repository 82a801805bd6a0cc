"""Copies shards of a compact index into more or fewer blocks. G shards that are copied; see `compact_index.py`.

The lines of a shard are in the order of the hashes of their keys, in the old blocks as in the new ones. So a copy reads
and writes memory in order, and memory of the new blocks is zeroed just before it is written.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.compact_index import (
    BLOCK_BYTES,
    CELLS,
    LINES,
    PLACE_MASK,
    TABLE_SHIFT,
    append_key,
    has_bits,
    insert_key,
    line_address,
    mask_of,
    place_at,
    set_spills,
    taken_of,
    turn_of,
)
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import set_word, word_at


@rule
def _unmixed(x: Number) -> Number:
    """Inverse of the last mixing of `hash_key`."""
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * np.uint64(0x319642B2D24D8EC3)
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * np.uint64(0x96DE1B173F119089)
    return x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))


@rule
def _id_of(table: Number, hash: Number) -> Number:
    """The id of a key, by its table and hash: the inverse of `hash_key` with salt 0."""
    # `hash_key` mixes id ^ number of the table. The hash of id 0 is this number, mixed.
    return np.int64(_unmixed(np.uint64(hash)) ^ _unmixed(np.uint64(hash_key(table, np.int64(0), np.int64(0)))))


@rule
def _add_cell(cell_N2: Array, n: Number, id: Number, word: Number) -> Number:
    """Write a cell to cell_N2[n] if there is room, and return n + 1."""
    if n < len(cell_N2):
        cell_N2[n, 0], cell_N2[n, 1] = id, word
    return n + 1


@rule
def least_hash(line: Number, lines: Number) -> Number:
    """The low 56 bits of the least hash of a line."""
    y = ((np.uint64(line) << np.uint64(32)) + np.uint64(lines) - np.uint64(1)) // np.uint64(lines)
    return np.int64(y << np.uint64(24))


@rule
def _zero(blocks: Number, begin: Number, end: Number) -> Number:
    """Zero the blocks begin to end - 1, whose addresses are at `blocks`. Returns the end, at least `begin`."""
    for b in range(begin, end):
        block = word_at(blocks, b)
        for w in range(np.int64(BLOCK_BYTES // 8)):
            set_word(block, w, np.int64(0))
    return max(begin, end)


@cpu
def compact_move(
    begin: Number, end: Number, shard_G: Array, shard_P4: Array, new_G4: Array, spill_P: Array, cells_P: Array,
    left_G: Array, left_GN2: Array, taken_G1: Array, taken_G: Array, taken_N2: Array,
) -> None:  # fmt: skip
    """Copy shards shard_G[begin:end] into new ones, new_G4, whose blocks are zeroed here. Neither the old shards nor
    the spill change.

    left_G[g]: number of keys of the old shard that found no room, their cells (id, table << 40 | place + 1) in
    left_GN2[g] as far as there is room. taken_G[g]: number of keys of the spill that found room, their cells in
    taken_N2 from taken_G1[g] on.
    """
    way_3L = np.empty((3, LINES), np.int64)
    for g in range(begin, end):
        p = shard_G[g]
        lines, low, tables = shard_P4[p, 1], shard_P4[p, 2], shard_P4[p, 3]
        bits = low + tables + np.int64(1)
        new_lines, new_low, new_tables = new_G4[g, 1], new_G4[g, 2], new_G4[g, 3]
        left, zeroed = np.int64(0), np.int64(0)
        new_bits = new_low + new_tables + np.int64(1)
        for n in range(lines):
            line = word_at(shard_P4[p, 0], n >> np.int64(6)) + ((n & np.int64(63)) << np.int64(6))
            if n & np.int64(63) == 0:
                # The keys of this block go to lines up to the one of the greatest hash in it.
                most = (np.uint64(n + LINES) << np.uint64(32)) // np.uint64(lines)
                b = np.int64((most * np.uint64(new_lines)) >> np.uint64(38)) + np.int64(1)
                zeroed = _zero(new_G4[g, 0], zeroed, min(b, new_lines >> np.int64(6)))
            least = least_hash(n, lines)
            for k in range(taken_of(line)):
                word = word_at(line, k)
                table = (word >> low) & mask_of(tables)
                begins = least
                if word & (np.int64(1) << (bits - np.int64(1))):
                    begins = least_hash(n ^ turn_of(word), lines)
                # The first hash from there on that ends with the bits of the cell.
                hash = (p << np.int64(56)) | (begins + ((word - begins) & mask_of(low)))
                to, place1 = line_address(new_G4, g, hash), place_at(line, k, bits)
                key = (hash & mask_of(new_low)) | (table << new_low)
                goes = has_bits(new_tables, new_bits, table, place1)
                if goes and taken_of(to) < CELLS:
                    append_key(to, new_bits, key, place1)
                elif not (goes and insert_key(to, hash, new_bits, key, place1, way_3L)):
                    set_spills(to)
                    left = _add_cell(left_GN2[g], left, _id_of(table, hash), (table << TABLE_SHIFT) | place1)
        _zero(new_G4[g, 0], zeroed, new_lines >> np.int64(6))
        left_G[g] = left
        taken = np.int64(0)
        for c in range(cells_P[p]):
            id, word = word_at(spill_P[p], 2 * c), word_at(spill_P[p], 2 * c + 1)
            if word != 0:
                table = word >> TABLE_SHIFT
                hash = np.int64(hash_key(table, id, np.int64(0)))
                to = line_address(new_G4, g, hash)
                key, place1 = (hash & mask_of(new_low)) | (table << new_low), word & PLACE_MASK
                goes = has_bits(new_tables, new_bits, table, place1)
                if goes and insert_key(to, hash, new_bits, key, place1, way_3L):
                    taken_N2[taken_G1[g] + taken, 0], taken_N2[taken_G1[g] + taken, 1] = id, word
                    taken += 1
                else:
                    set_spills(to)
        taken_G[g] = taken
