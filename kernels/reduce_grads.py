"""Sums the gradients of each unique key.  N ids, U unique keys, D weights.

    grad_UD[u] = sum of grad_ND[n] over the occurrences n of key u, in float32, in batch order

Invariant: the order of the sum is that of the batch, so the result depends on no number of threads.
"""

import numpy as np

from oneemb.kernels.jit import cpu, float_bits, prefetch, to_float32
from oneemb.kernels.threads import Threads

__all__ = ["reduce_grads"]

_EXPONENT = np.uint32(0x7F800000)
_AHEAD = 8


@cpu
def _reduce_grads_cpu(begin, end, grad_NX, head_U, next_N, grad_UD, finite_U):
    dim = grad_UD.shape[1]
    for u in range(begin, end):
        if u + _AHEAD < end:
            prefetch(grad_NX, head_U[u + _AHEAD])
        n = head_U[u]
        for d in range(dim):
            grad_UD[u, d] = to_float32(grad_NX[n, d])
        n = next_N[n]
        while n >= 0:
            for d in range(dim):
                grad_UD[u, d] += to_float32(grad_NX[n, d])
            n = next_N[n]
        bad = np.uint32(0)
        for d in range(dim):
            bad |= np.uint32((float_bits(grad_UD[u, d]) & _EXPONENT) == _EXPONENT)
        finite_U[u] = bad == 0


def reduce_grads(
    grad_NX: np.ndarray, head_U: np.ndarray, next_N: np.ndarray, *, threads: Threads
) -> tuple[np.ndarray, np.ndarray]:
    """Sum gradients of equal keys.

    Args:
        grad_NX: [N, D], C-contiguous, bits of float32, float16 (uint16) or bfloat16 (int16).
        head_U, next_N: the chains of `UniqueKeys`.

    Returns:
        grad_UD float32 [U, D] and finite_U bool [U]: whether every value of the row's sum is finite.
    """
    grad_UD = np.empty((len(head_U), grad_NX.shape[1]), np.float32)
    finite_U = np.empty(len(head_U), np.bool_)
    threads.run(_reduce_grads_cpu, len(head_U), grad_NX, head_U, next_N, grad_UD, finite_U)
    return grad_UD, finite_U
