"""Pins and scores of the slots that a lookup finds, on the GPU.  U keys, S slots.

Invariants: the keys of a launch are distinct, and so are the slots of their rows: no two threads of it write one
slot; pins are counted with atomics, since a launch on another stream may pin or release the same slot meanwhile.
"""

from oneemb.kernels.arrays import Array
from oneemb.kernels.hash_index_cuda import seek
from oneemb.kernels.jit import Number, cuda

_PLACE_MASK = (1 << 40) - 1


@cuda
def acquire_loop(
    cell_C2: Array, table_U: Array, id_U: Array, size_2: Array, pin_S: Array, score_S: Array, pins: Number,
    tick: Number, slot_U: Array, inserted_2: Array, count_4: Array,
) -> None:  # fmt: skip
    """slot_U[u] = the slot of key u, pinned `pins` times more; -1 where there is none: for the first size_2[0] keys.

    A slot's score becomes `tick`, the time of this use; if that is negative it grows by -tick.
    count_4: number of keys without a slot, added up; then size_2; then inserted_2[1], the keys that found no cell.
    """
    u = cuda.grid(1)
    if u == 0:
        count_4[1] = size_2[0]
        count_4[2] = size_2[1]
        count_4[3] = inserted_2[1]
    while u < size_2[0]:
        c = seek(cell_C2, table_U[u], id_U[u])
        if c < 0:
            slot_U[u] = -1
            cuda.atomic.add(count_4, 0, 1)
        else:
            s = (cell_C2[c, 1] & _PLACE_MASK) - 1
            slot_U[u] = s
            if pins > 0:
                cuda.atomic.add(pin_S, s, 1)
            if tick > 0:
                score_S[s] = tick
            else:
                score_S[s] -= tick
        u += cuda.gridsize(1)


@cuda
def release_loop(slot_U: Array, pin_S: Array) -> None:
    """Unpin slots, each once; -1 is none, and slots beyond those there are belong to rows that were dropped."""
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
