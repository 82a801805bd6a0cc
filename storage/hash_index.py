"""Hash index from keys to places, which are int64 numbers such as slots. It grows one shard at a time: 24 bytes a key
in use.

Growth never stops a caller for long. A full shard grows alone, by the factor `growth`, 1.4 unless the owner gives
another. A larger factor copies keys less often and leaves more cells empty: 30 bytes a key at 2.2. Each shard grows to
sizes of its own, so shards do not become full at the same moment.
P shards, G shards that grow, C cells, K blocks of keys.

Invariants: at most 84 of 100 cells of a shard are taken, so that a probe ends soon. A call that finds no memory raises
IndexMemoryError, has changed nothing, and says how much was needed.
"""

import math
from collections.abc import Iterator

import numpy as np

from oneemb.kernels.hash_index import (
    BLOCK,
    LINE,
    PLACE_BITS,
    PLACE_MAX,
    TABLE_MAX,
    cells_erase,
    cells_find,
    cells_items,
    cells_move,
    cells_put,
    count_keys,
    order_keys,
)
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import IndexMemoryError
from oneemb.storage.fs import aligned_bytes

SHARDS = 256
"""Number of shards, P. The hash of a key alone decides its shard."""

_CELL_BYTES = 16
_CELLS_MIN = LINE
_LOAD_MAX = 0.84

# Number of shards whose cells share a block of memory.
_BLOCK_SHARDS = 16

# Least bytes of a block that asks for huge pages; bytes of a huge page.
_HUGE_MIN, _HUGE_PAGE = 1 << 22, 1 << 21

SHARE_MIN = 512
"""Least number of keys for which another thread is used."""

PHASE_P = np.array([int(f"{p:08b}"[::-1], 2) for p in range(SHARDS)]) / SHARDS
"""Offset of each shard's sizes between two steps of growth, from 0 to 1, float64 [P]. Bits are reversed, so that the
offsets of neighbouring shards lie far apart."""

NO_ORDER = np.empty(0, np.int64)
"""`order_U` for `in_shards`, if the caller needs no order."""


def check_tables(table_U: np.ndarray) -> None:
    """Raise ValueError if a table number, int32 [U], is outside 0 to TABLE_MAX. `find` does not check: it would take
    such a key for another."""
    if len(table_U) and (table_U.min() < 0 or table_U.max() > TABLE_MAX):
        raise ValueError(f"tables must be from 0 to {TABLE_MAX}, got {table_U.min()} to {table_U.max()}")


def no_memory(keys: int, nbytes: int, more_bytes: int) -> IndexMemoryError:
    """Error of an index of `keys` keys in `nbytes` bytes that cannot allocate `more_bytes`."""
    return IndexMemoryError(
        f"the index cannot grow: it holds {keys} keys in {nbytes} bytes and must allocate {more_bytes} more for new"
        " keys; nothing has changed, and every key can still be used and saved; free memory, or save and continue on a"
        " machine with more memory"
    )


def first_present(old_U: np.ndarray, cell_U2: np.ndarray) -> tuple[int, int] | None:
    """(table, id) of the first cell whose key had a place before a put, old_U[i] for cell i; None = no key had one."""
    for id, word in cell_U2[old_U >= 0][:1].tolist():
        return word >> PLACE_BITS, id
    return None


