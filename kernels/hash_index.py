"""Open-addressing hash index in shards: (table, id) -> place.  U keys, P shards, C cells of a shard.

The high bits of a key's hash choose its shard, which never changes. Each shard has its own array of cells, so that it
grows alone and threads that work on different shards never write the same memory. A cell is two int64, the id and a
word with the table and the place. A cell is empty if its word is 0, so every int64 is a legal id:

    cell_C2[c] = (id, table << 40 | place + 1)

Probing is linear, by lines of four cells; a line fills a line of the CPU's cache. The home of a key is the first cell
of a line. The four cells of a line are compared at once, as one vector, since a branch for each cell would mostly be
mispredicted. The home is `mixed hash * lines >> 64`, so a shard may have any number of lines. The mixing includes C:
without it, keys that are copied from one index to an index of another size, in the order of the cells, would all fill
the same run of cells.

Loops take the address and the number of cells of each shard: address_P and cells_P, int64 [P]. Addresses are multiples
of 64, numbers of cells multiples of LINE.

Invariants: no two cells hold the same key; every line from a key's home line up to the line before the key's own is
full; within a line, taken cells come before empty ones.
Limits: place below 2^40 - 1, table below 2^23.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, part, rule
from oneemb.kernels.jit_code import end_of_line, keep_rolled, mul_high, natural, prefetch_word, set_word, word_at
from oneemb.kernels.threads import Threads

LINE = 4
"""Cells of a line."""

BLOCK = 1 << 13
"""Keys of a block; `count_keys` and `order_keys` work block by block."""

PLACE_BITS = 40
"""Bits of the place in a cell's word; the table lies above them."""

_PLACE_BITS = np.int64(PLACE_BITS)
_PLACE_MASK = np.int64((1 << 40) - 1)
PLACE_MAX = (1 << 40) - 2
TABLE_MAX = (1 << 23) - 1

# Keys whose cells are prefetched before the first of them is compared: enough to hide a read from memory.
_AHEAD = 32
_AHEAD_HOMES = np.uint64(_AHEAD)
SHARD_ROOM = 3 * _AHEAD
"""Length of the scratch array of `shard_find`: two groups of homes, and the keys of a group that are finished later."""
_RING = np.int64(2 * _AHEAD - 1)  # mask of an index into scratch arrays, which hold two groups of keys


@rule
def hash_key(table: Number, id: Number, salt: Number) -> Number:
    """64 well-mixed bits of a key: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), twice."""
    x = np.uint64(salt) + (np.uint64(table) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) ^ np.uint64(id)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@rule
def _shard(hash: Number, shards: Number) -> Number:
    return np.int64(mul_high(hash, np.uint64(shards)))


@rule
def home_cell(hash: Number, cells: Number) -> Number:
    """First cell of a key's home line. The hash is mixed once more, since its high bits have chosen the shard."""
    x = hash + np.uint64(cells) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = x ^ (x >> np.uint64(32))
    return np.int64(mul_high(x * np.uint64(0xD6E8FEB86659FD93), np.uint64(cells >> 2)) << np.uint64(2))


@rule
def _next_line(c: Number, cells: Number) -> Number:
    return 0 if c + LINE == cells else c + LINE


@rule
def probe(address: Number, cells: Number, home: Number, table: Number, id: Number) -> Number:
    """The cell that holds the key, or else the empty cell where it belongs."""
    c = home
    while True:
        end = end_of_line(address, c, id, table, _PLACE_BITS)
        if end != LINE:
            return c + end
        c = _next_line(c, cells)


@rule
def _locate(
    address_P: Array, cells_P: Array, table_U: Array, id_U: Array, first: Number, last: Number, hash_K: Array,
    shard_K: Array, home_K: Array, k: Number,
) -> None:  # fmt: skip
    """Write the shards and homes of keys first to last - 1 to shard_K and home_K from index k on, and prefetch the
    homes."""
    # The hashes have a loop of their own: LLVM vectorizes it, since it has no branches and reads no tables.
    for i in range(natural(last - first)):
        u = natural(first) + i
        hash_K[i] = hash_key(np.int64(table_U[u]), np.int64(id_U[u]), np.int64(0))
    for i in range(natural(last - first)):
        p = natural(_shard(hash_K[i], len(cells_P)))
        home = home_cell(hash_K[i], cells_P[p])
        shard_K[natural(k) + i] = p
        home_K[natural(k) + i] = home
        prefetch_word(address_P[p], 2 * home)


