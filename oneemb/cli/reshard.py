"""The command `reshard`: the parts of any number of ranks from a snapshot of any other."""

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, tell


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
    """Make the parts of N ranks from a snapshot of any number.

    SOURCE is the folder of a job's ranks, or of a table. A job loads a snapshot of any number of ranks; one of as many
    as it has it loads faster. Without --to the new parts take the place of the former ones. No job may have the tables.
    """
    from oneemb.rows.reshard import reshard

    with progress_bar(as_json, "resharding", "rows") as move:
        folders = reshard([source, *shard], name, ranks, list(to) or None, progress=move)
    tell(
        as_json,
        {"source": source, "snapshot": name, "ranks": ranks, "folders": folders},
        f"the parts of {name!r} for {ranks} ranks are in {', '.join(folders)}",
    )
