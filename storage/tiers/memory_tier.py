"""`MemoryTier`: base class of the tiers in host memory and in a GPU's memory, which makes each of them a `RowStore`.

hot_tier.py and device_tier.py keep the rows in slot arrays and serve loops. This class is the `RowStore` interface of
both: it takes and returns NumPy arrays, and moves rows by a few abstract methods that each tier implements.

A tier is of one of two kinds:
- **resident**: it holds all rows; the store below, if any, is only the target of `flush`. A full resident tier raises
  `StoreFullError`.
- **cache** (not resident): it holds some rows of the store below. It evicts rows that are not pinned, those with the
  lowest scores first, after it has written dirty rows to the store below.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.row_store import KeepsNeighbours, RowStore
from oneemb.storage.tiers.cached_rows import CachedRows
from oneemb.storage.tiers.free_slots import FreeSlots
from oneemb.storage.tiers.hot_rows import InitRows, RowsReadAhead
from oneemb.storage.tiers.limits import Counters, Limits
from oneemb.storage.tiers.victims import VictimClock, tie_numbers

# Half-life of a use's score: number of uses of rows, as a multiple of the slots. In bench_cache_policy.py caches miss
# least at 8 to 32, with Zipf's law and with real clicks. The faster popularity drifts, the lower the best value is.
HALF_LIFE = 8

BATCH = 65536
"""Number of rows that are moved at a time."""

# Bytes of rows that are read at a time to fill a cache.
_WARM_BYTES = 64 << 20

KeysAndSlots = tuple[Any, Any, Any]
"""(tables, ids, slots) of rows, arrays on the tier's device."""


