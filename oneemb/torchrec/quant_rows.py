"""Quantized rows of tables: how they are made from an embedding, and the module that looks them up.

    tables = quantized_tables(rows, configs)          for each table, its ids, rows, and the values of other ids
    frozen = frozen_rows(tables, dim, data_type)      a module: (table_N, id_N) -> float32 [N, D]

S rows, N ids, D weights of a row, B bytes of a row, M rows of one table. FP32 and FP16 rows have only weights. INT8,
INT4 and INT2 rows have FBGEMM's layout: D weights of 8, 4 or 2 bits, then scale and low as float16. (In files to serve,
`kernels/quantize_rows.py` writes scale and low of 8-bit rows as float32.)

Reference: FBGEMM's FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf, which makes the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.types import DataType

from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.kernels.init_rows import BY_ID, CONSTANT, NORMAL, TRUNC_NORMAL, UNIFORM, InitialRows
from oneemb.rows.values import weights_of
from oneemb.serving.frozen_rows import FrozenRows
from oneemb.storage.errors import StorageError
from oneemb.storage.store_rows import visit_rows
from oneemb.torchrec.quant_index import IndexedRows

DATA_TYPES = {DataType.FP32: 32, DataType.FP16: 16, DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}
"""{format of rows: bits of a weight}."""

_AS_THEY_ARE = {DataType.FP32: torch.float32, DataType.FP16: torch.float16}
_TRAINED = [torch.float32, torch.float16, torch.bfloat16]
_SCALES = 4  # bytes of scale and low together
_TABLES_MAX = 1 << 16  # tables of one trained embedding; lookups allocate an entry for each
_MODULUS_MAX = 1 << 24  # modulus of weights that follow from the id, see `options.py`


def _row_bytes(dim: int, data_type: DataType) -> int:
    """Bytes of a row, B."""
    bits = DATA_TYPES[data_type]
    return dim * bits // 8 + (_SCALES if bits <= 8 else 0)


class RowsOfTable(NamedTuple):
    """Rows of one table in a state dict."""

    ids: torch.Tensor
    """Ids, int64 [S], sorted."""
    weight: torch.Tensor
    """Rows, uint8 [S, B]."""
    absent: torch.Tensor
    """Values of ids without a row, int64 [8] on the CPU: seed of the trained embedding, number of the table in it,
    index of its dtype in (float32, float16, bfloat16), kind of the initializer, and its 4 parameters as float64
    bits."""

    @classmethod
    def none(cls, config: BaseEmbeddingConfig, number: int) -> Self:
        """A table without rows, in which every id reads as zeros."""
        size = _row_bytes(config.embedding_dim, config.data_type)
        absent = torch.tensor([0, number, 0, CONSTANT, 0, 0, 0, 0], device="cpu")
        return cls(
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, size, dtype=torch.uint8, device="cpu"),
            absent,
        )

    @property
    def number(self) -> int:
        """Number of the table in the trained embedding."""
        return int(self.absent[1])

    @property
    def origin(self) -> tuple[int, int]:
        """(seed, index of the dtype) of the trained embedding. Tables that one embedding held have equal origins."""
        return int(self.absent[0]), int(self.absent[2])

    def to(self, device: torch.device) -> Self:
        """Copy with the rows on a device."""
        return type(self)(self.ids.to(device), self.weight.to(device), self.absent.cpu())

    def check(self, config: BaseEmbeddingConfig) -> None:
        """Raise TypeError or ValueError unless these tensors can be the rows of a table with this config."""
        for part, tensor in zip(self._fields, self, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                raise TypeError(f"{part} must be a tensor with values, got {type(tensor).__name__}")
        size = _row_bytes(config.embedding_dim, config.data_type)
        if self.ids.dtype != torch.int64 or self.ids.dim() != 1 or not bool((self.ids[1:] > self.ids[:-1]).all()):
            raise ValueError(f"ids must be int64 in ascending order, got {self.ids.dtype} {[*self.ids.shape]}")
        if self.weight.dtype != torch.uint8 or tuple(self.weight.shape) != (len(self.ids), size):
            raise ValueError(
                f"weight must be uint8 [{len(self.ids)}, {size}], rows of {config.embedding_dim} weights as"
                f" {config.data_type.name}, got {self.weight.dtype} {[*self.weight.shape]}"
            )
        if self.absent.dtype != torch.int64 or tuple(self.absent.shape) != (8,):
            raise ValueError(f"absent must be int64 [8], got {self.absent.dtype} {[*self.absent.shape]}")
        if DATA_TYPES[config.data_type] <= 8:
            right_S = self.weight[:, -_SCALES:].contiguous().view(torch.float16).isfinite().all(1)
            if not right_S.all():
                wrong = int((~right_S).nonzero()[0])
                raise ValueError(f"the scales of weight must be finite, those of id {self.ids[wrong]} are not")
        if not _can_begin(self.absent[1:4].tolist(), self.absent[4:].cpu().numpy().view(np.float64)):
            raise ValueError(f"absent must describe the values of ids without a row, got {self.absent.tolist()}")


PARTS = tuple(RowsOfTable.__annotations__)
"""Names of the parts of `RowsOfTable` in state dicts."""


def quantized_tables(rows: MultiTableEmbedding, configs: Sequence[BaseEmbeddingConfig]) -> list[RowsOfTable]:
    """Current rows, of each table, that this rank has, in the format of the table's config. StorageError, naming the
    row, if a row has a NaN, an infinity, or weights that do not fit the format."""
    store = rows.store
    found: list[list[tuple[np.ndarray, torch.Tensor]]] = [[] for _ in configs]

    def quantize_all(table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        for t, config in enumerate(configs):
            place_M = np.flatnonzero(table_N == t)
            if len(place_M):
                weight_MD = torch.from_numpy(weights_of(store.format, row_NW[place_M]).astype(np.float32))
                found[t].append((id_N[place_M], _quantized(weight_MD, id_N[place_M], config)))

    visit_rows(store, quantize_all)
    absent = store.absent_rows
    tables = []
    for t, config in enumerate(configs):
        none = RowsOfTable.none(config, t)
        ids = torch.from_numpy(np.concatenate([none.ids.numpy(), *(ids for ids, _ in found[t])]))
        weight = torch.cat([none.weight, *(part for _, part in found[t])])
        found[t].clear()
        order = torch.argsort(ids)
        none.absent[0] = int(np.uint64(absent.seed).view(np.int64))
        none.absent[2], none.absent[3] = _TRAINED.index(rows.dtype), int(absent.kind_TC[t, 0])
        none.absent[4:] = torch.from_numpy(absent.param_TC4[t, 0].view(np.int64))
        tables.append(RowsOfTable(ids[order], weight[order], none.absent).to(store.backend.device))
    return tables


def _quantized(weight_MD: torch.Tensor, id_M: np.ndarray, config: BaseEmbeddingConfig) -> torch.Tensor:
    """Rows in the format of the config, uint8 [M, B]."""
    data_type = config.data_type
    if data_type == DataType.FP32:
        return weight_MD.contiguous().view(torch.uint8)
    if data_type == DataType.FP16:
        half_MD = weight_MD.half()
        _check_finite(half_MD, id_M, config)
        return half_MD.view(torch.uint8)
    _check_finite(weight_MD, id_M, config)
    quantize = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    row_MB: torch.Tensor = quantize(weight_MD.contiguous(), DATA_TYPES[data_type])
    _check_finite(row_MB[:, -_SCALES:].contiguous().view(torch.float16), id_M, config)
    return row_MB


def _can_begin(how: list[int], param_4: np.ndarray) -> bool:
    """Whether the numbers of `RowsOfTable.absent` describe initial rows. `how` has the table's number, the index of the
    dtype and the kind of the initializer, `param_4` the initializer's parameters."""
    number, trained, kind = how
    first, _, low, high = param_4.tolist()
    if not (0 <= number < _TABLES_MAX and 0 <= trained < len(_TRAINED) and np.isfinite(param_4).all()):
        return False
    if kind == BY_ID:
        return 1 <= first <= _MODULUS_MAX
    if kind == TRUNC_NORMAL:
        return 0 <= low <= high <= 1 and low < 1 and high > 0
    return kind in (CONSTANT, UNIFORM, NORMAL)


