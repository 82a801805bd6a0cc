"""The store of one embedding: its rows acquired, prefetched and read, by any thread.

`TieredRows` (tiered_rows.py) keeps the rows. `EmbeddingStore` takes the locks, counts changes and refuses calls that
are not allowed now. A store has parts (store_part.py), each with calls of its own:

    store.form         the optimizer whose state rows carry, and the device of the hot tier
    store.policy       policies of tables: evictions, scores, counts of ids seen
    store.snapshots    snapshots: save, load and delete, between two steps
    store.replicas     keys and rows of replicated tables
    store.coming       batches that coming steps will look up; the hot tier evicts their rows last
    store.holder       lets other objects of the process ask the store to free its folder

store_rows.py has calls on rows by key, and on all rows.

Invariants:
- the keys with rows, the rows' values and the snapshots depend neither on the tiers nor on any budget;
- a snapshot holds every row as it was at the call, the number of steps taken, and the format of the rows;
- `generation` changes whenever slots that were returned before become invalid;
- any thread may call a store. `prefetch`, which runs ahead of the training loop, changes nothing that anyone can see:
  not the rows known, their values or the count of changes; and it is cancelled for a step that needs its slots.

Locks: tiers are searched, filled and evicted from under the store lock (storage/locking/store_lock.py), which a
`prefetch` yields to waiting threads between two chunks. `release`, `mark_dirty` and kernels on pinned slots need the
pins' lock only.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from oneemb.kernels.arrays import Array, RowsOfIds
from oneemb.kernels.backend import Backend, Keys
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.threads import Threads
from oneemb.storage.bottom import Bottom, TableBottom
from oneemb.storage.coming_batches import ComingBatches
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.folder_holder import FolderHolder
from oneemb.storage.locking.pins import PinBook
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import StepLock, alone, waiting_first
from oneemb.storage.locking.store_lock import StoreLock, changing
from oneemb.storage.policies.policy_engine import PolicyEngine, refuses_some
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.policies.store_policy import StorePolicy
from oneemb.storage.policies.usage_index import USAGE_WORDS
from oneemb.storage.replicas import Replicas
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.rows.store_form import StoreForm
from oneemb.storage.snapshots.journal import Journal
from oneemb.storage.snapshots.store_snapshots import StoreSnapshots
from oneemb.storage.store_part import no_step, reading, with_store_lock
from oneemb.storage.tiered_rows import TieredRows
from oneemb.storage.tiers.hot_rows import HotRows, Prefetched
from oneemb.storage.tiers.stack import StorePlan
from oneemb.storage.tiers.warm_caches import fill_caches

_MEND = "the embedding's load_snapshot(name) goes on from one, its clear() from none"

# Maximum rows that a prefetch reads from a disk in one read, without the store lock.
_READ_AHEAD_MAX = 65536

# Maximum rows that a prefetch moves into the hot tier in one block under the store lock.
_PREFETCH_CHUNK = 4096


class Watcher(Protocol):
    """An object that is called before rows change."""

    def before_change(self, table_U: Array, id_U: Array, weight_UD: torch.Tensor) -> None:
        """Note that these rows, with these weights, are about to change. An error keeps them from changing."""

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Note that the rows of these keys have been erased."""


def weights_in(weight_SX: Array, slot_U: Array, format: RowFormat, backend: Backend) -> torch.Tensor:
    """The weights of the rows in these slots of a slab: [U, D]."""
    out = torch.empty(len(slot_U), format.dim, dtype=getattr(torch, format.dtype), device=backend.device)
    backend.gather(RowsOfIds(weight_SX, slot_U, backend.arange(len(slot_U))), backend.array(out))
    return out


