"""The command `quantize`, which writes a file of rows to serve; also content and checks of such a file."""

import os
from dataclasses import asdict

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell


@click.command("quantize")
@click.argument("path", type=FOLDER)
@click.option("--snapshot", "name", help="Which snapshot; without it, the newest.")
@click.option("--dtype", default="int8", show_default=True, type=click.Choice(["float32", "float16", "int8", "int4"]))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The file to write.")
@click.option("--shard", multiple=True, type=FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@click.option("--table", "tables", multiple=True, type=click.IntRange(0), help="Only this table; may be repeated.")
@click.option("--max-rows", type=click.IntRange(1), help="Most rows: of highest score, or newest.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@json_option
def quantize_command(
    path: str, name: str | None, dtype: str, out: str, shard: tuple[str, ...], tables: tuple[int, ...],
    max_rows: int | None, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a snapshot's weights to a file for serving.

    PATH is the folder of a table, or the folder that holds the tables of ranks. oneemb.InferenceEmbedding.open reads
    the file. The printed error compares weights in the file with the trained weights.
    """
    from oneemb.kernels.threads import Threads
    from oneemb.serving.build import find_snapshot, make_file, tell_unread
    from oneemb.storage.fs import absolute_path
    from oneemb.storage.snapshots.row_cap import RowCap
    from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks

    if os.path.exists(out) and not overwrite:
        raise FileExistsError(f"{out} exists; give overwrite=True to replace it, or another name")
    with progress_bar(as_json, "quantizing", "rows") as move:
        looks = SnapshotLooks([path, *shard])
        found = find_snapshot(looks, name)
        if name is None:
            text = f"{found.name!r} is the newest snapshot that can be read"
            tell_unread(looks, found, lambda error: click.echo(f"{text}: {error}", err=True))
        cap = None if max_rows is None else RowCap(max_rows)
        info = make_file(absolute_path(out), found, dtype, tables or None, threads=Threads(), progress=move, cap=cap)
    size = os.path.getsize(out)
    tell(
        as_json,
        {"path": path, "snapshot": info.name, "dtype": dtype, "out": out, "rows": info.rows, "bytes": size,
         "error_max": info.error_max, "error_rms": info.error_rms},
        f"{info.rows:,} rows of {info.name!r} are in {out} as {info.weights}, {size_text(size)}; error of a weight:"
        f" {info.error_max:.3g} at most, {info.error_rms:.3g} rms",
    )  # fmt: skip


def check_file(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check a file for serving: the command `check` for such a file."""
    from oneemb.kernels.threads import Threads
    from oneemb.storage.errors import CorruptTableError
    from oneemb.storage.serving.served_file import ServedFile

    _need_served(path)
    problems, rows = [], 0
    with progress_bar(as_json, "checking", "B") as move:
        try:
            file = ServedFile(path, threads=Threads())
            file.verify(move)
            rows = file.info.rows
        except CorruptTableError as error:
            problems.append(str(error))
    tell(
        as_json,
        {"path": path, "sound": not problems, "problems": problems, "rows": rows},
        *(problems or [f"{path}: no contradictions; {rows:,} rows"]),
    )
    if problems:
        ctx.exit(1)


def inspect_file(path: str, as_json: bool) -> None:
    """Show what a file for serving contains."""
    from oneemb.kernels.threads import Threads
    from oneemb.storage.serving.served_file import ServedFile

    _need_served(path)
    info = ServedFile(path, threads=Threads()).info
    tell(
        as_json,
        {"path": path, "format": "oneemb serving", **asdict(info)},
        f"{path}: {info.rows:,} rows of {info.dim} {info.weights} weights, trained as {info.trained}; snapshot"
        f" {info.name!r}, identity {info.identity}, sequence {info.sequence}",
        f"{size_text(os.path.getsize(path))}, {info.row_bytes} bytes a row; tables {', '.join(map(str, info.tables))};"
        f" error {info.error_max:.3g} at most, {info.error_rms:.3g} rms",
    )


def _need_served(path: str) -> None:
    from oneemb.storage.serving.served_file import is_served_file

    if not is_served_file(path):
        raise click.UsageError(
            f"{path} is a file, but none that `oneemb quantize` has made; name the folder of a table, or such a file"
        )
