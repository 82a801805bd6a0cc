"""Gradients of rows, from the backward passes to the owners of the rows.

    reduce_to_owners([weight.grad, ...])      every rank; skips gradients of rows that no ranks own together

A rank that has looked rows up keeps their gradients until a step, a norm or an unscaling needs the gradients of all
ranks. So any number of backward passes costs one exchange. Gradients of a key are summed twice, both times in float32:
each rank that looked the key up sums in batch order, then the owner sums in the order of the ranks. The owner divides
by the number of ranks if gradients are averaged, as DistributedDataParallel does with dense gradients. Where owners sum
parts of bags (requests.py), they get the gradients of the bags and make both sums. So R ranks give the same numbers as
one process, up to the rounding of sums.

Gradients of a replicated table's rows go to every rank. All ranks sum them in the same order, so that the copies of a
row stay equal, bit for bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads, Summed, join_grads, nowhere, sum_over_passes
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.ops.requests import (
    COUNTS,
    KeysByRank,
    Parts,
    Requested,
    counts_of,
    keys_by_rank,
    requested_by,
    tensors_of,
)
from oneemb.graph.rank_messages import whole_exchange
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.graph.tape import version_of
from oneemb.kernels.arrays import RowsOfIds
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.kernels.owner import owner_of
from oneemb.storage.embedding_store import EmbeddingStore


class Pass(NamedTuple):
    """Gradient of one lookup from one backward pass."""

    lease: Lease
    grad: torch.Tensor | Summed
    """Gradient of the rows that the lookup gave, [N, D], or of its bags, [P, D]; or sums by unique key (`Summed`)."""
    version: int
    """Version of the gradient tensor at the end of its backward pass; 0 for `Summed`. The user may hold the tensor too,
    from a hook or as argument of `backward`."""

    def checked(self) -> torch.Tensor | Summed:
        """The gradient; RuntimeError if it was changed in place since it came."""
        grad = self.grad
        if isinstance(grad, torch.Tensor) and version_of(grad) != self.version:
            raise RuntimeError(
                "the gradient of rows was changed in place since its backward pass. That happens to a buffer that is"
                " passed to backward() several times, or a tensor that a hook keeps: pass or keep a clone() of it"
            )
        return grad


def grads_of_leases(passes: Sequence[Pass]) -> list[tuple[Lease, list[torch.Tensor | Summed]]]:
    """(lease, gradients of its passes) of each lookup, in the order in which lookups were made. Raises as `checked`."""
    if len(passes) == 1:
        return [(passes[0].lease, [passes[0].checked()])]
    grads_of: dict[Lease, list[torch.Tensor | Summed]] = {}
    for one in passes:
        grads_of.setdefault(one.lease, []).append(one.checked())
    return sorted(grads_of.items(), key=lambda item: item[0].order)


def reduce_passes(passes: Sequence[Pass], *, shared: bool = False) -> Sequence[RowGrads]:
    """For each lookup, the gradients of its unique keys, still to be summed. If `shared`, the lease keeps the result,
    since the gradients of its other tables need the same."""
    reduced = []
    for lease, grads in grads_of_leases(passes):
        reduced.append(lease.reduce_once(grads) if shared else lease.reduce(grads))
    return reduced


class GradOfRanks(Protocol):
    """The attributes of a `RowGrad` that this file uses."""

    store: EmbeddingStore
    passes: Sequence[Pass]
    ranks: AnyRanks
    at_owners: bool

    def own(self, owned: tuple[Lease, RowGrads] | None) -> None:
        """Hold the reduced gradient of this rank's rows, in place of the gradient of its own lookups."""


_Grad = TypeVar("_Grad", bound=GradOfRanks)


def by_ranks(row_grads: Iterable[_Grad]) -> list[tuple[Ranks, list[_Grad]]]:
    """Pairs (ranks, gradients), one for each process group. Gradients of rows that no ranks share are left out."""
    groups: dict[Any, tuple[Ranks, list[_Grad]]] = {}
    for grad in row_grads:
        if not grad.ranks.alone:
            groups.setdefault(grad.ranks.group, (grad.ranks, []))[1].append(grad)
    return list(groups.values())


