"""Whether gradients are finite, found by the device for itself: updates and torch's fused optimizers ask it there.

    go_1[0] = 1     all that was looked at is finite; a number that is not turns it 0, and nothing here turns it back

A sum is finite if its terms are so small that it must be, which one pass over the gradients finds. Where they are not,
the sums are made once more and looked at: most steps leave that loop at once. So the answer is that of the sums.
"""

import numpy as np
import torch

from oneemb.kernels.arrays import Array, vector_width
from oneemb.kernels.jit import Number, cuda, load
from oneemb.kernels.later import Later, tell
from oneemb.kernels.launch import Gpu
from oneemb.kernels.reduce_grads_cuda import Segments, is_nonfinite, sum_segment

V = 1
SCALED = False

SCALE_MAX = 2.0**20
"""Scales of gradients below this are taken for this."""


@cuda
def find_large_loop(number_NX: Array, bound: Number, large_1: Array) -> None:
    """large_1[0] turns 1 where the magnitude of a number is not below `bound`."""
    x_V = cuda.local.array(V, np.float32)
    n = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while n < number_NX.shape[0]:
        d = cuda.threadIdx.x * V
        while d < number_NX.shape[1]:
            load(x_V, number_NX, n, d)
            for i in range(V):
                if not abs(x_V[i]) < bound:
                    large_1[0] = 1
            d += cuda.blockDim.x * V
        n += cuda.gridDim.x * cuda.blockDim.y


@cuda
def check_sums_loop(
    grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array, large_1: Array,
    go_1: Array,
) -> None:  # fmt: skip
    """go_1[0] turns 0 where a sum is not finite, if large_1[0] is 1."""
    sum_V = cuda.local.array(V, np.float32)
    dim = grad_NX.shape[1]
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < begin_U1.shape[0] - 1 and large_1[0] != 0 and begin_U1[u] < order_N.shape[0]:
        d = cuda.threadIdx.x * V
        while d < dim:
            sum_segment(sum_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
            for i in range(V):
                if is_nonfinite(sum_V[i]):
                    go_1[0] = 0
            d += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


@cuda
def check_sum_loop(finite_1: Array, go_1: Array, told_X: Array) -> None:
    """go_1[0] turns 0 if finite_1[0] is 0; the host is told go_1[0], if it waits for it."""
    if cuda.grid(1) == 0:
        if finite_1[0] == 0:
            go_1[0] = 0
        tell(go_1, told_X)


@cuda
def check_norm_loop(norm_1: Array, go_1: Array) -> None:
    """go_1[0] turns 0 where a norm is infinite or NaN."""
    if cuda.grid(1) == 0 and is_nonfinite(norm_1[0]):
        go_1[0] = 0


def check_segments_cuda(segments: Segments, sum_max: float, go_1: torch.Tensor, *, gpu: Gpu) -> None:
    """go_1[0] turns 0 if a sum is not finite; a sum whose exact value is below `sum_max` is finite."""
    large_1 = gpu.filled(1)
    bound = sum_max / max(1, segments.order_N.shape[0])
    if segments.scaled:
        bound /= SCALE_MAX
        gpu.run_rows(
            find_large_loop.at(V=1), segments.scale_N.shape[0], 1, segments.scale_N.view(-1, 1), np.float32(SCALE_MAX),
            large_1,
        )  # fmt: skip
    size, dim = segments.grad_NX.shape
    v = vector_width(dim, segments.grad_NX)
    gpu.run_rows(find_large_loop.at(V=v), size, dim // v, segments.grad_NX, np.float32(bound), large_1)
    keys, v = segments.begin_U1.shape[0] - 1, vector_width(dim, segments.grad_NX)
    gpu.run_rows(check_sums_loop.at(V=v, SCALED=segments.scaled), keys, dim // v, *segments, large_1, go_1)


def check_norm_cuda(norm: torch.Tensor, go_1: torch.Tensor, *, gpu: Gpu) -> None:
    """go_1[0] turns 0 if the norm of dense gradients is not finite."""
    zero_or_nan = norm - norm  # so that a finite norm of float64 is finite in float32
    gpu.run(check_norm_loop, 1, zero_or_nan.reshape(1).to(torch.float32), go_1)


def check_sums_cuda(finite_1: torch.Tensor, go_1: torch.Tensor, *, gpu: Gpu, later: Later | None = None) -> None:
    """go_1[0] turns 0 if finite_1[0], of sums that were made before, is 0. `later` is then told go_1[0]."""
    told_X = gpu.none(torch.int64) if later is None else later.told_X
    gpu.run_in_turn(
        lambda: ((check_sum_loop, gpu.grid(1)),), (finite_1, go_1, told_X), shapes=(check_sum_loop, later is None)
    )
