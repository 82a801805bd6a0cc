"""Page-locked memory through which rows go to a GPU and come back."""

import numpy as np
import torch

from oneemb.kernels.gather_cuda import copy_rows_in_cuda, copy_rows_out_cuda
from oneemb.kernels.launch import Gpu

# Rows that go through the buffer at a time.
_BATCH = 65536


class PinnedRows:
    """A buffer for rows of one width, used again and again."""

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
