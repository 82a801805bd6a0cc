"""The persistent table: a log of chunk files, an index in memory, and named snapshots that survive a loss of power.

A put appends rows; older versions of these rows become garbage, and compaction frees chunks that are mostly garbage.
Only snapshots outlive the object: a table is empty when it is opened, and `load_snapshot` loads rows.

Invariants, with a crash at any moment:
- a snapshot exists completely or not at all, and no later call changes it;
- every byte that is read back was compared with its checksum;
- a call that raises leaves the rows as they were, in memory and in every snapshot; only a `put` may have stored some of
  its rows, each completely.

The steps that make a snapshot durable (2 to 7 are in `SnapshotStore` and `SnapshotFiles`):
    1. write the rows that are in memory        4. write the manifest under a temporary name    7. sync its directory
    2. sync the chunks that the snapshot needs  5. sync it
    3. sync the directory of the chunks         6. rename it
"""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, ForkedProcessError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, doing
from oneemb.storage.hash_index import check_tables
from oneemb.storage.locking.store_lock import StoreLock
from oneemb.storage.row_store import Places
from oneemb.storage.table.aio_reader import open_reader
from oneemb.storage.table.block_reader import RowReader
from oneemb.storage.table.chunk_scan import live_rows, read_keys, scan_rows
from oneemb.storage.table.cold_file import index_maker
from oneemb.storage.table.compaction import CompactionResult
from oneemb.storage.table.contents import Contents
from oneemb.storage.table.geometry import Geometry, make_geometry
from oneemb.storage.table.recovery import Recovery
from oneemb.storage.table.snapshot_load import read_chain
from oneemb.storage.table.snapshot_manifest import ArrayPart, SnapshotInfo
from oneemb.storage.table.snapshot_store import SnapshotStore
from oneemb.storage.table.writer_lock import IN_USE, Holder, WriterLock

_CHUNK_BYTES = 256 << 20
# Chunk files that are synced at once, in a table with background threads.
_SYNC_THREADS = 8


