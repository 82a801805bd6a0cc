"""Calls of an object store in several threads, and the progress of a copy."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 8

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes to do)."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Progressing:
    """Bytes that a copy has done and has to do; each change is told to `progress`."""

    def __init__(self, progress: Progress | None):
        self._progress, self._done = progress, 0
        self.total = 0

    def add(self, size: int) -> None:
        """Note that `size` more bytes are done."""
        self._done += size
        if self._progress is not None:
            self._progress(self._done, max(self.total, self._done))


def in_order(call: Callable[[Argument], Result], arguments: Iterable[Argument]) -> Iterator[Result]:
    """Results of calls in several threads, in the order of the arguments. Fewer than `THREADS` calls are ahead of the
    results that were taken."""
    with ThreadPoolExecutor(THREADS, "oneemb-objects") as threads:
        running: list[Future[Result]] = []
        try:
            for argument in arguments:
                running.append(threads.submit(call, argument))
                while len(running) >= THREADS or running and running[0].done():
                    yield running.pop(0).result()
            while running:
                yield running.pop(0).result()
        finally:
            for one in running:
                one.cancel()
