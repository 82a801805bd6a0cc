"""Hash index of 10 bytes a cell: (table, id) -> place.  U keys, P shards, B blocks of a shard.

A cell is small because the cell's position says a part of the key. The hash of a key is a permutation of the ids of its
table (`hash_key`), so table and hash say the id. Bits 56 to 63 of the hash are the shard. The high 32 of the other
bits, y, say the line: `y * lines >> 32`. All y of one line are neighbours, so the low bits of the hash tell them apart:
a cell of a shard with 2^k to 2^(k + 1) - 1 lines stores the low 56 - k bits. Nothing is rounded: two keys never have
equal cells.

A line is 64 bytes, a line of the CPU's cache: six words of 64 bits, six low halves of places, and a head. From the
lowest bit, with `low` bits of the hash and `tables` bits of the table, which each shard has its own numbers of:

    word    low: bits of the hash | tables: the table | 1: moved | rest: high bits of place + 1
    half    16: low bits of place + 1
    head    3: number of taken cells | 10: keys of the line that have moved | 1: keys of the line are in the spill

A cell is empty if its place + 1 is 0. A block is 64 lines, 4096 bytes at an address that is a multiple of 4096. If a
line is full, a key moves to another line of its block, which the low bits of its hash choose: `line ^ turn(hash)`. If
that line is full too, other keys move until one finds room. So a key is in one of two lines of one block, and at 92 of
100 cells nearly every key finds room. A key that finds none goes to the spill, a `HashIndex` with cells of 16 bytes,
and so does a key whose table or place does not fit into its cell, and each key of a shard without lines.

Loops take the shards as shard_P4, int64 [P, 4]: the address of the addresses of the shard's blocks; lines; `low`;
`tables`. A shard without lines has one block, in which the head of line 0 says that keys are in the spill. The spill
is taken as the arrays of a `HashIndex`, whose shards have the same keys: spill_P, cells_P.

Invariants: a key is in one cell, or once in the spill; within a line, taken cells come before empty ones; the head of
each line is right, except that it may say without need that keys are in the spill.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import PLACE_BITS, close_hole, hash_key, home_cell, probe
from oneemb.kernels.jit import Number, cpu, rule
from oneemb.kernels.jit_code import equal_of_line, half_at, natural, prefetch_word, set_half, set_word, word_at

CELLS = 6
"""Cells of a line."""

LINES = 64
"""Lines of a block."""

BLOCK_BYTES = 4096
LINES_MAX = (1 << 32) - LINES

TABLE_SHIFT = np.int64(PLACE_BITS)
"""Bits of a place in a cell of the spill; the table lies above them."""

PLACE_MASK = np.int64((1 << PLACE_BITS) - 1)

# The head is the high half of a line's last word, so that these numbers are added to the word.
_HEAD = np.int64(7)
_TAKEN = np.int64(1 << 32)
_MOVED = np.int64(1 << 35)
_SPILLED = np.int64(1 << 45)
SPILLED = 1 << 45
"""Last word of a line without keys of which some are in the spill."""


AHEAD = 32
"""Keys whose lines are prefetched before the first of them is compared."""

_RING = np.int64(2 * AHEAD - 1)


@rule
def mask_of(bits: Number) -> Number:
    return (np.int64(1) << bits) - np.int64(1)


@rule
def _fits(table: Number, tables: Number) -> Number:
    """Whether a table fits into `tables` bits. No table fits into 0 bits: a shard without lines has no cells."""
    return ((table + np.int64(1)) >> tables) == 0


@rule
def line_of(hash: Number, lines: Number) -> Number:
    """Number of a key's line in its shard."""
    y = (np.uint64(hash) << np.uint64(8)) >> np.uint64(32)
    return np.int64((y * np.uint64(lines)) >> np.uint64(32))


@rule
def turn_of(hash: Number) -> Number:
    """Number from 1 to 63 that differs between the numbers of a key's two lines: other = line ^ turn."""
    return (((np.int64(hash) & np.int64(0xFFFF)) * np.int64(63)) >> np.int64(16)) + np.int64(1)


