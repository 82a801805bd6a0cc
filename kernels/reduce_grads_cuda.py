"""Sums the gradients of each unique key on the GPU.  N ids, U unique keys, D weights, P parts.

    grad_UD[u] = sum of grad_NX[n] over the occurrences n of key u, in float32
    of bags:     sum of scale_N[n] * grad_PX[bag of n]

Invariant: the order of the sum is a function of the batch alone. Up to 64 occurrences are summed in batch order, as
on the CPU and to the same bits. More are summed in parts of 64 occurrences, and then the parts in order. If there are
more than 64 parts, each 64 of them are summed first, and then these sums in order: no thread walks the whole chain of a
hot key. In each case the sum of k gradients is within k * 2^-24 * (sum of |g|) of the exact one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import Array, vector_width
from oneemb.kernels.jit import CudaLoop, Number, cuda, load, rule, store
from oneemb.kernels.jit_code import float_bits

if TYPE_CHECKING:  # row updates of the CPU import this file, and must not load CUDA
    from oneemb.kernels.launch import Gpu, Grid

PART = 64
"""Occurrences of a part."""

_COUNT_BITS = 26
_COUNT_MASK = (1 << _COUNT_BITS) - 1

V = 1
SCALED = False  # whether gradients are multiplied on their way into the sum; `at(SCALED=True)` sets it

# Number of sizes of batches for which views of the arrays are kept.
_SIZES_MAX = 16

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(begin_U1, part_U, key_P, part_PD): as in `Segments`, and the key of each part, int64 [P]."""


class Segments(NamedTuple):
    """Places of each key's gradients; see `segments_of`."""

    grad_NX: torch.Tensor
    """[N, D], or [P, D] of bags: bits of float32, float16 or bfloat16"""
    order_N: torch.Tensor
    """int64 [N]: the rows of grad_NX, key by key"""
    scale_N: torch.Tensor
    """float32 [N]: the factor of each row, in the order of order_N; of length 0 if all factors are 1"""
    begin_U1: torch.Tensor
    """int64 [U + 1]: where the rows of each key begin in order_N; N in places beyond the last key"""
    part_U: torch.Tensor
    """int64 [U]: 2 ** 26 times the first of a key's parts in part_PD, plus the number of its parts; any number for a
    key of at most one part"""
    part_PD: torch.Tensor
    """float32 [P, D]: the sums of parts. If a key has more than `PART` parts, each `PART`-th place of the key, from the
    first on, has the sum of `PART` parts instead"""

    @property
    def shape(self) -> tuple[int, int]:
        """(U, D): the shape of the summed gradients."""
        return self.begin_U1.shape[0] - 1, self.grad_NX.shape[1]

    @property
    def shapes(self) -> tuple[object, ...]:
        """A value that decides the shapes and dtypes of all arrays, and whether they are in C order, which gradients of
        a user need not be. The shapes of part_U and part_PD follow from the others."""
        grad_NX, order_N, scale_N, begin_U1, _, _ = self
        return (
            grad_NX.shape, grad_NX.dtype, grad_NX.is_contiguous(), order_N.numel(), scale_N.numel(), begin_U1.numel(),
        )  # fmt: skip

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
def begin_loop(sorted_N: Array, begin_U1: Array, part_U: Array, key_P: Array, count_1: Array) -> None:
    """begin_U1[u] = the first place of u in sorted_N, and N for all after the last u.

    Each key of several parts gets places for them, in any order of keys: part_U as of `Segments`; key_P[p] = u for each
    place. count_1[0] counts places.
    """
    size = sorted_N.shape[0]
    n = cuda.grid(1)
    while n < size:
        u = sorted_N[n]
        if u >= 0 and (n == 0 or sorted_N[n - 1] != u):
            begin_U1[u] = n
            if n + PART < size and sorted_N[n + PART] == u:
                last, end = n + PART, size  # a place of u, and one behind it; they close in on the end of u
                while end - last > 1:
                    middle = (last + end) >> 1
                    if sorted_N[middle] == u:
                        last = middle
                    else:
                        end = middle
                parts = (end - n + PART - 1) // PART
                first = cuda.atomic.add(count_1, 0, parts)
                part_U[u] = first << _COUNT_BITS | parts
                for p in range(first, first + parts):
                    key_P[p] = u
        n += cuda.gridsize(1)
    beyond = sorted_N[size - 1] + 1 + cuda.grid(1)
    while beyond < begin_U1.shape[0]:
        begin_U1[beyond] = size
        beyond += cuda.gridsize(1)


@cuda
def sum_parts_loop(
    grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array, key_P: Array,
    count_1: Array,
) -> None:  # fmt: skip
    """Sum each part in batch order; key_P and count_1 as of `begin_loop`."""
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


