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
_UNIT = 2.0**-32


def constants_of(initial: InitialRows | None, num_tables: int, dim: int, trained: torch.dtype) -> torch.Tensor | None:
    """What an id of each table begins with, float32 [T, D], where no weight depends on the id; None = one does.

    Args:
        initial: None = with zeros.
    """
    if initial is None:
        return torch.zeros(num_tables, dim)
    if (initial.kind_TC != CONSTANT).any():
        return None
    value_TD = np.repeat(initial.param_TC4[:, :, 0], np.diff(initial.end_C, prepend=0), axis=1)
    return torch.from_numpy(value_TD.astype(np.float32)).to(trained).float()


def _multiply(x: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers."""
    low = (x & 0xFFFF) * by
    high = torch.bitwise_right_shift(x, 16) * by + torch.bitwise_right_shift(low, 16)
    return torch.bitwise_right_shift(high, 16), torch.bitwise_left_shift(high & 0xFFFF, 16) | (low & 0xFFFF)


def _philox(
    x0: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, x3: torch.Tensor, k0: int, k1: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `kernels/philox.py`, of counter words from 0 to 2^32 - 1."""
    for _ in range(10):
        high0, low0 = _multiply(x0, 0xD2511F53)
        high1, low1 = _multiply(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3


def _polynomial(r: torch.Tensor, factors: list[float]) -> torch.Tensor:
    found = r * factors[0] + factors[1]
    for factor in factors[2:]:
        found = found * r + factor
    return found


def _normal_quantile(p: torch.Tensor) -> torch.Tensor:
    """Of `kernels/init_rows.py`, float64."""
    q = p - 0.5
    r = 0.180625 - q * q
    top = _polynomial(r, [
        2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
        1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
    ])  # fmt: skip
    low = _polynomial(r, [
        5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
        5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
    ])  # fmt: skip
    middle = q * top / low
    r = torch.sqrt(-torch.log(torch.minimum(p, 1.0 - p)))
    near = r - 1.6
    top = _polynomial(near, [
        7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
        3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
    ])  # fmt: skip
    low = _polynomial(near, [
        1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636165571966e-2, 1.48103976427480074590e-1,
        6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
    ])  # fmt: skip
    tail = top / low
    far = r - 5.0
    top = _polynomial(far, [
        2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
        2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
    ])  # fmt: skip
    low = _polynomial(far, [
        2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
        1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
    ])  # fmt: skip
    tail = torch.where(r <= 5.0, tail, top / low)
    return torch.where(torch.abs(q) <= 0.425, middle, torch.where(q < 0.0, -tail, tail))


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
        self.k0, self.k1 = initial.seed & _LOW, initial.seed >> 32
        kinds = set(initial.kind_TC.reshape(-1).tolist())
        self.draws = bool(kinds & {UNIFORM, NORMAL, TRUNC_NORMAL})
        self.has_normal, self.has_ids = bool(kinds & {NORMAL, TRUNC_NORMAL}), BY_ID in kinds
        self.register_buffer("kind_TC", torch.from_numpy(initial.kind_TC.copy()))
        self.register_buffer("param_TC4", torch.from_numpy(initial.param_TC4.copy()))
        widths = torch.from_numpy(np.diff(initial.end_C, prepend=0))
        self.register_buffer("column_D", torch.arange(len(widths)).repeat_interleave(widths))
        self.register_buffer("block_K", torch.arange(-(-dim // 4)))

    def forward(self, table_M: torch.Tensor, id_M: torch.Tensor) -> torch.Tensor:
        """float32 [M, D], of int64 [M] each."""
        kind_MD = self.kind_TC.index_select(0, table_M).index_select(1, self.column_D)
        param_MD4 = self.param_TC4.index_select(0, table_M).index_select(1, self.column_D)
        first_MD = param_MD4[:, :, 0]
        second_MD = param_MD4[:, :, 1]
        value_MD = first_MD
        if self.has_ids:
            modulus_MD = torch.where(kind_MD == 4, first_MD, 1.0).long()
            value_MD = torch.where(kind_MD == 4, torch.remainder(id_M.unsqueeze(1), modulus_MD).double(), value_MD)
        if self.draws:
            id_M1 = id_M.unsqueeze(1)
            high_M1 = torch.bitwise_right_shift(id_M1, 32) & 0xFFFFFFFF
            words = _philox(id_M1 & 0xFFFFFFFF, high_M1, table_M.unsqueeze(1), self.block_K, self.k0, self.k1)
            word_MD = torch.stack(words, 2).flatten(1)[:, : self.dim]
            u_MD = (word_MD.double() + 0.5) * 2.0**-32
            value_MD = torch.where(kind_MD == 1, first_MD + (second_MD - first_MD) * u_MD, value_MD)
            if self.has_normal:
                low_MD, high_MD = param_MD4[:, :, 2], param_MD4[:, :, 3]
                u_MD = torch.where(kind_MD == 3, low_MD + (high_MD - low_MD) * u_MD, u_MD)
                normal_MD = first_MD + second_MD * _normal_quantile(u_MD)
                value_MD = torch.where((kind_MD == 2) | (kind_MD == 3), normal_MD, value_MD)
        return value_MD.float().to(self.trained).float()
