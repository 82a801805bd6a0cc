"""The store of one embedding: its rows acquired and prefetched, by any thread; saved and loaded between two steps.

`TieredRows` (tiered_rows.py) keeps the rows; what is here says who may do what with them, and when.

Invariants:
- the rows known, their values and the snapshots do not depend on which tiers there are, nor on any budget;
- a snapshot holds every row as it was at the call, the number of steps taken and what the rows mean;
- `generation` changes whenever slots handed out before mean nothing any more;
- any thread may call a store. `prefetch`, which runs ahead of the training loop, changes nothing that anyone can see:
  not the rows known, their values or the count of changes; and rows it holds give way to a step that needs their slots.

Turns: tiers are searched, filled and evicted from in a turn (storage/locking/turns.py), and a `prefetch` gives way to
whoever waits for one between two chunks. `release`, `mark_dirty` and kernels on pinned slots need none, only the pins'
lock.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from oneemb.kernels.arrays import Array, RowsOfIds
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.loops import Keys, Loops
from oneemb.kernels.owner import owner_of
from oneemb.kernels.places import loops_at
from oneemb.kernels.threads import Threads
from oneemb.storage.bottom import EXPORTED, Bottom, TableBottom
from oneemb.storage.errors import (
    OtherSnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
    StoreFullError,
)
from oneemb.storage.locking.pins import PinBook
from oneemb.storage.locking.step_lock import StepLock, alone, between_steps, between_steps_now
from oneemb.storage.locking.turns import Turns, changing, undisturbed
from oneemb.storage.policies.kept_rows import KeptRows, refuses_some
from oneemb.storage.policies.ledger import MARKS, Departing, LedgerClock
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.replicas import Keys as ReplicatedKeys, Replicas
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.snapshots.journal import Journal
from oneemb.storage.snapshots.owned_rows import OwnedRows
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows
from oneemb.storage.table.delta import GONE
from oneemb.storage.table.snapshot_file import check_snapshot_name
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiered_rows import ChangeRows, NewPart, TieredRows
from oneemb.storage.tiers.hot_rows import HotRows, Prefetched
from oneemb.storage.tiers.stack import StorePlan

__all__ = ["EXPORTED", "ChangeRows", "EmbeddingStore", "NewPart", "Watcher", "weights_in"]

P = ParamSpec("P")
R = TypeVar("R")

_MEND = "the embedding's load_snapshot(name) goes on from one, its clear() from none"

# How long a prefetch gives way to those who wait at most, in naps of 20 microseconds: they take turns by then.
_NAPS_MAX = 500

# Rows that a prefetch reads at once from a disk, outside turns.
_READ_AHEAD_MAX = 65536

# Rows that a prefetch brings in in one turn; where they can be read in a turn only, it reads them in it.
_PREFETCH_CHUNK = 4096


class Watcher(Protocol):
    """An object that is told of rows before they change."""

    def before_change(self, table_U: Array, id_U: Array, weight_UD: torch.Tensor) -> None:
        """Note that these rows, with these weights, are about to change. An error keeps them from changing."""

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Note that the rows of these keys have been erased."""


class _Closes(Protocol):
    def close(self) -> None: ...


Method = Callable[Concatenate["EmbeddingStore", P], R]


