"""The manifest of a snapshot: its description, and the rows of chunks that it has.  FORMAT.md describes the bytes.

Invariant: every field is checked before it is used. A matching checksum shows only that the bytes are as they were
written, not that they are valid.
"""

import math
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.table.file_header import HEADER_BYTES, SNAPSHOT_MAGIC, pack_header
from oneemb.storage.table.geometry import Geometry, geometry_problem
from oneemb.storage.table.json_lists import from_json, to_json

_SUM = struct.Struct("<Q")
_CHUNK_NUMBER_MAX = 10**12 - 1
# Bytes of a run in a keys file without keys and checksums of blocks: three numbers, a checksum; and at most 8 zeros.
_RUN_BYTES_MIN = 32
_RUN_BYTES_MAX = 40
_CREATED_MAX = 253_402_300_800  # the year 10000, which Python's calendar does not reach
_ARRAY_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f4", "|u1")
_HEX = set("0123456789abcdef")
_FIELDS = {
    "name", "sequence", "created", "bytes", "row_width", "physical_block_size", "blocks_per_chunk", "meta", "chunks"
}  # fmt: skip


@dataclass
class SnapshotInfo:
    """The description of a snapshot, without its rows.

    Args:
        rows: number of rows.
        bytes: disk space of the files that the snapshot needs. Snapshots share chunks, so a sum over several snapshots
            is too large.
        row_width: number of 32-bit words of a row.
        physical_block_size: that of the table that saved the snapshot.
        created: seconds since 1970, by the clock of the machine that saved the snapshot.
        sequence: number that increases with each snapshot of a table.
        meta: the dict that was passed to `save_snapshot`.
        format_version: version of the format of the snapshot's files.
        identity: 32 hexadecimal digits, the same for this snapshot and its copies, and different for all others; if the
            file has none, 16 digits computed from its manifest. Names repeat between folders and runs, identities do
            not.
        saved_by: the process that saved the snapshot, in words.
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
    """The rows of one chunk that belong to a snapshot: rows of the first `blocks` blocks whose bit is set. FORMAT.md
    explains the fields of `chunks`."""

    number: int
    blocks: int
    keys_bytes: int
    keys_sum: int
    rows: int
    bits_sum: int = 0
    bits_offset: int = 0
    bit_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))


@dataclass
class ArrayPart:
    """An array that a snapshot has beside its rows."""

    dtype: str
    """NumPy's name of the dtype with its byte order, such as "<i8"."""
    shape: tuple[int, ...]
    sum: int = 0
    offset: int = 0
    data: np.ndarray | None = None
    """The array, if it is to be saved; None in a record that was read: `SnapshotFiles.read_array` reads the array."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass
class SnapshotRecord:
    """Contents of a snapshot file, to be saved or as read. In a record that was read, `parts` have no bits:
    `SnapshotFiles.read_bits` reads them."""

    info: SnapshotInfo
    geometry: Geometry
    parts: list[ChunkPart]
    path: str
    arrays: dict[str, ArrayPart] = field(default_factory=dict)
    """{name: array}."""

    def bits_bytes(self, part: ChunkPart) -> int:
        """Number of bytes of a part's list of rows: a multiple of 8."""
        return _bits_bytes(self.geometry, part.blocks)


def encode_snapshot(record: SnapshotRecord) -> bytes:
    """The bytes of a snapshot's file. Sets the checksums and offsets in `parts` and `arrays` of the record."""
    info, geometry = record.info, record.geometry
    arrays = []
    for array in record.arrays.values():
        assert array.data is not None
        arrays.append(_padded(np.ascontiguousarray(array.data).tobytes()))
        array.sum = xxh64(arrays[-1])
    bits = []
    for part in record.parts:
        bits.append(part.bit_N.tobytes())
        assert len(bits[-1]) == record.bits_bytes(part)
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
    if arrays:
        manifest["arrays"] = [
            [name, array.dtype, list(array.shape), f"{array.sum:016x}"] for name, array in record.arrays.items()
        ]
    body = to_json(manifest).encode()
    body += b" " * (-len(body) % 8)
    offset = HEADER_BYTES + len(body) + _SUM.size
    for part, data in zip(record.parts, bits, strict=True):
        part.bits_offset = offset
        offset += len(data)
    for array, data in zip(record.arrays.values(), arrays, strict=True):
        array.offset = offset
        offset += len(data)
    header = pack_header(SNAPSHOT_MAGIC, (len(body), sum(map(len, bits)), sum(map(len, arrays)), 0))
    return b"".join([header, body, _SUM.pack(xxh64(body)), *bits, *arrays])


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def decode_manifest(body: bytes, bits_offset: int, path: str, name: str) -> SnapshotRecord:
    """The record that a manifest describes. Raises CorruptTableError if a field is missing or out of its range.

    Args:
        body: JSON of the manifest.
        bits_offset: offset at which the lists of rows begin.
        name: name of the snapshot, from the name of the file.
    """

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
        manifest = from_json(body)
    except (ValueError, RecursionError) as error:
        raise CorruptTableError(f"{path}: the manifest at offset {HEADER_BYTES} is not JSON: {error}") from error
    need(isinstance(manifest, dict), "fields", manifest)
    missing = sorted(_FIELDS - manifest.keys())
    need(not missing, f"the fields {', '.join(missing)}", sorted(manifest))
    if manifest["name"] != name:
        raise CorruptTableError(
            f"{path}: the manifest at offset {HEADER_BYTES} is that of the snapshot {repr(manifest['name'])[:100]}; "
            f"the file was renamed: give it its name back"
        )
    created = manifest["created"]
    need(type(created) in (int, float) and 0 <= created < _CREATED_MAX, "a time as created", created)
    for field_name in ("sequence", "bytes"):
        need(number(manifest[field_name], 0), f"a number as {field_name}", manifest[field_name])
    need(isinstance(manifest["meta"], dict), "an object as meta", manifest["meta"])
    # The first releases wrote neither of these two.
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
        offset += _bits_bytes(geometry, blocks)
    arrays: dict[str, ArrayPart] = {}
    listed = manifest.get("arrays", [])
    need(isinstance(listed, list), "a list of arrays", listed)
    for entry in listed:
        need(isinstance(entry, list) and len(entry) == 4, "four values for each array", entry)
        array_name, dtype, shape, array_sum = entry
        need(isinstance(array_name, str) and array_name not in arrays, "each array's name once", entry)
        need(dtype in _ARRAY_DTYPES, f"arrays of {', '.join(_ARRAY_DTYPES)}", entry)
        sizes = isinstance(shape, list) and 1 <= len(shape) <= 4 and all(number(size, 0, 1 << 48) for size in shape)
        need(sizes and math.prod(shape) < 1 << 48, "1 to 4 sizes of an array", entry)
        arrays[array_name] = ArrayPart(dtype, tuple(shape), sum_of(array_sum), offset)
        offset += -(-arrays[array_name].nbytes // 8) * 8
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
    return SnapshotRecord(info, geometry, list(parts.values()), path, arrays)


def _bits_bytes(geometry: Geometry, blocks: int) -> int:
    return -(-blocks * geometry.rows_per_block // 64) * 8
