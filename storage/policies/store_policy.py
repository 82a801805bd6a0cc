"""Calls on the policies of a store's tables: eviction, scores, epochs, sightings.

Lookups do not use this module; they call `PolicyEngine.acquire`.
"""

from collections.abc import Sequence

import numpy as np

from oneemb.storage.policies.evictions import RowsToEvict
from oneemb.storage.policies.policy_engine import PolicyEngine
from oneemb.storage.store_part import Store, StorePart, no_step, reading, with_store_lock


class StorePolicy(StorePart):
    """Calls on the policies of a store. Without policies no row is evicted, and rows have no scores.

    Args:
        engine: the policy engine; None = no table has a policy.
        what: name of the embedding for error texts.
    """

    def __init__(self, store: Store, engine: PolicyEngine | None, what: str, num_tables: int):
        super().__init__(store)
        self._engine, self._what, self._tables = engine, what, range(num_tables)

    def _need(self) -> PolicyEngine:
        self._store.check_open()
        if self._engine is None:
            raise ValueError(f"{self._what} has no policy, so that its rows have no scores")
        return self._engine

    @property
    def counts_uses(self) -> bool:
        """Whether policies need to know how many ids of a batch have the same key."""
        return self._engine is not None and self._engine.counts_uses

    def check_clock(self) -> None:
        """ValueError if the policies' clock raises an error or returns no finite number."""
        if self._engine is not None:
            self._engine.usage.second  # noqa: B018  # It is read.

    # ---- rows that leave --------------------------------------------------------------------------------------------

    @no_step("evict")
    @with_store_lock
    def to_evict(self) -> list[RowsToEvict]:
        """Choose the expired rows that no lookup holds, for `evict`. ValueError if `expire_where` or a clock fails."""
        self._store.check_open()
        if self._engine is None or not self._store.built:
            return []
        self._store.pins.release_abandoned()
        return self._engine.to_evict(self._tables, self._store.step)

    @no_step("evict")
    @with_store_lock
    def evict(self, to_evict: Sequence[RowsToEvict] | None = None) -> dict[str, int]:
        """Evict the rows `to_evict`, and rows by which a table exceeds its capacity and that no lookup holds. Returns
        {reason: number of evicted rows}.

        Args:
            to_evict: result of the method `to_evict`, with no lookup since that call; None = call it now.
        """
        self._store.check_open()
        if self._engine is None or not self._store.built:
            return {}
        if to_evict is None:
            to_evict = self.to_evict()
        left = self._engine.evict(self._tables, to_evict)
        self._store.changes += bool(left)
        return left

    def evict_before_save(self) -> None:
        """Evict the expired rows of tables whose policy has `evict_at_snapshot`. Requires the store lock."""
        if (engine := self._engine) is not None and self._store.built:
            self._store.pins.release_abandoned()
            tables = [t for t, policy in enumerate(engine.policies) if policy.evict_at_snapshot]
            if tables and engine.evict(tables, engine.to_evict(tables, self._store.step), expired_only=True):
                self._store.changes += 1

    # ---- scores -----------------------------------------------------------------------------------------------------

    @reading
    def scores(self, table_U: np.ndarray, id_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the rows of these keys, uint64 [U], and whether each key has a row, bool [U]. The score of a key
        without a row is 0."""
        usage = self._need().usage
        place_U = usage.find(table_U, id_U)
        score_U = np.zeros(len(id_U), np.uint64)
        score_U[place_U >= 0] = usage.scores(place_U[place_U >= 0])
        return score_U, place_U >= 0

    @with_store_lock
    def check_scores(self, table_U: np.ndarray, id_U: np.ndarray, score_U: np.ndarray) -> None:
        """ValueError if `set_scores` would refuse these scores for these keys."""
        usage = self._need().usage
        known_U = usage.find(table_U, id_U) >= 0
        usage.check_scores(table_U[known_U], score_U[known_U])

    @no_step("set_scores")
    @with_store_lock
    def set_scores(
        self, table_U: np.ndarray, id_U: np.ndarray, score_U: np.ndarray, time_U: np.ndarray | None = None
    ) -> int:
        """Set the scores of the keys that have a row. Returns the number of these keys.

        Args:
            time_U: times of last use, uint64, if the policies have `timestamps`; None = the times do not change.

        Raises:
            ValueError: a score is invalid for its table's rule.
            StoreFullError: the rows do not fit in the hot tier at one time.
        """
        known = self._need().set_scores(table_U, id_U, score_U, time_U)
        self._store.changes += known > 0
        return known

    @with_store_lock
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that uses of rows have from now on."""
        clock = self._need().usage.clock
        if type(epoch) is not int:
            raise TypeError(f"an epoch must be an int, got {epoch!r}")
        if not clock.epoch <= epoch < 2**32:
            raise ValueError(
                f"an epoch must be an int below 2**32 and not before the present one, {clock.epoch}, got {epoch}"
            )
        clock.epoch = epoch
        self._store.changes += 1

    @with_store_lock
    def give_score(self, table: int, score: int) -> None:
        """Set the score, 0 to 2^64 - 1, that uses give from now on to rows of a table with `GivenScore`."""
        self._need().usage.give(table, score)

    @reading
    def uses(self, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int64 [N], scores uint64 [N], times of last use uint64 [N]) of a table's rows in this store. A time is
        in nanoseconds if the policy keeps timestamps, else two 32-bit numbers: step and second."""
        return self._need().usage.uses(table)

    @with_store_lock
    def timestamp(self) -> int:
        """Nanoseconds since 1970, later than the last use of every row."""
        return self._need().usage.timestamp()

    # ---- ids that were seen and have no row -------------------------------------------------------------------------

    @reading
    def sightings(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a table that were seen and have no row yet, and how often, both int64 [N]; see `Admission`."""
        admission = self._need().admission
        return (np.empty(0, np.int64), np.empty(0, np.int64)) if admission is None else admission.sightings(table)

    @property
    def sightings_bytes(self) -> int:
        """Bytes of memory that sightings take."""
        engine = self._engine
        return 0 if engine is None or engine.admission is None else engine.admission.nbytes

    @with_store_lock
    def add_sightings(self, table: int, id_N: np.ndarray, count_N: np.ndarray) -> None:
        """Tell admission that each of these distinct ids was seen `count_N` more times; ids with a row are left out."""
        engine = self._need()
        if engine.admission is not None:
            absent = engine.usage.find(np.full(len(id_N), table, np.int32), id_N) < 0
            engine.admission.add_sightings(table, id_N[absent], count_N[absent])
            self._store.changes += 1

    @with_store_lock
    def forget_sightings(self, table: int, id_N: np.ndarray) -> None:
        """Remove the counts of these ids."""
        if (admission := self._need().admission) is not None:
            admission.forget(np.full(len(id_N), table, np.int32), id_N)
            self._store.changes += 1
