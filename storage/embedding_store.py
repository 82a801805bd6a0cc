"""All rows of one embedding: its tiers stacked, new rows begun, snapshots saved and loaded.

    device store     hot tier (all rows)   ->  persistent table (snapshots)
    cached host      hot tier (cache)      ->  host tier (all rows)  ->  persistent table (snapshots)
    cached SSD       hot tier (cache)     [->  host tier (cache)]    ->  persistent table (all rows)

Invariants:
- the rows known, their values and the snapshots do not depend on which of the three it is, nor on any budget;
- a snapshot holds every row as it was at the call, the number of steps taken and what the rows mean;
- `generation` changes whenever slots handed out before mean nothing any more;
- any thread may call a store. `stage`, which runs ahead of the training loop, changes nothing that anyone can see: not
  the rows known, their values or the count of changes; and rows it holds give way to a step that needs their slots.

Turns: tiers are searched, filled and evicted from in a turn (storage/turns.py), and a `stage` gives way to whoever
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneemb.kernels.init_rows import InitialRows, init_rows
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import OtherSnapshotError, SnapshotNotFoundError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.hot_tier import SLOT_OVERHEAD_BYTES, HotTier
from oneemb.storage.persistent_table import PersistentTable
from oneemb.storage.row_layout import RowLayout
from oneemb.storage.row_store import RowStore, StorageError, StoreFullError
from oneemb.storage.snapshot_file import SnapshotInfo
from oneemb.storage.snapshot_reader import SnapshotReader, read_snapshot_info
from oneemb.storage.snapshot_rows import SnapshotRows, shard_of
from oneemb.storage.step_lock import StepLock, alone, between_steps
from oneemb.storage.turns import Turns, undisturbed

if TYPE_CHECKING:
    from oneemb.kernels.launch import Gpu

__all__ = ["EXPORTED", "EmbeddingStore", "Pins", "Staged", "StorePlan"]

# Of the machine's memory, what a store without a capacity may come to use.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class StorePlan:
    """Which tiers there are and how large.

    Args:
        persistent_path: folder of the persistent table.
        cache_bytes: budget of the hot tier; None = it holds all rows.
        host_bytes: budget of a host tier under the hot tier; 0 = no host tier, None = it holds all rows.
        capacity: rows in all at most; None = no limit but the memory's.
        physical_block_size: 512 or 4096.
        cache_policy: which rows caches evict first, "lru" or "lfu"; oneemb.storage.hot_tier says what they mean.
    """

    persistent_path: str
    cache_bytes: int | None
    host_bytes: int | None
    capacity: int | None
    physical_block_size: int
    cache_policy: str = "lfu"


_MEND = "the embedding's load_snapshot(name) goes on from one, its clear() from none"

# Holds the rows of a store that is made anew for rows of another width, while it is.
_REBUILD = "rows-on-their-way-to-another-width"

# How the name begins of the snapshot that holds the rows of an embedding on their way to a file.
EXPORTED = "rows-on-their-way-to-a-file-"

# How long a stage gives way to those who wait at most, in naps of 20 microseconds: they take turns by then.
_NAPS_MAX = 500

# Rows read ahead at a time, before others may have their turn: enough to keep a disk busy, some 50 ms of its reads.
_STAGE_CHUNK = 4096


@dataclass(eq=False)
class Staged:
    """Rows of a coming lookup that are in the hot tier and pinned, until its `admit` takes them over."""

    store: "EmbeddingStore"
    slot_U: Any
    """int64 [U]: -1 for a row that is not there yet."""
    generation: int
    held: bool = True
    """Whether the pins are still there."""
    keys: Any = None
    """On a GPU, the keys, cut to as many as there are."""
    missing: int = 0
    """On a GPU, how many are not there yet."""


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
        """Those of lookups that were dropped unfinished; `admit` releases them."""
        self.turns = Turns(f"the embedding on {plan.persistent_path}", _MEND, rank=0)
        self.step_lock = StepLock()
        """Held by steps, and by whoever takes all rows as they are or puts others in their place; before any turn."""
        self.writing = threading.Lock()
        """Held while rows are written in place, or read without a pin; after any turn."""
        self._pins: dict[int, Pins] = {}
        self._initial = initial
        self._state = np.empty(0, np.float32)
        self.gpu: Gpu | None = None
        """Where the hot tier is and kernels run; None = on the host. Keys and slots are then tensors there."""
        self._tiers: list[Any] = []
        self._table: PersistentTable | None = None
        self._closed = self._opened_before = False
        self._staged: set[Staged] = set()
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
                self._state, self.optimizer = state, optimizer
                return
            if self.layout.state_width and len(self._tiers[0]) or self.step:
                raise StorageError(
                    f"the rows hold the state of {self.optimizer!r} ({self.layout.state_width} values a row), the"
                    f" optimizer attached is {optimizer!r} ({len(state)} values); attach {self.optimizer!r}, or"
                    " start from another path"
                )
            # Rows that no optimizer has touched keep their weights and are given its state.
            self._make_anew(optimizer, state, self.gpu)
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
            tiers = self._make_tiers(layout, table)
            for info in () if self._opened_before else table.snapshots():
                if info.name.startswith(EXPORTED):  # Whoever wrote that file is dead.
                    with suppress(StorageError):
                        table.delete_snapshot(info.name)
            self._opened_before = True
        except BaseException:
            table.close()
            raise
        self._tiers, self._table, self.layout, self._state, self.optimizer = tiers, table, layout, state, optimizer
        # A store that is dropped gives back its threads, files and lock. At exit the system does.
        self._finalizer = weakref.finalize(self, _close_dropped, table)
        self._finalizer.atexit = False

    @_between_steps
    @_in_turn
    def move_to(self, gpu: "Gpu | None") -> None:
        """Let the hot tier be on a GPU, or on the host; rows and steps go along.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way.
        """
        if gpu is self.gpu or (gpu is not None and self.gpu is not None and gpu.device == self.gpu.device):
            return
        self._check_open()
        if not self.built:
            self.gpu = gpu
            return
        self._make_anew(self.optimizer, self._state, gpu)

    def _make_anew(self, optimizer: str | None, state: np.ndarray, gpu: "Gpu | None") -> None:
        """Make the tiers of rows with this state, there, and bring the rows along; what fails leaves them as they were.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way.
        """
        before = self.optimizer, self._state, self.gpu
        rows = len(self._tiers[0])
        if rows:
            self._check_room(rows, RowLayout(self.layout.dim, self.layout.dtype, len(state)), gpu)
            self.save_snapshot(_REBUILD, {}, overwrite=True)
        try:
            self._dismantle()
            try:
                self._build_and_load(optimizer, state, gpu, rows)
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

    def _build_and_load(self, optimizer: str | None, state: np.ndarray, gpu: "Gpu | None", rows: int) -> None:
        self.gpu = gpu
        self._build(optimizer, state)
        if rows:
            self.load_snapshot(_REBUILD)

    def _check_room(self, rows: int, layout: RowLayout, gpu: "Gpu | None") -> None:
        """Raise StoreFullError if a tier that holds all rows could not hold so many of this layout, on the host."""
        for name, budget_bytes in (("device", self.plan.cache_bytes), ("host", self.plan.host_bytes)):
            slots = self._slots(layout, budget_bytes)
            if budget_bytes is None and not (name == "device" and gpu is not None) and rows > slots:
                raise StoreFullError(
                    f"the {name} tier has room for {slots} rows of {layout.row_bytes} bytes and must hold all of"
                    f" {rows}; they are as they were. Give it more memory or capacity, or an optimizer with less state"
                )

    def _slots(self, layout: RowLayout, budget_bytes: int | None) -> int:
        """Slots of a tier on the host."""
        slot_bytes = layout.row_bytes + SLOT_OVERHEAD_BYTES
        if budget_bytes is not None:
            return max(budget_bytes // slot_bytes, 1)
        slots = int(_memory_bytes() * _MEMORY_SHARE) // slot_bytes
        return max(slots if self.plan.capacity is None else min(slots, self.plan.capacity), 1)

    def _make_tiers(self, layout: RowLayout, table: PersistentTable) -> list[Any]:
        """The tiers from the hot one down."""
        plan = self.plan

        def tier(name: str, budget_bytes: int | None, below: RowStore, row_limit: int | None) -> Any:
            if name == "device" and self.gpu is not None:
                return self._device_tier(layout, self.gpu, below)
            return HotTier(
                name, row_width=layout.row_width, slots=self._slots(layout, budget_bytes), below=below,
                resident=budget_bytes is None, row_limit=row_limit, policy=plan.cache_policy, threads=self.threads,
                writing=self.writing,
            )  # fmt: skip

        below: RowStore = table
        host = []
        if plan.host_bytes != 0:
            host = [tier("host", plan.host_bytes, below, None)]
            below = host[0]
        return [tier("device", plan.cache_bytes, below, plan.capacity), *host]

    def _device_tier(self, layout: RowLayout, gpu: "Gpu", below: RowStore) -> Any:
        """The hot tier on a GPU; None for what it would hold on the host."""
        from oneemb.kernels.init_rows_cuda import DeviceInitialRows
        from oneemb.storage import device_tier

        plan = self.plan
        slot_bytes = -(-layout.row_bytes // 16) * 16 + device_tier.SLOT_OVERHEAD_BYTES
        budget_bytes = plan.cache_bytes
        if budget_bytes is None:
            budget_bytes = int(gpu.free_bytes() * _MEMORY_SHARE)
        slots = max(budget_bytes // slot_bytes, 1)
        if plan.cache_bytes is None and plan.capacity is not None:
            slots = min(slots, plan.capacity)
        self._device_initial = DeviceInitialRows(self._initial, gpu=gpu)
        return device_tier.DeviceTier(
            "device", row_width=layout.row_width, slots=slots, below=below, resident=plan.cache_bytes is None,
            row_limit=plan.capacity, policy=plan.cache_policy, gpu=gpu,
        )  # fmt: skip

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
    def runner(self) -> Any:
        """What kernels on the hot tier's rows run on."""
        return self.threads if self.gpu is None else self.gpu

    def on_tier(self, array: np.ndarray) -> Any:
        """An array where the hot tier is: itself, or a copy on the GPU."""
        return array if self.gpu is None else self.gpu.put(array)

    def admit(self, table_U: np.ndarray, id_U: np.ndarray, staged: Staged | None = None) -> np.ndarray:
        """Make the rows of these keys resident in the hot tier, beginning new ones, and pin each once more.

        Args:
            staged: what `stage` gave for the same keys; its pins are the caller's from here on.

        Returns:
            slot_U, int64 [U]: good until it is released.

        Raises:
            StoreFullError: a tier is too small or capacity is reached; nothing has changed.
        """
        tier = self._tiers[0]

        def rest(slot_U: np.ndarray) -> np.ndarray:
            missing = np.flatnonzero(slot_U < 0)
            slot_U[missing] = tier.admit(table_U[missing], id_U[missing], self._begin_rows)
            return slot_U

        return self._admit(lambda: tier.admit(table_U, id_U, self._begin_rows), rest, staged)

    def admit_on_gpu(self, keys: Any, staged: Staged | None = None) -> tuple[Any, Any]:
        """As `admit`, for `DeviceKeys`. Gives slot_U and the keys, cut to as many as there are."""
        tier = self._tiers[0]

        def rest(slot_U: Any) -> tuple[Any, Any]:
            assert staged is not None
            if staged.missing:
                tier.admit_rest(staged.keys, slot_U, self._begin_rows)
            return slot_U, staged.keys

        return self._admit(lambda: tier.admit_keys(keys, self._begin_rows), rest, staged)

    def _admit(self, plain: Callable[[], Any], rest: Callable[[Any], Any], staged: Staged | None) -> Any:
        """What `plain`, or after staging `rest(slot_U)`, gives."""
        with self.turns:
            self.turns.check(changes=True)
            self._check_open()
            while self.abandoned:
                self.release_pins(self.abandoned.popleft(), dropped=True)
            rows = len(self._tiers[0])
            found = self._admit_staged(plain, rest, staged)
            self.changes += len(self._tiers[0]) > rows
            return found

    def _admit_staged(self, plain: Callable[[], Any], rest: Callable[[Any], Any], staged: Staged | None) -> Any:
        if staged is not None and staged.held and staged.generation == self.generation:
            slot_U, staged.held = staged.slot_U, False
            self._staged.discard(staged)
            try:
                return rest(slot_U)
            except BaseException as error:
                if self.gpu is None:  # the tier on a GPU has done so
                    self.release(slot_U[slot_U >= 0])
                if not isinstance(error, StoreFullError):
                    raise
        try:
            return plain()
        except StoreFullError:
            if not self._staged:
                raise
        for other in list(self._staged):
            self.unstage(other)
        return plain()

    def stage(self, table_U: np.ndarray, id_U: np.ndarray) -> Staged:
        """Read those rows of a coming lookup that are known, and pin them as far as there is room; begin none."""
        staged = Staged(self, np.full(len(id_U), -1, np.int64), self.generation)
        with self.turns:
            self.turns.check(changes=True)
            if not self.built:
                return staged
            staged.generation = self.generation
            staged.slot_U = slot_U = self._tiers[0].pin_resident(table_U, id_U)
            self._staged.add(staged)
        missing = np.flatnonzero(slot_U < 0)

        def bring(some: np.ndarray) -> None:
            # A step may have brought some in since they were looked for.
            slot_U[some] = self._tiers[0].pin_resident(table_U[some], id_U[some])
            some = some[slot_U[some] < 0]
            slot_U[some] = self._tiers[0].bring_known(table_U[some], id_U[some])

        return self._bring_known(staged, missing, bring)

    def stage_on_gpu(self, keys: Any) -> Staged:
        """As `stage`, for `DeviceKeys`, on the current stream: a step on another one waits until it is done."""
        staged = Staged(self, keys.id_U[:0], self.generation)
        with self.turns:
            self.turns.check(changes=True)
            staged.held = self.built
            if not self.built:
                return staged
            staged.generation = self.generation
            try:
                staged.slot_U, staged.keys, staged.missing = self._tiers[0].pin_resident(keys)
            except ValueError:  # what is wrong with the keys is for their admission to say
                staged.held = False
                return staged
            self._staged.add(staged)
        missing = (staged.slot_U < 0).nonzero().reshape(-1) if staged.missing else keys.id_U[:0]

        def bring(some: Any) -> None:
            staged.missing -= self._tiers[0].bring_known(staged.keys, staged.slot_U, some)

        return self._bring_known(staged, missing, bring)

    def _bring_known(self, staged: Staged, missing: Any, bring: Callable[[Any], None]) -> Staged:
        """Let `bring` bring the missing rows, some at a time and in turn with others, as far as there is room."""
        try:
            for begin in range(0, len(missing), _STAGE_CHUNK):
                naps = 0
                while self.turns.waiting and naps < _NAPS_MAX:
                    time.sleep(2e-5)
                    naps += 1
                with self.turns:
                    self.turns.check(changes=True)
                    if not staged.held or staged.generation != self.generation:
                        break
                    bring(missing[begin : begin + _STAGE_CHUNK])
        except StoreFullError:
            pass  # `admit` brings the rest, when those of the batches before have left.
        except BaseException:
            self.unstage(staged)
            raise
        return staged

    def unstage(self, staged: Staged) -> None:
        """Unpin what `stage` pinned, if no `admit` has taken it over."""
        with self.turns:
            if staged.held and staged.generation == self.generation and not self.turns.broken:
                if self.gpu is None:
                    self.release(staged.slot_U[staged.slot_U >= 0])
                else:
                    self._tiers[0].release_staged(staged.slot_U)
            staged.held = False
            self._staged.discard(staged)

    @_between_steps
    @_in_turn
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UX: np.ndarray) -> None:
        """Give keys, known or not, these rows; or the first words of them, before those that they have.

        Raises:
            StoreFullError: a tier is too small for so many rows at a time, or capacity is reached; nothing has changed.
        """
        slot_U = self.admit(self.on_tier(table_U), self.on_tier(id_U))
        try:
            with self.writing:
                self.row_SW[slot_U, : row_UX.shape[1]] = self.on_tier(row_UX)
            self.mark_dirty(slot_U)
        finally:
            self.release(slot_U)

    def release(self, slot_U: np.ndarray) -> None:
        """Unpin slots that `admit` gave, once each."""
        with undisturbed:
            self._tiers[0].release(slot_U)

    def pin_for(self, owner: Any, slot_U: Any) -> Pins:
        """Let an object own the pins of slots that `admit` gave: they are released for it when it is dropped."""
        pins = Pins(owner, self.abandoned.append)
        pins.slot_U, pins.generation = slot_U, self.generation
        self._pins[id(pins)] = pins
        return pins

    def release_pins(self, pins: Pins, *, dropped: bool = False) -> None:
        """Unpin what `pin_for` gave, once, if its slots still mean anything."""
        with undisturbed:
            if self._pins.pop(id(pins), None) is not None and pins.generation == self.generation:
                tier = self._tiers[0]
                # On a GPU, pins of a lookup that was dropped may be of another stream's.
                (tier.release if self.gpu is None or not dropped else tier.release_staged)(pins.slot_U)

    def mark_dirty(self, slot_U: np.ndarray) -> None:
        """Say that the rows in these slots have changed."""
        with undisturbed:
            self._tiers[0].mark_dirty(slot_U)
            self.changes += 1

    @_reading
    def read(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The rows of these keys, the initial row for a key that is not known, which stays unknown: float32 [U, W]."""
        self._check_open()
        row_UW = np.zeros((len(id_U), self.layout.row_width), np.float32)
        missing = np.arange(len(id_U))
        if self.built:
            missing = np.flatnonzero(self._tiers[0].get(table_U, id_U, row_UW))
        self._begin(row_UW, missing, table_U[missing], id_U[missing])
        return row_UW

    @_reading
    def slots_of(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray | None:
        """The slots of rows, for a read in place without a pin: int64 [N], -1 for a key that is not known.

        Keys may be there many times. None where rows move, or are on a GPU: read those of unique keys.
        """
        self._check_open()
        return self._tiers[0].slots_of(table_N, id_N) if self.built and self.gpu is None else None

    @_in_turn
    def read_on_gpu(self, keys: Any) -> tuple[Any, Any]:
        """What `read` gives, for `DeviceKeys`: a tensor on the GPU, float32 [U, at least W]; and the keys cut to U."""
        self._check_open()
        if not self.built:
            self._build(None, np.empty(0, np.float32))
        return self._tiers[0].read(keys, self._begin_on_gpu)

    def _begin_rows(self, slot_M: Any, table_M: Any, id_M: Any) -> None:
        begin = self._begin if self.gpu is None else self._begin_on_gpu
        begin(self.row_SW, slot_M, table_M, id_M)

    def _begin_on_gpu(self, row_SW: Any, slot_M: Any, table_M: Any, id_M: Any) -> None:
        from oneemb.kernels.init_rows_cuda import init_rows_cuda

        assert self.gpu is not None
        init_rows_cuda(
            self.layout.weights(row_SW), row_SW, slot_M, table_M, id_M, self._device_initial,
            self.gpu.put(np.asarray(self._state, np.float32)), state_begin=self.layout.state_begin, gpu=self.gpu,
        )  # fmt: skip

    def _begin(self, row_SW: np.ndarray, slot_M: np.ndarray, table_M: np.ndarray, id_M: np.ndarray) -> None:
        init_rows(
            self.layout.weights(row_SW), row_SW, slot_M, table_M, id_M, self._initial, self._state,
            state_begin=self.layout.state_begin, threads=self.threads,
        )  # fmt: skip

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
            self._build(None, self._state)
        assert self._table is not None
        self._tiers[0].flush()
        rows = SnapshotRows(self.layout, self.optimizer, tuple(self._state.tolist()), self.step)
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
                row_NW[:, begin:] = self._state
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
            self._build(None, self._state)
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
            self._staged.clear()
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


def _memory_bytes() -> int:
    """Memory this process may use: the machine's, or what its control group allows."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def _check_writable(path: str) -> None:
    try:
        LocalFileSystem().make_directories(path)
    except OSError as error:
        raise StorageError(
            f"persistent_path {path} cannot be made: {error.strerror}; give a folder that can"
        ) from error
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"persistent_path {path} cannot be written to; give a folder that can, or change its mode")
