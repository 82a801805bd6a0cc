"""Marks of pushes and of cleaning in an object store, so that cleaning removes no object on which a push counts.

    pushing/<writer>.json     a push is at work
    cleaning.json             `clean_store` is at work

A push writes its mark and then looks for that of cleaning, which it waits out. Cleaning writes its mark and then looks
for those of pushes: if there is one, it is refused. So one of the two sees the other. Both write their marks again
from time to time: a mark that is older than `ALIVE_S` was left by a process that was killed. Ages are differences of
times of the store, so that the clocks of machines need not agree.

Marks by the same `writer` do not count, since its calls follow each other: `TrainGraph.save` is one writer.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.objects.object_store import ObjectStore

ALIVE_S = 600.0
_AGAIN_S = 60.0
_LOOK_S = 1.0
_CLEANING = "cleaning.json"


class _Mark:
    """A mark for the time of a `with` block.

    Args:
        look: looks for the marks of others, once this one is written.
    """

    def __init__(self, store: ObjectStore, key: str, writer: str, look: Callable[[], None]):
        self._store, self._key, self._writer, self._look = store, key, writer, look
        self._written = 0.0

    def write_again(self) -> None:
        """Show that the process is alive, if that is due."""
        if time.monotonic() - self._written > _AGAIN_S:
            self._write()

    def _write(self) -> None:
        self._store.put_text(self._key, {"version": 1, "writer": self._writer})
        self._written = time.monotonic()

    def _is_dead(self, key: str) -> bool:
        """Whether another mark is so old that a killed process has left it, by the clock of the store."""
        own = self._store.written_at(self._key)
        now = None if own is None else own + time.monotonic() - self._written
        return self._store.age_s(key, now) > ALIVE_S

    def _remove(self) -> None:
        with suppress(StorageError):  # A mark that stays does not count once it is old.
            self._store.remove(self._key)

    def __enter__(self) -> Self:
        self._write()
        try:
            self._look()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()


class Pushing(_Mark):
    """Mark of a push.

    Args:
        writer: name of the caller whose cleaning does not run at the same time; "" = nobody's.
        rank: number of the process, if several push for one writer.
    """

    def __init__(self, store: ObjectStore, writer: str = "", rank: int = 0):
        name = f"{writer}-{rank}" if writer else uuid.uuid4().hex
        super().__init__(store, f"pushing/{name}.json", writer, self._wait)

    def _wait(self) -> None:
        while (other := self._store.get_text(_CLEANING)) is not None:
            if self._writer and other.get("writer") == self._writer or self._is_dead(_CLEANING):
                return
            time.sleep(_LOOK_S)
            self.write_again()


class Cleaning(_Mark):
    """Mark of cleaning. LockedError if a push is at work."""

    def __init__(self, store: ObjectStore, writer: str = ""):
        super().__init__(store, _CLEANING, writer, self._refuse)

    def _refuse(self) -> None:
        for key in self._store.keys("pushing/"):
            is_own = self._writer and key.startswith(f"pushing/{self._writer}-")
            if is_own or self._is_dead(key):
                self._store.remove(key)  # A push that was killed has left it.
            else:
                raise LockedError(
                    f"{self._store.url} must not be cleaned while a push writes there, and {key} says that one does;"
                    f" clean once it has ended, or, if it was killed, {ALIVE_S / 60:.0f} minutes later"
                )
