"""Rows of tables as plain tensors that aten ops look up. An exported program has them in place of an embedding.

N ids, M ids without a row, T tables, S rows, D weights of a row, X stored values of a row.

    key_S      int64, sorted: the id of each row XOR the salt of its table; salts make all keys distinct
    table_S    int32: the table of each row. A lookup compares it, since a looked-up id may have another table's key
    rows       [S, X]: float32, float16 or bfloat16 weights; or uint8, as `kernels/quantize_rows.py` makes them
    scale_S2   scale and low of each uint8 row: float16 for 4 bits and for TorchRec's formats, else float32. They are a
               tensor of their own, since TorchScript cannot read bytes as numbers

Invariants:
- a lookup is exact for every int64 id: XOR loses nothing, and both key and table are compared;
- a row has the same weights as in an `InferenceEmbedding` of the same file;
- if there are no rows, the tensors hold one row of table -1, which no lookup finds.
"""

from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import torch

from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.backend import BITS
from oneemb.kernels.init_rows import InitialRows
from oneemb.serving.initial import InitialValues, constants_of, initial_of
from oneemb.storage.errors import StorageError
from oneemb.storage.policies.row_policy import RowPolicy
from oneemb.storage.serving.served_file import QUANTIZED, ServedFile

_ROWS = 1 << 16  # number of rows that are copied at a time
SALTS_MAX = 64  # number of tries to find salts
_MASK = (1 << 64) - 1


def salts_of(tables: int, attempt: int) -> np.ndarray:
    """Salts, int64 [T], the first 0; each `attempt` gives others. Their upper bits differ, so that keys of tables lie
    apart."""
    found = [0]
    for t in range(1, tables):
        z = (t + attempt * 0x632BE59BD9B4E019) * 0x9E3779B97F4A7C15 & _MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        found.append(z ^ z >> 31)
    return np.array(found, np.uint64).view(np.int64)


