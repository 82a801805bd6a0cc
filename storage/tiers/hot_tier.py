"""The tier in host memory: an index over a slab, with a score, a dirty bit and a count of pins for each slot.

Kernels compute in place on the rows of the hot tier. The same class, as a `RowStore` (memory_tier.py), is also the host
tier between a smaller hot tier and an SSD. A cache evicts in rounds: a round looks at a part of the rows, in proportion
to the slots that are needed now (victims.py), so no step waits for a scan of the cache.

The score of a row says how the row was used since it came into the cache. The cache's policy decides what it is:
- "lru": the time of the row's last use; the rows that have not been used for longest are evicted first;
- "lfu": the number of uses, where a use counts half as much after each half-life. This is LRFU (Lee et al. IEEE
  Transactions on Computers 50(12), 2001). A half-life ends after eight times as many uses as the cache has slots, so
  users need not set it. Rows that are used once never evict rows that are used often, and rows that were used often
  only in the past are evicted after a while.

Invariants, beside those of hot_rows.py:
- the contents of a row never depend on where the row is or was;
- the slab begins at a multiple of a row's bytes, and grows in place, like the arrays beside it;
- one thread at a time calls a tier, except that `release` and `mark_dirty` may run beside any other call: they change
  pinned slots only, and the counts of pins have a lock of their own.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from oneemb.kernels.backend import Keys
from oneemb.kernels.gather import copy_rows, copy_rows_out
from oneemb.kernels.slot_marks import add_marks, add_pins, pick_keys, set_marks, share_counts
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.row_store import RowStore
from oneemb.storage.tiers.hot_rows import InitRows, RowsReadAhead
from oneemb.storage.tiers.limits import Limits
from oneemb.storage.tiers.memory_tier import BATCH, HALF_LIFE, MemoryTier
from oneemb.storage.tiers.reservation import Reservation
from oneemb.storage.tiers.slot_arrays import SlotArrays
from oneemb.storage.tiers.victims import VictimClock

# Bytes for each slot of a cache beside the row: the index at its usual load, score, pins, dirty bit.
SLOT_OVERHEAD_BYTES = 40

# Divisor of all scores when they become too large for float64.
_SCORE_STEP = 2.0**500

# Length of the list of pins of a resident tier from which on they are added to the counts.
_NOTED_MAX = 64


class HotTier(MemoryTier):
    """A tier in host memory. Raises StoreFullError if the system gives no address space for the slots of a cache.

    Args:
        name: in errors and statistics: "device" or "host".
        row_width, below, resident, policy, init, absent, refused: see `MemoryTier`.
        slots: number of rows that fit. Memory is allocated as slots are first used; in a resident tier, address space
            too.
        row_limit: maximum number of rows in this tier and the stores below together; None = no limit.
        writing: lock that is held by loops that write rows in place; None = no loop does.
        expected: rows for which a resident tier reserves memory at construction, if that fits.
        reads_ahead: whether threads may read the store below a cache beside calls of this tier: see `rows_ahead`.
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
        init: InitRows | None = None,
        absent: InitRows | None = None,
        refused: InitRows | None = None,
        threads: Threads,
        writing: AbstractContextManager[Any] | None = None,
        expected: int = 0,
        reads_ahead: bool = False,
    ):
        super().__init__(name, row_width, below, resident, policy, init, absent, refused)
        slot_bytes = row_width * 4 + SLOT_OVERHEAD_BYTES
        self._arrays = SlotArrays(name, row_width, slots, slot_bytes, resident, expected)
        self._dirty_S, self.pin_S, self.score_S, self.row_SW = self._arrays.arrays
        self.slots = self._arrays.most
        make_room = weakref.WeakMethod(self._make_room)
        self._limits = Limits(name, self.slots, slot_bytes, resident, row_limit, make_room)
        self.stable_slots = resident  # rows of a cache are evicted
        self._threads = threads
        self._writing = threading.Lock() if writing is None else writing
        self._index = HashIndex(threads)
        self.victims: VictimClock = VictimClock(self._index, self.slots, threads)
        # A resident tier counts pins for its statistics only, so it adds a list of pins up when they are read. Most
        # pins are released before that, with the array with which they were made, and are then taken off the list.
        self._noted_pins: list[tuple[np.ndarray, int]] = []
        self._pinned_X = share_counts(threads)  # pinned slots, as counted by each share of the loops over pins
        self._pin_lock = threading.Lock()  # a slot may be pinned for one batch while another unpins it
        self._reads_ahead = reads_ahead and not resident
        # Bytes for each slot: the dirty bit; in a cache, also pins and score. Memory that is never written is not
        # counted.
        self._mark_bytes = 1 if resident else 13
        # Score of one use now. Instead of lowering the scores of old uses, the tier raises the score of new uses. So
        # scores from different times can be compared, and a use changes only the score of its row. For "lru" the score
        # is the number of the call.
        self.use_score = 1.0

    # ---- for kernels: rows to compute on, in place ------------------------------------------------------------

    def acquire(self, keys: Keys) -> tuple[np.ndarray, Keys]:
        return self._acquire(keys.table_U, keys.id_U), keys

    def acquire_rest(self, keys: Keys, slot_U: np.ndarray) -> None:
        try:
            missing = np.flatnonzero(slot_U < 0)
            slot_U[missing] = self._acquire(keys.table_U[missing], keys.id_U[missing])
        except BaseException:
            self.release(slot_U)
            raise

    def acquire_at(self, keys: Keys, slot_U: np.ndarray) -> None:
        """`acquire` in a tier with stable slots, where the caller knows the slots: -1 = the key has no row, and this
        call fills in its slot."""
        missing = np.flatnonzero(slot_U < 0)
        slot_U[missing] = self._bring_in(keys.table_U[missing], keys.id_U[missing])
        self._counters.hits += len(slot_U) - len(missing)
        self._counters.misses += len(missing)
        self._pin(slot_U, 1)

    def _acquire(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        slot_U = self._index.find(table_U, id_U)
        missing = (slot_U < 0).nonzero()[0]
        if len(missing):
            hit_H, table_M, id_M = slot_U[slot_U >= 0], table_U[missing], id_U[missing]
            self._pin(hit_H, 1)  # so that they are not evicted
            try:
                slot_U[missing] = self._bring_in(table_M, id_M)
            finally:
                self._pin(hit_H, -1)
        else:
            hit_H = slot_U
        self._touch(hit_H)
        self._pin(slot_U, 1)
        self._counters.hits += len(slot_U) - len(missing)
        self._counters.misses += len(missing)
        return slot_U

    def pin_resident(self, keys: Keys) -> tuple[np.ndarray, Keys, np.ndarray]:
        slot_U, missing = self._pin_resident(keys.table_U, keys.id_U)
        return slot_U, keys, missing

    def _pin_resident(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pin the rows of keys that are in this tier. Returns their slots, -1 for other keys; and the positions of the
        other keys."""
        slot_U = self._index.find(table_U, id_U)
        hit_H, missing, noted_U = slot_U[slot_U >= 0], np.flatnonzero(slot_U < 0), slot_U.copy()
        self._touch(hit_H)
        self._counters.hits += len(hit_H)
        self._pin(noted_U, 1)
        return slot_U, missing

    def rows_ahead(self, keys: Keys, wanted: np.ndarray) -> RowsReadAhead | None:
        if not self._reads_ahead or len(wanted) > self._room():
            return None
        assert self._below is not None
        ahead = RowsReadAhead(self._below, keys, wanted)
        self._ahead.add(ahead)
        return ahead

    def bring_known(
        self, keys: Keys, slot_U: np.ndarray, wanted: np.ndarray, ahead: RowsReadAhead | None = None
    ) -> int:
        if self._resident or len(wanted) == 0:
            return 0
        assert self._below is not None
        # A step may have brought in some of the rows since the caller looked for them.
        slot_U[wanted], absent = self._pin_resident(keys.table_U[wanted], keys.id_U[wanted])
        missing = wanted[absent]
        found = len(wanted) - len(missing)
        self._limits.check_fits(len(missing), self._held())
        if ahead is None:
            ahead = RowsReadAhead(self._below, keys, missing)
            ahead.read()
        known = ahead.known(missing)
        u = ahead.wanted_M[known]
        slot_O = self._take(keys.table_U[u], keys.id_U[u], ahead.row_MW, known, dirty=False)
        self._pin(slot_O, 1)
        slot_U[u] = slot_O
        self._counters.misses += len(u)
        return found + len(u)

    def read(self, keys: Keys) -> tuple[np.ndarray, Keys]:
        row_UW = np.zeros((len(keys.id_U), self.row_width), np.float32)
        missing = np.flatnonzero(self.get(keys.table_U, keys.id_U, row_UW))
        self._absent(row_UW, missing, keys.table_U[missing], keys.id_U[missing])
        return row_UW, keys

    def gather(self, keys: Keys, weights: object, absent: object, out_ND: np.ndarray) -> bool:
        return False  # `slots_of` says where rows can be read.

    def slots_of(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        slot_N = self._index.find(table_N, id_N)
        self._counters.hits += int(np.count_nonzero(slot_N >= 0))
        return slot_N

    def pin_found(self, slot_U: np.ndarray) -> None:
        """Add one pin, as `acquire` does, to each row that a loop over several tiers has found in the index. The caller
        must not change `slot_U` afterwards."""
        self._pin(slot_U, 1)
        self._touch(slot_U)
        self._counters.hits += len(slot_U)

    def make_temporary(self, table_M: np.ndarray, id_M: np.ndarray) -> np.ndarray:
        self._limits.check_fits(len(id_M), self._held())
        self._evict_for(len(id_M))
        slot_M = self._free.reserve(len(id_M), len(self.row_SW))
        self._refused(self.row_SW, slot_M, table_M, id_M)
        with changing:
            self._dirty_S[slot_M] = False
            self._pin(slot_M, 2)
            self._free.commit(len(slot_M))
            self._temporary += len(slot_M)
        return slot_M

    def free_temporary(self, slot_M: np.ndarray) -> None:
        with changing:
            self._pin(slot_M, -1)
            self._dirty_S[slot_M] = False
            self._temporary -= len(slot_M)
            self._free.give_back(slot_M)

    def release(self, slot_U: np.ndarray, *, elsewhere: bool = False) -> None:
        self._pin(slot_U, -1)

    def mark_dirty(self, slot_U: np.ndarray) -> None:
        set_marks(self._dirty_S, slot_U, True, threads=self._threads)

    @property
    def reserved(self) -> Reservation:
        """Memory that is reserved for the rows."""
        return self._arrays.reserved

    @property
    def index(self) -> HashIndex:
        """Index from keys to slots; only the tier changes it."""
        return self._index

    @property
    def dirty_S(self) -> np.ndarray:
        """One dirty bit for each slot, bool [S]. A merged store loops over the bits of several tiers at once."""
        return self._dirty_S

    @property
    def pinned(self) -> int:
        with self._pin_lock:
            self._add_noted_pins()
            return int(self._pinned_X.sum())

    def check_slots(self) -> list[str]:
        return self._free.problems(self.name, self._all_keys()[2], self._free.returned_N, self._temporary)

    def only_read(self) -> None:
        # A child of fork must not write rows to the store below; and it needs a new lock, since the thread that holds
        # the old one may be missing in the child.
        super().only_read()
        self._pin_lock = threading.Lock()

    # ---- as a store under another tier: see memory_tier.py ------------------------------------------------------

    def _put(self, array: np.ndarray) -> np.ndarray:
        return array

    def _host(self, array: np.ndarray) -> np.ndarray:
        return array

    def _look(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slot_U = self._index.find(table_U, id_U)
        missing_U = slot_U < 0
        hit = (~missing_U).nonzero()[0]
        self._touch(slot_H := slot_U[hit])
        return slot_H, hit, missing_U

    def _pinned_of(self, slot_H: np.ndarray) -> int:
        with self._pin_lock:
            self._add_noted_pins()
            return int(np.count_nonzero(self.pin_S[slot_H]))

    def _rows_in(self, slot_N: np.ndarray, row_XW: np.ndarray, from_N: np.ndarray) -> None:
        copy_rows(row_XW, from_N, self.row_SW, slot_N, threads=self._threads)

    def _rows_out(self, slot_N: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        for n in range(0, len(slot_N), BATCH):
            part = slice(n, n + BATCH)
            yield part, copy_rows_out(self.row_SW, slot_N[part], threads=self._threads)

    def _copy_out(self, slot_N: np.ndarray, out_XW: np.ndarray, to_N: np.ndarray) -> None:
        with self._writing:
            copy_rows(self.row_SW, slot_N, out_XW, to_N, threads=self._threads)

    def _dirty_keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._keys_of(self._dirty_S[: self._free.used])

    def _all_keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._keys_of(np.ones(len(self.row_SW), np.bool_))

    def _scan(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for table_N, id_N, slot_N in self._index.items(batch):
            yield table_N, id_N, copy_rows_out(self.row_SW, slot_N, threads=self._threads)

    def stats(self) -> dict[str, Any]:
        return {
            "rows": len(self._index),
            "slots": self.slots,
            "pinned": self.pinned,
            "dirty": int(np.count_nonzero(self._dirty_S[: self._free.used])),
            **self._counters.stats(),
            "bytes": self._free.used * (self.row_width * 4 + self._mark_bytes) + self._index.nbytes,
        }

    def close(self) -> None:
        self.row_SW = np.zeros((0, self.row_width), np.float32)
        self._arrays.release()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _make_room(self, rows: int) -> None:
        """Get memory for `rows` rows in all, in a resident tier. No slot moves."""
        if rows > len(self.row_SW):
            self._arrays.make_room(rows)
            # The slab comes last: readers that see a new slab read the other arrays anew.
            self._dirty_S, self.pin_S, self.score_S, self.row_SW = self._arrays.arrays

    def _bring_in(self, table_M: np.ndarray, id_M: np.ndarray) -> np.ndarray:
        """Bring in the rows of keys that are not in this tier, from the store below or as new rows. Returns their
        slots, not pinned."""
        size = len(id_M)
        if size == 0:
            return np.empty(0, np.int64)
        old = np.empty(0, np.int64)
        new = np.arange(size)
        limit = self._limits.row_limit
        if limit is not None and len(self) + size > limit:  # Checked before any row is evicted.
            new_table_N = table_M
            if not self._resident and self._below is not None:
                new_table_N = table_M[~self._below.contains(table_M, id_M)]
            self._limits.check_new(len(new_table_N), self, int(new_table_N[0]) if len(new_table_N) else 0)
        self._limits.check_fits(size, self._held())
        slot_M = self._reserve(table_M, id_M)
        if not self._resident:
            assert self._below is not None
            missing_M = self._below.get(table_M, id_M, self.row_SW, slot_M)
            old, new = np.flatnonzero(~missing_M), np.flatnonzero(missing_M)
        slot_O, slot_N = slot_M[old], slot_M[new]
        self.init_rows(self.row_SW, slot_N, table_M[new], id_M[new])
        self._index.put(table_M, id_M, slot_M)
        with changing:
            self._free.commit(size)
            set_marks(self._dirty_S, slot_O, False, threads=self._threads)
            set_marks(self._dirty_S, slot_N, True, threads=self._threads)
            self._touch(slot_M, first=True)
            self._add_new(len(new))
            self.begun += len(new)
        return slot_M

    def _take(
        self, table_N: np.ndarray, id_N: np.ndarray, row_XW: np.ndarray, from_N: np.ndarray, *, dirty: bool
    ) -> np.ndarray:
        slot_N = self._reserve(table_N, id_N)
        self._rows_in(slot_N, row_XW, from_N)
        self._index.put(table_N, id_N, slot_N)
        with changing:
            self._free.commit(len(slot_N))
            set_marks(self._dirty_S, slot_N, dirty, threads=self._threads)
            self._touch(slot_N, first=True)
        return slot_N

    def _reserve(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Slots for rows of these keys; evicts other rows if there are too few free slots. The slots stay free until
        `commit`, which follows as soon as the index has the keys. The caller has checked that there is room."""
        self._evict_for(len(id_N))
        self._index.reserve_keys(table_N, id_N)
        return self._free.reserve(len(id_N), len(self.row_SW))

    def _pin(self, slot_U: np.ndarray, count: int) -> None:
        """Add `count`, which may be negative, to the pins of each slot. The caller must not change `slot_U`
        afterwards."""
        with self._pin_lock:
            if not self._resident:
                add_pins(self.pin_S, slot_U, count, self._pinned_X, threads=self._threads)
                return
            for n, (noted_U, noted) in enumerate(self._noted_pins):
                if noted_U is slot_U and noted == -count:
                    del self._noted_pins[n]
                    return
            self._noted_pins.append((slot_U, count))
            if len(self._noted_pins) > _NOTED_MAX:
                self._add_noted_pins()

    def _add_noted_pins(self) -> None:
        for slot_U, count in self._noted_pins:
            add_pins(self.pin_S, slot_U, count, self._pinned_X, threads=self._threads)
        self._noted_pins.clear()

    def _touch(self, slot_N: np.ndarray, *, first: bool = False) -> None:
        """Score a use of the rows in these slots. `first`: whether it is their first use since they came in."""
        if self._resident:
            return
        if first or self.policy == "lru":
            set_marks(self.score_S, slot_N, self.use_score, threads=self._threads)
        else:
            add_marks(self.score_S, slot_N, self.use_score, threads=self._threads)
        if self.policy == "lru":
            self.use_score += 1.0
            return
        self.use_score *= 2.0 ** (len(slot_N) / (HALF_LIFE * self.slots))
        if self.use_score > _SCORE_STEP:
            self.score_S[: self._free.used] /= _SCORE_STEP
            self.use_score /= _SCORE_STEP

    def _evict_for(self, size: int) -> None:
        """Evict rows until `size` slots are free, or all rows are pinned."""
        while (short := size - self._free.left(self.slots)) > 0:
            table_V, id_V, slot_V = self.victims.choose(short, self.score_S, self.pin_S)
            if len(slot_V) == 0:
                return  # All rows are pinned.
            self._evict_these((table_V, id_V, slot_V), self._dirty_S[slot_V].nonzero()[0])

    def _keys_of(self, chosen_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tables, ids, slots) of the rows in the chosen slots, in the order of the index, so that later changes to the
        index go through it part by part."""
        chosen_S = chosen_S.copy()  # Another thread may set bits now, and the arrays below have no room for more rows.
        size = int(np.count_nonzero(chosen_S))
        table_V, id_V, slot_V = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(size, np.int64)
        found = 0
        if size:
            for table_N, id_N, slot_N in self._index.items():
                found = pick_keys(table_N, id_N, slot_N, chosen_S, table_V, id_V, slot_V, found)
        return table_V[:found], id_V[:found], slot_V[:found]

    def _forget(self) -> None:
        self._index.clear()
        with self._pin_lock:
            self._noted_pins.clear()
            self._pinned_X[:] = 0
        self.pin_S[: self._free.used] = 0
        self.victims.restart()
        self._dirty_S[: self._free.used] = False
        self._free.clear()
        self._temporary = 0
