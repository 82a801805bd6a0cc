"""The usage index: key and usage metadata of every row, from which policies choose the rows to evict (evictions.py).

For each row of a store the usage index has the key, the score, and the time of the last use. A lookup reads it before
rows are made and updates it afterwards. The row's record has the same metadata (`USAGE_WORDS` words), moves between
tiers and into snapshots, and is the source from which a load rebuilds the index. If all rows have stable slots in one
slab, the usage index stores only the scores, side by side: keys are found in the index of the slab, the place of a row
is its slot, and the metadata is read from the records.

Shape letters: U distinct keys of a lookup, N rows, P places, X words of a place, V evicted rows, T tables.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from oneemb.kernels.score_rows import COUNT, DECAYED, EPOCH_COUNT, score_uses
from oneemb.kernels.shard_rows import keys_in_cells, rows_of_shards
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.hash_index import SHARDS
from oneemb.storage.policies.row_places import USAGE_WORDS, OwnPlaces, SlotPlaces, StableRows
from oneemb.storage.policies.row_policy import RowPolicy, rules_of

SECONDS_MAX = 2**32 - 1
"""Most seconds that a clock counts."""


@dataclass
class UsageClock:
    """Counts of a usage index that a snapshot contains: lookups, seconds, epoch, steps, and positions of rounds."""

    lookups: int = 0
    shard: int = 0
    """Shard at which the next round of eviction begins."""
    swept: int = 0
    """The shard at which the next sweep begins."""
    swept_step: int = 0
    """The step of the last sweep."""
    seconds: int = 0
    """Seconds that the usage index has run, over all jobs; time in which no job runs does not count."""
    epoch: int = 0
    steps: int = 0
    """Steps to add to those of the store. The store counts from 0 again when rows lose their optimizer state."""

    @classmethod
    def of_meta(cls, meta: dict[str, Any], name: str) -> "UsageClock | None":
        """The clock that `UsageIndex.to_meta` has put into the meta of snapshot `name`; None = it is not there.
        CorruptTableError if the entry is invalid."""
        found = meta.get("ledger")  # The name of the entry in the file format; see FORMAT.md.
        if found is None:
            return None
        names = {field.name for field in fields(cls)}
        most = {"shard": SHARDS - 1, "swept": SHARDS - 1, "seconds": SECONDS_MAX, "epoch": 2**32 - 1}
        if not isinstance(found, dict) or found.keys() != names or not all(
            type(value) is int and 0 <= value <= most.get(key, _UNLIMITED) for key, value in found.items()
        ):  # fmt: skip
            raise CorruptTableError(
                f"snapshot {name!r} has an invalid entry for the clock of its usage index: {repr(found)[:100]};"
                " restore its file from a copy, or load another snapshot"
            )
        return cls(**found)


_UNLIMITED = 2**62


def _halves(stamp: int) -> tuple[int, int]:
    """The lower and the upper half of 64 bits."""
    return stamp & 0xFFFFFFFF, stamp >> 32


class UsageIndex:
    """The usage index of a store.

    Args:
        capacity: most rows of all tables together; None = no limit.
        row_bytes: bytes of a row, by which a `capacity_mb` is converted to a number of rows.
    """

    def __init__(self, policies: Sequence[RowPolicy], capacity: int | None, threads: Threads, row_bytes: int = 4):
        self.policies = tuple(policies)
        self.clock = UsageClock()
        self.capacity, self._threads = capacity, threads
        self._rules = rules_of(policies)
        self.limits: dict[int, int] = {}
        """{table with a capacity: most rows of the table}."""
        self.above_T = np.full(len(policies), -1)
        """A table is swept if it has more rows than this."""
        self.fit(row_bytes)
        self.evicts_T = np.array([policy.evict is not None for policy in policies])
        # All tables have the same clock: `policies_of` checks this.
        times = [policy.clock or time.monotonic for policy in policies if policy.expire_after_seconds is not None]
        self._time = times[0] if times else None
        self._began = self._now()
        self.stamps = policies[0].timestamps
        """Whether usage words hold the time of a row's last use, in nanoseconds, in place of its step and second."""
        self._stamp = 0
        self.places: OwnPlaces | SlotPlaces = OwnPlaces(self._threads)
        self.left: dict[str, int] = {}
        """{reason: number of evicted rows}."""
        self.clear()

    def fit(self, row_bytes: int) -> None:
        """Compute the limits that are given in MiB for rows of this size."""
        for t, policy in enumerate(self.policies):
            if policy.capacity is not None:
                self.limits[t] = policy.capacity
            elif policy.capacity_mb is not None:
                self.limits[t] = max(1, policy.capacity_mb * 2**20 // row_bytes)
            if policy.sweep_above is not None:
                self.above_T[t] = policy.sweep_above
            elif policy.sweep_above_mb is not None:
                self.above_T[t] = policy.sweep_above_mb * 2**20 // row_bytes

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
        self.clock, self._began = UsageClock(), began
        self.rows_T = np.zeros(len(self.policies), np.int64)

    # ---- where rows are ---------------------------------------------------------------------------------------------

    @property
    def in_rows(self) -> bool:
        """Whether places are slots, and the usage metadata is only in the rows' records."""
        return isinstance(self.places, SlotPlaces)

    def use_rows(self, rows: StableRows | None, first: int) -> None:
        """Use the usage metadata in the records of rows with stable slots, which begins at word `first`. rows=None:
        slots are not stable; begin with an empty array instead."""
        if rows is not None:
            self.places = SlotPlaces(rows, first)
        elif self.in_rows:
            self.places = OwnPlaces(self._threads)

    def move_out(self) -> None:
        """Copy the usage metadata out of the records into a separate array, and use the array. After a memory error
        nothing has changed."""
        if self.in_rows:
            table_N, id_N, place_N = self.items()
            places, usage_N4 = OwnPlaces(self._threads), self.usage_words(place_N)
            place_N = places.add(table_N, id_N, None)
            places.word_PX[place_N] = usage_N4
            self.places = places

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
        """Whole seconds that the usage index has run, over all jobs, by the policies' `clock` function. ValueError if
        that function fails."""
        passed = min(max(0.0, self._now() - self._began), SECONDS_MAX)  # The difference may overflow to infinity.
        return min(self.clock.seconds + int(passed), SECONDS_MAX)

    def timestamp(self) -> int:
        """Nanoseconds since 1970; greater than every earlier result."""
        self._stamp = max(self._stamp + 1, time.time_ns())
        return self._stamp

    def counted(self) -> UsageClock:
        """A copy of the clock with the present second."""
        return replace(self.clock, seconds=self.second)

    def to_meta(self) -> dict[str, Any]:
        """Entries for the meta of a snapshot."""
        stamps = {"timestamps": True} if self.stamps else {}
        return {"ledger": asdict(self.counted()), "score_rules": self.rules(), **stamps}

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Place of each key, or -1 if the key has no row: int64 [U]."""
        return self.places.index.find(table_U, id_U)

    def reserve(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Reserve memory for these new keys. IndexMemoryError or MemoryError if memory does not suffice."""
        self.places.reserve(table_U, id_U)

    def use(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray, uses_U: np.ndarray, step: int, second: int,
        slot_U: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Count a lookup of these keys, whose rows exist now.

        Args:
            place_U: result of `find`. Keys with -1 are added to the index, and their places are written into this
                array.
            uses_U: int64, number of ids in the lookup that have the key.
            step, second: step of the store, and `second` of the usage index.
            slot_U: slots of the rows, if the metadata is in the records.
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
        """Add the rows of new keys to the index. Returns their places."""
        place_N = self.places.add(table_N, id_N, slot_N)
        self.rows_T += np.bincount(table_N, minlength=len(self.rows_T))
        return place_N

    def items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables, ids and places of all rows."""
        return self.rows_in(range(SHARDS))

    def usage_words(self, place_N: np.ndarray) -> np.ndarray:
        """Usage metadata of the rows at these places, for their records: uint32 [N, USAGE_WORDS]."""
        first = self.places.first
        return self.places.word_PX[place_N, first : first + USAGE_WORDS]

    def scores(self, place_N: np.ndarray) -> np.ndarray:
        """Scores of the rows at these places, uint64 [N]."""
        return self.places.score_P[place_N]

    @property
    def counts_uses(self) -> bool:
        """Whether the score of any table depends on how often a key occurs in a lookup."""
        return bool(np.isin(self._rules.kind_T, (COUNT, DECAYED, EPOCH_COUNT)).any())

    def check_scores(self, table_N: np.ndarray, score_N: np.ndarray) -> None:
        """ValueError if a score, uint64 [N], is invalid for the rule of its table."""
        is_number_N = self._rules.kind_T.take(table_N) == DECAYED
        if (score_N[is_number_N] >= np.array(np.inf).view(np.uint64)).any():
            raise ValueError("scores of LFU with a half-life are bits of finite float64 numbers, 0 or more, got others")

    def set_scores(self, place_N: np.ndarray, score_N: np.ndarray) -> None:
        """Set the scores of the rows at these places."""
        self.places.score_P[place_N] = score_N
        self._set_numbers(place_N, score_N, 0)

    def _set_numbers(self, place_N: np.ndarray, number_N: np.ndarray, word: int) -> None:
        """Write 64 bits into words `word` and `word + 1` of the metadata of each row."""
        words = slice(self.places.first + word, self.places.first + word + 2)
        self.places.word_PX[place_N, words] = np.ascontiguousarray(number_N, np.uint64).view(np.uint32).reshape(-1, 2)

    def give(self, table: int, score: int) -> None:
        """Set the score that uses give from now on to rows of a table with `GivenScore`."""
        self._rules.given_T[table] = score

    def uses(self, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids int64 [N], scores and times of last use, both uint64 [N], of the rows of a table."""
        table_N, id_N, place_N = self.rows_in(range(SHARDS))
        of_table = np.flatnonzero(table_N == table)
        usage_N2 = self.usage_words(place_N[of_table]).view(np.uint64)
        return id_N[of_table], usage_N2[:, 0].copy(), usage_N2[:, 1].copy()

    def set_times(self, place_N: np.ndarray, time_N: np.ndarray) -> None:
        """Set the times of last use, uint64, of the rows at these places."""
        self._set_numbers(place_N, time_N, 2)
        self._stamp = max(self._stamp, min(int(time_N.max(initial=0)), _UNLIMITED))

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, reason: str, erased_V: np.ndarray | None = None) -> None:
        """Remove evicted rows from the index. erased_V: whether each row existed, bool [V]; required if places are
        slots."""
        known_V = self.places.forget(table_V, id_V, erased_V)
        self.rows_T -= np.bincount(table_V[known_V], minlength=len(self.rows_T))
        if known_V.any():
            self.left[reason] = self.left.get(reason, 0) + int(np.count_nonzero(known_V))

    # ---- rows of some shards -----------------------------------------------------------------------------------------

    def free_rows(
        self, shards: range, word_PX: np.ndarray | None = None, first: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cells of the index with the keys of the rows in these shards that are not marked in `held_P`, and 64 bits of
        each row: its score, or the two words of `word_PX` from word `first` on."""
        address_P, cells_P = (array[shards.start : shards.stop] for array in self.places.index.shards)
        word_PX = self.places.score_PX if word_PX is None else word_PX
        return rows_of_shards(address_P, cells_P, word_PX, first, self.places.held_P, threads=self._threads)

    def rows_in(self, shards: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables, ids and places of the rows in these shards."""
        return keys_in_cells(self.free_rows(shards)[0])

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def begin(self, clock: UsageClock | None, step: int, step_now: int) -> None:
        """Remove all rows, and continue with the clock of another usage index, whose rows are added next.

        Args:
            clock: clock of the other usage index; None = there was none, and the rows get `first_usage`.
            step, step_now: step of the store from which the rows come, and step of this store.
        """
        self.clear()
        if clock is None:
            self.clock = UsageClock(lookups=1, swept_step=step_now)
        else:
            self.clock = replace(clock, steps=clock.steps + step - step_now)

    def begin_steps(self, step: int) -> None:
        """Note that the store counts its steps from 0 again; `step` was the last step."""
        self.clock.steps += step

    def first_usage(self, table_N: np.ndarray, id_N: np.ndarray, step: int) -> np.ndarray:
        """Usage metadata for rows that are loaded without any: they count as used once, now."""
        rows, second = len(id_N), 0
        if self.stamps:
            step, second = _halves(self.timestamp())
        usage_N4 = np.zeros((rows, USAGE_WORDS), np.uint32)
        score_uses(
            np.arange(rows), np.ones(rows, np.bool_), table_N, id_N, np.ones(rows, np.int64), self._rules,
            usage_N4.view(np.uint64)[:, 0], usage_N4, 0, lookup=1, step=step, second=second, epoch=0,
            threads=self._threads,
        )  # fmt: skip
        return usage_N4

    def add(self, table_N: np.ndarray, id_N: np.ndarray, usage_N4: np.ndarray) -> None:
        """Add loaded rows to the index, with the usage metadata of their records."""
        place_N = self._add(table_N, id_N)
        first = self.places.first
        usage_N2 = np.ascontiguousarray(usage_N4).view(np.uint64)
        self.places.word_PX[place_N, first : first + USAGE_WORDS] = usage_N4
        self.places.score_P[place_N] = usage_N2[:, 0]
        if self.stamps and len(usage_N4):
            self._stamp = max(self._stamp, min(int(usage_N2[:, 1].max()), _UNLIMITED))

    def check_rules(self, meta: dict[str, Any], name: str) -> None:
        """StorageError if the scores in snapshot `name`, which has this meta, were made by other rules."""
        theirs = meta.get("score_rules")
        if theirs is not None and bool(meta.get("timestamps")) != self.stamps:
            raise StorageError(
                f"snapshot {name!r} was saved with timestamps={bool(meta.get('timestamps'))}, and this embedding's"
                " policy says otherwise; load it with the same"
            )
        # This embedding may have more tables than the snapshot.
        if theirs is not None and (not isinstance(theirs, list) or theirs != self.rules()[: len(theirs)]):
            raise StorageError(
                f"snapshot {name!r} holds scores of other rules than this embedding's evict= asks for; load it into an"
                " embedding with the policy that it was saved with, or export its rows and import them"
            )

    def rules(self) -> list[list[float]]:
        """Rule by which the rows of each table are scored, as a snapshot has it."""
        return [[int(kind), float(param)] for kind, param in zip(*self._rules[:2], strict=True)]
