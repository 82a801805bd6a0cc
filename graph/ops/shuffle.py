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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from oneemb.graph.ops.asking import COUNTS, Asked, Asking, asked_by, cut_if_fewer_bytes, keys_by_rank, rows_like
from oneemb.graph.ops.keys import DTYPES, Keys
from oneemb.graph.ops.lookup import Lease, Remote, acquire, gather
from oneemb.graph.ops.reading import ReadRows, peek
from oneemb.graph.rank_errors import whole_exchange
from oneemb.graph.ranks import Ranks
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.tiers.hot_rows import Prefetched

__all__ = [
    "Routed", "asking_for", "lease_on_ranks", "look_up_on_ranks", "lookup_of", "shuffle_keys", "shuffle_rows",
]  # fmt: skip


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
    return Routed(*made[0], asked_by(store, ranks, received, counts_R, uses=store.policy.counts_uses))


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
