"""Format of a row: the weights, then the optimizer's state, in one record of 32-bit words.

words   0 .. mark_begin              D weights of the table's dtype; half-width weights lie two a word, and an odd last
one is followed by 16 zero bits words   mark_begin .. state_begin    what a policy notes of the row's use
(usage_index.py): none, where there is no policy words   state_begin .. row_width     the optimizer's state, float32
whatever the weights are: squares of gradients underflow in float16
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

from oneemb.kernels.arrays import Array

BITS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.int16}
"""Dtype of the NumPy array that holds the bits of weights; see oneemb.kernels.jit_code."""

WEIGHTS = tuple(BITS)
"""The dtypes of weights."""


@dataclass(frozen=True)
class RowFormat:
    """Meaning of the words of a row, and the optimizer whose state they hold.

    Args:
        dim, dtype: weights of a row, D, and their type: "float32", "float16" or "bfloat16".
        optimizer: name of the state's optimizer; None = nobody's, or not known.
        state: the state of a new row, float32 values.
        usage_words: words of usage metadata.
    """

    dim: int
    dtype: str
    optimizer: str | None = None
    state: tuple[float, ...] = ()
    usage_words: int = 0

    @functools.cached_property
    def state_width(self) -> int:
        """Words of state."""
        return len(self.state)

    @functools.cached_property
    def usage_begin(self) -> int:
        """Word at which the weights have ended."""
        return -(-self.dim * np.dtype(BITS[self.dtype]).itemsize // 4)

    @functools.cached_property
    def state_begin(self) -> int:
        """Word at which the state begins."""
        return self.usage_begin + self.usage_words

    @functools.cached_property
    def row_width(self) -> int:
        """32-bit words of a row, W."""
        return self.state_begin + self.state_width

    @functools.cached_property
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
        """Whether a row of one format is one of the other: the same weights, as many usage words and as much state."""
        widths = self.state_width, self.usage_words
        return self.same_weights(other) and widths == (other.state_width, other.usage_words)

    def converted(self, row_NW: np.ndarray, format: "RowFormat", *, with_state: bool) -> np.ndarray:
        """Rows of another format, of the same weights, as rows of this one: float32 [N, W]. Missing usage metadata are
        zeros; without `with_state`, rows get the state of new ones."""
        out_NW = np.zeros((len(row_NW), self.row_width), np.float32)
        out_NW[:, : self.usage_begin] = row_NW[:, : self.usage_begin]
        if self.usage_words == format.usage_words:
            its = slice(self.usage_begin, self.state_begin)
            out_NW[:, its] = row_NW[:, its]
        if with_state:
            out_NW[:, self.state_begin :] = row_NW[:, format.state_begin : format.state_begin + self.state_width]
        else:
            out_NW[:, self.state_begin :] = self.state
        return out_NW

    def weights(self, row_NW: Array) -> Array:
        """The same memory, array or tensor, as weights' bits [N, X], the first `dim` of each row being the weights."""
        if isinstance(row_NW, np.ndarray):
            return row_NW.view(BITS[self.dtype])
        import torch

        return row_NW.view(getattr(torch, np.dtype(BITS[self.dtype]).name))
