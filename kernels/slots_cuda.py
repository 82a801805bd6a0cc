"""Pins, scores and dirty bits of the slots that a lookup finds, on the GPU.  U keys, S slots, B shares of the keys.

Arrays have room for N keys or more, of which the first U count; the slots beyond are `BEYOND`, so that loops over slots
end there. `acquire_loop` gives the slot of each key that is here. A host that does not know how many keys miss runs
`admit_loop` (admit_cuda.py) behind it, which gives slots to the others.

Invariants: the keys of a launch are distinct, and so are the slots of their rows: no two threads of it write one
slot; pins are counted with atomics, since a launch on another stream may pin or release the same slot meanwhile.
"""

import numpy as np

from oneemb.kernels.arrays import BEYOND, Array
from oneemb.kernels.hash_index_cuda import PLACE_MASK, seek
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.ranks_cuda import share_of


@cuda
def acquire_loop(
    cell_C2: Array, table_U: Array, id_U: Array, size_2: Array, pin_S: Array, score_S: Array, pins: Number,
    tick: Number, slot_U: Array, inserted_2: Array, count_4: Array, count_B: Array,
) -> None:  # fmt: skip
    """slot_U[u] = the slot of key u, pinned `pins` times more; -1 where there is none, `BEYOND` for places beyond the
    first size_2[0]. Each block takes a share of the keys.

    A slot's score becomes `tick`, the time of this use; if that is negative it grows by -tick.
    count_4: number of keys without a slot, added up; then size_2; then inserted_2[1], the keys that found no cell.
    count_B[b] = number of keys without a slot in a share.
    """
    new_1 = cuda.shared.array(1, np.int32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    size = size_2[0]
    share = share_of(size)
    if t == 0:
        new_1[0] = 0
        if b == 0:
            count_4[1] = size
            count_4[2] = size_2[1]
            count_4[3] = inserted_2[1]
    cuda.syncthreads()
    u = b * share + t
    end = min(b * share + share, size)
    while u < end:
        c = seek(cell_C2, table_U[u], id_U[u])
        if c < 0:
            slot_U[u] = -1
            cuda.atomic.add(new_1, 0, 1)
        else:
            s = (cell_C2[c, 1] & PLACE_MASK) - 1
            slot_U[u] = s
            if pins > 0:
                cuda.atomic.add(pin_S, s, 1)
            if tick > 0:
                score_S[s] = tick
            else:
                score_S[s] -= tick
        u += cuda.blockDim.x
    cuda.syncthreads()
    if t == 0:
        count_B[b] = new_1[0]
        if new_1[0] > 0:
            cuda.atomic.add(count_4, 0, new_1[0])
    beyond = size + cuda.grid(1)
    while beyond < slot_U.shape[0]:
        slot_U[beyond] = BEYOND
        beyond += cuda.gridsize(1)


@cuda
def mark_dirty_loop(slot_U: Array, dirty_S: Array) -> None:
    """Set the dirty bits of slots; numbers below 0 are no slots."""
    u = cuda.grid(1)
    while u < slot_U.shape[0]:
        if slot_U[u] >= 0:
            dirty_S[slot_U[u]] = True
        u += cuda.gridsize(1)


@cuda
def release_loop(slot_U: Array, pin_S: Array) -> None:
    """Unpin slots, each once; numbers below 0 are no slots, and slots beyond those there are belong to rows that were
    dropped."""
    u = cuda.grid(1)
    while u < slot_U.shape[0]:
        if 0 <= slot_U[u] < pin_S.shape[0]:
            cuda.atomic.sub(pin_S, slot_U[u], 1)
        u += cuda.gridsize(1)


@cuda
def count_pinned_loop(pin_S: Array, used: Number, count_1: Array) -> None:
    """Add the number of pinned slots among the first `used` to count_1."""
    s = cuda.grid(1)
    while s < used:
        if pin_S[s] > 0:
            cuda.atomic.add(count_1, 0, 1)
        s += cuda.gridsize(1)
