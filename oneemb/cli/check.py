"""The commands `check`, which compares a table with its checksums, and `compact`, which frees unused disk space."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, table_lines, tell
from oneemb.cli.quantize import check_file
from oneemb.cli.snapshots import need_own_tables

if TYPE_CHECKING:
    from oneemb.storage.table.check import CheckResult, SnapshotCheck


@click.command()
@click.argument("path", type=click.Path(exists=True))
@json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Find damaged files.

    Compares every byte that the snapshots at PATH need with its checksum, follows every reference, and checks that
    snapshots of ranks have all their parts. Only reads, also while a job writes. Exits with 1 and a list of problems if
    there are any, and counts the lost rows of each snapshot by table; `oneemb salvage` saves the others. Tables of
    OneFlow have no checksums: their files are compared with one another. PATH may be a file that `oneemb quantize` has
    made.
    """
    from oneemb.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.snapshots.part_folders import check_parts

    if os.path.isfile(path):
        check_file(ctx, path, as_json)
        return
    with progress_bar(as_json, "checking", "B") as move:
        result = _check_oneflow(path, move) if is_oneflow_table(path) else check_parts(path, progress=move)
    left = result.by_snapshot.values()
    tell(
        as_json,
        {"path": path, "sound": not result.problems, **asdict(result)},
        *result.problems,
        f"{path}: {len(result.problems) or 'no'} contradictions; {len(result.snapshots)} snapshots with {result.rows:,}"
        f" rows, {size_text(result.bytes_read)} of blocks read",
        *(losses(result.by_snapshot) if result.problems else ()),
        *([salvage_advice(path)] if left and not any(found.whole for found in left) else ()),
        *(f"left over: {text}" for text in result.left_over),
        *([_unneeded_text(result)] if result.unneeded else []),
    )  # fmt: skip
    if result.problems:
        ctx.exit(1)


def losses(by_snapshot: "Mapping[str, SnapshotCheck]") -> list[str]:
    """Lines of a table: what is left of each snapshot."""
    rows = [
        (
            name, "whole" if found.whole else "damaged", f"{found.rows - found.rows_lost:,}", f"{found.rows_lost:,}",
            ", ".join(
                [f"{rows:,} of table {table}" for table, rows in sorted(found.lost.items())]
                + ([f"{found.lost_unknown:,} of unknown tables"] if found.lost_unknown else [])
                + found.unreadable
            ),
        )
        for name, found in by_snapshot.items()
    ]  # fmt: skip
    return table_lines(("snapshot", "", "rows left", "rows lost", "lost"), rows, "no snapshots")


def salvage_advice(path: str) -> str:
    """Line for the user of a folder in which no snapshot is whole."""
    return (
        f"every snapshot in {path} is damaged: `oneemb salvage` writes what is left of them to a new folder, with"
        " `--all-rows NAME` also the rows of a snapshot whose file is damaged"
    )


def _unneeded_text(result: "CheckResult") -> str:
    files, kept = len(result.unneeded), len(result.kept)
    if result.unreadable:
        return (
            f"{files} files belong to no snapshot that can be read; {kept} of them stay, since"
            f" {', '.join(result.unreadable)} may need them: restore the file from a copy, or delete the snapshot"
        )
    stay = f"; but {kept} of them stay until `oneemb compact --remove-orphans`" if kept else ""
    return f"{files} files belong to no snapshot: a job's, or what the next one removes{stay}"


def _check_oneflow(path: str, move: Callable[[int, int], None]) -> "CheckResult":
    import numpy as np

    from oneemb.foreign.oneflow_reader import OneFlowReader
    from oneemb.foreign.oneflow_table import oneflow_snapshots
    from oneemb.kernels.threads import Threads
    from oneemb.storage.errors import CorruptTableError
    from oneemb.storage.hash_index import HashIndex
    from oneemb.storage.table.check import CheckResult

    result = CheckResult()
    for name in oneflow_snapshots(path):
        try:
            reader = OneFlowReader(path, name)
            index = HashIndex(Threads(1), len(reader))
            done = 0
            for id_N, value_NV in reader.scan():
                index.put(np.zeros(len(id_N), np.int32), id_N, np.arange(len(id_N)))
                done += value_NV.nbytes
                move(done, len(reader) * reader.geometry.value_bytes)
            if len(index) < len(reader):
                raise CorruptTableError(f"{path}: snapshot {name!r} has {len(reader) - len(index)} keys twice")
            result.snapshots.append(name)
            result.rows += len(reader)
            result.bytes_read += done
        except CorruptTableError as error:
            result.problems.append(str(error))
    return result


@click.command()
@click.argument("path", type=FOLDER)
@click.option("--remove-orphans", is_flag=True, help="Give up snapshots that are gone, and free their disk.")
@json_option
def compact(path: str, remove_orphans: bool, as_json: bool) -> None:
    """Free the disk space that no snapshot needs.

    PATH is the folder of a table, or the folder that holds the tables of ranks. No job may use them: a job compacts its
    tables by itself. A crash leaves every snapshot at PATH complete. Files of snapshots that were removed by other
    means than oneemb stay until --remove-orphans is given.
    """
    from oneemb.storage.snapshots.part_folders import sweep_folder
    from oneemb.storage.snapshots.snapshot_parts import look_at
    from oneemb.storage.table.compact_snapshots import compact_snapshots
    from oneemb.storage.table.compaction import CompactionResult
    from oneemb.storage.table.table_info import table_info

    need_own_tables([path])
    found = look_at([path])
    before = sum(table_info(folder).disk_bytes for folder in found.folders)
    result = CompactionResult()
    with progress_bar(as_json, "moving", "rows") as move:
        for folder in found.folders:
            if len(found.folders) > 1:  # Leftovers show only beside other folders.
                sweep_folder(folder, found)
            one = compact_snapshots(folder, remove_orphans=remove_orphans, progress=move)
            result.chunks += one.chunks
            result.rows_moved += one.rows_moved
            result.bytes_freed += one.bytes_freed
    after = sum(table_info(folder).disk_bytes for folder in found.folders)
    tell(
        as_json,
        {"path": path, **asdict(result), "disk_bytes_before": before, "disk_bytes": after},
        f"{path}: {size_text(before)} became {size_text(after)}; {result.rows_moved:,} rows of {result.chunks} chunks"
        " moved",
    )
