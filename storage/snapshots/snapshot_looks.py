"""Looks at the snapshots of a table again and again, and reads the description of each snapshot once."""

import os
import time
from collections.abc import Iterable

from oneemb.storage.snapshots.snapshot_parts import FoundParts, look_at
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

_OLD_S = 2.0
"""Least age, in seconds, of a file's last change at which an equal time of change proves an equal file: times of change
are coarse."""


class SnapshotLooks:
    """Looks at the snapshots at some paths. The description of a snapshot is read again only if its file has changed.

    Several threads may call it.

    Args:
        paths: folders of tables, or folders with the folders of ranks.
    """

    def __init__(self, paths: Iterable[str]):
        self.paths = list(paths)
        self._known: dict[str, tuple[object, SnapshotInfo]] = {}
        """{path of a snapshot's file: (state of the file when it was read, its description)}."""
        self._found = FoundParts([], [], [])

    def look(self) -> FoundParts:
        """Find the parts at the paths; see `look_at`."""
        before, known = self._known, {}

        def read(files: SnapshotFiles, name: str) -> SnapshotInfo:
            path = files.path(name)
            try:
                stat = os.stat(path)
            except OSError:
                return files.read(name).info  # The reader says what is wrong.
            state = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
            found = before.get(path)
            if found is None or found[0] != state:
                found = state, files.read(name).info
            if time.time() - stat.st_mtime > _OLD_S:
                known[path] = found
            return found[1]

        found, last = look_at(self.paths, read=read), self._found
        self._known = known
        if (found.parts, found.damaged, found.folders) == (last.parts, last.damaged, last.folders):
            return last  # It knows the chains of its snapshots already.
        self._found = found
        return found
