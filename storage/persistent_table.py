"""Rows in files: a log of chunks, an index in memory, named snapshots that survive a loss of power.

A put appends; the row's older version becomes garbage, and compaction frees chunks that are mostly garbage. Only
snapshots outlive the object: opening a path starts empty, and `load_snapshot` resumes.

Invariants, with a crash at any moment:
- a snapshot exists completely or not at all, and no later call changes it;
- no byte is given out that was not compared with its checksum;
- a call that raises leaves the rows as they were, in memory and in every snapshot.

The steps that make a snapshot durable (4 to 7 are in `SnapshotFiles.write`):
    1. write the rows that are in memory        4. write the manifest under a temporary name    7. sync its directory
    2. sync the chunks that the snapshot needs  5. sync it
    3. sync the directory of the chunks         6. rename it
"""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.block_reader import DamagedBlock, PreadReader, plan_reads
from oneemb.storage.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles
from oneemb.storage.chunk_scan import block_damage, check_header, live_rows, missing_file, read_keys, scan_rows
from oneemb.storage.errors import (
    CorruptTableError,
    RowWidthError,
    SnapshotExistsError,
    StorageError,
)
from oneemb.storage.file_header import FORMAT_VERSION, HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.fs import FileSystem, LocalFileSystem, storage_error
from oneemb.storage.geometry import Geometry, make_geometry
from oneemb.storage.live_rows import LiveRows
from oneemb.storage.recovery import Recovery, needed_bytes, read_snapshots, remove_orphans
from oneemb.storage.row_writer import RowWriter
from oneemb.storage.snapshot_file import (
    ChunkPart,
    RenameUncertainError,
    SnapshotFiles,
    SnapshotInfo,
    SnapshotRecord,
)
from oneemb.storage.snapshot_reader import read_snapshot_info
from oneemb.storage.writer_lock import WriterLock

__all__ = ["PersistentTable", "read_snapshot_info"]

_CHUNK_BYTES = 256 << 20


