"""Delivery of versions to one sink: in order, each until the sink shows it."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypedDict

from oneemb.sinks.changes import Changes, StoppedError
from oneemb.sinks.sink import Sink
from oneemb.sinks.version import PublishError, TableVersion
from oneemb.sinks.versions import Versions
from oneemb.storage.errors import StorageError
from oneemb.storage.snapshots.row_cap import RowCap

_log = logging.getLogger("oneemb")

_LOOKS = 4
"""Largest number of failures in a row, each of a version that the job has deleted while it was read."""


class SinkStats(TypedDict):
    """Figures of a sink."""

    version: str | None
    """Name of the version that the sink shows; None = none, or not known yet."""
    lag_s: float
    """Age in seconds of the oldest version that the sink must still get; 0 = it shows the newest. For an object store,
    the newest is the one that the last look has found there, downloaded or not."""
    backlog_versions: int
    """Number of versions that the sink must still get. Those of an object store that were not downloaded yet count as
    one, without rows."""
    backlog_rows: int
    """Rows of these versions, at most."""
    backlog_bytes: int
    """Bytes of these rows, at most."""
    versions: int
    """Versions that the sink has got from this publisher."""
    rows: int
    """Rows of these versions, at most."""
    wholes: int
    """Versions among them that were given as all rows."""
    damaged: int
    """Versions among these whose changes could not be read, since files of an older snapshot are damaged."""
    unread: str | None
    """Error of a snapshot that cannot be read and may be newer than the sink's version, since its file does not say
    when it was saved; None = there is none."""
    errors: int
    """Calls that have failed."""
    error: str | None
    """Error of the last call; None = the call went well."""


class Delivery:
    """Gives one sink the versions that it lacks. One call at a time, from any thread.

    Invariant: after `close`, the sink is closed at once, or, if a `run` is at work, at the end of that `run`.
    """

    def __init__(self, versions: Versions, sink: Sink, when_behind: str):
        self.sink = sink
        self._versions, self._when_behind = versions, when_behind
        max_rows = getattr(sink, "max_rows", None)
        self._cap = None if max_rows is None else RowCap(max_rows)
        self._lock, self._closed = threading.Lock(), False
        self._shown: TableVersion | None = None
        self._count = {"versions": 0, "rows": 0, "wholes": 0, "damaged": 0, "errors": 0}
        self._unread: StorageError | None = None
        self.error: BaseException | None = None
        """Error of the last call of `run`; None = the sink showed the newest version."""

    def run(self, stop: Callable[[], bool]) -> None:
        """Give the sink all versions that it lacks. An error is kept in `error`, and logged once."""
        try:
            self._run_alone(stop)
        finally:
            if self._closed:
                self.close()

    def close(self) -> None:
        """Close the sink, now or once the call of `run` at work has ended. A second call closes it again."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self.sink.close()
            finally:
                self._lock.release()

    def _run_alone(self, stop: Callable[[], bool]) -> None:
        with self._lock:
            try:
                self._run(stop)
                self.error = None
            except StoppedError:
                pass
            except BaseException as error:
                self._count["errors"] += 1
                if str(error) != str(self.error):
                    _log.warning("%s is not up to date: %s: %s", self.sink.name, type(error).__name__, error)
                self.error = error
                if not isinstance(error, Exception):  # Ctrl-C of the caller, or a function that has ended its thread.
                    raise

    def _run(self, stop: Callable[[], bool]) -> None:
        looks = 0
        while not stop() and (pending := self._pending(stop)):
            changes, compared = pending[0], self._versions.compared
            try:
                self.sink.apply(changes)
            except Exception as error:
                if self._versions.mend(changes.version, error, compared):
                    continue
                # The job may have deleted the version while it was read; then there is a newer one.
                gone = isinstance(error, StorageError) and not self._versions.has(changes.version)
                looks += 1
                if not gone or looks == _LOOKS:
                    raise
                continue
            looks, self._shown = 0, self.sink.version()
            if self._shown is None or self._shown.identity != changes.version.identity:
                raise PublishError(
                    f"{self.sink.name} must show {changes.version.name!r} (identity {changes.version.identity}) after"
                    f" it was applied, it shows {self._shown}; see whether another publisher or program writes to it"
                )
            self._count["versions"] += 1
            self._count["rows"] += changes.num_rows
            self._count["wholes"] += changes.is_whole
            if changes.damage is not None:
                self._count["damaged"] += 1
                _log.warning(
                    "%s got all rows of %r, since the changes could not be read: %s",
                    self.sink.name, changes.version.name, changes.damage,
                )  # fmt: skip
        if not stop():
            told, self._unread = self._unread, self._versions.unread()
            if self._unread is not None and str(self._unread) != str(told):
                _log.warning("%s may not have got the newest version: %s", self.sink.name, self._unread)

    def _pending(self, stop: Callable[[], bool]) -> list[Changes]:
        self._shown = self.sink.version()
        self._versions.pull(stop)
        return self._versions.changes(
            self._shown, wants_whole=self.sink.wants_whole, when_behind=self._when_behind, stop=stop, cap=self._cap
        )

    def backlog(self) -> list[Changes]:
        """Changes that the sink lacks now, after the version that it showed when it was last asked. Empty if the folder
        cannot be read."""
        try:
            return self._versions.changes(
                self._shown, wants_whole=False, when_behind="whole", stop=lambda: False, cap=self._cap, compares=False
            )
        except (StorageError, OSError):
            return []  # `error` says so.

    def stats(self) -> SinkStats:
        """Figures of the sink."""
        backlog, shown, error, now = self.backlog(), self._shown, self.error, time.time()
        saved = [changes.snapshot.info.created for changes in backlog]
        offered = self._versions.offered
        if not saved and offered is not None and offered.identity != (None if shown is None else shown.identity):
            saved = [offered.created or now]  # The copy of the store does not have the version yet.
        return {
            "version": None if shown is None else shown.name,
            "lag_s": max((0.0, *(now - created for created in saved))),
            "backlog_versions": len(saved),
            "backlog_rows": sum(changes.num_rows for changes in backlog),
            "backlog_bytes": sum(changes.nbytes for changes in backlog),
            "versions": self._count["versions"],
            "rows": self._count["rows"],
            "wholes": self._count["wholes"],
            "damaged": self._count["damaged"],
            "unread": None if self._unread is None else str(self._unread),
            "errors": self._count["errors"],
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
