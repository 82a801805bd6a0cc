"""Deletes snapshots of an object store, and removes objects that no snapshot needs.

Invariants:
- a snapshot is gone once `current.json` of its name is; its parts and objects follow, and may stay for a while;
- an object goes before the last text that names it, so cleaning that is killed is continued by the next one;
- no object that a running push counts on is removed (marks.py).
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oneemb.storage.errors import CorruptTableError, SnapshotNeededError, SnapshotNotFoundError
from oneemb.storage.objects.manifests import (
    StoredPart,
    age_of_part,
    current_of,
    get_part,
    names_in,
    part_keys_in,
    remove_current,
    remove_part,
)
from oneemb.storage.objects.marks import Cleaning
from oneemb.storage.objects.object_store import ObjectStore, object_key

_DAY_S = 86400.0


@dataclass
class CleanResult:
    """Result of `clean_store`: numbers of objects and of parts that were removed, and the bytes of the objects."""

    objects: int = 0
    parts: int = 0
    bytes: int = 0


def delete_stored(url: str, name: str, *, options: dict[str, Any] | None = None) -> None:
    """Delete a snapshot from an object store. `clean_store` then removes the objects that no other snapshot needs.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        SnapshotNeededError: the snapshot is the parent of deltas in the store.
        StorageError: the store cannot be used.
    """
    store = ObjectStore(url, options)
    current_of(store, name)
    children = [child for child, parent in _parents_in(store).items() if parent == name]
    if children:
        raise SnapshotNeededError(
            f"snapshot {name!r} in {store.url} must not be deleted before its deltas"
            f" {', '.join(sorted(map(repr, children)))}; delete these first"
        )
    remove_current(store, name)
    for other, identity, shard in part_keys_in(store):
        if other == name:
            remove_part(store, other, identity, shard)


def forget_stored(store: ObjectStore, names: Iterable[str], kept: Collection[str] | None = None) -> None:
    """Remove the names of snapshots, so that `clean_parts` removes their parts and objects. The name of a snapshot with
    deltas stays. A missing name is no error.

    Args:
        names: deltas before their parents.
        kept: if given, a snapshot with deltas is removed together with all of them, unless one of these deltas is newer
            than the oldest snapshot of `kept`.
    """
    parents = _parents_in(store)
    for name in names:
        _forget(store, name, kept, parents)


def _forget(store: ObjectStore, name: str, kept: Collection[str] | None, parents: dict[str, str]) -> None:
    """Remove the name of one snapshot; see `forget_stored`. `parents`: {delta: parent} of the names that are left."""
    deltas = [child for child, parent in parents.items() if parent == name]
    for delta in deltas:
        deltas += [child for child, parent in parents.items() if parent == delta and child not in deltas]
    if deltas:
        if kept is None:
            return
        order = {one: current_of(store, one)[2] for one in {*deltas, *kept}.intersection(names_in(store))}
        if max(order.get(one, 0) for one in deltas) > min((order[one] for one in kept if one in order), default=0):
            return
    for one in (*reversed(deltas), name):
        with suppress(SnapshotNotFoundError):
            current_of(store, one)
            remove_current(store, one)
        parents.pop(one, None)


def clean_store(
    url: str, older_than_s: float = _DAY_S, *, options: dict[str, Any] | None = None, writer: str = ""
) -> CleanResult:
    """Remove what no snapshot in an object store needs: objects that killed pushes and deleted snapshots have left, and
    parts of snapshots that lack other parts or were replaced.

    Args:
        older_than_s: least age of the objects and parts that are removed, in seconds.
        writer: name of the caller whose own pushes do not run at the same time.

    Raises:
        LockedError: a push is at work.
        StorageError: the store cannot be used.
    """
    store = ObjectStore(url, options)
    with Cleaning(store, writer) as mark:
        result, needed = _clean_parts(store, older_than_s, mark)
        for key in list(store.keys("")):
            mark.write_again()
            # Where the store is a folder, a killed process leaves files with this suffix.
            is_unneeded = key.startswith("objects/") and key not in needed or key.endswith(".tmp")
            if is_unneeded and store.age_s(key) >= older_than_s:
                result.bytes += store.size_of(key) or 0
                store.remove(key)
                result.objects += 1
    return result


def clean_parts(store: ObjectStore, writer: str) -> None:
    """Remove the parts of snapshots that are not, or no longer, in the store, with their objects. Unlike `clean_store`,
    the call lists no objects, so objects of a push that was killed before it described its part stay. Raises as
    `clean_store`."""
    with Cleaning(store, writer) as mark:
        _clean_parts(store, 0.0, mark)


def _clean_parts(store: ObjectStore, older_than_s: float, mark: Cleaning) -> tuple[CleanResult, set[str]]:
    """Remove parts of this age that belong to no snapshot. Returns (what was removed, keys of needed objects)."""
    current = {name: current_of(store, name)[0] for name in names_in(store)}
    needed: set[str] = set()
    unneeded: list[tuple[tuple[str, str, int], dict[str, int]]] = []
    for name, identity, shard in part_keys_in(store):
        mark.write_again()
        if current.get(name) == identity or age_of_part(store, name, identity, shard) < older_than_s:
            needed.update(_objects_of(get_part(store, name, identity, shard)))
            continue
        try:
            unneeded.append(((name, identity, shard), _objects_of(get_part(store, name, identity, shard))))
        except CorruptTableError:  # `clean_store` finds the objects of this part among all objects.
            unneeded.append(((name, identity, shard), {}))
    result = CleanResult()
    for part, objects in unneeded:
        for key, size in objects.items():
            mark.write_again()
            if key not in needed and store.size_of(key) is not None and store.age_s(key) >= older_than_s:
                store.remove(key)
                result.objects += 1
                result.bytes += size
        remove_part(store, *part)
        result.parts += 1
    return result, needed


def _objects_of(part: StoredPart) -> dict[str, int]:
    """{key: number of bytes} of the objects of a part."""
    return {object_key(digest): size for file in part.files for digest, size in file.pieces}


def _parents_in(store: ObjectStore) -> dict[str, str]:
    """{name of a delta in the store: name of its parent}."""
    parents, current = {}, {name: current_of(store, name)[0] for name in names_in(store)}
    for name, identity, shard in part_keys_in(store):
        if current.get(name) == identity and (since := get_part(store, name, identity, shard).since) is not None:
            parents[name] = since[0]
    return parents
