"""An index of frozen rows, for calls on values on a CPU: keys are found and rows read in one loop.

    index = RowIndex()
    index.read(frozen, table_N, id_N)                               float32 [N, D], as `frozen` gives it
    index.pool(frozen, bags, table_F, column_F, means, out_BE)      sums or means, as embedding_bag gives them

N ids, F features, B samples, D weights of a row, E of all that a sample gives, T tables.

Invariant: the bits are those of `FrozenRows` and torch's embedding_bag, which is what traced models have.
"""

import threading
from typing import NamedTuple

import numpy as np
import torch

from oneemb.kernels.frozen_rows import FrozenArrays, cells_for, pool_frozen, put_cells, read_frozen
from oneemb.kernels.host_loops import BITS
from oneemb.kernels.threads import Threads
from oneemb.serving.frozen_rows import FrozenRows
from oneemb.storage.fs import aligned_bytes
from oneemb.torchrec.jagged import Jagged

__all__ = ["RowIndex"]

_CELL_BYTES = 16


class _Made(NamedTuple):
    cell_C2: np.ndarray
    begin_TD: np.ndarray | None
    """Rows as which ids without a row read, by table; zeros if the rows depend on the id."""
    at: tuple[int, int]
    """Where the rows and their scales are."""
    arrays: FrozenArrays
    """Which have the memory of the rows."""


def _places_of(frozen: FrozenRows) -> tuple[int, int]:
    return frozen.rows.data_ptr(), frozen.scale_S2.data_ptr()


def _cells_of(frozen: FrozenRows) -> np.ndarray:
    table_S, key_S = frozen.table_S.numpy(), frozen.key_S.numpy()
    place_S = np.flatnonzero(table_S >= 0)
    table_S, key_S = table_S[place_S], key_S[place_S]
    size = cells_for(len(place_S)) * _CELL_BYTES
    cell_C2: np.ndarray = aligned_bytes(size)[:size].view(np.int64).reshape(-1, 2)
    put_cells(cell_C2, table_S, key_S ^ frozen.salt_T.numpy()[table_S], place_S)
    return cell_C2


def _made(frozen: FrozenRows, cell_C2: np.ndarray) -> _Made:
    rows, scale_S2 = (its.view(BITS.get(its.dtype, its.dtype)).numpy() for its in (frozen.rows, frozen.scale_S2))
    parts = (None, rows, scale_S2, frozen.bits) if frozen.bits else (rows, None, None, 0)
    begin_TD = np.zeros((frozen.num_tables, frozen.dim), np.float32) if frozen.draws else None
    arrays = FrozenArrays(cell_C2.ctypes.data, len(cell_C2), *parts)
    return _Made(cell_C2, begin_TD, _places_of(frozen), arrays)


class RowIndex:
    """The places of keys in frozen rows, which are always the same; a copy, or a pickled one, makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index: _Made | None = None
        self._threads = Threads(1)

    def _of(self, frozen: FrozenRows) -> _Made:
        index = self._index
        if index is None or index.at != _places_of(frozen):  # The memory of rows can be moved: share_memory() does.
            with self._lock:
                cell_C2 = _cells_of(frozen) if self._index is None else self._index.cell_C2
                self._index = index = _made(frozen, cell_C2)
        return index

    def _now(self) -> Threads:
        """Threads, as many as torch has now."""
        threads, count = self._threads, torch.get_num_threads()
        if threads.count != count:
            self._threads = threads = Threads(count)
        return threads

    def read(self, frozen: FrozenRows, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """The weights of keys, float32 [N, D].

        Args:
            table_N, id_N: int64 [N], on the CPU.
        """
        out = torch.empty(len(id_N), frozen.dim, dtype=torch.float32, device="cpu")
        id_array = id_N.contiguous().numpy()
        place_N = read_frozen(
            self._of(frozen).arrays, table_N.int().numpy(), id_array, out.numpy(), threads=self._now()
        )  # fmt: skip
        absent = np.flatnonzero(place_N < 0)
        if len(absent):
            absent_M = torch.from_numpy(absent)
            out[absent_M] = _begins(frozen, table_N[absent_M], id_N[absent_M])
        return out

    def pool(
        self, frozen: FrozenRows, bags: Jagged, table_F: torch.Tensor, column_F: np.ndarray, means: bool,
        out_BE: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the sums or means of bags to `out_BE`, a feature from each of these columns on.

        Args:
            bags: of as many samples of each feature, on the CPU.
            table_F: int64, the table of each feature.
            column_F: int64.
            out_BE: float32.
        """
        made, threads = self._of(frozen), self._now()
        id_N, offset_P1 = bags.values.contiguous().numpy(), bags.offsets.contiguous().numpy()
        scale_N = None if bags.weights is None else bags.weights.detach().contiguous().numpy()
        its = table_F.numpy(), column_F, id_N, offset_P1, scale_N, means
        begin_TD = frozen.begin_TD.numpy() if made.begin_TD is None else made.begin_TD
        found = pool_frozen(made.arrays, *its, begin_TD, out_BE.numpy(), threads=threads)
        if found is not None and frozen.draws:
            table_N, place_N = found
            absent = np.flatnonzero(place_N < 0)
            absent_M = torch.from_numpy(absent)
            begin_MD = _begins(frozen, torch.from_numpy(table_N)[absent_M].long(), bags.values[absent_M])
            place_N[absent] = -1 - np.arange(len(absent))
            pool_frozen(made.arrays, *its, begin_MD.numpy(), out_BE.numpy(), threads=threads, known=found)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RowIndex, ()


def _begins(frozen: FrozenRows, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
    """Rows as which ids without a row read, float32 [M, D]."""
    begin_MD: torch.Tensor = frozen.begins(table_M, id_M) if frozen.draws else frozen.begin_TD[table_M]
    return begin_MD
