"""The commands `snapshot list` and `snapshot delete`, and what other commands ask about the snapshots of a table."""

import click

from oneemb.cli.output import FOLDER, json_option, size_text, tell

__all__ = ["need_own_table", "only_snapshot", "snapshot"]


@click.group()
def snapshot() -> None:
    """List or delete the snapshots of a table."""


@snapshot.command("list")
@click.argument("path", type=FOLDER)
@json_option
def list_snapshots(path: str, as_json: bool) -> None:
    """List the snapshots of the table at PATH, oldest first.

    Those that cannot be read are named beside the list, with the reason.
    """
    names, damaged = snapshot_names(path)
    tell(as_json, {"path": path, "snapshots": names, "damaged": damaged}, *(names or ["no snapshots"]))
    if not as_json:
        for name, reason in damaged.items():
            click.echo(f"damaged: {name!r}: {reason}", err=True)


@snapshot.command("delete")
@click.argument("path", type=FOLDER)
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete_snapshot(path: str, name: str, yes: bool, as_json: bool) -> None:
    """Delete a snapshot and free what only it used.

    NAME is a snapshot of the table at PATH. No job may have the table.
    """
    from oneemb.kernels.threads import Threads
    from oneemb.storage.fs import LocalFileSystem
    from oneemb.storage.table.persistent_table import PersistentTable
    from oneemb.storage.table.snapshot_file import SnapshotFiles
    from oneemb.storage.table.table_info import table_info

    need_own_table(path)
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
    tell(
        as_json,
        {"path": path, "deleted": name, "bytes_freed": freed},
        f"{name!r} is deleted, {size_text(freed)} are free",
    )


def need_own_table(path: str) -> None:
    """Raise unless a table of oneemb lies there."""
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.fs import LocalFileSystem
    from oneemb.storage.table.table_info import need_table

    if is_oneflow_table(path):
        raise ValueError(f"{path} holds a table of OneFlow, which is read here and not changed; use OneFlow for that")
    need_table(LocalFileSystem(), path)


def snapshot_names(path: str) -> tuple[list[str], dict[str, str]]:
    """The snapshots of a table, and of those that cannot be read the reason."""
    from oneemb.storage.foreign.oneflow_table import is_oneflow_table, oneflow_snapshots
    from oneemb.storage.table.table_info import snapshots_at

    if is_oneflow_table(path):
        return oneflow_snapshots(path), {}
    found, damaged = snapshots_at(path)
    return [info.name for info in found], damaged


def only_snapshot(path: str) -> str:
    """The only snapshot of a table."""
    names, damaged = snapshot_names(path)
    if len(names) != 1:
        there = ", ".join([*map(repr, names), *(f"{name!r}, which is damaged" for name in damaged)]) or "none"
        raise ValueError(f"{path} must have one snapshot, or one must be named with an option; there are: {there}")
    return names[0]
