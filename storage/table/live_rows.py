"""The index of a table: the place of each key's current row.

A place is the number of a row's position in the table. Places are divided into extents: runs of blocks, of about 1 MiB
each. A chunk takes the neighbouring extents that its blocks may need. In a chunk whose first extent is e, row r has the
place `e * rows_per_extent + r`. Extents of removed chunks are used again, so places stay small however long a table is
written to. Shape letters: E extents, B blocks.

`note` puts a key into a list; all keys of the list go into the index at once, which costs half as much for each key.
Until `put_pending` the index, the bits and the counts are out of date, so every call that reads them calls
`put_pending` first.

Invariants, between calls:
- the index contains a place if and only if the bit of the place is set, and `live_E[e]` is the number of bits of extent
  e;
- each chunk with extents is held once by this object;
- the index has room for every noted key, so `put_pending` allocates no memory for keys.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import numpy as np

from oneemb.kernels.row_blocks import bits_clear, bits_set
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.table.chunk_files import ChunkFile, ChunkFiles
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.pending_keys import PendingKeys
from oneemb.storage.table.snapshot_manifest import ChunkPart

_EXTENTS_MIN = 32
# In `first_E`: the extent's chunk is gone, but a `get` still reads the checksums of its blocks.
_READ = -2


class LiveRows:
    """Index of the current rows, with a bit for each live place and the checksum of each block.

    Args:
        files: the chunk files, which are held and released here. All chunks have the same geometry.
        make_index: makes an empty index with room for a number of keys.
        expected: number of keys for which the index has room at first.
        beside: thread that puts noted keys into the index; None = the caller's thread does.
    """

    def __init__(
        self, geometry: Geometry, files: ChunkFiles, make_index: Callable[[int], CompactIndex | ColdIndex],
        expected: int = 0, beside: Executor | None = None,
    ):  # fmt: skip
        self.geometry = geometry
        self._make_index = make_index
        self.index = make_index(expected)
        self.first_E = np.empty(0, np.int64)
        """For each extent, the first extent of its chunk; -1 for a free extent, `_READ` for one that a `get` reads."""
        self.live_E = np.empty(0, np.int64)
        self.bit_N = np.empty(0, np.uint8)
        self.sum_B = np.empty(0, np.uint32)
        self.emptied = True
        """Whether there may be chunks without live rows. The caller who has removed them all resets it."""
        self._chunk: dict[int, ChunkFile] = {}  # by first extent
        self._extents: dict[ChunkFile, slice] = {}
        self._read: dict[ChunkFile, slice] = {}  # Extents of removed chunks that a `get` still reads.
        self._files, self._beside = files, beside
        self._pending = PendingKeys(self.index, beside)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        arrays = (self.first_E, self.live_E, self.bit_N, self.sum_B)
        return self.index.nbytes + sum(array.nbytes for array in arrays)

    def chunks(self) -> list[ChunkFile]:
        """The chunks that have extents, oldest first."""
        return list(self._extents)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._extents

    def chunk_in(self, extent: int) -> ChunkFile:
        """The chunk to which an extent belongs."""
        return self._chunk[int(self.first_E[extent])]

    def first_block(self, chunk: ChunkFile) -> int:
        """Number of a chunk's first block, counted over all extents of the table."""
        return self._extents[chunk].start * self.geometry.blocks_per_extent

    def first_place(self, chunk: ChunkFile) -> int:
        """The place of a chunk's first row."""
        return self._extents[chunk].start * self.geometry.rows_per_extent

    def has_place(self, chunk: ChunkFile, place_N: np.ndarray) -> np.ndarray:
        """Whether each place is in the chunk: bool [N]."""
        extents, rows = self._extents[chunk], self.geometry.rows_per_extent
        return (place_N >= extents.start * rows) & (place_N < extents.stop * rows)

    def live_of(self, chunk: ChunkFile) -> int:
        """Number of live rows in the chunk."""
        return int(self.live_E[self._extents[chunk]].sum())

    def live_counts(self) -> tuple[list[ChunkFile], np.ndarray]:
        """The chunks, by their places, and the number of live rows of each, int64 [C]."""
        first_C = np.sort(np.fromiter(self._chunk, np.int64, len(self._chunk)))
        # A sum runs up to the next chunk: the extents between are free, so they have no live rows.
        live_C = np.add.reduceat(self.live_E, first_C) if len(first_C) else first_C
        return [self._chunk[first] for first in first_C.tolist()], live_C

    def dead_chunks(self) -> list[ChunkFile]:
        """The chunks without live rows."""
        chunks, live_C = self.live_counts()
        return [chunks[c] for c in np.flatnonzero(live_C == 0)]

    def add(self, chunk: ChunkFile, blocks: int) -> None:
        """Give a chunk extents for this many blocks, and take over the caller's hold of the chunk. After a MemoryError
        nothing has changed."""
        size = max(1, -(-blocks // self.geometry.blocks_per_extent))
        first = self._free_extents(size)
        if first is None:
            self._grow(size)
            first = self._free_extents(size)
            assert first is not None
        self._extents[chunk] = slice(first, first + size)
        self._chunk[first] = chunk
        self.emptied = True
        self.first_E[first : first + size] = first
        self._files.need(chunk, live_rows=1)

    def remove(self, chunk: ChunkFile) -> None:
        """Free the extents of a chunk without live rows, and release the chunk."""
        assert self.live_of(chunk) == 0
        extents = self._extents.pop(chunk)
        del self._chunk[extents.start]
        self.first_E[extents] = _READ if chunk.reading else -1
        if chunk.reading:
            self._read[chunk] = extents
        self._files.need(chunk, live_rows=-1)
        self._files.release(chunk)

    @contextmanager
    def held(self, chunks: list[ChunkFile]) -> Iterator[None]:
        """Keep the files and the block checksums of these chunks while the block reads them without the lock."""
        held = []
        try:
            for chunk in chunks:
                self._files.hold(chunk)
                held.append(chunk)
                chunk.reading = True
            yield
        finally:
            for chunk in held:
                chunk.reading = False
                if chunk in self._read:
                    self.first_E[self._read.pop(chunk)] = -1
                self._files.release(chunk)

    def reserve(self, table_U: np.ndarray, id_U: np.ndarray) -> bool:
        """Reserve the memory that these keys need in the index. Returns True if the caller may `note` the keys, once;
        if False, the caller must `put` them. After a MemoryError nothing has changed."""
        try:
            if self._pending.make_room(table_U, id_U, self._put):
                return True
        except MemoryError:
            pass  # Memory does not suffice for a whole list; it may suffice for these keys.
        self.put_pending()
        try:
            self.index.reserve_keys(table_U, id_U)
        except MemoryError:
            need = self.index.need_room(table_U, id_U)
            self.index.reserve_keys(table_U[need], id_U[need])
        return False

    def put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """Set the places of these keys' rows. Each key is in the index already, or was passed to `reserve`."""
        self.put_pending()
        self._put(table_U, id_U, place_U)

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Remove these keys from the index; their rows on disk become garbage. Returns bool [U]: whether the key had a
        row."""
        self.put_pending()
        if len(self.index) == 0:
            return np.zeros(len(id_U), np.bool_)
        place_U = self.index.erase(table_U, id_U)
        with changing:
            self._clear(place_U)
            return place_U >= 0

    def note(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        """Set the places of these keys' rows at the next `put_pending`. `reserve` must have returned True for the
        keys."""
        self._pending.note(table_U, id_U, place_U)

    def put_pending(self) -> None:
        """Put all noted keys into the index."""
        self._pending.put_pending(self._put)

    def drop_index(self) -> PendingKeys:
        """Free the index. The caller puts the keys of all live rows, whose bits stay, into the new one. Returns the
        keys that were noted and are not in the index. After a MemoryError nothing has changed."""
        former = self._pending
        former.wait()
        index = self._make_index(0)
        pending = PendingKeys(index, self._beside)
        self.index.release()
        self.index, self._pending = index, pending
        return former

    def put_pending_of(self, former: PendingKeys) -> None:
        """Put the keys that were noted for a former index into this one. After a MemoryError call it again."""

        def put(table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
            self.index.reserve_keys(table_U, id_U)
            self._put(table_U, id_U, place_U)

        former.forget_error()
        former.put_pending(put)

    def load(
        self, chunk: ChunkFile, table_N: np.ndarray, id_N: np.ndarray, row_N: np.ndarray
    ) -> tuple[int, int] | None:
        """Add rows `row_N` of a chunk with new keys to the index; `load_bits` sets their bits, and `load_counts` counts
        them. Returns None, or, if a key was there already, its (table, id): this object cannot be used any more
        then."""
        return self.index.put_new(table_N, id_N, row_N + self.first_place(chunk))

    def load_counts(self, chunk: ChunkFile, row_N: np.ndarray) -> None:
        """Count rows `row_N` of a chunk as live."""
        extents = self._extents[chunk]
        self.live_E[extents] += np.bincount(
            row_N // self.geometry.rows_per_extent, minlength=extents.stop - extents.start
        )

    def load_over(self, chunk: ChunkFile, table_N: np.ndarray, id_N: np.ndarray, row_N: np.ndarray) -> None:
        """Add rows `row_N` of a chunk, which replace older rows of the same keys, and set the bits. No `load_bits` may
        follow. MemoryError if memory does not suffice."""
        self.index.reserve_keys(table_N, id_N)
        self._put(table_N, id_N, row_N + self.first_place(chunk))

    def load_sums(self, chunk: ChunkFile, sum_B: np.ndarray, block: int = 0) -> None:
        """Set the checksums of a chunk's blocks, from block `block` on."""
        begin = self.first_block(chunk) + block
        self.sum_B[begin : begin + len(sum_B)] = sum_B

    def load_bits(self, chunk: ChunkFile, bit_N: np.ndarray) -> None:
        """Set the bits of the live rows of a chunk whose extents are new."""
        begin = self.first_place(chunk) // 8
        self.bit_N[begin : begin + len(bit_N)] = bit_N

    def part(self, chunk: ChunkFile, without_N: np.ndarray | None = None) -> ChunkPart:
        """The live rows of a chunk that are on disk now, without the rows at the ascending places `without_N`."""
        rows = chunk.blocks * self.geometry.rows_per_block
        extents, extent_bytes = self._extents[chunk], self.geometry.rows_per_extent // 8
        bit_N = self.bit_N[extents.start * extent_bytes : extents.stop * extent_bytes]
        part_N = bit_N[: -(-rows // 64) * 8].copy()
        if rows % 64:
            part_N[rows // 8] &= (1 << rows % 8) - 1
            part_N[rows // 8 + 1 :] = 0
        in_memory = np.unpackbits(bit_N[rows // 8 :], bitorder="little")[rows % 8 :].sum(dtype=np.int64)
        size = int(self.live_of(chunk) - in_memory)
        if without_N is not None:
            first = self.first_place(chunk)
            row_N = without_N[slice(*np.searchsorted(without_N, [first, first + rows]))] - first
            cleared_E = np.zeros(1, np.int64)
            bits_clear(part_N, row_N, rows, cleared_E)
            size += int(cleared_E[0])
        return ChunkPart(chunk.number, chunk.blocks, chunk.keys_bytes, chunk.keys_sum, size, bit_N=part_N)

    def release(self) -> None:
        """Release all chunks and the index. The object has none afterwards; a compaction that waited may still ask for
        them."""
        self._pending.wait()  # Its thread uses the file of the index, which other rows may use from now on.
        for chunk in self._extents:
            self._files.need(chunk, live_rows=-1)
            self._files.release(chunk)
        self.first_E.fill(-1)
        self._extents, self._chunk = {}, {}
        self.index.release()

    def _put(self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray) -> None:
        rows = self.geometry.rows_per_extent
        old_U = self.index.replace(table_U, id_U, place_U)
        with changing:
            # New places first: if a key comes twice in a call, its first place is the old place of the second.
            bits_set(self.bit_N, place_U, rows, self.live_E)
            self._clear(old_U)

    def _clear(self, place_U: np.ndarray) -> None:
        if bits_clear(self.bit_N, place_U, self.geometry.rows_per_extent, self.live_E):
            self.emptied = True

    def _free_extents(self, size: int) -> int | None:
        """First of the first `size` neighbouring free extents; None = there are no such extents."""
        edges = np.flatnonzero(np.diff(self.first_E == -1, prepend=False, append=False))
        begins, ends = edges[::2], edges[1::2]
        fit = np.flatnonzero(ends - begins >= size)
        return int(begins[fit[0]]) if len(fit) else None

    def _grow(self, size: int) -> None:
        """Add at least `size` neighbouring extents."""
        self._pending.wait()  # Its thread writes to the arrays.
        old = len(self.first_E)
        new = max(old + size, old * 3 // 2, _EXTENTS_MIN)
        rows, blocks = self.geometry.rows_per_extent, self.geometry.blocks_per_extent
        grown = []
        for array, per_extent in ((self.live_E, 1), (self.bit_N, rows // 8), (self.sum_B, blocks)):
            grown.append(np.zeros(new * per_extent, array.dtype))
            grown[-1][: len(array)] = array
        first_E = np.full(new, -1, np.int64)
        first_E[:old] = self.first_E
        self.first_E, (self.live_E, self.bit_N, self.sum_B) = first_E, grown