@cpu
def cells_find(
    begin: Number, end: Number, address_P: Array, cells_P: Array, table_U: Array, id_U: Array, place_U: Array
) -> None:
    """place_U[u] = the place of key u, -1 where the index does not hold it.

    One key in five is not in its home line. Such keys are collected and finished later: a branch for each would be
    mispredicted, and the loop would then wait for the next line to come from memory.
    """
    shard_K, home_K = np.empty(2 * _AHEAD, np.int64), np.empty(2 * _AHEAD, np.int64)
    later_K, hash_K = np.empty(_AHEAD, np.int64), np.empty(_AHEAD, np.uint64)
    _locate(address_P, cells_P, table_U, id_U, begin, min(begin + _AHEAD, end), hash_K, shard_K, home_K, 0)
    for first in range(begin, end, _AHEAD):
        last = min(first + _AHEAD, end)
        k_next = (last - begin) & _RING
        _locate(address_P, cells_P, table_U, id_U, last, min(last + _AHEAD, end), hash_K, shard_K, home_K, k_next)
        later = natural(0)
        for u in range(natural(first), natural(last)):
            at = (u - natural(begin)) & natural(_RING)
            p, c = natural(shard_K[at]), home_K[at]
            address = address_P[p]
            k = end_of_line(address, c, np.int64(id_U[u]), np.int64(table_U[u]), _PLACE_BITS)
            place_U[u] = (word_at(address, 2 * (c + (k & 3)) + 1) & _PLACE_MASK) - 1
            later_K[later] = u
            later += natural(k == LINE)
            following = _next_line(c, cells_P[p])
            prefetch_word(address, 2 * (following if k == LINE else c))
        for i in range(later):
            u = natural(later_K[i])
            at = (u - natural(begin)) & natural(_RING)
            p = natural(shard_K[at])
            following = _next_line(home_K[at], cells_P[p])
            c = probe(address_P[p], cells_P[p], following, np.int64(table_U[u]), np.int64(id_U[u]))
            place_U[u] = (word_at(address_P[p], 2 * c + 1) & _PLACE_MASK) - 1


@part
def shard_find(
    begin: Number, end: Number, address: Number, cells: Number, table_U: Array, id_U: Array, place_U: Array,
    home_2K: Array,
) -> None:  # fmt: skip
    """Do the work of `cells_find` in an index of one shard. home_2K: scratch memory, int64 [SHARD_ROOM]."""
    homes = _AHEAD_HOMES
    _homes(begin, min(begin + _AHEAD, end), address, cells, table_U, id_U, home_2K, natural(0))
    now = natural(0)
    for first in range(begin, end, _AHEAD):
        last = min(first + _AHEAD, end)
        _homes(last, min(last + _AHEAD, end), address, cells, table_U, id_U, home_2K, homes - now)
        later = natural(0)
        for i in range(natural(last - first)):
            u, c = natural(first) + i, home_2K[now + i]
            k = end_of_line(address, c, np.int64(id_U[u]), np.int64(table_U[u]), _PLACE_BITS)
            place_U[u] = (word_at(address, 2 * (c + (k & 3)) + 1) & _PLACE_MASK) - 1
            home_2K[homes + homes + later] = i
            later += natural(k == LINE)
            prefetch_word(address, 2 * (_next_line(c, cells) if k == LINE else c))
        for i in range(later):
            keep_rolled()
            i = natural(home_2K[homes + homes + i])
            u, c = natural(first) + i, _next_line(home_2K[now + i], cells)
            c = probe(address, cells, c, np.int64(table_U[u]), np.int64(id_U[u]))
            place_U[u] = (word_at(address, 2 * c + 1) & _PLACE_MASK) - 1
        now = homes - now


@part
def _homes(
    first: Number, last: Number, address: Number, cells: Number, table_U: Array, id_U: Array, home_2K: Array, k: Number
) -> None:
    """Write the homes of keys first to last - 1 to home_2K from index k on, and prefetch them."""
    for i in range(natural(last - first)):  # A loop of its own, as in `_locate`.
        u = natural(first) + i
        home_2K[k + i] = np.int64(hash_key(np.int64(table_U[u]), np.int64(id_U[u]), np.int64(0)))
    for i in range(natural(last - first)):
        home = home_cell(np.uint64(home_2K[k + i]), cells)
        home_2K[k + i] = home
        prefetch_word(address, 2 * home)


@cpu
def count_keys(begin: Number, end: Number, table_U: Array, id_U: Array, shard_U: Array, count_KP: Array) -> None:
    """For the keys of blocks begin to end - 1: shard_U[u] = the key's shard; count_KP[block, shard] += 1."""
    for k in range(begin, end):
        for u in range(k * BLOCK, min((k + 1) * BLOCK, len(id_U))):
            p = _shard(hash_key(np.int64(table_U[u]), np.int64(id_U[u]), np.int64(0)), count_KP.shape[1])
            shard_U[u] = p
            count_KP[k, p] += 1


