"""Snapshots that hold only what has changed since another one: which one that is, and the chain back to a whole one.

A delta is a snapshot whose lists have the rows that were written since its parent was saved, and whose array
`gone keys` has the keys that had a row then and have none now. The meta of its file says what `Delta` is:

    base      a whole snapshot, number 0
    d1        since base, number 1
    d2        since d1, number 2           the rows of d2 are those of base, changed by d1, then by d2

Invariants:
- a parent is known by its identity, which no other snapshot has, and its number: what is missing, or was replaced by
  another one of its name, is an error;
- numbers grow along a chain, so that it ends.
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
    """Description of a delta.

    Args:
        since, identity, since_number: name, identity and number of its parent.
        number: its own, greater than that.
        rows: number of rows in this table, unchanged ones included; an upper bound, where a delta of the chain does not
            say which have been evicted.
        inserted: number of its rows whose keys had none.
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
        """The delta in the meta of snapshot `name`; None = the snapshot is whole. CorruptTableError if the entry is
        invalid."""
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
                f"snapshot {name!r} says of its parent what no delta says: {repr(found)[:200]}; restore its file from a"
                " copy, or load another one"
            )
        return cls(**found)


def number_of(info: SnapshotInfo) -> int:
    """The number of a snapshot in the chains that go on from it: 0 of one that was saved whole."""
    delta = Delta.of_meta(info.meta, info.name)
    number = info.meta.get(_NUMBER, 0) if delta is None else delta.number
    if type(number) is not int or not 0 <= number < _NUMBER_MAX:
        raise CorruptTableError(f"snapshot {info.name!r} says that it has the number {number!r}, which none has")
    return number


def without_delta(meta: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The meta of a delta that has been made whole."""
    return {key: value for key, value in meta.items() if key != "delta"} | {_NUMBER: number}


def rows_of(info: SnapshotInfo) -> int:
    """Number of rows of a table that has loaded the snapshot."""
    delta = Delta.of_meta(info.meta, info.name)
    return info.rows if delta is None else delta.rows


def chain_of(last: T, there: Callable[[], Iterable[T]], info_of: Callable[[T], SnapshotInfo]) -> list[T]:
    """A snapshot and its ancestors among those that `there` returns, the whole one first.

    Raises:
        SnapshotNotFoundError: one of them is not there.
        CorruptTableError: a description is invalid.
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
                f" there, or has been replaced by another one; there are: {names}; bring it back, or load another one"
            )
        if number_of(info_of(parent)) != delta.since_number:
            raise CorruptTableError(
                f"snapshot {child.name!r} is a delta since number {delta.since_number} of its chain, and"
                f" {info_of(parent).name!r}, its parent, is number {number_of(info_of(parent))}; restore their files"
                " from a copy, or load another one"
            )
        chain.insert(0, parent)
    return chain


def deltas_since(identity: str, infos: Iterable[SnapshotInfo]) -> list[str]:
    """The names of those snapshots that are deltas since the one of this identity."""
    its = [(info.name, info.meta.get("delta")) for info in infos]  # Whatever else they say, and whoever wrote them.
    return [name for name, said in its if isinstance(said, dict) and said.get("identity") == identity]


def in_chain_text(name: str, done: str, deltas: Sequence[str]) -> str:
    """Text of the error for a snapshot that deltas need, and that cannot be `done` ("deleted", "replaced")."""
    return (
        f"snapshot {name!r} cannot be {done}: {', '.join(map(repr, deltas))}, deltas since it, need it; make the last"
        " of them whole with `oneemb merge-deltas` and delete them first"
    )


def gone_array(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """Keys as a delta's file has them: each once, in order, so that equal states are equal bytes."""
    return np.unique(np.stack([table_N.astype(np.int64), id_N], axis=1), axis=0)


def gone_keys(array: np.ndarray | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The tables, int32 [N], and ids, int64 [N], that delta `name` says are gone. CorruptTableError if they are
    invalid."""
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
        f"snapshot {name!r} says of the keys that are gone what no delta says: {array.dtype} {list(array.shape)};"
        " restore its file from a copy, or load another one"
    )
