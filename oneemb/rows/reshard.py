"""New snapshots from existing ones, while no job runs: parts for another number of ranks, or merged deltas.

Invariants:
- a resharded snapshot is complete at each moment, in its old or its new parts, even if the process is killed; merging
  deltas changes no snapshot of the chain, and copies no row;
- a resharded snapshot keeps its identity, so state dicts and checkpoints that name the snapshot still load it;
- one part is made at a time, so memory holds only the keys of one part.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.rows.arguments import Paths, as_list
from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.row_store import Places
from oneemb.storage.snapshots.owned_rows import owned_rows
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
from oneemb.storage.table.delta import GONE, Delta, gone_array, number_of, without_delta
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader


def reshard(
    source: Paths, name: str, ranks: int, to: Paths | None = None, *, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Split a snapshot into parts for another number of ranks, so that each rank then reads only its own part.

    Args:
        source: folder of a job's ranks or of a table, or the folders of a sharded table.
        name: name of the snapshot. New parts of a delta are complete: they include the rows of its parents.
        ranks: number of ranks; 1 = a table without ranks.
        to: folder in which each part gets a folder `rank-r-of-R`; or a folder for each rank. None = the first folder of
            `source`, in which the new parts replace the old ones.
        progress: called with (rows done, rows in all).

    Returns:
        The folders of the parts.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        SnapshotExistsError: a target folder has another snapshot of this name.
        StorageError: a folder is in use, or the disk fails; the snapshot has not changed.
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
            f"snapshot {name!r} has {ranks} parts already, in {', '.join(sorted(former))}; give these folders to the"
            " job as persistent_path"
        )
    foreign = [folder for folder in there.folders_with(name) if os.path.realpath(folder) not in former]
    if foreign:
        raise SnapshotExistsError(
            f"{', '.join(foreign)} has another snapshot {name!r} already; delete it, or give another folder in `to`"
        )
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
    """Write a part of the snapshot into each folder: all parts, or none. `there`: parts in the target folders."""
    fs, info = LocalFileSystem(), snapshot.info
    sequence = max(there.next_sequence, snapshot.sequence + 1)
    done = 0
    with NewParts(info.identity, len(folders), fs) as parts:
        for owner, folder in enumerate(folders):
            with (
                owned_rows(snapshot, owner, len(folders)) as owned,
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
    """Merge a delta and its parents into one new snapshot. The delta and its parents stay: delete them, the newest
    first, when no state dict or checkpoint names them any more.

    Args:
        source: folder of a table, or the folder with the folders of ranks, or the folders of a sharded table.
        name: name of the delta.
        into: name of the new snapshot, which has the same rows as `name`.
        since: name of a parent of `name`: the new snapshot is a delta since this parent; None = a complete snapshot.
        progress: called with (parts done, parts in all).

    Returns:
        Number of snapshots that were merged.

    Raises:
        SnapshotNotFoundError: there is no snapshot `name`, or one of its parents is missing.
        SnapshotExistsError: there is a snapshot `into` already.
        StorageError: a folder is in use, the disk fails, or the delta and its parents have parts of different numbers
            of ranks.
        ValueError: `since` is no parent of `name`.
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
            raise ValueError(f"since must be one of the parents of {name!r}, {names}, got {since!r}")
        begin = names.index(since)
    for part in last.parts:
        if last.part_in(part.folder, part.whole.shard, part.whole.shards) is None:
            raise StorageError(
                f"{name!r} and its parents must be of the same number of ranks, and are not; make it a complete"
                " snapshot with `oneemb reshard`"
            )
    identity, sequence = uuid.uuid4().hex, found.next_sequence
    with signals_deferred, NewParts(identity, len(last.parts)) as parts:
        for done, part in enumerate(last.parts):
            links = [other for link in chain for other in link.parts if other.whole.shard == part.whole.shard]
            with PersistentTable.open(
                part.folder, row_width=part.info.row_width, physical_block_size=part.info.physical_block_size,
                threads=Threads(1),
            ) as table:  # fmt: skip
                sweep_folder(part.folder, found, table.delete_snapshot)
                table_name = table_name_of(into, identity, part.folder)
                parts.begin(part.folder, table_name)
                places, meta, arrays = _merged(table, links, None if since is None else (since, begin))
                meta |= PartOf(into, part.whole.shard, part.whole.shards).to_meta(table_name)
                # Also a complete snapshot is saved with `since`, here {}, so that no row moves.
                table.save_snapshot(
                    table_name, meta, identity=identity, sequence=sequence, arrays=arrays, since=places or {}
                )  # fmt: skip
            if progress is not None:
                progress(done + 1, len(last.parts))
    return len(chain) - (0 if since is None else begin + 1)


def _merged(
    table: PersistentTable, links: Sequence[Part], since: tuple[str, int] | None
) -> tuple[Places | None, dict[str, Any], dict[str, np.ndarray]]:
    """Load the rows of a chain into `table`. Returns (places of the rows in the parent of the merged snapshot, or None
    if it is complete; meta of the merged snapshot, without `PartOf`; arrays of the merged snapshot).

    Args:
        links: this part of each snapshot in the chain, the oldest first.
        since: (name of the merged delta's parent, index of the parent in `links`); None = a complete snapshot.
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
        absent = np.flatnonzero(~table.contains(table_N, id_N))  # The other keys have rows again.
        arrays[GONE] = gone_array(table_N[absent], id_N[absent])
        inserted, parent = len(table) - rows + len(table.gone_since(places)[1]), links[n].info
        number = number_of(parent)
        meta |= Delta(name, parent.identity, number, number + 1, len(table), inserted).to_meta()
    return places, meta, arrays


def _gone(link: Part) -> tuple[np.ndarray, np.ndarray]:
    with SnapshotReader.open(link.folder, link.info.name) as reader:
        return reader.gone()
