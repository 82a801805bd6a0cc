"""Reads snapshots of OneFlow's tables. `oneflow_table.py` describes their files.

Invariant: since the format has no checksums, an index is compared with the sizes of the files before it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from oneemb.foreign.oneflow_table import (
    PIECE_BYTES,
    chunk_name,
    chunk_number,
    names_in,
    oneflow_snapshots,
    read_all,
    read_oneflow_geometry,
)
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, aligned_bytes, doing, storage_error


class OneFlowReader:
    """Rows of one snapshot. A reader needs memory for one batch, and 8 bytes for each row of one chunk.

    Raises:
        StorageError: there is no table at the path.
        SnapshotNotFoundError: the table has no snapshot of this name.
        CorruptTableError: files contradict each other, or OneFlow was stopped while it saved the snapshot.
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
        """Number of values of a row."""
        return self.geometry.value_bytes // 4

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each row once, as (ids int64 [N], values float32 [N, V]), at most `batch` rows at a time.
        CorruptTableError if an index names a missing row, or a row twice."""
        for number, _ in self._chunks:
            yield from self._scan_chunk(number, batch)

    def _read_list(self, name: str) -> list[tuple[int, int]]:
        """(chunk, number of its rows in the snapshot) for each index file that LIST names."""
        path = f"{self._directory}/LIST"
        try:
            listed = read_all(self._fs, path).decode("ascii", "replace").splitlines()
        except FileNotFoundError as error:
            there = ", ".join(map(repr, oneflow_snapshots(self._path, self._fs))) or "none"
            raise SnapshotNotFoundError(
                f"no snapshot named {name!r} of OneFlow's table at {self._path}; there are: {there}"
            ) from error
        except OSError as error:
            raise storage_error(error, "read", path) from error
        if len(set(listed)) < len(listed):
            raise CorruptTableError(
                f"{path} must name each index file once, but names one twice; read another snapshot"
            )
        chunks = []
        for line in listed:
            number = chunk_number(line, "index")
            if number is None:
                raise CorruptTableError(f"{path} must name index files, one in a line, got the line {line!r}")
            try:
                size = self._fs.size(f"{self._directory}/{line}")
            except FileNotFoundError as error:
                raise CorruptTableError(
                    f"{path} names {line}, which is missing; restore it from a copy, or read another snapshot"
                ) from error
            if size % 8:
                raise CorruptTableError(f"{self._directory}/{line} must hold 8 bytes a row, has {size} bytes")
            chunks.append((number, size // 8))
        # OneFlow makes each index file with the size for a full chunk, then truncates it and adds it to LIST.
        full = 8 * self.geometry.values_per_chunk
        for left in sorted(set(names_in(self._fs, self._directory)) - set(listed)):
            if chunk_number(left, "index") is not None and self._fs.size(f"{self._directory}/{left}") == full:
                raise CorruptTableError(
                    f"{path} does not name {left}, which has the size of an index file that OneFlow is still writing,"
                    " so the job has ended while it saved this snapshot; read another snapshot, or remove"
                    f" {self._directory}/{left} if it is left from an earlier save of this name"
                )
        return chunks

    def _scan_chunk(self, number: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        geometry, fs = self.geometry, self._fs
        index_path = f"{self._directory}/{chunk_name('index', number)}"
        key_path, value_path = (f"{self._path}/{kind}s/{chunk_name(kind, number)}" for kind in ("key", "value"))
        with doing("read", index_path):
            place_N = np.sort(np.frombuffer(read_all(fs, index_path), np.uint64))
        if len(place_N) == 0:
            return
        if np.any(place_N[1:] == place_N[:-1]):
            raise CorruptTableError(
                f"{index_path} must name each row once, but names a row twice; read another snapshot"
            )
        with _opened(fs, key_path) as keys, _opened(fs, value_path) as values:
            blocks = min(fs.size(value_path) // geometry.block_bytes, geometry.blocks_per_chunk)
            rows = min(fs.size(key_path) // geometry.key_bytes, blocks * geometry.values_per_block)
            first, low, high = number * geometry.values_per_chunk, int(place_N[0]), int(place_N[-1])
            if low < first or high >= first + rows:
                raise CorruptTableError(
                    f"{index_path} names row {low if low < first else high}, but {key_path} and {value_path} hold only"
                    f" {rows} rows from {first} on; a file was cut short or belongs to another table"
                )
            row_N = (place_N - np.uint64(first)).astype(np.int64)
            yield from self._scan_rows(keys, key_path, values, value_path, row_N, batch)

    def _scan_rows(
        self, keys: int, key_path: str, values: int, value_path: str, row_N: np.ndarray, batch: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        geometry = self.geometry
        per_block = geometry.values_per_block
        buffer_blocks = max(1, PIECE_BYTES // geometry.block_bytes)
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


def _read(fs: FileSystem, file: int, out: memoryview, offset: int, path: str) -> None:
    with doing("read", path):
        size = fs.read_into(file, out, offset)
    if size != len(out):
        raise CorruptTableError(f"{path} must have {len(out)} bytes from offset {offset} on, but ends after {size}")


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
