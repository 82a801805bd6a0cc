"""Compact index with a limit of memory: shards beyond the limit lie in a file, with a filter of their keys in memory.

A shard is *hot* while all its keys are in memory, in a `CompactIndex`, or *layered*: its blocks are in the file, and
keys that were put or erased since then are in the overlay, a `HashIndex` with the new place or a mark for an erased
key. A search asks the overlay first. For the other keys of layered shards it reads the block that may hold the key, if
the block's filter does not deny it: one read for a present key, and for one absent key in 200. When the overlay is
full, the shard with the most keys in the overlay is merged: the blocks of the shard are read, its keys of the overlay
are put, and its blocks are written again. So a call merges a few shards at most. Keys in the spill of the compact index
stay in memory, and so do the keys of tables from 255 on.

Shards with low numbers stay hot; the hash spreads keys evenly, so the choice of shards does not matter.

The limit holds for the sum of hot blocks, the overlay, which may take a quarter of the limit, and the filters.
Filters, about 1.6 bytes for each key in the file, and an overlay of the least size are always in memory, even if the
limit is below that. Beside the limit, a merge needs memory for two copies of a shard, and a load
whose limit is too small for it needs memory for a sixteenth of the index.

P shards, U keys, K blocks that are read, B blocks of a shard.

Invariants:
- for a key of a layered shard the overlay decides; if the overlay does not have the key, the blocks and the spill do;
- a call that raises has changed no key: blocks are read, shards merged and memory taken before a key is changed, and a
  merge that fails leaves a shard that answers as before;
- the file's blocks of a shard do not change until the shard has been read into memory.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from oneemb.kernels.cold_blocks import (
    EXTENT_BLOCKS,
    FILTER_BYTES,
    blocks_copy,
    cold_locate,
    fill_filters,
    overlay_changes,
    words_set,
)
from oneemb.kernels.compact_index import BLOCK_BYTES
from oneemb.kernels.hash_index import PLACE_MAX
from oneemb.kernels.threads import Threads
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import IndexMemoryError, StorageError
from oneemb.storage.fs import aligned_bytes
from oneemb.storage.hash_index import SHARDS, HashIndex, check_tables, no_memory
from oneemb.storage.locking.store_lock import changing

# In the overlay: the place of an erased key. No row has this place.
_ERASED = PLACE_MAX
# Part of the limit for the overlay; bytes of a key in it; its least size in keys.
_OVERLAY_PART, _OVERLAY_KEY_BYTES, _OVERLAY_MIN = 4, 27, 1 << 14
# Part of the overlay that a list of pending keys may take.
_LIST_PART = 8
# Bytes of a key in a full shard in memory, and in memory for one in the file, for estimates.
_HOT_KEY_BYTES, _COLD_KEY_BYTES = 13, 1.7
# Largest number of passes of a load, so a pass has 1 / _PASSES_MAX of the shards or more, even beyond the limit.
_PASSES_MAX = 16
# Blocks that are read at once: enough for a piece of compaction, which finds its keys and then puts them, so that the
# put reads no block again.
_READ_BLOCKS = 4096
# Bytes of the buffer of reads, and at least those of the buffer of writes.
_BUFFER_BYTES = _READ_BLOCKS * BLOCK_BYTES


class BlockFile(Protocol):
    """File of blocks in extents of EXTENT_BLOCKS blocks. The file may be lost with the process."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the object holds."""
        ...

    def write(self, address_B: np.ndarray) -> np.ndarray:
        """Write the blocks at these addresses to free extents. Returns the extents' numbers: int64 [E]. StorageError if
        the system could not write: no extent is taken then."""

    def read(self, block_K: np.ndarray, byte_N: np.ndarray) -> None:
        """Read the blocks with these numbers, extent * EXTENT_BLOCKS + number in the extent, to memory that begins at a
        page: uint8 [K * BLOCK_BYTES]. StorageError if the system could not read, or if a block has other
        bytes than were written."""

    def free(self, extent_E: np.ndarray) -> None:
        """Give extents back."""


