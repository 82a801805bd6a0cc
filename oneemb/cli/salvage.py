"""The command `salvage`, which writes what can be read of a damaged table into a new one."""

from dataclasses import asdict

import click

from oneemb.cli.check import losses
from oneemb.cli.output import FOLDER, json_option, progress_bar, tell


@click.command()
@click.argument("path", type=FOLDER)
@click.argument("to", type=click.Path(file_okay=False))
@click.option(
    "--all-rows", metavar="NAME",
    help="Make a snapshot NAME, too, of the newest version of every row, whether a snapshot lists it or not.",
)  # fmt: skip
@json_option
@click.pass_context
def salvage(ctx: click.Context, path: str, to: str, all_rows: str | None, as_json: bool) -> None:
    """Write every row that can be read of a damaged table into a new one.

    PATH is the folder of a table, or the folder that holds the tables of ranks; it is only read. TO is a new folder.
    Snapshots keep their names and identities there, so a job may load them; rows that are lost begin anew. Where the
    file of a snapshot is damaged, --all-rows takes the newest version of every row in the chunks, also of erased rows.
    Exits with 1 if anything is lost, and says how many rows of which tables.
    """
    from oneemb.cli.snapshots import need_own_tables
    from oneemb.storage.snapshots.copied_folders import salvage_folder

    need_own_tables([path])
    with progress_bar(as_json, "reading", "B") as move:
        result = salvage_folder(path, to, move, all_rows)
    whole = all(found.whole for found in result.by_snapshot.values())
    tell(
        as_json,
        {"path": path, "to": to, "whole": whole, **asdict(result)},
        *result.problems,
        f"{to}: {len(result.by_snapshot)} snapshots of {path}",
        *losses(result.by_snapshot),
    )
    if not whole:
        ctx.exit(1)
