"""Which rows of which chunks are the table's rows now.

Places are numbered in slots of some blocks each; a chunk takes as many neighbouring slots as it may have blocks. In a
chunk whose first slot is s, row r has the place `s * rows_per_slot + r`. Slots of chunks that are gone are used again,
so places stay small however long a table is written to, and a small chunk has few bits and checksums.

Keys that are `noted` go into the index later and many together, which costs half as much a key. Until `settle`
the index, the bits and the counts are those from before; whoever looks at them settles first.

Invariants, between calls:
- the index holds a place exactly when the place's bit is set, and `live_S[s]` counts the bits of slot s;
- each chunk with slots is held, once for that;
- the index has room for every key that was noted: `settle` needs no memory for it.
"""

from concurrent.futures import Executor

import numpy as np

from oneemb.kernels.row_blocks import bits_clear, bits_set
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.pending_keys import PendingKeys
from oneemb.storage.table.snapshot_file import ChunkPart

__all__ = ["LiveRows"]

_SLOTS_MIN = 32


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
        self.first_S = np.empty(0, np.int64)
        """The first slot of the chunk that has this one, -1 for a slot that no chunk has."""
        self.live_S = np.empty(0, np.int64)
        self.bit_N = np.empty(0, np.uint8)
        self.sum_B = np.empty(0, np.uint32)
        self._chunk: dict[int, ChunkFile] = {}  # by first slot
        self._slots: dict[ChunkFile, slice] = {}
        self._files = files
        self._pending = PendingKeys(self.index, beside)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        arrays = (self.first_S, self.live_S, self.bit_N, self.sum_B)
        return self.index.nbytes + sum(array.nbytes for array in arrays)

    def chunks(self) -> list[ChunkFile]:
        """Those that have slots, oldest first."""
        return list(self._slots)

    def __contains__(self, chunk: ChunkFile) -> bool:
        return chunk in self._slots

    def chunk_in(self, slot: int) -> ChunkFile:
        return self._chunk[int(self.first_S[slot])]

    def first_block(self, chunk: ChunkFile) -> int:
        """The number in the table of a chunk's first block."""
        return self._slots[chunk].start * self.geometry.blocks_per_slot

    def first_place(self, chunk: ChunkFile) -> int:
        return self._slots[chunk].start * self.geometry.rows_per_slot

    def has_place(self, chunk: ChunkFile, place_N: np.ndarray) -> np.ndarray:
        """Whether each place is in the chunk: bool [N]."""
        slots, rows = self._slots[chunk], self.geometry.rows_per_slot
        return (place_N >= slots.start * rows) & (place_N < slots.stop * rows)

    def live_of(self, chunk: ChunkFile) -> int:
        """How many of the chunk's rows are live."""
        return int(self.live_S[self._slots[chunk]].sum())

    def dead_chunks(self) -> list[ChunkFile]:
        """The chunks without live rows."""
        dead = self.first_S[(self.live_S == 0) & (self.first_S >= 0)]
        return [
            chunk
            for first, slots in zip(*(part.tolist() for part in np.unique(dead, return_counts=True)), strict=True)
            if self._slots[chunk := self._chunk[first]].stop - first == slots
        ]

    def add(self, chunk: ChunkFile, blocks: int) -> None:
        """Give a chunk slots for so many blocks; its hold passes over.

        Raises:
            MemoryError: there is no memory for more slots; nothing has changed.
        """
        size = max(1, -(-blocks // self.geometry.blocks_per_slot))
        first = self._free_slots(size)
        if first is None:
            self._grow(size)
            first = self._free_slots(size)
            assert first is not None
        self._slots[chunk] = slice(first, first + size)
        self._chunk[first] = chunk
        self.first_S[first : first + size] = first

    def remove(self, chunk: ChunkFile) -> None:
        """Take the slots of a chunk without live rows back, and let go of the chunk."""
        assert self.live_of(chunk) == 0
        slots = self._slots.pop(chunk)
        del self._chunk[slots.start]
        self.first_S[slots] = -1
        self._files.release(chunk)

    def reserve(self, table_U: np.ndarray, id_U: np.ndarray) -> bool:
        """Make sure that memory for these keys is there. Returns whether they may be noted, once; else they are `put`.

        Raises:
            MemoryError: there is none for those of them that are new; nothing has changed.
        """
        try:
            if self._pending.make_room(table_U, id_U, self._put):
                return True
        except MemoryError:
            pass  # For a whole list, that is: there may be some for these keys.
        self.settle()
        try:
            self.index.reserve_keys(table_U, id_U)
        except MemoryError:
            new = np.flatnonzero(self.index.find(table_U, id_U) < 0)
            self.index.reserve_keys(table_U[new], id_U[new])
        return False

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """The rows of these keys, which are here or were reserved for, are at these places from now on."""
        self.settle()
        self._put(table_U, id_U, place_U)

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Forget the rows of these keys: what they were is garbage. Returns whether each had one, bool [U]."""
        self.settle()
        place_U = self.index.erase(table_U, id_U)
        bits_clear(self.bit_N, place_U, self.geometry.rows_per_slot, self.live_S)
        return place_U >= 0

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """The rows of these keys are at these places from the next `settle` on. As many as `reserve` has allowed."""
        self._pending.note(table_U, id_U, place_U)

    def settle(self) -> None:
        """Take in all keys that were noted."""
        self._pending.settle(self._put)

    def load(
        self, chunk: ChunkFile, table_N: np.ndarray, id_N: np.ndarray, row_N: np.ndarray
    ) -> tuple[int, int] | None:
        """Take in rows of a chunk that `load_chunk` has taken in.

        Returns:
            The (table, id) of a key that is here twice now, else None. The index is of no use then.
        """
        slots = self._slots[chunk]
        self.live_S[slots] += np.bincount(row_N // self.geometry.rows_per_slot, minlength=slots.stop - slots.start)
        return self.index.put_new(table_N, id_N, row_N + self.first_place(chunk))

    def load_chunk(self, chunk: ChunkFile, bit_N: np.ndarray, sum_B: np.ndarray) -> None:
        """Take in a chunk with fresh slots: its live rows as bits, its blocks' checksums."""
        begin = self.first_place(chunk) // 8
        self.bit_N[begin : begin + len(bit_N)] = bit_N
        begin = self.first_block(chunk)
        self.sum_B[begin : begin + len(sum_B)] = sum_B

    def part(self, chunk: ChunkFile) -> ChunkPart:
        """The live rows of one chunk as they are now, of those on disk."""
        rows = chunk.blocks * self.geometry.rows_per_block
        slots, slot_bytes = self._slots[chunk], self.geometry.rows_per_slot // 8
        bit_N = self.bit_N[slots.start * slot_bytes : slots.stop * slot_bytes]
        part_N = bit_N[: -(-rows // 64) * 8].copy()
        if rows % 64:
            part_N[rows // 8] &= (1 << rows % 8) - 1
            part_N[rows // 8 + 1 :] = 0
        in_memory = np.unpackbits(bit_N[rows // 8 :], bitorder="little")[rows % 8 :].sum(dtype=np.int64)
        size = int(self.live_of(chunk) - in_memory)
        return ChunkPart(chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum, size, bit_N=part_N)

    def release(self) -> None:
        """Let go of all chunks. The object is of no use afterwards."""
        for chunk in self._slots:
            self._files.release(chunk)
        self._slots, self._chunk = {}, {}

    def _put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        rows = self.geometry.rows_per_slot
        old_U = self.index.replace(table_U, id_U, place_U)
        # New places first: of equal keys in one call, the earlier one's place is an old place of the later one.
        bits_set(self.bit_N, place_U, rows, self.live_S)
        bits_clear(self.bit_N, old_U, rows, self.live_S)

    def _free_slots(self, size: int) -> int | None:
        """The first of so many neighbouring free slots."""
        free = np.flatnonzero(self.first_S == -1)
        runs = np.flatnonzero(free[size - 1 :] - free[: max(0, len(free) - size + 1)] == size - 1)
        return int(free[runs[0]]) if len(runs) else None

    def _grow(self, size: int) -> None:
        """Have so many more slots at least, neighbours."""
        self._pending.wait()  # It writes to the arrays.
        old = len(self.first_S)
        new = max(old + size, old * 3 // 2, _SLOTS_MIN)
        rows, blocks = self.geometry.rows_per_slot, self.geometry.blocks_per_slot
        grown = []
        for array, per_slot in ((self.live_S, 1), (self.bit_N, rows // 8), (self.sum_B, blocks)):
            grown.append(np.zeros(new * per_slot, array.dtype))
            grown[-1][: len(array)] = array
        first_S = np.full(new, -1, np.int64)
        first_S[:old] = self.first_S
        self.first_S, (self.live_S, self.bit_N, self.sum_B) = first_S, grown
