"""Descriptions of snapshots in an object store: JSON texts beside the pieces. README.md lists their keys.

A push of a part writes the pieces first and the text of the part last. The push that then finds the texts of all parts
writes `current.json`. So a snapshot is in the store if, and only if, `current.json` names it. `newest.json` is for
readers that follow a job: they read one object, and list nothing. It may lag behind, and may name a deleted snapshot.
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from oneemb.storage.errors import CorruptTableError, FormatVersionError, SnapshotNotFoundError
from oneemb.storage.objects.object_store import ObjectStore, Piece
from oneemb.storage.snapshots.snapshot_parts import rank_folder_name
from oneemb.storage.table.chunk_files import chunk_paths
from oneemb.storage.table.snapshot_file import check_snapshot_name

_VERSION = 1
_NEWEST = "newest.json"
_IDENTITY = re.compile(r"[0-9a-f]{16,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredFile:
    """A file of a table.

    Args:
        path: path in the folder of the table.
        chunk: for a file of a chunk: number, blocks, bytes of keys and their checksum. A file with the same numbers has
            the same bytes.
    """

    path: str
    size: int
    pieces: tuple[Piece, ...]
    chunk: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredPart:
    """A part of a snapshot.

    Args:
        name, identity: of the snapshot.
        table_name: name of the part as a snapshot of its table.
        shard, shards: number of the part, and of all parts.
        sequence: number of the part in the order of saves of its table.
        rows: number of rows of the part.
        since: (name, identity) of the parent of a delta; None = the snapshot is no delta.
        files: files of chunks, then the file of the snapshot.
        created: time of the save, in seconds since 1970; 0.0 = unknown, since an earlier release pushed the part.
    """

    name: str
    identity: str
    table_name: str
    shard: int
    shards: int
    sequence: int
    rows: int
    since: tuple[str, str] | None
    files: tuple[StoredFile, ...]
    created: float = 0.0

    @property
    def folder(self) -> str:
        """Folder of the part's table, within the folder of the snapshot."""
        return "." if self.shards == 1 else rank_folder_name(self.shard, self.shards)


class Current(NamedTuple):
    """The snapshot that a store has by a name."""

    identity: str
    shards: int
    """Number of parts."""
    sequence: int
    created: float
    """Time of the save, in seconds since 1970; 0.0 = unknown, since an earlier release pushed the snapshot."""


def put_part(store: ObjectStore, part: StoredPart) -> bool:
    """Write the text of a part whose pieces are all in the store. Returns whether all parts are now there."""
    store.put_text(_part_key(part.name, part.identity, part.shard), {"version": _VERSION, **asdict(part)})
    if any(not has_part(store, part.name, part.identity, shard) for shard in range(part.shards)):
        return False
    current = {
        "version": _VERSION, "identity": part.identity, "shards": part.shards, "sequence": part.sequence,
        "created": part.created,
    }  # fmt: skip
    known = _current(store, part.name)
    if known is None or known["identity"] == part.identity or known["sequence"] <= part.sequence:
        store.put_text(_current_key(part.name), current)
        newest = newest_in(store)
        if newest is None or newest[1] != part.identity and newest[2] <= part.sequence:
            _put_newest(store, part.name, current)
    return True


def has_part(store: ObjectStore, name: str, identity: str, shard: int) -> bool:
    """Whether the text of a part is in the store."""
    return store.size_of(_part_key(name, identity, shard)) is not None


