"""Lookups of several embeddings as one op: `unique_keys` and `gather` for merged stores.

    keys  = unique_merged_keys([(first_table, ids, table_ids, num_tables, offsets), ...], key_type, padding_idx)
    check_merged_pooling(keys, [(p, per_sample_weights, pooling), ...])
    lease = acquire(merged_store, keys)
    rows  = gather_merged(lease, [(p, weight, per_sample_weights, pooling), ...])      a tensor for each

Lookup p is of a store of its own, and lookups are given in the order of the stores in the merged one. Then the order of
first occurrence puts the keys of a store side by side, and each key occurs in one lookup only: its gradients are summed
in the order in which a lookup of its own would have summed them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from oneemb.graph.ops import batch_ids
from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.lookup import (
    DTYPES,
    REPLACED,
    Keys,
    Lease,
    check_pooling,
    measure_gather,
    measure_unique_keys,
    next_order,
)
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.kernels import unique_keys as kernel
from oneemb.kernels.arrays import Bags, RowsOfIds
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.reduce_grads import Segments
from oneemb.kernels.threads import Threads
from oneemb.storage.merged_store import MergedPrefetched, MergedStore
from oneemb.storage.row_store import StorageError
from oneemb.storage.turns import whole

__all__ = ["MergedKeys", "MergedLease", "check_merged_pooling", "gather_merged", "unique_merged_keys"]

_LOOPS = HostLoops(Threads(1))

Lookup = tuple[int, torch.Tensor, torch.Tensor | None, int, torch.Tensor | None]


@dataclass(frozen=True)
class KeysPart:
    """One lookup's share of merged keys."""

    first_table: int
    ids: slice
    """Its ids among those of all lookups."""
    keys: Keys
    """Its shape, bags and `inverse_N`; the unique keys are those of all lookups."""


@dataclass(frozen=True)
class MergedKeys:
    """The unique keys of several lookups."""

    unique: kernel.UniqueKeys
    parts: list[KeysPart]
    begin_P1: np.ndarray
    """int64 [P + 1]: lookup p has the unique keys from begin_P1[p] to begin_P1[p + 1] - 1"""

    loops: HostLoops = _LOOPS

    def acquire(self, store: MergedStore, prefetched: MergedPrefetched | None) -> "MergedLease":
        """See `oneemb.graph.ops.acquire`."""
        with whole(member.turns for member in store.members):  # so that what is pinned has an owner
            slot_U, slots = store.acquire(self.unique, self._begins(store), prefetched)
            member_P = np.searchsorted(store.first_table_M1, self._first_tables())
            leases = [
                Lease(store.members[m], part.keys, slots[m])
                for m, part in zip(member_P.tolist(), self.parts, strict=True)
            ]
            return MergedLease(store, self, slot_U, store.generation, leases)

    def prefetch(self, store: MergedStore) -> MergedPrefetched:
        """See `oneemb.graph.ops.prefetch`."""
        return store.prefetch(self.unique, self._begins(store))

    def _begins(self, store: MergedStore) -> np.ndarray:
        return store.begins(self._first_tables(), self.begin_P1)

    def _first_tables(self) -> np.ndarray:
        return np.array([part.first_table for part in self.parts], np.int32)