@cpu
def order_keys(
    begin: Number, end: Number, table_U: Array, id_U: Array, place_U: Array, shard_U: Array, next_KP: Array,
    order_U: Array, cell_U2: Array,
) -> None:  # fmt: skip
    """Write the cells of the keys of blocks begin to end - 1 to cell_U2, shard by shard.

    next_KP: index at which the next cell of each block and shard goes. order_U[i] = the key whose cell is cell_U2[i];
    an empty `order_U` is not written.
    """
    for k in range(begin, end):
        for u in range(k * BLOCK, min((k + 1) * BLOCK, len(shard_U))):
            p = shard_U[u]
            i = next_KP[k, p]
            next_KP[k, p] += 1
            if len(order_U) != 0:
                order_U[i] = u
            cell_U2[i, 0] = id_U[u]
            cell_U2[i, 1] = (np.int64(table_U[u]) << _PLACE_BITS) | (place_U[u] + 1)


@cpu
def cells_put(
    begin: Number, end: Number, address_P: Array, cells_P: Array, size_P: Array, begin_P1: Array, order_U: Array,
    cell_U2: Array, old_U: Array,
) -> None:  # fmt: skip
    """Put the cells cell_U2[begin_P1[p]] to cell_U2[begin_P1[p + 1] - 1] into shard p, for shards begin to end - 1.

    old_U[order_U[i]] = the place that the key of cell i had before, -1 if the key is new. If `order_U` is empty, the
    place goes to old_U[i], which is faster since the writes are sequential. Of equal keys the last one stays. New keys
    are added to size_P. The caller has made sure that each shard keeps an empty cell.
    """
    home_K = np.empty(_AHEAD, np.int64)
    for p in range(begin, end):
        address, cells = address_P[p], cells_P[p]
        new = 0
        for first in range(begin_P1[p], begin_P1[p + 1], _AHEAD):
            last = min(first + _AHEAD, begin_P1[p + 1])
            for i in range(first, last):
                home = home_cell(hash_key(cell_U2[i, 1] >> _PLACE_BITS, cell_U2[i, 0], np.int64(0)), cells)
                home_K[i - first] = home
                prefetch_word(address, 2 * home)
            for i in range(first, last):
                id, word = cell_U2[i, 0], cell_U2[i, 1]
                c = probe(address, cells, home_K[i - first], word >> _PLACE_BITS, id)
                old = word_at(address, 2 * c + 1)
                old_U[order_U[i] if len(order_U) != 0 else i] = (old & _PLACE_MASK) - 1
                new += old == 0
                set_word(address, 2 * c, id)
                set_word(address, 2 * c + 1, word)
        size_P[p] += new


@cpu
def cells_move(
    begin: Number, end: Number, address_P: Array, cells_P: Array, shard_G: Array, address_G: Array, cells_G: Array
) -> None:
    """Copy shards shard_G[begin:end] into larger arrays of cells, address_G and cells_G, which are not initialized. The
    loop zeroes them before it reads them: the system would map memory twice that is read before it is written."""
    for g in range(begin, end):
        p = shard_G[g]
        for w in range(2 * cells_G[g]):
            set_word(address_G[g], w, 0)
        for c in range(cells_P[p]):
            word = word_at(address_P[p], 2 * c + 1)
            if word != 0:
                table, id = word >> _PLACE_BITS, word_at(address_P[p], 2 * c)
                home = home_cell(hash_key(table, id, np.int64(0)), cells_G[g])
                to = probe(address_G[g], cells_G[g], home, table, id)
                set_word(address_G[g], 2 * to, id)
                set_word(address_G[g], 2 * to + 1, word)


@rule
def _move_cell(address: Number, c: Number, to: Number) -> None:
    set_word(address, 2 * to, word_at(address, 2 * c))
    set_word(address, 2 * to + 1, word_at(address, 2 * c + 1))


@rule
def _taken_of_line(address: Number, c: Number) -> Number:
    """Number of taken cells in the line of cells c to c + 3."""
    taken = 0
    for k in range(LINE):
        taken += word_at(address, 2 * (c + k) + 1) != 0
    return taken


