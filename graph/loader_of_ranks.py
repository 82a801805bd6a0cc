"""A loader of ranks: where one rank has no batch any more, the loops of all ranks end."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from oneemb.graph.rank_errors import whole_exchange
from oneemb.graph.ranks import Ranks


class Together(Iterator[Any]):
    """The batches of this rank's loader, as long as every rank has one: where the first loader ends, all end.

    Args:
        ranks: with connections of their own for the thread that iterates.
        left: called when it has ended, or was left.

    Raises, where a batch is asked for:
        RankError: the loader of another rank has failed.
    """

    def __init__(self, ranks: Ranks, loader: Iterable[Any], left: Callable[[], object] = lambda: None):
        self._ranks = ranks
        self._left = [left]  # no longer here once it is called
        self._loader: list[Iterable[Any]] = [loader]  # no longer here once its iterator is
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

        with whole_exchange():  # An interrupt comes when it is known whether the others expect another exchange.
            try:
                self._ended = any(self._ranks.tell(_NEXT, has_one))
            except BaseException:
                self._ended = True
                raise
        if self._ended:
            raise StopIteration
        return batch.pop()

    def leave(self) -> None:
        """Ask for no more batches: who comes to the next one does not wait for this rank. May be called again."""
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
        self.leave()  # a loop that has never begun


_NEXT = "give the next batch of a loop over a loader"
_HAS_ONE, _HAS_NONE = 0, 1