class _Cold:
    """A shard's extents in the file, and the filters of its blocks."""

    def __init__(self, blocks: int):
        self.extent_E = np.empty(0, np.int64)
        # Filters begin at a line of the CPU's cache.
        word_N = np.empty((blocks * FILTER_BYTES + 64) // 8, np.int64)
        self.filter_N = word_N[-word_N.ctypes.data % 64 // 8 :]

    @property
    def nbytes(self) -> int:
        return int(self.filter_N.nbytes + self.extent_E.nbytes)


class ColdIndex:
    """`CompactIndex` whose memory is limited. Its calls may raise StorageError, if the file cannot be read or written,
    before they have changed anything.

    Args:
        file: the file, which other indexes may use as well.
        limit_bytes: most bytes of memory, see above.
        expected: number of keys for which the index makes room at construction, as far as the limit allows.
    """

    def __init__(self, threads: Threads, file: BlockFile, limit_bytes: int, expected: int = 0):
        self._threads, self._file, self._limit_bytes = threads, file, limit_bytes
        self._overlay_keys = max(_OVERLAY_MIN, limit_bytes // _OVERLAY_PART // _OVERLAY_KEY_BYTES)
        self._hot = CompactIndex(threads)
        self._overlay = HashIndex(threads)
        self._cold: list[_Cold | None] = [None] * SHARDS
        self._cold_P2 = np.zeros((SHARDS, 2), np.int64)
        self._layered_P = np.zeros(SHARDS, np.bool_)
        # Keys of each layered shard. Number of keys for which each shard has room.
        self._size_P, self._room_P = np.zeros(SHARDS, np.int64), np.zeros(SHARDS, np.int64)
        # Shards of which a load takes keys; None = there is no load.
        self._loaded: range | None = None
        # The blocks that were read last, in ascending order, and their bytes.
        self._block_K, self._byte_N = np.empty(0, np.int64), np.empty(0, np.uint8)
        self.reserve(min(expected, self._hot_keys_max))

    def __len__(self) -> int:
        return int(self.sizes_P.sum())

    @property
    def capacity(self) -> int:
        """Number of keys that fit in all shards, if the keys spread evenly; less if changes of many keys would fill the
        overlay."""
        capacity = self._hot.capacity
        return min(capacity, 32 * self._overlay_keys // _LIST_PART) if self._layered_P.any() else capacity

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._hot.nbytes + self._overlay.nbytes + self._cold_bytes + len(self._byte_N)

    @property
    def _cold_bytes(self) -> int:
        return self._file.nbytes + sum(cold.nbytes for cold in self._cold if cold is not None)

    @property
    def _hot_keys_max(self) -> int:
        """Number of keys for which the limit has room without the file."""
        return max(0, self._limit_bytes * (_OVERLAY_PART - 1) // _OVERLAY_PART - 2 * _BUFFER_BYTES) // _HOT_KEY_BYTES

    @property
    def sizes_P(self) -> np.ndarray:
        """Number of keys in each shard: int64 [P]."""
        return np.where(self._layered_P, self._size_P, self._hot.sizes_P)

    def key_counts(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Number of these keys that belong to each shard: int64 [P]."""
        return self._hot.key_counts(table_U, id_U)

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The place of each key, -1 for an absent key: int64 [U]."""
        known_U = self._overlay.find(table_U, id_U)
        return _places(known_U, self._find_below(table_U, id_U, known_U))

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Set the place of each key; of equal keys, the last one decides. Returns the former places, -1 for a new key:
        int64 [U]."""
        check_tables(table_U)
        self.reserve_keys(table_U, id_U)
        return self._put(table_U, id_U, place_U, self._hot.put)

    def replace(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> np.ndarray:
        """Faster `put` for keys that are present or had room reserved. Returns the former places, -1 for a new key, in
        any order."""
        check_tables(table_U)
        if self._layered_P.any():
            self._merge_for(len(id_U))
        return self._put(table_U, id_U, place_U, self._hot.replace)

    def put_new(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> tuple[int, int] | None:
        """`put` for absent keys, each given once. Returns (table, id) of a key that was present or given twice; None =
        no such key. In a load, keys of other shards than those of the pass are left out."""
        if self._loaded is not None:
            shard_U = self._overlay.shards_of(table_U, id_U)
            u = np.flatnonzero((shard_U >= self._loaded.start) & (shard_U < self._loaded.stop))
            return self._hot.put_new(table_U[u], id_U[u], place_U[u])
        for u in np.flatnonzero(self.put(table_U, id_U, place_U) >= 0)[:1].tolist():
            return int(table_U[u]), int(id_U[u])
        return None

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase the keys. Returns their former places, -1 for an absent key: int64 [U]."""
        if self._layered_P.any():
            self._merge_for(len(id_U))
        return self._put(table_U, id_U, None, lambda table_N, id_N, _: self._hot.erase(table_N, id_N))

    def reserve(self, more: int) -> None:
        """Make room for `more` unknown keys beside the present ones: each shard gets room for its mean share of them
        and three standard deviations."""
        if more > 0:
            mean = more / SHARDS
            self.grow(self.sizes_P + min(more, math.ceil(mean + 3 * math.sqrt(mean)) + 4))

    def reserve_keys(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Make room for these keys, so that a `put` of them cannot fail for lack of memory, unless ids with equal
        hashes were chosen."""
        self.grow(self.sizes_P + self.key_counts(table_U, id_U))

    def need_room(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Numbers of the keys for which a `put` needs room: int64 [N]."""
        layered_U = self._layered_P.take(self._overlay.shards_of(table_U, id_U))
        return np.flatnonzero(np.where(layered_U, self._overlay.find(table_U, id_U), self.find(table_U, id_U)) < 0)

    def has_room(self, need_P: np.ndarray) -> bool:
        """Whether each shard p has room for need_P[p] keys, present keys included."""
        return bool(np.all(need_P <= self._room_P))

    def grow(self, need_P: np.ndarray) -> None:
        """Make room in each shard p for need_P[p] keys, present keys included. In a layered shard, a present key takes
        room too when it is put."""
        if self._layered_P.any():
            self._merge_for(int(self._more_in_overlay(need_P).sum()))
        while not self._fits(need_P):
            hot = np.flatnonzero(~self._layered_P)
            if len(hot) == 0:
                break
            self._let_go(int(hot[-1]))
        self._hot.grow(np.where(self._layered_P, self._hot.sizes_P, need_P))
        self._overlay.grow(self._overlay.sizes_P + self._more_in_overlay(need_P))
        self._room_P = np.maximum(need_P, self._room_P)
        if self._layered_P.any():
            self._trim()

    def loading(self, keys: int, *, must_write: bool = True) -> Iterator[int]:
        """Load `keys` keys into the index, which is empty, in passes: yields the number of each pass. In a
        pass the caller gives all keys to `put_new`; the index takes the keys of some shards, and writes these shards at
        the end of the pass.

        Args:
            must_write: whether the load fails if a shard cannot be written; otherwise the shard stays in memory, beyond
                the limit.
        """
        shard_bytes, cold_bytes = keys / SHARDS * _HOT_KEY_BYTES + 1, keys / SHARDS * _COLD_KEY_BYTES
        hot, at_once, filters = SHARDS, SHARDS, SHARDS * cold_bytes
        if keys > self._hot_keys_max:
            free = self._limit_bytes * (_OVERLAY_PART - 1) / _OVERLAY_PART - filters - 2 * _BUFFER_BYTES
            hot = max(0, min(SHARDS - 1, int(free / (shard_bytes - cold_bytes))))
            at_once = max(SHARDS // _PASSES_MAX, hot, int((self._limit_bytes - filters) / shard_bytes))
        passes = [range(first, min(first + at_once, SHARDS)) for first in range(hot, SHARDS, at_once)]
        try:
            for n, self._loaded in enumerate([*passes, range(hot)] if hot else passes):
                need_P, mean = np.zeros(SHARDS, np.int64), keys / SHARDS
                need_P[self._loaded.start : self._loaded.stop] = min(keys, math.ceil(mean + 3 * math.sqrt(mean)) + 4)
                self._hot.grow(np.maximum(need_P, self._hot.sizes_P))
                yield n
                for p in self._loaded if self._loaded.start >= hot else ():
                    try:
                        self._let_go(p)
                    except StorageError:
                        if must_write:
                            raise
        finally:
            self._loaded = None
            self._trim()

    def release(self) -> None:
        """Give the extents of the file back. The index cannot be used any more. After a MemoryError it can."""
        extents = [cold.extent_E for cold in self._cold if cold is not None]
        if extents:
            self._file.free(np.concatenate(extents))
        self._cold = [None] * SHARDS
        self._cold_P2[:] = 0

    def _put(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray | None,
        put_hot: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:  # fmt: skip
        """Set the places of keys, or erase the keys if `place_U` is None. put_hot: puts keys of hot shards. Returns
        the former places, -1 for a new key."""
        put_U = np.full(len(id_U), _ERASED) if place_U is None else place_U
        assert place_U is None or len(place_U) == 0 or place_U.max() < _ERASED
        if not self._layered_P.any():
            return put_hot(table_U, id_U, put_U)
        shard_U = self._overlay.shards_of(table_U, id_U)
        layered_U = self._layered_P.take(shard_U)  # NumPy ends the process if `[shard_U]` gets no memory.
        u, rest = np.flatnonzero(layered_U), np.flatnonzero(~layered_U)
        known_N = self._overlay.find(table_U[u], id_U[u])
        below_N = self._find_below(table_U[u], id_U[u], known_N)
        old_U = np.full(len(id_U), -1)
        if place_U is None:
            there = np.flatnonzero(_places(known_N, below_N) >= 0)
            u, known_N, below_N = u[there], known_N[there], below_N[there]
        shard_N = shard_U[u]
        self._overlay.grow(self._overlay.sizes_P + _counts(shard_N[known_N < 0]))
        put_N, order_N, old_N = put_U[u], np.empty(len(u), np.int64), np.empty(len(u), np.int64)
        begin_P1, cell_N2 = self._overlay.in_shards(table_U[u], id_U[u], put_N, order_N)
        if len(rest):
            old_U[rest] = put_hot(table_U[rest], id_U[rest], put_U[rest])
        with changing:  # No line of this block allocates memory for each key.
            # Of equal keys, the first one finds what was there before, the next one finds the place of the first.
            self._overlay.put_cells(begin_P1, order_N, cell_N2, old_N)
            overlay_changes(0, len(u), old_N, below_N, put_N, _ERASED, u, shard_N, old_U, self._size_P, self._room_P)
        return old_U

    def _find_below(self, table_U: np.ndarray, id_U: np.ndarray, known_U: np.ndarray) -> np.ndarray:
        """The place of each key below the overlay: int64 [U]. Reads blocks. Keys that the overlay has, where known_U[u]
        is a place, are not searched in the file."""
        if not self._cold_P2.any():
            return self._hot.find(table_U, id_U)
        block_U, entry_U = np.empty(len(id_U), np.int64), np.empty(len(id_U), np.int64)
        self._threads.run(
            cold_locate, len(id_U), self._hot.shards, self._cold_P2, table_U, id_U, known_U, block_U, entry_U
        )
        u = np.flatnonzero(block_U >= 0)
        if len(u) == 0:
            return self._hot.find(table_U, id_U)
        rest, place_U = np.flatnonzero(block_U < 0), np.empty(len(id_U), np.int64)
        place_U[rest] = self._hot.find(table_U[rest], id_U[rest])
        u = u[np.argsort(block_U[u])]
        first_K = np.flatnonzero(np.diff(block_U[u], prepend=-1))
        for begin in range(0, len(first_K), _READ_BLOCKS):
            k = slice(begin, begin + _READ_BLOCKS)
            n = u[first_K[begin] : first_K[k.stop] if k.stop < len(first_K) else len(u)]
            entry_K, absent_K = entry_U[u[first_K[k]]], np.full(len(first_K[k]), self._hot.absent)
            address_K = self._read(block_U[u[first_K[k]]])
            try:
                words_set(0, len(entry_K), entry_K, address_K)
                place_U[n] = self._hot.find(table_U[n], id_U[n])
            finally:
                words_set(0, len(entry_K), entry_K, absent_K)
        return place_U

    def _read(self, block_K: np.ndarray) -> np.ndarray:
        """Addresses of blocks of the file, given in ascending order, after they were read: int64 [K]. At most
        _READ_BLOCKS blocks; valid until the next call. Blocks that the last call has read are not read again."""
        at_K = np.searchsorted(self._block_K, block_K)
        if len(self._block_K) == 0 or np.any(self._block_K[np.minimum(at_K, len(self._block_K) - 1)] != block_K):
            self._block_K = np.empty(0, np.int64)
            if len(self._byte_N) == 0:
                try:
                    self._byte_N = aligned_bytes(_READ_BLOCKS * BLOCK_BYTES)
                except OSError as error:
                    raise self._error(_READ_BLOCKS * BLOCK_BYTES) from error
            self._file.read(block_K, self._byte_N[: len(block_K) * BLOCK_BYTES])
            self._block_K, at_K = block_K, np.arange(len(block_K))
        return self._byte_N.ctypes.data + at_K * BLOCK_BYTES

    def _trim(self) -> None:
        """Give free memory to the system, except for what the next merge needs."""
        extents = max((len(cold.extent_E) for cold in self._cold if cold is not None), default=0)
        self._hot.trim(2 * extents * EXTENT_BLOCKS)

    def _fits(self, need_P: np.ndarray) -> bool:
        """Whether memory for need_P[p] keys in each hot shard p is within the limit."""
        hot = self._hot.bytes_with(np.where(self._layered_P, self._hot.sizes_P, need_P))
        overlay = max(self._overlay.nbytes, self._limit_bytes // _OVERLAY_PART)
        return hot + overlay + max(self._cold_bytes, _BUFFER_BYTES) + _BUFFER_BYTES <= self._limit_bytes

    def _more_in_overlay(self, need_P: np.ndarray) -> np.ndarray:
        """Number of keys that come to each shard of the overlay if shard p gets need_P[p] keys: int64 [P]."""
        return np.where(self._layered_P, np.maximum(need_P - self._size_P, 0), 0)

    def _merge_for(self, more: int) -> None:
        """Merge shards until the overlay has room for `more` keys within its limit, or is empty."""
        while 0 < len(self._overlay) > self._overlay_keys - more:
            self._merge(int(np.argmax(self._overlay.sizes_P)))

    def _merge(self, p: int) -> None:
        """Put the keys that the overlay has of shard p into the shard's blocks. After an error the overlay still has
        the keys, or the shard is hot."""
        table_N, id_N, place_N = self._overlay.items_of(p)
        if self._cold[p] is not None:
            self._thaw(p)
        # The overlay still counts, so these steps may end at any point and be done again.
        gone, kept = np.flatnonzero(place_N == _ERASED), np.flatnonzero(place_N != _ERASED)
        self._hot.erase(table_N[gone], id_N[gone])
        need_P = self._hot.sizes_P
        need_P[p] = self._size_P[p]
        self._hot.grow(need_P, tight=True)
        self._hot.put_in_room(table_N[kept], id_N[kept], place_N[kept])
        self._overlay.erase(table_N, id_N)
        self._layered_P[p], self._room_P[p] = False, 0
        self._let_go(p)

    def _thaw(self, p: int) -> None:
        """Read the blocks of shard p into memory and free its extents."""
        cold = self._cold[p]
        assert cold is not None
        block_B = self._hot.memory_for(p)
        try:
            for begin in range(0, len(block_B), _READ_BLOCKS):
                b = np.arange(begin, min(begin + _READ_BLOCKS, len(block_B)))
                number_K = cold.extent_E[b // EXTENT_BLOCKS] * EXTENT_BLOCKS + b % EXTENT_BLOCKS
                order = np.argsort(number_K)
                address_K = self._read(number_K[order])
                self._threads.run(blocks_copy, len(b), address_K, block_B[b[order]], share_min=64)
        except BaseException:
            self._hot.free(block_B)
            raise
        self._block_K = np.empty(0, np.int64)
        with changing:
            self._hot.give_back(p, block_B)
            self._cold[p], self._cold_P2[p] = None, 0
            self._file.free(cold.extent_E)

    def _let_go(self, p: int) -> None:
        """Make a hot shard a layered one: write its blocks, if it has any, and free their memory. After an error the
        shard is hot."""
        block_B = self._hot.blocks_of(p)
        try:
            if len(block_B):
                cold = _Cold(len(block_B))
                filters = cold.filter_N.ctypes.data
                self._threads.run(fill_filters, len(block_B), self._hot.shards, p, filters, share_min=64)
                cold.extent_E = self._file.write(block_B)
                self._block_K = np.empty(0, np.int64)
                try:
                    self._hot.take_away(p)
                except BaseException:
                    self._file.free(cold.extent_E)
                    raise
                self._cold[p], self._cold_P2[p] = cold, (filters, cold.extent_E.ctypes.data)
        except MemoryError as error:
            raise self._error(len(block_B) * FILTER_BYTES) from error
        self._size_P[p], self._room_P[p] = self._hot.sizes_P[p], 0
        self._layered_P[p] = True

    def _error(self, more_bytes: int) -> IndexMemoryError:
        return no_memory(len(self), self.nbytes, more_bytes)


def _places(known_N: np.ndarray, below_N: np.ndarray) -> np.ndarray:
    """Places of keys, -1 for an absent key, given what the overlay has of each, -1 = nothing, and the places below."""
    place_N = np.where(known_N >= 0, known_N, below_N)
    place_N[place_N == _ERASED] = -1
    return place_N


def _counts(shard_N: np.ndarray) -> np.ndarray:
    """Number of keys of each shard: int64 [P]."""
    return np.bincount(shard_N, minlength=SHARDS)
