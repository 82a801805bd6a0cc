"""Lookups between ranks: each row lives with its owner, and each rank looks up ids of its own.

    ahead = begin_lookup(ranks, store, name, make_keys, ...)    unique keys go to their owners
    ahead.prefetch()                    perhaps: owners read the rows that they know, from disk too, and pin them
    lease = ahead.acquire()             owners acquire the rows that all ranks ask them for, and send their weights
    rows = with_grad(gather(lease), lease, weight)              as on one rank

A lookup that is made at once is `look_up_on_ranks`. One may begin well ahead of its step, on another thread: nothing is
inserted before `acquire`, and no number depends on it. announce.py begins all lookups of a batch in one exchange.

Every rank runs these in the same order, whatever its batch holds. `oneemb.kernels.owner` says who owns a key, asking.py
where owners sum bags, settle.py how gradients come to them.

Rows and gradients travel in `comm_dtype`. Those that a rank has itself are rounded as those of others are, so that no
number depends on who owns a key; but where owners sum parts of bags (asking.py), it is the sums that are rounded.

Every rank has all rows of a replicated table: it asks itself for them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from oneemb.graph.ops.asking import COUNTS, Asked, Asking, asked_by, cut_if_fewer_bytes, keys_by_rank, rows_like
from oneemb.graph.ops.keys import DTYPES, Keys
from oneemb.graph.ops.lookup import Lease, Remote, gather
from oneemb.graph.ops.reading import ReadRows, peek
from oneemb.graph.ops.reserve import Reserved
from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import Ranks
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError


@dataclass
class LookupAhead:
    """A lookup whose keys have reached their owners."""

    ranks: Ranks
    what: str
    """Name of the lookup in exchanges; see `lookup_of`."""
    store: EmbeddingStore
    """The rows that this rank owns."""
    keys: Keys
    """Unique keys of this rank's ids."""
    asking: Asking
    """Rows that this rank asks others for."""
    asked: Asked
    """Rows that others ask this rank for."""
    inserts: bool
    """Whether unknown keys are inserted, by `acquire`; off, they read as their initial values."""
    again: bool = False
    """See `acquire` in lookup.py."""
    _own: Reserved | None = None
    """Lookup of what this rank is asked for; None = it is yet to be made."""

    def prefetch(self) -> None:
        """Read the rows that ranks ask this one for, as far as they are known and there is room, and pin them."""
        if self.inserts:
            with suppress(StorageError):  # It will be met again by `acquire`, which tells the ranks.
                self._own = Reserved(self.store, self.asked.keys, again=self.again)
                self._own.prefetch()

    def acquire(self, source: ReadRows | None = None) -> Lease:
        """The rows, from their owners, and pins on those that this rank was asked for. Call this once.

        Args:
            source: what reads as the store, and is read where nothing is inserted; None = the store.

        Raises:
            StoreFullError: a tier is too small for the step, or capacity is reached; nothing is inserted on this rank.
        """
        own, self._own = self._own, None
        owned: list[Lease] = []

        def read() -> torch.Tensor:
            asked = self.asked.keys
            if not self.inserts:
                return peek(source or self.store, asked)
            owned.append((own or Reserved(self.store, asked, again=self.again)).acquire())
            return gather(owned[0])

        row_SD, slot_U = self._bring_rows(read)
        array = self.store.loops.array
        its = self.asking, self.asked
        remote = Remote(self.ranks, array(row_SD), array(slot_U), owned[0] if owned else None, *its)
        return Lease(self.store, self.keys, remote=remote)

    def drop(self) -> None:
        """Unpin the rows that were prefetched for ranks. After an interrupt in it, it may be called again."""
        if (own := self._own) is not None:
            own.drop()
            self._own = None

    def of_ranks(self, takes_R: Sequence[bool]) -> Self:
        """Copy of this lookup that serves only the ranks in `takes_R`. Nothing is prefetched."""
        self.drop()
        asked, takes_N = self.asked, torch.from_numpy(np.repeat(takes_R, self.asked.count_R))
        remains = dataclasses.replace(
            asked,
            table_N=asked.table_N[takes_N],
            id_N=asked.id_N[takes_N],
            count_R=[count if takes else 0 for count, takes in zip(asked.count_R, takes_R, strict=True)],
            parts_R=[parts if takes else None for parts, takes in zip(asked.parts_R, takes_R, strict=True)],
            uses_N=None if asked.uses_N is None else asked.uses_N[takes_N],
        )
        asking = self.asking if takes_R[self.ranks.rank] else self.asking.of_none()
        return dataclasses.replace(self, asking=asking, asked=remains)

    def _bring_rows(self, read: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights or sums that the owners send to this rank, [S, D], of the store's dtype; and the place in it of each
        key, int64 [U], or of each part.

        Args:
            read: gives what ranks ask this one for, see `Asked.keys`; where it raises, all ranks do.
        """
        ranks, asking = self.ranks, self.asking
        like, what = rows_like(self.store, ranks), f"bring rows to {self.what}"
        answers_R, comes_R = self.asked.answers_R, asking.comes_R
        row_SD = ranks.answer(what, lambda: read().to(like.dtype), like, answers_R, comes_R)
        places = ranks.behind_heads(comes_R, ranks.heads(like))
        slot_U = torch.cat([torch.arange(at.start, at.stop, device="cpu") for at in places])
        if asking.cut is None:
            slot_U = torch.empty_like(slot_U).scatter_(0, asking.sent.order_N, slot_U)
        return row_SD.to(DTYPES[self.store.format.dtype]), slot_U.to(like.device)


def asking_for(store: EmbeddingStore, ranks: Ranks, keys: Keys, *, sums_bags: bool) -> tuple[Keys, Asking]:
    """These keys, counted, and what this rank asks others for in a lookup of them.

    Args:
        sums_bags: whether it is one of bags, of which `gather` is to give sums or means without weights.
    """
    loops = store.loops
    keys = dataclasses.replace(keys, unique=keys.loops.counted(keys.unique))
    table_U, id_U = (loops.tensor(array).cpu() for array in (keys.unique.table_U, keys.unique.id_U))
    owner_U = owner_of(table_U.numpy(), id_U.numpy(), ranks.size)
    if store.replicas:
        owner_U[store.replicas.are_of(table_U.numpy())] = ranks.rank  # It has the rows too.
    sent, uses_R = keys_by_rank(table_U, id_U, owner_U, ranks.size), None
    if store.policy.counts_uses:
        uses_U = torch.from_numpy(keys.loops.uses_of(keys.unique).astype(np.int32))
        uses_R = uses_U[sent.order_N].split(sent.count_R)
    cut, like = None, rows_like(store, ranks)
    # Rows of half as many bits give a sum that is rounded once; so would sums of parts be, each. float16 may not hold
    # a sum of what it holds. Gradients of replicated rows go to all ranks.
    if sums_bags and store.format.dtype == "float32" and like.dtype != torch.float16 and not store.replicas:
        assert keys.bags is not None
        offsets, row_P = keys.bags.arrays
        inverse_N, offset_P1 = (loops.tensor(array).cpu().numpy() for array in (keys.unique.inverse_N, offsets))
        row_P = None if row_P is None else loops.tensor(row_P).cpu().numpy()
        row_bytes, grad_bytes = (store.format.dim * dtype.itemsize for dtype in (like.dtype, ranks.comm_dtype))
        cut = cut_if_fewer_bytes(
            sent, inverse_N, offset_P1, row_P, rank=ranks.rank, row_bytes=row_bytes, grad_bytes=grad_bytes
        )
    return keys, Asking(sent, cut, uses_R)


def begin_lookup(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], Keys], *, inserts: bool = False,
    sums_bags: bool = False, again: bool = False, connections: Ranks | None = None,
) -> LookupAhead:  # fmt: skip
    """Send the unique keys of a lookup to their owners. Every rank calls it.

    Args:
        store: the rows that this rank owns, of the embedding `name`.
        make: gives the keys; where it raises, all ranks do.
        inserts, again: see `LookupAhead`.
        sums_bags: as for `asking_for`.
        connections: those by which keys go; None = those of `ranks`.
    """
    made: list[tuple[Keys, Asking]] = []
    what = lookup_of(name, inserts, ranks, again)

    def blocks() -> list[list[torch.Tensor]]:
        keys, asking = asking_for(store, ranks, make(), sums_bags=sums_bags)
        made.append((keys, asking))
        return [[torch.tensor(asking.counts(r), device="cpu"), *asking.tensors(r)] for r in range(ranks.size)]

    received = (ranks if connections is None else ranks.over(connections)).exchange(what, blocks)
    counts_R = [block.take(COUNTS, torch.int64).tolist() for block in received]
    asked = asked_by(store, ranks, received, counts_R, uses=store.policy.counts_uses)
    return LookupAhead(ranks, what, store, *made[0], asked, inserts, again)


def look_up_on_ranks(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], Keys], *, inserts: bool = False,
    has_gradient: bool = False, source: ReadRows | None = None, sums_bags: bool = False, again: bool = False,
) -> Lease:  # fmt: skip
    """The rows of a lookup, from their owners. Every rank calls it; arguments and errors are those of `begin_lookup`
    and `LookupAhead.acquire`.

    Args:
        has_gradient: whether a gradient may come; off, the rows are unpinned.
    """
    with whole_exchange():
        ahead = begin_lookup(ranks, store, name, make, inserts=inserts, sums_bags=sums_bags, again=again)
        lease = ahead.acquire(source)
    if not has_gradient:
        lease.unpin()
    return lease


def lookup_of(name: str, inserts: bool, ranks: Ranks, again: bool = False) -> str:
    """Name of a lookup on ranks, which contains all that must be the same on them."""
    once_more = " once more, in the backward pass," if again else ""
    return f"look up {name!r}{once_more} in {'training' if inserts else 'eval'} mode, comm_dtype {ranks.comm_dtype}"
