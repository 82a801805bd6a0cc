"""A GPU's memory for the hot tier: growth of slot arrays, order of calls on several streams, copies of rows over the
bus.

Streams and events are those of torch, not of cuda-python, since torch's allocator must know which streams still use
memory that is freed.
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
    """Enlarge arrays to `size` slots, or at least to `need`. Raises StoreFullError, with the arrays unchanged, if the
    device has too little memory.

    A slab is copied, so the device needs room for the old and the new slab. If there is no such room, rows are copied
    to the host and back, so that a store can use all of its budget and not only two thirds.

    Args:
        arrays, hold: functions that get and set the arrays. No other object may refer to the arrays.
    """
    before = arrays()
    have = len(before[0])
    try:
        hold(enlarged(before, size, device))
        return
    except torch.OutOfMemoryError:
        kept = [array.cpu() if array.is_cuda else array.clone() for array in before]
    del before
    hold([_enlarged(array[:0], 0, device) for array in kept])
    failure: BaseException | None = None
    for trial in (size, need):
        try:
            hold(enlarged(kept, trial, device))
            return
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # The frames of the traceback would keep the allocated arrays alive.
    hold(enlarged(kept, have, device))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    fits = have + free // limits.slot_bytes
    raise StoreFullError(
        f"the {limits.name} tier must have memory for {need} rows ({limits.mebibytes(need)} MiB; it may grow to"
        f" {limits.mebibytes(limits.slots)} MiB), and the device has {free // 2**20} MiB free, enough for about"
        f" {fits} rows; set or lower the store's cache_budget_mb, or free memory on the device"
    ) from failure


def enlarged(arrays: Arrays, size: int, device: torch.device) -> Arrays:
    """Copies of arrays with room for `size` slots."""
    return [_enlarged(array, size, device) for array in arrays]


def _enlarged(array: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Copy of an array on the device with `size` slots; the additional slots are zero."""
    grown = torch.zeros((size, *array.shape[1:]), dtype=array.dtype, device=device)
    grown[: len(array)] = array
    return grown


# ---- order of calls --------------------------------------------------------------------------------------------------


class StreamOrder:
    """Order of a tier's calls on several streams: the device runs the calls in the order in which the host made
    them."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._end: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._released: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def __call__(self, arrays: Callable[[], list[torch.Tensor]]) -> Iterator[None]:
        """Let the launches in a `with` block, on the current stream, run after the launches of all earlier blocks.
        `arrays` returns the arrays that the block uses and that outlive it."""
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
        """Record that these slots were released on the current stream, which need not be the stream of `slot_U`."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self._gpu.device)
            slot_U.record_stream(stream)
            self._released[stream] = stream.record_event()

    def after_releases(self) -> None:
        """Let later launches run after all releases so far, and so after the writes of the steps that released."""
        for event in list(self._released.values()):  # A copy, since other threads may release at the same time.
            torch.cuda.current_stream(self._gpu.device).wait_event(event)


# ---- rows on the bus -------------------------------------------------------------------------------------------------


# Number of rows that are copied through the buffer at a time.
_BATCH = 65536


class PinnedRows:
    """Buffer in page-locked memory through which rows of one width are copied to a GPU and back."""

    def __init__(self, row_width: int, gpu: Gpu):
        self._row_width = row_width
        self._gpu = gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._row_BW = torch.empty(0, row_width, dtype=torch.float32, device="cpu")
        self._last_copy: torch.cuda.Event | None = None  # recorded after the last copy out of the buffer, or into it

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
        """Copy of the rows on the device. The copy may still be in progress when the call returns."""
        row_BW = self._buffer(len(row_NW))
        row_BW.numpy().view(np.int32)[:] = row_NW.view(np.int32)
        rows = row_BW.to(self._gpu.device, non_blocking=True, copy=True)
        self._copied()
        return rows

    def to_host(self, row_NW: torch.Tensor) -> np.ndarray:
        """Copy of the rows in the buffer, valid until the next use of this object."""
        row_BW = self._buffer(len(row_NW))
        row_BW.copy_(row_NW, non_blocking=True)
        self._copied()
        self._wait()
        return row_BW.numpy()

    def _copied(self) -> None:
        # Copies run on the current stream of the tier's device, which need not be torch's current device.
        if self._on_gpu:
            self._last_copy = torch.cuda.current_stream(self._gpu.device).record_event()

    def _wait(self) -> None:
        if self._last_copy is not None:
            self._gpu.waits += 1
            self._last_copy.synchronize()
            self._last_copy = None

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