@cuda
def join_parts_loop(part_U: Array, part_PD: Array, key_P: Array, count_1: Array) -> None:
    """Sum `PART` parts at a time of keys with more parts, in order, into the first of them; key_P and count_1 as of
    `begin_loop`."""
    sum_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    p = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while p < count_1[0]:
        first, parts = part_U[key_P[p]] >> _COUNT_BITS, part_U[key_P[p]] & _COUNT_MASK
        d = cuda.threadIdx.x * V
        while parts > PART and (p - first) % PART == 0 and d < part_PD.shape[1]:
            load(sum_V, part_PD, p, d)
            for q in range(p + 1, min(p + PART, first + parts)):
                load(x_V, part_PD, q, d)
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
    begin, end = begin_U1[u], begin_U1[u + 1]
    if end - begin > PART:
        first, parts = part_U[u] >> _COUNT_BITS, part_U[u] & _COUNT_MASK
        step = PART if parts > PART else 1
        load(sum_V, part_PD, first, d)
        p = first + step
        while p < first + parts:
            load(x_V, part_PD, p, d)
            for i in range(V):
                sum_V[i] = plus(sum_V[i], x_V[i])
            p += step
    else:
        term(sum_V, grad_NX, order_N, scale_N, begin, d)
        for k in range(begin + 1, end):
            term(x_V, grad_NX, order_N, scale_N, k, d)
            for i in range(V):
                sum_V[i] = plus(sum_V[i], x_V[i])


