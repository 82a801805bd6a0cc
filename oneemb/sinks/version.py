"""Version of a table that a sink shows, as the sink stores it beside the rows."""

import hashlib
import json
import operator
import zlib
from collections.abc import Collection, Sequence
from typing import IO, Any, NamedTuple

from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import FileSystem, doing, read_file
from oneemb.storage.new_files import replace_file
from oneemb.storage.snapshots.row_cap import RowCap
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

_SUM = "crc32"
_READ_BYTES = 1 << 20


class PublishError(StorageError):
    """A sink does not have the newest version, or cannot get it. The message names the sink and says what to do."""


class TableVersion(NamedTuple):
    """A snapshot or delta of a table."""

    name: str
    """Name of the snapshot."""
    identity: str
    """Identity of the snapshot, which no other snapshot has."""
    sequence: int
    """Number that increases with each snapshot of the table."""
    embedding: str
    """Name of the embedding that saved the snapshot; "" if none did."""
    history: str = ""
    """Hash of the identities of the snapshots that the rows were read from; "" if an earlier release wrote it. The rows
    that stay under a cap depend on it, and `oneemb reshard` changes it."""

    @classmethod
    def of(cls, snapshot: PartedSnapshot) -> "TableVersion":
        """Version of a snapshot."""
        chain = " ".join(link.identity for link in (*snapshot.before, snapshot))
        return cls.of_info(snapshot.info, hashlib.sha256(chain.encode()).hexdigest()[:32])

    @classmethod
    def of_info(cls, info: SnapshotInfo, history: str) -> "TableVersion":
        """Version of the snapshot that `info` describes."""
        embedding = (info.meta.get("embedding") or {}).get("name", "")
        return cls(info.name, info.identity, info.sequence, embedding, history)

    def to_fields(self) -> dict[str, Any]:
        """The version as a dict that JSON can hold."""
        return self._asdict()

    @classmethod
    def of_fields(cls, found: object, where: str) -> "TableVersion":
        """Version in the dict that `to_fields` made. CorruptTableError, which names `where`, if it is no such dict."""
        kinds = {"name": str, "identity": str, "sequence": int, "embedding": str, "history": str}
        found = {"history": ""} | found if isinstance(found, dict) else found
        if not isinstance(found, dict) or any(type(found.get(key)) is not kind for key, kind in kinds.items()):
            raise CorruptTableError(
                f"{where} must hold the version that a publisher has written, got {repr(found)[:100]}; restore it from"
                " a copy, or remove it, and the sink gets all rows again"
            )
        return cls(*(found[key] for key in kinds))


def choice_of(tables: Sequence[int] | None, with_state: bool, max_rows: int | None = None) -> dict[str, Any]:
    """Choice of the rows and state that a sink gets, as a dict that JSON can hold. A sink stores its choice beside the
    version: a sink that was made with another choice shows no version, and gets all rows.

    Raises:
        ValueError: `tables` are no numbers of tables, or `max_rows` is no number of rows.
        TypeError: `with_state` is no bool.
    """
    if not isinstance(with_state, bool):
        raise TypeError(f"with_state must be True or False, got {type(with_state).__name__} {with_state!r:.100}")
    try:
        numbers = None if tables is None else sorted({operator.index(table) for table in tables})
    except TypeError as error:
        raise ValueError(f"tables must be a list of numbers of tables, or None for all, got {tables!r:.100}") from error
    if numbers is not None and (not numbers or numbers[0] < 0):
        raise ValueError(f"tables must be one number or more, each 0 or more, or None for all, got {tables!r:.100}")
    capped = {} if max_rows is None else {"max_rows": RowCap(max_rows).max_rows}
    return {"tables": numbers, "with_state": with_state} | capped


def load_json(text: str | bytes, where: str) -> object:
    """Object in a JSON text. CorruptTableError, which names `where`, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptTableError(
            f"{where} must hold JSON that a publisher has written, got {repr(text)[:100]}: {error}; restore it from a"
            " copy, or remove it, and the sink gets all rows again"
        ) from error


def unused_stem(stem: str, named: Collection[str]) -> str:
    """`stem`, or `stem` with a number if one of the files `named` has this stem: a named file must not be replaced."""
    stems, found, n = {file.partition(".")[0] for file in named}, stem, 2
    while found in stems:
        found, n = f"{stem}-{n}", n + 1
    return found


def read_json(fs: FileSystem, path: str) -> object:
    """Object in a JSON file; None = there is no file. CorruptTableError if the file holds no JSON, or its bytes are
    others than `write_json` wrote."""
    data = read_file(fs, path)
    found = None if data is None else load_json(data, path)
    if isinstance(found, dict) and _SUM in found:
        expected, has = found.pop(_SUM), zlib.crc32(json.dumps(found).encode())
        if has != expected:
            raise CorruptTableError(
                f"{path} must have {_SUM} {expected}, as it was written, it has {has}; restore it from a copy, or"
                " remove it, and the sink gets all rows again"
            )
    return found


def write_json(fs: FileSystem, path: str, value: dict[str, Any]) -> None:
    """Replace a JSON file, durably and atomically. The file gets the CRC-32 of the other fields, too."""
    with doing("write", path):
        summed = value | {_SUM: zlib.crc32(json.dumps(value).encode())}
        replace_file(fs, path, json.dumps(summed).encode())
        fs.sync_directory(path.rpartition("/")[0])


def sum_of(file: IO[bytes]) -> int:
    """CRC-32 of all bytes of a file."""
    found = 0
    while data := file.read(_READ_BYTES):
        found = zlib.crc32(data, found)
    return found
