"""The policy engine: carries out the policies of an embedding's tables on its tiers.

A lookup goes through `acquire`: expired rows are evicted, admission decides which new ids get a row, rows are evicted
to make room for them, and the usage metadata of each row is written into its record.

Invariants:
- the usage index has every row of the store, with the same metadata as the rows' records;
- no row that a lookup holds is evicted, and which rows are evicted does not depend on prefetched rows;
- if an `acquire` has no room for its rows, it evicts only rows that had expired. Reads and writes of tiers come last:
  if one fails, the rows that were evicted for the lookup stay evicted from tiers and usage index, and nothing else has
  changed.

Nothing here is thread-safe: `EmbeddingStore` calls it under its lock.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Keys
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import SHARDS
from oneemb.storage.locking.pins import PinBook
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.policies.admission import Admission
from oneemb.storage.policies.evictions import Evictions, RowsToEvict
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.policies.usage_index import USAGE_WORDS, UsageClock, UsageIndex
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.tiered_rows import TieredRows
from oneemb.storage.tiers.hot_rows import HotRows, Prefetched
from oneemb.storage.tiers.hot_tier import HotTier

# Most rows whose weights a sweep reads at once.
_ROWS_AT_ONCE = 1 << 15


class PolicyEngine:
    """The policy engine of a store.

    Args:
        policies: policy of each table.
        capacity: most rows of all tables together; None = no limit.
        writing: the lock to hold while words of rows are written in place.
    """

    def __init__(
        self, policies: Sequence[RowPolicy], capacity: int | None, rows: TieredRows, pins: PinBook, threads: Threads,
        writing: AbstractContextManager[Any],
    ):  # fmt: skip
        self._policies, self._threads = policies, threads
        self._rows, self._pins, self._writing = rows, pins, writing
        self._usage = UsageIndex(policies, capacity, threads)
        self._evictions = Evictions(self._usage, threads)
        self._hot: HotRows | None = None  # The tier whose slots the usage index uses.
        self.admission = self.new_admission()
        """Decides which ids get a row; None = all ids do."""
        self._asks = False
        self._refuses = any(policy.when_full == "refuse" for policy in policies)
        self.turned_away = 0
        """Number of keys that got no row because their table was full."""

    def new_admission(self) -> Admission | None:
        """An `Admission` that has counted nothing."""
        has_rules = any(policy.admit is not None for policy in self._policies)
        return Admission(self._policies, self._threads) if has_rules else None

    @property
    def usage(self) -> UsageIndex:
        """The usage index. With stable slots on the host it uses the metadata in the rows' records. Call between steps
        or with the store lock: the first call after the hot tier was replaced switches to the new tier."""
        hot = self._rows.hot if self._rows.built else None
        if hot is not self._hot:
            lying = hot if isinstance(hot, HotTier) and hot.stable_slots else None
            self._usage.use_rows(lying, self._format.usage_begin)
            self._hot = hot
        return self._usage

    def move_out(self) -> None:
        """Copy the usage metadata out of the rows' records before the rows get another format or tier. After an
        IndexMemoryError or MemoryError nothing has changed."""
        self.usage.move_out()
        self._hot = None

    @property
    def policies(self) -> Sequence[RowPolicy]:
        """The policy of each table."""
        return self._policies

    @property
    def counts_uses(self) -> bool:
        """Whether the score of any table, or an admission rule, depends on how often a key occurs in a lookup. Needs no
        lock."""
        return self._usage.counts_uses or self.admission is not None

    @property
    def gone(self) -> int:
        """Number of evicted rows, for whatever reason."""
        return sum(self.usage.left.values())

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def acquire(
        self, keys: Keys, prefetched: Prefetched | None, *, step: int, again: bool, admits: bool,
        uses_U: np.ndarray | None,
    ) -> tuple[Array, Keys]:  # fmt: skip
        """See `EmbeddingStore.acquire`; `step` counts the updates made so far."""
        if self._asks:
            raise ValueError("a function of a policy (admit=, expire_where=) must not call the embedding that asks it")
        usage, backend = self.usage, self._rows.backend
        second = usage.second  # Read first, since the clock may raise: rows are evicted only after calls that may fail.
        keys = backend.counted(keys)
        table_U, id_U = (backend.tensor(array).cpu().numpy() for array in (keys.table_U, keys.id_U))
        place_U = usage.find(table_U, id_U)
        held = [place_U, *self._pins.places()]
        unknown = np.flatnonzero(place_U < 0)
        asks = self.admission is not None and len(unknown) > 0 and not admits
        if uses_U is None:
            uses_U = backend.uses_of(keys) if usage.counts_uses or asks else np.ones(len(table_U), np.int64)
        admitted_M, sighted = np.ones(len(unknown), np.bool_), (table_U[unknown], id_U[unknown], uses_U[unknown])
        if asks:
            assert self.admission is not None
            with self._calling_user():
                admitted_M = self.admission.asks(*sighted, usage.clock.lookups + 1, again=again)
        self._sweep(step, second, held)
        if self._refuses and not admits:
            fits_M = self._evictions.fitting(table_U[unknown[admitted_M]], held)
            self.turned_away += 0 if again else int(np.count_nonzero(~fits_M))
            admitted_M[np.flatnonzero(admitted_M)[~fits_M]] = False
        new, temporary = unknown[admitted_M], unknown[~admitted_M]
        usage.reserve(table_U[new], id_U[new])
        shard, gone = usage.clock.shard, self.gone
        try:
            slot_U, temporary_M = self._make_resident(
                keys, prefetched, self._evictions.make_room(table_U[new], held), temporary, place_U
            )
        except BaseException:
            if self.gone == gone:  # No row was evicted, so the next round begins at the same shard.
                usage.clock.shard = shard
            raise
        try:
            with changing:  # New rows are in the tier and not yet in the usage index.
                if not again and not len(temporary):
                    self._use(table_U, id_U, place_U, uses_U, step, second, slot_U)
                elif not again or len(new):
                    # In a repeated lookup only rows that were evicted meanwhile, and begin again, are counted.
                    used = new if again else np.append(np.flatnonzero(place_U >= 0), new)
                    its_place_U = place_U[used]  # `_use` sets the places of new rows in this array.
                    its_slot_U = slot_U[backend.put(used)]
                    self._use(table_U[used], id_U[used], its_place_U, uses_U[used], step, second, its_slot_U)
                    place_U[used] = its_place_U
                if asks and not again:
                    assert self.admission is not None
                    self.admission.note(*sighted, admitted_M, usage.clock.lookups)
                elif self.admission is not None and len(new):
                    self.admission.forget(table_U[new], id_U[new])
        except BaseException:
            self._pins.give_back(slot_U, temporary_M)
            raise
        self._pins.note_places(slot_U, place_U, temporary_M)
        return slot_U, keys

    def _make_resident(
        self, keys: Keys, prefetched: Prefetched | None, to_evict: Sequence[RowsToEvict], temporary: np.ndarray,
        place_U: np.ndarray,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Evict the rows `to_evict`, then make the rows of all keys resident and pin them. Returns the slots of all
        keys, and the slots of temporary rows (None if there are none).

        Args:
            temporary: indices of the keys that get temporary rows.
            place_U: place of each key in the usage index, -1 for keys without a row.
        """
        hot, leaving = self._rows.hot, sum(len(rows.id_V) for rows in to_evict)
        if prefetched is None and len(temporary) == 0 and isinstance(hot, HotTier) and self.usage.in_rows:
            slot_U = place_U.copy()
            hot.check_room(int(np.count_nonzero(slot_U < 0)), leaving)
            for rows in to_evict:
                self._evict(rows)
            hot.acquire_at(keys, slot_U)
            return slot_U, None
        slot_U = self._pins.pin_with_room(keys, prefetched, leaving)
        try:
            for rows in to_evict:
                self._evict(rows)
            temporary_M = self._make_temporary(keys, slot_U, temporary)
        except BaseException:
            self._pins.give_back(slot_U)
            raise
        try:
            hot.acquire_rest(keys, slot_U)  # Unpins all rows if it fails.
        except BaseException:
            if temporary_M is not None:
                hot.free_temporary(temporary_M)
            raise
        return slot_U, temporary_M

    def _make_temporary(self, keys: Keys, slot_U: Array, temporary: np.ndarray) -> Array | None:
        """Make temporary rows for the keys with indices `temporary`. Returns their slots, and writes them into
        slot_U."""
        if len(temporary) == 0:
            return None
        hot, which = self._rows.hot, self._rows.backend.put(temporary)
        temporary_M = hot.make_temporary(keys.table_U[which], keys.id_U[which])
        try:
            slot_U[which] = temporary_M
        except BaseException:
            self._pins.give_back(temporary_M, temporary_M)
            raise
        return temporary_M

    def _sweep(self, step: int, second: int, held: Sequence[np.ndarray]) -> None:
        """Evict the expired rows of the shards that are due in this step."""
        usage = self.usage
        shards = self._evictions.due(step)
        usage.fit(self._format.row_bytes)
        to_evict = self._evictions.expired(shards, step, second, held, sweeps=True)
        for table_N, id_N in self._evictions.keys_to_weigh(shards, _ROWS_AT_ONCE):
            row_NW = np.empty((len(id_N), self._format.row_width), np.float32)
            self._rows.hot.get(table_N, id_N, row_NW)
            with self._calling_user():
                to_evict += self._evictions.unwanted(table_N, id_N, self._numbers(row_NW), held)
        self._evictions.swept(step, shards)
        for rows in to_evict:
            self._evict(rows)

    def _numbers(self, row_NW: np.ndarray) -> np.ndarray:
        """The weights of rows: float32 [N, D]."""
        weight_ND = torch.from_numpy(self._format.weights(row_NW)[:, : self._format.dim])
        return weight_ND.view(getattr(torch, self._format.dtype)).float().numpy()

    def _use(
        self, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray, uses_U: np.ndarray, step: int, second: int,
        slot_U: Array,
    ) -> None:  # fmt: skip
        """Count a lookup in the usage metadata of rows that are pinned in slots `slot_U`; see `UsageIndex.use`."""
        usage = self.usage
        if usage.in_rows:
            with self._writing:
                usage.use(table_U, id_U, place_U, uses_U, step, second, slot_U)
            with signals_deferred:
                self._rows.hot.mark_dirty(slot_U)
            return
        usage.use(table_U, id_U, place_U, uses_U, step, second)
        self._write_usage(slot_U, usage.usage_words(place_U))

    def _write_usage(self, slot_U: Array, usage_U4: np.ndarray) -> None:
        """Write usage metadata into the records of pinned rows."""
        hot: HotRows = self._rows.hot
        with self._writing:
            self._rows.backend.copy_words_in(hot.row_SW, slot_U, self._format.usage_begin, usage_U4.view(np.int32))
        with signals_deferred:
            hot.mark_dirty(slot_U)

    @property
    def _format(self) -> RowFormat:
        return self._rows.format

    # ---- rows that leave --------------------------------------------------------------------------------------------

    def _evict(self, to_evict: RowsToEvict) -> np.ndarray:
        """Evict these rows, which no lookup holds. Returns bool [V]: whether the key had a row."""
        table_V, id_V, reason = to_evict
        erased_V = self._pins.erase(table_V, id_V)
        with changing:
            self.usage.forget(table_V, id_V, reason, erased_V)
        return erased_V

    def forget(self, table_V: np.ndarray, id_V: np.ndarray, erased_V: np.ndarray) -> None:
        """Remove keys whose rows the user has erased from the usage index. erased_V: whether each key had a row."""
        self.usage.forget(table_V, id_V, "erased", erased_V)

    def to_evict(self, tables: Sequence[int], step: int) -> list[RowsToEvict]:
        """Choose the expired rows that no lookup holds: by age in all tables, by weights in `tables` only."""
        usage, held = self.usage, self._pins.places()
        to_evict = self._evictions.expired(range(SHARDS), step, usage.second, held)
        if any(usage.policies[t].weighs for t in tables):
            for table_N, id_N, row_NW in self._rows.rows():
                asked = np.flatnonzero(np.isin(table_N, tables))
                with self._calling_user():
                    to_evict += self._evictions.unwanted(
                        table_N[asked], id_N[asked], self._numbers(row_NW[asked]), held
                    )
        return to_evict

    def evict(
        self, tables: Sequence[int], to_evict: Sequence[RowsToEvict], *, expired_only: bool = False
    ) -> dict[str, int]:
        """Evict the rows of `to_evict` that belong to `tables`. Unless `expired_only`, also evict rows by which a table
        exceeds its capacity and that no lookup holds. Returns {reason: number of evicted rows}."""
        left = dict[str, int]()
        self._evict_of(tables, to_evict, left)
        if not expired_only:
            self.usage.fit(self._format.row_bytes)
            # The surplus is chosen among the rows that are left.
            self._evict_of(tables, self._evictions.surplus(self._pins.places(), tables), left)
        return left

    @contextmanager
    def _calling_user(self) -> Iterator[None]:
        """Context in which a user's function is called: a lookup in the embedding raises an error meanwhile."""
        self._asks = True
        try:
            yield
        finally:
            self._asks = False

    def _evict_of(self, tables: Sequence[int], to_evict: Sequence[RowsToEvict], left: dict[str, int]) -> None:
        """Evict the rows of `to_evict` in `tables`, and add their numbers to `left` by reason. A row with two reasons
        counts for the first."""
        for rows in to_evict:
            chosen = np.flatnonzero(np.isin(rows.table_V, tables))
            erased_V = self._evict(RowsToEvict(rows.table_V[chosen], rows.id_V[chosen], rows.reason))
            if erased := int(np.count_nonzero(erased_V)):
                left[rows.reason] = left.get(rows.reason, 0) + erased

    # ---- scores -----------------------------------------------------------------------------------------------------

    def set_scores(
        self, table_U: np.ndarray, id_U: np.ndarray, score_U: np.ndarray, time_U: np.ndarray | None = None
    ) -> int:
        """See `StorePolicy.set_scores`."""
        usage, backend = self.usage, self._rows.backend
        place_U = usage.find(table_U, id_U)
        known = np.flatnonzero(place_U >= 0)
        table_U, id_U, place_U = table_U[known], id_U[known], place_U[known]
        usage.check_scores(table_U, score_U[known])
        if len(known):
            slot_U, _ = self._pins.acquire(backend.distinct_keys(backend.put(table_U), backend.put(id_U)))
            try:
                with changing:
                    with self._writing:
                        usage.set_scores(place_U, score_U[known])
                        if time_U is not None and usage.stamps:
                            usage.set_times(place_U, time_U[known])
                    self._write_usage(slot_U, usage.usage_words(place_U))
            finally:
                self._pins.give_back(slot_U)
        return len(known)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def to_meta(self) -> dict[str, Any]:
        """Entries of the policies for the meta of a snapshot."""
        return self.usage.to_meta()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the policies for a snapshot."""
        return {} if self.admission is None else self.admission.to_arrays()

    def loaded_admission(self, arrays: Mapping[str, np.ndarray], name: str) -> Admission | None:
        """An `Admission` with the sightings in the arrays of snapshot `name`; None = no policy has an admission
        rule."""
        admission = self.new_admission()
        if admission is not None and self.admission is not None:
            admission.admitted, admission.refused = self.admission.admitted, self.admission.refused
            admission.from_arrays(arrays, name)
        return admission

    def read_rows(self, format: RowFormat, clock: UsageClock | None, steps: int, step: int) -> None:
        """Rebuild the usage index from the rows that the store has now, with the metadata in their records.

        Args:
            format, clock, steps: row format, usage clock (None = no clock) and number of updates of the store from
                which the rows come.
            step: number of updates of this store.
        """
        usage = slice(self._format.usage_begin, self._format.state_begin)
        self.usage.begin(clock if format.usage_words == USAGE_WORDS else None, steps, step)
        for table_N, id_N, row_NW in self._rows.rows():
            usage_N4 = np.ascontiguousarray(row_NW[:, usage]).view(np.uint32)
            self.usage.add(table_N, id_N, usage_N4)

    def clear(self) -> None:
        """Forget every row and all sightings."""
        self.usage.clear()
        if self.admission is not None:
            self.admission.clear()

    def stats(self) -> dict[str, Any]:
        """Numbers of rows evicted, by reason, bytes of memory, and numbers of ids that were admitted or refused."""
        counts: dict[str, Any] = {"left": dict(self.usage.left), "bytes": self.usage.nbytes}
        if self.admission is not None:
            counts |= {"admitted": self.admission.admitted, "refused": self.admission.refused}
            counts["bytes"] += self.admission.nbytes
        if self._refuses:
            counts["turned_away"] = self.turned_away
        return counts


def refuses_some(policies: Sequence[RowPolicy] | None) -> bool:
    """Whether a policy may refuse a row to an id: it has an admission rule, or `when_full="refuse"`."""
    return policies is not None and any(policy.admit is not None or policy.when_full == "refuse" for policy in policies)