@cuda
def reduce_loop(
    grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array, grad_UD: Array,
    finite_1: Array,
) -> None:  # fmt: skip
    """Write each key's sum, and nothing in places beyond the last key; finite_1[0] turns 0 where a value of a sum
    is not finite."""
    sum_V = cuda.local.array(V, np.float32)
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < grad_UD.shape[0] and begin_U1[u] < order_N.shape[0]:
        d = cuda.threadIdx.x * V
        while d < grad_UD.shape[1]:
            sum_segment(sum_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
            store(grad_UD, u, d, sum_V)
            for i in range(V):
                if is_nonfinite(sum_V[i]):
                    finite_1[0] = 0
            d += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


def segments_of(
    grad_NX: torch.Tensor,
    inverse_N: torch.Tensor,
    keys: int,
    bag_N: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None,
    *,
    gpu: "Gpu",
) -> Segments:
    """The gradients of each of `keys` keys; the parts of keys with many occurrences are summed here already.

    Args:
        grad_NX: [N, D], or [P, D] of bags; C-contiguous, bits of float32, float16 (uint16) or bfloat16 (int16).
        inverse_N: int32, the key of each id, -1 for padding.
        bag_N: int64 [N], the row of grad_NX for each id; None = its own.
        scale_N: float32 [N], the factor of each id's row; None = 1.
    """
    segments, *args = _grouped(grad_NX, inverse_N, keys, bag_N, scale_N, gpu, _new_arrays)
    if segments.order_N.shape[0]:
        shapes = begin_loop, grad_NX.data_ptr() % 16, segments.shapes
        gpu.run_in_turn(lambda: _loops_of(segments, gpu), *args, shapes=shapes)
    return segments


def _grouped(
    grad_NX: torch.Tensor, inverse_N: torch.Tensor, keys: int, bag_N: torch.Tensor | None,
    scale_N: torch.Tensor | None, gpu: "Gpu", arrays: "Callable[[int, int, int, Gpu], Arrays]",
) -> list[Any]:  # fmt: skip
    """Segments that no loop has written yet, and the arguments of each of `_loops_of`, which write them. `arrays`:
    `_new_arrays` or `_arrays_again`."""
    # The sort is stable, so that ids of one key stay in batch order; padding, -1, comes first and is in no range.
    sorted_N, order_N = torch.sort(inverse_N, stable=True)
    size, dim = order_N.numel(), grad_NX.shape[1]
    # An upper bound: a key that has parts has more than PART occurrences, so at least PART / 2 for each part.
    parts = 2 * size // PART if size > PART else 0
    begin_U1, part_U, key_P, part_PD = arrays(keys, parts, dim, gpu)
    count_1 = gpu.filled(1)
    scale_N = gpu.none(torch.float32) if scale_N is None else scale_N[order_N]
    order_N = order_N if bag_N is None else bag_N[order_N]
    segments = Segments(grad_NX, order_N, scale_N, begin_U1, part_U, part_PD)
    args = [segments, (sorted_N, begin_U1, part_U, key_P, count_1)]
    if parts > 0:
        args.append((*segments, key_P, count_1))
    if size > PART * PART:
        args.append((part_U, segments.part_PD, key_P, count_1))
    return args


def _new_arrays(keys: int, parts: int, dim: int, gpu: "Gpu") -> Arrays:
    """Arrays for so many keys, parts and weights of a row, not initialized."""
    begin_U1, part_U, key_P = (gpu.empty(size, dtype=torch.int64) for size in (keys + 1, keys, parts))
    return begin_U1, part_U, key_P, gpu.empty(parts, dim, dtype=torch.float32)


class _ArraysAgain:
    """Arrays as of `_new_arrays`, which launches on one stream use one after the other. They are views of the same
    memory for all sizes, and views are kept, since most steps repeat the sizes of earlier steps."""

    def __init__(self, gpu: "Gpu"):
        self._gpu = gpu
        self._number_X, self._sum_X = gpu.none(torch.int64), gpu.none(torch.float32)
        self.made: dict[tuple[int, int, int], Arrays] = {}

    def make(self, keys: int, parts: int, dim: int) -> Arrays:
        gpu, numbers, sums = self._gpu, 2 * keys + 1 + parts, parts * dim
        if len(self.made) >= _SIZES_MAX or numbers > len(self._number_X) or sums > len(self._sum_X):
            self.made.clear()
        with torch.inference_mode(False):
            if numbers > len(self._number_X):
                self._number_X = gpu.none(torch.int64)  # The memory is freed before more is allocated.
                self._number_X = gpu.empty(1 << numbers.bit_length(), dtype=torch.int64)
            if sums > len(self._sum_X):
                self._sum_X = gpu.none(torch.float32)
                self._sum_X = gpu.empty(1 << sums.bit_length(), dtype=torch.float32)
            begin_U1, part_U, key_P = torch.split(self._number_X[:numbers], [keys + 1, keys, parts])
            part_PD = self._sum_X[:sums].view(parts, dim)
        found = gpu.kept(begin_U1), gpu.kept(part_U), gpu.kept(key_P), gpu.kept(part_PD)
        self.made[keys, parts, dim] = found
        return found


def _arrays_again(keys: int, parts: int, dim: int, gpu: "Gpu") -> Arrays:
    again: _ArraysAgain | None = gpu.scratch.get(_ArraysAgain)
    if again is None:
        again = gpu.scratch[_ArraysAgain] = _ArraysAgain(gpu)
    return again.made.get((keys, parts, dim)) or again.make(keys, parts, dim)


def _loops_of(segments: Segments, gpu: "Gpu", keys: int = 0) -> list[tuple[CudaLoop, "Grid"]]:
    """Loops that write segments, and their sums for so many keys, for `Gpu.run_in_turn`."""
    size, (parts, dim) = segments.order_N.shape[0], segments.part_PD.shape
    loops, v = [(begin_loop, gpu.grid(size))], vector_width(dim, segments.grad_NX)
    if parts > 0:
        loops.append((sum_parts_loop.at(V=v, SCALED=segments.scaled), gpu.grid_of_rows(parts, dim // v)))
    if size > PART * PART:
        of_parts = vector_width(dim, segments.part_PD)
        loops.append((join_parts_loop.at(V=of_parts), gpu.grid_of_rows(parts, dim // of_parts)))
    if keys > 0:
        loops.append((reduce_loop.at(V=v, SCALED=segments.scaled), gpu.grid_of_rows(keys, dim // v)))
    return loops


def sum_grads_cuda(
    grad_NX: torch.Tensor, inverse_N: torch.Tensor, keys: int, bag_N: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None, finite_1: torch.Tensor | None = None, *, gpu: "Gpu",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Result of `reduce_grads_cuda` for `segments_of`, whose loops are launched together."""
    # Nothing reads the segments after this launch.
    segments, *args = _grouped(grad_NX, inverse_N, keys, bag_N, scale_N, gpu, _arrays_again)
    grad_UD = torch.empty(keys, grad_NX.shape[1], dtype=torch.float32, device=gpu.device)
    finite_1 = gpu.filled(1, 1) if finite_1 is None else finite_1
    if keys > 0:
        shapes = reduce_loop, grad_NX.data_ptr() % 16, segments.shapes
        args.append((*segments, grad_UD, finite_1))
        gpu.run_in_turn(lambda: _loops_of(segments, gpu, keys), *args, shapes=shapes)
    return grad_UD, finite_1


def reduce_grads_cuda(
    segments: Segments, finite_1: torch.Tensor | None = None, *, gpu: "Gpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients of equal keys: grad_UD float32 [U, D], and int64 [1], 1 if all sums are finite, on the device.
    Beyond the last key, grad_UD holds any numbers.

    Args:
        finite_1: the number that turns 0 if a sum is not finite; None = a new one.
    """
    keys, dim = segments.begin_U1.shape[0] - 1, segments.grad_NX.shape[1]
    grad_UD = gpu.empty(keys, dim, dtype=torch.float32)
    finite_1 = gpu.filled(1, 1) if finite_1 is None else finite_1
    v = vector_width(dim, segments.grad_NX)
    loop = reduce_loop.at(V=v, SCALED=segments.scaled)
    gpu.run_rows(loop, keys, dim // v, *segments, grad_UD, finite_1, shapes=segments.shapes)
    return grad_UD, finite_1
