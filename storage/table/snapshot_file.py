"""The file of a snapshot: which chunks it needs and which of their rows are its own.  FORMAT.md has the bytes.

A snapshot is one file that appears by a rename, so it is there completely or not at all. Its steps are numbered in
`SnapshotFiles.write`.

Invariant: a right checksum says that bytes are as they were written, not that they make sense. Every field of a file is
checked before it is used, and memory is taken for bytes that are there.
"""

import json
import struct
import time
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from oneemb.kernels.checksum import Buffer, xxh64
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.table.file_header import HEADER_BYTES, SNAPSHOT_MAGIC, pack_header, read_header
from oneemb.storage.table.geometry import Geometry, geometry_problem

__all__ = ["ChunkPart", "RenameUncertainError", "SnapshotFiles", "SnapshotInfo", "SnapshotRecord"]

_SUFFIX = ".snapshot"
_TEMPORARY = ".tmp"
_SUM = struct.Struct("<Q")
_NAME_BYTES_MAX = 200
_READ_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 48
_CHUNK_NUMBER_MAX = 10**12 - 1
# A run of keys, beside its rows' keys and its blocks' checksums: three numbers, a checksum; zeros.
_RUN_BYTES_MIN = 32
_RUN_BYTES_MAX = 40
_CREATED_MAX = 253_402_300_800  # the year 10000, beyond which no calendar goes
_HEX = set("0123456789abcdef")
_FIELDS = {
    "name", "sequence", "created", "bytes", "row_width", "physical_block_size", "blocks_per_chunk", "meta", "chunks"
}  # fmt: skip


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
        identity: of this snapshot and its copies alone, 32 hexadecimal digits; of one that has none written, 16 that
            follow from its manifest. Names repeat from folder to folder and from run to run, this does not.
        saved_by: the process that saved it.
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
    identity: str
    saved_by: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.created))
        return f"{self.name!r}, identity {self.identity}, saved {when} by {self.saved_by}"


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
        """The snapshots' names, sorted. Files with names that no save gives are nobody's."""
        return sorted(name for listed in self._listed() if (name := _name_of(listed)) is not None)

    def leftovers(self) -> list[str]:
        """Paths of files that an unfinished save has left."""
        return [
            f"{self.directory}/{listed}" for listed in self._listed()
            if listed.endswith(_TEMPORARY) and _name_of(listed[: -len(_TEMPORARY)]) is not None
        ]  # fmt: skip

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
        except IsADirectoryError as error:
            raise CorruptTableError(f"{path} must be a file that begins at offset 0 with {SNAPSHOT_MAGIC!r}, it is a "
                                    f"directory; move it elsewhere") from error  # fmt: skip
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
        rows = part.blocks * record.geometry.rows_per_block
        if int.from_bytes(bit_N[rows // 8 :].tobytes(), "little") >> rows % 8:
            raise CorruptTableError(
                f"{record.path}: the list of rows at offset {part.bits_offset} names rows beyond the {rows} that "
                f"{part.blocks} blocks of chunk {part.number} hold; run `oneemb check` on the table"
            )
        listed = int(np.count_nonzero(np.unpackbits(bit_N)))
        if listed != part.rows:
            raise CorruptTableError(
                f"{record.path}: chunk {part.number} must have {part.rows} rows, the list at offset {part.bits_offset}"
                f" has {listed}; run `oneemb check` on the table"
            )
        return bit_N

    def not_found(self, name: str) -> SnapshotNotFoundError:
        there = ", ".join(repr(other) for other in self.names()) or "none"
        return SnapshotNotFoundError(f"no snapshot named {name!r} in {self.directory}; there are: {there}")

    def _read(self, file: int, path: str, name: str) -> SnapshotRecord:
        json_bytes, bits_bytes, _, _ = read_header(self._bytes(file, 0, HEADER_BYTES), SNAPSHOT_MAGIC, path)
        if json_bytes % 8 or not 0 < json_bytes < _FILE_BYTES_MAX:
            raise CorruptTableError(f"{path}: the header at offset 0 gives the manifest {json_bytes} bytes")
        body = self._bytes(file, HEADER_BYTES, json_bytes)
        expected = self._bytes(file, HEADER_BYTES + json_bytes, _SUM.size)
        if len(expected) != _SUM.size:
            raise CorruptTableError(f"{path}: the file ends before offset {HEADER_BYTES + json_bytes + _SUM.size}")
        _check(body, json_bytes, _SUM.unpack(expected)[0], path, HEADER_BYTES, "manifest")
        record = _decode(body, HEADER_BYTES + json_bytes + _SUM.size, path, name)
        end = HEADER_BYTES + json_bytes + _SUM.size + sum(_bits_bytes(record.geometry, part) for part in record.parts)
        if end - HEADER_BYTES - json_bytes - _SUM.size != bits_bytes or not self._bytes(file, end - 1, 1):
            raise CorruptTableError(
                f"{path}: the lists of rows of {len(record.parts)} chunks must end at offset {end}; the header at "
                f"offset 0 gives them {bits_bytes} bytes, or the file ends before"
            )
        return record

    def _bytes(self, file: int, offset: int, size: int) -> bytes:
        """The bytes of a file, fewer where it ends. Takes memory for bytes that are there, not for those asked for."""
        out = bytearray()
        while len(out) < size:
            piece = bytearray(min(size - len(out), max(len(out), _READ_BYTES)))
            got = self._fs.read_into(file, memoryview(piece), offset + len(out))
            out += piece[:got]
            if got < len(piece):
                break
        return bytes(out)

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
    if not isinstance(name, str):
        raise TypeError(f"a snapshot's name must be a str, got {name!r}")
    try:
        quoted = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise ValueError(f"a snapshot's name must be text that UTF-8 can hold, got {name!r}") from error
    if not name or len(quoted) > _NAME_BYTES_MAX:
        raise ValueError(
            f"a snapshot's name must have 1 to {_NAME_BYTES_MAX} characters, other than letters and digits counting "
            f"as 3 or more, got {name!r}"
        )
    return quoted + _SUFFIX


def _name_of(file_name: str) -> str | None:
    """The snapshot whose file has this name; None if no snapshot's has."""
    if not file_name.endswith(_SUFFIX):
        return None
    name = unquote(file_name[: -len(_SUFFIX)])
    try:
        return name if _file_name(name) == file_name else None
    except ValueError:
        return None  # An empty name, or one that is no text.


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
        "identity": info.identity,
        "saved_by": info.saved_by,
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


def _decode(body: bytes, bits_offset: int, path: str, name: str) -> SnapshotRecord:
    """What a manifest says, every field checked; the lists of rows begin at `bits_offset`."""

    def need(right: bool, what: str, found: Any) -> None:
        if not right:
            raise CorruptTableError(
                f"{path}: the manifest at offset {HEADER_BYTES} must have {what}, has {repr(found)[:100]}; restore the "
                f"file from a copy, or delete the snapshot"
            )

    def number(value: Any, least: int, most: int = (1 << 62)) -> bool:
        return type(value) is int and least <= value <= most

    def sum_of(value: Any) -> int:
        need(isinstance(value, str) and len(value) == 16 and not set(value) - _HEX, "sums of 16 hex digits", value)
        return int(value, 16)

    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptTableError(f"{path}: the manifest at offset {HEADER_BYTES} is not JSON: {error}") from error
    need(isinstance(manifest, dict), "fields", manifest)
    missing = sorted(_FIELDS - manifest.keys())
    need(not missing, f"the fields {', '.join(missing)}", sorted(manifest))
    if manifest["name"] != name:
        raise CorruptTableError(
            f"{path}: the manifest at offset {HEADER_BYTES} is that of the snapshot {repr(manifest['name'])[:100]}; "
            f"the file was renamed"
        )
    created = manifest["created"]
    need(type(created) in (int, float) and 0 <= created < _CREATED_MAX, "a time as created", created)
    for field_name in ("sequence", "bytes"):
        need(number(manifest[field_name], 0), f"a number as {field_name}", manifest[field_name])
    need(isinstance(manifest["meta"], dict), "an object as meta", manifest["meta"])
    # The first releases wrote neither.
    identity = manifest.get("identity", f"{xxh64(body):016x}")
    saved_by = manifest.get("saved_by", "a process that did not leave its name")
    need(isinstance(identity, str) and len(identity) in (16, 32) and not set(identity) - _HEX, "an identity", identity)
    need(isinstance(saved_by, str), "a text as saved_by", saved_by)
    numbers = (manifest["row_width"], manifest["physical_block_size"], manifest["blocks_per_chunk"])
    problem = geometry_problem(*numbers)
    if problem is not None:
        raise CorruptTableError(f"{path}: the manifest at offset {HEADER_BYTES} is wrong: {problem}")
    geometry = Geometry(*numbers)
    need(isinstance(manifest["chunks"], list), "a list of chunks", manifest["chunks"])
    parts: dict[int, ChunkPart] = {}
    offset = bits_offset
    for entry in manifest["chunks"]:
        need(isinstance(entry, list) and len(entry) == 6, "six values for each chunk", entry)
        chunk, blocks, keys_bytes, keys_sum, rows, bits_sum = entry
        need(number(chunk, 0, _CHUNK_NUMBER_MAX) and chunk not in parts, "each chunk's number once", entry)
        need(number(blocks, 1, geometry.blocks_per_chunk), f"1 to {geometry.blocks_per_chunk} blocks a chunk", entry)
        need(number(rows, 0, blocks * geometry.rows_per_block), "no more rows than fit in a chunk's blocks", entry)
        least = HEADER_BYTES + _RUN_BYTES_MIN + 12 * rows + 4 * blocks
        most = HEADER_BYTES + (_RUN_BYTES_MAX + 4 + 12 * geometry.rows_per_block) * blocks
        need(number(keys_bytes, least, most), f"{least} to {most} bytes of keys for a chunk", entry)
        parts[chunk] = ChunkPart(chunk, blocks, keys_bytes, sum_of(keys_sum), rows, sum_of(bits_sum), offset)
        offset += _bits_bytes(geometry, parts[chunk])
    info = SnapshotInfo(
        name=name,
        rows=sum(part.rows for part in parts.values()),
        bytes=manifest["bytes"] + offset,
        row_width=geometry.row_width,
        physical_block_size=geometry.physical_block_size,
        created=created,
        sequence=manifest["sequence"],
        meta=manifest["meta"],
        format_version=1,
        identity=identity,
        saved_by=saved_by,
    )
    return SnapshotRecord(info, geometry, list(parts.values()), path)


def _check(data: Buffer, size: int, expected: int, path: str, offset: int, what: str) -> None:
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
