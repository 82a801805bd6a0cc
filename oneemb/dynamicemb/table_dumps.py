"""Dumps of the tables of one embedding: written, checked and loaded.

Invariants:
- every rank makes the calls, in the same order; an error on one rank is raised on all; `check_load` changes no row;
- rank 0 writes the last file of a dump; a dump without its last file is ignored.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.adapters.table_state import widths_of_state
from oneemb.dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy as Score, evict_strategy_of, policy_of
from oneemb.dynamicemb.tables import DynamicTables
from oneemb.foreign.dynamicemb_files import Layout, ids_of_numbers, numbers_in_file
from oneemb.foreign.dynamicemb_reader import Dump, DumpRows, find_dump
from oneemb.foreign.dynamicemb_writer import DumpWriter, remove_unfinished, unpublish
from oneemb.rows.values import encode_rows
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.store_rows import set_rows

__all__ = ["TableDumps"]

_ROWS = 65536
"""Number of keys that are read at a time."""

_OPT_ARGS = {
    "sgd": ("sgd", ()),
    "adam": ("adam", ("beta1", "beta2", "eps", "weight_decay")),
    "adamw": ("adam", ("beta1", "beta2", "eps", "weight_decay")),
    "adagrad": ("exact_adagrad", ("eps", "initial_accumulator_value")),
    "row_wise_adagrad": ("exact_row_wise_adagrad", ("eps", "initial_accumulator_value")),
}
"""{optimizer's name in oneemb: (its name in dumps, its options in dumps)}."""

_NOT_OF_SEED = {"opt_type", "initial_accumulator_value"}
"""Options that dumps of the layout "seed" lack."""


class TableDumps:
    """Writes and reads dumps of the tables of one embedding."""

    def __init__(self, tables: DynamicTables):
        self._tables = tables

    # ---- dumps ------------------------------------------------------------------------------------------------------

    def opt_args(self, t: int) -> dict[str, Any]:
        """Options of a table's optimizer for a dump; ValueError if dynamicemb's files cannot hold its state."""
        row_optimizer, optimizer = self._tables.rows.row_optimizer, self._tables.optimizers[t]
        if row_optimizer is None or optimizer is None:
            return {}
        if row_optimizer.name not in _OPT_ARGS:
            raise ValueError(
                f"table {self._tables.names[t]!r} must be trained by sgd, adam, exact_adagrad or"
                f" exact_row_wise_adagrad, whose state dynamicemb's files can hold, got {row_optimizer.name!r}; save a"
                " snapshot"
            )
        kind, options = _OPT_ARGS[row_optimizer.name]
        group = dict(optimizer.param_groups[0])
        found: dict[str, Any] = {"opt_type": kind, "lr": float(group["lr"])}
        if kind == "adam":
            found["iters"] = self._tables.rows.store.step
            group |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        return found | {option: float(group[option]) for option in options}

    def dump(self, folder: str, names: Sequence[str], *, optim: bool, counter: bool, layout: Layout) -> None:
        """Write dumps of the named tables into an existing folder. Every rank makes the call. ValueError if the files
        cannot hold a table's state. After a StorageError the earlier dumps of tables whose turn had not come are
        intact."""
        for t in [self._tables.index(name) for name in names]:
            what = f"dump table {self._tables.names[t]!r}"
            self._tables.together("dump", what, functools.partial(self._dump, folder, t, what, optim, counter, layout))

    def _dump(self, folder: str, t: int, what: str, optim: bool, counter: bool, layout: Layout) -> None:
        table, ranks = self._tables.tables[t], self._tables.ranks
        by_first = layout == "seed"  # one file for all ranks
        rank_of = self._tables.rank_by_dist(t)
        if by_first:
            rank_of = functools.partial(np.zeros_like, dtype=np.int64)
        writers: list[DumpWriter] = []
        metas: list[dict[str, Any]] = []

        def begin() -> None:
            if by_first:
                self._check_seed(t, counter)
            metas.append(self.meta(t, layout, optim))
            rank, size = (0, 1) if by_first else (ranks.rank, ranks.size)
            if not by_first or ranks.first:
                writers.append(
                    DumpWriter(
                        folder, table.name, rank=rank, ranks=size, version=layout,
                        score_words=self._score_words(t, layout), states=self._states() if optim else [],
                        with_state=optim, with_counts=counter,
                    )
                )  # fmt: skip

        def write(rows: DumpRows) -> None:
            key_N = rows.key_N
            if not by_first:
                key_N = numbers_in_file(table.options.dist_type, key_N, ranks.size, table.num_embeddings)
            scores = rows.score_NS
            if table.options.score_strategy is Score.TIMESTAMP:
                assert scores is not None
                scores = now - scores
            writers[0].append(key_N, rows.value_ND, scores, rows.state_NZ if optim else None)

        try:
            ranks.agree(what, lambda: remove_unfinished(folder, table.name) if ranks.first else None)
            ranks.agree(what, begin)
            now = ranks.by_first(what, self._tables.rows.store.policy.timestamp)
            self._tables.move(t, what, rank_of, write)
            if counter:
                counts = self._counts_for(t, what, rank_of)
                ranks.agree(what, lambda: _each(writers, lambda writer: writer.append_counter(*counts)))
            ranks.agree(what, lambda: _each(writers, DumpWriter.finish))
            ranks.agree(what, lambda: unpublish(folder, table.name) if ranks.first else None)
            ranks.agree(what, lambda: _each(writers, DumpWriter.publish))  # rename to final names
            if optim or not by_first:  # "seed" writes this file only with optimizer state
                ranks.agree(what, lambda: writers[0].publish_meta(metas[0]) if ranks.first else None)
        finally:
            for writer in writers:
                writer.discard()

    def _check_seed(self, t: int, counter: bool) -> None:
        """Raise ValueError if files of the layout "seed" cannot hold a table's scores or counts."""
        if isinstance(self._tables.tables[t].options.score_strategy, tuple):
            raise ValueError(
                f'files of layout "seed" have one score a row, and table {self._tables.names[t]!r} has two; dump it'
                ' with layout "today"'
            )
        if counter:
            raise ValueError('files of layout "seed" have no counts; dump with counter=False, or with layout "today"')

    def _score_words(self, t: int, layout: Layout) -> int:
        """Number of scores of a row in files of a layout."""
        strategy = self._tables.tables[t].options.score_strategy
        if layout == "seed" and self._tables.strategy(t) is Score.TIMESTAMP:
            return 0
        return len(strategy) if isinstance(strategy, tuple) else 1

    def _counts_for(
        self, t: int, what: str, rank_of: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids without a row, of all ranks, that `rank_of` assigns to this rank, and the count of each."""
        own = self._tables.sightings(t)
        if self._tables.ranks.size == 1:
            return own

        def send() -> list[list[torch.Tensor]]:
            rank_N = rank_of(own[0])
            of_rank = [[torch.from_numpy(array[rank_N == r]) for array in own] for r in range(self._tables.ranks.size)]
            return [[torch.tensor([len(columns[0])], device="cpu"), *columns] for columns in of_rank]

        ids, counts = [], []
        for block in self._tables.ranks.exchange(what, send):
            count = int(block.take(1, torch.int64))
            ids.append(block.take(count, torch.int64).numpy())
            counts.append(block.take(count, torch.int64).numpy())
        return np.concatenate(ids), np.concatenate(counts)

    def meta(self, t: int, layout: Layout, optim: bool) -> dict[str, Any]:
        """Content of the last file of a dump."""
        row_optimizer = self._tables.rows.row_optimizer
        content = self.opt_args(t) if optim or row_optimizer is None or row_optimizer.name in _OPT_ARGS else {}
        if layout == "seed":
            return {name: value for name, value in content.items() if name not in _NOT_OF_SEED}
        table = self._tables.tables[t]
        content["evict_strategy"] = str(evict_strategy_of(table.options.score_strategy))
        content["dist_type"] = table.options.dist_type
        content["step_score"] = self._tables.score[t]
        if table.options.dist_type == "continuous" and table.num_embeddings is not None:
            content["num_embeddings"] = table.num_embeddings  # dynamicemb's own dumps lack it
        return content

    def _states(self) -> list[tuple[str, int]]:
        """Parts of a row's optimizer state, each as (name in files of the first layout, number of values)."""
        row_optimizer, dim = self._tables.rows.row_optimizer, self._tables.rows.embedding_dim
        if row_optimizer is None:
            return []
        parts = widths_of_state(row_optimizer, dim)
        return list(zip(["m", "v"] if len(parts) == 2 else ["Gt"], parts, strict=False))

    # ---- loads ------------------------------------------------------------------------------------------------------

    def check_load(self, folder: str, names: Sequence[str], *, optim: bool, counter: bool) -> dict[str, Dump]:
        """Dumps of the named tables, complete and fitting the tables. Every rank makes the call. StorageError or
        ValueError if a dump is missing, incomplete, or of another kind. Nothing changes."""
        what = f"look at the dumps in {folder}"
        found: dict[str, Dump] = {}
        ranks = self._tables.ranks
        self._tables.together(
            "load", what, lambda: ranks.agree(what, lambda: found.update(self._found(folder, names, optim, counter)))
        )
        return found

    def _found(self, folder: str, names: Sequence[str], optim: bool, counter: bool) -> dict[str, Dump]:
        dumps = {name: find_dump(folder, name, dim=self._tables.rows.embedding_dim) for name in names}
        for name, dump in dumps.items():
            t = self._tables.index(name)
            dump.check_distinct(self._num_embeddings(t, dump))
            self._check_scores(t, dump)
            if optim:
                self._check_states(t, dump)
                dump.check_states()
            if counter and not dump.has_counters and self._tables.tables[t].options.admit_strategy is not None:
                raise ValueError(
                    f"the dump of table {name!r} has no counts of ids without a row; load it with counter=False"
                )
        return dumps

    def _num_embeddings(self, t: int, dump: Dump) -> int | None:
        """`num_embeddings` of the table when it was dumped, from which the key blocks of "continuous" follow; None =
        not known."""
        return dump.meta.get("num_embeddings", self._tables.tables[t].num_embeddings)

    def _check_scores(self, t: int, dump: Dump) -> None:
        name, strategy = self._tables.names[t], self._tables.tables[t].options.score_strategy
        theirs, own = dump.meta.get("evict_strategy"), str(evict_strategy_of(strategy))
        if theirs is not None and theirs != own:
            raise ValueError(
                f"table {name!r} must have the score strategy with which it was dumped, {theirs}, got {own}; give it"
                " the same score_strategy"
            )
        if not dump.has_scores and strategy not in (Score.TIMESTAMP, Score.NO_EVICTION):
            raise CorruptTableError(
                f"the dump of table {name!r} must have files of scores for score_strategy {strategy!r}, got none;"
                " restore them from a copy"
            )
        words = 2 if isinstance(strategy, tuple) else 1
        if dump.score_words not in (0, words):
            raise ValueError(
                f"the dump of table {name!r} must have {words} scores a row for score_strategy {strategy!r}, got"
                f" {dump.score_words}"
            )

    def _check_states(self, t: int, dump: Dump) -> None:
        own, width = self.opt_args(t), sum(width for _, width in self._states())
        if dump.version == "seed" and not dump.meta:
            raise ValueError(
                f"the dump of table {self._tables.names[t]!r} must have optimizer state, got none; load it with"
                " optim=False"
            )
        theirs = dump.meta.get("opt_type", own.get("opt_type"))
        if theirs != own.get("opt_type") or dump.rows and dump.state_width != width:
            raise ValueError(
                f"table {self._tables.names[t]!r} must be trained by {theirs} ({dump.state_width} state values a row),"
                f" as its dump was, got {own.get('opt_type')} ({width} values); load it with optim=False, or train it"
                " with the same optimizer"
            )

    def load(self, name: str, dump: Dump, *, optim: bool, counter: bool) -> None:
        """Load the rows of a dump that `check_load` returned; other rows stay as they are. Every rank makes the call.
        After a StoreFullError, for rows that do not fit, the table has a part of the rows."""
        t = self._tables.index(name)
        what = f"load table {name!r}"

        def load() -> None:
            now = self._tables.ranks.by_first(what, self._tables.rows.store.policy.timestamp)
            self._tables.ranks.agree(what, lambda: self._load(t, dump, now, optim, counter))

        self._tables.together("load", what, load)

    def _load(self, t: int, dump: Dump, now: int, optim: bool, counter: bool) -> None:
        store = self._tables.rows.store
        store.build()
        at_once, fitting = self._tables.at_once, self._fitting_of(t, dump, now)
        if fitting is not None:
            at_once = min(at_once, max(1, len(fitting)))
        for rows in dump.read(at_once, state=optim):
            id_N = self._ids_of(t, dump, rows.rank, rows.key_N)
            own = self._tables.own(t, id_N)
            if fitting is not None:
                own = own[np.isin(id_N[own], fitting)]
            if len(own) == 0:
                continue
            state_NZ = rows.state_NZ[own] if rows.state_NZ is not None and dump.state_width else None
            score_NS = None if rows.score_NS is None else rows.score_NS[own]
            self.put(t, id_N[own], rows.value_ND[own], state_NZ, score_NS, now)
        if optim:
            self.take_options(t, dump.meta)
        self._tables.score[t] = int(dump.meta.get("step_score", self._tables.score[t]))
        if counter and dump.has_counters:
            for id_N, count_N in dump.counters(_ROWS):
                self._tables.forget_sightings(t, id_N)
                self._tables.add_sightings(t, id_N, count_N)

    def put(
        self, t: int, id_U: np.ndarray, value_UD: np.ndarray, state_UZ: np.ndarray | None, score_US: np.ndarray | None,
        now: int,
    ) -> None:  # fmt: skip
        """Write rows that this rank owns into the store, which must be built.

        Args:
            state_UZ: optimizer state; None = the state of new rows.
            score_US: scores in the form of files; None = the scores that a lookup would give.
            now: the store's `timestamp`, the same for all rows.
        """
        store = self._tables.rows.store
        format = store.format if state_UZ is not None else dataclasses.replace(store.format, state=())
        table_U = np.full(len(id_U), t, np.int32)
        set_rows(store, table_U, id_U, encode_rows(format, value_UD, state_UZ))
        if score_US is not None:
            score_U, time_U = self._scores_of(t, score_US, now)
            store.policy.set_scores(table_U, id_U, score_U, time_U)

    def _ids_of(self, t: int, dump: Dump, rank: int, key_N: np.ndarray) -> np.ndarray:
        """Ids of the keys in a dump's file of `rank`."""
        if dump.version == "seed":
            return key_N
        dist = dump.meta.get("dist_type", "roundrobin")
        return ids_of_numbers(dist, rank, key_N, dump.ranks, self._num_embeddings(t, dump))

    def _fitting_of(self, t: int, dump: Dump, now: int) -> np.ndarray | None:
        """Ids of this rank's rows with the highest scores, if the dump has more rows for this rank than its capacity;
        None = all rows fit. Capacity is that of the current number of ranks, not the dump's."""
        table = self._tables.tables[t]
        capacity = policy_of(table.options, table.num_embeddings, self._tables.ranks.size).capacity
        if capacity is None or dump.rows <= capacity:
            return None
        ids, scores = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
        for rank, key_N, score_NS in dump.scores(_ROWS):
            id_N = self._ids_of(t, dump, rank, key_N)
            own = self._tables.own(t, id_N)
            ids.append(id_N[own])
            score_N = np.zeros(len(own), np.uint64)
            scores.append(score_N if score_NS is None else self._scores_of(t, score_NS[own], now)[0])
        id_N, score_N = np.concatenate(ids), np.concatenate(scores)
        if len(id_N) <= capacity:
            return None
        warnings.warn(
            f"table {table.name!r} has room for {capacity} of {len(id_N)} rows of the dump on rank"
            f" {self._tables.ranks.rank}, so those of the lowest scores are left out; raise max_capacity, or"
            " num_embeddings of the config",
            stacklevel=2,
        )
        return id_N[np.lexsort((id_N, score_N))[-capacity:]]  # with equal scores keep greater ids

    def _scores_of(self, t: int, score_NS: np.ndarray, now: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Scores, and times of last use, from the scores in a dump. Times are None if the score strategy has no
        time."""
        strategy = self._tables.tables[t].options.score_strategy
        if isinstance(strategy, tuple):
            columns = dict(zip(strategy, score_NS.T, strict=True))
            scores = (np.ascontiguousarray(columns[one]).view(np.uint64) for one in (Score.LFU, Score.TIMESTAMP))
            return next(scores), next(scores)
        if self._tables.strategy(t) is Score.TIMESTAMP:
            score_N = np.maximum(now - score_NS[:, 0], 0).view(np.uint64)
            return score_N, score_N
        return np.ascontiguousarray(score_NS[:, 0]).view(np.uint64), None

    def take_options(self, t: int, meta: Mapping[str, Any]) -> None:
        """Set the optimizer's options and count of steps to those in `meta`, the last file of a dump."""
        optimizer = self._tables.optimizers[t]
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                if name in meta and name in group:
                    group[name] = meta[name]
            if "betas" in group and {"beta1", "beta2"} <= meta.keys():
                group["betas"] = (meta["beta1"], meta["beta2"])
        if "iters" in meta:
            self._tables.rows.store.step = int(meta["iters"])
            self._tables.rows.store.changes += 1


def _each(writers: Sequence[DumpWriter], call: Callable[[DumpWriter], None]) -> None:
    for writer in writers:
        call(writer)
