"""Snapshots of an embedding that all ranks save and load together, also those of earlier jobs in the same folders.

Each rank saves a part with the rows that it owns, including rows of replicated tables, so a snapshot holds each row
once. (storage/snapshots/snapshot_parts.py says when parts form a snapshot.) In a load, each rank reads the rows that it
owns from the parts of any number of ranks, then sends copies of its rows of replicated tables to all other ranks. All
ranks make each call together; if one rank fails, all ranks raise.

    save       1. each rank removes remains of killed saves    4. the ranks wait for each other twice, then remove the
               2. each rank marks its part as unfinished          marks: the snapshot exists
               3. each rank saves its part, durably            5. the snapshots that it replaces are removed

Invariants, if any rank is killed at any point:
- the last complete snapshot can be loaded, and the snapshot being saved is complete or does not exist;
- the next save removes the remains of an incomplete snapshot;
- a snapshot that does not fit is refused on all ranks before any rank has changed a row.
"""

import functools
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from oneemb.checkpoints.rank_replicas import RankReplicas
from oneemb.graph.ranks import AnyRanks, RankError, read_together, together
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import (
    CorruptTableError,
    FormatVersionError,
    OtherSnapshotError,
    SnapshotExistsError,
    SnapshotNeededError,
    SnapshotNotFoundError,
    StorageError,
)
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.replicas import TableIds
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.part_folders import NewParts, PartRemoval, sweep_folder, to_remove
from oneemb.storage.snapshots.snapshot_parts import FoundParts, PartedSnapshot, find_parts, folders_at, table_name_of
from oneemb.storage.snapshots.unfinished import unmark
from oneemb.storage.table.delta import Delta, rows_of
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.tiered_rows import NewPart

T = TypeVar("T")


class Loaded(NamedTuple):
    """Result of a load."""

    info: SnapshotInfo
    as_saved: bool
    """Whether the folder has a snapshot of the rows as they are; False = optimizer state was added to them, or the
    snapshot was read from another folder."""


