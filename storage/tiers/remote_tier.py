"""A tier whose rows a parameter server stores.

The tier holds all rows, above a persistent table that has the rows of the last snapshot. An index holds each key with
the number of the push that last wrote its row. The server stores that number with the row, as a *stamp*:

    value = the row's 32-bit words, a zero word if their number is odd, 8 bytes: stamp XOR checksum
    checksum = XXH64 of the words before, with the id as the seed

A job reads only values that it has pushed itself, so it never reads a value with another layout.

Invariants:
- a row that the server returns without the stamp of its last push, or with other words, is an error. So it is noticed
  if a server has restarted empty or with older rows, drops rows, or has another writer;
- the server is not asked for a key that is not in the index, since a value there would be left from an earlier job;
- a push that fails changes no row that a later call returns: the caller still has the row, and pushes it again.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from oneemb.kernels.checksum import rows_sum
from oneemb.kernels.threads import Threads, close_when_dropped
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import changing
from oneemb.storage.remote.parameter_server import Erases, LostRowsError, ParameterServer, ServerError
from oneemb.storage.row_store import RowStore

_STAMP_WORDS = 2

# Least number of rows whose checksums are worth waking a thread for.
_SHARE_MIN = 512

_BATCH = 65536  # rows that are pushed at once
_COUNT_BITS = 39
"""Number of bits of a stamp that count pushes. An entry of the index has one bit more, whether the row is dirty."""


class RemoteTier:
    """A tier that stores its rows on a parameter server.

    Args:
        server: connection to the server; closed with the tier.
        name: prefix of the tables on the server, which are `name.0`, `name.1` and so on. No other job may write to
            them.
        row_width: number of 32-bit words of a row.
        below: the store below; None = there is none.
    """

    def __init__(self, server: ParameterServer, name: str, *, row_width: int, below: RowStore | None, threads: Threads):
        self.name = "remote"
        self.row_width = row_width
        self._width = row_width + row_width % 2 + _STAMP_WORDS
        """Number of 32-bit words of a value."""
        self._server, self._prefix, self._below, self._threads = server, name, below, threads
        # {key: 2 * number of the row's last push + 1 if the row is dirty}.
        self._index = HashIndex(threads)
        self._dirty = 0
        self._pushes = 0
        self._of_job = secrets.randbits(64 - _COUNT_BITS) << _COUNT_BITS  # Makes the stamps of different jobs differ.
        self._pulled = self._pushed = self._left_behind = 0
        # A tier that is garbage collected ends its connections. At exit the system ends them.
        self._finalizer = close_when_dropped(self, server)

    def __len__(self) -> int:
        return len(self._index)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def get(
        self, table_U: np.ndarray, id_U: np.ndarray, out_XW: np.ndarray, to_U: np.ndarray | None = None
    ) -> np.ndarray:
        """See `RowSource.get`. Raises LostRowsError if the server has another row than was pushed, or no row;
        ServerError if it cannot be reached or refuses."""
        place_U = self._index.find(table_U, id_U)
        known_K = np.flatnonzero(place_U >= 0)
        row_KW = self._pull(table_U[known_K], id_U[known_K], place_U[known_K])
        out_XW[known_K if to_U is None else to_U[known_K]] = row_KW
        return place_U < 0

    def _pull(self, table_K: np.ndarray, id_K: np.ndarray, place_K: np.ndarray) -> np.ndarray:
        """Read the rows of these K keys from the server: float32 [K, W]. place_K: entries of the index, which hold the
        number of each row's last push. Raises LostRowsError if a row is missing or has another stamp."""
        row_KW = np.empty((len(id_K), self.row_width), np.float32)
        for table, of_table in _by_table(table_K):
            id_N = np.ascontiguousarray(id_K[of_table])
            [word_NX], found_NP = self._server.pull(self._table(table), id_N, [self._width])
            word_NX = np.ascontiguousarray(word_NX)
            stamp_N = word_NX.view(np.uint64)[:, -1] ^ self._sums(word_NX, id_N)
            wrong_N = ~found_NP[:, 0] | (stamp_N != self._stamps(place_K[of_table] >> 1))
            if wrong_N.any():
                self._raise_lost(table, id_N, found_NP[:, 0], wrong_N)
            row_KW[of_table] = word_NX[:, : self.row_width]
        self._pulled += len(id_K)
        return row_KW

    def _raise_lost(self, table: int, id_N: np.ndarray, found_N: np.ndarray, wrong_N: np.ndarray) -> None:
        first = int(np.flatnonzero(wrong_N)[0])
        what = "other rows than were pushed last" if found_N[first] else "no rows"
        raise LostRowsError(
            f"{self._server.name} has {what} of {np.count_nonzero(wrong_N)} of {len(id_N)} ids of table"
            f" {self._table(table)!r} (the first is {id_N[first]}), which this job has pushed to it: the server was"
            " restarted without its rows, drops keys to save memory, or another program writes to that table. Load the"
            " last snapshot, which brings all rows back; give each job a prefix of its own, and the server a disk and"
            " enough room for all keys"
        )

    def put(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray) -> None:
        """See `RowStore.put`. Raises ServerError if the server cannot be reached or refuses, for example if it is
        full."""
        self._push(table_U, id_U, row_UW, dirty=True)

    def _push(self, table_U: np.ndarray, id_U: np.ndarray, row_UW: np.ndarray, *, dirty: bool) -> None:
        for table, of_table in _by_table(table_U):
            table_N, id_N = np.ascontiguousarray(table_U[of_table]), np.ascontiguousarray(id_U[of_table])
            self._index.reserve_keys(table_N, id_N)  # Fails, if memory runs out, before the push.
            self._pushes += 1
            word_NX = np.empty((len(id_N), self._width), np.float32)
            word_NX[:, : self.row_width] = row_UW[of_table]
            word_NX[:, self.row_width : -_STAMP_WORDS] = 0
            word_NX.view(np.uint64)[:, -1] = self._stamps(np.array([self._pushes])) ^ self._sums(word_NX, id_N)
            place_N = np.full(len(id_N), 2 * self._pushes + dirty)
            self._server.push(self._table(table), id_N, [word_NX])
            with changing:  # The server has the new rows already, the index still has the old stamps.
                old_N = self._index.put(table_N, id_N, place_N)
                self._dirty += len(id_N) * dirty - _dirty(old_N)
                self._pushed += len(id_N)

    def _sums(self, word_NX: np.ndarray, id_N: np.ndarray) -> np.ndarray:
        """Checksums of values, uint64 [N]."""
        stride, sum_N = self._width // 2, np.empty(len(id_N), np.uint64)
        self._threads.run(
            rows_sum, len(id_N), word_NX.view(np.uint64).reshape(-1), stride, stride - 1, id_N.view(np.uint64), sum_N,
            share_min=_SHARE_MIN,
        )  # fmt: skip
        return sum_N

    def _stamps(self, push_N: np.ndarray) -> np.ndarray:
        return push_N.astype(np.uint64) | np.uint64(self._of_job)

    def _table(self, table: int) -> str:
        return f"{self._prefix}.{table}"

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """See `RowStore.erase`. A row that the server cannot erase stays there, and no job reads it."""
        erased_U = self._index.find(table_U, id_U) >= 0
        gone_U = erased_U if self._below is None else self._below.erase(table_U, id_U)
        with changing:
            old_U = self._index.erase(table_U, id_U)
            self._dirty -= _dirty(old_U)
            erased_U |= gone_U
        known_K = np.flatnonzero(old_U >= 0)
        for table, of_table in _by_table(table_U[known_K]):
            self._erase_there(table, np.ascontiguousarray(id_U[known_K[of_table]]))
        return erased_U

    def _erase_there(self, table: int, id_N: np.ndarray) -> None:
        try:
            if isinstance(self._server, Erases):
                self._server.erase(self._table(table), id_N, 1)
                return
        except ServerError:
            pass  # The row is never read, since its key is not in the index. If the error lasts, a later call raises.
        self._left_behind += len(id_N)

    def contains(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        return self._index.find(table_U, id_U) >= 0

    def scan(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for table_N, id_N, place_N in self._index.items(batch):
            yield table_N, id_N, self._pull(table_N, id_N, place_N)

    def flush(self) -> None:
        """Read the rows that were pushed since the last flush back from the server, and put them into the store
        below."""
        if self._below is None:
            return
        for table_N, id_N, place_N in self._dirty_batches():
            signals_deferred.raise_interrupt()  # Rows of batches that were written are clean, other rows are unchanged.
            self._below.put(table_N, id_N, self._pull(table_N, id_N, place_N))
            self._index.replace(table_N, id_N, place_N - 1)
            self._dirty -= len(id_N)
        self._below.flush()

    def _dirty_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if self._dirty == 0:
            return
        dirty = [[array[place_N % 2 == 1] for array in (table_N, id_N, place_N)]
                 for table_N, id_N, place_N in self._index.items()]  # fmt: skip
        table_V, id_V, place_V = (np.concatenate(arrays) for arrays in zip(*dirty, strict=True))
        for n in range(0, len(id_V), _BATCH):
            yield table_V[n : n + _BATCH], id_V[n : n + _BATCH], place_V[n : n + _BATCH]

    # ---- the tier -------------------------------------------------------------------------------------------------

    def check_holds(self, rows: int) -> None:
        """Do nothing: only the server knows its room, and a push beyond it raises."""

    def reload(self) -> None:
        """Push every row of the store below; see `Tier.reload`."""
        assert self._below is not None
        self._forget()
        try:
            for table_N, id_N, row_NW in self._below.scan():
                signals_deferred.raise_interrupt()
                self._push(table_N, id_N, row_NW, dirty=False)
        except BaseException:
            self._forget()
            raise

    def clear(self) -> None:
        """See `RowStore.clear`. The server keeps its copies, which no job reads, until new pushes."""
        if self._below is not None:
            self._below.clear()
        with changing:
            self._forget()

    def _forget(self) -> None:
        self._left_behind += len(self._index)
        self._index.clear()
        self._dirty = 0

    def only_read(self) -> None:
        """Do nothing: this tier keeps no copy of a row that is read."""

    def check_slots(self) -> list[str]:
        """An empty list: this tier has no slots."""
        return []

    def stats(self) -> dict[str, Any]:
        return {
            "rows": len(self._index),
            "dirty": self._dirty,
            "rows_pulled": self._pulled,
            "rows_pushed": self._pushed,
            "rows_left_behind": self._left_behind,
            "bytes": self._index.nbytes,
        }

    def close(self) -> None:
        """End the connection. The server keeps its rows."""
        self._finalizer.detach()
        self._server.close()


def _by_table(table_U: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield each table number in `table_U` with the positions of its keys, an array or slice."""
    if len(table_U) == 0:
        return
    if (table_U == table_U[0]).all():
        yield int(table_U[0]), slice(None)
        return
    order_U = np.argsort(table_U, kind="stable")
    unique_T, begin_T = np.unique(table_U[order_U], return_index=True)
    yield from zip(unique_T.tolist(), np.split(order_U, begin_T[1:]), strict=True)


def _dirty(place_U: np.ndarray) -> int:
    """Number of dirty rows among these entries of the index; -1 is no entry."""
    return int(np.count_nonzero((place_U >= 0) & (place_U % 2 == 1)))
