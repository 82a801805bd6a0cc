"""Sink of rows in a folder of Parquet or safetensors files: files for each version, and a manifest.

    MANIFEST.json                                  versions whose files, one applied after the other, give all rows
    <sequence>-<identity>.parquet                  rows of a version: keys, values, tables, and state if published
    <sequence>-<identity>.gone.parquet             keys that have no row any more: keys, tables

    {"format": 1, "versions": [{"version": {...}, "whole": true, "rows": file, "gone": file or null, "num_rows": n,
     "num_gone": n, "rows_sum": CRC-32 of the file, "gone_sum": the same, or null}, ...],
     "choice": {tables, state and format of the rows}, "former": [files of the versions before the first one],
     "crc32": CRC-32 of the object without this field, as Python's `json.dumps` writes it}

Invariants:
- the manifest is replaced, atomically, after the files that it names are durable;
- files that a manifest names do not change;
- files of a manifest are removed two whole versions later, so a reader of a manifest can read its files.
"""

import re
from contextlib import suppress
from functools import partial
from typing import IO, Any, Literal

import numpy as np

from oneemb.kernels.extras import need
from oneemb.rows.files import RowFileWriter, RowsOfFile
from oneemb.rows.files_parquet import ParquetWriter
from oneemb.rows.files_safetensors import NewTensor, SafetensorsWriter, write_safetensors
from oneemb.sinks.changes import Changes
from oneemb.sinks.folder_lock import FolderLock
from oneemb.sinks.version import TableVersion, choice_of, read_json, sum_of, unused_stem, write_json
from oneemb.storage.errors import CorruptTableError, FormatVersionError
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing
from oneemb.storage.new_files import new_files
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

_FORMAT = 1
_OURS = re.compile(r"\d{12,}-[0-9a-f]{32}(-all)?(-\d+)?(\.gone)?\.(parquet|safetensors)(\.tmp)?")


