"""Common parts of row updates: rules that torch's optimizers use, and the call of a loop on the host's threads.

The arrays of an update, the same for every optimizer (see oneemb.storage.rows.row_format for the row):

    row_SW       float32 [S, W], C order: the slab; the optimizer's state begins at word `state_begin`
    weight_SX    the same memory seen as weights' bits (float32, uint16 = float16, int16 = bfloat16)
    slot_U       int64 [U]: the rows to update, each slot at most once
    grad_UD      float32 [U, D], C order: the summed gradient of each row; or `Segments`, gradients still to be summed,
                 which the loop sums row by row before it uses them, to the same bits

Invariants: an update writes D weights and the state of the rows in slot_U and no other byte; a row's new value
depends on that row and its gradient alone, so neither the order of the rows nor the number of threads matters.
What torch computes in Python floats (bias corrections, decayed rates) is computed in Python floats before the
loop and rounded to float32 once, as torch rounds it: `plan` of a `RowUpdate` returns such scalars as Python floats.
"""

import numpy as np

from oneemb.kernels.jit import CpuLoop, Number, rule
from oneemb.kernels.reduce_grads import Segments
from oneemb.kernels.threads import Threads


@rule
def l2_grad(w: Number, g: Number, weight_decay: Number) -> Number:
    """The gradient with L2 decay. Without decay it is g itself, even where w is infinite."""
    return g + weight_decay * w if weight_decay != 0 else g


@rule
def lerp(x: Number, y: Number, from_x: Number, pull: Number) -> Number:
    """x + pull * (y - x) if `from_x`, otherwise y + pull * (y - x); the scalars come from `lerp_scalars`."""
    return (x if from_x else y) + pull * (y - x)


def lerp_scalars(share: float) -> tuple[bool, np.float32]:
    """(from_x, pull) with which `lerp` goes `share` of the way from x to y. Like torch.lerp, it starts at the nearer of
    the two."""
    pull = np.float32(share)
    from_x = bool(pull < np.float32(0.5))
    return from_x, pull if from_x else pull - np.float32(1)


@rule
def maximum(x: Number, y: Number) -> Number:
    """The larger of two numbers; NaN if either is NaN, as in torch.maximum."""
    return x if x >= y or x != x else y


def run_row_update(
    loop: CpuLoop,
    weight_SX: np.ndarray,
    row_SW: np.ndarray,
    slot_U: np.ndarray,
    grads: np.ndarray | Segments,
    state_begin: int,
    scalars: tuple,
    *,
    state_width: int,
    threads: Threads,
) -> None:
    """Run an update's loop over all rows of slot_U.

    Args:
        scalars: NumPy numbers, bools and integers, and Python floats, which are rounded to float32 here.
        state_width: number of words of state that the loop uses.
    """
    assert row_SW.dtype == np.float32 and row_SW.ndim == 2 and row_SW.flags.c_contiguous
    assert weight_SX.dtype in (np.float32, np.uint16, np.int16) and weight_SX.flags.c_contiguous
    assert len(weight_SX) == len(row_SW) and row_SW.shape[1] >= state_begin + state_width
    assert slot_U.dtype == np.int64 and slot_U.ndim == 1 and slot_U.flags.c_contiguous
    assert grads.shape[0] == len(slot_U)
    if isinstance(grads, Segments):
        arrays = grads.arrays()
    else:
        assert grads.dtype == np.float32 and grads.ndim == 2
        arrays = grads, None, None, None
    assert arrays[0].flags.c_contiguous
    rounded = [np.float32(scalar) if type(scalar) is float else scalar for scalar in scalars]
    threads.run(loop, len(slot_U), weight_SX, row_SW, slot_U, arrays, state_begin, *rounded)
