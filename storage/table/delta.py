"""Deltas: snapshots that hold only the changes since a parent snapshot, and the chain from a delta to a whole snapshot,
which holds all rows of the table and has no parent.

A delta contains the rows that were written since its parent was saved. Its array `gone keys` has the keys that had a
row in the parent and have none now. The meta of its file has the fields of a `Delta`:

    base      a whole snapshot, number 0
    d1        parent base, number 1
    d2        parent d1, number 2          to load d2, load base, then apply d1, then d2

The number of a delta is greater than that of its parent.

Invariants:
- a delta names its parent by identity, which no other snapshot has, and by the parent's number: a parent that is
  missing, or was replaced by another snapshot of the same name, is an error;
- numbers grow along a chain, so a chain has no circle.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np

from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.hash_index import check_tables
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

GONE = "gone keys"
"""The name of the array of keys that have no row any more: int64 [N, 2], tables and ids."""

_NUMBER = "delta_number"
_NUMBER_MAX = 1 << 62

T = TypeVar("T")


@dataclass(frozen=True)
class Delta:
    """Description of a delta in the meta of its snapshot.

    Args:
        since, identity, since_number: name, identity and number of the parent.
        number: number of the delta, greater than `since_number`.
        rows: number of rows in the table after the delta is loaded, unchanged rows included; an upper bound if a delta
            of the chain leaves evicted keys out.
        inserted: number of the delta's rows whose keys had no row in the parent.
    """

    since: str
    identity: str
    since_number: int
    number: int
    rows: int
    inserted: int

    def to_meta(self) -> dict[str, Any]:
        """Entry for the meta of the snapshot."""
        return {"delta": asdict(self)}

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], name: str) -> "Delta | None":
        """The `Delta` that the meta of snapshot `name` describes; None = the snapshot is whole. CorruptTableError if
        the entry is invalid."""
        found = meta.get("delta")
        if found is None:
            return None
        names = {field.name for field in fields(cls)}
        numbers = names - {"since", "identity"}
        if (
            not isinstance(found, dict) or found.keys() != names
            or not all(isinstance(found[key], str) and found[key] for key in names - numbers)
            or not all(type(found[key]) is int and 0 <= found[key] < _NUMBER_MAX for key in numbers)
            or found["number"] <= found["since_number"]
        ):  # fmt: skip
            raise CorruptTableError(
                f"snapshot {name!r}: its description as a delta is invalid: {repr(found)[:200]}; restore its file from"
                " a copy, or load another snapshot"
            )
        return cls(**found)


def number_of(info: SnapshotInfo) -> int:
    """Number of a snapshot in its chain. A snapshot that was saved whole has number 0; one whose meta `without_delta`
    has made has the number that was given there."""
    delta = Delta.of_meta(info.meta, info.name)
    number = info.meta.get(_NUMBER, 0) if delta is None else delta.number
    if type(number) is not int or not 0 <= number < _NUMBER_MAX:
        raise CorruptTableError(
            f"snapshot {info.name!r}: its number in a chain must be an int from 0 to 2**62 - 1, it is {number!r};"
            " restore its file from a copy, or load another snapshot"
        )
    return number


def without_delta(meta: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Meta of a delta for a snapshot that has all rows of the table, as the delta and its ancestors together have them:
    without the delta's entry, since the snapshot needs no parent.

    Args:
        number: what `number_of` returns for the snapshot. Deltas of the old delta need its old number.
    """
    return {key: value for key, value in meta.items() if key != "delta"} | {_NUMBER: number}


def rows_of(info: SnapshotInfo) -> int:
    """Number of rows of a table that has loaded the snapshot."""
    delta = Delta.of_meta(info.meta, info.name)
    return info.rows if delta is None else delta.rows


def chain_of(last: T, there: Callable[[], Iterable[T]], info_of: Callable[[T], SnapshotInfo]) -> list[T]:
    """Return the chain of a snapshot: the whole snapshot first, then each delta, `last` at the end.

    Args:
        there: returns all snapshots among which parents are looked up.
        info_of: returns the info of a snapshot.

    Raises:
        SnapshotNotFoundError: a snapshot of the chain is missing.
        CorruptTableError: a description of a delta is invalid.
    """
    chain, by_identity = [last], dict[str, T]()
    while (delta := Delta.of_meta(info_of(chain[0]).meta, info_of(chain[0]).name)) is not None:
        if not by_identity:
            by_identity = {info_of(one).identity: one for one in there()}
        child, parent = info_of(chain[0]), by_identity.get(delta.identity)
        if parent is None:
            names = ", ".join(repr(info_of(one).name) for one in by_identity.values())
            raise SnapshotNotFoundError(
                f"snapshot {child.name!r} is a delta since {delta.since!r} (identity {delta.identity}), which is not"
                f" there, or has been replaced; there are: {names}; bring it back, or load another snapshot"
            )
        if number_of(info_of(parent)) != delta.since_number:
            raise CorruptTableError(
                f"snapshot {child.name!r} is a delta since number {delta.since_number} of its chain, and"
                f" {info_of(parent).name!r}, its parent, is number {number_of(info_of(parent))}; restore their files"
                " from a copy, or load another snapshot"
            )
        chain.insert(0, parent)
    return chain


def deltas_since(identity: str, infos: Iterable[SnapshotInfo]) -> list[str]:
    """Names of the snapshots that are deltas whose parent has this identity."""
    described = [(info.name, info.meta.get("delta")) for info in infos]  # The other fields may be invalid.
    return [name for name, delta in described if isinstance(delta, dict) and delta.get("identity") == identity]


def in_chain_text(name: str, done: str, deltas: Sequence[str]) -> str:
    """Text of the error if a snapshot cannot be `done` ("deleted", "replaced") because `deltas` need it."""
    return (
        f"snapshot {name!r} cannot be {done}: {', '.join(map(repr, deltas))}, deltas since it, need it; delete"
        " them first, or make the last one whole with `oneemb merge-deltas`. After a resume, graph.load(path,"
        " delete_newer=True) deletes everything that was saved later"
    )


def gone_array(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """The array `gone keys` of a delta, int64 [N, 2]: each key once, sorted, so that equal states give equal bytes."""
    return np.unique(np.stack([table_N.astype(np.int64), id_N], axis=1), axis=0)


def gone_keys(array: np.ndarray | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tables, int32 [N], and ids, int64 [N], of the keys in the array `gone keys` of delta `name`. CorruptTableError if
    the array is invalid."""
    if array is None:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    if array.dtype == np.int64 and array.ndim == 2 and array.shape[1] == 2:
        table_N, id_N = array[:, 0].astype(np.int32), array[:, 1].copy()
        if (table_N == array[:, 0]).all():
            try:
                check_tables(table_N)
                return table_N, id_N
            except ValueError:
                pass
    raise CorruptTableError(
        f"snapshot {name!r}: its array of keys that are gone must be int64 of shape [N, 2], with valid tables, it is"
        f" {array.dtype} {list(array.shape)}; restore its file from a copy, or load another snapshot"
    )
