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
from oneemb.kernels.launch import Gpu, outside_inference_mode
from oneemb.storage.errors import StoreFullError
from oneemb.storage.row_store import RowSource
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


@outside_inference_mode
def _enlarged(array: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Copy of an array on the device with `size` slots; the additional slots are zero."""
    grown = torch.zeros((size, *array.shape[1:]), dtype=array.dtype, device=device)
    grown[: len(array)] = array
    return grown


# ---- order of calls --------------------------------------------------------------------------------------------------


_UNORDERED = contextlib.nullcontext()


class StreamOrder:
    """Order of a tier's calls on several streams: the device runs the calls in the order in which the host made
    them. As long as all calls come on one stream, nothing is asked of the device for that."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._several = False
        """Whether calls have come on several streams."""
        self.only: int | None = None if gpu.device.type == "cuda" else gpu.stream_now()
        """Handle of the stream of all calls so far; None = there is no call yet, or there are several streams."""
        self._end: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._released: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def _alone(self, stream: torch.cuda.Stream) -> bool:
        """Whether all calls so far came on this stream. Once they do not, the calls of the first stream end, for later
        ones, with all work that it has now."""
        if self._several:
            return False
        if self._stream is None or self._stream == stream:
            self._stream, self.only = stream, stream.cuda_stream
            return True
        # In this order, since a thread may release slots on the first stream meanwhile, without a lock: its release
        # comes before this mark, or the thread makes a later one.
        self._several, self.only = True, None
        self._end = self._stream.record_event()
        self._released.setdefault(self._stream, self._end)
        return False

    def __call__(self, arrays: Callable[[], list[torch.Tensor]]) -> contextlib.AbstractContextManager[None]:
        """Let the launches in a `with` block, on the current stream, run after the launches of all earlier blocks.
        `arrays` returns the arrays that the block uses and that outlive it."""
        return _UNORDERED if self.alone() else self._ordered(torch.cuda.current_stream(self._gpu.device), arrays)

    def alone(self) -> bool:
        """Note a call on the current stream. Returns whether all calls so far were on this stream, so that the launches
        are in order already."""
        # Handles are quicker to get than streams.
        return self._gpu.stream_now() == self.only or self._alone(torch.cuda.current_stream(self._gpu.device))

    @contextlib.contextmanager
    def _ordered(self, stream: torch.cuda.Stream, arrays: Callable[[], list[torch.Tensor]]) -> Iterator[None]:
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
        if not self.alone():
            stream = torch.cuda.current_stream(self._gpu.device)
            slot_U.record_stream(stream)
            self._released[stream] = stream.record_event()

    def after_releases(self) -> None:
        """Let later launches run after all releases so far, and so after the writes of the steps that released."""
        if not self.alone():
            stream = torch.cuda.current_stream(self._gpu.device)
            for event in list(self._released.values()):  # A copy, since other threads may release at the same time.
                stream.wait_event(event)


# ---- rows on the bus -------------------------------------------------------------------------------------------------

# Bytes of a buffer. While the bus copies one buffer, the host fills or empties the other.
_BUFFER_BYTES = 1 << 25


class PinnedRows:
    """Two buffers in page-locked memory through which rows of one width are copied to a GPU and back, a part of at most
    `_BUFFER_BYTES` at a time. The buffers are kept: new memory for each step would cost a page fault for each page."""

    def __init__(self, row_width: int, gpu: Gpu):
        self._row_width = row_width
        self._gpu = gpu
        self._rows_max = max(1, _BUFFER_BYTES // (4 * row_width))
        self._buffers = [_Buffer(self._rows_max, row_width, gpu) for _ in range(2)]

    def parts(self, size: int) -> list[slice]:
        """Slices of at most as many rows as fit into a buffer."""
        return [slice(n, min(n + self._rows_max, size)) for n in range(0, size, self._rows_max)]

    def rows_in(self, row_SW: torch.Tensor, slot_N: torch.Tensor, row_XW: np.ndarray, from_N: np.ndarray) -> None:
        """Write rows row_XW[from_N] into these slots of a slab."""
        for part in self.parts(len(slot_N)):
            buffer = self._next()
            row_NW = buffer.rows(part.stop - part.start)
            # As integers, so that no bit is taken for a number; "clip" writes to `out` without a copy.
            np.take(row_XW.view(np.int32), from_N[part], axis=0, out=row_NW.view(np.int32), mode="clip")
            copy_rows_in_cuda(row_SW, slot_N[part], buffer.to_device(row_NW), gpu=self._gpu)

    def read(
        self, below: RowSource, table_N: np.ndarray, id_N: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray, torch.Tensor]]:
        """Yield the rows of keys in a store below the tier, a part of the keys at a time: (part, missing_N, rows).
        missing_N says which keys of the part have no row below; `rows`, on the device, has any numbers for these. The
        copy of a part may still be in progress when the part is yielded."""
        for part in self.parts(len(id_N)):
            buffer = self._next()
            row_NW = buffer.rows(part.stop - part.start)
            missing_N = below.get(table_N[part], id_N[part], row_NW)
            yield part, missing_N, buffer.to_device(row_NW)

    def rows_out(self, row_SW: torch.Tensor, slot_N: torch.Tensor) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows in these slots of a slab, a part of the slots at a time: float32 [part, W], valid until the next
        part."""
        ahead: tuple[slice, _Buffer, int] | None = None
        for part in [*self.parts(len(slot_N)), None]:
            now, ahead = ahead, None
            if part is not None:
                buffer = self._next()
                rows = copy_rows_out_cuda(row_SW, slot_N[part], self._row_width, gpu=self._gpu)
                buffer.from_device(rows)
                ahead = part, buffer, len(rows)
            if now is not None:
                yield now[0], now[1].arrived(now[2])

    def drop(self) -> None:
        """Free the buffers; the next use makes new ones."""
        for buffer in self._buffers:
            buffer.drop()

    def _next(self) -> "_Buffer":
        """The buffer whose turn it is."""
        self._buffers.reverse()
        return self._buffers[0]


class _Buffer:
    """Page-locked memory that grows with the rows that are copied at a time, up to `rows_max` rows."""

    def __init__(self, rows_max: int, row_width: int, gpu: Gpu):
        self._rows_max, self._row_width, self._gpu = rows_max, row_width, gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._last_copy: torch.cuda.Event | None = None  # recorded after the last copy out of the buffer, or into it
        self.drop()

    @outside_inference_mode
    def drop(self) -> None:
        self._wait()
        self._row_BW = torch.empty(0, self._row_width, dtype=torch.float32, device="cpu")

    @outside_inference_mode
    def rows(self, size: int) -> np.ndarray:
        """Room for `size` rows, float32 [size, W], once the last copy has ended."""
        self._wait()
        if size > len(self._row_BW):
            self.drop()
            self._row_BW = torch.empty(
                min(self._rows_max, 1 << (size - 1).bit_length()), self._row_width, pin_memory=self._on_gpu,
                dtype=torch.float32, device="cpu",
            )  # fmt: skip
        return self._row_BW[:size].numpy()

    def to_device(self, row_NW: np.ndarray) -> torch.Tensor:
        """Copy on the device of the array that `rows` returned. The copy may be in progress when the call returns."""
        rows = self._row_BW[: len(row_NW)].to(self._gpu.device, non_blocking=True, copy=True)
        self._copied()
        return rows

    def from_device(self, row_NW: torch.Tensor) -> None:
        """Begin to copy rows into the buffer."""
        self.rows(len(row_NW))
        self._row_BW[: len(row_NW)].copy_(row_NW, non_blocking=True)
        self._copied()

    def arrived(self, size: int) -> np.ndarray:
        """The first `size` rows of the buffer, after the copy into it has ended."""
        self._wait()
        return self._row_BW[:size].numpy()

    def _copied(self) -> None:
        # Copies run on the current stream of the tier's device, which need not be torch's current device.
        if self._on_gpu:
            self._last_copy = torch.cuda.current_stream(self._gpu.device).record_event()

    def _wait(self) -> None:
        if self._last_copy is not None:
            self._gpu.waits += 1
            self._last_copy.synchronize()
            self._last_copy = None
