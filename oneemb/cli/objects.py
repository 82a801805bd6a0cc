"""The commands `push`, `pull` and `stored`, for snapshots in an object store."""

import click

from oneemb.cli.check import salvage_advice
from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell

_SNAPSHOT = click.option("--snapshot", "names", multiple=True, help="Only this snapshot; may be repeated.")


@click.command()
@click.argument("path", type=FOLDER)
@click.argument("url")
@_SNAPSHOT
@json_option
@click.pass_context
def push(ctx: click.Context, path: str, url: str, names: tuple[str, ...], as_json: bool) -> None:
    """Copy snapshots of a table to an object store, also while a job writes.

    PATH is the folder of a table, or the folder that holds the tables of ranks. URL is where the snapshots of this
    table lie, such as s3://bucket/items: any store that fsspec knows. Only what the store lacks is uploaded. Exits with
    1 if a snapshot is damaged.
    """
    from dataclasses import asdict

    from oneemb.cli.snapshots import need_own_tables
    from oneemb.storage.objects.push import push as push_snapshots

    need_own_tables([path])
    with progress_bar(as_json, "uploading", "B") as move:
        result = push_snapshots(path, url, names or None, progress=move)
    tell(
        as_json,
        {"path": path, "url": url, **asdict(result)},
        f"{url}: {len(result.snapshots)} snapshots, {len(result.pushed)} of them new;"
        f" {size_text(result.bytes_uploaded)} uploaded",
        *(f"waiting: {name!r} lacks parts that other ranks have to push" for name in result.waiting),
        *(f"gone: {name!r} was deleted or replaced while it was pushed" for name in result.gone),
        *(f"not pushed: {name!r}: {reason}" for name, reason in result.damaged.items()),
        *([salvage_advice(path)] if result.damaged and not result.snapshots and not result.waiting else ()),
    )
    if result.damaged:
        ctx.exit(1)


@click.command()
@click.argument("url")
@click.argument("path", type=click.Path(file_okay=False))
@_SNAPSHOT
@json_option
def pull(url: str, path: str, names: tuple[str, ...], as_json: bool) -> None:
    """Copy snapshots of an object store to a folder.

    URL is where `oneemb push` has put the snapshots of a table. PATH is a new folder, or one that has snapshots of the
    same table; no job may use it. Every byte is compared with its checksum.
    """
    from dataclasses import asdict

    from oneemb.storage.objects.pull import pull as pull_snapshots

    with progress_bar(as_json, "downloading", "B") as move:
        result = pull_snapshots(url, path, names or None, progress=move)
    tell(
        as_json,
        {"url": url, "path": path, **asdict(result)},
        f"{path}: {len(result.snapshots)} snapshots, {len(result.pulled)} of them new;"
        f" {size_text(result.bytes_downloaded)} downloaded",
    )


@click.group()
def stored() -> None:
    """List or delete the snapshots of an object store."""


@stored.command("list")
@click.argument("url")
@json_option
def list_stored(url: str, as_json: bool) -> None:
    """List the snapshots at URL that are whole."""
    from oneemb.storage.objects.manifests import names_in
    from oneemb.storage.objects.object_store import ObjectStore

    names = names_in(ObjectStore(url))
    tell(as_json, {"url": url, "snapshots": names}, *(names or ["no snapshots"]))


@stored.command("delete")
@click.argument("url")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete(url: str, name: str, yes: bool, as_json: bool) -> None:
    """Delete a snapshot at URL. `oneemb stored clean` then frees its space."""
    from oneemb.storage.objects.deletion import delete_stored

    if not yes:
        click.confirm(f"Delete snapshot {name!r} of {url} for good?", abort=True, err=True)
    delete_stored(url, name)
    tell(as_json, {"url": url, "deleted": name}, f"{url}: {name!r} is deleted")


@stored.command("clean")
@click.argument("url")
@click.option("--older-than-hours", type=click.FloatRange(min=0), default=24.0, show_default=True)
@json_option
def clean(url: str, older_than_hours: float, as_json: bool) -> None:
    """Remove what no snapshot at URL needs: what killed pushes and deleted snapshots have left. It is refused while a
    push runs."""
    from dataclasses import asdict

    from oneemb.storage.objects.deletion import clean_store

    result = clean_store(url, older_than_hours * 3600)
    tell(
        as_json,
        {"url": url, **asdict(result)},
        f"{url}: removed {result.objects} objects of {size_text(result.bytes)}, {result.parts} parts of snapshots that"
        " are not whole or were replaced",
    )