def reduce_to_owners(row_grads: Iterable[GradOfRanks]) -> None:
    """Bring the gradients of rows that ranks own together to the owners of the rows.

    Every rank must call it with the gradients of the same embeddings in the same order. It exchanges messages unless
    all gradients are at the owners already.

    Raises:
        RankError: another rank has failed; nothing has changed.
        RuntimeError: a gradient was changed in place since its backward pass.
    """
    for ranks, group in by_ranks(row_grads):
        if not all(grad.at_owners for grad in group):
            stores, ranks_of_grads = (
                [grad.store for grad in group],
                [grad.ranks for grad in group if not grad.ranks.alone],
            )
            make, lookups = functools.partial(_all_left, group, ranks), [_single_lookup(grad) for grad in group]
            for grad, owned in zip(group, shuffle_grads(ranks, stores, ranks_of_grads, make, lookups), strict=True):
                grad.own(owned)


def _single_lookup(row_grad: GradOfRanks) -> Lease | None:
    """Lookup to which all backward passes of a gradient belong; None = they belong to several, or there is no pass."""
    leases = {one.lease for one in row_grad.passes}
    return leases.pop() if len(leases) == 1 else None


class Left(NamedTuple):
    """Gradients of the lookups of one embedding, sorted by the rank that gets them."""

    id_R: Sequence[torch.Tensor]
    """int64, for each rank: ids of the keys. A key may occur several times."""
    table_R: Sequence[torch.Tensor]
    """int32, for each rank: tables of the keys."""
    parts_R: Sequence[Parts | None]
    """For each rank: the parts of bags to which the gradients belong; None = each gradient belongs to a key."""
    grad_ND: torch.Tensor
    """float32: one gradient for each key, or for each part; gradients for rank 0 come first."""
    uses_R: Sequence[torch.Tensor] | None = None
    """int32, for each rank: number of ids that each key has in lookups in eval mode. The step counts these as uses of
    the key; None = no policy counts uses."""

    @property
    def rows_R(self) -> list[int]:
        """Number of gradients that go to each rank."""
        keys_and_parts = zip(self.id_R, self.parts_R, strict=True)
        return [len(ids) if parts is None else len(parts.size_S) for ids, parts in keys_and_parts]

    @classmethod
    def joined(cls, those: Sequence[Self]) -> Self:
        """One object with the gradients of all objects in `those`, in their order."""
        if len(those) == 1:
            return those[0]
        of_ranks, grads_R = [], zip(*(one.grad_ND.split(one.rows_R) for one in those), strict=True)
        uses_R = None
        if those[0].uses_R is not None:
            uses_R = [torch.cat(uses) for uses in zip(*(one.uses_R or () for one in those), strict=True)]
        for of_rank in zip(*(zip(*left[:3], strict=True) for left in those), strict=True):
            ids, tables, parts = zip(*of_rank, strict=True)
            begins = np.cumsum([0, *map(len, ids[:-1])]).tolist()
            explicit = [Parts.of_each(len(keys)) if one is None else one for one, keys in zip(parts, ids, strict=True)]
            key_N = torch.cat([begin + one.key_N for begin, one in zip(begins, explicit, strict=True)])
            joined = Parts(key_N.to(torch.int32), torch.cat([one.size_S for one in explicit]))
            of_ranks.append((torch.cat(ids), torch.cat(tables), joined))
        id_R, table_R, parts_R = zip(*of_ranks, strict=True)
        return cls(id_R, table_R, parts_R, torch.cat([grads for of_rank in grads_R for grads in of_rank]), uses_R)


def _all_left(row_grads: Sequence[GradOfRanks], ranks: Ranks) -> list[Left | None]:
    return [_left(grad, ranks) for grad in row_grads]