@dataclass(eq=False)
class MergedLease:
    """The rows of several lookups. Each has a lease of its own, which holds its pins and its gradients.

    Once released it holds no array: a loss that somebody keeps refers to it.
    """

    store: MergedStore
    keys: MergedKeys
    slot_U: np.ndarray
    """Merged slots."""
    generation: int
    leases: list[Lease]
    order: int = field(default_factory=next_order)

    @property
    def has_grads(self) -> bool:
        """Whether any lookup got a gradient."""
        return any(lease.grads for lease in self.leases)

    @property
    def released(self) -> bool:
        return all(lease.released for lease in self.leases)

    def release(self) -> None:
        """Unpin the rows and drop the gradients."""
        for lease in self.leases:
            lease.release()
        self.leases, self.keys, self.slot_U = [], _NO_KEYS, _NO_SLOTS

    def reduce(self) -> RowGrads:
        """The gradients that have come, those of each key to be summed; lookups that got none are left out."""
        self.check_current()
        unique, parts = self.keys.unique, list(zip(self.keys.parts, self.leases, strict=True))
        got = [lease.sum_passes(lease.grads) for lease in self.leases if lease.grads]
        # Where one was summed, and is float32, all are.
        grad_NX = _LOOPS.array(got[0] if len(got) == 1 else torch.cat(got))
        inverse_N, row_N, scale_N = unique.inverse_N, None, None
        dead = [part for part, lease in parts if not lease.grads]
        if dead:
            inverse_N = inverse_N.copy()
            for part in dead:
                inverse_N[part.ids] = -1
        if dead or any(lease.grad_bags is not None for lease in self.leases):
            row_N = _rows_of_ids([(part.ids, lease.grad_bags) for part, lease in parts if lease.grads], len(inverse_N))
        if any(lease.scale_N is not None for lease in self.leases):
            scale_N = np.ones(len(inverse_N), np.float32)
            for part, lease in parts:
                if lease.scale_N is not None:
                    scale_N[part.ids] = lease.scale_N
        order_N, begin_U1, scale_N = kernel.occurrences(inverse_N, len(unique.id_U), row_N, scale_N)
        table_U, id_U, slot_U = unique.table_U, unique.id_U, self.slot_U
        if dead:
            begin_P1 = self.keys.begin_P1
            u = np.concatenate(
                [np.arange(begin_P1[p], begin_P1[p + 1]) for p, (_, lease) in enumerate(parts) if lease.grads]
            )
            table_U, id_U, slot_U = table_U[u], id_U[u], slot_U[u]
            begin_U1 = np.append(begin_U1[u], begin_U1[-1])  # keys between them occur nowhere now
        return RowGrads(
            self.store, self.generation, table_U, id_U, slot_U,
            segments=Segments(grad_NX, order_N, begin_U1, scale_N),
            stores=tuple(lease.store for lease in self.leases if lease.grads),
        )  # fmt: skip

    def check_current(self) -> None:
        """Raise StorageError if the rows of a member have been replaced."""
        if self.generation != self.store.generation:
            raise StorageError(REPLACED)


_NO_SLOTS = np.empty(0, np.int64)
_NO_KEYS = MergedKeys(_LOOPS.distinct_keys(np.empty(0, np.int32), _NO_SLOTS), [], np.zeros(1, np.int64))


def _rows_of_ids(parts: Sequence[tuple[slice, Bags | None]], ids: int) -> np.ndarray:
    """The row of each id among the gradients of these lookups, of ids or of bags, one after another: int32 [N]."""
    row_N = np.empty(ids, np.int32)
    begin = 0
    for own, bags in parts:
        if bags is None:
            end = begin + own.stop - own.start
            row_N[own] = np.arange(begin, end, dtype=np.int32)
        else:
            end = begin + len(bags.offset_P1) - 1
            np.add(bags.bag_N, np.int32(begin), out=row_N[own])
        begin = end
    return row_N


@Op(LOOKUP | PREPARE, gives="keys", pure=True, measure=measure_unique_keys)
def unique_merged_keys(lookups: Sequence[Lookup], key_type: torch.dtype, padding_idx: int | None) -> MergedKeys:
    """The unique (merged table, id) pairs of several lookups, lookup by lookup in order of first occurrence.

    Args:
        lookups: the merged table at which each one's tables begin, growing; and what `unique_keys` is given for it.

    Raises:
        TypeError, ValueError: as `unique_keys`, of any lookup.
    """
    batches = []
    for lookup in lookups:
        try:
            batches.append(_batch_of(*lookup, key_type))
        except (TypeError, ValueError) as error:
            error.first_table = lookup[0]  # type: ignore[union-attr]  # says which line of `build` it is of
            raise
    end_P = list(itertools.accumulate(len(batch.id_N) for batch in batches))
    begin_P = [0, *end_P[:-1]]
    table_N = np.empty(end_P[-1], np.int32)
    for (first_table, _, _, num_tables, _), batch, begin, end in zip(lookups, batches, begin_P, end_P, strict=True):
        if batch.table_N is not None:
            np.add(batch.table_N, np.int32(first_table), out=table_N[begin:end])
        elif num_tables == 1:
            table_N[begin:end] = first_table
        else:
            table_N[begin:end].reshape(-1, num_tables)[:] = np.arange(first_table, first_table + num_tables)
    id_N = torch.cat([batch.id_N for batch in batches]).numpy()
    unique = kernel.unique_keys(table_N, id_N, padding_id=padding_idx)
    assert unique.head_U is not None
    begin_P1 = np.append(np.searchsorted(unique.head_U, begin_P), len(unique.head_U))
    parts = []
    for lookup, batch, begin, end in zip(lookups, batches, begin_P, end_P, strict=True):
        own = unique._replace(inverse_N=unique.inverse_N[begin:end])
        parts.append(KeysPart(lookup[0], slice(begin, end), Keys(batch.shape, own, batch.bags, _LOOPS)))
    return MergedKeys(unique, parts, begin_P1)


