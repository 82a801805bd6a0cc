"""Lookups that ranks are expected to make: their keys go to the owners ahead of the step.

    with Announcement(ranks) as announcement:         on each rank, once a batch, on any thread
        announced = announce(announcement, lookups)   all their unique keys, in one exchange; owners pin the rows
    ...
    lease = announced.lookups[0].acquire()            in the step: its rows, from their owners
    announced.miss(store, inserts=True)               or: `build` has looked up other ids

A rank that expects other lookups than the others, or none, announces in vain: then all are made as if none had been.
In the step each rank tells before a lookup whether its ids are those that it has announced. Where they are not, the
ranks make this rank's lookup unannounced, those that have got their rows already without keys.

Invariants: every rank tells once for each lookup, in the order in which it makes them; nothing is inserted before.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np
import torch

from oneemb.graph.ops.asking import COUNTS, asked_by, keys_of_ranks
from oneemb.graph.ops.keys import Keys
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ops.shuffle import (
    Routed,
    asking_for,
    lease_on_ranks,
    look_up_on_ranks,
    lookup_of,
)
from oneemb.graph.rank_errors import whole_exchange
from oneemb.graph.ranks import Ranks
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = ["Announced", "AnnouncedLookup", "Announcement", "LookupOnRanks", "announce", "announced_lookup"]


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
    """A lookup that ranks have announced, or tried to.

    Args:
        of: those that were announced with it.
        number: which of them it is.
        routed: its keys, and those that ranks ask this one for; None = it was announced in vain.
    """

    def __init__(self, of: "Announced", number: int, lookup: LookupOnRanks, routed: Routed | None):
        self.name, self.ranks, self.store, self.keys, self.inserts, self._sums_bags = lookup
        self.what = lookup.what
        self.routed = routed
        self.prefetched: Prefetched | None = None
        """Rows that ranks ask this one for."""
        self._of, self._number = of, number

    def acquire(self) -> Lease | None:
        """The rows; None if they are to be looked up unannounced. Unknown keys are inserted if `inserts`.

        Raises:
            RankError, StoreFullError: as `look_up_on_ranks`.
        """
        if self not in self._of.waiting:  # It was announced in vain, or the ranks were told of another in its place.
            self._of.miss(self.store, inserts=self.inserts)
            return None
        with whole_exchange():
            told = self._of.tell(self, self._number)
            lookup = self._of.agreed(told)
            if lookup is None:
                return None
            lease = lookup.read(told)
            missed = next((number for number in told if number < 0), None)
            if missed is not None:
                inserts = missed == _MISSED_IN_TRAINING
                look_up_on_ranks(self.ranks, self.store, self.name, lambda: _no_keys(self.store), inserts=inserts)
        return lease

    def look_up(self, check: Callable[[], object], *, has_gradient: bool) -> Lease:
        """Lease on the rows of `self.keys`, looked up without an announcement.

        Args:
            check: checks the lookup's other arguments; if it raises, all ranks raise.
            has_gradient: as for `look_up_on_ranks`.
        """

        def keys() -> Keys:
            check()
            return self.keys

        return look_up_on_ranks(
            self.ranks, self.store, self.name, keys, inserts=self.inserts, has_gradient=has_gradient,
            sums_bags=self._sums_bags,
        )  # fmt: skip

    def read(self, told: Sequence[int]) -> Lease:
        """The rows that this rank has asked for, if it is one of those that have told so; to each of them its rows."""
        assert self.routed is not None
        routed = self.routed
        if any(number < 0 for number in told):
            routed = _of_some(routed, told, self.ranks.rank)
            self.drop()
        prefetched, self.prefetched = self.prefetched, None
        return lease_on_ranks(self.ranks, self.what, self.store, routed, inserts=self.inserts, prefetched=prefetched)

    def prefetch(self) -> None:
        """Read the rows that ranks ask this one for, as far as they are known and there is room, and pin them."""
        if self.inserts and self.routed is not None:
            with suppress(StorageError):  # It will be met again by the lookup, which tells the ranks.
                self.prefetched = self.store.prefetch(self.routed.asked.keys.unique)

    def drop(self) -> None:
        """Unpin the rows that were prefetched for ranks."""
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is not None:
            self.store.unprefetch(prefetched)

    def forget(self) -> None:
        """See `Reserved`; it holds no lease."""


class Announced:
    """The lookups of a step that were announced together."""

    def __init__(self, lookups: Sequence[LookupOnRanks], routed: Sequence[Routed] | None):
        self.lookups = [
            AnnouncedLookup(self, number, lookup, None if routed is None else routed[number])
            for number, lookup in enumerate(lookups)
        ]
        self.waiting = [] if routed is None else list(self.lookups)
        """Lookups of which this rank has told nothing yet."""

    def tell(self, lookup: AnnouncedLookup, number: int) -> list[int]:
        """Exchange with the ranks which lookup each makes now; `number` is this rank's."""
        self.waiting.remove(lookup)
        try:
            return lookup.ranks.tell(f"{lookup.what}, as announced or not", lambda: number)
        except BaseException:
            self.waiting.clear()  # The other ranks wait for nothing.
            raise

    def agreed(self, told: Sequence[int]) -> AnnouncedLookup | None:
        """The lookup of which ranks have got the rows that they announced; None if there is none, or not one alone."""
        numbers = {number for number in told if number >= 0}
        return self.lookups[numbers.pop()] if len(numbers) == 1 else None

    def miss(self, store: EmbeddingStore, *, inserts: bool) -> None:
        """Tell the ranks that a lookup is about to be made of ids that were not announced.

        Raises:
            RankError, StoreFullError: as `look_up_on_ranks`.
        """
        lookup = next((lookup for lookup in self.waiting if lookup.store is store), None)
        if lookup is None:
            return
        with whole_exchange():
            told = self.tell(lookup, _MISSED_IN_TRAINING if inserts else _MISSED_IN_EVAL)
            agreed = self.agreed(told)
            if agreed is not None:
                agreed.read(told).unpin()

    def end(self) -> None:
        """Release everything."""
        self.waiting.clear()
        if self.lookups:
            self.drop()

    def drop(self) -> None:
        """Unpin the rows that were prefetched for ranks."""
        for lookup in self.lookups:
            lookup.drop()


