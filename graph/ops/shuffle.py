"""Lookups and gradients between ranks: each row lives with its owner, and each rank looks up ids of its own.

    lease = look_up_on_ranks(ranks, store, make_keys, ...)
        routed = shuffle_keys(ranks, ..., make_keys, store)     unique keys to their owners
        owned  = acquire(store, routed.asked)                   on the owner: the rows that all ranks ask it for
        rows   = shuffle_rows(ranks, ..., routed, owned)        their weights, back to those who asked
    rows = with_grad(gather(lease), lease, weight)              as on one rank

    shuffle_grads(ranks, stores, ...)                           before a step: gradients of rows to their owners

Every rank runs these in the same order, whatever its batch holds. `oneemb.kernels.owner` says who owns a key. Gradients
wait with the rank that looked the rows up until something needs them whole: a step, a norm, an unscaling. So any number
of backward passes costs one exchange.

Rows and gradients travel in `comm_dtype`. Those that a rank has itself are rounded as those of others are, so that no
number depends on who owns a key. Gradients of a key are summed twice: in batch order by each rank that looked it up,
then in the order of the ranks by its owner, which takes their mean, as DistributedDataParallel does of dense gradients,
or sum; both in float32. So the numbers of R ranks are those of one up to the rounding of that sum.

Every rank has all rows of a replicated table: it asks itself for them, and gets the gradients of all ranks, which it
sums in the same order as the others do. So its copy stays equal to theirs, bit for bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads, nowhere
from oneemb.graph.ops.lookup import DTYPES, Keys, Lease, ReadRows, Remote, acquire, gather, peek
from oneemb.graph.ops.op import LOOKUP, UPDATE, Op
from oneemb.graph.ranks import Ranks, whole_exchange
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = [
    "Asked", "Routed", "Sums", "by_owner", "keys_of_ranks", "lease_on_ranks", "look_up_on_ranks", "lookup_of",
    "shuffle_grads", "shuffle_keys", "shuffle_rows",
]  # fmt: skip

# More than any embedding has: what comes from other ranks, they have checked.
_TABLES = 1 << 31


@dataclass(frozen=True)
class Routed:
    """Unique keys of a lookup, and those that ranks ask this one for."""

    keys: Keys
    """This rank's own."""
    order_U: torch.Tensor
    """int64 [U]: its unique keys, those that it asks rank 0 for first."""
    sent_R: list[int]
    """Keys that it asks each rank for."""
    asked: "Asked"


@dataclass(frozen=True)
class Asked:
    """Keys that ranks ask this one for, one rank's after another."""

    store: EmbeddingStore
    ranks: Ranks
    table_N: torch.Tensor
    """int32"""
    id_N: torch.Tensor
    """int64"""
    count_R: list[int]
    """How many are each rank's."""

    @functools.cached_property
    def keys(self) -> Keys:
        """The unique ones. They are looked up in such a shape that their rows can be sent as an answer, behind heads
        of zeros."""
        store, ranks = self.store, self.ranks
        heads = ranks.heads(rows_like(store, ranks))
        keys = keys_of_ranks(store, self.table_N, self.id_N)
        loops, inverse_N = store.loops, store.loops.tensor(keys.unique.inverse_N)
        answer_N = inverse_N.new_full((len(inverse_N) + heads * ranks.size,), -1)
        answer_N[ranks.behind_heads(self.count_R, heads).to(loops.device)] = inverse_N
        unique = keys.unique._replace(inverse_N=loops.array(answer_N))  # type: ignore[attr-defined]  # a NamedTuple
        return dataclasses.replace(keys, shape=answer_N.shape, unique=unique)


