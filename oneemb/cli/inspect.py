"""The command `inspect`, which shows what a table contains."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from oneemb.cli.output import json_option, size_text, table_lines, tell
from oneemb.cli.quantize import inspect_file

if TYPE_CHECKING:
    from oneemb.storage.snapshots.snapshot_parts import FoundParts
    from oneemb.storage.table.snapshot_manifest import SnapshotInfo
    from oneemb.storage.table.table_info import TableInfo


@click.command()
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--histogram", "snapshot", metavar="SNAPSHOT",
    help="Show how norms, and where a policy notes uses, ages and scores of its rows are spread.",
)  # fmt: skip
@click.option("--disk", is_flag=True, help="Show the disk space of each snapshot, and what a deletion frees.")
@json_option
def inspect(path: str, snapshot: str | None, disk: bool, as_json: bool) -> None:
    """Show what the table at PATH, or the tables of ranks there, contain.

    Lists snapshots, the disk space that they take, and the job that writes there. Only reads, also while a job writes.
    """
    from oneemb.foreign.oneflow_table import is_oneflow_table
    from oneemb.storage.snapshots.snapshot_parts import look_at
    from oneemb.storage.table.table_info import table_info

    if disk and snapshot is not None:
        raise click.UsageError("give --disk or --histogram, not both")
    if os.path.isfile(path):
        inspect_file(path, as_json)
        return
    if snapshot is not None:
        _inspect_rows(path, snapshot, as_json)
        return
    if is_oneflow_table(path):
        _inspect_oneflow(path, as_json)
        return
    found = look_at([path])
    if disk:
        _inspect_disk(path, found, as_json)
        return
    if found.folders != [path]:
        _inspect_ranks(path, found, as_json)
        return
    info = table_info(path)
    snapshots = [_described(snapshot) for snapshot in info.snapshots]
    incomplete = found.broken()
    result = {
        "path": path,
        "format": "oneemb",
        "format_version": max((snapshot.format_version for snapshot in info.snapshots), default=None),
        "snapshots": snapshots,
        "incomplete": incomplete,
        **_fields_of(info),
    }
    version = f" {result['format_version']}" if snapshots else ""
    tell(
        as_json,
        result,
        f"{path}: a table of oneemb, format{version or ' not known yet'}; "
        + (f"held by {info.holder}" if info.holder else "nobody writes to it"),
        f"{size_text(info.disk_bytes)} on disk in {info.chunks} chunks: {size_text(info.live_bytes)} of rows in"
        f" snapshots, {size_text(info.garbage_bytes)} of garbage and lists; {size_text(info.unsaved_bytes)} in no"
        " snapshot",
        *_lines(snapshots),
        *_missing_lines(info.missing),
        *(f"damaged: {reason}" for reason in info.damaged.values()),
        *(f"incomplete: {reason}" for reason in incomplete.values()),
        *_lost_lines(info, ""),
    )


def _inspect_disk(path: str, found: "FoundParts", as_json: bool) -> None:
    """Show the disk space of the snapshots at a path, their parts in all folders together."""
    from oneemb.storage.table.table_info import SnapshotDisk, snapshot_disk, table_info

    whole = {(part.folder, part.info.name): part.whole.name for part in found.parts}
    disk: dict[str, SnapshotDisk] = {}
    total = unsaved = 0
    for folder in found.folders:
        info = table_info(folder)
        total, unsaved = total + info.disk_bytes, unsaved + info.unsaved_bytes
        for name, one in snapshot_disk(folder).items():
            snapshot = disk.setdefault(whole.get((folder, name), name), SnapshotDisk())
            snapshot.bytes += one.bytes
            snapshot.freed += one.freed
    damaged = found.damage()
    needed_by = {name: names for name in disk if (names := found.going_on_from(name))}
    rows = [
        (name, size_text(one.bytes), size_text(one.freed), ", ".join(needed_by.get(name, ())) or "-")
        for name, one in disk.items()
    ]
    tell(
        as_json,
        {
            "path": path, "disk_bytes": total, "unsaved_bytes": unsaved,
            "snapshots": {name: asdict(one) | {"deltas": needed_by.get(name, [])} for name, one in disk.items()},
            "damaged": damaged,
        },
        f"{path}: {size_text(total)} on disk, {size_text(unsaved)} in no snapshot",
        *table_lines(("snapshot", "needs", "a deletion frees", "deltas that need it"), rows, "no snapshots"),
        *(f"damaged: {reason}" for reason in damaged.values()),
    )  # fmt: skip


def _fields_of(info: "TableInfo") -> dict[str, object]:
    """Fields of the JSON result that each table has."""
    return {
        "holder": info.holder, "chunks": info.chunks, "disk_bytes": info.disk_bytes, "live_bytes": info.live_bytes,
        "garbage_bytes": info.garbage_bytes, "unsaved_bytes": info.unsaved_bytes, "missing": info.missing,
        "damaged": info.damaged, "lost": info.lost, "lost_more": info.lost_more, "kept": info.kept,
    }  # fmt: skip


def _lost_lines(info: "TableInfo", where: str) -> list[str]:
    from oneemb.storage.table.recovery import lost_text

    if not (info.lost or info.lost_more or info.kept):
        return []
    return [f"lost: {where}{lost_text(info.lost, info.lost_more, len(info.kept))}"]


def _inspect_rows(path: str, snapshot: str, as_json: bool) -> None:
    from oneemb.cli.histogram import histogram_lines, histograms
    from oneemb.storage.snapshots.owned_rows import owned_rows
    from oneemb.storage.snapshots.snapshot_parts import look_at
    from oneemb.storage.table.snapshot_reader import SnapshotReader

    whole = look_at([path]).get(snapshot)
    with ExitStack() as stack:
        if whole.before:
            rows = stack.enter_context(owned_rows(whole, 0, 1))
            found = histograms([(whole.info, rows)])
        else:
            parts = [(part.info, SnapshotReader.open(part.folder, part.info.name)) for part in whole.parts]
            for _, reader in parts:
                stack.enter_context(reader)
            found = histograms(parts)
    result = {"path": path, "snapshot": snapshot, "tables": found}
    tell(as_json, result, f"{path}, snapshot {snapshot!r}:", *(histogram_lines(found) or ["no rows"]))


def _inspect_ranks(path: str, found: "FoundParts", as_json: bool) -> None:
    """Show the tables of all ranks together."""
    from oneemb.storage.snapshots.snapshot_parts import incomplete_text, leftover_text
    from oneemb.storage.table.table_info import table_info

    infos = {folder: table_info(folder) for folder in found.folders}
    snapshots = [
        _described(whole.info, sum(part.info.rows for part in whole.parts))
        | {"shard": None, "shards": len(whole.parts), "folders": [part.folder for part in whole.parts]}
        for whole in found.snapshots()
    ]
    incomplete = {parts[0].whole.name: incomplete_text(parts) for parts in found.incomplete()} | found.broken()
    left_over = [leftover_text(part) for part in found.leftovers()]
    result = {
        "path": path,
        "format": "oneemb",
        "snapshots": snapshots,
        "incomplete": incomplete,
        "left_over": left_over,
        "folders": {folder: _fields_of(info) for folder, info in infos.items()},
    }
    tables = [
        (folder, size_text(info.disk_bytes), size_text(info.live_bytes), info.holder or "nobody")
        for folder, info in infos.items()
    ]
    tell(
        as_json,
        result,
        f"{path}: {len(infos)} tables of oneemb",
        *table_lines(("folder", "on disk", "rows in snapshots", "held by"), tables, "no tables"),
        *_lines(snapshots),
        *(f"left over: {text}" for text in left_over),
        *(line for info in infos.values() for line in _missing_lines(info.missing)),
        *(f"incomplete: {reason}" for reason in incomplete.values()),
        *(f"damaged: {reason}" for info in infos.values() for reason in info.damaged.values()),
        *(line for folder, info in infos.items() for line in _lost_lines(info, f"{folder}: ")),
    )


def _missing_lines(missing: Mapping[str, int]) -> list[str]:
    return [
        f"missing: {path}: {size_text(size)} that snapshots need; `oneemb check` names the snapshots"
        for path, size in sorted(missing.items())
    ]


def _lines(snapshots: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a text table of snapshots."""
    columns: tuple[str, ...] = ("name", "rows", "weights", "state", "optimizer", "step", "bytes", "saved")
    several = any((saved["shards"] or 1) > 1 for saved in snapshots)
    deltas = any(saved["since"] for saved in snapshots)
    rows = [
        (
            saved["name"], f"{saved['rows']:,}", f"{saved['dim']} {saved['dtype']}" if saved["dim"] else "-",
            str(saved["state_width"]), saved["optimizer"] or "-", str(saved["step"]), size_text(saved["bytes"]),
            saved["created"], *([str(saved["shards"])] if several else []),
            *([_delta_text(saved)] if deltas else []),
        )
        for saved in snapshots
    ]  # fmt: skip
    columns += ("parts",) * several + ("a delta",) * deltas
    return table_lines(columns, rows, "no snapshots")


