"""Arrays that go together when a batch is looked up, on the host or on a GPU.

Letters: N ids in P bags, U unique keys, S slots, D weights of a row, B samples, C columns.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A NumPy array where loops run on the host, a tensor on the device where they run on a GPU. The two have no type in
common. Code above the kernels hands them to `Backend`, and does itself only what is written alike for both: arithmetic,
comparison, indexing by an array."""


@dataclass(frozen=True)
class Bags:
    """Arrangement of N ids in P bags."""

    offset_P1: Array
    """int64 [P + 1]: bag p holds the ids from offset_P1[p] to offset_P1[p + 1] - 1"""
    known_N: Array | None = None
    """`bag_N` where it is known: always on a GPU"""
    row_P: Array | None = None
    """int32 [P]: which row bag p is of those that the bags give, and of their gradients; None = row p"""

    @functools.cached_property
    def bag_N(self) -> Array:
        """int32 [N], int64 on a GPU: the row of the bag of each id"""
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
    """`Bags.row_P` of bags that lie column by column and give rows sample by sample: bag c * B + b gives b * C + c.
    Only to be read."""
    samples = bags // columns
    return np.ascontiguousarray(np.arange(bags, dtype=np.int32).reshape(samples, columns).T).reshape(-1)


class RowsOfIds(NamedTuple):
    """Slots of the weights of each id: slot_U[inverse_N[n]]."""

    weight_SX: Array
    """weights' bits [S, X], X >= D, as `RowFormat.weights` gives them"""
    slot_U: Array
    """int64 [U]; or None, which `gather` on the host takes: `inverse_N` holds the slots"""
    inverse_N: Array
    """the unique key of each id; -1 for padding"""


class Terms(NamedTuple):
    """The terms of sums: at most `number` values of an array for each sum, times those that scale them."""

    grad_NX: Array
    scale_N: Array | None
    number: int
    finite_U: Array | None = None
    """bool [U], given for finished sums: whether each row is finite throughout; None = not checked"""
