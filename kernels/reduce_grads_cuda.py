"""Sums the gradients of each unique key on the GPU.  N ids, U unique keys, D weights, P parts.

    grad_UD[u] = sum of grad_NX[n] over the occurrences n of key u, in float32
    of bags:     sum of scale_N[n] * grad_PX[bag of n]

Invariant: the order of the sum is a function of the batch alone. Up to 64 occurrences are summed in batch order, as
on the CPU and to the same bits; a key with more is summed in parts of 64, and the parts in order, so that no thread
walks the whole chain of a hot key. Both ways of a sum of k terms are within k * 2^-24 * (sum of |g|) of the exact one.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cuda, load, rule, store
from oneemb.kernels.jit_code import float_bits

if TYPE_CHECKING:  # row updates of the CPU import this file, and must not load CUDA
    from oneemb.kernels.launch import Gpu

PART = 64
"""Occurrences of a part."""

_COUNT_BITS = 26
_COUNT_MASK = (1 << 26) - 1

V = 1
SCALED = False  # whether gradients are multiplied on their way into the sum; `at(SCALED=True)` sets it


class Segments(NamedTuple):
    """Places of each key's gradients; see `segments_of`."""

    grad_NX: torch.Tensor
    """[N, D], or [P, D] of bags: bits of float32, float16 or bfloat16"""
    order_N: torch.Tensor
    """int64 [N]: the rows of grad_NX, key by key"""
    scale_N: torch.Tensor
    """float32 [N]: the factor of each, in the order of order_N; of length 0 for ones"""
    begin_U1: torch.Tensor
    """int64 [U + 1]: where each key's begin in order_N; N in places beyond the keys there are"""
    part_U: torch.Tensor
    """int64 [U]: where its parts begin in part_PD, times 2 ** 26, plus their number; 0 for a key of at most one part"""
    part_PD: torch.Tensor
    """float32 [P, D]: the sums of parts"""

    @property
    def shape(self) -> tuple[int, int]:
        """(U, D): the shape of the summed gradients."""
        return self.begin_U1.shape[0] - 1, self.grad_NX.shape[1]

    @property
    def scaled(self) -> bool:
        return self.scale_N.shape[0] > 0

    def cut(self, size: int) -> "Segments":
        """The segments of the first `size` keys, beyond which there are none."""
        return self._replace(begin_U1=self.begin_U1[: size + 1], part_U=self.part_U[:size])


@rule
def is_nonfinite(x: Number) -> Number:
    return (float_bits(x) & np.uint32(0x7F800000)) == np.uint32(0x7F800000)


@rule
def plus(x: Number, y: Number) -> Number:
    return x + y


@rule
def times(x: Number, scale: Number) -> Number:
    return x * scale


@cuda.inner
def term(x_V: Array, grad_NX: Array, order_N: Array, scale_N: Array, k: Number, d: Number) -> None:
    """x_V = what occurrence k adds at weights d .. d + V."""
    load(x_V, grad_NX, order_N[k], d)
    if SCALED:
        for i in range(V):
            x_V[i] = times(x_V[i], scale_N[k])


@cuda
def place_parts_loop(begin_U1: Array, part_U: Array, key_P: Array, count_1: Array) -> None:
    """Give each key of several parts places for them, in any order of keys: part_U as of `Segments`; key_P[p] = u for
    each place. count_1[0] counts places."""
    u = cuda.grid(1)
    while u < part_U.shape[0]:
        count = begin_U1[u + 1] - begin_U1[u]
        part_U[u] = 0
        if count > PART:
            parts = (count + PART - 1) // PART
            first = cuda.atomic.add(count_1, 0, parts)
            part_U[u] = first << _COUNT_BITS | parts
            for p in range(first, first + parts):
                key_P[p] = u
        u += cuda.gridsize(1)


@cuda
def sum_parts_loop(
    grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array, key_P: Array,
    count_1: Array,
) -> None:  # fmt: skip
    """Sum each part in batch order; key_P and count_1 as of `place_parts_loop`."""
    sum_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < count_1[0]:
        u = key_P[p]
        begin = begin_U1[u] + (p - (part_U[u] >> _COUNT_BITS)) * PART
        end = min(begin + PART, begin_U1[u + 1])
        d = cuda.threadIdx.x * V
        while d < part_PD.shape[1]:
            term(sum_V, grad_NX, order_N, scale_N, begin, d)
            for k in range(begin + 1, end):
                term(x_V, grad_NX, order_N, scale_N, k, d)
                for i in range(V):
                    sum_V[i] = plus(sum_V[i], x_V[i])
            store(part_PD, p, d, sum_V)
            d += cuda.blockDim.x * V
        p += cuda.gridDim.x * cuda.blockDim.y