class PersistentTable:
    """A `RowStore` on files. Make one with `open`."""

    def __init__(
        self, fs: FileSystem, path: str, geometry: Geometry, threads: Threads, max_space_amplification: float, io: str,
        background: bool, expected_rows: int, index_bytes: int | None, mend: str, holder: Holder | None = None,
    ):  # fmt: skip
        self._fs, self._path, self._threads = fs, path, threads
        self._store_lock = StoreLock(f"the table at {path}", mend, rank=1)
        self._put_at_save, self._closed = 0, False
        self._places: Places = {}
        self._count = dict.fromkeys(("rows_got", "rows_missing", "rows_put"), 0)
        self.row_width = geometry.row_width
        self.recovery = Recovery()
        with doing("make the directory of the table at", path):
            fs.make_directories(path)
        self.what = f"the table at {path}"
        self._lock = WriterLock(fs, f"{path}/LOCK", holder or self, takes_over=holder is not None)
        try:
            self.recovery.stale_lock = self._lock.left_by
            with doing("make the directories of the table at", path):
                # Each syncs the directory above, LOCK's name with it.
                for directory in (f"{path}/chunks", f"{path}/snapshots"):
                    fs.make_directories(directory)
            blocks = open_reader(io, fs, f"{path}/chunks", geometry.physical_block_size, threads)
            self._store = SnapshotStore(fs, path, blocks.direct, self.recovery, self._lock)
            self._files = self._store.chunk_files
            self._files.sync_threads = _SYNC_THREADS if background else 1
            self._rows = RowReader(blocks, self._files, self._store_lock)
            self._io, self._direct = blocks.name, blocks.direct
            self._contents = Contents(
                fs, self._store, geometry, threads, self._store_lock, index_maker(fs, path, io, threads, index_bytes),
                max_space_amplification, background, expected_rows,
            )  # fmt: skip
        except BaseException:
            self._lock.release()
            raise
        self._store_lock.before_fork = weakref.WeakMethod(self._get_ready_for_fork)

    @classmethod
    def open(
        cls,
        path: AnyPath,
        *,
        row_width: int,
        physical_block_size: int = 4096,
        threads: Threads,
        max_space_amplification: float = 2.0,
        chunk_bytes: int = _CHUNK_BYTES,
        expected_rows: int = 0,
        index_memory_bytes: int | None = None,
        io: str = "auto",
        background: bool = True,
        fs: FileSystem | None = None,
        mend: str = "close it, open it again and load one",
        holder: Holder | None = None,
    ) -> "PersistentTable":
        """Open the table at a path. It is empty: `load_snapshot` loads rows that were saved.

        Args:
            path: a folder; it is made if it does not exist.
            row_width: number of 32-bit words of a row.
            physical_block_size: number of bytes that the device reads at once, 512 or 4096. A load changes it to the
                snapshot's.
            max_space_amplification: without snapshots, disk use is at most this factor times the bytes of live rows,
                plus two chunks; see `compaction.py` for snapshots. More disk means fewer writes.
            chunk_bytes: approximate most bytes of rows in a chunk file. A small table has smaller chunks.
            expected_rows: number of rows for which the index has room at once; a table may hold more.
            index_memory_bytes: most bytes of memory for the index, see `ColdIndex`; None = 12 to 16 bytes a key.
            io: "aio" = Linux AIO, past the system's page cache; "pread" = reads by threads, through the cache; "auto" =
                "aio" if it works at this path, else "pread".
            background: if True, write, sync and compact in background threads; if False, in the calls themselves.
            mend: advice in the error of a broken table: what to do.
            holder: object that owns the table. If another object of this process holds the path, it is asked to close
                for this holder. None = the table is the holder, and no other object is asked.

        Raises:
            LockedError: another table object writes to this path.
            StorageError: the path cannot be made, read or written.
            ValueError: an argument is out of its range.
        """
        if max_space_amplification <= 1:
            raise ValueError(f"max_space_amplification must be above 1, got {max_space_amplification}")
        geometry = make_geometry(row_width, physical_block_size, chunk_bytes)
        return cls(
            fs or LocalFileSystem(), absolute_path(path), geometry, threads, max_space_amplification, io, background,
            expected_rows, index_memory_bytes, mend, holder,
        )  # fmt: skip

    @property
    def broken(self) -> bool:
        """Whether a call has ended half way, so that the table cannot be used any more."""
        return self._store_lock.broken

    def __len__(self) -> int:
        with self._store_lock:
            self._begin(changes=False)
            return len(self._contents.live.index)

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        check_tables(table_U)
        with self._store_lock:
            self._rows.wait()
            self._begin(changes=False)
            place_U = self._contents.live.index.find(table_U, id_U)
            missing_U = place_U < 0
            memory_U = self._contents.writer.in_memory(place_U)
            if memory_U.any():
                u = np.flatnonzero(memory_U)
                self._contents.writer.read(place_U[u], out_XW, u if to_U is None else to_U[u])
            u = np.flatnonzero(~(missing_U | memory_U))
            if len(u):
                try:
                    to_N = u if to_U is None else to_U[u]
                    self._rows.read(self._contents.live, table_U[u], id_U[u], place_U[u], to_N, out_XW)
                except CorruptTableError as error:
                    if self._store_lock.forked and isinstance(error.__cause__, FileNotFoundError):
                        raise ForkedProcessError(
                            f"the process that made the table at {self._path} has moved rows to other files since this"
                            f" child of it was forked: {error}; fork anew, or read a snapshot with SnapshotReader"
                        ) from error
                    raise
                self._store_lock.check(changes=False)  # Another thread may have broken the table meanwhile.
            self._count["rows_got"] += len(id_U)
            self._count["rows_missing"] += int(missing_U.sum())
            return missing_U

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase rows; see `RowStore.erase`. Existing snapshots keep the rows; later ones do not have them."""
        with self._store_lock:
            self._begin()
            return self._contents.live.erase(table_U, id_U)

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        check_tables(table_U)
        with self._store_lock:
            self._begin(changes=False)
            return self._contents.live.index.find(table_U, id_U) >= 0

    def write_order(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Order in which to put rows; see `KeepsNeighbours`. New keys are ordered by their ids."""
        with self._store_lock:
            self._begin(changes=False)
            place_N = self._contents.live.index.find(table_N, id_N)
        order = np.argsort(place_N)
        new = np.searchsorted(place_N, 0, sorter=order)
        order[:new] = order[:new][np.lexsort((id_N[order[:new]], table_N[order[:new]]))]
        return order

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        if row_UW.shape != (len(id_U), self.row_width) or row_UW.dtype != np.float32:
            raise ValueError(
                f"rows must be float32 of shape [{len(id_U)}, {self.row_width}], got {row_UW.dtype} {row_UW.shape}"
            )
        check_tables(table_U)
        row_UW = np.ascontiguousarray(row_UW)
        with self._store_lock:
            self._begin(put_pending=False)
            piece = self._contents.compactor.piece_rows
            for begin in range(0, len(id_U), piece):
                n = slice(begin, begin + piece)
                table_N, id_N = table_U[n], id_U[n]
                self._contents.compactor.make_room(len(id_N))
                self._begin(put_pending=False)  # The table may have been closed while rows were moved.
                # Memory for the index comes first: after the append nothing may fail.
                later = self._contents.live.reserve(table_N, id_N)
                place_N = self._contents.writer.append(table_N, id_N, row_UW[n])
                if later:
                    self._contents.live.note(table_N, id_N, place_N)
                else:
                    self._contents.live.put(table_N, id_N, place_N)
            self._count["rows_put"] += len(id_U)

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield every row once, as the rows were at the first `next`: later puts do not change what is yielded."""
        with self._store_lock:
            self._begin(changes=False)
            geometry = self._contents.live.geometry
            place_N, table_N, id_N, row_NW = self._contents.writer.copy()
            alive = np.flatnonzero(self._contents.live.index.find(table_N, id_N) == place_N)
            held = self._contents.hold_rows()
        try:
            for begin in range(0, len(alive), batch):
                n = alive[begin : begin + batch]
                yield table_N[n], id_N[n], row_NW[n]
            for part, chunk in zip(held.parts, held.chunks, strict=True):
                keys = read_keys(self._fs, chunk.keys_path, geometry, part)
                rows = live_rows(part.bit_N)
                yield from scan_rows(self._fs, chunk.rows_path, geometry, part.number, keys, rows, batch)
        finally:
            with self._store_lock:
                held.release(self._files)

    def clear(self) -> None:
        with self._store_lock:
            self._begin(put_pending=False)
            with self._contents.no_compaction():
                self._begin(put_pending=False)  # The table may have been closed while a compaction ended.
                self._contents.clear()
            self._contents.compactor.finish_removals()

    def flush(self) -> None:
        """Write the rows that are in memory to their chunk. They are durable when a snapshot has been saved."""
        with self._store_lock:
            self._begin(put_pending=False)
            self._contents.writer.write_out()

    def save_snapshot(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, identity: str | None = None,
        sequence: int = 0, without: tuple[np.ndarray, np.ndarray] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None, since: Places | None = None,
    ) -> SnapshotInfo:  # fmt: skip
        """Save a snapshot of all rows as they are now. It is atomic, and durable when the call returns. Returns its
        info.

        First the call moves rows out of chunks with garbage, so that the snapshot does not hold the garbage: no rows if
        few were overwritten, half of the rows or more if most were.

        Args:
            meta: any dict that JSON can hold; `load_snapshot` returns it.
            overwrite: if True, replace a snapshot of the same name, atomically.
            identity: identity for the snapshot, 32 hexadecimal digits: that of the snapshot of which this is a part or
                a copy. None = a new one.
            sequence: least sequence number that the snapshot gets; the newest snapshot has the greatest.
            without: keys, (table_U, id_U), whose rows stay in the table but are left out of the snapshot.
            arrays: {name: array} to store beside the rows: integers, float32 or bytes.
            since: an earlier value of `places`: the snapshot holds only rows that were written since then, and no row
                is moved first. A row that compaction has moved since then counts as written.

        Raises:
            SnapshotExistsError: there is a snapshot of that name, and `overwrite` is False.
            StorageError: the snapshot could not be saved; an older one of that name is unchanged. The first save that
                meets a damaged chunk may raise CorruptTableError; later saves do not move the rows of this chunk.
        """
        with self._store_lock:
            self._begin()
            self._store.may_save(name, overwrite)
            self._contents.leave_suspects()
            if since is None:
                self._contents.compactor.clean_for_save(name)
            self._begin()  # The table may have been closed while rows were moved.
            self._store.may_save(name, overwrite)
            self._contents.writer.write_out()  # Step 1 of a save (see FORMAT.md).
            held = self._contents.hold_rows(without)
            # Copies: the save drops the bits of the parts.
            places = {part.number: replace(part) for part in held.parts}
            if since is not None:
                held.leave_out(since, self._files)
            try:
                record = self._store.describe(name, held, meta, time.time(), identity, sequence)
                for array_name, data in (arrays or {}).items():
                    record.arrays[array_name] = ArrayPart(data.dtype.str, data.shape, data=data)
            except BaseException:
                held.release(self._files)
                raise
            self._store.save(record, held)
            self._places, self._put_at_save = places, self._count["rows_put"]
            self._contents.compactor.finish_removals()
        return record.info

    @property
    def places(self) -> Places:
        """Places of all rows at the last save or load of a snapshot, a bit for each row: for `save_snapshot` and
        `gone_since`. For a delta, rows of its chain are included. Valid while the table is open and the snapshots of
        the chain exist."""
        return self._places

    def gone_since(self, then: Places) -> tuple[np.ndarray, np.ndarray]:
        """Keys, (table_N, id_N), that had a row when `then` was taken (an earlier value of `places`) and have no row
        now. StorageError if a file with keys of that time is missing or damaged."""
        with self._store_lock:
            self._begin()
            return self._contents.gone_since(then)

    def load_snapshot(self, name: str, deltas: Sequence[str] = ()) -> dict[str, Any]:
        """Replace the table's rows by those of the whole snapshot `name`, then apply `deltas` in order. Returns the
        `meta` of the last snapshot.

        Memory holds one index at a time: the index of the table's rows is freed before that of the snapshot is built.
        After an error the former index is built again, so the rows are unchanged; this takes as long as a load. If the
        disk fails meanwhile, the table is broken.

        Raises:
            SnapshotNotFoundError: a snapshot is missing.
            RowWidthError: the snapshot has rows of another width.
            CorruptTableError: files of a snapshot are damaged.
        """
        with self._store_lock:
            self._begin(put_pending=False)
            with self._contents.no_compaction():
                self._begin()  # While a compaction ended, other threads may have closed the table or saved snapshots.
                records = read_chain(self._store.files, [name, *deltas], self.row_width)
                self._reader_for(records[0].geometry)
                self._contents.load(records)
            self._places = self._contents.parts()
            self._contents.compactor.finish_removals()
            return records[-1].info.meta

    def delete_snapshot(self, name: str) -> None:
        """Remove a snapshot, and the chunks that only this snapshot needs. The removal is durable when the call
        returns. SnapshotNotFoundError if there is no snapshot of that name; StorageError if the snapshot could not be
        removed, or if the removal may not be durable."""
        with self._store_lock:
            self._begin(put_pending=False)
            self._store.delete(name)
            self._contents.compactor.finish_removals()

    def snapshots(self) -> list[SnapshotInfo]:
        """The snapshots, oldest first."""
        with self._store_lock:
            self._begin(put_pending=False, changes=False)
            return self._store.infos()

    def compact(self) -> CompactionResult:
        """Move the live rows out of every chunk that has garbage and that no snapshot needs, and remove these chunks.
        The garbage in chunks of snapshots is kept small by each save and is removed with the snapshots. After a
        StorageError no row is lost."""
        with self._store_lock:
            self._begin()
            return self._contents.compactor.compact()

    def stats(self) -> dict[str, Any]:
        with self._store_lock:
            self._begin(changes=False)
            chunks = self._files.chunks.values()
            return {
                "rows": len(self),
                "physical_block_size": self._contents.live.geometry.physical_block_size,
                "chunk_bytes": self._contents.compactor.chunk_bytes,
                "chunks": len(chunks),
                "snapshots": len(self._store.infos()),
                "disk_bytes": sum(chunk.nbytes for chunk in chunks),
                "live_bytes": self._contents.compactor.live_bytes(),
                "loose_bytes": self._contents.compactor.loose_bytes(),
                "snapshot_bytes": sum(chunk.nbytes for chunk in chunks if chunk.snapshots),
                **self._contents.index_stats(),
                "bytes_written": self._files.bytes_written,
                "bytes_removed": self._files.bytes_removed,
                "rows_moved": self._contents.rows_moved,
                **self._count,
                **self._rows.stats(),
            }

    def close(self) -> None:
        """Close the table and release the lock of its folder. Rows that no snapshot holds are lost, and their files are
        removed."""
        if self._store_lock.forked:
            return  # The path belongs to the process that opened it.
        with self._store_lock:
            self._rows.wait()
            if self._closed:
                return
            self._closed = True
            try:
                if self._store_lock.broken:
                    self._contents.abandon()
                    return
                self._contents.close()
                self._rows.close()
            finally:
                self._lock.release()

    def close_for(self, other: str) -> str:
        return IN_USE

    def force_close(self) -> int:
        lost = self._count["rows_put"] - self._put_at_save
        self.close()
        return lost

    def __enter__(self) -> "PersistentTable":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, *, put_pending: bool = True, changes: bool = True) -> None:
        """Check, at the start of every call and under the lock, that the table can be used. A call that uses the index
        first puts pending keys into it."""
        self._store_lock.check(changes=changes)
        if self._closed:
            raise StorageError(f"the table at {self._path} is closed; open it again")
        if self._contents.compactions is not None:
            self._contents.compactions.raise_error()
        if not self._store_lock.forked:  # Keys were put before the fork, and a child changes and removes no file.
            self._contents.mend_index(put_pending)

    def _get_ready_for_fork(self) -> None:
        if self._rows.reading:
            raise RuntimeError("a fork came in the middle of a read")  # A child gets no complete copy.
        if not self._closed:
            self._contents.get_ready_for_fork()

    def _reader_for(self, geometry: Geometry) -> None:
        """Raise StorageError if the table's block reader cannot read blocks of this geometry's size."""
        if geometry.physical_block_size < self._contents.live.geometry.physical_block_size and self._direct:
            blocks = open_reader(self._io, self._fs, self._files.directory, geometry.physical_block_size, self._threads)
            blocks.close()
