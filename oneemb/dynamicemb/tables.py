"""Tables in one embedding, as dynamicemb's modules see them: scores, incremental dumps, dumps.

Invariants:
- every rank makes the calls that say so, in the same order; where one fails all raise, and no file or row has changed;
- a dump is whole when its last file is there, which rank 0 writes; until then it is none.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from oneemb.dynamicemb.dynamicemb_config import (
    DynamicEmbCheckMode,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions,
    evict_strategy_of,
    evicting_strategy,
    policy_of,
)
from oneemb.embedding import MultiTableEmbedding
from oneemb.graph.ranks import Received
from oneemb.kernels.owner import owner_of
from oneemb.rank_calls import RankCalls
from oneemb.rows.values import encode_rows, state_of, weights_of
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.foreign.dynamicemb_files import Layout, file_key, key_of_file, owner_of_key
from oneemb.storage.foreign.dynamicemb_reader import Dump, DumpRows, find_dump
from oneemb.storage.foreign.dynamicemb_writer import DumpWriter, remove_unfinished, unpublish

__all__ = ["DynamicTables", "TableInfo"]

T = TypeVar("T")

_ROWS = 65536
"""Rows that are read, sent or written at a time."""

_OPT_ARGS = {
    "sgd": ("sgd", ()),
    "adam": ("adam", ("beta1", "beta2", "eps", "weight_decay")),
    "adamw": ("adam", ("beta1", "beta2", "eps", "weight_decay")),
    "adagrad": ("exact_adagrad", ("eps", "initial_accumulator_value")),
    "row_wise_adagrad": ("exact_row_wise_adagrad", ("eps", "initial_accumulator_value")),
}
"""What dumps call an optimizer, and what they say of it, by the names that rows have for it."""

_NOT_OF_SEED = {"opt_type", "initial_accumulator_value"}
"""What only today's dumps say of it."""


@dataclass(frozen=True)
class TableInfo:
    """One of the tables.

    Args:
        name: of the table.
        options: its own.
        num_embeddings: of its config; None = there is none.
    """

    name: str
    options: DynamicEmbTableOptions
    num_embeddings: int | None