def get_part(store: ObjectStore, name: str, identity: str, shard: int) -> StoredPart:
    """A part of a snapshot. CorruptTableError if it is missing or damaged."""
    key = _part_key(name, identity, shard)
    fields = store.get_text(key)
    if fields is None:
        raise CorruptTableError(f"{store.url}/{key} is missing, though a snapshot needs it; push the snapshot again")
    try:
        _check_version(fields, store, key)
        fields["created"] = _time(fields)
        part = StoredPart(**{field: fields[field] for field in StoredPart.__dataclass_fields__})
        check_snapshot_name(part.table_name)
        numbers = _number(part.shard), _number(part.shards), _number(part.sequence), _number(part.rows)
        if not numbers[0] < numbers[1]:
            raise ValueError(f"the number of a part must be below that of all parts, got {numbers[0]} of {numbers[1]}")
        files = _files_of(fields["files"])
        since = None if part.since is None else (str(part.since[0]), str(part.since[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptTableError(f"{store.url}/{key} is no description of a part: {error!r}; push it again") from error
    if (part.name, part.identity, part.shard) != (name, identity, shard):
        raise CorruptTableError(f"{store.url}/{key} describes another part, {part.name!r}; push the snapshot again")
    return replace(part, files=files, since=since)


def current_of(store: ObjectStore, name: str) -> Current:
    """The snapshot of this name. SnapshotNotFoundError if there is none."""
    found = _current(store, name)
    if found is None:
        raise SnapshotNotFoundError(
            f"no snapshot named {name!r} in {store.url}; there are: {', '.join(map(repr, names_in(store))) or 'none'}"
        )
    return Current(str(found["identity"]), int(found["shards"]), int(found["sequence"]), _time(found))


def has_snapshot(store: ObjectStore, name: str, identity: str | None) -> bool:
    """Whether a store has the snapshot of this name and identity; None = of any identity."""
    found = _current(store, name)
    return found is not None and identity in (None, str(found["identity"]))


def newest_in(store: ObjectStore) -> tuple[str, str, int] | None:
    """(name, identity, sequence) of the snapshot that was saved last; None = the store has none."""
    fields = store.get_text(_NEWEST)
    if fields is None:
        return None
    _check_current(fields, store, _NEWEST)
    try:
        check_snapshot_name(fields.get("name", ""))
    except (TypeError, ValueError) as error:
        raise CorruptTableError(
            f"{store.url}/{_NEWEST} names no snapshot: {error}; delete the object and push a snapshot again"
        ) from error
    return fields["name"], fields["identity"], fields["sequence"]


def names_in(store: ObjectStore) -> list[str]:
    """Names of the snapshots in the store, sorted."""
    return sorted(unquote(key.split("/")[1]) for key in store.keys("snapshots/") if key.endswith("/current.json"))


def part_keys_in(store: ObjectStore) -> list[tuple[str, str, int]]:
    """(name, identity, shard) of all parts in the store, those of incomplete snapshots included."""
    found = []
    for key in store.keys("snapshots/"):
        words = key.split("/")
        if len(words) == 4 and words[3].removesuffix(".json").isdecimal():
            found.append((unquote(words[1]), words[2], int(words[3].removesuffix(".json"))))
    return sorted(found)


def remove_part(store: ObjectStore, name: str, identity: str, shard: int) -> None:
    """Remove the text of a part."""
    store.remove(_part_key(name, identity, shard))


def remove_current(store: ObjectStore, name: str) -> None:
    """Remove `current.json` of a name: the store then has no snapshot of this name."""
    store.remove(_current_key(name))
    newest = newest_in(store)
    if newest is not None and newest[0] == name:
        left = {one: found for one in names_in(store) if (found := _current(store, one)) is not None}
        if left:
            last = max(left, key=lambda one: int(left[one]["sequence"]))
            _put_newest(store, last, left[last])
        else:
            store.remove(_NEWEST)


def age_of_part(store: ObjectStore, name: str, identity: str, shard: int) -> float:
    """Seconds since the text of a part was written."""
    return store.age_s(_part_key(name, identity, shard))


def _current(store: ObjectStore, name: str) -> dict[str, Any] | None:
    key = _current_key(name)
    fields = store.get_text(key)
    if fields is None:
        return None
    _check_current(fields, store, key)
    return fields


def _put_newest(store: ObjectStore, name: str, current: dict[str, Any]) -> None:
    store.put_text(_NEWEST, {**current, "name": name})


def _check_current(fields: dict[str, Any], store: ObjectStore, key: str) -> None:
    """Raise CorruptTableError unless a text names a snapshot."""
    _check_version(fields, store, key)
    identity = fields.get("identity")
    try:
        is_sound = _number(fields.get("shards")) > 0 and _number(fields.get("sequence")) >= 0
    except ValueError:
        is_sound = False
    if not is_sound or not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise CorruptTableError(f"{store.url}/{key} names no snapshot; push the snapshot again")


def _check_version(fields: dict[str, Any], store: ObjectStore, key: str) -> None:
    if fields.get("version") != _VERSION:
        raise FormatVersionError(
            f"{store.url}/{key} has version {fields.get('version')!r}, this release reads version {_VERSION}; use the"
            " release that wrote it"
        )


def _files_of(entries: Any) -> tuple[StoredFile, ...]:
    """The files that a text lists. ValueError unless they are the two files of each chunk, then that of a snapshot."""
    if not isinstance(entries, list) or len(entries) % 2 == 0:
        raise ValueError("the files must be two for each chunk and one of a snapshot")
    files = tuple(map(_file_of, entries))
    for n, file in enumerate(files[:-1]):
        if len(file.chunk) != 4 or file.chunk != files[n - n % 2].chunk:
            raise ValueError(f"a chunk must have four numbers, the same for both files, got {list(file.chunk)}")
        if file.path != chunk_paths("chunks", file.chunk[0])[n % 2]:
            raise ValueError(f"the path of a file must be that of its chunk, got {file.path!r}")
    folder, _, name = files[-1].path.partition("/")
    if folder != "snapshots" or not name.isascii() or "/" in name or name.strip(".") == "" or "\0" in name:
        raise ValueError(f"the path of the last file must be that of a snapshot, got {files[-1].path!r}")
    return files


def _file_of(fields: dict[str, Any]) -> StoredFile:
    """The file that an entry of a text describes."""
    pieces = tuple((_digest(digest), _number(size)) for digest, size in fields["pieces"])
    if not isinstance(fields["path"], str):
        raise ValueError(f"the path of a file must be a text, got {fields['path']!r}")
    return StoredFile(fields["path"], _number(fields["size"]), pieces, tuple(map(_number, fields["chunk"])))


def _number(value: Any) -> int:
    """The value. ValueError unless it is an integer from 0 on, of 64 bits."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"a number must be an integer of 64 bits, got {value!r}")
    return value


def _time(fields: dict[str, Any]) -> float:
    """Time of a save in a text, in seconds since 1970; 0.0 = the text has none."""
    value = fields.get("created")
    return float(value) if isinstance(value, int | float) and 0 <= value < 1 << 40 else 0.0


def _digest(value: Any) -> str:
    """The value. ValueError unless it is a SHA-256, since it becomes the key of an object."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"a piece must be named by its SHA-256, got {value!r}")
    return value


def _folder_of(name: str) -> str:
    return f"snapshots/{quote(name, safe='').replace('.', '%2E')}"  # A name of dots would be another folder.


def _part_key(name: str, identity: str, shard: int) -> str:
    return f"{_folder_of(name)}/{identity}/{shard}.json"


def _current_key(name: str) -> str:
    return f"{_folder_of(name)}/current.json"
