"""Row updates on the GPU: gradient, optimizer and write-back in one launch, whatever the optimizer.

The arrays are those of oneemb.kernels.row_update, on the device. The gradient comes either summed, float32 [U, D], or
as `Segments` of the batch's gradients, which are summed just before the optimizer uses them and not written to memory.

A group of threads shares a row; each takes V weights at a time, with their state and gradient, as 16 bytes where
every row is aligned to that. An optimizer whose rule needs nothing but one weight, its state and its gradient is run
by `element_loop`; one that first needs numbers of the whole row by `row_loop`. See oneemb.kernels.rule_loops.

Letters: V weights that a thread handles at once, X values of a row as it is stored.

A loop also sets the dirty bits of its rows, unless the length of dirty_S is 0.

Invariants: those of oneemb.kernels.row_update; slot -1 is left out, and a loop ends at slot `BEYOND`; and where go_1[0]
is 0, which a check on the device may set, nothing is written.
"""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from oneemb.kernels.arrays import BEYOND, Array, vector_width
from oneemb.kernels.jit import CudaLoop, Number, cuda, load, store
from oneemb.kernels.reduce_grads_cuda import Segments, plus, sum_segment

if TYPE_CHECKING:  # row updates of the CPU import this file, and must not load CUDA
    import torch

    from oneemb.kernels.launch import Gpu, Loops

V = 1


@cuda.inner
def given(
    g_V: Array, grad_UD: Array, order_N: Array, scale_N: Array, begin_U1: Array, part_U: Array, part_PD: Array,
    u: Number, d: Number,
) -> None:  # fmt: skip
    """The gradient, read from grad_UD."""
    load(g_V, grad_UD, u, d)


gradient = given  # or sum_segment; `at(gradient=...)` sets it


@cuda.inner
def _stateless(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple
) -> None:
    w_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    for i in range(V):
        w_V[i] = optimizer(w_V[i], g_V[i], *scalars)
    store(weight_SX, s, d, w_V)


@cuda.inner
def _one_state(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple
) -> None:
    w_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    load(x_V, row_SW, s, state_begin + d)
    for i in range(V):
        w_V[i], x_V[i] = optimizer(w_V[i], x_V[i], g_V[i], *scalars)
    store(weight_SX, s, d, w_V)
    store(row_SW, s, state_begin + d, x_V)


@cuda.inner
def _two_states(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple
) -> None:
    w_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    y_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    load(x_V, row_SW, s, state_begin + d)
    load(y_V, row_SW, s, state_begin + dim + d)
    for i in range(V):
        w_V[i], x_V[i], y_V[i] = optimizer(w_V[i], x_V[i], y_V[i], g_V[i], *scalars)
    store(weight_SX, s, d, w_V)
    store(row_SW, s, state_begin + d, x_V)
    store(row_SW, s, state_begin + dim + d, y_V)


@cuda.inner
def _three_states(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple
) -> None:
    w_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    y_V = cuda.local.array(V, np.float32)
    z_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    load(x_V, row_SW, s, state_begin + d)
    load(y_V, row_SW, s, state_begin + dim + d)
    load(z_V, row_SW, s, state_begin + 2 * dim + d)
    for i in range(V):
        w_V[i], x_V[i], y_V[i], z_V[i] = optimizer(w_V[i], x_V[i], y_V[i], z_V[i], g_V[i], *scalars)
    store(weight_SX, s, d, w_V)
    store(row_SW, s, state_begin + d, x_V)
    store(row_SW, s, state_begin + dim + d, y_V)
    store(row_SW, s, state_begin + 2 * dim + d, z_V)


elements = _stateless  # `at(elements=..., optimizer=...)` sets both
optimizer: Any = None


@cuda
def element_loop(
    weight_SX: Array, row_SW: Array, slot_U: Array, grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array,
    part_U: Array, part_PD: Array, go_1: Array, dirty_S: Array, state_begin: Number, scalars: tuple,
) -> None:  # fmt: skip
    """One step of an optimizer that looks at one weight at a time."""
    g_V = cuda.local.array(V, np.float32)
    dim = grad_NX.shape[1]
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0] and slot_U[u] != BEYOND and go_1[0] != 0:
        s = slot_U[u]
        d = cuda.threadIdx.x * V if s >= 0 else dim
        if d == 0 and dirty_S.shape[0] > 0:
            dirty_S[s] = True
        while d < dim:
            gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
            elements(weight_SX, row_SW, s, d, state_begin, dim, g_V, scalars)
            d += cuda.blockDim.x * V
        u += cuda.gridDim.x * cuda.blockDim.y


