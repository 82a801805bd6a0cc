"""Gradients of rows, summed for each key."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from oneemb.kernels.arrays import Array, Terms
from oneemb.kernels.backend import Backend, Keys, Segments
from oneemb.kernels.hash_index import TABLE_MAX
from oneemb.storage.embedding_store import EmbeddingStore, weights_in
from oneemb.storage.merged_store import MergedStore


class Summed(NamedTuple):
    """Gradients of the U unique keys of one lookup, summed over its ids."""

    grad_UD: Array
    """float32 [U, D]"""
    finite_X: Array
    """Whether all values of a sum are finite, as `Backend.sum_segments` returns it."""


class RowGrads:
    """Gradients of U unique keys of one store, for the rows in slot_U: summed, or as segments still to be summed.

    The first read of `sums` sums the segments. An update without such a read sums row by row, with the same bits.

    Args:
        store: the store of the rows, or the merged store.
        generation: `generation` of the store when the rows got these slots.
        table_U, id_U, slot_U: tables, ids and slots of the keys; slot -1 = the row is not pinned.
        segments: the gradients of ids, grouped by unique key; None = `sums` is given.
        sums: (grad_UD, finite_X), see the property; None = `segments` is given.
        stores: for merged stores, the stores whose lookups got a gradient; None = all.
        unique: the keys whose arrays may have room for more than there are, see `counted`; None = they have not.
    """

    def __init__(
        self,
        store: EmbeddingStore | MergedStore,
        generation: int,
        table_U: Array,
        id_U: Array,
        slot_U: Array,
        *,
        segments: Segments | None = None,
        sums: tuple[Array, Array] | None = None,
        stores: tuple[EmbeddingStore, ...] | None = None,
        unique: Keys | None = None,
    ):
        self.store = store
        self.generation = generation
        self.table_U, self.id_U, self.slot_U = table_U, id_U, slot_U
        self.segments = segments
        self.stores = store.members if stores is None else stores
        self._sums = sums
        self._unique = unique
        self.go_1: Array | None = None
        """int64 [1] on a GPU: 0 = an update writes nothing, see late_check.py; None = it does."""

    def counted(self) -> "RowGrads":
        """The same gradients in arrays that are cut to the number of keys, for which the host waits for a GPU. Only
        updates take arrays with more room, where slots are below 0."""
        if self._unique is None:
            return self
        size = len(self.store.backend.counted(self._unique).id_U)
        self._unique = None
        if size < len(self.id_U):
            self.table_U, self.id_U, self.slot_U = self.table_U[:size], self.id_U[:size], self.slot_U[:size]
            if self.segments is not None:
                self.segments = cast(Any, self.segments).cut(size)  # Those of the host have no more room.
            if self._sums is not None:
                self._sums = self._sums[0][:size], self._sums[1][:size]
        return self

    @property
    def sums(self) -> tuple[Array, Array]:
        """(grad_UD, float32 [U, D]; finite_X, whether all values of a sum are finite), as from
        `Backend.sum_segments`."""
        if self._sums is None:
            assert self.segments is not None
            self._sums = self.store.backend.sum_segments(self.segments)
        return self._sums

    @property
    def grad_UD(self) -> Array:
        return self.sums[0]

    @property
    def finite_X(self) -> Array:
        return self.sums[1]

    def finite_rows(self) -> np.ndarray:
        """Whether all values of each row's sum are finite: bool [U], on the host."""
        backend = self.store.backend
        if backend.waits:
            return torch.isfinite(backend.tensor(self.grad_UD)).all(1).cpu().numpy()
        return cast(np.ndarray, self.finite_X)

    @property
    def to_update(self) -> Segments | Array:
        """The gradients for an update: sums if they are made, otherwise the gradients that are still to be summed."""
        return self.segments if self._sums is None else self._sums[0]

    def sum_to_check(self, go_1: Array | None = None) -> Array | None:
        """On a GPU, sum float32 gradients now if there are as many gradients as keys or more: a check then reads the
        sums, and the gradients are read once. Gradients of bags may be fewer than keys, and gradients of 16 bits are
        smaller than sums; a check reads these as they are, and the update reads them once more. `go_1`: number on the
        device that turns 0 if a sum that is made now is not finite. Returns `finite_X` of sums that are made; None =
        they are not."""
        if self._sums is None:
            segments, backend = self.segments, cast(Any, self.store.backend)
            assert segments is not None
            if not backend.waits or segments.grad_NX.dtype is not torch.float32:
                return None
            if len(self.id_U) > len(segments.grad_NX):
                return None
            self._sums = (backend if go_1 is None else backend.guarded(go_1)).sum_segments(segments)
        return self._sums[1]

    @property
    def terms(self) -> Terms:
        """The terms of the sums: gradients that are still to be summed, or finished sums as single terms."""
        if self.segments is None or self._sums is not None:
            return Terms(self.grad_UD, None, 1, self.finite_X)
        return Terms(self.segments.grad_NX, self.segments.scale_N, len(self.segments.order_N))

    def with_sums(self, grad_UD: Array) -> "RowGrads":
        """Gradients of the same keys with `grad_UD` as their sums."""
        backend = self.store.backend
        sums = grad_UD, backend.finite_of(grad_UD)
        keys = self.table_U, self.id_U, self.slot_U
        return RowGrads(self.store, self.generation, *keys, sums=sums, stores=self.stores)

    def plus(self, others: Sequence[Summed]) -> "RowGrads":
        """The same gradients with other sums of the same keys added, in their order."""
        backend = self.store.backend
        total_UD = backend.tensor(self.counted().grad_UD).clone()
        for other in others:
            total_UD += backend.tensor(other.grad_UD)[: len(total_UD)]
        return self.with_sums(backend.array(total_UD))

    def with_slots(self, slot_U: Array, generation: int) -> "RowGrads":
        """The same gradients with other slots, for rows that have moved."""
        keys = self.table_U, self.id_U, slot_U
        return RowGrads(
            self.store, generation, *keys, segments=self.segments, sums=self._sums, stores=self.stores,
            unique=self._unique,
        )  # fmt: skip

    def before_change(self) -> None:
        """Notify the watchers of the stores that these rows are about to change.

        Raises:
            StorageError: a watcher forbids the change.
        """
        store = self.store
        for member in store.members:
            if member.watchers:
                break
        else:
            return
        self.counted()
        weight_UD = weights_in(store.weight_SX, self.slot_U, store.format, store.backend)
        if isinstance(store, EmbeddingStore):
            store.before_change(self.table_U, self.id_U, weight_UD)
            return
        for m, member in enumerate(store.members):
            own = np.flatnonzero(store.members_of(self.table_U) == m)
            if member.watchers and len(own):
                table_U = self.table_U[own] - store.first_table_M1[m]
                member.before_change(table_U, self.id_U[own], weight_UD[torch.from_numpy(own)])

    def of_tables(self, tables: Collection[int]) -> "RowGrads":
        """The gradients of the keys of `tables`."""
        self.counted()
        table_U = self.store.backend.tensor(self.table_U)
        wanted_U = torch.isin(table_U, torch.tensor(sorted(tables), dtype=table_U.dtype, device=table_U.device))
        if bool(wanted_U.all()):
            return self
        return self.rows(self.store.backend.array(wanted_U.nonzero().view(-1)))

    def rows(self, u: Array) -> "RowGrads":
        """The gradients of the keys with the indices `u`, summed."""
        self.counted()
        keys = self.table_U[u], self.id_U[u], self.slot_U[u]
        grad_UD, backend = self.grad_UD[u], self.store.backend
        finite_X = backend.finite_of(grad_UD) if backend.waits else self.finite_X[u]
        return RowGrads(self.store, self.generation, *keys, sums=(grad_UD, finite_X))


