"""Reading rows: with a gradient, without one, and in place."""

import dataclasses
from typing import Any

import numpy as np
import torch

from oneemb.graph.ops.keys import tables_and_ids, unique_keys
from oneemb.graph.ops.leases import Keys, Lease, acquire, check_place, measure_acquire
from oneemb.graph.ops.op import LOOKUP, op
from oneemb.kernels.loops import Array, loops_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.turns import undisturbed

__all__ = ["DTYPES", "check_pooling", "gather", "lookup", "measure_gather", "peek", "read_ids", "scales_of"]


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def measure_gather(args: Any, rows: Any) -> tuple[int, int]:
    return rows.numel() // max(1, rows.shape[-1]), 2 * rows.numel() * rows.element_size()


@op(LOOKUP, takes=("store",), gives="lease", measure=measure_acquire)
def lookup(
    store: EmbeddingStore,
    ids: torch.Tensor,
    table_ids: torch.Tensor | None,
    num_tables: int,
    key_type: torch.dtype,
    padding_idx: int | None,
    offsets: torch.Tensor | None = None,
) -> Lease:
    """`unique_keys` and `acquire` in one."""
    keys = unique_keys(ids, table_ids, num_tables, key_type, padding_idx, offsets, threads=store.threads)
    return acquire(store, keys)


