"""Arrays that go together when a batch is looked up, on the host or on a GPU.

Letters: N ids in P bags, U unique keys, S slots, D weights of a row.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Array", "Bags", "RowsOfIds", "Terms"]

Array = Any
"""A NumPy array where loops run on the host, a tensor on the device where they run on a GPU. The two have no type in
common. Code above the kernels hands them to `Loops`, and does itself only what is written alike for both: arithmetic,
comparison, indexing by an array."""


@dataclass(frozen=True)
class Bags:
    """How N ids lie in P bags."""

    offset_P1: Array
    """int64 [P + 1]: bag p holds the ids from offset_P1[p] to offset_P1[p + 1] - 1"""
    known_N: Array | None = None
    """`bag_N` where it is known: always on a GPU"""

    @functools.cached_property
    def bag_N(self) -> Array:
        """int32 [N], int64 on a GPU: the bag of each id"""
        if self.known_N is not None:
            return self.known_N
        return np.repeat(np.arange(len(self.offset_P1) - 1, dtype=np.int32), np.diff(self.offset_P1))


class RowsOfIds(NamedTuple):
    """Where the weights of each id are: in slot slot_U[inverse_N[n]]."""

    weight_SX: Array
    """weights' bits [S, X], X >= D, as `RowFormat.weights` gives them"""
    slot_U: Array
    """int64 [U]; or None, which `gather` on the host takes: `inverse_N` holds the slots"""
    inverse_N: Array
    """the unique key of each id; -1 for padding"""


class Terms(NamedTuple):
    """What sums are made of: at most `number` values of an array, times those that scale them."""

    grad_NX: Array
    scale_N: Array | None
    number: int
