"""Lookups of several embeddings as one op: `unique_keys` and `gather` for merged stores.

    keys  = unique_merged_keys([MergedLookup(first_table, num_tables, ids, ...), ...], key_type, padding_idx)
    check_merged_pooling(keys, [(p, per_sample_weights, pooling), ...])
    reserved = reserve(merged_store, keys)
    rows  = gather_merged(reserved, [(p, per_sample_weights, pooling), ...])   a tensor for each
    lease = part_of(reserved, p).acquire()         once `build` makes lookup p

Each lookup p reads another store, and lookups come in the order of their stores in the merged store. So the order of
first occurrence puts the keys of a store side by side, and each key occurs in one lookup only: its gradients are summed
in the same order as without merging. In names of arrays, M is the number of stores and P the number of lookups (or of
bags).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.keys import BatchKeys, bags_of_ids, check_ids, check_no_columns, check_tables, measure_unique_keys
from oneemb.graph.ops.lookup import DTYPES, Lease, full_of, make_room
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.graph.ops.reading import check_pooling, measure_gather
from oneemb.kernels import unique_keys as kernel
from oneemb.kernels.arrays import Bags, RowsOfIds, rows_of_columns
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.reduce_grads import Segments
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.locking.store_lock import whole
from oneemb.storage.merged_store import MergedPrefetched, MergedStore

_BACKEND = HostBackend(Threads(1))


class MergedLookup(NamedTuple):
    """Arguments of one lookup of several that are merged; ids, tables and bags are as for `unique_keys`."""

    first_table: int
    """Number that table 0 of the lookup has among the merged tables."""
    num_tables: int
    ids: torch.Tensor
    table_ids: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class KeysPart:
    """One lookup's share of merged keys."""

    first_table: int
    ids: slice
    """Range of the lookup's ids in the ids of all lookups."""
    keys: BatchKeys
    """Keys with the shape, bags and `inverse_N` of the lookup, but the unique keys of all lookups."""
    unique: slice
    """Range of the lookup's unique keys in the unique keys of all lookups."""


@dataclass(frozen=True)
class MergedKeys:
    """The unique keys of several lookups."""

    unique: kernel.UniqueKeys
    parts: list[KeysPart]
    begin_P1: np.ndarray
    """int64 [P + 1]: lookup p has the unique keys from begin_P1[p] to begin_P1[p + 1] - 1."""

    backend: HostBackend = _BACKEND


class MergedRows:
    """Unique keys of several lookups, acquired together from the stores that `store` joins. Each lookup gets a lease of
    its own."""

    def __init__(self, store: MergedStore, keys: MergedKeys):
        self.store = store
        self.keys = keys
        first_tables = np.array([part.first_table for part in keys.parts], np.int32)
        self.member_P = np.searchsorted(store.first_table_M1, first_tables).tolist()
        """Index of each lookup's store among the members of the merged store."""
        self.begin_M1 = store.begins(first_tables, keys.begin_P1)
        """[M + 1]: member m has the unique keys from begin_M1[m] to begin_M1[m + 1] - 1."""

    def own_keys(self, p: int) -> BatchKeys:
        """The keys of lookup p, equal to the result of `unique_keys` without merging."""
        part, unique = self.keys.parts[p], self.keys.unique
        inverse_N = np.where(part.keys.unique.inverse_N < 0, -1, part.keys.unique.inverse_N - part.unique.start)
        assert unique.head_U is not None
        own = kernel.UniqueKeys(
            unique.table_U[part.unique] - np.int32(part.first_table),
            unique.id_U[part.unique],
            inverse_N.astype(np.int32),
            unique.head_U[part.unique] - part.ids.start,
        )
        return BatchKeys(part.keys.shape, own, part.keys.bags, self.store.members[self.member_P[p]].backend)

    def reduce(self, grads: Mapping[int, tuple[Lease, Sequence[torch.Tensor]]]) -> RowGrads:
        """Gradients of the unique keys of some lookups, still to be summed.

        Args:
            grads: {p: (pinned lease of lookup p, gradients from its backward passes)}.
        """
        unique, parts = self.keys.unique, self.keys.parts
        live = sorted(grads)
        got = [grads[p][0].sum_passes(grads[p][1]) for p in live]
        # `cat` makes all gradients float32 if one of them, a sum of several passes, is.
        grad_NX = _BACKEND.array(torch.cat(got))
        inverse_N, row_N, scale_N = unique.inverse_N, None, None
        dead = [part for p, part in enumerate(parts) if p not in grads]
        if dead:
            inverse_N = inverse_N.copy()
            for part in dead:
                inverse_N[part.ids] = -1
        bags_P = [None if grads[p][0].argmax_PD is not None else parts[p].keys.bags for p in live]
        if dead or any(bags is not None for bags in bags_P):
            row_N = _rows_of_ids([(parts[p].ids, bags) for p, bags in zip(live, bags_P, strict=True)], len(inverse_N))
        if any(lease.scale_N is not None for lease, _ in grads.values()):
            scale_N = np.ones(len(inverse_N), np.float32)
            for p, (lease, _) in grads.items():
                if lease.scale_N is not None:
                    scale_N[parts[p].ids] = lease.scale_N
        order_N, begin_U1, scale_N = kernel.occurrences(inverse_N, len(unique.id_U), row_N, scale_N)
        table_U, id_U = unique.table_U, unique.id_U
        slot_U = self.store.merged_slots([self.member_P[p] for p in live], [grads[p][0].slot_U for p in live])
        if dead:
            u = np.concatenate([np.arange(parts[p].unique.start, parts[p].unique.stop) for p in live])
            table_U, id_U = table_U[u], id_U[u]
            begin_U1 = np.append(begin_U1[u], begin_U1[-1])  # keys of lookups without a gradient occur nowhere
        return RowGrads(
            self.store, self.store.generation, table_U, id_U, slot_U,
            segments=Segments(grad_NX, order_N, begin_U1, scale_N),
            stores=tuple(grads[p][0].store for p in live),
        )  # fmt: skip


