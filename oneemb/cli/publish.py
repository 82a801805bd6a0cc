"""The command `publish`, which gives the versions of a table to sinks."""

import time
from typing import TYPE_CHECKING, Literal, cast

import click

from oneemb.cli.output import FOLDER, json_option, tell

if TYPE_CHECKING:
    from oneemb.sinks.sink import Sink


@click.command("publish")
@click.argument("path", type=FOLDER)
@click.option(
    "--to", "targets", multiple=True, required=True, metavar="SINK",
    help="redis://HOST?prefix=NAME, parquet:FOLDER, safetensors:FOLDER, table:FOLDER or served:FILE; may be repeated.",
)  # fmt: skip
@click.option("--with-state", is_flag=True, help="Publish the optimizer's state too.")
@click.option("--table", "tables", multiple=True, type=click.IntRange(0), help="Only this table; may be repeated.")
@click.option("--max-rows", type=click.IntRange(1), help="Most rows of a sink: of highest score, or newest.")
@click.option("--dtype", default="float32", show_default=True, help="Weights in served files.")
@click.option("--seconds", default=1.0, show_default=True, help="Time between two looks for newer versions.")
@click.option("--once", is_flag=True, help="Publish the newest version, and end.")
@click.option("--version", help="Publish this snapshot, and not the newest.")
@json_option
def publish_command(
    path: str, targets: tuple[str, ...], with_state: bool, tables: tuple[int, ...], dtype: str, seconds: float,
    once: bool, version: str | None, max_rows: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Publish the versions of a table to sinks, while a job saves snapshots and deltas, until Ctrl-C.

    PATH is the folder of the table, or the folder that holds the tables of ranks. Each sink goes on from the version
    that it shows.
    """
    from oneemb.sinks.publisher import publish

    sinks = [_sink(target, list(tables) or None, with_state, dtype, max_rows) for target in targets]
    with publish(path, sinks, seconds=seconds, version=version) as publisher:
        shown: dict[str, str | None] = {}
        while not once:
            for name, stats in publisher.stats().items():
                if stats["version"] != shown.get(name) and not as_json:
                    click.echo(f"{name}: {stats['version']}")
                shown[name] = stats["version"]
            time.sleep(seconds)
        publisher.flush()
        found = publisher.stats()
    tell(
        as_json,
        {"path": path, "sinks": found},
        *(f"{name}: {stats['version']}, {stats['rows']:,} rows written" for name, stats in found.items()),
    )


def _sink(
    target: str, tables: list[int] | None, with_state: bool, dtype: str, max_rows: int | None
) -> "Sink":  # fmt: skip
    from oneemb import sinks

    kind, _, place = target.partition(":")
    if kind in ("redis", "rediss"):
        return sinks.Redis(target, tables=tables, with_state=with_state, max_rows=max_rows)
    if not place:
        raise click.BadParameter(f"a sink must be a Redis URL or KIND:PLACE, got {target!r}", param_hint="--to")
    if kind in ("parquet", "safetensors"):
        format = cast(Literal["parquet", "safetensors"], kind)
        return sinks.Files(place, format, tables=tables, with_state=with_state, max_rows=max_rows)
    if kind == "table":
        return sinks.Table(place, tables=tables, with_state=with_state, max_rows=max_rows)
    if kind == "served":
        return sinks.ServedFile(place, dtype, tables=tables, max_rows=max_rows)
    raise click.BadParameter(
        f"the kind of a sink must be redis, parquet, safetensors, table or served, got {kind!r}", param_hint="--to"
    )