@rule
def _movable(address: Number, cells: Number, line: Number) -> Number:
    """Cell of a later line whose key may move to the full line that begins at cell `line`; -1 if there is none."""
    c = _next_line(line, cells)
    while True:
        for k in range(LINE):
            word = word_at(address, 2 * (c + k) + 1)
            if word == 0:
                return -1
            home = home_cell(hash_key(word >> _PLACE_BITS, word_at(address, 2 * (c + k)), np.int64(0)), cells)
            from_home, from_line = c - home, c - line
            from_home += cells if from_home < 0 else 0
            from_line += cells if from_line < 0 else 0
            if from_home >= from_line:
                return c + k
        c = _next_line(c, cells)


@rule
def close_hole(address: Number, cells: Number, hole: Number) -> None:
    """Empty cell `hole`, and move keys nearer to their homes that could not be found otherwise.

    The order of keys within a line does not matter. Keys of later lines have to move only if the hole's line was full,
    since a search goes on to the next line only from a full one.
    """
    while True:
        line = hole - hole % LINE
        taken = _taken_of_line(address, line)
        c = _movable(address, cells, line) if taken == LINE else np.int64(-1)
        if c < 0:
            last = line + taken - 1
            _move_cell(address, last, hole)
            set_word(address, 2 * last + 1, 0)
            return
        _move_cell(address, c, hole)
        hole = c


@cpu
def cells_erase(
    begin: Number, end: Number, first: Number, address_P: Array, cells_P: Array, size_P: Array, shard_U: Array,
    table_U: Array, id_U: Array, old_U: Array,
) -> None:  # fmt: skip
    """Erase the keys of shards first + begin to first + end - 1. old_U[u] = the place that key u had, -1 if the index
    did not hold it. Erased keys are subtracted from size_P."""
    begin, end = begin + first, end + first
    home_K = np.empty(_AHEAD, np.int64)
    for u in range(-_AHEAD, len(id_U)):
        at = (u + _AHEAD) % _AHEAD
        if u >= 0 and begin <= shard_U[u] < end:
            p, table, id = shard_U[u], np.int64(table_U[u]), np.int64(id_U[u])
            address, cells = address_P[p], cells_P[p]
            c = probe(address, cells, home_K[at], table, id)
            word = word_at(address, 2 * c + 1)
            old_U[u] = (word & _PLACE_MASK) - 1
            if word != 0:
                size_P[p] -= 1
                close_hole(address, cells, c)
        ahead = u + _AHEAD
        if ahead < len(id_U) and begin <= shard_U[ahead] < end:
            p = shard_U[ahead]
            home = home_cell(hash_key(np.int64(table_U[ahead]), np.int64(id_U[ahead]), np.int64(0)), cells_P[p])
            home_K[at] = home
            prefetch_word(address_P[p], 2 * home)
            prefetch_word(address_P[p], 2 * _next_line(home, cells_P[p]))


@cpu
def cells_items(
    address_P: Array, cells_P: Array, p: Number, c: Number, table_N: Array, id_N: Array, place_N: Array
) -> tuple:
    """Copy the taken cells, from cell c of shard p on, until the arrays are full. Returns (number of copied keys, next
    shard, next cell); the next shard is P once all are copied."""
    n = 0
    while p < len(cells_P):
        while c < cells_P[p]:
            word = word_at(address_P[p], 2 * c + 1)
            if word != 0:
                if n == len(id_N):
                    return n, p, c
                table_N[n] = word >> _PLACE_BITS
                id_N[n] = word_at(address_P[p], 2 * c)
                place_N[n] = (word & _PLACE_MASK) - 1
                n += 1
            c += 1
        p += 1
        c = 0
    return n, p, c


@cpu
def _find_each_cpu(
    begin: Number, end: Number, address_MP: Array, cells_MP: Array, begin_M1: Array, table_U: Array, id_U: Array,
    place_U: Array,
) -> None:  # fmt: skip
    for m in range(len(begin_M1) - 1):
        first, last = max(begin, begin_M1[m]), min(end, begin_M1[m + 1])
        if first < last:
            cells_find(first, last, address_MP[m], cells_MP[m], table_U, id_U, place_U)


def find_each(
    address_MP: np.ndarray,
    cells_MP: np.ndarray,
    begin_M1: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    *,
    threads: Threads,
) -> np.ndarray:
    """Places of keys in M indexes, -1 for an absent key: int64 [U]. Keys begin_M1[m] to begin_M1[m + 1] - 1 are looked
    up in index m, by that index's table numbers; address_MP and cells_MP describe the shards of each index."""
    place_U = np.empty(len(id_U), np.int64)
    threads.run(_find_each_cpu, len(id_U), address_MP, cells_MP, begin_M1, table_U, id_U, place_U)
    return place_U
