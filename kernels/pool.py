"""Pools the weights of bags of ids.  N ids in P bags, D weights.

    out_PD[p] = sum over the ids n of bag p of scale_N[n] * weights of id n
    bag p holds the ids offset_P1[p] to offset_P1[p + 1] - 1; an empty bag gives zeros; padding counts for nothing

The sum runs in float32, in batch order, and is rounded once; the rows of the ids are written nowhere. A mean is a sum
whose scales are 1 / (ids of the bag that are not padding).

Reference: torch.nn.EmbeddingBag.
"""

import numpy as np

from oneemb.kernels.jit import cpu, from_float32, prefetch, to_float32
from oneemb.kernels.threads import Threads

__all__ = ["bags_of", "mean_scales", "pool", "scale_grads"]

# Ids whose rows are asked for ahead of the one at work.
_AHEAD = 12

# Float32 lanes of a vector register.
_LANES = 16

# A bag is several rows of work.
_SHARE_MIN = 64


@cpu
def _bags_of_cpu(begin, end, offset_P1, table_P, bag_N, table_N):
    for p in range(begin, end):
        for n in range(offset_P1[p], offset_P1[p + 1]):
            bag_N[n] = p
            table_N[n] = table_P[p]


def bags_of(offset_P1: np.ndarray, table_P: np.ndarray, *, threads: Threads) -> tuple[np.ndarray, np.ndarray]:
    """The bag and the table of each id, int32 [N] each. `offset_P1` is int64, from 0 up to N; `table_P` is int32."""
    assert len(offset_P1) <= 2**31
    bag_N, table_N = np.empty(offset_P1[-1], np.int32), np.empty(offset_P1[-1], np.int32)
    threads.run(_bags_of_cpu, len(offset_P1) - 1, offset_P1, table_P, bag_N, table_N, share_min=1 << 14)
    return bag_N, table_N


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
    dim = out_PX.shape[1]
    sum_D = np.empty(dim, np.float32)
    last = offset_P1[end]
    for p in range(begin, end):
        sum_D[:] = 0
        for n in range(offset_P1[p], offset_P1[p + 1]):
            if n + _AHEAD < last and inverse_N[n + _AHEAD] >= 0:
                prefetch(weight_SX, slot_U[inverse_N[n + _AHEAD]])
            u = inverse_N[n]
            if u < 0:
                continue
            s = slot_U[u]
            scale = np.float32(1) if scale_N is None else scale_N[n]
            for d in range(dim):
                sum_D[d] += to_float32(weight_SX[s, d]) * scale
        for d in range(dim):
            out_PX[p, d] = from_float32(sum_D[d], out_PX[p, d])


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
        weight_SX: weights' bits [S, X], X >= D, as `RowLayout.weights` gives them.
        slot_U: int64 [U].
        inverse_N: the key of each id; -1 for padding.
        scale_N: float32 [N]; None = 1.
        out_PX: [P, D] of the dtype of `weight_SX`.
    """
    threads.run(_pool_cpu, len(out_PX), weight_SX, slot_U, inverse_N, offset_P1, scale_N, out_PX, share_min=_SHARE_MIN)


@cpu
def _scale_grads_cpu(begin, end, weight_SX, slot_U, inverse_N, bag_N, grad_PX, out_N):
    dim = grad_PX.shape[1]
    lane_L = np.empty(_LANES, np.float32)
    for n in range(begin, end):
        u = inverse_N[n]
        out_N[n] = 0
        if u < 0:
            continue
        s, p = slot_U[u], bag_N[n]
        lane_L[:] = 0
        for begin_d in range(0, dim - _LANES + 1, _LANES):
            for lane in range(_LANES):
                lane_L[lane] += to_float32(weight_SX[s, begin_d + lane]) * to_float32(grad_PX[p, begin_d + lane])
        for lane in range(dim % _LANES):
            d = dim - dim % _LANES + lane
            lane_L[lane] += to_float32(weight_SX[s, d]) * to_float32(grad_PX[p, d])
        for lane in range(_LANES):
            out_N[n] += lane_L[lane]


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
