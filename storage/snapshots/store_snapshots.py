"""Saves, loads, deletes and lists the snapshots of one store.

A snapshot holds all rows as they are at the call, the number of steps taken, and the meaning of the rows' words.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from oneemb.storage.bottom import EXPORTED, Bottom
from oneemb.storage.errors import OtherSnapshotError, SnapshotExistsError, SnapshotNotFoundError, StorageError
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.policies.policy_engine import PolicyEngine
from oneemb.storage.policies.store_policy import StorePolicy
from oneemb.storage.policies.usage_index import UsageClock
from oneemb.storage.replicas import Replicas, TableIds
from oneemb.storage.snapshots.journal import Journal
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows, shard_of
from oneemb.storage.store_part import Store, StorePart, no_step, with_store_lock
from oneemb.storage.table.delta import GONE
from oneemb.storage.table.snapshot_file import check_snapshot_name
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiered_rows import NewPart
from oneemb.storage.tiers.warm_caches import cached_arrays, load_lists


class StoreSnapshots(StorePart):
    """Part of a store that handles its snapshots. `engine`: the policy engine; None = no table has a policy."""

    def __init__(
        self, store: Store, bottom: Bottom, journal: Journal, engine: PolicyEngine | None, policy: StorePolicy,
        replicas: Replicas,
    ):  # fmt: skip
        super().__init__(store)
        self._bottom, self._journal, self._engine = bottom, journal, engine
        self._policy, self._replicas = policy, replicas
        self.saved: tuple[str, int] | None = None
        """(identity of the snapshot that was saved last, the store's `changes` at that time)."""
        self._kept_in: tuple[str | None, int] = None, 0
        """(name of a snapshot that has all rows, `changes` at that time). A name of None = there were no rows then."""
        self._kept_step = 0
        """The store's step at that time; -1 = the snapshot is deleted."""

    # ---- save -------------------------------------------------------------------------------------------------------

    @no_step("save_snapshot")
    @with_store_lock
    def save(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, part: NewPart | None = None,
        since: str | None = None, keep_evicted: bool = False, sequence: int = 0,
    ) -> SnapshotInfo:  # fmt: skip
        """Save all rows as they are now, durably, under a name. Returns the snapshot's description.

        Args:
            meta: JSON values of the caller that are stored with the rows.
            part: the snapshot of all ranks to which this one belongs; it leaves out rows of replicated tables that
                other ranks own. None = a snapshot of this store alone.
            since: save a delta, only the changes since this snapshot, one of the last that were saved or loaded.
            keep_evicted: if True, leave evicted keys out of the delta, so that its readers keep these rows.
            sequence: least sequence number that the snapshot gets; that of `part` counts instead.

        Raises:
            StorageError: the name exists and `overwrite` is off, or that snapshot is the parent of deltas; `since` is
                none of the last snapshots; or the disk fails. All existing snapshots stay complete.
        """
        store, journal, engine = self._store, self._journal, self._engine
        store.check_open()
        if overwrite:
            journal.check_not_needed(name, "replaced")
        without = self._replicas.keys(own=False) if part is not None and self._replicas else None
        if since is not None:
            journal.parent(since, keep_evicted)
        if not overwrite and any(info.name == name for info in self.rows.snapshots()):
            raise SnapshotExistsError.named(name, f"in {self._bottom.name}")
        check_snapshot_name(name)
        if not name.startswith(EXPORTED):
            self._policy.evict_before_save()
        uses, arrays = (None, {}) if engine is None else (engine.to_meta(), engine.to_arrays())
        if not name.startswith(EXPORTED) and store.plan.caches and store.built:
            self.rows.hot.flush()  # It moves rows between caches.
            arrays |= cached_arrays(self.rows.tiers, self.rows.cached)
        loaded = rows = len(self.rows) - (0 if without is None else len(without[1]))
        places = None
        if since is not None:
            places, gone, delta = journal.delta(since, rows, keep_evicted)
            loaded = delta.rows
            uses, arrays = {**(uses or {}), **delta.to_meta()}, {**arrays, GONE: gone}
        info = self.rows.save(
            name, meta, store.step, overwrite=overwrite, part=part, without=without, more=uses, arrays=arrays,
            since=places, sequence=sequence,
        )  # fmt: skip
        self.saved = info.identity, store.changes
        if not keep_evicted and not name.startswith(EXPORTED):
            self._keep(name)
        whole = name if part is None else part.name
        if not whole.startswith(EXPORTED):
            journal.add(whole, info, rows, loaded, exact=not keep_evicted)
        return info

    def check_since(self, since: str, keep_evicted: bool) -> str:
        """Identity of snapshot `since`. Raises StorageError if a delta since that snapshot cannot be saved."""
        with self.store_lock:
            return self._journal.parent(since, keep_evicted).info.identity

    def may_go_on(self, since: str, identity: str | None, deltas_max: int) -> bool:
        """Whether the next save should be a delta since snapshot `since`: the snapshot has this identity, a delta since
        it can be saved, and its chain has fewer than `deltas_max` deltas, with at most half as many rows as the
        store."""
        with self.store_lock:
            try:
                _, *deltas = chain = self._journal.chain(since)
            except StorageError:
                return False
            rows = sum(info.rows for info in deltas)
            return chain[-1].identity == identity and len(deltas) < deltas_max and 2 * rows <= len(self.rows)

    @property
    def are_current(self) -> bool:
        """Whether a snapshot has all rows as they are now. Call it under the store lock."""
        return self._store.changes == self._kept_in[1]

    def lacks_steps(self, changes: int, step: int) -> bool:
        """Whether the last snapshot with all rows is older than the last step, of a store with these counts. The
        store may be in the hands of the garbage collector."""
        return changes != self._kept_in[1] and step != self._kept_step

    def all_rows_gone(self) -> None:
        """Record that all rows were removed on purpose, so that no snapshot lacks a row."""
        self._keep(None)

    def _keep(self, name: str | None) -> None:
        """Record that this snapshot has all rows as they are now."""
        self._kept_in, self._kept_step = (name, self._store.changes), self._store.step

    # ---- load -------------------------------------------------------------------------------------------------------

    @no_step("load_snapshot")
    def load(self, name: str, *, weights_only: bool = False) -> bool:
        """Replace all rows by those of a snapshot. Repairs a broken store.

        If the snapshot's rows have no optimizer state, as pretrained vectors, or if `weights_only`, rows get the state
        of new rows, and the step is 0. Returns True if the rows now are exactly those of the snapshot, False if state
        was added.

        Raises:
            StorageError: there is no such snapshot (the message names the existing ones), its rows have another format
                than this embedding's, or they do not fit; the store's rows are unchanged.
        """
        with self.store_lock:
            self._store.check_process()
            info = self._check_loads(name, weights_only)
            if not self._store.broken:
                self._check_reads(info, weights_only)
            return self._load(info, weights_only)

    @no_step("check_rows")
    def check_rows(self, info: SnapshotInfo, owned: LinkedRows | None, *, weights_only: bool, read: bool) -> None:
        """Raise the errors that `load_rows` would raise, as far as they can be known before. With `read`, read all new
        rows if the store has rows to lose, so that damage is found before the old rows are dropped."""
        with self.store_lock:
            self._store.check_process()
            self._store.check_open()
            self._check_kind(info, weights_only)
            self._check_policy(info)
            if read and not self._store.broken:
                self._check_reads(info, weights_only, owned)

    @no_step("load_rows")
    def load_rows(
        self, info: SnapshotInfo, owned: LinkedRows | None, *, weights_only: bool, replicated: TableIds | None = None
    ) -> bool:
        """Load a snapshot that `check_rows` has accepted. Returns True if the rows now are exactly those of the
        snapshot, False if state was added.

        Args:
            owned: the snapshot's rows that belong to this store; None = all rows of the snapshot, which the store at
                the bottom has saved and loads itself.
            replicated: keys of the snapshot that are in replicated tables; None = there are no such tables.
        """
        with self.store_lock:
            self._store.check_process()
            as_saved = self._load(info, weights_only, owned)
            if replicated is not None:
                self._replicas.add(self._replicas.new(*replicated, self.rows.format.row_bytes))
            return as_saved

    def _load(self, info: SnapshotInfo, weights_only: bool, owned: LinkedRows | None = None) -> bool:
        store, engine = self._store, self._engine
        rows, clock = SnapshotRows.of_meta(info.meta, info.name), UsageClock.of_meta(info.meta, info.name)
        usage_of = None
        self._check_policy(info)
        arrays = dict[str, np.ndarray]()
        if engine is not None or store.plan.caches:
            arrays = self._bottom.arrays(info.name) if owned is None else owned.arrays()
        cached = load_lists(store.plan, arrays, info.name)
        if engine is not None:
            usage_of = engine.usage.first_usage
            admission = engine.loaded_admission(arrays, info.name)
        with self.store_lock:
            broken = store.mend()
            store.check_open()
            try:
                store.replaced += 1
                store.step, same = self.rows.load(info, weights_only, owned, usage_of)
                with changing:
                    self.rows.cached, store.looks_first = cached, True
                    self._journal.clear()
                    self._replicas.clear()
                    if engine is not None:
                        engine.read_rows(rows.format, clock, rows.step, store.step)
                        engine.admission = admission
                    if same and owned is None and self.rows.loaded_in_place:
                        self._journal.add(PartOf.name_of(info), info, len(self.rows), len(self.rows))
            except BaseException as error:
                if broken or not self.rows.whole:  # The store has no rows now, or only some of them.
                    self.store_lock.cut_short(error)
                raise
            store.changes += 1
            self._keep(info.name)
            return same

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless `load` would find this snapshot, with rows that fit this embedding."""
        self._check_policy(self._check_loads(name))

    def _check_policy(self, info: SnapshotInfo) -> None:
        """Raise StorageError unless the policy of this store can continue with the usage metadata of the snapshot."""
        UsageClock.of_meta(info.meta, info.name)
        self._policy.check_clock()
        if self._engine is not None:
            self._engine.usage.check_rules(info.meta, info.name)

    def _check_loads(self, name: str, weights_only: bool = False) -> SnapshotInfo:
        """Description of a snapshot that `load` can load. Raises StorageError if there is no such snapshot, if its rows
        have another format than this embedding's, or if it is a part for another owner."""
        info, plan = self._bottom.chain(name)[-1], self._store.plan
        self._check_kind(info, weights_only)
        shard, shards = shard_of(info.meta, name)
        if (shard, shards) != (plan.owner, plan.owners):
            raise StorageError(
                f"snapshot {name!r} in {self._bottom.name} is part {shard} of {shards} of a sharded snapshot; join the"
                f" parts in one folder with `oneemb reshard --ranks 1`, or bring all parts into one embedding with"
                " oneemb.import_rows"
            )
        return info

    def _check_kind(self, info: SnapshotInfo, weights_only: bool) -> None:
        """Raise StorageError unless the rows of this snapshot have this embedding's format."""
        name, rows, here = info.name, self.rows, self.rows.format
        where, format = f"snapshot {name!r} in {self._bottom.name}", SnapshotRows.of_meta(info.meta, name).format
        if not format.same_weights(here):
            raise StorageError(
                f"{where} holds rows of {format.dim} {format.dtype} weights, this embedding has {here.dim}"
                f" {here.dtype}; load the snapshot into an embedding with the same dim and dtype"
            )
        if rows.built and not (weights_only or rows.lacks_state_of(format) or rows.adds_state_to(format)):
            known = format.optimizer is not None and format.state_width > 0
            if format.state_width != here.state_width or known and format.optimizer != here.optimizer:
                raise StorageError(
                    f"{where} holds the state of {format.optimizer!r} ({format.state_width} values a row), the"
                    f" optimizer attached is {here.optimizer!r} ({here.state_width} values); attach"
                    f" {format.optimizer!r}"
                )

    def _check_reads(self, info: SnapshotInfo, weights_only: bool, owned: LinkedRows | None = None) -> None:
        """Before a load that drops rows, raise StoreFullError or StorageError if the new rows do not fit or cannot be
        read."""
        rows = self.rows
        if not len(rows):
            return
        format = SnapshotRows.of_meta(info.meta, info.name).format
        rows.check_holds(rows.hot, info, owned)
        other_words = not format.same_words(rows.format) or rows.wider(format, weights_only)
        if owned is not None or self._store.plan.copies_rows or other_words:
            for _ in rows.scan(info.name, owned):
                pass

    @no_step("load_snapshot")
    @with_store_lock
    def with_closed_table(self, call: Callable[[], bool]) -> bool:
        """Result of `call`, which adds snapshots to the table's folder, while the table is closed. False, without a
        call, if the store has rows, which would be lost."""
        if not self.rows.built:
            return call()
        if len(self.rows):
            return False
        self.rows.dismantle()
        try:
            return call()
        finally:
            self.rows.build()

    # ---- what there is ----------------------------------------------------------------------------------------------

    @with_store_lock
    def delete(self, name: str) -> None:
        """Delete a snapshot, and free the disk space that only it needed. Raises StorageError if there is no such
        snapshot, if it is the parent of deltas, or if the disk fails."""
        self._store.check_open()
        self._journal.check_not_needed(name, "deleted")
        if self._kept_in[0] == name:
            # Before the deletion, which may fail after the snapshot is gone.
            self._kept_in, self._kept_step = (None, -1), -1
        self.rows.delete(name)
        self._journal.forget(name)

    def info(self, name: str) -> SnapshotInfo:
        """Description of a snapshot. Raises SnapshotNotFoundError, which names the existing ones; StorageError if it
        cannot be read, or if the store at the bottom keeps no snapshots."""
        return self._bottom.snapshot(name)

    def names(self) -> list[str]:
        """Names of all snapshots of the store at the bottom, oldest first."""
        return [info.name for info in self.rows.snapshots()]

    def check(self, name: str, identity: str | None, named_by: str) -> None:
        """Raise an error unless the snapshot of this name exists and has this identity.

        Args:
            identity: identity that the snapshot must have; None = any.
            named_by: file that names the snapshot, for errors.

        Raises:
            SnapshotNotFoundError: there is no snapshot of that name; the message names the existing ones.
            OtherSnapshotError: the snapshot has another identity, so that another run has saved it.
            StorageError: the snapshot could not be read.
        """
        try:
            info = self.info(name)
        except SnapshotNotFoundError as error:
            raise SnapshotNotFoundError(f"{named_by} names a snapshot that is not there: {error}") from error
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError.named_by(named_by, name, identity, self._bottom.name, info)
