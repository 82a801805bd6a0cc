"""Snapshots made of others while no job runs: parts of another number of ranks, or one snapshot of a chain of deltas.

Invariants:
- a snapshot is whole at each moment, in its former parts or in the new ones, whatever ends the process; a merged chain
  stays as it is, and no row of it is copied;
- the identity of a snapshot with new parts stays: a state dict or a checkpoint that names it names the new parts too;
- one part is made at a time: memory is what the keys of one part take.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.rows.arguments import Paths, as_list
from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.row_store import Places
from oneemb.storage.snapshots.owned_rows import OwnedRows
from oneemb.storage.snapshots.part_folders import NewParts, PartRemoval, sweep_folder, to_remove
from oneemb.storage.snapshots.snapshot_parts import (
    FoundParts,
    Part,
    PartedSnapshot,
    find_parts,
    folders_at,
    look_at,
    rank_folder_name,
    table_name_of,
)
from oneemb.storage.snapshots.snapshot_rows import PartOf, without_part
from oneemb.storage.table.delta import GONE, Delta, gone_array, gone_keys, number_of, without_delta
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader


def reshard(
    source: Paths, name: str, ranks: int, to: Paths | None = None, *, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Make the parts of so many ranks from a snapshot, so that each of them loads its own without reading others.

    Args:
        source: the folder of a job's ranks or of a table, or the folders of a sharded one.
        name: of the snapshot. The parts of a delta are made whole, with what it goes on from.
        ranks: how many; 1 = a table without ranks.
        to: the folder in which they go, each to `rank-r-of-R`; or a folder for each rank. None = the first of the
            source: there the new parts take the place of the former ones.
        progress: called with (rows done, rows in all).

    Returns:
        The folders of the parts.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        SnapshotExistsError: another snapshot of this name is where the parts are to go.
        StorageError: a folder is in use, or the disk fails; the snapshot is as it was.
        ValueError: an argument is not as above.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    sources = as_list(source)
    targets = sources[:1] if to is None else as_list(to)
    if len(targets) not in (1, ranks):
        raise ValueError(f"to must name a folder, or one for each of {ranks} ranks, got {len(targets)}")
    snapshot = look_at(sources).get(name)
    folders = targets
    if ranks > 1 and len(targets) == 1:
        folders = [os.path.join(targets[0], rank_folder_name(rank, ranks)) for rank in range(ranks)]
    former = {os.path.realpath(part.folder) for part in snapshot.parts}
    if {os.path.realpath(folder) for folder in folders} == former:
        return folders
    there = find_parts(folders_at([*targets, *folders]))
    in_place = not former.isdisjoint(map(os.path.realpath, there.folders))
    if in_place and len(snapshot.parts) == ranks:
        raise StorageError(
            f"snapshot {name!r} has {ranks} parts already, in {', '.join(sorted(former))}; a job finds them when these"
            " are its persistent_path"
        )
    foreign = [folder for folder in there.folders_with(name) if os.path.realpath(folder) not in former]
    if foreign:
        raise SnapshotExistsError(f"{', '.join(foreign)} has a snapshot {name!r} already; delete it, or go elsewhere")
    with signals_deferred:
        _make(snapshot, folders, there, progress)
        if in_place:
            for snapshots in to_remove(there, name):
                with PartRemoval(snapshots, {}) as remove:
                    remove()
    return folders


def _make(
    snapshot: PartedSnapshot, folders: Sequence[str], there: FoundParts, progress: Callable[[int, int], None] | None
) -> None:
    """Make a part in each folder, all or none."""
    fs, info = LocalFileSystem(), snapshot.info
    sequence = max(there.next_sequence, snapshot.sequence + 1)
    done = 0
    with NewParts(info.identity, len(folders), fs) as parts:
        for owner, folder in enumerate(folders):
            with (
                closing(OwnedRows(snapshot, owner, len(folders))) as owned,
                PersistentTable.open(
                    folder, row_width=info.row_width, physical_block_size=info.physical_block_size, threads=Threads(1)
                ) as table,
            ):
                sweep_folder(folder, there, table.delete_snapshot, fs)
                table_name = table_name_of(info.name, info.identity, folder)
                parts.begin(folder, table_name)
                for batch in owned.scan():
                    signals_deferred.raise_interrupt()
                    table.put(*batch)
                    done += len(batch[1])
                    if progress is not None:
                        progress(done, info.rows)
                meta = without_part(info.meta)
                if snapshot.before:
                    meta = without_delta(meta, number_of(info))
                meta |= PartOf(info.name, owner, len(folders)).to_meta(table_name)
                table.save_snapshot(table_name, meta, identity=info.identity, sequence=sequence, arrays=owned.arrays())


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
    with signals_deferred, NewParts(identity, len(last.parts)) as parts:
        for done, part in enumerate(last.parts):
            links = [its for link in chain for its in link.parts if its.whole.shard == part.whole.shard]
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


def _merged(
    table: PersistentTable, links: Sequence[Part], since: tuple[str, int] | None
) -> tuple[Places | None, dict[str, Any], dict[str, np.ndarray]]:
    """Load the rows of a chain. Returns the places of rows that the merged snapshot does not hold, its meta without the
    number of its part, and its arrays.

    Args:
        since: of a delta, the name of the snapshot that it is to go on from, and which of the links that is.
    """
    names, last, places, rows = [link.info.name for link in links], links[-1].info, None, 0
    if since is not None:
        table.load_snapshot(names[0], names[1 : since[1] + 1])
        places, rows = table.places, len(table)
    signals_deferred.raise_interrupt()
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
