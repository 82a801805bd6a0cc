"""Pools the weights of bags of ids.  N ids in P bags, D weights.

    pool        out_PD[row_P[p]] = sum over the ids n of bag p of scale_N[n] * weights of id n
    pool_max    out_PD[row_P[p]] = elementwise maximum over the ids of bag p of their weights
    bag p holds the ids offset_P1[p] to offset_P1[p + 1] - 1; an empty bag gives zeros; padding is left out
    row_P may be None: row p

The sum runs in float32, in batch order, and is rounded once; the rows of the ids are not copied. A mean is a sum
whose scales are 1 / (ids of the bag that are not padding).

If several ids of a bag have the same greatest weight, the first of them gives the maximum. NaN is neither greater nor
less than any number: a NaN of the bag's first id is the maximum, a NaN of a later id is passed over.

Reference: torch.nn.EmbeddingBag.
"""

import numpy as np

from oneemb.kernels.arrays import Array, Bags
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.jit_code import keep_rolled, natural, to_float32
from oneemb.kernels.jit_lanes import LANES, load_lanes, same_lanes, store_lanes
from oneemb.kernels.reduce_grads import row_of, sum_rows
from oneemb.kernels.threads import Threads

# Least number of bags that is worth waking a thread for; a bag has several rows.
_SHARE_MIN = 64


@cpu
def _mean_scales_cpu(begin: Number, end: Number, offset_P1: Array, inverse_N: Array, scale_N: Array) -> None:
    for p in range(begin, end):
        count = 0
        for n in range(offset_P1[p], offset_P1[p + 1]):
            count += inverse_N[n] >= 0
        scale = np.float32(1) / np.float32(max(count, 1))
        for n in range(offset_P1[p], offset_P1[p + 1]):
            scale_N[n] = scale


def mean_scales(offset_P1: np.ndarray, inverse_N: np.ndarray, *, threads: Threads) -> np.ndarray:
    """Scale of each id with which a bag's sum is the bag's mean: float32 [N]."""
    scale_N = np.empty(len(inverse_N), np.float32)
    threads.run(_mean_scales_cpu, len(offset_P1) - 1, offset_P1, inverse_N, scale_N, share_min=1 << 14)
    return scale_N


@cpu
def _pool_cpu(
    begin: Number, end: Number, weight_SX: Array, slot_U: Array, inverse_N: Array, offset_P1: Array, row_P: Array,
    scale_N: Array, out_PX: Array,
) -> None:  # fmt: skip
    last = offset_P1[end] - 1
    for p in range(begin, end):
        r = p if row_P is None else np.int64(row_P[p])
        sum_rows(
            out_PX, r, np.float32(0), weight_SX, slot_U, inverse_N, offset_P1[p], offset_P1[p + 1], last, scale_N
        )  # fmt: skip


def pool(
    weight_SX: np.ndarray,
    slot_U: np.ndarray,
    inverse_N: np.ndarray,
    bags: Bags,
    scale_N: np.ndarray | None,
    out_PX: np.ndarray,
    *,
    threads: Threads,
) -> None:
    """out_PX[p] = the sum of bag p; out_PX[row_P[p]] if `bags.row_P` is given.

    Args:
        weight_SX, slot_U, inverse_N: as in `gather`; `slot_U` must not be None.
        scale_N: float32 [N]; None = 1.
        out_PX: [P, D] of the dtype of `weight_SX`.
    """
    if len(slot_U) == 0:  # nothing but padding
        out_PX[:] = 0
        return
    threads.run(
        _pool_cpu, len(out_PX), weight_SX, slot_U, inverse_N, *bags.arrays, scale_N, out_PX, share_min=_SHARE_MIN
    )


@cpu
def _pool_max_cpu(
    begin: Number, end: Number, weight_SX: Array, slot_U: Array, inverse_N: Array, offset_P1: Array, row_P: Array,
    out_PX: Array, argmax_PD: Array,
) -> None:  # fmt: skip
    dim = natural(out_PX.shape[1])
    last = natural(offset_P1[end]) - natural(1)
    for p in range(natural(begin), natural(end)):
        r = p if row_P is None else natural(row_P[p])
        empty = True
        for n in range(natural(offset_P1[p]), natural(offset_P1[p + natural(1)])):
            keep_rolled()
            s = row_of(weight_SX, slot_U, inverse_N, n, last, 0, dim)
            if s < 0:
                continue
            place, row = np.int32(n - natural(offset_P1[p])), natural(s)
            for d in range(dim):
                greater = empty or to_float32(weight_SX[row, d]) > to_float32(out_PX[r, d])
                out_PX[r, d] = weight_SX[row, d] if greater else out_PX[r, d]
                argmax_PD[r, d] = place if greater else argmax_PD[r, d]
            empty = False
        if empty:
            for d in range(dim):
                out_PX[r, d] = 0
                argmax_PD[r, d] = -1


def pool_max(
    weight_SX: np.ndarray,
    slot_U: np.ndarray,
    inverse_N: np.ndarray,
    bags: Bags,
    out_PX: np.ndarray,
    argmax_PD: np.ndarray,
    *,
    threads: Threads,
) -> None:
    """out_PX[p] = elementwise maximum of bag p. argmax_PD[p], int32 = position within the bag, from 0, of the id that
    gave each maximum; -1 for a bag that holds nothing but padding."""
    if len(slot_U) == 0:  # nothing but padding
        out_PX[:], argmax_PD[:] = 0, -1
        return
    threads.run(
        _pool_max_cpu, len(out_PX), weight_SX, slot_U, inverse_N, *bags.arrays, out_PX, argmax_PD, share_min=_SHARE_MIN
    )


@cpu
def _spread_max_grads_cpu(
    begin: Number, end: Number, offset_P1: Array, row_P: Array, argmax_PD: Array, grad_PX: Array, out_NX: Array
) -> None:
    zero = grad_PX.dtype.type(0)
    for p in range(natural(begin), natural(end)):
        r = p if row_P is None else natural(row_P[p])
        for n in range(natural(offset_P1[p]), natural(offset_P1[p + natural(1)])):
            keep_rolled()
            place = np.int32(n - natural(offset_P1[p]))
            for d in range(natural(grad_PX.shape[1])):
                out_NX[n, d] = grad_PX[r, d] if argmax_PD[r, d] == place else zero


def spread_max_grads(
    bags: Bags, argmax_PD: np.ndarray, grad_PX: np.ndarray, out_NX: np.ndarray, *, threads: Threads
) -> None:
    """out_NX[n, d] = grad_PX[p, d] if `argmax_PD` says that id n gave maximum d of its bag p, otherwise zero. If
    `bags.row_P` is given, the gradient of bag p is in row row_P[p]. grad_PX and out_NX hold the raw bits of float32,
    float16 or bfloat16, both of the same."""
    threads.run(_spread_max_grads_cpu, len(grad_PX), *bags.arrays, argmax_PD, grad_PX, out_NX, share_min=_SHARE_MIN)


@cpu
def _scale_grads_cpu(
    begin: Number, end: Number, weight_SX: Array, slot_U: Array, inverse_N: Array, bag_N: Array, grad_PX: Array,
    out_N: Array,
) -> None:  # fmt: skip
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
        # From here on the lanes are added one after another, an order that the GPU's loop can keep too.
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
    """Gradient of scale_N, float32 [N]: for each id, the dot product of its weights and its bag's gradient."""
    out_N = np.empty(len(inverse_N), np.float32)
    threads.run(_scale_grads_cpu, len(out_N), weight_SX, slot_U, inverse_N, bag_N, grad_PX, out_N)
    return out_N
