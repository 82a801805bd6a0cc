"""Memory reservations of all host tiers of this process.

A resident tier reserves memory as its rows come; with a capacity it reserves memory for all of them at construction, if
that fits. A cache reserves its budget at construction, whether that fits or not.

Invariants:
- a resident tier reserves more only if the sum stays within nine tenths of the process's memory limit;
- a reservation ends when its tier is closed or collected;
- within a block of `granted`, new tiers get the granted memory, whatever the limit has become;
- a child of fork has reservations of its own. The parent's stores cannot grow in the child, so there each of their
  reservations shrinks to the memory in use.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers.memory_limit import memory_limit

# Share of the process's memory limit that rows may take; the rest is for batches, gradients and everything else.
_MEMORY_SHARE = 0.9


class Reservation:
    """Memory that one tier has reserved: `bytes` at first, whether they fit or not. `name`: the tier, for errors."""

    def __init__(self, name: str, bytes: int = 0):
        self._name = name
        self.bytes = bytes
        self.mapped = 0
        """Bytes of address space that the tier's arrays have mapped."""
        self.grant: Reservation | None = None
        """The grant that gets the bytes back when the reservation shrinks; None = none."""
        with _lock:
            _book.add(self)

    def raise_to(self, bytes: int) -> None:
        """Raise the reservation to at least `bytes` in all. StoreFullError, with nothing changed, if that exceeds the
        rows' share."""
        if bytes <= self.bytes:
            return
        with _lock:
            grant = _grants.get(threading.get_ident())
            given = 0 if grant is None else min(bytes - self.bytes, grant.bytes)
            if given < bytes - self.bytes:
                self._check_memory(bytes, given)
            if grant is not None and given:
                grant.bytes -= given
                self.grant = grant
            self.bytes = bytes

    def _check_memory(self, bytes: int, given: int) -> None:
        """Raise StoreFullError if this tier's reservation cannot be `bytes`, of which `given` come from a grant."""
        others = list(_book)
        limit = memory_limit(sum(one.mapped for one in others))
        reserved = sum(one.bytes for one in others) - self.bytes - given
        if reserved + bytes > limit.bytes * _MEMORY_SHARE:
            raise StoreFullError(
                f"the {self._name} tier needs {mebibytes(bytes)} MiB; rows in memory may take"
                f" {mebibytes(int(limit.bytes * _MEMORY_SHARE))} MiB in this process (nine tenths of"
                f" {limit.name}), of which other tiers have reserved {mebibytes(reserved)} MiB. Give this"
                " embedding, or others, a cached store with a cache_budget_mb, or a smaller capacity; or give the"
                " process more memory"
            )

    def lower_to(self, bytes: int) -> None:
        """Lower the reservation to `bytes`. Bytes that came from a grant go back to the grant."""
        if self.grant is not None:
            with _lock:
                if self.grant is _grants.get(threading.get_ident()):
                    self.grant.bytes += self.bytes - bytes
        self.bytes = bytes

    def release(self) -> None:
        """End the reservation."""
        self.lower_to(0)
        self.mapped = 0


@contextmanager
def granted(name: str, bytes: int, instead: Sequence[Reservation]) -> Iterator[None]:
    """Reserve memory, during a `with` block, for tiers that this thread makes in place of others that it closes. Raises
    StoreFullError, with nothing changed, if there is too little memory.

    Args:
        bytes: largest number of bytes that the new tiers need.
        instead: reservations of the tiers to be closed; their memory stays reserved, so that they can be made again.
    """
    grant = Reservation(name)
    grant.raise_to(max(bytes - sum(one.bytes for one in instead), 0))
    with _lock:
        for one in instead:
            one.grant = grant
        _grants[threading.get_ident()] = grant
    try:
        yield
    finally:
        with _lock:
            del _grants[threading.get_ident()]
        grant.release()


def usable_bytes() -> int:
    """Number of bytes that the rows of all tiers of this process may take together; at least this thread's grant."""
    with _lock:
        grant = _grants.get(threading.get_ident())
        limit = memory_limit(sum(one.mapped for one in list(_book))).bytes
        return max(int(limit * _MEMORY_SHARE), 0 if grant is None else grant.bytes)


def mebibytes(bytes: int) -> int:
    """Number of MiB, rounded up, for errors."""
    return -(-bytes // 2**20)


_grants: dict[int, Reservation] = {}
"""{thread: its grant}."""
_book: "weakref.WeakSet[Reservation]" = weakref.WeakSet()
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # A thread of the parent may have held the old one.
    _grants.clear()
    for one in list(_book):
        one.bytes = min(one.bytes, one.mapped)


os.register_at_fork(after_in_child=_in_child)
