"""Arrays that grow in place: no row ever moves, and address space is taken as rows come.

Each array has a span of addresses of its own, long enough for all rows that it may ever have. Spans lie between 16 and
80 TiB, where the system maps nothing by itself. Only the used beginning of a span is mapped, so that many arrays fit
under `ulimit -v`.

Invariants:
- an array taken before `grow` shares memory with the one after it, and stays valid while anything refers to it;
- the address of row 0 is a multiple of a row's bytes: rows of one width in several arrays are a whole number of rows
  apart, so that one loop can reach all of them.
"""

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

_FIRST, _LAST = 1 << 44, 5 << 44

# A new span gets at most 1 / _SHARES_MIN of the free addresses, and less if there are many spans.
_SHARES_MIN = 8

# Distance between two tries to find unmapped addresses, in bytes.
_STEP = 1 << 36

# Bytes from which on an array asks for huge pages: with small pages a step takes a fifth longer.
_HUGE_MIN = 1 << 22
_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14

_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_map, _remap, _unmap, _advise = _libc.mmap, _libc.mremap, _libc.munmap, _libc.madvise
_map.restype = _remap.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class GrowingArray:
    """An array of zeros [S, ...] whose length S grows, at most to the attribute `most`. With very many arrays `most` is
    less than the argument, since they share the addresses. Raises MemoryError if there is no address space."""

    def __init__(self, most: int, shape: tuple[int, ...], dtype: Any):
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self._span = _Span((most + 1) * self._row_bytes)
        self._first = self._span.begin + -self._span.begin % self._row_bytes
        self.most = min(most, (self._span.end - self._first) // self._row_bytes)
        self.array = self._view(0)
        """The rows that are mapped now."""

    @property
    def mapped(self) -> int:
        """Bytes of address space that are mapped."""
        return self._span.mapped

    def grow(self, rows: int) -> None:
        """Make room for at least `rows` rows. After a MemoryError nothing has changed."""
        if rows > len(self.array):
            assert rows <= self.most
            self._span.grow(self._first - self._span.begin + rows * self._row_bytes)
            self.array = self._view(rows)

    def _view(self, rows: int) -> np.ndarray:
        return array_at(self._first, (rows, *self._shape), self._dtype, self._span)


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, kept: object):
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}
        self.kept = kept


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype, kept: object) -> np.ndarray:
    """An array over the memory at an address. It keeps `kept`, the owner of the memory, alive."""
    memory: Any = _Memory(address, shape, dtype.str, kept)
    return np.asarray(memory)


class _Span:
    """Addresses of one array; the first `mapped` bytes of them are mapped."""

    def __init__(self, bytes: int):
        self.mapped = self._asked = 0
        with _lock:
            self.begin, self.end, self.mapped = _place(_pages(bytes))
            _spans.add(self)

    def grow(self, bytes: int) -> None:
        """Map at least the first `bytes` bytes."""
        self._complete()
        size = _pages(bytes)
        if size <= self.mapped:
            return
        if size >= _HUGE_MIN:  # The system uses a huge page only if all of it is mapped at its first write.
            size = min(size + -(self.begin + size) % _HUGE_PAGE, _pages(self.end - self.begin))
        self._asked = size
        if _remap(self.begin, self.mapped, size, 0) == _FAILED:  # in place or not at all
            self._asked = self.mapped
            raise _no_memory(size - self.mapped)
        self.mapped = size
        if size >= _HUGE_MIN:
            _advise(self.begin, size, _MADV_HUGEPAGE)  # A system without huge pages refuses, which does no harm.

    # Default arguments keep functions alive: at exit Python may drop the module's names before the last array.
    def _complete(self, advise: Any = _advise) -> None:
        """Count bytes that an interrupted `grow` has mapped: `madvise` succeeds only on mapped bytes."""
        more = self._asked - self.mapped
        if self.mapped and more > 0 and advise(self.begin + self.mapped, more, 0) == 0:
            self.mapped = self._asked

    def __del__(self, unmap: Any = _unmap) -> None:
        self._complete()
        if self.mapped:
            unmap(self.begin, self.mapped)


def _place(bytes: int) -> tuple[int, int, int]:
    """(begin of a new span, its end, bytes that are mapped: one page). With very many spans the new one is shorter."""
    page, kind, access = mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    taken = sorted((one.begin, one.end) for one in list(_spans))
    free = _LAST - _FIRST - sum(end - begin for begin, end in taken)
    size = min(bytes, free // (_SHARES_MIN + len(taken)) // page * page)
    begin = _FIRST
    for other_begin, other_end in [*taken, (_LAST, _LAST)]:
        # A page stays free between two spans, so that the system does not join their mappings.
        while begin + size + page <= other_begin:
            at = _map(begin, page, access, kind | _MAP_FIXED_NOREPLACE, -1, 0)
            if at == begin:
                return begin, begin + size, page
            if at != _FAILED:  # Old kernels may map elsewhere.
                _unmap(at, page)
            begin += max(size, _STEP)  # The addresses are mapped already, or beyond what the system has.
        begin = max(begin, other_end + page)
    # No span is free: map all bytes now, wherever the system puts them. Unwritten pages take no memory.
    at = _map(None, bytes, access, kind | _MAP_NORESERVE, -1, 0)
    if at == _FAILED:
        raise _no_memory(bytes)
    return at, at + bytes, bytes


def _pages(bytes: int) -> int:
    return -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _no_memory(bytes: int) -> MemoryError:
    return MemoryError(f"the system has no {bytes} more bytes of address space: {os.strerror(ctypes.get_errno())}")


_spans: "weakref.WeakSet[_Span]" = weakref.WeakSet()
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # A thread of the parent may have held the old one.


os.register_at_fork(after_in_child=_in_child)