@functools.cache
def element_update(rule: Any, states: int) -> CudaLoop:
    """The loop for rule(w, *state, g, *scalars) -> w, *state with this many states a weight."""
    return element_loop.at(optimizer=rule, elements=(_stateless, _one_state, _two_states, _three_states)[states])


# ---- optimizers that need numbers of the whole row -------------------------------------------------------------------


@cuda.inner
def _as_it_is(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple,
) -> None:  # fmt: skip
    return


@cuda.inner
def _directed(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple,
) -> None:  # fmt: skip
    """Replace the gradients g_V of V weights, which have two states each, by the directions of their steps. New states
    are computed but not stored."""
    w_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    y_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    load(x_V, row_SW, s, state_begin + d)
    load(y_V, row_SW, s, state_begin + dim + d)
    for i in range(V):
        g_V[i], x_V[i], y_V[i] = direction(w_V[i], x_V[i], y_V[i], g_V[i], *scalars)


@cuda.inner
def _directed_elements(
    weight_SX: Array, row_SW: Array, s: Number, d: Number, state_begin: Number, dim: Number, g_V: Array, scalars: tuple,
) -> None:  # fmt: skip
    """Update V weights, and their two states, by a step in the direction that `direction` computes; scalars[0] is the
    rate of the row."""
    w_V = cuda.local.array(V, np.float32)
    x_V = cuda.local.array(V, np.float32)
    y_V = cuda.local.array(V, np.float32)
    load(w_V, weight_SX, s, d)
    load(x_V, row_SW, s, state_begin + d)
    load(y_V, row_SW, s, state_begin + dim + d)
    for i in range(V):
        g_V[i], x_V[i], y_V[i] = direction(w_V[i], x_V[i], y_V[i], g_V[i], *scalars[1:])
        w_V[i] = optimizer(w_V[i], g_V[i], *scalars)
    store(weight_SX, s, d, w_V)
    store(row_SW, s, state_begin + d, x_V)
    store(row_SW, s, state_begin + dim + d, y_V)


@cuda.inner
def _no_state(row_SW: Array, s: Number, at: Number) -> Number:
    return np.float32(0)


@cuda.inner
def _keep_nothing(row_SW: Array, s: Number, at: Number, x: Number) -> None:
    return


@cuda.inner
def _state_at(row_SW: Array, s: Number, at: Number) -> Number:
    return row_SW[s, at]


@cuda.inner
def _keep_at(row_SW: Array, s: Number, at: Number, x: Number) -> None:
    row_SW[s, at] = x


# `at` of `row_update` sets these.
direct = _as_it_is
row_state = _no_state
keep_row_state = _keep_nothing
direction: Any = None
shares: Any = None
rate_of: Any = None
SUMS = False
STATES = 0
_BLOCK_MAX = 256


@cuda
def row_loop(
    weight_SX: Array, row_SW: Array, slot_U: Array, grad_NX: Array, order_N: Array, scale_N: Array, begin_U1: Array,
    part_U: Array, part_PD: Array, go_1: Array, dirty_S: Array, state_begin: Number, scalars: tuple,
) -> None:  # fmt: skip
    """One step of an optimizer that needs rates of a row before it steps the row's weights one by one."""
    share_x = cuda.shared.array(_BLOCK_MAX, np.float32)  # each thread's shares of its row's sums
    share_y = cuda.shared.array(_BLOCK_MAX, np.float32)
    sum_2 = cuda.local.array(2, np.float32)
    g_V = cuda.local.array(V, np.float32)
    w_V = cuda.local.array(V, np.float32)
    dim = grad_NX.shape[1]
    at = state_begin + STATES * dim
    lane, lanes, groups = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockDim.y
    # All threads of a block make the same number of turns, since they wait for each other.
    first = cuda.blockIdx.x * groups
    while first < slot_U.shape[0] and slot_U[first] != BEYOND and go_1[0] != 0:
        u = first + cuda.threadIdx.y
        live = u < slot_U.shape[0] and slot_U[u] >= 0
        own = cuda.threadIdx.y * lanes
        sum_2[0] = np.float32(0)
        sum_2[1] = np.float32(0)
        if SUMS:
            if live:
                d = lane * V
                while d < dim:
                    gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
                    direct(weight_SX, row_SW, slot_U[u], d, state_begin, dim, g_V, scalars)
                    load(w_V, weight_SX, slot_U[u], d)  # last, since the sum of a gradient takes many registers
                    for i in range(V):
                        x, y = shares(w_V[i], g_V[i], *scalars)
                        sum_2[0] = plus(sum_2[0], x)
                        sum_2[1] = plus(sum_2[1], y)
                    d += lanes * V
                share_x[own + lane] = sum_2[0]
                share_y[own + lane] = sum_2[1]
            cuda.syncthreads()
            sum_2[0] = np.float32(0)
            sum_2[1] = np.float32(0)
            if live:
                for k in range(lanes):
                    sum_2[0] = plus(sum_2[0], share_x[own + k])
                    sum_2[1] = plus(sum_2[1], share_y[own + k])
        if live:
            s = slot_U[u]
            rates = rate_of(sum_2[0], sum_2[1], np.float32(dim), row_state(row_SW, s, at), *scalars)
            d = lane * V
            while d < dim:
                gradient(g_V, grad_NX, order_N, scale_N, begin_U1, part_U, part_PD, u, d)
                elements(weight_SX, row_SW, s, d, state_begin, dim, g_V, rates[1:] + scalars)
                d += lanes * V
        cuda.syncthreads()  # the row's state has been read by all, and so have the shares
        if live and lane == 0:
            keep_row_state(row_SW, slot_U[u], at, rates[0])
            if dirty_S.shape[0] > 0:
                dirty_S[slot_U[u]] = True
        first += cuda.gridDim.x * groups


