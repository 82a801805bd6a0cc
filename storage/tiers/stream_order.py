"""Order of a tier's calls on several of a GPU's streams: the device runs them in the order in which the host made them.

Streams and events are torch's and not cuda-python's: its allocator must know which stream still uses what is freed.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from oneemb.kernels.launch import Gpu


class StreamOrder:
    """The order of one tier."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._on_gpu = gpu.device.type == "cuda"
        self._end: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._released: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def __call__(self, arrays: Callable[[], list[torch.Tensor]]) -> Iterator[None]:
        """Let launches of a block, on the current stream, run after the launches of all blocks before.

        Args:
            arrays: returns the arrays that the block uses and that outlive it.
        """
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
        """These slots were released on the current stream, which need not be the one that their array is of."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self._gpu.device)
            slot_U.record_stream(stream)
            self._released[stream] = stream.record_event()

    def after_releases(self) -> None:
        """Let launches from here on run after the releases so far, and so after the writes of their steps."""
        for event in list(self._released.values()):  # Other threads release meanwhile.
            torch.cuda.current_stream(self._gpu.device).wait_event(event)
