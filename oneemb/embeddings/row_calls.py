"""Calls about rows by id: erase some, let those leave that have expired, give scores. Ranks make each together.

Each rank names ids of its own, and each of them is dealt with by the rank that owns its row.
"""

from collections import Counter

import numpy as np
import torch

from oneemb.embeddings.rank_calls import RankCalls
from oneemb.graph.ops.lookup import free_failed_passes
from oneemb.graph.ranks import Ranks
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.policies.ledger import Departing

__all__ = ["RowCalls"]


class RowCalls:
    """Makes the calls; see `TableEmbedding`, whose methods these are.

    Args:
        name: of the embedding, in errors.
        store: the rows of this rank.
        ranks: None = this process has all rows.
        key_type: torch.int64 or int32, of ids.
        num_tables: how many there are.
    """

    def __init__(self, name: str, store: EmbeddingStore, ranks: Ranks | None, key_type: torch.dtype, num_tables: int):
        self._name, self._store = name, store
        self._calls = RankCalls(ranks, [store])
        self._key_type, self._num_tables = key_type, num_tables

    def erase(self, ids: torch.Tensor, table: int) -> int:
        """See `TableEmbedding.erase`."""
        what = f"erase rows of {self._name!r}"
        return self._calls.together("erase", what, lambda: self._erase_named(what, ids, table))

    def _erase_named(self, what: str, ids: torch.Tensor, table: int) -> int:
        free_failed_passes(self._store)  # Rows that nobody will train are in use by no lookup.
        table_N, id_N = self._named_by_ranks(what, ids, table)
        order_N = np.lexsort((id_N, table_N))
        table_N, id_N = table_N[order_N], id_N[order_N]
        first_N = np.append(True, (table_N[1:] != table_N[:-1]) | (id_N[1:] != id_N[:-1]))[: len(id_N)]
        table_U, id_U = table_N[first_N], id_N[first_N]
        if not self._calls.alone:  # On none of them, if one refuses.
            self._calls.agree(what, lambda: self._store.check_free(table_U, id_U))
        return sum(self._calls.all_gather(what, lambda: self._erase(table_U, id_U)))

    def _erase(self, table_U: np.ndarray, id_U: np.ndarray) -> int:
        """Erase those that are here. Returns how many there were of which no other rank has copies that count."""
        erased_U = self._store.erase(table_U, id_U)
        for watcher in list(self._store.watchers):
            watcher.erase(table_U, id_U)
        counted_U = self._store.replicas.are_counted(table_U[erased_U], id_U[erased_U])
        return int(np.count_nonzero(counted_U))

    def evict(self) -> dict[str, int]:
        """See `TableEmbedding.evict`."""
        what, left = f"evict rows of {self._name!r}", Counter[str]()

        def evict() -> list[dict[str, int]]:
            if self._calls.alone:  # In one turn: another thread's lookup may not use a row between choice and leave.
                return [self._store.evict()]
            departing: list[Departing] = []  # On none of them, if one fails to say what leaves.
            self._calls.agree(what, lambda: departing.extend(self._store.departing()))
            return self._calls.all_gather(what, lambda: self._store.evict(departing))

        for its in self._calls.together("evict", what, evict):
            left.update(its)
        return dict(left)

    def scores(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """See `TableEmbedding.scores`."""
        what = f"read scores of {self._name!r}"
        if self._calls.alone:
            return torch.from_numpy(self._store.scores(*self._named(ids, table))[0]).view(ids.shape)

        def ask() -> tuple[list[list[np.ndarray]], int]:
            named_R = self._calls.all_gather(what, lambda: self._named(ids, table))
            found = self._calls.all_gather(what, lambda: [self._store.scores(*named)[0] for named in named_R])
            return found, len(named_R[self._calls.rank][1])

        of_owners, count = self._calls.together("scores", what, ask)
        score_N = np.zeros(count, np.uint64)
        for scores_R in of_owners:  # A rank that does not own a row says 0.
            score_N |= scores_R[self._calls.rank]
        return torch.from_numpy(score_N).view(ids.shape)

    def set_scores(self, ids: torch.Tensor, scores: torch.Tensor, table: int) -> int:
        """See `TableEmbedding.set_scores`."""
        what = f"set scores of {self._name!r}"
        return self._calls.together("set_scores", what, lambda: self._set_scores(what, ids, scores, table))

    def _set_scores(self, what: str, ids: torch.Tensor, scores: torch.Tensor, table: int) -> int:
        of_ranks = self._calls.all_gather(what, lambda: self._named_scores(ids, scores, table))
        table_N, id_N, score_N = (np.concatenate(column) for column in zip(*of_ranks, strict=True))
        if len(np.unique(np.rec.fromarrays([table_N, id_N]))) < len(id_N):
            raise ValueError("ids must be there once each, so that it is clear which score each has; some repeat")
        # Each owner's share: a score that is none of its table's rule is refused before any is set.
        if not self._calls.alone:
            self._calls.agree(what, lambda: self._store.check_scores(table_N, id_N, score_N))
        return sum(self._calls.all_gather(what, lambda: self._store.set_scores(table_N, id_N, score_N)))

    def _named_scores(
        self, ids: torch.Tensor, scores: torch.Tensor, table: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table_N, id_N = self._named(ids, table)
        if scores.shape != ids.shape or scores.dtype not in (torch.uint64, torch.int64):
            raise TypeError(
                f"scores must be uint64 or int64 {list(ids.shape)}, as the ids, got {scores.dtype} {list(scores.shape)}"
            )
        score_N = scores.detach().cpu().reshape(-1).numpy()
        if scores.dtype == torch.int64 and (score_N < 0).any():
            raise ValueError(f"scores must be 0 or more, got {int(score_N.min())}")
        return table_N, id_N, score_N.astype(np.uint64)

    def set_epoch(self, epoch: int) -> None:
        """See `TableEmbedding.set_epoch`."""
        what = f"set the epoch of {self._name!r}"

        def set_it() -> None:
            of_ranks = self._calls.all_gather(what, lambda: epoch)
            if any(its != epoch for its in of_ranks):
                raise ValueError(f"an epoch is the same for all ranks, got {of_ranks}")
            self._calls.agree(what, lambda: self._store.set_epoch(epoch))

        self._calls.together("set_epoch", what, set_it)

    def _named_by_ranks(self, what: str, ids: torch.Tensor, table: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys that any rank names."""
        table_N, id_N = zip(*self._calls.all_gather(what, lambda: self._named(ids, table)), strict=True)
        return np.concatenate(table_N), np.concatenate(id_N)

    def _named(self, ids: torch.Tensor, table: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [N] and int64 [N]."""
        if not isinstance(ids, torch.Tensor) or ids.dtype != self._key_type:
            got = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"ids must be {self._key_type}, got {got}")
        if type(table) is not int or not 0 <= table < self._num_tables:
            raise ValueError(f"table must be an int from 0 to {self._num_tables - 1}, got {table!r}")
        id_N = ids.detach().cpu().reshape(-1).to(torch.int64).numpy()
        return np.full(len(id_N), table, np.int32), id_N
