"""Hash index of 10 bytes a cell, for the many keys of a table on disk: from a million keys on, 12 to 16 bytes a key, 14
on average.

Cells are described in `kernels/compact_index.py`. Shards are those of `HashIndex`. A shard with few keys has no lines:
its keys are in the spill, a `HashIndex` with cells of 16 bytes. Keys that find no room in a full shard are in the
spill, too: less than one key in 1000, or all keys if the ids were chosen to have equal hashes.
P shards, G shards that grow, B blocks, U keys.

Growth copies a shard in the order of its lines, which is the order of the new lines as well, so that it costs little.
A shard grows alone, by a factor of its own, so that shards do not become full at the same moment. Blocks of the old
shard serve the next one that grows.

Invariants: at most 92 of 100 cells of a shard are taken. A call that finds no memory raises IndexMemoryError, has
changed nothing, and says how much was needed.
"""

import math
from collections.abc import Iterator

import numpy as np

from oneemb.kernels.compact_index import (
    AHEAD,
    BLOCK_BYTES,
    CELLS,
    LINES,
    LINES_MAX,
    SPILLED,
    compact_erase,
    compact_find,
    compact_put,
)
from oneemb.kernels.compact_index_move import compact_move
from oneemb.kernels.hash_index import PLACE_BITS
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import IndexMemoryError
from oneemb.storage.fs import aligned_bytes, free_pages
from oneemb.storage.hash_index import NO_ORDER, PHASE_P, SHARDS, SHARE_MIN, HashIndex, first_present, no_memory
from oneemb.storage.locking.store_lock import changing

# Shards that grow at once.
_GROWN = 8
# Most keys of a shard without lines. A block has room for 353.
_SMALL = 192
_BLOCK_KEYS = int(CELLS * LINES * 0.92)
# Factor by which a full shard grows, and the most that is added to the factor, by the shard's phase.
_GROWTH, _GROWTH_MORE = 1.2, 0.2
# The most room, beyond what is asked for, that a shard gets at first.
_ROOM_MORE = 0.12
# The spill has room for AHEAD keys, with which a put is fast, and this part of the new keys of a shard with lines.
_SPILL_PART = 256
# Bits of a cell for the table; all bits set mark a key in the spill. With more bits places would not fit.
_TABLE_BITS = 8
# Cells of keys that one shard may leave over when it grows, before the growth is done again with room for more.
_LEFT = 64
# Least bytes of a piece of memory, and of one in huge pages.
_PIECE_BYTES, _HUGE_PAGE = 1 << 18, 1 << 21


