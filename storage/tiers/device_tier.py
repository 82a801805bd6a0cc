"""The hot tier in a GPU's memory: what hot_tier.py is in the host's, for keys and slots on the device.

Keys of `acquire` and the slots it gives are tensors on the device; as a `RowStore` the tier takes and gives NumPy
arrays like every other. Rows that miss are gathered on the host into pinned buffers and copied, whole and in bulk; so
are evicted rows on their way down.

Invariants, beside those of hot_rows.py:
- rows begin at multiples of 16 bytes, so that loops may move them 16 bytes at a time;
- a lookup waits for the device once, to learn how many keys it has, how many of them miss and whether its tables and
  offsets were as they must be. Those do not wait whose rows were all prefetched, and those of a resident tier that has
  room for as many new rows as there are ids: the device then gives new keys their slots, and the host learns later how
  many there were (`_apply_pending`). Until then its counts of rows and free slots are those of before;
- everything runs on torch's current stream. Calls that search, fill or evict come on the device in the order in which
  the host made them, on whatever streams. Between them steps read and write rows in pinned slots, and
  release them, on streams of their own: prefetching moves no array that they use, and takes no slot that is pinned.
  What moves those arrays, or gives them back, waits for the whole device before and after.

Streams and events are torch's and not cuda-python's: its allocator must know which stream still uses what is freed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda, look_up_cuda
from oneemb.kernels.later import Later
from oneemb.kernels.launch import outside_inference_mode
from oneemb.kernels.slots_cuda import count_pinned_loop, mark_dirty_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.errors import StoreFullError
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.row_store import RowStore
from oneemb.storage.tiers.device_index import DeviceIndex
from oneemb.storage.tiers.device_memory import PinnedRows, StreamOrder
from oneemb.storage.tiers.device_slots import USE_SCORE, DeviceSlots, in_order, padded, up_to_date
from oneemb.storage.tiers.hot_rows import InitRows, fill_pinned
from oneemb.storage.tiers.limits import Limits
from oneemb.storage.tiers.memory_tier import MemoryTier

# Memory beside the row for each slot: the index at its usual load; then key, score, pins, dirty bit, stack of slots.
_INDEX_BYTES = 16 * 2
SLOT_OVERHEAD_BYTES = _INDEX_BYTES + 12 + 8 + 4 + 1 + 8


class DeviceTier(DeviceSlots):
    """Rows in a GPU's memory; arguments as of `HotTier`.

    Args:
        slots: rows that fit. Memory is taken as slots are first used.
        backend: that of the GPU.
    """

    @outside_inference_mode
    def __init__(
        self,
        name: str,
        *,
        row_width: int,
        slots: int,
        below: RowStore | None,
        resident: bool,
        row_limit: int | None = None,
        policy: str = "lfu",
        init: InitRows,
        absent: InitRows | None = None,
        refused: InitRows | None = None,
        backend: CudaBackend,
    ):
        super().__init__(name, row_width, below, resident, policy, init, absent, refused)
        self.slots = slots
        self._backend = backend
        self._gpu = gpu = backend.gpu
        self.stable_slots = False  # What is read must be pinned: growing and evicting wait for no stream that reads.
        self._limits = Limits(name, slots, padded(row_width) * 4 + SLOT_OVERHEAD_BYTES, resident, row_limit)
        self._bus = PinnedRows(row_width, gpu)
        self._order = StreamOrder(gpu)
        self._tick = 0
        self._ahead_failed = -1
        self._free_2, self._next_2 = (gpu.empty(2, dtype=torch.int64) for _ in range(2))  # not `kept`: they take turns
        self.use_score = USE_SCORE
        with self._order(self._arrays):
            self._index = DeviceIndex(gpu)
            self._forget()

    # ---- for kernels: rows to compute on, in place ------------------------------------------------------------

    @in_order
    def acquire(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys]:
        """See `HotRows.acquire`. ValueError, with nothing changed, if tables or offsets are invalid.

        Where nothing has to be known before, the host does not wait: keys and slots are then not cut, and the slots
        beyond the actual number of keys are `BEYOND`.
        """
        while self._pending and self._apply_first(wait=False):
            pass
        room = keys.id_U.numel()
        if self._make_room_to_admit(keys, room):
            return self._admit(keys, room), keys
        self._apply_pending()
        slot_U, keys, missed = self._find_and_pin(keys, 1)
        if missed:
            try:
                missing = torch.nonzero(slot_U < 0).reshape(-1)
                slot_M = self._bring_in(keys.table_U[missing], keys.id_U[missing])
            except BaseException:
                self.release(slot_U)
                raise
            with changing:
                slot_U[missing] = slot_M
        self._counters.hits += len(keys.id_U) - missed
        self._counters.misses += missed
        self._make_room_ahead(room)
        return slot_U, keys

    @up_to_date
    def acquire_rest(self, keys: DeviceKeys, slot_U: torch.Tensor) -> None:
        try:
            missing = torch.nonzero(slot_U < 0).reshape(-1)
            # Some may have come in since they were looked for.
            slot_M, _ = self.acquire(self._backend.distinct_keys(keys.table_U[missing], keys.id_U[missing]))
        except BaseException:
            self.release(slot_U)
            raise
        with changing:
            slot_U[missing] = slot_M

    @up_to_date
    def pin_resident(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys, torch.Tensor]:
        slot_U, keys, missed = self._find_and_pin(keys, 1)
        try:
            missing = torch.nonzero(slot_U < 0).reshape(-1) if missed else self._gpu.empty(0, dtype=torch.int64)
        except BaseException:
            self.release(slot_U)
            raise
        self._counters.hits += len(keys.id_U) - missed
        return slot_U, keys, missing

    def rows_ahead(self, keys: DeviceKeys, wanted: torch.Tensor) -> None:
        return None  # They are read under the store lock.

    @up_to_date
    def bring_known(self, keys: DeviceKeys, slot_U: torch.Tensor, wanted: torch.Tensor, ahead: None = None) -> int:
        """See `HotRows.bring_known`. The slab does not grow, since that would move rows which steps on other streams
        may use: without free slots the call raises `StoreFullError`."""
        if self._resident or len(wanted) == 0:
            return 0
        assert self._below is not None
        # Steps may have brought some in since they were looked for.
        distinct = self._backend.distinct_keys(keys.table_U[wanted], keys.id_U[wanted])
        slot_M, _, missed = self._find_and_pin(distinct, 1)
        fill_pinned(slot_U, wanted, slot_M, self.release)
        found = len(wanted) - missed
        self._counters.hits += found
        missing = wanted[torch.nonzero(slot_M < 0).reshape(-1)] if found else wanted
        self._limits.check_fits(missed, self._held())
        table_M, id_M = keys.table_U[missing], keys.id_U[missing]
        old, rows = self._known_below(table_M, id_M)
        size = len(old)
        if min(self._free.used + self._free.fresh(size), self.slots) > len(self.pin_S):
            raise StoreFullError(f"the {self.name} tier has no slots yet for {size} more rows")
        u = missing[old]
        slot_O = self._reserve(size)
        copy_rows_in_cuda(self.row_SW, slot_O, rows, gpu=self._gpu)
        with self._taking(slot_O, table_M[old], id_M[old], dirty=False):
            self.pin_S[slot_O] = 1
        fill_pinned(slot_U, u, slot_O, self.release)
        self._counters.misses += size
        return found + size

    def _known_below(self, table_M: torch.Tensor, id_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the keys that have rows in the store below, and these rows, on the device."""
        assert self._below is not None
        found, rows = [np.empty(0, np.int64)], [self._gpu.empty(0, self.row_width, dtype=torch.float32)]
        for part, missing_N, row_NW in self._bus.read(self._below, self._host(table_M), self._host(id_M)):
            known = np.flatnonzero(~missing_N)
            found.append(part.start + known)
            rows.append(row_NW if len(known) == len(row_NW) else row_NW[self._gpu.put(known)])
        return self._gpu.put(np.concatenate(found)), torch.cat(rows)

    @up_to_date
    def read(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys]:
        self._order.after_releases()
        slot_U, keys, missed = self._find_and_pin(keys, 0)
        if missed == 0:
            self._counters.hits += len(keys.id_U)
            return copy_rows_out_cuda(self.row_SW, slot_U, self.row_SW.shape[1], gpu=self._gpu), keys
        row_UW = self._gpu.full(len(keys.id_U), self.row_SW.shape[1], value=0, dtype=torch.float32)
        here = torch.nonzero(slot_U >= 0).reshape(-1)
        rows = copy_rows_out_cuda(self.row_SW, slot_U[here], self.row_SW.shape[1], gpu=self._gpu)
        copy_rows_in_cuda(row_UW, here, rows, gpu=self._gpu)
        self._counters.hits += len(here)
        self._counters.misses += missed
        missing = torch.nonzero(slot_U < 0).reshape(-1)
        if not self._resident:
            known, rows = self._known_below(keys.table_U[missing], keys.id_U[missing])
            copy_rows_in_cuda(row_UW, missing[known], rows, gpu=self._gpu)
            absent_M = torch.ones(missed, dtype=torch.bool, device=self._gpu.device)
            absent_M[known] = False
            missing = missing[absent_M]
        if len(missing):
            self._absent(row_UW, missing, keys.table_U[missing], keys.id_U[missing])
        return row_UW, keys

    @in_order
    def gather(
        self, keys: DeviceKeys, weights: Callable[[torch.Tensor], torch.Tensor], absent: InitRows, out_ND: torch.Tensor
    ) -> bool:
        """See `HotRows.gather`."""
        if not self._resident or keys.check is not None or out_ND.shape[0] == 0:
            return False
        self._order.after_releases()
        gpu, index = self._gpu, self._index
        later = Later(gpu, 5)
        # No use is counted: a resident tier evicts nothing.
        missing = look_up_cuda(
            index.cell_C2, weights(self.row_SW), keys, index.inserted_2, out_ND, later, gpu=gpu
        )  # fmt: skip
        absent(out_ND, missing, keys.table_U, keys.id_U)
        self._count_later(later)
        return True

    def slots_of(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        raise AssertionError("slots are not stable here")

    @up_to_date
    def make_temporary(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        self._limits.check_fits(len(id_M), self._held())
        slot_M = self._reserve(len(id_M))
        self._refused(self.row_SW, slot_M, table_M, id_M)
        self._table_S[slot_M] = -1  # no row's, whatever is written to it
        with changing:
            self.pin_S[slot_M] = 2
            self._free.commit(len(slot_M))
            self._temporary += len(slot_M)
        return slot_M

    @up_to_date
    def free_temporary(self, slot_M: torch.Tensor) -> None:
        self._order.after_releases()
        left_M = self.pin_S[slot_M] - 1
        with changing:
            self.pin_S[slot_M] = left_M
            self._dirty_S[slot_M] = False
            self._temporary -= len(slot_M)
            self._free.give_back(slot_M)

    @up_to_date
    def check_slots(self) -> list[str]:
        _, _, slot_N = self._index.items()
        return self._free.problems(self.name, self._host(slot_N), self._host(self._free.returned_N), self._temporary)

    def release(self, slot_U: torch.Tensor, *, elsewhere: bool = False) -> None:
        if elsewhere:
            self._release_in_order(slot_U)
        else:
            self._release(slot_U)

    def mark_dirty(self, slot_U: torch.Tensor) -> None:
        self._gpu.run(mark_dirty_loop, len(slot_U), slot_U, self._dirty_S)

    @property
    def dirty_S(self) -> torch.Tensor:
        """Dirty bits, bool [S], for loops that change rows in slots that are pinned."""
        return self._dirty_S

    @property
    def pinned(self) -> int:
        self._apply_pending()
        count_1 = self._gpu.full(1, value=0, dtype=torch.int64)
        self._gpu.run(count_pinned_loop, self._free.used, self.pin_S, self._free.used, count_1)
        return self._gpu.read(count_1)[0]

    # ---- as a store under another tier: see memory_tier.py ------------------------------------------------------

    get = up_to_date(MemoryTier.get)
    put = up_to_date(MemoryTier.put)
    erase = up_to_date(MemoryTier.erase)
    contains = up_to_date(MemoryTier.contains)
    flush = up_to_date(MemoryTier.flush)
    reload = up_to_date(MemoryTier.reload)
    clear = up_to_date(MemoryTier.clear)
    cached = up_to_date(MemoryTier.cached)
    warm = up_to_date(MemoryTier.warm)

    @up_to_date
    def _write_down(self) -> None:
        super()._write_down()

    def close(self) -> None:
        super().close()
        self._bus.drop()

    def __len__(self) -> int:
        self._apply_pending()
        return super().__len__()

    def _held(self) -> int:
        self._apply_pending()
        return super()._held()

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return self._gpu.put(array)

    def _host(self, array: torch.Tensor) -> np.ndarray:
        return self._gpu.to_host(array)

    def _look(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        self._order.after_releases()
        slot_U, _, _ = self._find_and_pin(self._backend.distinct_keys(self._put(table_U), self._put(id_U)), 0)
        missing_U = self._host(slot_U < 0)
        return slot_U[slot_U >= 0], np.flatnonzero(~missing_U), missing_U

    def _pinned_of(self, slot_H: torch.Tensor) -> int:
        self._order.after_releases()
        return self._gpu.read((self.pin_S[slot_H] > 0).sum())[0]

    def _rows_in(self, slot_N: torch.Tensor, row_XW: np.ndarray, from_N: np.ndarray) -> None:
        self._bus.rows_in(self.row_SW, slot_N, row_XW, from_N)

    def _rows_out(self, slot_N: torch.Tensor) -> Iterator[tuple[slice, np.ndarray]]:
        return self._bus.rows_out(self.row_SW, slot_N)

    def _copy_out(self, slot_N: torch.Tensor, out_XW: np.ndarray, to_N: np.ndarray) -> None:
        for part, row_NW in self._rows_out(slot_N):
            out_XW.view(np.int32)[to_N[part]] = row_NW.view(np.int32)

    def _dirty_keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._order.after_releases()
        used = slice(0, self._free.used)
        return self._keys_of(torch.nonzero(self._dirty_S[used] & (self._table_S[used] >= 0)).reshape(-1))

    def _all_keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._index.items()

    def _scan(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        with self._order(self._arrays):
            self._apply_pending()
            table_N, id_N, slot_N = self._index.items()
        for n in range(0, len(slot_N), batch):
            piece = slice(n, n + batch)
            with self._order(self._arrays):
                self._order.after_releases()
                found = self._host(table_N[piece]).copy(), self._host(id_N[piece]).copy()
                row_NW = np.empty((len(found[0]), self.row_width), np.float32)
                self._copy_out(slot_N[piece], row_NW, np.arange(len(row_NW)))
            yield *found, row_NW

    @up_to_date
    def stats(self) -> dict[str, Any]:
        return {
            "rows": len(self._index),
            "slots": self.slots,
            "pinned": self.pinned,
            "dirty": int(self._dirty_S[: self._free.used].sum()),
            **self._counters.stats(),
            "bytes": len(self.pin_S) * (self._limits.slot_bytes - _INDEX_BYTES) + self._index.nbytes,
        }
