"""The book of the memory that tiers on the host have reserved, in all of this process.

A tier that holds all rows reserves memory as its rows come; where a capacity says how many there will be, it reserves
for all of them at once, if that fits. Caches have reserved the budgets that the user gave them.

Invariants:
- what tiers that hold all rows reserve never makes the sum exceed nine tenths of the limit of the process;
- a reservation ends when its tier is closed or collected;
- a child of fork has a book of its own. Stores that it has a copy of come to take no more, so that what they had
  reserved and not used is free in it.
"""

import os
import threading
import weakref

from oneemb.storage.row_store import StoreFullError
from oneemb.storage.tiers.memory_limit import memory_limit

__all__ = ["Reservation", "usable_bytes"]

# Of the memory that the process may use; the rest is for batches, gradients and what is not rows.
_MEMORY_SHARE = 0.9


class Reservation:
    """Memory that one tier counts as its own.

    Args:
        name: what errors call the tier.
        bytes: reserved at once, whether there is room or not.
    """

    def __init__(self, name: str, bytes: int = 0):
        self._name = name
        self.bytes = bytes
        self.mapped = 0
        """Address space taken."""
        with _lock:
            _book.add(self)

    def raise_to(self, bytes: int) -> None:
        """Reserve so much in all at least.

        Raises:
            StoreFullError: there is no room for it. Nothing has changed.
        """
        if bytes <= self.bytes:
            return
        with _lock:
            others = list(_book)
            limit = memory_limit(sum(one.mapped for one in others))
            reserved = sum(one.bytes for one in others) - self.bytes
            if reserved + bytes > limit.bytes * _MEMORY_SHARE:
                raise StoreFullError(
                    f"the {self._name} tier needs {_mebibytes(bytes)} MiB; rows in memory may take"
                    f" {_mebibytes(int(limit.bytes * _MEMORY_SHARE))} MiB in this process (nine tenths of"
                    f" {limit.name}), of which other tiers have reserved {_mebibytes(reserved)} MiB. Give this"
                    " embedding, or others, a cached store with a cache_budget_mb, or a smaller capacity; or give the"
                    " process more memory"
                )
            self.bytes = bytes

    def release(self) -> None:
        """Give back what was reserved."""
        self.bytes = self.mapped = 0


def usable_bytes() -> int:
    """Memory that rows may take in this process, if no other tier had any."""
    with _lock:
        return int(memory_limit(sum(one.mapped for one in list(_book))).bytes * _MEMORY_SHARE)


def _mebibytes(bytes: int) -> int:
    return -(-bytes // 2**20)


_book: "weakref.WeakSet[Reservation]" = weakref.WeakSet()
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # which a thread of the parent may have held
    for one in list(_book):
        one.bytes = min(one.bytes, one.mapped)


os.register_at_fork(after_in_child=_in_child)
