"""Exchange of a batch's ids between the ranks of a job, over gloo, on the thread that trains.

Every rank has every id of a batch and makes the same cache ids of them: transformers are the same on all ranks without
being sent. One exchange a batch says the ids, another one whether its rows are there.
"""

import traceback
from typing import TypeVar

import torch.distributed as dist

__all__ = ["Ranks"]

_T = TypeVar("_T")


class Ranks:
    """The ranks of the default process group; without one there is one rank. All of them make one together."""

    def __init__(self) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if started else 1
        self.rank = dist.get_rank() if started else 0
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

    def exchange(self, mine: _T) -> list[_T]:
        """All-gather `mine`."""
        if self._group is None:
            return [mine]
        found: list[_T] = [mine] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def agree(self, failed: BaseException | None) -> None:
        """Raise what failed on this rank, or that another one failed; return if none did.

        Raises:
            RuntimeError: another rank failed; the message has its error.
        """
        said = self.exchange(None if failed is None else text_of(failed))
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # which keeps this frame
        for rank, text in enumerate(said):
            if text is not None:
                raise RuntimeError(f"rank {rank} of {self.size} failed, and so do all; there it was:\n{text}")


def text_of(error: BaseException) -> str:
    """An error and its traceback."""
    return "".join(traceback.format_exception(error))