@Op(LOOKUP, takes=("ranks",))
def shuffle_keys(ranks: Ranks, what: str, make: Callable[[], Keys], store: EmbeddingStore) -> Routed:
    """Send the unique keys of a lookup to their owners.

    Args:
        what: names the lookup: the same on all ranks.
        make: gives the keys; where it raises, all ranks do.
        store: the rows that this rank owns.

    Raises:
        RankError: another rank has failed.
        What `make` raises.
    """
    made: list[tuple[Keys, torch.Tensor, list[int]]] = []

    def blocks() -> list[list[torch.Tensor]]:
        keys = make()
        sent = by_owner(store, ranks, keys)
        made.append((keys, sent.order_N, sent.count_R))
        return [[torch.tensor([len(ids)]), ids, tables] for ids, tables in zip(sent.id_R, sent.table_R, strict=True)]

    received = ranks.exchange(what, blocks)
    count_R = [int(block.take(1, torch.int64)) for block in received]
    id_N = torch.cat([block.take(count, torch.int64) for block, count in zip(received, count_R, strict=True)])
    table_N = torch.cat([block.take(count, torch.int32) for block, count in zip(received, count_R, strict=True)])
    return Routed(*made[0], Asked(store, ranks, table_N, id_N, count_R))


class KeysByRank(NamedTuple):
    """Keys by the ranks that they go to."""

    order_N: torch.Tensor
    """int64: which of the keys these are, those that go to rank 0 first."""
    count_R: list[int]
    id_R: Sequence[torch.Tensor]
    table_R: Sequence[torch.Tensor]


def by_owner(store: EmbeddingStore, ranks: Ranks, keys: Keys) -> KeysByRank:
    """The unique ones by the ranks that are asked for their rows: of replicated tables this one, else their owner."""
    table_U, id_U = (store.loops.tensor(array).cpu() for array in (keys.unique.table_U, keys.unique.id_U))
    owner_U = owner_of(table_U.numpy(), id_U.numpy(), ranks.size)
    if store.replicas:
        owner_U[store.replicas.are_of(table_U.numpy())] = ranks.rank
    return _by_rank(table_U, id_U, owner_U, ranks.size)


def _by_trainer(store: EmbeddingStore, ranks: Ranks, table_U: torch.Tensor, id_U: torch.Tensor) -> KeysByRank:
    """Keys by the ranks that train their rows: of replicated tables every one, else their owner."""
    if not store.replicas:
        return _by_rank(table_U, id_U, owner_of(table_U.numpy(), id_U.numpy(), ranks.size), ranks.size)
    replicated_U = store.replicas.are_of(table_U.numpy())
    alone, replicated = np.flatnonzero(~replicated_U), np.flatnonzero(replicated_U)
    owner_A = owner_of(table_U.numpy()[alone], id_U.numpy()[alone], ranks.size)
    key_N = np.concatenate([alone, np.tile(replicated, ranks.size)])
    rank_N = np.concatenate([owner_A, np.repeat(np.arange(ranks.size), len(replicated))])
    return _by_rank(table_U, id_U, rank_N, ranks.size, key_N)


def _by_rank(
    table_U: torch.Tensor, id_U: torch.Tensor, rank_N: np.ndarray, ranks: int, key_N: np.ndarray | None = None
) -> KeysByRank:
    """Keys by the rank that each goes to; `key_N` says which they are, None = all in their order."""
    # A stable sort of 16 bits goes through them once.
    sorted_N = np.argsort(rank_N.astype(np.uint16) if ranks <= 1 << 16 else rank_N, kind="stable")
    order_N = torch.from_numpy(sorted_N if key_N is None else key_N[sorted_N])
    count_R = np.bincount(rank_N, minlength=ranks).tolist()
    return KeysByRank(order_N, count_R, id_U[order_N].split(count_R), table_U[order_N].split(count_R))


def keys_of_ranks(store: EmbeddingStore, table_N: torch.Tensor, id_N: torch.Tensor) -> Keys:
    """Keys that several ranks have sent, on the place of the store's rows; one may come from each."""
    loops = store.loops
    table_N, id_N = table_N.to(loops.device), id_N.to(loops.device)
    unique = loops.unique_keys(loops.array(table_N), loops.array(id_N), tables=_TABLES, padding_id=None, check=None)
    return Keys(id_N.shape, loops.counted(unique), None, loops)