class PersistentTable:
    """A `RowStore` on files. Make one with `open`."""

    def __init__(
        self, fs: FileSystem, path: str, geometry: Geometry, threads: Threads, max_space_amplification: float, io: str
    ):
        self._fs, self._path, self._threads = fs, path, threads
        self._max_space_amplification = max_space_amplification
        self._guard = threading.RLock()
        self.row_width = geometry.row_width
        self.recovery = Recovery()
        directory = f"{path}/chunks"
        self._snapshot_files = SnapshotFiles(fs, f"{path}/snapshots")
        try:
            for made in (path, directory, self._snapshot_files.directory):
                fs.make_directories(made)
        except OSError as error:
            raise storage_error(error, "make the directories of the table", path) from error
        self._lock = WriterLock(fs, f"{path}/LOCK")
        try:
            self.recovery.stale_lock = self._lock.left_by
            records = read_snapshots(self._snapshot_files, self.recovery)
            next_number = remove_orphans(fs, directory, self._snapshot_files, needed_bytes(records), self.recovery)
            self._reader = PreadReader(fs, threads)
            self._files = ChunkFiles(fs, directory, next_number, self._reader.direct)
            self._snapshots: dict[str, tuple[SnapshotRecord, list[ChunkFile]]] = {}
            for record in records:
                self._snapshots[record.info.name] = record, self._adopt(record)
            self._sequence = max((record.info.sequence for record in records), default=0) + 1
        except BaseException:
            self._lock.release()
            raise
        self._uncertain: list[list[ChunkFile]] = []
        self._live = LiveRows(geometry, self._files, threads)
        self._writer = RowWriter(self._live, self._files, threads)
        self._closed = False
        self._count = dict.fromkeys(("rows_got", "rows_missing", "rows_put", "read_requests", "bytes_read"), 0)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        row_width: int,
        physical_block_size: int = 4096,
        threads: Threads,
        max_space_amplification: float = 2.0,
        chunk_bytes: int = _CHUNK_BYTES,
        io: str = "auto",
        fs: FileSystem | None = None,
    ) -> "PersistentTable":
        """The table at a path, empty: `load_snapshot` brings back what was saved.

        Args:
            path: a directory; it is made where it is not there.
            row_width: 32-bit words of a row.
            physical_block_size: bytes that the device reads at once, 512 or 4096. A loaded snapshot brings its own.
            threads: runs lookups and copies.
            max_space_amplification: disk space for each byte of live rows, beside two chunks and what only snapshots
                need.
            chunk_bytes: bytes of rows in a chunk file, about.
            io: "auto", or a way of reading by name.
            fs: where files are; None = this machine's.

        Raises:
            LockedError: another table object writes to this path.
            StorageError: the path cannot be made, read or written.
        """
        if max_space_amplification <= 1:
            raise ValueError(f"max_space_amplification must be above 1, got {max_space_amplification}")
        geometry = make_geometry(row_width, physical_block_size, chunk_bytes)
        return cls(fs or LocalFileSystem(), os.fspath(path), geometry, threads, max_space_amplification, io)

    def __len__(self) -> int:
        return len(self._live.index)

    def get(self, table_U: np.ndarray, id_U: np.ndarray, out_UW: np.ndarray) -> np.ndarray:
        with self._guard:
            self._begin()
            place_U = self._live.index.find(table_U, id_U)
            missing_U = place_U < 0
            memory_U = self._writer.in_memory(place_U)
            if memory_U.any():
                to_N = np.flatnonzero(memory_U)
                self._writer.read(place_U[to_N], out_UW, to_N)
            to_N = np.flatnonzero(~(missing_U | memory_U))
            if len(to_N):
                self._read(table_U, id_U, place_U[to_N], to_N, out_UW)
            self._count["rows_got"] += len(id_U)
            self._count["rows_missing"] += int(missing_U.sum())
            return missing_U

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        with self._guard:
            self._begin()
            return self._live.index.find(table_U, id_U) >= 0

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        if row_UW.shape != (len(id_U), self.row_width) or row_UW.dtype != np.float32:
            raise ValueError(
                f"rows must be float32 of shape [{len(id_U)}, {self.row_width}], got {row_UW.dtype} {row_UW.shape}"
            )
        with self._guard:
            self._begin()
            if len(id_U) == 0:
                return
            self._live.index.reserve(len(id_U))
            place_U = self._writer.append(table_U, id_U, np.ascontiguousarray(row_UW))
            self._live.put(table_U, id_U, place_U)
            self._drop_dead()
            self._count["rows_put"] += len(id_U)

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every row once, as the rows were when the first batch was asked for: later puts do not show."""
        with self._guard:
            self._begin()
            geometry = self._live.geometry
            place_N, table_N, id_N, row_NW = self._writer.copy()
            alive = np.flatnonzero(self._live.index.find(table_N, id_N) == place_N)
            parts, chunks = self._cut()
        try:
            for begin in range(0, len(alive), batch):
                n = alive[begin : begin + batch]
                yield table_N[n], id_N[n], row_NW[n]
            for part, chunk in zip(parts, chunks, strict=True):
                keys = read_keys(self._fs, chunk.keys_path, geometry, part)
                rows = live_rows(part.bit_N)
                yield from scan_rows(self._fs, chunk.rows_path, geometry, part.number, keys, rows, batch)
        finally:
            with self._guard:
                for chunk in chunks:
                    self._files.release(chunk)

    def clear(self) -> None:
        with self._guard:
            self._begin()
            self._replace(LiveRows(self._live.geometry, self._files, self._threads))

    def flush(self) -> None:
        """Write the rows that are in memory to their chunk. They are durable when a snapshot has been saved."""
        with self._guard:
            self._begin()
            self._writer.write_out()

    def save_snapshot(self, name: str, meta: dict[str, Any], *, overwrite: bool = False) -> None:
        """Keep all rows as they are now under a name. Durable when this returns, and atomic.

        Args:
            name: of the snapshot.
            meta: any dict that JSON can hold; `load_snapshot` returns it.
            overwrite: take the place of the snapshot of that name, in one step.

        Raises:
            SnapshotExistsError: there is one of that name, and `overwrite` is False.
            StorageError: it could not be made; one of that name is as it was.
        """
        with self._guard:
            self._begin()
            path = self._snapshot_files.path(name)
            if not overwrite and (name in self._snapshots or name in self.recovery.damaged):
                raise SnapshotExistsError(
                    f"there is a snapshot named {name!r} already, at {path}; pass overwrite=True to replace it, or "
                    f"delete it, or choose another name"
                )
            self._writer.write_out()  # 1.
            parts, chunks = self._cut()
            info = SnapshotInfo(
                name=name,
                rows=len(self),
                bytes=sum(_part_bytes(part, self._live.geometry) for part in parts),
                row_width=self.row_width,
                physical_block_size=self._live.geometry.physical_block_size,
                created=time.time(),
                sequence=self._sequence,
                meta=meta,
                format_version=FORMAT_VERSION,
            )
            self._sequence += 1
            try:
                for chunk in chunks:
                    self._files.sync(chunk)  # 2.
                self._files.sync_names()  # 3.
                record = self._snapshot_files.write(info, self._live.geometry, parts)  # 4. to 7.
            except RenameUncertainError as error:
                # Either snapshot may be the one that a loss of power leaves: hold the chunks of both.
                self._enter(error.record, chunks, certain=False)
                raise
            except BaseException:
                for chunk in chunks:
                    self._files.release(chunk)
                raise
            self._enter(record, chunks, certain=True)

    def load_snapshot(self, name: str) -> dict[str, Any]:
        """Make the snapshot's rows the table's rows; returns the `meta` it was saved with.

        Raises:
            SnapshotNotFoundError: there is none of that name.
            RowWidthError: its rows have another width.
            CorruptTableError: its files are not what was written; the table's rows are as they were.
        """
        with self._guard:
            self._begin()
            record = self._snapshot_files.read(name)
            if record.geometry.row_width != self.row_width:
                raise RowWidthError(
                    f"snapshot {name!r} at {record.path} has rows of {record.geometry.row_width} words, this table has "
                    f"{self.row_width}; open the table with row_width={record.geometry.row_width}: the same dimension, "
                    f"dtype and optimizer as when it was saved"
                )
            live = LiveRows(record.geometry, self._files, self._threads, expected=record.info.rows)
            try:
                for part in record.parts:
                    self._load_part(live, record, part)
                if len(live.index) != record.info.rows:
                    raise CorruptTableError(
                        f"{record.path}: the snapshot must have {record.info.rows} rows, its chunks have "
                        f"{len(live.index)} different keys; run `oneemb check` on the table"
                    )
            except BaseException:
                live.release()
                raise
            self._replace(live)
            return record.info.meta

    def delete_snapshot(self, name: str) -> None:
        """Remove a snapshot, and the chunks that nothing else needs. Durable when this returns.

        Raises:
            SnapshotNotFoundError: there is none of that name.
            StorageError: it may be there yet; call again.
        """
        with self._guard:
            self._begin()
            if name not in self._snapshots and name not in self.recovery.damaged:
                raise self._snapshot_files.not_found(name)
            self._snapshot_files.remove(name)
            self._settle()
            self._forget(name)

    def snapshots(self) -> list[SnapshotInfo]:
        """The snapshots, oldest first."""
        with self._guard:
            return [record.info for record, _ in self._snapshots.values()]

    def stats(self) -> dict[str, Any]:
        with self._guard:
            live_bytes = int(len(self) * self._live.geometry.disk_bytes_per_row)
            disk_bytes = sum(chunk.nbytes for chunk in self._files.chunks.values())
            snapshot_bytes = sum(chunk.nbytes for chunk in self._files.chunks.values() if chunk.snapshots)
            return {
                "rows": len(self),
                "io": self._reader.name,
                "read_depth": self._reader.depth,
                "physical_block_size": self._live.geometry.physical_block_size,
                "chunks": len(self._files.chunks),
                "snapshots": len(self._snapshots),
                "disk_bytes": disk_bytes,
                "live_bytes": live_bytes,
                "snapshot_bytes": snapshot_bytes,
                "memory_bytes": self._live.nbytes,
                "index_bytes": self._live.index.nbytes,
                "bytes_written": self._files.bytes_written,
                "bytes_removed": self._files.bytes_removed,
                **self._count,
                **self._reader.stats(),
            }

    def close(self) -> None:
        """Give back the path. Rows that no snapshot holds are gone, and so are their files."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                self._live.release()
                self._files.close()
                self._reader.close()
            finally:
                self._lock.release()

    def __enter__(self) -> "PersistentTable":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        if self._closed:
            raise StorageError(f"the table at {self._path} is closed; open it again")

    def _read(
        self, table_U: np.ndarray, id_U: np.ndarray, place_N: np.ndarray, to_N: np.ndarray, out_UW: np.ndarray
    ) -> None:
        """Bring rows that are on disk to rows `to_N` of the output."""
        geometry = self._live.geometry
        plan = plan_reads(geometry, place_N, to_N)
        slot_Q = plan.slot_Q
        offset_Q = ROWS_BEGIN + (plan.block_Q - slot_Q * geometry.blocks_per_chunk) * geometry.block_bytes
        begin = 0
        while begin < len(slot_Q):
            slots, first = np.unique(slot_Q[begin:], return_index=True)
            more = len(slots) > self._files.files_open_max
            end = begin + int(first[self._files.files_open_max]) if more else len(slot_Q)
            file_S = {int(slot): self._open_rows(int(slot)) for slot in slots[: self._files.files_open_max]}
            file_Q = np.array([file_S[slot] for slot in slot_Q[begin:end].tolist()], np.int64)
            try:
                self._reader.read(
                    plan.cut(begin, end), file_Q, offset_Q[begin:end], self._live.sum_B, out_UW
                )
            except DamagedBlock as damage:
                place, u = int(plan.place_P[damage.p]), int(plan.to_P[damage.p])
                slot, row = divmod(place, geometry.rows_per_chunk)
                raise block_damage(
                    self._rows_path(slot), geometry, row // geometry.rows_per_block, damage.data,
                    int(self._live.sum_B[place // geometry.rows_per_block]), int(table_U[u]), int(id_U[u]),
                ) from None  # fmt: skip
            except OSError as error:
                q = begin + (error.filename if isinstance(error.filename, int) else 0)
                at = f"{self._rows_path(int(slot_Q[q]))} at offset {offset_Q[q]}"
                raise storage_error(error, "read rows from", at) from error
            begin = end
        self._count["read_requests"] += len(slot_Q)
        self._count["bytes_read"] += int(plan.blocks_Q.sum()) * geometry.block_bytes

    def _open_rows(self, slot: int) -> int:
        chunk = self._live.chunk_S[slot]
        assert chunk is not None
        try:
            return self._files.rows_file(chunk)
        except FileNotFoundError as error:
            raise missing_file(chunk.rows_path) from error
        except OSError as error:
            raise storage_error(error, "open", chunk.rows_path) from error

    def _rows_path(self, slot: int) -> str:
        chunk = self._live.chunk_S[slot]
        assert chunk is not None
        return chunk.rows_path

    def _cut(self) -> tuple[list[ChunkPart], list[ChunkFile]]:
        """What is live of each chunk on disk now, and the chunks, each held once more."""
        parts, chunks = [], []
        for slot, chunk in self._live.slots():
            if self._live.live_S[slot]:
                parts.append(self._live.part(slot))
                self._files.hold(chunk)
                chunks.append(chunk)
        return parts, chunks

    def _enter(self, record: SnapshotRecord, chunks: list[ChunkFile], *, certain: bool) -> None:
        """A snapshot has its name: it holds these chunks. What it replaced holds none, once that is certain."""
        for part in record.parts:
            part.bit_N = np.empty(0, np.uint8)
        name = record.info.name
        if name in self._snapshots and not certain:
            self._uncertain.append(self._snapshots.pop(name)[1])
        elif certain:
            self._settle()
            self._forget(name)
        for chunk in chunks:
            chunk.snapshots += 1
        self._snapshots[name] = record, chunks

    def _forget(self, name: str) -> None:
        """There is no snapshot of this name any more, for certain."""
        _, chunks = self._snapshots.pop(name, (None, []))
        self._release_snapshot(chunks)
        if self.recovery.damaged.pop(name, None) is not None and not self.recovery.damaged:
            needed = {number: (1 << 62, 1 << 62) for number in self._files.chunks}
            remove_orphans(self._fs, f"{self._path}/chunks", self._snapshot_files, needed, self.recovery)

    def _settle(self) -> None:
        """The names of the snapshots are on the device: what was held for names that might come back is free."""
        for chunks in self._uncertain:
            self._release_snapshot(chunks)
        self._uncertain = []

    def _release_snapshot(self, chunks: list[ChunkFile]) -> None:
        for chunk in chunks:
            chunk.snapshots -= 1
            self._files.release(chunk)

    def _adopt(self, record: SnapshotRecord) -> list[ChunkFile]:
        chunks = []
        for part in record.parts:
            chunk = self._files.adopt(
                part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum, synced=True
            )
            chunk.snapshots += 1
            chunks.append(chunk)
        return chunks

    def _load_part(self, live: LiveRows, record: SnapshotRecord, part: ChunkPart) -> None:
        """Give a chunk of a snapshot a slot in `live`, and put its keys into the index."""
        geometry = record.geometry
        bit_N = self._snapshot_files.read_bits(record, part)
        chunk = self._files.adopt(part.number, geometry, part.blocks, part.keys_bytes, part.keys_sum, synced=True)
        slot = live.add(chunk)
        self._check_rows_file(chunk, part)
        keys = read_keys(self._fs, chunk.keys_path, geometry, part)
        begin = slot * geometry.blocks_per_chunk
        live.sum_B[begin : begin + part.blocks] = keys.sum_B
        rows = live_rows(bit_N)
        if len(rows) != part.rows:
            raise CorruptTableError(f"{record.path}: chunk {part.number} must have {part.rows} rows, has {len(rows)}")
        live.put(keys.table_N[rows], keys.id_N[rows], slot * geometry.rows_per_chunk + rows)

    def _check_rows_file(self, chunk: ChunkFile, part: ChunkPart) -> None:
        path, header = chunk.rows_path, bytearray(HEADER_BYTES)
        try:
            file = self._fs.open(path)
            try:
                size = self._fs.read_into(file, memoryview(header), 0)
            finally:
                self._fs.close(file)
            check_header(header[:size], ROWS_MAGIC, path, chunk.number, chunk.geometry)
            size, needed = self._fs.size(path), ROWS_BEGIN + part.blocks * chunk.geometry.block_bytes
        except FileNotFoundError as error:
            raise missing_file(path) from error
        except OSError as error:
            raise storage_error(error, "read", path) from error
        if size < needed:
            raise CorruptTableError(
                f"{path} must have {needed} bytes, has {size}; restore it from a copy, or delete the snapshots that "
                f"need it"
            )

    def _replace(self, live: LiveRows) -> None:
        """These are the table's rows from now on."""
        if self._writer.chunk is not None:
            self._files.seal(self._writer.chunk)
        old, self._live = self._live, live
        self._writer = RowWriter(live, self._files, self._threads)
        old.release()

    def _drop_dead(self) -> None:
        """Let go of chunks without live rows, but for the one being written."""
        for slot in np.flatnonzero(self._live.live_S == 0).tolist():
            if self._live.chunk_S[slot] is not None and slot != self._writer.slot:
                self._live.remove(slot)


def _part_bytes(part: ChunkPart, geometry: Geometry) -> int:
    return ROWS_BEGIN + part.blocks * geometry.block_bytes + part.keys_bytes