def _in_turn(method: Method[P, R]) -> Method[P, R]:
    """Runs a method that changes the store in a turn."""

    @functools.wraps(method)
    def run(self: "EmbeddingStore", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turns:
            self.turns.check(changes=True)
            return method(self, *args, **kwargs)

    return run


def _between_steps(method: Method[P, R]) -> Method[P, R]:
    """Runs a method when no thread is in the middle of a step."""

    @functools.wraps(method)
    def run(self: "EmbeddingStore", /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.turns.forked:
            return method(self, *args, **kwargs)  # which says what a child may not
        return between_steps((self.step_lock,), method.__name__, lambda: method(self, *args, **kwargs))

    return run


def _reading(method: Method[P, R]) -> Method[P, R]:
    """Runs a method that only reads in a turn. A child of the process that made the store may call it too."""

    @functools.wraps(method)
    def run(self: "EmbeddingStore", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turns:
            self.turns.check(changes=False)
            if self.turns.forked:
                self.rows.only_read()
            return method(self, *args, **kwargs)

    return run


def weights_in(weight_SX: Array, slot_U: Array, format: RowFormat, loops: Loops) -> torch.Tensor:
    """The weights of the rows in these slots of a slab: [U, D]."""
    out = torch.empty(len(slot_U), format.dim, dtype=getattr(torch, format.dtype), device=loops.device)
    loops.gather(RowsOfIds(weight_SX, slot_U, loops.arange(len(slot_U))), loops.array(out))
    return out


class EmbeddingStore:
    """The rows of one embedding.

    Args:
        dim, dtype: weights of a row and their type, "float32", "float16" or "bfloat16".
        initial: how new rows begin.
        plan: the tiers.
        threads: runs the loops.
        bottom: what lies below the tiers; None = a persistent table at the plan's path.
        policies: which rows each table keeps; None = all of them.
        name: name of the embedding, for errors of other objects of this process that want its folder.

    Raises:
        StorageError: the path cannot be made or written to.
    """

    def __init__(
        self, *, dim: int, dtype: str, initial: InitialRows, plan: StorePlan, threads: Threads,
        bottom: Bottom | None = None, policies: Sequence[RowPolicy] | None = None, name: str = "",
    ):  # fmt: skip
        self.what = f"embedding {name!r}"
        if bottom is None:
            bottom = TableBottom(plan.persistent_path, plan.physical_block_size, threads, _MEND, self)
        self.threads = threads
        self.plan = plan = replace(plan, lends=refuses_some(policies))
        self.num_tables = len(initial.kind_TC)
        self.step = 0
        """Updates made so far."""
        self.changes = 0
        """Counts what changed the rows: two equal readings mean equal rows."""
        self.saved: tuple[str, int] | None = None
        """The identity of the snapshot that was saved last, and `changes` then."""
        self._kept_in: tuple[str | None, int] = None, 0
        """Name of the snapshot that has all rows as of `changes`, and that count; None = there were no rows then."""
        self.owner: Callable[[], _Closes | None] = weakref.ref(self)
        """Returns the object to close in order to free the folder."""
        self.replaced = 0
        """Counts how often other rows have taken the place of those that were looked up, or none have."""
        self.turns = Turns(f"the embedding on {bottom.name}", _MEND, rank=0)
        self.step_lock = StepLock()
        """Held by steps, and by whoever takes all rows as they are or puts others in their place; before any turn."""
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        """Objects that a step, or `put`, tells which rows it is about to change."""
        self.writing = threading.Lock()
        """Held by loops that write rows in place, and by those that read rows which may be written; after any turn."""
        self.replicas = Replicas(plan, threads)
        """The keys of replicated tables."""
        self._bottom = bottom
        format = RowFormat(dim, dtype, marks=0 if policies is None else MARKS)
        self.rows = TieredRows(plan, bottom, format, initial, HostLoops(threads), threads, self.writing, policies)
        """All rows, in their tiers."""
        self.pins = PinBook(self.rows, placed=policies is not None)
        """Owners of pinned rows. In a turn only."""
        self.kept: KeptRows | None = None
        """Which rows policies keep; None where no table has one, and all stay. In a turn only."""
        if policies is not None:
            self.kept = KeptRows(policies, plan.capacity, self.rows, self.pins, threads, self.writing)
        self.journal = Journal(self.rows, self.replicas, threads)
        """The snapshots since which a delta can be saved. In a turn only."""
        self._closed = ""
        """Advice of the error of a closed store; "" = it is open."""

    # ---- form and place -----------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the tiers are there. Until then no row is known here, and every id reads as its initial value."""
        return bool(self.rows.tiers)

    @property
    def format(self) -> RowFormat:
        """Format of a row, and the optimizer whose state it holds."""
        return self.rows.new_rows.format

    @property
    def loops(self) -> Loops:
        """Loops that run where the hot tier is. Keys and slots are arrays of that place."""
        return self.rows.new_rows.loops

    @property
    def generation(self) -> int:
        """Changes whenever slots handed out before mean nothing any more."""
        return self.rows.generation

    def build(self) -> None:
        """Make the tiers, if they are not there, for rows without state until an optimizer is attached.

        Raises:
            StorageError: the path is in use or unusable.
        """
        alone((self.step_lock,), self._build)

    @_in_turn
    def _build(self) -> None:
        self._check_open()
        if not self.built:
            self.rows.build()

    def attach(self, optimizer: str, state: np.ndarray) -> None:
        """Let rows carry the state of this optimizer. Those that no optimizer has trained keep their weights.

        Args:
            state: float32 [Z], what the state of a new row holds.

        Raises:
            StorageError: the path is in use or unusable, or the rows already hold another optimizer's state.
        """
        alone((self.step_lock,), lambda: self._attach(optimizer, state))

    @_in_turn
    def _attach(self, optimizer: str, state: np.ndarray) -> None:
        self._check_open()
        format, before = self.format.with_state(optimizer, state), self.format
        if not self.built:
            self.rows.build(format)
            return
        fits = format.same_words(before) and (before.optimizer in (None, optimizer) or not format.state)
        if not fits and (self.step or before.state and len(self.rows)):
            raise StorageError(
                f"the rows hold the state of {before.optimizer!r} ({before.state_width} values a row), the optimizer"
                f" attached is {optimizer!r} ({len(state)} values); attach {before.optimizer!r}, let its state go by"
                " detach_optimizer('drop'), or start from another path"
            )
        self._relayout(format, self.loops)

    def detach(self, state: str) -> None:
        """Let another optimizer be attached to rows that one has trained.

        Args:
            state: "keep": one of the same name, which goes on with the state; "drop": any, which begins anew, at step
                0; or the name of an optimizer whose state is the same values, which goes on with them.

        Raises:
            StoreFullError, StorageError: there is no room for the rows on the disk on their way; they are as they were.
        """
        alone((self.step_lock,), lambda: self._detach(state))

    @_in_turn
    def _detach(self, state: str) -> None:
        self._check_open()
        if state == "drop":
            self._relayout(self.format.with_state(None, np.empty(0, np.float32)), self.loops)
            if self.kept is not None:
                self.kept.ledger.begin_steps(self.step)
            self.step = 0
            self.changes += 1
        elif state != "keep" and self.format.state:
            self._relayout(replace(self.format, optimizer=state), self.loops)

    def move_to(self, device: torch.device) -> None:
        """Let the hot tier be on a GPU, or on the host; rows and steps go along.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way.
            RuntimeError, ImportError: CUDA cannot be used.
        """
        loops = loops_at(device, self.threads)
        if loops.place != self.loops.place:
            self._move_to(loops)

    @_between_steps
    @_in_turn
    def _move_to(self, loops: Loops) -> None:
        self._check_open()
        self._relayout(self.format, loops)
        self.replaced += 1

    def _relayout(self, format: RowFormat, loops: Loops) -> None:
        if self.kept is not None:
            self.kept.move_out()
        try:
            self.rows.relayout(format, loops, self.step)
        except BaseException as error:
            if not self.rows.whole:
                self.turns.cut_short(error)
            raise

    # ---- rows -----------------------------------------------------------------------------------------------------

    @property
    def row_SW(self) -> Array:
        """The hot tier's slab, float32 [S, W], and on a GPU a tensor [S, at least W]. Read it anew for every use."""
        if not self.rows.tiers:
            raise StorageError(f"the embedding on {self._bottom.name} has no rows in memory any more: closed")
        return self.rows.hot.row_SW

    @property
    def weight_SX(self) -> Array:
        """The same memory as weights' bits."""
        return self.rows.new_rows.format.weights(self.row_SW)

    @property
    def members(self) -> tuple["EmbeddingStore"]:
        """The stores that a lookup here is of; see `MergedStore`."""
        return (self,)

    @property
    def hot(self) -> HotRows:
        """The hot tier. In a turn only."""
        return self.rows.hot

    def acquire(
        self, keys: Keys, prefetched: Prefetched | None = None, *, again: bool = False, admits: bool = False,
        uses_U: np.ndarray | None = None,
    ) -> tuple[Array, Keys]:  # fmt: skip
        """Make the rows of these keys resident in the hot tier, beginning new ones, and pin each once more.

        Args:
            prefetched: what `prefetch` gave for the same keys; its pins are the caller's from here on.
            again: a lookup that was made before needs its rows again: to a policy that is no use of them.
            admits: whether every key gets a row, whatever a policy says. Otherwise some may be lent one, until the
                `Pins` of the slots are released.
            uses_U: int64, how many ids of a batch each key is of, for policies; None = as the keys say.

        Returns:
            slot_U, int64 [U], good until it is released; and the keys, cut to as many as there are.

        Raises:
            StoreFullError: a tier is too small, or capacity or that of replicated tables is reached; nothing has
                changed.
            ValueError: tables or offsets, on a GPU, are not as they must be; nothing has changed.
        """
        with self.turns:
            self.turns.check(changes=True)
            if self._closed:
                self._check_open()
            self.pins.release_abandoned()
            hot, kept = self.rows.hot, self.kept
            begun, new = hot.begun, self._new_replicas(keys) if self.replicas else None
            if kept is None:
                found = self.pins.acquire(keys, prefetched)
            else:
                gone = kept.gone
                try:
                    found = kept.acquire(keys, prefetched, step=self.step, again=again, admits=admits, uses_U=uses_U)
                except BaseException:
                    if prefetched is not None:
                        self.pins.give_up(prefetched)
                    raise
                finally:
                    self.changes += kept.gone > gone
                self.changes += not again  # Scores and sightings have.
            self.changes += hot.begun > begun
            if new is not None:
                with changing:
                    self.replicas.add(new)
            return found

    def _new_replicas(self, keys: Keys) -> ReplicatedKeys:
        """Keys of replicated tables that are about to be begun."""
        keys = self.loops.counted(keys)
        table_U, id_U = (self.loops.tensor(array).cpu().numpy() for array in (keys.table_U, keys.id_U))
        return self.replicas.new(table_U, id_U, self.format.row_bytes)

    @property
    def counts_uses(self) -> bool:
        """Whether policies ask how many ids of a batch a key is of."""
        return self.kept is not None and self.kept.counts_uses

    @property
    def lends(self) -> bool:
        """Whether lookups may be lent rows: one key may then have several slots."""
        return self.plan.lends

    @_in_turn
    def lent(self) -> np.ndarray:
        """The slots of rows that are lent now: int64."""
        return self.pins.lent()

    @_in_turn
    def check_free(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Raise StorageError if a lookup whose step is still to come holds the row of one of these keys."""
        if not self.built:
            return
        self.pins.release_abandoned()
        if in_use := self.pins.in_use(table_U, id_U):
            raise StorageError(f"{in_use} of the rows to erase are in use by a lookup; erase them between two steps")

    @_between_steps
    @_in_turn
    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Forget the rows of these keys, here and in every tier. Snapshots keep theirs.

        Returns:
            Which there were, bool [U].

        Raises:
            StorageError: a lookup whose step is still to come holds one; nothing has changed.
        """
        self._check_open()
        if not self.built:
            return np.zeros(len(id_U), np.bool_)
        self.pins.release_abandoned()
        own = np.flatnonzero(owner_of(table_U, id_U, self.plan.owners) == self.plan.owner)
        self.journal.erase(table_U[own], id_U[own])  # First: no delta brings back what is gone.
        erased_U = self.pins.erase(table_U, id_U)
        with changing:
            self.replicas.forget(table_U, id_U)
            if self.kept is not None:
                self.kept.forget(table_U, id_U, erased_U)
            self.changes += bool(erased_U.any())
        return erased_U

    @_between_steps
    @_in_turn
    def departing(self) -> list[Departing]:
        """The rows that have expired, as policies say, and that no lookup holds. `evict` lets them leave.

        Raises:
            ValueError: `expire_where` or a clock raises, or gives what it is not to give.
        """
        self._check_open()
        if self.kept is None or not self.built:
            return []
        self.pins.release_abandoned()
        return self.kept.departing(range(self.num_tables), self.step)

    @_between_steps
    @_in_turn
    def evict(self, departing: Sequence[Departing] | None = None) -> dict[str, int]:
        """Let these rows leave, and those that are more than a table may have, and that no lookup holds.

        Args:
            departing: what `departing` gave, with no lookup since; None = what it gives in this very turn.

        Returns:
            How many, by reason.

        Raises:
            ValueError: as `departing`, where it is asked here; no row has left.
        """
        self._check_open()
        if self.kept is None or not self.built:
            return {}
        if departing is None:
            departing = self.departing()
        left = self.kept.evict(range(self.num_tables), departing)
        self.changes += bool(left)
        return left

    @_reading
    def scores(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scores of these rows, uint64 [U], 0 of those that are not there; and which are, bool [U]."""
        return self._need_policy().scores(table_U, id_U)

    @_in_turn
    def check_scores(self, table_U: np.ndarray, id_U: np.ndarray, score_U: np.ndarray) -> None:
        """Raise ValueError unless `set_scores` may give these rows these scores."""
        self._need_policy().check_scores(table_U, id_U, score_U)

    @_between_steps
    @_in_turn
    def set_scores(
        self, table_U: np.ndarray, id_U: np.ndarray, score_U: np.ndarray, time_U: np.ndarray | None = None
    ) -> int:
        """Give those of these rows that are there other scores. Returns how many there are.

        Args:
            time_U: uint64, of their last uses, where the policy has `timestamps`; None = they stay as they are.

        Raises:
            ValueError: a score is none of its table's rule.
            StoreFullError: so many rows do not fit in the hot tier at a time.
        """
        known = self._need_policy().set_scores(table_U, id_U, score_U, time_U)
        self.changes += known > 0
        return known

    @_in_turn
    def set_epoch(self, epoch: int) -> None:
        """Let uses from now on be of this epoch."""
        self._need_policy().set_epoch(epoch)
        self.changes += 1

    @_in_turn
    def give_score(self, table: int, score: int) -> None:
        """Let uses of rows of a table of `GivenScore` give this score from now on, 0 to 2^64 - 1."""
        self._need_policy().ledger.give(table, score)

    @_reading
    def uses(self, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids int64 [N] of a table's rows in this store; their scores and, with `timestamps`, times of last use, both
        uint64 [N]."""
        return self._need_policy().ledger.uses(table)

    @_reading
    def sightings(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a table that were seen and have no row yet, and how often, both int64 [N]; see `Admission`."""
        admission = self._need_policy().admission
        return (np.empty(0, np.int64), np.empty(0, np.int64)) if admission is None else admission.sightings(table)

    @property
    def sightings_bytes(self) -> int:
        """Bytes of memory that sightings take."""
        return 0 if self.kept is None or self.kept.admission is None else self.kept.admission.nbytes

    @_in_turn
    def add_sightings(self, table: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Count these ids, which are distinct, so often more; those that have a row are left out."""
        kept = self._need_policy()
        if kept.admission is not None:
            absent = kept.ledger.find(np.full(len(id_N), table, np.int32), id_N) < 0
            kept.admission.add_sightings(table, id_N[absent], count_N[absent])
            self.changes += 1

    @_in_turn
    def forget_sightings(self, table: int, id_N: np.ndarray) -> None:
        """Count these ids no more."""
        if (admission := self._need_policy().admission) is not None:
            admission.forget(np.full(len(id_N), table, np.int32), id_N)
            self.changes += 1

    @_in_turn
    def timestamp(self) -> int:
        """Nanoseconds since 1970, later than the last use of every row."""
        return self._need_policy().ledger.timestamp()

    def _need_policy(self) -> KeptRows:
        self._check_open()
        if self.kept is None:
            raise ValueError(f"the embedding on {self._bottom.name} has no policy, so that its rows have no scores")
        return self.kept

    def prefetch(self, keys: Keys) -> Prefetched:
        """Read those rows of a coming lookup that are known, and pin them as far as there is room; begin none.

        On a GPU it runs on the current stream; a step on another one waits until it is done.
        """
        with self.turns:
            self.turns.check(changes=True)
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
        """Read the `missing` keys' rows, outside turns where that can be done, and bring them in, in several turns."""
        with self.turns:
            self.turns.check(changes=True)
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
            naps = 0
            while self.turns.waiting and naps < _NAPS_MAX:
                time.sleep(2e-5)
                naps += 1
            with self.turns:
                self.turns.check(changes=True)
                if not prefetched.valid:
                    return
                chunk = missing[begin : begin + _PREFETCH_CHUNK]
                prefetched.missing -= self.hot.bring_known(prefetched.keys, prefetched.slot_U, chunk, ahead)

    def hold(self, keys: Keys, slot_U: Array, missing: int = 0) -> Prefetched:
        """Note the pins of a coming lookup, in the turn in which they were made."""
        try:
            prefetched = Prefetched(self, keys, slot_U, self.generation, missing)
            self.pins.prefetched.add(prefetched)
        except BaseException:
            self.release(slot_U)
            raise
        return prefetched

    @_reading
    def check_slots(self) -> list[str]:
        """One text for each fault of a tier's slots, see `Tier.check_slots`; empty if there is none."""
        self.pins.release_abandoned()
        return self.rows.check_slots()

    def unprefetch(self, prefetched: Prefetched) -> None:
        """Unpin what `prefetch` pinned, if no `acquire` has taken it over."""
        with self.turns:
            if self.turns.broken:
                self.pins.take(prefetched)
            else:
                self.pins.give_up(prefetched)

    @_between_steps
    @_in_turn
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
        """Give keys, known or not, these rows; or the first words of them, before those that they have.

        Raises:
            StoreFullError: a tier is too small for so many rows at a time, or capacity is reached; nothing has changed.
        """
        put = self.loops.put
        slot_U, keys = self.acquire(self.loops.distinct_keys(put(table_U), put(id_U)), admits=True)
        try:
            if self.watchers:
                self.before_change(keys.table_U, keys.id_U, self.weights_in(slot_U))
            format = self.format
            with self.writing:
                its = slice(0, min(format.mark_begin, row_UX.shape[1]))
                self.row_SW[slot_U, its] = put(row_UX[:, its])
                its = slice(format.state_begin, row_UX.shape[1])  # What a policy notes is not the caller's.
                if its.start < its.stop:
                    self.row_SW[slot_U, its] = put(row_UX[:, its])
            self.mark_dirty(keys.table_U, slot_U)
        finally:
            self.release(slot_U)

    @_in_turn
    def replicas_of(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The rows of these keys of replicated tables, which are here: float32 [U, W]."""
        row_UW = np.empty((len(id_U), self.format.row_width), np.float32)
        missing_U = self.hot.get(table_U, id_U, row_UW)
        assert not missing_U.any()
        return row_UW

    @_between_steps
    @_in_turn
    def put_replicas(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """Have rows of replicated tables as another owner has loaded them. Watchers are not told.

        Raises:
            StoreFullError: there is no room for them; some may be here.
        """
        self._put_replicas(self.replicas.new(table_U, id_U, self.format.row_bytes), table_U, id_U, row_UW)
        self.changes += 1

    def _put_replicas(self, new: ReplicatedKeys, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self.hot.put(table_U, id_U, row_UW)
        with changing:
            self.replicas.add(new)

    @_between_steps
    @_in_turn
    def begin_replicas(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Begin those rows of replicated tables that are not here, as lookups elsewhere have. It is no change of rows:
        they are what they were there. There may be more than replicated tables may have: what ranks have begun can be
        saved.

        Raises:
            StoreFullError: a tier is too small, or capacity is reached; some may be here.
        """
        new = self.replicas.new(table_U, id_U, None)
        if len(new[1]):
            put = self.loops.put
            row_UW, _ = self.hot.read(self.loops.distinct_keys(put(new[0]), put(new[1])))
            row_UW = self.loops.tensor(row_UW).cpu().numpy()[:, : self.format.row_width]
            self._put_replicas(new, *new, np.ascontiguousarray(row_UW))

    def weights_in(self, slot_U: Array) -> torch.Tensor:
        """The weights of the rows in these slots, which are pinned: [U, D]."""
        return weights_in(self.weight_SX, slot_U, self.format, self.loops)

    def before_change(self, table_U: Array, id_U: Array, weight_UD: torch.Tensor) -> None:
        """Tell the watchers that these rows are about to change.

        Raises:
            StorageError: a watcher keeps them from it.
        """
        for watcher in list(self.watchers):
            watcher.before_change(table_U, id_U, weight_UD)

    @_between_steps
    def copy_to(self, other: "EmbeddingStore", *, with_state: bool, change: ChangeRows | None = None) -> None:
        """Let another store, which is new, have the rows as they are now, and the step.

        Args:
            with_state: let it have the optimizer's state too; off, its rows have none and begin at step 0.
            change: is given tables, ids and rows on their way, and changes the rows in place.

        Raises:
            StorageError: the other's path is in use or unusable, or has no room for them.
        """
        with self.turns, other.turns:
            self.turns.check(changes=True)
            self._check_open()
            if self.built:
                other.begin_with(self.rows, self.step, with_state, change, self.kept)
                other.replicas.add(self.replicas.keys())

    @_between_steps
    def visit(self, call: ChangeRows) -> None:
        """Give every row, as all of them are now, to a function: tables, ids and rows, some at a time. It must not
        change them, or use the store.

        Raises:
            StorageError: rows cannot be read.
        """
        with self.turns:
            self.turns.check(changes=True)
            self._check_open()
            if self.built:
                for table_N, id_N, row_NW in self.hot.scan():
                    undisturbed.raise_interrupt()
                    call(table_N, id_N, row_NW)

    def begin_with(
        self, rows: TieredRows, step: int, with_state: bool, change: ChangeRows | None, kept: KeptRows | None
    ) -> None:
        """Have these rows, of a store that was at this step, for `copy_to`. There are none here yet."""
        self.rows.copy_from(rows, with_state=with_state, change=change)
        with changing:  # Until the ledger knows the rows: others would never be evicted.
            self.step = step if with_state else 0
            if self.kept is not None:
                clock = None if kept is None else kept.ledger.counted()
                self.kept.read_rows(rows.format, clock, step, self.step)
                if kept is not None:
                    self.kept.admission = self.kept.loaded_admission(kept.to_arrays(), "of the other")
            self.changes += 1

    def release(self, slot_U: Array, *, elsewhere: bool = False) -> None:
        """Unpin slots that `acquire` gave, once each; see `HotRows.release`."""
        with undisturbed:
            self.hot.release(slot_U, elsewhere=elsewhere)

    def mark_dirty(self, table_U: Array, slot_U: Array) -> None:
        """Say that the rows of keys of these tables, in these slots, have changed."""
        with undisturbed:
            self.rows.hot.mark_dirty(slot_U)
            self.changes += 1

    @_reading
    def read(self, keys: Keys) -> tuple[Array, Keys]:
        """The rows of these keys: float32 [U, at least W]; and the keys, cut to as many as there are.

        A key that is not known stays so and reads as its initial row, or as zeros, as a policy says.

        Raises:
            ValueError: tables or offsets, on a GPU, are not as they must be.
        """
        self._check_open()
        if self.built:
            return self.hot.read(keys)
        keys = self.loops.counted(keys)
        row_UW = self.loops.put(np.zeros((len(keys.id_U), self.format.row_width), np.float32))
        self.rows.new_rows.absent(row_UW, self.loops.arange(len(keys.id_U)), keys.table_U, keys.id_U)
        return row_UW, keys

    @_reading
    def slots_of(self, table_N: Array, id_N: Array) -> Array | None:
        """The slots of rows, for a read in place without a pin: int64 [N], -1 for a key that is not known.

        Keys may be there many times. None where rows move: read those of unique keys.
        """
        if self._closed:
            self._check_open()
        return self.rows.hot.slots_of(table_N, id_N) if self.reads_in_place else None

    @property
    def reads_in_place(self) -> bool:
        """Whether rows lie still, so that `slots_of` gives their slots."""
        return bool(self.rows.tiers) and self.rows.hot.lies_still

    @property
    def absent_rows(self) -> InitialRows:
        """Rows as which keys without a row read."""
        return self.rows.new_rows.absent_rows

    def members_of(self, table_U: Array) -> np.ndarray:
        """int32 [U], which of `members` each key is of."""
        return np.zeros(len(table_U), np.int32)

    def describe_key(self, table: int, id: int) -> str:
        """A key as errors name it."""
        return f"id {id} in table {table}"

    # ---- snapshots ------------------------------------------------------------------------------------------------

    @_between_steps
    @_in_turn
    def save_snapshot(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, part: NewPart | None = None,
        since: str | None = None, keep_evicted: bool = False,
    ) -> SnapshotInfo:  # fmt: skip
        """Write every row as it is now, durably, under a name.

        Args:
            meta: what the caller wants to find again beside the rows, any JSON.
            part: of which snapshot of several stores this is a part; None = it is one of this store alone. A part
                has those rows of replicated tables that count here.
            since: write a delta: only what has changed since this snapshot, one of the last that were saved or loaded.
            keep_evicted: a delta does not say which rows have left by a policy: who loads it has them still.

        Returns:
            What the snapshot is.

        Raises:
            StorageError: the name is taken and `overwrite` is off, or the disk fails; the snapshots there are whole. Or
                it is of a snapshot that deltas go on from; or `since` is none of the last.
        """
        self._check_open()
        if overwrite:
            self.journal.check_not_needed(name, "replaced")
        without = self.replicas.keys(own=False) if part is not None and self.replicas else None
        if since is not None:
            self.journal.parent(since, keep_evicted)
        if not overwrite and any(info.name == name for info in self.rows.snapshots()):
            raise SnapshotExistsError.named(name, f"in {self._bottom.name}")
        check_snapshot_name(name)
        if not name.startswith(EXPORTED):
            self._evict_before_save()
        uses, arrays = (None, None) if self.kept is None else (self.kept.to_meta(), self.kept.to_arrays())
        loaded = rows = len(self.rows) - (0 if without is None else len(without[1]))
        places = None
        if since is not None:
            places, gone, delta = self.journal.delta(since, rows, keep_evicted)
            loaded = delta.rows
            uses, arrays = {**(uses or {}), **delta.to_meta()}, {**(arrays or {}), GONE: gone}
        info = self.rows.save(
            name, meta, self.step, overwrite=overwrite, part=part, without=without, more=uses, arrays=arrays,
            since=places,
        )  # fmt: skip
        self.saved = info.identity, self.changes
        if not keep_evicted and not name.startswith(EXPORTED):
            self._kept_in = name, self.changes
        whole = name if part is None else part.name
        if not whole.startswith(EXPORTED):
            self.journal.add(whole, info, rows, loaded, exact=not keep_evicted)
        return info

    def _evict_before_save(self) -> None:
        """Let rows leave that have expired, of tables that are to have none of these in a snapshot."""
        if self.kept is not None and self.built:
            self.pins.release_abandoned()
            tables = [t for t, policy in enumerate(self.kept.policies) if policy.evict_at_snapshot]
            if tables and self.kept.evict(tables, self.kept.departing(tables, self.step), expired_only=True):
                self.changes += 1

    def check_since(self, since: str, keep_evicted: bool) -> str:
        """The identity of a snapshot since which a delta can be saved.

        Raises:
            StorageError: it is none of the last that were saved or loaded.
        """
        with self.turns:
            return self.journal.parent(since, keep_evicted).info.identity

    @_between_steps
    def load_snapshot(self, name: str, *, weights_only: bool = False) -> bool:
        """Start from the rows of a snapshot, forgetting those here. Mends a broken store.

        A snapshot of rows without state, such as pretrained vectors, is given the state of new rows and begins at
        step 0.

        Args:
            weights_only: leave the state in the snapshot: rows are given that of new ones, and begin at step 0.

        Returns:
            Whether the rows are now what the snapshot holds, rather than those with state added.

        Raises:
            StorageError: there is no such snapshot (the message names those there are), its rows are not of this
                embedding's kind, or they do not fit; the rows here are as they were.
        """
        with self.turns:
            self._check_process()
            info = self.rows.check_loads(name, weights_only)
            if not self._broken:
                self.rows.check_reads(info, weights_only)
            return self._load(info, weights_only)

    @_between_steps
    def check_rows(self, info: SnapshotInfo, owned: OwnedRows | None, *, weights_only: bool, read: bool) -> None:
        """Raise unless `load_rows` will do what it is asked to, as far as that can be known.

        Args:
            read: read all rows that take the place of others, so that a damaged one is found before those are gone.

        Raises:
            StorageError: as `load_snapshot`; the rows here are as they were.
        """
        with self.turns:
            self._check_process()
            self._check_open()
            self.rows.check_kind(info, weights_only)
            self._check_policy(info)
            if read and not self._broken:
                self.rows.check_reads(info, weights_only, owned)

    @_between_steps
    def check_replicas(self, info: SnapshotInfo, rows: int, others: int, replicated: int) -> None:
        """Raise unless there is room for rows of replicated tables, beside those of a snapshot that this store owns.

        Args:
            info: what the snapshot is.
            rows: how many of its rows this store owns.
            others: rows of replicated tables that other stores own.
            replicated: all rows of replicated tables.

        Raises:
            StoreFullError: there is not.
        """
        with self.turns:
            self._check_process()
            formats = self.format, SnapshotRows.of_meta(info.meta, info.name).format
            self.replicas.check_room(replicated, max(format.row_bytes for format in formats))
            if self.built and not self._broken:
                self.hot.check_holds(rows + others)

    @_between_steps
    def load_rows(
        self, info: SnapshotInfo, owned: OwnedRows | None, *, weights_only: bool,
        replicated: ReplicatedKeys | None = None,
    ) -> bool:  # fmt: skip
        """Do as `load_snapshot` with a snapshot that `check_rows` has found to fit.

        Args:
            info: what it is; of the store at the bottom, if `owned` is None.
            owned: those of its rows that are this store's.
            replicated: the keys of replicated tables among them; None = there are no such tables.
        """
        with self.turns:
            self._check_process()
            as_saved = self._load(info, weights_only, owned)
            if replicated is not None:
                self.replicas.add(self.replicas.new(*replicated, self.format.row_bytes))
            return as_saved

    @property
    def _broken(self) -> bool:
        return self.turns.broken or self.rows.broken

    def _load(self, info: SnapshotInfo, weights_only: bool, owned: OwnedRows | None = None) -> bool:
        rows, clock = SnapshotRows.of_meta(info.meta, info.name), LedgerClock.of_meta(info.meta, info.name)
        marks, kept = None, self.kept
        self._check_policy(info)
        if kept is not None:
            marks = kept.ledger.first_marks
            arrays = self._bottom.arrays(info.name) if owned is None else owned.arrays()
            admission = kept.loaded_admission(arrays, info.name)
        with self.turns:
            broken = self._mend()
            self._check_open()
            try:
                self.replaced += 1
                self.step, same = self.rows.load(info, weights_only, owned, marks)
                with changing:
                    self.journal.clear()
                    self.replicas.clear()
                    if kept is not None:
                        kept.read_rows(rows.format, clock, rows.step, self.step)
                        kept.admission = admission
                    if same and owned is None and self.rows.lie_as_saved:
                        self.journal.add(PartOf.name_of(info), info, len(self.rows), len(self.rows))
            except BaseException as error:
                if broken or not self.rows.whole:  # Without rows, or with a part of them, there is nothing to go on.
                    self.turns.cut_short(error)
                raise
            self.changes += 1
            self._kept_in = info.name, self.changes
            return same

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless `load_snapshot` would find this snapshot, and rows in it that fit."""
        self._check_policy(self.rows.check_loads(name))

    def _check_policy(self, info: SnapshotInfo) -> None:
        """Raise StorageError unless a snapshot says of the uses of its rows what the policy here can go on with."""
        LedgerClock.of_meta(info.meta, info.name)
        self._check_clock()
        if self.kept is not None:
            self.kept.ledger.check_rules(info.meta, info.name)

    def _check_clock(self) -> None:
        """Raise ValueError if the policies' clock gives no time."""
        if self.kept is not None:
            self.kept.ledger.second  # noqa: B018  # It is read.

    @_in_turn
    def delete_snapshot(self, name: str) -> None:
        """Forget a snapshot and free what only it held.

        Raises:
            StorageError: there is none, deltas go on from it, or the disk fails.
        """
        self._check_open()
        self.journal.check_not_needed(name, "deleted")
        if self._kept_in[0] == name:
            self._kept_in = None, -1  # First: a deletion may fail after the snapshot is gone.
        self.rows.delete(name)
        self.journal.forget(name)

    def snapshot(self, name: str) -> SnapshotInfo:
        """Description of a snapshot.

        Raises:
            SnapshotNotFoundError: there is none of that name; the message names those there are.
            StorageError: it could not be read, or the store below keeps none.
        """
        return self._bottom.snapshot(name)

    def snapshots(self) -> list[str]:
        """Names of the finished snapshots in the path, oldest first."""
        return [info.name for info in self.rows.snapshots()]

    def check_snapshot(self, name: str, identity: str | None, named_by: str) -> None:
        """Raise unless the snapshot of this name is there and is the one that is meant.

        Args:
            identity: of the snapshot that is meant; None = whichever has the name.
            named_by: what names it, for errors.

        Raises:
            SnapshotNotFoundError: there is none of that name; the message names those there are.
            OtherSnapshotError: it is another one, of another run; the message says which.
            StorageError: it could not be read.
        """
        try:
            info = self.snapshot(name)
        except SnapshotNotFoundError as error:
            raise SnapshotNotFoundError(f"{named_by} names a snapshot that is not there: {error}") from error
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError.named_by(named_by, name, identity, self._bottom.name, info)

    # ---- the rest -------------------------------------------------------------------------------------------------

    @_between_steps
    def clear(self) -> None:
        """Forget every row; snapshots stay. Mends a broken store."""
        with self.turns:
            self._check_process()
            self._check_open()
            self._check_clock()
            self._mend()
            self.rows.clear()
            with changing:
                self.journal.clear()
                self.replicas.clear()
                if self.kept is not None:
                    self.kept.clear()
                self.changes += 1
                self.replaced += 1
                self.step, self._kept_in = 0, (None, self.changes)

    @_reading
    def stats(self) -> dict[str, Any]:
        """Sizes now and counters since the store was built, a dict a tier."""
        if self.built and not self.turns.forked:
            self.pins.release_abandoned()
        counts: dict[str, Any] = {
            "rows": len(self.rows), "replicated_rows": len(self.replicas), "step": self.step,
        }  # fmt: skip
        if self.kept is not None:
            counts["policy"] = self.kept.stats()
        return {**counts, **self.rows.stats()}

    @_between_steps
    def close(self) -> None:
        """Free memory, files and the path's lock. Rows that no snapshot holds are gone."""
        with self.turns:
            self._closed = self._closed or "make it again to go on"
            self.replaced += 1
            self.rows.dismantle()
            if not self.turns.forked:
                self.threads.close()

    def give_way(self, other: str) -> str:
        """Close, if no row is lost; see `Holder.give_way`."""
        if self.plan.owners > 1:  # Other ranks may have unsaved rows, and a save takes all ranks.
            return "whose ranks give way together: make this call on all of them"
        why = between_steps_now(self.step_lock, lambda: self._give_way(other))
        return "which is in the middle of a step, a save or a load" if why is None else why

    def _give_way(self, other: str) -> str:
        if lost := self._unsaved():
            return f"whose {lost:,} rows no snapshot holds as they are now"
        self._closed = f"{other} of this process has taken over its folder: give each embedding one of its own"
        self._close_all()
        return ""

    def let_go(self) -> int:
        """Close, and return the number of lost rows; see `Holder.let_go`.

        Raises:
            RuntimeError: this thread is in the middle of a step.
        """
        return between_steps((self.step_lock,), "oneemb.release", self._let_go)

    def _let_go(self) -> int:
        lost = self._unsaved()
        self._close_all()
        return lost

    def _close_all(self) -> None:
        (self.owner() or self).close()  # The embedding may be gone while a loss that is kept refers to its store.

    def _unsaved(self) -> int:
        """Number of rows, if they differ from `_kept_in`; 0 if they do not, or can no longer be saved."""
        with self.turns:
            lost = self.changes != self._kept_in[1] and self.built and not self._broken and self.owner() is not None
            return max(1, len(self.rows)) if lost else 0

    def _mend(self) -> bool:
        """Let a broken store have no rows, and be sound. Returns whether it was broken."""
        broken = self._broken
        if broken:
            self.rows.dismantle()
            self.replicas.clear()
            if self.kept is not None:
                self.kept.ledger.clear()
            self.pins.prefetched.clear()
            self.turns.mended()
        return broken

    def _check_process(self) -> None:
        if self.turns.forked:
            self.turns.check(changes=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the embedding on {self._bottom.name} is closed; {self._closed}")
