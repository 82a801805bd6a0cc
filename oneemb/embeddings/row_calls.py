"""Calls on rows by id: erase rows, evict expired rows, read and set scores. Ranks make each call together.

Each rank passes its own ids, and the owner of a row carries out the call on it.
"""

from collections import Counter
from typing import Any, cast

import numpy as np
import torch

from oneemb.graph.arguments import Lookup
from oneemb.graph.build_error import warn_user
from oneemb.graph.ops.keys import check_dtype
from oneemb.graph.ops.lookup import free_failed_passes
from oneemb.graph.ranks import AnyRanks, read_together, together
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.policies.evictions import RowsToEvict
from oneemb.storage.policies.row_policy import GivenScore, RowPolicy
from oneemb.storage.store_rows import check_free, contains_rows, erase_rows, visit_rows


class RowCalls(torch.nn.Module):
    """Part of an embedding: the calls on rows by id."""

    name: str
    store: EmbeddingStore
    key_type: torch.dtype
    num_tables: int
    policies: tuple[RowPolicy, ...] | None
    ranks: AnyRanks
    lookups: Any
    """Object that makes lookups. lookups.py, which has its classes, imports this module."""
    warns_of_growth = True
    """Whether the warning of `look_up_without_gradient` is still to be given."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all tables; with `process_group` of this rank, as `stats()["rows"]`. Raises StorageError if
        the embedding is closed or broken."""
        self.store.check_open()
        rows: int = self.store.stats()["rows"]
        return rows

    def __len__(self) -> int:
        return self.num_rows

    def __bool__(self) -> bool:
        return True  # An embedding without rows is an embedding.

    def contains(self, ids: torch.Tensor, table: int = 0) -> torch.Tensor:
        """Whether each id has a row: bool of the shape of `ids`, on the CPU. No row is read or inserted.

        With `process_group` every rank makes the call, each with its own ids.

        Args:
            ids: integers of `key_type`, any shape.
            table: number of the ids' table.

        Raises:
            TypeError, ValueError: ids or table are not as above.
        """
        what = f"ask for rows of {self.name!r}"

        def ask() -> list[list[np.ndarray]]:
            named_R = self.ranks.all_gather(what, lambda: self._named(ids, table))
            return self.ranks.all_gather(what, lambda: [contains_rows(self.store, *named) for named in named_R])

        of_owners = read_together(self.ranks, [self.store], "contains", what, ask)
        found_N = np.logical_or.reduce([found_R[self.ranks.rank] for found_R in of_owners])
        return torch.from_numpy(found_N).view(ids.shape)

    def look_up_without_gradient(self, lookup: Lookup) -> torch.Tensor:
        """The rows of a lookup in training mode that has no gradient. Warns, once, if it has inserted rows under
        `torch.no_grad()`, as an evaluation would that forgets `eval()`."""
        warns = self.warns_of_growth and not torch.is_grad_enabled() and self.store.built
        before = len(self.store.rows) if warns else 0
        rows = cast(torch.Tensor, self.lookups.look_up(self, lookup, True, False))
        if warns and (grown := len(self.store.rows) - before) > 0:
            self.warns_of_growth = False
            warn_user(
                f"embedding {self.name!r} is in training mode, so a lookup under torch.no_grad() has inserted {grown:,}"
                " new ids; to evaluate, call model.eval() before and model.train() after. This warning comes once"
            )
        return rows

    def _check_table(self, table: object) -> None:
        is_number = isinstance(table, int | np.integer) and not isinstance(table, bool)
        if not is_number or not 0 <= table < self.num_tables:  # type: ignore[operator]  # a number: see above
            raise ValueError(f"table must be an int from 0 to {self.num_tables - 1}, got {table!r}")

    def ids(self, table: int = 0) -> torch.Tensor:
        """Ids of a table's rows: int64 [rows], ascending. With `process_group`, ids of the rows that this rank owns; a
        rank may make the call alone. The call reads rows on a disk or server. A forked child cannot make it for an SSD
        store.

        Raises:
            ValueError: there is no such table.
        """
        self._check_table(table)
        found = [np.empty(0, np.int64)]

        def note(table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
            counted_N = self.store.replicas.are_counted(table_N, id_N)
            found.append(id_N[(table_N == table) & counted_N])

        visit_rows(self.store, note)
        return torch.from_numpy(np.sort(np.concatenate(found)))

    def erase(self, ids: torch.Tensor, table: int = 0) -> int:
        """Forget the rows of ids, weights and optimizer state. If an id is looked up again, its row is initialized
        anew. Snapshots keep their rows.

        With `process_group` every rank makes the call, each with its own ids; ids from all ranks are erased.

        Args:
            ids: integers of `key_type`, any shape. Ids may repeat, and may have no row.
            table: number of the ids' table.

        Returns:
            Number of rows erased on all ranks together.

        Raises:
            TypeError, ValueError: ids or table are not as above.
            StorageError: a lookup that waits for its step holds one of the rows; nothing has changed.
        """
        what = f"erase rows of {self.name!r}"
        return together(self.ranks, [self.store], "erase", what, lambda: self._erase_named(what, ids, table))

    def _erase_named(self, what: str, ids: torch.Tensor, table: int) -> int:
        free_failed_passes(self.store)  # Failed backward passes must not hold rows.
        of_ranks = self.ranks.all_gather(what, lambda: self._named(ids, table))
        table_N, id_N = (np.concatenate(column) for column in zip(*of_ranks, strict=True))
        order_N = np.lexsort((id_N, table_N))
        table_N, id_N = table_N[order_N], id_N[order_N]
        first_N = np.append(True, (table_N[1:] != table_N[:-1]) | (id_N[1:] != id_N[:-1]))[: len(id_N)]
        table_U, id_U = table_N[first_N], id_N[first_N]
        self.ranks.agree(what, lambda: check_free(self.store, table_U, id_U))  # If one rank refuses, none erases.
        return sum(self.ranks.all_gather(what, lambda: self._erase(table_U, id_U)))

    def _erase(self, table_U: np.ndarray, id_U: np.ndarray) -> int:
        """Erase this rank's rows of the keys. Returns their number; a copy of a row counts only on its owner."""
        erased_U = erase_rows(self.store, table_U, id_U)
        for reference in list(self.store.watchers.values()):
            if (watcher := reference()) is not None:
                watcher.erase(table_U, id_U)
        counted_U = self.store.replicas.are_counted(table_U[erased_U], id_U[erased_U])
        return int(np.count_nonzero(counted_U))

    def evict(self) -> dict[str, int]:
        """Evict all rows that have expired by the age, norm or `expire_where` of the tables' policies. With
        `process_group` every rank makes the call.

        Returns:
            {reason: number of rows on all ranks together}, with the reasons "expired", "norm", "where", and "capacity"
            for tables that were loaded with more rows than their capacity.

        Raises:
            ValueError: `expire_where` or a clock raises, or returns a wrong result. On this rank no row is evicted.
        """
        what, left = f"evict rows of {self.name!r}", Counter[str]()

        def evict() -> list[dict[str, int]]:
            if self.ranks.alone:  # One call holds the store lock, so no other thread uses a row before its eviction.
                return [self.store.policy.evict()]
            to_evict: list[RowsToEvict] = []  # chosen on all ranks before any rank evicts
            self.ranks.agree(what, lambda: to_evict.extend(self.store.policy.to_evict()))
            return self.ranks.all_gather(what, lambda: self.store.policy.evict(to_evict))

        for counts in together(self.ranks, [self.store], "evict", what, evict):
            left.update(counts)
        return dict(left)

    def scores(self, ids: torch.Tensor, table: int = 0) -> torch.Tensor:
        """Score of each id's row, uint64 of the shape of `ids`; 0 = no row. Rows with the lowest score are evicted
        first.

        The policy defines the score: for `LRU` the number of the row's last lookup, for `StepLRU` of its last step, for
        `LFU` the number of uses (with a half-life the bits of a float64, log2(uses) + step / half_life), for `MixedLFU`
        the power and the step, for `EpochLRU` and `EpochLFU` the epoch with the lookup or the uses, for `GivenScore`
        the given score. With `process_group` every rank makes the call, each with its own ids.

        Raises:
            TypeError, ValueError: ids or table are not as for `erase`, or there is no policy.
        """
        what = f"read scores of {self.name!r}"

        def ask() -> tuple[list[list[np.ndarray]], int]:
            named_R = self.ranks.all_gather(what, lambda: self._named(ids, table))
            found = self.ranks.all_gather(what, lambda: [self.store.policy.scores(*named)[0] for named in named_R])
            return found, len(named_R[self.ranks.rank][1])

        of_owners, count = read_together(self.ranks, [self.store], "scores", what, ask)
        score_N = np.zeros(count, np.uint64)
        for scores_R in of_owners:  # A rank that does not own the row gives 0.
            score_N |= scores_R[self.ranks.rank]
        return torch.from_numpy(score_N).view(ids.shape)

    def set_scores(self, ids: torch.Tensor, scores: torch.Tensor, table: int = 0) -> int:
        """Set the scores of rows. The next use of a row changes its score by the rule of the policy. With
        `GivenScore(on_use=False)` uses change no score, so it stays until the next `set_scores`.

        With `process_group` every rank makes the call, each with its own ids, perhaps none.

        Args:
            ids: integers of `key_type`, any shape, distinct over all ranks. Ids without a row are ignored.
            scores: uint64, or int64 of at least 0, of the shape of `ids`.
            table: number of the ids' table.

        Returns:
            Number of the ids of all ranks together that have a row; the same on every rank.

        Raises:
            TypeError, ValueError: `scores` is not as above, ids repeat, or there is no policy.
            StoreFullError: the rows do not fit in the hot tier at the same time.
        """
        what = f"set scores of {self.name!r}"
        return together(
            self.ranks, [self.store], "set_scores", what, lambda: self._set_scores(what, ids, scores, table)
        )  # fmt: skip

    def _set_scores(self, what: str, ids: torch.Tensor, scores: torch.Tensor, table: int) -> int:
        of_ranks = self.ranks.all_gather(what, lambda: self._named_scores(ids, scores, table))
        table_N, id_N, score_N = (np.concatenate(column) for column in zip(*of_ranks, strict=True))
        if len(np.unique(np.rec.fromarrays([table_N, id_N]))) < len(id_N):
            raise ValueError("ids must be distinct, so that each id has one score, but some ids repeat")
        # All owners check their scores before any score is set.
        self.ranks.agree(what, lambda: self.store.policy.check_scores(table_N, id_N, score_N))
        return sum(self.ranks.all_gather(what, lambda: self.store.policy.set_scores(table_N, id_N, score_N)))

    def _named_scores(
        self, ids: torch.Tensor, scores: torch.Tensor, table: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table_N, id_N = self._named(ids, table)
        if scores.shape != ids.shape or scores.dtype not in (torch.uint64, torch.int64):
            raise TypeError(
                f"scores must be uint64 or int64 of the shape of ids, {list(ids.shape)}, got {scores.dtype}"
                f" {list(scores.shape)}"
            )
        score_N = scores.detach().cpu().reshape(-1).numpy()
        if scores.dtype == torch.int64 and (score_N < 0).any():
            raise ValueError(f"scores must be 0 or more, got {int(score_N.min())}")
        return table_N, id_N, score_N.astype(np.uint64)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of further uses, for `EpochLRU` and `EpochLFU`. Snapshots keep the epoch. With `process_group`
        every rank makes the call, with the same epoch.

        Args:
            epoch: from the current epoch to 2^32 - 1. A new embedding is at epoch 0.

        Raises:
            TypeError, ValueError: `epoch` is not as above, or there is no policy.
        """
        what = f"set the epoch of {self.name!r}"

        def set_it() -> None:
            of_ranks = self.ranks.all_gather(what, lambda: epoch)
            if any(of_rank != epoch for of_rank in of_ranks):
                raise ValueError(f"epoch must be the same on all ranks, got {of_ranks}")
            self.ranks.agree(what, lambda: self.store.policy.set_epoch(epoch))

        together(self.ranks, [self.store], "set_epoch", what, set_it)

    def give_score(self, score: int, table: int = 0) -> None:
        """Set the score that further lookups give to rows of a table: to used rows if its policy is
        `GivenScore(on_use=True)`, only to new rows if it is `GivenScore()`. With `process_group` every rank makes the
        call.

        Args:
            score: 0 to 2^64 - 1. Snapshots hold the scores of rows, but not this score.
            table: number of the table.

        Raises:
            TypeError, ValueError: `score` is not as above, or the table has another policy.
        """
        policy = None if self.policies is None or not 0 <= table < self.num_tables else self.policies[table]
        if policy is None or not isinstance(policy.evict, GivenScore):
            raise ValueError(f"table {table} must have a policy with evict=GivenScore(...), got {policy}")
        self.store.policy.give_score(table, GivenScore(score).new)

    def _named(self, ids: torch.Tensor, table: int) -> tuple[np.ndarray, np.ndarray]:
        """(tables, int32 [N]; ids, int64 [N]) of the ids that this rank passes."""
        check_dtype(ids, self.key_type)
        self._check_table(table)
        id_N = ids.detach().cpu().reshape(-1).to(torch.int64).numpy()
        return np.full(len(id_N), table, np.int32), id_N
