"""A process that owns all rows, as a group of one rank: its exchanges return its own messages.

`OneRank` has the methods of `Ranks` (ranks.py) that lookups, steps and calls on rows use, so that their code is the
same with and without other ranks. Snapshots and checkpoints check `alone`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal, TypeVar

import torch

from oneemb.graph.rank_messages import Blocks, Received, Traffic, bytes_of

T = TypeVar("T")

Gradients = Literal["mean", "sum"]
"""Reduction of the gradients that ranks have for the same row."""

_COMM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_between_ranks(gradients: object, comm_dtype: torch.dtype) -> None:
    """Raise ValueError unless both arguments are values that `Ranks` takes."""
    if not isinstance(gradients, str) or gradients not in ("mean", "sum"):
        raise ValueError(f'gradients_of_ranks must be "mean" or "sum", got {gradients!r}')
    if not isinstance(comm_dtype, torch.dtype) or comm_dtype not in _COMM_DTYPES:
        raise ValueError(f"comm_dtype must be torch.float32, torch.float16 or torch.bfloat16, got {comm_dtype!r}")


class OneRank:
    """Group of this process alone. A method calls the function that it is given and returns the result; an error of the
    function is not wrapped. See `Ranks`.

    Args:
        gradients, comm_dtype: as for `Ranks`. They change no number, since nothing is sent.

    Raises:
        ValueError: an argument is not a value that `Ranks` takes.
    """

    alone: Literal[True] = True
    """Whether this process owns all rows: False for every process group, even one with a single rank."""
    rank, size, first = 0, 1, True
    group = None
    forked = False
    whole = nullcontext()

    def __init__(self, gradients: Gradients = "mean", comm_dtype: torch.dtype = torch.float32):
        check_between_ranks(gradients, comm_dtype)
        self.gradients, self.comm_dtype = gradients, comm_dtype
        self.traffic = Traffic()

    def __repr__(self) -> str:
        return "this process alone"

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[Received]:
        """The tensors that `make` returns for this rank."""
        (block,) = make()
        return [Received(torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *map(bytes_of, block)]))]

    def agree(self, what: str, check: Callable[[], T | None] = lambda: None) -> T | None:
        """Result of `check`."""
        return check()

    def all_gather(self, what: str, make: Callable[[], T]) -> list[T]:
        """List with one element, the result of `make`."""
        return [make()]

    def by_first(self, what: str, call: Callable[[], T]) -> T:
        """Result of `call`."""
        return call()

    def of_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Result of `make`."""
        return make()

    def norms(self, norms: Sequence[float], ord: float) -> list[float]:
        """`norms`: this process has the whole vectors."""
        return list(norms)

    def any(self, flag: bool) -> bool:
        """`flag`, since there is no other rank."""
        return flag

    def fail(self, what: str, failure: BaseException, since: int = 0) -> None:
        """Do nothing: no other rank waits."""


ALONE = OneRank()
"""The default group: this process alone, gradients "mean", float32."""
