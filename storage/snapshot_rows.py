"""What the rows of a snapshot are: kept in its `meta`, so that whoever reads it knows what the words mean."""

from dataclasses import asdict, dataclass
from typing import Any

from oneemb.storage.row_layout import RowLayout
from oneemb.storage.row_store import StorageError

__all__ = ["SnapshotRows"]


@dataclass(frozen=True)
class SnapshotRows:
    """Rows of one layout, and how far their training has come.

    Args:
        layout: how a row lies in its words.
        optimizer: whose state follows the weights; None = nobody's, or not known.
        state: what the state of a new row holds, `layout.state_width` values.
        step: updates made so far.
    """

    layout: RowLayout
    optimizer: str | None
    state: tuple[float, ...]
    step: int

    def to_meta(self, embedding: dict[str, Any]) -> dict[str, Any]:
        """The snapshot's `meta`: this, and what the embedding says of itself."""
        return {"rows": asdict(self), "embedding": embedding}

    @classmethod
    def of_meta(cls, meta: dict[str, Any], name: str) -> "SnapshotRows":
        """What `to_meta` wrote.

        Raises:
            StorageError: the snapshot was not saved by an embedding or a writer.
        """
        if "rows" not in meta:
            raise StorageError(
                f"snapshot {name!r} does not say what its rows are; it was not saved by oneemb's modules"
            )
        rows = meta["rows"]
        return cls(RowLayout(**rows["layout"]), rows["optimizer"], tuple(rows["state"]), rows["step"])