class MergedReserved:
    """Several lookups that a step is expected to make. If all keys of a lookup are known, its rows are pinned."""

    def __init__(self, rows: MergedRows, prefetched: MergedPrefetched | None):
        self.rows = rows
        self._prefetched = prefetched
        with whole(member.store_lock for member in rows.store.members):  # so that all pins have an owner
            slots = rows.store.acquire_found(rows.keys.unique, rows.begin_M1, prefetched)
            self.leases: list[Lease | None] = [
                None if slots[m] is None else Lease(rows.store.members[m], None, slots[m], (rows, p))
                for p, m in enumerate(rows.member_P)
            ]
            """Lease of each lookup; None = it has unknown keys, and is not acquired yet."""

    def acquire(self, p: int) -> Lease:
        """Pinned lease on the rows of lookup p, with the `order` of a lookup that is made now. Unknown keys are
        inserted, or none if StoreFullError is raised."""
        lease = self.leases[p]
        if lease is None:
            store = self.rows.store.members[self.rows.member_P[p]]
            try:
                try:
                    lease = self._pin(p)
                except StoreFullError as error:
                    make_room(store, error)
                lease = self.leases[p] = lease or self._pin(p)
            except StoreFullError as error:
                raise full_of(store, error) from None
        return lease.acquire()

    def _pin(self, p: int) -> Lease:
        rows, m = self.rows, self.rows.member_P[p]
        store = rows.store.members[m]
        with store.store_lock:  # so that what is pinned has an owner
            slot_U = rows.store.acquire_rest(m, rows.keys.unique, rows.begin_M1, self._prefetched)
            return Lease(store, None, slot_U, (rows, p))

    def drop_part(self, p: int) -> None:
        """Unpin the rows of lookup p."""
        if (lease := self.leases[p]) is not None:
            lease.unpin()
        elif self._prefetched is not None:
            part = self._prefetched.parts[self.rows.member_P[p]]
            part.store.unprefetch(part)

    def drop(self) -> None:
        """Unpin the rows of all lookups."""
        for p in range(len(self.leases)):
            self.drop_part(p)


@dataclass(frozen=True)
class ReservedPart:
    """Lookup `p` of several that were reserved together; it has the methods of `Reserved`."""

    reserved: MergedReserved
    p: int
    inserts = True
    """Whether the lookup inserts unknown keys."""

    def acquire(self) -> Lease:
        """Pinned lease on the rows; see `MergedReserved.acquire`."""
        return self.reserved.acquire(self.p)

    def drop(self) -> None:
        """Unpin the rows."""
        self.reserved.drop_part(self.p)

    def forget(self) -> None:
        """Drop the reference to the lease, without unpinning its rows."""
        self.reserved.leases[self.p] = None


