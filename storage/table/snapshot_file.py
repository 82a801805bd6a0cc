"""Writes, reads and removes the files of snapshots.  FORMAT.md describes their bytes.

A snapshot is one file that appears by a rename, so it exists completely or not at all. `SnapshotFiles.write` numbers
the steps of a save as FORMAT.md does.

Invariant: bytes are compared with their checksum before they are used, and memory is allocated only for bytes that the
file has.
"""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np

from oneemb.kernels.checksum import Buffer, xxh64
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, doing, storage_error
from oneemb.storage.new_files import replace_file
from oneemb.storage.table.file_header import HEADER_BYTES, SNAPSHOT_MAGIC, read_header
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord, decode_manifest, encode_snapshot

_SUFFIX = ".snapshot"
_TEMPORARY = ".tmp"
_SUM = struct.Struct("<Q")
_NAME_BYTES_MAX = 200
_READ_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 48
_SAVED = re.compile(rb'"sequence": ?(\d{1,18}), ?"created": ?(\d{1,12}(?:\.\d{1,12})?),')
"""Two fields of a manifest. Quotes in texts are escaped, so no text has these bytes."""


class SnapshotFiles:
    """The snapshot files in a directory. For reading, the directory need not exist."""

    def __init__(self, fs: FileSystem, directory: str):
        self._fs = fs
        self.directory = directory

    def names(self) -> list[str]:
        """Names of all snapshots, sorted. Files with other names than a save gives are left out."""
        return sorted(name for listed in self._listed() if (name := _name_of(listed)) is not None)

    def leftovers(self) -> list[str]:
        """Paths of temporary files that unfinished saves have left."""
        return [
            f"{self.directory}/{listed}" for listed in self._listed()
            if listed.endswith(_TEMPORARY) and _name_of(listed[: -len(_TEMPORARY)]) is not None
        ]  # fmt: skip

    def path(self, name: str) -> str:
        """Path of the file of snapshot `name`. Raises TypeError or ValueError if the name is invalid."""
        return f"{self.directory}/{_file_name(name)}"

    def write(self, record: SnapshotRecord) -> None:
        """Write a snapshot file, which replaces an older one of the same name. The snapshot's chunks must be durable
        already (steps 1 to 3).

        Raises:
            StorageError: the file is not written; an older one is unchanged.
            RenameUncertainError: the file is written, but a loss of power may bring the older one back.
        """
        data = encode_snapshot(record)
        record.info = replace(record.info, bytes=record.info.bytes + len(data))
        with doing("write the snapshot", record.path):
            # 4. write under a temporary name  5. sync the file  6. rename it, atomically. After a failure the next open
            # of the table removes the temporary file.
            replace_file(self._fs, record.path, data, record.path + _TEMPORARY)
        try:
            self._fs.sync_directory(self.directory)  # 7. sync its name
        except OSError as error:
            raise RenameUncertainError(record.info.name, "written", error, self.directory) from error

    def remove(self, name: str) -> None:
        """Remove a snapshot file, durably. After a StorageError the file still exists; after a RenameUncertainError it
        is removed, but a loss of power may bring it back."""
        path = self.path(name)
        with doing("remove the snapshot", path):
            self._fs.remove(path)
        try:
            self._fs.sync_directory(self.directory)
        except OSError as error:
            raise RenameUncertainError(name, "removed", error, self.directory) from error

    def read(self, name: str) -> SnapshotRecord:
        """Read the snapshot of this name, without its lists of rows and its arrays.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
            CorruptTableError: the file is damaged.
            FormatVersionError: another release wrote it.
        """
        path = self.path(name)
        with self._opened(path, name) as file:
            return self._read(file, path, name)

    def read_checked(self, name: str) -> SnapshotRecord:
        """Read the snapshot of this name, and compare every byte of its file with a checksum. Raises as `read` does."""
        record = self.read(name)
        for part in record.parts:
            self.read_bits(record, part)
        for array in record.arrays:
            self.read_array(record, array)
        return record

    def saved(self, name: str) -> tuple[int, float] | None:
        """(sequence, time) of the save of a snapshot that `read` cannot read. No checksum holds for these bytes, so
        each number may be wrong. None = the file has no such bytes."""
        try:
            with self._opened(self.path(name), name) as file:
                found = _SAVED.search(self._bytes(file, 0, _READ_BYTES))
        except StorageError:
            return None
        return None if found is None else (int(found[1]), float(found[2]))

    @contextmanager
    def _opened(self, path: str, name: str) -> Iterator[int]:
        """Open the file of a snapshot for a `with` block. Turns errors of the block into StorageErrors."""
        try:
            file = self._fs.open(path)
        except FileNotFoundError as error:
            raise self.not_found(name) from error
        except OSError as error:
            raise storage_error(error, "open the snapshot", path) from error
        try:
            yield file
        except IsADirectoryError as error:
            raise CorruptTableError(f"{path} must be a file that begins at offset 0 with {SNAPSHOT_MAGIC!r}, it is a "
                                    f"directory; move it elsewhere") from error  # fmt: skip
        except OSError as error:
            raise storage_error(error, "read the snapshot", path) from error
        finally:
            self._fs.close(file)

    def read_bits(self, record: SnapshotRecord, part: ChunkPart) -> np.ndarray:
        """Read the list of rows of one part: uint8, one bit for each row, a whole number of 64-bit words. Raises
        CorruptTableError if the list is damaged."""
        bit_N = np.frombuffer(self._piece(record, part.bits_offset, record.bits_bytes(part)), np.uint8)
        _check(bit_N, record.bits_bytes(part), part.bits_sum, record.path, part.bits_offset, "list of rows")
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

    def read_array(self, record: SnapshotRecord, name: str) -> np.ndarray:
        """Read an array that the snapshot has beside its rows. Raises CorruptTableError if the array is damaged."""
        array = record.arrays[name]
        size = -(-array.nbytes // 8) * 8
        data = self._piece(record, array.offset, size)
        _check(data, size, array.sum, record.path, array.offset, f"array {name!r}")
        return np.frombuffer(data, array.dtype, math.prod(array.shape)).reshape(array.shape)

    def _piece(self, record: SnapshotRecord, offset: int, size: int) -> bytes:
        """Read bytes of a snapshot's file; see `_bytes`."""
        with self._opened(record.path, record.info.name) as file:
            return self._bytes(file, offset, size)

    def not_found(self, name: str) -> SnapshotNotFoundError:
        """The error for a snapshot that does not exist."""
        there = ", ".join(repr(other) for other in self.names()) or "none"
        return SnapshotNotFoundError(f"no snapshot named {name!r} in {self.directory}; there are: {there}")

    def _read(self, file: int, path: str, name: str) -> SnapshotRecord:
        json_bytes, bits_bytes, arrays_bytes, _ = read_header(self._bytes(file, 0, HEADER_BYTES), SNAPSHOT_MAGIC, path)
        if json_bytes % 8 or not 0 < json_bytes < _FILE_BYTES_MAX:
            raise CorruptTableError(
                f"{path}: the manifest must have a multiple of 8 bytes, below {_FILE_BYTES_MAX}; by the header at"
                f" offset 0 it has {json_bytes}; run `oneemb check` on the table"
            )
        body = self._bytes(file, HEADER_BYTES, json_bytes)
        expected = self._bytes(file, HEADER_BYTES + json_bytes, _SUM.size)
        if len(expected) != _SUM.size:
            raise CorruptTableError(
                f"{path}: the manifest must end at offset {HEADER_BYTES + json_bytes + _SUM.size}, the file ends before"
                " it; restore the file from a copy, or delete the snapshot"
            )
        _check(body, json_bytes, _SUM.unpack(expected)[0], path, HEADER_BYTES, "manifest")
        record = decode_manifest(body, HEADER_BYTES + json_bytes + _SUM.size, path, name)
        begin = HEADER_BYTES + json_bytes + _SUM.size
        bits = sum(record.bits_bytes(part) for part in record.parts)
        arrays = sum(-(-array.nbytes // 8) * 8 for array in record.arrays.values())
        end = begin + bits + arrays
        if (bits, arrays) != (bits_bytes, arrays_bytes) or not self._bytes(file, end - 1, 1):
            raise CorruptTableError(
                f"{path}: the lists of rows of {len(record.parts)} chunks must end at offset {begin + bits}, and"
                f" {len(record.arrays)} arrays at {end}; the header at offset 0 gives them {bits_bytes} and"
                f" {arrays_bytes} bytes, or the file ends before"
            )
        return record

    def _bytes(self, file: int, offset: int, size: int) -> bytes:
        """Read `size` bytes of a file, or fewer if the file ends before. Allocates memory only for bytes that exist."""
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
    """A snapshot was written or removed, but a loss of power may undo that."""

    def __init__(self, name: str, done: str, error: OSError, directory: str):
        super().__init__(
            f"{storage_error(error, 'sync the directory', directory)}; the snapshot {name!r} is {done}, but a loss of "
            f"power may undo that until a later save or delete of any snapshot succeeds"
        )


def check_snapshot_name(name: str) -> None:
    """Raise TypeError or ValueError if the name is invalid for a snapshot."""
    _file_name(name)


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
    """Name of the snapshot whose file has this name; None if no snapshot's file has such a name."""
    if not file_name.endswith(_SUFFIX):
        return None
    name = unquote(file_name[: -len(_SUFFIX)])
    try:
        return name if _file_name(name) == file_name else None
    except ValueError:
        return None  # The name is empty, or not valid UTF-8.


def _check(data: Buffer, size: int, expected: int, path: str, offset: int, what: str) -> None:
    if len(data) != size:
        raise CorruptTableError(
            f"{path} is cut off: the {what} at offset {offset} must have {size} bytes, {len(data)} are there; "
            f"run `oneemb check` on the table"
        )
    actual = xxh64(data)
    if actual != expected:
        raise CorruptTableError(
            f"{path}: the {what} at offset {offset}, {size} bytes, has checksum {actual:016x}, written as "
            f"{expected:016x}; run `oneemb check` on the table"
        )
