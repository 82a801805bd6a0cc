"""The hot tier in a GPU's memory: what hot_tier.py is in the host's, for keys and slots on the device.

Keys of `acquire` and the slots it gives are tensors on the device; as a `RowStore` the tier takes and gives NumPy
arrays like every other. Rows that miss are gathered on the host into pinned buffers and copied, whole and in bulk; so
are evicted rows on their way down.

Invariants, beside those of hot_rows.py:
- rows begin at multiples of 16 bytes, so that loops may move them 16 bytes at a time;
- a lookup waits for the device once, to learn how many keys it has, how many of them miss and whether its tables and
  offsets were as they must be; one whose rows were all prefetched does not wait;
- everything runs on torch's current stream. Calls that search, fill or evict come on the device in the order in which
  the host made them, on whatever streams (stream_order.py). Between them steps read and write rows in pinned slots, and
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

from oneemb.kernels.cuda_loops import CudaLoops
from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda
from oneemb.kernels.slots_cuda import acquire_loop, count_pinned_loop, release_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.locking.turns import changing
from oneemb.storage.row_store import RowStore
from oneemb.storage.tiers.device_index import DeviceIndex
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.hot_rows import BeginRows, fill_pinned
from oneemb.storage.tiers.hot_tier import HALF_LIFE
from oneemb.storage.tiers.limits import Counters, Limits
from oneemb.storage.tiers.pinned_rows import PinnedRows
from oneemb.storage.tiers.stream_order import StreamOrder

__all__ = ["SLOT_OVERHEAD_BYTES", "DeviceTier"]

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
_BATCH = 65536


def _in_order(method: "Callable[Concatenate[DeviceTier, P], R]") -> "Callable[Concatenate[DeviceTier, P], R]":
    """Runs a method of the tier after all that was asked of it before, on any stream."""

    @functools.wraps(method)
    def run(self: "DeviceTier", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._order(self._arrays):
            return method(self, *args, **kwargs)

    return run


class DeviceTier:
    """Rows in a GPU's memory.

    Args:
        name: what errors and statistics call this tier.
        row_width: 32-bit words of a row.
        slots: rows that fit. Memory is taken as slots are first used.
        below: the store underneath, on the host; None = nothing.
        resident: whether every row is here. One with nothing below must be.
        row_limit: rows that may be known to this tier and those below together; None = no limit.
        policy: which rows a cache evicts first, "lfu" = those least often used of late, "lru" = least recently.
        begin: writes the rows of keys that no tier has.
        absent: writes what keys read as that have no row; None = the same.
        refused: writes what keys read as that get no row; None = the same.
        loops: where it is.
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
        begin: BeginRows,
        absent: BeginRows | None = None,
        refused: BeginRows | None = None,
        loops: CudaLoops,
    ):
        assert (resident or below is not None) and policy in ("lru", "lfu")
        self.name = name
        self.row_width = row_width
        self.slots = slots
        self._loops = loops
        self._gpu = gpu = loops.gpu
        self._below = below
        self._resident = resident
        self.lies_still = False  # What is read must be pinned: growing and evicting wait for no stream that reads.
        self.begin_rows, self._absent, self._refused = begin, absent or begin, refused or begin
        self._limits = Limits(name, slots, _padded(row_width) * 4 + SLOT_OVERHEAD_BYTES, resident, row_limit)
        self._counters = Counters()
        self.policy = policy
        self._bus = PinnedRows(row_width, gpu)
        self._order = StreamOrder(gpu)
        self._tick = 0
        self.use_score = _USE_SCORE  # what a use counts now, for "lfu": see oneemb.storage.tiers.hot_tier
        self.row_SW: torch.Tensor
        self.score_S: torch.Tensor
        self.pin_S: torch.Tensor
        self._free = FreeSlots(loops.arange)
        with self._order(self._arrays):
            self._index = DeviceIndex(gpu)
            self._forget()
        # Number of rows known here and below; None = it is not known. A store below may be far away: it counts its rows
        # when a caller, or a limit, needs the number.
        self._rows: int | None = 0 if below is None or resident else None

    def __len__(self) -> int:
        if self._rows is None:
            rows = len(self._index)
            if not self._resident and self._below is not None:
                table_N, id_N, _ = self._keys_of(self._dirty())
                rows = len(self._below) + int(np.count_nonzero(~self._below.contains(_host(table_N), _host(id_N))))
            self._rows = rows
        return self._rows

    # ---- for kernels: rows to compute on, in place ------------------------------------------------------------

    @_in_order
    def acquire(self, keys: DeviceKeys, count_U: torch.Tensor | None = None) -> tuple[torch.Tensor, DeviceKeys]:
        """Make rows resident and pin them; see `HotRows.acquire`.

        Args:
            count_U: int64 [U], how often each key occurs, for "lfu"; None = once.

        Raises:
            ValueError: tables or offsets were not as they must be; nothing has changed.
        """
        slot_U, keys, missed = self._find_and_pin(keys, 1, count_U)
        if missed:
            try:
                missing = torch.nonzero(slot_U < 0).reshape(-1)
                count_M = None if count_U is None else count_U[missing]
                slot_M = self._bring_in(keys.table_U[missing], keys.id_U[missing], count_M)
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
            slot_M, _ = self.acquire(self._loops.distinct_keys(keys.table_U[missing], keys.id_U[missing]))
        except BaseException:
            self.release(slot_U)
            raise
        with changing:
            slot_U[missing] = slot_M

    @_in_order
    def pin_resident(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys, torch.Tensor]:
        slot_U, keys, missed = self._find_and_pin(keys, 1, None)
        try:
            missing = torch.nonzero(slot_U < 0).reshape(-1) if missed else self._gpu.empty(0, dtype=torch.int64)
        except BaseException:
            self.release(slot_U)
            raise
        self._counters.hits += len(keys.id_U) - missed
        return slot_U, keys, missing

    @_in_order
    def rows_ahead(self, keys: DeviceKeys, wanted: torch.Tensor) -> None:
        """None: rows are read in a turn."""

    def bring_known(self, keys: DeviceKeys, slot_U: torch.Tensor, wanted: torch.Tensor, ahead: None = None) -> int:
        """Pin known rows; see `HotRows.bring_known`. The slab does not grow, since that would move rows which steps on
        other streams may use: without free slots the call raises `StoreFullError`."""
        if self._resident or len(wanted) == 0:
            return 0
        assert self._below is not None
        # Steps may have brought some in since they were looked for.
        distinct = self._loops.distinct_keys(keys.table_U[wanted], keys.id_U[wanted])
        slot_M, _, missed = self._find_and_pin(distinct, 1, None)
        fill_pinned(slot_U, wanted, slot_M, self.release)
        found = len(wanted) - missed
        self._counters.hits += found
        missing = wanted[torch.nonzero(slot_M < 0).reshape(-1)] if found else wanted
        self._limits.check_fits(missed, self._held())
        table_M, id_M = keys.table_U[missing], keys.id_U[missing]
        row_MW = np.empty((missed, self.row_width), np.float32)
        old_M = ~self._below.get(_host(table_M), _host(id_M), row_MW)
        size = int(np.count_nonzero(old_M))
        if min(self._free.used + self._free.fresh(size), self.slots) > len(self.pin_S):
            raise StoreFullError(f"the {self.name} tier has no slots yet for {size} more rows")
        old = self._gpu.put(np.flatnonzero(old_M))
        u = missing[old]
        slot_O = self._reserve(size)
        with self._taking(slot_O, table_M[old], id_M[old], row_MW[old_M], dirty=False):
            self.pin_S[slot_O] = 1
        fill_pinned(slot_U, u, slot_O, self.release)
        self._counters.misses += size
        return found + size

    @_in_order
    def read(self, keys: DeviceKeys) -> tuple[torch.Tensor, DeviceKeys]:
        self._order.after_releases()
        slot_U, keys, missed = self._find_and_pin(keys, 0, None)
        table_U, id_U = keys.table_U, keys.id_U
        row_UW = self._gpu.full(len(id_U), self.row_SW.shape[1], value=0, dtype=torch.float32)
        here = torch.nonzero(slot_U >= 0).reshape(-1)
        rows = copy_rows_out_cuda(self.row_SW, slot_U[here], self.row_SW.shape[1], gpu=self._gpu)
        copy_rows_in_cuda(row_UW, here, rows, gpu=self._gpu)
        self._counters.hits += len(here)
        self._counters.misses += missed
        missing = torch.nonzero(slot_U < 0).reshape(-1)
        if missed and not self._resident:
            assert self._below is not None
            row_MW = np.empty((missed, self.row_width), np.float32)
            absent_M = self._below.get(_host(table_U[missing]), _host(id_U[missing]), row_MW)
            found = missing[self._gpu.put(~absent_M)]
            copy_rows_in_cuda(row_UW, found, self._bus.to_device(row_MW[~absent_M]), gpu=self._gpu)
            missing = missing[self._gpu.put(absent_M)]
        if len(missing):
            self._absent(row_UW, missing, table_U[missing], id_U[missing])
        return row_UW, keys

    def slots_of(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        raise AssertionError("rows here do not lie still")

    @_in_order
    def lend(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        self._limits.check_fits(len(id_M), self._held())
        slot_M = self._reserve(len(id_M))
        self._refused(self.row_SW, slot_M, table_M, id_M)
        self._table_S[slot_M] = -1  # no row's, whatever is written to it
        with changing:
            self.pin_S[slot_M] = 2
            self._free.commit(len(slot_M))
            self._lent += len(slot_M)
        return slot_M

    @_in_order
    def take_back(self, slot_M: torch.Tensor) -> None:
        self._order.after_releases()
        left_M = self.pin_S[slot_M] - 1
        with changing:
            self.pin_S[slot_M] = left_M
            self._dirty_S[slot_M] = False
            self._lent -= len(slot_M)
            self._free.give_back(slot_M)

    @_in_order
    def check_slots(self) -> list[str]:
        _, _, slot_N = self._index.items()
        return self._free.problems(self.name, _host(slot_N), _host(self._free.returned_N), self._lent)

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
    def begun(self) -> int:
        return self._counters.new_rows

    @property
    def pinned(self) -> int:
        count_1 = self._gpu.full(1, value=0, dtype=torch.int64)
        self._gpu.run(count_pinned_loop, self._free.used, self.pin_S, self._free.used, count_1)
        return self._gpu.read(count_1)[0]

    # ---- as a store under another tier ------------------------------------------------------------------------

    @_in_order
    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        self._order.after_releases()
        slot_U, _, missed = self._find_and_pin(self._loops.distinct_keys(*map(self._gpu.put, (table_U, id_U))), 0, None)
        missing_U = _host(slot_U < 0)
        hit = np.flatnonzero(~missing_U)
        to_U = np.arange(len(id_U)) if to_U is None else to_U
        out_XW[to_U[hit]] = self._rows_out(slot_U[slot_U >= 0])
        self._counters.hits += len(hit)
        self._counters.misses += missed
        if self._resident or self._below is None or not missed:
            return missing_U
        missing = np.flatnonzero(missing_U)
        found = missing[~self._below.get(table_U[missing], id_U[missing], out_XW, to_U[missing])]
        missing_U[found] = False
        # What was read is worth keeping, as far as it fits.
        kept = found[: self._room()]
        if len(kept):
            self._take(self._gpu.put(table_U[kept]), self._gpu.put(id_U[kept]), out_XW[to_U[kept]], dirty=False)
        return missing_U

    @_in_order
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        hit_U = _host(self._index.find(self._gpu.put(table_U), self._gpu.put(id_U)) >= 0)
        new = np.flatnonzero(~hit_U)
        unknown = self._limits.unknown(self._below, table_U, id_U, new)
        if unknown:
            self._limits.check_new(unknown, self, int(table_U[new[0]]))
        if self._resident:
            self._limits.check_fits(len(new), self._held())
        rows, self._rows = self._rows, None  # A failure below may come when some of the new rows are kept already.
        self._keep(table_U, id_U, row_UW, hit_U, new)
        if unknown is not None and rows is not None:
            self._rows = rows + unknown

    def _keep(
        self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray, hit_U: np.ndarray, new: np.ndarray
    ) -> None:
        fits = min(len(new), self._room())
        if fits < len(new):  # A cache too small to keep them passes the rest on.
            rest = new[fits:]
            assert self._below is not None
            self._below.put(table_U[rest], id_U[rest], row_UW[rest])
        kept = new[:fits]
        self._take(self._gpu.put(table_U[kept]), self._gpu.put(id_U[kept]), row_UW[kept], dirty=True)
        # Making room may have evicted keys that were here when the call began, so they are looked up again.
        hit = np.flatnonzero(hit_U)
        slot_H, _, _ = self._find_and_pin(
            self._loops.distinct_keys(*map(self._gpu.put, (table_U[hit], id_U[hit]))), 0, None
        )
        here_H = _host(slot_H >= 0)
        slot_H = slot_H[slot_H >= 0]
        self._rows_in(slot_H, row_UW[hit[here_H]])
        self._dirty_S[slot_H] = True
        gone = hit[~here_H]
        if len(gone):
            assert self._below is not None
            self._below.put(table_U[gone], id_U[gone], row_UW[gone])

    @_in_order
    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase rows; see `RowStore.erase`.

        Raises:
            StorageError: a row is pinned; nothing has changed.
        """
        self._order.after_releases()
        table_H, id_H = self._gpu.put(table_U), self._gpu.put(id_U)
        slot_U = self._index.find(table_H, id_H)
        here_U = slot_U >= 0
        slot_H = slot_U[here_U]
        if pinned := self._gpu.read((self.pin_S[slot_H] > 0).sum())[0]:
            raise StorageError(f"{pinned} of the rows to erase are in use by a lookup; erase them between two steps")
        erased_U = _host(here_U).copy()
        table_H, id_H = table_H[here_U], id_H[here_U]
        gone_U = erased_U if self._below is None else self._below.erase(table_U, id_U)
        with changing:
            self._index.erase(table_H, id_H)
            self._dirty_S[slot_H] = False
            self._free.give_back(slot_H)
            erased_U |= gone_U
            self._add_known(-int(np.count_nonzero(erased_U)))
        return erased_U

    @_in_order
    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        here_U = _host(self._index.find(self._gpu.put(table_U), self._gpu.put(id_U)) >= 0).copy()
        if not self._resident and self._below is not None:
            away = np.flatnonzero(~here_U)
            here_U[away] = self._below.contains(table_U[away], id_U[away])
        return here_U

    def scan(self, batch: int = _BATCH) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if not self._resident:
            with self._order(self._arrays):
                self._write_down()
            assert self._below is not None
            yield from self._below.scan(batch)
            return
        with self._order(self._arrays):
            table_N, id_N, slot_N = self._index.items()
        for n in range(0, len(slot_N), batch):
            batch_N = slice(n, n + batch)
            with self._order(self._arrays):
                self._order.after_releases()
                found = _host(table_N[batch_N]).copy(), _host(id_N[batch_N]).copy(), self._rows_out(slot_N[batch_N])
            yield found

    @_in_order
    def flush(self) -> None:
        if self._below is not None:
            self._write_down()
            self._below.flush()

    def check_room(self, more: int, leaving: int) -> None:
        self._limits.check_fits(more, self._held() - (leaving if self._resident else 0))

    def check_holds(self, rows: int) -> None:
        self._limits.check_holds(rows)

    @_in_order
    def reload(self) -> None:
        assert self._below is not None
        self._forget()
        try:
            if self._resident:
                for table_N, id_N, row_NW in self._below.scan():
                    self._take(self._gpu.put(table_N), self._gpu.put(id_N), row_NW, dirty=False)
            self._rows = len(self._index) if self._resident else None
        except BaseException:
            self._forget()
            raise

    @_in_order
    def clear(self) -> None:
        if self._below is not None:
            self._below.clear()
        with changing:
            self._forget()

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

    def only_read(self) -> None:
        pass  # A child of fork has no GPU.

    def close(self) -> None:
        self._forget()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _find_and_pin(
        self, keys: DeviceKeys, pins: int, count_U: torch.Tensor | None
    ) -> tuple[torch.Tensor, DeviceKeys, int]:
        """The slots of keys, -1 for one that is not here, the keys cut to as many as there are, and how many of them
        are not here. Rows that are here are pinned once more if `pins` is 1, and count as used now."""
        slot_U = self._gpu.empty(len(keys.id_U), dtype=torch.int64)
        count_4 = self._gpu.full(4, value=0, dtype=torch.int64)
        self._tick += 1
        count_U = self._gpu.empty(0, dtype=torch.int64) if count_U is None else count_U
        self._gpu.run(
            acquire_loop, len(slot_U), self._index.cell_C2, keys.table_U, keys.id_U, keys.size_2, self.pin_S,
            self.score_S, pins, self._tick if self.policy == "lru" else -int(self.use_score), count_U, slot_U,
            self._index.inserted_2, count_4,
        )  # fmt: skip
        # Bags of no ids have a size_2 that no launch has copied.
        counts = self._gpu.read(count_4) if len(slot_U) else [0, *self._gpu.read(keys.size_2), 0]
        missed, size, wrong, lost = counts
        self._index.check_inserted(lost)
        slot_U = slot_U[:size]
        if wrong:
            if pins:
                self.release(slot_U)
            assert keys.check is not None
            keys.check()
            raise AssertionError("the device found tables or offsets to be wrong, and the host does not")
        self._grow_old(size - missed)
        return slot_U, keys.cut(size), missed

    def _grow_old(self, uses: int) -> None:
        """Let uses from here on count more than those before, by the number of rows that have been used."""
        self.use_score *= 2.0 ** (uses / (HALF_LIFE * self.slots))
        if self.use_score > _USE_SCORE * _SCORE_STEP:
            self.score_S //= _SCORE_STEP
            self.use_score /= _SCORE_STEP

    def _bring_in(self, table_M: torch.Tensor, id_M: torch.Tensor, count_M: torch.Tensor | None) -> torch.Tensor:
        """Pinned slots for keys that are not here: rows from below, or else new ones."""
        size = len(id_M)
        new_M = torch.ones(size, dtype=torch.bool, device=self._gpu.device)
        unknown = size
        if self._resident:
            self._limits.check_new(size, self, int(table_M[0]))
        self._limits.check_fits(size, self._held())
        row_MW = None
        if not self._resident:
            assert self._below is not None
            row_MW = np.empty((size, self.row_width), np.float32)
            missing_M = self._below.get(_host(table_M), _host(id_M), row_MW)
            unknown = int(np.count_nonzero(missing_M))
            if unknown:
                self._limits.check_new(unknown, self, int(_host(table_M)[missing_M][0]))
            new_M = self._gpu.put(missing_M)
            row_MW = row_MW[~missing_M]
        slot_M = self._reserve(size)
        slot_N = slot_M[new_M]
        self.begin_rows(self.row_SW, slot_N, table_M[new_M], id_M[new_M])
        if row_MW is not None and len(row_MW):
            self._rows_in(slot_M[~new_M], row_MW)
        with self._taking(slot_M, table_M, id_M, None, dirty=new_M):
            if count_M is not None and self.policy == "lfu":
                self.score_S[slot_M] *= count_M
            self.pin_S[slot_M] = 1
            self._add_known(unknown)
            self._counters.new_rows += unknown
        return slot_M

    def _take(self, table_N: torch.Tensor, id_N: torch.Tensor, row_NW: np.ndarray, *, dirty: bool) -> None:
        """Keep these rows, of keys that are not here, unpinned. The caller has checked that there is room."""
        with self._taking(self._reserve(len(id_N)), table_N, id_N, row_NW, dirty=dirty):
            pass

    @contextmanager
    def _taking(
        self, slot_N: torch.Tensor, table_N: torch.Tensor, id_N: torch.Tensor, row_NW: np.ndarray | None, *,
        dirty: bool | torch.Tensor,
    ) -> Iterator[None]:  # fmt: skip
        """Enter keys that are not here, with these rows, into reserved slots; None = the rows are there already. The
        block that follows is part of the same change."""
        if row_NW is not None:
            self._rows_in(slot_N, row_NW)
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

    def _rows_in(self, slot_N: torch.Tensor, row_NW: np.ndarray) -> None:
        for n in range(0, len(slot_N), _BATCH):
            row_SW = self._bus.to_device(row_NW[n : n + _BATCH])
            copy_rows_in_cuda(self.row_SW, slot_N[n : n + _BATCH], row_SW, gpu=self._gpu)

    def _rows_out(self, slot_N: torch.Tensor) -> np.ndarray:
        row_NW = np.empty((len(slot_N), self.row_width), np.float32)
        for n in range(0, len(slot_N), _BATCH):
            row_SW = copy_rows_out_cuda(self.row_SW, slot_N[n : n + _BATCH], self.row_width, gpu=self._gpu)
            row_NW[n : n + _BATCH] = self._bus.to_host(row_SW)
        return row_NW

    def _add_known(self, more: int) -> None:
        if self._rows is not None:
            self._rows += more

    def _held(self) -> int:
        """Rows that cannot make room for others: all there are or, in a cache, those that are pinned."""
        return len(self._index) + self._lent if self._resident else self.pinned

    def _room(self) -> int:
        """Rows that could come in: free slots, and in a cache those of rows that could be evicted."""
        return self.slots - self._held()

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
        """Get memory for so many slots, and for as many again while that many may come.

        A slab doubles by being copied, for which the device needs room for both: each row is copied once or twice in
        its life. Where there is no such room it goes by way of the host's memory, twice over the bus; so a store comes
        to use all of its budget, and not two thirds.
        """
        have = len(self.pin_S)
        if need <= have:
            return
        self._free.make_stack(need)
        size = min(self.slots, max(need, 2 * have, _SLOTS_MIN))
        self._gpu.wait()
        try:
            self._enlarge(size, need)
        finally:
            self._gpu.wait()

    def _enlarge(self, size: int, need: int) -> None:
        """Get memory for `size` slots, or at least for `need`."""
        have = len(self.pin_S)
        arrays = self._slot_arrays()
        try:
            self._hold([_enlarged(array, size, self._gpu.device) for array in arrays])
            return
        except torch.OutOfMemoryError:
            kept = [array.cpu() if array.is_cuda else array.clone() for array in arrays]
        del arrays
        self._hold([_enlarged(array[:0], 0, self._gpu.device) for array in kept])
        failure: BaseException | None = None
        for trial in (size, need):
            try:
                self._hold([_enlarged(array, trial, self._gpu.device) for array in kept])
                return
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # whose frames hold what there was memory for
        self._hold([_enlarged(array, have, self._gpu.device) for array in kept])
        free = torch.cuda.mem_get_info(self._gpu.device)[0] if self._gpu.device.type == "cuda" else 0
        fits = have + free // self._limits.slot_bytes
        raise StoreFullError(
            f"the {self.name} tier needs memory for {need} rows ({self._limits.mebibytes(need)} MiB) of its"
            f" {self._limits.mebibytes(self.slots)} MiB, and the device has {free // 2**20} MiB left, enough for about"
            f" {fits} rows; give the store a cache_budget_mb, or a smaller one, or free memory on the device"
        ) from failure

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
        evictable = len(self._index) + self._lent - self._gpu.read(pinned_S.sum())[0]
        # Stable, so that rows of one score leave in order of slot, whatever the device does.
        victim_V = torch.sort(score_S, stable=True).indices[: min(count, evictable)]
        victim_V = torch.sort(victim_V).values
        self._put_below(victim_V[self._dirty_S[victim_V]])
        table_V, id_V, _ = self._keys_of(victim_V)
        self._index.erase(table_V, id_V)
        with changing:
            self._free.give_back(victim_V)
            self._counters.evicted += len(victim_V)

    def _write_down(self) -> None:
        self._order.after_releases()
        self._put_below(self._dirty())

    def _dirty(self) -> torch.Tensor:
        """Slots of rows that the store below does not have as they are."""
        used = slice(0, self._free.used)
        return torch.nonzero(self._dirty_S[used] & (self._table_S[used] >= 0)).reshape(-1)

    def _put_below(self, slot_N: torch.Tensor) -> None:
        if len(slot_N) == 0:
            return
        assert self._below is not None
        for n in range(0, len(slot_N), _BATCH):
            slot_B = slot_N[n : n + _BATCH]
            table_N, id_N, _ = self._keys_of(slot_B)
            self._below.put(_host(table_N).copy(), _host(id_N).copy(), self._rows_out(slot_B))
            self._dirty_S[slot_B] = False
        self._counters.written_down += len(slot_N)

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
        self._free = FreeSlots(self._loops.arange)
        self._lent = 0  # slots of rows that are in no index
        self._index.clear()
        self._rows = 0


def _padded(row_width: int) -> int:
    """Words of a row that ends where 16 bytes do."""
    return -(-row_width // 4) * 4


def _enlarged(array: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """A copy on the device with room for `size` slots, those beyond the old ones zero."""
    grown = torch.zeros((size, *array.shape[1:]), dtype=array.dtype, device=device)
    grown[: len(array)] = array
    return grown


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
