"""The contract of a store of rows. Tiers stack because the store below a tier can be any `RowStore`.

A `RowSource` can be read; a `RowStore` can be written to as well; a store may also implement `Snapshots`.

Invariants, for every implementation:
- a row is `row_width` 32-bit words in a float32 array. Stores do not read the words as numbers, and return the same
  bits;
- keys are unique within one call (`table_U` int32, `id_U` int64, every int64 legal); `row_UW` float32 [U, W],
  C-contiguous;
- a call that raises has changed nothing, except that a `put` may have kept some of its rows whole;
- one thread at a time calls a store, except that any thread may `get` from the persistent table beside other calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotInfo

Places = Mapping[int, ChunkPart]
"""{number of a chunk: its rows that were live} at one moment."""


class RowSource(Protocol):
    """A store whose rows can be read by key."""

    @property
    def row_width(self) -> int:
        """32-bit words of a row, W."""

    def __len__(self) -> int:
        """Number of rows."""

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        """Copy the rows of these keys into `out_XW`. Returns whether each key has no row: bool [U].

        Args:
            out_XW: contiguous float32 array, of U rows or a slab. Its rows for keys without a row are not written.
            to_U: int64 [U], the row of `out_XW` to which each key's row is copied; None = 0 to U - 1.
        """

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Whether each key has a row: bool [U]."""

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield every row once, in batches (table_N, id_N, row_NW) of at most `batch` rows, in any order. The store
        must not change meanwhile."""

    def close(self) -> None:
        """Free memory, files and locks. A second call does nothing."""


class RowStore(RowSource, Protocol):
    """A store whose rows can be read and written by key."""

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """Store these rows, which replace the keys' earlier rows."""

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Erase the rows of these keys, here and in every store below. Returns whether each key had a row: bool [U]."""

    def clear(self) -> None:
        """Erase all rows, here and in every store below."""

    def flush(self) -> None:
        """Write every dirty row to the store below; return when that store has all rows."""

    def stats(self) -> dict[str, Any]:
        """Counters since the store was made, and current sizes."""


@runtime_checkable
class KeepsNeighbours(Protocol):
    """A store that reads neighbouring rows at once; optional for a store."""

    def write_order(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Positions of these keys, int64 [N], in the order in which their rows should be put: rows that lie side by
        side stay so. New keys come first."""


@runtime_checkable
class Snapshots(Protocol):
    """Snapshots of all rows, durable and named; optional for a store."""

    def save_snapshot(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, identity: str | None = None,
        sequence: int = 0, without: tuple[np.ndarray, np.ndarray] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None, since: Places | None = None,
    ) -> SnapshotInfo:  # fmt: skip
        """Save all rows as they are now, except those of the keys `without`, (table_U, id_U); atomic. identity=None
        draws a new one. The snapshot's number is `sequence` or higher. It holds `arrays` beside the rows. With `since`,
        an earlier value of `places`, it holds only the rows written after that."""

    def load_snapshot(self, name: str, deltas: Sequence[str] = ()) -> dict[str, Any]:
        """Replace all rows of the store by the rows of a snapshot, with the changes of its deltas applied. Returns
        `meta` of the last delta, or of the snapshot."""

    @property
    def places(self) -> Places:
        """Places of the rows of the snapshot that was last saved or loaded."""

    def gone_since(self, then: Places) -> tuple[np.ndarray, np.ndarray]:
        """Keys, (table_N, id_N), that had a row when `then` was taken (an earlier value of `places`) and have no row
        now."""

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot."""

    def snapshots(self) -> list[SnapshotInfo]:
        """Descriptions of all snapshots, oldest first."""