def _left(row_grad: GradOfRanks, ranks: Ranks) -> Left | None:
    """Gradients of this rank's lookups of one embedding; None = there are no gradients."""
    store, of_keys, left, leases = row_grad.store, [], [], []
    for lease, grads in grads_of_leases(row_grad.passes):
        cut = None if lease.remote is None else lease.remote.request.cut
        if lease.remote is None or cut is None:
            of_keys.append(lease.reduce(grads))
            leases.append(lease)
            continue
        sent, grad_PD = lease.remote.request.sent, sum_over_passes(cast("list[torch.Tensor]", grads))
        backend, grad_SD = store.backend, grad_PD.new_empty(len(cut.bag_S), grad_PD.shape[1])
        grads_of_parts = RowsOfIds(
            backend.array(grad_PD.contiguous()),
            backend.arange(len(grad_PD)),
            backend.array(cut.bag_S.to(backend.device)),
        )
        backend.gather(grads_of_parts, backend.array(grad_SD))
        if lease.pooling == "mean":
            grad_SD *= cut.scale_S.to(grad_SD.device)[:, None]
        uses_R = None
        if store.engine is not None:
            uses_R = lease.remote.request.uses_R or [torch.ones_like(tables) for tables in sent.table_R]
            if lease.remote.owned is not None:  # A lookup in training mode has counted its uses already.
                uses_R = [torch.zeros_like(uses) for uses in uses_R]
        left.append(Left(sent.id_R, sent.table_R, cut.parts_R, grad_SD, uses_R))
    summed = join_grads(of_keys)
    if summed is not None:
        backend = store.backend
        remote = leases[0].remote
        if len(leases) == 1 and remote is not None and not store.replicas:
            sent = remote.request.sent  # Gradients go to the ranks that sent the rows.
        else:
            table_U, id_U = (backend.tensor(array).cpu() for array in (summed.table_U, summed.id_U))
            sent = _by_trainer(store, ranks, table_U, id_U)
        grad_UD, uses_R = backend.tensor(summed.grad_UD), None
        grad_ND = grad_UD.index_select(0, sent.order_N.to(grad_UD.device))
        if store.engine is not None:
            uses_R = _uses_by_steps(store, leases, summed)[sent.order_N].split(sent.count_R)
        left.insert(0, Left(sent.id_R, sent.table_R, [None] * ranks.size, grad_ND, uses_R))
    return Left.joined(left) if left else None


def _uses_by_steps(store: EmbeddingStore, leases: Sequence[Lease], summed: RowGrads) -> torch.Tensor:
    """For each key of `summed`, the number of its ids in those lookups of `leases` that ran in eval mode: int32 [U]."""
    backend, uses_U = store.backend, np.zeros(len(summed.id_U), np.int64)
    evaluated = [lease for lease in leases if lease.remote is not None and lease.remote.owned is None]
    if evaluated:
        keys = [
            (summed.table_U, summed.id_U),
            *((lease.keys.unique.table_U, lease.keys.unique.id_U) for lease in evaluated),
        ]
        table_N, id_N = (
            backend.array(torch.cat([*map(backend.tensor, columns)])) for columns in zip(*keys, strict=True)
        )
        # The summed keys are distinct and come first, so they are the unique keys 0 to U-1.
        unique = backend.unique_keys(table_N, id_N, tables=TABLE_MAX + 1, padding_id=None, check=None)
        key_N = backend.tensor(unique.inverse_N).cpu().numpy()[len(uses_U) :].astype(np.int64)
        np.add.at(uses_U, key_N, np.concatenate([backend.uses_of(lease.keys.unique) for lease in evaluated]))
    return torch.from_numpy(uses_U.astype(np.int32))


def _by_trainer(store: EmbeddingStore, ranks: Ranks, table_U: torch.Tensor, id_U: torch.Tensor) -> KeysByRank:
    """Keys grouped by rank: each key once, for its owner, or once for every rank if its table is replicated."""
    if not store.replicas:
        return keys_by_rank(table_U, id_U, owner_of(table_U.numpy(), id_U.numpy(), ranks.size), ranks.size)
    replicated_U = store.replicas.are_of(table_U.numpy())
    of_one_rank, replicated = np.flatnonzero(~replicated_U), np.flatnonzero(replicated_U)
    # A: the keys that are not in replicated tables.
    owner_A = owner_of(table_U.numpy()[of_one_rank], id_U.numpy()[of_one_rank], ranks.size)
    key_N = np.concatenate([of_one_rank, np.tile(replicated, ranks.size)])
    rank_N = np.concatenate([owner_A, np.repeat(np.arange(ranks.size), len(replicated))])
    return keys_by_rank(table_U, id_U, rank_N, ranks.size, key_N)


