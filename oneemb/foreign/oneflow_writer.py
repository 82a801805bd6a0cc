"""Writes tables for OneFlow to read. `oneflow_table.py` describes their files.

Invariant: a write changes no byte of an existing file. Each snapshot's rows go to new chunks. The file LIST, without
which a snapshot does not exist, is written last: it is renamed into place when all files that it names are durable.
"""

import os

import numpy as np

from oneemb.foreign.oneflow_table import (
    CHUNK_FILE,
    NUMBERS,
    PIECE_BYTES,
    OneFlowGeometry,
    chunk_name,
    names_in,
    oneflow_snapshots,
    read_oneflow_geometry,
)
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, SnapshotExistsError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, doing
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.new_files import replace_file
from oneemb.storage.table.geometry import PHYSICAL_BLOCK_SIZES
from oneemb.storage.table.writer_lock import IN_USE, WriterLock

CHUNK_BYTES = 4 << 30


class OneFlowWriter:
    """Writes rows to new chunks of a table, and saves them as a snapshot.

    Args:
        path: folder of the table; a missing folder is made, and an existing table keeps its rows.
        name: name of the snapshot to save.
        key_bytes, value_bytes, physical_block_size: numbers of the table, see `OneFlowGeometry`.
        chunk_bytes: bytes of a full chunk of a new table; OneFlow opens only tables with the default.
        fs: file system; None = this machine's.

    Raises:
        LockedError: another writer of oneemb has locked the path.
        SnapshotExistsError: the table has a snapshot of this name.
        StorageError: the path cannot be written to, or holds a table of another kind.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, path: AnyPath, name: str, *, key_bytes: int, value_bytes: int, physical_block_size: int,
        chunk_bytes: int = CHUNK_BYTES, fs: FileSystem | None = None,
    ):  # fmt: skip
        if physical_block_size not in PHYSICAL_BLOCK_SIZES:
            raise ValueError(f"physical_block_size must be 512 or 4096 bytes, got {physical_block_size}")
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError(
                f"the name of a snapshot of OneFlow must be possible as the name of a folder, got {name!r}"
            )
        self._fs, self._path, self._name = fs or LocalFileSystem(), absolute_path(path), name
        block_bytes = OneFlowGeometry(key_bytes, value_bytes, physical_block_size, 1).block_bytes
        geometry = OneFlowGeometry(key_bytes, value_bytes, physical_block_size, max(1, chunk_bytes // block_bytes))
        self.what = f"a writer of the table of OneFlow's at {self._path}"
        self._index = HashIndex(Threads(1))
        self._made: list[str] = []
        self._files: tuple[int, int] | None = None
        if "chunks" in names_in(self._fs, self._path):
            raise StorageError(f"{self._path} holds a table of oneemb; choose another folder for one of OneFlow")
        with doing("make the folder", self._path):
            self._fs.make_directories(self._path)
        self._lock: WriterLock | None = WriterLock(self._fs, f"{self._path}/LOCK", self, foreign=True)
        try:
            self.geometry = self._make_table(geometry)
            if name in oneflow_snapshots(self._path, self._fs):
                raise SnapshotExistsError(f"{self._path} has a snapshot {name!r} already; take another name")
        except BaseException:
            self._lock.release()
            raise
        there = [*names_in(self._fs, f"{self._path}/keys"), *names_in(self._fs, f"{self._path}/values")]
        self._chunk = max((int(match[2]) for match in map(CHUNK_FILE.fullmatch, there) if match), default=-1) + 1
        self._block = 0

    def put(self, id_N: np.ndarray, value_NV: np.ndarray) -> None:
        """Add rows, on fresh blocks; `value_NV` is float32 [N, value_bytes / 4]. Of equal ids the last one counts. With
        keys of 4 bytes the key is the low 32 bits of the id."""
        geometry, begin = self.geometry, 0
        assert value_NV.dtype == np.float32 and value_NV.shape == (len(id_N), geometry.value_bytes // 4)
        piece_blocks = max(1, PIECE_BYTES // geometry.block_bytes)
        while begin < len(id_N):
            if self._block == geometry.blocks_per_chunk:
                self._end_chunk()
            blocks = min(piece_blocks, geometry.blocks_per_chunk - self._block)
            end = min(begin + blocks * geometry.values_per_block, len(id_N))
            self._write(id_N[begin:end], value_NV[begin:end])
            begin = end

    def save(self) -> None:
        """Save the rows durably as the snapshot. After a StorageError the snapshot does not exist."""
        fs = self._fs
        self._check_lock()
        self._end_chunk()
        for kind in ("keys", "values"):
            with doing("sync the folder", f"{self._path}/{kind}"):
                fs.sync_directory(f"{self._path}/{kind}")
        directory = f"{self._path}/snapshots/{self._name}"
        with doing("make the folder", directory):
            fs.make_directories(directory)
            for left in fs.names(directory):  # left by an interrupted save
                fs.remove(f"{directory}/{left}")
        parts = [place_N for _, _, place_N in self._index.items()]
        place_N = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        chunk_N = place_N // self.geometry.values_per_chunk
        lines = []
        for chunk in np.unique(chunk_N).tolist():
            begin, end = np.searchsorted(chunk_N, [chunk, chunk + 1])
            lines.append(chunk_name("index", chunk))
            self._write_file(f"{directory}/{lines[-1]}", place_N[begin:end].astype(np.uint64).data)
        with doing("write the snapshot's", f"{directory}/LIST"):
            fs.sync_directory(directory)
            replace_file(fs, f"{directory}/LIST", "".join(f"{line}\n" for line in lines).encode())
            fs.sync_directory(directory)
        self._made = []

    def remove_snapshot(self) -> None:
        """Remove the snapshot that `save` made. Its rows stay in the chunks; OneFlow cannot free them."""
        self._check_lock()
        path = f"{self._path}/snapshots/{self._name}/LIST"
        with doing("remove the snapshot", path):
            self._fs.remove(path)
            self._fs.sync_directory(os.path.dirname(path))

    def close(self) -> None:
        """Release the path, and remove files with rows that were not saved. A second call does nothing."""
        files, self._files = self._files, None
        for file in files or ():
            self._fs.close(file)
        made, self._made = self._made, []
        for path in made if self._lock is not None and self._lock.still_there else []:
            try:
                self._fs.remove(path)
            except OSError:
                pass  # Harmless: the next writer takes another chunk number.
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.release()

    def close_for(self, other: str) -> str:
        return IN_USE

    def force_close(self) -> int:
        lost = len(self._index) if self._made else 0
        self.close()
        return lost

    def _check_lock(self) -> None:
        """Raise StorageError if this writer no longer holds the folder's lock."""
        if self._lock is None:
            raise StorageError(f"{self.what} is closed, and its unsaved rows are gone; make it again")
        self._lock.check()

    def _make_table(self, geometry: OneFlowGeometry) -> OneFlowGeometry:
        """Geometry of the table at the path; a new table gets `geometry`."""
        numbers = (geometry.key_bytes, geometry.value_bytes, geometry.physical_block_size, geometry.blocks_per_chunk)
        there = set(names_in(self._fs, self._path))
        for name, number in zip(NUMBERS, numbers, strict=True):
            if name not in there and "values" in there and names_in(self._fs, f"{self._path}/values"):
                raise CorruptTableError(f"{self._path} holds rows and has no file {name}; restore it from a copy")
            if name not in there:
                self._write_file(f"{self._path}/{name}", f"{number}\n".encode())
        found = read_oneflow_geometry(self._path, self._fs)
        expected = (geometry.key_bytes, geometry.value_bytes, geometry.physical_block_size)
        if (found.key_bytes, found.value_bytes, found.physical_block_size) != expected:
            raise StorageError(
                f"{self._path} holds a table of OneFlow with keys of {found.key_bytes} bytes, values of"
                f" {found.value_bytes} and blocks of {found.physical_block_size}, but these rows need {expected[0]},"
                f" {expected[1]} and {expected[2]}; write rows of that kind, or choose another folder"
            )
        with doing("make the folders of the table at", self._path):
            for kind in ("keys", "values", "snapshots"):
                self._fs.make_directories(f"{self._path}/{kind}")
            self._fs.sync_directory(self._path)
        return found

    def _write(self, id_N: np.ndarray, value_NV: np.ndarray) -> None:
        """Write rows to the current chunk, on fresh blocks. The caller makes sure that they fit."""
        geometry = self.geometry
        per_block = geometry.values_per_block
        blocks = -(-len(id_N) // per_block)
        whole_BV = np.zeros((blocks, geometry.block_bytes // 4), np.float32)
        row_n = np.zeros((blocks * per_block, value_NV.shape[1]), np.float32)
        row_n[: len(id_N)] = value_NV
        whole_BV[:, : per_block * value_NV.shape[1]] = row_n.reshape(blocks, -1)
        key_n = np.zeros(blocks * per_block, np.uint32 if geometry.key_bytes == 4 else np.uint64)
        key_n[: len(id_N)] = id_N.astype(np.int64).view(np.uint64).astype(key_n.dtype)
        self._index.reserve(len(id_N))
        keys, values = self._files or self._begin_chunk()
        with doing("write rows to", self._made[-1]):
            self._fs.write(values, whole_BV.data, self._block * geometry.block_bytes)
            self._fs.write(keys, key_n.data, self._block * per_block * geometry.key_bytes)
        first = self._chunk * geometry.values_per_chunk + self._block * per_block
        id_N = key_n[: len(id_N)].astype(np.int64)
        self._index.put(np.zeros(len(id_N), np.int32), id_N, first + np.arange(len(id_N)))
        self._block += blocks

    def _begin_chunk(self) -> tuple[int, int]:
        self._check_lock()
        files = []
        for kind in ("key", "value"):
            path = f"{self._path}/{kind}s/{chunk_name(kind, self._chunk)}"
            with doing("make the chunk file", path):
                try:
                    files.append(self._fs.create(path))
                except OSError:
                    for file in files:
                        self._fs.close(file)
                    raise
            self._made.append(path)
        self._files = (files[0], files[1])
        return self._files

    def _end_chunk(self) -> None:
        if self._files is None:
            return
        files, self._files = self._files, None
        self._chunk, self._block = self._chunk + 1, 0
        with doing("sync", self._made[-1]):
            try:
                for file in files:
                    self._fs.sync(file)
            finally:
                for file in files:
                    self._fs.close(file)

    def _write_file(self, path: str, data: bytes | memoryview) -> None:
        with doing("write", path):
            file = self._fs.create(path)
            try:
                self._fs.write(file, data, 0)
                self._fs.sync(file)
            finally:
                self._fs.close(file)
