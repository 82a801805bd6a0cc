"""Commands for tables on disk: look at them, check, compact, export, import.

Invariants:
- with --json a command writes one JSON object to the standard output and nothing else there;
- exit codes: 0 = done, 1 = `check` found contradictions, or the user said no or closed the output, 2 = it could not be
  done, and the reason is on stderr, 130 = interrupted and 143 = told to end, after what was half done was taken back;
- what is heavy is loaded by the command that needs it.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

if TYPE_CHECKING:
    from oneemb.storage.table.snapshot_manifest import SnapshotInfo

__all__ = ["oneemb"]

_INTERRUPTED = 128 + signal.SIGINT
_FOLDER = click.Path(exists=True, file_okay=False)


class _Failure(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Says the errors that a user can do something about without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        from oneemb.storage.row_store import StorageError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)
        except (StorageError, ValueError, TypeError, ImportError, OSError) as error:
            raise _Failure(_in_options(str(error))) from error


def _in_options(text: str) -> str:
    """An error's advice in terms of the command line: arguments of functions are options here."""
    text = re.sub(r"\b([a-z_]+)=True\b", lambda match: "--" + match[1].replace("_", "-"), text)
    text = re.sub(r"\b([a-z_]+)=False\b", lambda match: "no --" + match[1].replace("_", "-"), text)
    text = re.sub(r"\b([a-z_]+)=\.\.\.", lambda match: "--" + match[1].replace("_", "-"), text)
    return text.replace("keys=None", "--row-numbers").replace("without with_state", "without --with-state")


def _json_option(command: Callable) -> Callable:
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON object to the standard output.")(
        command
    )


def _tell(as_json: bool, result: dict[str, Any], *lines: str) -> None:
    click.echo(json.dumps(result) if as_json else "\n".join(lines))


