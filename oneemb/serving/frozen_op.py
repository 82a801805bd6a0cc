"""The lookup of frozen rows as one registered op, which is quick in Python and needs oneemb where it runs.

    torch.ops.oneemb.frozen_rows(table_N, id_N, cell_C2, rows, kind_TC, param_TC4, end_C, key_0, key_1, dim, bits,
        trained, padding_idx)                                                                   float32 [N, D]

Its tensors are those of a file of rows (`storage/serving/FORMAT.md`): the index has a hash, not an order, so that a
lookup reads one line of it where `FrozenRows` searches 20 places of a million. It has no state.

Invariant: what is read lies in the tensors: cells are compared with the rows when they come from a file, and with
nothing later; whoever changes them in a program has no such promise.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import library

from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.arrays import Array
from oneemb.kernels.host_loops import BITS
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.serve_rows import MISSING, ServedRows, serve_rows
from oneemb.kernels.threads import Threads
from oneemb.serving.initial import first_weights, initial_of
from oneemb.storage.policies import RowPolicy
from oneemb.storage.row_format import RowFormat
from oneemb.storage.serving.served_file import QUANTIZED, ServedFile

__all__ = ["HashedRows"]

_LINE_BYTES = 64
_LOW = 0xFFFFFFFF

_library = library.Library("oneemb", "FRAGMENT")
_library.define(
    "frozen_rows(Tensor table_N, Tensor id_N, Tensor cell_C2, Tensor rows, Tensor kind_TC, Tensor param_TC4,"
    " Tensor end_C, int key_0, int key_1, int dim, int bits, str trained, int? padding_idx) -> Tensor"
)


def _frozen_rows(
    table_N: torch.Tensor, id_N: torch.Tensor, cell_C2: torch.Tensor, rows: torch.Tensor, kind_TC: torch.Tensor,
    param_TC4: torch.Tensor, end_C: torch.Tensor, key_0: int, key_1: int, dim: int, bits: int, trained: str,
    padding_idx: int | None,
) -> torch.Tensor:  # fmt: skip
    if id_N.dtype != torch.int64 or table_N.shape != id_N.shape or id_N.dim() != 1:
        raise TypeError(f"ids must be int64 [N], and tables as many, got {id_N.dtype} {list(id_N.shape)}")
    table_N32 = table_N.to(torch.int32).numpy()
    if len(table_N32) and not 0 <= int(table_N32.min()) <= int(table_N32.max()) < len(kind_TC):
        raise ValueError(
            f"tables must be from 0 to {len(kind_TC) - 1}, got {int(table_N32.min())} to {int(table_N32.max())}"
        )
    if cell_C2.data_ptr() % _LINE_BYTES:  # whoever loaded the program has put it elsewhere: slow, not wrong
        cell_C2 = cell_C2.clone()
    threads, id_array = Threads(torch.get_num_threads()), id_N.contiguous().numpy()
    out = torch.empty(len(id_array), dim)
    served = ServedRows.unchecked(cell_C2.numpy(), _bits(rows), bits)
    place_N, _ = serve_rows(served, table_N32, id_array, padding_idx, out.numpy(), threads=threads)
    missing = np.flatnonzero(place_N == MISSING) if len(end_C) else np.empty(0, np.int64)
    if len(missing):
        initial = InitialRows(key_1 << 32 | key_0, kind_TC.numpy(), param_TC4.numpy(), end_C.numpy())
        weight_MD = first_weights(
            initial, RowFormat(dim, trained), table_N32[missing], id_array[missing], threads=threads
        )  # fmt: skip
        begins = torch.from_numpy(weight_MD).view(TRAINED[trained])
        out[torch.from_numpy(missing)] = begins.float()
    return out


def _bits(rows: torch.Tensor) -> Array:
    """Weights as loops read them: see `kernels/jit_code.py`."""
    return rows.view(BITS.get(rows.dtype, rows.dtype)).numpy()


_library.impl("frozen_rows", _frozen_rows, "CPU")


@library.register_fake("oneemb::frozen_rows", lib=_library)
def _(
    table_N: torch.Tensor, id_N: torch.Tensor, cell_C2: torch.Tensor, rows: torch.Tensor, kind_TC: torch.Tensor,
    param_TC4: torch.Tensor, end_C: torch.Tensor, key_0: int, key_1: int, dim: int, bits: int, trained: str,
    padding_idx: int | None,
) -> torch.Tensor:  # fmt: skip
    return id_N.new_empty((id_N.shape[0], dim), dtype=torch.float32)


class HashedRows(torch.nn.Module):
    """The lookup of `FrozenRows` as one op: the same arguments of `forward`, the same result, quicker in Python.

    Args:
        file: whose rows it has.
        absent: how an id without a row reads: "initial", as it begins in training, or "zeros".
        policies: of the tables; as of `initial_of`.

    Raises:
        StorageError: the file is damaged, or does not say how rows begin and `absent` needs it.
    """

    cell_C2: torch.Tensor
    rows: torch.Tensor
    kind_TC: torch.Tensor
    param_TC4: torch.Tensor
    end_C: torch.Tensor

    def __init__(self, file: ServedFile, absent: str = "initial", policies: Sequence[RowPolicy] | None = None):
        super().__init__()
        info, initial = file.info, initial_of(file, absent, policies)
        file.verify()
        self.dim, self.bits, self.num_tables = info.dim, QUANTIZED.get(info.weights, 0), info.num_tables
        self.trained, self.padding_idx = info.trained, info.embedding.get("padding_idx")
        if initial is None:
            initial = InitialRows(0, np.zeros((info.num_tables, 0), np.int64), np.zeros((0, 0, 4)), np.empty(0, int))
        self.key_0, self.key_1 = initial.seed & _LOW, initial.seed >> 32
        row_SX = file.rows.row_SX
        dtype = torch.uint8 if self.bits else TRAINED[info.weights]
        rows = torch.empty(max(1, len(row_SX)), row_SX.shape[1], dtype=dtype)
        _bits(rows)[: len(row_SX)] = row_SX
        self.register_buffer("rows", rows)
        for name, array in (
            ("cell_C2", file.rows.cell_C2), ("kind_TC", initial.kind_TC), ("param_TC4", initial.param_TC4),
            ("end_C", initial.end_C),
        ):  # fmt: skip
            self.register_buffer(name, torch.from_numpy(array.copy()).clone())  # in memory of torch, which is aligned

    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """As `FrozenRows.forward`."""
        found: torch.Tensor = torch.ops.oneemb.frozen_rows(
            table_N, id_N, self.cell_C2, self.rows, self.kind_TC, self.param_TC4, self.end_C, self.key_0, self.key_1,
            self.dim, self.bits, self.trained, self.padding_idx,
        )  # fmt: skip
        return found

    def extra_repr(self) -> str:
        return f"tables={self.num_tables}, rows={self.rows.shape[0]}, dim={self.dim}, bits={self.bits}"
