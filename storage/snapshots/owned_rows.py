"""Reads the rows of a snapshot that belong to one of several owners, from all parts that may hold such rows.

Invariant: memory does not grow with the number of rows: one chunk of one part is read at a time.
"""

from contextlib import ExitStack

import numpy as np

from oneemb.kernels.owner import owner_of
from oneemb.storage.errors import OtherSnapshotError
from oneemb.storage.fs import FileSystem
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.snapshot_parts import Part, PartedSnapshot
from oneemb.storage.table.snapshot_reader import Keep, SnapshotReader


def owned_rows(
    snapshot: PartedSnapshot, owner: int, owners: int, fs: FileSystem | None = None, *, keep: Keep | None = None
) -> LinkedRows:
    """Rows of owner `owner` of `owners` in a snapshot and its ancestors. Only parts that may hold such rows are opened.
    Raises StorageError if a part cannot be read here, or is not the part that was listed. `keep`: function that says
    which of these rows are kept; None = all."""

    def is_own(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        own_N = owner_of(table_N, id_N, owners) == owner
        return own_N if keep is None else own_N & keep(table_N, id_N)

    links: list[list[SnapshotReader]] = []
    with ExitStack() as opened:  # closes the opened readers if a later one cannot be opened
        for link in (*snapshot.before, snapshot):
            links.append([opened.enter_context(open_part(part, fs)) for part in link.parts_for(owner, owners)])
        opened.pop_all()
    return LinkedRows(links, is_own)


def open_part(part: Part, fs: FileSystem | None = None) -> SnapshotReader:
    """Reader of the rows of one part. OtherSnapshotError if the part is not the one that was listed."""
    reader = SnapshotReader.open(part.folder, part.info.name, fs=fs)
    if reader.info.identity != part.info.identity:
        raise OtherSnapshotError(
            f"snapshot {part.info.name!r} in {part.folder}: this rank sees {reader.info}, but the rank that listed the"
            f" snapshots saw {part.info}; all ranks must see the same folders"
        )
    return reader
