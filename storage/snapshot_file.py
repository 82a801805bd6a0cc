"""The file of a snapshot: which chunks it needs and which of their rows are its own.  FORMAT.md has the bytes.

A snapshot is one file that appears by a rename, so it is there completely or not at all. Its steps are numbered in
`SnapshotFiles.write`.
"""

import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.file_header import HEADER_BYTES, SNAPSHOT_MAGIC, pack_header, read_header
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.geometry import Geometry

__all__ = ["ChunkPart", "RenameUncertainError", "SnapshotFiles", "SnapshotInfo", "SnapshotRecord"]

_SUFFIX = ".snapshot"
_TEMPORARY = ".tmp"
_SUM = struct.Struct("<Q")
_NAME_BYTES_MAX = 200


@dataclass
class SnapshotInfo:
    """What a snapshot is, without its rows.

    Args:
        name: as it was saved.
        rows: rows in it.
        bytes: disk space of the files that it needs; snapshots share chunks, so these do not add up.
        row_width: 32-bit words of a row.
        physical_block_size: of the table that saved it.
        created: seconds since 1970, by the clock of the machine that saved it.
        sequence: grows with each snapshot of a table.
        meta: what the caller of `save_snapshot` gave.
        format_version: of its files.
    """

    name: str
    rows: int
    bytes: int
    row_width: int
    physical_block_size: int
    created: float
    sequence: int
    meta: dict[str, Any]
    format_version: int


@dataclass
class ChunkPart:
    """The rows of one chunk that belong to a snapshot: those of its first `blocks` blocks whose bit is set."""

    number: int
    blocks: int
    keys_bytes: int
    keys_sum: int
    rows: int
    bits_sum: int = 0
    bits_offset: int = 0
    bit_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))


@dataclass
class SnapshotRecord:
    """A snapshot file as read: `parts` without their bits, which `SnapshotFiles.read_bits` brings."""

    info: SnapshotInfo
    geometry: Geometry
    parts: list[ChunkPart]
    path: str


class SnapshotFiles:
    """The snapshot files in a directory.

    Args:
        fs: where they are.
        directory: need not exist for reading.
    """

    def __init__(self, fs: FileSystem, directory: str):
        self._fs = fs
        self.directory = directory

    def names(self) -> list[str]:
        """The snapshots' names, sorted."""
        return sorted(unquote(name[: -len(_SUFFIX)]) for name in self._listed() if name.endswith(_SUFFIX))

    def leftovers(self) -> list[str]:
        """Paths of files that an unfinished save has left."""
        return [f"{self.directory}/{name}" for name in self._listed() if name.endswith(_TEMPORARY)]

    def path(self, name: str) -> str:
        return f"{self.directory}/{_file_name(name)}"

    def write(self, record: SnapshotRecord) -> None:
        """Make a snapshot file, in place of one of that name. The chunks it needs are safe already (steps 1 to 3).

        Raises:
            StorageError: it is not written; one of that name is as it was.
            RenameUncertainError: it is written, and a loss of power may bring the old one back.
        """
        path, temporary = record.path, record.path + _TEMPORARY
        data = _encode(record)
        record.info = replace(record.info, bytes=record.info.bytes + len(data))
        doing, at = "write the snapshot", temporary
        try:
            try:
                file = self._fs.create(temporary)  # 4. the manifest, under a temporary name
            except FileExistsError:
                self._fs.remove(temporary)
                file = self._fs.create(temporary)
            try:
                self._fs.write(file, data, 0)
                doing = "sync the snapshot"
                self._fs.sync(file)  # 5. it is safe under that name
            finally:
                self._fs.close(file)
            doing, at = "rename the snapshot to", path
            self._fs.rename(temporary, path)  # 6. it takes the place of the old one in one step
        except OSError as error:
            try:
                self._fs.remove(temporary)
            except OSError:
                pass  # The next open of the table removes it.
            raise storage_error(error, doing, at) from error
        try:
            self._fs.sync_directory(self.directory)  # 7. its name is safe
        except OSError as error:
            raise RenameUncertainError(record.info.name, "written", error, self.directory) from error

    def remove(self, name: str) -> None:
        """Return when the file is gone for good.

        Raises:
            StorageError: it is still there.
            RenameUncertainError: it is gone, and a loss of power may bring it back.
        """
        path = self.path(name)
        try:
            self._fs.remove(path)
        except OSError as error:
            raise storage_error(error, "remove the snapshot", path) from error
        try:
            self._fs.sync_directory(self.directory)
        except OSError as error:
            raise RenameUncertainError(name, "removed", error, self.directory) from error

    def read(self, name: str) -> SnapshotRecord:
        """The snapshot of this name.

        Raises:
            SnapshotNotFoundError: there is none.
            CorruptTableError: the file is not what was written.
            FormatVersionError: another release wrote it.
        """
        path = self.path(name)
        try:
            file = self._fs.open(path)
        except FileNotFoundError as error:
            raise self.not_found(name) from error
        except OSError as error:
            raise storage_error(error, "open the snapshot", path) from error
        try:
            return self._read(file, path, name)
        except OSError as error:
            raise storage_error(error, "read the snapshot", path) from error
        finally:
            self._fs.close(file)

    def read_bits(self, record: SnapshotRecord, part: ChunkPart) -> np.ndarray:
        """The bits of one part: uint8, a whole number of 64-bit words."""
        try:
            file = self._fs.open(record.path)
        except FileNotFoundError as error:
            raise self.not_found(record.info.name) from error
        except OSError as error:
            raise storage_error(error, "open the snapshot", record.path) from error
        try:
            bit_N = np.frombuffer(self._bytes(file, part.bits_offset, _bits_bytes(record.geometry, part)), np.uint8)
        except OSError as error:
            raise storage_error(error, "read the snapshot", record.path) from error
        finally:
            self._fs.close(file)
        _check(bit_N, _bits_bytes(record.geometry, part), part.bits_sum, record.path, part.bits_offset, "list of rows")
        return bit_N

    def not_found(self, name: str) -> SnapshotNotFoundError:
        there = ", ".join(repr(other) for other in self.names()) or "none"
        return SnapshotNotFoundError(f"no snapshot named {name!r} in {self.directory}; there are: {there}")

    def _read(self, file: int, path: str, name: str) -> SnapshotRecord:
        json_bytes, bits_bytes, _, _ = read_header(self._bytes(file, 0, HEADER_BYTES), SNAPSHOT_MAGIC, path)
        body = self._bytes(file, HEADER_BYTES, json_bytes)
        expected = self._bytes(file, HEADER_BYTES + json_bytes, _SUM.size)
        if len(expected) != _SUM.size:
            raise CorruptTableError(f"{path}: the file ends before offset {HEADER_BYTES + json_bytes + _SUM.size}")
        _check(body, json_bytes, _SUM.unpack(expected)[0], path, HEADER_BYTES, "manifest")
        manifest = json.loads(body)
        if manifest["name"] != name:
            raise CorruptTableError(f"{path}: the file holds the snapshot {manifest['name']!r}; it was renamed")
        geometry = Geometry(manifest["row_width"], manifest["physical_block_size"], manifest["blocks_per_chunk"])
        offset = HEADER_BYTES + json_bytes + _SUM.size
        parts = []
        for number, blocks, keys_bytes, keys_sum, rows, bits_sum in manifest["chunks"]:
            part = ChunkPart(number, blocks, keys_bytes, int(keys_sum, 16), rows, int(bits_sum, 16), offset)
            parts.append(part)
            offset += _bits_bytes(geometry, part)
        info = SnapshotInfo(
            name=name,
            rows=sum(part.rows for part in parts),
            bytes=manifest["bytes"] + offset,
            row_width=geometry.row_width,
            physical_block_size=geometry.physical_block_size,
            created=manifest["created"],
            sequence=manifest["sequence"],
            meta=manifest["meta"],
            format_version=1,
        )
        return SnapshotRecord(info, geometry, parts, path)

    def _bytes(self, file: int, offset: int, size: int) -> bytes:
        out = bytearray(size)
        return bytes(out[: self._fs.read_into(file, memoryview(out), offset)])

    def _listed(self) -> list[str]:
        try:
            return self._fs.names(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, "list", self.directory) from error


