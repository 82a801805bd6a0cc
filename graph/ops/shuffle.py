"""Lookups between ranks: each row lives with its owner, and each rank looks up ids of its own.

    lease = look_up_on_ranks(ranks, store, make_keys, ...)
        routed = shuffle_keys(ranks, ..., make_keys, store)     unique keys to their owners
        owned  = acquire(store, routed.asked)                   on the owner: the rows that all ranks ask it for
        rows   = shuffle_rows(ranks, ..., routed, owned)        their weights, back to those who asked
    rows = with_grad(gather(lease), lease, weight)              as on one rank

Every rank runs these in the same order, whatever its batch holds. `oneemb.kernels.owner` says who owns a key, asking.py
where owners sum bags, settle.py how gradients come to them.

Rows and gradients travel in `comm_dtype`. Those that a rank has itself are rounded as those of others are, so that no
number depends on who owns a key; but where owners sum parts of bags (asking.py), it is the sums that are rounded.

Every rank has all rows of a replicated table: it asks itself for them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch

from oneemb.graph.ops.asking import COUNTS, Asking, Parts, cut_bags, keys_by_rank
from oneemb.graph.ops.lookup import DTYPES, Keys, Lease, ReadRows, Remote, acquire, equal, gather, peek
from oneemb.graph.ranks import Ranks, Received, whole_exchange
from oneemb.kernels.arrays import Bags
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = [
    "Asked", "Routed", "asked_by", "asking_for", "keys_of_ranks", "lease_on_ranks", "look_up_on_ranks",
    "lookup_of", "shuffle_keys", "shuffle_rows",
]  # fmt: skip

# More than any embedding has: what comes from other ranks, they have checked.
_TABLES = 1 << 31


@dataclass(frozen=True)
class Asked:
    """Keys that ranks ask this one for, one rank's after another; and parts of bags that it is to sum."""

    store: EmbeddingStore
    ranks: Ranks
    table_N: torch.Tensor
    """int32"""
    id_N: torch.Tensor
    """int64"""
    count_R: Sequence[int]
    """How many are each rank's."""
    parts_R: Sequence[Parts | None]
    """Parts of bags that each rank asks for; None = the row of each of its keys."""
    uses_N: torch.Tensor | None = None
    """int32: how many ids each is of; None = no policy asks."""

    @property
    def answers_R(self) -> list[int]:
        """How many rows go to each rank."""
        its = zip(self.count_R, self.parts_R, strict=True)
        return [count if parts is None else len(parts.size_S) for count, parts in its]

    @functools.cached_property
    def keys(self) -> Keys:
        """The unique ones. They are looked up in such a shape that their rows can be sent as an answer, behind heads
        of zeros."""
        return self.keys_behind(self.ranks.heads(rows_like(self.store, self.ranks)))

    def keys_behind(self, heads: int) -> Keys:
        """The unique ones, of which a lookup gives the rows that go to each rank, behind so many rows of zeros."""
        store, ranks, answers_R = self.store, self.ranks, self.answers_R
        loops, inverse_N = store.loops, store.loops.tensor(self._unique.unique.inverse_N)
        answers, bags, of_answer_N = sum(answers_R) + heads * ranks.size, None, inverse_N
        if any(parts is not None for parts in self.parts_R):
            of_answer_N, bags = self._key_of_ids, bags_of_sizes(self._sizes_behind(heads), store)
        elif heads:
            of_answer_N = inverse_N.new_full((answers,), -1)
            for at, its in zip(ranks.behind_heads(answers_R, heads), inverse_N.split(answers_R), strict=True):
                of_answer_N[at] = its
        uses_U = None
        if self.uses_N is not None:
            uses_U = np.zeros(len(self._unique.unique.id_U), np.int64)
            np.add.at(uses_U, inverse_N.cpu().numpy(), self.uses_N.numpy())
        unique = self._unique.unique._replace(inverse_N=loops.array(of_answer_N))  # type: ignore[attr-defined]  # a NamedTuple
        return Keys(torch.Size((answers,)), unique, bags, loops, uses_U)

    @functools.cached_property
    def _unique(self) -> Keys:
        return keys_of_ranks(self.store, self.table_N, self.id_N)

    @functools.cached_property
    def _key_of_ids(self) -> torch.Tensor:
        """The unique key of each id of parts, one rank's after another."""
        inverse_N = self.store.loops.tensor(self._unique.unique.inverse_N)
        its = zip(inverse_N.split(list(self.count_R)), self.parts_R, strict=True)
        return torch.cat(
            [keys if parts is None else keys.index_select(0, parts.key_N.to(keys.device)) for keys, parts in its]
        )

    def _sizes_behind(self, heads: int) -> torch.Tensor:
        """How many ids each part has, 0 where a head is: int64, on the CPU."""
        size_A = torch.zeros(sum(self.answers_R) + heads * self.ranks.size, dtype=torch.int64, device="cpu")
        for at, parts in zip(self.ranks.behind_heads(self.answers_R, heads), self.parts_R, strict=True):
            size_A[at] = 1 if parts is None else parts.size_S
        return size_A

    def is_as(self, other: object) -> TypeGuard["Asked"]:
        """Whether `other` has the same keys and parts. False for embeddings with a policy."""
        if not isinstance(other, Asked) or self.uses_N is not None:
            return False
        if self.sizes != other.sizes:
            return False
        return all(equal(*its) for its in zip(self.tensors, other.tensors, strict=True))

    @property
    def sizes(self) -> list[tuple[int, int, bool]]:
        """(keys, answers, whether it asks for parts of bags) of each rank."""
        its = zip(self.count_R, self.answers_R, self.parts_R, strict=True)
        return [(keys, answers, parts is not None) for keys, answers, parts in its]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The keys, and the parts of bags."""
        parts = [tensor for its in self.parts_R if its is not None for tensor in (its.key_N, its.size_S)]
        return [self.table_N, self.id_N, *parts]


def asked_by(
    store: EmbeddingStore, ranks: Ranks, received: Sequence[Received], counts_R: Sequence[Sequence[int]], *,
    uses: bool = False,
) -> Asked:  # fmt: skip
    """Request of all ranks to this one, from their first messages, `counts_R`, and their second ones, `received`.

    Args:
        uses: whether they have sent how many ids each key is of.
    """
    tables, ids, parts_R, uses_R = [], [], [], []
    for block, (keys, parts, ids_of_parts) in zip(received, counts_R, strict=True):
        ids.append(block.take(keys, torch.int64))
        tables.append(block.take(keys, torch.int32))
        its = None
        if parts >= 0:
            its = Parts(block.take(ids_of_parts, torch.int32), block.take(parts, torch.int32))
        parts_R.append(its)
        if uses:
            uses_R.append(block.take(keys, torch.int32))
    uses_N = torch.cat(uses_R) if uses else None
    return Asked(store, ranks, torch.cat(tables), torch.cat(ids), [keys for keys, *_ in counts_R], parts_R, uses_N)


@dataclass(frozen=True)
class Routed:
    """Unique keys of a lookup, what this rank asks others for, and what they ask it for."""

    keys: Keys
    """This rank's own."""
    asking: Asking
    asked: Asked


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
    if store.counts_uses:
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
        cut = cut_bags(sent, inverse_N, offset_P1, row_P, rank=ranks.rank, row_bytes=row_bytes, grad_bytes=grad_bytes)
    return keys, Asking(sent, cut, uses_R)


