"""A local copy of one snapshot of an object store, with its ancestors, which all servers of a machine share.

Invariants:
- a snapshot is in the copy completely or not at all;
- readers of the copy go on while a newer snapshot is pulled, or while another process replaces damaged files of the
  copy; `mend` tells a reader that has met damage to read again;
- whether there is a newer snapshot follows from one object, `newest.json`; nothing is listed;
- only chunks that the copy lacks are downloaded, and the description of a part is read once.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from oneemb.storage.errors import CorruptTableError, LockedError, OtherTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import is_damage
from oneemb.storage.objects.manifests import Current, current_of, has_snapshot, newest_in
from oneemb.storage.objects.object_store import ObjectStore
from oneemb.storage.objects.pull import KnownParts, PullStoppedError, pull_from
from oneemb.storage.snapshots.part_folders import open_anew
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks

_LOOK_S = 0.05
_TRIES = 3


class StoredCopy:
    """Copy, in `folder`, of the newest or a named snapshot at a URL, with its ancestors."""

    def __init__(self, store: ObjectStore, folder: str):
        self.url, self.folder, self._store = store.url, folder, store
        self.looks = SnapshotLooks([folder])
        """Looks at the copy."""
        self._damaged = ""  # identity of the snapshot whose copy the next pull must compare with the store
        self._mended: set[tuple[str, str]] = set()  # (identity of a snapshot, error) for which `mend` has asked a pull
        self.compared = 0
        """Number of times that the copy was compared with the store, since files of it were damaged."""
        self.offered: Current | None = None
        """The snapshot that the store had when it was last asked; None = it was not asked yet."""
        self._known: KnownParts = {}  # parts of the snapshot that was pulled last, and of its ancestors

    def pull(self, name: str | None, stop: Callable[[], bool]) -> None:
        """Pull the snapshot of this name, or the newest one, with its ancestors, and remove all others from the copy.

        Args:
            stop: called from time to time; once it returns True, the call ends.

        Raises:
            SnapshotNotFoundError: the store has no such snapshot.
            CorruptTableError: an object is missing or damaged.
            StorageError: the store or the folder cannot be used.
        """
        is_newest = name is None
        if name is None:
            newest = newest_in(self._store)
            if newest is None:
                raise SnapshotNotFoundError(f"{self.url} must have a snapshot, it has none; push one first")
            name = newest[0]
        tries, is_new = 0, False
        while not stop():
            # The job may replace the snapshot of this name at any time, so its identity is read again.
            self.offered = current_of(self._store, name)
            identity = self.offered.identity
            if self._damaged != identity and self._has(name, identity, is_newest):
                return
            if tries == _TRIES:
                raise CorruptTableError(
                    f"snapshot {name!r} in {self.url} must have identity {identity}, it has another in {self.folder}"
                    f" after {_TRIES} pulls; push the snapshot again, to another URL if two jobs use this one"
                )
            try:
                # Readers compare what they read.
                is_damaged = self._damaged == identity
                pull_from(
                    self._store, self.folder, [name], verify=False, known=self._known, is_damaged=is_damaged, stop=stop
                )  # fmt: skip
                self._damaged = ""
                self.compared += is_damaged
            except PullStoppedError:
                return
            except LockedError:
                time.sleep(_LOOK_S)  # Another process of this machine pulls or removes a snapshot.
                continue
            except CorruptTableError:
                self._known.clear()  # A part that has been pushed again has another description.
                raise
            except OtherTableError as error:
                self._known.clear()
                if is_new:
                    raise OtherTableError(
                        f"{self.url} must have snapshot {name!r} and its parents from one table, but they have"
                        f" different rows of one chunk; push them to another URL if two jobs use this one: {error}"
                    ) from error
                # The job went on from an older snapshot in another folder, so the copy is of no use.
                shutil.rmtree(self.folder, ignore_errors=True)
                is_new = True
                continue
            tries += 1
            with suppress(StorageError):  # Another process will.
                self._remove_others(name)

    def mend(self, identity: str, error: StorageError, compared: int) -> bool:
        """Whether a reader of the snapshot with this identity, which has got `error`, must pull and read again. If the
        error says that files are damaged, the next `pull` compares the copy with the store, once for each snapshot and
        error: if the copy has the same damage again then, the store has the damage too.

        Args:
            compared: `compared` when the reader began; more now = the copy was replaced while it was read.
        """
        if self._damaged == identity or self.compared > compared:
            return True
        damage = identity, str(error)
        if damage in self._mended or not is_damage(error):
            return False
        self._mended = {one for one in self._mended if one[0] == identity} | {damage}
        self._damaged = identity
        return True

    def late_call(self, seconds: float) -> str | None:
        """The call of the store that began `seconds` ago or earlier, in words; None = there is none."""
        return self._store.calls.late(seconds)

    def is_offered(self, name: str, identity: str) -> bool:
        """Whether the store has the snapshot of this name and identity."""
        return has_snapshot(self._store, name, identity)

    def _has(self, name: str, identity: str, is_newest: bool) -> bool:
        """Whether the copy has the snapshot. If it is the newest of the store, newer ones in the copy, which a killed
        pull has left, are removed."""
        try:
            found = self.looks.look()
            wanted = found.get(name, identity, self.url)
        except StorageError:
            return False
        if is_newest and found.snapshots()[-1].sequence > wanted.sequence:
            with suppress(StorageError):  # Another process will.
                self._remove_others(name)
        return True

    def _remove_others(self, name: str) -> None:
        found = self.looks.look()
        wanted = found.get(name)
        kept = {part.info.identity for link in (*wanted.before, wanted) for part in link.parts}
        for folder in found.folders:
            with open_anew(folder) as table:
                for damaged in found.damaged:
                    if damaged.folder == folder and not damaged.newer:
                        table.delete_snapshot(damaged.name)
                for info in reversed(table.snapshots()):  # Deltas go before their parents.
                    if info.identity not in kept:
                        table.delete_snapshot(info.name)