def nowhere(backend: Backend, rows: int) -> Array:
    """Slots of rows that are not pinned: int64 [rows], all -1."""
    return backend.array(torch.full((rows,), -1, device=backend.device, dtype=torch.int64))


def join_grads(parts: Sequence[RowGrads]) -> RowGrads | None:
    """The gradients in `parts`, which belong to one store, as one object in which gradients of equal keys are to be
    summed in the order of `parts`. None = there are no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    for part in parts:
        part.counted()
    store, stores = parts[0].store, tuple({member: None for part in parts for member in part.stores})
    backend = store.backend
    table_N, id_N, slot_N, grad_ND = (
        backend.array(torch.cat([backend.tensor(getattr(part, name)) for part in parts]))
        for name in ("table_U", "id_U", "slot_U", "grad_UD")
    )
    unique = backend.counted(backend.unique_keys(table_N, id_N, tables=TABLE_MAX + 1, padding_id=None, check=None))
    return RowGrads(
        store, parts[0].generation, unique.table_U, unique.id_U, _slots_of(store, unique, slot_N),
        segments=backend.segments(unique, None, grad_ND, None), stores=stores,
    )  # fmt: skip


def _slots_of(store: EmbeddingStore | MergedStore, unique: Any, slot_N: Array) -> Array:
    """Slot of each unique key; the admitted row's slot where the key has been admitted since."""
    if isinstance(store, MergedStore) or not store.has_temporary_rows:
        return slot_N.take(unique.head_U)
    backend = store.backend
    inverse_N, slot_of_N = (backend.tensor(array).cpu().numpy() for array in (unique.inverse_N, slot_N))
    kept = np.flatnonzero(~np.isin(slot_of_N, store.temporary()))
    slot_U = np.empty(len(unique.id_U), np.int64)
    inverse_N = inverse_N.astype(np.int64)
    slot_U[inverse_N] = slot_of_N
    slot_U[inverse_N[kept]] = slot_of_N[kept]
    return backend.put(slot_U)


def sum_over_passes(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gradients of the ids or bags of a lookup, summed in float32 over its backward passes: [N, D] or [P, D].

    The gradient of a single pass is returned as it is, and may be non-contiguous.
    """
    if len(grads) == 1:
        return grads[0]
    total = grads[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for grad in grads[1:]:
        total += grad
    return total
