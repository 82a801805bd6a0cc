"""Reads of rows for the ids or bags of a lookup; lookups without a gradient, which need no lease.

    rows  = peek(store, keys)
    rows  = read_ids(store, ids, ...)  without unique keys

N ids, U unique keys, P bags, D weights of a row, W words of a row.
"""

import dataclasses
from typing import Any, Protocol

import torch

from oneemb.graph.ops.keys import DTYPES, POOLINGS, BatchKeys, check_ids, check_scales, tables_and_ids
from oneemb.graph.ops.op import LOOKUP, PREPARE, Op
from oneemb.kernels import backend as kernels
from oneemb.kernels.arrays import Array, RowsOfIds
from oneemb.kernels.backend import Backend
from oneemb.kernels.host_backend import backend_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.store_rows import gather_rows


class ReadRows(Protocol):
    """Interface of a store that can be read without a lease."""

    @property
    def format(self) -> RowFormat:
        """Format of a row."""

    @property
    def backend(self) -> Backend:
        """Backend of the device of the rows."""

    def read(self, keys: kernels.Keys) -> tuple[Array, kernels.Keys]:
        """The rows of these keys; see `EmbeddingStore.read`."""


def check_place(store: ReadRows | MergedStore, backend: Backend) -> None:
    if backend.place != store.backend.place:
        raise ValueError(
            f"ids must be on {store.backend.place}, where the embedding is, got {backend.place};"
            f" call ids.to({str(store.backend.device)!r})"
        )


def measure_gather(args: object, rows: torch.Tensor) -> tuple[int, int]:
    return rows.numel() // max(1, rows.shape[-1]), 2 * rows.numel() * rows.element_size()


def read_rows(
    store: ReadRows, weight_SX: Array, slot_U: Array, keys: BatchKeys, scale_N: Array | None, pooling: str
) -> tuple[torch.Tensor, Array | None]:
    """(weights of each id or bag, read from the rows in slot_U; for "max" the `argmax_PD` of `Backend.pool_max`, for
    other poolings None)."""
    backend, layout, rows = store.backend, store.format, RowsOfIds(weight_SX, slot_U, keys.unique.inverse_N)
    dim = layout.dim
    out = torch.empty(*keys.shape, dim, dtype=DTYPES[layout.dtype], device=backend.device)
    out_ND = backend.array(out if out.dim() == 2 else out.view(-1, dim))
    argmax_PD = None
    if keys.bags is None:
        backend.gather(rows, out_ND)
    elif pooling == "max":
        argmax_PD = backend.array(torch.empty(out_ND.shape, dtype=torch.int32, device=backend.device))
        backend.pool_max(rows, keys.bags, out_ND, argmax_PD)
    else:
        backend.pool(rows, keys.bags, scale_N, out_ND)
    return out, argmax_PD


def gathered(store: ReadRows, keys: BatchKeys) -> torch.Tensor | None:
    """The weights of each id, read without a wait for a GPU; None where that is not possible. Keys without a row read
    as in `read`."""
    if not store.backend.waits or keys.bags is not None or not isinstance(store, EmbeddingStore):
        return None
    backend, layout = store.backend, store.format
    out = torch.empty(*keys.shape, layout.dim, dtype=DTYPES[layout.dtype], device=backend.device)
    return out if gather_rows(store, keys.unique, backend.array(out.view(-1, layout.dim))) else None


