"""Lookups between ranks: the owner of a key stores the row, and each rank looks up the ids of its own batch.

    ahead = begin_lookup(ranks, store, name, make_keys, ...)    unique keys go to their owners
    ahead.prefetch()                                            optional: owners read known rows and pin them
    lease = ahead.acquire()                                     owners acquire the requested rows and send the weights
    rows = with_grad(gather(lease), lease, weight)              as on one rank

`look_up_on_ranks` makes a lookup at once. A lookup may also begin well ahead of its step, on another thread; that
changes no number. Ranks can announce all lookups that they expect of a batch, in one exchange:

    with Announced(ranks) as announced:                on each rank, once a batch, on any thread
        announce(announced, lookups)                   sends the unique keys of all lookups; owners pin the rows
    lease = announced.lookups[0].acquire()             in the step: the rows of the first lookup, from their owners
    announced.miss(store, inserts=True)                or, if `build` has looked up other ids

If ranks expect different lookups, or a rank expects none, the announcement is in vain: no lookup uses it. In the step
each rank reports before a lookup whether `build` looks up the announced ids. If a rank's ids are others, all ranks make
that rank's lookup unannounced; ranks that have received their rows already take part without keys.

Invariants:
- every rank runs these calls in the same order, whatever its batch holds, and reports once for each announced lookup;
- nothing is inserted before `acquire`.

`oneemb.kernels.owner` computes the owner of a key; requests.py lets owners sum parts of bags; owner_grads.py sends
gradients to owners. Messages hold rows and gradients in `comm_dtype`. A rank also rounds its own rows to `comm_dtype`,
so that no number depends on which rank owns a key; where owners sum parts of bags, they round the sums. Every rank has
all rows of a replicated table, and requests them from itself.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from oneemb.graph.one_rank import ALONE
from oneemb.graph.ops.keys import DTYPES, BatchKeys
from oneemb.graph.ops.lookup import Lease, Remote, gather
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ops.reading import ReadRows, peek
from oneemb.graph.ops.requests import (
    COUNTS,
    Request,
    Requested,
    cut_if_fewer_bytes,
    keys_by_rank,
    keys_of_ranks,
    requested_by,
    rows_like,
)
from oneemb.graph.ops.reserve import Reserved
from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError


@dataclass
class LookupAhead:
    """A lookup whose keys have reached their owners."""

    ranks: Ranks
    what: str
    """Name of the lookup in exchanges; see `lookup_description`."""
    store: EmbeddingStore
    """The rows that this rank owns."""
    keys: BatchKeys
    """Unique keys of this rank's ids."""
    request: Request
    """Rows that this rank requests from others."""
    requested: Requested
    """Rows that others request from this rank."""
    inserts: bool
    """Whether unknown keys are inserted, by `acquire`; off, they read as their initial values."""
    again: bool = False
    """Whether the lookup repeats one of the forward pass; see `in_backward`."""
    _own: Reserved | None = None
    """This rank's lookup of the rows that are requested from it; None = not made yet."""

    def prefetch(self) -> None:
        """Read and pin the known rows that are requested from this rank, as far as there is room."""
        if self.inserts:
            with suppress(StorageError):  # `acquire` raises the same error, on all ranks.
                self._own = Reserved(self.store, self.requested.keys, again=self.again)
                self._own.prefetch()

    def acquire(self, source: ReadRows | None = None) -> Lease:
        """Lease on copies of the rows, which their owners send. The lease pins the rows that ranks have requested from
        this rank. Call this once.

        Args:
            source: store to read if nothing is inserted; None = `store`.

        Raises:
            StoreFullError: a tier is too small for the step, or capacity is reached; nothing is inserted on this rank.
        """
        own, self._own = self._own, None
        owned: list[Lease] = []

        def read() -> torch.Tensor:
            requested = self.requested.keys
            if not self.inserts:
                return peek(source or self.store, requested)
            owned.append((own or Reserved(self.store, requested, again=self.again)).acquire())
            return gather(owned[0])

        row_SD, slot_U = self._bring_rows(read)
        array = self.store.backend.array
        requests = self.request, self.requested
        remote = Remote(self.ranks, array(row_SD), array(slot_U), owned[0] if owned else None, *requests)
        return Lease(self.store, self.keys, remote=remote)

    def drop(self) -> None:
        """Unpin the prefetched rows. If an interrupt stops this call, it may be called again."""
        if (own := self._own) is not None:
            own.drop()
            self._own = None

    def of_ranks(self, takes_R: Sequence[bool]) -> Self:
        """Copy of this lookup that serves only the ranks r for which takes_R[r] is true. Drops this lookup's prefetched
        rows; the copy has none."""
        self.drop()
        requested, takes_N = self.requested, torch.from_numpy(np.repeat(takes_R, self.requested.count_R))
        remains = dataclasses.replace(
            requested,
            table_N=requested.table_N[takes_N],
            id_N=requested.id_N[takes_N],
            count_R=[count if takes else 0 for count, takes in zip(requested.count_R, takes_R, strict=True)],
            parts_R=[parts if takes else None for parts, takes in zip(requested.parts_R, takes_R, strict=True)],
            uses_N=None if requested.uses_N is None else requested.uses_N[takes_N],
        )
        request = self.request if takes_R[self.ranks.rank] else self.request.empty()
        return dataclasses.replace(self, request=request, requested=remains)

    def _bring_rows(self, read: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights or sums that the owners send to this rank, [S, D] in the store's dtype; index in them of each key,
        int64 [U], or of each part). `read` returns the rows that are requested from this rank, as a lookup of
        `Requested.keys`; if it raises, all ranks raise."""
        ranks, request = self.ranks, self.request
        like, what = rows_like(self.store, ranks), f"bring rows to {self.what}"
        answers_R, comes_R = self.requested.answers_R, request.comes_R
        row_SD = ranks.answer(what, lambda: read().to(like.dtype), like, answers_R, comes_R)
        places = ranks.behind_heads(comes_R, ranks.heads(like))
        slot_U = torch.cat([torch.arange(at.start, at.stop, device="cpu") for at in places])
        if request.cut is None:
            slot_U = torch.empty_like(slot_U).scatter_(0, request.sent.order_N, slot_U)
        return row_SD.to(DTYPES[self.store.format.dtype]), slot_U.to(like.device)


def request_for(store: EmbeddingStore, ranks: Ranks, keys: BatchKeys, *, sums_bags: bool) -> tuple[BatchKeys, Request]:
    """(keys of a lookup, whose number the host knows; this rank's request to the owners of their rows).

    Args:
        sums_bags: whether `gather` will sum or average bags, without `per_sample_weights`.
    """
    backend = store.backend
    keys = dataclasses.replace(keys, unique=keys.backend.counted(keys.unique))
    table_U, id_U = (backend.tensor(array).cpu() for array in (keys.unique.table_U, keys.unique.id_U))
    owner_U = owner_of(table_U.numpy(), id_U.numpy(), ranks.size)
    if store.replicas:
        owner_U[store.replicas.are_of(table_U.numpy())] = ranks.rank  # This rank has copies.
    sent, uses_R = keys_by_rank(table_U, id_U, owner_U, ranks.size), None
    if store.policy.counts_uses:
        uses_U = torch.from_numpy(keys.backend.uses_of(keys.unique).astype(np.int32))
        uses_R = uses_U[sent.order_N].split(sent.count_R)
    cut, like = None, rows_like(store, ranks)
    # Bags of a 16-bit store are not cut: a sum is rounded once, but sums of parts would each be rounded. A sum of
    # float16 values may overflow in a message. Gradients of replicated rows go to all ranks, not to owners.
    if sums_bags and store.format.dtype == "float32" and like.dtype != torch.float16 and not store.replicas:
        assert keys.bags is not None
        offsets, row_P = keys.bags.arrays
        inverse_N, offset_P1 = (backend.tensor(array).cpu().numpy() for array in (keys.unique.inverse_N, offsets))
        row_P = None if row_P is None else backend.tensor(row_P).cpu().numpy()
        row_bytes, grad_bytes = (store.format.dim * dtype.itemsize for dtype in (like.dtype, ranks.comm_dtype))
        cut = cut_if_fewer_bytes(
            sent, inverse_N, offset_P1, row_P, rank=ranks.rank, row_bytes=row_bytes, grad_bytes=grad_bytes
        )
    return keys, Request(sent, cut, uses_R)


def begin_lookup(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], BatchKeys], *, inserts: bool = False,
    sums_bags: bool = False, again: bool = False, connections: Ranks | None = None,
) -> LookupAhead:  # fmt: skip
    """Send the unique keys of a lookup to their owners. Every rank calls it.

    Args:
        store: the rows that this rank owns, of the embedding `name`.
        make: returns the keys; if it raises, all ranks raise.
        inserts, again: see `LookupAhead`.
        sums_bags: as for `request_for`.
        connections: connections by which the keys go; None = the connections of `ranks`.
    """
    made: list[tuple[BatchKeys, Request]] = []
    what = lookup_description(name, inserts, ranks, again)

    def blocks() -> list[list[torch.Tensor]]:
        keys, request = request_for(store, ranks, make(), sums_bags=sums_bags)
        made.append((keys, request))
        return [[torch.tensor(request.counts(r), device="cpu"), *request.tensors(r)] for r in range(ranks.size)]

    received = (ranks if connections is None else ranks.over(connections)).exchange(what, blocks)
    counts_R = [block.take(COUNTS, torch.int64).tolist() for block in received]
    requested = requested_by(store, ranks, received, counts_R, uses=store.policy.counts_uses)
    return LookupAhead(ranks, what, store, *made[0], requested, inserts, again)


def look_up_on_ranks(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], BatchKeys], *, inserts: bool = False,
    has_gradient: bool = False, source: ReadRows | None = None, sums_bags: bool = False, again: bool = False,
) -> Lease:  # fmt: skip
    """Lease on copies of the rows of a lookup, which their owners send. Every rank calls it. Arguments and errors are
    those of `begin_lookup` and `LookupAhead.acquire`.

    Args:
        has_gradient: whether the lookup may get a gradient; if False, the rows are unpinned.
    """
    with whole_exchange():
        ahead = begin_lookup(ranks, store, name, make, inserts=inserts, sums_bags=sums_bags, again=again)
        lease = ahead.acquire(source)
    if not has_gradient:
        lease.unpin()
    return lease


def lookup_description(name: str, inserts: bool, ranks: Ranks, again: bool = False) -> str:
    """Text by which ranks compare a lookup before they exchange data. It holds everything that must be the same on all
    ranks."""
    once_more = " once more, in the backward pass," if again else ""
    return f"look up {name!r}{once_more} in {'training' if inserts else 'eval'} mode, comm_dtype {ranks.comm_dtype}"


class LookupOnRanks(NamedTuple):
    """Lookup of an embedding whose rows ranks own together."""

    name: str
    """Name of the embedding."""
    ranks: Ranks
    store: EmbeddingStore
    """The rows that this rank owns."""
    keys: BatchKeys
    inserts: bool
    """Whether unknown keys are inserted."""
    sums_bags: bool
    """Whether bags are summed or averaged, without `per_sample_weights`."""

    @property
    def what(self) -> str:
        """Name of the lookup in exchanges."""
        return lookup_description(self.name, self.inserts, self.ranks)


_MISSED_IN_EVAL, _MISSED_IN_TRAINING = -2, -1  # reported in place of the number of an announced lookup


class AnnouncedLookup:
    """Lookup `number` of an announcement.

    Args:
        ahead: the lookup that has begun; None = the announcement was in vain.
    """

    def __init__(self, announced: "Announced", number: int, lookup: LookupOnRanks, ahead: LookupAhead | None):
        self.lookup, self.ahead = lookup, ahead
        self._announced, self._number = announced, number

    @property
    def inserts(self) -> bool:
        """Whether unknown keys are inserted."""
        return self.lookup.inserts

    def acquire(self) -> Lease | None:
        """Lease on the rows; None if the ids must be looked up unannounced. Unknown keys are inserted if `inserts`.
        Raises as `look_up_on_ranks`."""
        ranks, store, announced = self.lookup.ranks, self.lookup.store, self._announced
        if self not in announced.waiting:  # Announced in vain, or `miss` was reported in place of this lookup.
            announced.miss(store, inserts=self.inserts)
            return None
        with whole_exchange():
            number_R = announced.report(self, self._number)
            lease = announced.rows(number_R)
            if lease is None:
                return None
            missed = next((number for number in number_R if number < 0), None)
            if missed is not None:
                make, inserts = functools.partial(_no_keys, store), missed == _MISSED_IN_TRAINING
                look_up_on_ranks(ranks, store, self.lookup.name, make, inserts=inserts)
        return lease

    def look_up(self, check: Callable[[BatchKeys], object], *, has_gradient: bool) -> Lease:
        """Lease on the rows of the same keys, looked up unannounced. `check` checks other arguments of the lookup
        against the keys; if it raises, all ranks raise."""
        name, ranks, store, keys, inserts, sums_bags = self.lookup

        def make() -> BatchKeys:
            check(keys)
            return keys

        return look_up_on_ranks(
            ranks, store, name, make, inserts=inserts, has_gradient=has_gradient, sums_bags=sums_bags
        )

    def drop(self) -> None:
        """Unpin the prefetched rows."""
        if self.ahead is not None:
            self.ahead.drop()

    def forget(self) -> None:
        """Do nothing: an announced lookup holds no lease (compare `Reserved.forget`)."""


class Announced:
    """The lookups of a batch that ranks announce in one exchange. The end of the `with` block takes part in the
    exchange if this rank has not done so, since the other ranks wait for it.

    Args:
        ranks: ranks with connections for this thread alone (`Ranks.again`); a process alone announces nothing.
    """

    def __init__(self, ranks: AnyRanks = ALONE):
        self._ranks = None if ranks.alone else ranks
        """Ranks that still wait for this rank's announcement; None = no exchange is due."""
        self.lookups: Sequence[AnnouncedLookup] = ()
        self.waiting: list[AnnouncedLookup] = []
        """Lookups that this rank has not reported yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.drop()
        if self._ranks is not None:
            self.make(())  # The announcement of the others is in vain.

    def make(self, lookups: Sequence[LookupOnRanks]) -> None:
        """Announce lookups. If a rank announces none, the announcement is in vain."""
        self.lookups = [AnnouncedLookup(self, number, lookup, None) for number, lookup in enumerate(lookups)]
        ranks = self._ranks
        if ranks is None:
            return
        prepared = [request_for(one.store, one.ranks, one.keys, sums_bags=one.sums_bags) for one in lookups]
        counts_R = [[count for _, request in prepared for count in request.counts(r)] for r in range(ranks.size)]
        blocks = [
            [
                torch.tensor([_code(lookups), *counts], device="cpu"),
                *(tensor for _, request in prepared for tensor in request.tensors(r)),
            ]
            for r, counts in enumerate(counts_R)
        ]
        self._ranks = None
        received = ranks.exchange("announce the lookups of a batch", lambda: blocks)
        if not lookups or any(int(block.take(1, torch.int64)) != _code(lookups) for block in received):
            return
        counts_RL = [block.take(COUNTS * len(lookups), torch.int64).view(-1, COUNTS).tolist() for block in received]
        for n, (one, (keys, request)) in enumerate(zip(lookups, prepared, strict=True)):
            counts = [counts_L[n] for counts_L in counts_RL]
            requested = requested_by(one.store, one.ranks, received, counts, uses=one.store.policy.counts_uses)
            self.lookups[n].ahead = LookupAhead(one.ranks, one.what, one.store, keys, request, requested, one.inserts)
        self.waiting = list(self.lookups)
        for lookup in self.lookups:
            assert lookup.ahead is not None
            lookup.ahead.prefetch()

    def report(self, lookup: AnnouncedLookup, number: int) -> list[int]:
        """Number of the lookup that each rank makes now. This rank makes `number`, in place of `lookup` perhaps."""
        self.waiting.remove(lookup)
        try:
            return lookup.lookup.ranks.gather_number(f"{lookup.lookup.what}, as announced or not", lambda: number)
        except BaseException:
            self.waiting.clear()  # No rank waits for another report.
            raise

    def rows(self, number_R: Sequence[int]) -> Lease | None:
        """Lease on the rows of the ranks that make a lookup as announced; None if there are no such ranks, or they
        make different lookups. `number_R`: result of `report`."""
        numbers = {number for number in number_R if number >= 0}
        if len(numbers) != 1:
            return None
        ahead = self.lookups[numbers.pop()].ahead
        assert ahead is not None
        if any(number < 0 for number in number_R):
            ahead = ahead.of_ranks([number >= 0 for number in number_R])
        return ahead.acquire()

    def miss(self, store: EmbeddingStore, *, inserts: bool) -> None:
        """Report to the ranks that this rank's next lookup is unannounced. Raises as `look_up_on_ranks`.

        Args:
            store: store of the lookup; nothing is reported if no announced lookup of it waits.
            inserts: whether the lookup inserts unknown keys.
        """
        lookup = next((lookup for lookup in self.waiting if lookup.lookup.store is store), None)
        if lookup is None:
            return
        with whole_exchange():
            lease = self.rows(self.report(lookup, _MISSED_IN_TRAINING if inserts else _MISSED_IN_EVAL))
            if lease is not None:
                lease.unpin()

    def end(self) -> None:
        """Unpin the prefetched rows, and report no further lookup."""
        self.waiting.clear()
        self.drop()

    def drop(self) -> None:
        """Unpin the prefetched rows of all lookups."""
        for lookup in self.lookups:
            lookup.drop()


NOTHING_ANNOUNCED = Announced()


def _measure_announce(args: object, announced: Announced) -> tuple[int, int]:
    begun = [lookup.ahead for lookup in announced.lookups if lookup.ahead is not None]
    keys = sum(sum(ahead.request.sent.count_R) + len(ahead.requested.id_N) for ahead in begun)
    return keys, keys * (4 + 8)


@Op(PREPARE, takes=("announcement",), measure=_measure_announce)
def announce(announcement: Announced | None, lookups: Sequence[LookupOnRanks]) -> Announced:
    """Send the unique keys of lookups to their owners, which read and pin known rows.

    Args:
        announcement: the announcement of the batch, without lookups so far; None = announce nothing.
    """
    announced = announcement or Announced()
    announced.make(lookups)
    return announced


@Op(LOOKUP, takes=("announced",))
def announced_lookup(announced: Announced, number: int) -> AnnouncedLookup:
    """Lookup `number` of an announcement."""
    return announced.lookups[number]


def _no_keys(store: EmbeddingStore) -> BatchKeys:
    table_N, id_N = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int32, torch.int64))
    return keys_of_ranks(store, table_N, id_N)


def _code(lookups: Sequence[LookupOnRanks]) -> int:
    """Checksum of the names of lookups: equal on ranks that announce the same lookups; 0 for no lookup."""
    return zlib.crc32("; ".join(one.what for one in lookups).encode())
