"""Exchange of rows of replicated tables: a snapshot holds each row once, and a load gives every rank a copy."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from oneemb.graph.ranks import AnyRanks
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.replicas import TableIds
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.store_rows import set_rows

# Largest size of one exchange of rows of replicated tables, in bytes and in rows of each rank.
_SPREAD_BYTES, _SPREAD_ROWS = 64 << 20, 1 << 16


class RankReplicas:
    """Sends rows of replicated tables between the ranks, each of which has a copy of every such row."""

    def __init__(self, store: EmbeddingStore, ranks: AnyRanks):
        self._store, self._ranks = store, ranks

    def check(self, what: str, snapshot: PartedSnapshot, rows: int) -> TableIds | None:
        """Keys of replicated tables in a snapshot that this rank owns; None = the embedding has no replicated tables.
        Raises on all ranks if one rank has no room for the copies. `rows`: number of all rows of the snapshot that this
        rank owns."""
        replicas = self._store.replicas
        if not replicas:
            return None

        found: list[TableIds] = []

        def look() -> int:
            with owned_rows(snapshot, self._ranks.rank, self._ranks.size, LocalFileSystem()) as owned:
                found.append(owned.keys(replicas.are_of))
            return len(found[0][1])

        count_R = self._ranks.all_gather(what, look)
        total, others = sum(count_R), sum(count_R) - count_R[self._ranks.rank]
        self._ranks.agree(what, lambda: self._store.replicas.check_fits(snapshot.info, rows, others, total))
        return found[0]

    def spread(self, what: str, own: TableIds, put: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> None:
        """Send the rows with the keys `own` to all other ranks, and call `put` with the tables, ids and rows from each
        other rank."""
        store, (table_N, id_N) = self._store, own
        batch = max(1, min(_SPREAD_BYTES // store.format.row_bytes // self._ranks.size, _SPREAD_ROWS))

        def spread(u: slice) -> None:
            of_all = self._ranks.all_gather(
                what, lambda: (table_N[u], id_N[u], store.replicas.rows_of(table_N[u], id_N[u]))
            )
            self._ranks.agree(what, lambda: put_all(of_all))

        def put_all(of_all: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
            for rank, rows in enumerate(of_all):
                if rank != self._ranks.rank and len(rows[1]):
                    put(*rows)

        for begin in range(0, max(self._ranks.all_gather(what, lambda: len(id_N))), batch):
            spread(slice(begin, begin + batch))

    def even_out(self, what: str) -> None:
        """Overwrite all copies of rows of replicated tables by the owner's row, and report the changes to watchers.
        Call it by `together`. If it fails, the rows are lost on every rank, and later calls raise."""
        store = self._store
        if not store.replicas:
            return

        def put(table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
            # At most half of the cache at once, since accumulated gradients may pin other rows.
            most = max(1, store.stats()["device"]["slots"] // 2)
            for begin in range(0, len(id_U), most):
                u = slice(begin, begin + most)
                set_rows(store, table_U[u], id_U[u], row_UW[u])

        try:
            self._ranks.agree(what, store.build)
            self.bring_new(what)
            self.spread(what, store.replicas.keys(own=True), put)
        except BaseException as error:
            self._store.store_lock.cut_short(error)
            raise

    def bring_new(self, what: str) -> None:
        """Send the keys of replicated tables whose rows this rank's lookups have initialized to the owners, which
        initialize the same rows."""
        store = self._store
        if self._ranks.alone or not store.replicas:
            return

        def blocks() -> list[list[torch.Tensor]]:
            keys = store.replicas.keys(own=False)
            table_N, id_N, owner_N = (torch.from_numpy(column) for column in (*keys, owner_of(*keys, self._ranks.size)))
            owned_R = [owner_N == owner for owner in range(self._ranks.size)]
            return [[owned_N.sum().reshape(1), id_N[owned_N], table_N[owned_N]] for owned_N in owned_R]

        received = self._ranks.exchange(what, blocks)

        def begin() -> None:
            for block in received:
                count = int(block.take(1, torch.int64))
                id_U, table_U = block.take(count, torch.int64), block.take(count, torch.int32)
                store.replicas.begin(table_U.numpy(), id_U.numpy())

        self._ranks.agree(what, begin)
