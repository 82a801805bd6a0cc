"""Replicated tables of a store: every one of the owners that have rows together has all rows of such a table.

Snapshots, norms and whatever else counts rows take each of them once, with the owner that `owner_of` names.

Invariants:
- a store's keys of replicated tables are here, all of them and no others;
- a row that a gradient, a load or an import has reached is with every owner, with the same bits; one that a lookup has
  begun may be missing elsewhere, and begins there with the same values, since those depend on seed and key alone.
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
"""Most bytes of the rows of all replicated tables of an embedding on a rank, with optimizer state."""

TableIds = tuple[np.ndarray, np.ndarray]
"""Tables, int32 [N], and ids, int64 [N]."""


class Replicas(StorePart):
    """The rows of replicated tables that a store has, and their keys. False where no table is replicated, as for one
    owner."""

    def __init__(self, store: Store, plan: StorePlan, threads: Threads):
        super().__init__(store)
        tables = plan.replicated if plan.owners > 1 else ()
        self._plan = plan
        self._replicated_T = np.zeros(max(tables, default=-1) + 2, bool)  # The last one stands for all beyond.
        self._replicated_T[list(tables)] = True
        self._index = HashIndex(threads)

    def __bool__(self) -> bool:
        return len(self._replicated_T) > 1

    def __len__(self) -> int:
        return len(self._index)

    def are_of(self, table_N: np.ndarray, id_N: np.ndarray | None = None) -> np.ndarray:
        """Whether each key is one of a replicated table: bool [N]. Ids do not matter."""
        replicated_N: np.ndarray = self._replicated_T.take(table_N, mode="clip")
        return replicated_N

    def are_counted(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Whether each of these keys, whose rows are here, counts here: bool [N]; a replicated one counts with its
        owner only."""
        counted_N = ~self.are_of(table_N)
        shared = np.flatnonzero(~counted_N)
        counted_N[shared] = self._is_own(table_N[shared], id_N[shared])
        return counted_N

    def keys(self, *, own: bool | None = None) -> TableIds:
        """All keys; those that count here; or those that do not."""
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

    # ---- what comes and goes ----------------------------------------------------------------------------------------

    def new(self, table_U: np.ndarray, id_U: np.ndarray, row_bytes: int | None) -> TableIds:
        """The distinct keys that are of replicated tables and not here; memory to `add` them is reserved.
        StoreFullError if their rows, of `row_bytes` each, exceed the limit; None = there is no limit."""
        u = np.flatnonzero(self.are_of(table_U))
        new_U = u[self._index.find(table_U[u], id_U[u]) < 0]
        table_U, id_U = table_U[new_U], id_U[new_U]
        if len(id_U):
            if row_bytes is not None:
                self.check_room(len(self) + len(id_U), row_bytes)
            self._index.reserve_keys(table_U, id_U)
        return table_U, id_U

    def new_of(self, keys: Keys) -> TableIds:
        """Keys of a lookup that `new` gives: they are about to be begun."""
        backend, format = self.rows.backend, self.rows.format
        keys = backend.counted(keys)
        table_U, id_U = (backend.tensor(array).cpu().numpy() for array in (keys.table_U, keys.id_U))
        return self.new(table_U, id_U, format.row_bytes)

    def add(self, keys: TableIds) -> None:
        """Note keys that `new` gave, whose rows are here now."""
        if len(keys[1]):
            self._index.put(*keys, np.zeros(len(keys[1]), np.int64))

    def forget(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Note that these keys, of any tables, have no row any more."""
        if self:
            self._index.erase(table_U, id_U)

    def clear(self) -> None:
        """Forget every key."""
        self._index.clear()

    def check_room(self, rows: int, row_bytes: int) -> None:
        """Raise `StoreFullError` if so many rows in all are more than replicated tables may have."""
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
        """Raise StoreFullError unless there is room for rows of replicated tables, beside those of a snapshot.

        Args:
            rows: rows of the snapshot that this store owns.
            others, replicated: rows of replicated tables that other stores own, and all of them.
        """
        with self.store_lock:
            self._store.check_process()
            formats = self.rows.format, SnapshotRows.of_meta(info.meta, info.name).format
            self.check_room(replicated, max(format.row_bytes for format in formats))
            if self._store.built and not self._store.broken:
                self.rows.hot.check_holds(rows + others)

    @with_store_lock
    def rows_of(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The rows of these keys of replicated tables, which are here: float32 [U, W]."""
        row_UW = np.empty((len(id_U), self.rows.format.row_width), np.float32)
        missing_U = self.rows.hot.get(table_U, id_U, row_UW)
        assert not missing_U.any()
        return row_UW

    @no_step("put_replicas")
    @with_store_lock
    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """Write rows of replicated tables as another owner has loaded them, without the watchers' knowledge. After a
        StoreFullError some may be here."""
        self._put(self.new(table_U, id_U, self.rows.format.row_bytes), table_U, id_U, row_UW)
        self._store.changes += 1

    def _put(self, new: TableIds, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        self.rows.hot.put(table_U, id_U, row_UW)
        with changing:
            self.add(new)

    @no_step("begin_replicas")
    @with_store_lock
    def begin(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Begin those rows of replicated tables that are not here, as lookups elsewhere have: no change of rows. There
        may be more than the limit, since what ranks have begun can be saved. After a StoreFullError some may be
        here."""
        new = self.new(table_U, id_U, None)
        if len(new[1]):
            hot, backend = self.rows.hot, self.rows.backend
            row_UW, _ = hot.read(backend.distinct_keys(backend.put(new[0]), backend.put(new[1])))
            row_UW = backend.tensor(row_UW).cpu().numpy()[:, : self.rows.format.row_width]
            self._put(new, *new, np.ascontiguousarray(row_UW))
