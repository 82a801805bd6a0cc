"""Reads the index of a TensorFlow checkpoint: which tensor lies where in the files of data. TensorFlow is not needed.

The index <prefix>.index is a table of LevelDB's format, without compression. Little-endian:

    file     data blocks, meta block, index block, footer
    footer   (offset, size) of the meta block and of the index block, varints; zeros up to 40 bytes; magic number
    block    entries, offsets of restarts uint32 [R], R uint32; then the type of compression, 1 byte, and the masked
             CRC-32C of the block and this byte, uint32
    entry    bytes shared with the key before, other bytes of the key, bytes of the value, varints; key; value

A key of a data block is the name of a tensor, its value a BundleEntryProto; the empty key has a BundleHeaderProto. The
tensors lie in <prefix>.data-<shard>-of-<shards>, each with a masked CRC-32C.

Invariant: every length and offset in the index is compared with the size of the file before it is used.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from oneemb.foreign.stored_arrays import FilePart, masked
from oneemb.kernels.crc32c import crc32c
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import FileSystem, doing

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_DTYPES = {1: "float32", 2: "float64", 3: "int32", 9: "int64", 14: "bfloat16", 19: "float16"}
_STRING = 7

_Fields = dict[int, list["int | bytes"]]


class BundleTensor(NamedTuple):
    """Tensor of a checkpoint."""

    dtype: str
    """NumPy's name of the dtype; "bfloat16"; or "type <number>" for others."""
    shape: tuple[int, ...]
    part: FilePart
    """Bytes of the tensor; `rows` is the length of its first dimension, 1 for a scalar."""


def read_bundle(fs: FileSystem, prefix: str) -> dict[str, BundleTensor]:
    """{name: tensor} of a checkpoint.

    Raises:
        SnapshotNotFoundError: there is no checkpoint of this prefix.
        CorruptTableError: the index is damaged.
    """
    path = f"{prefix}.index"
    data = _read_all(fs, path)
    if len(data) < _FOOTER_BYTES or struct.unpack_from("<Q", data, len(data) - 8)[0] != _MAGIC:
        raise CorruptTableError(
            f"{path}, offset {max(0, len(data) - 8)}: the last 8 bytes must be the magic number of a checkpoint's"
            f" index, {_MAGIC:#x}; the file is cut short or of another kind, restore it from a copy"
        )
    footer = _Bytes(path, data, len(data) - _FOOTER_BYTES, len(data) - 8)
    for _ in _entries(path, data, footer.varint(), footer.varint()):
        pass  # The meta block says nothing, but a wrong checksum says that the file is damaged.
    tensors: dict[str, BundleTensor] = {}
    shards = 0
    for _, handle in _entries(path, data, footer.varint(), footer.varint()):
        for key, value in _entries(path, data, handle.varint(), handle.varint()):
            fields = _message(value)
            if key == b"":
                shards = _number(fields, 1, 0)
                if _number(fields, 2, 0):
                    raise CorruptTableError(f"{path}: the checkpoint must be little-endian, and is big-endian")
                continue
            name = key.decode("utf-8", "replace")
            tensors[name] = _tensor(path, f"{prefix}.data", name, fields, shards)
    return tensors


