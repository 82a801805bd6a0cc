"""Tables of one embedding with dynamicemb's operations: scores, changed rows, and rows distributed by `dist_type`.

Invariant: where a docstring says that every rank makes the call, ranks make such calls in the same order; an error on
one rank is raised on all, and no row has changed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oneemb.adapters.table_state import read_words
from oneemb.dynamicemb.dynamicemb_config import (
    DynamicEmbCheckMode,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions,
    evicting_strategy,
)
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.foreign.dynamicemb_files import owner_of_key
from oneemb.foreign.dynamicemb_reader import DumpRows
from oneemb.graph import ops
from oneemb.graph.ranks import Received, together
from oneemb.kernels.owner import owner_of
from oneemb.rows.values import state_of, weights_of

__all__ = ["DynamicTables", "NamedTable"]

_ROWS = 65536
"""Largest number of rows that are read, sent or written at a time."""


@dataclass(frozen=True)
class NamedTable:
    """Name and options of a table, and `num_embeddings` of its config, None = no config."""

    name: str
    options: DynamicEmbTableOptions
    num_embeddings: int | None


class DynamicTables:
    """Tables of one embedding, with dynamicemb's operations.

    Args:
        rows: the embedding.
        tables: description of each table; entry t is table number t of `rows`.
        optimizers: optimizer of each table's rows; None = not trained.
    """

    def __init__(
        self, rows: MultiTableEmbedding, tables: Sequence[NamedTable],
        optimizers: Sequence[torch.optim.Optimizer | None],
    ):  # fmt: skip
        self.rows, self.tables, self.optimizers = rows, tuple(tables), list(optimizers)
        self.ranks = rows.ranks
        """Ranks that share the rows."""
        self.score = {
            t: int(evicting_strategy(table.options.score_strategy) in (Score.STEP, Score.LFU))
            for t, table in enumerate(self.tables)
        }
        """{table number: score that the next lookup gives its rows}, for STEP and CUSTOMIZED; 0 = not set by
        `set_score`."""
        self._warned_full = 0

    def together(self, verb: str, what: str, call: Callable[[], object]) -> None:
        """Make a call on all ranks, between two steps; see `oneemb.graph.ranks.together`."""
        together(self.ranks, [self.rows.store], verb, what, call)

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables]

    def index(self, name: str) -> int:
        """Number of the table with this name; ValueError if there is none."""
        if name not in self.names:
            raise ValueError(f"there is no table {name!r}; there are: {', '.join(self.names)}")
        return self.names.index(name)

    def strategy(self, t: int) -> Score:
        """Strategy by which rows of a table are evicted."""
        return evicting_strategy(self.tables[t].options.score_strategy)

    def _goes_by_time(self, t: int) -> bool:
        strategy = self.tables[t].options.score_strategy
        return isinstance(strategy, tuple) or self.strategy(t) is Score.TIMESTAMP

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def before_lookup(self) -> None:
        """Set the scores that a lookup in training mode gives; call `after_lookup` after this lookup. RuntimeError if a
        table has no score, or is not for training."""
        for t, table in enumerate(self.tables):
            if not table.options.training:
                raise RuntimeError(f"table {table.name!r} is not for training (training=False); call eval() first")
            match self.strategy(t):
                case Score.TIMESTAMP:
                    self.rows.give_score(self.rows.store.policy.timestamp(), t)
                case Score.CUSTOMIZED | Score.STEP:
                    if not self.score[t]:
                        raise RuntimeError(
                            f"table {table.name!r} must have a score before the lookup, got none; call set_score"
                        )
                    self.rows.give_score(self.score[t], t)

    def after_lookup(self) -> None:
        """Count the lookup, and warn of ids for which a table had no room."""
        for t in range(len(self.tables)):
            if self.strategy(t) is Score.STEP and not ops.in_backward():
                self.score[t] = self.score[t] % (2**64 - 1) + 1
        if any(table.options.safe_check_mode == DynamicEmbCheckMode.WARNING for table in self.tables):
            full = self.rows.stats()["policy"].get("turned_away", 0)
            if full > self._warned_full:
                warnings.warn(
                    f"{full - self._warned_full} ids of a lookup in tables {', '.join(self.names)} got no row, since a"
                    " table has no room for all rows of a lookup: they read as zeros and are not trained; raise"
                    " max_capacity, or num_embeddings of the config",
                    stacklevel=3,
                )
            self._warned_full = full

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all tables, from the next step on."""
        for optimizer in self.optimizers:
            for group in [] if optimizer is None else optimizer.param_groups:
                group["lr"] = lr

    # ---- scores -----------------------------------------------------------------------------------------------------

    def set_score(self, scores: Mapping[str, int]) -> None:
        """Set the score that later lookups give the rows of each named table: {table: score}. TypeError or ValueError
        if a table's score strategy is not CUSTOMIZED, or a score is not above 0."""
        for name, score in scores.items():
            t = self.index(name)
            if isinstance(score, bool) or not isinstance(score, int):
                raise TypeError(f"the score of table {name!r} must be an int, got {score!r}")
            if not 0 < score < 2**64:
                raise ValueError(f"the score of table {name!r} must be from 1 to 2**64 - 1, got {score}")
            if self.strategy(t) is not Score.CUSTOMIZED:
                raise ValueError(
                    f"set_score needs score_strategy CUSTOMIZED, table {name!r} has {self.strategy(t).name}"
                )
        for name, score in scores.items():
            t = self.index(name)
            if score < self.score[t]:
                warnings.warn(f"the score of table {name!r} falls from {self.score[t]} to {score}", stacklevel=3)
            self.score[t] = score

    def get_score(self) -> dict[str, int]:
        """{table: current score}. Pass it to a later `incremental_dump` to get the rows that have changed since this
        call. The score is the time, or the score that the next lookup gives."""
        return {table.name: self._score_now(t) for t, table in enumerate(self.tables)}

    def _score_now(self, t: int) -> int:
        return self.rows.store.policy.timestamp() if self._goes_by_time(t) else self.score[t]

    def incremental_dump(
        self, thresholds: Mapping[str, int], gather: bool
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Rows whose score, or time of last use, is at least the table's threshold.

        Args:
            thresholds: {table: threshold}.
            gather: whether each rank gets the rows of all ranks; every rank makes the call then.

        Returns:
            {table: (ids int64 [N], weights float32 [N, D])}, on the CPU; and {table: threshold for the next call}.
        """
        found, scores = {}, {}
        for name, threshold in thresholds.items():
            t = self.index(name)
            id_N, score_N, time_N = self.rows.store.policy.uses(t)
            id_N = np.sort(id_N[(time_N if self._goes_by_time(t) else score_N) >= np.uint64(max(0, threshold))])
            parts = [rows.value_ND for rows in self.read(t, id_N, scored=False)]
            value_ND = np.concatenate([np.empty((0, self.rows.embedding_dim), np.float32), *parts])
            of_ranks = self._gathered(name, id_N, value_ND) if gather else [(id_N, value_ND)]
            ids, weights = (np.concatenate(arrays) for arrays in zip(*of_ranks, strict=True))
            found[name], scores[name] = (torch.from_numpy(ids), torch.from_numpy(weights)), self._score_now(t)
        return found, scores

    def _gathered(self, name: str, id_N: np.ndarray, value_ND: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return self.ranks.all_gather(f"gather rows of table {name!r}", lambda: (id_N, value_ND))

    # ---- rows out ---------------------------------------------------------------------------------------------------

    def export(self, t: int) -> list[DumpRows]:
        """Rows of a table that `dist_type` assigns to this rank. Every rank makes the call."""
        found: list[DumpRows] = []
        what = f"export table {self.names[t]!r}"
        self.together("export", what, lambda: self.move(t, what, self.rank_by_dist(t), found.append))
        return found

    def rank_by_dist(self, t: int) -> Callable[[np.ndarray], np.ndarray]:
        """Function from ids of table t to the ranks that the table's `dist_type` assigns them to."""
        table, ranks = self.tables[t], self.ranks.size
        return lambda id_N: owner_of_key(table.options.dist_type, id_N, ranks, table.num_embeddings)

    def move(
        self, t: int, what: str, rank_of: Callable[[np.ndarray], np.ndarray], take: Callable[[DumpRows], object]
    ) -> None:
        """Send each row of table t to the rank that `rank_of` returns for its id, some rows at a time. Each rank calls
        `take` with the rows that it receives; `what` names the operation in errors."""
        own = self.read(t, np.sort(self.rows.store.policy.uses(t)[0]), scored=True)
        if self.ranks.size == 1:
            for rows in own:
                take(rows)
            return
        pending: list[DumpRows] = []

        def send() -> list[list[torch.Tensor]]:
            while pending:  # An error here is raised on all ranks.
                take(pending.pop())
            rows = next(own, None)
            if rows is None:
                return [[torch.tensor([-1], device="cpu")]] * self.ranks.size
            rank_N = rank_of(rows.key_N)
            return [_packed(rows, np.flatnonzero(rank_N == r)) for r in range(self.ranks.size)]

        while True:
            received = self.ranks.exchange(what, send)
            counts = [block.take(1, torch.int64).item() for block in received]
            if max(counts) < 0:
                return
            for block, count in zip(received, counts, strict=True):
                if count > 0:
                    pending.append(_unpacked(block, int(count)))
            pending.reverse()  # `pop` then takes them in the order of ranks

    def read(self, t: int, id_N: np.ndarray, *, scored: bool) -> Iterator[DumpRows]:
        """Yield rows of this rank, some at a time, for ids in ascending order; `scored` = with their scores."""
        store = self.rows.store
        if not store.built:
            return
        at_once, format = self.at_once, store.format
        all_N, score_N, time_N = store.policy.uses(t)
        order_N = np.argsort(all_N)
        for begin in range(0, len(id_N), at_once):
            ids, scores = id_N[begin : begin + at_once], None
            words_NW = read_words(store, np.full(len(ids), t, np.int32), ids)[:, : format.row_width]
            if scored:
                at = order_N[np.searchsorted(all_N, ids, sorter=order_N)]
                scores = self._columns(t, score_N[at], time_N[at], begin)
            weights = weights_of(format, words_NW).astype(np.float32)
            yield DumpRows(self.ranks.rank, ids, weights, scores, state_of(format, words_NW).copy())

    @property
    def at_once(self) -> int:
        """Largest number of rows to read or write at a time."""
        # At most half of a cache, so that a running step's rows can stay pinned.
        return max(1, min(_ROWS, self.rows.store.stats()["device"]["slots"] // 2))

    def _columns(self, t: int, score_N: np.ndarray, time_N: np.ndarray, begin: int) -> np.ndarray:
        """Scores in the form of dynamicemb: int64 [N, 1]; or [N, 2] for a tuple of strategies, in its order."""
        strategy = self.tables[t].options.score_strategy
        if isinstance(strategy, tuple):
            columns = {Score.TIMESTAMP: time_N, Score.LFU: score_N}
            return np.stack([columns[one] for one in strategy], axis=1).view(np.int64)
        if strategy is Score.NO_EVICTION:
            return np.arange(begin, begin + len(score_N))[:, None]
        return score_N.view(np.int64)[:, None]

    def own(self, t: int, id_N: np.ndarray) -> np.ndarray:
        """Indices of the ids that this rank owns."""
        plan = self.rows.store.plan
        return np.flatnonzero(owner_of(np.full(len(id_N), t, np.int32), id_N, plan.owners) == plan.owner)

    # ---- sightings --------------------------------------------------------------------------------------------------

    def sightings(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids without a row that this rank counts, in ascending order, and the count of each: int64 [N] both."""
        id_N, count_N = self.rows.store.policy.sightings(t)
        order_N = np.argsort(id_N)
        return id_N[order_N], count_N[order_N]

    def add_sightings(self, t: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Add `count_N` to the counts of distinct ids; ids that another rank owns are ignored."""
        own = self.own(t, id_N)
        self.rows.store.policy.add_sightings(t, id_N[own], count_N[own])

    def forget_sightings(self, t: int, id_N: np.ndarray) -> None:
        """Forget the counts of these ids."""
        self.rows.store.policy.forget_sightings(t, id_N)

    @property
    def sightings_bytes(self) -> int:
        """Memory that the counts take, in bytes."""
        return self.rows.store.policy.sightings_bytes


def _packed(rows: DumpRows, places: np.ndarray) -> list[torch.Tensor]:
    """Tensors of a message with the rows at these indices."""
    assert rows.score_NS is not None and rows.state_NZ is not None
    arrays = rows.key_N[places], rows.value_ND[places], rows.score_NS[places], rows.state_NZ[places]
    widths = [1, *(array.shape[1] for array in arrays[1:])]
    return [
        torch.tensor([len(places)], device="cpu"),
        torch.tensor(widths, device="cpu"),
        *(torch.from_numpy(array.copy()) for array in arrays),
    ]


def _unpacked(block: Received, count: int) -> DumpRows:
    _, dim, words, width = block.take(4, torch.int64).tolist()
    key_N = block.take(count, torch.int64).numpy()
    value_ND = block.take(count * dim, torch.float32).numpy().reshape(count, dim)
    score_NS = block.take(count * words, torch.int64).numpy().reshape(count, words)
    state_NZ = block.take(count * width, torch.float32).numpy().reshape(count, width)
    return DumpRows(0, key_N, value_ND, score_NS, state_NZ)
