"""An index from keys to places in a device's memory that grows with its keys: 32 to 64 bytes a key in use.

Invariants: at most 7 of 10 cells have ever been taken, so that a probe ends soon; a call that fails to get memory has
changed nothing. How many keys and taken cells there are is known on the host, so no call waits for the device but
those that must: growth, and `erase` and `items`, which say what they found.
"""

import torch

from oneemb.kernels.hash_index_cuda import erase_loop, find_loop, insert_loop, items_loop, rehash_loop
from oneemb.kernels.launch import SHARES_MAX, Gpu, outside_inference_mode
from oneemb.kernels.slots_cuda import acquire_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.locking.store_lock import changing

_CELLS_MIN = 64
_LOAD_MAX = 0.7


class DeviceIndex:
    """Map from (table, id) to a place, an int64 from 0 to 2^40 - 2."""

    @outside_inference_mode
    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._size = 0
        self._taken = 0  # cells that hold a key or held one: an upper bound, since cells given up are used again
        self.inserted_2 = gpu.kept(gpu.full(2, value=0, dtype=torch.int64))
        """On the device: number of cells that insertions took for the first time, and number of keys that found no
        cell, which must stay 0. An insertion does not wait for it: the next read of the device passes it to
        `check_inserted`."""
        self.count_X = gpu.kept(gpu.empty(SHARES_MAX, dtype=torch.int32))
        """Room for numbers of keys in shares, `count_B` of `acquire_loop`; each lookup writes it anew."""
        self._hold(self._empty_cells(0))

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.cell_C2.numel() * 8

    def find(self, table_U: torch.Tensor, id_U: torch.Tensor) -> torch.Tensor:
        """The place of each key, -1 for a key that is not here: int64 [U]."""
        place_U = self._gpu.empty(len(id_U), dtype=torch.int64)
        size_1 = self._gpu.full(1, value=len(id_U), dtype=torch.int64)
        self._gpu.run(find_loop, len(id_U), self.cell_C2, table_U, id_U, size_1, place_U)
        return place_U

    def find_slots(
        self, keys: DeviceKeys, pin_S: torch.Tensor, score_S: torch.Tensor, pins: int, tick: int
    ) -> tuple[torch.Tensor, int, bool]:
        """Find places that are slots, which are pinned `pins` times more and used now; see `acquire_loop`. Returns the
        slots, int64 [U], -1 for an absent key, cut to as many keys as there are; the number of absent keys; and
        whether tables or offsets are invalid."""
        gpu, size = self._gpu, keys.id_U.shape[0]
        slot_U, count_4, (blocks, _) = gpu.empty(size, dtype=torch.int64), gpu.filled(4), gpu.shares(size)
        gpu.run_shares(
            acquire_loop, blocks, self.cell_C2, keys.table_U, keys.id_U, keys.size_2, pin_S, score_S, pins, tick,
            slot_U, self.inserted_2, count_4, self.count_X[:blocks],
            shapes=(size, self.cell_C2.shape, pin_S.shape),
        )  # fmt: skip
        # Bags of no ids have a size_2 that no launch has copied.
        counts = gpu.read(count_4) if size else [0, *gpu.read(keys.size_2), 0]
        missed, size, wrong, lost = counts
        self.check_inserted(lost)
        return slot_U[:size], missed, bool(wrong)

    def has_room(self, more: int) -> bool:
        """Whether this many keys beyond those here fit without growth."""
        return self._taken + more <= self._taken_max

    def note_inserted(self, size: int) -> None:
        """Count keys that a loop has put into the cells."""
        self._size += size
        self._taken += size

    def insert(self, table_U: torch.Tensor, id_U: torch.Tensor, place_U: torch.Tensor) -> None:
        """Put distinct keys that are not here."""
        self.reserve(len(id_U))
        self._gpu.run(insert_loop, len(id_U), self.cell_C2, table_U, id_U, place_U, self.inserted_2)
        self.note_inserted(len(id_U))

    def erase(self, table_U: torch.Tensor, id_U: torch.Tensor) -> torch.Tensor:
        """Take distinct keys out. Returns the places they had, -1 for a key that was not here: int64 [U]."""
        old_U = self._gpu.empty(len(id_U), dtype=torch.int64)
        self._gpu.run(erase_loop, len(id_U), self.cell_C2, table_U, id_U, old_U)
        with changing:  # The keys are gone, and `_size` still counts them.
            self._size -= self._gpu.read((old_U >= 0).sum())[0]
        return old_U

    def items(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All (table_N int32, id_N int64, place_N int64), in order of place."""
        size_1 = self._gpu.full(1, value=0, dtype=torch.int64)
        table_N = self._gpu.empty(self._size, dtype=torch.int32)
        id_N, place_N = (self._gpu.empty(self._size, dtype=torch.int64) for _ in range(2))
        self._gpu.run(items_loop, len(self.cell_C2), self.cell_C2, table_N, id_N, place_N, size_1)
        place_N, order_N = torch.sort(place_N)
        return table_N[order_N], id_N[order_N], place_N

    def reserve(self, more: int) -> None:
        """Make room for this many keys beyond those here. A torch.OutOfMemoryError has changed nothing."""
        if self.has_room(more):
            return
        # Cells given up count until the index is built anew; where they are many it need not grow for that.
        cells = self._empty_cells(2 * (self._size + more))
        count_2 = self._gpu.full(2, value=0, dtype=torch.int64)
        self._gpu.run(rehash_loop, len(self.cell_C2), self.cell_C2, cells, count_2)
        self.check_inserted(self._gpu.read(count_2)[1])
        self._hold(cells)
        self._taken = self._size

    def check_inserted(self, lost: int) -> None:
        """Raise AssertionError unless `lost`, the second number of `inserted_2`, is 0: such keys lose their rows."""
        if lost:
            raise AssertionError(f"{lost} keys found no cell in an index of {len(self.cell_C2)} cells: rows were lost")

    def clear(self) -> None:
        """Forget every key."""
        self._hold(self._empty_cells(0))
        self._size = self._taken = 0
        self.inserted_2.zero_()

    def _hold(self, cells: torch.Tensor) -> None:
        self.cell_C2, self._taken_max = cells, int(cells.shape[0] * _LOAD_MAX)

    @outside_inference_mode
    def _empty_cells(self, keys: int) -> torch.Tensor:
        cells = max(_CELLS_MIN, int(keys / _LOAD_MAX) + 2)
        return self._gpu.kept(self._gpu.full(cells, 2, value=0, dtype=torch.int64))
