"""Loaders of a loop: the position of a loader after the batch trained last; loops of all ranks that end together.

position = LoaderPosition(state)
for batch in position.read(loader):      on the thread that loads, some batches ahead of their steps
    ...
    position.trained()                   after the call for each batch, in the order in which batches were read
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from oneemb.graph.build_error import warn_user
from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import Ranks


class Together(Iterator[Any]):
    """The batches of this rank's loader, as long as every rank has a batch: when one loader ends, all loops end.

    Args:
        ranks: ranks with connections for the iterating thread alone (`Ranks.again`).
        left: called when the loop has ended or is left early.

    `next` raises:
        RankError: the loader of another rank has failed.
    """

    def __init__(self, ranks: Ranks, loader: Iterable[Any], left: Callable[[], object] = lambda: None):
        self._ranks = ranks
        self._left = [left]  # empty once `left` is called
        self._loader: list[Iterable[Any]] = [loader]  # empty once the loader's iterator is made
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        batch: list[Any] = []
        failed: list[BaseException] = []
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader.pop())
            batch += [value for _, value in zip(range(1), self._iterator, strict=False)]
        except BaseException as error:
            failed.append(error)

        def has_one() -> int:
            if failed:
                raise failed.pop()
            return _HAS_ONE if batch else _HAS_NONE

        with whole_exchange():  # An interrupt waits until `_ended` is set: `leave` must know if others still wait.
            try:
                self._ended = any(self._ranks.gather_number(_NEXT, has_one))
            except BaseException:
                self._ended = True
                raise
        if self._ended:
            raise StopIteration
        return batch.pop()

    def leave(self) -> None:
        """End this rank's loop. Other ranks do not wait for it at their next batch. May be called again."""
        with whole_exchange():
            left, self._left = self._left, []
            if left and not self._ended:
                self._ended = True
                self._ranks.leave(_NEXT)
            self._iterator = None
            self._loader.clear()
            for call in left:
                call()

    def __del__(self) -> None:
        self.leave()  # for a loop that never ran


_NEXT = "give the next batch of a loop over a loader"
_HAS_ONE, _HAS_NONE = 0, 1


class LoaderPosition:
    """State of a loader after the batch trained last, and the number of batches read since.

    Args:
        state: the loader's state before the first batch is trained.
    """

    def __init__(self, state: Any = None):
        self.state = state
        """`loader.state_dict()` right after the loader returned the batch trained last; None = no state_dict."""
        self._read: deque[Any] = deque()
        """The loader's state right after each batch that was read and is not in an update yet."""
        self._called = 0
        """Number of batches in `_read` whose calls are made; the next update trains them."""
        self._has_failed = False
        """Whether the loader's `state_dict` has failed; it is not called again."""
        self._end: list[Any] = []
        """[the loader's state after its last batch], once the loader has ended; empty before."""

    @property
    def ahead(self) -> int:
        """Number of batches that were read and are not in an update yet."""
        return len(self._read)

    def read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and note its state after each batch. Warn if its state_dict fails."""
        for batch in loader:
            self._read.append(self._state_of(loader))
            yield batch
        self._end.append(self._state_of(loader))

    def _state_of(self, loader: Iterable[Any]) -> Any:
        state_dict = getattr(loader, "state_dict", None)
        if state_dict is None or self._has_failed:
            return None
        try:
            return copy.deepcopy(state_dict())  # A loader may return an object that it changes later.
        except Exception as error:  # A loader that wraps another has the method even if the wrapped loader lacks it.
            self._has_failed = True
            warn_user(
                f"state_dict of {type(loader).__name__} cannot be called or copied ({type(error).__name__}: {error}):"
                " the loop goes on, and loader_state is None"
            )
            return None

    def trained(self, updated: bool = True) -> None:
        """Note that the call for the next batch is made.

        Args:
            updated: whether the call ended with an update, which trains all batches since the update before.
        """
        self._called += 1
        while updated and self._called:
            self.state = self._read.popleft()
            self._called -= 1

    def ended(self) -> None:
        """Note that the loop has ended. The position is then the loader's end, unless another rank's loader ended first
        or a batch is not in an update."""
        if self._end and not self._read:
            self.state = self._end.pop()
