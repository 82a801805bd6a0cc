"""Calls that ranks make together: on an embedding, or on a graph of several. One process makes them alone.

Each begins between two steps and goes on by exchanges (graph/ranks.py).

Invariant: where a call raises on one rank it raises on all, before it has begun too; an interrupt comes before it or
after it, since the others wait for this rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, Never, TypeVar, cast

import torch

from oneemb.graph.ranks import Blocks, Ranks, Received
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.step_lock import between_steps
from oneemb.storage.locking.undisturbed import undisturbed

__all__ = ["RankCalls"]

T = TypeVar("T")

# Bytes that the first rank sends to each other one at a time: all of them are in its memory at once.
_CHUNK = 4 << 20


class RankCalls:
    """Makes the calls.

    Args:
        ranks: None = there are none, and this process has all rows.
        stores: of this rank; no step of theirs may be under way.
    """

    def __init__(self, ranks: Ranks | None, stores: Sequence[EmbeddingStore]):
        self._ranks, self._stores = ranks, list(stores)
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.alone = ranks is None
        """Whether this process has all rows."""

    @property
    def first(self) -> bool:
        """Whether this rank does what one has to do for all."""
        return self.rank == 0

    def together(self, verb: str, what: str, call: Callable[[], T]) -> T:
        """Run `call` between two steps, on all ranks; returns what it gives.

        Args:
            verb: what the call is, where it comes in the middle of a step.
            what: what the first exchange of `call` says.

        Raises:
            What `call` raises, here or on another rank.
        """
        locks = [store.step_lock for store in self._stores]
        if self._ranks is None:
            return between_steps(locks, verb, call)
        for store in self._stores:
            if store.turns.forked:
                store.turns.check(changes=True)
        begun = False

        def run() -> T:
            nonlocal begun
            begun = True
            with undisturbed:
                return call()

        try:
            return between_steps(locks, verb, run)
        except BaseException as error:
            if not begun:
                self._fail(what, error)
            raise

    def _fail(self, what: str, error: BaseException) -> Never:
        def fail() -> None:
            raise error

        self.agree(what, fail)
        raise error

    def agree(self, what: str, check: Callable[[], Any] = lambda: None) -> Any:
        """Call `Ranks.agree`. Any: the result of `check`."""
        return check() if self._ranks is None else self._ranks.agree(what, check)

    def by_first(self, what: str, call: Callable[[], T]) -> T:
        """Result of `call` on the first rank, for all ranks. Others do not call it.

        Raises:
            As `Ranks.agree`.
        """
        return cast(T, self.agree(what, lambda: call() if self.first else None))

    def all_gather(self, what: str, make: Callable[[], T]) -> list[T]:
        """Call `Ranks.all_gather`."""
        return [make()] if self._ranks is None else self._ranks.all_gather(what, make)

    def exchange(self, what: str, make: Callable[[], Blocks]) -> list[Received]:
        """Call `Ranks.exchange`. There must be ranks."""
        assert self._ranks is not None
        return self._ranks.exchange(what, make)

    def of_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Do as `by_first`, for any number of bytes.

        Raises:
            As `Ranks.exchange`.
        """
        data = bytearray()

        def keep() -> int:
            data[:] = make()
            return len(data)

        size = self.by_first(what, keep)
        if self._ranks is None or self.size == 1:
            return bytes(data)
        parts = []
        for begin in range(0, size, _CHUNK):
            count = min(_CHUNK, size - begin)
            sent = [torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=count)] if self.first else []
            received = self._ranks.exchange(what, lambda sent=sent: [sent] * self.size)  # type: ignore[misc]
            parts.append(received[0].take(count, torch.uint8).cpu().numpy().tobytes())
        return b"".join(parts)
