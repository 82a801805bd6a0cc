"""The command `merge-deltas`: a whole snapshot, or one delta, of a chain of deltas."""

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, tell
from oneemb.cli.snapshots import need_own_tables


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
    """Make one snapshot of a delta and those that it goes on from.

    PATH is the folder of a table, or that in which ranks have theirs. No row is copied. The others stay until they are
    deleted, the last one first. No job may have the tables.
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
