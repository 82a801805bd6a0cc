"""Files of served versions. A served version is one snapshot as rows to look up: a whole file, or a whole file and
layers, which hold only what has changed since.

    000000000007-<identity>-float32.serving                          all rows of snapshot 7
    000000000009-<identity>-float32-since-<identity of 7>.serving    what has changed from 7 to 9

The files of a served version are found by the identities in their names: a layer goes on from the version whose
identity it names. A newer version gets one new layer, of the changes since the nearest older version that has files.
The new layer takes in the layers before it while these have less than twice as many rows, or are too many. So a row is
written again a few times, not once for each delta.

Invariants:
- a version has at most `LAYERS` layers, which together have at most a quarter of the whole file's rows;
- a new layer depends on the snapshots and the files before it alone, so any process makes the same one.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.rows.values import weights_of
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.serving.room import Room
from oneemb.storage.serving.served_file import MANIFEST_MAX, ServedFile, with_gone
from oneemb.storage.serving.served_writer import write_served_file
from oneemb.storage.snapshots.changed_rows import changed_rows
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.row_cap import Keys, KeysIn, RowCap, capped_changes
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

Progress = Callable[[int, int | None], None]

LAYERS = 4
"""Largest number of layers of a version."""

_SHARE_MAX = 4  # layers have at most a 4th of the file's rows
_SHARE_LARGE = 8  # if layers have more than an 8th, a thread makes a whole file
_BATCH = 1 << 16


class VersionFile(NamedTuple):
    """A file of a served version. `since`: identity of the version from which a layer goes on; "" = a whole file."""

    sequence: int
    identity: str
    since: str
    path: str


def file_name(sequence: int, identity: str, kind: str, since: str = "") -> str:
    """Name of a file of a version. `kind`: dtype and tables of the rows."""
    return f"{sequence:012d}-{identity}-{kind}{since and f'-since-{since}'}.serving"


def files_in(folder: str, kind: str) -> list[VersionFile]:
    """Files of versions of one kind in a folder, the oldest first; none if there is no folder."""
    name = re.compile(rf"(\d{{12,}})-(.+?)-{re.escape(kind)}(?:-since-(.+))?\.serving")
    try:
        found = [name.fullmatch(one) for one in sorted(os.listdir(folder))]
    except OSError:
        return []
    return [VersionFile(int(one[1]), one[2], one[3] or "", os.path.join(folder, one[0])) for one in found if one]


def files_of(identity: str, files: Sequence[VersionFile]) -> list[VersionFile] | None:
    """Files of the version of an identity: the whole file, then the layers, the oldest first; None = there are none. Of
    several such lists, the one with the newest whole file, then with the fewest layers."""
    found = []
    for one in files:
        if one.identity == identity:
            if not one.since:
                return [one]
            others = [other for other in files if other.sequence < one.sequence]  # A chain has no circle.
            before = files_of(one.since, others)
            if before is not None and len(before) <= LAYERS:
                found.append([*before, one])
    return max(found, key=lambda made: (made[0].sequence, -len(made)), default=None)


def nearest_files(snapshot: PartedSnapshot, files: Sequence[VersionFile]) -> tuple[list[VersionFile], int]:
    """Files of the version from which a layer for a snapshot goes on, and the number of snapshots of the chain up to
    that version; ([], 0) = no snapshot of the chain has files. Of several versions, the one with the newest whole file
    is taken, then the newest."""
    found: list[tuple[int, int, list[VersionFile]]] = []
    for n, link in enumerate((*snapshot.before, snapshot), 1):
        made = files_of(link.identity, files)
        if made is not None:
            found.append((made[0].sequence, n, made))
    _, links, made = max(found, key=lambda one: one[:2], default=(0, 0, []))
    return made, links


def rows_since(
    snapshot: PartedSnapshot, files: Sequence[VersionFile], looks: SnapshotLooks, cap: RowCap | None
) -> tuple[list[VersionFile], PartedSnapshot | LinkedRows | None]:
    """Files of the version from which a layer for a snapshot goes on, and the changes since that version. If a snapshot
    of the chain has files, the changes are the deltas after it. Else they are found by places of rows, since the newest
    older version whose snapshot is still there. Changes None = all rows must be read.

    Raises:
        StorageError: files of a snapshot are damaged.
    """
    made, links = nearest_files(snapshot, files)
    if made:
        return made, replace(snapshot, before=snapshot.before[links:])
    if cap is None:  # Which rows stay under a cap follows from deltas alone.
        found = looks.look()
        names = {one.identity: one.name for one in found.snapshots() if one.name not in found.broken()}
        for one in reversed(files):
            is_older = one.sequence < snapshot.sequence and one.identity in names
            if is_older and (made := files_of(one.identity, files) or []):
                return made, changed_rows(found.get(names[one.identity]), snapshot)
    return [], None


def open_files(
    files: Sequence[VersionFile], *, threads: Threads, before: LayeredFile | None = None
) -> LayeredFile:  # fmt: skip
    """Open a version. If `before`, which is open, has the same whole file, the two share its memory.

    Raises:
        FileNotFoundError: a file has been removed meanwhile.
        CorruptTableError: a file is damaged, or does not go on from the one before it.
        RoomFullError: this process cannot map layers, since its addresses are limited.
    """
    paths = [one.path for one in files]
    if before is not None and before.base.path == paths[0] and before.base.info.identity == files[0].identity:
        there = {layer.path for layer in before.layers}
        if before.room.has_places(len(set(paths[1:]) - there)):
            return LayeredFile(before.base, before.room, paths[1:], threads=threads, before=before)
    room = Room()
    return LayeredFile(ServedFile(paths[0], threads=threads, memory_of=room.map_base), room, paths[1:], threads=threads)


def is_large(file: LayeredFile) -> bool:
    """Whether a version has so many rows in layers that a whole file should be made of it."""
    return sum(layer.info.rows for layer in file.layers) * _SHARE_LARGE > file.base.info.rows


def weights_in(
    rows: LinkedRows, format: RowFormat, weights: str, served_T: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the rows of the served tables in batches, for `write_served_file`, with weights of type `weights`."""
    for table_N, id_N, row_NW in rows.scan(_BATCH):
        kept = served_T.take(table_N)
        table_N, id_N, row_NW = table_N[kept], id_N[kept], row_NW[kept]
        if weights == format.dtype:
            yield table_N, id_N, format.weights(row_NW)[:, : format.dim]
        else:
            yield table_N, id_N, weights_of(format, row_NW).astype(np.float32)


