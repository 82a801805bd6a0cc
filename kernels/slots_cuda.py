"""What a lookup does to the slots it finds, on the GPU: pins and scores.  U keys, S slots.

Invariant: the keys of a launch are distinct, and so are the slots of their rows: no two threads write one slot.
"""

from oneemb.kernels.hash_index_cuda import seek
from oneemb.kernels.jit import cuda

__all__ = ["admit_loop", "count_pinned_loop", "release_loop"]

_PLACE_MASK = (1 << 40) - 1


@cuda
def admit_loop(cell_C2, table_U, id_U, pin_S, score_S, pins, tick, count_U, slot_U, missed_1):
    """slot_U[u] = the slot of key u, pinned `pins` times more; -1 and one more in missed_1 where there is none.

    A slot's score becomes `tick`, the time of this use; with tick 0 it grows by count_U[u], or 1 if count_U is empty.
    """
    u = cuda.grid(1)
    while u < id_U.shape[0]:
        c = seek(cell_C2, table_U[u], id_U[u])
        if c < 0:
            slot_U[u] = -1
            cuda.atomic.add(missed_1, 0, 1)
        else:
            s = (cell_C2[c, 1] & _PLACE_MASK) - 1
            slot_U[u] = s
            pin_S[s] += pins
            if tick > 0:
                score_S[s] = tick
            elif count_U.shape[0] > 0:
                score_S[s] += count_U[u]
            else:
                score_S[s] += 1
        u += cuda.gridsize(1)


@cuda
def release_loop(slot_U, pin_S):
    """Unpin slots, each once."""
    u = cuda.grid(1)
    while u < slot_U.shape[0]:
        pin_S[slot_U[u]] -= 1
        u += cuda.gridsize(1)


@cuda
def count_pinned_loop(pin_S, used, count_1):
    """Add the number of pinned slots among the first `used` to count_1."""
    s = cuda.grid(1)
    while s < used:
        if pin_S[s] > 0:
            cuda.atomic.add(count_1, 0, 1)
        s += cuda.gridsize(1)
