"""New rows on the GPU: the same weights as oneemb.kernels.init_rows, drawn by the same rules.

A thread draws blocks of four weights, as Philox gives them. Constants and uniform draws have the CPU's bits; normal
draws go through log in float64, whose last bit may differ, and differ after rounding to float32 by 1 ulp at most.
"""

import numpy as np
import torch

from oneemb.kernels.arrays import Array
from oneemb.kernels.init_rows import InitialRows, draw
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.jit_code import from_float32
from oneemb.kernels.launch import Gpu
from oneemb.kernels.philox import philox


class DeviceInitialRows:
    """`InitialRows` on the device."""

    def __init__(self, initial: InitialRows, *, gpu: Gpu):
        self.seed = np.uint64(initial.seed)
        self.kind_TC = gpu.put(initial.kind_TC)
        self.param_TC4 = gpu.put(initial.param_TC4)
        self.end_C = gpu.put(initial.end_C)


@cuda
def init_loop(
    weight_SX: Array, row_SW: Array, slot_U: Array, table_U: Array, id_U: Array, seed: Number, kind_TC: Array,
    param_TC4: Array, end_C: Array, state: Array, state_begin: Number,
) -> None:  # fmt: skip
    """Write the weights and state of new rows; slot -1 is none. A group of threads shares a row, four weights a
    turn."""
    dim = end_C[end_C.shape[0] - 1]
    u = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while u < slot_U.shape[0]:
        s = slot_U[u]
        if s >= 0:
            table = table_U[u]
            id = np.uint64(id_U[u])
            block = cuda.threadIdx.x
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
                block += cuda.blockDim.x
            z = cuda.threadIdx.x
            while z < state.shape[0]:
                row_SW[s, state_begin + z] = state[z]
                z += cuda.blockDim.x
        u += cuda.gridDim.x * cuda.blockDim.y


def init_rows_cuda(
    weight_SX: torch.Tensor,
    row_SW: torch.Tensor,
    slot_U: torch.Tensor,
    table_U: torch.Tensor,
    id_U: torch.Tensor,
    initial: DeviceInitialRows,
    state: torch.Tensor,
    *,
    state_begin: int,
    gpu: Gpu,
) -> None:
    """Write the initial weights and state of keys (table_U int32, id_U int64) into rows slot_U."""
    pieces = max(-(-int(weight_SX.shape[1]) // 4), 1)
    gpu.run_rows(
        init_loop, len(slot_U), pieces, weight_SX, row_SW, slot_U, table_U, id_U, initial.seed, initial.kind_TC,
        initial.param_TC4, initial.end_C, state, state_begin,
    )  # fmt: skip
