"""What one row is made of: the weights, then the optimizer's state, in one record of 32-bit words.

words   0 .. state_begin             D weights of the table's dtype; half-width weights lie two a word, and an
                                     odd last one is followed by 16 zero bits
words   state_begin .. row_width     the optimizer's state, float32 whatever the weights are: squares of
                                     gradients underflow in float16
"""

from dataclasses import dataclass, replace

import numpy as np

from oneemb.kernels.arrays import Array

__all__ = ["WEIGHTS", "RowFormat"]

# How the weights' bits lie in a NumPy array; see oneemb.kernels.jit_code.
_BITS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
WEIGHTS = tuple(_BITS)
"""The dtypes of weights."""


@dataclass(frozen=True)
class RowFormat:
    """What the words of a row are, and whose state they hold.

    Args:
        dim: weights of a row, D.
        dtype: of the weights, "float32", "float16" or "bfloat16".
        optimizer: whose state follows the weights; None = nobody's, or not known.
        state: what the state of a new row holds, a float32 value each.
    """

    dim: int
    dtype: str
    optimizer: str | None = None
    state: tuple[float, ...] = ()

    @property
    def state_width(self) -> int:
        """Words of state."""
        return len(self.state)

    @property
    def state_begin(self) -> int:
        """Word at which the state begins."""
        return -(-self.dim * np.dtype(_BITS[self.dtype]).itemsize // 4)

    @property
    def row_width(self) -> int:
        """32-bit words of a row, W."""
        return self.state_begin + self.state_width

    @property
    def row_bytes(self) -> int:
        return self.row_width * 4

    @property
    def storage_dim(self) -> int:
        """Values of a row: weights and state."""
        return self.dim + self.state_width

    def with_state(self, optimizer: str | None, state: np.ndarray) -> "RowFormat":
        """The same weights with the state of this optimizer; `state` is float32 [Z]."""
        return replace(self, optimizer=optimizer, state=tuple(state.tolist()))

    def same_weights(self, other: "RowFormat") -> bool:
        """Whether rows of both begin with the same kind of weights."""
        return (self.dim, self.dtype) == (other.dim, other.dtype)

    def same_words(self, other: "RowFormat") -> bool:
        """Whether a row of one format is a row of the other: the same weights, and as much state."""
        return self.same_weights(other) and self.state_width == other.state_width

    def weights(self, row_NW: Array) -> Array:
        """The same memory as an array [N, X] of weights' bits, the first `dim` of each row being the weights.

        Of an array it is an array, of a tensor a tensor.
        """
        if isinstance(row_NW, np.ndarray):
            return row_NW.view(_BITS[self.dtype])
        import torch

        return row_NW.view(getattr(torch, np.dtype(_BITS[self.dtype]).name))