def rows_like(store: EmbeddingStore, ranks: Ranks) -> torch.Tensor:
    """A tensor of no rows, [0, D], with the device of the store's and the dtype in which they travel: their own, or
    `comm_dtype` if that is smaller."""
    dtype = min(DTYPES[store.format.dtype], ranks.comm_dtype, key=lambda dtype: dtype.itemsize)
    return torch.empty(0, store.format.dim, dtype=dtype, device=store.loops.device)


@Op(LOOKUP, takes=("ranks",))
def shuffle_rows(
    ranks: Ranks, what: str, routed: Routed, read: Callable[[], torch.Tensor], store: EmbeddingStore
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of this rank's unique keys from their owners: [S, D], of the store's dtype, and where those of each
    key are in it, int64 [U].

    Args:
        what: as for `shuffle_keys`.
        read: gives the weights of the keys that ranks ask this one for, see `Asked.keys`; where it raises, all ranks
            do.

    Raises:
        As `shuffle_keys`.
    """
    like = rows_like(store, ranks)
    row_SD = ranks.answer(what, lambda: read().to(like.dtype), like, routed.asked.count_R, routed.sent_R)
    slot_U = torch.empty(len(routed.order_U), dtype=torch.int64)
    slot_U[routed.order_U] = ranks.behind_heads(routed.sent_R, ranks.heads(like))
    return row_SD.to(DTYPES[store.format.dtype]), slot_U.to(like.device)


def look_up_on_ranks(
    ranks: Ranks, store: EmbeddingStore, name: str, make: Callable[[], Keys], *, inserts: bool = False,
    has_gradient: bool = False, source: ReadRows | None = None,
) -> Lease:  # fmt: skip
    """The rows of a lookup, from their owners. Every rank calls it.

    Args:
        store: the rows that this rank owns.
        name: of the embedding.
        make: gives the keys; where it raises, all ranks do.
        inserts: insert unknown keys; off, they read as their initial values.
        has_gradient: whether a gradient may come.
        source: what reads as the store, and is read where nothing is inserted; None = the store.

    Raises:
        RankError: another rank has failed.
        StoreFullError: a tier is too small for the step, or capacity is reached; nothing is inserted on this rank.
        What `make` raises.
    """
    what = lookup_of(name, inserts, ranks)
    with whole_exchange():
        routed = shuffle_keys(ranks, what, make, store)
        lease = lease_on_ranks(ranks, what, store, routed, inserts=inserts, source=source)
    if not has_gradient:
        lease.unpin()
    return lease


def lookup_of(name: str, inserts: bool, ranks: Ranks) -> str:
    """What ranks do that look up an embedding of this name; what must be the same on all is in it."""
    return f"look up {name!r} in {'training' if inserts else 'eval'} mode, comm_dtype {ranks.comm_dtype}"


def lease_on_ranks(
    ranks: Ranks, what: str, store: EmbeddingStore, routed: Routed, *, inserts: bool,
    source: ReadRows | None = None, prefetched: Prefetched | None = None,
) -> Lease:  # fmt: skip
    """The rows of keys that their owners have, and pins on those that this rank was asked for.

    Args:
        what, store, inserts, source: as for `look_up_on_ranks`.
        prefetched: what `prefetch` gave for the keys that this rank is asked for.

    Raises:
        RankError, StoreFullError: as `look_up_on_ranks`.
    """
    owned: list[Lease] = []

    def read() -> torch.Tensor:
        asked = routed.asked.keys
        if not inserts:
            return peek(source or store, asked)
        owned.append(acquire(store, asked, prefetched))
        return gather(owned[0])

    row_SD, slot_U = shuffle_rows(ranks, f"rows to {what}", routed, read, store)
    array = store.loops.array
    return Lease(store, routed.keys, remote=Remote(ranks, array(row_SD), array(slot_U), owned[0] if owned else None))


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tables, int32 [U], ids, int64 [U], and the gradients of these rows, float32 [U, D]."""


@Op(UPDATE)
def shuffle_grads(
    ranks: Ranks,
    stores: Sequence[EmbeddingStore],
    scales: Sequence[float],
    make: Callable[[], Sequence[Sums | None]],
    names: Sequence[str] = (),
) -> list[tuple[Lease, RowGrads] | None]:
    """The gradients of the rows that this rank owns or has copies of, to be summed, from those of all ranks; with a
    lease on them that is not pinned yet. None for a store that has a gradient on no rank.

    Args:
        stores: the rows that this rank owns, of each embedding.
        scales: by what its gradients are multiplied.
        make: gives for each embedding the gradients of the rows that this rank has looked up; None = there are none.
        names: of the embeddings.

    Raises:
        RankError: another rank has failed.
        What `make` raises.
    """
    sent_E: list[tuple[torch.Tensor, list[int]]] = []

    def blocks() -> list[list[torch.Tensor]]:
        blocks_R: list[list[torch.Tensor]] = [[] for _ in range(ranks.size)]
        count_RE: list[list[int]] = [[] for _ in range(ranks.size)]
        for store, sums in zip(stores, make(), strict=True):
            if sums is None:
                sent_E.append((torch.empty(0, store.format.dim, dtype=ranks.comm_dtype), [0] * ranks.size))
                for counts in count_RE:
                    counts.append(_NONE)
                continue
            table_U, id_U, grad_UD = sums
            sent = _by_trainer(store, ranks, table_U, id_U)
            sent_E.append((grad_UD[sent.order_N.to(grad_UD.device)].to(ranks.comm_dtype), sent.count_R))
            for block, counts, ids, tables in zip(blocks_R, count_RE, sent.id_R, sent.table_R, strict=True):
                counts.append(len(ids))
                block += [ids, tables]
        return [[torch.tensor(counts), *block] for counts, block in zip(count_RE, blocks_R, strict=True)]

    brought: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = []
    with whole_exchange():
        what = f"bring gradients of {', '.join(names)}, in {ranks.comm_dtype}, to their owners for the"
        received = ranks.exchange(f"{what} {ranks.gradients}", blocks)
        count_RE = [block.take(len(stores), torch.int64).tolist() for block in received]
        for e, (grad_ND, sent_R) in enumerate(sent_E):
            count_R = [counts[e] for counts in count_RE]
            if all(count == _NONE for count in count_R):
                brought.append(None)
                continue
            keys = [
                (block.take(count, torch.int64), block.take(count, torch.int32))
                for block, count in zip(received, count_R, strict=True)
                if count != _NONE
            ]
            id_N, table_N = (torch.cat(column) for column in zip(*keys, strict=True))
            grad_ND = ranks.swap(grad_ND, sent_R, [max(0, count) for count in count_R])
            brought.append((id_N, table_N, grad_ND))
        # After the last message: a rank that fails at it, for want of memory, leaves none waiting in one.
        return [
            None if its is None else _owned(store, scale, *its)
            for store, scale, its in zip(stores, scales, brought, strict=True)
        ]


_NONE = -1  # in place of a count: the rank has no gradients of an embedding


def _owned(
    store: EmbeddingStore, scale: float, id_N: torch.Tensor, table_N: torch.Tensor, grad_ND: torch.Tensor
) -> tuple[Lease, RowGrads]:
    keys, loops = keys_of_ranks(store, table_N, id_N), store.loops
    scale_N = None if scale == 1.0 else loops.array(torch.full((len(id_N),), scale, device=loops.device))
    segments = loops.segments(keys.unique, None, loops.array(grad_ND.float().to(loops.device)), scale_N)
    lease = Lease(store, keys)
    table_U, id_U = keys.unique.table_U, keys.unique.id_U
    return lease, RowGrads(store, -1, table_U, id_U, nowhere(loops, len(id_U)), segments=segments)