class MemoryTier(ABC):
    """Base class of tiers in memory.

    Args:
        name: name of the tier in errors and statistics.
        row_width: number of 32-bit words of a row.
        below: the store below; None = there is none.
        resident: whether the tier holds all rows. Must be True if `below` is None.
        policy: rule for the rows that a cache evicts first, "lru" or "lfu".
        init: function that writes new rows; None = no caller acquires rows of this tier.
        absent: function that writes the values of absent rows, for keys without a row; None = `init`.
        refused: function that writes the values of temporary rows; None = `init`.
    """

    slots: int
    begun = 0
    """See `HotRows.begun`."""
    score_S: Any
    use_score: float
    victims: VictimClock | None = None
    """Chooses the rows that a cache evicts; None = the tier chooses them itself."""
    _score_dtype: Any = np.float64
    _limits: Limits
    _index: Any
    _dirty_S: Any

    def __init__(
        self, name: str, row_width: int, below: RowStore | None, resident: bool, policy: str, init: InitRows | None,
        absent: InitRows | None, refused: InitRows | None,
    ):  # fmt: skip
        assert (resident or below is not None) and policy in ("lru", "lfu")
        self.name = name
        self.row_width = row_width
        self.policy = policy
        self.init_rows: InitRows = init or _no_rows
        self._absent, self._refused = absent or self.init_rows, refused or self.init_rows
        self._below = below
        self._order_of = below.write_order if isinstance(below, KeepsNeighbours) else None
        self._resident = resident
        self._counters = Counters()
        self._free = FreeSlots()  # A device tier has another, in the memory of its device.
        self._temporary = 0  # slots of rows that are in no index
        self._ahead: weakref.WeakSet[RowsReadAhead] = weakref.WeakSet()  # those that callers still use
        self._keeps_reads = True  # whether a cache keeps rows that were read from below
        # Number of rows in this tier and the stores below; None = not known. A store below may be remote, so its rows
        # are counted only when a caller, or a limit, needs the number.
        self._rows: int | None = 0 if below is None or resident else None

    # ---- methods of each kind of tier ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def pinned(self) -> int:
        """Number of pinned slots."""

    @abstractmethod
    def _put(self, array: np.ndarray) -> Any:
        """Copy of a host array on the tier's device; on the host, the array itself."""

    @abstractmethod
    def _host(self, array: Any) -> np.ndarray:
        """Copy on the host of an array on the tier's device; on the host, the array itself."""

    @abstractmethod
    def _look(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Find keys, and score a use of their rows. Returns the slots of keys in this tier, [H]; the positions of these
        keys, int64 [H]; and whether each key is not in this tier, bool [U]."""

    @abstractmethod
    def _pinned_of(self, slot_H: Any) -> int:
        """Number of these slots that are pinned."""

    @abstractmethod
    def _rows_in(self, slot_N: Any, row_XW: np.ndarray, from_N: np.ndarray) -> None:
        """Write rows row_XW[from_N] into these slots."""

    @abstractmethod
    def _rows_out(self, slot_N: Any) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows in these slots, a part of the slots at a time: float32 [part, W], valid until the next part."""

    @abstractmethod
    def _copy_out(self, slot_N: Any, out_XW: np.ndarray, to_N: np.ndarray) -> None:
        """Copy the rows in these slots to out_XW[to_N]."""

    @abstractmethod
    def _take(
        self, table_N: np.ndarray, id_N: np.ndarray, row_XW: np.ndarray, from_N: np.ndarray, *, dirty: bool
    ) -> Any:
        """Store rows row_XW[from_N] of keys that are not in this tier, and return their slots. The caller has checked
        that there is room."""

    @abstractmethod
    def _dirty_keys(self) -> KeysAndSlots:
        """Keys and slots of the dirty rows."""

    @abstractmethod
    def _all_keys(self) -> KeysAndSlots:
        """Keys and slots of all rows of this tier."""

    @abstractmethod
    def _scan(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The rows of a resident tier; see `RowSource.scan`."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop all rows of this tier."""

    # ---- as a store under another tier -------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self._rows is None:
            rows = len(self._index)
            if not self._resident and self._below is not None:
                table_N, id_N, _ = self._dirty_keys()
                known_N = self._below.contains(self._host(table_N), self._host(id_N))
                rows = len(self._below) + int(np.count_nonzero(~known_N))
            self._rows = rows
        return self._rows

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        slot_H, hit, missing_U = self._look(table_U, id_U)
        to_U = np.arange(len(id_U)) if to_U is None else to_U
        self._copy_out(slot_H, out_XW, to_U[hit])
        self._counters.hits += len(hit)
        self._counters.misses += len(missing_U) - len(hit)
        if self._resident or self._below is None or len(hit) == len(missing_U):
            return missing_U
        missing = np.flatnonzero(missing_U)
        found = missing[~self._below.get(table_U[missing], id_U[missing], out_XW, to_U[missing])]
        missing_U[found] = False
        # Rows that were read from below are kept, as far as they fit.
        kept = found[: self._room()] if self._keeps_reads else found[:0]
        if len(kept):
            self._take(table_U[kept], id_U[kept], out_XW, to_U[kept], dirty=False)
        return missing_U

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        hit_U = self._host(self._index.find(self._put(table_U), self._put(id_U)) >= 0)
        new = np.flatnonzero(~hit_U)
        unknown = self._limits.unknown(self._below, table_U, id_U, new)
        if unknown:
            self._limits.check_new(unknown, self, int(table_U[new[0]]))
        if self._resident:
            self._limits.check_fits(len(new), self._held())
        rows, self._rows = self._rows, None  # The store below may fail after some of the new rows are stored.
        self._keep(table_U, id_U, row_UW, hit_U, new)
        if unknown is not None and rows is not None:
            self._rows = rows + unknown

    def _keep(
        self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray, hit_U: np.ndarray, new: np.ndarray
    ) -> None:
        row_UW = np.ascontiguousarray(row_UW)
        fits = min(len(new), self._room())
        if fits < len(new):  # A cache without room for all rows puts the others into the store below.
            rest = new[fits:]
            assert self._below is not None
            self._note_change_below(table_U[rest], id_U[rest])
            self._below.put(table_U[rest], id_U[rest], row_UW[rest])
        self._take(table_U[new[:fits]], id_U[new[:fits]], row_UW, new[:fits], dirty=True)
        # Making room may have evicted keys that were here when the call began, so they are looked up again.
        hit = np.flatnonzero(hit_U)
        slot_H, here, gone_U = self._look(table_U[hit], id_U[hit])
        self._rows_in(slot_H, row_UW, hit[here])
        self._dirty_S[slot_H] = True
        gone = hit[gone_U]
        if len(gone):
            assert self._below is not None
            self._note_change_below(table_U[gone], id_U[gone])
            self._below.put(table_U[gone], id_U[gone], row_UW[gone])

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """See `RowStore.erase`. StorageError, with nothing changed, if a row is pinned."""
        table_H, id_H = self._put(table_U), self._put(id_U)
        slot_U = self._index.find(table_H, id_H)
        here_U = slot_U >= 0
        slot_H = slot_U[here_U]
        if pinned := self._pinned_of(slot_H):
            raise StorageError(f"{pinned} of the rows to erase are in use by a lookup; erase them between two steps")
        erased_U = self._host(here_U).copy()
        table_H, id_H = table_H[here_U], id_H[here_U]
        self._note_change_below(table_U, id_U)
        gone_U = erased_U if self._below is None else self._below.erase(table_U, id_U)
        with changing:
            self._index.erase(table_H, id_H)
            self._dirty_S[slot_H] = False
            self._free.give_back(slot_H)
            erased_U |= gone_U
            self._add_known(-int(np.count_nonzero(erased_U)))
        return erased_U

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        here_U = self._host(self._index.find(self._put(table_U), self._put(id_U)) >= 0)
        if not self._resident and self._below is not None:
            away = np.flatnonzero(~here_U)
            here_U[away] = self._below.contains(table_U[away], id_U[away])
        return here_U

    def scan(self, batch: int = BATCH) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if self._resident:
            yield from self._scan(batch)
            return
        self._write_down()
        assert self._below is not None
        yield from self._below.scan(batch)

    def flush(self) -> None:
        if self._below is not None:
            self._write_down()
            self._below.flush()

    def check_room(self, more: int, leaving: int) -> None:
        self._limits.check_fits(more, self._held() - (leaving if self._resident else 0))

    def check_holds(self, rows: int) -> None:
        self._limits.check_holds(rows)

    def reload(self) -> None:
        assert self._below is not None
        self._forget()
        try:
            if self._resident:
                for table_N, id_N, row_NW in self._below.scan():
                    signals_deferred.raise_interrupt()
                    self._limits.check_fits(len(id_N), self._held())
                    self._take(table_N, id_N, row_NW, np.arange(len(id_N)), dirty=False)
        except BaseException:
            self._forget()
            raise
        finally:
            self._rows = len(self._index) if self._resident else None

    @property
    def _now(self) -> float:
        """Score of a use now."""
        return self.use_score

    @_now.setter
    def _now(self, score: float) -> None:
        self.use_score = score

    @property
    def is_cache(self) -> bool:
        """Whether the tier holds some rows of the store below."""
        return not self._resident

    def cached(self) -> CachedRows:
        """Keys and scores of the rows of this cache."""
        table_N, id_N, slot_N = self._all_keys()
        score_N = self._host(self.score_S[slot_N]).astype(np.float64)
        score_N = self._now - score_N if self.policy == "lru" else score_N / self._now
        shard = 0 if self.victims is None else self.victims.shard
        rows = CachedRows(self.policy, shard, self._host(table_N), self._host(id_N), score_N.astype(np.float32))
        return rows if self._order_of is None else rows.of(self._order_of(rows.table_N, rows.id_N))

    def warm(self, rows: CachedRows) -> None:
        """Read rows that a cache held earlier into the free slots of this cache, with their scores; the most used rows
        first. Keys without a row are ignored. Rows that are here stay."""
        rows = rows.hottest(len(self._index) + self._free.left(self.slots))
        if self.victims is not None:
            self.victims.shard = rows.shard
        now = self._now
        if rows.policy != self.policy:  # Scores of the other policy say little; the rows count as used now.
            rows = rows._replace(policy=self.policy, score_N=np.full_like(rows.score_N, float(self.policy == "lfu")))
        elif self.policy == "lru":
            now += float(rows.score_N.max(initial=0))
        step = max(1, _WARM_BYTES // (4 * self.row_width))
        for begin in range(0, len(rows.id_N), step):
            signals_deferred.raise_interrupt()  # The rows that are here are complete.
            part = rows.of(slice(begin, begin + step))
            self._bring_back(part.table_N, part.id_N)
            slot_N = self._host(self._index.find(self._put(part.table_N), self._put(part.id_N)))
            here = np.flatnonzero(slot_N >= 0)
            score_N = part.score_N[here].astype(np.float64)
            score_N = now - score_N if self.policy == "lru" else score_N * now
            self.score_S[self._put(slot_N[here])] = self._put(score_N.astype(self._score_dtype))
            self._now = now

    def _bring_back(self, table_N: np.ndarray, id_N: np.ndarray) -> None:
        """Read rows that are not here from the store below, as far as there are free slots."""
        assert self._below is not None
        slot_N = self._host(self._index.find(self._put(table_N), self._put(id_N)))
        away = np.flatnonzero(slot_N < 0)
        # A damaged list may have a key twice, which must not get two slots.
        away = away[np.unique(tie_numbers(table_N[away], id_N[away]), return_index=True)[1]]
        away = np.sort(away)[: self._free.left(self.slots)]
        if len(away):
            row_MW = np.empty((len(away), self.row_width), np.float32)
            found = np.flatnonzero(~self._below.get(table_N[away], id_N[away], row_MW))
            if len(found):
                self._take(table_N[away[found]], id_N[away[found]], row_MW, found, dirty=False)

    @contextmanager
    def keeping_no_reads(self) -> Iterator[None]:
        """Block in which this cache keeps no row that is read through it."""
        keeps, self._keeps_reads = self._keeps_reads, False
        try:
            yield
        finally:
            self._keeps_reads = keeps

    def clear(self) -> None:
        if self._below is not None:
            self._below.clear()
        with changing:
            self._forget()
            self._rows = 0

    def close(self) -> None:
        self._forget()

    def only_read(self) -> None:
        self._keeps_reads = False

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _add_known(self, more: int) -> None:
        if self._rows is not None:
            self._rows += more

    def _add_new(self, rows: int) -> None:
        """Count rows that were initialized."""
        self._add_known(rows)
        self._counters.new_rows += rows

    def _held(self) -> int:
        """Number of rows that cannot be evicted: all rows of a resident tier, the pinned rows of a cache."""
        return len(self._index) + self._temporary if self._resident else self.pinned

    def _room(self) -> int:
        """Number of rows that could be added: free slots and, in a cache, slots of rows that could be evicted."""
        return self.slots - self._held()

    def _note_change_below(self, table_N: Any, id_N: Any) -> None:
        """Tell each `RowsReadAhead` of this tier that the rows of these keys in the store below are about to change."""
        for ahead in self._ahead:
            ahead.note_change(table_N, id_N)

    def _evict_these(self, keys: KeysAndSlots, dirty: Any) -> None:
        """Evict these rows, none of which is pinned; `dirty`: positions, or a mask, of the dirty rows among them."""
        table_V, id_V, slot_V = keys
        self._put_below((table_V[dirty], id_V[dirty], slot_V[dirty]))
        self._index.erase(table_V, id_V)
        with changing:
            self._free.give_back(slot_V)
            self._counters.evicted += len(slot_V)

    def _write_down(self) -> None:
        self._put_below(self._dirty_keys())

    def _put_below(self, keys: KeysAndSlots) -> None:
        table_N, id_N, slot_N = keys
        if len(slot_N) == 0:
            return
        assert self._below is not None
        self._note_change_below(table_N, id_N)
        tables, ids = self._host(table_N), self._host(id_N)
        if self._order_of is not None:  # Rows that were used together then stay in the same blocks.
            order = self._order_of(tables, ids)
            tables, ids, slot_N = tables[order], ids[order], slot_N[self._put(order)]
        for part, row_NW in self._rows_out(slot_N):
            signals_deferred.raise_interrupt()  # Rows of parts that were written are clean, other rows are unchanged.
            self._below.put(tables[part], ids[part], row_NW)
            self._dirty_S[slot_N[part]] = False
        self._counters.written_down += len(slot_N)


def _no_rows(row_SW: Array, slot_M: Array, table_M: Array, id_M: Array) -> None:
    raise AssertionError("nobody acquires rows of this tier")