def shuffle_grads(
    ranks: Ranks,
    stores: Sequence[EmbeddingStore],
    ranks_of_grads: Sequence[Ranks],
    make: Callable[[], Sequence[Left | None]],
    lookups: Sequence[Lease | None],
) -> list[tuple[Lease, RowGrads] | None]:
    """For each store, a lease on the rows that this rank owns or has copies of, and their gradients from all ranks,
    still to be summed; None = no rank has a gradient. The lease is pinned if the lookup in `lookups` has requested the
    same rows.

    Args:
        stores: for each embedding, the store with the rows that this rank owns.
        ranks_of_grads: for each embedding, `ranks` with the `comm_dtype` and the scale of its gradients.
        make: returns for each embedding the gradients of the rows that this rank has looked up; None = no gradients.
        lookups: for each embedding, the lookup to which all its gradients belong; None = several lookups, or none.
    """
    sent: list[Left | None] = []

    def blocks() -> list[list[torch.Tensor]]:
        sent.extend(make())
        return [_block(sent, r) for r in range(ranks.size)]

    brought: list[tuple[Requested, torch.Tensor] | None] = []
    with whole_exchange():
        what = ", ".join(f"the {own.gradients} of {own.name} in {own.comm_dtype}" for own in ranks_of_grads)
        received = ranks.exchange(f"bring gradients to their owners for {what}", blocks)
        counts_RE = [block.take(COUNTS * len(stores), torch.int64).view(-1, COUNTS).tolist() for block in received]
        for e, (store, own, left) in enumerate(zip(stores, ranks_of_grads, sent, strict=True)):
            counts_R = [counts[e] for counts in counts_RE]
            if all(keys == _NONE for keys, *_ in counts_R):
                brought.append(None)
                continue
            counts_R = [(max(0, keys), *more) for keys, *more in counts_R]
            requested = requested_by(store, ranks, received, counts_R, uses=store.engine is not None)
            if left is None:
                rows_R, grad_ND = (
                    [0] * ranks.size,
                    torch.empty(0, store.format.dim, device=store.backend.device, dtype=torch.float32),
                )
            else:
                rows_R, grad_ND = left.rows_R, left.grad_ND
            brought.append((requested, ranks.swap(grad_ND.to(own.comm_dtype), rows_R, requested.answers_R)))
        # This comes after the last message: a rank that has no memory for it leaves no other rank waiting.
        return [
            None if one is None else _owned(*one, own.grad_scale, lookup)
            for own, one, lookup in zip(ranks_of_grads, brought, lookups, strict=True)
        ]


_NONE = -1  # number of keys in a message where the rank has no gradients of an embedding


def _block(sent: Sequence[Left | None], r: int) -> list[torch.Tensor]:
    """Message to rank `r`: the counts of each embedding, then the keys."""
    counts: list[int] = []
    keys: list[torch.Tensor] = []
    for left in sent:
        if left is None:
            counts += (_NONE, -1, 0)
        else:
            counts += counts_of(left.id_R[r], left.parts_R[r])
            keys += tensors_of(left.id_R[r], left.table_R[r], left.parts_R[r])
            keys += [] if left.uses_R is None else [left.uses_R[r]]
    return [torch.tensor(counts, device="cpu"), *keys]


def _owned(requested: Requested, grad_ND: torch.Tensor, scale: float, lookup: Lease | None) -> tuple[Lease, RowGrads]:
    pinned, remote = None, None if lookup is None else lookup.remote
    if lookup is not None and remote is not None and requested.is_as(remote.requested):
        requested = remote.requested  # Its unique keys are known.
        if remote.owned is not None and remote.owned.is_pinned:
            pinned, lookup.remote = remote.owned, dataclasses.replace(remote, owned=None)  # The gradient owns the pins.
    keys, store = requested.keys_behind(0), requested.store
    backend = store.backend
    grad_ND = grad_ND.float().to(backend.device)
    if scale != 1.0:  # Received rows are fewer than terms of sums. NumPy's product may raise on one rank: np.seterr.
        grad_ND *= scale
    segments = backend.segments(keys.unique, keys.bags, backend.array(grad_ND), None)
    table_U, id_U = keys.unique.table_U, keys.unique.id_U
    if pinned is None or pinned.slot_U is None:
        return Lease(store, keys), RowGrads(store, -1, table_U, id_U, nowhere(backend, len(id_U)), segments=segments)
    return pinned, RowGrads(store, pinned.generation, table_U, id_U, pinned.slot_U, segments=segments)
