"""Brings records into the order of their slots, a window at a time in memory.

Records come in any order and leave as whole windows of slots, one after the other. What does not fit in memory is kept
beyond the end of the file that is being made, window by window, and is cut off in the end.
"""

import errno
import math
from collections.abc import Iterator

import numpy as np

from oneemb.kernels.serve_rows import BLOCK_BYTES
from oneemb.storage.fs import FileSystem

_WINDOW_BYTES = 64 << 20
_WINDOWS = 256
"""More windows would be kept in pieces too small to be read quickly."""


class RecordWindows:
    """Records by slot.

    Args:
        slots: of the file.
        record_bytes: a multiple of 8.
        file, end: of the file system `fs`: there is nothing from `end` on.
        window_bytes: what is kept in memory, up to three times; None = 64 MiB, or a 256th of a very large file.
    """

    def __init__(
        self, fs: FileSystem, file: int, end: int, slots: int, record_bytes: int, window_bytes: int | None = None
    ):
        self._fs, self._file, self._end = fs, file, -(-end // BLOCK_BYTES) * BLOCK_BYTES
        self._slots, self._record_bytes = slots, record_bytes
        least = window_bytes or max(_WINDOW_BYTES, slots * record_bytes // _WINDOWS)
        # A window begins and ends with a block, and has a record at least.
        step = BLOCK_BYTES // math.gcd(record_bytes, BLOCK_BYTES)
        self._window = -(-least // (record_bytes * step)) * step
        self._room = least
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._bytes = 0
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # of each window: where pieces lie, and their records

    @property
    def is_beyond(self) -> bool:
        """Whether there is anything beyond the end of the file."""
        return bool(self._pieces)

    def put(self, slot_N: np.ndarray, record_NX: np.ndarray) -> None:
        """Keep records, uint8 [N, record_bytes], of these slots."""
        self._kept.append((slot_N, record_NX))
        self._bytes += record_NX.nbytes + slot_N.nbytes
        if self._bytes > self._room and self._slots > self._window:
            self._write_kept()

    def _write_kept(self) -> None:
        slot_N, record_NX = self._take_kept()
        order_N = np.argsort(slot_N)
        slot_N, record_NX = slot_N[order_N], record_NX[order_N]
        bounds = np.searchsorted(slot_N, np.arange(0, self._slots + self._window, self._window)).tolist()
        for w, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if begin < end:
                self._pieces.setdefault(w, []).append((self._end, end - begin))
                self._write(slot_N[begin:end])
                self._write(record_NX[begin:end])

    def _write(self, array: np.ndarray) -> None:
        self._fs.write(self._file, array.reshape(-1).view(np.uint8), self._end)
        self._end += array.nbytes

    def _take_kept(self) -> tuple[np.ndarray, np.ndarray]:
        slot_N = np.concatenate([slots for slots, _ in self._kept])
        record_NX = np.concatenate([records for _, records in self._kept])
        self._kept, self._bytes = [], 0
        return slot_N, record_NX

    def windows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each window in turn: its first slot, records uint8 [S, record_bytes], zeros in empty slots, and which slots
        are taken, bool [S]. The arrays are those of the next one too."""
        if self._kept and self._slots > self._window:
            self._write_kept()
        record_SX = np.empty((min(self._window, self._slots), self._record_bytes), np.uint8)
        taken_S = np.empty(len(record_SX), np.bool_)
        for w, first in enumerate(range(0, self._slots, self._window)):
            size = min(self._window, self._slots - first)
            its_SX, its_S = record_SX[:size], taken_S[:size]
            its_SX[:], its_S[:] = 0, False
            for slot_N, record_NX in self._of(w):
                its_SX[slot_N - first], its_S[slot_N - first] = record_NX, True
            yield first, its_SX, its_S

    def _of(self, w: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self._pieces:
            yield from self._kept  # There is one window, or no record.
        for offset, records in self._pieces.get(w, []):
            bytes_ = np.empty(records * (8 + self._record_bytes), np.uint8)
            if self._fs.read_into(self._file, bytes_.data, offset) < len(bytes_):
                raise OSError(errno.EIO, "what was written a moment ago cannot be read")
            yield bytes_[: 8 * records].view(np.int64), bytes_[8 * records :].reshape(records, -1)
