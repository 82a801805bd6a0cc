"""Format of a row: weights, usage metadata and optimizer state, in one record of 32-bit words.

words 0 .. usage_begin                D weights of the table's dtype. Two half-width weights share a word, and 16
                                      zero bits follow an odd last one
words usage_begin .. state_begin      usage metadata of a policy (usage_index.py); none without a policy
words state_begin .. row_width        state of the optimizer, float32 for all dtypes of weights, since squares of
                                      gradients underflow in float16
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

from oneemb.kernels.arrays import Array

BITS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
"""{dtype of weights: NumPy dtype of arrays that hold their bits}."""

WEIGHTS = tuple(BITS)
"""All dtypes of weights."""


@dataclass(frozen=True)
class RowFormat:
    """Meaning of the words of a row, and the optimizer whose state the row holds.

    Args:
        dim: D, number of weights of a row.
        dtype: type of the weights: "float32", "float16" or "bfloat16".
        optimizer: name of the optimizer whose state it is; None = no optimizer, or an unknown one.
        state: the state of a new row, float32 values.
        usage_words: number of words of usage metadata.
    """

    dim: int
    dtype: str
    optimizer: str | None = None
    state: tuple[float, ...] = ()
    usage_words: int = 0

    @functools.cached_property
    def state_width(self) -> int:
        """Number of words of optimizer state, Z."""
        return len(self.state)

    @functools.cached_property
    def usage_begin(self) -> int:
        """First word behind the weights, where usage metadata begin."""
        return -(-self.dim * np.dtype(BITS[self.dtype]).itemsize // 4)

    @functools.cached_property
    def state_begin(self) -> int:
        """First word of the optimizer's state."""
        return self.usage_begin + self.usage_words

    @functools.cached_property
    def row_width(self) -> int:
        """Number of 32-bit words of a row, W."""
        return self.state_begin + self.state_width

    @functools.cached_property
    def row_bytes(self) -> int:
        return self.row_width * 4

    @property
    def storage_dim(self) -> int:
        """Number of values of a row: weights and optimizer state."""
        return self.dim + self.state_width

    def with_state(self, optimizer: str | None, state: np.ndarray) -> "RowFormat":
        """Format with the same weights and the state of this optimizer; `state`, float32 [Z], is that of a new row."""
        return replace(self, optimizer=optimizer, state=tuple(state.tolist()))

    def same_weights(self, other: "RowFormat") -> bool:
        """Whether rows of both formats have equally many weights of the same dtype."""
        return (self.dim, self.dtype) == (other.dim, other.dtype)

    def same_words(self, other: "RowFormat") -> bool:
        """Whether the words of a row mean the same in both formats: same weights, equally many words of usage metadata
        and of state."""
        widths = self.state_width, self.usage_words
        return self.same_weights(other) and widths == (other.state_width, other.usage_words)

    def converted(self, row_NW: np.ndarray, format: "RowFormat", *, with_state: bool) -> np.ndarray:
        """Convert rows of another format with the same weights to this format: float32 [N, W]. Usage metadata are
        copied if both have equally many words of them, otherwise zeros. Without `with_state`, rows get the state of new
        rows."""
        out_NW = np.zeros((len(row_NW), self.row_width), np.float32)
        out_NW[:, : self.usage_begin] = row_NW[:, : self.usage_begin]
        if self.usage_words == format.usage_words:
            usage = slice(self.usage_begin, self.state_begin)
            out_NW[:, usage] = row_NW[:, usage]
        if with_state:
            out_NW[:, self.state_begin :] = row_NW[:, format.state_begin : format.state_begin + self.state_width]
        else:
            out_NW[:, self.state_begin :] = self.state
        return out_NW

    @functools.cached_property
    def new_words(self) -> np.ndarray:
        """Words of a new row behind its weights, as float32. The array is shared, so it must not be written to."""
        return np.array((0.0,) * self.usage_words + self.state, np.float32)

    def weights(self, row_NW: Array) -> Array:
        """View of rows, an array or a tensor, as bits of weights [N, X]; the first `dim` of a row are its weights."""
        if self.dtype == "float32":  # A view of the same bits takes some time.
            return row_NW
        if isinstance(row_NW, np.ndarray):
            return row_NW.view(BITS[self.dtype])
        import torch

        return row_NW.view(getattr(torch, np.dtype(BITS[self.dtype]).name))