def row_update(
    rule: Any, rate_of: Any, *, shares: Any, direction: Any, states: int, has_row_state: bool
) -> CudaLoop:  # fmt: skip
    """The loop for an optimizer with this many states a weight; see `row_loops` of oneemb.kernels.rule_loops."""
    assert states == 2 or direction is None
    kept = dict(row_state=_state_at, keep_row_state=_keep_at) if has_row_state else {}
    sums = dict(SUMS=True, shares=shares) if shares is not None else {}
    directed = dict(direct=_directed, direction=direction, elements=_directed_elements) if direction is not None else {}
    of_states = (_stateless, _one_state, _two_states, _three_states)[states]
    return row_loop.at(
        rate_of=rate_of, optimizer=rule, STATES=states, **{"elements": of_states, **directed}, **sums, **kept
    )  # fmt: skip


def run_row_update_cuda(
    loop: CudaLoop,
    scalars: tuple,
    weight_SX: "torch.Tensor",
    row_SW: "torch.Tensor",
    slot_U: "torch.Tensor",
    grad: "torch.Tensor | Segments",
    state_begin: int,
    go_1: "torch.Tensor | None" = None,
    dirty_S: "torch.Tensor | None" = None,
    *,
    gpu: "Gpu",
) -> None:
    """Run an update's loop over all rows of slot_U.

    Args:
        grad: gradients, float32 [U, D], from the beginning of memory that torch has allocated, which is aligned; or
            the segments of the U keys.
        go_1: int64 [1] on the device: 0 = leave the rows as they are; None = go.
        dirty_S: bool [S]: dirty bits, which the loop sets; None = none.
    """
    rows, dim = shape = grad.shape
    none, no_scale, no_parts, no_dirty = gpu.nothing(dim)
    arrays: Segments | tuple[torch.Tensor, ...]
    of_grad: tuple[object, ...]
    if isinstance(grad, Segments):
        arrays, of_grad = grad, (grad.shapes, grad.grad_NX.data_ptr() % 16)
    else:
        arrays, of_grad = (grad, none, no_scale, none, none, no_parts), (shape, grad.is_contiguous())

    def loops() -> "Loops":
        # weight_SX and row_SW are views of one slab, so their rows are aligned alike.
        v = vector_width(dim, weight_SX) if state_begin % 4 == 0 else 1
        if isinstance(grad, Segments):
            v = min(v, vector_width(dim, grad.grad_NX))
            found = loop.at(V=v, gradient=sum_segment, SCALED=grad.scaled)
        else:
            found = loop.at(V=v, gradient=given, SCALED=False)
        return ((found, gpu.grid_of_rows(rows, dim // v)),)

    go_1 = gpu.filled(1, 1) if go_1 is None else go_1
    if rows > 0:
        # The slab decides the shape of its view weight_SX, and how many dirty bits there are.
        shapes = (
            loop, rows, row_SW.shape, row_SW.data_ptr() % 16, weight_SX.dtype, of_grad, dirty_S is None, state_begin,
        )  # fmt: skip
        dirty_S = no_dirty if dirty_S is None else dirty_S
        gpu.run_in_turn(loops, (weight_SX, row_SW, slot_U, *arrays, go_1, dirty_S, state_begin, scalars), shapes=shapes)
