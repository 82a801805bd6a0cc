"""The rows of a snapshot and of the deltas that go on from it, read as those of one.

Invariant: memory grows with the keys that deltas have changed, not with the rows.
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
    """Rows of a chain of snapshots, the newest of each key.

    Args:
        links: the readers of each snapshot's parts, the whole one first, then its deltas in order; closed with this.
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
        """Number of rows that `keep` keeps. Reads keys only; raises as `scan`."""
        return sum(len(id_N) for _, id_N in self.keys(keep))

    def keys(self, keep: Keep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The keys of the rows that are kept, (table_N int32, id_N int64), some at a time; raises as `scan`."""
        for reader, newest in self._newest_first():
            yield from reader.keys(newest(keep))

    def scan(self, batch: int = 65536, keep: Keep | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every row once, as `SnapshotReader.scan`, the newest snapshot's first. CorruptTableError if files are
        damaged, or a writer has removed a snapshot meanwhile."""
        for reader, newest in self._newest_first():
            if len(reader):
                yield from reader.scan(batch, keep if newest is _all_of else newest(keep or _every_key))

    def _newest_first(self) -> Iterator[tuple[SnapshotReader, _Narrow]]:
        """Each reader, and a function that drops keys that later snapshots have, or say are gone."""
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
        """Arrays of each part of the last snapshot beside its rows, by name, without the keys that are gone."""
        return [{name: its.array(name) for name in its.arrays if name != GONE} for its in self._links[-1]]

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
    """Leaves out the keys of an index."""

    def __init__(self, index: HashIndex):
        self._index = index

    def __call__(self, keep: Keep) -> Keep:
        def kept(table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
            return keep(table_N, id_N) & (self._index.find(table_N, id_N) < 0)

        return kept