def _delta_text(saved: Mapping[str, Any]) -> str:
    """Parent and number of changed rows of a delta, as text; "-" for a whole snapshot."""
    if saved["since"] is None:
        return "-"
    return f"since {saved['since']!r}: {saved['changed_rows']:,} changed, {saved['inserted_rows']:,} of them new"


def _inspect_oneflow(path: str, as_json: bool) -> None:
    from oneemb.foreign.oneflow_reader import OneFlowReader
    from oneemb.foreign.oneflow_table import oneflow_snapshots, read_oneflow_geometry

    geometry = read_oneflow_geometry(path)
    snapshots = []
    damaged = {}
    for name in oneflow_snapshots(path):
        try:
            snapshots.append((name, len(OneFlowReader(path, name))))
        except RuntimeError as error:
            damaged[name] = str(error)
    result = {
        "path": path,
        "format": "oneflow",
        **asdict(geometry),
        "snapshots": [{"name": name, "rows": rows} for name, rows in snapshots],
        "damaged": damaged,
    }
    tell(
        as_json,
        result,
        f"{path}: a table of OneFlow, keys of {geometry.key_bytes} bytes, rows of {geometry.value_bytes // 4} float32,"
        f" blocks of {geometry.block_bytes} bytes",
        *table_lines(("name", "rows"), [(name, f"{rows:,}") for name, rows in snapshots], "no snapshots"),
        *(f"damaged: {reason}" for reason in damaged.values()),
    )


