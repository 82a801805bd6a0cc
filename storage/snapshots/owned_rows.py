"""Reads the rows of a snapshot that belong to one of several owners, from all parts that may hold such rows.

Invariant: memory does not grow with the number of rows: one chunk of one part is read at a time.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from oneemb.kernels.owner import owner_of
from oneemb.storage.errors import OtherSnapshotError
from oneemb.storage.fs import FileSystem
from oneemb.storage.policies.admission import joined_arrays
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.snapshot_parts import Part, PartedSnapshot
from oneemb.storage.table.snapshot_reader import Keep, SnapshotReader


class OwnedRows:
    """Rows of owner `owner` of `owners` in a snapshot and its ancestors. Only parts that may hold such rows are opened.
    Raises StorageError if a part cannot be read here, or is not the part that was listed."""

    def __init__(self, snapshot: PartedSnapshot, owner: int, owners: int, fs: FileSystem | None = None):
        self._owner, self._owners = owner, owners
        links: list[list[SnapshotReader]] = []
        with ExitStack() as opened:  # closes the opened readers if a later one cannot be opened
            for link in (*snapshot.before, snapshot):
                links.append([opened.enter_context(_open(part, fs)) for part in link.parts_for(owner, owners)])
            opened.pop_all()
        self._linked = LinkedRows(links)
        self._count: int | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = self._linked.count(self._is_own)
        return self._count

    def keys(self, keep: Keep) -> tuple[np.ndarray, np.ndarray]:
        """Keys of the owner's rows that `keep` keeps: table_N int32, id_N int64. Reads only keys."""

        def is_kept(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
            return self._is_own(table_N, id_N) & keep(table_N, id_N)

        tables, ids = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for table_N, id_N in self._linked.keys(is_kept):
            tables.append(table_N)
            ids.append(id_N)
        return np.concatenate(tables), np.concatenate(ids)

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each row once, in batches (table_N int32, id_N int64, row_NW float32) of at most `batch` rows."""
        yield from self._linked.scan(batch, self._is_own)

    def arrays(self) -> dict[str, np.ndarray]:
        """The snapshot's arrays, {name: array}, joined from all parts and restricted to the owner's keys."""
        return joined_arrays(self._linked.arrays(), self._is_own)

    def close(self) -> None:
        """Close the files."""
        self._linked.close()

    def _is_own(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        return owner_of(table_N, id_N, self._owners) == self._owner


def _open(part: Part, fs: FileSystem | None) -> SnapshotReader:
    reader = SnapshotReader.open(part.folder, part.info.name, fs=fs)
    if reader.info.identity != part.info.identity:
        raise OtherSnapshotError(
            f"snapshot {part.info.name!r} in {part.folder}: this rank sees {reader.info}, but the rank that listed the"
            f" snapshots saw {part.info}; all ranks must see the same folders"
        )
    return reader