class HashIndex:
    """Map from (table, id) to a place, an int64 from 0 to 2^40 - 2. Tables are from 0 to 2^23 - 1.

    Args:
        expected: number of keys for which the index makes room at construction.
        growth: factor by which the cells of a full shard are multiplied.
    """

    def __init__(self, threads: Threads, expected: int = 0, growth: float = 1.4):
        self._threads = threads
        self._growth = growth
        self.clear()
        self.reserve(expected)

    def __len__(self) -> int:
        return int(self._size_P.sum())

    @property
    def capacity(self) -> int:
        """Number of keys that fit in all shards, present keys included, if the keys spread evenly over the shards."""
        return int(self._limit_P.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return int(self._cells_P.sum()) * _CELL_BYTES

    @property
    def shards(self) -> tuple[np.ndarray, np.ndarray]:
        """Address of each shard's cells, and number of its cells: two int64 [P], for a loop over several indexes. Valid
        until keys are added."""
        return self._address_P, self._cells_P

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`shards`, and the number of keys of each shard, int64 [P], for a loop that adds keys where there are cells,
        and erases keys."""
        return self._address_P, self._cells_P, self._size_P

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The place of each key, -1 for an absent key: int64 [U]."""
        place_U = np.empty(len(id_U), np.int64)
        self._threads.run(cells_find, len(id_U), self._address_P, self._cells_P, table_U, id_U, place_U)
        return place_U

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Set the place of each key; of equal keys, the last one decides. Returns the former places, -1 for a new key:
        int64 [U]."""
        order_U = np.empty(len(id_U), np.int64)
        begin_P1, cell_U2 = self.in_shards(table_U, id_U, place_U, order_U)
        self.grow(self._size_P + np.diff(begin_P1))
        return self._put_cells(begin_P1, order_U, cell_U2)

    def replace(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Faster `put` for keys that are present or had room reserved. Returns the former places, -1 for a new key, in
        any order."""
        begin_P1, cell_U2 = self.in_shards(table_U, id_U, place_U, NO_ORDER)
        try:
            self.grow(self._size_P + np.diff(begin_P1))
        except IndexMemoryError:
            # Present keys need no room. Each shard must keep an empty cell, or a search would never end.
            new = np.flatnonzero(self.find(table_U, id_U) < 0)
            if np.any(self._size_P + self.key_counts(table_U[new], id_U[new]) >= self._cells_P):
                raise
        return self._put_cells(begin_P1, NO_ORDER, cell_U2)

    def put_new(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> tuple[int, int] | None:
        """Faster `put` for absent keys, each given once. Returns (table, id) of a key that was present or given twice;
        None = no such key."""
        begin_P1, cell_U2 = self.in_shards(table_U, id_U, place_U, NO_ORDER)
        self.grow(self._size_P + np.diff(begin_P1))
        return first_present(self._put_cells(begin_P1, NO_ORDER, cell_U2), cell_U2)

    def _put_cells(self, begin_P1: np.ndarray, order_U: np.ndarray, cell_U2: np.ndarray) -> np.ndarray:
        """`put_cells`. Returns the former places: int64 [U]."""
        old_U = np.empty(len(cell_U2), np.int64)
        self.put_cells(begin_P1, order_U, cell_U2, old_U)
        return old_U

    def put_cells(self, begin_P1: np.ndarray, order_U: np.ndarray, cell_U2: np.ndarray, old_U: np.ndarray) -> None:
        """Put the cells that `in_shards` has returned. Their keys are present or have room: no shard grows, and no
        memory is allocated. Writes the former places to old_U, in the order of the keys, or of the cells if `order_U`
        is empty."""
        self._threads.run(
            cells_put, SHARDS, self._address_P, self._cells_P, self._size_P, begin_P1, order_U, cell_U2, old_U,
            share_min=1 + SHARDS * SHARE_MIN // (len(cell_U2) + 1),
        )  # fmt: skip

    def in_shards(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray, order_U: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sort keys by shard. Returns the begin of each shard among the cells, int64 [P + 1], and the cells of the
        keys, int64 [U, 2], within a shard in the order given. Writes the number of the key of cell i to order_U[i],
        unless `order_U` is empty. Raises ValueError if a table is invalid."""
        assert len(place_U) == 0 or 0 <= place_U.min() <= place_U.max() <= PLACE_MAX
        check_tables(table_U)
        shard_U, count_KP = self._count(table_U, id_U)
        begin_P1 = np.concatenate([[0], np.cumsum(count_KP.sum(0))])
        next_KP = begin_P1[:-1] + np.cumsum(count_KP, 0) - count_KP
        cell_U2 = np.empty((len(id_U), 2), np.int64)
        self._threads.run(
            order_keys, len(count_KP), table_U, id_U, place_U, shard_U, next_KP, order_U, cell_U2, share_min=1
        )
        return begin_P1, cell_U2

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase the keys. Returns their former places, -1 for an absent key: int64 [U]."""
        old_U = np.empty(len(id_U), np.int64)
        shard_U, _ = self._count(table_U, id_U)
        if len(id_U) == 0:
            return old_U
        # Evicted rows lie in a few neighbouring shards: threads share these shards only.
        first, shards = int(shard_U.min()), int(shard_U.max()) - int(shard_U.min()) + 1
        self._threads.run(
            cells_erase, shards, first, self._address_P, self._cells_P, self._size_P, shard_U, table_U, id_U, old_U,
            share_min=1 + shards * SHARE_MIN // (len(id_U) + 1),
        )  # fmt: skip
        return old_U

    def items_of(self, p: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The keys of shard p with their places: table_N int32, id_N int64, place_N int64."""
        size = int(self._size_P[p])
        table_N, id_N, place_N = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(size, np.int64)
        cells_items(self._address_P[p : p + 1], self._cells_P[p : p + 1], 0, 0, table_N, id_N, place_N)
        return table_N, id_N, place_N

    def items(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield all keys with places, in batches (table_N int32, id_N int64, place_N int64). The index must not change
        meanwhile."""
        shard = cell = 0
        while shard < SHARDS:
            table_N, id_N, place_N = np.empty(batch, np.int32), np.empty(batch, np.int64), np.empty(batch, np.int64)
            size, shard, cell = cells_items(self._address_P, self._cells_P, shard, cell, table_N, id_N, place_N)
            if size:
                yield table_N[:size], id_N[:size], place_N[:size]

    def reserve(self, more: int) -> None:
        """Make room for `more` unknown keys beside the present ones: each shard gets room for its mean share of them
        and six standard deviations."""
        if more > 0:
            mean = more / SHARDS
            self.grow(self._size_P + min(more, math.ceil(mean + 6 * math.sqrt(mean)) + 4))

    def reserve_keys(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Make room for these keys, so that a `put` of them cannot fail."""
        self.grow(self._size_P + self.key_counts(table_U, id_U))

    @property
    def limit_P(self) -> np.ndarray:
        """Number of keys for which each shard has room: int64 [P]."""
        return self._limit_P

    @property
    def sizes_P(self) -> np.ndarray:
        """Number of keys in each shard: int64 [P]."""
        return self._size_P.copy()

    def key_counts(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Number of these keys that belong to each shard: int64 [P]."""
        return self._count(table_U, id_U)[1].sum(0)

    def shards_of(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The shard of each key: uint8 [U]."""
        return self._count(table_U, id_U)[0]

    def has_room(self, need_P: np.ndarray) -> bool:
        """Whether each shard p has room for need_P[p] keys, present keys included."""
        return bool(np.all(need_P <= self._limit_P))

    def grow(self, need_P: np.ndarray) -> None:
        """Make room in each shard p for need_P[p] keys, present keys included."""
        shard_G = np.flatnonzero(need_P > self._limit_P)
        if len(shard_G) == 0:
            return
        self._resize(shard_G, need_P[shard_G])

    def shrink(self, shard_G: np.ndarray) -> None:
        """Give these shards no more cells than their keys need, if they have more than four times as many. After a
        MemoryError nothing has changed."""
        cells_G = _cells_for(self._size_P[shard_G], PHASE_P[shard_G], self._growth)
        shard_G = shard_G[self._cells_P[shard_G] > 4 * cells_G]
        if len(shard_G):
            self._resize(shard_G, self._size_P[shard_G])

    def _resize(self, shard_G: np.ndarray, need_G: np.ndarray) -> None:
        """Move shards into as many cells as need_G[g] keys need."""
        order = np.argsort(PHASE_P[shard_G])
        shard_G, need_G = shard_G[order], need_G[order]
        cells_G = _cells_for(need_G, PHASE_P[shard_G], self._growth)
        limit_G = _limit(cells_G)
        try:
            grown, address_G = _new_cells(cells_G)
        except MemoryError as error:
            raise no_memory(len(self), self.nbytes, int(cells_G.sum()) * _CELL_BYTES) from error
        self._threads.run(
            cells_move, len(grown), self._address_P, self._cells_P, shard_G, address_G, cells_G, share_min=1
        )
        for p, cell_C2 in zip(shard_G.tolist(), grown, strict=True):
            self._cell_PC2[p] = cell_C2
        self._address_P[shard_G], self._cells_P[shard_G] = address_G, cells_G
        self._limit_P[shard_G] = limit_G

    def _count(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each key, uint8 [U]; and the number of keys of each shard in each block of BLOCK keys, int64 [K,
        P]."""
        shard_U = np.empty(len(id_U), np.uint8)
        count_KP = np.zeros((-(-len(id_U) // BLOCK), SHARDS), np.int64)
        self._threads.run(count_keys, len(count_KP), table_U, id_U, shard_U, count_KP, share_min=1)
        return shard_U, count_KP

    def clear(self) -> None:
        """Erase all keys."""
        cells_P = np.full(SHARDS, _CELLS_MIN, np.int64)
        cell_PC2, address_P = _new_cells(cells_P)
        for cell_C2 in cell_PC2:
            cell_C2.fill(0)
        size_P, limit_P = np.zeros(SHARDS, np.int64), _limit(cells_P)
        # The arrays are kept for loops, which are given their addresses.
        self._cell_PC2, self._cells_P, self._address_P = cell_PC2, cells_P, address_P
        self._size_P, self._limit_P = size_P, limit_P


def _new_cells(cells_G: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """One array of cells_G[g] cells for each of G shards, int64 [cells, 2], aligned to cache lines, not initialized;
    and their addresses, int64 [G].

    Neighbouring shards share a block of memory, which is freed once all of its shards have grown again.
    """
    made: list[np.ndarray] = []
    address_G = np.empty(len(cells_G), np.int64)
    for first in range(0, len(cells_G), _BLOCK_SHARDS):
        end_B = np.cumsum(cells_G[first : first + _BLOCK_SHARDS])
        block_C2 = _map_cells(int(end_B[-1]) + LINE)
        address = block_C2.ctypes.data
        end_B += -(address // _CELL_BYTES) % LINE
        begin_B = end_B - cells_G[first : first + _BLOCK_SHARDS]
        address_G[first : first + _BLOCK_SHARDS] = address + _CELL_BYTES * begin_B
        made += [block_C2[begin:end] for begin, end in zip(begin_B.tolist(), end_B.tolist(), strict=True)]
    return made, address_G


def _map_cells(cells: int) -> np.ndarray:
    """Memory for `cells` cells: int64 [cells, 2]. Large memory is newly mapped in huge pages: a search takes a third
    longer in small pages, which recycled memory would keep."""
    size = cells * _CELL_BYTES
    if size < _HUGE_MIN:
        return np.empty((cells, 2), np.int64)
    try:
        memory = aligned_bytes(size + _HUGE_PAGE)
    except OSError as error:
        raise MemoryError(f"the system gives no {size} bytes") from error
    first = -memory.ctypes.data % _HUGE_PAGE
    return memory[first : first + size].view(np.int64).reshape(cells, 2)


def _limit(cells_P: np.ndarray) -> np.ndarray:
    """Maximum number of keys in shards of cells_P cells: int64 [P]."""
    return (cells_P * _LOAD_MAX).astype(np.int64)


def _cells_for(need_P: np.ndarray, phase_P: np.ndarray, growth: float) -> np.ndarray:
    """Least number of cells, among the sizes that each shard may have, with room for need_P keys: int64 [P]."""
    least_P = (need_P + 1) / _LOAD_MAX
    step_P = np.maximum(np.ceil(np.log(least_P / _CELLS_MIN) / math.log(growth) - phase_P), 0)
    return (np.ceil(_CELLS_MIN * growth ** (step_P + phase_P)).astype(np.int64) + LINE) // LINE * LINE
