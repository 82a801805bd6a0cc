"""GPU streams on which coming batches are prepared, ordered with the steps that use the results.

    worker   prepare stream    copy ids, unique keys, find and read rows of t + 1 | mark        (no wait of the host)
    loop     compute stream    step t                                | wait for the mark | step t + 1

Streams and events are torch's, not cuda-python's: torch's allocator must know that the compute stream still reads
tensors that were allocated on the prepare stream, or it would reuse their memory. The device tier itself orders
accesses to the index and the slots of a cache, which both halves change.

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

    A launch by another thread would fail, and spoil the capture.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.preparing_threads = 0
        self.capturing_block: object | None = None  # identifies the block that captures; None = no capture

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Block that loads and prepares a batch. It waits until no graph is captured."""
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
        """Block that captures a graph, if it yields True. False = batches are still being prepared after `patience_s`
        seconds, so nothing may be captured."""
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
            self._captured(block)  # An interrupt may have prevented or ended the first call.

    def _captured(self, block: object) -> None:
        with self._changed:
            if self.capturing_block is block:
                self.capturing_block = None
            self._changed.notify_all()


capture_gate = CaptureGate()
# A forked child has none of the threads that were preparing or capturing, so its gate is open.
os.register_at_fork(after_in_child=capture_gate.__init__)  # type: ignore[misc]


Stream = Any
"""torch.cuda.Stream. Any: tests use fake streams and events."""

Mark = list[tuple[torch.device, Any]]
"""(device, event that comes when all work launched on the device before the mark is done)."""


class Ahead:
    """The streams of one loop. It is made on the loop's thread before the worker starts, so that all launches of the
    worker are ordered after earlier launches of the loop.

    Args:
        devices: devices of prepared batches. The current GPU is added; the CPU is ignored.
        cuda: torch.cuda, or a test's fake.
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
        """Block on the worker's thread whose launches go to the prepare streams."""
        with contextlib.ExitStack() as entered:
            for stream in self._ahead.values():  # The current device comes last, so that it stays current.
                entered.enter_context(self._cuda.stream(stream))
            yield

    def follow(self, versions: object = None) -> None:
        """Order all further launches on the prepare streams after the launches of the loop so far.

        Args:
            versions: versions of the tensors that will be read. If they equal those of the last call, no new order is
                needed: the streams wait for the changes already.
        """
        if versions is None or versions != self._versions:
            for device, stream in self._ahead.items():
                stream.wait_stream(self._loop[device])
        self._versions = versions

    def mark(self, made: object) -> Mark:
        """Events that come when all work launched so far is done, one for each device. Called on the worker's thread.

        Args:
            made: the results, whose tensors may be on further devices.
        """
        devices = dict.fromkeys([*self._ahead, *(tensor.device for tensor in tensors_in(made))]) if self._ahead else {}
        return [(device, self._cuda.current_stream(device).record_event()) for device in devices]

    def take_over(self, mark: Mark, made: object) -> None:
        """Order all further launches of the loop after the launches that made the tensors in `made`, as marked. Called
        on the loop's thread."""
        for device, event in mark:
            self._loop[device] = self._cuda.current_stream(device)
            self._loop[device].wait_event(event)
        for tensor in tensors_in(made) if mark else ():
            tensor.record_stream(self._loop[tensor.device])

    def leave(self) -> None:
        """Order all further launches of the loop, and reuse of memory, after all launches on the prepare streams.
        Called on the loop's thread."""
        for device, stream in self._ahead.items():
            self._cuda.current_stream(device).wait_stream(stream)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The GPU tensors within a value: in containers, and in dataclasses such as keys and prefetched rows."""
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