class RankSnapshots:
    """Saves, loads, lists and deletes snapshots of an embedding.

    Args:
        name: name of the embedding, for errors.
        store: this rank's store.
        paths: folders that the user has given.
        folders: for each rank, the folder of its persistent table.
        ranks: ranks that own the rows.
    """

    def __init__(self, name: str, store: EmbeddingStore, paths: Sequence[str], folders: Sequence[str], ranks: AnyRanks):
        self._name, self._store, self._paths = name, store, list(paths)
        self._folders = list(folders)
        self.ranks = ranks
        self._rank, self._size = ranks.rank, ranks.size
        self._own = self._folders[self._rank]
        self._fs = LocalFileSystem()
        self.replicas = RankReplicas(store, ranks)
        self._swept = False
        self._part_of = ""
        self._read_from: FoundParts | None = None
        self.last: str | None = None
        """Name of the snapshot that was saved or loaded last; None = none was, or it has been deleted."""
        self.are_kept = True
        """Whether the folders stay; False = the module that has made the folders removes them at its end."""

    def together(self, what: str, call: Callable[[], T]) -> T:
        """Result of `call`, which all ranks run between two steps. Its first exchange must be named `words(what)`."""
        return together(self.ranks, [self._store], what.partition(" ")[0], self.words(what), call)

    def words(self, what: str) -> str:
        """Name of the operation `what` in exchanges."""
        return f"{self._part_of}{what} of embedding {self._name!r}"

    @contextmanager
    def part_of(self, what: str) -> Iterator[None]:
        """Block in which names of exchanges begin with `what`, a call on the whole graph."""
        self._part_of, former = f"{what}: ", self._part_of
        try:
            yield
        finally:
            self._part_of = former

    # ---- snapshots in other folders ---------------------------------------------------------------------------------

    @property
    def folder(self) -> str:
        """Folder of this rank's table."""
        return self._own

    @contextmanager
    def reading(self, found: FoundParts) -> Iterator[None]:
        """Block in which loads read the snapshots `found`, which lie in other folders. All ranks must enter it."""
        self._read_from = found
        try:
            yield
        finally:
            self._read_from = None

    @property
    def reads_elsewhere(self) -> bool:
        """Whether loads read snapshots of other folders than the embedding's."""
        return self._read_from is not None

    def keep_linked(self) -> None:
        """Remove the marks of parts that have been linked into the folders of all ranks."""
        if self._size > 1:
            found = find_parts([self._own], self._fs)
            unmark(self._fs, self._own, {part.info.identity for part in found.parts if part.marked})

    # ---- list -------------------------------------------------------------------------------------------------------

    def seen(self) -> list[str]:
        """Names of the snapshots that this rank sees, oldest first. Other ranks may see other snapshots, so the names
        are only for warnings."""
        if self._has_no_ranks():
            return self._store.snapshots.names()
        return [one.name for one in find_parts(folders_at([*self._paths, *self._folders]), self._fs).snapshots()]

    def names(self) -> list[str]:
        """Names of the snapshots, oldest first: the same on all ranks."""
        if self._has_no_ranks():
            return self._store.snapshots.names()
        found = self._look()
        return [one.name for one in found.snapshots() if not one.name.startswith(EXPORTED)]

    def deltas_before(self, name: str, kept: Collection[str]) -> list[str]:
        """Names of all deltas that go on from the snapshot `name`, newest first: the same on all ranks. [] if any
        of these deltas is newer than one of `kept`."""
        if self._has_no_ranks():
            infos = [self._store.snapshots.info(one) for one in self._store.snapshots.names()]
        else:
            infos = [one.info for one in self._look().snapshots()]
        chain, deltas, later = {info.identity for info in infos if info.name == name}, list[str](), False
        for info in infos:  # Parents are older than their deltas.
            later = later or info.name in kept
            delta = Delta.of_meta(info.meta, info.name)
            if delta is not None and delta.identity in chain:
                if later:
                    return []
                chain.add(info.identity)
                deltas.insert(0, info.name)
        return deltas

    def _look(self) -> FoundParts:
        return self.together("list snapshots", lambda: self._find(self.words("list snapshots")))

    def find(self, what: str, name: str, identity: str | None, named_by: str) -> PartedSnapshot:
        """The snapshot `name`; arguments and errors as for `FoundParts.get`. `what` names the exchange."""
        elsewhere, snapshots = self._read_from, list[PartedSnapshot]()
        if elsewhere is None:
            return self._find(what).get(name, identity, named_by)
        self.ranks.agree(what, lambda: snapshots.append(elsewhere.get(name, identity, named_by)))
        return snapshots[0]

    def _find(self, what: str, check: Callable[[], object] = lambda: None) -> FoundParts:
        """The parts that all ranks find: each rank in its own folder, the first rank also in folders that belong to no
        rank. Each rank runs `check` first."""

        def look() -> FoundParts:
            check()
            folders = [folder for folder in folders_at([self._own]) if folder == self._own]
            if self._rank == 0:
                folders += [folder for folder in folders_at(self._paths) if folder not in self._folders]
            return find_parts(folders, self._fs)

        return FoundParts.together(self.ranks.all_gather(what, look))

    def _has_no_ranks(self) -> bool:
        """Whether this process owns all rows, and its folder has no folders of ranks, from an earlier job."""
        return (
            self.ranks.alone
            and self._read_from is None
            and not any(folder != self._own for folder in folders_at([self._own]))
        )

    def of_all(self, what: str, mine: T) -> list[T]:
        """`mine` of each rank, in the order of the ranks. `what` names the operation."""
        words = self.words(what)
        gather = functools.partial(self.ranks.all_gather, words, lambda: mine)
        return read_together(self.ranks, [self._store], what, words, gather)

    # ---- save -------------------------------------------------------------------------------------------------------

    def save(
        self, name: str, description: dict[str, Any], *, overwrite: bool = False, since: str | None = None,
        keep_evicted: bool = False, sequence: int = 0,
    ) -> str:  # fmt: skip
        """Save a snapshot, or a delta since the snapshot `since`; returns its identity. See
        `TableEmbedding.save_snapshot` and `save_delta`. `sequence`: least sequence number that the snapshot gets."""
        if not self.are_kept:
            raise StorageError(
                f"tables {self._name} are in a temporary folder, which is removed with their collection and can keep no"
                " snapshot; give the collection store_options with a path"
            )
        if self._has_no_ranks():
            identity = self._store.snapshots.save(
                name, description, overwrite=overwrite, since=since, keep_evicted=keep_evicted, sequence=sequence
            ).identity
        else:
            call = f"save_snapshot {name!r}" if since is None else f"save_delta {name!r} since {since!r}"
            call += ", replacing" * overwrite + ", keep_evicted" * keep_evicted
            identity = self.together(
                call, lambda: self._save(call, name, description, overwrite, since, keep_evicted, sequence)
            )
        self.last = name
        return identity

    def _save(
        self, call: str, name: str, description: dict[str, Any], overwrite: bool, since: str | None = None,
        keep_evicted: bool = False, sequence: int = 0,
    ) -> str:  # fmt: skip
        what = self.words(call)
        identity = self.ranks.all_gather(what, lambda: uuid.uuid4().hex)[0]
        table_name = ""

        def check() -> None:
            nonlocal table_name
            self._store.build()  # From here on, the store holds the lock of its table.
            table_name = table_name_of(name, identity, self._own, self._fs)

        found = self._find(what, check)
        former = found.folders_with(name)
        if former and not overwrite:
            raise SnapshotExistsError.named(name, f"in {', '.join(former)}")
        found.check_no_deltas(name, "replaced")
        if since is not None:
            parents = set(self.ranks.all_gather(what, lambda: self._store.snapshots.check_since(since, keep_evicted)))
            if len(parents) > 1:
                raise StorageError(
                    f"since={since!r} must name the same snapshot on all ranks, but ranks know different ones of this"
                    " name; save a complete snapshot"
                )
        self.ranks.agree(what, lambda: self._sweep(found))
        self.replicas.bring_new(what)
        part = NewPart(name, identity, max(found.next_sequence, sequence))
        parts = NewParts(identity, self._size, self._fs)

        def save() -> None:
            snapshots = self._store.snapshots
            parts.begin(self._own, table_name, snapshots.delete)
            snapshots.save(table_name, description, part=part, since=since, keep_evicted=keep_evicted)

        try:
            self.ranks.agree(what, save)
        except BaseException:
            parts.take_back()
            raise
        # A rank that does not hear from all others in the exchange above, since one has died, takes its part back.
        # After this second wait, every rank knows that no rank takes its part back. Only then are marks removed, so no
        # part loses its mark while another part may be missing.
        self.ranks.agree(f"{what}: all parts are there")
        self.ranks.agree(what, parts.finish)
        if former:
            with suppress(StorageError, RankError):  # The new snapshot exists; the next save tries to remove again.
                for snapshots in to_remove(found, name):
                    self._remove(what, snapshots)
        return identity

    def _sweep(self, found: FoundParts) -> None:
        """Remove remains of killed saves: each rank in its own folder, the first rank also in folders that belong to no
        rank (earlier jobs with other numbers of ranks)."""
        sweep_folder(self._own, found, self._store.snapshots.delete, self._fs)
        if self._rank == 0:
            left = {part.folder for part in found.leftovers()}
            for folder in found.folders:
                if folder not in self._folders and (not self._swept or folder in left):
                    sweep_folder(folder, found, fs=self._fs)
        self._swept = True

    # ---- delete -----------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """Delete a snapshot; see `TableEmbedding.delete_snapshot`."""
        last, self.last = self.last, None if self.last == name else self.last  # first, since an interrupt may come
        try:
            if self._has_no_ranks():
                self._store.snapshots.delete(name)
            else:
                self.together(f"delete_snapshot {name!r}", lambda: self._delete(name))
        except SnapshotNeededError:
            self.last = last
            raise

    def _delete(self, name: str) -> None:
        what = self.words(f"delete_snapshot {name!r}")
        found = self._find(what, self._store.build)
        found.check_no_deltas(name, "deleted")
        self.ranks.agree(what, lambda: self._sweep(found))  # first, since a killed delta must not keep its parent
        for snapshots in to_remove(found, name):
            self._remove(what, snapshots)

    def _remove(self, what: str, snapshots: Sequence[Any]) -> None:
        """Delete snapshots of single tables: each rank those in its own folder, the first rank also those in folders
        that belong to no rank."""
        mine = [
            one for one in snapshots
            if one.folder == self._own or self._rank == 0 and one.folder not in self._folders
        ]  # fmt: skip
        removal = self._opened(what, mine)
        with removal:
            self.ranks.agree(what, removal.mark)
            self.ranks.agree(what, removal.remove)
            self.ranks.agree(what, removal.unmark)

    def _opened(self, what: str, snapshots: Sequence[Any]) -> PartRemoval:
        opened: list[PartRemoval] = []
        try:
            self.ranks.agree(
                what, lambda: opened.append(PartRemoval(snapshots, {self._own: self._store.snapshots.delete}, self._fs))
            )
        except BaseException:
            for removal in opened:
                removal.__exit__()
            raise
        return opened[0]

    # ---- export -----------------------------------------------------------------------------------------------------

    def export(self, name: str, check: Callable[[], object], export: Callable[[list[str], str], int]) -> int:
        """Result of `export(folders, name)` on the first rank. `export` reads the current rows from a temporary
        snapshot, whose name is the first rank's `name`. `check` raises if the export must not begin."""

        def run() -> int:
            what = self.words("export_rows")
            shared = self.ranks.all_gather(what, lambda: (check(), name))[0][1]
            self._save("export_rows", shared, {}, overwrite=False)
            try:
                return self.ranks.all_gather(what, lambda: export(self._folders, shared))[0]
            finally:
                self._delete(shared)

        return self.together("export_rows", run)

    # ---- load -------------------------------------------------------------------------------------------------------

    def check_fits(self, name: str, check: Callable[[SnapshotInfo], object]) -> None:
        """Raise StorageError unless the snapshot `name` exists and fits the embedding. `check` raises unless the kind
        of the snapshot fits."""
        if self._has_no_ranks():
            check(self._store.snapshots.info(name))
            self._store.snapshots.check_fits(name)
            return

        def look() -> None:
            what = self.words(f"check_fits {name!r}")
            snapshot = self.find(what, name, None, "")
            self.ranks.agree(what, lambda: check(snapshot.info))
            self._open(what, snapshot, weights_only=False, read=False)

        self.together(f"check_fits {name!r}", look)

    def existing(self, named: Sequence[tuple[str, str | None]]) -> list[bool]:
        """Whether each snapshot (name, identity or None = any) exists. A snapshot that cannot be read exists, too. All
        ranks pass the same list."""
        if not named:
            return []
        check: Callable[[str, str | None, str], object] = self._store.snapshots.check
        if not self._has_no_ranks():
            check = self._look().get
        return [_exists(check, name, identity) for name, identity in named]

    def check_named(self, name: str, identity: str | None, named_by: str) -> None:
        """Raise unless the snapshot `name` exists and has this identity; see `StoreSnapshots.check`."""
        if self._has_no_ranks():
            self._store.snapshots.check(name, identity, named_by)
        else:
            what = f"check_snapshot {name!r} {identity or ''}"
            self.together(what, lambda: self.find(self.words(what), name, identity, named_by))

    def load(self, name: str, *, weights_only: bool, check: Callable[[SnapshotInfo], object]) -> Loaded:
        """Load a snapshot; see `TableEmbedding.load_snapshot`. Call it by `together`. `check` raises unless the kind of
        the snapshot fits the embedding."""
        if self._has_no_ranks():
            info = self._store.snapshots.info(name)
            check(info)
            return Loaded(info, self._store.snapshots.load(name, weights_only=weights_only))
        what = self.words(f"load_snapshot {name!r}")
        snapshot = self.find(what, name, None, "")
        self.ranks.agree(what, lambda: check(snapshot.info))
        info, owned, replicated = self._open(what, snapshot, weights_only=weights_only, read=True)
        as_saved = False

        def load() -> None:
            nonlocal as_saved
            as_saved = self._store.snapshots.load_rows(info, owned, weights_only=weights_only, replicated=replicated)

        try:
            self.ranks.agree(what, load)
            if replicated is not None:
                self.replicas.spread(what, replicated, self._store.replicas.put)
        except BaseException as error:
            if not self.ranks.alone:  # Some ranks may have the rows of the snapshot, others not.
                self._store.store_lock.cut_short(error)
            raise
        finally:
            if owned is not None:
                owned.close()
        return Loaded(snapshot.info, as_saved and self._read_from is None)

    def _open(
        self, what: str, snapshot: PartedSnapshot, *, weights_only: bool, read: bool
    ) -> tuple[SnapshotInfo, LinkedRows | None, TableIds | None]:
        """(snapshot; this rank's rows in the parts of all ranks, or None = load the rank's own part; keys of replicated
        tables that the rank owns, or None = no such tables). Raises on all ranks unless the rows fit on all ranks."""
        own = snapshot.part_in(self._own, self._rank, self._size)
        owned: LinkedRows | None = None

        def check() -> None:
            nonlocal owned
            if own is None:
                owned = owned_rows(snapshot, self._rank, self._size, self._fs)
            self._store.snapshots.check_rows(info, owned, weights_only=weights_only, read=read)

        info = snapshot.info if own is None else own.info
        try:
            self.ranks.agree(what, check)
            replicated = self.replicas.check(what, snapshot, rows_of(info) if owned is None else len(owned))
        except BaseException:
            if owned is not None:
                owned.close()
            raise
        return info, owned, replicated


def _exists(check: Callable[[str, str | None, str], object], name: str, identity: str | None) -> bool:
    """Whether `check` finds the snapshot."""
    try:
        check(name, identity, "a checkpoint")
    except (SnapshotNotFoundError, OtherSnapshotError, ValueError):
        return False
    except (CorruptTableError, FormatVersionError):
        pass  # The snapshot exists, though it cannot be read.
    return True
