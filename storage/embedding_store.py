"""All rows of one embedding: its tiers, new rows begun, snapshots saved and loaded.

Invariants:
- the rows known, their values and the snapshots do not depend on which of the three it is, nor on any budget;
- a snapshot holds every row as it was at the call, the number of steps taken and what the rows mean;
- `generation` changes whenever slots handed out before mean nothing any more;
- any thread may call a store. `prefetch`, which runs ahead of the training loop, changes nothing that anyone can see:
  not the rows known, their values or the count of changes; and rows it holds give way to a step that needs their slots.

Turns: tiers are searched, filled and evicted from in a turn (storage/turns.py), and a `prefetch` gives way to whoever
waits for one between two chunks. `release`, `mark_dirty` and kernels on pinned slots need none, only the pins' lock.
"""

import _thread
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.loops import Keys, Loops
from oneemb.kernels.places import loops_at
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import OtherSnapshotError, SnapshotNotFoundError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.row_layout import RowLayout
from oneemb.storage.row_store import StorageError, StoreFullError
from oneemb.storage.snapshot_rows import SnapshotRows, shard_of
from oneemb.storage.step_lock import StepLock, alone, between_steps
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from oneemb.storage.tiers.hot_rows import HotRows, Prefetched
from oneemb.storage.tiers.stack import NewRows, StorePlan, check_room, make_tiers
from oneemb.storage.turns import Turns, undisturbed

if TYPE_CHECKING:
    pass

__all__ = ["EXPORTED", "EmbeddingStore", "Pins"]

_MEND = "the embedding's load_snapshot(name) goes on from one, its clear() from none"

# Holds the rows of a store that is made anew for rows of another width, while it is.
_REBUILD = "rows-on-their-way-to-another-width"

# How the name begins of the snapshot that holds the rows of an embedding on their way to a file.
EXPORTED = "rows-on-their-way-to-a-file-"

# How long a prefetch gives way to those who wait at most, in naps of 20 microseconds: they take turns by then.
_NAPS_MAX = 500

# Rows read ahead at a time, before others may have their turn: enough to keep a disk busy, some 50 ms of its reads.
_PREFETCH_CHUNK = 4096


class Pins(weakref.ref):
    """The pins of a lookup, for when its owner is dropped before it has released them.

    Python calls the function of a weak reference without running a line of code: no interrupt can lose the note.
    """

    __slots__ = ("generation", "slot_U")
    slot_U: Any
    generation: int


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method that changes the store in a turn."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with self.turns:
            self.turns.check(changes=True)
            return method(self, *args, **kwargs)

    return run


