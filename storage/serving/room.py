"""A range of addresses in which a served file and its layers are mapped, so that one array covers all their records.

Invariants:
- an array of the range stays valid while anything refers to it; a place where no file is mapped reads as zeros;
- a place for a layer is used again only after its former layer has been unmapped;
- a child of fork has the mappings of its parent, and its own places from then on.
"""

import ctypes
import math
import mmap
import os
import weakref

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.serving.served_file import ServedFile, ServedInfo

_PLACES = 16
"""Number of layers that can be mapped at once: those of the version that serves, and of former ones in use."""

_LAYER_BYTES = 2 << 20
"""Bytes of a place beyond twice the bytes of the file. A layer always fits: it has at most a quarter of the file's
rows, and twice as many tables."""
_FIXED = 0x10  # MAP_FIXED of Linux and macOS


class RoomFullError(StorageError):
    """A room has no place for a layer."""


class Room:
    """Addresses for a file, and for layers behind it. Addresses take no memory."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._address = self._stride = self._first = 0
        self._free: list[int] = []

    def has_places(self, layers: int) -> bool:
        """Whether that many layers can be mapped."""
        return layers <= len(self._free)

    def map_base(self, file: int, info: ServedInfo, size: int) -> np.ndarray:
        """Map the file at the beginning. OSError if the system refuses."""
        # Records of a layer are whole records behind those of the file, and a mapping begins at a page.
        step = math.lcm(mmap.PAGESIZE, info.record_bytes)
        self._first = -(-size // step) * step
        self._stride = -(-(2 * size + _LAYER_BYTES) // step) * step
        try:
            self._memory = _addresses(self._first + _PLACES * self._stride)
            self._free = list(range(_PLACES))
        except OSError:  # of a process with a limit on its addresses
            self._memory = _addresses(self._first)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        _map(self._address, size, file)
        return self.bytes()[:size]

    def bytes(self) -> np.ndarray:
        """All addresses, uint8."""
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)

    def open_layer(self, path: str, threads: Threads) -> tuple[ServedFile, int]:
        """Open a layer: (open file, offset of its first byte in the range). The layer is unmapped when the file is
        collected.

        Raises:
            RoomFullError: there is no place for it.
            FileNotFoundError, StorageError: as for `ServedFile`.
        """
        offsets: list[int] = []

        def memory_of(file: int, info: ServedInfo, size: int) -> np.ndarray:
            try:
                place = self._free.pop()
            except IndexError:
                raise RoomFullError(
                    f"{path} must have a place beside its file, all are in use; open it again"
                ) from None
            offset = self._first + place * self._stride
            offsets.append(offset)
            _map(self._address + offset, size, file)
            return self.bytes()[offset : offset + size]

        try:
            layer = ServedFile(path, threads=threads, memory_of=memory_of)
        except BaseException:
            for offset in offsets:
                self._unmap(offset)
            raise
        weakref.finalize(layer, self._unmap, offsets[0]).atexit = False
        return layer, offsets[0]

    def _unmap(self, offset: int) -> None:
        _map(self._address + offset, self._stride, None)
        self._free.append((offset - self._first) // self._stride)


def _addresses(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _map(address: int, size: int, file: int | None) -> None:
    """Map an open file, or pages of zeros, read-only at an address, in place of what is there."""
    flags = _FIXED | (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file is None else mmap.MAP_SHARED)
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype, call.argtypes = ctypes.c_void_p, [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    if call(address, size, mmap.PROT_READ, flags, -1 if file is None else file, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