class EmbeddingStore:
    """The rows of one embedding.

    Args:
        dim, dtype: weights of a row and their type, "float32", "float16" or "bfloat16".
        initial: first weights of new rows.
        plan: the tiers and their sizes.
        threads: threads that run the loops.
        bottom: the store below the tiers; None = a persistent table at the plan's path.
        policies: policy of each table, which says which rows it keeps; None = every table keeps all rows.
        name: name of the embedding, for errors of other objects of this process that want its folder.
        refusal: as for `TableBottom`.

    Raises:
        StorageError: the path cannot be made or written to.
    """

    format: RowFormat
    """Format of a row, and the optimizer whose state it holds."""
    backend: Backend
    """Backend of the hot tier's device. Keys and slots are arrays on that device."""
    generation: int
    """Version of the slots: changes whenever slots that were returned before become invalid."""

    def __init__(
        self, *, dim: int, dtype: str, initial: InitialRows, plan: StorePlan, threads: Threads,
        bottom: Bottom | None = None, policies: Sequence[RowPolicy] | None = None, name: str = "", refusal: str = "",
    ):  # fmt: skip
        self.holder = FolderHolder(self, f"embedding {name!r}", plan.owners)
        """Lets other objects of this process ask this store to free its folder."""
        if bottom is None:
            bottom = TableBottom(plan, threads, _MEND, self.holder, refusal)
        self.threads = threads
        self.plan = plan = replace(plan, has_temporary_rows=refuses_some(policies))
        self.num_tables = len(initial.kind_TC)
        self.step = 0
        """Updates made so far."""
        self.changes = 0
        """Number of changes of rows: if two readings are equal, no row has changed between them."""
        self.replaced = 0
        """Number of times that all rows were replaced or removed, or moved to another device."""
        self.store_lock = StoreLock(f"the embedding on {bottom.name}", _MEND, rank=0)
        self.step_lock = StepLock()
        """Held by steps, and by calls that read or replace all rows; taken before the store lock."""
        self.watchers: dict[int, weakref.ref[Watcher]] = {}
        """{Python's id of an object: weak reference to the object}. The objects are called with the keys and weights of
        rows before a step or `set_rows` changes them."""
        self.writing = threading.Lock()
        """Held by loops that write rows in place, or read rows that others may write; taken after the store lock."""
        self._bottom = bottom
        format = RowFormat(dim, dtype, usage_words=0 if policies is None else USAGE_WORDS)
        self.rows = TieredRows(
            self, plan, bottom, format, initial, HostBackend(threads), threads, self.writing, policies
        )
        """All rows, in their tiers."""
        self.pins = PinBook(self.rows, placed=policies is not None)
        """Pins of the hot tier and their owners. Use under the store lock only."""
        self.engine: PolicyEngine | None = None
        """Carries out the policies of the tables; None = all rows stay. Use under the store lock only."""
        if policies is not None:
            self.engine = PolicyEngine(policies, plan.capacity, self.rows, self.pins, threads, self.writing)
        self.policy = StorePolicy(self, self.engine, f"the embedding on {bottom.name}", self.num_tables)
        """Calls on the policies of the tables."""
        self.replicas = Replicas(self, plan, threads)
        """Replicated tables."""
        self.journal = Journal(self.rows, self.replicas, threads)
        """Snapshots on which a new delta can be based. Use under the store lock only."""
        self.form = StoreForm(self, self.engine, threads)
        self.coming = ComingBatches(self)
        self.snapshots = StoreSnapshots(self, bottom, self.journal, self.engine, self.policy, self.replicas)
        self._closed = ""
        """Advice in the errors of a closed store; "" = the store is open."""
        self.looks_first = False
        """Whether `acquire` must first check that the store is open, and fill its caches after a load."""

    # ---- form and place -----------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the tiers have been made. Before that no key has a row, and every id reads as its initial value."""
        return bool(self.rows.tiers)

    def build(self) -> None:
        """Make the tiers, if they are not made yet. Rows have no optimizer state until an optimizer is attached. Raises
        StorageError if the path is in use or unusable."""
        alone((self.step_lock,), self._build)

    @with_store_lock
    def _build(self) -> None:
        self.check_open()
        if not self.built:
            self.rows.build()

    # ---- rows -----------------------------------------------------------------------------------------------------

    @property
    def row_SW(self) -> Array:
        """The hot tier's slab, float32 [S, W], and on a GPU a tensor [S, at least W]. Read it anew for every use."""
        if not self.rows.tiers:
            raise StorageError(f"the embedding on {self._bottom.name} has no rows in memory any more: closed")
        return self.rows.hot.row_SW

    @property
    def weight_SX(self) -> Array:
        """View of `row_SW` as the bits of weights: [S, X], the first `dim` entries of each row being its weights."""
        # `row_SW` is only called where it raises, to save a call in each lookup.
        return self.format.weights(self.rows.hot.row_SW if self.rows.tiers else self.row_SW)

    @property
    def members(self) -> tuple["EmbeddingStore"]:
        """The stores whose rows a lookup reads: this one only. A `MergedStore` returns several."""
        return (self,)

    @property
    def hot(self) -> HotRows:
        """The hot tier. Use under the store lock only."""
        return self.rows.hot

    def acquire(
        self, keys: Keys, prefetched: Prefetched | None = None, *, again: bool = False, admits: bool = False,
        uses_U: np.ndarray | None = None,
    ) -> tuple[Array, Keys]:  # fmt: skip
        """Bring the rows of these keys into the hot tier, initialize new rows, and add one pin to each row.

        Args:
            prefetched: result of `prefetch` for the same keys; this call takes over its pins.
            again: whether an earlier lookup acquires its rows again; policies then count no use.
            admits: whether every key gets a permanent row. If False, policies may give keys temporary rows, which exist
                until the `Pins` of the slots are released.
            uses_U: int64, number of ids in the batch for each key, for policies; None = the counts in `keys`.

        Returns:
            slot_U, int64 [U], valid until released; and the U keys, on a GPU perhaps uncut (`HotRows.acquire`).

        Raises:
            StoreFullError: a tier is too small, or the capacity or the limit of replicated tables is reached; nothing
                has changed.
            ValueError: tables or offsets, on a GPU, are invalid; nothing has changed.
        """
        with self.store_lock:
            return self.acquire_locked(keys, prefetched, again, admits, uses_U)

    def acquire_locked(
        self, keys: Keys, prefetched: Prefetched | None, again: bool, admits: bool, uses_U: np.ndarray | None
    ) -> tuple[Array, Keys]:
        """`acquire` for a caller that has the store lock, and keeps it until the pins have an owner."""
        self.store_lock.check(changes=True)
        if self.looks_first:
            self.check_open()
            fill_caches(self.rows.tiers, self.rows.cached)
            self.looks_first = False
        self.pins.release_abandoned()
        hot, engine = self.rows.hot, self.engine
        begun, new = hot.begun, self.replicas.new_of(keys) if self.replicas.any else None
        if engine is None:
            found = self.pins.acquire(keys, prefetched)
        else:
            gone = engine.gone
            try:
                found = engine.acquire(keys, prefetched, step=self.step, again=again, admits=admits, uses_U=uses_U)
            except BaseException:
                if prefetched is not None:
                    self.pins.cancel(prefetched)
                raise
            finally:
                self.changes += engine.gone > gone
            self.changes += not again  # Scores and sightings have.
        self.changes += hot.begun > begun
        if new is not None:
            with changing:
                self.replicas.add(new)
        return found

    @property
    def has_temporary_rows(self) -> bool:
        """Whether lookups may get temporary rows; then one key may have several slots."""
        return self.plan.has_temporary_rows

    @with_store_lock
    def temporary(self) -> np.ndarray:
        """The slots of temporary rows: int64."""
        return self.pins.temporary()

    def prefetch(self, keys: Keys) -> Prefetched:
        """Read the rows that a coming lookup's keys have already, and pin as many as fit. On a GPU this runs on the
        current stream; a step on another stream waits for it."""
        with self.store_lock:
            self.store_lock.check(changes=True)
            nothing = Prefetched(self, keys, keys.id_U[:0], self.generation, 0, held=False)
            if not self.built:
                return nothing
            try:
                slot_U, keys, missing = self.hot.pin_resident(keys)
            except ValueError:  # what is wrong with the keys is for `acquire` to say
                return nothing
            prefetched = self.hold(keys, slot_U, len(missing))
        try:
            for begin in range(0, len(missing), _READ_AHEAD_MAX):
                self._bring(prefetched, missing[begin : begin + _READ_AHEAD_MAX])
        except StoreFullError:
            pass  # `acquire` brings the rest, when those of the batches before have left.
        except BaseException:
            self.unprefetch(prefetched)
            raise
        return prefetched

    def _bring(self, prefetched: Prefetched, missing: Array) -> None:
        """Read rows that are not in the hot tier, without the store lock where possible, and move them there by chunks.
        `missing`: positions of their keys in `prefetched.keys`."""
        with self.store_lock:
            self.store_lock.check(changes=True)
            if not prefetched.valid:
                return
            ahead = self.hot.rows_ahead(prefetched.keys, missing)
        if ahead is not None:
            try:
                ahead.read()
            except StorageError:
                if prefetched.valid:
                    raise
                return  # A load, say, has put other files in place of those that were read.
        for begin in range(0, len(missing), _PREFETCH_CHUNK):
            waiting_first(self.store_lock)
            with self.store_lock:
                self.store_lock.check(changes=True)
                if not prefetched.valid:
                    return
                chunk = missing[begin : begin + _PREFETCH_CHUNK]
                prefetched.missing -= self.hot.bring_known(prefetched.keys, prefetched.slot_U, chunk, ahead)

    def hold(self, keys: Keys, slot_U: Array, missing: int = 0) -> Prefetched:
        """Register the pins of a coming lookup, in the block under the store lock that made the pins."""
        try:
            prefetched = Prefetched(self, keys, slot_U, self.generation, missing)
            self.pins.prefetched.add(prefetched)
        except BaseException:
            self.release(slot_U)
            raise
        return prefetched

    @reading
    def check_slots(self) -> list[str]:
        """One text for each fault of a tier's slots, see `Tier.check_slots`; empty if there is none."""
        self.pins.release_abandoned()
        return self.rows.check_slots()

    def unprefetch(self, prefetched: Prefetched) -> None:
        """Unpin the rows that `prefetch` pinned, unless an `acquire` has taken over the pins."""
        with self.store_lock:
            end = self.pins.take if self.store_lock.broken else self.pins.cancel
            end(prefetched)

    def weights_in(self, slot_U: Array) -> torch.Tensor:
        """The weights of the rows in these slots, which are pinned: [U, D]."""
        return weights_in(self.weight_SX, slot_U, self.format, self.backend)

    def before_change(self, table_U: Array, id_U: Array, weight_UD: torch.Tensor) -> None:
        """Tell the watchers that these rows are about to change. A watcher that raises prevents it."""
        for reference in list(self.watchers.values()):
            if (watcher := reference()) is not None:
                watcher.before_change(table_U, id_U, weight_UD)

    def release(self, slot_U: Array, *, elsewhere: bool = False) -> None:
        """Remove one pin from each slot that `acquire` returned; see `HotRows.release`."""
        with signals_deferred:
            self.hot.release(slot_U, elsewhere=elsewhere)

    def mark_dirty(self, table_U: Array, slot_U: Array) -> None:
        """Set the dirty bits of these slots, whose rows have changed; `table_U` is not read."""
        with signals_deferred:
            self.rows.hot.mark_dirty(slot_U)
            self.changes += 1

    @reading
    def read(self, keys: Keys) -> tuple[Array, Keys]:
        """Copies of the rows of these keys, float32 [U, at least W]; and the keys, cut to their actual number U.

        An unknown key reads as its initial row, or as zeros, as its policy says. Raises ValueError if tables or
        offsets, on a GPU, are invalid.
        """
        self.check_open()
        if self.built:
            return self.hot.read(keys)
        keys = self.backend.counted(keys)
        row_UW = self.backend.put(np.zeros((len(keys.id_U), self.format.row_width), np.float32))
        self.rows.new_rows.absent(row_UW, self.backend.arange(len(keys.id_U)), keys.table_U, keys.id_U)
        return row_UW, keys

    def slots_of(self, table_N: Array, id_N: Array) -> Array | None:
        """Slots of rows, which may be read in place without a pin: int64 [N], -1 for a key without a row. Keys may
        repeat. None if slots are not stable. Use under the store lock only, as long as the slots are read."""
        self.store_lock.check(changes=False)
        if self._closed:
            self.check_open()
        return self.rows.hot.slots_of(table_N, id_N) if self.reads_in_place else None

    @property
    def reads_in_place(self) -> bool:
        """Whether slots are stable, so that `slots_of` gives them."""
        return bool(self.rows.tiers) and self.rows.hot.stable_slots

    @property
    def absent_rows(self) -> InitialRows:
        """Values that a read returns for keys without a row."""
        return self.rows.new_rows.absent_rows

    def members_of(self, table_U: Array) -> np.ndarray:
        """Index in `members` of the store that each key belongs to: int32 [U], all 0."""
        return np.zeros(len(table_U), np.int32)

    def describe_key(self, table: int, id: int) -> str:
        """Text that names a key in errors."""
        return f"id {id} in table {table}"

    # ---- the rest -------------------------------------------------------------------------------------------------

    @no_step("clear")
    def clear(self) -> None:
        """Remove all rows; snapshots stay. A broken store can be used again afterwards."""
        with self.store_lock:
            self.check_process()
            self.check_open()
            self.policy.check_clock()
            self.mend()
            self.rows.clear()
            with changing:
                self.journal.clear()
                self.replicas.clear()
                if self.engine is not None:
                    self.engine.clear()
                self.changes += 1
                self.replaced += 1
                self.step = 0
                self.snapshots.all_rows_gone()

    @reading
    def stats(self) -> dict[str, Any]:
        """Current sizes, and counters since the store was built; one dict for each tier."""
        if self.built and not self.store_lock.forked:
            self.pins.release_abandoned()
        counts: dict[str, Any] = {"rows": len(self.rows), "replicated_rows": len(self.replicas), "step": self.step}
        if self.engine is not None:
            counts["policy"] = self.engine.stats()
        return {**counts, **self.rows.stats()}

    def close(self) -> None:
        """Free memory, files and the path's lock. Rows that no snapshot holds are gone."""
        if not self.store_lock.forked:
            self.step_lock.warn_of_late_error()
        self._close()

    @no_step("close")
    def _close(self) -> None:
        with self.store_lock:
            self.say_closed(self._closed or "make it again to go on")
            self.replaced += 1
            self.rows.dismantle()
            if not self.store_lock.forked:
                self.threads.close()

    def unsaved(self) -> int:
        """Number of all rows that `close` would lose. 0 if a snapshot holds all rows as they are now, or the store is
        broken."""
        with self.store_lock:
            lost = not self.snapshots.are_current and self.built and not self.broken
            return max(1, len(self.rows)) if lost else 0

    def say_closed(self, advice: str) -> None:
        """Set the advice that errors of the closed store give."""
        self._closed, self.looks_first = advice, True

    @property
    def broken(self) -> bool:
        """Whether a call was cut short, so that rows may be wrong."""
        return self.store_lock.broken or self.rows.broken

    def mend(self) -> bool:
        """Remove all rows of a broken store, after which it can be used again. Returns whether it was broken."""
        broken = self.broken
        if broken:
            self.rows.dismantle()
            self.replicas.clear()
            if self.engine is not None:
                self.engine.usage.clear()
            self.pins.prefetched.clear()
            self.store_lock.mended()
        return broken

    def check_process(self) -> None:
        """Raise ForkedProcessError if this process is a child of the one that made the store."""
        if self.store_lock.forked:
            self.store_lock.check(changes=True)

    def check_open(self) -> None:
        """Raise StorageError if the store is closed."""
        if self._closed:
            raise StorageError(f"the embedding on {self._bottom.name} is closed; {self._closed}")
