"""Index of the usage of every row, and choice of the rows to evict.

The ledger knows the key of every row of a store, its score, and when it was last used. It is asked before a lookup's
rows are made, and told after; the same numbers are in the row's record (`MARKS` words of it), which moves between tiers
and into snapshots, and from which the ledger is made anew after a load. Where all rows lie still in one slab, the
ledger has no more of its own than the scores side by side: it finds keys in the index over the slab, the place of a row
is its slot, and its numbers are those in the record itself.

Which rows leave depends on keys, scores and counts alone, never on where rows are or who has prefetched them. All rows
are in the 256 shards of an index, by their keys' hashes. A round takes the rows that leave out of some of them, the
shards of the next round being the next ones: so the time of a round does not grow with the table. Each shard is a
random sample of the rows, and gives up as large a share as all others by the time that each had its turn. A round is
for all tables that are full, whichever needs room: so each of them has its turn with every shard, too.

U distinct keys of a lookup, N rows, P places of the ledger, V rows that leave, T tables.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from oneemb.kernels.least import least_of
from oneemb.kernels.score_rows import COUNT, DECAYED, EPOCH_COUNT, score_uses, ties_of
from oneemb.kernels.shard_rows import keys_in_cells, rows_of_shards
from oneemb.kernels.slot_marks import set_marks
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError, StoreFullError
from oneemb.storage.hash_index import SHARDS
from oneemb.storage.policies.row_places import MARKS, LyingRows, OwnPlaces, SlotPlaces
from oneemb.storage.policies.row_policy import RowPolicy, rules_of

__all__ = ["MARKS", "Departing", "Ledger", "LedgerClock"]

# Rows that a round looks at, or all where there are fewer; and which share of the rows it looks at leave at least.
_ROUND_ROWS = 1 << 17
_ROUND_SHARE = 1 / 16

# Cells that a sweep looks at together, in some milliseconds.
_RUN_CELLS = 1 << 16

_UNLIMITED = 2**62
_SECONDS_MAX = 2**32 - 1

# Places that address space is taken for before they are needed.
_PLACES_AT_ONCE = 1 << 26


def _halves(stamp: int) -> tuple[int, int]:
    """The lower and the upper half of 64 bits."""
    return stamp & 0xFFFFFFFF, stamp >> 32


class Departing(NamedTuple):
    """Rows that are to leave."""

    table_V: np.ndarray
    id_V: np.ndarray
    reason: str


@dataclass
class LedgerClock:
    """Counts of a ledger; a snapshot keeps them."""

    lookups: int = 0
    shard: int = 0
    """Where the next round of eviction begins."""
    swept: int = 0
    """The shard at which the next sweep begins."""
    swept_step: int = 0
    """The step of the last sweep."""
    seconds: int = 0
    """On the ledger's own clock, which stands while there is no job."""
    epoch: int = 0
    steps: int = 0
    """Steps before those of the store, which begins to count them anew where rows lose their optimizer's state."""

    @classmethod
    def of_meta(cls, meta: dict[str, Any], name: str) -> "LedgerClock | None":
        """The clock that `Ledger.to_meta` has put into the meta of snapshot `name`; None = it is not there.

        Raises:
            CorruptTableError: the entry is none that a ledger writes.
        """
        found = meta.get("ledger")
        if found is None:
            return None
        names = {field.name for field in fields(cls)}
        most = {"shard": SHARDS - 1, "swept": SHARDS - 1, "seconds": _SECONDS_MAX, "epoch": 2**32 - 1}
        if not isinstance(found, dict) or found.keys() != names or not all(
            type(value) is int and 0 <= value <= most.get(key, _UNLIMITED) for key, value in found.items()
        ):  # fmt: skip
            raise CorruptTableError(
                f"snapshot {name!r} says of the uses of its rows what no embedding says: {repr(found)[:100]}; restore"
                " its file from a copy, or load another one"
            )
        return cls(**found)