class _Bytes:
    """Bytes of a file from an offset to an end, read from their begin on."""

    def __init__(self, path: str, data: bytes, at: int, end: int):
        self.path, self.data, self.at, self.end = path, data, at, end

    def __len__(self) -> int:
        return self.end - self.at

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self.error("a number must have at most 10 bytes")

    def take(self, size: int) -> bytes:
        if size > len(self):
            raise self.error(f"{size} bytes must follow, but only {len(self)} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def error(self, text: str) -> CorruptTableError:
        return CorruptTableError(f"{self.path}, offset {self.at}: {text}; restore the checkpoint from a copy")


def _entries(path: str, data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, _Bytes]]:
    """Keys and values of a block."""
    if offset + size + _TRAILER_BYTES > len(data):
        raise CorruptTableError(
            f"{path} must have a block of {size} bytes at offset {offset}, but ends at {len(data)}; restore the"
            " checkpoint from a copy"
        )
    kind, crc = struct.unpack_from("<BI", data, offset + size)
    if masked(crc32c(data[offset : offset + size + 1])) != crc:
        raise CorruptTableError(
            f"{path}, offset {offset}: the block of {size} bytes has another checksum than was written; restore the"
            " checkpoint from a copy"
        )
    if kind:
        raise CorruptTableError(
            f"{path}, offset {offset}: blocks must not be compressed, as TensorFlow writes them, got type {kind}"
        )
    block = _Bytes(path, data, offset, offset + size)
    if size < 4:
        raise block.error("a block must have 4 bytes or more")
    restarts = struct.unpack_from("<I", data, offset + size - 4)[0]
    if 4 * restarts + 4 > size:
        raise block.error(f"the block must have {restarts} restarts, but has {size} bytes")
    block.end -= 4 * restarts + 4
    key = b""
    while len(block):
        shared, rest, length = block.varint(), block.varint(), block.varint()
        if shared > len(key):
            raise block.error(f"a key must share at most {len(key)} bytes with the key before, got {shared}")
        key = key[:shared] + block.take(rest)
        begin = block.at
        block.take(length)
        yield key, _Bytes(path, data, begin, begin + length)


def _message(value: _Bytes) -> _Fields:
    """Fields of a protocol buffer: {number: values}."""
    fields: _Fields = {}
    while len(value):
        tag = value.varint()
        match tag & 7:
            case 0:
                found: int | bytes = value.varint()
            case 1:
                found = int.from_bytes(value.take(8), "little")
            case 2:
                found = value.take(value.varint())
            case 5:
                found = int.from_bytes(value.take(4), "little")
            case kind:
                raise value.error(f"a field must be of type 0, 1, 2 or 5, got {kind}")
        fields.setdefault(tag >> 3, []).append(found)
    return fields


def _number(fields: Mapping[int, list["int | bytes"]], field: int, default: int) -> int:
    value = fields.get(field, [default])[-1]
    return value if isinstance(value, int) else default


def _tensor(path: str, data_path: str, name: str, fields: _Fields, shards: int) -> BundleTensor:
    shape = []
    for text in fields.get(2, []):
        if isinstance(text, bytes):
            for dim in _message(_Bytes(path, text, 0, len(text))).get(2, []):
                if isinstance(dim, bytes):
                    shape.append(_number(_message(_Bytes(path, dim, 0, len(dim))), 1, 0))
    number = _number(fields, 1, 0)
    dtype, shard = _DTYPES.get(number, f"type {number}"), _number(fields, 3, 0)
    offset, size = _number(fields, 4, 0), _number(fields, 5, 0)
    if dtype in _DTYPES.values():
        item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        values = 1
        for length in shape:
            values *= length
        if 7 in fields:
            dtype = "slices"  # A partitioned variable, whose parts have entries of their own.
        elif values * item != size or shard >= shards:
            raise CorruptTableError(
                f"{path}: tensor {name!r} must have {values} values of {dtype}, {values * item} bytes, in one of"
                f" {shards} files, got {size} bytes in file {shard}; restore the checkpoint from a copy"
            )
    part = FilePart(f"{data_path}-{shard:05d}-of-{shards:05d}", offset, shape[0] if shape else 1, _number(fields, 6, 0))
    return BundleTensor("string" if number == _STRING else dtype, tuple(shape), part)


def _read_all(fs: FileSystem, path: str) -> bytes:
    try:
        size = fs.size(path)
    except FileNotFoundError as error:
        raise SnapshotNotFoundError(f"no checkpoint of TensorFlow: there is no file {path}") from error
    data = bytearray(size)
    with doing("read", path):
        file = fs.open(path)
        try:
            got = fs.read_into(file, memoryview(data), 0) if size else 0
        finally:
            fs.close(file)
    if got != size:
        raise CorruptTableError(f"{path} became shorter while it was read")
    return bytes(data)
