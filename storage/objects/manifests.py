"""Descriptions of snapshots in an object store: JSON texts beside the pieces.

    snapshots/<name>/current.json                identity and number of parts of the complete snapshot of this name
    snapshots/<name>/<identity>/<shard>.json     one part: its files, each as a list of pieces
    objects/<2 digits>/<SHA-256>                 a piece, named by its bytes
    newest.json                                  name of the complete snapshot with the greatest sequence

A push of a part writes the pieces first and the text of the part last. The push that then finds the texts of all parts
writes `current.json`. So a snapshot is in the store if, and only if, `current.json` names it. `newest.json` is for
readers that follow a job: they read one object, and list nothing. It may lag behind, and may name a deleted snapshot.
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from oneemb.storage.errors import CorruptTableError, FormatVersionError, SnapshotNotFoundError
from oneemb.storage.objects.object_store import ObjectStore, Piece
from oneemb.storage.snapshots.snapshot_parts import rank_folder_name

_VERSION = 1
_NEWEST = "newest.json"
_IDENTITY = re.compile(r"[0-9a-f]{16,32}")


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

    @property
    def folder(self) -> str:
        """Folder of the part's table, within the folder of the snapshot."""
        return "." if self.shards == 1 else rank_folder_name(self.shard, self.shards)


def put_part(store: ObjectStore, part: StoredPart) -> bool:
    """Write the text of a part whose pieces are all in the store. Returns whether all parts are now there."""
    store.put_text(_part_key(part.name, part.identity, part.shard), {"version": _VERSION, **asdict(part)})
    keys = [_part_key(part.name, part.identity, shard) for shard in range(part.shards)]
    if any(store.size_of(key) is None for key in keys):
        return False
    current = {"version": _VERSION, "identity": part.identity, "shards": part.shards, "sequence": part.sequence}
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
        part = StoredPart(**{field: fields[field] for field in StoredPart.__dataclass_fields__})
        files = tuple(map(_file_of, fields["files"]))
        since = None if part.since is None else (str(part.since[0]), str(part.since[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptTableError(f"{store.url}/{key} is no description of a part: {error!r}; push it again") from error
    if (part.name, part.identity, part.shard) != (name, identity, shard):
        raise CorruptTableError(f"{store.url}/{key} describes another part, {part.name!r}; push the snapshot again")
    return replace(part, files=files, since=since)


def current_of(store: ObjectStore, name: str) -> tuple[str, int, int]:
    """(identity, number of parts, sequence) of the snapshot of this name. SnapshotNotFoundError if there is none."""
    found = _current(store, name)
    if found is None:
        raise SnapshotNotFoundError(
            f"no snapshot named {name!r} in {store.url}; there are: {', '.join(map(repr, names_in(store))) or 'none'}"
        )
    return str(found["identity"]), int(found["shards"]), int(found["sequence"])


def newest_in(store: ObjectStore) -> tuple[str, str, int] | None:
    """(name, identity, sequence) of the snapshot that was saved last; None = the store has none."""
    fields = store.get_text(_NEWEST)
    if fields is None:
        return None
    _check_current(fields, store, _NEWEST)
    if not isinstance(fields.get("name"), str):
        raise CorruptTableError(f"{store.url}/{_NEWEST} names no snapshot; delete the object and push a snapshot again")
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
    identity, numbers = fields.get("identity"), [fields.get(field) for field in ("shards", "sequence")]
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity) or not all(type(n) is int for n in numbers):
        raise CorruptTableError(f"{store.url}/{key} names no snapshot; push the snapshot again")


def _check_version(fields: dict[str, Any], store: ObjectStore, key: str) -> None:
    if fields.get("version") != _VERSION:
        raise FormatVersionError(
            f"{store.url}/{key} has version {fields.get('version')!r}, this release reads version {_VERSION}; use the"
            " release that wrote it"
        )


def _file_of(fields: dict[str, Any]) -> StoredFile:
    """The file that an entry of a text describes."""
    pieces = tuple((str(digest), int(size)) for digest, size in fields["pieces"])
    return StoredFile(_relative(fields["path"]), int(fields["size"]), pieces, tuple(map(int, fields["chunk"])))


def _relative(path: str) -> str:
    """A path below a folder. ValueError if it leads elsewhere."""
    if not path or path.startswith("/") or any(word in ("", ".", "..") for word in path.split("/")) or "\0" in path:
        raise ValueError(f"the path of a file must lie in its table, got {path!r}")
    return path


def _folder_of(name: str) -> str:
    return f"snapshots/{quote(name, safe='').replace('.', '%2E')}"  # A name of dots would be another folder.


def _part_key(name: str, identity: str, shard: int) -> str:
    return f"{_folder_of(name)}/{identity}/{shard}.json"


def _current_key(name: str) -> str:
    return f"{_folder_of(name)}/current.json"
