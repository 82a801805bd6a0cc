"""Makes the parts of any number of ranks from a snapshot of any other, while no job runs.

Invariants:
- the snapshot is whole at each moment, in its former parts or in the new ones, whatever ends the process;
- its identity stays: what names it, a state dict or a checkpoint, names the new parts too;
- one part is made at a time: memory is what the keys of one part take.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing

from oneemb.kernels.threads import Threads
from oneemb.rows.arguments import Paths, as_list
from oneemb.storage.errors import SnapshotExistsError, StorageError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.undisturbed import undisturbed
from oneemb.storage.snapshots.owned_rows import OwnedRows
from oneemb.storage.snapshots.part_folders import NewParts, PartRemoval, sweep_folder, to_remove
from oneemb.storage.snapshots.snapshot_parts import (
    FoundParts,
    PartedSnapshot,
    find_parts,
    folders_at,
    look_at,
    rank_folder_name,
    table_name_of,
)
from oneemb.storage.snapshots.snapshot_rows import PartOf, without_part
from oneemb.storage.table.delta import number_of, without_delta
from oneemb.storage.table.persistent_table import PersistentTable


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
    with undisturbed:
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
                    undisturbed.raise_interrupt()
                    table.put(*batch)
                    done += len(batch[1])
                    if progress is not None:
                        progress(done, info.rows)
                meta = without_part(info.meta)
                if snapshot.before:
                    meta = without_delta(meta, number_of(info))
                meta |= PartOf(info.name, owner, len(folders)).to_meta(table_name)
                table.save_snapshot(table_name, meta, identity=info.identity, sequence=sequence, arrays=owned.arrays())