def spread_max_grads(keys: BatchKeys, argmax_PD: Array, grad_PD: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Gradients of ids, [N, D], from the gradients of their bags' maxima: each value goes to the id that gave the
    maximum."""
    assert keys.bags is not None
    grad_ND = grad_PD.new_empty(len(keys.unique.inverse_N), grad_PD.shape[1])
    backend.spread_max_grads(keys.bags, argmax_PD, backend.array(grad_PD), backend.array(grad_ND))
    return grad_ND


@Op(PREPARE, takes=("keys",))
def check_pooling(keys: BatchKeys, per_sample_weights: torch.Tensor | None, pooling: str) -> None:
    """Raise TypeError or ValueError if a coming `gather` would refuse these arguments."""
    if pooling not in POOLINGS:
        raise ValueError(f'pooling must be "sum", "mean" or "max", got {pooling!r}')
    if per_sample_weights is not None:
        check_scales(
            per_sample_weights, keys.bags is not None, pooling, len(keys.unique.inverse_N), keys.backend.device
        )


def scales_of(keys: BatchKeys, per_sample_weights: torch.Tensor | None, pooling: str, store: ReadRows) -> Array | None:
    """Factor of each id in its bag: float32 [N]; None = 1. Raises as `check_pooling`."""
    check_pooling(keys, per_sample_weights, pooling)
    if per_sample_weights is not None:
        # A copy: the caller may change it before the backward pass, which reads it again.
        return store.backend.array(per_sample_weights.detach().clone(memory_format=torch.contiguous_format))
    if keys.bags is None or pooling != "mean":
        return None
    return store.backend.mean_scales(keys.bags.offset_P1, keys.unique.inverse_N)


@Op(LOOKUP, takes=("store", "keys"), measure=measure_gather)
def peek(
    store: ReadRows, keys: BatchKeys, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """The weights of each id or bag, as from `gather`, without a gradient, and without inserting unknown ids, which
    read as their initial values.

    Raises:
        TypeError, ValueError: as `gather`; or the ids are not on the device of the embedding.
    """
    check_place(store, keys.backend)
    if per_sample_weights is None and pooling == "sum" and (found := gathered(store, keys)) is not None:
        return found
    row_UW, unique = store.read(keys.unique)  # on a GPU tables and offsets are checked here, before anything uses them
    keys = dataclasses.replace(keys, unique=unique)
    sums = per_sample_weights is None and pooling == "sum"
    scale_N = None if sums else scales_of(keys, per_sample_weights, pooling, store)
    weight_UX, slot_U = store.format.weights(row_UW), store.backend.arange(len(row_UW))
    return read_rows(store, weight_UX, slot_U, keys, scale_N, pooling)[0]


def read_ids(
    store: EmbeddingStore,
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    *,
    inserts: bool,
) -> torch.Tensor | None:
    """The weights of ids that are in no bags, without a gradient; None = this store cannot be read in this way.

    Each id is read from the slot of its row, without unique keys and pins. That needs stable slots, on the host, or all
    rows on a GPU.

    Args:
        inserts: if True, unknown ids are inserted, as by `acquire`; if False, they read as their initial values.

    Raises:
        TypeError, ValueError, StoreFullError: as `unique_keys` and `acquire`.
    """
    if store.backend.waits:
        if inserts or table_ids is not None or padding_idx is not None or store.plan.cache_bytes is not None:
            return None
        return _read_ids_there(store, ids, num_tables, key_type)
    if not store.reads_in_place or inserts and store.engine is not None:  # A policy counts unique keys.
        return None
    check_ids(ids, table_ids, num_tables, key_type)
    backend = backend_of(ids, store.threads)
    if backend.place != store.backend.place:
        return None
    table_N, id_N, check = tables_and_ids(ids, table_ids, num_tables, backend)
    if check is not None:
        check()
    layout = store.format
    out = torch.empty(*ids.shape, layout.dim, dtype=DTYPES[layout.dtype], device="cpu")
    out_ND = backend.array(out.view(-1, layout.dim))
    with store.store_lock:  # No row is pinned, so no row may move before it is read.
        slot_N = store.slots_of(table_N, id_N)
        if slot_N is None:
            return None
        missing = (slot_N < 0).nonzero()[0]
        if padding_idx is not None:
            missing = missing[id_N[missing] != padding_idx]
            slot_N[id_N == padding_idx] = -1  # a loaded snapshot of another embedding may hold a row of padding_idx
        if len(missing) and inserts:
            unique = backend.unique_keys(
                table_N[missing], id_N[missing], tables=num_tables, padding_id=None, check=None
            )
            slot_U, _ = store.acquire(unique)
            store.release(slot_U)
            slot_N[missing] = slot_U.take(unique.inverse_N)
        with store.writing:
            backend.gather(RowsOfIds(store.weight_SX, None, slot_N), out_ND)
        if len(missing) and not inserts:
            row_MW, _ = store.read(backend.distinct_keys(table_N[missing], id_N[missing]))
            out_ND[missing] = layout.weights(row_MW)[:, : layout.dim]
    return out


def _read_ids_there(
    store: EmbeddingStore, ids: torch.Tensor, num_tables: int, key_type: torch.dtype
) -> torch.Tensor | None:
    """`read_ids` for a store with all rows on a GPU."""
    check_ids(ids, None, num_tables, key_type)
    backend: Any = backend_of(ids, store.threads)
    if backend.place != store.backend.place:
        return None
    table_N, id_N, _ = tables_and_ids(ids, None, num_tables, backend)
    return gathered(store, BatchKeys(ids.shape, backend.every_id(table_N, id_N), None, backend))
