"""Description of a snapshot's rows, in the snapshot's `meta`: it tells readers what the words of a row mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.rows.row_format import WEIGHTS, RowFormat
from oneemb.storage.table.geometry import ROW_WIDTH_MAX
from oneemb.storage.table.snapshot_manifest import SnapshotInfo

_STEP_MAX = 1 << 62


@dataclass(frozen=True)
class SnapshotRows:
    """Format of a snapshot's rows, and the number of steps that have been taken."""

    format: RowFormat
    step: int

    def described(self) -> dict[str, Any]:
        """The description as a dict that JSON can hold."""
        row = self.format
        marks = {"marks": row.usage_words} if row.usage_words else {}
        return {
            "layout": {"dim": row.dim, "dtype": row.dtype, "state_width": row.state_width, **marks},
            "optimizer": row.optimizer,
            "state": row.state,
            "step": self.step,
        }

    def to_meta(self, embedding: dict[str, Any]) -> dict[str, Any]:
        """The snapshot's `meta`: this description, and the embedding's description of itself."""
        return {"rows": self.described(), "embedding": embedding}

    @classmethod
    def of_meta(cls, meta: dict[str, Any], name: str) -> "SnapshotRows":
        """Read the description that `to_meta` made. Raises StorageError if the meta has none, since neither an
        embedding nor a writer has saved the snapshot; CorruptTableError if the description is invalid."""
        if "rows" not in meta:
            raise StorageError(
                f"snapshot {name!r} does not say what its rows are; it was not saved by oneemb's modules"
            )
        rows = meta["rows"]
        _need(isinstance(rows, dict) and {"layout", "optimizer", "state", "step"} <= rows.keys(), name, rows)
        layout, optimizer, state, step = rows["layout"], rows["optimizer"], rows["state"], rows["step"]
        _need(isinstance(layout, dict) and layout.keys() - {"marks"} == {"dim", "dtype", "state_width"}, name, layout)
        _need(_number(layout["dim"], 1, ROW_WIDTH_MAX), name, layout)
        _need(isinstance(layout["dtype"], str) and layout["dtype"] in WEIGHTS, name, layout)
        _need(_number(layout["state_width"], 0, ROW_WIDTH_MAX), name, layout)
        _need(_number(layout.get("marks", 0), 0, ROW_WIDTH_MAX), name, layout)
        _need(optimizer is None or isinstance(optimizer, str), name, optimizer)
        _need(isinstance(state, list | tuple) and len(state) == layout["state_width"], name, state)
        _need(all(type(value) in (int, float) for value in state), name, state)
        _need(_number(step, 0, _STEP_MAX), name, step)
        marks = layout.get("marks", 0)
        return cls(RowFormat(layout["dim"], layout["dtype"], optimizer, tuple(state), marks), step)


@dataclass(frozen=True)
class PartOf:
    """Which part of a whole snapshot a table's snapshot is.

    Args:
        name: name of the whole snapshot.
        shard, shards: number of the part, and number of parts. The part has the keys with owner_of(key) = shard.
    """

    name: str
    shard: int
    shards: int

    @staticmethod
    def name_of(info: SnapshotInfo) -> str:
        """Name of the whole snapshot to which a table's snapshot belongs; its own name if it is no part."""
        part = part_of(info.meta, info.name)
        return info.name if part is None else part.name

    def to_meta(self, table_name: str) -> dict[str, Any]:
        """Entries for the meta of the table's snapshot `table_name`. There are none if it is the whole snapshot."""
        if self.shards == 1 and table_name == self.name:
            return {}
        return {"snapshot": self.name, "shard": [self.shard, self.shards]}


def part_of(meta: dict[str, Any], name: str) -> PartOf | None:
    """Read the entries of `PartOf.to_meta` from the meta of snapshot `name`; None = it is no part. Raises
    CorruptTableError if an entry is invalid."""
    if "snapshot" not in meta:
        return None
    whole = meta["snapshot"]
    _need(isinstance(whole, str) and 0 < len(whole), name, whole)
    return PartOf(whole, *shard_of(meta, name))


def without_part(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of a snapshot without the entries of `PartOf.to_meta`."""
    return {key: value for key, value in meta.items() if key not in ("snapshot", "shard")}


def shard_of(meta: dict[str, Any], name: str) -> tuple[int, int]:
    """(number of the part, number of parts) from the meta of snapshot `name`; (0, 1) if it is no part. Raises
    CorruptTableError if the entry is invalid."""
    shard = meta.get("shard", (0, 1))
    _need(isinstance(shard, list | tuple) and len(shard) == 2, name, shard)
    _need(_number(shard[1], 1, _STEP_MAX) and _number(shard[0], 0, shard[1] - 1), name, shard)
    return shard[0], shard[1]


def _number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _need(right: bool, name: str, found: Any) -> None:
    if not right:
        raise CorruptTableError(
            f"snapshot {name!r} does not say what its rows are in a way that an embedding or a writer does: "
            f"{repr(found)[:100]}; restore its file from a copy, or load another snapshot"
        )
