"""New rows on the GPU: the same weights as oneemb.kernels.init_rows, drawn by the same rules.

A thread draws blocks of four weights, as Philox gives them. Constants and uniform draws have the CPU's bits; normal
draws go through log in float64, whose last bit may differ, and differ after rounding to float32 by 1 ulp at most.
"""

from typing import NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.init_rows import InitialRows, draw
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.jit_code import from_float32
from oneemb.kernels.later import tell
from oneemb.kernels.launch import Gpu
from oneemb.kernels.philox import philox

_LISTED_MAX = 1 << 14
"""Listed rows that `init_loop` writes at a time."""


class DeviceInitialRows:
    """`InitialRows` on the device."""

    def __init__(self, initial: InitialRows, *, gpu: Gpu):
        self.seed = np.uint64(initial.seed)
        self.kind_TC, self.param_TC4, self.end_C = (
            gpu.kept(gpu.put(array)) for array in (initial.kind_TC, initial.param_TC4, initial.end_C)
        )


class ListedSlots(NamedTuple):
    """Slots of some keys of a lookup, in arrays with room for all of its keys; the device knows how many there are."""

    slot_R: torch.Tensor
    """int64: slots of rows"""
    key_R: torch.Tensor
    """int64: which of the keys each slot is of"""
    count_X: torch.Tensor
    """int64: the first number is the number of slots"""
    told_X: torch.Tensor
    """int64: where the host is told count_X, as by oneemb.kernels.later; empty = it is not told"""


@cuda.inner
def begin_row(
    weight_SX: Array, row_SW: Array, s: Number, table: Number, key_id: Number, seed: Number, kind_TC: Array,
    param_TC4: Array, end_C: Array, state: Array, state_begin: Number, lane: Number, lanes: Number,
) -> None:  # fmt: skip
    """Write the weights and state of the new row in slot s, which `lanes` threads share, four weights a turn."""
    dim = end_C[end_C.shape[0] - 1]
    id = np.uint64(key_id)
    block = lane
    while block < (dim + 3) // 4:
        a, b, c, d = philox(id, id >> np.uint64(32), table, block, seed)
        for i in range(4):
            w = 4 * block + i
            if w < dim:
                column = 0
                while end_C[column] <= w:
                    column += 1
                word = a if i == 0 else b if i == 1 else c if i == 2 else d
                x = np.float32(draw(kind_TC[table, column], param_TC4[table, column], word, id))
                weight_SX[s, w] = from_float32(x, weight_SX[s, w])
        block += lanes
    z = lane
    while z < state.shape[0]:
        row_SW[s, state_begin + z] = state[z]
        z += lanes


@cuda
def init_loop(
    weight_SX: Array, row_SW: Array, slot_R: Array, key_R: Array, count_X: Array, told_X: Array, table_U: Array,
    id_U: Array, seed: Number, kind_TC: Array, param_TC4: Array, end_C: Array, state: Array, state_begin: Number,
) -> None:  # fmt: skip
    """Write the weights and state of new rows. A group of threads shares a row.

    Arrays are as in `ListedSlots`; where key_R has length 0, slot r is that of key r.
    """
    listed = key_R.shape[0] > 0
    rows = count_X[0] if listed else np.int64(slot_R.shape[0])
    r = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if r == 0 and cuda.threadIdx.x == 0:
        tell(count_X, told_X)
    while r < rows:
        s = slot_R[r]
        u = key_R[r] if listed else np.int64(r)
        begin_row(
            weight_SX, row_SW, s, table_U[u], id_U[u], seed, kind_TC, param_TC4, end_C, state, state_begin,
            cuda.threadIdx.x, cuda.blockDim.x,
        )  # fmt: skip
        r += cuda.gridDim.x * cuda.blockDim.y


def init_rows_cuda(
    weight_SX: torch.Tensor,
    row_SW: torch.Tensor,
    slot_U: torch.Tensor | ListedSlots,
    table_U: torch.Tensor,
    id_U: torch.Tensor,
    initial: DeviceInitialRows,
    state: torch.Tensor,
    *,
    state_begin: int,
    gpu: Gpu,
) -> None:
    """Write the initial weights and state of keys (table_U int32, id_U int64) into rows slot_U, or of the keys that are
    listed."""
    pieces = max(-(-int(weight_SX.shape[1]) // 4), 1)
    slots = slot_U if isinstance(slot_U, ListedSlots) else ListedSlots(slot_U, slot_U[:0], slot_U, slot_U[:0])
    # Of listed slots there are few or none as a rule: not so many blocks begin for nothing.
    rows, shapes = slots.slot_R.shape[0], None
    if slots is slot_U:
        rows = min(rows, _LISTED_MAX)
        shapes = (
            weight_SX.shape, weight_SX.dtype, row_SW.shape, slots.slot_R.shape, slots.count_X.shape,
            slots.told_X.shape, id_U.shape,
            initial.kind_TC.shape, state.shape,
        )  # fmt: skip
    gpu.run_rows(
        init_loop, rows, pieces, weight_SX, row_SW, *slots, table_U, id_U, initial.seed, initial.kind_TC,
        initial.param_TC4, initial.end_C, state, state_begin, shapes=shapes,
    )  # fmt: skip