def _check_finite(number_MX: torch.Tensor, id_M: np.ndarray, config: BaseEmbeddingConfig) -> None:
    right_M = number_MX.isfinite().all(1)
    if not right_M.all():
        wrong = int((~right_M).nonzero()[0])
        raise StorageError(
            f"the row of id {id_M[wrong]} in table {config.name!r} has a NaN, an infinity or weights that are too large"
            f" for {config.data_type.name}; quantize the table as FP32"
        )


def frozen_rows(tables: Sequence[RowsOfTable], dim: int, data_type: DataType) -> IndexedRows:
    """Module that looks up the rows of these tables, which have one `origin` and different numbers."""
    absent_T = torch.stack([table.absent for table in tables]).numpy()
    number_T = absent_T[:, 1]
    if len(set(number_T.tolist())) < len(number_T):
        raise ValueError(f"tables of one embedding must have different numbers, got {number_T.tolist()}")
    kind_TC = np.full((number_T.max() + 1, 1), CONSTANT)
    param_TC4 = np.zeros((len(kind_TC), 1, 4))
    kind_TC[number_T, 0], param_TC4[number_T, 0] = absent_T[:, 3], absent_T[:, 4:].copy().view(np.float64)
    initial = InitialRows(int(absent_T[0, 0]) % 2**64, kind_TC, param_TC4, np.array([dim]))
    table_S = torch.cat([torch.full_like(table.ids, table.number, dtype=torch.int32) for table in tables])
    id_S, rows = (torch.cat([table[part] for table in tables]) for part in (0, 1))
    bits, scale_S2 = DATA_TYPES[data_type], torch.empty(0, 2, device=rows.device, dtype=torch.float32)
    if data_type in _AS_THEY_ARE:
        rows, bits = rows.view(_AS_THEY_ARE[data_type]), 0
    else:
        rows, scale_SB = rows.split([rows.shape[1] - _SCALES, _SCALES], 1)
        scale_S2 = scale_SB.contiguous().view(torch.float16)
    trained = _TRAINED[int(absent_T[0, 2])]
    return IndexedRows(FrozenRows.of_rows(table_S, id_S, rows, scale_S2, len(kind_TC), dim, bits, initial, trained))


def rows_of_table(indexed: IndexedRows, absent: torch.Tensor) -> RowsOfTable:
    """Rows of one table in a module made by `frozen_rows`; `absent` has the table's number."""
    frozen = indexed.frozen
    ids, rows, scale_S2 = frozen.rows_of(int(absent[1]))
    weight = rows.view(torch.uint8)
    if frozen.bits:
        weight = torch.cat([weight, scale_S2.view(torch.uint8)], 1)
    return RowsOfTable(ids, weight, absent)
