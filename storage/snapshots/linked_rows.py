"""Reads a snapshot and the deltas that follow it as one snapshot.

Invariant: memory grows with the number of keys that deltas have changed, not with the number of rows.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.delta import GONE, gone_keys
from oneemb.storage.table.snapshot_manifest import SnapshotInfo
from oneemb.storage.table.snapshot_reader import Keep, SnapshotReader

_Narrow = Callable[[Keep], Keep]


class LinkedRows:
    """Rows of a snapshot and its deltas: for each key the newest row.

    Args:
        links: readers of the parts of each snapshot: first the snapshot that is no delta, then the deltas in order.
            `close` closes the readers.
    """

    def __init__(self, links: Sequence[Sequence[SnapshotReader]]):
        self._links = [list(link) for link in links]

    @property
    def info(self) -> SnapshotInfo:
        """Description of the last snapshot, or of a part of it."""
        return self._links[-1][0].info

    def __len__(self) -> int:
        if len(self._links) == 1:
            return sum(len(reader) for reader in self._links[0])
        return self.count(_every_key)

    def count(self, keep: Keep) -> int:
        """Number of rows that `keep` keeps. Reads only keys. CorruptTableError as for `scan`."""
        return sum(len(id_N) for _, id_N in self.keys(keep))

    def keys(self, keep: Keep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys of the rows that `keep` keeps, in batches (table_N int32, id_N int64). CorruptTableError as for
        `scan`."""
        for reader, newest in self._newest_first():
            yield from reader.keys(newest(keep))

    def scan(self, batch: int = 65536, keep: Keep | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each row once, like `SnapshotReader.scan`, from the last snapshot back. Raises CorruptTableError if
        files are damaged, or if a writer has removed one of the snapshots since they were opened."""
        for reader, newest in self._newest_first():
            if len(reader):
                yield from reader.scan(batch, keep if newest is _all_of else newest(keep or _every_key))

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
                    for keys in [*reader.keys(_every_key), self._gone(reader)]:
                        later.put(*keys, np.zeros(len(keys[1]), np.int64))

    @staticmethod
    def _gone(reader: SnapshotReader) -> tuple[np.ndarray, np.ndarray]:
        return gone_keys(reader.array(GONE) if GONE in reader.arrays else None, reader.info.name)

    def arrays(self) -> list[dict[str, np.ndarray]]:
        """Arrays of each part of the last snapshot, {name: array}, without the array of keys that are gone."""
        return [{name: reader.array(name) for name in reader.arrays if name != GONE} for reader in self._links[-1]]

    def close(self) -> None:
        """Close the files."""
        for link in self._links:
            for reader in link:
                reader.close()

    def __enter__(self) -> "LinkedRows":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _every_key(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    return np.ones(len(id_N), np.bool_)


def _all_of(keep: Keep) -> Keep:
    return keep


class _NotIn:
    """Restricts a `keep` to keys that are not in an index."""

    def __init__(self, index: HashIndex):
        self._index = index

    def __call__(self, keep: Keep) -> Keep:
        def kept(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
            return keep(table_N, id_N) & (self._index.find(table_N, id_N) < 0)

        return kept
