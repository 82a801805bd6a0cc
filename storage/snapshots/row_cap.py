"""Chooses the rows of a snapshot that stay under a cap, a largest number of rows. The rank of a row is its score, if a
policy has given scores, or else the number of the delta that has written the row last. The rows of the highest ranks
stay; a hash of the key decides between rows of one rank.

Invariants:
- the choice depends on the snapshot, its ancestors, the tables and the cap alone;
- memory grows with the number of rows only while all rows of a snapshot are compared: for the first snapshot, and for a
  delta after which a row that did not stay before may come back.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oneemb.kernels.score_rows import ties_of
from oneemb.kernels.shard_rows import least_of
from oneemb.kernels.threads import Threads
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.snapshots.linked_rows import LinkedRows, every_key
from oneemb.storage.snapshots.owned_rows import owned_rows
from oneemb.storage.snapshots.snapshot_parts import PartedSnapshot
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows
from oneemb.storage.table.snapshot_reader import Keep

Keys = tuple[np.ndarray, np.ndarray]
"""table_N int32, id_N int64."""

_REMEMBERED = 4


class CappedRows(NamedTuple):
    """Keys of the rows that stay, and their ranks."""

    table_N: np.ndarray
    id_N: np.ndarray
    rank_N: np.ndarray
    """uint64: score, or number in the chain of the snapshot that has written the row last."""
    is_all: bool
    """Whether these are all rows of the snapshot."""
    least: tuple[int, int]
    """Smallest rank, and the smallest tie number of the rows with this rank. Every row that does not stay has a smaller
    pair."""

    @property
    def keys(self) -> Keys:
        return self.table_N, self.id_N


class RowCap:
    """Chooses the rows that stay. Several threads may call it.

    Args:
        max_rows: largest number of rows, of all tables together.

    Raises:
        ValueError: `max_rows` is no int of 1 or more.
    """

    def __init__(self, max_rows: int):
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be a number of rows, 1 or more, or None for all, got {max_rows!r:.100}")
        self.max_rows = max_rows
        self._threads, self._lock = Threads(1), threading.Lock()
        self._known: dict[tuple[object, ...], CappedRows] = {}  # {(tables, identity of each link): rows}

    def rows_of(self, snapshot: PartedSnapshot, tables: Sequence[int] | None = None) -> CappedRows:
        """Rows of a snapshot that stay. Raises StorageError as `LinkedRows.scan` does.

        Args:
            tables: numbers of the tables that share the cap; rows of other tables are left out. None = all.
        """
        links = (*snapshot.before, snapshot)
        chain = (None if tables is None else tuple(tables), *(link.identity for link in links))
        keep = every_key if tables is None else _OfTables(tables)
        with self._lock:
            known, n = None, len(links)
            while n and (known := self._known.get(chain[: 1 + n])) is None:
                n -= 1
            while known is not None and n < len(links):
                known, n = self._after(known, links[n], n, keep), n + 1
            if known is None:
                known = self._of_all(links, keep)
            self._known[chain] = known
            for old in list(self._known)[:-_REMEMBERED]:
                del self._known[old]
            return known

    def _of_all(self, links: Sequence[PartedSnapshot], keep: Keep) -> CappedRows:
        """Rows that stay, chosen from all rows of a chain."""
        found, later = [], HashIndex(self._threads)
        for n in range(len(links) - 1, -1, -1):
            with _of_link(links[n]) as rows:
                for table_N, id_N, rank_N in _ranked(rows, links[n], n, keep):
                    new = later.find(table_N, id_N) < 0
                    found.append((table_N[new], id_N[new], rank_N[new]))
                if n:
                    for table_N, id_N in (rows.keys(every_key), rows.gone()):
                        later.put(table_N, id_N, np.zeros(len(id_N), np.int64))
        return self._most(found, True)

    def _after(self, known: CappedRows, link: PartedSnapshot, n: int, keep: Keep) -> CappedRows | None:
        """Rows that stay after the delta `link`, chosen from the delta's rows and the rows that stayed before; None =
        other rows may come back."""
        changed = HashIndex(self._threads)
        with _of_link(link) as rows:
            for table_N, id_N in (rows.keys(every_key), rows.gone()):
                changed.put(table_N, id_N, np.zeros(len(id_N), np.int64))
            found = list(_ranked(rows, link, n, keep))
        same = changed.find(known.table_N, known.id_N) < 0
        found.append((known.table_N[same], known.id_N[same], known.rank_N[same]))
        made = self._most(found, known.is_all)
        return made if known.is_all or len(made.id_N) == self.max_rows and made.least >= known.least else None

    def _most(self, found: list[tuple[np.ndarray, np.ndarray, np.ndarray]], is_all: bool) -> CappedRows:
        """The `max_rows` rows of the highest ranks. `is_all`: whether the snapshot has no rows beside `found`."""
        empty = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint64)
        table_N, id_N, rank_N = (np.concatenate(arrays) for arrays in zip(empty, *found, strict=True))

        def tie_of(some: np.ndarray) -> np.ndarray:
            return ties_of(table_N[some], id_N[some], threads=self._threads)

        excess = len(id_N) - self.max_rows
        if excess > 0:
            kept_N = np.ones(len(id_N), np.bool_)
            kept_N[least_of(rank_N, excess, tie_of)] = False
            table_N, id_N, rank_N, is_all = table_N[kept_N], id_N[kept_N], rank_N[kept_N], False
        least = int(rank_N.min(initial=(1 << 64) - 1))
        tie = tie_of(np.flatnonzero(rank_N == least)).min(initial=(1 << 64) - 1)
        return CappedRows(table_N, id_N, rank_N, is_all, (least, int(tie)))


class CappedChanges(NamedTuple):
    """Changes from one choice of rows to the rows of a newer snapshot that stay."""

    put: Keys
    """Keys of the rows to write."""
    gone: Keys
    """Keys that have no row any more."""
    comes_back: bool
    """Whether `put` has rows that no delta in between has written: rows that did not stay before."""


def capped_changes(before: Keys, after: CappedRows, written: Keys) -> CappedChanges:
    """Changes from the keys `before` to the rows `after`. `written`: keys that deltas in between have written."""
    had, has, changed = KeysIn(before), KeysIn(after.keys), KeysIn(written)
    is_gone_N, comes_N, changed_N = ~has(*before), ~had(*after.keys), changed(*after.keys)
    put_N = comes_N | changed_N
    return CappedChanges(
        (after.table_N[put_N], after.id_N[put_N]), (before[0][is_gone_N], before[1][is_gone_N]),
        bool((comes_N & ~changed_N).any()),
    )  # fmt: skip


class KeysIn:
    """Function that keeps the keys of a set, for `LinkedRows`."""

    def __init__(self, keys: Keys):
        self._index = HashIndex(Threads(1))
        self._index.put(*keys, np.zeros(len(keys[1]), np.int64))

    def __call__(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        return self._index.find(table_N, id_N) >= 0


def _of_link(link: PartedSnapshot) -> LinkedRows:
    """Rows that one snapshot of a chain has written, without rows of its ancestors."""
    return owned_rows(replace(link, before=()), 0, 1)


def _ranked(
    rows: LinkedRows, link: PartedSnapshot, n: int, keep: Keep
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield keys and ranks of the rows that snapshot number `n` of a chain has written."""
    format = SnapshotRows.of_meta(link.info.meta, link.name).format
    if not format.usage_words:
        table_N, id_N = rows.keys(keep)
        yield table_N, id_N, np.full(len(id_N), n, np.uint64)
        return
    for table_N, id_N, row_NW in rows.scan():
        kept = keep(table_N, id_N)
        half_N2 = row_NW[kept, format.usage_begin : format.usage_begin + 2].view(np.uint32).astype(np.uint64)
        yield table_N[kept], id_N[kept], half_N2[:, 0] | half_N2[:, 1] << np.uint64(32)


class _OfTables:
    """Function that keeps the keys of some tables, for `LinkedRows`."""

    def __init__(self, tables: Sequence[int]):
        self._table_C = np.array(tables, np.int32)

    def __call__(self, table_N: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        return np.isin(table_N, self._table_C)
