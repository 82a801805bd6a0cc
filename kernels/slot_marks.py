"""Marks that a tier keeps for each slot: pins, dirty bits, scores.  S slots, U distinct slots.

Slots of -1 stand for rows that are not there, and are passed over.
"""

import numpy as np

from oneemb.kernels.jit import cpu
from oneemb.kernels.threads import Threads

__all__ = ["add_marks", "set_marks"]


@cpu
def _add_marks_cpu(begin, end, mark_S, slot_U, count):
    for u in range(begin, end):
        if slot_U[u] >= 0:
            mark_S[slot_U[u]] += count


@cpu
def _set_marks_cpu(begin, end, mark_S, slot_U, value):
    for u in range(begin, end):
        if slot_U[u] >= 0:
            mark_S[slot_U[u]] = value


def add_marks(mark_S: np.ndarray, slot_U: np.ndarray, count: int, *, threads: Threads) -> None:
    """mark_S[slot_U] += count"""
    threads.run(_add_marks_cpu, len(slot_U), mark_S, slot_U, count, share_min=1 << 18)


def set_marks(mark_S: np.ndarray, slot_U: np.ndarray, value: int, *, threads: Threads) -> None:
    """mark_S[slot_U] = value"""
    threads.run(_set_marks_cpu, len(slot_U), mark_S, slot_U, value, share_min=1 << 18)
