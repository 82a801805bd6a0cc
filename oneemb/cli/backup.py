"""The command `backup`, which copies the snapshots of a table while a job uses it."""

from dataclasses import asdict

import click

from oneemb.cli.check import salvage_advice
from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell


@click.command()
@click.argument("path", type=FOLDER)
@click.argument("to", type=click.Path(file_okay=False))
@click.option("--link", is_flag=True, help="Make hard links instead of copies of the chunks.")
@click.option("--no-verify", is_flag=True, help="Do not compare the copy with its checksums.")
@json_option
@click.pass_context
def backup(ctx: click.Context, path: str, to: str, link: bool, no_verify: bool, as_json: bool) -> None:
    """Copy the snapshots of a table, also while a job writes.

    PATH is the folder of a table, or the folder that holds the tables of ranks. TO is a new folder, or that of an
    earlier backup: then only what it lacks is copied. Where the file system can share blocks between files, a copy
    takes no time. Every byte of TO is read and compared with its checksum at the end. Exits with 1 if a snapshot could
    not be copied, since its files are damaged, or a part or the parent of a delta is missing.
    """
    from oneemb.cli.snapshots import need_own_tables
    from oneemb.storage.snapshots.backup import backup_folder

    need_own_tables([path])
    with progress_bar(as_json, "verifying", "B") as move:
        result = backup_folder(path, to, link=link, verify=not no_verify, progress=move)
    tell(
        as_json,
        {"path": path, "to": to, **asdict(result)},
        f"{to}: {len(result.snapshots)} snapshots, {len(result.copied)} of them new;"
        f" {size_text(result.bytes_written)} copied",
        *(f"gone: {name!r} was deleted or replaced while it was copied" for name in result.gone),
        *(f"not copied: {reason}" for reason in result.incomplete.values()),
        *([salvage_advice(path)] if result.incomplete and not result.snapshots else ()),
    )
    if result.incomplete:
        ctx.exit(1)
