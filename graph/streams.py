"""The stream of a GPU on which coming batches are prepared, and how their steps come to use what it made.

    worker   prepare stream    copy ids, unique keys, find and read rows of t + 1 | mark        (no wait of the host)
    loop     compute stream    step t                                | wait for the mark | step t + 1

Streams and events are torch's own, not cuda-python's: its allocator has to know that the compute stream still reads
what was allocated on the other one, or it would hand the memory out again. What both halves change beside that, the
index and the slots of a cache, the device tier keeps in order by itself.

Without CUDA all of this does nothing.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Ahead", "alone"]


class _Alone:
    """Keeps threads that prepare batches from launching anything while a CUDA graph is captured, which would spoil it
    and fail there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._captures = False

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A batch is loaded and prepared inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._captures)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def capturing(self, patience_s: float) -> Iterator[bool]:
        """Whether a graph may be captured inside: not if batches are being prepared for so long."""
        with self._changed:
            may = self._changed.wait_for(lambda: self._working == 0 and not self._captures, patience_s)
            self._captures |= may
        try:
            yield may
        finally:
            with self._changed:
                self._captures &= not may
                self._changed.notify_all()


alone = _Alone()


class Ahead:
    """Made on the thread of the loop, before the worker begins: what is there by then is there for the worker too.

    Args:
        cuda: torch.cuda, or what stands for it in a test.
    """

    def __init__(self, cuda: Any = torch.cuda):
        self._cuda = cuda
        self._stream: Any = None
        if cuda.is_initialized():
            self._stream = cuda.Stream()
            self._stream.wait_stream(cuda.current_stream())

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """On the worker's thread: what it launches goes to the stream of its own."""
        if self._stream is None:
            yield
            return
        with self._cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """The moment at which all that was launched ahead so far is done; None where there is no such stream."""
        return None if self._stream is None else self._stream.record_event()

    def take_over(self, mark: Any, made: Any) -> None:
        """On the loop's thread: let what is launched from here on use what was made ahead, `made` being its tensors."""
        if mark is None:
            return
        stream = self._cuda.current_stream()
        stream.wait_event(mark)
        for tensor in _tensors(made):
            tensor.record_stream(stream)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those on a GPU among a value's parts: of containers and of dataclasses, such as keys and staged rows."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, one.name) for one in dataclasses.fields(value)])
