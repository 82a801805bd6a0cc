"""The rows of an embedding in their tiers: made, saved, loaded, and given another form.

Until `build` there are no tiers: the optimizer decides how wide a row is. `relayout` gives rows that are there another
form (the state of an optimizer that comes later) or another place (a GPU).

Invariants:
- `relayout` succeeds, or leaves rows, form, place and snapshots as they were;
- `load` succeeds, or leaves the rows as they were, or says by `whole` that some of them are gone;
- `generation` changes whenever slots handed out before mean nothing any more;
- format, backend and generation of the holder are those of the rows after every change.

Nothing here is thread-safe: `EmbeddingStore` calls it under its lock.
"""

import functools
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from oneemb.kernels.backend import Backend
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.threads import Threads, close_when_dropped
from oneemb.storage.bottom import RESCUED, Bottom
from oneemb.storage.errors import StorageError, StoreFullError
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.row_store import Places, RowStore, Snapshots
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.snapshot_rows import PartOf, SnapshotRows
from oneemb.storage.table.delta import rows_of
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiers.cached_rows import CachedRows
from oneemb.storage.tiers.hot_rows import HotRows, Tier
from oneemb.storage.tiers.stack import NewRows, StorePlan, make_tiers, with_room


class NewPart(NamedTuple):
    """Snapshot of which a store is about to save its part."""

    name: str
    identity: str
    sequence: int


