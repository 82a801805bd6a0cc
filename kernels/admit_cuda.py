"""Slots, first values and index cells of a lookup's new keys, on the GPU, launched together with `acquire_loop`.

The host need not know whether there are new keys: `acquire_loop` has counted them in each share of the keys, and a
block whose share has none ends at once. The r-th new key, in the order of the keys, gets the slot that
`FreeSlots.reserve` would give it, so slots do not depend on the order in which threads run.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from oneemb.kernels.arrays import BLOCK_MAX, Array
from oneemb.kernels.hash_index_cuda import PLACE_BITS, claim
from oneemb.kernels.init_rows_cuda import DeviceInitialRows, begin_row
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.later import Later, tell
from oneemb.kernels.launch import SHARES_MAX, Gpu, Loops
from oneemb.kernels.ranks_cuda import rank_in_block, ranks_of_shares, share_of
from oneemb.kernels.slots_cuda import acquire_loop
from oneemb.kernels.unique_keys_cuda import DeviceKeys


class TierArrays(NamedTuple):
    """Arrays of a tier of S slots. A tier that grows replaces some of them."""

    row_SW: torch.Tensor
    table_S: torch.Tensor
    id_S: torch.Tensor
    score_S: torch.Tensor
    pin_S: torch.Tensor
    dirty_S: torch.Tensor
    free_X: torch.Tensor
    """int64: the stack of `FreeSlots`"""
    cell_C2: torch.Tensor
    inserted_2: torch.Tensor
    """int64: as count_2 of `insert_loop`"""
    count_X: torch.Tensor
    """int32 [SHARES_MAX]: room for the number of keys without a slot in each share"""


@cuda
def admit_loop(
    slot_U: Array, count_4: Array, told_X: Array, count_B: Array, free_X: Array, free_2: Array, next_2: Array,
    cell_C2: Array, inserted_2: Array, table_S: Array, id_S: Array, score_S: Array, pin_S: Array, dirty_S: Array,
    score: Number, lane_bits: Number, weight_SX: Array, row_SW: Array, table_U: Array, id_U: Array, seed: Number,
    kind_TC: Array, param_TC4: Array, end_C: Array, state: Array, state_begin: Number,
) -> None:  # fmt: skip
    """Give each key without a slot a free one, write the row's first values, and put the key into the index; the slot
    is then pinned once and dirty. 2 ** lane_bits threads share a row.

    count_4, count_B: as `acquire_loop` has written them; the host is told count_4. free_2: number of slots on the
    stack free_X, and number of slots ever used; next_2: the same numbers after the loop, which writes them. score: of a
    new row.
    """
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
        tell(count_4, told_X)
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


@functools.lru_cache(maxsize=256)
def _key_of(*shapes: object) -> object:
    """An object that stands for these shapes in keys of launches, since the hash of so many takes some time."""
    return object()


class DeviceAdmission:
    """Acquires keys in a tier, where new keys get rows without the host. Arguments that are the same for many lookups
    are put together once.

    Args:
        arrays: the arrays of the tier as they are now.
        weight_SX: view of `arrays.row_SW` as bits of weights.
        initial, state, state_begin: first values of new rows, as for `init_rows_cuda`.
    """

    def __init__(
        self, arrays: TierArrays, weight_SX: torch.Tensor, initial: DeviceInitialRows, state: torch.Tensor, *,
        state_begin: int, gpu: Gpu,
    ):  # fmt: skip
        row_SW, table_S, id_S, score_S, pin_S, dirty_S, free_X, cell_C2, inserted_2, _ = arrays
        self.arrays, self.stream, self._gpu = arrays, gpu.stream_now(), gpu
        self._found = cell_C2, inserted_2, score_S, pin_S
        self._slots = cell_C2, inserted_2, table_S, id_S, score_S, pin_S, dirty_S
        self._values = gpu.lane_bits(-(-weight_SX.shape[1] // 4)), weight_SX, row_SW
        self._initial = initial.seed, initial.kind_TC, initial.param_TC4, initial.end_C, state, state_begin
        self._shapes = _key_of(
            free_X.shape, cell_C2.shape, row_SW.shape, weight_SX.shape, weight_SX.dtype,
            initial.kind_TC.shape, state.shape,
        )  # fmt: skip
        self._size, self._count_B = 0, arrays.count_X

    def acquire(
        self, keys: DeviceKeys, size: int, slot_U: torch.Tensor, count_4: torch.Tensor, later: Later,
        free_2: torch.Tensor, next_2: torch.Tensor, tick: int,
    ) -> None:  # fmt: skip
        """Write the pinned slots of `size` keys into slot_U, and tell `later` count_4; other arguments as of the loops.
        A new row has the score of one use: the absolute value of `tick`. The device must run the calls for one tier one
        after the other. An error that is not the driver's has launched nothing."""
        if size != self._size:
            gpu = self._gpu
            self._count_B, self._size = gpu.kept(self.arrays.count_X[: gpu.shares(size)[0]]), size
        count_B = self._count_B
        table_U, id_U = keys.table_U, keys.id_U
        cell_C2, inserted_2, score_S, pin_S = self._found
        self._gpu.run_in_turn(
            self._loops,
            (cell_C2, table_U, id_U, keys.size_2, pin_S, score_S, 1, tick, slot_U, inserted_2, count_4, count_B),
            (
                slot_U, count_4, later.told_X, count_B, self.arrays.free_X, free_2, next_2, *self._slots, abs(tick),
                *self._values, table_U, id_U, *self._initial,
            ),
            shapes=(self._shapes, size),
        )  # fmt: skip

    def _loops(self) -> Loops:
        grid = self._gpu.grid_of_shares(self._count_B.shape[0])
        return (acquire_loop, grid), (admit_loop, grid)