def _described(info: "SnapshotInfo", changed: int | None = None) -> dict[str, Any]:
    """JSON description of a snapshot. For a delta `rows` counts all rows after the delta is applied, and `changed` is
    the number of rows in all its parts (None = it has one part)."""
    from oneemb.storage.errors import StorageError
    from oneemb.storage.snapshots.snapshot_rows import SnapshotRows, shard_of
    from oneemb.storage.table.delta import Delta

    rows: SnapshotRows | None = None
    delta: Delta | None = None
    shard = shards = None
    try:
        rows = SnapshotRows.of_meta(info.meta, info.name)
        shard, shards = shard_of(info.meta, info.name)
        delta = Delta.of_meta(info.meta, info.name)
    except StorageError:
        pass  # Another program wrote the rows, or their description makes no sense.
    return {
        "name": info.name,
        "rows": delta.rows if delta and changed is None else info.rows,
        "dim": rows.format.dim if rows else None,
        "dtype": rows.format.dtype if rows else None,
        "state_width": rows.format.state_width if rows else None,
        "optimizer": rows.format.optimizer if rows else None,
        "step": rows.step if rows else None,
        "bytes": info.bytes,
        "created": datetime.fromtimestamp(info.created, UTC).isoformat(timespec="seconds"),
        "row_width": info.row_width,
        "physical_block_size": info.physical_block_size,
        "format_version": info.format_version,
        "shard": shard,
        "shards": shards,
        "since": delta.since if delta else None,
        "changed_rows": (info.rows if changed is None else changed) if delta else None,
        "inserted_rows": delta.inserted if delta else None,
    }
