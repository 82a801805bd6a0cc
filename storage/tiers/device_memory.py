"""A GPU's memory as the hot tier uses it: growth of slot arrays, order of calls on several streams, rows on the bus.

Streams and events are torch's and not cuda-python's: its allocator must know which stream still uses what is freed.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda
from oneemb.kernels.launch import Gpu
from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers.limits import Limits

Arrays = list[torch.Tensor]
"""Arrays of S slots, all of one device."""


def enlarge(
    arrays: Callable[[], Arrays], hold: Callable[[Arrays], None], size: int, need: int, limits: Limits,
    device: torch.device,
) -> None:  # fmt: skip
    """Let arrays have memory for `size` slots, or at least for `need`. StoreFullError if there is none: they are as
    they were.

    A slab is copied, for which the device needs room for both. Where there is no such room it goes by way of the host's
    memory, twice over the bus; so a store comes to use all of its budget, and not two thirds.

    Args:
        arrays, hold: get and set the arrays, which nobody else refers to.
    """
    before = arrays()
    have = len(before[0])
    try:
        hold([_enlarged(array, size, device) for array in before])
        return
    except torch.OutOfMemoryError:
        kept = [array.cpu() if array.is_cuda else array.clone() for array in before]
    del before
    hold([_enlarged(array[:0], 0, device) for array in kept])
    failure: BaseException | None = None
    for trial in (size, need):
        try:
            hold([_enlarged(array, trial, device) for array in kept])
            return
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # whose frames hold what there was memory for
    hold([_enlarged(array, have, device) for array in kept])
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    fits = have + free // limits.slot_bytes
    raise StoreFullError(
        f"the {limits.name} tier needs memory for {need} rows ({limits.mebibytes(need)} MiB) of its"
        f" {limits.mebibytes(limits.slots)} MiB, and the device has {free // 2**20} MiB left, enough for about"
        f" {fits} rows; give the store a cache_budget_mb, or a smaller one, or free memory on the device"
    ) from failure


def _enlarged(array: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """A copy on the device with room for `size` slots, those beyond the old ones zero."""
    grown = torch.zeros((size, *array.shape[1:]), dtype=array.dtype, device=device)
    grown[: len(array)] = array
    return grown


# ---- order of calls --------------------------------------------------------------------------------------------------


class StreamOrder:
    """Order of a tier's calls on several streams: the device runs them in the order in which the host made them."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._end: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._released: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def __call__(self, arrays: Callable[[], list[torch.Tensor]]) -> Iterator[None]:
        """Let launches of a block, on the current stream, run after those of all blocks before. `arrays` returns the
        arrays that the block uses and that outlive it."""
        if not self._on_gpu:
            yield
            return
        stream = torch.cuda.current_stream(self._gpu.device)
        if self._end is not None and stream != self._stream:
            stream.wait_event(self._end)
            for array in arrays():
                array.record_stream(stream)
        try:
            yield
        finally:
            self._stream, self._end = stream, stream.record_event()

    def released(self, slot_U: torch.Tensor) -> None:
        """Note that these slots were released on the current stream, which need not be that of their array."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self._gpu.device)
            slot_U.record_stream(stream)
            self._released[stream] = stream.record_event()

    def after_releases(self) -> None:
        """Let launches from here on run after the releases so far, and so after the writes of their steps."""
        for event in list(self._released.values()):  # Other threads release meanwhile.
            torch.cuda.current_stream(self._gpu.device).wait_event(event)


# ---- rows on the bus -------------------------------------------------------------------------------------------------


# Rows that go through the buffer at a time.
_BATCH = 65536


class PinnedRows:
    """Page-locked memory for rows of one width, through which they go to a GPU and come back."""

    def __init__(self, row_width: int, gpu: Gpu):
        self._row_width = row_width
        self._gpu = gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._row_BW = torch.empty(0, row_width, dtype=torch.float32, device="cpu")
        self._left: torch.cuda.Event | None = None  # when the last copy out of the buffer, or into it, has ended

    def rows_in(self, row_SW: torch.Tensor, slot_N: torch.Tensor, row_XW: np.ndarray, from_N: np.ndarray) -> None:
        """Write rows row_XW[from_N] into these slots of a slab."""
        for n in range(0, len(slot_N), _BATCH):
            rows = self.to_device(row_XW[from_N[n : n + _BATCH]])
            copy_rows_in_cuda(row_SW, slot_N[n : n + _BATCH], rows, gpu=self._gpu)

    def rows_out(self, row_SW: torch.Tensor, slot_N: torch.Tensor) -> np.ndarray:
        """The rows in these slots of a slab: float32 [N, W]."""
        row_NW = np.empty((len(slot_N), self._row_width), np.float32)
        for n in range(0, len(slot_N), _BATCH):
            rows = copy_rows_out_cuda(row_SW, slot_N[n : n + _BATCH], self._row_width, gpu=self._gpu)
            row_NW[n : n + _BATCH] = self.to_host(rows)
        return row_NW

    def to_device(self, row_NW: np.ndarray) -> torch.Tensor:
        """The rows on the device, on their way there when this returns."""
        row_BW = self._buffer(len(row_NW))
        row_BW.numpy().view(np.int32)[:] = row_NW.view(np.int32)
        rows = row_BW.to(self._gpu.device, non_blocking=True, copy=True)
        self._copied()
        return rows

    def to_host(self, row_NW: torch.Tensor) -> np.ndarray:
        """The rows in the buffer, good until its next use."""
        row_BW = self._buffer(len(row_NW))
        row_BW.copy_(row_NW, non_blocking=True)
        self._copied()
        self._wait()
        return row_BW.numpy()

    def _copied(self) -> None:
        # Copies go to the current stream of the tier's device, which need not be the current device.
        if self._on_gpu:
            self._left = torch.cuda.current_stream(self._gpu.device).record_event()

    def _wait(self) -> None:
        if self._left is not None:
            self._left.synchronize()
            self._left = None

    def _buffer(self, rows: int) -> torch.Tensor:
        self._wait()
        if rows > len(self._row_BW):
            self._row_BW = torch.empty(
                max(rows, 2 * len(self._row_BW)),
                self._row_width,
                pin_memory=self._on_gpu,
                dtype=torch.float32,
                device="cpu",
            )
        return self._row_BW[:rows]
