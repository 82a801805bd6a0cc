"""Tables as OneFlow's one_embedding lays them out: read, and written for OneFlow to read.

    <path>/KEY_SIZE, VALUE_SIZE, PHYSICAL_BLOCK_SIZE, NUM_LOGICAL_BLOCKS_PER_CHUNK    a number each, as text
    <path>/LOCK                                  there, or OneFlow takes the folder for a new one
    <path>/keys/key-<chunk>                      the keys of a chunk's rows, row after row; chunk: 12 decimal digits
    <path>/values/value-<chunk>                  its blocks; what rows leave of a block is unused
    <path>/snapshots/<name>/LIST                 names of the index files, one a line
    <path>/snapshots/<name>/index-<chunk>        rows of the snapshot in that chunk, uint64, counted through all chunks

A block is the physical block, or as many of them as one value needs. A put of rows begins on a fresh block.

Invariants:
- the format has no checksums, so what an index says is compared with the sizes of the files before it is believed;
- writing changes no byte of a file that is there: a snapshot's rows go to chunks of their own, and LIST, without which
  there is no snapshot, comes last, by a rename, when all it names is on the device.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.kernels.xxh64 import xxh64_words
from oneemb.storage.errors import CorruptTableError, SnapshotExistsError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, aligned_bytes, storage_error
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.geometry import PHYSICAL_BLOCK_SIZES
from oneemb.storage.table.writer_lock import WriterLock

__all__ = [
    "OneFlowGeometry",
    "OneFlowReader",
    "OneFlowWriter",
    "is_oneflow_table",
    "oneflow_owner_of",
    "oneflow_snapshots",
    "read_oneflow_geometry",
]

CHUNK_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20
_SHARDING_SEED = 1
_KEY_SIZES = (4, 8)
# Of the files with the table's numbers, and of what they hold: far beyond any.
_NUMBER_BYTES, _NUMBER_MAX = 64, 1 << 40
_CHUNK_FILE = re.compile(r"(key|value|index)-([0-9]{12})")


@dataclass(frozen=True)
class OneFlowGeometry:
    """The four numbers of a table.

    Args:
        key_bytes: 4 or 8.
        value_bytes: of a row's values.
        physical_block_size: bytes that the device reads at once.
        blocks_per_chunk: logical blocks of a full chunk.
    """

    key_bytes: int
    value_bytes: int
    physical_block_size: int
    blocks_per_chunk: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a logical block."""
        return -(-self.value_bytes // self.physical_block_size) * self.physical_block_size

    @property
    def values_per_block(self) -> int:
        return self.block_bytes // self.value_bytes

    @property
    def values_per_chunk(self) -> int:
        return self.values_per_block * self.blocks_per_chunk


# In the order of the fields above.
_NUMBERS = ("KEY_SIZE", "VALUE_SIZE", "PHYSICAL_BLOCK_SIZE", "NUM_LOGICAL_BLOCKS_PER_CHUNK")


def is_oneflow_table(path: AnyPath, fs: FileSystem | None = None) -> bool:
    """Whether OneFlow's table lies in this folder."""
    try:
        return (fs or LocalFileSystem()).size(f"{absolute_path(path)}/{_NUMBERS[0]}") > 0
    except OSError:
        return False


def read_oneflow_geometry(path: AnyPath, fs: FileSystem | None = None) -> OneFlowGeometry:
    """The numbers that the table at a path was made with.

    Raises:
        StorageError: there is no such table.
        CorruptTableError: a number is not one that a table can have.
    """
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    numbers = []
    for name in _NUMBERS:
        try:
            size = fs.size(f"{path}/{name}")
            text = _read_all(fs, f"{path}/{name}").decode("ascii", "replace").strip() if size <= _NUMBER_BYTES else "?"
        except FileNotFoundError as error:
            raise StorageError(f"{path} is no table of OneFlow: it has no file {name}; give its folder") from error
        except OSError as error:
            raise storage_error(error, "read", f"{path}/{name}") from error
        if not text.isdecimal() or not 1 <= int(text) <= _NUMBER_MAX:
            raise CorruptTableError(f"{path}/{name} must hold a positive number up to {_NUMBER_MAX}, holds {text!r}")
        numbers.append(int(text))
    geometry = OneFlowGeometry(*numbers)
    if geometry.physical_block_size % 4:
        raise CorruptTableError(
            f"{path} must have blocks of float32, has PHYSICAL_BLOCK_SIZE {geometry.physical_block_size}"
        )
    if geometry.key_bytes not in _KEY_SIZES or geometry.value_bytes % 4:
        raise CorruptTableError(
            f"{path} must have keys of 4 or 8 bytes and values of float32, has KEY_SIZE {geometry.key_bytes} and"
            f" VALUE_SIZE {geometry.value_bytes}"
        )
    return geometry


def oneflow_snapshots(path: AnyPath, fs: FileSystem | None = None) -> list[str]:
    """Names of the snapshots of the table at a path, sorted."""
    fs, directory = fs or LocalFileSystem(), f"{absolute_path(path)}/snapshots"
    return [name for name in sorted(_names(fs, directory)) if "LIST" in _names(fs, f"{directory}/{name}")]


def oneflow_owner_of(id_N: np.ndarray, key_bytes: int, owners: int) -> np.ndarray:
    """Which of several paths OneFlow keeps each key in: int64 [N]. Keys of 4 bytes are widened with zeros."""
    word_N = id_N.astype(np.int64).view(np.uint64)
    if key_bytes == 4:
        word_N = word_N & np.uint64(0xFFFFFFFF)
    return (xxh64_words(word_N, _SHARDING_SEED) % np.uint64(owners)).astype(np.int64)


# ---- reading --------------------------------------------------------------------------------------------------------


class OneFlowReader:
    """The rows of one snapshot. Memory is that of the batch, and 8 bytes for each row of one chunk.

    Args:
        path: the table's folder.
        name: which snapshot.
        fs: where files are; None = this machine's.

    Raises:
        StorageError: there is no such table.
        SnapshotNotFoundError: there is none of that name.
        CorruptTableError: its files contradict each other, or OneFlow ended while it saved.
    """

    def __init__(self, path: AnyPath, name: str, *, fs: FileSystem | None = None):
        self._fs, self._path = fs or LocalFileSystem(), absolute_path(path)
        self.geometry = read_oneflow_geometry(self._path, self._fs)
        self._directory = f"{self._path}/snapshots/{name}"
        self._chunks = self._read_list(name)

    def __len__(self) -> int:
        return sum(rows for _, rows in self._chunks)

    @property
    def storage_dim(self) -> int:
        """Values of a row."""
        return self.geometry.value_bytes // 4

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every row once as (id_N int64, value_NV float32), at most `batch` at a time.

        Raises:
            CorruptTableError: an index names a row that is not there, or a row twice.
        """
        for number, _ in self._chunks:
            yield from self._scan_chunk(number, batch)

    def _read_list(self, name: str) -> list[tuple[int, int]]:
        """(chunk, rows in it) of each index file that LIST names."""
        path = f"{self._directory}/LIST"
        try:
            listed = _read_all(self._fs, path).decode("ascii", "replace").splitlines()
        except FileNotFoundError as error:
            there = ", ".join(map(repr, oneflow_snapshots(self._path, self._fs))) or "none"
            raise SnapshotNotFoundError(
                f"no snapshot named {name!r} of OneFlow's table at {self._path}; there are: {there}"
            ) from error
        except OSError as error:
            raise storage_error(error, "read", path) from error
        if len(set(listed)) < len(listed):
            raise CorruptTableError(f"{path} names an index file twice; read another snapshot")
        chunks = []
        for line in listed:
            number = _chunk_number(line, "index")
            if number is None:
                raise CorruptTableError(f"{path} must name index files, one a line, it has the line {line!r}")
            try:
                size = self._fs.size(f"{self._directory}/{line}")
            except FileNotFoundError as error:
                raise CorruptTableError(
                    f"{path} names {line}, which is missing; restore it from a copy, or read another snapshot"
                ) from error
            if size % 8:
                raise CorruptTableError(f"{self._directory}/{line} must hold 8 bytes a row, has {size} bytes")
            chunks.append((number, size // 8))
        # OneFlow makes each index file as large as it can get, cuts them back, and adds each to LIST when it is cut.
        full = 8 * self.geometry.values_per_chunk
        for left in sorted(set(_names(self._fs, self._directory)) - set(listed)):
            if _chunk_number(left, "index") is not None and self._fs.size(f"{self._directory}/{left}") == full:
                raise CorruptTableError(
                    f"{path} does not name {left}, which is as large as one that OneFlow was still writing: the job"
                    f" ended while it saved this snapshot, read another one; or remove {self._directory}/{left} if you"
                    f" know that it is left from an earlier save of this name"
                )
        return chunks

    def _scan_chunk(self, number: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        geometry, fs = self.geometry, self._fs
        index_path = f"{self._directory}/{_chunk_name('index', number)}"
        key_path, value_path = (f"{self._path}/{kind}s/{_chunk_name(kind, number)}" for kind in ("key", "value"))
        with _doing("read", index_path):
            place_N = np.sort(np.frombuffer(_read_all(fs, index_path), np.uint64))
        if len(place_N) == 0:
            return
        if np.any(place_N[1:] == place_N[:-1]):
            raise CorruptTableError(f"{index_path} names a row twice; read another snapshot")
        with _opened(fs, key_path) as keys, _opened(fs, value_path) as values:
            blocks = min(fs.size(value_path) // geometry.block_bytes, geometry.blocks_per_chunk)
            rows = min(fs.size(key_path) // geometry.key_bytes, blocks * geometry.values_per_block)
            first, low, high = number * geometry.values_per_chunk, int(place_N[0]), int(place_N[-1])
            if low < first or high >= first + rows:
                raise CorruptTableError(
                    f"{index_path} names row {low if low < first else high}, {key_path} and {value_path} hold {rows}"
                    f" rows from {first} on; a file was cut short or belongs to another table"
                )
            row_N = (place_N - np.uint64(first)).astype(np.int64)
            yield from self._scan_rows(keys, key_path, values, value_path, row_N, batch)

    def _scan_rows(
        self, keys: int, key_path: str, values: int, value_path: str, row_N: np.ndarray, batch: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        geometry = self.geometry
        per_block = geometry.values_per_block
        buffer_blocks = max(1, _PIECE_BYTES // geometry.block_bytes)
        buffer = aligned_bytes(buffer_blocks * geometry.block_bytes)
        used = per_block * geometry.value_bytes // 4
        key_type = np.int32 if geometry.key_bytes == 4 else np.int64
        begin = 0
        while begin < len(row_N):
            block = int(row_N[begin]) // per_block
            end = min(begin + batch, int(np.searchsorted(row_N, (block + buffer_blocks) * per_block)))
            n = row_N[begin:end] - block * per_block
            blocks = int(n[-1]) // per_block + 1
            want = buffer.data[: blocks * geometry.block_bytes]
            _read(self._fs, values, want, block * geometry.block_bytes, value_path)
            key_n = np.empty(int(n[-1]) + 1, key_type)
            offset = block * per_block * geometry.key_bytes
            _read(self._fs, keys, key_n.data.cast("B"), offset, key_path)
            value_BV = buffer[: len(want)].view(np.float32).reshape(blocks, -1)[:, :used]
            value_NV = value_BV.reshape(blocks, per_block, -1)[n // per_block, n % per_block]
            yield key_n[n].astype(np.int64), value_NV
            begin = end


# ---- writing --------------------------------------------------------------------------------------------------------


class OneFlowWriter:
    """Puts rows into a table's chunks and saves them as a snapshot.

    Args:
        path: the table's folder; it is made where it is not there. A table that is there keeps its rows.
        name: the snapshot to save.
        key_bytes, value_bytes, physical_block_size: of the table.
        chunk_bytes: of a full chunk; OneFlow's default, or it will not open the table. One that is there keeps its own.
        fs: where files are; None = this machine's.

    Raises:
        LockedError: another writer of oneemb has the path.
        SnapshotExistsError: there is a snapshot of this name.
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
            raise ValueError(f"a snapshot of OneFlow's is a folder, its name must be one of a folder, got {name!r}")
        self._fs, self._path, self._name = fs or LocalFileSystem(), absolute_path(path), name
        block_bytes = OneFlowGeometry(key_bytes, value_bytes, physical_block_size, 1).block_bytes
        geometry = OneFlowGeometry(key_bytes, value_bytes, physical_block_size, max(1, chunk_bytes // block_bytes))
        self._index = HashIndex(Threads(1))
        self._made: list[str] = []
        self._files: tuple[int, int] | None = None
        if "chunks" in _names(self._fs, self._path):
            raise StorageError(f"{self._path} holds a table of oneemb; choose another folder for one of OneFlow")
        with _doing("make the folder", self._path):
            self._fs.make_directories(self._path)
        self._lock: WriterLock | None = WriterLock(self._fs, f"{self._path}/LOCK", foreign=True)
        try:
            self.geometry = self._make_table(geometry)
            if name in oneflow_snapshots(self._path, self._fs):
                raise SnapshotExistsError(f"{self._path} has a snapshot {name!r} already; take another name")
        except BaseException:
            self._lock.release()
            raise
        there = [*_names(self._fs, f"{self._path}/keys"), *_names(self._fs, f"{self._path}/values")]
        self._chunk = max((int(name[-12:]) for name in there if _CHUNK_FILE.fullmatch(name)), default=-1) + 1
        self._block = 0

    def put(self, id_N: np.ndarray, value_NV: np.ndarray) -> None:
        """Add rows, on fresh blocks. Of equal ids the last one counts.

        Args:
            id_N: int64; with keys of 4 bytes their low 32 bits are the key.
            value_NV: float32 [N, value_bytes / 4].

        Raises:
            StorageError: the disk fails.
        """
        geometry, begin = self.geometry, 0
        assert value_NV.dtype == np.float32 and value_NV.shape == (len(id_N), geometry.value_bytes // 4)
        piece_blocks = max(1, _PIECE_BYTES // geometry.block_bytes)
        while begin < len(id_N):
            if self._block == geometry.blocks_per_chunk:
                self._end_chunk()
            blocks = min(piece_blocks, geometry.blocks_per_chunk - self._block)
            end = min(begin + blocks * geometry.values_per_block, len(id_N))
            self._write(id_N[begin:end], value_NV[begin:end])
            begin = end

    def save(self) -> None:
        """Save the rows as the snapshot, durably.

        Raises:
            StorageError: it is not there.
        """
        fs = self._fs
        self._check_lock()
        self._end_chunk()
        for kind in ("keys", "values"):
            with _doing("sync the folder", f"{self._path}/{kind}"):
                fs.sync_directory(f"{self._path}/{kind}")
        directory = f"{self._path}/snapshots/{self._name}"
        with _doing("make the folder", directory):
            fs.make_directories(directory)
            for left in fs.names(directory):  # of a save that has not finished
                fs.remove(f"{directory}/{left}")
        parts = [place_N for _, _, place_N in self._index.items()]
        place_N = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        chunk_N = place_N // self.geometry.values_per_chunk
        lines = []
        for chunk in np.unique(chunk_N).tolist():
            begin, end = np.searchsorted(chunk_N, [chunk, chunk + 1])
            lines.append(_chunk_name("index", chunk))
            self._write_file(f"{directory}/{lines[-1]}", place_N[begin:end].astype(np.uint64).data)
        self._write_file(f"{directory}/LIST.tmp", "".join(f"{line}\n" for line in lines).encode())
        with _doing("rename the snapshot to", f"{directory}/LIST"):
            fs.sync_directory(directory)
            fs.rename(f"{directory}/LIST.tmp", f"{directory}/LIST")
            fs.sync_directory(directory)
        self._made = []

    def remove_snapshot(self) -> None:
        """Take back what `save` has saved; its rows stay in the chunks, which no call of OneFlow frees."""
        self._check_lock()
        path = f"{self._path}/snapshots/{self._name}/LIST"
        with _doing("remove the snapshot", path):
            self._fs.remove(path)
            self._fs.sync_directory(os.path.dirname(path))

    def close(self) -> None:
        """Give back the path. Rows that were not saved are gone, and so are their files. Closing twice is fine."""
        files, self._files = self._files, None
        for file in files or ():
            self._fs.close(file)
        made, self._made = self._made, []
        for path in made if self._lock is not None and self._lock.still_there else []:
            try:
                self._fs.remove(path)
            except OSError:
                pass  # It is in nobody's way: the next writer takes another chunk.
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.release()

    def _check_lock(self) -> None:
        """Raise StorageError if the folder is this writer's no more."""
        if self._lock is not None:
            self._lock.check()

    def _make_table(self, geometry: OneFlowGeometry) -> OneFlowGeometry:
        """Write the numbers of a new table, or take those of the one that is there."""
        numbers = (geometry.key_bytes, geometry.value_bytes, geometry.physical_block_size, geometry.blocks_per_chunk)
        there = set(_names(self._fs, self._path))
        for name, number in zip(_NUMBERS, numbers, strict=True):
            if name not in there and "values" in there and _names(self._fs, f"{self._path}/values"):
                raise CorruptTableError(f"{self._path} holds rows and has no file {name}; restore it from a copy")
            if name not in there:
                self._write_file(f"{self._path}/{name}", f"{number}\n".encode())
        found = read_oneflow_geometry(self._path, self._fs)
        expected = (geometry.key_bytes, geometry.value_bytes, geometry.physical_block_size)
        if (found.key_bytes, found.value_bytes, found.physical_block_size) != expected:
            raise StorageError(
                f"{self._path} holds a table of OneFlow with keys of {found.key_bytes} bytes, values of"
                f" {found.value_bytes} and blocks of {found.physical_block_size}, these rows need {expected}; write"
                f" rows of that kind, or choose another folder"
            )
        with _doing("make the folders of the table at", self._path):
            for kind in ("keys", "values", "snapshots"):
                self._fs.make_directories(f"{self._path}/{kind}")
            self._fs.sync_directory(self._path)
        return found

    def _write(self, id_N: np.ndarray, value_NV: np.ndarray) -> None:
        """Write rows to the chunk, on fresh blocks; they fit in it."""
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
        with _doing("write rows to", self._made[-1]):
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
            path = f"{self._path}/{kind}s/{_chunk_name(kind, self._chunk)}"
            with _doing("make the chunk file", path):
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
        with _doing("sync", self._made[-1]):
            try:
                for file in files:
                    self._fs.sync(file)
            finally:
                for file in files:
                    self._fs.close(file)

    def _write_file(self, path: str, data: bytes | memoryview) -> None:
        with _doing("write", path):
            file = self._fs.create(path)
            try:
                self._fs.write(file, data, 0)
                self._fs.sync(file)
            finally:
                self._fs.close(file)


# ---- files ----------------------------------------------------------------------------------------------------------


def _chunk_name(kind: str, number: int) -> str:
    return f"{kind}-{number:012d}"


def _chunk_number(name: str, kind: str) -> int | None:
    match = _CHUNK_FILE.fullmatch(name)
    return int(match[2]) if match and match[1] == kind else None


def _names(fs: FileSystem, directory: str) -> list[str]:
    try:
        return fs.names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_all(fs: FileSystem, path: str) -> bytearray:
    size, file = fs.size(path), fs.open(path)
    try:
        data = bytearray(size)
        if fs.read_into(file, memoryview(data), 0) != size:
            raise CorruptTableError(f"{path} became shorter while it was read; a writer removes it, read it again")
        return data
    finally:
        fs.close(file)


def _read(fs: FileSystem, file: int, out: memoryview, offset: int, path: str) -> None:
    with _doing("read", path):
        size = fs.read_into(file, out, offset)
    if size != len(out):
        raise CorruptTableError(f"{path} must have {len(out)} bytes from offset {offset} on, it ends after {size}")


@contextmanager
def _opened(fs: FileSystem, path: str) -> Iterator[int]:
    try:
        file = fs.open(path)
    except FileNotFoundError as error:
        raise CorruptTableError(f"{path} is missing, though a snapshot needs it; restore it from a copy") from error
    except OSError as error:
        raise storage_error(error, "open", path) from error
    try:
        yield file
    finally:
        fs.close(file)


@contextmanager
def _doing(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, action, path) from error