def _rows_of_ids(parts: Sequence[tuple[slice, Bags | None]], ids: int) -> np.ndarray:
    """int32 [N]: for each id, the index of its gradient, or of its bag's gradient, if the gradients of the lookups in
    `parts` follow one another. Other ids have any number.

    Args:
        parts: (the lookup's ids among all ids; its bags, or None if its gradients belong to ids) of each lookup.
        ids: number of all ids.
    """
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


@Op(PREPARE, gives="keys", measure=measure_unique_keys)
def unique_merged_keys(lookups: Sequence[MergedLookup], key_type: torch.dtype, padding_idx: int | None) -> MergedKeys:
    """The unique (merged table, id) pairs of several lookups, lookup by lookup in order of first occurrence.

    Args:
        lookups: in the order of their tables.

    Raises:
        TypeError, ValueError: as `unique_keys`, of any lookup.
    """
    batches = [_batch_of(lookup, key_type) for lookup in lookups]
    end_P = list(itertools.accumulate(len(batch.id_N) for batch in batches))
    begin_P = [0, *end_P[:-1]]
    table_N = np.empty(end_P[-1], np.int32)
    for lookup, batch, begin, end in zip(lookups, batches, begin_P, end_P, strict=True):
        first_table, num_tables = lookup.first_table, lookup.num_tables
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
    parts: list[KeysPart] = []
    for lookup, batch, begin, end in zip(lookups, batches, begin_P, end_P, strict=True):
        own = unique._replace(inverse_N=unique.inverse_N[begin:end])
        keys = BatchKeys(batch.shape, own, batch.bags, _BACKEND)
        p = len(parts)
        parts.append(
            KeysPart(lookup.first_table, slice(begin, end), keys, slice(int(begin_P1[p]), int(begin_P1[p + 1])))
        )
    return MergedKeys(unique, parts, begin_P1)


class _Batch(NamedTuple):
    """The ids of one lookup."""

    id_N: torch.Tensor
    table_N: np.ndarray | None
    """None = the last dimension of `shape` counts the tables."""
    shape: torch.Size
    bags: Bags | None


def _batch_of(lookup: MergedLookup, key_type: torch.dtype) -> _Batch:
    _, num_tables, ids, table_ids, offsets, columns = lookup
    if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
        raise ValueError(f"ids must be on the CPU, where the embedding is, got {ids.device}; call ids.cpu()")
    if offsets is not None:
        shape, offset_P1, table_P, check = bags_of_ids(ids, table_ids, num_tables, key_type, offsets, columns, _BACKEND)
        check()
        bags = Bags(offset_P1.numpy())
        if columns is not None:
            bags = Bags(bags.offset_P1, row_P=rows_of_columns(len(offset_P1) - 1, len(columns)))
            table_N = np.array(columns, np.int32)[bags.bag_N % np.int32(len(columns))]
        else:
            table_N = bags.bag_N % np.int32(num_tables) if table_P is None else table_P.numpy()[bags.bag_N]
        return _Batch(ids.detach(), table_N, shape, bags)
    check_no_columns(columns)
    check_ids(ids, table_ids, num_tables, key_type)
    tables = None
    if table_ids is not None:
        check_tables(table_ids if ids.numel() else table_ids.reshape(-1)[:0], num_tables)
        tables = table_ids.detach().to(torch.int32).expand(ids.shape).reshape(-1).numpy()
    return _Batch(ids.detach().reshape(-1), tables, ids.shape, None)


@Op(PREPARE, takes=("keys",))
def check_merged_pooling(keys: MergedKeys, pooled: Sequence[tuple[int, torch.Tensor | None, str]]) -> None:
    """Do as `check_pooling` for each lookup p in `pooled`."""
    for p, per_sample_weights, pooling in pooled:
        check_pooling(keys.parts[p].keys, per_sample_weights, pooling)


