"""Copies rows between a slab and batch arrays.  S slots, N ids, U unique keys, D weights, W row width.

Copies move bits: what a row means is no matter here.
"""

import numpy as np

from oneemb.kernels.jit import cpu, prefetch, prefetch_row
from oneemb.kernels.threads import Threads

__all__ = ["copy_rows_in", "copy_rows_out", "gather"]

# Rows asked for ahead of the one at work.
_AHEAD = 12


@cpu
def _gather_cpu(begin, end, weight_SX, slot_U, inverse_N, out_ND):
    dim = out_ND.shape[1]
    for n in range(begin, end):
        if n + _AHEAD < end and inverse_N[n + _AHEAD] >= 0:
            prefetch(weight_SX, slot_U[inverse_N[n + _AHEAD]])
        u = inverse_N[n]
        if u < 0:
            for d in range(dim):
                out_ND[n, d] = 0
        else:
            s = slot_U[u]
            for d in range(dim):
                out_ND[n, d] = weight_SX[s, d]


def gather(
    weight_SX: np.ndarray, slot_U: np.ndarray, inverse_N: np.ndarray, out_ND: np.ndarray, *, threads: Threads
) -> None:
    """out_ND[n] = the weights in slot `slot_U[inverse_N[n]]`, zeros where `inverse_N[n]` is -1.

    Args:
        weight_SX: weights' bits [S, X], X >= D, as `RowLayout.weights` gives them.
        slot_U: int64 [U].
        inverse_N: int64 [N].
        out_ND: [N, D] of the dtype of `weight_SX`.
    """
    threads.run(_gather_cpu, len(inverse_N), weight_SX, slot_U, inverse_N, out_ND)


@cpu
def _copy_rows_out_cpu(begin, end, row_SW, slot_U, out_UW):
    width = row_SW.shape[1]
    for u in range(begin, end):
        if u + _AHEAD < end:
            prefetch_row(row_SW, slot_U[u + _AHEAD])
        s = slot_U[u]
        for w in range(width):
            out_UW[u, w] = row_SW[s, w]


def copy_rows_out(row_SW: np.ndarray, slot_U: np.ndarray, *, threads: Threads) -> np.ndarray:
    """The whole rows in these slots: float32 [U, W]."""
    out_UW = np.empty((len(slot_U), row_SW.shape[1]), np.float32)
    # As integers: a copy of float32 may quiet a signalling NaN, and state words may be any bits.
    threads.run(_copy_rows_out_cpu, len(slot_U), row_SW.view(np.int32), slot_U, out_UW.view(np.int32))
    return out_UW


@cpu
def _copy_rows_in_cpu(begin, end, row_SW, slot_U, row_UW):
    width = row_SW.shape[1]
    for u in range(begin, end):
        s = slot_U[u]
        for w in range(width):
            row_SW[s, w] = row_UW[u, w]


def copy_rows_in(row_SW: np.ndarray, slot_U: np.ndarray, row_UW: np.ndarray, *, threads: Threads) -> None:
    """Put whole rows into distinct slots."""
    threads.run(_copy_rows_in_cpu, len(slot_U), row_SW.view(np.int32), slot_U, row_UW.view(np.int32))