@op(LOOKUP, takes=("lease", "weight"), pure=True, measure=measure_gather)
def gather(
    lease: Lease, weight: torch.Tensor, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """The weights of each id, zeros for padding: [*shape of ids, D], of the store's dtype; of bags, those pooled.

    Its gradient is left with the lease, for `reduce_grads`; `weight`, which stands for all rows, gets none.

    Args:
        per_sample_weights: float32 [N], by what the weights of each id are multiplied before a sum.
        pooling: "sum" or "mean", what a bag gives.

    Raises:
        TypeError, ValueError: `per_sample_weights` is not as above, or given for a mean or for ids in no bags.
    """
    lease.scale_N = scales_of(lease.keys, per_sample_weights, pooling, lease.store)
    return _Gather.apply(weight, lease, per_sample_weights)


class _Gather(torch.autograd.Function):
    """Reads rows forward; backward leaves their gradient with the lease. `weight` only ties it to autograd."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, lease: Lease, scales: torch.Tensor | None) -> torch.Tensor:
        ctx.lease = lease
        store = lease.store
        weight_SX = store.weight_SX
        lease.check_generation()  # Another thread may have closed the store; the slab taken before stays what it is.
        with undisturbed, store.writing:  # undisturbed, so that a fork finds no lock held
            return _read(store, weight_SX, lease.slot_U, lease.keys, lease.scale_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        lease, (grad,) = ctx.lease, grads
        lease.check_held()
        grad_ND = grad.reshape(-1, grad.shape[-1]).contiguous()
        if ctx.needs_input_grad[0]:
            with undisturbed:
                if lease.pending is not None and not lease.grads:
                    lease.pending.append(lease)
                lease.grads.append(grad_ND)
        return None, None, _grad_of_scales(lease, grad_ND) if ctx.needs_input_grad[2] else None


def _grad_of_scales(lease: Lease, grad_PD: torch.Tensor) -> torch.Tensor:
    bags, store, loops = lease.keys.bags, lease.store, lease.store.loops
    assert bags is not None
    inverse_N, grad_PX = lease.keys.unique.inverse_N, loops.array(grad_PD)
    with undisturbed, store.writing:
        return loops.tensor(loops.scale_grads(store.weight_SX, lease.slot_U, inverse_N, bags.bag_N, grad_PX))


def _read(store: EmbeddingStore, weight_SX: Array, slot_U: Array, keys: Keys, scale_N: Array | None) -> torch.Tensor:
    """The weights of each id, or of each bag, from the rows in slot_U."""
    loops, dim, inverse_N = store.loops, store.format.dim, keys.unique.inverse_N
    out = torch.empty(*keys.shape, dim, dtype=DTYPES[store.format.dtype], device=loops.device)
    out_ND = loops.array(out.view(-1, dim))
    if keys.bags is None:
        loops.gather(weight_SX, slot_U, inverse_N, out_ND)
    else:
        loops.pool(weight_SX, slot_U, inverse_N, keys.bags.offset_P1, scale_N, out_ND)
    return out


@op(LOOKUP, takes=("keys",), checks=True)
def check_pooling(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str) -> None:
    """Check what `gather` is going to be given.

    Raises:
        TypeError, ValueError: it would refuse it.
    """
    if pooling not in ("sum", "mean"):
        raise ValueError(f'pooling must be "sum" or "mean", got {pooling!r}')
    if per_sample_weights is None:
        return
    if keys.bags is None or pooling != "sum":
        raise ValueError('per_sample_weights are for bags that are summed; pass offsets, and pooling="sum"')
    ids = len(keys.unique.inverse_N)
    given = isinstance(per_sample_weights, torch.Tensor)
    if not given or per_sample_weights.dtype != torch.float32 or per_sample_weights.shape != (ids,):
        got = (per_sample_weights.dtype, list(per_sample_weights.shape)) if given else type(per_sample_weights)
        raise TypeError(f"per_sample_weights must be float32, one for each of {ids} ids, got {got}")
    device = keys.loops.device
    if per_sample_weights.device != device:
        raise ValueError(f"per_sample_weights must be on {device}, where ids are, got {per_sample_weights.device}")


def scales_of(keys: Keys, per_sample_weights: torch.Tensor | None, pooling: str, store: EmbeddingStore) -> Array | None:
    check_pooling(keys, per_sample_weights, pooling)
    if per_sample_weights is not None:
        return store.loops.array(per_sample_weights.detach().contiguous())
    if keys.bags is None or pooling == "sum":
        return None
    return store.loops.mean_scales(keys.bags.offset_P1, keys.unique.inverse_N)


@op(LOOKUP, takes=("store", "keys"), pure=True, measure=measure_gather)
def peek(
    store: EmbeddingStore, keys: Keys, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """What `gather` gives without inserting: an unknown id reads as its initial value. It has no gradient."""
    check_place(store, keys)
    row_UW, unique = store.read(keys.unique)  # on a GPU tables and offsets are checked here, before anything uses them
    keys = dataclasses.replace(keys, unique=unique)
    scale_N = scales_of(keys, per_sample_weights, pooling, store)
    return _read(store, store.format.weights(row_UW), store.loops.arange(len(row_UW)), keys, scale_N)


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
    """What `peek` gives of ids that are in no bags or, if it `inserts` unknown ones, `gather`; without a gradient.

    Where rows lie still, ids need not be made unique to be found and pinned: each is read where it is. None where rows
    do not, or are on a GPU.

    Raises:
        TypeError, ValueError, StoreFullError: as `unique_keys` and `acquire`.
    """
    if not store.reads_in_place:
        return None
    loops = loops_of(ids, store.threads) if isinstance(ids, torch.Tensor) else store.loops
    table_N, id_N, check = tables_and_ids(ids, table_ids, num_tables, key_type, loops)
    if loops.place != store.loops.place:
        return None
    if check is not None:
        check()
    out = torch.empty(*ids.shape, store.format.dim, dtype=DTYPES[store.format.dtype])
    out_ND = loops.array(out.view(-1, store.format.dim))
    with store.turns:  # Nothing is pinned: the rows must be there until they are read.
        slot_N = store.slots_of(table_N, id_N)
        if slot_N is None:
            return None
        missing = np.flatnonzero(slot_N < 0)
        if padding_idx is not None:
            missing = missing[id_N[missing] != padding_idx]
            slot_N[id_N == padding_idx] = -1  # a snapshot of another embedding may have brought it
        if len(missing) and inserts:
            unique = loops.unique_keys(table_N[missing], id_N[missing], tables=num_tables, padding_id=None, check=None)
            slot_U, _ = store.acquire(unique)
            store.release(slot_U)
            slot_N[missing] = slot_U[unique.inverse_N]
        with store.writing:
            loops.gather(store.weight_SX, None, slot_N, out_ND)
        if len(missing) and not inserts:
            row_MW, _ = store.read(loops.distinct_keys(table_N[missing], id_N[missing]))
            out_ND[missing] = store.format.weights(row_MW)[:, : store.format.dim]
    return out