def _sorted_keys(table_S: np.ndarray, id_S: np.ndarray, tables: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Salts of the tables, sorted keys, and the index of the row of each key."""
    for attempt in range(SALTS_MAX):
        salt_T = salts_of(tables, attempt)
        key_S = id_S ^ salt_T[table_S]
        order_S = np.argsort(key_S)
        key_S = key_S[order_S]
        if not (key_S[1:] == key_S[:-1]).any():
            return salt_T, key_S, order_S
    raise StorageError(
        f"no salts of {SALTS_MAX} tries keep the keys of {tables} tables apart; export fewer tables at a time"
    )


def _rows_of(file: ServedFile, place_S: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` and `scale_S2` of the rows at these slots of a file, which has been verified."""
    info, row_SX = file.info, file.rows.row_SX
    bits = QUANTIZED.get(info.weights, 0)
    width = {0: info.dim, 8: info.dim, 4: (info.dim + 1) // 2}[bits]
    dtype = torch.uint8 if bits else TRAINED[info.weights]
    rows = torch.empty(len(place_S), width, dtype=dtype, device="cpu")
    scale_S2 = torch.empty(
        len(place_S) if bits else 0, 2, dtype=torch.float16 if bits == 4 else torch.float32, device="cpu"
    )
    out_SX = rows.view(BITS.get(dtype, dtype)).numpy()
    scale_SB = scale_S2.view(torch.uint8).numpy()
    for begin in range(0, len(place_S), _ROWS):
        some_NX = row_SX[place_S[begin : begin + _ROWS]]
        out_SX[begin : begin + _ROWS] = some_NX[:, :width]
        if bits:
            scale_SB[begin : begin + _ROWS] = some_NX[:, width : width + scale_SB.shape[1]]
    return rows, scale_S2


class FrozenRows(torch.nn.Module):
    """Weights of keys, looked up by aten ops. The module can be scripted, exported and compiled; it has no store.

    Args:
        key_S, table_S, salt_T, rows, scale_S2: as above; `salt_T` is from `salts_of`.
        dim: number of weights of a row, D.
        bits: bits of a quantized weight, 8, 4 or 2, with the first weight in the lowest bits; 0 = not quantized.
        initial: initial rows, as which ids without a row read; None = they read as zeros.
        trained: dtype of the weights in training.
        padding_idx: an id that reads as zeros; None = no such id.
    """

    key_S: torch.Tensor
    table_S: torch.Tensor
    salt_T: torch.Tensor
    rows: torch.Tensor
    scale_S2: torch.Tensor
    begin_TD: torch.Tensor
    draws: Final[bool]

    def __init__(
        self, key_S: torch.Tensor, table_S: torch.Tensor, salt_T: torch.Tensor, rows: torch.Tensor,
        scale_S2: torch.Tensor, dim: int, bits: int, initial: InitialRows | None, trained: torch.dtype,
        padding_idx: int | None,
    ):  # fmt: skip
        super().__init__()
        self.dim, self.bits, self.num_tables = dim, bits, len(salt_T)
        self.has_padding, self.padding_idx = padding_idx is not None, padding_idx or 0
        self.register_buffer("key_S", key_S)
        self.register_buffer("table_S", table_S)
        self.register_buffer("salt_T", salt_T)
        self.register_buffer("rows", rows)
        self.register_buffer("scale_S2", scale_S2)
        constants = constants_of(initial, self.num_tables, dim, trained)
        self.draws = constants is None
        self.register_buffer(
            "begin_TD", torch.empty(0, dim, dtype=torch.float32, device="cpu") if constants is None else constants
        )
        self.begins: torch.nn.Module = torch.nn.Identity()
        if constants is None:
            assert initial is not None
            self.begins = InitialValues(initial, trained)

    @classmethod
    def of_file(
        cls, file: ServedFile, *, absent: str = "initial", policies: Sequence[RowPolicy] | None = None
    ) -> Self:  # fmt: skip
        """Rows of a served file. While it runs it needs 40 bytes a row of memory, besides the rows and the mapped file.

        Args:
            absent: values of an id without a row: "initial" = its initial row in training, or "zeros".
            policies: policy of each table; same as for `initial_of`.

        Raises:
            StorageError: the file is damaged, or does not describe initial rows and `absent` needs them.
        """
        initial = initial_of(file, absent, policies)
        file.verify()
        info = file.info
        table_S, id_S, place_S = file.keys()
        salt_T, key_S, order_S = _sorted_keys(table_S, id_S, info.num_tables)
        del id_S
        table_S, place_S = table_S[order_S], place_S[order_S]
        del order_S
        rows, scale_S2 = _rows_of(file, place_S)
        if not len(key_S):
            key_S, table_S = np.zeros(1, np.int64), np.full(1, -1, np.int32)
            rows, scale_S2 = rows.new_zeros(1, rows.shape[1]), scale_S2.new_zeros(1, 2)
        return cls(
            torch.from_numpy(key_S), torch.from_numpy(table_S), torch.from_numpy(salt_T), rows, scale_S2, info.dim,
            QUANTIZED.get(info.weights, 0), initial, TRAINED[info.trained], info.embedding.get("padding_idx"),
        )  # fmt: skip

    @classmethod
    def of_rows(
        cls, table_S: torch.Tensor, id_S: torch.Tensor, rows: torch.Tensor, scale_S2: torch.Tensor, num_tables: int,
        dim: int, bits: int, initial: InitialRows | None, trained: torch.dtype = torch.float32,
    ) -> Self:  # fmt: skip
        """Rows with distinct keys, in any order; `table_S` (int32) and `id_S` (int64) have the key of each row."""
        if not len(id_S):
            table_S, id_S = table_S.new_full((1,), -1), id_S.new_zeros(1)
            rows, scale_S2 = rows.new_zeros(1, rows.shape[1]), scale_S2.new_zeros(1, 2)
        salt_T, key_S, order_S = _sorted_keys(table_S.clamp(min=0).cpu().numpy(), id_S.cpu().numpy(), num_tables)
        order = torch.from_numpy(order_S).to(rows.device)
        table_S, rows, scale_S2 = table_S[order], rows[order], scale_S2[order] if len(scale_S2) else scale_S2
        tensors = torch.from_numpy(key_S), table_S, torch.from_numpy(salt_T), rows, scale_S2
        return cls(*tensors, dim, bits, initial, trained, None).to(rows.device)

    def rows_of(self, table: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of the ids of a table, sorted, their rows, and the rows' scales."""
        place_S = torch.nonzero(self.table_S == table).squeeze(1)
        id_S = self.key_S[place_S] ^ self.salt_T[table]
        order_S = torch.argsort(id_S)
        place_S = place_S[order_S]
        return id_S[order_S], self.rows[place_S], self.scale_S2[place_S] if self.bits else self.scale_S2

    def forward(self, table_N: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
        """Weights of keys, float32 [N, D]. `table_N` has tables from 0 to T-1, `id_N` any ids, both int64 [N]."""
        key_N = id_N ^ self.salt_T.index_select(0, table_N)
        place_N = torch.searchsorted(self.key_S, key_N).clamp(max=self.key_S.shape[0] - 1)
        found_N = (self.key_S.index_select(0, place_N) == key_N) & (self.table_S.index_select(0, place_N) == table_N)
        weight_ND = self.weights_at(place_N)
        if self.draws:
            weight_ND = torch.where(found_N.unsqueeze(1), weight_ND, 0.0)
            absent_M = torch.nonzero(~found_N).squeeze(1)
            begin_MD = self.begin(table_N.index_select(0, absent_M), id_N.index_select(0, absent_M))
            weight_ND = weight_ND.index_copy(0, absent_M, begin_MD)
        else:
            weight_ND = torch.where(found_N.unsqueeze(1), weight_ND, self.begin(table_N, id_N))
        if self.has_padding:
            weight_ND = torch.where((id_N == self.padding_idx).unsqueeze(1), 0.0, weight_ND)
        return weight_ND

    def begin(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """Weights of keys that have no row: float32 [M, D]."""
        if self.draws:
            return self.begins(table_M, id_M)
        return self.begin_TD.index_select(0, table_M)

    def weights_at(self, place_N: torch.Tensor) -> torch.Tensor:
        """Weights of the rows with these indices: float32 [N, D]."""
        row_NX = self.rows.index_select(0, place_N)
        if self.bits == 0:
            return row_NX.float()
        if self.bits == 4:
            both_NX2 = torch.stack([row_NX & 15, torch.bitwise_right_shift(row_NX, 4)], 2)
            row_NX = both_NX2.flatten(1)[:, : self.dim]
        if self.bits == 2:
            parts = [torch.bitwise_right_shift(row_NX, shift) & 3 for shift in (0, 2, 4, 6)]
            row_NX = torch.stack(parts, 2).flatten(1)
        scale_N2 = self.scale_S2.index_select(0, place_N).float()
        return row_NX.float() * scale_N2[:, :1] + scale_N2[:, 1:]

    def extra_repr(self) -> str:
        return f"tables={self.num_tables}, rows={self.rows.shape[0]}, dim={self.dim}, bits={self.bits}"
