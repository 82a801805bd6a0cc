"""Which rows of which chunks are the table's rows now.

A chunk of the table has a slot, and the row r of the chunk in slot s has the place `s * rows_per_chunk + r`; slots
of chunks that are gone are used again, so places stay small however long a table is written to.

Keys that are `noted` go into the index later and many together, which costs half as much a key. Until `settle`
the index, the bits and the counts are those from before; whoever looks at them settles first.

Invariants, between calls:
- the index holds a place exactly when the place's bit is set, and `live_S[s]` counts the bits of slot s;
- each chunk with a slot is held, once for that.
"""

from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from oneemb.kernels.row_blocks import bits_clear, bits_set
from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.geometry import Geometry
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.pending_keys import PendingKeys
from oneemb.storage.snapshot_file import ChunkPart

__all__ = ["LiveRows"]


class LiveRows:
    """The index, and the bits and checksums of the chunks it points into.

    Args:
        geometry: of all the chunks.
        files: holds and releases them.
        threads: runs lookups.
        expected: keys to make room for at once.
        beside: takes in keys that were noted; None = the caller's thread does.
    """

    def __init__(
        self, geometry: Geometry, files: ChunkFiles, threads: Threads, expected: int = 0, beside: Executor | None = None
    ):  # fmt: skip
        self.geometry = geometry
        # Appends are bound by what the index's growth costs; it may take 30 bytes a key in place of 24 for less of it.
        self.index = HashIndex(threads, expected, growth=2.2)
        self.chunk_S: list[ChunkFile | None] = []
        self.live_S = np.zeros(0, np.int64)
        self.bit_N = np.zeros(0, np.uint8)
        self.sum_B = np.zeros(0, np.uint32)
        self._files = files
        self._free: list[int] = []
        self._pending = PendingKeys(beside)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.index.nbytes + self.bit_N.nbytes + self.sum_B.nbytes + self.live_S.nbytes

    def slots(self) -> Iterator[tuple[int, ChunkFile]]:
        return ((slot, chunk) for slot, chunk in enumerate(self.chunk_S) if chunk is not None)

    def add(self, chunk: ChunkFile) -> int:
        """Give a chunk a slot; its hold passes over. Returns the slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.chunk_S[slot] = chunk
        return slot

    def remove(self, slot: int) -> None:
        """Take the slot of a chunk without live rows back, and let go of the chunk."""
        assert self.live_S[slot] == 0
        chunk = self.chunk_S[slot]
        assert chunk is not None
        self.chunk_S[slot] = None
        self._free.append(slot)
        self._files.release(chunk)

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """The rows of these keys are at these places from now on.

        Raises:
            MemoryError: the index cannot grow; nothing has changed, and nothing points at these places.
        """
        self.settle()
        self._put(table_U, id_U, place_U)

    def can_note(self, size: int) -> bool:
        """Whether so many keys may be noted, once.

        Raises:
            MemoryError: the index cannot grow for those that were noted before; they still are.
        """
        return self._pending.make_room(size, self._put)

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """The rows of these keys are at these places from the next `settle` on. As many as `can_note` has allowed."""
        self._pending.note(table_U, id_U, place_U)

    def settle(self) -> None:
        """Take in all keys that were noted.

        Raises:
            MemoryError: the index cannot grow; nothing has changed, and the keys are still noted.
        """
        self._pending.settle(self._put)

    def _put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        rows = self.geometry.rows_per_chunk
        old_U = self.index.replace(table_U, id_U, place_U)
        # New places first: of equal keys in one call, the earlier one's place is an old place of the later one.
        bits_set(self.bit_N, place_U, rows, self.live_S)
        bits_clear(self.bit_N, old_U, rows, self.live_S)

    def load(self, slot: int, table_N: np.ndarray, id_N: np.ndarray, row_N: np.ndarray) -> tuple[int, int] | None:
        """Take in rows of a chunk that `load_chunk` has taken in.

        Returns:
            The (table, id) of a key that is here twice now, else None. The index is of no use then.
        """
        return self.index.put_new(table_N, id_N, row_N + slot * self.geometry.rows_per_chunk)

    def load_chunk(self, slot: int, size: int, bit_N: np.ndarray, sum_B: np.ndarray) -> None:
        """Take in a chunk with a fresh slot: its live rows as bits, how many they are, its blocks' checksums."""
        begin = slot * self.geometry.rows_per_chunk // 8
        self.bit_N[begin : begin + len(bit_N)] = bit_N
        begin = slot * self.geometry.blocks_per_chunk
        self.sum_B[begin : begin + len(sum_B)] = sum_B
        self.live_S[slot] = size

    def part(self, slot: int) -> ChunkPart:
        """The live rows of one chunk as they are now, of those on disk."""
        chunk = self.chunk_S[slot]
        assert chunk is not None
        rows = chunk.blocks * self.geometry.rows_per_block
        begin = slot * self.geometry.rows_per_chunk // 8
        bit_N = self.bit_N[begin : begin + self.geometry.rows_per_chunk // 8]
        part_N = bit_N[: -(-rows // 64) * 8].copy()
        if rows % 64:
            part_N[rows // 8] &= (1 << rows % 8) - 1
            part_N[rows // 8 + 1 :] = 0
        in_memory = np.unpackbits(bit_N[rows // 8 :], bitorder="little")[rows % 8 :].sum(dtype=np.int64)
        size = int(self.live_S[slot] - in_memory)
        return ChunkPart(chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum, size, bit_N=part_N)

    def release(self) -> None:
        """Let go of all chunks. The object is of no use afterwards."""
        for _, chunk in self.slots():
            self._files.release(chunk)
        self.chunk_S = []

    def _grow(self) -> None:
        self._pending.wait()  # It writes to the arrays.
        old = len(self.chunk_S)
        new = max(old + 1, old * 3 // 2)
        rows, blocks = self.geometry.rows_per_chunk, self.geometry.blocks_per_chunk
        live_S, bit_N = np.zeros(new, np.int64), np.zeros(new * rows // 8, np.uint8)
        sum_B = np.zeros(new * blocks, np.uint32)
        live_S[:old], bit_N[: old * rows // 8], sum_B[: old * blocks] = self.live_S, self.bit_N, self.sum_B
        self.live_S, self.bit_N, self.sum_B = live_S, bit_N, sum_B
        self.chunk_S += [None] * (new - old)
        self._free += range(new - 1, old - 1, -1)
