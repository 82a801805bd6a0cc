"""The commands `export`, which writes rows to files, and `import`, which makes a snapshot from files or other
tables."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from oneemb.cli.output import FOLDER, json_option, progress_bar, size_text, tell
from oneemb.cli.snapshots import only_snapshot

if TYPE_CHECKING:
    from oneemb.rows.foreign import ForeignFormat, ForeignReport
    from oneemb.rows.import_rows import Source
    from oneemb.rows.reader import PersistentTableReader

_FOREIGN = click.Choice(["tfra", "torchrec", "torch", "hugectr"])


@click.command("export")
@click.argument("path", type=FOLDER)
@click.argument("target", nargs=-1, required=True, type=click.Path())
@click.option("--snapshot", "name", help="Which snapshot; without it, the only one.")
@click.option("--shard", multiple=True, type=FOLDER, help="Another folder of a sharded snapshot; may be repeated.")
@click.option("--table", type=click.IntRange(0), help="Export this table only.")
@click.option("--with-state", is_flag=True, help="Write the optimizer's state too.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.option("--batch-size", default=65536, show_default=True, help="Rows at a time.")
@click.option("--format", "format", type=_FOREIGN, help="Library for which to write one table.")
@click.option("--name", "foreign_name", help="Name of the table in that library.")
@click.option("--state", help="Name of the slots in TFRA, without the last part.")
@click.option("--num-embeddings", type=click.IntRange(1), help="Rows of the weight in torch or TorchRec.")
@click.option("--managed-collisions", is_flag=True, help="Write TorchRec's buffers that give any id a row.")
@json_option
def export_command(
    path: str, target: tuple[str, ...], name: str | None, shard: tuple[str, ...], table: int | None, with_state: bool,
    overwrite: bool, batch_size: int, format: "ForeignFormat | None", foreign_name: str | None, state: str | None,
    num_embeddings: int | None, managed_collisions: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the rows of a snapshot to files.

    PATH is the folder of the table. TARGET is one .npz, .parquet or .safetensors file; or several .npy files, for keys,
    values, and, if wanted, table numbers and optimizer state. With --format it is a folder for TFRA or HugeCTR, or a
    .safetensors file for torch or TorchRec.
    """
    from oneemb.rows.export_rows import export_rows

    name = name or only_snapshot([path, *shard])
    if format is not None:
        from oneemb.rows.foreign import export_foreign

        if len(target) > 1:
            raise click.UsageError("with --format there is one TARGET")
        with progress_bar(as_json, "exporting", "rows") as move:
            report = export_foreign(
                [path, *shard], target[0], format, name=foreign_name, state=state, num_embeddings=num_embeddings,
                managed_collisions=managed_collisions, snapshot=name, table=table or 0, with_state=with_state,
                overwrite=overwrite, batch_size=batch_size, progress=move,
            )  # fmt: skip
        _tell_report(as_json, report, f"rows of {name!r} are in {target[0]}")
        return
    _only_with_format(name=foreign_name, state=state, num_embeddings=num_embeddings,
                      managed_collisions=managed_collisions or None)  # fmt: skip
    with progress_bar(as_json, "exporting", "rows") as move:
        rows = export_rows(
            [path, *shard], target[0] if len(target) == 1 else target, snapshot=name, table=table,
            with_state=with_state, overwrite=overwrite, batch_size=batch_size, progress=move,
        )  # fmt: skip
    size = sum(os.path.getsize(file) for file in target)
    tell(
        as_json,
        {"path": path, "snapshot": name, "target": list(target), "rows": rows, "bytes": size},
        f"{rows:,} rows of {name!r} are in {', '.join(target)}, {size_text(size)}",
    )


