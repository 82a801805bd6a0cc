"""Ops between ranks: each row lives with its owner, and each rank looks up ids of its own.

    keys   = unique_keys(ids, ...)                 each rank's own
    routed = shuffle_keys(keys, ranks)             to their owners: the unique keys that all ranks ask this one for
    lease  = acquire(store, routed)
    owned  = with_grad(gather(lease), lease, weight)   [asked, D]: a row for each key that a rank asked for
    rows   = shuffle_rows(routed, owned, ...)      back to those who asked, and to their ids; a backward pass
                                                   sends gradients by shuffle_grads to the owners: each rank's weight
                                                   gets a RowGrad of the rows that it owns, summed over ranks

Every rank runs these ops, and the backward pass, in the same order, whatever its batch holds. `oneemb.kernels.owner`
says who owns a key.

Gradients of a key are summed twice: in batch order by each rank that looked it up, then in the order of the ranks by
its owner, both in float32. So the numbers of R ranks are those of one up to the rounding of that sum.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from oneemb.graph.ops.lookup import Keys, check_pooling, spread_max_grads
from oneemb.graph.ops.op import LOOKUP, Op
from oneemb.kernels import unique_keys as kernel
from oneemb.kernels.arrays import RowsOfIds
from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads

__all__ = ["Route", "RoutedKeys", "shuffle_grads", "shuffle_keys", "shuffle_rows"]

_LOOPS = HostLoops(Threads(1))


@dataclass(frozen=True)
class Route:
    """How the keys of this rank have gone to their owners."""

    keys: Keys
    """This rank's own."""
    order_U: torch.Tensor
    """int64 [U]: this rank's unique keys, those of owner 0 first."""
    sent_R: list[int]
    """Keys sent to each owner."""
    asked_R: list[int]
    """Keys that each rank asked this one for."""


@dataclass(frozen=True)
class RoutedKeys(Keys):
    """The keys that all ranks ask this one for, as `acquire` and `gather` take them: of shape [asked]."""

    route: Route


@Op(LOOKUP, takes=("keys",), gives="keys")
def shuffle_keys(keys: Keys, ranks: int) -> RoutedKeys:
    """Send unique keys to their owners; every one of `ranks` ranks calls it.

    Raises:
        RuntimeError: the process group has another number of ranks.
    """
    if (world := distributed.get_world_size()) != ranks:
        raise RuntimeError(f"keys are to be shuffled among {ranks} ranks, the process group has {world}; give that")
    unique = keys.unique
    owner_U = owner_of(unique.table_U, unique.id_U, ranks)
    order_U = np.argsort(owner_U, kind="stable")
    sent_R = torch.from_numpy(np.bincount(owner_U, minlength=ranks))
    asked_R = torch.empty_like(sent_R)
    distributed.all_to_all_single(asked_R, sent_R)
    route = Route(keys, torch.from_numpy(order_U), sent_R.tolist(), asked_R.tolist())
    key_U2 = torch.from_numpy(np.stack([unique.table_U[order_U], unique.id_U[order_U]], 1))
    key_N2 = _exchange(key_U2, route.sent_R, route.asked_R).numpy()
    table_N, id_N = key_N2[:, 0].astype(np.int32), np.ascontiguousarray(key_N2[:, 1])
    return RoutedKeys(torch.Size([len(id_N)]), kernel.unique_keys(table_N, id_N), None, keys.loops, route)


def _exchange(row_NX: torch.Tensor, sent_R: list[int], received_R: list[int]) -> torch.Tensor:
    """Rows to the ranks, `sent_R` of them to each, for `received_R` of each."""
    out = torch.empty(sum(received_R), *row_NX.shape[1:], dtype=row_NX.dtype)
    distributed.all_to_all_single(out, row_NX.contiguous(), received_R, sent_R)
    return out


def shuffle_grads(routed: RoutedKeys, grad_UD: torch.Tensor) -> torch.Tensor:
    """Send the gradient of each of this rank's unique keys to its owner: [U, D] -> [asked, D]."""
    route = routed.route
    return _exchange(grad_UD[route.order_U], route.sent_R, route.asked_R)


class _ShuffleRows(torch.autograd.Function):
    """Rows from their owners; backward sums the gradients of each key and sends them to its owner."""

    @staticmethod
    def forward(
        ctx: Any, owned_ND: torch.Tensor, routed: RoutedKeys, scale_N: np.ndarray | None, pooling: str
    ) -> torch.Tensor:
        ctx.routed, ctx.scale_N, ctx.argmax_PD, ctx.dtype = routed, scale_N, None, owned_ND.dtype
        route = routed.route
        row_UD = torch.empty(len(route.order_U), owned_ND.shape[1], dtype=owned_ND.dtype)
        row_UD[route.order_U] = _exchange(owned_ND, route.asked_R, route.sent_R)
        keys = route.keys
        out = torch.empty(*keys.shape, row_UD.shape[1], dtype=row_UD.dtype)
        rows = RowsOfIds(_LOOPS.array(row_UD), np.arange(len(row_UD)), keys.unique.inverse_N)
        out_NX = _LOOPS.array(out.view(-1, row_UD.shape[1]))
        if keys.bags is None:
            _LOOPS.gather(rows, out_NX)
        elif pooling == "max":
            ctx.argmax_PD = np.empty(out_NX.shape, np.int32)
            _LOOPS.pool_max(rows, keys.bags.offset_P1, out_NX, ctx.argmax_PD)
        else:
            _LOOPS.pool(rows, keys.bags.offset_P1, scale_N, out_NX)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        keys = ctx.routed.route.keys
        bags, grad_NX = keys.bags, grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        if ctx.argmax_PD is not None:
            bags, grad_NX = None, spread_max_grads(keys, ctx.argmax_PD, grad_NX, _LOOPS)
        segments = _LOOPS.segments(keys.unique, bags, _LOOPS.array(grad_NX), ctx.scale_N)
        grad_UD = torch.from_numpy(_LOOPS.sum_segments(segments)[0])
        # In the dtype of the rows, as autograd wants gradients to be.
        return shuffle_grads(ctx.routed, grad_UD).to(ctx.dtype), None, None, None


@Op(LOOKUP, takes=("keys",))
def shuffle_rows(
    routed: RoutedKeys, owned: torch.Tensor, per_sample_weights: torch.Tensor | None = None, pooling: str = "sum"
) -> torch.Tensor:
    """What `gather` gives on one rank: the rows of each of this rank's ids, or bags, from their owners.

    Args:
        owned: [asked, D], the rows that all ranks asked this one for; it gets their gradients, summed over the ids of
            each rank.
        per_sample_weights, pooling: as in `gather`; the weights get no gradient.

    Raises:
        TypeError, ValueError: as `gather`; or `per_sample_weights` needs a gradient.
    """
    keys = routed.route.keys
    check_pooling(keys, per_sample_weights, pooling)
    scale_N = None
    if per_sample_weights is not None:
        if per_sample_weights.requires_grad:
            raise ValueError("per_sample_weights get no gradient on several ranks; detach them")
        scale_N = per_sample_weights.contiguous().numpy()
    elif keys.bags is not None and pooling == "mean":
        scale_N = _LOOPS.mean_scales(keys.bags.offset_P1, keys.unique.inverse_N)
    return _ShuffleRows.apply(owned, routed, scale_N, pooling)
