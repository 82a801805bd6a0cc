"""Packs and reads the header of a file: the 128 bytes with which every file of a table begins. See FORMAT.md.

Invariant for this format and all later ones: magic, version, release and checksum stay at their offsets, so that any
release can tell a damaged file from a file of a later format.
"""

import struct
from functools import cache
from importlib import metadata

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import CorruptTableError, FormatVersionError

FORMAT_VERSION = 1
HEADER_BYTES = 128
ROWS_MAGIC = b"oneembRW"
KEYS_MAGIC = b"oneembKY"
SNAPSHOT_MAGIC = b"oneembSN"

# magic, version, length of the header, release, four numbers that each kind of file uses in its own way, zeros
_FIELDS = struct.Struct("<8sII24s4Q48x")
_SUM = struct.Struct("<Q")


def pack_header(magic: bytes, number_4: tuple[int, int, int, int]) -> bytes:
    """The bytes of a header with this magic and these four numbers."""
    fields = _FIELDS.pack(magic, FORMAT_VERSION, HEADER_BYTES, _release().encode()[:24], *number_4)
    return fields + _SUM.pack(xxh64(fields))


def read_header(header: bytes, magic: bytes, path: str) -> tuple[int, int, int, int]:
    """The four numbers of a header, after comparing its checksum. CorruptTableError if the header is damaged or has
    another magic, FormatVersionError if it has a format that this release does not read."""
    if len(header) < HEADER_BYTES:
        raise CorruptTableError(
            f"{path} is cut off: the header must have {HEADER_BYTES} bytes, the file has {len(header)};"
            " restore the file from a copy, or delete the snapshots that need it"
        )
    found_magic, version, _, release, *number_4 = _FIELDS.unpack(header[: _FIELDS.size])
    (expected,) = _SUM.unpack_from(header, _FIELDS.size)
    actual = xxh64(header[: _FIELDS.size])
    if expected != actual or found_magic != magic:
        raise CorruptTableError(
            f"{path}: the header at offset 0 is damaged: kind {found_magic!r} (must be {magic!r}), checksum "
            f"{actual:016x} (written as {expected:016x}); run `oneemb check` on the table"
        )
    if version != FORMAT_VERSION:
        made_by = release.rstrip(b"\0").decode("utf-8", "replace")
        raise FormatVersionError(
            f"{path} has format {version}, this release reads format {FORMAT_VERSION}; {made_by} wrote it: "
            f"install that release, or a later one that reads format {version}"
        )
    return (number_4[0], number_4[1], number_4[2], number_4[3])


@cache
def _release() -> str:
    try:
        return f"oneemb {metadata.version('oneemb')}"
    except metadata.PackageNotFoundError:
        return "oneemb"
