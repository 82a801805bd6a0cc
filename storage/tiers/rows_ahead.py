"""Rows that one thread reads from the store below a cache while other threads use the cache."""

import numpy as np

from oneemb.kernels.loops import Keys
from oneemb.storage.row_store import RowSource


class RowsAhead:
    """Rows below of keys that a cache does not have. M keys, W words of a row.

    `read` runs beside other calls of the cache, which names each key whose row below changes meanwhile (`note_change`);
    `known` reads those rows once more.

    Args:
        below: the store, whose `get` any thread may call.
        keys: of a lookup.
        wanted_M: int64, ascending: which of them.
    """

    def __init__(self, below: RowSource, keys: Keys, wanted_M: np.ndarray):
        self.wanted_M = wanted_M
        self._below, self._table_M, self._id_M = below, keys.table_U[wanted_M], keys.id_U[wanted_M]
        self.row_MW = np.empty((len(wanted_M), below.row_width), np.float32)
        self._missing_M = np.ones(len(wanted_M), np.bool_)
        self._changed: list[np.ndarray] = []

    def read(self) -> None:
        """Read the rows. Needs no turn."""
        self._missing_M = self._below.get(self._table_M, self._id_M, self.row_MW)

    def note_change(self, id_N: np.ndarray) -> None:
        """Note, in a turn, ids of keys whose rows below are about to change."""
        self._changed.append(id_N)

    def known(self, wanted: np.ndarray) -> np.ndarray:
        """The `wanted` keys that have rows, as places in `wanted_M`; `row_MW` has their rows as they are now.
        In a turn, after `read`."""
        m = np.searchsorted(self.wanted_M, wanted)
        if self._changed:
            again = m[np.isin(self._id_M[m], np.concatenate(self._changed))]
            self._missing_M[again] = self._below.get(self._table_M[again], self._id_M[again], self.row_MW, again)
        return m[~self._missing_M[m]]
