"""Groups of arrays that describe one lookup, on the host or on a GPU.

Letters: N ids in P bags, U unique keys, S slots, D weights of a row, B samples, C columns.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A NumPy array if loops run on the host, a tensor on the device if loops run on a GPU. The two types have no base
class in common. Code above the kernels passes arrays to a `Backend`. Directly it uses only operations that are written
alike for both types: arithmetic, comparison, indexing by an array."""


BLOCK_MAX = 256
"""Threads of a block of a CUDA loop, at most."""

BEYOND = -2
"""Slot, on a GPU, in each place after the last key of a lookup. -1 is the slot of a key that has none."""


def vector_width(dim: int, weight_SX: Array, *others: Array) -> int:
    """V, the weights that a CUDA loop may take at a time: as many as fill 16 bytes if every row of every array is
    aligned to 16 bytes and D is a multiple of V; else 1. Arrays of D float32 columns that oneemb has made for the loop
    need not be given: torch aligns what it allocates."""
    width = 16 // weight_SX.element_size()
    if dim % width:
        return 1
    for array in (weight_SX, *others):
        if array.data_ptr() % 16 or array.stride(0) * array.element_size() % 16:
            return 1
    return width


@dataclass(frozen=True)
class Bags:
    """Arrangement of N ids in P bags."""

    offset_P1: Array
    """int64 [P + 1]: bag p holds the ids from offset_P1[p] to offset_P1[p + 1] - 1"""
    known_N: Array | None = None
    """`bag_N` if the caller has computed it already; a GPU backend always gives it"""
    row_P: Array | None = None
    """int32 [P]: row of the output, and of its gradient, that belongs to bag p; None = row p"""

    @functools.cached_property
    def bag_N(self) -> Array:
        """int32 [N], on a GPU int64: for each id, the output row of its bag"""
        if self.known_N is not None:
            return self.known_N
        row_P = np.arange(len(self.offset_P1) - 1, dtype=np.int32) if self.row_P is None else self.row_P
        return np.repeat(row_P, np.diff(self.offset_P1))

    @property
    def arrays(self) -> tuple[Array, Array | None]:
        """offset_P1, row_P"""
        return self.offset_P1, self.row_P


@functools.lru_cache(maxsize=8)
def rows_of_columns(bags: int, columns: int) -> np.ndarray:
    """`Bags.row_P` for bags in the order of columns and an output in the order of samples: bag c * B + b has output row
    b * C + c. The array is shared between calls, so it must not be written to."""
    samples = bags // columns
    return np.ascontiguousarray(np.arange(bags, dtype=np.int32).reshape(samples, columns).T).reshape(-1)


class RowsOfIds(NamedTuple):
    """A slab, and where each id's weights are in it: id n has slot slot_U[inverse_N[n]]."""

    weight_SX: Array
    """weights' bits [S, X], X >= D, as `RowFormat.weights` gives them"""
    slot_U: Array
    """int64 [U]: slot of each unique key; None = `inverse_N` holds slots (only for `gather` on the host)"""
    inverse_N: Array
    """int32 or int64 [N]: number of each id's unique key; -1 for padding"""


class Terms(NamedTuple):
    """Terms of sums, as the check for finite sums takes them: each sum adds at most `number` rows of `grad_NX`, each
    times its number of `scale_N` (None = 1)."""

    grad_NX: Array
    scale_N: Array | None
    number: int
    finite_X: Array | None = None
    """For sums that are computed already, as `Backend.sum_segments` returns it; None = not computed"""
