"""Streams of each GPU on which coming batches are prepared, in order with the steps that use the results.

    worker   prepare stream    copy ids, unique keys, find and read rows of t + 1 | mark        (no wait of the host)
    loop     compute stream    step t                                | wait for the mark | step t + 1

Streams and events are torch's own, not cuda-python's: torch's allocator has to know that the compute stream still reads
what was allocated on the other one, or it would hand the memory out again. The index and the slots of a cache, which
both halves change, the device tier keeps in order by itself.

Without CUDA all of this does nothing.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class CaptureGate:
    """Keeps threads that prepare batches from launching anything while a CUDA graph is captured.

    A launch by another thread would spoil the capture, and fail.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.preparing_threads = 0
        self.capturing_block: object | None = None  # stands for the block that captures

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A batch is loaded and prepared inside."""
        with self._changed:
            self._changed.wait_for(lambda: self.capturing_block is None)
            self.preparing_threads += 1
        try:
            yield
        finally:
            with self._changed:
                self.preparing_threads -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def capturing(self, patience_s: float) -> Iterator[bool]:
        """Whether a graph may be captured inside; no, if batches are still being prepared after `patience_s`."""
        block = object()
        try:
            try:
                with self._changed:
                    may = self._changed.wait_for(
                        lambda: self.preparing_threads == 0 and self.capturing_block is None, patience_s
                    )
                    if may:
                        self.capturing_block = block
                yield may
            finally:
                self._captured(block)
        finally:
            self._captured(block)  # An interrupt may have come in place of the first, or in it.

    def _captured(self, block: object) -> None:
        with self._changed:
            if self.capturing_block is block:
                self.capturing_block = None
            self._changed.notify_all()


capture_gate = CaptureGate()
# A child of fork has none of the threads that were preparing or capturing: its gate is open.
os.register_at_fork(after_in_child=capture_gate.__init__)  # type: ignore[misc]


Stream = Any
"""torch.cuda.Stream; Any, since a test has streams and events of its own."""

Mark = list[tuple[torch.device, Any]]
"""An event for each device; it comes when everything launched so far is done."""


class Ahead:
    """The streams of one loop. Made on its thread before the worker starts: the worker's launches come after it.

    Args:
        devices: of prepared batches; of GPUs the current one counts too, and the CPU has no streams.
        cuda: torch.cuda, or a fake of a test.
    """

    def __init__(self, devices: Iterable[torch.device] = (), cuda: Any = torch.cuda):
        self._cuda = cuda
        self._ahead: dict[torch.device, Stream] = {}
        self._loop: dict[torch.device, Stream] = {}
        self._versions: object = None
        if cuda.is_initialized():
            here = torch.device("cuda", cuda.current_device())
            further = [device for device in devices if device.type == "cuda" and device != here]
            for device in [*further, here]:
                self._ahead[device], self._loop[device] = cuda.Stream(device), cuda.current_stream(device)
            self.follow()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Block on the worker's thread, whose launches go to streams of its own."""
        with contextlib.ExitStack() as entered:
            for stream in self._ahead.values():  # The last of them is the current device's, which stays current.
                entered.enter_context(self._cuda.stream(stream))
            yield

    def follow(self, versions: object = None) -> None:
        """Order launches ahead, from here on, after all that the loop has launched so far.

        Args:
            versions: of the tensors that are to be read; if they are those of the last call, their changes are waited
                for already.
        """
        if versions is None or versions != self._versions:
            for device, stream in self._ahead.items():
                stream.wait_stream(self._loop[device])
        self._versions = versions

    def mark(self, made: object) -> Mark:
        """On the worker's thread: the moment, on each device, at which all that was launched so far is done.

        Args:
            made: the results; their tensors may be on other devices too.
        """
        devices = dict.fromkeys([*self._ahead, *(tensor.device for tensor in tensors_in(made))]) if self._ahead else {}
        return [(device, self._cuda.current_stream(device).record_event()) for device in devices]

    def take_over(self, mark: Mark, made: object) -> None:
        """On the loop's thread: order launches from here on after those that made the tensors in `made` ahead."""
        for device, event in mark:
            self._loop[device] = self._cuda.current_stream(device)
            self._loop[device].wait_event(event)
        for tensor in tensors_in(made) if mark else ():
            tensor.record_stream(self._loop[tensor.device])

    def leave(self) -> None:
        """On the loop's thread: order launches from here on, and freed memory, after all launches ahead."""
        for device, stream in self._ahead.items():
            self._cuda.current_stream(device).wait_stream(stream)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors on a GPU within a value, in containers and dataclasses, such as keys and prefetched rows."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from tensors_in(element)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
