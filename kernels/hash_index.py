"""Open-addressing hash index: (table, id) -> place.  U keys, C cells.

A cell is two int64: the id, and the table and place in one word. Whether a cell is taken is told by the word
alone (0 = empty), so every int64 is a legal id:

    cell_C2[c] = (id, table << 40 | place + 1)

Linear probing; the home of a key is `hash * C >> 64`, so C may be any number. The hash is salted with C: keys
that are read out of one index in the order of its cells arrive in random order at an index of another size,
where they would otherwise pile up in one run.

Invariants: no two cells hold one key; between a key's home and its cell no cell is empty.
Limits: place below 2^40 - 1, table below 2^23.
"""

import numpy as np

from oneemb.kernels.jit import cpu, mul_high, prefetch, rule

__all__ = ["PLACE_MAX", "TABLE_MAX", "cells_erase", "cells_find", "cells_items", "cells_put", "hash_key"]

_PLACE_BITS = np.int64(40)
_PLACE_MASK = np.int64((1 << 40) - 1)
PLACE_MAX = (1 << 40) - 2
TABLE_MAX = (1 << 23) - 1

# Keys whose cells are asked for ahead of the one at work: enough to hide a read from memory.
_AHEAD = 12


@rule
def hash_key(table, id, salt):
    """64 well-mixed bits of a key: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), twice."""
    x = np.uint64(salt) + (np.uint64(table) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) ^ np.uint64(id)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@rule
def _home(table, id, cells):
    return np.int64(mul_high(hash_key(table, id, cells), np.uint64(cells)))


@rule
def _probe(cell_C2, table, id):
    """The cell that holds the key, or else the empty cell where it belongs."""
    cells = len(cell_C2)
    c = _home(table, id, cells)
    while True:
        word = cell_C2[c, 1]
        if word == 0 or (cell_C2[c, 0] == id and word >> _PLACE_BITS == table):
            return c
        c += 1
        if c == cells:
            c = 0


@cpu
def cells_find(begin, end, cell_C2, table_U, id_U, place_U):
    """place_U[u] = the place of key u, -1 where the index does not hold it."""
    cells = len(cell_C2)
    for u in range(begin, min(begin + _AHEAD, end)):
        prefetch(cell_C2, _home(table_U[u], id_U[u], cells))
    for u in range(begin, end):
        if u + _AHEAD < end:
            prefetch(cell_C2, _home(table_U[u + _AHEAD], id_U[u + _AHEAD], cells))
        c = _probe(cell_C2, np.int64(table_U[u]), id_U[u])
        place_U[u] = (cell_C2[c, 1] & _PLACE_MASK) - 1


@cpu
def cells_put(cell_C2, table_U, id_U, place_U, old_U):
    """Set the place of each key in order; old_U[u] = the place it had, -1 if it is new. Returns the new keys.

    The caller has made sure that an empty cell is left after every key is in.
    """
    cells = len(cell_C2)
    size = len(id_U)
    new = 0
    for u in range(min(_AHEAD, size)):
        prefetch(cell_C2, _home(table_U[u], id_U[u], cells))
    for u in range(size):
        if u + _AHEAD < size:
            prefetch(cell_C2, _home(table_U[u + _AHEAD], id_U[u + _AHEAD], cells))
        table = np.int64(table_U[u])
        c = _probe(cell_C2, table, id_U[u])
        word = cell_C2[c, 1]
        old_U[u] = (word & _PLACE_MASK) - 1
        if word == 0:
            new += 1
            cell_C2[c, 0] = id_U[u]
        cell_C2[c, 1] = (table << _PLACE_BITS) | (place_U[u] + 1)
    return new


@cpu
def cells_erase(cell_C2, table_U, id_U, old_U):
    """Take the keys out; old_U[u] = the place key u had, -1 if it was not there. Returns how many were there."""
    cells = len(cell_C2)
    erased = 0
    for u in range(len(id_U)):
        hole = _probe(cell_C2, np.int64(table_U[u]), id_U[u])
        word = cell_C2[hole, 1]
        old_U[u] = (word & _PLACE_MASK) - 1
        if word == 0:
            continue
        erased += 1
        # Close the hole: a later key of the same run moves into it unless its home lies after the hole.
        c = hole
        while True:
            c += 1
            if c == cells:
                c = 0
            word = cell_C2[c, 1]
            if word == 0:
                break
            home = _home(word >> _PLACE_BITS, cell_C2[c, 0], cells)
            stays = hole < home <= c if hole <= c else (hole < home or home <= c)
            if not stays:
                cell_C2[hole, 0] = cell_C2[c, 0]
                cell_C2[hole, 1] = word
                hole = c
        cell_C2[hole, 1] = 0
    return erased


@cpu
def cells_items(cell_C2, first, table_N, id_N, place_N):
    """Copy taken cells from cell `first` on until the arrays are full. Returns (keys copied, cell to go on at)."""
    n = 0
    c = first
    while c < len(cell_C2) and n < len(id_N):
        word = cell_C2[c, 1]
        if word != 0:
            table_N[n] = word >> _PLACE_BITS
            id_N[n] = cell_C2[c, 0]
            place_N[n] = (word & _PLACE_MASK) - 1
            n += 1
        c += 1
    return n, c