class DynamicTables:
    """Tables that are one embedding.

    Args:
        rows: the embedding; table t of it is `tables[t]`.
        tables: what is known of each.
        optimizers: what steps the rows of each table; None = nothing does.
    """

    def __init__(
        self, rows: MultiTableEmbedding, tables: Sequence[TableInfo],
        optimizers: Sequence[torch.optim.Optimizer | None],
    ):  # fmt: skip
        self.rows, self.tables, self._optimizers = rows, tuple(tables), list(optimizers)
        self._calls = RankCalls(rows.ranks, [rows.store])
        self._score = {
            t: int(evicting_strategy(table.options.score_strategy) in (Score.STEP, Score.LFU))
            for t, table in enumerate(self.tables)
        }
        self._told_full = 0

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return [table.name for table in self.tables]

    def index(self, name: str) -> int:
        """Which table has this name.

        Raises:
            ValueError: none has.
        """
        if name not in self.names:
            raise ValueError(f"there is no table {name!r}; there are: {', '.join(self.names)}")
        return self.names.index(name)

    def _strategy(self, t: int) -> Score:
        return evicting_strategy(self.tables[t].options.score_strategy)

    def _goes_by_time(self, t: int) -> bool:
        strategy = self.tables[t].options.score_strategy
        return isinstance(strategy, tuple) or self._strategy(t) is Score.TIMESTAMP

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def before_lookup(self) -> None:
        """Say what scores a lookup in training mode gives. The next call of `after_lookup` is of the same lookup.

        Raises:
            RuntimeError: a table was not told its score, or is not for training.
        """
        for t, table in enumerate(self.tables):
            if not table.options.training:
                raise RuntimeError(f"table {table.name!r} is not for training (training=False); call eval() first")
            match self._strategy(t):
                case Score.TIMESTAMP:
                    self.rows.give_score(self.rows.store.timestamp(), t)
                case Score.CUSTOMIZED | Score.STEP:
                    if not self._score[t]:
                        raise RuntimeError(f"set_score must give table {table.name!r} a score before the lookup")
                    self.rows.give_score(self._score[t], t)

    def after_lookup(self) -> None:
        """Count the lookup, and warn of ids for which there was no room."""
        for t in range(len(self.tables)):
            if self._strategy(t) is Score.STEP:
                self._score[t] = self._score[t] % (2**64 - 1) + 1
        if any(table.options.safe_check_mode == DynamicEmbCheckMode.WARNING for table in self.tables):
            full = self.rows.stats()["policy"].get("turned_away", 0)
            if full > self._told_full:
                warnings.warn(
                    f"{full - self._told_full} ids of a lookup in tables {', '.join(self.names)} got no row, since a"
                    " table has no room for all rows of a lookup: they read as zeros and are not trained; raise"
                    " max_capacity, or num_embeddings of the config",
                    stacklevel=3,
                )
            self._told_full = full

    def set_learning_rate(self, lr: float) -> None:
        """Of all tables, from the next step on."""
        for optimizer in self._optimizers:
            for group in [] if optimizer is None else optimizer.param_groups:
                group["lr"] = lr

    # ---- scores -----------------------------------------------------------------------------------------------------

    def set_score(self, scores: Mapping[str, int]) -> None:
        """Say what scores lookups from now on give the rows of some tables, by name.

        Raises:
            TypeError, ValueError: a table's score strategy is not CUSTOMIZED, or a score is not above 0.
        """
        for name, score in scores.items():
            t = self.index(name)
            if isinstance(score, bool) or not isinstance(score, int):
                raise TypeError(f"the score of table {name!r} must be an int, got {score!r}")
            if not 0 < score < 2**64:
                raise ValueError(f"the score of table {name!r} must be from 1 to 2**64 - 1, got {score}")
            if self._strategy(t) is not Score.CUSTOMIZED:
                raise ValueError(f"scores are set of tables of CUSTOMIZED; {name!r} has {self._strategy(t).name}")
        for name, score in scores.items():
            t = self.index(name)
            if score < self._score[t]:
                warnings.warn(f"the score of table {name!r} falls from {self._score[t]} to {score}", stacklevel=3)
            self._score[t] = score

    def get_score(self) -> dict[str, int]:
        """What `incremental_dump` takes, later, for what changes from now on: by table the time, or the score that the
        next lookup gives."""
        return {table.name: self._score_now(t) for t, table in enumerate(self.tables)}

    def _score_now(self, t: int) -> int:
        return self.rows.store.timestamp() if self._goes_by_time(t) else self._score[t]

    def incremental_dump(
        self, thresholds: Mapping[str, int], gather: bool
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """The rows whose score, or time of last use, is not below a threshold.

        Args:
            thresholds: by table.
            gather: give those of all ranks, rather than of this one. Every rank makes the call then.

        Returns:
            By table the ids, int64 [N], and weights, float32 [N, D], on the CPU; and what the next call is to be given.
        """
        found, scores = {}, {}
        for name, threshold in thresholds.items():
            t = self.index(name)
            id_N, score_N, time_N = self.rows.store.uses(t)
            id_N = id_N[(time_N if self._goes_by_time(t) else score_N) >= np.uint64(max(0, threshold))]
            parts = [rows.value_ND for rows in self._read(t, np.sort(id_N), scored=False)]
            values = np.concatenate([np.empty((0, self.rows.embedding_dim), np.float32), *parts])
            own = np.sort(id_N), values
            its = [own]
            if gather:
                its = self._calls.all_gather(f"gather rows of table {name!r}", functools.partial(_itself, own))
            ids, weights = (np.concatenate(arrays) for arrays in zip(*its, strict=True))
            found[name], scores[name] = (torch.from_numpy(ids), torch.from_numpy(weights)), self._score_now(t)
        return found, scores

    # ---- rows out ---------------------------------------------------------------------------------------------------

    def export(self, t: int) -> list[DumpRows]:
        """The rows of a table that dynamicemb would keep on this rank: those that `dist_type` gives it. Every rank
        makes the call."""
        found: list[DumpRows] = []
        what = f"export table {self.names[t]!r}"
        self._calls.together("export", what, lambda: self._move(t, what, self._rank_by_dist(t), found.append))
        return found

    def _rank_by_dist(self, t: int) -> Callable[[np.ndarray], np.ndarray]:
        table, ranks = self.tables[t], self._calls.size
        return lambda id_N: owner_of_key(table.options.dist_type, id_N, ranks, table.num_embeddings)

    def _move(
        self, t: int, what: str, rank_of: Callable[[np.ndarray], np.ndarray], take: Callable[[DumpRows], object]
    ) -> None:
        """Send the rows of a table to ranks, some at a time: each has `take` called with those for it.

        Args:
            rank_of: gives the rank of each id.
        """
        own = self._read(t, np.sort(self.rows.store.uses(t)[0]), scored=True)
        if self._calls.size == 1:
            for rows in own:
                take(rows)
            return
        pending: list[DumpRows] = []

        def send() -> list[list[torch.Tensor]]:
            while pending:  # Where it fails, all ranks are told.
                take(pending.pop())
            rows = next(own, None)
            if rows is None:
                return [[torch.tensor([-1])]] * self._calls.size
            rank_N = rank_of(rows.key_N)
            return [_packed(rows, np.flatnonzero(rank_N == r)) for r in range(self._calls.size)]

        while True:
            received = self._calls.exchange(what, send)
            counts = [block.take(1, torch.int64).item() for block in received]
            if max(counts) < 0:
                return
            for block, count in zip(received, counts, strict=True):
                if count > 0:
                    pending.append(_unpacked(block, int(count)))
            pending.reverse()  # so that they are taken in the order of the ranks

    def _read(self, t: int, id_N: np.ndarray, *, scored: bool) -> Iterator[DumpRows]:
        """These rows, which this rank has."""
        store = self.rows.store
        if not store.built:
            return
        at_once, format = self._at_once, store.format
        all_N, score_N, time_N = store.uses(t)
        order_N = np.argsort(all_N)
        for begin in range(0, len(id_N), at_once):
            ids, scores = id_N[begin : begin + at_once], None
            keys = store.loops.distinct_keys(store.loops.put(np.full(len(ids), t, np.int32)), store.loops.put(ids))
            words_NW = store.loops.tensor(store.read(keys)[0]).cpu().numpy()[:, : format.row_width]
            if scored:
                at = order_N[np.searchsorted(all_N, ids, sorter=order_N)]
                scores = self._columns(t, score_N[at], time_N[at], begin)
            weights = weights_of(format, words_NW).astype(np.float32)
            yield DumpRows(self._calls.rank, ids, weights, scores, state_of(format, words_NW).copy())

    @property
    def _at_once(self) -> int:
        # At most half of a cache, so that the rows of a running step can stay pinned.
        return max(1, min(_ROWS, self.rows.store.stats()["device"]["slots"] // 2))

    def _columns(self, t: int, score_N: np.ndarray, time_N: np.ndarray, begin: int) -> np.ndarray:
        """Scores as dynamicemb has them: int64 [N, 1], or [N, 2] of a tuple of strategies, in its order."""
        strategy = self.tables[t].options.score_strategy
        if isinstance(strategy, tuple):
            columns = {Score.TIMESTAMP: time_N, Score.LFU: score_N}
            return np.stack([columns[one] for one in strategy], axis=1).view(np.int64)
        if strategy is Score.NO_EVICTION:
            return np.arange(begin, begin + len(score_N))[:, None]
        return score_N.view(np.int64)[:, None]

    # ---- dumps ------------------------------------------------------------------------------------------------------

    def opt_args(self, t: int) -> dict[str, Any]:
        """What a dump says of the table's optimizer.

        Raises:
            ValueError: dynamicemb's files know none such.
        """
        row_optimizer, optimizer = self.rows.row_optimizer, self._optimizers[t]
        if row_optimizer is None or optimizer is None:
            return {}
        if row_optimizer.name not in _OPT_ARGS:
            raise ValueError(
                "dynamicemb's files have the state of sgd, adam, exact_adagrad and exact_row_wise_adagrad; table"
                f" {self.names[t]!r} is trained by {row_optimizer.name!r}: save a snapshot"
            )
        kind, options = _OPT_ARGS[row_optimizer.name]
        group = dict(optimizer.param_groups[0])
        found: dict[str, Any] = {"opt_type": kind, "lr": float(group["lr"])}
        if kind == "adam":
            found["iters"] = self.rows.store.step
            group |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        return found | {option: float(group[option]) for option in options}

    def dump(self, folder: str, names: Sequence[str], *, optim: bool, counter: bool, layout: Layout) -> None:
        """Write tables of these names into a folder that is there. Every rank makes the call.

        Args:
            layout: "today" or "seed", which has one file for all ranks.

        Raises:
            ValueError: the files cannot say what a table has.
            StorageError: a file cannot be written; what was there before is, for tables that were not begun.
        """
        for t in [self.index(name) for name in names]:
            what = f"dump table {self.names[t]!r}"
            self._calls.together("dump", what, functools.partial(self._dump, folder, t, what, optim, counter, layout))

    def _dump(self, folder: str, t: int, what: str, optim: bool, counter: bool, layout: Layout) -> None:
        table, calls = self.tables[t], self._calls
        by_first = layout == "seed"
        rank_of = self._rank_by_dist(t)
        if by_first:
            rank_of = _first
        writers: list[DumpWriter] = []
        metas: list[dict[str, Any]] = []

        def begin() -> None:
            if by_first:
                self._check_seed(t, counter)
            metas.append(self._meta(t, layout, optim))
            rank, ranks = (0, 1) if by_first else (calls.rank, calls.size)
            if not by_first or calls.first:
                writers.append(
                    DumpWriter(
                        folder, table.name, rank=rank, ranks=ranks, version=layout,
                        score_words=self._score_words(t, layout), states=self._states() if optim else [],
                        with_state=optim, with_counts=counter,
                    )
                )  # fmt: skip

        def write(rows: DumpRows) -> None:
            key_N = rows.key_N
            if not by_first:
                key_N = file_key(table.options.dist_type, key_N, calls.size, table.num_embeddings)
            scores = rows.score_NS
            if table.options.score_strategy is Score.TIMESTAMP:
                assert scores is not None
                scores = now - scores
            writers[0].append(key_N, rows.value_ND, scores, rows.state_NZ if optim else None)

        try:
            calls.agree(what, lambda: remove_unfinished(folder, table.name) if calls.first else None)
            calls.agree(what, begin)
            now = calls.by_first(what, self.rows.store.timestamp)
            self._move(t, what, rank_of, write)
            if counter:
                counts = self._counts_for(t, what, rank_of)
                calls.agree(what, lambda: _each(writers, lambda writer: writer.append_counter(*counts)))
            calls.agree(what, lambda: _each(writers, DumpWriter.finish))
            calls.agree(what, lambda: unpublish(folder, table.name) if calls.first else None)
            calls.agree(what, lambda: _each(writers, DumpWriter.publish))
            if optim or not by_first:  # "seed" has no last file without the state.
                calls.agree(what, lambda: writers[0].publish_meta(metas[0]) if calls.first else None)
        finally:
            for writer in writers:
                writer.discard()

    def _check_seed(self, t: int, counter: bool) -> None:
        """Raise ValueError if the files of "seed" cannot say what a table has."""
        if isinstance(self.tables[t].options.score_strategy, tuple):
            raise ValueError(
                f'files of layout "seed" have one score a row, and table {self.names[t]!r} has two; dump it with layout'
                ' "today"'
            )
        if counter:
            raise ValueError('files of layout "seed" have no counts; dump with counter=False, or with layout "today"')

    def _score_words(self, t: int, layout: Layout) -> int:
        """Scores of a row in files of a layout."""
        strategy = self.tables[t].options.score_strategy
        if layout == "seed" and self._strategy(t) is Score.TIMESTAMP:
            return 0
        return len(strategy) if isinstance(strategy, tuple) else 1

    def _counts_for(
        self, t: int, what: str, rank_of: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sightings of all ranks that `rank_of` gives this one."""
        own = self.sightings(t)
        if self._calls.size == 1:
            return own

        def send() -> list[list[torch.Tensor]]:
            rank_N = rank_of(own[0])
            of_rank = [[torch.from_numpy(array[rank_N == r]) for array in own] for r in range(self._calls.size)]
            return [[torch.tensor([len(its[0])]), *its] for its in of_rank]

        ids, counts = [], []
        for block in self._calls.exchange(what, send):
            count = int(block.take(1, torch.int64))
            ids.append(block.take(count, torch.int64).numpy())
            counts.append(block.take(count, torch.int64).numpy())
        return np.concatenate(ids), np.concatenate(counts)

    def _meta(self, t: int, layout: Layout, optim: bool) -> dict[str, Any]:
        """What the last file of a dump says."""
        row_optimizer = self.rows.row_optimizer
        its = self.opt_args(t) if optim or row_optimizer is None or row_optimizer.name in _OPT_ARGS else {}
        if layout == "seed":
            return {name: value for name, value in its.items() if name not in _NOT_OF_SEED}
        table = self.tables[t]
        its["evict_strategy"] = str(evict_strategy_of(table.options.score_strategy))
        its["dist_type"] = table.options.dist_type
        its["step_score"] = self._score[t]
        if table.options.dist_type == "continuous" and table.num_embeddings is not None:
            its["num_embeddings"] = table.num_embeddings  # dynamicemb's own lack it: keys are places in blocks by it.
        return its

    def _states(self) -> list[tuple[str, int]]:
        """What parts the state of a row has, with names of the older files, and how many numbers each is."""
        row_optimizer, dim = self.rows.row_optimizer, self.rows.embedding_dim
        if row_optimizer is None:
            return []
        parts = [dim] * len(row_optimizer.weight_state) + [1] * len(row_optimizer.row_state)
        return list(zip(["m", "v"] if len(parts) == 2 else ["Gt"], parts, strict=False))

    # ---- loads ------------------------------------------------------------------------------------------------------

    def check_load(self, folder: str, names: Sequence[str], *, optim: bool, counter: bool) -> dict[str, Dump]:
        """The dumps of these tables, found to be whole and to fit. Every rank makes the call.

        Raises:
            StorageError, ValueError: one is not there, or not whole, or of another kind; nothing has changed.
        """
        what = f"look at the dumps in {folder}"
        found: dict[str, Dump] = {}
        self._calls.together(
            "load", what, lambda: self._calls.agree(what, lambda: found.update(self._found(folder, names, optim)))
        )
        return found

    def _found(self, folder: str, names: Sequence[str], optim: bool) -> dict[str, Dump]:
        dumps = {name: find_dump(folder, name, dim=self.rows.embedding_dim) for name in names}
        for name, dump in dumps.items():
            t = self.index(name)
            dump.check_distinct(self._num_embeddings(t, dump))
            self._check_scores(t, dump)
            if optim:
                self._check_states(t, dump)
                dump.check_states()
        return dumps

    def _num_embeddings(self, t: int, dump: Dump) -> int | None:
        """By which the keys of a dump are places in blocks, where they are."""
        found: int | None = dump.meta.get("num_embeddings", self.tables[t].num_embeddings)
        return found

    def _check_scores(self, t: int, dump: Dump) -> None:
        name, strategy = self.names[t], self.tables[t].options.score_strategy
        theirs, own = dump.meta.get("evict_strategy"), str(evict_strategy_of(strategy))
        if theirs is not None and theirs != own:
            raise ValueError(
                f"table {name!r} was dumped with {theirs}, and has {own} here; give it the same score_strategy"
            )
        if not dump.has_scores and strategy not in (Score.TIMESTAMP, Score.NO_EVICTION):
            raise CorruptTableError(
                f"the dump of table {name!r} lacks its files of scores, which rows of score_strategy {strategy!r} have;"
                " restore them from a copy"
            )
        words = 2 if isinstance(strategy, tuple) else 1
        if dump.score_words not in (0, words):
            raise ValueError(
                f"the dump of table {name!r} has {dump.score_words} scores a row, its score_strategy {strategy!r}"
                f" has {words}"
            )

    def _check_states(self, t: int, dump: Dump) -> None:
        own, width = self.opt_args(t), sum(width for _, width in self._states())
        if dump.version == "seed" and not dump.meta:
            raise ValueError(f"the dump of table {self.names[t]!r} has no optimizer's state; load it with optim=False")
        theirs = dump.meta.get("opt_type", own.get("opt_type"))
        if theirs != own.get("opt_type") or dump.rows and dump.state_width != width:
            raise ValueError(
                f"the dump of table {self.names[t]!r} has the state of {theirs} ({dump.state_width} numbers a row), and"
                f" {own.get('opt_type')} trains it here ({width} numbers); load it with optim=False, or train it with"
                " the same optimizer"
            )

    def load(self, name: str, dump: Dump, *, optim: bool, counter: bool) -> None:
        """Bring in the rows of a dump that `check_load` gave; other rows stay. Every rank makes the call.

        Raises:
            StoreFullError: the table has no room for them, and a part of them is in it.
        """
        t = self.index(name)
        what = f"load table {name!r}"

        def load() -> None:
            now = self._calls.by_first(what, self.rows.store.timestamp)
            self._calls.agree(what, lambda: self._load(t, dump, now, optim, counter))

        self._calls.together("load", what, load)

    def _load(self, t: int, dump: Dump, now: int, optim: bool, counter: bool) -> None:
        store = self.rows.store
        store.build()
        at_once, kept = self._at_once, self._kept_of(t, dump, now)
        if kept is not None:
            at_once = min(at_once, max(1, len(kept)))
        for rows in dump.read(at_once, state=optim):
            id_N = self._ids_of(t, dump, rows.rank, rows.key_N)
            own = self.own(t, id_N)
            if kept is not None:
                own = own[np.isin(id_N[own], kept)]
            if len(own) == 0:
                continue
            table_U, id_U = np.full(len(own), t, np.int32), id_N[own]
            state_NZ = rows.state_NZ[own] if rows.state_NZ is not None and dump.state_width else None
            format = store.format if state_NZ is not None else dataclasses.replace(store.format, state=())
            store.put(table_U, id_U, encode_rows(format, rows.value_ND[own], state_NZ))
            if rows.score_NS is not None:
                score_U, time_U = self._scores_of(t, rows.score_NS[own], now)
                store.set_scores(table_U, id_U, score_U, time_U)
        if optim:
            self._take_options(t, dump.meta)
        self._score[t] = int(dump.meta.get("step_score", self._score[t]))
        if counter and dump.has_counters:
            for id_N, count_N in dump.counters(_ROWS):
                self.forget_sightings(t, id_N)
                self.add_sightings(t, id_N, count_N)

    def _ids_of(self, t: int, dump: Dump, rank: int, key_N: np.ndarray) -> np.ndarray:
        """The ids that keys of a dump stand for."""
        if dump.version == "seed":
            return key_N
        dist = dump.meta.get("dist_type", "roundrobin")
        return key_of_file(dist, rank, key_N, dump.ranks, self._num_embeddings(t, dump))

    def _kept_of(self, t: int, dump: Dump, now: int) -> np.ndarray | None:
        """Where a table has no room for all of this rank's rows of a dump, the ids of those that stay if others leave
        by their scores; None = there is room. Ranks of another number have room for another number of rows."""
        table = self.tables[t]
        capacity = policy_of(table.options, table.num_embeddings, self._calls.size).capacity
        if capacity is None or dump.rows <= capacity:
            return None
        ids, scores = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
        for rank, key_N, score_NS in dump.scores(_ROWS):
            id_N = self._ids_of(t, dump, rank, key_N)
            own = self.own(t, id_N)
            ids.append(id_N[own])
            score_N = np.zeros(len(own), np.uint64)
            scores.append(score_N if score_NS is None else self._scores_of(t, score_NS[own], now)[0])
        id_N, score_N = np.concatenate(ids), np.concatenate(scores)
        if len(id_N) <= capacity:
            return None
        warnings.warn(
            f"table {table.name!r} has room for {capacity} of {len(id_N)} rows that rank {self._calls.rank} has of the"
            " dump: those of the least scores are left out; raise max_capacity, or num_embeddings of the config",
            stacklevel=2,
        )
        return id_N[np.lexsort((id_N, score_N))[-capacity:]]  # of equal scores those of the greater ids

    def own(self, t: int, id_N: np.ndarray) -> np.ndarray:
        """Which of these ids this rank owns."""
        plan = self.rows.store.plan
        return np.flatnonzero(owner_of(np.full(len(id_N), t, np.int32), id_N, plan.owners) == plan.owner)

    def _scores_of(self, t: int, score_NS: np.ndarray, now: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Scores, and times of last use, of a dump's scores."""
        strategy = self.tables[t].options.score_strategy
        if isinstance(strategy, tuple):
            columns = dict(zip(strategy, score_NS.T, strict=True))
            its = (np.ascontiguousarray(columns[one]).view(np.uint64) for one in (Score.LFU, Score.TIMESTAMP))
            return next(its), next(its)
        if self._strategy(t) is Score.TIMESTAMP:
            score_N = np.maximum(now - score_NS[:, 0], 0).view(np.uint64)
            return score_N, score_N
        return np.ascontiguousarray(score_NS[:, 0]).view(np.uint64), None

    def _take_options(self, t: int, meta: Mapping[str, Any]) -> None:
        """Go on with the options that a dump has of its optimizer."""
        optimizer = self._optimizers[t]
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                if name in meta and name in group:
                    group[name] = meta[name]
            if "betas" in group and {"beta1", "beta2"} <= meta.keys():
                group["betas"] = (meta["beta1"], meta["beta2"])
        if "iters" in meta:
            self.rows.store.step = int(meta["iters"])
            self.rows.store.changes += 1

    # ---- sightings --------------------------------------------------------------------------------------------------

    def sightings(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a table that this rank counts, and their counts, both int64 [N]."""
        id_N, count_N = self.rows.store.sightings(t)
        order_N = np.argsort(id_N)
        return id_N[order_N], count_N[order_N]

    def add_sightings(self, t: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Count those of these ids, which are distinct, that are this rank's."""
        own = self.own(t, id_N)
        self.rows.store.add_sightings(t, id_N[own], count_N[own])

    def forget_sightings(self, t: int, id_N: np.ndarray) -> None:
        """Count these ids no more."""
        self.rows.store.forget_sightings(t, id_N)

    @property
    def sightings_bytes(self) -> int:
        """Bytes of memory that counts take."""
        return self.rows.store.sightings_bytes


def _each(writers: Sequence[DumpWriter], call: Callable[[DumpWriter], None]) -> None:
    for writer in writers:
        call(writer)


def _itself(value: T) -> T:
    return value


def _first(id_N: np.ndarray) -> np.ndarray:
    return np.zeros(len(id_N), np.int64)


def _packed(rows: DumpRows, its: np.ndarray) -> list[torch.Tensor]:
    """These of the rows, as they travel."""
    assert rows.score_NS is not None and rows.state_NZ is not None
    arrays = rows.key_N[its], rows.value_ND[its], rows.score_NS[its], rows.state_NZ[its]
    widths = [1, *(array.shape[1] for array in arrays[1:])]
    return [torch.tensor([len(its)]), torch.tensor(widths), *(torch.from_numpy(array.copy()) for array in arrays)]


def _unpacked(block: Received, count: int) -> DumpRows:
    _, dim, words, width = block.take(4, torch.int64).tolist()
    key_N = block.take(count, torch.int64).numpy()
    value_ND = block.take(count * dim, torch.float32).numpy().reshape(count, dim)
    score_NS = block.take(count * words, torch.int64).numpy().reshape(count, words)
    state_NZ = block.take(count * width, torch.float32).numpy().reshape(count, width)
    return DumpRows(0, key_N, value_ND, score_NS, state_NZ)