@rule
def line_address(shard_P4: Array, p: Number, hash: Number) -> Number:
    """Address of a key's line."""
    line = line_of(hash, shard_P4[p, 1])
    return word_at(shard_P4[p, 0], line >> np.int64(6)) + ((line & np.int64(63)) << np.int64(6))


@rule
def _other(line: Number, hash: Number) -> Number:
    """Address of the other line of a key, given the address of one."""
    return line ^ (turn_of(hash) << np.int64(6))


@rule
def taken_of(line: Number) -> Number:
    return (word_at(line, _HEAD) >> np.int64(32)) & np.int64(7)


@rule
def _moved(line: Number) -> Number:
    return (word_at(line, _HEAD) >> np.int64(35)) & np.int64(1023)


@rule
def _add(line: Number, change: Number) -> None:
    """Add to the head of a line."""
    set_word(line, _HEAD, word_at(line, _HEAD) + change)


@rule
def _spills(line: Number) -> Number:
    return (word_at(line, _HEAD) & _SPILLED) != 0


@rule
def set_spills(line: Number) -> None:
    set_word(line, _HEAD, word_at(line, _HEAD) | _SPILLED)


@rule
def place_at(line: Number, k: Number, bits: Number) -> Number:
    """place + 1 of a cell, whose word has `bits` bits of the key."""
    high = np.int64(np.uint64(word_at(line, k)) >> np.uint64(bits))
    return (high << np.int64(16)) | half_at(line, np.int64(24) + k)


@rule
def _set_cell(line: Number, k: Number, bits: Number, key: Number, place1: Number) -> None:
    set_word(line, k, key | ((place1 >> np.int64(16)) << bits))
    set_half(line, np.int64(24) + k, place1)


@rule
def _find(line: Number, bits: Number, key: Number) -> Number:
    """The cell of a line whose word has this key in its low bits: 0 to 5; 6 = none."""
    k = equal_of_line(line, mask_of(bits), key)
    return k if k < CELLS and place_at(line, k, bits) != 0 else np.int64(CELLS)


@cpu
def compact_find(
    begin: Number, end: Number, shard_P4: Array, spill_P: Array, cells_P: Array, table_U: Array, id_U: Array,
    place_U: Array,
) -> None:  # fmt: skip
    """place_U[u] = the place of key u, -1 where the index does not hold it. Keys that are not in their first line are
    finished later, as in `cells_find`."""
    hash_K, line_K = np.empty(2 * AHEAD, np.uint64), np.empty(2 * AHEAD, np.int64)
    later_K = np.empty(AHEAD, np.int64)
    _locate(shard_P4, table_U, id_U, begin, min(begin + AHEAD, end), hash_K, line_K, np.int64(0))
    for first in range(begin, end, AHEAD):
        last = min(first + AHEAD, end)
        _locate(shard_P4, table_U, id_U, last, min(last + AHEAD, end), hash_K, line_K, (last - begin) & _RING)
        later = natural(0)
        for u in range(natural(first), natural(last)):
            at = (u - natural(begin)) & natural(_RING)
            hash, line = np.int64(hash_K[at]), line_K[at]
            p = natural(np.uint64(hash) >> np.uint64(56))
            low, tables = shard_P4[p, 2], shard_P4[p, 3]
            bits, table = low + tables + np.int64(1), np.int64(table_U[u])
            k = equal_of_line(line, mask_of(bits), (hash & mask_of(low)) | (table << low))
            fits = _fits(table, tables)
            place = place_at(line, k & np.int64(7), bits) - np.int64(1)
            place = place if (k != CELLS) & fits else np.int64(-1)
            place_U[u] = place
            later_K[later] = u
            elsewhere = (place < 0) & (((word_at(line, _HEAD) >> np.int64(35)) != 0) | (not fits))
            later += natural(elsewhere)
            prefetch_word(_other(line, hash) if elsewhere else line, np.int64(0))
        for i in range(later):
            u = natural(later_K[i])
            at = (u - natural(begin)) & natural(_RING)
            hash, line = np.int64(hash_K[at]), line_K[at]
            p = natural(np.uint64(hash) >> np.uint64(56))
            low, tables = shard_P4[p, 2], shard_P4[p, 3]
            bits, table, id = low + tables + np.int64(1), np.int64(table_U[u]), np.int64(id_U[u])
            place1 = np.int64(0)
            fits = _fits(table, tables)
            if fits and _moved(line) != 0:
                other = _other(line, hash)
                k = _find(other, bits, (hash & mask_of(low)) | (table << low) | (np.int64(1) << (bits - 1)))
                if k != CELLS:
                    place1 = place_at(other, k, bits)
            if place1 == 0 and (_spills(line) or not fits):
                c = probe(spill_P[p], cells_P[p], home_cell(np.uint64(hash), cells_P[p]), table, id)
                place1 = word_at(spill_P[p], 2 * c + 1) & PLACE_MASK
            place_U[u] = place1 - 1


