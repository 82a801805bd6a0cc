"""Values of ids without a row in a served file: their initial rows in training, by the kernels or by aten ops.

M ids, D weights of a row, C columns, T tables, K blocks of four weights.

`kernels/init_rows.py` is the definition. Aten ops give the same bits for constant, id and uniform weights, and for the
85 % of normal weights that need no logarithm. Other normal weights may differ by one rounding of their dtype, since
torch's logarithm may differ from the kernel's in the last bit.

Invariant: no integer overflows in the aten ops, since overflow is undefined in C++, which some compilers generate.
"""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from oneemb.embeddings.embedding_arguments import initial_rows
from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.init_rows import (
    BY_ID,
    CONSTANT,
    NORMAL,
    QUANTILE_FACTORS,
    TRUNC_NORMAL,
    UNIFORM,
    InitialRows,
    init_rows,
)
from oneemb.kernels.philox import M0, M1, W0, W1
from oneemb.kernels.threads import Threads
from oneemb.options import Initializer, TableOptions, from_json
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.policies.row_policy import Absent, RowPolicy, reads_as, rows_instead
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.serving.served_file import ServedFile


def initial_of(
    file: ServedFile | LayeredFile, absent: str, policies: Sequence[RowPolicy] | None = None
) -> InitialRows | None:
    """Initial rows, as which ids without a row read; None = they read as zeros.

    Args:
        absent: "initial" = initial rows, or what a table's policy says instead; or "zeros".
        policies: policy of each table; None = the policies that the file describes.

    Raises:
        StorageError: the file does not describe initial rows, or describes them wrongly.
    """
    if absent not in ("initial", "zeros"):
        raise ValueError(f'absent must be "initial" or "zeros", got {absent!r}')
    if absent == "zeros":
        return None
    described = file.info.embedding
    if not {"seed", "tables", "column_dims", "default_initializer"} <= described.keys():
        raise StorageError(
            f"snapshot {file.info.name!r} does not say how rows begin: a writer or an earlier release saved it; pass"
            ' absent="zeros", or save it again'
        )
    try:
        tables = cast(list[TableOptions], from_json(json.dumps(described["tables"])))
        default = cast(Initializer, from_json(json.dumps(described["default_initializer"])))
        if type(described["seed"]) is not int or not all(type(dim) is int for dim in described["column_dims"]):
            raise ValueError(f"seed {described['seed']!r} and column_dims must be integers")
        initial = initial_rows(described["seed"], described["column_dims"], tables, default)
        if len(tables) != file.info.num_tables or sum(described["column_dims"]) != file.info.dim:
            raise ValueError("tables and columns must be those of the rows, and are others")
        absent_T = [_absent_of(one) for one in described.get("absent", ())]
        if len(absent_T) not in (0, len(tables)):
            raise ValueError(f"absent must be given for each of {len(tables)} tables, or for none, got {len(absent_T)}")
        return reads_as(absent_T, initial) if policies is None else rows_instead(policies, initial, "absent")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptTableError(
            f"{file.path}: its description of the embedding is wrong: {str(error)[:200]}"
        ) from error


def _absent_of(described: object) -> Absent:
    found = described if isinstance(described, str) else from_json(json.dumps(described))
    if found not in ("initial", "zeros") and not isinstance(found, Initializer):
        raise ValueError(f"absent is {str(described)[:100]}")
    return cast(Absent, found)


def first_weights(
    initial: InitialRows, format: RowFormat, gives: str, table_M: np.ndarray, id_M: np.ndarray, *, threads: Threads
) -> np.ndarray:
    """Initial weights of keys, [M, D]: the bits of `format` if `gives` is its dtype, else float32."""
    row_MW = np.zeros((len(id_M), format.row_width), np.float32)
    weight_MX = format.weights(row_MW)
    init_rows(
        weight_MX, row_MW, np.arange(len(id_M)), table_M, id_M.astype(np.int64), initial, np.empty(0, np.float32),
        state_begin=format.state_begin, threads=threads,
    )  # fmt: skip
    weight_MD = np.ascontiguousarray(weight_MX[:, : format.dim])
    return (
        weight_MD if gives == format.dtype else torch.from_numpy(weight_MD).view(TRAINED[format.dtype]).float().numpy()
    )


_KINDS = (CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL, BY_ID)
_LOW = 0xFFFFFFFF


def constants_of(initial: InitialRows | None, num_tables: int, dim: int, trained: torch.dtype) -> torch.Tensor | None:
    """Initial rows of each table, float32 [T, D], if no weight depends on the id, else None. Zeros if `initial` is
    None."""
    if initial is None:
        return torch.zeros(num_tables, dim, dtype=torch.float32, device="cpu")
    if (initial.kind_TC != CONSTANT).any():
        return None
    value_TD = np.repeat(initial.param_TC4[:, :, 0], np.diff(initial.end_C, prepend=0), axis=1)
    return torch.from_numpy(value_TD.astype(np.float32)).to(trained).float()


