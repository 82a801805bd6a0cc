"""The file NAMES of a file server: the number under which the server stores the values of each table and part.

    JSON in ASCII, with spaces up to a multiple of 8 bytes | XXH64 of all these bytes, little-endian

    {"version": 1, "identity": 32 hexadecimal digits, "values": [[table, part, [widths]], ...]}

The number is the index in the list `values`. Invariant: a table and part keep their number for ever, and the number is
durable before the first row is stored under it.
"""

import json
import struct
import uuid

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import CorruptTableError, FormatVersionError
from oneemb.storage.fs import FileSystem, doing, read_file
from oneemb.storage.new_files import replace_file

_SUM = struct.Struct("<Q")
_VERSION = 1


class Value:
    """Where a part of a table's rows is stored: the number of the persistent table, and all widths that values of the
    part have had, in the order of their first use."""

    def __init__(self, number: int, widths: list[int]):
        self.number, self.widths = number, widths


class ValueNames:
    """Contents of the file NAMES at this path, which need not exist. The file is read here.

    Raises:
        CorruptTableError: the file is damaged.
        FormatVersionError: a later release wrote the file.
        StorageError: the file cannot be read.
    """

    def __init__(self, fs: FileSystem, path: str):
        self._fs, self.path = fs, path
        self.identity = uuid.uuid4().hex
        self.new = False
        """Whether there was no file."""
        self._values: dict[tuple[str, int], Value] = {}
        data = read_file(fs, path)
        if data is None:
            self.new = True
        else:
            self._read(data)

    @property
    def widths(self) -> list[int]:
        """All widths that any value has had, ascending."""
        return sorted({width for value in self._values.values() for width in value.widths})

    def find(self, table: str, part: int) -> Value | None:
        """Where a part is stored; None = no row of the table has had this part."""
        return self._values.get((table, part))

    def add(self, table: str, part: int, width: int) -> Value:
        """Record durably that a part has values of this width. Returns where the part is stored. After a StorageError
        nothing has changed."""
        known = self._values.get((table, part))
        if known is not None and width in known.widths:
            return known
        value = Value(len(self._values), [width]) if known is None else Value(known.number, [*known.widths, width])
        self._write(self._values | {(table, part): value})
        self._values[table, part] = value
        return value

    def write(self) -> None:
        """Write the file, durably."""
        self._write(self._values)
        self.new = False

    def _write(self, values: dict[tuple[str, int], Value]) -> None:
        named = [[table, part, value.widths] for (table, part), value in values.items()]
        text = json.dumps({"version": _VERSION, "identity": self.identity, "values": named}).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        write_durably(self._fs, self.path, text + _SUM.pack(xxh64(text)))

    def _read(self, data: bytes) -> None:
        text, end = data[: -_SUM.size], data[-_SUM.size :]
        try:
            if len(text) % 8 or len(end) < _SUM.size or _SUM.unpack(end)[0] != xxh64(text):
                raise ValueError("its checksum does not match")
            fields = json.loads(text)
            if fields["version"] != _VERSION:
                raise FormatVersionError(
                    f"{self.path} has format {fields['version']}, and this release reads {_VERSION}: a later release"
                    " wrote it; open it with that one"
                )
            self.identity = str(fields["identity"])
            for number, (table, part, widths) in enumerate(fields["values"]):
                self._values[str(table), int(part)] = Value(number, [int(width) for width in widths])
            if len(self._values) != len(fields["values"]):
                raise ValueError("it names a part twice")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptTableError(
                f"{self.path}, {len(data)} bytes, is not what was written: {error}; restore it from a copy of this"
                " folder: it says to which tables the rows belong"
            ) from error


def write_durably(fs: FileSystem, path: str, data: bytes) -> None:
    """Replace a whole file, durably and atomically. After a StorageError the file has its old or its new contents."""
    with doing("write", path):
        replace_file(fs, path, data, f"{path}.new")
        fs.sync_directory(path.rpartition("/")[0])