@contextmanager
def _bar(as_json: bool, what: str, unit: str):
    """A function (done, total) that moves a progress bar; none without a terminal to show it on."""
    of_bytes = unit == "B"
    with tqdm(
        desc=what, unit=unit if of_bytes else f" {unit}", unit_scale=of_bytes, unit_divisor=1024,
        disable=True if as_json else None, leave=False,
    ) as bar:  # fmt: skip

        def move(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oneemb")
def oneemb() -> None:
    """Embedding tables on disk: what they hold, whether they are sound, and the way in and out."""


# ---- inspect --------------------------------------------------------------------------------------------------------


@oneemb.command()
@click.argument("path", type=_FOLDER)
@_json_option
def inspect(path: str, as_json: bool) -> None:
    """Show what a table holds.

    The snapshots at PATH, the disk they take, and who writes there. Reads only, beside a job that writes too.
    """
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.table.recovery import lost_text
    from oneemb.storage.table.table_info import table_info

    if is_oneflow_table(path):
        _inspect_oneflow(path, as_json)
        return
    info = table_info(path)
    snapshots = [_described(snapshot) for snapshot in info.snapshots]
    unsaved = info.disk_bytes - info.needed_bytes
    result = {
        "path": path,
        "format": "oneemb",
        "format_version": max((snapshot.format_version for snapshot in info.snapshots), default=None),
        "holder": info.holder,
        "chunks": info.chunks,
        "disk_bytes": info.disk_bytes,
        "live_bytes": info.live_bytes,
        "garbage_bytes": info.garbage_bytes,
        "unsaved_bytes": unsaved,
        "snapshots": snapshots,
        "damaged": info.damaged,
        "lost": info.lost,
        "lost_more": info.lost_more,
        "kept": info.kept,
    }
    columns = ("name", "rows", "weights", "state", "optimizer", "step", "bytes", "saved")
    rows: list[tuple[str, ...]] = [
        (
            one["name"], f"{one['rows']:,}", f"{one['dim']} {one['dtype']}" if one["dim"] else "-",
            str(one["state_width"]),
            str(one["optimizer"] or "-"), str(one["step"]), _size(one["bytes"]), one["created"],
        )
        for one in snapshots
    ]  # fmt: skip
    version = f" {result['format_version']}" if snapshots else ""
    _tell(
        as_json,
        result,
        f"{path}: a table of oneemb, format{version or ' not known yet'}; "
        + (f"held by {info.holder}" if info.holder else "nobody writes to it"),
        f"{_size(info.disk_bytes)} on disk in {info.chunks} chunks: {_size(info.live_bytes)} of rows in snapshots,"
        f" {_size(info.garbage_bytes)} of garbage and lists; {_size(unsaved)} in no snapshot",
        *_table(columns, rows, "no snapshots"),
        *(f"damaged: {reason}" for reason in info.damaged.values()),
        *([f"lost: {lost_text(info.lost, info.lost_more, len(info.kept))}"]
          if info.lost or info.lost_more or info.kept else []),
    )  # fmt: skip


def _inspect_oneflow(path: str, as_json: bool) -> None:
    from oneemb.storage.foreign.oneflow_reader import OneFlowReader
    from oneemb.storage.foreign.oneflow_table import oneflow_snapshots, read_oneflow_geometry

    geometry = read_oneflow_geometry(path)
    snapshots: list[dict[str, Any]] = []
    damaged = {}
    for name in oneflow_snapshots(path):
        try:
            snapshots.append({"name": name, "rows": len(OneFlowReader(path, name))})
        except RuntimeError as error:
            damaged[name] = str(error)
    result = {"path": path, "format": "oneflow", **asdict(geometry), "snapshots": snapshots, "damaged": damaged}
    _tell(
        as_json,
        result,
        f"{path}: a table of OneFlow, keys of {geometry.key_bytes} bytes, rows of {geometry.value_bytes // 4} float32,"
        f" blocks of {geometry.block_bytes} bytes",
        *_table(("name", "rows"), [(one["name"], f"{one['rows']:,}") for one in snapshots], "no snapshots"),
        *(f"damaged: {reason}" for reason in damaged.values()),
    )


def _described(info: "SnapshotInfo") -> dict[str, Any]:
    from oneemb.storage.errors import StorageError
    from oneemb.storage.snapshot_rows import SnapshotRows, shard_of

    rows: dict[str, Any] = {}
    shard: int | None = None
    shards: int | None = None
    try:
        rows = SnapshotRows.of_meta(info.meta, info.name).described()
        shard, shards = shard_of(info.meta, info.name)
    except StorageError:
        pass  # The rows are another program's, or what the snapshot says of them makes no sense.
    layout = rows.get("layout", {})
    return {
        "name": info.name,
        "rows": info.rows,
        "dim": layout.get("dim"),
        "dtype": layout.get("dtype"),
        "state_width": layout.get("state_width"),
        "optimizer": rows.get("optimizer"),
        "step": rows.get("step"),
        "bytes": info.bytes,
        "created": datetime.fromtimestamp(info.created, UTC).isoformat(timespec="seconds"),
        "row_width": info.row_width,
        "physical_block_size": info.physical_block_size,
        "format_version": info.format_version,
        "shard": shard,
        "shards": shards,
    }


# ---- check, compact -------------------------------------------------------------------------------------------------


@oneemb.command()
@click.argument("path", type=_FOLDER)
@_json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Find what is not what was written.

    Every byte that the snapshots at PATH need is compared with its checksum, and every reference followed. Reads only,
    beside a job that writes too. Exits with 1 and a list when something contradicts. Tables of OneFlow have
    no checksums: their files are compared with each other.
    """
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.table.check import CheckResult, check_table

    with _bar(as_json, "checking", "B") as move:
        result: CheckResult = _check_oneflow(path, move) if is_oneflow_table(path) else check_table(path, progress=move)
    _tell(
        as_json,
        {"path": path, "sound": not result.problems, **asdict(result)},
        *result.problems,
        f"{path}: {len(result.problems) or 'no'} contradictions; {len(result.snapshots)} snapshots with {result.rows:,}"
        f" rows, {_size(result.bytes_read)} of blocks read",
        *([f"{len(result.unneeded)} files belong to no snapshot: a job's, or what the next one removes"
           + (f"; but {len(result.kept)} of them stay until `oneemb compact --remove-orphans`" if result.kept else "")]
          if result.unneeded else []),
    )  # fmt: skip
    if result.problems:
        ctx.exit(1)


def _check_oneflow(path: str, move: Callable[[int, int], None]) -> Any:
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


@oneemb.command()
@click.argument("path", type=_FOLDER)
@click.option("--remove-orphans", is_flag=True, help="Give up snapshots that are gone, and free their disk.")
@_json_option
def compact(path: str, remove_orphans: bool, as_json: bool) -> None:
    """Free the disk space that snapshots do not need.

    No job may have the table: one that has compacts by itself. A crash leaves every
    snapshot at PATH whole. Files of snapshots that somebody else has removed stay until --remove-orphans is given.
    """
    from oneemb.storage.table.compact_snapshots import compact_snapshots
    from oneemb.storage.table.table_info import table_info

    _need_own(path)
    before = table_info(path).disk_bytes
    with _bar(as_json, "moving", "rows") as move:
        result = compact_snapshots(path, remove_orphans=remove_orphans, progress=move)
    after = table_info(path).disk_bytes
    _tell(
        as_json,
        {"path": path, **asdict(result), "disk_bytes_before": before, "disk_bytes": after},
        f"{path}: {_size(before)} became {_size(after)}; {result.rows_moved:,} rows of {result.chunks} chunks moved",
    )


# ---- snapshots ------------------------------------------------------------------------------------------------------


@oneemb.group()
def snapshot() -> None:
    """List or delete the snapshots of a table."""


@snapshot.command("list")
@click.argument("path", type=_FOLDER)
@_json_option
def list_snapshots(path: str, as_json: bool) -> None:
    """List the snapshots of the table at PATH, oldest first.

    Those that cannot be read are named beside the list, with the reason.
    """
    names, damaged = _names(path)
    _tell(as_json, {"path": path, "snapshots": names, "damaged": damaged}, *(names or ["no snapshots"]))
    if not as_json:
        for name, reason in damaged.items():
            click.echo(f"damaged: {name!r}: {reason}", err=True)


@snapshot.command("delete")
@click.argument("path", type=_FOLDER)
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_json_option
def delete_snapshot(path: str, name: str, yes: bool, as_json: bool) -> None:
    """Delete a snapshot and free what only it used.

    NAME is a snapshot of the table at PATH. No job may have the table.
    """
    from oneemb.kernels.threads import Threads
    from oneemb.storage.fs import LocalFileSystem
    from oneemb.storage.table.persistent_table import PersistentTable
    from oneemb.storage.table.snapshot_file import SnapshotFiles
    from oneemb.storage.table.table_info import table_info

    _need_own(path)
    files = SnapshotFiles(LocalFileSystem(), f"{path}/snapshots")
    if name not in files.names():
        raise files.not_found(name)
    if not yes:
        click.confirm(f"Delete snapshot {name!r} of {path} for good?", abort=True, err=True)
    before = table_info(path).disk_bytes
    # The table starts empty, so the width of its rows plays no part.
    with PersistentTable.open(path, row_width=1, threads=Threads(1), background=False) as table:
        table.delete_snapshot(name)
    freed = before - table_info(path).disk_bytes
    _tell(
        as_json, {"path": path, "deleted": name, "bytes_freed": freed}, f"{name!r} is deleted, {_size(freed)} are free"
    )


def _need_own(path: str) -> None:
    """Raise unless a table of oneemb lies there."""
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.fs import LocalFileSystem
    from oneemb.storage.table.table_info import need_table

    if is_oneflow_table(path):
        raise ValueError(f"{path} holds a table of OneFlow, which is read here and not changed; use OneFlow for that")
    need_table(LocalFileSystem(), path)


def _names(path: str) -> tuple[list[str], dict[str, str]]:
    """The snapshots of a table, and of those that cannot be read the reason."""
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table, oneflow_snapshots
    from oneemb.storage.table.table_info import snapshots_at

    if is_oneflow_table(path):
        return oneflow_snapshots(path), {}
    found, damaged = snapshots_at(path)
    return [info.name for info in found], damaged


# ---- export, import -------------------------------------------------------------------------------------------------


@oneemb.command("export")
@click.argument("path", type=_FOLDER)
@click.argument("target", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--snapshot", "name", help="Which snapshot; without it, the only one.")
@click.option("--shard", multiple=True, type=_FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@click.option("--table", type=click.IntRange(0), help="Export this table only.")
@click.option("--with-state", is_flag=True, help="Write the optimizer's state too.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.option("--batch-size", default=65536, show_default=True, help="Rows at a time.")
@_json_option
def export_command(
    path: str, target: tuple[str, ...], name: str | None, shard: tuple[str, ...], table: int | None, with_state: bool,
    overwrite: bool, batch_size: int, as_json: bool,
) -> None:  # fmt: skip
    """Write a snapshot's rows to files.

    The snapshot is one of the table at PATH. TARGET is a file .npz, .parquet or .safetensors; or files .npy of keys,
    values, and of tables and state if they are wanted.
    """
    from oneemb.rows.export_rows import export_rows

    name = name or _only(path)
    with _bar(as_json, "exporting", "rows") as move:
        rows = export_rows(
            [path, *shard], target[0] if len(target) == 1 else target, snapshot=name, table=table,
            with_state=with_state, overwrite=overwrite, batch_size=batch_size, progress=move,
        )  # fmt: skip
    size = sum(os.path.getsize(file) for file in target)
    _tell(
        as_json,
        {"path": path, "snapshot": name, "target": list(target), "rows": rows, "bytes": size},
        f"{rows:,} rows of {name!r} are in {', '.join(target)}, {_size(size)}",
    )


@oneemb.command("import")
@click.argument("source", nargs=-1, required=True, type=click.Path(exists=True))
@click.argument("path", type=click.Path(file_okay=False))
@click.option("--snapshot", "name", required=True, help="Name of the new snapshot.")
@click.option("--shard", multiple=True, type=click.Path(file_okay=False), help="Another folder to shard the rows over.")
@click.option("--keys", default="keys", show_default=True, help="Column of keys.")
@click.option("--row-numbers", is_flag=True, help="The number of each row is its key.")
@click.option(
    "--values", multiple=True, default=["values"], show_default=True, help="Column of weights; may be repeated."
)
@click.option("--tables", help="Column of table numbers; without it, 'tables' if there is one.")
@click.option("--table", default=0, show_default=True, type=click.IntRange(0), help="Table of rows that do not say.")
@click.option("--state", default="state", show_default=True, help="Column of the optimizer's state.")
@click.option("--with-state", is_flag=True, help="Bring the optimizer's state too.")
@click.option("--allow-nonfinite", is_flag=True, help="Bring weights that are infinite or no number as they are.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of the rows; else the source's.")
@click.option(
    "--block-size", default="4096", show_default=True, type=click.Choice(["512", "4096"]), help="Of the disk."
)
@click.option("--from-snapshot", help="Of a table of OneFlow or oneemb, which snapshot; without it, the only one.")
@click.option("--embedding-dim", type=click.IntRange(1), help="Weights of a row of OneFlow's; the rest is state.")
@click.option("--batch-size", default=65536, show_default=True, help="Rows at a time.")
@_json_option
def import_command(
    source: tuple[str, ...], path: str, name: str, shard: tuple[str, ...], keys: str, row_numbers: bool,
    values: tuple[str, ...], tables: str | None, table: int, state: str, with_state: bool, allow_nonfinite: bool,
    dtype: str | None, block_size: str, from_snapshot: str | None, embedding_dim: int | None, batch_size: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a snapshot of rows in files.

    The snapshot is a new one of the table at PATH, which is made if it is not there. SOURCE is a file .npz, .parquet or
    .safetensors; files .npy of keys, values, and of tables and state if there are any; one file .npy of values, whose
    row numbers are the keys; or the folders of a table of OneFlow or oneemb.
    """
    from oneemb.rows.import_rows import import_rows

    opened: Any = source[0] if len(source) == 1 else source
    if os.path.isdir(source[0]):
        opened = _table_reader(list(source), from_snapshot, embedding_dim, batch_size)
    elif from_snapshot is not None or embedding_dim is not None:
        raise click.UsageError("--from-snapshot and --embedding-dim are for folders of tables")
    with _bar(as_json, "importing", "rows") as move:
        rows = import_rows(
            [path, *shard], opened, snapshot=name, keys=None if row_numbers else keys,
            values=values[0] if len(values) == 1 else values, tables=tables, table=table, state=state,
            with_state=with_state, allow_nonfinite=allow_nonfinite, dtype=dtype,
            physical_block_size=int(block_size), batch_size=batch_size, progress=move,
        )  # fmt: skip
    _tell(
        as_json,
        {"source": list(source), "path": path, "snapshot": name, "rows": rows},
        f"{rows:,} rows are in snapshot {name!r} of {path}",
    )


def _table_reader(paths: list[str], name: str | None, embedding_dim: int | None, batch_size: int) -> Any:
    from oneemb.rows.reader import make_persistent_table_reader
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table, read_oneflow_geometry

    name = name or _only(paths[0])
    if not is_oneflow_table(paths[0]):
        return make_persistent_table_reader(paths, name, "int64", "float32", batch_size=batch_size)
    key_type = f"int{8 * read_oneflow_geometry(paths[0]).key_bytes}"
    return make_persistent_table_reader(
        paths, name, key_type, "float32", batch_size=batch_size, embedding_dim=embedding_dim, format="oneflow"
    )


def _only(path: str) -> str:
    """The only snapshot of a table."""
    names, damaged = _names(path)
    if len(names) != 1:
        there = ", ".join([*map(repr, names), *(f"{name!r}, which is damaged" for name in damaged)]) or "none"
        raise ValueError(f"{path} must have one snapshot, or one must be named with an option; there are: {there}")
    return names[0]


# ---- text -----------------------------------------------------------------------------------------------------------


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], none: str) -> list[str]:
    if not rows:
        return [none]
    width = [max(len(row[c]) for row in (columns, *rows)) for c in range(len(columns))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in (columns, *rows)
    ]
