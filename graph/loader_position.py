"""Where a loader is, for the batches that a loop has trained: the loop's thread reads batches ahead of their steps.

position = LoaderPosition(state)
for batch in position.read(loader):      on the thread that loads
    ...
    position.trained()                   once the batch's call is made, in the order in which they were read
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["LoaderPosition"]


class LoaderPosition:
    """How far a loop is behind what it has read of its loader.

    Args:
        state: of a loader, until a batch is trained.
    """

    def __init__(self, state: Any = None):
        self.state = state
        """The loader's `state_dict()` as it was when it had given the batch trained last; None = it has none."""
        self._read: deque[Any] = deque()
        """The same of each batch that is read and not trained."""
        self._called = 0
        """Batches among them whose calls are made, and that no update has used yet."""
        self._end: list[Any] = []
        """The same when the loader had no more batches."""

    @property
    def ahead(self) -> int:
        """How many batches have been read and are in no update yet."""
        return len(self._read)

    def read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader."""
        state_dict = getattr(loader, "state_dict", lambda: None)
        for batch in loader:
            self._read.append(copy.deepcopy(state_dict()))  # A loader may give its own object, and change it.
            yield batch
        self._end.append(copy.deepcopy(state_dict()))

    def trained(self, updated: bool = True) -> None:
        """The call of the next batch is made.

        Args:
            updated: whether it has ended with an update, of the batches since the last one together.
        """
        self._called += 1
        while updated and self._called:
            self.state = self._read.popleft()
            self._called -= 1

    def ended(self) -> None:
        """The loop has come to its end: the loader is at its own, unless a loop of other ranks has ended before."""
        if self._end and not self._read:
            self.state = self._end.pop()