class FileSink:
    """Folder of Parquet or safetensors files. Needs `pip install 'oneemb[parquet]'` or `'oneemb[safetensors]'`.

    `MANIFEST.json` lists the versions. The first one has all rows; to have the rows of the last one, a reader takes
    the files of each in order: it removes the keys in `gone`, then puts the rows. `oneemb.import_rows` reads the files
    of rows.

    Args:
        folder: folder for the files; one publisher at a time writes to it.
        format: "parquet" or "safetensors".
        tables: numbers of the tables to publish; None = all.
        with_state: if True, publish the optimizer state too.
        merge_after: number of deltas after which all rows are written anew, so that a reader reads no more of them.
        merge_share: share of the rows of the first version; all rows are also written anew once deltas have more rows
            than that.
        max_rows: largest number of rows, of these tables together; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.

    Raises:
        ValueError, ImportError: the format is unknown, or its package is not installed.
    """

    def __init__(
        self, folder: AnyPath, format: Literal["parquet", "safetensors"] = "parquet", *,
        tables: "list[int] | tuple[int, ...] | None" = None, with_state: bool = False, merge_after: int = 64,
        merge_share: float = 1.0, max_rows: int | None = None,
    ):  # fmt: skip
        if format not in ("parquet", "safetensors"):
            raise ValueError(f"format must be 'parquet' or 'safetensors', got {format!r}")
        need("pyarrow.parquet" if format == "parquet" else "safetensors", f"a folder of {format} files", format)
        self.name = self._folder = absolute_path(folder)
        self._fs, self._format = LocalFileSystem(), format
        self._choice = choice_of(tables, with_state, max_rows) | {"format": format}
        self._tables, self._with_state = self._choice["tables"], with_state
        self.max_rows = max_rows
        self._merge_after, self._merge_share = merge_after, merge_share
        self._lock = FolderLock(self._fs, self._folder)

    @property
    def wants_whole(self) -> bool:
        versions = self._manifest()["versions"]
        if not versions:
            return False
        first, *deltas = versions
        changed = sum(one["num_rows"] + one["num_gone"] for one in deltas)
        return len(deltas) >= self._merge_after or changed > self._merge_share * max(first["num_rows"], 1)

    def version(self) -> TableVersion | None:
        manifest = self._manifest()
        versions = manifest["versions"]
        if not versions or manifest.get("choice", self._choice) != self._choice:
            return None  # Files of another choice lack rows.
        return TableVersion.of_fields(versions[-1]["version"], self._path)

    def apply(self, changes: Changes) -> None:
        self._lock.take()
        manifest = self._manifest()
        stem = f"{changes.version.sequence:012d}-{changes.version.identity}{'-all' * changes.is_whole}"
        stem = unused_stem(stem, {*_files_of(manifest["versions"]), *manifest["former"]})
        rows, gone = f"{stem}.{self._format}", f"{stem}.gone.{self._format}"
        with doing("write files in", self._folder):
            num_rows = self._write_rows(changes, rows)
            table_N, id_N = changes.gone(tables=self._tables)
            if len(id_N):
                self._write_gone(table_N, id_N, gone)
            self._fs.sync_directory(self._folder)
            rows_sum, gone_sum = self._sum_of(rows), self._sum_of(gone) if len(id_N) else None
        entry = {
            "version": changes.version.to_fields(), "whole": changes.is_whole, "rows": rows,
            "gone": gone if len(id_N) else None, "num_rows": num_rows, "num_gone": len(id_N),
            "rows_sum": rows_sum, "gone_sum": gone_sum,
        }  # fmt: skip
        versions, former = [*manifest["versions"], entry], manifest["former"]
        if changes.is_whole:
            versions, former = [entry], _files_of(manifest["versions"])
        write_json(
            self._fs, self._path, {"format": _FORMAT, "choice": self._choice, "versions": versions, "former": former}
        )
        self._remove_others({*_files_of(versions), *former})

    def close(self) -> None:
        self._lock.release()

    @property
    def _path(self) -> str:
        return f"{self._folder}/MANIFEST.json"

    def _manifest(self) -> dict[str, Any]:
        found = read_json(self._fs, self._path)
        if found is None:
            return {"format": _FORMAT, "versions": [], "former": []}
        if isinstance(found, dict) and found.get("format", _FORMAT) != _FORMAT:
            raise FormatVersionError(
                f"{self._path} has format {found['format']!r}, and this release reads {_FORMAT}: a later release wrote"
                " it; publish with that one"
            )
        try:
            assert isinstance(found, dict)
            for one in found["versions"]:
                assert isinstance(one["num_rows"], int) and isinstance(one["num_gone"], int)
                assert isinstance(one["version"], dict)
            assert all(isinstance(file, str) for file in [*found["former"], *_files_of(found["versions"])])
            return found
        except (AssertionError, KeyError, TypeError) as error:
            raise CorruptTableError(
                f"{self._path} must be a manifest of a publisher, it is {repr(found)[:100]}; restore it from a copy, or"
                " remove it, and all rows are written anew"
            ) from error

    def _write_rows(self, changes: Changes, file: str) -> int:
        rows = changes.with_state() if self._with_state else changes.without_state()
        writer, written = self._writer(f"{self._folder}/{file}", rows), 0
        try:
            # An empty batch first, so that a file without rows has columns, too.
            writer.write(_empty(rows, self._with_state))
            for batch in changes.batches(tables=self._tables, with_state=self._with_state):
                writer.write(batch)
                written += len(batch.id_N)
            writer.finish()
        finally:
            writer.abandon()
        return written

    def _writer(self, path: str, rows: SnapshotRows) -> RowFileWriter:
        return ParquetWriter(path, rows) if self._format == "parquet" else SafetensorsWriter(path, rows)

    def _write_gone(self, table_N: np.ndarray, id_N: np.ndarray, file: str) -> None:
        columns = {"keys": id_N, "tables": table_N}
        with new_files(f"{self._folder}/{file}") as (out,):
            if self._format == "parquet":
                arrow, parquet = (need(one, "a folder of parquet files", "parquet") for one in _ARROW)
                parquet.write_table(arrow.table(columns), out)
                return
            tensors = {
                name: NewTensor(column.dtype.name, column.shape, partial(_copy, column))
                for name, column in columns.items()
            }
            write_safetensors(out, tensors, {})

    def _sum_of(self, file: str) -> int:
        with open(f"{self._folder}/{file}", "rb") as written:
            return sum_of(written)

    def _remove_others(self, kept: set[str]) -> None:
        """Remove files of sinks that the manifest does not name, such as those of killed publishers."""
        for file in self._fs.names(self._folder):
            if _OURS.fullmatch(file) and file not in kept:
                with suppress(OSError):
                    self._fs.remove(f"{self._folder}/{file}")


_ARROW = ("pyarrow", "pyarrow.parquet")


def _copy(column: np.ndarray, out: IO[bytes]) -> None:
    out.write(column.tobytes())


def _empty(rows: SnapshotRows, with_state: bool) -> RowsOfFile:
    format = rows.format
    dtype = np.float16 if format.dtype == "float16" else np.float32
    state_NZ = np.empty((0, format.state_width), np.float32) if with_state else None
    return RowsOfFile(np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, format.dim), dtype), state_NZ)


def _files_of(versions: list[dict[str, Any]]) -> list[str]:
    return [file for one in versions for file in (one["rows"], one["gone"]) if file is not None]