def shuffle_keys(
    ranks: Ranks, what: str, make: Callable[[], Keys], store: EmbeddingStore, sums_bags: bool = False
) -> Routed:
    """Send the unique keys of a lookup to their owners.

    Args:
        what: names the lookup: the same on all ranks.
        make: gives the keys; where it raises, all ranks do.
        store: the rows that this rank owns.
        sums_bags: as for `asking_for`.

    Raises:
        RankError: another rank has failed.
        What `make` raises.
    """
    made: list[tuple[Keys, Asking]] = []

    def blocks() -> list[list[torch.Tensor]]:
        keys, asking = asking_for(store, ranks, make(), sums_bags=sums_bags)
        made.append((keys, asking))
        return [[torch.tensor(asking.counts(r), device="cpu"), *asking.tensors(r)] for r in range(ranks.size)]

    received = ranks.exchange(what, blocks)
    counts_R = [block.take(COUNTS, torch.int64).tolist() for block in received]
    return Routed(*made[0], asked_by(store, ranks, received, counts_R, uses=store.counts_uses))


def keys_of_ranks(store: EmbeddingStore, table_N: torch.Tensor, id_N: torch.Tensor) -> Keys:
    """Keys that several ranks have sent, on the place of the store's rows; one may come from each."""
    loops = store.loops
    table_N, id_N = table_N.to(loops.device), id_N.to(loops.device)
    unique = loops.unique_keys(loops.array(table_N), loops.array(id_N), tables=_TABLES, padding_id=None, check=None)
    return Keys(id_N.shape, loops.counted(unique), None, loops)


