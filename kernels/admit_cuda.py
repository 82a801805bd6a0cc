"""Slots, first values and index cells of a lookup's new keys, on the GPU, in one launch behind `acquire_loop`.

The host need not know whether there are new keys: `acquire_loop` has counted them in each share of the keys, and a
block whose share has none ends at once. The r-th new key, in the order of the keys, gets the slot that
`FreeSlots.reserve` would give it, so slots do not depend on the order in which threads run.
"""

from typing import NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import BLOCK_MAX, Array
from oneemb.kernels.hash_index_cuda import PLACE_BITS, claim
from oneemb.kernels.init_rows_cuda import DeviceInitialRows, begin_row
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.launch import SHARES_MAX, Gpu
from oneemb.kernels.ranks_cuda import rank_in_block, ranks_of_shares, share_of


class DeviceAdmission(NamedTuple):
    """Arrays of a tier that give slots to the keys of a lookup that have none. S slots, B shares of the keys."""

    slot_U: torch.Tensor
    """int64: -1 for a key without a slot; the loop writes the slots"""
    count_4: torch.Tensor
    """int64, as `acquire_loop` has written it"""
    count_B: torch.Tensor
    """int32: number of keys without a slot in each share"""
    free_X: torch.Tensor
    """int64: the stack of `FreeSlots`"""
    free_2: torch.Tensor
    """int64: number of slots on the stack, and number of slots ever used"""
    next_2: torch.Tensor
    """int64: the same numbers after the loop, which writes them"""
    cell_C2: torch.Tensor
    inserted_2: torch.Tensor
    """int64: as count_2 of `insert_loop`"""
    table_S: torch.Tensor
    id_S: torch.Tensor
    score_S: torch.Tensor
    pin_S: torch.Tensor
    dirty_S: torch.Tensor
    score: int
    """Score of a new row."""


@cuda
def admit_loop(
    slot_U: Array, count_4: Array, count_B: Array, free_X: Array, free_2: Array, next_2: Array, cell_C2: Array,
    inserted_2: Array, table_S: Array, id_S: Array, score_S: Array, pin_S: Array, dirty_S: Array, score: Number,
    lane_bits: Number, weight_SX: Array, row_SW: Array, table_U: Array, id_U: Array, seed: Number, kind_TC: Array,
    param_TC4: Array, end_C: Array, state: Array, state_begin: Number,
) -> None:  # fmt: skip
    """Give each key without a slot a free one, write the row's first values, and put the key into the index; the slot
    is then pinned once and dirty. 2 ** lane_bits threads share a row."""
    count_T = cuda.shared.array(BLOCK_MAX, np.int32)
    rank_B = cuda.shared.array(SHARES_MAX, np.int32)
    key_T = cuda.shared.array(BLOCK_MAX, np.int64)
    t, b, lanes = cuda.threadIdx.x, cuda.blockIdx.x, 1 << lane_bits
    lane = t & (lanes - 1)
    new, size = count_4[0], count_4[1]
    returned = min(new, free_2[0])
    if b == 0 and t == 0:
        next_2[0] = free_2[0] - returned
        next_2[1] = free_2[1] + new - returned
    if count_B[b] > 0:
        ranks_of_shares(count_B, count_T, rank_B)
        rank = np.int64(rank_B[b])
        share = share_of(size)
        first = b * share
        end = min(first + share, size)
        while first < end:
            u = first + t
            is_new = u < end and slot_U[u] < 0
            r = rank_in_block(count_T, 1 if is_new else 0)
            found = count_T[cuda.blockDim.x - 1]
            if is_new:
                key_T[r] = u
            cuda.syncthreads()
            k = t >> lane_bits
            while k < found:
                v = key_T[k]
                if rank + k < returned:
                    s = free_X[free_2[0] - returned + rank + k]
                else:
                    s = free_2[1] + rank + k - returned
                begin_row(
                    weight_SX, row_SW, s, table_U[v], id_U[v], seed, kind_TC, param_TC4, end_C, state, state_begin,
                    lane, lanes,
                )  # fmt: skip
                if lane == 0:
                    taken = claim(cell_C2, table_U[v], id_U[v], (np.int64(table_U[v]) << PLACE_BITS) | (s + 1))
                    cuda.atomic.add(inserted_2, 0 if taken > 0 else 1, 1 if taken != 0 else 0)
                    table_S[s] = table_U[v]
                    id_S[s] = id_U[v]
                    score_S[s] = score
                    pin_S[s] = 1
                    dirty_S[s] = True
                    slot_U[v] = s
                k += cuda.blockDim.x >> lane_bits
            rank += found
            first += cuda.blockDim.x
            cuda.syncthreads()


def admit_rows_cuda(
    weight_SX: torch.Tensor, row_SW: torch.Tensor, admission: DeviceAdmission, table_U: torch.Tensor,
    id_U: torch.Tensor, initial: DeviceInitialRows, state: torch.Tensor, *, state_begin: int, gpu: Gpu,
) -> None:  # fmt: skip
    """Admit the keys of a lookup (table_U int32, id_U int64) that have no slot; arguments as of `init_rows_cuda`."""
    lane_bits = gpu.lane_bits(-(-weight_SX.shape[1] // 4))
    gpu.run_shares(
        admit_loop, admission.count_B.shape[0], *admission, lane_bits, weight_SX, row_SW, table_U, id_U, initial.seed,
        initial.kind_TC, initial.param_TC4, initial.end_C, state, state_begin,
        shapes=(
            admission.slot_U.shape, admission.free_X.shape, admission.cell_C2.shape, row_SW.shape, weight_SX.shape,
            weight_SX.dtype, initial.kind_TC.shape, state.shape,
        ),
    )  # fmt: skip