def _no_keys(store: EmbeddingStore) -> Keys:
    return keys_of_ranks(
        store, torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
    )


def _of_some(routed: Routed, told: Sequence[int], rank: int) -> Routed:
    """The request without the part of ranks that have missed."""
    takes_R = [number >= 0 for number in told]
    asked = routed.asked
    takes_N = torch.from_numpy(np.repeat(takes_R, asked.count_R))
    remains = dataclasses.replace(
        asked,
        table_N=asked.table_N[takes_N],
        id_N=asked.id_N[takes_N],
        count_R=[count if takes else 0 for count, takes in zip(asked.count_R, takes_R, strict=True)],
        parts_R=[parts if takes else None for parts, takes in zip(asked.parts_R, takes_R, strict=True)],
        uses_N=None if asked.uses_N is None else asked.uses_N[takes_N],
    )
    asking = routed.asking if takes_R[rank] else routed.asking.of_none()
    return Routed(routed.keys, asking, remains)


class Announcement:
    """A rank's part in the exchange of what ranks expect of one batch: `with` sees to it that it takes part.

    Args:
        ranks: with connections of their own for the thread; None = there are none.
    """

    def __init__(self, ranks: Ranks | None):
        self._ranks = ranks
        self.announced = Announced((), ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.make(())  # In vain for the others; unless it was made.

    def make(self, lookups: Sequence[LookupOnRanks]) -> Announced:
        """Announce lookups, which may be none.

        Raises:
            RankError: another rank has failed.
        """
        ranks = self._ranks
        if ranks is None:
            return Announced(lookups, None)
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
            return Announced(lookups, None)
        told_RL = [block.take(COUNTS * len(lookups), torch.int64).view(-1, COUNTS).tolist() for block in received]
        routed = []
        for n, (one, (keys, asking)) in enumerate(zip(lookups, its, strict=True)):
            counts = [told[n] for told in told_RL]
            asked = asked_by(one.store, one.ranks, received, counts, uses=one.store.policy.counts_uses)
            routed.append(Routed(keys, asking, asked))
        self.announced = Announced(lookups, routed)
        for lookup in self.announced.lookups:
            lookup.prefetch()
        return self.announced


def _code(lookups: Sequence[LookupOnRanks]) -> int:
    """Is equal where ranks announce the same lookups; 0 for none."""
    return zlib.crc32("; ".join(one.what for one in lookups).encode())


def _measure_announce(args: object, announced: Announced) -> tuple[int, int]:
    routed = [lookup.routed for lookup in announced.lookups if lookup.routed is not None]
    keys = sum(sum(its.asking.sent.count_R) + len(its.asked.id_N) for its in routed)
    return keys, keys * (4 + 8)


@Op(PREPARE, takes=("announcement",), measure=_measure_announce)
def announce(announcement: Announcement | None, lookups: Sequence[LookupOnRanks]) -> Announced:
    """Send the unique keys of lookups to their owners, which pin the rows that they know.

    Args:
        announcement: of the batch; None = nothing is announced.

    Raises:
        RankError: another rank has failed.
    """
    return (announcement or Announcement(None)).make(lookups)


@Op(LOOKUP, takes=("announced",))
def announced_lookup(announced: Announced, number: int) -> AnnouncedLookup:
    """One of the lookups that were announced together."""
    return announced.lookups[number]
