"""Reads a snapshot and the deltas that follow it as one snapshot: all rows, or those that a function keeps.

Invariant: memory grows with the number of keys that deltas have changed, not with the number of rows.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.policies.admission import joined_arrays
from oneemb.storage.table.delta import GONE
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import Keep, SnapshotReader
from oneemb.storage.tiers.cached_rows import joined_rows

_Narrow = Callable[[Keep], Keep]
_Keys = tuple[np.ndarray, np.ndarray]


class LinkedRows:
    """Rows of a snapshot and its deltas: for each key the newest row.

    Args:
        links: readers of the parts of each snapshot: first the snapshot that is no delta, then the deltas in order.
            `close` closes the readers.
        keep: function that says which keys are kept; only their rows are read. None = all; `arrays` then needs one part
            for each snapshot.
        gone: keys that have no row any more, table_N int32, id_N int64; None = those that the deltas list.
    """

    def __init__(
        self, links: Sequence[Sequence[SnapshotReader]], keep: Keep | None = None, gone: _Keys | None = None
    ):  # fmt: skip
        self._links = [list(link) for link in links]
        self._keep, self._gone = keep, gone
        self._count: int | None = None

    @property
    def info(self) -> SnapshotInfo:
        """Description of the last snapshot, or of a part of it."""
        return self._links[-1][0].info

    def __len__(self) -> int:
        if self._count is None:
            if len(self._links) == 1 and self._keep is None:
                self._count = sum(len(reader) for reader in self._links[0])
            else:
                self._count = sum(len(id_N) for _, id_N in self._keys(every_key))
        return self._count

    def keys(self, keep: Keep) -> tuple[np.ndarray, np.ndarray]:
        """Keys of the kept rows that this `keep` keeps too: table_N int32, id_N int64. Reads only keys. Raises
        CorruptTableError as `scan` does."""
        found = [(np.empty(0, np.int32), np.empty(0, np.int64)), *self._keys(keep)]
        return np.concatenate([table_N for table_N, _ in found]), np.concatenate([id_N for _, id_N in found])

    def _keys(self, keep: Keep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        own = self._keep

        def kept(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
            return keep(table_N, id_N) if own is None else own(table_N, id_N) & keep(table_N, id_N)

        for reader, newest in self._newest_first():
            yield from reader.keys(newest(kept))

    def gone(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys that have lost their row in a delta and were not written since: table_N int32, id_N int64. If the first
        snapshot is a delta too, its parent may have rows of these keys. Raises CorruptTableError as `scan` does."""
        if self._gone is not None:
            return self._gone
        later, found = HashIndex(Threads(1)), [(np.empty(0, np.int32), np.empty(0, np.int64))]
        for link in reversed(self._links):
            for reader in link:
                for keys in reader.keys(every_key):  # A key that a delta lists as gone and as written is written.
                    later.put(*keys, np.zeros(len(keys[1]), np.int64))
            for reader in link:
                table_N, id_N = reader.gone()
                new = later.find(table_N, id_N) < 0
                found.append((table_N[new], id_N[new]))
                later.put(*found[-1], np.zeros(int(new.sum()), np.int64))
        keep = self._keep or every_key
        table_N, id_N = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        kept = keep(table_N, id_N)
        return table_N[kept], id_N[kept]

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each row once, in batches (table_N int32, id_N int64, row_NW float32) of at most `batch` rows, from the
        last snapshot back. Raises CorruptTableError if files are damaged, or if a writer has removed one of the
        snapshots since they were opened."""
        for reader, newest in self._newest_first():
            if len(reader):
                yield from reader.scan(batch, self._keep if newest is _all_of else newest(self._keep or every_key))

    def _newest_first(self) -> Iterator[tuple[SnapshotReader, _Narrow]]:
        """Yield each reader, from the last snapshot back, with a function that restricts a `keep` to keys that no later
        snapshot has or lists as gone."""
        later = HashIndex(Threads(1))
        for n in range(len(self._links) - 1, -1, -1):
            narrow: _Narrow = _all_of if n == len(self._links) - 1 else _NotIn(later)
            for reader in self._links[n]:
                yield reader, narrow
            if n:
                for reader in self._links[n]:
                    for keys in [*reader.keys(every_key), reader.gone()]:
                        later.put(*keys, np.zeros(len(keys[1]), np.int64))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the last snapshot, {name: array}, without the array of keys that are gone: joined from all parts
        and restricted to the keys that are kept."""
        parts = [{name: reader.array(name) for name in reader.arrays if name != GONE} for reader in self._links[-1]]
        if self._keep is None:
            return parts[0]
        return joined_arrays(parts, self._keep) | joined_rows(parts, self._keep, self.info.name)

    def close(self) -> None:
        """Close the files."""
        for link in self._links:
            for reader in link:
                reader.close()

    def __enter__(self) -> "LinkedRows":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def every_key(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """Keep all keys: a `keep` for `LinkedRows` and `SnapshotReader`."""
    return np.ones(len(id_N), np.bool_)


def _all_of(keep: Keep) -> Keep:
    return keep


class _NotIn:
    """Function that restricts a `keep` to keys that are not in an index."""

    def __init__(self, index: HashIndex):
        self._index = index

    def __call__(self, keep: Keep) -> Keep:
        def kept(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
            return keep(table_N, id_N) & (self._index.find(table_N, id_N) < 0)

        return kept
