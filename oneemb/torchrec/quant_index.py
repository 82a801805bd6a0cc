"""Frozen rows with an index of their keys, for calls on values on a CPU: one loop finds rows and reads or pools them.

    rows = IndexedRows(frozen)
    rows(table_N, id_N)                                     float32 [N, D], equal to `frozen(table_N, id_N)`
    rows.pool(bags, table_F, begins, means, out_BE)         sums or means, equal to torch's embedding_bag

N ids, F features, B samples, D weights of a row, E columns of the output, T tables, C cells, M absent ids.

Invariant: results equal, bit for bit, those of `FrozenRows` and torch's embedding_bag, which traced models use.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from oneemb.graph.tracers import tracer_of, uncompiled
from oneemb.kernels.backend import BITS
from oneemb.kernels.frozen_rows import OTHER, RowArrays
from oneemb.kernels.indexed_rows import RowIndex, cells_for, pool_indexed, put_cells, read_indexed
from oneemb.kernels.threads import Threads
from oneemb.serving.frozen_rows import FrozenRows
from oneemb.storage.fs import aligned_bytes
from oneemb.torchrec.jagged import Jagged

_CELL_BYTES = 16
_making = threading.Lock()


class _Index(NamedTuple):
    """Index of frozen rows. The keys never change; the memory of the rows can move, for example by share_memory()."""

    cell_C2: np.ndarray
    at: tuple[int, int, int]
    """Addresses of the rows, their scales and the values of ids without a row, when the index was made."""
    begin_TD: np.ndarray
    """For each table, the values of an id without a row, [T, D]; zeros if they depend on the id."""
    arrays: RowIndex
    """Addresses of the index and of the rows, for the kernels."""


class IndexedRows(torch.nn.Module):
    """Frozen rows with an index, which the first call on values on a CPU makes. A traced, scripted or exported model
    has only the frozen rows, which search sorted keys and give the same numbers."""

    __jit_ignored_attributes__ = ["_index", "_threads"]

    def __init__(self, frozen: FrozenRows):
        super().__init__()
        self.frozen = frozen
        self.dim: int = frozen.dim
        self._index: _Index | None = None
        self._threads = Threads(1)

    def __getstate__(self) -> dict[str, Any]:
        """State without the index: each copy, also in another process, makes its own index."""
        return {**vars(self), "_index": None, "_threads": Threads(1)}

    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """Read rows; see `FrozenRows.forward`."""
        if not torch.jit.is_scripting():
            if _is_called(id_N):
                return self._read(table_N, id_N)
        return self.frozen(table_N, id_N)

    @torch.jit.export
    def where(self) -> torch.device:
        """Device of the rows."""
        return self.frozen.key_S.device

    @torch.jit.unused
    @uncompiled
    def _read(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(id_N), self.dim, dtype=torch.float32, device="cpu")
        place_N = read_indexed(
            self._now().arrays, table_N.int().numpy(), id_N.contiguous().numpy(), out.numpy(), threads=self._threads
        )  # fmt: skip
        absent = torch.from_numpy(np.flatnonzero(place_N < 0))
        if len(absent):
            out[absent] = self.frozen.begin(table_N[absent], id_N[absent])
        return out

    @torch.jit.unused
    def pools(self, bags: Jagged) -> bool:
        """Whether `pool` supports these bags: a call on values on a CPU, without a gradient of the bags' weights."""
        trains = bags.weights is not None and bags.weights.requires_grad and torch.is_grad_enabled()
        tensors = (bags.values, bags.offsets, self.frozen.key_S, *(() if bags.weights is None else (bags.weights,)))
        return not trains and all(map(_is_called, tensors))

    @torch.jit.unused
    def pool(self, bags: Jagged, table_F: torch.Tensor, begins: list[int], means: bool, out_BE: torch.Tensor) -> None:
        """Write the sums or means of bags to `out_BE`. All features have the same number of samples.

        Args:
            table_F: table of each feature.
            begins: for each feature, its first column in `out_BE`.
            means: whether bags are averaged, not summed.
            out_BE: result, float32.
        """
        frozen, index = self.frozen, self._now()
        id_N, offset_P1 = bags.values.contiguous().numpy(), bags.offsets.contiguous().numpy()
        scale_N = None if bags.weights is None else bags.weights.detach().contiguous().numpy()
        arguments = table_F.numpy(), np.array(begins), id_N, offset_P1, scale_N, means
        found = pool_indexed(index.arrays, *arguments, index.begin_TD, out_BE.numpy(), threads=self._threads)
        if found is not None and frozen.draws:
            table_N, place_N = found
            absent = np.flatnonzero(place_N < 0)
            absent_M = torch.from_numpy(absent)
            begin_MD = frozen.begin(torch.from_numpy(table_N)[absent_M].long(), bags.values[absent_M])
            place_N[absent] = OTHER - np.arange(len(absent))
            pool_indexed(index.arrays, *arguments, begin_MD.numpy(), out_BE.numpy(), threads=self._threads, known=found)

    def _now(self) -> _Index:
        """Current index, made anew if the rows have moved; it also adopts torch's current number of threads."""
        if self._threads.count != (count := torch.get_num_threads()):
            self._threads = Threads(count)
        frozen, index = self.frozen, self._index
        at = frozen.rows.data_ptr(), frozen.scale_S2.data_ptr(), frozen.begin_TD.data_ptr()
        if index is None or index.at != at:
            with _making:
                cell_C2 = _cells_of(frozen) if self._index is None else self._index.cell_C2
                self._index = index = _index_of(frozen, cell_C2, at)
        return index


