"""Pools the weights of bags of ids.  N ids in P bags, D weights.

    out_PD[p] = sum over the ids n of bag p of scale_N[n] * weights of id n
    bag p holds the ids offset_P1[p] to offset_P1[p + 1] - 1; an empty bag gives zeros; padding counts for nothing

The sum runs in float32, in batch order, and is rounded once; the rows of the ids are written nowhere. A mean is a sum
whose scales are 1 / (ids of the bag that are not padding).

Reference: torch.nn.EmbeddingBag.
"""

import numpy as np

from oneemb.kernels.jit import cpu, keep_rolled, to_float32
from oneemb.kernels.jit_lanes import LANES, load_lanes, same_lanes, store_lanes
from oneemb.kernels.reduce_grads import sum_rows
from oneemb.kernels.threads import Threads

__all__ = ["mean_scales", "pool", "scale_grads"]

# A bag is several rows of work.
_SHARE_MIN = 64


@cpu
def _mean_scales_cpu(begin, end, offset_P1, inverse_N, scale_N):
    for p in range(begin, end):
        count = 0
        for n in range(offset_P1[p], offset_P1[p + 1]):
            count += inverse_N[n] >= 0
        scale = np.float32(1) / np.float32(max(count, 1))
        for n in range(offset_P1[p], offset_P1[p + 1]):
            scale_N[n] = scale


def mean_scales(offset_P1: np.ndarray, inverse_N: np.ndarray, *, threads: Threads) -> np.ndarray:
    """What each id is multiplied with for its bag's sum to be the mean: float32 [N]."""
    scale_N = np.empty(len(inverse_N), np.float32)
    threads.run(_mean_scales_cpu, len(offset_P1) - 1, offset_P1, inverse_N, scale_N, share_min=1 << 14)
    return scale_N


@cpu
def _pool_cpu(begin, end, weight_SX, slot_U, inverse_N, offset_P1, scale_N, out_PX):
    last = offset_P1[end] - 1
    for p in range(begin, end):
        sum_rows(
            out_PX, p, np.float32(0), weight_SX, slot_U, inverse_N, offset_P1[p], offset_P1[p + 1], last, scale_N
        )  # fmt: skip


def pool(
    weight_SX: np.ndarray,
    slot_U: np.ndarray,
    inverse_N: np.ndarray,
    offset_P1: np.ndarray,
    scale_N: np.ndarray | None,
    out_PX: np.ndarray,
    *,
    threads: Threads,
) -> None:
    """out_PX[p] = the sum of bag p.

    Args:
        weight_SX: weights' bits [S, X], X >= D, as `RowFormat.weights` gives them.
        slot_U: int64 [U].
        inverse_N: the key of each id; -1 for padding.
        scale_N: float32 [N]; None = 1.
        out_PX: [P, D] of the dtype of `weight_SX`.
    """
    if len(slot_U) == 0:  # nothing but padding
        out_PX[:] = 0
        return
    threads.run(_pool_cpu, len(out_PX), weight_SX, slot_U, inverse_N, offset_P1, scale_N, out_PX, share_min=_SHARE_MIN)


@cpu
def _scale_grads_cpu(begin, end, weight_SX, slot_U, inverse_N, bag_N, grad_PX, out_N):
    dim = grad_PX.shape[1]
    rest = dim - dim % LANES
    lane_1L = np.empty((1, LANES), np.float32)
    for n in range(begin, end):
        u = inverse_N[n]
        out_N[n] = 0
        if u < 0:
            continue
        s, p = slot_U[u], np.int64(bag_N[n])
        products = same_lanes(np.float32(0))
        for d in range(0, rest, LANES):
            keep_rolled()
            products = products + load_lanes(weight_SX, s, d) * load_lanes(grad_PX, p, d)
        # Lane by lane from here on: an order that the loop for GPUs can keep too.
        store_lanes(lane_1L, np.int64(0), np.int64(0), products)
        for d in range(rest, dim):
            lane_1L[0, d - rest] += to_float32(weight_SX[s, d]) * to_float32(grad_PX[p, d])
        for lane in range(LANES):
            out_N[n] += lane_1L[0, lane]


def scale_grads(
    weight_SX: np.ndarray,
    slot_U: np.ndarray,
    inverse_N: np.ndarray,
    bag_N: np.ndarray,
    grad_PX: np.ndarray,
    *,
    threads: Threads,
) -> np.ndarray:
    """The gradient of scale_N: for each id its weights times its bag's gradient, summed over D. float32 [N]"""
    out_N = np.empty(len(inverse_N), np.float32)
    threads.run(_scale_grads_cpu, len(out_N), weight_SX, slot_U, inverse_N, bag_N, grad_PX, out_N)
    return out_N