class Ledger:
    """See the head of this file.

    Args:
        policies: of each table.
        capacity: rows of all tables together at most; None = no limit.
        threads: runs loops.
        row_bytes: of a row, by which a `capacity_mb` is so many rows.
    """

    def __init__(self, policies: Sequence[RowPolicy], capacity: int | None, threads: Threads, row_bytes: int = 4):
        self.policies = tuple(policies)
        self.clock = LedgerClock()
        self._capacity, self._threads = capacity, threads
        self._rules = rules_of(policies)
        self._limits: dict[int, int] = {}
        self._above_T = np.full(len(policies), -1)
        self.fit(row_bytes)
        self._evicts_T = np.array([policy.evict is not None for policy in policies])
        # One for all tables: see `policies_of`.
        times = [policy.clock or time.monotonic for policy in policies if policy.expire_after_seconds is not None]
        self._time = times[0] if times else None
        self._began = self._now()
        self.stamps = policies[0].timestamps
        """Whether marks hold the time of a row's last use, in nanoseconds, in place of its step and second."""
        self._stamp = 0
        self.places: OwnPlaces | SlotPlaces = self._own_places()
        self.left: dict[str, int] = {}
        """How many rows have left, by reason."""
        self.clear()

    def fit(self, row_bytes: int) -> None:
        """Let rows have so many bytes from here on."""
        for t, policy in enumerate(self.policies):
            if policy.capacity is not None:
                self._limits[t] = policy.capacity
            elif policy.capacity_mb is not None:
                self._limits[t] = max(1, policy.capacity_mb * 2**20 // row_bytes)
            if policy.sweep_above is not None:
                self._above_T[t] = policy.sweep_above
            elif policy.sweep_above_mb is not None:
                self._above_T[t] = policy.sweep_above_mb * 2**20 // row_bytes

    def __len__(self) -> int:
        return len(self.places.index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self.places.nbytes

    def clear(self) -> None:
        """Forget every row, and begin to count anew."""
        began = self._now()
        self.places = self.places.cleared()
        self.clock, self._began = LedgerClock(), began
        self.rows_T = np.zeros(len(self.policies), np.int64)

    # ---- where rows are ---------------------------------------------------------------------------------------------

    @property
    def lies_in_rows(self) -> bool:
        """Whether places are slots, and what is known of rows is in their records."""
        return isinstance(self.places, SlotPlaces)

    def lie_in(self, rows: LyingRows | None, first: int) -> None:
        """Know of rows what is in their records, from word `first` on. They are those that are known now, or will be
        by `clear` and `add`. None = rows do not lie still; what was in records that did is forgotten."""
        if rows is not None:
            self.places = SlotPlaces(rows, first)
        elif self.lies_in_rows:
            self.places = self._own_places()

    def move_out(self) -> None:
        """Know of rows what is in their records now, and go on without these.

        Raises:
            IndexMemoryError, MemoryError: there is no memory for it; nothing has changed.
        """
        if self.lies_in_rows:
            table_N, id_N, place_N = self.items()
            places, mark_N4 = self._own_places(), self.marks(place_N)
            place_N = places.add(table_N, id_N, None)
            places.word_PX[place_N] = mark_N4
            self.places = places

    def _own_places(self) -> OwnPlaces:
        most = self._capacity or 0
        if len(self._limits) == len(self.policies):
            most = min(sum(self._limits.values()), most or _PLACES_AT_ONCE)
        return OwnPlaces(self._threads, min(most, _PLACES_AT_ONCE))

    # ---- time -------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        if self._time is None:
            return 0.0
        try:
            now = float(self._time())
        except Exception as error:
            raise ValueError(f"the clock of a policy must give seconds, and raised {error!r}") from error
        if not math.isfinite(now):
            raise ValueError(f"the clock of a policy must give seconds, got {now}")
        return now

    @property
    def second(self) -> int:
        """Whole seconds on the ledger's own clock.

        Raises:
            ValueError: the policies' clock gives none.
        """
        passed = min(max(0.0, self._now() - self._began), _SECONDS_MAX)  # Of two finite numbers it may be infinite.
        return min(self.clock.seconds + int(passed), _SECONDS_MAX)

    def timestamp(self) -> int:
        """Nanoseconds since 1970, later than all that were given before."""
        self._stamp = max(self._stamp + 1, time.time_ns())
        return self._stamp

    def counted(self) -> LedgerClock:
        """Counts up to now."""
        return replace(self.clock, seconds=self.second)

    def to_meta(self) -> dict[str, Any]:
        """Entries of the ledger for the meta of a snapshot."""
        stamps = {"timestamps": True} if self.stamps else {}
        return {"ledger": asdict(self.counted()), "score_rules": self.rules(), **stamps}

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """The place of each key, -1 of one that has no row: int64 [U]."""
        return self.places.index.find(table_U, id_U)

    def reserve(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Have memory for rows of these keys, which have none.

        Raises:
            IndexMemoryError, MemoryError: there is none.
        """
        self.places.reserve(table_U, id_U)

    def use(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray, uses_U: np.ndarray, step: int, second: int,
        slot_U: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Count a lookup of these keys, whose rows are there now.

        Args:
            place_U: what `find` has given. New keys, of -1, are known from here on, and have their places in it.
            uses_U: int64, ids that each key is of.
            step: of the store.
            second: of the ledger's clock.
            slot_U: where the rows are, if their numbers are in their records.
        """
        is_new_U = place_U < 0
        new = np.flatnonzero(is_new_U)
        if len(new):
            place_U[new] = self._add(table_U[new], id_U[new], None if slot_U is None else slot_U[new])
        step += self.clock.steps
        if self.stamps:
            step, second = _halves(self.timestamp())
        score_uses(
            place_U, is_new_U, table_U, id_U, uses_U, self._rules, self.places.score_P,
            self.places.word_PX, self.places.first, lookup=self.clock.lookups + 1, step=step, second=second,
            epoch=self.clock.epoch, threads=self._threads,
        )  # fmt: skip
        self.clock.lookups += 1

    def _add(self, table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray | None = None) -> np.ndarray:
        """Know these rows, of keys that were not known. Returns their places."""
        place_N = self.places.add(table_N, id_N, slot_N)
        self.rows_T += np.bincount(table_N, minlength=len(self.rows_T))
        return place_N

    def items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables, ids and places of all rows."""
        return self._rows_in(range(SHARDS))

    def marks(self, place_N: np.ndarray) -> np.ndarray:
        """Usage metadata of the rows at these places, for their records: uint32 [N, MARKS]."""
        first = self.places.first
        return self.places.word_PX[place_N, first : first + MARKS]

    def scores(self, place_N: np.ndarray) -> np.ndarray:
        """Scores of the rows at these places, uint64 [N]."""
        return self.places.score_P[place_N]

    @property
    def counts_uses(self) -> bool:
        """Whether a score depends on how many ids of a lookup are of a key."""
        return bool(np.isin(self._rules.kind_T, (COUNT, DECAYED, EPOCH_COUNT)).any())

    def check_scores(self, table_N: np.ndarray, score_N: np.ndarray) -> None:
        """Raise ValueError unless rows of these tables may have these scores, uint64 [N]."""
        is_number_N = self._rules.kind_T.take(table_N) == DECAYED
        if (score_N[is_number_N] >= np.array(np.inf).view(np.uint64)).any():
            raise ValueError("scores of LFU with a half-life are bits of finite float64 numbers, 0 or more, got others")

    def set_scores(self, place_N: np.ndarray, score_N: np.ndarray) -> None:
        """Set the scores of the rows at these places."""
        self.places.score_P[place_N] = score_N
        self._set_numbers(place_N, score_N, 0)

    def _set_numbers(self, place_N: np.ndarray, number_N: np.ndarray, word: int) -> None:
        """Put 64 bits into two words of what is known of each row."""
        its = slice(self.places.first + word, self.places.first + word + 2)
        self.places.word_PX[place_N, its] = np.ascontiguousarray(number_N, np.uint64).view(np.uint32).reshape(-1, 2)

    def give(self, table: int, score: int) -> None:
        """Let uses of rows of a table of `GivenScore` give this score from now on."""
        self._rules.given_T[table] = score

    def uses(self, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids int64 [N], scores and times of last use, both uint64 [N], of the rows of a table."""
        table_N, id_N, place_N = self._rows_in(range(SHARDS))
        its = np.flatnonzero(table_N == table)
        mark_N2 = self.marks(place_N[its]).view(np.uint64)
        return id_N[its], mark_N2[:, 0].copy(), mark_N2[:, 1].copy()

    def set_times(self, place_N: np.ndarray, time_N: np.ndarray) -> None:
        """Set the times of last use, uint64, of the rows at these places."""
        self._set_numbers(place_N, time_N, 2)
        self._stamp = max(self._stamp, min(int(time_N.max(initial=0)), _UNLIMITED))

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, reason: str, erased_V: np.ndarray | None = None) -> None:
        """These rows have left.

        Args:
            erased_V: bool, which there were, where places are slots.
        """
        known_V = self.places.forget(table_V, id_V, erased_V)
        self.rows_T -= np.bincount(table_V[known_V], minlength=len(self.rows_T))
        if known_V.any():
            self.left[reason] = self.left.get(reason, 0) + int(np.count_nonzero(known_V))

    # ---- who leaves -------------------------------------------------------------------------------------------------

    def make_room(self, table_M: np.ndarray, held: Sequence[np.ndarray]) -> list[Departing]:
        """Which rows have to leave before new ones, of these tables, begin.

        Args:
            held: places of rows that may not leave, arrays, -1 for none; those of the lookup's other keys among them.

        Raises:
            StoreFullError: there would be more rows than fit, and too few that may leave.
        """
        if len(table_M) == 0:
            return []
        new_T = np.bincount(table_M, minlength=len(self.rows_T))
        excess_T = self._excess(new_T)
        over_T, excess = (excess_T > 0) & (new_T > 0), self._excess_of_all(len(table_M))
        if not over_T.any() and excess <= 0:
            return []
        self._check_enough(new_T, np.where(over_T, excess_T, 0), excess, held)
        excess_T[~over_T] = np.minimum(excess_T[~over_T], 0)
        return [self._choose(excess_T, excess, held)]

    def fitting(self, table_M: np.ndarray, held: Sequence[np.ndarray]) -> np.ndarray:
        """Which of new rows, of these tables, there can be room for: bool [M]. All, but of tables that refuse rows
        where they are full, which take the first ones.

        Args:
            held: as in `make_room`.
        """
        fits_M = np.ones(len(table_M), np.bool_)
        new_T = np.bincount(table_M, minlength=len(self.rows_T))
        excess_T = self._excess(new_T)
        full = [t for t, policy in enumerate(self.policies) if policy.when_full == "refuse" and excess_T[t] > 0]
        free_T = self.rows_T - self._in_use(held) if full else self.rows_T
        for t in full:
            leaving = max(0, int(free_T[t])) if self._evicts_T[t] else 0
            many = max(0, int(new_T[t] - excess_T[t] + leaving))
            fits_M[np.flatnonzero(table_M == t)[many:]] = False
        return fits_M

    def surplus(self, held: Sequence[np.ndarray], tables: Sequence[int]) -> list[Departing]:
        """Which rows have to leave of these tables where they were loaded with more than they may have, as far as they
        may."""
        excess_T = self._excess(np.zeros(len(self.rows_T), np.int64))
        over = [t for t in tables if self._evicts_T[t] and excess_T[t] > 0]
        if not over:
            return []
        free_T, departing = self.rows_T - self._in_use(held), []
        with self._holding(held):
            cell_N, score_N = self._free_rows(range(SHARDS))
        table_N, id_N, _ = keys_in_cells(cell_N)
        for t in over:
            of = np.flatnonzero(table_N == t)
            its = of[self._least(cell_N[of], score_N[of], int(min(excess_T[t], free_T[t])))]
            departing.append(Departing(table_N[its], id_N[its], "capacity"))
        return departing

    def _excess(self, new_T: np.ndarray) -> np.ndarray:
        """How many rows more than it may have each table has with so many new ones; below 0 where there is room."""
        excess_T = np.full(len(self.rows_T), -_UNLIMITED, np.int64)
        for t, limit in self._limits.items():
            excess_T[t] = self.rows_T[t] + new_T[t] - limit
        return excess_T

    def _excess_of_all(self, new: int) -> int:
        return -_UNLIMITED if self._capacity is None else len(self) + new - self._capacity

    def _check_enough(self, new_T: np.ndarray, excess_T: np.ndarray, excess: int, held: Sequence[np.ndarray]) -> None:
        """Raise StoreFullError unless as many rows may leave as have to."""
        domains: list[tuple[str, int, int, int | None]] = [
            (f"table {t}", self._limits[t], int(excess_T[t]), t) for t in np.flatnonzero(excess_T > 0).tolist()
        ]
        if excess > 0:
            assert self._capacity is not None
            domains.append(("the store", self._capacity, excess, None))
        most_held = sum(len(place_N) for place_N in held)
        for where, limit, leaving, t in domains:
            known, new = (int(its_T.sum() if t is None else its_T[t]) for its_T in (self.rows_T, new_T))
            evicts = bool(self._evicts_T[t or 0])
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
        """How many rows of each table are at these places: int64 [T]."""
        place_N = np.unique(np.concatenate([np.empty(0, np.int64), *held]))
        return np.bincount(self.places.table_P[place_N[place_N >= 0]], minlength=len(self.rows_T))

    @contextmanager
    def _holding(self, held: Sequence[np.ndarray]) -> Iterator[None]:
        """Rows at these places may not leave."""
        try:
            for place_N in held:
                set_marks(self.places.held_P, place_N, True, threads=self._threads)
            yield
        finally:
            for place_N in held:
                set_marks(self.places.held_P, place_N, False, threads=self._threads)

    def _choose(self, excess_T: np.ndarray, excess: int, held: Sequence[np.ndarray]) -> Departing:
        """The rows that leave, in a round or more.

        Args:
            excess_T: how many of each table have to leave; below 0 where so many more would fit.
            excess: how many have to leave of all tables, these among them.
            held: as in `make_room`.
        """
        share = max([_ROUND_ROWS / max(len(self), 1), excess / (_ROUND_SHARE * max(len(self), 1))])
        for t in np.flatnonzero(excess_T > 0).tolist():
            share = max(share, int(excess_T[t]) / (_ROUND_SHARE * int(self.rows_T[t])))
        many, shard = min(SHARDS, math.ceil(SHARDS * share)), self.clock.shard
        tables, ids = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        while (excess_T > 0).any() or excess > 0:
            shards = range(shard, min(shard + many, SHARDS))
            shard = shards.stop % SHARDS
            with self._holding(held):
                table_V, id_V, place_V = keys_in_cells(self._choose_in(shards, excess_T, excess))
            held = [*held, place_V]  # None leaves twice.
            excess -= len(id_V)
            excess_T -= np.bincount(table_V, minlength=len(excess_T))
            tables.append(table_V)
            ids.append(id_V)
        self.clock.shard = shard
        return Departing(np.concatenate(tables), np.concatenate(ids), "capacity")

    def _choose_in(self, shards: range, excess_T: np.ndarray, excess: int) -> np.ndarray:
        """Rows of these shards to evict: the cells of the index that have their keys."""
        cell_N, score_N = self._free_rows(shards)
        chosen = [cell_N[:0]]
        if tables := [t for t in self._limits if self._evicts_T[t]]:
            stays_N, table_N = np.ones(len(cell_N), np.bool_), keys_in_cells(cell_N)[0]
            for t in tables:
                of_table = np.flatnonzero(table_N == t)
                some = int(len(of_table) * _ROUND_SHARE)
                count = max(int(excess_T[t]), min(some, int(excess_T[t]) + some), 0)
                its = of_table[self._least(cell_N[of_table], score_N[of_table], count)]
                stays_N[its] = False
                chosen.append(cell_N[its])
                excess -= len(its)
            cell_N, score_N = cell_N[stays_N], score_N[stays_N]
        if excess > 0:
            chosen.append(cell_N[self._least(cell_N, score_N, max(excess, int(len(cell_N) * _ROUND_SHARE)))])
        return np.concatenate(chosen)

    def _free_rows(
        self, shards: range, word_PX: np.ndarray | None = None, first: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows in these shards that are not held: the cells that their keys are in; and their scores, or the 64
        bits that begin at word `first` of others."""
        address_P, cells_P = (array[shards.start : shards.stop] for array in self.places.index.shards)
        word_PX = self.places.score_PX if word_PX is None else word_PX
        return rows_of_shards(address_P, cells_P, word_PX, first, self.places.held_P, threads=self._threads)

    def _runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Consecutive shards, in the given order, grouped until a group has `_RUN_CELLS` cells."""
        cells_of, begin, end, cells = self.places.index.shards[1].tolist(), 0, 0, 0
        for shard in shards:
            if shard != end or cells >= _RUN_CELLS:
                if begin < end:
                    yield range(begin, end)
                begin, cells = shard, 0
            end = shard + 1
            cells += cells_of[shard]
        if begin < end:
            yield range(begin, end)

    def _rows_in(self, shards: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables, ids and places of the rows in these shards."""
        return keys_in_cells(self._free_rows(shards)[0])

    def _least(self, cell_N: np.ndarray, score_N: np.ndarray, count: int) -> np.ndarray:
        """Which `count` rows are of least score, or all; between equal ones the hash of the key decides."""
        if count >= len(score_N):
            return np.arange(len(score_N))
        if count == 0:
            return np.empty(0, np.int64)
        below, equal = least_of(score_N, count)
        if len(equal) > (more := count - len(below)):
            table_N, id_N, _ = keys_in_cells(cell_N[equal])
            equal = equal[np.argsort(ties_of(table_N, id_N, threads=self._threads))[:more]]
        return np.concatenate([below, equal])

    def due(self, step: int) -> list[int]:
        """The shards whose turn it is to be swept in this step: all of them in `sweep_steps`."""
        sweeps = [policy.sweep_steps for policy in self.policies if policy.sweeps]
        step += self.clock.steps
        if not sweeps or step <= self.clock.swept_step:
            return []
        many = SHARDS * step // min(sweeps) - SHARDS * self.clock.swept_step // min(sweeps)
        return [(self.clock.swept + n) % SHARDS for n in range(min(many, SHARDS))]

    def swept(self, step: int, shards: Sequence[int]) -> None:
        """Note that the shards that were due have been swept."""
        if shards:
            self.clock.swept, self.clock.swept_step = (shards[-1] + 1) % SHARDS, step + self.clock.steps

    def expired(
        self, shards: Iterable[int], step: int, second: int, held: Sequence[np.ndarray], *, sweeps: bool = False
    ) -> list[Departing]:
        """The rows of these shards that were not used for longer than their policies say.

        Args:
            sweeps: pass over tables that have too few rows to be swept.
        """
        limits = [(policy.expire_after_steps, policy.expire_after_seconds) for policy in self.policies]
        steps_T = np.array([_UNLIMITED if limit is None else limit for limit, _ in limits])
        seconds_T = np.array([_UNLIMITED if limit is None else limit for _, limit in limits])
        if sweeps:
            few_T = self.rows_T <= self._above_T
            steps_T[few_T] = seconds_T[few_T] = _UNLIMITED
        step += self.clock.steps
        departing = []
        for run in self._runs(shards):
            cell_N, last_N = self._free_rows(run, self.places.word_PX, self.places.first + 2)
            table_N, id_N, place_N = keys_in_cells(cell_N)
            last_N2 = last_N.view(np.uint32).reshape(-1, 2)
            old_N = step - last_N2[:, 0].astype(np.int64) > steps_T.take(table_N)
            old_N |= second - last_N2[:, 1].astype(np.int64) > seconds_T.take(table_N)
            if old_N.any():
                with self._holding(held):
                    old = np.flatnonzero(old_N & ~self.places.held_P[place_N])
                departing.append(Departing(table_N[old], id_N[old], "expired"))
        return [its for its in departing if len(its.id_V)]

    def keys_to_weigh(self, shards: Iterable[int], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tables and ids of the rows of these shards whose weights sweeps look at, at most so many at a time."""
        weighed_T = np.array([policy.sweeps_weights for policy in self.policies]) & (self.rows_T > self._above_T)
        if weighed_T.any():
            for run in self._runs(shards):
                table_N, id_N, _ = self._rows_in(run)
                weighed = np.flatnonzero(weighed_T.take(table_N))
                for begin in range(0, len(weighed), most):
                    its = weighed[begin : begin + most]
                    yield table_N[its], id_N[its]

    def unwanted(
        self, table_N: np.ndarray, id_N: np.ndarray, weight_ND: np.ndarray, held: Sequence[np.ndarray]
    ) -> list[Departing]:
        """The rows among these that are to leave for their weights, float32 [N, D].

        Raises:
            ValueError: the result of `expire_where` is not as it must be.
        """
        departing = []
        with self._holding(held):
            free_N = ~self.places.held_P[self.find(table_N, id_N)]
        for t in np.unique(table_N).tolist():
            policy = self.policies[t]
            of_table = np.flatnonzero((table_N == t) & free_N)
            if policy.expire_below_norm is not None:
                norm_N = np.sqrt(np.square(weight_ND[of_table].astype(np.float64)).sum(1))
                is_small_N = norm_N < policy.expire_below_norm  # Not one of NaN: that is for `expire_where`.
                small = of_table[is_small_N]
                departing.append(Departing(table_N[small], id_N[small], "norm"))
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
                departing.append(Departing(table_N[gone], id_N[gone], "where"))
        return [its for its in departing if len(its.id_V)]

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def begin(self, clock: LedgerClock | None, step: int, step_now: int) -> None:
        """Forget all, and go on from what another ledger has counted, of rows that are to be added.

        Args:
            clock: its; None = there was none: the rows have `first_marks`.
            step: of the store whose ledger that was.
            step_now: of the store that has the rows now.
        """
        self.clear()
        if clock is None:
            self.clock = LedgerClock(lookups=1, swept_step=step_now)
        else:
            self.clock = replace(clock, steps=clock.steps + step - step_now)

    def begin_steps(self, step: int) -> None:
        """The store begins to count its steps anew; `step` was the last one."""
        self.clock.steps += step

    def first_marks(self, table_N: np.ndarray, id_N: np.ndarray, step: int) -> np.ndarray:
        """Usage metadata for rows that are loaded without any: they count as used once, now."""
        rows, second = len(id_N), 0
        if self.stamps:
            step, second = _halves(self.timestamp())
        mark_N4 = np.zeros((rows, MARKS), np.uint32)
        score_uses(
            np.arange(rows), np.ones(rows, np.bool_), table_N, id_N, np.ones(rows, np.int64), self._rules,
            mark_N4.view(np.uint64)[:, 0], mark_N4, 0, lookup=1, step=step, second=second, epoch=0,
            threads=self._threads,
        )  # fmt: skip
        return mark_N4

    def add(self, table_N: np.ndarray, id_N: np.ndarray, mark_N4: np.ndarray) -> None:
        """Know rows that have been loaded, with what their records hold."""
        place_N = self._add(table_N, id_N)
        first = self.places.first
        mark_N2 = np.ascontiguousarray(mark_N4).view(np.uint64)
        self.places.word_PX[place_N, first : first + MARKS] = mark_N4
        self.places.score_P[place_N] = mark_N2[:, 0]
        if self.stamps and len(mark_N4):
            self._stamp = max(self._stamp, min(int(mark_N2[:, 1].max()), _UNLIMITED))

    def check_rules(self, meta: dict[str, Any], name: str) -> None:
        """Raise StorageError if the scores in the snapshot of this meta are those of other rules."""
        theirs = meta.get("score_rules")
        if theirs is not None and bool(meta.get("timestamps")) != self.stamps:
            raise StorageError(
                f"snapshot {name!r} was saved with timestamps={bool(meta.get('timestamps'))}, and this embedding's"
                " policy says otherwise; load it with the same"
            )
        # Further tables here are no difference.
        if theirs is not None and (not isinstance(theirs, list) or theirs != self.rules()[: len(theirs)]):
            raise StorageError(
                f"snapshot {name!r} holds scores of other rules than this embedding's evict= asks for; load it into an"
                " embedding with the policy that it was saved with, or export its rows and import them"
            )

    def rules(self) -> list[list[float]]:
        """Rule by which the rows of each table are scored, as a snapshot has it."""
        return [[int(kind), float(param)] for kind, param in zip(*self._rules[:2], strict=True)]
