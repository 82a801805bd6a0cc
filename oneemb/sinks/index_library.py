"""Interface of a library of vector indexes, and the view that says which vectors of an index are live.

A vector is added behind all others, at the next position. An id whose vector changes gets a new position; the vector at
its old position stays, and searches leave it out. `IndexView` says which positions are live, and which id each one has.
"""

import zlib
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.sinks.version import TableVersion
from oneemb.storage.hash_index import HashIndex

PIECE = 1024
"""Vectors that are added in one call: searches of the same index wait for the call."""


class IndexView(NamedTuple):
    """The index as searches see it: the positions that are live in one version of the table. P positions."""

    version: TableVersion
    index: Any
    """Index of the library; it may have more positions than the view, none of which is live."""
    id_P: np.ndarray
    """int64 [P]: id of each position."""
    live_P: np.ndarray
    """bool [P]: whether a search may find the position."""
    bit_N: np.ndarray
    """uint8: `live_P` as bits, the lowest first."""
    choice: dict[str, Any]
    """Table and library of the index, as its sink was made."""

    @classmethod
    def of(
        cls, version: TableVersion, index: Any, id_P: np.ndarray, live_P: np.ndarray, choice: dict[str, Any]
    ) -> "IndexView":
        """View with these positions."""
        return cls(version, index, id_P, live_P, np.packbits(live_P, bitorder="little"), choice)

    def places(self) -> HashIndex:
        """Positions of the live ids."""
        places, place_N = HashIndex(Threads(1)), np.flatnonzero(self.live_P)
        places.put(np.zeros(len(place_N), np.int32), self.id_P[place_N], place_N)
        return places

    def after(
        self, version: TableVersion, places: HashIndex, first: int, id_N: np.ndarray, gone_N: np.ndarray
    ) -> "IndexView":
        """View of the index in a later version: `id_N` have their vectors at positions `first` and later, and `gone_N`
        have none. This view stays as it is. `places`: the positions of this view's live ids."""
        # Positions between those of this view and `first` were added by calls that failed later.
        id_P = np.concatenate([self.id_P, np.zeros(first - len(self.id_P), np.int64), id_N])
        live_P = np.zeros(len(id_P), np.bool_)
        live_P[: len(self.live_P)] = self.live_P
        live_P[first:] = True
        changed_N = np.concatenate([id_N, gone_N])
        old_N = places.find(np.zeros(len(changed_N), np.int32), changed_N)
        live_P[old_N[old_N >= 0]] = False
        return IndexView.of(version, self.index, id_P, live_P, self.choice)

    def move(self, places: HashIndex, before: "IndexView") -> None:
        """Turn `places`, the positions of the live ids of the view `before`, into those of this view."""
        new_P = self.live_P.copy()
        new_P[: len(before.live_P)] ^= before.live_P  # positions that have come to life or died since
        for live in (False, True):
            place_N = np.flatnonzero(new_P & (self.live_P == live))
            keys = np.zeros(len(place_N), np.int32), self.id_P[place_N]
            places.put(*keys, place_N) if live else places.erase(*keys)


class IndexLibrary(Protocol):
    """A library's index of vectors at positions 0, 1, 2 and so on."""

    name: str
    """Name of the library, in figures and errors."""
    suffix: str
    """End of the name of an index file."""
    choice: dict[str, Any]
    """Arguments that a new index depends on; with others, the sink gets all rows."""

    def made(self, vector_ND: np.ndarray) -> Any:
        """Empty index for these vectors, trained if it needs to be."""

    def size(self, index: Any) -> int:
        """Number of positions."""
        ...

    def add(self, index: Any, vector_ND: np.ndarray) -> None:
        """Add vectors at the next positions. No search runs meanwhile."""

    def search(self, view: IndexView, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, float32 [Q, k], and live positions, int64 [Q, k], of the nearest vectors; infinite and -1 where there
        are fewer. Several threads may call it."""
        ...

    def write(self, index: Any, file: "SummedFile") -> None:
        """Write the index to a file."""

    def read(self, file: IO[bytes]) -> Any:
        """Index that `write` has written."""


class SummedFile:
    """A new file with the CRC-32 of all bytes that were written."""

    def __init__(self, file: IO[bytes]):
        self._file, self.sum = file, 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._file.write(data)
