"""Calls that ranks make together: on an embedding, or on a graph of several. One process makes them alone.

Each begins between two steps and goes on by exchanges (graph/ranks.py).

Invariant: where a call raises on one rank it raises on all, before it has begun too; an interrupt comes before it or
after it, since the others wait for this rank.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from oneemb.graph.ranks import AnyRanks
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.step_lock import between_steps

T = TypeVar("T")


def together(ranks: AnyRanks, stores: Sequence[EmbeddingStore], verb: str, what: str, call: Callable[[], T]) -> T:
    """Run `call` between two steps, on all ranks; returns what it gives.

    Args:
        stores: of this rank; no step of theirs may be under way.
        verb: name of the call, for the error if a step is under way.
        what: what the first exchange of `call` says.

    Raises:
        What `call` raises, here or on another rank.
    """
    if ranks.forked:
        for store in stores:
            store.turns.check(changes=True)
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        with ranks.whole:
            return call()

    try:
        return between_steps([store.step_lock for store in stores], verb, run)
    except BaseException as error:
        if not begun:
            _fail(ranks, what, error)
        raise


def read_together(ranks: AnyRanks, stores: Sequence[EmbeddingStore], verb: str, what: str, call: Callable[[], T]) -> T:
    """Do as `together` for a call that changes nothing: a process that has all rows makes it at any time."""
    return call() if ranks.alone else together(ranks, stores, verb, what, call)


def _fail(ranks: AnyRanks, what: str, error: BaseException) -> None:
    def fail() -> None:
        raise error

    ranks.agree(what, fail)
