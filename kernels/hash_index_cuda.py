"""Open-addressing hash index on the GPU: (table, id) -> place.  U keys, C cells, 16 bytes each.

    cell_C2[c] = (id, table << 40 | place + 1)       word 0 = never taken, word -1 = erased

The cells are those of oneemb.kernels.hash_index, but an erased key leaves a tombstone (word -1): threads cannot close a
hole while others probe past it. An inserted key takes a tombstone or a cell never taken, whichever comes first; the
owner of the index rebuilds it when too few cells were never taken.

Invariants: between a key's home and its cell every cell was taken once; the word alone tells whether a cell is taken,
so every int64 is a legal id. A launch either only reads, only inserts or only erases; inserted keys are distinct and
not in the index, so a cell is claimed by one compare-and-swap, and its id may be written later. A loop ends after C
cells, even in a full index.

Limits: place below 2^40 - 1, table below 2^23.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index import hash_key
from oneemb.kernels.jit import Number, cuda, pair, rule
from oneemb.kernels.jit_code import mul_high

PLACE_BITS = 40
"""Bits of a cell's word that hold the place."""

PLACE_MASK = (1 << 40) - 1


@rule
def home(table: Number, id: Number, cells: Number) -> Number:
    """The cell at which the search for a key begins."""
    return np.int64(mul_high(hash_key(table, id, cells), np.uint64(cells)))


@cuda.inner
def seek(cell_C2: Array, table: Number, id: Number) -> Number:
    """The cell that holds the key, or -1."""
    cells = cell_C2.shape[0]
    c = home(table, id, cells)
    for _ in range(cells):
        id_there, word = pair(cell_C2, c)
        if word == 0:
            return -1
        if word > 0 and id_there == id and word >> PLACE_BITS == table:
            return c
        c += 1
        if c == cells:
            c = 0
    return -1


@cuda.inner
def claim(cell_C2: Array, table: Number, id: Number, word: Number) -> Number:
    """Insert a key that is not in the index: 1 = in a cell never taken before, 0 = in a tombstone, -1 = all are
    taken."""
    cells = cell_C2.shape[0]
    c = home(table, id, cells)
    for _ in range(cells):
        before = cell_C2[c, 1]
        # Another thread may take the cell first: the thread whose swap succeeds has it.
        while before <= 0:
            found = cuda.atomic.cas(cell_C2, (c, 1), before, word)
            if found == before:
                cell_C2[c, 0] = id
                return 1 if before == 0 else 0
            before = found
        c += 1
        if c == cells:
            c = 0
    return -1


@cuda
def find_loop(cell_C2: Array, table_U: Array, id_U: Array, size_1: Array, place_U: Array) -> None:
    """place_U[u] = the place of key u, -1 where the index does not hold it, for the first size_1[0] keys."""
    u = cuda.grid(1)
    while u < size_1[0]:
        c = seek(cell_C2, table_U[u], id_U[u])
        place_U[u] = (cell_C2[c, 1] & PLACE_MASK) - 1 if c >= 0 else -1
        u += cuda.gridsize(1)


@cuda
def insert_loop(cell_C2: Array, table_U: Array, id_U: Array, place_U: Array, count_2: Array) -> None:
    """Insert keys. count_2[0] counts the cells taken for the first time, count_2[1] the keys that found no cell."""
    u = cuda.grid(1)
    while u < id_U.shape[0]:
        taken = claim(cell_C2, table_U[u], id_U[u], (np.int64(table_U[u]) << PLACE_BITS) | (place_U[u] + 1))
        if taken > 0:
            cuda.atomic.add(count_2, 0, 1)
        elif taken < 0:
            cuda.atomic.add(count_2, 1, 1)
        u += cuda.gridsize(1)


@cuda
def erase_loop(cell_C2: Array, table_U: Array, id_U: Array, old_U: Array) -> None:
    """Erase distinct keys; old_U[u] = the place that key u had, -1 if it was not in the index."""
    u = cuda.grid(1)
    while u < id_U.shape[0]:
        c = seek(cell_C2, table_U[u], id_U[u])
        old_U[u] = -1
        if c >= 0:
            old_U[u] = (cell_C2[c, 1] & PLACE_MASK) - 1
            cell_C2[c, 1] = -1
        u += cuda.gridsize(1)


@cuda
def rehash_loop(cell_C2: Array, to_C2: Array, count_2: Array) -> None:
    """Insert all keys of an index into an empty one; count_2 as for `insert_loop`."""
    c = cuda.grid(1)
    while c < cell_C2.shape[0]:
        word = cell_C2[c, 1]
        if word > 0:
            taken = claim(to_C2, word >> PLACE_BITS, cell_C2[c, 0], word)
            cuda.atomic.add(count_2, 0 if taken > 0 else 1, 1)
        c += cuda.gridsize(1)


@cuda
def items_loop(cell_C2: Array, table_N: Array, id_N: Array, place_N: Array, size_1: Array) -> None:
    """Copy all keys out, in any order; size_1[0] counts them."""
    c = cuda.grid(1)
    while c < cell_C2.shape[0]:
        word = cell_C2[c, 1]
        if word > 0:
            n = cuda.atomic.add(size_1, 0, 1)
            table_N[n] = word >> PLACE_BITS
            id_N[n] = cell_C2[c, 0]
            place_N[n] = (word & PLACE_MASK) - 1
        c += cuda.gridsize(1)