@rule
def _locate(
    shard_P4: Array, table_U: Array, id_U: Array, first: Number, last: Number, hash_K: Array, line_K: Array, k: Number
) -> None:
    """Write the hashes of keys first to last - 1 and the addresses of their lines from index k on, and prefetch the
    lines."""
    for i in range(natural(last - first)):
        u = natural(first) + i
        hash_K[natural(k) + i] = hash_key(np.int64(table_U[u]), np.int64(id_U[u]), np.int64(0))
    for i in range(natural(last - first)):
        hash = hash_K[natural(k) + i]
        line = line_address(shard_P4, natural(hash >> np.uint64(56)), hash)
        line_K[natural(k) + i] = line
        prefetch_word(line, np.int64(0))


@rule
def has_bits(tables: Number, bits: Number, table: Number, place1: Number) -> Number:
    """Whether the table and the place of a key fit into a cell."""
    return _fits(table, tables) and ((place1 >> np.int64(16)) >> (np.int64(64) - bits)) == 0


@rule
def append_key(line: Number, bits: Number, key: Number, place1: Number) -> None:
    """Write a new key into the first empty cell of its line, which must have one."""
    _set_cell(line, taken_of(line), bits, key, place1)
    _add(line, _TAKEN)


@rule
def insert_key(line: Number, hash: Number, bits: Number, key: Number, place1: Number, way_3L: Array) -> Number:
    """Write a new key, whose line is `line`, into a cell of its block. Returns whether it found room; if it did not,
    nothing has changed.

    way_3L: scratch memory, int64 [3, LINES]: lines that were searched, in order; the line before, from which a key may
    move to it; and this key's cell.
    """
    if taken_of(line) < CELLS:
        append_key(line, bits, key, place1)
        return True
    moved = np.int64(1) << (bits - np.int64(1))
    other = _other(line, hash)
    if taken_of(other) < CELLS:
        append_key(other, bits, key | moved, place1)
        _add(line, _MOVED)
        return True
    way_3L[0, 0], way_3L[1, 0], way_3L[0, 1], way_3L[1, 1] = line, -1, other, -1
    found = np.uint64(1) << np.uint64((line >> np.int64(6)) & np.int64(63))
    found |= np.uint64(1) << np.uint64((other >> np.int64(6)) & np.int64(63))
    at, end = np.int64(0), np.int64(2)
    while at < end:
        now = way_3L[0, at]
        for k in range(np.int64(CELLS)):
            to = _other(now, word_at(now, k))
            bit = np.uint64(1) << np.uint64((to >> np.int64(6)) & np.int64(63))
            if found & bit:
                continue
            if taken_of(to) < CELLS:
                free, cell = to, taken_of(to)
                _add(to, _TAKEN)
                while True:
                    word = word_at(now, k) ^ moved
                    set_word(free, cell, word)
                    set_half(free, np.int64(24) + cell, half_at(now, np.int64(24) + k))
                    if word & moved:
                        _add(now, _MOVED)
                    else:
                        _add(free, -_MOVED)
                    free, cell = now, k
                    if way_3L[1, at] < 0:
                        break
                    k = way_3L[2, at]
                    at = way_3L[1, at]
                    now = way_3L[0, at]
                _set_cell(free, cell, bits, key | (moved if free == other else np.int64(0)), place1)
                if free == other:
                    _add(line, _MOVED)
                return True
            found |= bit
            way_3L[0, end], way_3L[1, end], way_3L[2, end] = to, at, k
            end += 1
        at += 1
    return False