def _read(merged: MergedRows, lookups: Sequence[int], leases: Sequence[Lease]) -> list[torch.Tensor]:
    """Weights of the ids or bags of some lookups, a tensor for each. The tensors share one storage, but torch does not
    know them as views.

    Args:
        lookups: indices of the lookups, ascending; the letter P in names below counts these.
        leases: pinned leases of these lookups.
    """
    store, keys = merged.store, merged.keys
    dim, dtype, backend = store.format.dim, DTYPES[store.format.dtype], store.backend
    parts = [keys.parts[p] for p in lookups]
    slot_U = np.empty(len(keys.unique.id_U), np.int64)
    merged_U = store.merged_slots([merged.member_P[p] for p in lookups], [lease.slot_U for lease in leases])
    begin = 0
    for part in parts:
        end = begin + part.unique.stop - part.unique.start
        slot_U[part.unique] = merged_U[begin:end]
        begin = end
    weight_SX, inverse_N = store.weight_SX, keys.unique.inverse_N
    end_P = list(itertools.accumulate(part.keys.shape.numel() for part in parts))
    begin_P = [0, *end_P[:-1]]
    all_ND = torch.empty(end_P[-1], dim, dtype=dtype, device="cpu")
    row_ND = backend.array(all_ND)
    first = 0
    # One call of a loop reads lookups with consecutive indices and the same pooling; lookups[i] - i is constant there.
    for (_, pooled, takes_max), group in itertools.groupby(
        range(len(parts)), lambda i: (lookups[i] - i, parts[i].keys.bags is not None, leases[i].pooling == "max")
    ):
        adjacent = list(group)
        end = end_P[adjacent[-1]]
        ids = slice(parts[adjacent[0]].ids.start, parts[adjacent[-1]].ids.stop)
        rows = RowsOfIds(weight_SX, slot_U, inverse_N[ids])
        if not pooled:
            backend.gather(rows, row_ND[first:end])
        else:
            bags, scale_N = _pooling([parts[i] for i in adjacent], [leases[i] for i in adjacent])
            if takes_max:
                argmax_PD = np.empty((end - first, dim), np.int32)
                backend.pool_max(rows, bags, row_ND[first:end], argmax_PD)
                for i in adjacent:
                    leases[i].argmax_PD = argmax_PD[begin_P[i] - first : end_P[i] - first]
            else:
                backend.pool(rows, bags, scale_N, row_ND[first:end])
        first = end
    return [
        torch.empty(0, dtype=dtype, device="cpu").set_(all_ND.untyped_storage(), begin * dim, (*part.keys.shape, dim))  # type: ignore[call-overload]
        for part, begin in zip(parts, begin_P, strict=True)
    ]


def _pooling(parts: Sequence[KeysPart], leases: Sequence[Lease]) -> tuple[Bags, np.ndarray | None]:
    """(bags, factor of each id or None) of neighbouring lookups, joined as if they were one lookup."""
    offsets, rows, count = [np.zeros(1, np.int64)], list[np.ndarray](), 0
    for part in parts:
        own = part.keys.bags
        assert own is not None
        offsets.append(own.offset_P1[1:] + (part.ids.start - parts[0].ids.start))
        size = len(own.offset_P1) - 1
        rows.append(np.int32(count) + (np.arange(size, dtype=np.int32) if own.row_P is None else own.row_P))
        count += size
    in_order = all(part.keys.bags is not None and part.keys.bags.row_P is None for part in parts)
    bags = Bags(np.concatenate(offsets), row_P=None if in_order else np.concatenate(rows))
    if all(lease.scale_N is None for lease in leases):
        return bags, None
    scales = [
        np.ones(part.ids.stop - part.ids.start, np.float32) if lease.scale_N is None else lease.scale_N
        for part, lease in zip(parts, leases, strict=True)
    ]
    return bags, np.concatenate(scales)


@Op(LOOKUP, takes=("reserved",))
def part_of(reserved: MergedReserved, p: int) -> ReservedPart:
    """Lookup `p` of the reserved lookups."""
    return ReservedPart(reserved, p)


def _measure_gather_merged(args: object, rows: Sequence[torch.Tensor | None]) -> tuple[int, int]:
    measured = [measure_gather(args, row) for row in rows if row is not None]
    return sum(count for count, _ in measured), sum(size for _, size in measured)


@Op(LOOKUP, takes=("reserved",), measure=_measure_gather_merged)
def gather_merged(
    reserved: MergedReserved, read: Sequence[tuple[int, torch.Tensor | None, str]]
) -> tuple[torch.Tensor | None, ...]:
    """Result of `gather` for each lookup in `read`, from one loop over all rows; None = the lookup has unknown keys.

    Args:
        read: (p, per_sample_weights, pooling) of each lookup, p ascending; see `gather`.

    Raises:
        TypeError, ValueError: as `gather`.
    """
    found: dict[int, Lease] = {}
    for p, per_sample_weights, pooling in read:
        if (lease := reserved.leases[p]) is not None:
            lease.pool_by(per_sample_weights, pooling, reserved.rows.keys.parts[p].keys)
            found[p] = lease
    rows = dict(zip(found, _read(reserved.rows, list(found), list(found.values())), strict=True)) if found else {}
    return tuple(rows.get(p) for p, _, _ in read)
