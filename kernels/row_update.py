"""What every row update shares: the call onto the threads, the L2 gradient.

The arrays of an update, the same for every optimizer (see oneemb.storage.row_layout for the row):

    row_SW       float32 [S, W], C order: the slab; the optimizer's state begins at word `state_begin`
    weight_SX    the same memory seen as weights' bits (float32, uint16 = float16, int16 = bfloat16)
    slot_U       int64 [U]: the rows to update, each slot at most once
    grad_UD      float32 [U, D], C order: the summed gradient of each row; or `Segments`, gradients still to be summed,
                 which the loop sums row by row on their way into the optimizer, to the same bits

Invariants: an update writes D weights and the state of the rows in slot_U and no other byte; a row's new value
depends on that row and its gradient alone, so neither the order of the rows nor the number of threads matters.
What torch computes in Python floats (bias corrections, decayed rates) is computed in Python floats before the
loop and rounded to float32 once, as torch rounds it.
"""

from typing import Any

import numpy as np

from oneemb.kernels.jit import CudaLoop, rule
from oneemb.kernels.reduce_grads import Segments
from oneemb.kernels.threads import Threads

__all__ = ["l2_grad", "run_row_update"]


@rule
def l2_grad(w, g, weight_decay):
    """The gradient with L2 decay. Without decay it is g itself, even where w is infinite."""
    return g + weight_decay * w if weight_decay != 0 else g


def run_row_update(
    loop,
    weight_SX: Any,
    row_SW: Any,
    slot_U: Any,
    grad_UD: Any,
    state_begin: int,
    *scalars,
    state_width: int,
    threads: Any,
    on_cuda: CudaLoop,
) -> None:
    """Run an update's loop over all rows of slot_U; `state_width` words of state are in use.

    `threads` are the CPU's, for its loop, or a `Gpu`, for the loop `on_cuda`; the arrays are where it computes.
    """
    if not isinstance(threads, Threads):
        from oneemb.kernels.row_update_cuda import run_row_update_cuda

        run_row_update_cuda(on_cuda, weight_SX, row_SW, slot_U, grad_UD, state_begin, *scalars, gpu=threads)
        return
    assert row_SW.dtype == np.float32 and row_SW.ndim == 2 and row_SW.flags.c_contiguous
    assert weight_SX.dtype in (np.float32, np.uint16, np.int16) and weight_SX.flags.c_contiguous
    assert len(weight_SX) == len(row_SW) and row_SW.shape[1] >= state_begin + state_width
    assert slot_U.dtype == np.int64 and slot_U.ndim == 1 and slot_U.flags.c_contiguous
    assert grad_UD.shape[0] == len(slot_U)
    if isinstance(grad_UD, Segments):
        grads = grad_UD.arrays()
    else:
        assert grad_UD.dtype == np.float32 and grad_UD.ndim == 2
        grads = grad_UD, None, None, None
    assert grads[0].flags.c_contiguous
    threads.run(loop, len(slot_U), weight_SX, row_SW, slot_U, grads, state_begin, *scalars)