@cuda.inner
def sum_segment(
    sum_V: Array, grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array,
    u: Number, d: Number,
) -> None:  # fmt: skip
    """sum_V = the summed gradient of key u at weights d .. d + V."""
    x_V = cuda.local.array(V, np.float32)
    begin = part_U[u] >> _COUNT_BITS
    end = begin + (part_U[u] & _COUNT_MASK)
    if begin < end:
        load(sum_V, part_PD, begin, d)
        for p in range(begin + 1, end):
            load(x_V, part_PD, p, d)
            for i in range(V):
                sum_V[i] = plus(sum_V[i], x_V[i])
    else:
        term(sum_V, grad_NX, order_N, scale_N, begin_U1[u], d)
        for k in range(begin_U1[u] + 1, begin_U1[u + 1]):
            term(x_V, grad_NX, order_N, scale_N, k, d)
            for i in range(V):
                sum_V[i] = plus(sum_V[i], x_V[i])


@cuda
def reduce_loop(
    grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array, grad_UD: Array,
    finite_U: Array,
) -> None:  # fmt: skip
    """Write each key's sum, and nothing in places beyond the keys there are; finite_U[u] turns 0 where a value of the
    sum is not finite."""
    sum_V = cuda.local.array(V, np.float32)
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < grad_UD.shape[0] and begin_U1[u] < order_N.shape[0]:
        d = cuda.threadIdx.x * V
        while d < grad_UD.shape[1]:
            sum_segment(sum_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
            store(grad_UD, u, d, sum_V)
            for i in range(V):
                if is_nonfinite(sum_V[i]):
                    finite_U[u] = False
            d += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


def segments_of(
    grad_NX: torch.Tensor,
    order_N: torch.Tensor,
    begin_U1: torch.Tensor,
    bag_N: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None,
    *,
    gpu: "Gpu",
) -> Segments:
    """The gradients by unique key; the parts of keys with many occurrences are summed here already.

    Args:
        grad_NX: [N, D], or [P, D] of bags; C-contiguous, bits of float32, float16 (uint16) or bfloat16 (int16).
        order_N, begin_U1: of `oneemb.kernels.unique_keys_cuda.occurrences`.
        bag_N: int64 [N], the row of grad_NX for each id; None = its own.
        scale_N: float32 [N], the factor of each id's row; None = 1.
    """
    from oneemb.kernels.launch import vector_width

    dim, size, keys = grad_NX.shape[1], len(order_N), len(begin_U1) - 1
    scale_N = gpu.empty(0, dtype=torch.float32) if scale_N is None else scale_N[order_N]
    order_N = order_N if bag_N is None else bag_N[order_N]
    # An upper bound: a key that has parts has more than PART occurrences, so at least PART / 2 for each part.
    parts = 2 * size // PART if size > PART else 0
    part_U, part_PD = gpu.empty(keys, dtype=torch.int64), gpu.empty(parts, dim, dtype=torch.float32)
    segments = Segments(grad_NX, order_N, scale_N, begin_U1, part_U, part_PD)
    key_P, count_1 = gpu.empty(parts, dtype=torch.int64), gpu.zeros(1)
    gpu.run(place_parts_loop, keys, begin_U1, part_U, key_P, count_1)
    v = vector_width(dim, grad_NX, part_PD)
    loop = sum_parts_loop.at(V=v, SCALED=segments.scaled)
    gpu.run_rows(loop, parts, dim // v, *segments, key_P, count_1)
    return segments


def reduce_grads_cuda(segments: Segments, *, gpu: "Gpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients of equal keys: grad_UD float32 [U, D] and finite_U bool [U], on the device. Beyond the keys there
    are grad_UD holds any numbers, and finite_U True."""
    from oneemb.kernels.launch import vector_width

    keys, dim = segments.begin_U1.shape[0] - 1, segments.grad_NX.shape[1]
    grad_UD = gpu.empty(keys, dim, dtype=torch.float32)
    finite_U = gpu.full(keys, value=True, dtype=torch.bool)
    v = vector_width(dim, segments.grad_NX, segments.part_PD, grad_UD)
    gpu.run_rows(reduce_loop.at(V=v, SCALED=segments.scaled), keys, dim // v, *segments, grad_UD, finite_U)
    return grad_UD, finite_U
