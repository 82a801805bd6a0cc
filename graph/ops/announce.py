"""Lookups ahead that begin together: the keys of all lookups that ranks expect of a batch go to the owners at once.

    with Announced(ranks) as announced:      on each rank, once a batch, on any thread
        announce(announced, lookups)         all their unique keys, in one exchange; owners pin the rows
    ...
    lease = announced.lookups[0].acquire()            in the step: its rows, from their owners
    announced.miss(store, inserts=True)               or: `build` has looked up other ids

A rank that expects other lookups than the others, or none, announces in vain: then all are made as if none had been.
In the step each rank tells before a lookup whether its ids are those that it has announced. Where they are not, the
ranks make this rank's lookup unannounced, those that have got their rows already without keys.

Invariants: every rank tells once for each lookup, in the order in which it makes them; nothing is inserted before.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from oneemb.graph.one_rank import ALONE
from oneemb.graph.ops.asking import COUNTS, asked_by, keys_of_ranks
from oneemb.graph.ops.keys import Keys
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.ops.lookup_ahead import LookupAhead, asking_for, look_up_on_ranks, lookup_of
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.storage.embedding_store import EmbeddingStore


class LookupOnRanks(NamedTuple):
    """Lookup of an embedding whose rows ranks own together."""

    name: str
    """Name of the embedding."""
    ranks: Ranks
    store: EmbeddingStore
    """The rows that this rank owns."""
    keys: Keys
    inserts: bool
    """Whether unknown keys are inserted."""
    sums_bags: bool
    """See `Lookup.sums_bags`."""

    @property
    def what(self) -> str:
        """Name of the lookup in exchanges."""
        return lookup_of(self.name, self.inserts, self.ranks)


_MISSED_IN_EVAL, _MISSED_IN_TRAINING = -2, -1  # what ranks tell; otherwise the number of the lookup they have announced


class AnnouncedLookup:
    """Lookup `number` of those that ranks have announced together, or tried to.

    Args:
        ahead: the lookup that has begun; None = it was announced in vain.
    """

    def __init__(self, announced: "Announced", number: int, lookup: LookupOnRanks, ahead: LookupAhead | None):
        self.lookup, self.ahead = lookup, ahead
        self._announced, self._number = announced, number

    @property
    def inserts(self) -> bool:
        """Whether unknown keys are inserted."""
        return self.lookup.inserts

    def acquire(self) -> Lease | None:
        """The rows; None if they are to be looked up unannounced. Unknown keys are inserted if `inserts`. It raises as
        `look_up_on_ranks`."""
        ranks, store, announced = self.lookup.ranks, self.lookup.store, self._announced
        if self not in announced.waiting:  # It was announced in vain, or the ranks were told of another in its place.
            announced.miss(store, inserts=self.inserts)
            return None
        with whole_exchange():
            told = announced.tell(self, self._number)
            lease = announced.rows(told)
            if lease is None:
                return None
            missed = next((number for number in told if number < 0), None)
            if missed is not None:
                none = [torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int32, torch.int64)]
                keys, inserts = keys_of_ranks(store, *none), missed == _MISSED_IN_TRAINING
                look_up_on_ranks(ranks, store, self.lookup.name, lambda: keys, inserts=inserts)
        return lease

    def look_up(self, check: Callable[[Keys], object], *, has_gradient: bool) -> Lease:
        """Lease on the rows of the announced keys, looked up without an announcement. Where `check`, of the lookup's
        other arguments, raises, all ranks do."""
        name, ranks, store, keys, inserts, sums_bags = self.lookup

        def make() -> Keys:
            check(keys)
            return keys

        return look_up_on_ranks(
            ranks, store, name, make, inserts=inserts, has_gradient=has_gradient, sums_bags=sums_bags
        )

    def drop(self) -> None:
        """Unpin the rows that were prefetched for ranks."""
        if self.ahead is not None:
            self.ahead.drop()

    def forget(self) -> None:
        """See `Reserved`; it holds no lease."""


class Announced:
    """The lookups of a batch that ranks announce together. `with` sees to it that this rank takes part in the exchange.

    Args:
        ranks: of the exchange, with connections of their own for the thread; a process alone announces nothing.
    """

    def __init__(self, ranks: AnyRanks = ALONE):
        self._ranks = None if ranks.alone else ranks
        """Ranks of the exchange that is still to be made; None = no exchange is due."""
        self.lookups: Sequence[AnnouncedLookup] = ()
        self.waiting: list[AnnouncedLookup] = []
        """Lookups of which this rank has told nothing yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.drop()
        if self._ranks is not None:
            self.make(())  # In vain for the others.

    def make(self, lookups: Sequence[LookupOnRanks]) -> None:
        """Announce lookups, which may be none: then it is in vain for the others."""
        self.lookups = [AnnouncedLookup(self, number, lookup, None) for number, lookup in enumerate(lookups)]
        ranks = self._ranks
        if ranks is None:
            return
        its = [asking_for(one.store, one.ranks, one.keys, sums_bags=one.sums_bags) for one in lookups]
        counts_R = [[count for _, asking in its for count in asking.counts(r)] for r in range(ranks.size)]
        blocks = [
            [
                torch.tensor([_code(lookups), *counts], device="cpu"),
                *(tensor for _, asking in its for tensor in asking.tensors(r)),
            ]
            for r, counts in enumerate(counts_R)
        ]
        self._ranks = None
        received = ranks.exchange("announce the lookups of a batch", lambda: blocks)
        if not lookups or any(int(block.take(1, torch.int64)) != _code(lookups) for block in received):
            return
        told_RL = [block.take(COUNTS * len(lookups), torch.int64).view(-1, COUNTS).tolist() for block in received]
        for n, (one, (keys, asking)) in enumerate(zip(lookups, its, strict=True)):
            counts = [told[n] for told in told_RL]
            asked = asked_by(one.store, one.ranks, received, counts, uses=one.store.policy.counts_uses)
            self.lookups[n].ahead = LookupAhead(one.ranks, one.what, one.store, keys, asking, asked, one.inserts)
        self.waiting = list(self.lookups)
        for lookup in self.lookups:
            assert lookup.ahead is not None
            lookup.ahead.prefetch()

    def tell(self, lookup: AnnouncedLookup, number: int) -> list[int]:
        """Exchange with the ranks which lookup each makes now; `number` is this rank's."""
        self.waiting.remove(lookup)
        try:
            return lookup.lookup.ranks.tell(f"{lookup.lookup.what}, as announced or not", lambda: number)
        except BaseException:
            self.waiting.clear()  # The other ranks wait for nothing.
            raise

    def rows(self, told: Sequence[int]) -> Lease | None:
        """The rows that this rank has asked for, if it makes a lookup as announced; to each rank that does, its rows.
        None if no rank does, or not all of these the same lookup."""
        numbers = {number for number in told if number >= 0}
        if len(numbers) != 1:
            return None
        ahead = self.lookups[numbers.pop()].ahead
        assert ahead is not None
        if any(number < 0 for number in told):
            ahead = ahead.of_ranks([number >= 0 for number in told])
        return ahead.acquire()

    def miss(self, store: EmbeddingStore, *, inserts: bool) -> None:
        """Tell the ranks that a lookup is about to be made of ids that were not announced. It raises as
        `look_up_on_ranks`."""
        lookup = next((lookup for lookup in self.waiting if lookup.lookup.store is store), None)
        if lookup is None:
            return
        with whole_exchange():
            told = self.tell(lookup, _MISSED_IN_TRAINING if inserts else _MISSED_IN_EVAL)
            lease = self.rows(told)
            if lease is not None:
                lease.unpin()

    def end(self) -> None:
        """Release everything."""
        self.waiting.clear()
        self.drop()

    def drop(self) -> None:
        """Unpin the rows that were prefetched for ranks."""
        for lookup in self.lookups:
            lookup.drop()


NOTHING_ANNOUNCED = Announced()


def _code(lookups: Sequence[LookupOnRanks]) -> int:
    """Is equal where ranks announce the same lookups; 0 for none."""
    return zlib.crc32("; ".join(one.what for one in lookups).encode())


def _measure_announce(args: object, announced: Announced) -> tuple[int, int]:
    begun = [lookup.ahead for lookup in announced.lookups if lookup.ahead is not None]
    keys = sum(sum(its.asking.sent.count_R) + len(its.asked.id_N) for its in begun)
    return keys, keys * (4 + 8)


@Op(PREPARE, takes=("announcement",), measure=_measure_announce)
def announce(announcement: Announced | None, lookups: Sequence[LookupOnRanks]) -> Announced:
    """Send the unique keys of lookups to their owners, which pin the rows that they know.

    Args:
        announcement: of the batch, to which no lookup was added yet; None = nothing is announced.
    """
    announced = announcement or Announced()
    announced.make(lookups)
    return announced


@Op(LOOKUP, takes=("announced",))
def announced_lookup(announced: Announced, number: int) -> AnnouncedLookup:
    """One of the lookups that were announced together."""
    return announced.lookups[number]
