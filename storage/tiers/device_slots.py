"""Slots of a hot tier in a GPU's memory, with their index: found, filled, given to new keys, evicted, grown.

device_tier.py makes a hot tier of them and has the invariants of both.

A lookup waits for the device where the host has to know how many keys miss: to read rows from below, to evict others,
to get memory, to refuse what does not fit, or to say what is wrong with tables or offsets. Where none of that can
happen, `_admit` lets the device give new keys their slots, and `_apply_pending` counts them when the numbers have come.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from oneemb.kernels.admit_cuda import DeviceAdmission, TierArrays
from oneemb.kernels.cuda_backend import CudaBackend
from oneemb.kernels.gather_cuda import copy_rows_in_cuda
from oneemb.kernels.later import Later
from oneemb.kernels.launch import Gpu, outside_inference_mode
from oneemb.kernels.slots_cuda import release_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.tiers.device_index import DeviceIndex
from oneemb.storage.tiers.device_memory import PinnedRows, StreamOrder, enlarge, enlarged
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.hot_rows import InitRows
from oneemb.storage.tiers.memory_tier import HALF_LIFE, MemoryTier

# Evicting sorts the scores, so it makes room for this share of the slots at a time.
_EVICT_SHARE = 1 / 16

# What the first use counts, for "lfu", and the factor by which scores are brought down, far from int64's end.
USE_SCORE = 256.0
_SCORE_STEP = 1 << 20

_SLOTS_MIN = 1024

# Lookups for whose new rows there is to be memory: the host may be as many ahead of the device without a wait.
_LOOKUPS_AHEAD = 2

P = ParamSpec("P")
R = TypeVar("R")
Slots = TypeVar("Slots", bound="DeviceSlots")


def in_order(method: Callable[Concatenate[Slots, P], R]) -> Callable[Concatenate[Slots, P], R]:
    """Decorator that runs a method of the tier after all that was asked of it before, on any stream."""

    @functools.wraps(method)
    def run(self: Slots, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Most calls come on the stream of all calls before, and then call neither `alone` nor what a `with` calls.
        if self._gpu.stream_now() == self._order.only or self._order.alone():
            return method(self, *args, **kwargs)
        with self._order(self._arrays):
            return method(self, *args, **kwargs)

    return run


def up_to_date(method: Callable[Concatenate[Slots, P], R]) -> Callable[Concatenate[Slots, P], R]:
    """Decorator like `in_order`, which first brings the host's counts up to those of the device."""

    @functools.wraps(method)
    def run(self: Slots, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._order(self._arrays):
            self._apply_pending()
            return method(self, *args, **kwargs)

    return run


class DeviceSlots(MemoryTier):
    """Base class of `DeviceTier`, which sets the attributes below."""

    row_SW: torch.Tensor
    score_S: torch.Tensor
    pin_S: torch.Tensor
    _table_S: torch.Tensor
    _id_S: torch.Tensor
    _dirty_S: torch.Tensor
    _score_dtype = np.int64
    _index: DeviceIndex
    _backend: CudaBackend
    _gpu: Gpu
    _order: StreamOrder
    _bus: PinnedRows
    _pending: deque[tuple[Later, int, bool]]
    """Lookups of which the host does not know yet how many of their keys missed: (numbers to come, largest number of
    keys that may have got slots, whether missing keys have got slots). The numbers are `count_4` of `acquire_loop` or
    `count_5` of `look_up_loop`; the last four of them mean the same."""
    _tick: int
    _free_2: torch.Tensor
    """int64 on the device: number of free slots that were given back, and number of slots ever used."""
    _next_2: torch.Tensor
    """An array like `_free_2`, for the numbers after the next admission."""
    _made: int
    """Number of slots that there is memory for: the length of `pin_S`, which takes less time to read here."""
    _free_known: tuple[int, int]
    """Values of `_free_2` once the device has done what it was asked for."""
    _ahead_failed: int
    """Number of slots when there was no memory for more than were needed; -1 = there was."""
    _admission: tuple[InitRows, torch.Tensor, torch.Tensor, DeviceAdmission] | None
    """(`init_rows`, stack of free slots, cells of the index, the `DeviceAdmission` that was made for them). The first
    three may have been replaced since. None = the admission is still to be made."""
    use_score: float
    """Number that a use counts now, for "lfu": see oneemb.storage.tiers.hot_tier."""

    def _release(self, slot_U: torch.Tensor) -> None:
        gpu, size = self._gpu, slot_U.shape[0]
        if size > 0:
            gpu.run_in_turn(
                lambda: ((release_loop, gpu.grid(size)),), (slot_U, self.pin_S),
                shapes=(release_loop, size, self.pin_S.shape),
            )  # fmt: skip
        if gpu.stream_now() != self._order.only:
            self._order.released(slot_U)

    _release_in_order = in_order(_release)

    def _find_and_pin(self, keys: DeviceKeys, pins: int) -> tuple[torch.Tensor, DeviceKeys, int]:
        """The slots of keys, -1 for one that is not here, the keys cut to as many as there are, and how many of them
        are not here. Rows that are here are pinned once more if `pins` is 1, and count as used now."""
        slot_U, missed, wrong = self._index.find_slots(keys, self.pin_S, self.score_S, pins, self._next_tick())
        if wrong:
            if pins:
                self._release(slot_U)
            assert keys.check is not None
            keys.check()
            raise AssertionError("the device found tables or offsets to be wrong, and the host does not")
        self._grow_old(len(slot_U) - missed)
        return slot_U, keys.cut(len(slot_U)), missed

    @property
    def _now(self) -> float:
        return self._tick if self.policy == "lru" else self.use_score

    @_now.setter
    def _now(self, score: float) -> None:
        if self.policy == "lru":
            self._tick = int(score)
        else:
            self.use_score = score

    def _next_tick(self) -> int:
        """The number by which `acquire_loop` scores a use that is made now."""
        self._tick += 1
        return self._tick if self.policy == "lru" else -int(self.use_score)

    # ---- lookups for which the host does not wait ----------------------------------------------------------------

    def _make_room_to_admit(self, keys: DeviceKeys, size: int) -> bool:
        """Whether `_admit`, which does not wait for the device, can acquire these keys: only if no error is possible.
        Counts pending lookups until there is room. `size`: length of the arrays of keys."""
        if not self._resident or keys.check is not None or size == 0:
            return False
        if not hasattr(self.init_rows, "admission"):
            return False
        free, limit = self._free, self._limits.row_limit
        while True:
            more = size  # new keys, whatever pending lookups have brought
            for _, admitted, _ in self._pending:
                more += admitted
            slots = free.used - free.returned + more
            if slots <= self._made and slots <= free.room and self._index.has_room(more):
                if limit is None or self._rows is not None and self._rows + more <= limit:
                    return True
            if not self._pending:
                return False
            self._apply_first(wait=True)

    def _make_room_ahead(self, keys: int) -> None:
        """Get memory for the new rows of the next lookups of so many keys, which then need not wait. Where there is no
        memory they wait."""
        more = _LOOKUPS_AHEAD * keys
        slots = self._free.used + self._free.fresh(more)
        admits_keys = hasattr(self.init_rows, "admission")
        if not self._resident or not admits_keys or slots > self.slots or len(self.pin_S) == self._ahead_failed:
            return
        self._admission = None  # It holds cells that the index may replace, here and below.
        try:
            self._index.reserve(more)
            self._grow(slots, ahead=True)
        except torch.OutOfMemoryError:
            self._ahead_failed = len(self.pin_S)

    def _admit(self, keys: DeviceKeys, size: int) -> torch.Tensor:
        """Pinned slots of keys, `BEYOND` after the last; new ones are initialized and put into the index: see
        admit_cuda.py. An error has changed nothing, unless it is one of the driver, after which no call succeeds."""
        free, gpu = self._free, self._gpu
        slot_U, counts, later = torch.empty_like(keys.id_U), gpu.filled(4), Later(gpu, 4)
        # While an admission is pending, only the device knows which slots are free; then no call has changed them.
        is_known = True
        for _, _, admits in self._pending:
            is_known = is_known and not admits
        if self._free_known != (free.returned, free.used) and is_known:
            self._free_2[:1].fill_(free.returned)
            self._free_2[1:].fill_(free.used)
            self._free_known = free.returned, free.used
        admission, tick = self._admission_now(), self._next_tick()
        admission.acquire(keys, size, slot_U, counts, later, self._free_2, self._next_2, tick)
        with changing:
            self._free_2, self._next_2 = self._next_2, self._free_2
            self._pending.append((later, size, True))
            self.begun += 1
        return slot_U

    def _admission_now(self) -> DeviceAdmission:
        """`DeviceAdmission` for the arrays and the first values of rows as they are now, and for the current stream."""
        init, stack_X, index = self.init_rows, self._free.stack_X, self._index
        if (kept := self._admission) is not None:
            of_init, of_stack, of_cells, found = kept
            same = of_init is init and of_stack is stack_X and of_cells is index.cell_C2
            if same and found.stream == self._gpu.stream_now():
                return found
        arrays = TierArrays(
            self.row_SW, self._table_S, self._id_S, self.score_S, self.pin_S, self._dirty_S, stack_X, index.cell_C2,
            index.inserted_2, index.count_X,
        )  # fmt: skip
        found = init.admission(arrays)  # type: ignore[attr-defined]
        self._admission = init, stack_X, index.cell_C2, found
        return found

    def _count_later(self, counts: Later) -> None:
        """Count what a lookup that has only read has found, when the numbers have come."""
        self._pending.append((counts, 0, False))
        self._apply_pending(wait=False)

    def _apply_pending(self, *, wait: bool = True) -> None:
        """Count what lookups have found and admitted for which the host did not wait; all of them, or those whose
        numbers have come."""
        while self._pending and self._apply_first(wait=wait):
            pass

    def _apply_first(self, *, wait: bool) -> bool:
        """Count what the first pending lookup has found and admitted. Returns whether its numbers have come."""
        later, _, admits = self._pending[0]
        counts = later.values(wait=wait)
        if counts is None:
            return False
        missed, size, _, lost = counts[-4:]
        if missed and admits:
            with changing:
                self._pending.popleft()
                self._index.note_inserted(missed)
                self._free.commit(missed)
                self._free_known = self._free.returned, self._free.used
                self._add_new(missed)
        else:
            self._pending.popleft()
        self._counters.hits += size - missed
        if missed:
            self._counters.misses += missed
        if lost:
            self._index.check_inserted(lost)
        return True

    def _grow_old(self, uses: int) -> None:
        """Let uses from here on count more than those before, by the number of rows that have been used."""
        self.use_score *= 2.0 ** (uses / (HALF_LIFE * self.slots))
        if self.use_score > USE_SCORE * _SCORE_STEP:
            self.score_S //= _SCORE_STEP
            self.use_score /= _SCORE_STEP

    def _bring_in(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """Pinned slots for keys that are not here: rows from below, or else new ones."""
        size = len(id_M)
        if self._resident:
            self._limits.check_new(size, self, int(table_M[0]))
        self._limits.check_fits(size, self._held())
        if self._resident:
            slot_M, unknown, new = self._reserve(size), size, None
        else:
            slot_M, new = self._read_below(table_M, id_M)
            unknown = len(new)
        if unknown:
            n = slice(None) if new is None else new
            self.init_rows(self.row_SW, slot_M[n], table_M[n], id_M[n])
        dirty: bool | torch.Tensor = new is None
        if new is not None and unknown:
            dirty = torch.zeros(size, dtype=torch.bool, device=self._gpu.device)
            dirty[new] = True
        with self._taking(slot_M, table_M, id_M, dirty=dirty):
            self.pin_S[slot_M] = 1
            self._add_new(unknown)
            self.begun += unknown
        return slot_M

    def _read_below(self, table_M: torch.Tensor, id_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reserved slots for keys that are not here, with the rows that the store below has; and the positions of keys
        without a row there."""
        assert self._below is not None
        tables, ids, missing_M = self._host(table_M), self._host(id_M), np.empty(len(id_M), np.bool_)
        limit = self._limits.row_limit
        if limit is not None and len(self) + len(ids) > limit:  # Checked before any row is evicted.
            new_table_N = tables[~self._below.contains(tables, ids)]
            self._limits.check_new(len(new_table_N), self, int(new_table_N[0]) if len(new_table_N) else 0)
        slot_M = self._reserve(len(ids))
        for part, missing_N, rows in self._bus.read(self._below, tables, ids):
            missing_M[part], slot_N = missing_N, slot_M[part]
            if missing_N.any():
                slot_N = slot_N.masked_fill(self._gpu.put(missing_N), -1)
            copy_rows_in_cuda(self.row_SW, slot_N, rows, gpu=self._gpu)
        return slot_M, self._gpu.put(np.flatnonzero(missing_M))

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
        self._admission = None
        self._index.reserve(size)
        return self._free.reserve(size, len(self.pin_S))

    def _grow(self, need: int, *, ahead: bool = False) -> None:
        """Get memory for so many slots, and for as many again: each row is copied once or twice in its life. `ahead`:
        not by way of the host, and torch.OutOfMemoryError, with nothing changed, if there is none."""
        have = len(self.pin_S)
        if need > have:
            self._free.make_stack(need)
            size = min(self.slots, max(need, 2 * have, _SLOTS_MIN))
            self._gpu.wait()
            try:
                if ahead:
                    self._hold(enlarged(self._slot_arrays(), size, self._gpu.device))
                else:
                    enlarge(self._slot_arrays, self._hold, size, need, self._limits, self._gpu.device)
            finally:
                self._gpu.wait()

    def _hold(self, arrays: list[torch.Tensor]) -> None:
        kept = list(map(self._gpu.kept, arrays))
        self._admission, self._made = None, 0  # An admission holds the arrays of before.
        self.row_SW, self._table_S, self._id_S, self.score_S, self.pin_S, self._dirty_S = kept
        self._made = len(arrays[0])

    def _arrays(self) -> list[torch.Tensor]:
        return [
            *self._slot_arrays(),
            self._free.stack_X,
            self._free_2,
            self._next_2,
            self._index.cell_C2,
            self._index.inserted_2,
            self._index.count_X,
        ]

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

    @outside_inference_mode
    def _forget(self) -> None:
        gpu = self._gpu
        gpu.wait()  # Steps on other streams may be using what is given back.
        self._pending = deque()
        self._free_known, self._admission, self._made = (-1, -1), None, 0
        self.row_SW = gpu.empty(0, padded(self.row_width), dtype=torch.float32)
        self._table_S = gpu.empty(0, dtype=torch.int32)
        self._id_S = gpu.empty(0, dtype=torch.int64)
        self.score_S = gpu.empty(0, dtype=torch.int64)
        self.pin_S = gpu.empty(0, dtype=torch.int32)
        self._dirty_S = gpu.empty(0, dtype=torch.bool)
        empty = outside_inference_mode(lambda size: gpu.kept(gpu.empty(size, dtype=torch.int64)))
        self._free = FreeSlots(self._backend.arange, empty)
        self._temporary = 0  # slots of rows that are in no index
        self._index.clear()


def padded(row_width: int) -> int:
    """Words of a row that ends where 16 bytes do."""
    return -(-row_width // 4) * 4