ChangeRows = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""change(table_N, id_N, row_NW) writes other words into the rows of these keys."""


UsageOf = Callable[..., np.ndarray]
"""usage(table_N, id_N, step=) gives uint32 [N, usage words] of rows at this step."""


def _rescue_name() -> str:
    """Name of a snapshot that holds rows while their width changes. The name is unique: a process that was killed
    during such a change leaves its snapshot behind."""
    return f"{RESCUED}{uuid.uuid4().hex[:8]}"


class HasRows(Protocol):
    """The object that has the rows. `TieredRows` sets these attributes, which every lookup reads, to its own."""

    format: RowFormat
    backend: Backend
    generation: int


class TieredRows:
    """The rows of an embedding.

    Args:
        holder: the object that has these rows, which keeps them; they do not keep the object.
        plan, bottom: the tiers, and the store below them.
        format: of a row, as long as no optimizer has come.
        initial, policies: first values of weights, and policies of tables; None = all rows stay.
        backend: of the hot tier.
        writing: the lock that is held by whoever writes rows in place.
    """

    def __init__(
        self, holder: HasRows, plan: StorePlan, bottom: Bottom, format: RowFormat, initial: InitialRows,
        backend: Backend, threads: Threads, writing: AbstractContextManager[Any],
        policies: Sequence[RowPolicy] | None = None,
    ):  # fmt: skip
        self._plan, self._bottom, self._threads, self._writing = plan, bottom, threads, writing
        self._holder = weakref.ref(holder)
        self.generation = 0
        self._set_new_rows(NewRows(format, initial, backend, policies))
        self.whole = True
        """False when a call was cut short and a part of the rows is gone, until `dismantle`."""
        self._set_tiers([])
        self.opened = 0
        """How often the store at the bottom has been opened: what `places` gave is of one of these times."""
        self.loaded_in_place = False
        """Whether the load before has taken rows where they lie, rather than copies of them."""
        self.bottom_store: RowStore | None = None
        self.cached: dict[str, CachedRows] = {}
        """{name of a cache: rows that it held when the loaded snapshot was saved}, until `fill_caches`."""

    # ---- tiers ------------------------------------------------------------------------------------------------------

    @property
    def built(self) -> bool:
        """Whether the tiers are there."""
        return bool(self.tiers)

    @property
    def format(self) -> RowFormat:
        return self.new_rows.format

    @property
    def backend(self) -> Backend:
        return self.new_rows.backend

    def __len__(self) -> int:
        return len(self.hot) if self.tiers else 0

    def build(self, format: RowFormat | None = None) -> None:
        """Make the tiers, without a row, for this format; None = the present one. StorageError if the bottom cannot be
        opened."""
        self._open(self.new_rows if format is None else self.new_rows.of(format, self.backend))

    def relayout(self, format: RowFormat, backend: Backend, step: int) -> None:
        """Give rows this format, and move the hot tier to where these loops run. Rows without state get that of new
        ones.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, there or on the disk on their way, they cannot
                be given another width, or anything else has failed. The rows are as they were; or, where `whole` is
                False now, in the snapshot that a note names.
        """
        try:
            self._relayout(format, backend, step)
        except Exception as error:  # of CUDA, for instance: the rows are as they were
            if not self.whole or isinstance(error, StorageError | MemoryError):
                raise
            raise StorageError(f"the rows in {self._bottom.name} could not be moved: {error}") from error

    def _relayout(self, format: RowFormat, backend: Backend, step: int) -> None:
        before, after = self.new_rows, self.new_rows.of(format, backend)
        if not self.built:
            self._set_new_rows(after)
            return
        if format.same_words(before.format) and backend is before.backend:
            self._set_format(format)
            return
        with with_room(self._plan, self.tiers, format, backend, len(self)):
            self._replace(before, after, step)

    def _replace(self, before: NewRows, after: NewRows, step: int) -> None:
        """Make the tiers anew, or bring those of before back."""
        saved: str | None = None
        if after.format.same_words(before.format):
            self.hot.flush()  # The store at the bottom has all rows, and keeps them.
        elif len(self):
            saved = _rescue_name()
            self.save(saved, {}, step)
        try:
            self._change(after, saved)
        except BaseException as error:
            try:
                self._change(before, saved)
            except BaseException as second:
                self.whole = False
                self._say_where_rows_are(error, second, saved, step)
                raise error from second
            self._delete_rescue(saved)
            raise
        self._delete_rescue(saved)

    def _change(self, new_rows: NewRows, saved: str | None) -> None:
        """Make the tiers anew, and bring the rows along: from the store at the bottom, or from the snapshot `saved`."""
        if self.bottom_store is not None and self.bottom_store.row_width == new_rows.format.row_width:
            self._drop_tiers()
            self._set_tiers(make_tiers(self._plan, new_rows, self.bottom_store, self._threads, self._writing))
            self._set_new_rows(new_rows)
            return
        self.dismantle()
        self._open(new_rows)
        if saved is not None:
            self._load_saved(saved)

    def _load_saved(self, name: str) -> None:
        format = SnapshotRows.of_meta(self._bottom.snapshot(name).meta, name).format
        if format.same_words(self.format):
            self._snapshots().load_snapshot(name)
        else:
            self._put_all(name, format)
        self.reload()

    def _say_where_rows_are(self, error: BaseException, second: BaseException, saved: str | None, step: int) -> None:
        """Rows that are in no tier any more: save them if they are in no snapshot yet."""
        error.add_note(f"the rows could not be brought back to where they were either: {second}")
        if saved is None and isinstance(self.bottom_store, Snapshots):
            name = _rescue_name()
            try:
                self._save(self.bottom_store, name, {}, step)
            except Exception as third:
                error.add_note(f"nor could they be saved: {third}")
                return
            saved = name
        if saved is not None:
            error.add_note(f"the rows are in the snapshot {saved!r} in {self._bottom.name}")

    def _delete_rescue(self, saved: str | None) -> None:
        """The rows are where they should be. Nothing fails because of a snapshot that is left."""
        if saved is None:
            return
        try:
            self.delete(saved)
        except Exception as error:
            warnings.warn(
                f"the snapshot {saved!r} is not needed any more and could not be deleted: {error}; delete it with"
                " delete_snapshot",
                stacklevel=2,
            )

    def _open(self, new_rows: NewRows) -> None:
        store = self._bottom.open(new_rows.format.row_width)
        try:
            tiers = make_tiers(self._plan, new_rows, store, self._threads, self._writing)
        except BaseException:
            store.close()
            raise
        self.bottom_store = store
        self._set_new_rows(new_rows)
        self._set_tiers(tiers)
        self.opened += 1
        # Rows that are dropped give back their threads, files and lock. At exit the system does.
        self._finalizer = close_when_dropped(self, store)

    def reload(self) -> None:
        """Let all tiers start from the rows of the store at the bottom."""
        for tier in reversed(self.tiers):
            tier.reload()

    def _set_new_rows(self, new_rows: NewRows) -> None:
        self.new_rows = new_rows
        """How rows begin: their form, and the loops of the hot tier."""
        if (holder := self._holder()) is not None:
            holder.format, holder.backend, holder.generation = new_rows.format, new_rows.backend, self.generation

    def _set_format(self, format: RowFormat) -> None:
        """Give the rows a format with the same words."""
        self.new_rows.format = format
        self._set_new_rows(self.new_rows)

    def _begin_generation(self) -> None:
        holder = self._holder() or self
        self.generation = holder.generation = self.generation + 1  # in one line: no error comes between

    def _set_tiers(self, tiers: list[Tier]) -> None:
        self.tiers = tiers
        """Tiers above the store at the bottom, the hot one first. Empty until `build`."""
        self.hot = cast(HotRows, tiers[0] if tiers else None)
        """The hot tier; None until `build`. An attribute, since every lookup reads it."""

    def _drop_tiers(self) -> None:
        tiers = self.tiers
        self._set_tiers([])
        self._begin_generation()
        for tier in tiers:
            tier.close()

    def dismantle(self) -> None:
        """Have no tiers any more. Rows that no snapshot holds are gone, unless the store at the bottom keeps them."""
        store, self.bottom_store = self.bottom_store, None
        self.whole = True
        self._drop_tiers()
        if store is not None:
            store.close()
            self._finalizer.detach()

    def clear(self) -> None:
        """Forget every row; snapshots stay."""
        self._begin_generation()
        self.cached = {}
        if self.built:
            self.hot.clear()

    def only_read(self) -> None:
        """In a child of fork: keep no row of those that are read."""
        for tier in self.tiers:
            tier.only_read()

    def check_slots(self) -> list[str]:
        """See `Tier.check_slots`, of all tiers."""
        return [problem for tier in self.tiers for problem in tier.check_slots()]

    @property
    def broken(self) -> bool:
        """Whether the store at the bottom is of no use, since a call on it was cut short."""
        return getattr(self.bottom_store, "broken", False)

    def stats(self) -> dict[str, Any]:
        """Sizes now and counters since the tiers were made, a dict a tier."""
        stats: dict[str, Any] = {tier.name: tier.stats() for tier in self.tiers}
        if self.bottom_store is not None:
            stats["persistent"] = self.bottom_store.stats()
        return stats

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _snapshots(self) -> Snapshots:
        """The store at the bottom as one that keeps snapshots; StorageError if it is none."""
        if not self.built:
            self.build()
        if not isinstance(self.bottom_store, Snapshots):
            raise StorageError(
                f"{self._bottom.name} cannot keep snapshots; saving rows, loading rows and changing the optimizer need"
                " them; use a persistent table, or attach the optimizer before the first lookup"
            )
        return self.bottom_store

    def save(
        self, name: str, meta: dict[str, Any], step: int, *, part: NewPart | None = None,
        more: dict[str, Any] | None = None, **how: Any,
    ) -> SnapshotInfo:  # fmt: skip
        """Write every row, durably, under a name; see `StoreSnapshots.save`.

        Args:
            more: further entries of the meta.
            how: overwrite, without, arrays and since of `Snapshots.save_snapshot`.
        """
        snapshots = self._snapshots()
        self.hot.flush()
        return self._save(snapshots, name, meta, step, part, more, **how)

    @property
    def places(self) -> Places:
        """Positions of the rows of the last saved or loaded snapshot in the store at the bottom."""
        return self._snapshots().places

    def gone_since(self, then: Places) -> tuple[np.ndarray, np.ndarray]:
        """Keys, (table_N, id_N), that had a row when `then` was taken (an earlier value of `places`) and have no row
        now. StorageError if a file with keys of that time is missing or damaged."""
        snapshots = self._snapshots()
        self.hot.flush()
        return snapshots.gone_since(then)

    def _save(
        self, snapshots: Snapshots, name: str, meta: dict[str, Any], step: int, part: NewPart | None = None,
        more: dict[str, Any] | None = None, **how: Any,
    ) -> SnapshotInfo:  # fmt: skip
        meta, shard = SnapshotRows(self.format, step).to_meta(meta), (self._plan.owner, self._plan.owners)
        meta |= more or {}
        if part is not None:
            meta |= PartOf(part.name, *shard).to_meta(name)
            how |= {"identity": part.identity, "sequence": part.sequence}
        elif shard != (0, 1):  # None of other ranks is beside it: nobody may take it for a whole one.
            meta["shard"] = list(shard)
        return snapshots.save_snapshot(name, meta, **how)

    def delete(self, name: str) -> None:
        """Forget a snapshot and free what only it held."""
        self._snapshots().delete_snapshot(name)

    def snapshots(self) -> list[SnapshotInfo]:
        """The finished ones, oldest first."""
        if isinstance(self.bottom_store, Snapshots):
            return self.bottom_store.snapshots()
        return self._bottom.snapshots()

    def lacks_state_of(self, format: RowFormat) -> bool:
        """Whether rows here have no state yet, and those have."""
        return self.format.optimizer is None and self.format.state_width == 0 < format.state_width

    def adds_state_to(self, format: RowFormat) -> bool:
        """Whether rows here have state, and those have none."""
        return format.state_width == 0 < self.format.state_width

    def load(
        self, info: SnapshotInfo, weights_only: bool = False, owned: LinkedRows | None = None,
        usage_of: UsageOf | None = None,
    ) -> tuple[int, bool]:  # fmt: skip
        """Replace all rows by those of a snapshot; the caller has checked that its format fits, see
        `StoreSnapshots.load`. Returns (number of updates that the rows have had, whether their optimizer state is the
        snapshot's). Without state in the snapshot, new state is made and the number is 0.

        Args:
            owned: the rows, if they do not come from one snapshot of the store at the bottom.
            usage_of: makes usage metadata for rows that lack it.
        """
        name, rows = info.name, SnapshotRows.of_meta(info.meta, info.name)
        if weights_only and not self.built:
            self.build()
        lacks_state = self.built and not weights_only and self.lacks_state_of(rows.format)
        adds_state = self.wider(rows.format, weights_only)
        self.loaded_in_place = replaced = False
        try:
            if lacks_state:
                replaced = True
                self.dismantle()
            if not self.built:
                self.build(replace(rows.format, usage_words=self.format.usage_words))
            elif self.format.optimizer is None and self.format.state_width == 0 and not weights_only:
                self._set_format(replace(rows.format, usage_words=self.format.usage_words))
            for tier in self.tiers:
                self.check_holds(tier, info, owned)
            if adds_state or owned is not None or not rows.format.same_words(self.format):
                replaced = True
                make_usage = (
                    None if usage_of is None else functools.partial(usage_of, step=0 if adds_state else rows.step)
                )
                self._put_all(name, rows.format, owned, with_state=not adds_state, usage_of=make_usage)
            else:
                whole, *deltas = [link.name for link in self._bottom.chain(name)]
                self._snapshots().load_snapshot(whole, deltas)
                self.loaded_in_place = True
                replaced = True
            self._begin_generation()
            self.reload()
        except BaseException:
            self.whole = not replaced  # Some rows may be replaced and others not.
            raise
        return 0 if adds_state else rows.step, not adds_state

    def check_holds(self, tier: Tier, info: SnapshotInfo, owned: LinkedRows | None) -> None:
        """Raise StoreFullError unless a tier can hold the rows of a snapshot."""
        try:
            tier.check_holds(rows_of(info) if owned is None else len(owned))
        except StoreFullError:
            if owned is not None or rows_of(info) == info.rows:
                raise
            with self._bottom.read(info.name) as linked:  # A delta may have said too many.
                tier.check_holds(len(linked))

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Batches of all rows; see `RowSource.scan`."""
        for batch in self.hot.scan() if self.built else ():
            signals_deferred.raise_interrupt()
            yield batch

    def wider(self, format: RowFormat, weights_only: bool) -> bool:
        """Whether a load has to give rows the state of new ones."""
        return self.built and (self.adds_state_to(format) or weights_only and format.state_width > 0)

    def _put_all(
        self, name: str, format: RowFormat, owned: LinkedRows | None = None, *, with_state: bool = False,
        usage_of: UsageOf | None = None,
    ) -> None:  # fmt: skip
        """Start from the rows of a snapshot, of this format, put one after another; without state they are given that
        of new rows."""
        assert self.bottom_store is not None
        self.bottom_store.clear()
        for table_N, id_N, row_NX in self.scan(name, owned):
            if not with_state or not format.same_words(self.format):
                row_NX = self.format.converted(row_NX, format, with_state=with_state)
                if usage_of is not None and format.usage_words != self.format.usage_words:
                    usage = slice(self.format.usage_begin, self.format.state_begin)
                    row_NX[:, usage] = usage_of(table_N, id_N).view(np.float32)
            self.bottom_store.put(table_N, id_N, row_NX)

    def scan(self, name: str, owned: LinkedRows | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All rows of a snapshot of the store at the bottom, or those given. Ctrl-C comes between two batches."""
        reader = self._bottom.read(name) if owned is None else owned
        try:
            for batch in reader.scan():
                signals_deferred.raise_interrupt()
                yield batch
        finally:
            if owned is None:
                reader.close()
