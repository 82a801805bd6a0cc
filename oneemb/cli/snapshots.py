"""The commands `snapshot list`, `snapshot delete`, `merge-deltas` and `reshard`, and checks for them."""

import os
from collections.abc import Sequence

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell


@click.group()
def snapshot() -> None:
    """List or delete the snapshots of a table."""


@snapshot.command("list")
@click.argument("path", type=FOLDER)
@json_option
@click.pass_context
def list_snapshots(ctx: click.Context, path: str, as_json: bool) -> None:
    """List the snapshots of the table at PATH, or of the tables of ranks there, oldest first.

    Snapshots that cannot be read, or that lack parts or the parent of a delta, are listed separately with the reason;
    the command then exits with 1.
    """
    names, damaged, incomplete = snapshot_names([path])
    result = {"path": path, "snapshots": names, "damaged": damaged, "incomplete": incomplete}
    tell(as_json, result, *(names or ["no snapshots"]))
    if not as_json:
        for name, reason in damaged.items():
            click.echo(f"damaged: {name!r}: {reason}", err=True)
        for reason in incomplete.values():
            click.echo(f"incomplete: {reason}", err=True)
    if damaged or incomplete:
        ctx.exit(1)


@snapshot.command("delete")
@click.argument("path", type=FOLDER)
@click.argument("name")
@click.option("--shard", multiple=True, type=FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete_snapshot(path: str, name: str, shard: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete a snapshot, and free the disk space that only this snapshot used.

    PATH is the folder of a table, or the folder that holds the tables of ranks; NAME is one of its snapshots. No job
    may use the tables.
    """
    from oneemb.storage.snapshots.part_folders import PartRemoval, to_remove
    from oneemb.storage.snapshots.snapshot_parts import look_at
    from oneemb.storage.table.table_info import table_info

    paths = [path, *shard]
    need_own_tables(paths)
    found = look_at(paths)
    removals = to_remove(found, name)
    found.check_no_deltas(name, "deleted")
    if not yes:
        click.confirm(f"Delete snapshot {name!r} of {', '.join(paths)} for good?", abort=True, err=True)
    before = sum(table_info(folder).disk_bytes for folder in found.folders)
    for snapshots in removals:
        with PartRemoval(snapshots, {}) as remove:
            remove()
    freed = before - sum(table_info(folder).disk_bytes for folder in found.folders)
    tell(
        as_json,
        {"path": path, "deleted": name, "bytes_freed": freed},
        f"{name!r} is deleted, {size_text(freed)} are free",
    )


def need_own_tables(paths: Sequence[str]) -> None:
    """Raise ValueError or StorageError unless these folders hold tables of oneemb."""
    from oneemb.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.fs import LocalFileSystem
    from oneemb.storage.snapshots.snapshot_parts import folders_at
    from oneemb.storage.table.table_info import need_table

    for path in paths:
        if is_oneflow_table(path):
            raise ValueError(
                f"{path} must hold a table of oneemb, but holds a table of OneFlow, which oneemb only reads; use"
                " OneFlow to change it"
            )
        if not folders_at([path]):
            need_table(LocalFileSystem(), path)


def snapshot_names(paths: Sequence[str]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Names of the snapshots in these folders; {name: reason} of those that cannot be read; {name: reason} of those
    that are incomplete."""
    from oneemb.foreign.oneflow_table import is_oneflow_table, oneflow_snapshots
    from oneemb.storage.snapshots.snapshot_parts import incomplete_text, look_at

    if is_oneflow_table(paths[0]):
        return oneflow_snapshots(paths[0]), {}, {}
    found = look_at(paths)
    damaged = {
        one.name if one.folder in paths else f"{os.path.basename(one.folder)}/{one.name}": one.reason
        for one in found.damaged
    }
    incomplete, broken = {parts[0].whole.name: incomplete_text(parts) for parts in found.incomplete()}, found.broken()
    names = [one.name for one in found.snapshots() if one.name not in broken]
    return names, damaged, incomplete | broken


def only_snapshot(paths: Sequence[str]) -> str:
    """Name of the only snapshot in these folders; ValueError if there is none or there are several."""
    names, damaged, incomplete = snapshot_names(paths)
    if len(names) != 1:
        there = ", ".join([
            *map(repr, names), *(f"{name!r}, which is damaged" for name in damaged),
            *(f"{name!r}, which is not whole" for name in incomplete),
        ]) or "none"  # fmt: skip
        raise ValueError(f"{paths[0]} must have exactly one snapshot, if no option names one; there are: {there}")
    return names[0]


@click.command("merge-deltas")
@click.argument("path", type=FOLDER)
@click.option("--name", required=True, help="The delta whose rows the new snapshot has.")
@click.option("--into", required=True, help="The name of the new snapshot.")
@click.option("--since", help="Make a delta since this one, from which NAME goes on; without it, a whole snapshot.")
@click.option("--shard", multiple=True, type=FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@json_option
def merge_deltas_command(
    path: str, name: str, into: str, since: str | None, shard: tuple[str, ...], as_json: bool
) -> None:
    """Make one snapshot of a delta and the snapshots that it builds on.

    PATH is the folder of a table, or the folder that holds the tables of ranks. No row is copied. The merged snapshots
    stay until they are deleted, the newest first. No job may use the tables.
    """
    from oneemb.rows.reshard import merge_deltas

    need_own_tables([path, *shard])
    with progress_bar(as_json, "merging", "parts") as move:
        merged = merge_deltas([path, *shard], name, into, since=since, progress=move)
    what = "a whole snapshot" if since is None else f"a delta since {since!r}"
    tell(
        as_json,
        {"path": path, "snapshot": into, "of": name, "since": since, "merged": merged},
        f"{into!r} is {what}, of {merged} snapshots up to {name!r}",
    )


@click.command("reshard")
@click.argument("source", type=FOLDER)
@click.option("--name", required=True, help="Which snapshot.")
@click.option("--ranks", required=True, type=click.IntRange(1), help="How many; 1 = a table without ranks.")
@click.option(
    "--to", multiple=True, type=click.Path(file_okay=False), help="Where the parts go; or, repeated, one for each rank."
)
@click.option("--shard", multiple=True, type=FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@json_option
def reshard_command(
    source: str, name: str, ranks: int, to: tuple[str, ...], shard: tuple[str, ...], as_json: bool
) -> None:
    """Make a snapshot's parts for another number of ranks.

    SOURCE is the folder of a table, or the folder that holds the tables of ranks. A job loads snapshots of any number
    of ranks, but fastest those of its own number. Without --to the new parts replace the old ones. No job may use the
    tables.
    """
    from oneemb.rows.reshard import reshard

    with progress_bar(as_json, "resharding", "rows") as move:
        folders = reshard([source, *shard], name, ranks, list(to) or None, progress=move)
    tell(
        as_json,
        {"source": source, "snapshot": name, "ranks": ranks, "folders": folders},
        f"the parts of {name!r} for {ranks} ranks are in {', '.join(folders)}",
    )
