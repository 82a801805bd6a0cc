"""Replicated tables of a store: every rank stores all rows of such a table.

Snapshots, norms and other counts of rows count each replicated row once, on the rank that `owner_of` names.

Invariants:
- `Replicas` holds exactly the keys of replicated tables that the store has;
- a row that a gradient, a load or an import has changed has the same bits on every rank. A row that a lookup has
  initialized may be missing on other ranks, and gets the same values there: they depend on seed and key alone.
"""

import numpy as np

from oneemb.kernels.backend import Keys
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.store_part import Store, StorePart, no_step, with_store_lock
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiers.stack import StorePlan

REPLICATED_BYTES_MAX = 1 << 30
"""Maximum bytes, on each rank, of all replicated rows of an embedding, with optimizer state."""

TableIds = tuple[np.ndarray, np.ndarray]
"""(tables, int32 [N]; ids, int64 [N]) of N keys."""


class Replicas(StorePart):
    """Keys of replicated tables that a store has, and calls on their rows. Its truth value is False if no table is
    replicated or there is one rank only."""

    def __init__(self, store: Store, plan: StorePlan, threads: Threads):
        super().__init__(store)
        tables = plan.replicated if plan.owners > 1 else ()
        self._plan = plan
        self._replicated_T = np.zeros(max(tables, default=-1) + 2, bool)  # The last one stands for all beyond.
        self._replicated_T[list(tables)] = True
        self.any = bool(tables)
        """Whether there are replicated tables: the truth value, which takes less time to read here."""
        self._index = HashIndex(threads)

    def __bool__(self) -> bool:
        return self.any

    def __len__(self) -> int:
        return len(self._index)

    def are_of(self, table_N: np.ndarray, id_N: np.ndarray | None = None) -> np.ndarray:
        """Whether the table of each key is replicated: bool [N]. `id_N` is not read."""
        replicated_N: np.ndarray = self._replicated_T.take(table_N, mode="clip")
        return replicated_N

    def are_counted(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Whether this rank counts each key, whose row it stores: bool [N]. The owner alone counts a replicated key."""
        counted_N = ~self.are_of(table_N)
        shared = np.flatnonzero(~counted_N)
        counted_N[shared] = self._is_own(table_N[shared], id_N[shared])
        return counted_N

    def keys(self, *, own: bool | None = None) -> TableIds:
        """Replicated keys of this store. own: None = all; True = keys that this rank owns; False = keys that other
        ranks own."""
        batches = list(self._index.items())
        if not batches:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        table_N, id_N, _ = (np.concatenate(column) for column in zip(*batches, strict=True))
        if own is None:
            return table_N, id_N
        chosen = np.flatnonzero(self._is_own(table_N, id_N) == own)
        return table_N[chosen], id_N[chosen]

    def _is_own(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        return owner_of(table_N, id_N, self._plan.owners) == self._plan.owner

    # ---- new and erased keys ----------------------------------------------------------------------------------------

    def new(self, table_U: np.ndarray, id_U: np.ndarray, row_bytes: int | None) -> TableIds:
        """Replicated keys among these distinct ones that have no row here; memory for `add` of them is reserved. Raises
        StoreFullError if the rows, of `row_bytes` each, would exceed the limit; row_bytes=None = no limit."""
        u = np.flatnonzero(self.are_of(table_U))
        new_U = u[self._index.find(table_U[u], id_U[u]) < 0]
        table_U, id_U = table_U[new_U], id_U[new_U]
        if len(id_U):
            if row_bytes is not None:
                self.check_room(len(self) + len(id_U), row_bytes)
            self._index.reserve_keys(table_U, id_U)
        return table_U, id_U

    def new_of(self, keys: Keys) -> TableIds:
        """Replicated keys of a lookup that have no row here yet; see `new`."""
        backend, format = self.rows.backend, self.rows.format
        keys = backend.counted(keys)
        table_U, id_U = (backend.tensor(array).cpu().numpy() for array in (keys.table_U, keys.id_U))
        return self.new(table_U, id_U, format.row_bytes)

    def add(self, keys: TableIds) -> None:
        """Add keys that `new` returned, once the store has their rows."""
        if len(keys[1]):
            self._index.put(*keys, np.zeros(len(keys[1]), np.int64))

    def forget(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Remove keys whose rows were erased; keys of tables that are not replicated are ignored."""
        if self:
            self._index.erase(table_U, id_U)

    def clear(self) -> None:
        """Forget every key."""
        self._index.clear()

    def check_room(self, rows: int, row_bytes: int) -> None:
        """Raise `StoreFullError` if `rows`, the total number of replicated rows, exceeds REPLICATED_BYTES_MAX."""
        if rows * row_bytes <= REPLICATED_BYTES_MAX:
            return
        raise StoreFullError(
            f"the replicated tables in {self._plan.persistent_path} have {len(self)} rows and were to have {rows}, of"
            f" {row_bytes} bytes each: {rows * row_bytes} bytes on each of {self._plan.owners} ranks, of which they may"
            f" take {REPLICATED_BYTES_MAX}; save a snapshot, and load it where the largest of these tables are made"
            " without replicate=True, so that each of their rows is with one rank"
        )

    # ---- rows -------------------------------------------------------------------------------------------------------

    @no_step("check_replicas")
    def check_fits(self, info: SnapshotInfo, rows: int, others: int, replicated: int) -> None:
        """Raise StoreFullError unless a snapshot can be loaded: the store has room for its own and all replicated rows.

        Args:
            rows: number of the snapshot's rows that this rank owns.
            others: number of replicated rows that other ranks own.
            replicated: number of all replicated rows.
        """
        with self.store_lock:
            self._store.check_process()
            formats = self.rows.format, SnapshotRows.of_meta(info.meta, info.name).format
            self.check_room(replicated, max(format.row_bytes for format in formats))
            if self._store.built and not self._store.broken:
                self.rows.hot.check_holds(rows + others)

    @with_store_lock
    def rows_of(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Rows of these replicated keys, all of which the store has: float32 [U, W]."""
        row_UW = np.empty((len(id_U), self.rows.format.row_width), np.float32)
        missing_U = self.rows.hot.get(table_U, id_U, row_UW)
        assert not missing_U.any()
        return row_UW

    @no_step("put_replicas")
    @with_store_lock
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """Write replicated rows that another rank has loaded; watchers are not called. After a StoreFullError some rows
        may have been written."""
        self._put(self.new(table_U, id_U, self.rows.format.row_bytes), table_U, id_U, row_UW)
        self._store.changes += 1

    def _put(self, new: TableIds, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self.rows.hot.put(table_U, id_U, row_UW)
        with changing:
            self.add(new)

    @no_step("begin_replicas")
    @with_store_lock
    def begin(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Initialize the replicated rows that lookups on other ranks have initialized and this rank lacks. The limit is
        not checked: rows that exist on a rank must be able to be saved. Does not count as a change. After a
        StoreFullError some rows may have been added."""
        new = self.new(table_U, id_U, None)
        if len(new[1]):
            hot, backend = self.rows.hot, self.rows.backend
            row_UW, _ = hot.read(backend.distinct_keys(backend.put(new[0]), backend.put(new[1])))
            row_UW = backend.tensor(row_UW).cpu().numpy()[:, : self.rows.format.row_width]
            self._put(new, *new, np.ascontiguousarray(row_UW))
