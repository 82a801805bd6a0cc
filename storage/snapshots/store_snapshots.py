"""The snapshots of one store: saved, loaded, deleted, looked at.

A snapshot holds every row as it was at the call, the number of steps taken and what the rows mean.
"""

from typing import Any

from oneemb.storage.bottom import EXPORTED, Bottom
from oneemb.storage.errors import OtherSnapshotError, SnapshotExistsError, SnapshotNotFoundError, StorageError
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.policies.policy_engine import PolicyEngine
from oneemb.storage.policies.store_policy import StorePolicy
from oneemb.storage.policies.usage_index import UsageClock
from oneemb.storage.replicas import Replicas, TableIds
from oneemb.storage.snapshots.journal import Journal
from oneemb.storage.snapshots.owned_rows import OwnedRows
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows, shard_of
from oneemb.storage.store_part import Store, StorePart, no_step, with_store_lock
from oneemb.storage.table.delta import GONE
from oneemb.storage.table.snapshot_file import check_snapshot_name
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiered_rows import NewPart


class StoreSnapshots(StorePart):
    """The snapshots of a store; `engine` is the policy engine, None where no table has a policy."""

    def __init__(
        self, store: Store, bottom: Bottom, journal: Journal, engine: PolicyEngine | None, policy: StorePolicy,
        replicas: Replicas,
    ):  # fmt: skip
        super().__init__(store)
        self._bottom, self._journal, self._engine = bottom, journal, engine
        self._policy, self._replicas = policy, replicas
        self.saved: tuple[str, int] | None = None
        """The identity of the snapshot that was saved last, and the store's `changes` then."""
        self._kept_in: tuple[str | None, int] = None, 0
        """Name of the snapshot that has all rows as of `changes`, and that count; None = there were no rows then."""

    # ---- save -------------------------------------------------------------------------------------------------------

    @no_step("save_snapshot")
    @with_store_lock
    def save(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, part: NewPart | None = None,
        since: str | None = None, keep_evicted: bool = False,
    ) -> SnapshotInfo:  # fmt: skip
        """Write every row as it is now, durably, under a name. Returns the snapshot's description.

        Args:
            meta: any JSON that the caller wants to find again beside the rows.
            part: of which snapshot of several stores this is a part, without other owners' rows of replicated tables;
                None = it is one of this store alone.
            since: write a delta: only changes since this snapshot, one of the last that were saved or loaded.
            keep_evicted: a delta does not say which rows policies have evicted: its readers keep them.

        Raises:
            StorageError: the name is taken and `overwrite` is off, or deltas go on from that snapshot; `since` is none
                of the last; or the disk fails. The snapshots there are whole.
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
        uses, arrays = (None, None) if engine is None else (engine.to_meta(), engine.to_arrays())
        loaded = rows = len(self.rows) - (0 if without is None else len(without[1]))
        places = None
        if since is not None:
            places, gone, delta = journal.delta(since, rows, keep_evicted)
            loaded = delta.rows
            uses, arrays = {**(uses or {}), **delta.to_meta()}, {**(arrays or {}), GONE: gone}
        info = self.rows.save(
            name, meta, store.step, overwrite=overwrite, part=part, without=without, more=uses, arrays=arrays,
            since=places,
        )  # fmt: skip
        self.saved = info.identity, store.changes
        if not keep_evicted and not name.startswith(EXPORTED):
            self._kept_in = name, store.changes
        whole = name if part is None else part.name
        if not whole.startswith(EXPORTED):
            journal.add(whole, info, rows, loaded, exact=not keep_evicted)
        return info

    def check_since(self, since: str, keep_evicted: bool) -> str:
        """The identity of a snapshot since which a delta can be saved; StorageError if it is none of the last."""
        with self.store_lock:
            return self._journal.parent(since, keep_evicted).info.identity

    @property
    def are_current(self) -> bool:
        """Whether one of them has all rows as they are now. Under the store lock only."""
        return self._store.changes == self._kept_in[1]

    def all_rows_gone(self) -> None:
        """Note that the store has no rows any more, on purpose."""
        self._kept_in = None, self._store.changes

    # ---- load -------------------------------------------------------------------------------------------------------

    @no_step("load_snapshot")
    def load(self, name: str, *, weights_only: bool = False) -> bool:
        """Start from the rows of a snapshot, forgetting those here. Mends a broken store.

        A snapshot of rows without state, such as pretrained vectors, is given the state of new rows and begins at step
        0; so is any with `weights_only`. Returns whether the rows are now the snapshot's, rather than those with state
        added.

        Raises:
            StorageError: there is no such snapshot (the message names those there are), its rows are not of this
                embedding's kind, or they do not fit; the rows here are as they were.
        """
        with self.store_lock:
            self._store.check_process()
            info = self._check_loads(name, weights_only)
            if not self._store.broken:
                self._check_reads(info, weights_only)
            return self._load(info, weights_only)

    @no_step("check_rows")
    def check_rows(self, info: SnapshotInfo, owned: OwnedRows | None, *, weights_only: bool, read: bool) -> None:
        """Raise, as `load`, unless `load_rows` will succeed as far as that can be known. With `read`, read all rows
        that are to replace others, so that a damaged one is found before those are gone."""
        with self.store_lock:
            self._store.check_process()
            self._store.check_open()
            self._check_kind(info, weights_only)
            self._check_policy(info)
            if read and not self._store.broken:
                self._check_reads(info, weights_only, owned)

    @no_step("load_rows")
    def load_rows(
        self, info: SnapshotInfo, owned: OwnedRows | None, *, weights_only: bool, replicated: TableIds | None = None
    ) -> bool:
        """`load` of a snapshot that `check_rows` has accepted.

        Args:
            owned: this store's share of its rows; None = the snapshot is one of the store at the bottom.
            replicated: the keys of replicated tables among them; None = there are no such tables.
        """
        with self.store_lock:
            self._store.check_process()
            as_saved = self._load(info, weights_only, owned)
            if replicated is not None:
                self._replicas.add(self._replicas.new(*replicated, self.rows.format.row_bytes))
            return as_saved

    def _load(self, info: SnapshotInfo, weights_only: bool, owned: OwnedRows | None = None) -> bool:
        store, engine = self._store, self._engine
        rows, clock = SnapshotRows.of_meta(info.meta, info.name), UsageClock.of_meta(info.meta, info.name)
        usage_of = None
        self._check_policy(info)
        if engine is not None:
            usage_of = engine.usage.first_usage
            arrays = self._bottom.arrays(info.name) if owned is None else owned.arrays()
            admission = engine.loaded_admission(arrays, info.name)
        with self.store_lock:
            broken = store.mend()
            store.check_open()
            try:
                store.replaced += 1
                store.step, same = self.rows.load(info, weights_only, owned, usage_of)
                with changing:
                    self._journal.clear()
                    self._replicas.clear()
                    if engine is not None:
                        engine.read_rows(rows.format, clock, rows.step, store.step)
                        engine.admission = admission
                    if same and owned is None and self.rows.loaded_in_place:
                        self._journal.add(PartOf.name_of(info), info, len(self.rows), len(self.rows))
            except BaseException as error:
                if broken or not self.rows.whole:  # Without rows, or with a part of them, there is nothing to go on.
                    self.store_lock.cut_short(error)
                raise
            store.changes += 1
            self._kept_in = info.name, store.changes
            return same

    def check_fits(self, name: str) -> None:
        """Raise StorageError unless `load` would find this snapshot, and rows in it that fit."""
        self._check_policy(self._check_loads(name))

    def _check_policy(self, info: SnapshotInfo) -> None:
        """Raise StorageError unless a snapshot says of the uses of its rows what the policy here can go on with."""
        UsageClock.of_meta(info.meta, info.name)
        self._policy.check_clock()
        if self._engine is not None:
            self._engine.usage.check_rules(info.meta, info.name)

    def _check_loads(self, name: str, weights_only: bool = False) -> SnapshotInfo:
        """Raise StorageError unless a snapshot is there and `load` finds rows of this embedding's kind in it."""
        info, plan = self._bottom.chain(name)[-1], self._store.plan
        self._check_kind(info, weights_only)
        shard, shards = shard_of(info.meta, name)
        if (shard, shards) != (plan.owner, plan.owners):
            raise StorageError(
                f"snapshot {name!r} in {self._bottom.name} is part {shard} of {shards} of a sharded one; make it whole"
                f" in one folder with `oneemb reshard --ranks 1`, or bring all parts into one embedding with"
                " oneemb.import_rows"
            )
        return info

    def _check_kind(self, info: SnapshotInfo, weights_only: bool) -> None:
        """Raise StorageError unless rows of this snapshot, wherever it is, are of this embedding's kind."""
        name, rows, here = info.name, self.rows, self.rows.format
        where, format = f"snapshot {name!r} in {self._bottom.name}", SnapshotRows.of_meta(info.meta, name).format
        if not format.same_weights(here):
            raise StorageError(
                f"{where} holds rows of {format.dim} {format.dtype} weights, this embedding has {here.dim} {here.dtype}"
            )
        if rows.built and not (weights_only or rows.lacks_state_of(format) or rows.adds_state_to(format)):
            known = format.optimizer is not None and format.state_width > 0
            if format.state_width != here.state_width or known and format.optimizer != here.optimizer:
                raise StorageError(
                    f"{where} holds the state of {format.optimizer!r} ({format.state_width} values a row), the"
                    f" optimizer attached is {here.optimizer!r} ({here.state_width} values); attach"
                    f" {format.optimizer!r}"
                )

    def _check_reads(self, info: SnapshotInfo, weights_only: bool, owned: OwnedRows | None = None) -> None:
        """Before a load, raise StoreFullError or StorageError if the rows do not fit, or cannot be read."""
        rows = self.rows
        if not len(rows):
            return
        format = SnapshotRows.of_meta(info.meta, info.name).format
        rows.check_holds(rows.hot, info, owned)
        other_words = not format.same_words(rows.format) or rows.wider(format, weights_only)
        if owned is not None or self._store.plan.copies_rows or other_words:
            for _ in rows.scan(info.name, owned):
                pass

    # ---- what there is ----------------------------------------------------------------------------------------------

    @with_store_lock
    def delete(self, name: str) -> None:
        """Delete a snapshot, and free what only it held. StorageError if there is none, deltas go on from it, or the
        disk fails."""
        self._store.check_open()
        self._journal.check_not_needed(name, "deleted")
        if self._kept_in[0] == name:
            self._kept_in = None, -1  # First: a deletion may fail after the snapshot is gone.
        self.rows.delete(name)
        self._journal.forget(name)

    def info(self, name: str) -> SnapshotInfo:
        """Description of a snapshot. SnapshotNotFoundError names those there are; StorageError if it cannot be read, or
        the store below keeps none."""
        return self._bottom.snapshot(name)

    def names(self) -> list[str]:
        """Names of the finished snapshots in the path, oldest first."""
        return [info.name for info in self.rows.snapshots()]

    def check(self, name: str, identity: str | None, named_by: str) -> None:
        """Raise unless the snapshot of this name, which `named_by` names, is there and is the one that is meant.

        Args:
            identity: of the snapshot that is meant; None = whichever has the name.

        Raises:
            SnapshotNotFoundError: there is none of that name; the message names those there are.
            OtherSnapshotError: it is another run's; the message says which.
            StorageError: it could not be read.
        """
        try:
            info = self.info(name)
        except SnapshotNotFoundError as error:
            raise SnapshotNotFoundError(f"{named_by} names a snapshot that is not there: {error}") from error
        if identity is not None and info.identity != identity:
            raise OtherSnapshotError.named_by(named_by, name, identity, self._bottom.name, info)