class InitialValues(torch.nn.Module):
    """Initial weights of keys, as a module that can be scripted and exported.

    Args:
        initial: description of the initial rows.
        trained: dtype of the weights in training, to which they are rounded.

    Raises:
        ValueError: an initializer cannot be computed by aten ops.
    """

    kind_TC: torch.Tensor
    param_TC4: torch.Tensor
    column_D: torch.Tensor
    block_K: torch.Tensor
    key_R2: torch.Tensor
    by_2: torch.Tensor
    coefficients_832: torch.Tensor

    def __init__(self, initial: InitialRows, trained: torch.dtype):
        super().__init__()
        unknown = sorted(set(initial.kind_TC.reshape(-1).tolist()) - set(_KINDS))
        if unknown:
            raise ValueError(
                f"initializers must be of kinds that an exported program can draw, got kinds {unknown}; export with"
                ' absent="zeros"'
            )
        dim = int(initial.end_C[-1])
        self.dim, self.trained = dim, trained
        kinds = set(initial.kind_TC.reshape(-1).tolist())
        self.draws = bool(kinds & {UNIFORM, NORMAL, TRUNC_NORMAL})
        self.has_normal, self.has_ids = bool(kinds & {NORMAL, TRUNC_NORMAL}), BY_ID in kinds
        self.register_buffer("kind_TC", torch.from_numpy(initial.kind_TC.copy()))
        self.register_buffer("param_TC4", torch.from_numpy(initial.param_TC4.copy()))
        widths = torch.from_numpy(np.diff(initial.end_C, prepend=0))
        self.register_buffer("column_D", torch.arange(len(widths), device="cpu").repeat_interleave(widths))
        self.register_buffer("block_K", torch.arange(-(-dim // 4), device="cpu"))
        seed = initial.seed  # gives the keys of the 10 rounds of Philox
        key_R2 = [[(seed + int(W0) * r) & _LOW, ((seed >> 32) + int(W1) * r) & _LOW] for r in range(10)]
        self.register_buffer("key_R2", torch.tensor(key_R2, device="cpu").reshape(10, 2, 1, 1))
        self.register_buffer("by_2", torch.tensor([int(M0), int(M1)], device="cpu").reshape(2, 1, 1))
        factors = torch.tensor(QUANTILE_FACTORS, dtype=torch.float64, device="cpu")
        self.register_buffer("coefficients_832", factors.permute(2, 0, 1).reshape(8, 3, 2, 1, 1).contiguous())

    def forward(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """Initial weights, float32 [M, D], of keys (table, id), int64 [M] each."""
        # 1 is UNIFORM, 2 NORMAL, 3 TRUNC_NORMAL, 4 BY_ID: TorchScript reads no constants of modules.
        kind_MD = self.kind_TC.index_select(0, table_M).index_select(1, self.column_D)
        param_MD4 = self.param_TC4.index_select(0, table_M).index_select(1, self.column_D)
        first_MD = param_MD4[:, :, 0]
        second_MD = param_MD4[:, :, 1]
        value_MD = first_MD
        if self.has_ids:
            modulus_MD = torch.where(kind_MD == 4, first_MD, 1.0).long()
            value_MD = torch.where(kind_MD == 4, torch.remainder(id_M.unsqueeze(1), modulus_MD).double(), value_MD)
        if self.draws:
            word_MD = self._words(table_M, id_M)
            u_MD = (word_MD.double() + 0.5) * 2.0**-32
            value_MD = torch.where(kind_MD == 1, first_MD + (second_MD - first_MD) * u_MD, value_MD)
            if self.has_normal:
                low_MD, high_MD = param_MD4[:, :, 2], param_MD4[:, :, 3]
                u_MD = torch.where(kind_MD == 3, low_MD + (high_MD - low_MD) * u_MD, u_MD)
                normal_MD = first_MD + second_MD * self._normal_quantile(u_MD)
                value_MD = torch.where((kind_MD == 2) | (kind_MD == 3), normal_MD, value_MD)
        return value_MD.float().to(self.trained).float()

    def _words(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """A random word for each weight, int64 [M, D]: `kernels/philox.py`, with both halves of its state in one
        tensor."""
        blocks_MK = self.block_K + (id_M & 0).unsqueeze(1)  # not expand(M): M is symbolic in a trace
        low_MK = (id_M & 0xFFFFFFFF).unsqueeze(1).expand_as(blocks_MK)
        high_MK = (torch.bitwise_right_shift(id_M, 32) & 0xFFFFFFFF).unsqueeze(1).expand_as(blocks_MK)
        x_2MK = torch.stack([low_MK, table_M.unsqueeze(1).expand_as(blocks_MK)])
        y_2MK = torch.stack([high_MK, blocks_MK])
        for round in range(10):
            low = (x_2MK & 0xFFFF) * self.by_2
            high = torch.bitwise_right_shift(x_2MK, 16) * self.by_2 + torch.bitwise_right_shift(low, 16)
            x_2MK = torch.bitwise_right_shift(high, 16).flip(0) ^ y_2MK ^ self.key_R2[round]
            y_2MK = (torch.bitwise_left_shift(high & 0xFFFF, 16) | (low & 0xFFFF)).flip(0)
        words = torch.stack([x_2MK[0], y_2MK[0], x_2MK[1], y_2MK[1]], 2)
        return words.flatten(1)[:, : self.dim]

    def _normal_quantile(self, p: torch.Tensor) -> torch.Tensor:
        """Quantiles of the standard normal distribution at the probabilities p, float64, with the formula of
        `kernels/init_rows.py`. It has one rational function for each of three ranges of p: all three are computed, and
        one is selected for each element."""
        q = p - 0.5
        r = torch.sqrt(-torch.log(torch.minimum(p, 1.0 - p)))
        r_3 = torch.stack([0.180625 - q * q, r - 1.6, r - 5.0]).unsqueeze(1)
        found = r_3 * self.coefficients_832[0] + self.coefficients_832[1]
        for k in range(2, 8):
            found = found * r_3 + self.coefficients_832[k]
        tail = torch.where(r <= 5.0, found[1, 0] / found[1, 1], found[2, 0] / found[2, 1])
        tail = torch.where(q < 0.0, -tail, tail)
        return torch.where(torch.abs(q) <= 0.425, q * found[0, 0] / found[0, 1], tail)