class BlockMemory:
    """Memory in blocks of BLOCK_BYTES, known by their addresses. Blocks that were given back are used again."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        # Free blocks; and free blocks whose pages were given to the system.
        self._free_B = self._bare_B = np.empty(0, np.int64)
        self._mapped_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all blocks; free blocks count until their pages are given to the system."""
        return self._mapped_bytes - len(self._bare_B) * BLOCK_BYTES

    def take(self, blocks: int) -> np.ndarray:
        """Addresses of blocks, whose contents are undefined: int64 [blocks]. MemoryError if the system gives none."""
        if blocks > len(self._free_B) and len(self._bare_B):
            self._free_B, self._bare_B = np.concatenate([self._bare_B, self._free_B]), np.empty(0, np.int64)
        more = blocks - len(self._free_B)
        if more > 0:
            size = max(more * BLOCK_BYTES, _PIECE_BYTES, self._mapped_bytes >> 5)
            size = -(-size // _HUGE_PAGE) * _HUGE_PAGE if size >= _HUGE_PAGE else -(-size // BLOCK_BYTES) * BLOCK_BYTES
            try:
                piece = aligned_bytes(size + (_HUGE_PAGE if size >= _HUGE_PAGE else 0))
            except OSError as error:
                raise MemoryError(f"the system gives no {size} bytes") from error
            begin = piece.ctypes.data
            begin += -begin % (_HUGE_PAGE if size >= _HUGE_PAGE else BLOCK_BYTES)
            # Free blocks of earlier pieces are taken first.
            free_B = np.concatenate([np.arange(begin + size - BLOCK_BYTES, begin - 1, -BLOCK_BYTES), self._free_B])
            self._pieces.append(piece)
            self._free_B, self._mapped_bytes = free_B, self._mapped_bytes + size
        taken_B = self._free_B[len(self._free_B) - blocks :].copy()
        self._free_B = self._free_B[: len(self._free_B) - blocks]
        return taken_B

    def give(self, address_B: np.ndarray) -> None:
        """Give blocks back."""
        self._free_B = np.concatenate([self._free_B, address_B])

    def trim(self, keep: int) -> None:
        """Give the pages of all free blocks but `keep` to the system."""
        bare_B = np.sort(self._free_B[: max(0, len(self._free_B) - keep)])
        if len(bare_B):
            first_N = np.flatnonzero(np.diff(bare_B, prepend=-1) != BLOCK_BYTES)
            bare, free = np.concatenate([self._bare_B, bare_B]), self._free_B[len(bare_B) :].copy()
            for first, end in zip(first_N.tolist(), [*first_N[1:].tolist(), len(bare_B)], strict=True):
                free_pages(int(bare_B[first]), (end - first) * BLOCK_BYTES)
            self._bare_B, self._free_B = bare, free

    @property
    def taken_bytes(self) -> int:
        """Bytes of the blocks that are in use."""
        return self.nbytes - len(self._free_B) * BLOCK_BYTES


class CompactIndex:
    """Map from (table, id) to a place, an int64 from 0 to 2^40 - 2. Tables are from 0 to 2^23 - 1; keys of tables from
    255 on take as much memory as in a `HashIndex`.

    Args:
        expected: number of keys for which the index makes room at construction.
    """

    def __init__(self, threads: Threads, expected: int = 0):
        self._threads = threads
        self._memory = BlockMemory()
        self._spill = HashIndex(threads, growth=2.2)
        # Stands for the block of a shard without lines, and for blocks that were taken away: keys are in the spill.
        self._no_block = np.zeros(2 * BLOCK_BYTES // 8, np.int64)
        address = self._no_block.ctypes.data
        skip = -address % BLOCK_BYTES // 8
        self._no_block[skip + 7 : skip + BLOCK_BYTES // 8 : 8] = SPILLED
        self._no_lines = np.array([address + 8 * skip])
        self._block_PB = [self._no_lines] * SHARDS
        self._shard_P4 = np.zeros((SHARDS, 4), np.int64)
        self._shard_P4[:, 0] = self._no_lines.ctypes.data
        self._size_P, self._limit_P = np.zeros(SHARDS, np.int64), np.zeros(SHARDS, np.int64)
        # Whether keys of tables that do not fit into a cell have come: each of them needs room in the spill.
        self._is_wide = False
        self.reserve(expected)

    def __len__(self) -> int:
        return int(self._size_P.sum())

    @property
    def capacity(self) -> int:
        """Number of keys that fit in all shards, present keys included, if the keys spread evenly over the shards."""
        return int(np.where(self._limit_P > 0, self._limit_P, self._spill.limit_P).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return self._memory.nbytes + self._spill.nbytes

    @property
    def spilled(self) -> int:
        """Number of keys in the spill."""
        return len(self._spill)

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The place of each key, -1 for an absent key: int64 [U]."""
        place_U = np.empty(len(id_U), np.int64)
        self._threads.run(
            compact_find, len(id_U), self._shard_P4, *self._spill.shards, table_U, id_U, place_U
        )  # fmt: skip
        return place_U

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Set the place of each key; of equal keys, the last one decides. Returns the former places, -1 for a new key:
        int64 [U]."""
        order_U = np.empty(len(id_U), np.int64)
        begin_P1, cell_U2 = self._in_shards(table_U, id_U, place_U, order_U)
        self.grow(self._size_P + np.diff(begin_P1))
        return self._put_cells(begin_P1, order_U, cell_U2)

    def replace(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Faster `put` for keys that are present or had room reserved. Returns the former places, -1 for a new key, in
        any order."""
        begin_P1, cell_U2 = self._in_shards(table_U, id_U, place_U, NO_ORDER)
        try:
            self.grow(self._size_P + np.diff(begin_P1))
        except IndexMemoryError:
            new = np.flatnonzero(self.find(table_U, id_U) < 0)
            if not self.has_room(self._size_P + self.key_counts(table_U[new], id_U[new])):
                raise
        return self._put_cells(begin_P1, NO_ORDER, cell_U2)

    def put_new(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> tuple[int, int] | None:
        """Faster `put` for absent keys, each given once. Returns (table, id) of a key that was present or given twice;
        None = no such key."""
        begin_P1, cell_U2 = self._in_shards(table_U, id_U, place_U, NO_ORDER)
        self.grow(self._size_P + np.diff(begin_P1))
        return first_present(self._put_cells(begin_P1, NO_ORDER, cell_U2), cell_U2)

    def put_in_room(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """`put` of keys that are present or have room: no shard grows."""
        begin_P1, cell_U2 = self._in_shards(table_U, id_U, place_U, NO_ORDER)
        self._put_cells(begin_P1, NO_ORDER, cell_U2)

    def _in_shards(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray, order_U: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `HashIndex.in_shards`."""
        found = self._spill.in_shards(table_U, id_U, place_U, order_U)
        self._see_tables(table_U)
        return found

    def _put_cells(self, begin_P1: np.ndarray, order_U: np.ndarray, cell_U2: np.ndarray) -> np.ndarray:
        """See `HashIndex._put_cells`. Only the spill grows, if many keys find no room in their shards."""
        old_U = np.empty(len(cell_U2), np.int64)
        next_P, end_P = begin_P1[:-1].copy(), begin_P1[1:]
        self._put_next(next_P, end_P, order_U, cell_U2, old_U)
        if (next_P < end_P).any():
            with changing:  # So many keys have found no room that the spill is full.
                while (more_P := end_P - next_P).any():
                    self._spill.grow(self._spill.sizes_P + more_P)
                    self._put_next(next_P, end_P, order_U, cell_U2, old_U)
        return old_U

    def _put_next(
        self, next_P: np.ndarray, end_P: np.ndarray, order_U: np.ndarray, cell_U2: np.ndarray, old_U: np.ndarray
    ) -> None:
        """Put cells next_P[p] to end_P[p] of each shard p, until the spill has no room for the next one."""
        self._threads.run(
            compact_put, SHARDS, self._shard_P4, *self._spill.arrays, self._size_P, next_P, end_P, order_U, cell_U2,
            old_U, share_min=1 + SHARDS * SHARE_MIN // (len(old_U) + 1),
        )  # fmt: skip

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase the keys. Returns their former places, -1 for an absent key: int64 [U]."""
        old_U = np.empty(len(id_U), np.int64)
        shard_U = self._spill.shards_of(table_U, id_U)
        if len(id_U) == 0:
            return old_U
        first, shards = int(shard_U.min()), int(shard_U.max()) - int(shard_U.min()) + 1
        self._threads.run(
            compact_erase, shards, first, self._shard_P4, *self._spill.arrays, self._size_P, shard_U, table_U, id_U,
            old_U, share_min=1 + shards * SHARE_MIN // (len(id_U) + 1),
        )  # fmt: skip
        return old_U

    def reserve(self, more: int) -> None:
        """Make room for `more` unknown keys beside the present ones: each shard gets room for its mean share of them
        and three standard deviations."""
        if more > 0:
            mean = more / SHARDS
            self.grow(self._size_P + min(more, math.ceil(mean + 3 * math.sqrt(mean)) + 4))

    def reserve_keys(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Make room for these keys, so that a `put` of them cannot fail, unless ids with equal hashes were chosen."""
        self.grow(self._size_P + self.key_counts(table_U, id_U))

    @property
    def sizes_P(self) -> np.ndarray:
        """Number of keys in each shard: int64 [P]."""
        return self._size_P.copy()

    def key_counts(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Number of these keys that belong to each shard: int64 [P]."""
        self._see_tables(table_U)
        return self._spill.key_counts(table_U, id_U)

    def _see_tables(self, table_U: np.ndarray) -> None:
        self._is_wide = self._is_wide or bool(len(table_U) and table_U.max() >= (1 << _TABLE_BITS) - 1)

    def has_room(self, need_P: np.ndarray) -> bool:
        """Whether each shard p has room for need_P[p] keys, present keys included."""
        fits_P = np.where(self._limit_P > 0, need_P <= self._limit_P, need_P <= _SMALL)
        return bool(fits_P.all()) and self._spill.has_room(self._spill_need(need_P))

    def grow(self, need_P: np.ndarray, *, tight: bool = False) -> None:
        """Make room in each shard p for need_P[p] keys, present keys included. tight: whether a shard that grows gets
        little more room than that."""
        shard_G, blocks_G = self._growing(need_P, tight)
        # A few at a time: the old blocks of some serve the next ones.
        for begin in range(0, len(shard_G), _GROWN):
            g = slice(begin, begin + _GROWN)
            self._rebuild(shard_G[g], blocks_G[g])
        try:
            self._spill.grow(self._spill_need(need_P))
        except IndexMemoryError as error:
            raise self._error(len(self._spill) * 16) from error

    def bytes_with(self, need_P: np.ndarray) -> int:
        """Bytes of the cells in use while `grow` makes this room; approximate."""
        shard_G, blocks_G = self._growing(need_P, False)
        old_G = self._shard_P4[shard_G, 1] // LINES
        beside = int(np.sort(old_G)[-_GROWN:].sum())
        return self._memory.taken_bytes + self._spill.nbytes + (int((blocks_G - old_G).sum()) + beside) * BLOCK_BYTES

    def _growing(self, need_P: np.ndarray, tight: bool) -> tuple[np.ndarray, np.ndarray]:
        """The shards that `grow` gives new blocks, and the number of their blocks."""
        small_P = self._limit_P == 0
        # Cells of the spill share memory, so that it is freed if many shards leave it in one call.
        small = _SMALL // 2 if np.any(small_P & (need_P > _SMALL)) else _SMALL
        shard_G = np.flatnonzero(need_P > np.where(small_P, small, self._limit_P))
        if len(shard_G) == 0:
            return shard_G, shard_G
        old_G, phase_G = self._shard_P4[shard_G, 1] // LINES, PHASE_P[shard_G]
        new_G = (old_G == 0) | tight
        more_G = np.where(new_G, 0, old_G * (_GROWTH + _GROWTH_MORE * phase_G))
        room_G = need_P[shard_G] * np.where(new_G, 1 + _ROOM_MORE * phase_G, 1) / _BLOCK_KEYS
        return shard_G, np.ceil(np.maximum(more_G, room_G)).astype(np.int64)

    def _spill_need(self, need_P: np.ndarray) -> np.ndarray:
        """Number of keys for which each shard of the spill needs room."""
        new_P = np.maximum(need_P - self._size_P, 0)
        few_P = np.minimum(new_P, AHEAD + new_P // _SPILL_PART)
        return self._spill.sizes_P + np.where((self._limit_P > 0) & (not self._is_wide), few_P, new_P)

    def _rebuild(self, shard_G: np.ndarray, blocks_G: np.ndarray) -> None:
        """Give shards other numbers of blocks."""
        end_G = np.cumsum(blocks_G)
        try:
            block_B = self._memory.take(int(end_G[-1]))
        except MemoryError as error:
            raise self._error(int(end_G[-1]) * BLOCK_BYTES) from error
        block_GB = [block_B[end - blocks : end] for end, blocks in zip(end_G.tolist(), blocks_G.tolist(), strict=True)]
        try:
            self._move(shard_G, block_GB)
        except MemoryError as error:
            self._memory.give(block_B)
            raise self._error(len(shard_G) * _LEFT * 16) from error

    def _move(self, shard_G: np.ndarray, block_GB: list[np.ndarray]) -> None:
        """Copy shards into new blocks, which take the place of the old ones."""
        block_GB = [block_B.copy() for block_B in block_GB]
        new_G4 = np.empty((len(shard_G), 4), np.int64)
        new_G4[:, 0] = [block_B.ctypes.data for block_B in block_GB]
        new_G4[:, 1] = [len(block_B) * LINES for block_B in block_GB]
        assert new_G4[:, 1].max() <= LINES_MAX
        new_G4[:, 2] = [56 + 1 - int(lines).bit_length() for lines in new_G4[:, 1]]
        new_G4[:, 3] = _TABLE_BITS
        spilled_G = self._spill.sizes_P[shard_G]
        taken_G1 = np.concatenate([[0], np.cumsum(spilled_G)])
        taken_N2 = np.empty((int(taken_G1[-1]), 2), np.int64)
        left_G, taken_G, room = np.empty(len(shard_G), np.int64), np.empty(len(shard_G), np.int64), _LEFT
        while True:
            left_GN2 = np.empty((len(shard_G), room, 2), np.int64)
            self._threads.run(
                compact_move, len(shard_G), shard_G, self._shard_P4, new_G4, *self._spill.shards, left_G, left_GN2,
                taken_G1, taken_G, taken_N2, share_min=1,
            )  # fmt: skip
            if left_G.max() <= room:
                break
            room = int(left_G.max())
        left = _keys(np.concatenate([left_GN2[g, :left] for g, left in enumerate(left_G.tolist())]))
        taken = _keys(np.concatenate(
            [taken_N2[begin : begin + n] for begin, n in zip(taken_G1.tolist(), taken_G.tolist(), strict=False)]
        ))  # fmt: skip
        if len(left[0]):
            self._spill.reserve_keys(left[0], left[1])
        old_GB = [self._block_PB[p] for p in shard_G.tolist() if self._limit_P[p]]
        old_B = np.concatenate(old_GB) if old_GB else None
        block_PB, limit_G = self._block_PB.copy(), new_G4[:, 1] // LINES * _BLOCK_KEYS
        for p, block_B in zip(shard_G.tolist(), block_GB, strict=True):
            block_PB[p] = block_B
        with changing:
            if len(left[0]):
                self._spill.put_new(*left)
            self._block_PB, self._shard_P4[shard_G], self._limit_P[shard_G] = block_PB, new_G4, limit_G
            if len(taken[0]):
                self._spill.erase(*taken[:2])
            if old_B is not None:
                self._memory.give(old_B)
        if len(taken[0]):
            try:
                self._spill.shrink(shard_G)
            except MemoryError:
                pass  # The spill keeps cells that no key needs.

    @property
    def shards(self) -> np.ndarray:
        """The shards, as loops take them."""
        return self._shard_P4

    @property
    def absent(self) -> int:
        """Address of a block in which no key is found."""
        return int(self._no_lines[0])

    def blocks_of(self, p: int) -> np.ndarray:
        """Addresses of the blocks of shard p."""
        return self._block_PB[p] if self._limit_P[p] else np.empty(0, np.int64)

    def take_away(self, p: int) -> None:
        """Free the blocks of shard p, whose bytes the caller has copied. Until `give_back` the shard must not change,
        and a search finds its keys in the spill only. For one search of other keys, the caller writes the address of a
        block that it has read into the shard's array of addresses."""
        absent_B = np.full(len(self._block_PB[p]), self._no_lines[0])
        self._memory.give(self._block_PB[p])
        self._block_PB[p], self._shard_P4[p, 0] = absent_B, absent_B.ctypes.data

    def memory_for(self, p: int) -> np.ndarray:
        """Addresses of new blocks, as many as shard p has; the caller copies bytes there and calls `give_back`, or
        calls `free`."""
        blocks = len(self._block_PB[p])
        try:
            return self._memory.take(blocks)
        except MemoryError as error:
            raise self._error(blocks * BLOCK_BYTES) from error

    def give_back(self, p: int, block_B: np.ndarray) -> None:
        """Give blocks to shard p, whose own were taken away."""
        self._block_PB[p], self._shard_P4[p, 0] = block_B, block_B.ctypes.data

    def free(self, block_B: np.ndarray) -> None:
        """Free blocks of `memory_for`."""
        self._memory.give(block_B)

    def trim(self, keep: int) -> None:
        """Give the pages of all free blocks but `keep` to the system."""
        self._memory.trim(keep)

    def loading(self, keys: int, *, must_write: bool = True) -> Iterator[int]:
        """See `ColdIndex.loading`: one pass."""
        self.reserve(keys)
        yield 0

    def need_room(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Numbers of the keys for which a `put` needs room: int64 [N]."""
        return np.flatnonzero(self.find(table_U, id_U) < 0)

    def release(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def _error(self, more_bytes: int) -> IndexMemoryError:
        return no_memory(len(self), self.nbytes, more_bytes)


def _keys(cell_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables, ids and places of cells."""
    word_N = cell_N2[:, 1]
    place_N = (word_N & ((1 << PLACE_BITS) - 1)) - 1
    return (word_N >> PLACE_BITS).astype(np.int32), cell_N2[:, 0].copy(), place_N
