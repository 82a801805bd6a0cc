"""Makes files of rows that are only read from snapshots, of ranks and deltas too, beside the job that writes them.

Invariant: several processes that need one file make it once: one has the lock, the others wait and find the file.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.rows.values import weights_of
from oneemb.storage.bottom import EXPORTED
from oneemb.storage.errors import SnapshotNotFoundError
from oneemb.storage.fs import LocalFileSystem, storage_error
from oneemb.storage.owned_rows import OwnedRows
from oneemb.storage.row_format import RowFormat
from oneemb.storage.serving.served_file import ServedFile, ServedInfo, row_bytes_of
from oneemb.storage.serving.served_writer import write_served_file
from oneemb.storage.snapshot_parts import PartedSnapshot, look_at
from oneemb.storage.snapshot_rows import SnapshotRows

__all__ = ["DTYPES", "Progress", "find_snapshot", "make_file", "open_made"]

DTYPES = ("float32", "float16", "int8", "int4")
"""Of files; "float32" = as trained."""

Progress = Callable[[int, int | None], None]
_KEPT = 2  # files of one kind that stay in a folder


def find_snapshot(paths: Sequence[str], name: str | None) -> PartedSnapshot:
    """The snapshot of this name; without a name the newest.

    Raises:
        StorageError: there is none.
    """
    found = look_at(paths)
    if name is None:
        names = [one.name for one in found.snapshots() if not one.name.startswith(EXPORTED)]
        if not names:
            raise SnapshotNotFoundError(f"no snapshot in {', '.join(paths)}; save one first")
        name = names[-1]
    return found.get(name)


def make_file(
    path: str, snapshot: PartedSnapshot, dtype: str, tables: Sequence[int] | None, *, threads: Threads,
    progress: Progress | None = None,
) -> ServedInfo:  # fmt: skip
    """Write the file of a snapshot.

    Args:
        dtype: one of `DTYPES`.
        tables: those whose rows it has, in the order of their columns; None = all.

    Raises:
        ValueError: a table is not one of the snapshot's.
        StorageError: the snapshot was removed meanwhile or is damaged, or a row does not fit in the dtype.
    """
    meta, name = snapshot.info.meta, snapshot.name
    format = SnapshotRows.of_meta(meta, name).format
    embedding = meta.get("embedding") or {}
    weights = format.dtype if dtype == "float32" or dtype == format.dtype else dtype
    with closing(OwnedRows(snapshot, 0, 1)) as rows:
        count = len(embedding.get("tables", ())) or 1 + int(rows.keys(_all)[0].max(initial=0))
        served = tuple(range(count)) if tables is None else tuple(tables)
        if not served or len(set(served)) < len(served) or not set(served) <= set(range(count)):
            raise ValueError(f"tables must be some of 0 to {count - 1}, each once, got {list(served)}")
        info = ServedInfo(
            name, snapshot.info.identity, snapshot.sequence, format.dtype, weights, format.dim,
            row_bytes_of(weights, format.dim), 0, 0, count, served, (), embedding, 0.0, 0.0, "",
        )  # fmt: skip
        return write_served_file(
            path, info, _weights(rows, format, weights, np.isin(np.arange(count), served)), threads=threads,
            progress=progress, total=sum(part.info.rows for part in snapshot.parts),
        )  # fmt: skip


def _all(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    return np.ones(len(id_N), np.bool_)


def _weights(
    rows: OwnedRows, format: RowFormat, weights: str, served_T: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for table_N, id_N, row_NW in rows.scan():
        kept = served_T[table_N]
        table_N, id_N, row_NW = table_N[kept], id_N[kept], row_NW[kept]
        if weights == format.dtype:
            yield table_N, id_N, format.weights(row_NW)[:, : format.dim]
        else:
            yield table_N, id_N, weights_of(format, row_NW).astype(np.float32)


def open_made(
    folder: str, snapshot: PartedSnapshot, dtype: str, tables: Sequence[int] | None, *, threads: Threads
) -> ServedFile:
    """The open file of a snapshot in a folder, made if it is not there; older ones of its kind than the last two go.

    Raises:
        As `make_file`, and CorruptTableError: the file is there and damaged.
    """
    kind = dtype + ("" if tables is None else "-tables-" + "-".join(map(str, tables)))
    name = f"{snapshot.sequence:012d}-{snapshot.info.identity}-{kind}.serving"
    path = os.path.join(folder, name)
    try:
        return ServedFile(path, threads=threads)
    except FileNotFoundError:
        pass
    try:
        LocalFileSystem().make_directories(folder)
        lock = os.open(os.path.join(folder, "LOCK"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error(error, "make files in", folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The system frees it when the process ends, however it ends.
        if not os.path.exists(path):
            for left in os.listdir(folder):
                if left.endswith(".tmp"):  # of a process that was killed: who has the lock is the only writer here
                    os.remove(os.path.join(folder, left))
            make_file(path, snapshot, dtype, tables, threads=threads)
            its = sorted(one for one in os.listdir(folder) if one.endswith(f"-{kind}.serving"))
            for old in its[:-_KEPT]:
                if old != name:
                    os.remove(os.path.join(folder, old))
        return ServedFile(path, threads=threads)
    finally:
        os.close(lock)
