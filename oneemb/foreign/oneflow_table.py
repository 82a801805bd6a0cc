"""Files, numbers and snapshots of a table of OneFlow's one_embedding.

    <path>/KEY_SIZE, VALUE_SIZE, PHYSICAL_BLOCK_SIZE, NUM_LOGICAL_BLOCKS_PER_CHUNK    a number each, as text
    <path>/LOCK                                  must exist, else OneFlow treats the folder as a new table
    <path>/keys/key-<chunk>                      the keys of a chunk's rows, row after row; chunk: 12 decimal digits
    <path>/values/value-<chunk>                  its blocks; the rest of a block after its rows is unused
    <path>/snapshots/<name>/LIST                 names of the index files, one a line
    <path>/snapshots/<name>/index-<chunk>        rows of the snapshot in that chunk, uint64, counted through all chunks

A block is the physical block, or as many of them as one value needs. A put of rows begins on a fresh block.

`oneflow_reader.py` reads a snapshot, `oneflow_writer.py` writes one.
"""

import re
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.checksum import xxh64_words
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, storage_error

PIECE_BYTES = 1 << 20
_SHARDING_SEED = 1
_KEY_SIZES = (4, 8)
# Upper bounds for the size of a file with one of the table's numbers, and for the number.
_NUMBER_BYTES, _NUMBER_MAX = 64, 1 << 40
CHUNK_FILE = re.compile(r"(key|value|index)-([0-9]{12})")


@dataclass(frozen=True)
class OneFlowGeometry:
    """The four numbers of a table: bytes of a key (4 or 8), bytes of a row's values, bytes of the device's block, and
    number of logical blocks in a full chunk."""

    key_bytes: int
    value_bytes: int
    physical_block_size: int
    blocks_per_chunk: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a logical block, which holds one value or more."""
        return -(-self.value_bytes // self.physical_block_size) * self.physical_block_size

    @property
    def values_per_block(self) -> int:
        return self.block_bytes // self.value_bytes

    @property
    def values_per_chunk(self) -> int:
        return self.values_per_block * self.blocks_per_chunk


# Names of the files with the four numbers, in the order of the fields of `OneFlowGeometry`.
NUMBERS = ("KEY_SIZE", "VALUE_SIZE", "PHYSICAL_BLOCK_SIZE", "NUM_LOGICAL_BLOCKS_PER_CHUNK")


def is_oneflow_table(path: AnyPath) -> bool:
    """Whether the folder holds a table of OneFlow."""
    try:
        return LocalFileSystem().size(f"{absolute_path(path)}/{NUMBERS[0]}") > 0
    except OSError:
        return False


def read_oneflow_geometry(path: AnyPath, fs: FileSystem | None = None) -> OneFlowGeometry:
    """Geometry of the table at a path; StorageError if there is no table, CorruptTableError if a number is missing or
    out of its range."""
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    numbers = []
    for name in NUMBERS:
        try:
            size = fs.size(f"{path}/{name}")
            text = read_all(fs, f"{path}/{name}").decode("ascii", "replace").strip() if size <= _NUMBER_BYTES else "?"
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
    return [name for name in sorted(names_in(fs, directory)) if "LIST" in names_in(fs, f"{directory}/{name}")]


def oneflow_owner_of(id_N: np.ndarray, key_bytes: int, owners: int) -> np.ndarray:
    """Index of the path in which OneFlow stores each key, int64 [N]. Keys of 4 bytes are widened with zeros."""
    word_N = id_N.astype(np.int64).view(np.uint64)
    if key_bytes == 4:
        word_N = word_N & np.uint64(0xFFFFFFFF)
    return (xxh64_words(word_N, _SHARDING_SEED) % np.uint64(owners)).astype(np.int64)


# ---- files ----------------------------------------------------------------------------------------------------------


def chunk_name(kind: str, number: int) -> str:
    """Name of a chunk's file of kind "key", "value" or "index"."""
    return f"{kind}-{number:012d}"


def chunk_number(name: str, kind: str) -> int | None:
    """Number of the chunk whose file of this kind has this name; None = it is no such file."""
    match = CHUNK_FILE.fullmatch(name)
    return int(match[2]) if match and match[1] == kind else None


def names_in(fs: FileSystem, directory: str) -> list[str]:
    """Names in a folder; empty if there is no such folder."""
    try:
        return fs.names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_all(fs: FileSystem, path: str) -> bytearray:
    """Content of a file."""
    size, file = fs.size(path), fs.open(path)
    try:
        data = bytearray(size)
        if fs.read_into(file, memoryview(data), 0) != size:
            raise CorruptTableError(
                f"{path} became shorter while it was read, since a writer removes it; read it again"
            )
        return data
    finally:
        fs.close(file)
