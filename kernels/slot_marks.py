"""Numbers that a tier keeps for each slot: pins, dirty bits, scores.  S slots, U distinct slots, N keys, V chosen keys.

A slot of -1 stands for a missing row and is skipped.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.threads import SHARES, Threads

# Least number of slots that is worth waking a thread for.
_SHARE_MIN = 1 << 13


@cpu
def _add_marks_cpu(begin: Number, end: Number, mark_S: Array, slot_U: Array, count: Number) -> None:
    for u in range(begin, end):
        if slot_U[u] >= 0:
            mark_S[slot_U[u]] += count


@cpu
def _add_pins_cpu(
    begin: Number, end: Number, pin_S: Array, slot_U: Array, count: Number, shares: Number, pinned_X: Array
) -> None:
    more = 0
    for u in range(begin, end):
        if slot_U[u] >= 0:
            before = pin_S[slot_U[u]]
            pin_S[slot_U[u]] = before + count
            more += int(before + count > 0) - int(before > 0)
    # Share x begins at size * x // shares.
    pinned_X[-(-begin * shares // max(len(slot_U), 1))] += more


@cpu
def _set_marks_cpu(begin: Number, end: Number, mark_S: Array, slot_U: Array, value: Number) -> None:
    for u in range(begin, end):
        if slot_U[u] >= 0:
            mark_S[slot_U[u]] = value


@cpu
def _pick_keys_cpu(
    table_N: Array, id_N: Array, slot_N: Array, chosen_S: Array, table_V: Array, id_V: Array, slot_V: Array,
    size: Number,
) -> Number:  # fmt: skip
    for n in range(len(slot_N)):
        if chosen_S[slot_N[n]]:
            table_V[size] = table_N[n]
            id_V[size] = id_N[n]
            slot_V[size] = slot_N[n]
            size += 1
    return size


def add_marks(mark_S: np.ndarray, slot_U: np.ndarray, count: float, *, threads: Threads) -> None:
    """mark_S[slot_U] += count"""
    threads.run(_add_marks_cpu, len(slot_U), mark_S, slot_U, count, share_min=_SHARE_MIN)


def share_counts(threads: Threads) -> np.ndarray:
    """int64 zeros, one for each share into which a loop of these threads may be divided."""
    return np.zeros(max(1, threads.count * SHARES), np.int64)


def add_pins(pin_S: np.ndarray, slot_U: np.ndarray, count: int, pinned_X: np.ndarray, *, threads: Threads) -> None:
    """pin_S[slot_U] += count. The sum of pinned_X, an array from `share_counts` for the same threads, stays the number
    of slots whose pins are above 0. Counting allocates no memory, so it cannot fail halfway."""
    shares = threads.shares_of(len(slot_U), _SHARE_MIN)
    threads.run(_add_pins_cpu, len(slot_U), pin_S, slot_U, count, shares, pinned_X, share_min=_SHARE_MIN)


def set_marks(mark_S: np.ndarray, slot_U: np.ndarray, value: float, *, threads: Threads) -> None:
    """mark_S[slot_U] = value"""
    threads.run(_set_marks_cpu, len(slot_U), mark_S, slot_U, value, share_min=_SHARE_MIN)


def pick_keys(
    table_N: np.ndarray, id_N: np.ndarray, slot_N: np.ndarray, chosen_S: np.ndarray, table_V: np.ndarray,
    id_V: np.ndarray, slot_V: np.ndarray, size: int,
) -> int:  # fmt: skip
    """Append the keys whose slots are chosen, and their slots, behind the first `size` entries of table_V, id_V and
    slot_V. Returns the new size."""
    return _pick_keys_cpu(table_N, id_N, slot_N, chosen_S, table_V, id_V, slot_V, size)
