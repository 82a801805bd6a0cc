"""Reads the batches of a loader on a thread, up to `count` batches before they are prepared.

    reader    read 0 .. read 16 | read 17          | read 18          | ...
    worker    prepare 0         | prepare 1        | prepare 2        | ...          (prefetch.py)
    loop                        | compute 0        | compute 1        | ...

Invariants:
- no step waits for a later batch than its own: while the loader waits for data, steps train what it has given;
- at most `count` batches wait to be taken, and none is read while `bytes_max` bytes wait;
- an error of the loader is raised when its batch is taken, with its traceback.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from oneemb.graph.streams import capture_gate
from oneemb.kernels.threads import start, within_thread_code

__all__ = ["BYTES_MAX", "ReadAhead"]

BYTES_MAX = 256 << 20
"""Bytes of batches that may wait to be taken."""

Batch = TypeVar("Batch")
Noted = TypeVar("Noted")


class _End:
    """In place of a batch: the loader's end, or its error."""

    def __init__(self, error: BaseException | None):
        self.error = error


class ReadAhead(Iterator[Noted], Generic[Batch, Noted]):
    """Iterator over the results of `note` for the batches of a loader. `iter` starts the thread.

    Args:
        batches: the loader.
        note: called on the thread with each batch, right after the loader has given it.
        bytes_of: bytes of a result of `note`.
        count: largest number of results that wait to be taken.
    """

    def __init__(
        self, batches: Iterable[Batch], note: Callable[[Batch], Noted], bytes_of: Callable[[Noted], int], count: int,
        bytes_max: int = BYTES_MAX,
    ):  # fmt: skip
        self._batches: list[Iterable[Batch]] = [batches]  # empty once the thread iterates over the batches
        self._note, self._bytes_of, self._count, self._bytes_max = note, bytes_of, count, bytes_max
        self._read: deque[tuple[Noted, int] | _End] = deque()
        # Queues only signal. A batch is in `_read` until it is taken, whatever an interrupt does.
        self._ready: SimpleQueue[None] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._closed = self._gone = False
        self._thread = threading.Thread(target=self._run, name="oneemb-prefetch-reader", daemon=True)

    def __iter__(self) -> "ReadAhead[Batch, Noted]":
        start(self._thread)
        return self

    def __next__(self) -> Noted:
        self._ready.get()
        if self._closed:
            raise StopIteration
        item = self._read.popleft()
        self._taken.put(None)
        if not isinstance(item, _End):
            return item[0]
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Let the thread end, and let a thread that waits in `next` see the end. Any thread may call it, repeatedly."""
        self._closed = True
        self._taken.put(None)
        self._ready.put(None)

    def wait(self, patience_s: float) -> bool:
        """Wait until the thread has ended, for at most `patience_s` seconds. Returns whether it has."""
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True  # The thread never began; or the garbage collector closes the loop on the thread itself.
        end = time.monotonic() + patience_s
        while not self._gone and (rest := end - time.monotonic()) > 0:
            try:
                self._ended.get(timeout=min(0.1, rest))
            except Empty:
                pass
        if self._gone and not within_thread_code():
            self._thread.join()
        return self._gone

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            self._gone = True
            self._ended.put(None)

    def _read_all(self) -> None:
        try:
            iterator = iter(self._batches.pop())
            while self._has_room():
                with capture_gate.preparing():
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        self._hand_over(_End(None))
                        return
                    noted = self._note(batch)
                del batch
                self._hand_over((noted, self._bytes_of(noted)))
                del noted
        except BaseException as error:
            self._hand_over(_End(error))

    def _has_room(self) -> bool:
        """Wait until one more batch may be read. Returns False if none may, since nobody takes batches any more."""
        while not self._closed:
            waiting = [item[1] for item in list(self._read) if not isinstance(item, _End)]
            if len(waiting) < self._count and (not waiting or sum(waiting) < self._bytes_max):
                return True
            self._taken.get()
        return False

    def _hand_over(self, item: tuple[Noted, int] | _End) -> None:
        self._read.append(item)
        self._ready.put(None)
