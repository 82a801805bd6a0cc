"""Copies rows between a slab and batch arrays, and whole arrays.  S slots, N ids, U unique keys, D weights, W words.

All copies are bit for bit.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu, part
from oneemb.kernels.jit_code import keep_rolled, natural, prefetch, prefetch_row
from oneemb.kernels.jit_lanes import LANES, bypasses_caches, end_stream, move_lanes, stream_lanes
from oneemb.kernels.threads import Threads

# Rows that are prefetched ahead of the current one.
_AHEAD = np.uint64(24)


@part
def _copy_row(to_UX: Array, u: Number, from_SX: Array, s: Number, width: Number) -> None:
    """to_UX[u, :width] = from_SX[s, :width], bit for bit"""
    for x in range(0, width - LANES + 1, LANES):
        keep_rolled()
        move_lanes(to_UX, u, x, from_SX, s, x)
    for x in range(width - width % LANES, width):
        to_UX[u, x] = from_SX[s, x]


@cpu
def _gather_cpu(
    begin: Number, end: Number, weight_SX: Array, slot_U: Array, inverse_N: Array, out_ND: Array, streamed: Number
) -> None:
    dim = out_ND.shape[1]
    last = natural(end - 1)
    for n in range(natural(begin), natural(end)):
        keep_rolled()
        ahead = natural(max(inverse_N[min(n + _AHEAD, last)], 0))
        if slot_U is not None:
            prefetch(slot_U, max(inverse_N[min(n + _AHEAD + _AHEAD, last)], 0))
        prefetch_row(weight_SX, ahead if slot_U is None else slot_U[ahead], 0, dim)
        u = inverse_N[n]
        if u < 0:
            for d in range(dim):
                out_ND[n, d] = 0
            continue
        s = np.int64(u) if slot_U is None else slot_U[natural(u)]
        if streamed:
            for d in range(0, dim, LANES):
                keep_rolled()
                stream_lanes(out_ND, np.int64(n), d, weight_SX, s, d)
        else:
            _copy_row(out_ND, np.int64(n), weight_SX, s, dim)
    end_stream()


def gather(
    weight_SX: np.ndarray, slot_U: np.ndarray | None, inverse_N: np.ndarray, out_ND: np.ndarray, *, threads: Threads
) -> None:
    """out_ND[n] = the weights in slot `slot_U[inverse_N[n]]`, zeros where `inverse_N[n]` is -1.

    Args:
        weight_SX: weights' bits [S, X], X >= D, as `RowFormat.weights` gives them.
        slot_U: int64 [U]; None = `inverse_N` holds the slots.
        inverse_N: int32 or int64 [N].
    """
    if slot_U is not None and len(slot_U) == 0:  # nothing but padding
        out_ND[:] = 0
        return
    streamed = out_ND.shape[1] % LANES == 0 and bypasses_caches(out_ND)
    threads.run(_gather_cpu, len(inverse_N), weight_SX, slot_U, inverse_N, out_ND, streamed)


@cpu
def _copy_rows_cpu(begin: Number, end: Number, from_SW: Array, from_N: Array, to_SW: Array, to_N: Array) -> None:
    width = from_SW.shape[1]
    for n in range(begin, end):
        prefetch_row(from_SW, from_N[min(natural(n) + _AHEAD, natural(end - 1))], 0, width)
        _copy_row(to_SW, to_N[n], from_SW, from_N[n], width)


def copy_rows(
    from_SW: np.ndarray, from_N: np.ndarray, to_SW: np.ndarray, to_N: np.ndarray, *, threads: Threads
) -> None:
    """to_SW[to_N[n]] = from_SW[from_N[n]], for whole float32 rows of two slabs. from_N and to_N are int64 slots; the
    slots of `to_N` are distinct."""
    assert from_SW.shape[1] == to_SW.shape[1] and from_SW.dtype == to_SW.dtype == np.float32
    # Copied as integers: a copy of float32 may quiet a signalling NaN, and words of state may hold any bits.
    threads.run(_copy_rows_cpu, len(from_N), from_SW.view(np.int32), from_N, to_SW.view(np.int32), to_N)


def copy_rows_out(row_SW: np.ndarray, slot_U: np.ndarray, *, threads: Threads) -> np.ndarray:
    """Copies of the whole rows in these slots: float32 [U, W]."""
    out_UW = np.empty((len(slot_U), row_SW.shape[1]), np.float32)
    copy_rows(row_SW, slot_U, out_UW, np.arange(len(slot_U)), threads=threads)
    return out_UW


@cpu
def _copy_words_in_cpu(begin: Number, end: Number, row_SW: Array, slot_U: Array, first: Number, word_UX: Array) -> None:
    for u in range(begin, end):
        prefetch_row(row_SW, slot_U[min(natural(u) + _AHEAD, natural(end - 1))], first, word_UX.shape[1])
        for x in range(word_UX.shape[1]):
            row_SW[slot_U[u], first + x] = word_UX[u, x]


def copy_words_in(row_SW: np.ndarray, slot_U: np.ndarray, first: int, word_UX: np.ndarray, *, threads: Threads) -> None:
    """Write int32 words into the rows of distinct slots, from word `first` of a row on."""
    threads.run(_copy_words_in_cpu, len(slot_U), row_SW.view(np.int32), slot_U, first, word_UX)


# Words that one iteration copies.
_BLOCK = 1 << 13


@cpu
def _copy_cpu(begin: Number, end: Number, from_V: Array, to_V: Array) -> None:
    for i in range(begin * _BLOCK, min(end * _BLOCK, len(from_V))):
        to_V[natural(i)] = from_V[natural(i)]


@cpu
def _stream_cpu(begin: Number, end: Number, from_XL: Array, to_XL: Array) -> None:
    for x in range(begin * _BLOCK // LANES, min(end * _BLOCK // LANES, len(from_XL))):
        stream_lanes(to_XL, x, np.int64(0), from_XL, x, np.int64(0))
    end_stream()


def copy_into(to: np.ndarray, array: np.ndarray, *, threads: Threads) -> None:
    """Copy a C-contiguous array, of 2 or 4 bytes a value, into an array of the same shape and dtype.

    torch is not used for it: its OpenMP threads would spin for milliseconds on the cores that the next loops need.
    """
    word = np.int32 if array.dtype.itemsize == 4 else np.int16
    from_V, to_V = array.reshape(-1).view(word), to.reshape(-1).view(word)
    lines = len(from_V) // LANES
    to_XL = to_V[: lines * LANES].reshape(lines, LANES)
    if bypasses_caches(to_XL):
        from_XL = from_V[: lines * LANES].reshape(lines, LANES)
        threads.run(_stream_cpu, -(-lines * LANES // _BLOCK), from_XL, to_XL, share_min=4)
        to_V[lines * LANES :] = from_V[lines * LANES :]
        return
    threads.run(_copy_cpu, -(-len(from_V) // _BLOCK), from_V, to_V, share_min=4)
