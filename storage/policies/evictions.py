"""Choice of the rows that policies evict: at capacity, by age, by their weights.

Which rows are evicted depends on keys, scores and counts, and not on tiers or prefetching. The index has 256 shards;
the hash of its key puts a row into a shard, so each shard is a random sample of the rows. A round of eviction chooses
rows from some shards, and the next round goes on with the next shards, so the time of a round does not grow with the
table. A round evicts rows of every full table, whichever table needs room, so each table loses rows from all shards in
turn.

Shape letters: N rows, M new rows, V rows to evict, T tables.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from oneemb.kernels.score_rows import ties_of
from oneemb.kernels.shard_rows import keys_in_cells, least_of
from oneemb.kernels.slot_marks import set_marks
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.hash_index import SHARDS
from oneemb.storage.policies.usage_index import UsageIndex

# Approximate number of rows that a round looks at, and the least share of these rows that it evicts.
_ROUND_ROWS = 1 << 17
_ROUND_SHARE = 1 / 16

# Cells of the index that a sweep looks at in one loop, which takes some milliseconds.
_RUN_CELLS = 1 << 16

_UNLIMITED = 2**62


class RowsToEvict(NamedTuple):
    """Keys of rows to evict, and the reason: "capacity", "expired", "norm" or "where"."""

    table_V: np.ndarray
    id_V: np.ndarray
    reason: str


class Evictions:
    """Chooses the rows of a usage index to evict: at capacity, by age, by their weights."""

    def __init__(self, usage: UsageIndex, threads: Threads):
        self._usage, self._threads = usage, threads

    def make_room(self, table_M: np.ndarray, held: Sequence[np.ndarray]) -> list[RowsToEvict]:
        """Choose the rows to evict before new rows are made.

        Args:
            table_M: table of each new row.
            held: arrays of places of rows that must not be evicted, the rows of the present lookup included; a place of
                -1 means no row.

        Raises:
            StoreFullError: the new rows do not fit, and too few rows may be evicted.
        """
        if len(table_M) == 0:
            return []
        new_T = np.bincount(table_M, minlength=len(self._usage.rows_T))
        excess_T = self._excess(new_T)
        over_T, excess = (excess_T > 0) & (new_T > 0), self._excess_of_all(len(table_M))
        if not over_T.any() and excess <= 0:
            return []
        self._check_enough(new_T, np.where(over_T, excess_T, 0), excess, held)
        excess_T[~over_T] = np.minimum(excess_T[~over_T], 0)
        return [self._choose(excess_T, excess, held)]

    def fitting(self, table_M: np.ndarray, held: Sequence[np.ndarray]) -> np.ndarray:
        """Whether there can be room for each new row: bool [M]. False for the last new rows of a full table whose
        policy has `when_full="refuse"`. table_M, held: as in `make_room`."""
        fits_M = np.ones(len(table_M), np.bool_)
        new_T = np.bincount(table_M, minlength=len(self._usage.rows_T))
        excess_T = self._excess(new_T)
        full = [t for t, policy in enumerate(self._usage.policies) if policy.when_full == "refuse" and excess_T[t] > 0]
        free_T = self._usage.rows_T - self._in_use(held) if full else self._usage.rows_T
        for t in full:
            leaving = max(0, int(free_T[t])) if self._usage.evicts_T[t] else 0
            many = max(0, int(new_T[t] - excess_T[t] + leaving))
            fits_M[np.flatnonzero(table_M == t)[many:]] = False
        return fits_M

    def surplus(self, held: Sequence[np.ndarray], tables: Sequence[int]) -> list[RowsToEvict]:
        """Choose rows to evict from those of `tables` that exceed their capacity, for example after a load. Held rows
        stay, so a table may still exceed its capacity."""
        excess_T = self._excess(np.zeros(len(self._usage.rows_T), np.int64))
        over = [t for t in tables if self._usage.evicts_T[t] and excess_T[t] > 0]
        if not over:
            return []
        free_T, to_evict = self._usage.rows_T - self._in_use(held), []
        with self._holding(held):
            cell_N, score_N = self._usage.free_rows(range(SHARDS))
        table_N, id_N, _ = keys_in_cells(cell_N)
        for t in over:
            of = np.flatnonzero(table_N == t)
            least = of[self._least(cell_N[of], score_N[of], int(min(excess_T[t], free_T[t])))]
            to_evict.append(RowsToEvict(table_N[least], id_N[least], "capacity"))
        return to_evict

    def _excess(self, new_T: np.ndarray) -> np.ndarray:
        """Number of rows by which each table would exceed its capacity with `new_T` new rows; negative if there is
        room."""
        excess_T = np.full(len(self._usage.rows_T), -_UNLIMITED, np.int64)
        for t, limit in self._usage.limits.items():
            excess_T[t] = self._usage.rows_T[t] + new_T[t] - limit
        return excess_T

    def _excess_of_all(self, new: int) -> int:
        return -_UNLIMITED if self._usage.capacity is None else len(self._usage) + new - self._usage.capacity

    def _check_enough(self, new_T: np.ndarray, excess_T: np.ndarray, excess: int, held: Sequence[np.ndarray]) -> None:
        """StoreFullError if fewer rows may be evicted than the excess of a table (`excess_T`) or of all tables
        (`excess`)."""
        domains: list[tuple[str, int, int, int | None]] = [
            (f"table {t}", self._usage.limits[t], int(excess_T[t]), t) for t in np.flatnonzero(excess_T > 0).tolist()
        ]
        if excess > 0:
            assert self._usage.capacity is not None
            domains.append(("the store", self._usage.capacity, excess, None))
        most_held = sum(len(place_N) for place_N in held)
        for where, limit, leaving, t in domains:
            known, new = (int(its_T.sum() if t is None else its_T[t]) for its_T in (self._usage.rows_T, new_T))
            evicts = bool(self._usage.evicts_T[t or 0])
            if evicts and known - most_held >= leaving:
                continue
            held_T = self._in_use(held)
            in_use = int(held_T.sum() if t is None else held_T[t])
            if evicts and known - in_use >= leaving:
                continue
            why, least = "nothing says which of them may leave (evict=)", known + new
            if evicts:
                why, least = f"{in_use} of them are in use by this step and cannot leave", in_use + new
            raise (StoreFullError.of_pins if evicts else StoreFullError)(
                f"capacity of {where} is {limit} rows; {known} are kept, {why}, and {new} new ones were asked for; give"
                f" a capacity of at least {least}, or use fewer ids a step"
            )

    def _in_use(self, held: Sequence[np.ndarray]) -> np.ndarray:
        """Number of rows of each table at the places `held`: int64 [T]."""
        place_N = np.unique(np.concatenate([np.empty(0, np.int64), *held]))
        return np.bincount(self._usage.places.table_P[place_N[place_N >= 0]], minlength=len(self._usage.rows_T))

    @contextmanager
    def _holding(self, held: Sequence[np.ndarray]) -> Iterator[None]:
        """Mark the rows at these places as held during the with block, so that no choice contains them."""
        try:
            for place_N in held:
                set_marks(self._usage.places.held_P, place_N, True, threads=self._threads)
            yield
        finally:
            for place_N in held:
                set_marks(self._usage.places.held_P, place_N, False, threads=self._threads)

    def _choose(self, excess_T: np.ndarray, excess: int, held: Sequence[np.ndarray]) -> RowsToEvict:
        """Choose the rows to evict, in one round or more.

        Args:
            excess_T, excess: number of rows to evict from each table, negative if there is room; and from all tables
                together.
            held: as in `make_room`.
        """
        share = max([_ROUND_ROWS / max(len(self._usage), 1), excess / (_ROUND_SHARE * max(len(self._usage), 1))])
        for t in np.flatnonzero(excess_T > 0).tolist():
            share = max(share, int(excess_T[t]) / (_ROUND_SHARE * int(self._usage.rows_T[t])))
        many, shard = min(SHARDS, math.ceil(SHARDS * share)), self._usage.clock.shard
        tables, ids = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        while (excess_T > 0).any() or excess > 0:
            shards = range(shard, min(shard + many, SHARDS))
            shard = shards.stop % SHARDS
            with self._holding(held):
                table_V, id_V, place_V = keys_in_cells(self._choose_in(shards, excess_T, excess))
            held = [*held, place_V]  # So that no row is chosen twice.
            excess -= len(id_V)
            excess_T -= np.bincount(table_V, minlength=len(excess_T))
            tables.append(table_V)
            ids.append(id_V)
        self._usage.clock.shard = shard
        return RowsToEvict(np.concatenate(tables), np.concatenate(ids), "capacity")

    def _choose_in(self, shards: range, excess_T: np.ndarray, excess: int) -> np.ndarray:
        """Choose rows of these shards to evict; returns the cells of the index with their keys."""
        cell_N, score_N = self._usage.free_rows(shards)
        chosen = [cell_N[:0]]
        if tables := [t for t in self._usage.limits if self._usage.evicts_T[t]]:
            stays_N, table_N = np.ones(len(cell_N), np.bool_), keys_in_cells(cell_N)[0]
            for t in tables:
                of_table = np.flatnonzero(table_N == t)
                some = int(len(of_table) * _ROUND_SHARE)
                count = max(int(excess_T[t]), min(some, int(excess_T[t]) + some), 0)
                least = of_table[self._least(cell_N[of_table], score_N[of_table], count)]
                stays_N[least] = False
                chosen.append(cell_N[least])
                excess -= len(least)
            cell_N, score_N = cell_N[stays_N], score_N[stays_N]
        if excess > 0:
            chosen.append(cell_N[self._least(cell_N, score_N, max(excess, int(len(cell_N) * _ROUND_SHARE)))])
        return np.concatenate(chosen)

    def _runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Consecutive shards, in the given order, grouped until a group has `_RUN_CELLS` cells."""
        cells_of, begin, end, cells = self._usage.places.index.shards[1].tolist(), 0, 0, 0
        for shard in shards:
            if shard != end or cells >= _RUN_CELLS:
                if begin < end:
                    yield range(begin, end)
                begin, cells = shard, 0
            end = shard + 1
            cells += cells_of[shard]
        if begin < end:
            yield range(begin, end)

    def _least(self, cell_N: np.ndarray, score_N: np.ndarray, count: int) -> np.ndarray:
        """Indices of the `count` rows of least score, or of all rows if there are fewer. Ties are broken by the hash of
        the key."""

        def tie_of(place_E: np.ndarray) -> np.ndarray:
            table_E, id_E, _ = keys_in_cells(cell_N[place_E])
            return ties_of(table_E, id_E, threads=self._threads)

        return least_of(score_N, count, tie_of)

    def due(self, step: int) -> list[int]:
        """Numbers of the shards to sweep in this step. Within `sweep_steps` steps every shard is swept once."""
        sweeps = [policy.sweep_steps for policy in self._usage.policies if policy.sweeps]
        clock = self._usage.clock
        step += clock.steps
        if not sweeps or step <= clock.swept_step:
            return []
        many = SHARDS * step // min(sweeps) - SHARDS * clock.swept_step // min(sweeps)
        return [(clock.swept + n) % SHARDS for n in range(min(many, SHARDS))]

    def swept(self, step: int, shards: Sequence[int]) -> None:
        """Note that the shards from `due` have been swept in this step."""
        if shards:
            clock = self._usage.clock
            clock.swept, clock.swept_step = (shards[-1] + 1) % SHARDS, step + clock.steps

    def expired(
        self, shards: Iterable[int], step: int, second: int, held: Sequence[np.ndarray], *, sweeps: bool = False
    ) -> list[RowsToEvict]:
        """Choose the rows of these shards that were not used for longer than their policies allow.

        Args:
            step, second: the present step and second.
            sweeps: if True, leave out tables that are too small to sweep (`sweep_above`).
        """
        limits = [(policy.expire_after_steps, policy.expire_after_seconds) for policy in self._usage.policies]
        steps_T = np.array([_UNLIMITED if limit is None else limit for limit, _ in limits])
        seconds_T = np.array([_UNLIMITED if limit is None else limit for _, limit in limits])
        if sweeps:
            few_T = self._usage.rows_T <= self._usage.above_T
            steps_T[few_T] = seconds_T[few_T] = _UNLIMITED
        step += self._usage.clock.steps
        to_evict = []
        for run in self._runs(shards):
            cell_N, last_N = self._usage.free_rows(run, self._usage.places.word_PX, self._usage.places.first + 2)
            table_N, id_N, place_N = keys_in_cells(cell_N)
            last_N2 = last_N.view(np.uint32).reshape(-1, 2)
            old_N = step - last_N2[:, 0].astype(np.int64) > steps_T.take(table_N)
            old_N |= second - last_N2[:, 1].astype(np.int64) > seconds_T.take(table_N)
            if old_N.any():
                with self._holding(held):
                    old = np.flatnonzero(old_N & ~self._usage.places.held_P[place_N])
                to_evict.append(RowsToEvict(table_N[old], id_N[old], "expired"))
        return [rows for rows in to_evict if len(rows.id_V)]

    def keys_to_weigh(self, shards: Iterable[int], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield tables and ids of the rows of these shards whose weights a sweep must check, at most `most` at a
        time."""
        weighed_T = self._usage.rows_T > self._usage.above_T
        weighed_T &= np.array([policy.sweeps_weights for policy in self._usage.policies])
        if weighed_T.any():
            for run in self._runs(shards):
                table_N, id_N, _ = self._usage.rows_in(run)
                weighed = np.flatnonzero(weighed_T.take(table_N))
                for begin in range(0, len(weighed), most):
                    piece = weighed[begin : begin + most]
                    yield table_N[piece], id_N[piece]

    def unwanted(
        self, table_N: np.ndarray, id_N: np.ndarray, weight_ND: np.ndarray, held: Sequence[np.ndarray]
    ) -> list[RowsToEvict]:
        """Choose, among these rows with their weights (float32 [N, D]), the rows to evict by `expire_below_norm` and
        `expire_where`. ValueError if the function `expire_where` fails."""
        to_evict = []
        with self._holding(held):
            free_N = ~self._usage.places.held_P[self._usage.find(table_N, id_N)]
        for t in np.unique(table_N).tolist():
            policy = self._usage.policies[t]
            of_table = np.flatnonzero((table_N == t) & free_N)
            if policy.expire_below_norm is not None:
                norm_N = np.sqrt(np.square(weight_ND[of_table].astype(np.float64)).sum(1))
                is_small_N = norm_N < policy.expire_below_norm  # False for a norm of NaN: left to `expire_where`.
                small = of_table[is_small_N]
                to_evict.append(RowsToEvict(table_N[small], id_N[small], "norm"))
                of_table = of_table[~is_small_N]
            if policy.expire_where is not None and len(of_table):
                try:
                    leaves_N = np.asarray(policy.expire_where(t, id_N[of_table].copy(), weight_ND[of_table].copy()))
                except Exception as error:
                    raise ValueError(f"expire_where of table {t} raised {error!r}; no row has left") from error
                if leaves_N.dtype != np.bool_ or leaves_N.shape != of_table.shape:
                    raise ValueError(
                        f"expire_where must give bool [{len(of_table)}], one for each row, got {leaves_N.dtype}"
                        f" {list(leaves_N.shape)}"
                    )
                gone = of_table[leaves_N]
                to_evict.append(RowsToEvict(table_N[gone], id_N[gone], "where"))
        return [rows for rows in to_evict if len(rows.id_V)]