@rule
def _remove(line: Number, k: Number, bits: Number, hash: Number) -> None:
    """Empty cell k of a line, whose key has this hash."""
    last = taken_of(line) - np.int64(1)
    if word_at(line, k) & (np.int64(1) << (bits - np.int64(1))):
        _add(_other(line, hash), -_MOVED)
    set_word(line, k, word_at(line, last))
    set_half(line, np.int64(24) + k, half_at(line, np.int64(24) + last))
    set_word(line, last, np.int64(0))
    set_half(line, np.int64(24) + last, np.int64(0))
    _add(line, -_TAKEN)


@cpu
def compact_put(
    begin: Number, end: Number, shard_P4: Array, spill_P: Array, cells_P: Array, spilled_P: Array, size_P: Array,
    next_P: Array, end_P: Array, order_U: Array, cell_U2: Array, old_U: Array,
) -> None:  # fmt: skip
    """Put the cells cell_U2[next_P[p]] to cell_U2[end_P[p] - 1] into shard p, for shards begin to end - 1, in order,
    and advance next_P. A shard stops early at a key for which the spill has no cell.

    order_U, cell_U2, old_U: as in `cells_put`. New keys are added to size_P, those in the spill to spilled_P as well.
    """
    hash_K, line_K, later_K = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.int64), np.empty(AHEAD, np.int64)
    way_3L = np.empty((3, LINES), np.int64)
    for p in range(begin, end):
        low, tables = shard_P4[p, 2], shard_P4[p, 3]
        bits = low + tables + np.int64(1)
        spill, cells = spill_P[p], cells_P[p]
        first = next_P[p]
        while first < end_P[p]:
            last = min(first + AHEAD, end_P[p])
            for i in range(first, last):
                hash = hash_key(cell_U2[i, 1] >> TABLE_SHIFT, cell_U2[i, 0], np.int64(0))
                line = line_address(shard_P4, p, hash)
                hash_K[i - first], line_K[i - first] = np.int64(hash), line
                prefetch_word(line, np.int64(0))
            # Where a key may find the spill full, all keys wait, so that the put can stop at that key.
            later, in_order = np.int64(0), spilled_P[p] + last - first >= cells
            for i in range(first, last):
                word, hash, line = cell_U2[i, 1], hash_K[i - first], line_K[i - first]
                table, place1 = word >> TABLE_SHIFT, word & PLACE_MASK
                key = (hash & mask_of(low)) | (table << low)
                k = equal_of_line(line, mask_of(bits), key)
                old1 = place_at(line, k & np.int64(7), bits) if k != CELLS else np.int64(0)
                head, goes = word_at(line, _HEAD) >> np.int64(32), has_bits(tables, bits, table, place1)
                # A key that has to move on waits, with all that follow: an equal key may be among these.
                in_order |= not goes
                if old1 != 0 and not in_order:
                    _set_cell(line, k, bits, key, place1)
                elif head < CELLS and not in_order:  # No key of the line has moved or is in the spill.
                    append_key(line, bits, key, place1)
                    size_P[p] += 1
                else:
                    later_K[later] = i
                    later += 1
                    prefetch_word(_other(line, hash), np.int64(0))
                    continue
                old_U[order_U[i] if len(order_U) != 0 else i] = old1 - 1
            for j in range(later):
                i = later_K[j]
                id, word, hash, line = cell_U2[i, 0], cell_U2[i, 1], hash_K[i - first], line_K[i - first]
                table, place1 = word >> TABLE_SHIFT, word & PLACE_MASK
                key, fits = (hash & mask_of(low)) | (table << low), _fits(table, tables)
                old1, at, k = np.int64(0), line, np.int64(CELLS)
                if fits:
                    k = _find(line, bits, key)
                    if k == CELLS and _moved(line) != 0:
                        at = _other(line, hash)
                        k = _find(at, bits, key | (np.int64(1) << (bits - np.int64(1))))
                    if k != CELLS:
                        old1 = place_at(at, k, bits)
                c, goes = np.int64(-1), has_bits(tables, bits, table, place1)
                if k == CELLS and (not fits or _spills(line)):
                    c = probe(spill, cells, home_cell(np.uint64(hash), cells), table, id)
                    old1 = word_at(spill, 2 * c + 1) & PLACE_MASK
                if k != CELLS and goes:
                    moved = word_at(at, k) & (np.int64(1) << (bits - np.int64(1)))
                    _set_cell(at, k, bits, key | moved, place1)
                elif c >= 0 and old1 != 0:
                    set_word(spill, 2 * c + 1, word)
                elif k == CELLS and goes and insert_key(line, hash, bits, key, place1, way_3L):
                    size_P[p] += 1
                else:
                    if spilled_P[p] + 1 >= cells:
                        last = i
                        break
                    if k != CELLS:
                        _remove(at, k, bits, hash)
                        size_P[p] -= 1
                    c = probe(spill, cells, home_cell(np.uint64(hash), cells), table, id)
                    set_word(spill, 2 * c, id)
                    set_word(spill, 2 * c + 1, word)
                    spilled_P[p] += 1
                    size_P[p] += 1
                    set_spills(line)
                old_U[order_U[i] if len(order_U) != 0 else i] = old1 - 1
            first, full = last, last < min(first + AHEAD, end_P[p])
            if full:
                break
        next_P[p] = first