class RenameUncertainError(StorageError):
    """A snapshot was written or removed, and a loss of power may undo that."""

    def __init__(self, name: str, done: str, error: OSError, directory: str):
        super().__init__(
            f"{storage_error(error, 'sync the directory', directory)}; the snapshot {name!r} is {done}, but a loss of "
            f"power may undo that until a later save or delete of any snapshot succeeds"
        )


def _file_name(name: str) -> str:
    quoted = quote(name, safe="")
    if not name or len(quoted) > _NAME_BYTES_MAX:
        raise ValueError(
            f"a snapshot's name must have 1 to {_NAME_BYTES_MAX} characters, other than letters and digits counting "
            f"as 3 or more, got {name!r}"
        )
    return quoted + _SUFFIX


def _bits_bytes(geometry: Geometry, part: ChunkPart) -> int:
    return -(-part.blocks * geometry.rows_per_block // 64) * 8


def _encode(record: SnapshotRecord) -> bytes:
    info, geometry = record.info, record.geometry
    bits = []
    for part in record.parts:
        bits.append(part.bit_N.tobytes())
        assert len(bits[-1]) == _bits_bytes(geometry, part)
        part.bits_sum = xxh64(bits[-1])
    manifest = {
        "name": info.name,
        "sequence": info.sequence,
        "created": info.created,
        "bytes": info.bytes,
        "row_width": geometry.row_width,
        "physical_block_size": geometry.physical_block_size,
        "blocks_per_chunk": geometry.blocks_per_chunk,
        "meta": info.meta,
        "chunks": [
            [part.number, part.blocks, part.keys_bytes, f"{part.keys_sum:016x}", part.rows, f"{part.bits_sum:016x}"]
            for part in record.parts
        ],
    }
    body = json.dumps(manifest, ensure_ascii=True).encode()
    body += b" " * (-len(body) % 8)
    offset = HEADER_BYTES + len(body) + _SUM.size
    for part, data in zip(record.parts, bits, strict=True):
        part.bits_offset = offset
        offset += len(data)
    header = pack_header(SNAPSHOT_MAGIC, (len(body), sum(map(len, bits)), 0, 0))
    return b"".join([header, body, _SUM.pack(xxh64(body)), *bits])


def _check(data, size: int, expected: int, path: str, offset: int, what: str) -> None:
    if len(data) != size:
        raise CorruptTableError(
            f"{path}: the {what} at offset {offset} must have {size} bytes, the file ends after {len(data)} of them; "
            f"run `oneemb check` on the table"
        )
    actual = xxh64(data)
    if actual != expected:
        raise CorruptTableError(
            f"{path}: the {what} at offset {offset}, {size} bytes, has checksum {actual:016x}, written as "
            f"{expected:016x}; run `oneemb check` on the table"
        )
