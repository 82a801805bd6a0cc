"""The contract of a store of rows. Tiers stack because each of them stands on any `RowStore`.

A `RowSource` can be read, a `RowStore` written to as well; `Snapshots` are a store's own affair.

Invariants, for every implementation:
- a row is `row_width` float32 words that nobody below the optimizer reads as numbers; it comes back bit for bit;
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
"""By the numbers of chunks, which of their rows were live at one moment."""


class RowSource(Protocol):
    """Rows by key, to be read."""

    @property
    def row_width(self) -> int:
        """32-bit words of a row, W."""

    def __len__(self) -> int:
        """Number of rows."""

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        """Copy the rows of these keys into `out_XW`, and return which are missing, bool [U].

        Args:
            out_XW: float32 and contiguous: an array for these rows, or a slab. Rows of missing keys are not written.
            to_U: int64 [U], the place of each key in `out_XW`; None = 0 to U - 1.
        """

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Whether each key has a row: bool [U]."""

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every row once as (table_N, id_N, row_NW), at most `batch` at a time, in no order that means anything.
        The store must not change meanwhile."""

    def close(self) -> None:
        """Free what the store holds. Closing twice is fine."""


class RowStore(RowSource, Protocol):
    """Keeps rows by key."""

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """Keep these rows, in place of those the keys had."""

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Forget the rows of these keys, here and in every store below; returns whether each had one, bool [U]."""

    def clear(self) -> None:
        """Forget every row."""

    def flush(self) -> None:
        """Hand every row that a store below does not have yet down to it; return when it has them."""

    def stats(self) -> dict[str, Any]:
        """Counters since the store was made, and sizes now."""


@runtime_checkable
class Snapshots(Protocol):
    """Keeps complete states of all rows, durably, by name. A store may have them or not."""

    def save_snapshot(
        self, name: str, meta: dict[str, Any], *, overwrite: bool = False, identity: str | None = None,
        sequence: int = 0, without: tuple[np.ndarray, np.ndarray] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None, since: Places | None = None,
    ) -> SnapshotInfo:  # fmt: skip
        """Keep all rows as they are now, but for those of the keys `without`, (table_U, id_U); atomic. Without an
        identity the snapshot gets one of its own; its number among the snapshots is `sequence` or more. It holds
        `arrays` beside the rows. With `since`, which `places` gave, it holds only rows that were written after that."""

    def load_snapshot(self, name: str, deltas: Sequence[str] = ()) -> dict[str, Any]:
        """Make a snapshot's rows, as the deltas that go on from it have changed them, the rows of the store; returns
        the `meta` of the last."""

    @property
    def places(self) -> Places:
        """Places of the rows of the snapshot that was saved or loaded last."""

    def gone_since(self, then: Places) -> tuple[np.ndarray, np.ndarray]:
        """The keys that had rows at those places, and have none now."""

    def delete_snapshot(self, name: str) -> None:
        """Forget a snapshot."""

    def snapshots(self) -> list[SnapshotInfo]:
        """Snapshots, oldest first."""