class _Batch(NamedTuple):
    """The ids of one lookup."""

    id_N: torch.Tensor
    table_N: np.ndarray | None
    """None where tables are the columns of `shape`."""
    shape: torch.Size
    bags: Bags | None


def _batch_of(
    first_table: int,
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    offsets: torch.Tensor | None,
    key_type: torch.dtype,
) -> _Batch:
    if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
        raise ValueError(f"ids must be on the CPU, where the embedding is, got {ids.device}; call ids.cpu()")
    if offsets is not None:
        shape, offset_P1, table_P, check = batch_ids.bags_of_ids(ids, table_ids, num_tables, key_type, offsets, _LOOPS)
        check()
        bags = Bags(offset_P1.numpy())
        table_N = bags.bag_N % np.int32(num_tables) if table_P is None else table_P.numpy()[bags.bag_N]
        return _Batch(ids.detach(), table_N, shape, bags)
    batch_ids.check_ids(ids, table_ids, num_tables, key_type)
    tables = None
    if table_ids is not None:
        batch_ids.check_tables(table_ids if ids.numel() else table_ids.reshape(-1)[:0], num_tables)
        tables = table_ids.detach().to(torch.int32).expand(ids.shape).reshape(-1).numpy()
    return _Batch(ids.detach().reshape(-1), tables, ids.shape, None)


@Op(LOOKUP, takes=("keys",), checks=True)
def check_merged_pooling(keys: MergedKeys, pooled: Sequence[tuple[int, torch.Tensor | None, str]]) -> None:
    """`check_pooling` of lookups p.

    Raises:
        TypeError, ValueError: as `check_pooling`.
    """
    for p, per_sample_weights, pooling in pooled:
        part = keys.parts[p]
        try:
            check_pooling(part.keys, per_sample_weights, pooling)
        except (TypeError, ValueError) as error:
            error.first_table = part.first_table  # type: ignore[union-attr]  # as above
            raise


