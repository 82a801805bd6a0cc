"""Sink that writes a file of read-only rows for `InferenceEmbedding`, with all rows for each version."""

import os
from collections.abc import Sequence

from oneemb.kernels.threads import Threads
from oneemb.serving.build import check_formats, make_file
from oneemb.sinks.changes import Changes
from oneemb.sinks.version import TableVersion, choice_of
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing
from oneemb.storage.serving.served_file import ServedFile
from oneemb.storage.snapshots.row_cap import RowCap


class ServedFileSink:
    """One file of read-only rows, which `oneemb.InferenceEmbedding` opens. It is replaced, atomically, by the file of
    the newest version; versions in between are left out.

    Args:
        path: the file.
        dtype: "float32" (the weights as trained), "float16", "int8" or "int4".
        tables: numbers of the tables to serve, in the order of the columns of ids; None = all.
        num_threads: threads that write.
        max_rows: largest number of rows, of these tables together; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.
    """

    wants_whole = True

    def __init__(
        self, path: AnyPath, dtype: str = "float32", *, tables: Sequence[int] | None = None, num_threads: int = 1,
        max_rows: int | None = None,
    ):  # fmt: skip
        self.name = self._path = absolute_path(path)
        choice_of(tables, False)
        self.max_rows, self._cap = max_rows, None if max_rows is None else RowCap(max_rows)
        self._dtype, self._tables, self._threads = check_formats(dtype, "zeros"), tables, Threads(num_threads)

    def version(self) -> TableVersion | None:
        if not os.path.exists(self._path):
            return None
        info = ServedFile(self._path, threads=self._threads).info
        tables = range(info.num_tables) if self._tables is None else self._tables
        weights = info.trained if self._dtype == "float32" else self._dtype
        if (info.tables, info.weights, info.max_rows) != (tuple(tables), weights, self.max_rows or 0):
            return None  # The file was made with another choice.
        return TableVersion(info.name, info.identity, info.sequence, info.embedding.get("name", ""))

    def apply(self, changes: Changes) -> None:
        folder = os.path.dirname(self._path)
        with doing("make the folder", folder):
            LocalFileSystem().make_directories(folder)

        def progress(done: int, total: int | None) -> None:
            changes.check_wanted()

        make_file(
            self._path, changes.snapshot, self._dtype, self._tables, threads=self._threads, progress=progress,
            cap=self._cap,
        )  # fmt: skip

    def close(self) -> None:
        """Do nothing: no file is open."""
