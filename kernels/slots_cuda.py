"""Pins, scores and dirty bits of the slots that a lookup finds, and slots of new keys, on the GPU.  U keys, S slots.

Arrays have room for N keys or more, of which the first U count; the slots beyond are `BEYOND`, so that loops over slots
end there. A host that does not know how many keys miss runs all four of these loops, the last of which puts the new
keys into the index:

    acquire_loop     the slot of each key that is here, pinned
    new_slots_loop   a list of the other keys, with a free slot for each
    init_loop        rows of these, see init_rows_cuda.py
    admit_loop       the keys are in the index, their slots taken and pinned

The last two take the list, and end at once where it is empty.

Invariants: the keys of a launch are distinct, and so are the slots of their rows: no two threads of it write one
slot; pins are counted with atomics, since a launch on another stream may pin or release the same slot meanwhile.
"""

import numpy as np

from oneemb.kernels.arrays import BEYOND, Array
from oneemb.kernels.hash_index_cuda import PLACE_BITS, claim, seek
from oneemb.kernels.jit import Number, cuda

_PLACE_MASK = (1 << 40) - 1

BLOCK_MAX = 1024
"""Threads of the block that ranks new keys, at most."""


@cuda
def acquire_loop(
    cell_C2: Array, table_U: Array, id_U: Array, size_2: Array, pin_S: Array, score_S: Array, pins: Number,
    tick: Number, slot_U: Array, absent_R: Array, inserted_2: Array, count_4: Array,
) -> None:  # fmt: skip
    """slot_U[u] = the slot of key u, pinned `pins` times more; -1 where there is none, `BEYOND` for places beyond the
    first size_2[0]. absent_R, unless its length is 0, lists the keys without a slot, in any order.

    A slot's score becomes `tick`, the time of this use; if that is negative it grows by -tick. If `pins` and `tick` are
    0 nothing is written to slots, and keys may repeat.
    count_4: number of keys without a slot, added up; then size_2; then inserted_2[1], the keys that found no cell.
    """
    u = cuda.grid(1)
    if u == 0:
        count_4[1] = size_2[0]
        count_4[2] = size_2[1]
        count_4[3] = inserted_2[1]
    while u < slot_U.shape[0]:
        inside = u < size_2[0]
        c = seek(cell_C2, table_U[u], id_U[u]) if inside else np.int64(-1)
        if c < 0:
            slot_U[u] = -1 if inside else BEYOND
            if inside:
                r = cuda.atomic.add(count_4, 0, 1)
                if r < absent_R.shape[0]:
                    absent_R[r] = u
        else:
            s = (cell_C2[c, 1] & _PLACE_MASK) - 1
            slot_U[u] = s
            if pins > 0:
                cuda.atomic.add(pin_S, s, 1)
            if tick > 0:
                score_S[s] = tick
            elif tick < 0:
                score_S[s] -= tick
        u += cuda.gridsize(1)


@cuda
def new_slots_loop(
    slot_U: Array, size_2: Array, count_4: Array, free_X: Array, free_2: Array, share: Number, new_R: Array,
    key_R: Array,
) -> None:  # fmt: skip
    """new_R[r] = a free slot for key key_R[r], the r-th of the keys without a slot; one block runs it, each thread for
    `share` keys.

    count_4[0] is the number of these keys. The slots are those that `FreeSlots.reserve` gives: the last on the stack
    free_X, which holds free_2[0] slots, then those from free_2[1] on.
    """
    count_B = cuda.shared.array(BLOCK_MAX, np.int64)
    t = cuda.threadIdx.x
    new = count_4[0]
    if new > 0:
        begin = t * share
        end = min(begin + share, size_2[0])
        count = 0
        for u in range(begin, end):
            if slot_U[u] < 0:
                count += 1
        count_B[t] = count
        cuda.syncthreads()
        rank = np.int64(0)
        for k in range(t):
            rank += count_B[k]
        returned = min(new, free_2[0])
        for u in range(begin, end):
            if slot_U[u] < 0:
                key_R[rank] = u
                if rank < returned:
                    new_R[rank] = free_X[free_2[0] - returned + rank]
                else:
                    new_R[rank] = free_2[1] + rank - returned
                rank += 1


@cuda
def admit_loop(
    cell_C2: Array, table_U: Array, id_U: Array, new_R: Array, key_R: Array, slot_U: Array, count_4: Array,
    free_2: Array, table_S: Array, id_S: Array, score_S: Array, pin_S: Array, dirty_S: Array, score: Number,
    inserted_2: Array,
) -> None:  # fmt: skip
    """Put the keys with a new slot into the index; their slots are taken, pinned once and dirty.

    inserted_2: as count_2 of `insert_loop`. free_2: as of `new_slots_loop`; the slots are no more free.
    """
    r = cuda.grid(1)
    if r == 0:
        returned = min(count_4[0], free_2[0])
        free_2[0] -= returned
        free_2[1] += count_4[0] - returned
    while r < count_4[0]:
        s = new_R[r]
        u = key_R[r]
        taken = claim(cell_C2, table_U[u], id_U[u], (np.int64(table_U[u]) << PLACE_BITS) | (s + 1))
        cuda.atomic.add(inserted_2, 0 if taken > 0 else 1, 1 if taken != 0 else 0)
        table_S[s] = table_U[u]
        id_S[s] = id_U[u]
        score_S[s] = score
        pin_S[s] = 1
        dirty_S[s] = True
        slot_U[u] = s
        r += cuda.gridsize(1)


@cuda
def mark_dirty_loop(slot_U: Array, dirty_S: Array) -> None:
    """Set the dirty bits of slots; those below 0 are none."""
    u = cuda.grid(1)
    while u < slot_U.shape[0]:
        if slot_U[u] >= 0:
            dirty_S[slot_U[u]] = True
        u += cuda.gridsize(1)


@cuda
def release_loop(slot_U: Array, pin_S: Array) -> None:
    """Unpin slots, each once; those below 0 are none, and slots beyond those there are belong to rows that were
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
