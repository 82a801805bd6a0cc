"""Reads blocks by Linux AIO, many direct reads at once, where the system and the file system support this.

Invariants:
- the buffers of reads in flight are neither freed nor used for anything else; `read` leaves no read in flight;
- an AIO context and its buffers belong to one process: a forked child makes new ones, since a child shares its
  parent's memory.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from oneemb.kernels.aio import AIO_NUMBERS, BAD_BLOCK, aio_destroy, aio_read, aio_setup
from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import FileSystem, aligned_bytes
from oneemb.storage.table.block_reader import REQUEST_BYTES_MAX, BlockReader, DamagedBlock, PreadReader, ReadPlan
from oneemb.storage.table.geometry import Geometry

_DEPTH = 128
_PROBE_BYTES = 4096


class AioReader:
    """A `BlockReader` by Linux AIO: one thread keeps up to `depth` direct reads in flight. OSError if the system does
    not let this process use AIO."""

    name = "aio"
    direct = True

    def __init__(self, depth: int = _DEPTH):
        self.depth = depth
        self._kept: list[np.ndarray] = []
        self._begin()

    def _begin(self) -> None:
        """Make the AIO context and the arrays that the reads of this process use."""
        assert AIO_NUMBERS is not None
        context_1 = np.zeros(1, np.int64)
        failed = aio_setup(AIO_NUMBERS[0], self.depth, context_1)
        if failed:
            raise OSError(-failed, os.strerror(-failed))
        self._context: int | None = int(context_1[0])
        aio_destroy(AIO_NUMBERS[1], 0)  # Destroys nothing: compiles the function before the garbage collector needs it.
        self._process = os.getpid()
        self._iocb_MX, self._event_KX = np.zeros((2 * self.depth, 8), np.int64), np.zeros((self.depth, 4), np.int64)
        self._byte_N = np.empty(0, np.uint8)

    def read(
        self, plan: ReadPlan, file_Q: np.ndarray, offset_Q: np.ndarray, sum_B: np.ndarray, out_UW: np.ndarray
    ) -> None:
        if self._context is None or self._process != os.getpid():
            self._begin()
        geometry = plan.geometry
        buffer_bytes = max(REQUEST_BYTES_MAX, geometry.block_bytes)
        if len(self._byte_N) != buffer_bytes * len(self._iocb_MX):
            self._byte_N = aligned_bytes(buffer_bytes * len(self._iocb_MX))
        failed_4 = np.zeros(4, np.int64)
        assert AIO_NUMBERS is not None and self._context is not None
        result = aio_read(
            AIO_NUMBERS[2], AIO_NUMBERS[3], self._context, self.depth, self._iocb_MX, self._event_KX,
            self._byte_N.view(np.uint64), buffer_bytes // 8, file_Q, offset_Q,
            plan.blocks_Q * geometry.block_bytes, plan.block_Q, plan.first_Q, plan.place_P, plan.to_P,
            geometry.rows_per_block, geometry.block_words, sum_B, out_UW.view(np.uint32), failed_4,
        )  # fmt: skip
        q, p, m, left = failed_4.tolist()
        if left:
            self._leave()
        if result == BAD_BLOCK:
            skip = plan.place_P[p] // geometry.rows_per_block - plan.block_Q[q]
            at = int(m * buffer_bytes + skip * geometry.block_bytes)
            raise DamagedBlock(p, self._byte_N[at : at + geometry.block_bytes].copy())
        if result:
            raise OSError(-result, os.strerror(-result), q)

    def _leave(self) -> None:
        """Destroy the context, since its reads in flight cannot be waited for; the next `read` makes a new context."""
        context, self._context = self._context, None
        if AIO_NUMBERS is not None and aio_destroy(AIO_NUMBERS[1], context) < 0:
            self._kept.append(self._byte_N)  # The reads were not waited for and may still write into these buffers.

    def free_buffers(self) -> None:
        """Free the buffers; the next read makes others."""
        self._byte_N = np.empty(0, np.uint8)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        if self._context is not None and self._process == os.getpid() and AIO_NUMBERS is not None:
            aio_destroy(AIO_NUMBERS[1], self._context)
        self._context = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit names of modules are None, and the system frees contexts faster than `close`.
        if hasattr(self, "_context") and not is_finalizing():
            self.close()


def open_reader(io: str, fs: FileSystem, directory: str, block_bytes: int, threads: Threads) -> BlockReader:
    """Return the block reader that `io` names. "auto" is an `AioReader` if a trial on a file in `directory` works, else
    a `PreadReader`. StorageError if `io` is "aio" and the trial fails, ValueError if `io` is none of the three."""
    if io not in ("auto", "aio", "pread"):
        raise ValueError(f"io must be 'auto', 'aio' or 'pread', got {io!r}")
    reader = "it was not asked for" if io == "pread" else _tried(fs, directory, block_bytes)
    if not isinstance(reader, str):
        return reader
    if io == "aio":
        raise StorageError(
            f"io='aio' does not work in {directory} with blocks of {block_bytes} bytes: {reader}; use io='auto' or "
            f"io='pread', or a path on a local disk"
        )
    return PreadReader(fs, threads)


def _tried(fs: FileSystem, directory: str, block_bytes: int) -> AioReader | str:
    """Return an `AioReader` that has read blocks of `block_bytes` from a file in the directory, or, as a text, the
    reason why such reads do not work."""
    if not fs.native or AIO_NUMBERS is None:
        return "this system has no Linux AIO"
    path = f"{directory}/probe.tmp"
    try:
        try:
            file = fs.create(path, direct=True)
        except FileExistsError:
            fs.remove(path)
            file = fs.create(path, direct=True)
        try:
            return _probe(fs, file, block_bytes)
        finally:
            fs.close(file)
            fs.remove(path)
    except OSError as error:
        return _reason(error)


def _reason(error: OSError) -> str:
    limit = "; the system's limit of such reads, fs.aio-max-nr, is used up" if error.errno == errno.EAGAIN else ""
    return f"{error.strerror}{limit}"


def _probe(fs: FileSystem, file: int, block_bytes: int) -> AioReader | str:
    """Write a page in blocks and read each block back with an `AioReader`. Returns the reader, or the reason of a
    failure as a text."""
    geometry = Geometry(block_bytes // 4, block_bytes, 64)
    blocks = _PROBE_BYTES // block_bytes
    byte_N = aligned_bytes(_PROBE_BYTES)
    byte_N[:] = np.arange(_PROBE_BYTES) % 251
    for begin in range(0, _PROBE_BYTES, block_bytes):
        fs.write(file, byte_N[begin : begin + block_bytes], begin)
    sum_B = np.empty(blocks, np.uint32)
    blocks_sum(0, blocks, byte_N.view(np.uint64), geometry.block_words, sum_B)
    n = np.arange(blocks)
    plan = ReadPlan(geometry, n, n, n, np.ones(blocks, np.int64), np.arange(blocks + 1))
    out_UW = np.empty((blocks, geometry.row_width), np.float32)
    # A reader that works is returned for use: the system takes tens of milliseconds to destroy a context.
    reader = AioReader()
    try:
        reader.read(plan, np.full(blocks, file), n * block_bytes, sum_B, out_UW)
        works = out_UW.tobytes() == byte_N.tobytes()
    except DamagedBlock:
        works = False
    except BaseException:
        reader.close()
        raise
    if not works:
        reader.close()
        return "it reads other bytes than were written"
    reader.free_buffers()
    return reader