class _GatherMerged(torch.autograd.Function):
    """Reads rows forward; backward leaves the gradients of each lookup with its lease."""

    @staticmethod
    def forward(
        ctx: Any, lease: MergedLease, read: tuple[int, ...], *weights_and_scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.lease, ctx.read = lease, read
        ctx.set_materialize_grads(False)
        out = _read(lease, read)
        needs = ctx.needs_input_grad[2:]
        constant = [rows for i, rows in enumerate(out) if not needs[i] and not needs[len(out) + i]]
        ctx.mark_non_differentiable(*constant)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        lease, read, needs = ctx.lease, ctx.read, ctx.needs_input_grad[2:]
        if lease.released:
            raise RuntimeError(
                "a gradient reached a lookup after its step, whose update could not use it; call backward on every loss"
                " in build"
            )
        scale_grads: list[torch.Tensor | None] = [None] * len(read)
        for i, (p, grad) in enumerate(zip(read, grads, strict=True)):
            if grad is None:
                continue
            lease.leases[p].check_held()
            grad_ND = grad.reshape(-1, grad.shape[-1])
            if needs[i]:
                lease.leases[p].grads.append(grad_ND)
            if needs[len(read) + i]:
                scale_grads[i] = _grad_of_scales(lease, p, grad_ND.contiguous())
        return None, None, *([None] * len(read)), *scale_grads


def _read(lease: MergedLease, read: tuple[int, ...]) -> list[torch.Tensor]:
    """The weights of each id, or bag, of the lookups p: rows of one array, as tensors that are no views of another."""
    store, keys = lease.store, lease.keys
    dim, dtype, loops = store.format.dim, DTYPES[store.format.dtype], store.loops
    weight_SX, inverse_N = store.weight_SX, keys.unique.inverse_N
    parts = [keys.parts[p] for p in read]
    end_P = list(itertools.accumulate(part.keys.shape.numel() for part in parts))
    begin_P = [0, *end_P[:-1]]
    all_ND = torch.empty(end_P[-1], dim, dtype=dtype)
    row_ND = loops.array(all_ND)
    first = 0
    leases = [lease.leases[p] for p in read]
    # Lookups that lie side by side and are read in the same way are one launch.
    for (_, pooled, takes_max), group in itertools.groupby(
        range(len(parts)), lambda i: (read[i] - i, parts[i].keys.bags is not None, leases[i].pooling == "max")
    ):
        adjacent = list(group)
        end = end_P[adjacent[-1]]
        ids = slice(parts[adjacent[0]].ids.start, parts[adjacent[-1]].ids.stop)
        rows = RowsOfIds(weight_SX, lease.slot_U, inverse_N[ids])
        if not pooled:
            loops.gather(rows, row_ND[first:end])
        else:
            offset_P1, scale_N = _pooling([parts[i] for i in adjacent], [leases[i] for i in adjacent])
            if takes_max:
                argmax_PD = np.empty((end - first, dim), np.int32)
                loops.pool_max(rows, offset_P1, row_ND[first:end], argmax_PD)
                for i in adjacent:
                    leases[i].argmax_PD = argmax_PD[begin_P[i] - first : end_P[i] - first]
            else:
                loops.pool(rows, offset_P1, scale_N, row_ND[first:end])
        first = end
    return [
        torch.empty(0, dtype=dtype).set_(all_ND.untyped_storage(), begin * dim, (*part.keys.shape, dim))  # type: ignore[call-overload]
        for part, begin in zip(parts, begin_P, strict=True)
    ]


def _pooling(parts: Sequence[KeysPart], leases: Sequence[Lease]) -> tuple[np.ndarray, np.ndarray | None]:
    """Offsets and scales of lookups that lie side by side, as of one."""
    offsets = [np.zeros(1, np.int64)]
    for part in parts:
        assert part.keys.bags is not None
        offsets.append(part.keys.bags.offset_P1[1:] + (part.ids.start - parts[0].ids.start))
    if all(lease.scale_N is None for lease in leases):
        return np.concatenate(offsets), None
    scales = [
        np.ones(part.ids.stop - part.ids.start, np.float32) if lease.scale_N is None else lease.scale_N
        for part, lease in zip(parts, leases, strict=True)
    ]
    return np.concatenate(offsets), np.concatenate(scales)


def _grad_of_scales(lease: MergedLease, p: int, grad_PD: torch.Tensor) -> torch.Tensor:
    keys, store = lease.keys.parts[p].keys, lease.store
    assert keys.bags is not None
    loops, rows = store.loops, RowsOfIds(store.weight_SX, lease.slot_U, keys.unique.inverse_N)
    return loops.tensor(loops.scale_grads(rows, keys.bags.bag_N, loops.array(grad_PD)))


def _measure_gather_merged(args: object, rows: Sequence[torch.Tensor]) -> tuple[int, int]:
    measured = [measure_gather(args, row) for row in rows]
    return sum(count for count, _ in measured), sum(size for _, size in measured)


@Op(LOOKUP, takes=("lease",), pure=True, measure=_measure_gather_merged)
def gather_merged(
    lease: MergedLease, read: Sequence[tuple[int, torch.Tensor, torch.Tensor | None, str]]
) -> tuple[torch.Tensor, ...]:
    """What `gather` gives of each of these lookups, from one loop over the rows of all.

    Args:
        read: (p, weight, per_sample_weights, pooling) of each, p growing; see `gather`.

    Raises:
        TypeError, ValueError: as `gather`.
        StorageError: the rows have been replaced since they were acquired.
    """
    lease.check_current()
    for p, _, per_sample_weights, pooling in read:
        lease.leases[p].pool_by(per_sample_weights, pooling)
    lookups, weights, scales, _ = zip(*read, strict=True)
    return _GatherMerged.apply(lease, lookups, *weights, *scales)
