"""Calls of an object store in several threads, and the progress of a copy."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
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
    asked: SimpleQueue[tuple[Future[Result], Argument] | None] = SimpleQueue()
    threads: list[Thread] = []
    running: list[Future[Result]] = []
    waits = True
    try:
        for argument in arguments:
            running.append(Future())
            asked.put((running[-1], argument))
            if len(threads) < THREADS:
                thread = Thread(target=_work, args=(call, asked), name="oneemb-objects", daemon=True)
                thread.start()
                threads.append(thread)
            while len(running) >= THREADS or running and running[0].done():
                yield running.pop(0).result()
        while running:
            yield running.pop(0).result()
    except (KeyboardInterrupt, SystemExit):
        waits = False  # A call of a store may never return.
        raise
    finally:
        for one in running:
            one.cancel()
        for _ in threads:
            asked.put(None)
        for thread in threads if waits else ():
            thread.join()


def _work(
    call: Callable[[Argument], Result], asked: "SimpleQueue[tuple[Future[Result], Argument] | None]"
) -> None:  # fmt: skip
    """Make the calls that are asked for, until a None. Daemon threads run this: when a program ends, Python waits for
    the threads of an executor, and a call of a store may never return."""
    while (one := asked.get()) is not None:
        _make(call, *one)
        del one  # so that a thread without a call holds no piece


def _make(call: Callable[[Argument], Result], future: "Future[Result]", argument: Argument) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call(argument))
        except BaseException as error:
            future.set_exception(error)
