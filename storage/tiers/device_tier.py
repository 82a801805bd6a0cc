"""The hot tier in a GPU's memory: what hot_tier.py is in the host's, for keys and slots on the device.

Keys of `acquire` and the slots it gives are tensors on the device; as a `RowStore` the tier takes and gives NumPy
arrays like every other. Rows that miss are gathered on the host into pinned buffers and copied, whole and in bulk; so
are evicted rows on their way down.

Invariants, beside those of hot_rows.py:
- rows begin at multiples of 16 bytes, so that loops may move them 16 bytes at a time;
- a lookup waits for the device once, to learn how many keys it has, how many of them miss and whether its tables and
  offsets were as they must be; one whose rows were all prefetched does not wait;
- everything runs on torch's current stream. Calls that search, fill or evict come on the device in the order in which
  the host made them, on whatever streams. Between them steps read and write rows in pinned slots, and
  release them, on streams of their own: prefetching moves no array that they use, and takes no slot that is pinned.
  What moves those arrays, or gives them back, waits for the whole device before and after.

Streams and events are torch's and not cuda-python's: its allocator must know which stream still uses what is freed.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda
from oneemb.kernels.slots_cuda import count_pinned_loop, release_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.errors import StoreFullError
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.row_store import RowStore
from oneemb.storage.tiers.device_index import DeviceIndex
from oneemb.storage.tiers.device_memory import PinnedRows, StreamOrder, enlarge
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.hot_rows import InitRows, fill_pinned
from oneemb.storage.tiers.limits import Limits
from oneemb.storage.tiers.memory_tier import HALF_LIFE, MemoryTier

# Memory beside the row for each slot: the index at its usual load; then key, score, pins, dirty bit, stack of slots.
_INDEX_BYTES = 16 * 2
SLOT_OVERHEAD_BYTES = _INDEX_BYTES + 12 + 8 + 4 + 1 + 8

# Evicting sorts the scores, so it makes room for this share of the slots at a time.
_EVICT_SHARE = 1 / 16

# What the first use counts, for "lfu", and the factor by which scores are brought down, far from int64's end.
_USE_SCORE = 256.0
_SCORE_STEP = 1 << 20

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS_MIN = 1024


def _in_order(method: "Callable[Concatenate[DeviceTier, P], R]") -> "Callable[Concatenate[DeviceTier, P], R]":
    """Runs a method of the tier after all that was asked of it before, on any stream."""

    @functools.wraps(method)
    def run(self: "DeviceTier", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._order(self._arrays):
            return method(self, *args, **kwargs)

    return run


class DeviceTier(MemoryTier):
    """Rows in a GPU's memory; arguments as of `HotTier`.

    Args:
        slots: rows that fit. Memory is taken as slots are first used.
        backend: that of the GPU.
    """

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
        super().__init__(name, row_width, below, resident, policy, init, absent, refused, backend.arange)
        self.slots = slots
        self._backend = backend
        self._gpu = gpu = backend.gpu
        self.stable_slots = False  # What is read must be pinned: growing and evicting wait for no stream that reads.
        self._limits = Limits(name, slots, _padded(row_width) * 4 + SLOT_OVERHEAD_BYTES, resident, row_limit)
        self._bus = PinnedRows(row_width, gpu)
        self._order = StreamOrder(gpu)
        self._tick = 0
        self.use_score = _USE_SCORE  # what a use counts now, for "lfu": see oneemb.storage.tiers.hot_tier
        with self._order(self._arrays):
            self._index = DeviceIndex(gpu)
            self._forget()

    # ---- for kernels: rows to compute on, in place ------------------------------------------------------------

    @_in_order
    def acquire(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys]:
        """See `HotRows.acquire`. ValueError, with nothing changed, if tables or offsets are invalid."""
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
        return slot_U, keys

    @_in_order
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

    @_in_order
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

    @_in_order
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
        row_MW = np.empty((missed, self.row_width), np.float32)
        old_M = ~self._below.get(self._host(table_M), self._host(id_M), row_MW)
        size = int(np.count_nonzero(old_M))
        if min(self._free.used + self._free.fresh(size), self.slots) > len(self.pin_S):
            raise StoreFullError(f"the {self.name} tier has no slots yet for {size} more rows")
        old = self._gpu.put(np.flatnonzero(old_M))
        u = missing[old]
        slot_O = self._reserve(size)
        self._rows_in(slot_O, row_MW, np.flatnonzero(old_M))
        with self._taking(slot_O, table_M[old], id_M[old], dirty=False):
            self.pin_S[slot_O] = 1
        fill_pinned(slot_U, u, slot_O, self.release)
        self._counters.misses += size
        return found + size

    @_in_order
    def read(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys]:
        self._order.after_releases()
        slot_U, keys, missed = self._find_and_pin(keys, 0)
        row_UW = self._gpu.full(len(keys.id_U), self.row_SW.shape[1], value=0, dtype=torch.float32)
        here = torch.nonzero(slot_U >= 0).reshape(-1)
        rows = copy_rows_out_cuda(self.row_SW, slot_U[here], self.row_SW.shape[1], gpu=self._gpu)
        copy_rows_in_cuda(row_UW, here, rows, gpu=self._gpu)
        self._counters.hits += len(here)
        self._counters.misses += missed
        missing = torch.nonzero(slot_U < 0).reshape(-1)
        if missed and not self._resident:
            assert self._below is not None
            row_MW = np.empty((missed, self.row_width), np.float32)
            absent_M = self._below.get(self._host(keys.table_U[missing]), self._host(keys.id_U[missing]), row_MW)
            found = missing[self._gpu.put(~absent_M)]
            copy_rows_in_cuda(row_UW, found, self._bus.to_device(row_MW[~absent_M]), gpu=self._gpu)
            missing = missing[self._gpu.put(absent_M)]
        if len(missing):
            self._absent(row_UW, missing, keys.table_U[missing], keys.id_U[missing])
        return row_UW, keys

    def slots_of(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        raise AssertionError("slots are not stable here")

    @_in_order
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

    @_in_order
    def free_temporary(self, slot_M: torch.Tensor) -> None:
        self._order.after_releases()
        left_M = self.pin_S[slot_M] - 1
        with changing:
            self.pin_S[slot_M] = left_M
            self._dirty_S[slot_M] = False
            self._temporary -= len(slot_M)
            self._free.give_back(slot_M)

    @_in_order
    def check_slots(self) -> list[str]:
        _, _, slot_N = self._index.items()
        return self._free.problems(self.name, self._host(slot_N), self._host(self._free.returned_N), self._temporary)

    def release(self, slot_U: torch.Tensor, *, elsewhere: bool = False) -> None:
        if elsewhere:
            self._release_in_order(slot_U)
        else:
            self._release(slot_U)

    def _release(self, slot_U: torch.Tensor) -> None:
        self._gpu.run(release_loop, len(slot_U), slot_U, self.pin_S)
        self._order.released(slot_U)

    _release_in_order = _in_order(_release)

    def mark_dirty(self, slot_U: torch.Tensor) -> None:
        self._dirty_S.index_fill_(0, slot_U, True)  # An assignment would wait for the device.

    @property
    def pinned(self) -> int:
        count_1 = self._gpu.full(1, value=0, dtype=torch.int64)
        self._gpu.run(count_pinned_loop, self._free.used, self.pin_S, self._free.used, count_1)
        return self._gpu.read(count_1)[0]

    # ---- as a store under another tier: see memory_tier.py ------------------------------------------------------

    get = _in_order(MemoryTier.get)
    put = _in_order(MemoryTier.put)
    erase = _in_order(MemoryTier.erase)
    contains = _in_order(MemoryTier.contains)
    flush = _in_order(MemoryTier.flush)
    reload = _in_order(MemoryTier.reload)
    clear = _in_order(MemoryTier.clear)

    @_in_order
    def _write_down(self) -> None:
        super()._write_down()

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return self._gpu.put(array)

    def _host(self, array: torch.Tensor) -> np.ndarray:
        return array.cpu().numpy()

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

    def _rows_out(self, slot_N: torch.Tensor) -> np.ndarray:
        return self._bus.rows_out(self.row_SW, slot_N)

    def _copy_out(self, slot_N: torch.Tensor, out_XW: np.ndarray, to_N: np.ndarray) -> None:
        out_XW[to_N] = self._rows_out(slot_N)

    def _dirty_keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._order.after_releases()
        used = slice(0, self._free.used)
        return self._keys_of(torch.nonzero(self._dirty_S[used] & (self._table_S[used] >= 0)).reshape(-1))

    def _scan(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        with self._order(self._arrays):
            table_N, id_N, slot_N = self._index.items()
        for n in range(0, len(slot_N), batch):
            its = slice(n, n + batch)
            with self._order(self._arrays):
                self._order.after_releases()
                found = self._host(table_N[its]).copy(), self._host(id_N[its]).copy(), self._rows_out(slot_N[its])
            yield found

    @_in_order
    def stats(self) -> dict[str, Any]:
        return {
            "rows": len(self._index),
            "slots": self.slots,
            "pinned": self.pinned,
            "dirty": int(self._dirty_S[: self._free.used].sum()),
            **self._counters.stats(),
            "bytes": len(self.pin_S) * (self._limits.slot_bytes - _INDEX_BYTES) + self._index.nbytes,
        }

    # ---- inside -----------------------------------------------------------------------------------------------

    def _find_and_pin(self, keys: DeviceKeys, pins: int) -> tuple[torch.Tensor, DeviceKeys, int]:
        """The slots of keys, -1 for one that is not here, the keys cut to as many as there are, and how many of them
        are not here. Rows that are here are pinned once more if `pins` is 1, and count as used now."""
        self._tick += 1
        tick = self._tick if self.policy == "lru" else -int(self.use_score)
        slot_U, missed, wrong = self._index.find_slots(keys, self.pin_S, self.score_S, pins, tick)
        if wrong:
            if pins:
                self.release(slot_U)
            assert keys.check is not None
            keys.check()
            raise AssertionError("the device found tables or offsets to be wrong, and the host does not")
        self._grow_old(len(slot_U) - missed)
        return slot_U, keys.cut(len(slot_U)), missed

    def _grow_old(self, uses: int) -> None:
        """Let uses from here on count more than those before, by the number of rows that have been used."""
        self.use_score *= 2.0 ** (uses / (HALF_LIFE * self.slots))
        if self.use_score > _USE_SCORE * _SCORE_STEP:
            self.score_S //= _SCORE_STEP
            self.use_score /= _SCORE_STEP

    def _bring_in(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """Pinned slots for keys that are not here: rows from below, or else new ones."""
        size = len(id_M)
        new_M = torch.ones(size, dtype=torch.bool, device=self._gpu.device)
        unknown = size
        if self._resident:
            self._limits.check_new(size, self, int(table_M[0]))
        self._limits.check_fits(size, self._held())
        row_MW, old = np.empty((0 if self._resident else size, self.row_width), np.float32), np.empty(0, np.int64)
        if not self._resident:
            assert self._below is not None
            missing_M = self._below.get(self._host(table_M), self._host(id_M), row_MW)
            unknown, old = int(np.count_nonzero(missing_M)), np.flatnonzero(~missing_M)
            if unknown:
                self._limits.check_new(unknown, self, int(self._host(table_M)[missing_M][0]))
            new_M = self._gpu.put(missing_M)
        slot_M = self._reserve(size)
        slot_N = slot_M[new_M]
        self.init_rows(self.row_SW, slot_N, table_M[new_M], id_M[new_M])
        if len(old):
            self._rows_in(slot_M[~new_M], row_MW, old)
        with self._taking(slot_M, table_M, id_M, dirty=new_M):
            self.pin_S[slot_M] = 1
            self._add_known(unknown)
            self._counters.new_rows += unknown
        return slot_M

    def _take(
        self, table_N: np.ndarray, id_N: np.ndarray, row_XW: np.ndarray, from_N: np.ndarray, *, dirty: bool
    ) -> torch.Tensor:
        slot_N = self._reserve(len(id_N))
        self._rows_in(slot_N, row_XW, from_N)
        with self._taking(slot_N, self._put(table_N), self._put(id_N), dirty=dirty):
            return slot_N

    @contextmanager
    def _taking(
        self, slot_N: torch.Tensor, table_N: torch.Tensor, id_N: torch.Tensor, *, dirty: bool | torch.Tensor
    ) -> Iterator[None]:
        """Enter keys that are not here, whose rows are in reserved slots. The block that follows is part of the same
        change."""
        # Writes to free slots harm nothing, as long as the slots are not dirty.
        self._table_S[slot_N] = table_N
        self._id_S[slot_N] = id_N
        self.score_S[slot_N] = self._tick if self.policy == "lru" else int(self.use_score)
        self._grow_old(len(slot_N))
        self._index.insert(table_N, id_N, slot_N)
        with changing:
            self._free.commit(len(slot_N))
            self._dirty_S[slot_N] = dirty
            yield

    def _reserve(self, size: int) -> torch.Tensor:
        """Slots for so many rows, and room for their keys in the index; other rows are evicted if need be. The slots
        stay free until `commit`. The caller has checked that there is room."""
        short = size - self._free.left(self.slots)
        if short > 0:
            self._evict(max(short, int(self.slots * _EVICT_SHARE)))
        self._grow(self._free.used + self._free.fresh(size))
        self._index.reserve(size)
        return self._free.reserve(size, len(self.pin_S))

    def _grow(self, need: int) -> None:
        """Get memory for so many slots, and for as many again: each row is copied once or twice in its life."""
        have = len(self.pin_S)
        if need > have:
            self._free.make_stack(need)
            size = min(self.slots, max(need, 2 * have, _SLOTS_MIN))
            self._gpu.wait()
            try:
                enlarge(self._slot_arrays, self._hold, size, need, self._limits, self._gpu.device)
            finally:
                self._gpu.wait()

    def _hold(self, arrays: list[torch.Tensor]) -> None:
        self.row_SW, self._table_S, self._id_S, self.score_S, self.pin_S, self._dirty_S = arrays

    def _arrays(self) -> list[torch.Tensor]:
        return [*self._slot_arrays(), self._free.stack_X, self._index.cell_C2, self._index.inserted_2]

    def _slot_arrays(self) -> list[torch.Tensor]:
        return [self.row_SW, self._table_S, self._id_S, self.score_S, self.pin_S, self._dirty_S]

    def _evict(self, count: int) -> None:
        """Drop the `count` unpinned rows of least score, or as many as there are."""
        used = slice(0, self._free.used)
        self._order.after_releases()
        score_S = self.score_S[used].clone()
        # Looked at once: a step on another stream may release some of them meanwhile.
        pinned_S = self.pin_S[used] > 0
        score_S[pinned_S] = torch.iinfo(torch.int64).max
        score_S[self._free.returned_N] = torch.iinfo(torch.int64).max
        evictable = len(self._index) + self._temporary - self._gpu.read(pinned_S.sum())[0]
        # Stable, so that rows of one score leave in order of slot, whatever the device does.
        victim_V = torch.sort(score_S, stable=True).indices[: min(count, evictable)]
        victim_V = torch.sort(victim_V).values
        self._evict_these(self._keys_of(victim_V), self._dirty_S[victim_V])

    def _keys_of(self, slot_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(table, id, slot) of the rows in these slots."""
        return self._table_S[slot_N], self._id_S[slot_N], slot_N

    def _forget(self) -> None:
        gpu = self._gpu
        gpu.wait()  # Steps on other streams may be using what is given back.
        self.row_SW = gpu.empty(0, _padded(self.row_width), dtype=torch.float32)
        self._table_S = gpu.empty(0, dtype=torch.int32)
        self._id_S = gpu.empty(0, dtype=torch.int64)
        self.score_S = gpu.empty(0, dtype=torch.int64)
        self.pin_S = gpu.empty(0, dtype=torch.int32)
        self._dirty_S = gpu.empty(0, dtype=torch.bool)
        self._free = FreeSlots(self._backend.arange)
        self._temporary = 0  # slots of rows that are in no index
        self._index.clear()


def _padded(row_width: int) -> int:
    """Words of a row that ends where 16 bytes do."""
    return -(-row_width // 4) * 4