def bags_of_sizes(size_P: torch.Tensor, store: EmbeddingStore) -> Bags:
    """Bags of so many ids each, one after another."""
    loops = store.loops
    offset_P1 = torch.cat([size_P.new_zeros(1), size_P.cumsum(0)])
    if not loops.waits:
        return Bags(loops.array(offset_P1))
    bag_N = torch.repeat_interleave(size_P.to(loops.device))
    return Bags(loops.array(offset_P1.to(loops.device)), loops.array(bag_N))


def rows_like(store: EmbeddingStore, ranks: Ranks) -> torch.Tensor:
    """A tensor of no rows, [0, D], with the device of the store's and the dtype in which they travel: their own, or
    `comm_dtype` if that is smaller."""
    dtype = min(DTYPES[store.format.dtype], ranks.comm_dtype, key=lambda dtype: dtype.itemsize)
    return torch.empty(0, store.format.dim, dtype=dtype, device=store.loops.device)


def shuffle_rows(
    ranks: Ranks, what: str, routed: Routed, read: Callable[[], torch.Tensor], store: EmbeddingStore
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights or sums that the owners send to this rank, [S, D], of the store's dtype; and the place in it of each key,
    int64 [U], or of each part.

    Args:
        what: as for `shuffle_keys`.
        read: gives what ranks ask this one for, see `Asked.keys`; where it raises, all ranks do.

    Raises:
        As `shuffle_keys`.
    """
    like = rows_like(store, ranks)
    asking, asked = routed.asking, routed.asked
    row_SD = ranks.answer(what, lambda: read().to(like.dtype), like, asked.answers_R, asking.comes_R)
    places = ranks.behind_heads(asking.comes_R, ranks.heads(like))
    slot_U = torch.cat([torch.arange(at.start, at.stop, device="cpu") for at in places])
    if asking.cut is None:
        slot_U = torch.empty_like(slot_U).scatter_(0, asking.sent.order_N, slot_U)
    return row_SD.to(DTYPES[store.format.dtype]), slot_U.to(like.device)


def look_up_on_ranks(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], Keys], *, inserts: bool = False,
    has_gradient: bool = False, source: ReadRows | None = None, sums_bags: bool = False, again: bool = False,
) -> Lease:  # fmt: skip
    """The rows of a lookup, from their owners. Every rank calls it.

    Args:
        store: the rows that this rank owns.
        name: of the embedding.
        make: gives the keys; where it raises, all ranks do.
        inserts: insert unknown keys; off, they read as their initial values.
        has_gradient: whether a gradient may come.
        source: what reads as the store, and is read where nothing is inserted; None = the store.
        sums_bags: as for `asking_for`.
        again: as for `acquire`.

    Raises:
        RankError: another rank has failed.
        StoreFullError: a tier is too small for the step, or capacity is reached; nothing is inserted on this rank.
        What `make` raises.
    """
    what = lookup_of(name, inserts, ranks, again)
    with whole_exchange():
        routed = shuffle_keys(ranks, what, make, store, sums_bags)
        lease = lease_on_ranks(ranks, what, store, routed, inserts=inserts, source=source, again=again)
    if not has_gradient:
        lease.unpin()
    return lease


def lookup_of(name: str, inserts: bool, ranks: Ranks, again: bool = False) -> str:
    """Name of a lookup on ranks, which contains all that must be the same on them."""
    once_more = " once more, in the backward pass," if again else ""
    return f"look up {name!r}{once_more} in {'training' if inserts else 'eval'} mode, comm_dtype {ranks.comm_dtype}"


def lease_on_ranks(
    ranks: Ranks, what: str, store: EmbeddingStore, routed: Routed, *, inserts: bool,
    source: ReadRows | None = None, prefetched: Prefetched | None = None, again: bool = False,
) -> Lease:  # fmt: skip
    """The rows of keys that their owners have, and pins on those that this rank was asked for.

    Args:
        what, store, inserts, source, again: as for `look_up_on_ranks`.
        prefetched: what `prefetch` gave for the keys that this rank is asked for.

    Raises:
        RankError, StoreFullError: as `look_up_on_ranks`.
    """
    owned: list[Lease] = []

    def read() -> torch.Tensor:
        asked = routed.asked.keys
        if not inserts:
            return peek(source or store, asked)
        owned.append(acquire(store, asked, prefetched, again=again))
        return gather(owned[0])

    row_SD, slot_U = shuffle_rows(ranks, f"bring rows to {what}", routed, read, store)
    array = store.loops.array
    remote = Remote(ranks, array(row_SD), array(slot_U), owned[0] if owned else None, routed.asking, routed.asked)
    return Lease(store, routed.keys, remote=remote)
