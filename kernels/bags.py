"""How the ids of a batch lie in bags."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bags"]


@dataclass(frozen=True)
class Bags:
    """How N ids lie in P bags."""

    offset_P1: Any
    """int64 [P + 1]: bag p holds the ids from offset_P1[p] to offset_P1[p + 1] - 1"""
    known_N: Any = None
    """`bag_N` where it is known: always on a GPU"""

    @functools.cached_property
    def bag_N(self) -> Any:
        """int32 [N], int64 on a GPU: the bag of each id"""
        if self.known_N is not None:
            return self.known_N
        return np.repeat(np.arange(len(self.offset_P1) - 1, dtype=np.int32), np.diff(self.offset_P1))
