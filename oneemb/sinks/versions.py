"""Versions of a table in its folder: which of them a sink must still get, and in which form."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from oneemb.serving.stored_rows import StoredCopy
from oneemb.sinks.changes import Changes
from oneemb.sinks.version import PublishError, TableVersion
from oneemb.storage.bottom import NOT_SAVED
from oneemb.storage.errors import FormatVersionError, OtherTableError, StorageError
from oneemb.storage.fs import is_damage
from oneemb.storage.objects.manifests import Current
from oneemb.storage.snapshots.changed_rows import changed_rows
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.row_cap import RowCap
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import FoundParts, PartedSnapshot


class Versions:
    """Snapshots and deltas in the folders of a table, as a job saves and deletes them. Several threads may call it.

    Args:
        paths: folders of the table.
        target: name of the snapshot to publish; None = the newest.
        stored: copy of an object store's snapshots in the only path; None = a job writes to the paths.
    """

    def __init__(self, paths: Sequence[str], target: str | None = None, stored: StoredCopy | None = None):
        self._looks = SnapshotLooks(paths) if stored is None else stored.looks
        self.target = target
        self._stored = stored
        self._pulls = threading.Lock()

    @property
    def paths(self) -> list[str]:
        """Folders of the table."""
        return self._looks.paths

    def look(self) -> FoundParts:
        """Parts of snapshots in the folders. Only files that have changed are read again."""
        return self._looks.look()

    def pull(self, stop: Callable[[], bool]) -> None:
        """Bring the snapshot to publish, with its ancestors, from the object store, if there is one. StorageError if
        the store cannot be used, or has no snapshot."""
        if self._stored is not None:
            with self._pulls:  # `look` does not wait for a download.
                self._stored.pull(self.target, stop)

    @property
    def offered(self) -> Current | None:
        """The version to publish, as the object store had it when it was last asked; None = there is no store."""
        return None if self._stored is None else self._stored.offered

    def late_call(self, seconds: float) -> str | None:
        """The call of the object store that began `seconds` ago or earlier, in words; None = there is none."""
        return None if self._stored is None else self._stored.late_call(seconds)

    @property
    def compared(self) -> int:
        """Number of times that the copy of an object store was compared with the store."""
        return 0 if self._stored is None else self._stored.compared

    def mend(self, version: TableVersion, error: Exception, compared: int) -> bool:
        """Whether a reader of a version, which has got `error`, must pull and read again, since the copy of an object
        store is damaged or was replaced. `compared`: as for `StoredCopy.mend`."""
        if self._stored is None or not isinstance(error, StorageError):
            return False
        try:
            with self._pulls:
                newest = self.newest()
        except StorageError:
            return False  # `pull` mends snapshots whose descriptions are damaged.
        if newest is None or version.identity not in [link.identity for link in (*newest.before, newest)]:
            return False  # Another thread has pulled a newer snapshot and removed this one.
        return self._stored.mend(newest.identity, error, compared)

    def has(self, version: TableVersion) -> bool:
        """Whether the snapshot of a version, and all its ancestors, are still there."""
        found = self._looks.look()
        broken = found.broken()
        return any(one.identity == version.identity for one in found.snapshots() if one.name not in broken)

    def newest(self) -> PartedSnapshot | None:
        """The newest snapshot, or the one that is the target; None = there is none yet.

        Raises:
            SnapshotNotFoundError: the target is not there, or an ancestor is missing or was replaced.
            CorruptTableError: the snapshot cannot be read.
        """
        found = self.look()
        if self.target is not None:
            return found.get(self.target)
        names = [one.name for one in found.snapshots() if not one.name.startswith(NOT_SAVED)]
        return found.get(names[-1]) if names else None

    def unread(self) -> StorageError | None:
        """Error of a snapshot that cannot be read and may be newer than the newest that can be; None = there is none.
        CorruptTableError or FormatVersionError if it is newer for sure. An object store itself says which is the
        newest, and `pull` brings it."""
        newest = self.newest() if self.target is None and self._stored is None else None
        error, is_sure = (None, False) if newest is None else self.look().unread_after(newest, NOT_SAVED)
        if error is not None and is_sure:
            raise error
        return error

    def changes(
        self, shown: TableVersion | None, *, wants_whole: bool, when_behind: str, stop: Callable[[], bool],
        cap: RowCap | None = None, compares: bool = True,
    ) -> list[Changes]:  # fmt: skip
        """Changes that a sink must get, in order.

        Args:
            shown: the version that the sink shows; None = none.
            wants_whole: whether the sink wants all rows in place of deltas.
            when_behind: "whole" = all rows of the newest version if the changes since `shown` are not there; "error" =
                PublishError.
            stop, cap: passed to `Changes`.
            compares: whether a whole snapshot is compared with `shown`, which takes a while; False = all its rows are
                the changes.

        Raises:
            PublishError: the changes since `shown` are not there, and `when_behind` is "error".
            OtherTableError: the sink shows a version of another embedding.
            StorageError: as `newest`.
        """
        newest = self.newest()
        if newest is None:
            return []
        if shown is None:
            return [Changes(newest, True, stop, cap)]
        version = TableVersion.of(newest)
        if version.embedding != shown.embedding:
            raise OtherTableError(
                f"the sink must show versions of embedding {version.embedding!r} in {', '.join(self.paths)}, it shows"
                f" {shown.name!r} of embedding {shown.embedding!r}; give the sink another place"
            )
        if version.identity == shown.identity:
            return []
        if self.target is None and version.sequence < shown.sequence:
            for damaged in self.look().damaged_of(shown.name):
                raise damaged.error()  # The sink's version was not deleted: it stays.
        links = [*newest.before, newest]
        known = [link.identity for link in links]
        if shown.identity in known and not wants_whole:
            first = known.index(shown.identity) + 1
            chain = [replace(link, before=tuple(links[:n])) for n, link in enumerate(links)]
            if cap is None or TableVersion.of(chain[first - 1]).history == shown.history:
                return [Changes(link, False, stop, cap) for link in chain[first:]]
            wants_whole = True  # Under the cap, the sink has other rows than this chain gives.
        damage = None
        if compares and cap is None and not wants_whole and version.sequence > shown.sequence:
            try:
                changed = self._changed_since(shown, newest)
            except StorageError as error:
                if not is_damage(error) and not isinstance(error, FormatVersionError):
                    raise
                damage, changed = error, None
            if changed is not None:
                return [Changes(newest, False, stop, changed=changed)]
        if when_behind == "error" and not wants_whole:
            because = "" if damage is None else f", since files are damaged: {damage}"
            raise PublishError(
                f"the sink shows {shown.name!r} (identity {shown.identity}), and {', '.join(self.paths)} has no changes"
                f' from there to {version.name!r}{because}; publish with when_behind="whole" to give the sink all rows'
            ) from damage
        return [Changes(newest, True, stop, cap, damage=damage)]

    def _changed_since(self, shown: TableVersion, newest: PartedSnapshot) -> LinkedRows | None:
        """Changes from the version that a sink shows to a snapshot that does not go on from it. None if the folder does
        not have the sink's version, or if all rows must be read. StorageError if files of one of the two are damaged or
        cannot be read."""
        found = self.look()
        for one in found.snapshots():
            if one.identity == shown.identity and one.name not in found.broken():
                return changed_rows(found.get(one.name), newest)
        for damaged in found.damaged_of(shown.name):
            raise damaged.error()
        return None
