"""Makes a whole snapshot, or one delta, of a chain of deltas, while no job runs. No row is copied.

Invariants:
- the chain stays as it is, and the new snapshot is whole or not there, whatever ends the process;
- one part is made at a time: memory is what the keys of one part take.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.rows.arguments import Paths, as_list
from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.locking.undisturbed import undisturbed
from oneemb.storage.row_store import Places
from oneemb.storage.snapshots.part_folders import NewParts, sweep_folder
from oneemb.storage.snapshots.snapshot_parts import Part, PartedSnapshot, look_at, table_name_of
from oneemb.storage.snapshots.snapshot_rows import PartOf, without_part
from oneemb.storage.table.delta import GONE, Delta, gone_array, gone_keys, number_of, without_delta
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader


def merge_deltas(
    source: Paths, name: str, into: str, *, since: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Make one snapshot of a delta and those that it goes on from. They stay: delete them, the last one first, when
    nothing names them any more.

    Args:
        source: the folder of a table, or that in which ranks have theirs, or the folders of a sharded one.
        name: of the delta.
        into: the name of the new snapshot, which has the rows of that one.
        since: make it a delta since this one of the chain; None = a whole snapshot.
        progress: called with (parts done, parts in all).

    Returns:
        How many snapshots have been made one.

    Raises:
        SnapshotNotFoundError: there is no such snapshot, or one that it goes on from is missing.
        SnapshotExistsError: there is one named `into`.
        StorageError: a folder is in use, the disk fails, or the snapshots have parts of other ranks than each other.
        ValueError: `since` is none that `name` goes on from.
    """
    found = look_at(as_list(source))
    last = found.get(name)
    chain = [*last.before, last]
    if found.folders_with(into):
        raise SnapshotExistsError(f"there is a snapshot named {into!r} already; delete it, or choose another name")
    begin = 0
    if since is not None:
        names = [link.name for link in last.before]
        if since not in names:
            raise ValueError(f"since must be one of those that {name!r} goes on from, {names}, got {since!r}")
        begin = names.index(since)
    for part in last.parts:
        if last.part_in(part.folder, part.whole.shard, part.whole.shards) is None:
            raise StorageError(
                f"{name!r} goes on from snapshots of other numbers of ranks than its own; make it whole with"
                " `oneemb reshard`"
            )
    identity, sequence = uuid.uuid4().hex, found.next_sequence
    with undisturbed, NewParts(identity, len(last.parts)) as parts:
        for done, part in enumerate(last.parts):
            links = [_part_in(link, part) for link in chain]
            with PersistentTable.open(
                part.folder, row_width=part.info.row_width, physical_block_size=part.info.physical_block_size,
                threads=Threads(1),
            ) as table:  # fmt: skip
                sweep_folder(part.folder, found, table.delete_snapshot)
                table_name = table_name_of(into, identity, part.folder)
                parts.begin(part.folder, table_name)
                places, meta, arrays = _merged(table, links, None if since is None else (since, begin))
                meta |= PartOf(into, part.whole.shard, part.whole.shards).to_meta(table_name)
                # Since nothing, where it is whole: so no row moves.
                table.save_snapshot(
                    table_name, meta, identity=identity, sequence=sequence, arrays=arrays, since=places or {}
                )  # fmt: skip
            if progress is not None:
                progress(done + 1, len(last.parts))
    return len(chain) - (0 if since is None else begin + 1)


def _part_in(link: PartedSnapshot, part: Part) -> Part:
    return next(its for its in link.parts if its.whole.shard == part.whole.shard)


def _merged(
    table: PersistentTable, links: Sequence[Part], since: tuple[str, int] | None
) -> tuple[Places | None, dict[str, Any], dict[str, np.ndarray]]:
    """Load the rows of a chain, and say what the merged snapshot holds: where rows lay that it does not, its meta but
    for which part it is, and its arrays.

    Args:
        since: of a delta, the name of the snapshot that it is to go on from, and which of the links that is.
    """
    names, last, places, rows = [link.info.name for link in links], links[-1].info, None, 0
    if since is not None:
        table.load_snapshot(names[0], names[1 : since[1] + 1])
        places, rows = table.places, len(table)
    undisturbed.raise_interrupt()
    table.load_snapshot(names[0], names[1:])
    meta = without_delta(without_part(last.meta), 0)
    with SnapshotReader.open(links[-1].folder, last.name) as reader:
        arrays = {name: reader.array(name) for name in reader.arrays if name != GONE}
    if since is not None and places is not None:
        name, n = since
        gone = [_gone(link) for link in links[n + 1 :]]
        table_N, id_N = (np.concatenate(column) for column in zip(*gone, strict=True))
        absent = np.flatnonzero(~table.contains(table_N, id_N))  # The others have come back.
        arrays[GONE] = gone_array(table_N[absent], id_N[absent])
        inserted, parent = len(table) - rows + len(table.gone_since(places)[1]), links[n].info
        number = number_of(parent)
        meta |= Delta(name, parent.identity, number, number + 1, len(table), inserted).to_meta()
    return places, meta, arrays


def _gone(link: Part) -> tuple[np.ndarray, np.ndarray]:
    with SnapshotReader.open(link.folder, link.info.name) as reader:
        return gone_keys(reader.array(GONE) if GONE in reader.arrays else None, link.info.name)