@click.command("import")
@click.argument("source", nargs=-1, required=True, type=click.Path())
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
@click.option("--state", help="Column of the optimizer's state, else 'state'; with --format, where the state is.")
@click.option("--with-state", is_flag=True, help="Bring the optimizer's state too.")
@click.option("--allow-nonfinite", is_flag=True, help="Bring weights that are infinite or no number as they are.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of the rows; else the source's.")
@click.option(
    "--block-size", default="4096", show_default=True, type=click.Choice(["512", "4096"]), help="Of the disk."
)
@click.option("--from-snapshot", help="Of a table of OneFlow or oneemb, which snapshot; without it, the only one.")
@click.option(
    "--embedding-dim", type=click.IntRange(1), help="Weights of a row of OneFlow's, the rest is state; or of raw files."
)
@click.option("--batch-size", default=65536, show_default=True, help="Rows at a time.")
@click.option("--format", "format", type=_FOREIGN, help="Library whose checkpoint SOURCE is.")
@click.option("--name", "foreign_name", help="With --format, name of the table there; without it, the only one.")
@click.option("--ids", help="With --format torch, name of the ids of the rows; else row numbers.")
@click.option("--optimizer", help="With --format, the optimizer whose state to bring, such as 'adam'.")
@click.option("--step", type=click.IntRange(0), help="With --format, number of optimizer steps.")
@click.option("--key-type", type=click.Choice(["int64", "int32", "uint32"]), help="Of keys in raw files; else int64.")
@json_option
def import_command(
    source: tuple[str, ...], path: str, name: str, shard: tuple[str, ...], keys: str, row_numbers: bool,
    values: tuple[str, ...], tables: str | None, table: int, state: str | None, with_state: bool, allow_nonfinite: bool,
    dtype: str | None, block_size: str, from_snapshot: str | None, embedding_dim: int | None, batch_size: int,
    format: "ForeignFormat | None", foreign_name: str | None, ids: str | None, optimizer: str | None, step: int | None,
    key_type: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Make a snapshot from rows in files.

    PATH is the folder of the table that gets the snapshot; a missing table is made. SOURCE is one .npz, .parquet or
    .safetensors file; several .npy files, of keys, values, and, if there are any, table numbers and optimizer state;
    one .npy file of values, whose row numbers are the keys; or the folders of a table of OneFlow or oneemb. With
    --format it is a checkpoint of TFRA, by its prefix or folder; a sparse model of HugeCTR; or a state dict of torch or
    TorchRec.
    """
    from oneemb.rows.import_rows import import_rows

    if format is not None:
        from oneemb.rows.foreign import import_foreign

        if len(source) > 1:
            raise click.UsageError("with --format there is one SOURCE")
        with progress_bar(as_json, "importing", "rows") as move:
            report = import_foreign(
                [path, *shard], source[0], format, name=foreign_name, ids=ids, state=state, optimizer=optimizer,
                step=step, embedding_dim=embedding_dim, key_type=key_type or "int64", snapshot=name, table=table,
                with_state=with_state, allow_nonfinite=allow_nonfinite, dtype=dtype,
                physical_block_size=int(block_size), batch_size=batch_size, progress=move,
            )  # fmt: skip
        _tell_report(as_json, report, f"rows are in snapshot {name!r} of {path}")
        return
    _only_with_format(name=foreign_name, ids=ids, optimizer=optimizer, step=step, key_type=key_type)
    rows_of: Source = source[0] if len(source) == 1 else source
    if os.path.isdir(source[0]):
        rows_of = _table_reader(list(source), from_snapshot, embedding_dim, batch_size)
    elif from_snapshot is not None or embedding_dim is not None:
        raise click.UsageError("--from-snapshot and --embedding-dim are for folders of tables")
    with progress_bar(as_json, "importing", "rows") as move:
        rows = import_rows(
            [path, *shard], rows_of, snapshot=name, keys=None if row_numbers else keys,
            values=values[0] if len(values) == 1 else values, tables=tables, table=table, state=state or "state",
            with_state=with_state, allow_nonfinite=allow_nonfinite, dtype=dtype,
            physical_block_size=int(block_size), batch_size=batch_size, progress=move,
        )  # fmt: skip
    tell(
        as_json,
        {"source": list(source), "path": path, "snapshot": name, "rows": rows},
        f"{rows:,} rows are in snapshot {name!r} of {path}",
    )


def _only_with_format(**options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise click.UsageError(f"--{option.replace('_', '-')} is only for --format")


def _tell_report(as_json: bool, report: "ForeignReport", where: str) -> None:
    tell(as_json, {**asdict(report), "not_carried": list(report.not_carried)}, f"{where}\n{report}")


def _table_reader(
    paths: list[str], name: str | None, embedding_dim: int | None, batch_size: int
) -> "PersistentTableReader":
    from oneemb.foreign.oneflow_table import is_oneflow_table, read_oneflow_geometry
    from oneemb.rows.reader import make_persistent_table_reader

    name = name or only_snapshot(paths)
    if not is_oneflow_table(paths[0]):
        return make_persistent_table_reader(paths, name, "int64", "float32", batch_size=batch_size)
    key_type = f"int{8 * read_oneflow_geometry(paths[0]).key_bytes}"
    return make_persistent_table_reader(
        paths, name, key_type, "float32", batch_size=batch_size, embedding_dim=embedding_dim, format="oneflow"
    )
