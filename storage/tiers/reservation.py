"""Memory reservations of all host tiers of this process.

A resident tier reserves memory as its rows come; with a capacity it reserves memory for all of them at construction, if
that fits. A cache reserves its budget at construction, whether that fits or not.

Invariants:
- a resident tier reserves more only if the sum stays within nine tenths of the process's memory limit;
- a reservation ends when its tier is closed or collected;
- a child of fork has reservations of its own. The parent's stores cannot grow in the child, so there each of their
  reservations shrinks to the memory in use.
"""

import os
import threading
import weakref

from oneemb.storage.row_store import StoreFullError
from oneemb.storage.tiers.memory_limit import memory_limit

__all__ = ["Reservation", "mebibytes", "usable_bytes"]

# Share of the process's memory limit that rows may take; the rest is for batches, gradients and everything else.
_MEMORY_SHARE = 0.9


class Reservation:
    """Memory reserved by one tier.

    Args:
        name: the tier's name, for errors.
        bytes: bytes reserved at once, whether they fit or not.
    """

    def __init__(self, name: str, bytes: int = 0):
        self._name = name
        self.bytes = bytes
        self.mapped = 0
        """Bytes of address space that the tier's arrays have mapped."""
        with _lock:
            _book.add(self)

    def raise_to(self, bytes: int) -> None:
        """Raise the reservation to at least `bytes` in all.

        Raises:
            StoreFullError: that would exceed the share of rows; nothing has changed.
        """
        if bytes <= self.bytes:
            return
        with _lock:
            others = list(_book)
            limit = memory_limit(sum(one.mapped for one in others))
            reserved = sum(one.bytes for one in others) - self.bytes
            if reserved + bytes > limit.bytes * _MEMORY_SHARE:
                raise StoreFullError(
                    f"the {self._name} tier needs {mebibytes(bytes)} MiB; rows in memory may take"
                    f" {mebibytes(int(limit.bytes * _MEMORY_SHARE))} MiB in this process (nine tenths of"
                    f" {limit.name}), of which other tiers have reserved {mebibytes(reserved)} MiB. Give this"
                    " embedding, or others, a cached store with a cache_budget_mb, or a smaller capacity; or give the"
                    " process more memory"
                )
            self.bytes = bytes

    def release(self) -> None:
        """End the reservation."""
        self.bytes = self.mapped = 0


def usable_bytes() -> int:
    """Bytes that the rows of all tiers of this process may take together."""
    with _lock:
        return int(memory_limit(sum(one.mapped for one in list(_book))).bytes * _MEMORY_SHARE)


def mebibytes(bytes: int) -> int:
    """MiB, rounded up, as errors give memory."""
    return -(-bytes // 2**20)


_book: "weakref.WeakSet[Reservation]" = weakref.WeakSet()
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # A thread of the parent may have held the old one.
    for one in list(_book):
        one.bytes = min(one.bytes, one.mapped)


os.register_at_fork(after_in_child=_in_child)