@cpu
def compact_erase(
    begin: Number, end: Number, first: Number, shard_P4: Array, spill_P: Array, cells_P: Array, spilled_P: Array,
    size_P: Array, shard_U: Array, table_U: Array, id_U: Array, old_U: Array,
) -> None:  # fmt: skip
    """Erase the keys of shards first + begin to first + end - 1. old_U[u] = the place that key u had, -1 if the index
    did not hold it. Erased keys are subtracted from size_P, those of the spill from spilled_P as well."""
    begin, end = begin + first, end + first
    hash_K, line_K = np.empty(AHEAD, np.int64), np.empty(AHEAD, np.int64)
    for u in range(-AHEAD, len(id_U)):
        at = (u + AHEAD) % AHEAD
        if u >= 0 and begin <= shard_U[u] < end:
            p, table, id = np.int64(shard_U[u]), np.int64(table_U[u]), np.int64(id_U[u])
            low, tables = shard_P4[p, 2], shard_P4[p, 3]
            bits = low + tables + np.int64(1)
            hash, line, place1 = hash_K[at], line_K[at], np.int64(0)
            key, fits = (hash & mask_of(low)) | (table << low), _fits(table, tables)
            if fits:
                where, k = line, _find(line, bits, key)
                if k == CELLS and _moved(line) != 0:
                    where = _other(line, hash)
                    k = _find(where, bits, key | (np.int64(1) << (bits - np.int64(1))))
                if k != CELLS:
                    place1 = place_at(where, k, bits)
                    _remove(where, k, bits, hash)
                    size_P[p] -= 1
            if place1 == 0 and (_spills(line) or not fits):
                c = probe(spill_P[p], cells_P[p], home_cell(np.uint64(hash), cells_P[p]), table, id)
                place1 = word_at(spill_P[p], 2 * c + 1) & PLACE_MASK
                if place1 != 0:
                    close_hole(spill_P[p], cells_P[p], c)
                    spilled_P[p] -= 1
                    size_P[p] -= 1
            old_U[u] = place1 - 1
        ahead = u + AHEAD
        if ahead < len(id_U) and begin <= shard_U[ahead] < end:
            hash = hash_key(np.int64(table_U[ahead]), np.int64(id_U[ahead]), np.int64(0))
            hash_K[at] = np.int64(hash)
            line_K[at] = line_address(shard_P4, np.int64(shard_U[ahead]), hash)
            prefetch_word(line_K[at], np.int64(0))
            prefetch_word(_other(line_K[at], np.int64(hash)), np.int64(0))