def _between_steps(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method when no thread is in the middle of a step."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if self.turns.forked:
            return method(self, *args, **kwargs)  # which says what a child may not
        return between_steps((self.step_lock,), method.__name__, lambda: method(self, *args, **kwargs))

    return run


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method that only reads in a turn. A child of the process that made the store may call it too."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with self.turns:
            self.turns.check(changes=False)
            if self.turns.forked:
                for tier in self._tiers:
                    tier.only_read()
            return method(self, *args, **kwargs)

    return run


class EmbeddingStore:
    """The rows of one embedding.

    Args:
        dim, dtype: weights of a row and their type, "float32", "float16" or "bfloat16".
        initial: how new rows begin.
        plan: the tiers.
        threads: runs the loops.

    Raises:
        StorageError: the path cannot be made or written to.
    """

    def __init__(self, *, dim: int, dtype: str, initial: InitialRows, plan: StorePlan, threads: Threads):
        self.layout = RowLayout(dim, dtype, 0)
        self.plan = plan
        self.threads = threads
        self.generation = 0
        self.step = 0
        """Updates made so far."""
        self.optimizer: str | None = None
        """Whose state the rows hold; None = nobody's yet."""
        self.changes = 0
        """Counts what changed the rows: two equal readings mean equal rows."""
        self.abandoned: deque[Pins] = deque()
        """Those of lookups that were dropped unfinished; `acquire` releases them."""
        self.turns = Turns(f"the embedding on {plan.persistent_path}", _MEND, rank=0)
        self.step_lock = StepLock()
        """Held by steps, and by whoever takes all rows as they are or puts others in their place; before any turn."""
        self.writing = threading.Lock()
        """Held by loops that write rows in place, and by those that read rows which may be written; after any turn."""
        self._pins: dict[int, Pins] = {}
        self.loops: Loops = HostLoops(threads)
        """Where the hot tier is and loops run. Keys and slots are arrays of theirs."""
        self._new_rows = NewRows(self.layout, initial, np.empty(0, np.float32), self.loops)
        self._tiers: list[HotRows] = []
        self._table: PersistentTable | None = None
        self._closed = self._opened_before = False
        self._prefetched: set[Prefetched] = set()
        _check_writable(plan.persistent_path)

    # ---- building -------------------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the tiers are there. Until then there is no row, and every id reads as its initial value."""
        return self._table is not None

    def build(self, optimizer: str | None, state: np.ndarray) -> None:
        """Make the tiers for rows with this state, or say why those there do not fit.

        Args:
            optimizer: whose state it is; None = rows without state, until an optimizer comes.
            state: float32 [Z], what the state of a new row holds.

        Raises:
            StorageError: the path is in use or unusable, or the rows already hold another optimizer's state.
        """
        alone((self.step_lock,), lambda: self._build_in_turn(optimizer, state))

    @_in_turn
    def _build_in_turn(self, optimizer: str | None, state: np.ndarray) -> None:
        self._build(optimizer, state)

    def _build(self, optimizer: str | None, state: np.ndarray) -> None:
        self._check_open()
        if self.built:
            if optimizer is None:
                return
            if len(state) == self.layout.state_width and (self.optimizer in (None, optimizer) or len(state) == 0):
                self._new_rows.state, self.optimizer = state, optimizer
                return
            if self.layout.state_width and len(self._tiers[0]) or self.step:
                raise StorageError(
                    f"the rows hold the state of {self.optimizer!r} ({self.layout.state_width} values a row), the"
                    f" optimizer attached is {optimizer!r} ({len(state)} values); attach {self.optimizer!r}, or"
                    " start from another path"
                )
            # Rows that no optimizer has touched keep their weights and are given its state.
            self._make_anew(optimizer, state, self.loops)
            return
        layout = RowLayout(self.layout.dim, self.layout.dtype, len(state))
        table = PersistentTable.open(
            self.plan.persistent_path,
            row_width=layout.row_width,
            physical_block_size=self.plan.physical_block_size,
            threads=self.threads,
            mend=_MEND,
        )
        try:
            new_rows = NewRows(layout, self._new_rows.initial, state, self.loops)
            tiers = make_tiers(self.plan, new_rows, table, self.threads, self.writing)
            for info in () if self._opened_before else table.snapshots():
                if info.name.startswith(EXPORTED):  # Whoever wrote that file is dead.
                    with suppress(StorageError):
                        table.delete_snapshot(info.name)
            self._opened_before = True
        except BaseException:
            table.close()
            raise
        self._tiers, self._table, self._new_rows = tiers, table, new_rows
        self.layout, self.optimizer = layout, optimizer
        # A store that is dropped gives back its threads, files and lock. At exit the system does.
        self._finalizer = weakref.finalize(self, _close_dropped, table)
        self._finalizer.atexit = False

    @_between_steps
    @_in_turn
    def move_to(self, device: torch.device) -> None:
        """Let the hot tier be on a GPU, or on the host; rows and steps go along.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way.
            RuntimeError, ImportError: CUDA cannot be used.
        """
        loops = loops_at(device, self.threads)
        if loops.place == self.loops.place:
            return
        self._check_open()
        if not self.built:
            self.loops = loops
            self._new_rows = NewRows(self.layout, self._new_rows.initial, self._new_rows.state, loops)
            return
        self._make_anew(self.optimizer, self._new_rows.state, loops)

    def _make_anew(self, optimizer: str | None, state: np.ndarray, loops: Loops) -> None:
        """Make the tiers of rows with this state, there, and bring the rows along; what fails leaves them as they were.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way.
        """
        before = self.optimizer, self._new_rows.state, self.loops
        rows = len(self._tiers[0])
        if rows:
            check_room(self.plan, RowLayout(self.layout.dim, self.layout.dtype, len(state)), loops, rows)
            self.save_snapshot(_REBUILD, {}, overwrite=True)
        try:
            self._dismantle()
            try:
                self._build_and_load(optimizer, state, loops, rows)
            except (StorageError, MemoryError, RuntimeError, ValueError):
                if self.built:
                    self._dismantle()
                self.turns.mended()
                self._build_and_load(*before, rows)
                raise
        except BaseException as error:
            if not self.built or len(self._tiers[0]) != rows:
                self.turns.cut_short(error)
                error.add_note(f"the rows are in the snapshot {_REBUILD!r} in {self.plan.persistent_path}")
                raise
            if rows:
                self.delete_snapshot(_REBUILD)
            raise
        if rows:
            self.delete_snapshot(_REBUILD)

    def _build_and_load(self, optimizer: str | None, state: np.ndarray, loops: Loops, rows: int) -> None:
        self.loops = loops
        self._build(optimizer, state)
        if rows:
            self.load_snapshot(_REBUILD)

    # ---- rows -----------------------------------------------------------------------------------------------------

    @property
    def row_SW(self) -> Any:
        """The hot tier's slab, float32 [S, W], and on a GPU a tensor [S, at least W]. Read it anew for every use."""
        tiers = self._tiers
        if not tiers:
            raise StorageError(f"the embedding on {self.plan.persistent_path} has no rows in memory any more: closed")
        return tiers[0].row_SW

    @property
    def weight_SX(self) -> Any:
        """The same memory as weights' bits."""
        return self.layout.weights(self.row_SW)

    @property
    def members(self) -> tuple["EmbeddingStore"]:
        """The stores that a lookup here is of; see `MergedStore`."""
        return (self,)

    @property
    def hot(self) -> HotRows:
        """The hot tier. In a turn only."""
        return self._tiers[0]

    def acquire(self, keys: Keys, prefetched: Prefetched | None = None) -> tuple[Array, Keys]:
        """Make the rows of these keys resident in the hot tier, beginning new ones, and pin each once more.

        Args:
            prefetched: what `prefetch` gave for the same keys; its pins are the caller's from here on.

        Returns:
            slot_U, int64 [U], good until it is released; and the keys, cut to as many as there are.

        Raises:
            StoreFullError: a tier is too small or capacity is reached; nothing has changed.
            ValueError: tables or offsets, on a GPU, are not as they must be; nothing has changed.
        """
        with self.turns:
            self.turns.check(changes=True)
            self._check_open()
            while self.abandoned:
                self.release_pins(self.abandoned.popleft(), dropped=True)
            begun = self.hot.begun
            found = self._acquire(keys, prefetched)
            self.changes += self.hot.begun > begun
            return found

    def _acquire(self, keys: Keys, prefetched: Prefetched | None) -> tuple[Array, Keys]:
        if prefetched is not None and self.take(prefetched):
            with suppress(StoreFullError):
                if prefetched.missing:
                    self.hot.acquire_rest(prefetched.keys, prefetched.slot_U)
                return prefetched.slot_U, prefetched.keys
        try:
            return self.hot.acquire(keys)
        except StoreFullError:
            if not self._prefetched:
                raise
        for other in list(self._prefetched):
            self.unprefetch(other)
        return self.hot.acquire(keys)

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
            for begin in range(0, len(missing), _PREFETCH_CHUNK):
                naps = 0
                while self.turns.waiting and naps < _NAPS_MAX:
                    time.sleep(2e-5)
                    naps += 1
                with self.turns:
                    self.turns.check(changes=True)
                    if not prefetched.held or prefetched.generation != self.generation:
                        break
                    some = missing[begin : begin + _PREFETCH_CHUNK]
                    prefetched.missing -= self.hot.bring_known(prefetched.keys, slot_U, some)
        except StoreFullError:
            pass  # `acquire` brings the rest, when those of the batches before have left.
        except BaseException:
            self.unprefetch(prefetched)
            raise
        return prefetched

    def hold(self, keys: Keys, slot_U: Array, missing: int = 0) -> Prefetched:
        """Note the pins of a coming lookup, in the turn in which they were made."""
        prefetched = Prefetched(self, keys, slot_U, self.generation, missing)
        self._prefetched.add(prefetched)
        return prefetched

    def take(self, prefetched: Prefetched) -> bool:
        """Let the caller have these pins, in a turn. Returns whether there are any that still mean anything."""
        if not prefetched.held or prefetched.generation != self.generation:
            return False
        prefetched.held = False
        self._prefetched.discard(prefetched)
        return True

    def unprefetch(self, prefetched: Prefetched) -> None:
        """Unpin what `prefetch` pinned, if no `acquire` has taken it over."""
        with self.turns:
            if prefetched.held and prefetched.generation == self.generation and not self.turns.broken:
                self.release(prefetched.slot_U, elsewhere=True)
            prefetched.held = False
            self._prefetched.discard(prefetched)

    @_between_steps
    @_in_turn
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
        """Give keys, known or not, these rows; or the first words of them, before those that they have.

        Raises:
            StoreFullError: a tier is too small for so many rows at a time, or capacity is reached; nothing has changed.
        """
        put = self.loops.put
        slot_U, keys = self.acquire(self.loops.distinct_keys(put(table_U), put(id_U)))
        try:
            with self.writing:
                self.row_SW[slot_U, : row_UX.shape[1]] = put(row_UX)
            self.mark_dirty(keys.table_U, slot_U)
        finally:
            self.release(slot_U)

    def release(self, slot_U: Array, *, elsewhere: bool = False) -> None:
        """Unpin slots that `acquire` gave, once each; see `HotRows.release`."""
        with undisturbed:
            self.hot.release(slot_U, elsewhere=elsewhere)

    def pin_for(self, owner: Any, slot_U: Array) -> Pins:
        """Let an object own the pins of slots that `acquire` gave: they are released for it when it is dropped."""
        pins = Pins(owner, self.abandoned.append)
        pins.slot_U, pins.generation = slot_U, self.generation
        self._pins[id(pins)] = pins
        return pins

    def release_pins(self, pins: Pins, *, dropped: bool = False) -> None:
        """Unpin what `pin_for` gave, once, if its slots still mean anything."""
        with undisturbed:
            if self._pins.pop(id(pins), None) is not None and pins.generation == self.generation:
                self.hot.release(pins.slot_U, elsewhere=dropped)

    def mark_dirty(self, table_U: Array, slot_U: Array) -> None:
        """Say that the rows of keys of these tables, in these slots, have changed."""
        with undisturbed:
            self.hot.mark_dirty(slot_U)
            self.changes += 1

    @_reading
    def read(self, keys: Keys) -> tuple[Array, Keys]:
        """The rows of these keys: float32 [U, at least W]; and the keys, cut to as many as there are.

        A key that is not known stays so and reads as its initial row.

        Raises:
            ValueError: tables or offsets, on a GPU, are not as they must be.
        """
        self._check_open()
        if self.built:
            return self.hot.read(keys)
        keys = self.loops.counted(keys)
        row_UW = self.loops.put(np.zeros((len(keys.id_U), self.layout.row_width), np.float32))
        self._new_rows(row_UW, self.loops.arange(len(keys.id_U)), keys.table_U, keys.id_U)
        return row_UW, keys

    @_reading
    def slots_of(self, table_N: Array, id_N: Array) -> Array | None:
        """The slots of rows, for a read in place without a pin: int64 [N], -1 for a key that is not known.

        Keys may be there many times. None where rows move: read those of unique keys.
        """
        self._check_open()
        return self.hot.slots_of(table_N, id_N) if self.built else None

    @property
    def reads_in_place(self) -> bool:
        """Whether rows lie still, so that `slots_of` gives their slots."""
        return bool(self._tiers) and self.hot.lies_still

    def members_of(self, table_U: Array) -> np.ndarray:
        """int32 [U], which of `members` each key is of."""
        return np.zeros(len(table_U), np.int32)

    def describe_key(self, table: int, id: int) -> str:
        """A key as errors name it."""
        return f"id {id} in table {table}"

    # ---- snapshots ------------------------------------------------------------------------------------------------

    @_between_steps
    @_in_turn
    def save_snapshot(self, name: str, meta: dict, *, overwrite: bool = False) -> SnapshotInfo:
        """Write every row as it is now, durably, under a name.

        Args:
            meta: what the caller wants to find again beside the rows, any JSON.

        Returns:
            What the snapshot is.

        Raises:
            StorageError: the name is taken and `overwrite` is off, or the disk fails; the snapshots there are whole.
        """
        if not self.built:
            self._build(None, self._new_rows.state)
        assert self._table is not None
        self._tiers[0].flush()
        rows = SnapshotRows(self.layout, self.optimizer, tuple(self._new_rows.state.tolist()), self.step)
        return self._table.save_snapshot(name, rows.to_meta(meta), overwrite=overwrite)

    @_between_steps
    def load_snapshot(self, name: str) -> bool:
        """Start from the rows of a snapshot, forgetting those here. Mends a broken store.

        A snapshot of rows without state, such as pretrained vectors, is given the state of new rows and begins at
        step 0.

        Returns:
            Whether the rows are now what the snapshot holds, rather than those with state added.

        Raises:
            StorageError: there is no such snapshot (the message names those there are), its rows are not of this
                embedding's kind, or they do not fit; the rows here are as they were.
        """
        with self.turns:
            self._check_process()
            info = read_snapshot_info(self.plan.persistent_path, name)
            self._check_snapshot(name, info)
            broken = self._mend()
            try:
                return self._load(name, info)
            except BaseException as error:
                if broken:  # It has no rows now, which is nothing to go on from either.
                    self.turns.cut_short(error)
                raise

    def _check_snapshot(self, name: str, info: SnapshotInfo) -> None:
        """Raise StorageError unless a snapshot holds rows of this embedding's kind, and no other optimizer's state."""
        rows = SnapshotRows.of_meta(info.meta, name)
        if (rows.layout.dim, rows.layout.dtype) != (self.layout.dim, self.layout.dtype):
            raise StorageError(
                f"snapshot {name!r} in {self.plan.persistent_path} holds rows of {rows.layout.dim}"
                f" {rows.layout.dtype} weights, this embedding has {self.layout.dim} {self.layout.dtype}"
            )
        shard, shards = shard_of(info.meta, name)
        if shards != 1:
            raise StorageError(
                f"snapshot {name!r} in {self.plan.persistent_path} is part {shard} of {shards} of a sharded one; bring"
                " all of them into one embedding with oneemb.import_rows"
            )
        if self.built and not (self._is_narrower(rows) or self._is_wider(rows)):
            self._check_state(name, rows)

    def _is_narrower(self, rows: SnapshotRows) -> bool:
        """Whether rows here have no state yet, and those have."""
        return self.optimizer is None and self.layout.state_width == 0 < rows.layout.state_width

    def _is_wider(self, rows: SnapshotRows) -> bool:
        """Whether rows here have state, and those have none."""
        return rows.layout.state_width == 0 < self.layout.state_width

    def _load(self, name: str, info: SnapshotInfo) -> bool:
        self._check_open()
        rows = SnapshotRows.of_meta(info.meta, name)
        rebuild, widen = self.built and self._is_narrower(rows), self.built and self._is_wider(rows)
        if self.built and len(self._tiers[0]):
            # What could go wrong later has to do so while the rows here are still there.
            self._tiers[0].check_holds(info.rows)
            if rebuild or widen or None in (self.plan.cache_bytes, self.plan.host_bytes):
                _read_through(self.plan.persistent_path, name)
        replaced = False
        try:
            if rebuild:
                self._dismantle()
                replaced = True
            if not self.built or self.optimizer is None and self.layout.state_width == 0:
                self._build(rows.optimizer, np.array(rows.state, np.float32))
            assert self._table is not None
            for tier in self._tiers:
                tier.check_holds(info.rows)
            if widen:
                replaced = True
                self._load_weights(name)
            else:
                self._table.load_snapshot(name)
                replaced = True
            for tier in reversed(self._tiers):
                tier.reload()
        except BaseException as error:
            if replaced:  # Half of the rows are nothing to go on from.
                self.turns.cut_short(error)
            raise
        self.generation += 1
        self.changes += 1
        self.step = 0 if widen else rows.step
        return not widen

    def _check_state(self, name: str, rows: SnapshotRows) -> None:
        known = rows.optimizer is not None and rows.layout.state_width > 0
        if rows.layout == self.layout and not (known and rows.optimizer != self.optimizer):
            return
        raise StorageError(
            f"snapshot {name!r} in {self.plan.persistent_path} holds the state of {rows.optimizer!r}"
            f" ({rows.layout.state_width} values a row), the optimizer attached is {self.optimizer!r}"
            f" ({self.layout.state_width} values); attach {rows.optimizer!r}"
        )

    def _load_weights(self, name: str) -> None:
        assert self._table is not None
        self._table.clear()
        begin = self.layout.state_begin
        with SnapshotReader.open(self.plan.persistent_path, name) as reader:
            for table_N, id_N, row_NX in reader.scan():
                undisturbed.raise_interrupt()
                row_NW = np.empty((len(id_N), self.layout.row_width), np.float32)
                row_NW[:, :begin] = row_NX
                row_NW[:, begin:] = self._new_rows.state
                self._table.put(table_N, id_N, row_NW)

    @_in_turn
    def delete_snapshot(self, name: str) -> None:
        """Forget a snapshot and free what only it held."""
        self._need_table().delete_snapshot(name)

    def snapshots(self) -> list[str]:
        """Names of the finished snapshots in the path, oldest first."""
        if self._table is not None:
            return [info.name for info in self._table.snapshots()]
        return [info.name for info in read_snapshot_info(self.plan.persistent_path)]

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
            info = read_snapshot_info(self.plan.persistent_path, name)
        except SnapshotNotFoundError as error:
            raise SnapshotNotFoundError(f"{named_by} names a snapshot that is not there: {error}") from error
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError(
                f"{named_by} names the snapshot {name!r} with identity {identity}; the one of that name in"
                f" {self.plan.persistent_path} is another run's: {info}. Use the persistent_path of the run that saved"
                f" {named_by}"
            )

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless `load_snapshot` would find this snapshot, and rows in it that fit."""
        self._check_snapshot(name, read_snapshot_info(self.plan.persistent_path, name))

    def _need_table(self) -> PersistentTable:
        if self._table is None:
            self._build(None, self._new_rows.state)
        assert self._table is not None
        return self._table

    # ---- the rest -------------------------------------------------------------------------------------------------

    @_between_steps
    def clear(self) -> None:
        """Forget every row; snapshots stay. Mends a broken store."""
        with self.turns:
            self._check_process()
            self._check_open()
            self._mend()
            if self.built:
                self._tiers[0].clear()
            self.generation += 1
            self.changes += 1
            self.step = 0

    @_reading
    def stats(self) -> dict[str, Any]:
        """Sizes now and counters since the store was built, a dict a tier."""
        stats: dict[str, Any] = {"rows": len(self._tiers[0]) if self.built else 0, "step": self.step}
        stats.update((tier.name, tier.stats()) for tier in self._tiers)
        if self._table is not None:
            stats["persistent"] = self._table.stats()
        return stats

    @_between_steps
    def close(self) -> None:
        """Free memory, files and the path's lock. Rows that no snapshot holds are gone."""
        with self.turns:
            self._closed = True
            if self.built:
                self._dismantle()
            if not self.turns.forked:
                self.threads.close()

    def _mend(self) -> bool:
        """Let a broken store have no rows, and be sound. Returns whether it was broken."""
        broken = self.turns.broken or self._table is not None and self._table.broken
        if broken:
            if self.built:
                self._dismantle()
            self._prefetched.clear()
            self.turns.mended()
        return broken

    def _check_process(self) -> None:
        if self.turns.forked:
            self.turns.check(changes=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the embedding on {self.plan.persistent_path} is closed; make it again to go on")

    def _dismantle(self) -> None:
        tiers, table = self._tiers, self._table
        assert table is not None
        self._tiers, self._table = [], None
        self.generation += 1
        for tier in tiers:
            tier.close()
        table.close()
        self._finalizer.detach()


def _close_dropped(table: PersistentTable) -> None:
    """Close the table of a store that nobody has any more. The garbage collector may ask for it on any thread."""
    if threading.current_thread().name.startswith("oneemb-"):  # Which close may have to wait for.
        threading.Thread(target=table.close, name="close").start()
        return
    try:
        table.close()
    except KeyboardInterrupt:  # Python drops what is raised here: it comes again, a moment later.
        threading.Timer(0.01, _thread.interrupt_main).start()


def _read_through(path: str, name: str) -> None:
    """Raise what reading all rows of a snapshot raises."""
    with SnapshotReader.open(path, name) as reader:
        for _ in reader.scan():
            undisturbed.raise_interrupt()


def _check_writable(path: str) -> None:
    try:
        LocalFileSystem().make_directories(path)
    except OSError as error:
        raise StorageError(
            f"persistent_path {path} cannot be made: {error.strerror}; give a folder that can"
        ) from error
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"persistent_path {path} cannot be written to; give a folder that can, or change its mode")
