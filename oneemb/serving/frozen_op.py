"""Lookup of frozen rows as one registered op. It is fast in Python, and needs oneemb where it runs.

    torch.ops.oneemb.frozen_rows(table_N, id_N, region_T6, pilot_B, record_SW, kind_TC, param_TC4, end_C, key_0, key_1,
        dim, weights, trained, padding_idx)                                                     float32 [N, D]

The tensors are those of a served file (`storage/serving/FORMAT.md`). Ids have a perfect hash, so a lookup reads one
record, where the search of `FrozenRows` in a million keys reads 20. The op has no state.

Invariant: a lookup reads only inside the tensors. The tensors are compared with one another when they are read from a
file, and not later: a program whose tensors a user has changed is not protected.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import library

from oneemb.kernels.frozen_rows import MISSING
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.serve_rows import ServedRows, serve_rows
from oneemb.kernels.threads import Threads
from oneemb.serving.initial import first_weights, initial_of
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.serving.served_file import QUANTIZED, ServedFile, array_dtype

_LOW = 0xFFFFFFFF

_library = library.Library("oneemb", "FRAGMENT")
_library.define(
    "frozen_rows(Tensor table_N, Tensor id_N, Tensor region_T6, Tensor pilot_B, Tensor record_SW, Tensor kind_TC,"
    " Tensor param_TC4, Tensor end_C, int key_0, int key_1, int dim, str weights, str trained, int? padding_idx)"
    " -> Tensor"
)


def _frozen_rows(
    table_N: torch.Tensor, id_N: torch.Tensor, region_T6: torch.Tensor, pilot_B: torch.Tensor, record_SW: torch.Tensor,
    kind_TC: torch.Tensor, param_TC4: torch.Tensor, end_C: torch.Tensor, key_0: int, key_1: int, dim: int, weights: str,
    trained: str, padding_idx: int | None,
) -> torch.Tensor:  # fmt: skip
    if id_N.dtype != torch.int64 or table_N.shape != id_N.shape or id_N.dim() != 1:
        raise TypeError(
            f"ids must be int64 [N], and tables must have the same shape, got ids {id_N.dtype} {list(id_N.shape)} and"
            f" tables {list(table_N.shape)}"
        )
    if table_N.dtype != torch.int64:  # long() would make table 0 of 0.5
        raise TypeError(f"tables must be int64 [N], got {table_N.dtype} {list(table_N.shape)}; call tables.long()")
    if len(table_N):
        low, high = int(table_N.min()), int(table_N.max())  # int32 would make table 0 of 2^32
        if not 0 <= low <= high < len(region_T6):
            raise ValueError(f"tables must be from 0 to {len(region_T6) - 1}, got {low} to {high}")
    table_N32 = table_N.to(torch.int32).contiguous().numpy()
    threads, id_array = Threads(torch.get_num_threads()), id_N.contiguous().numpy()
    out = torch.empty(len(id_array), dim, dtype=torch.float32, device="cpu")  # not torch's default dtype
    served = ServedRows.unchecked(
        region_T6.numpy().view(np.uint64), pilot_B.numpy().view(np.uint16), record_SW.numpy(), array_dtype(weights),
        QUANTIZED.get(weights, 0),
    )  # fmt: skip
    place_N, _ = serve_rows(served, table_N32, id_array, padding_idx, out.numpy(), threads=threads)
    missing = np.flatnonzero(place_N == MISSING) if len(end_C) else np.empty(0, np.int64)
    if len(missing):
        initial = InitialRows(key_1 << 32 | key_0, kind_TC.numpy(), param_TC4.numpy(), end_C.numpy())
        format = RowFormat(dim, trained)
        begins = first_weights(initial, format, "float32", table_N32[missing], id_array[missing], threads=threads)
        out[torch.from_numpy(missing)] = torch.from_numpy(begins)
    return out


_library.impl("frozen_rows", _frozen_rows, "CPU")


@library.register_fake("oneemb::frozen_rows", lib=_library)
def _(
    table_N: torch.Tensor, id_N: torch.Tensor, region_T6: torch.Tensor, pilot_B: torch.Tensor, record_SW: torch.Tensor,
    kind_TC: torch.Tensor, param_TC4: torch.Tensor, end_C: torch.Tensor, key_0: int, key_1: int, dim: int, weights: str,
    trained: str, padding_idx: int | None,
) -> torch.Tensor:  # fmt: skip
    return id_N.new_empty((id_N.shape[0], dim), dtype=torch.float32)


class HashedRows(torch.nn.Module):
    """The lookup of `FrozenRows` as one op: `forward` has the same arguments and result, and is faster in Python.

    Args:
        file: served file with the rows.
        absent: values of an id without a row: "initial" = its initial row in training, or "zeros".
        policies: policy of each table; same as for `initial_of`.

    Raises:
        StorageError: the file is damaged, or does not describe initial rows and `absent` needs them.
    """

    region_T6: torch.Tensor
    pilot_B: torch.Tensor
    record_SW: torch.Tensor
    kind_TC: torch.Tensor
    param_TC4: torch.Tensor
    end_C: torch.Tensor

    def __init__(self, file: ServedFile, absent: str = "initial", policies: Sequence[RowPolicy] | None = None):
        super().__init__()
        info, initial = file.info, initial_of(file, absent, policies)
        file.verify()
        self.dim, self.weights, self.num_tables = info.dim, info.weights, info.num_tables
        self.trained, self.padding_idx = info.trained, info.embedding.get("padding_idx")
        if initial is None:
            initial = InitialRows(0, np.zeros((info.num_tables, 0), np.int64), np.zeros((0, 0, 4)), np.empty(0, int))
        self.key_0, self.key_1 = initial.seed & _LOW, initial.seed >> 32
        for name, array in (
            ("region_T6", file.rows.region_T6.view(np.int64)), ("pilot_B", file.rows.pilot_B.view(np.int16)),
            ("record_SW", file.rows.record_SW), ("kind_TC", initial.kind_TC), ("param_TC4", initial.param_TC4),
            ("end_C", initial.end_C),
        ):  # fmt: skip
            self.register_buffer(name, torch.from_numpy(array.copy()).clone())  # torch's memory is aligned

    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """Read rows; see `FrozenRows.forward`."""
        found: torch.Tensor = torch.ops.oneemb.frozen_rows(
            table_N, id_N, self.region_T6, self.pilot_B, self.record_SW, self.kind_TC, self.param_TC4, self.end_C,
            self.key_0, self.key_1, self.dim, self.weights, self.trained, self.padding_idx,
        )  # fmt: skip
        return found

    def extra_repr(self) -> str:
        return f"tables={self.num_tables}, slots={self.record_SW.shape[0]}, dim={self.dim}, weights={self.weights}"