def _cells_of(frozen: FrozenRows) -> np.ndarray:
    table_S, key_S = frozen.table_S.numpy(), frozen.key_S.numpy()
    place_S = np.flatnonzero(table_S >= 0)
    table_S, key_S = table_S[place_S], key_S[place_S]
    size = cells_for(len(place_S)) * _CELL_BYTES
    cell_C2: np.ndarray = aligned_bytes(size)[:size].view(np.int64).reshape(-1, 2)
    put_cells(cell_C2, table_S, key_S ^ frozen.salt_T.numpy()[table_S], place_S)
    return cell_C2


def _index_of(frozen: FrozenRows, cell_C2: np.ndarray, at: tuple[int, int, int]) -> _Index:
    row_SX, scale_S2 = (
        tensor.view(BITS.get(tensor.dtype, tensor.dtype)).numpy() for tensor in (frozen.rows, frozen.scale_S2)
    )
    begin_TD = np.zeros((frozen.num_tables, frozen.dim), np.float32) if frozen.draws else frozen.begin_TD.numpy()
    arrays = RowIndex(cell_C2.ctypes.data, len(cell_C2), RowArrays.of(row_SX, frozen.bits, scale_S2))
    return _Index(cell_C2, at, begin_TD, arrays)


def _is_called(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a CPU and has values."""
    if torch.compiler.is_dynamo_compiling() or type(tensor) is not torch.Tensor:
        return False
    return tensor.device.type == "cpu" and tracer_of(tensor) is None


def pooled_while_read(groups: Sequence[Any], bags: Sequence[Jagged], width: int) -> torch.Tensor | None:
    """Sums or means of the bags of each group, float32 [B, E], by a loop that pools rows while it reads them; None =
    the loop does not support these rows or bags.

    Args:
        groups: `GroupOfTables` modules.
        bags: bags of each group.
        width: E, the number of columns of the output.
    """
    if torch.compiler.is_dynamo_compiling() or not groups:
        return None
    for group, jagged in zip(groups, bags, strict=True):
        if not (isinstance(group.rows, IndexedRows) and group.rows.pools(jagged)):
            return None
    out_BE = torch.empty(bags[0].samples[0], width, dtype=torch.float32, device="cpu")
    for group, jagged in zip(groups, bags, strict=True):
        group.rows.pool(jagged, group.table_F, group.begins, group.means, out_BE)
    return out_BE