def make_layer(
    folder: str, kind: str, snapshot: PartedSnapshot, made: Sequence[VersionFile],
    changes: PartedSnapshot | LinkedRows, *, threads: Threads, progress: Progress, cap: RowCap | None = None,
    before: LayeredFile | None = None,
) -> list[VersionFile] | None:  # fmt: skip
    """Write a layer for a snapshot, which goes on from an older version, and return all files of the new version.
    None = a whole file must be made, since too much has changed, or the tables are others.

    Args:
        made, changes: as `rows_since` returns them.
        cap: says which rows stay; None = all.
        before: open version; those of its files that are in `made` are not opened and checked again.

    Raises:
        StorageError, CorruptTableError: as `make_file` does; or a file of `made` is damaged.
    """
    there = {} if before is None else {one.path: one for one in (before.base, *before.layers)}
    base, *layers = (there.get(one.path) or ServedFile(one.path, threads=threads) for one in made)
    info, (_, *files) = base.info, made
    format = SnapshotRows.of_meta(snapshot.info.meta, snapshot.name).format
    described = (snapshot.info.meta.get("embedding") or {}).get("tables", ())
    if (format.dim, format.dtype, len(described)) != (info.dim, info.trained, info.num_tables):
        return None
    if 2 * len(info.packed()) > MANIFEST_MAX:  # A layer has twice as many tables.
        return None
    served_T = np.isin(np.arange(info.num_tables), info.tables)
    with ExitStack() as opened:
        rows = opened.enter_context(owned_rows(changes, 0, 1) if isinstance(changes, PartedSnapshot) else changes)
        live = rows.keys(lambda table_N, id_N: served_T.take(table_N))
        if cap is None:
            table_N, id_N = rows.gone()
            gone = table_N[served_T.take(table_N)], id_N[served_T.take(table_N)]
        else:
            known = _keys_of([base, *layers], threads)
            live, gone, comes_back = capped_changes(known, cap.rows_of(snapshot, info.tables), live)
            assert isinstance(changes, PartedSnapshot)
            read = snapshot if comes_back else changes
            rows = opened.enter_context(owned_rows(read, 0, 1, keep=KeysIn(live)))
        count = len(live[1]) + len(gone[1])
        if _SHARE_MAX * (count + sum(layer.info.rows for layer in layers)) > info.rows:
            return None
        taken: list[ServedFile] = []
        while layers and (len(layers) >= LAYERS or layers[-1].info.rows < 2 * count):
            taken.append(layers.pop())
            count += taken[-1].info.rows
        since = layers[-1].info.identity if layers else info.identity
        new = replace(
            info, name=snapshot.name, identity=snapshot.identity, sequence=snapshot.sequence, since=since,
            tables=tuple(with_gone(info.tables, info.num_tables)),
            embedding=snapshot.info.meta.get("embedding") or {},
        )  # fmt: skip
        older = _older(taken, [live, gone], info.num_tables, threads)
        gone = gone[0] + np.int32(info.num_tables), gone[1]
        keys = [live, gone, *((table_N, id_N) for _, table_N, id_N, _ in older)]
        path = os.path.join(folder, file_name(new.sequence, new.identity, kind, since))

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            yield from weights_in(rows, format, info.weights, served_T)
            for begin in range(0, len(gone[1]), _BATCH):
                id_N = gone[1][begin : begin + _BATCH]
                record_NW = np.zeros((len(id_N), info.record_bytes // 8), np.int64)
                record_NW[:, -1] = id_N
                yield gone[0][begin : begin + _BATCH], id_N, record_NW.view(np.uint8)
            for layer, table_N, id_N, place_N in older:
                for begin in range(0, len(id_N), _BATCH):
                    piece = slice(begin, begin + _BATCH)
                    yield table_N[piece], id_N[piece], layer.rows.record_SW[place_N[piece]].view(np.uint8)

        written = write_served_file(
            path, new, (np.concatenate([one for one, _ in keys]), np.concatenate([one for _, one in keys])), batches(),
            threads=threads, progress=progress,
        )  # fmt: skip
    return [made[0], *files[: len(layers)], VersionFile(written.sequence, written.identity, since, path)]


def _keys_of(files: Sequence[ServedFile], threads: Threads) -> Keys:
    """Keys that have a row in a version. `files`: the file and its layers, the oldest first."""
    tables = files[0].info.num_tables
    found = [
        (table_N[table_N < tables], id_N[table_N < tables])
        for _, table_N, id_N, _ in _older(files[::-1], [], tables, threads)
    ]
    return np.concatenate([table_N for table_N, _ in found]), np.concatenate([id_N for _, id_N in found])


def _older(
    taken: Sequence[ServedFile], newer: Sequence[tuple[np.ndarray, np.ndarray]], num_tables: int, threads: Threads
) -> list[tuple[ServedFile, np.ndarray, np.ndarray, np.ndarray]]:
    """Rows of layers, the newest first, whose keys no newer layer has and which are not among `newer`: layer, tables,
    ids and places."""
    later, found = HashIndex(threads), []
    for table_N, id_N in newer:
        later.put(table_N, id_N, np.zeros(len(id_N), np.int64))
    for layer in taken:
        layer.verify()
        table_N, id_N, place_N = layer.keys()
        trained_N = table_N % np.int32(num_tables)
        new = later.find(trained_N, id_N) < 0
        later.put(trained_N[new], id_N[new], np.zeros(int(new.sum()), np.int64))
        found.append((layer, table_N[new], id_N[new], place_N[new]))
    return found
