"""How ids without a row begin, in aten ops alone.  M ids, D weights, C columns, T tables, K blocks of four weights.

`kernels/init_rows.py` is the definition. Constants, ids and uniform weights have its bits. Normal ones have them for
the 85 of 100 that need no logarithm; the others are within one rounding of the weights' dtype, as torch's logarithm may
differ from the kernel's in its last place.

Invariant: no integer overflows, so that a compiler of C++ has nothing to assume.
"""

import numpy as np
import torch

from oneemb.kernels.init_rows import BY_ID, CONSTANT, NORMAL, TRUNC_NORMAL, UNIFORM, InitialRows

__all__ = ["InitialValues", "constants_of"]

_KINDS = (CONSTANT, UNIFORM, NORMAL, TRUNC_NORMAL, BY_ID)
_LOW = 0xFFFFFFFF


def constants_of(initial: InitialRows | None, num_tables: int, dim: int, trained: torch.dtype) -> torch.Tensor | None:
    """Initial rows of each table, float32 [T, D], if no weight depends on the id; None = one does.

    Args:
        initial: None = with zeros.
    """
    if initial is None:
        return torch.zeros(num_tables, dim, dtype=torch.float32, device="cpu")
    if (initial.kind_TC != CONSTANT).any():
        return None
    value_TD = np.repeat(initial.param_TC4[:, :, 0], np.diff(initial.end_C, prepend=0), axis=1)
    return torch.from_numpy(value_TD.astype(np.float32)).to(trained).float()


_MULTIPLIERS = [0xD2511F53, 0xCD9E8D57]
_KEY_STEPS = [0x9E3779B9, 0xBB67AE85]
# Of the rational functions in `normal_quantile`: numerator and denominator in the middle, near it, and far from it.
_FACTORS = [
    [
        [
            2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
            1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
        ],
        [
            5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
            5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
        ],
    ],
    [
        [
            7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
            3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
        ],
        [
            1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636165571966e-2, 1.48103976427480074590e-1,
            6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
        ],
    ],
    [
        [
            2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
            2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
        ],
        [
            2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
            1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
        ],
    ],
]  # fmt: skip


def _keys_of(seed: int) -> torch.Tensor:
    """The keys of each round of Philox, int64 [10, 2, 1, 1]."""
    first = [seed & _LOW, seed >> 32]
    return torch.tensor([
        [(key + step * round) & _LOW for key, step in zip(first, _KEY_STEPS, strict=True)] for round in range(10)
    ], device="cpu").reshape(10, 2, 1, 1)  # fmt: skip


class InitialValues(torch.nn.Module):
    """The initial weights of keys, as a module that can be scripted and exported.

    Args:
        initial: how rows begin.
        trained: the weights' dtype in training, to which they are rounded.

    Raises:
        ValueError: there is a kind of initializer that aten ops cannot do.
    """

    kind_TC: torch.Tensor
    param_TC4: torch.Tensor
    column_D: torch.Tensor
    block_K: torch.Tensor
    key_R2: torch.Tensor
    by_2: torch.Tensor
    factor_832: torch.Tensor

    def __init__(self, initial: InitialRows, trained: torch.dtype):
        super().__init__()
        unknown = sorted(set(initial.kind_TC.reshape(-1).tolist()) - set(_KINDS))
        if unknown:
            raise ValueError(
                f"rows begin by initializers of kinds {unknown}, which an exported program cannot draw; export with"
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
        self.register_buffer("key_R2", _keys_of(initial.seed))
        self.register_buffer("by_2", torch.tensor(_MULTIPLIERS, device="cpu").reshape(2, 1, 1))
        factors = torch.tensor(_FACTORS, dtype=torch.float64, device="cpu")
        self.register_buffer("factor_832", factors.permute(2, 0, 1).reshape(8, 3, 2, 1, 1).contiguous())

    def forward(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """float32 [M, D], of int64 [M] each."""
        # Kinds are numbers here, 1 UNIFORM, 2 NORMAL, 3 TRUNC_NORMAL, 4 BY_ID: a script has no constants of modules.
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
        """A random word for each weight, int64 [M, D]: `kernels/philox.py`, both of its halves at a time."""
        blocks_MK = self.block_K + (id_M & 0).unsqueeze(1)  # not expanded to M, which is no number in a traced program
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
        """Normal quantile of `kernels/init_rows.py`, float64, with all three of its rational functions."""
        q = p - 0.5
        r = torch.sqrt(-torch.log(torch.minimum(p, 1.0 - p)))
        r_3 = torch.stack([0.180625 - q * q, r - 1.6, r - 5.0]).unsqueeze(1)
        found = r_3 * self.factor_832[0] + self.factor_832[1]
        for k in range(2, 8):
            found = found * r_3 + self.factor_832[k]
        tail = torch.where(r <= 5.0, found[1, 0] / found[1, 1], found[2, 0] / found[2, 1])
        tail = torch.where(q < 0.0, -tail, tail)
        return torch.where(torch.abs(q) <= 0.425, q * found[0, 0] / found[0, 1], tail)
