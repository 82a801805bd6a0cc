"""Norms of rows of gradients, for clipping.  U rows, D weights.

    part_U[u] = sum of |g|^p over row u, in float64; for p = infinity their maximum

Invariant: a row is summed in order, and the parts by one thread, so a norm does not depend on the number of threads.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.threads import Threads


@cpu
def _row_parts_cpu(begin: Number, end: Number, grad_UD: Array, p: Number, part_U: Array) -> None:
    dim = grad_UD.shape[1]
    for u in range(begin, end):
        part = 0.0
        for d in range(dim):
            size = abs(np.float64(grad_UD[u, d]))
            if p == 2.0:
                part += size * size
            elif p == np.inf:
                # Written so that NaN stays.
                part = part if part >= size else size
            else:
                part += size**p
        part_U[u] = part


def rows_norm(grad_UD: np.ndarray, p: float, *, threads: Threads) -> float:
    """The p-norm of all values together (p above 0, or infinity); NaN or infinite where one of them is."""
    part_U = np.empty(len(grad_UD), np.float64)
    threads.run(_row_parts_cpu, len(grad_UD), grad_UD, np.float64(p), part_U)
    if p == np.inf:
        return float(part_U.max(initial=0.0))
    return float(part_U.sum() ** (1.0 / p))
