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

from oneemb.graph.build_error import warn_user

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
        self._has_failed = False
        """Whether the loader's `state_dict` has."""
        self._end: list[Any] = []
        """The same when the loader had no more batches."""

    @property
    def ahead(self) -> int:
        """How many batches have been read and are in no update yet."""
        return len(self._read)

    def read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader. Where it cannot say where it is, a warning tells it, and the batches come."""
        for batch in loader:
            self._read.append(self._state_of(loader))
            yield batch
        self._end.append(self._state_of(loader))

    def _state_of(self, loader: Iterable[Any]) -> Any:
        state_dict = getattr(loader, "state_dict", None)
        if state_dict is None or self._has_failed:
            return None
        try:
            return copy.deepcopy(state_dict())  # A loader may give its own object, and change it.
        except Exception as error:  # Loaders that wrap another one have the method whether or not that one has.
            self._has_failed = True
            warn_user(
                f"state_dict of {type(loader).__name__} cannot be called or copied ({type(error).__name__}: {error}):"
                " the loop goes on, and loader_state is None"
            )
            return None

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
