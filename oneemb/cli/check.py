"""The command `check`: whether a table is as it was written; and `compact`, which frees its garbage."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell
from oneemb.cli.snapshots import need_own_table

if TYPE_CHECKING:
    from oneemb.storage.table.check import CheckResult

__all__ = ["check", "compact"]


@click.command()
@click.argument("path", type=FOLDER)
@json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Find damage: what is not what was written.

    Every byte that the snapshots at PATH need is compared with its checksum, and every reference followed. Reads only,
    beside a job that writes too. Exits with 1 and a list when something contradicts. Tables of OneFlow have
    no checksums: their files are compared with each other.
    """
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.table.check import check_table

    with progress_bar(as_json, "checking", "B") as move:
        result = _check_oneflow(path, move) if is_oneflow_table(path) else check_table(path, progress=move)
    tell(
        as_json,
        {"path": path, "sound": not result.problems, **asdict(result)},
        *result.problems,
        f"{path}: {len(result.problems) or 'no'} contradictions; {len(result.snapshots)} snapshots with {result.rows:,}"
        f" rows, {size_text(result.bytes_read)} of blocks read",
        *([f"{len(result.unneeded)} files belong to no snapshot: a job's, or what the next one removes"
           + (f"; but {len(result.kept)} of them stay until `oneemb compact --remove-orphans`" if result.kept else "")]
          if result.unneeded else []),
    )  # fmt: skip
    if result.problems:
        ctx.exit(1)


def _check_oneflow(path: str, move: Callable[[int, int], None]) -> "CheckResult":
    import numpy as np

    from oneemb.kernels.threads import Threads
    from oneemb.storage.errors import CorruptTableError
    from oneemb.storage.foreign.oneflow_reader import OneFlowReader
    from oneemb.storage.foreign.oneflow_table import oneflow_snapshots
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
    """Free the disk space that snapshots do not need.

    No job may have the table: one that has compacts by itself. A crash leaves every
    snapshot at PATH whole. Files of snapshots that somebody else has removed stay until --remove-orphans is given.
    """
    from oneemb.storage.table.compact_snapshots import compact_snapshots
    from oneemb.storage.table.table_info import table_info

    need_own_table(path)
    before = table_info(path).disk_bytes
    with progress_bar(as_json, "moving", "rows") as move:
        result = compact_snapshots(path, remove_orphans=remove_orphans, progress=move)
    after = table_info(path).disk_bytes
    tell(
        as_json,
        {"path": path, **asdict(result), "disk_bytes_before": before, "disk_bytes": after},
        f"{path}: {size_text(before)} became {size_text(after)}; {result.rows_moved:,} rows of {result.chunks} chunks"
        " moved",
    )
