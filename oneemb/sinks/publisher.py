"""Publisher: threads that follow the versions of a table and give them to sinks.

Invariants:
- each sink gets versions in order, and none is left out; the snapshots and deltas on disk are the backlog, so a
  publisher that was killed, or a sink that fails, loses no rows;
- a sink neither waits for another sink nor for training; training waits for a sink only in `check`, if it was told to.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, cast

from oneemb.rows.arguments import Paths, as_embedding, as_list
from oneemb.serving.following import Follower
from oneemb.serving.stored_rows import StoredCopy
from oneemb.sinks.changes import Changes
from oneemb.sinks.delivery import Delivery, SinkStats
from oneemb.sinks.sink import FunctionSink, Sink
from oneemb.sinks.version import PublishError
from oneemb.sinks.versions import Versions
from oneemb.storage.errors import ForkedProcessError, StorageError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.objects.object_store import ObjectStore, is_url

_log = logging.getLogger("oneemb")

_PAUSE_S = 0.05
"""Seconds between two looks at a backlog that is too large."""


def publish(
    paths: Paths,
    sinks: "Sequence[Sink | Callable[[Changes], Any]]",
    *,
    seconds: float = 1.0,
    version: str | None = None,
    folder: AnyPath | None = None,
    when_behind: Literal["whole", "error"] = "whole",
    max_versions: int | None = None,
    max_bytes: int | None = None,
    when_full: Literal["error", "pause"] = "error",
) -> "Publisher":
    """Publish the versions of a table to sinks, as a job saves snapshots and deltas, in threads of this process.

    The process may be the job, or any other that reads the table's folder. A sink gets the changes of each version,
    once and in order, and stores beside the rows which version it shows. So a publisher that was killed goes on where
    it ended.

    Args:
        paths: folder of the table, or the folder with the folders of ranks, or the folders of a sharded table; or
            the URL to which a job pushes its snapshots. With ranks, one process publishes.
        sinks: sinks of `oneemb.sinks`, or functions that take `Changes`.
        seconds: time between two looks for newer versions.
        version: name of the snapshot to publish; None = the newest, again and again.
        folder: with a URL, folder on this machine for the snapshots that are published.
        when_behind: what a sink gets if the changes from its version to the newest cannot be found, since the job has
            deleted its version, files of it are damaged, or more than half of the rows have changed: "whole" = all
            rows; "error" = nothing, and `PublishError`.
        max_versions, max_bytes: largest backlog of a sink, in versions and in bytes of rows; None = any. `check`
            compares the backlogs with it.
        when_full: what `check` does if a backlog is larger: "error" = raise `PublishError`; "pause" = wait.

    Returns:
        A `Publisher`. At the end of its `with` block all sinks have got the newest version; if the block raises, the
        publisher stops at once.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Example:
        >>> import tempfile, numpy, torch, oneemb
        >>> folder, items = tempfile.mkdtemp(), {}
        >>> def index(changes):
        ...     for batch in changes.batches():
        ...         items.update(zip(batch.id_N.tolist(), batch.weight_ND.tolist()))
        >>> with oneemb.publish(folder, [index]):
        ...     with oneemb.make_persistent_table_writer(folder, "v1", torch.int64, torch.float32, 2) as writer:
        ...         writer.write(numpy.array([7]), numpy.array([[1, 2]], numpy.float32))
        >>> items
        {7: [1.0, 2.0]}
    """
    if as_embedding(paths) is not None:
        raise TypeError("paths must be the folder of a table, got an embedding; give the persistent_path of its store")
    if isinstance(sinks, str | bytes) or not isinstance(sinks, Sequence) or not sinks:
        raise TypeError(f"sinks must be a list of sinks of oneemb.sinks or functions, got {sinks!r:.100}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"seconds must be a number above 0, got {type(seconds).__name__} {seconds!r}")
    if not 0 < seconds <= 1e6:
        raise ValueError(f"seconds must be above 0, and 1000000 at most, got {seconds}")
    _check_choice("when_behind", when_behind, "whole", "error")
    _check_choice("when_full", when_full, "error", "pause")
    for name, value in (("max_versions", max_versions), ("max_bytes", max_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be an int of 0 or more, or None for any, got {value!r}")
    if is_url(paths) != (folder is not None):
        raise ValueError(f"folder must be given with a URL, and only then, got folder={folder!r} with {paths!r}")
    if is_url(paths) and folder is not None:
        stored = StoredCopy(ObjectStore(paths), absolute_path(folder))
        versions = Versions([stored.folder], version, stored)
    else:
        versions = Versions(as_list(paths), version)
    limits = max_versions, max_bytes
    return Publisher(versions, sinks, seconds, when_behind, limits, when_full == "pause")


class Publisher:
    """Publishes the versions of a table. Made by `publish`."""

    def __init__(
        self, versions: Versions, sinks: "Sequence[Sink | Callable[[Changes], Any]]", seconds: float, when_behind: str,
        limits: tuple[int | None, int | None], pauses: bool,
    ):  # fmt: skip
        self._versions, self._seconds, self._limits, self._pauses = versions, seconds, limits, pauses
        self._deliveries = {
            name: Delivery(versions, sink, when_behind) for name, sink in _named(list(map(_as_sink, sinks))).items()
        }
        self._process = os.getpid()
        self._closed = False
        self._followers = [Follower(delivery.run, seconds) for delivery in self._deliveries.values()]
        for follower in self._followers:
            follower.start()

    def stats(self) -> dict[str, SinkStats]:
        """Figures of each sink: the version that it shows, its lag and backlog, and its errors. {name: figures}."""
        self._check_process()
        return {name: delivery.stats() for name, delivery in self._deliveries.items()}

    def check(self) -> None:
        """Compare the backlogs with `max_versions` and `max_bytes`: a training loop calls it after each save.

        Raises:
            PublishError: a backlog is larger, and `when_full` is "error". With "pause" the call waits until all
                backlogs are small enough, and logs a warning when it begins to wait.
        """
        self._check_open()
        full, told = self._full(), False
        while full:
            text = (
                f"{'; '.join(full)}; the limit is {self._limits[0]} versions and {self._limits[1]} bytes (None = any)."
                " No row is lost: snapshots and deltas stay until the job deletes them. See why the sink is slow, or"
                " raise max_versions or max_bytes"
            )
            if not self._pauses:
                raise PublishError(text)
            if not told:
                _log.warning("training waits for sinks: %s", text)
                told = True
            time.sleep(min(self._seconds, _PAUSE_S))
            self._check_open()
            full = self._full()

    def _full(self) -> list[str]:
        """Text for each sink whose backlog is too large."""
        most_versions, most_bytes = self._limits
        texts = []
        for name, stats in self.stats().items() if self._limits != (None, None) else ():
            versions, nbytes = stats["backlog_versions"], stats["backlog_bytes"]
            if most_versions is not None and versions > most_versions or most_bytes is not None and nbytes > most_bytes:
                error = "" if stats["error"] is None else f" ({stats['error']})"
                texts.append(f"sink {name} is {versions} versions of {nbytes} bytes behind{error}")
        return texts

    def flush(self) -> None:
        """Give all sinks the newest version, in this thread.

        Raises:
            PublishError: sinks have failed; the message has the error of each.
        """
        self._check_open()
        for delivery in self._deliveries.values():
            delivery.run(lambda: False)
        failed = {name: one.error for name, one in self._deliveries.items() if one.error is not None}
        if failed:
            texts = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
            raise PublishError(f"{len(failed)} of {len(self._deliveries)} sinks are not up to date: {texts}") from next(
                iter(failed.values())
            )

    def show(self, version: str | None) -> None:
        """Publish another version, for example to roll all sinks back; None = the newest again. Sinks that
        show a newer version get all rows.

        Raises:
            PublishError: sinks have failed; the message has the error of each.
        """
        self._check_open()
        self._versions.target = version
        self.flush()

    def close(self) -> None:
        """Stop, without waiting for newer versions, and close the sinks. If the call is interrupted while it waits for
        sinks at work, or if a call of an object store has no answer for 10 seconds, each is closed by its thread. A
        child of fork closes nothing."""
        if self._process != os.getpid():
            return
        self._closed = True
        for follower in self._followers:
            follower.stop()
        try:
            for follower in self._followers:
                follower.close(self._versions.late_call)
        finally:
            for delivery in self._deliveries.values():
                delivery.close()

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise StorageError("the publisher is closed; call publish again")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ForkedProcessError(
                "a publisher works in the process that made it, and this is a child of it; call publish here"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self._process != os.getpid():
            return
        try:
            if kind is None and not self._closed:
                self.flush()
        finally:
            self.close()


def _as_sink(sink: "Sink | Callable[[Changes], Any]") -> Sink:
    if hasattr(sink, "apply") and hasattr(sink, "version"):
        return cast(Sink, sink)
    if callable(sink):
        return FunctionSink(sink)
    raise TypeError(
        f"sinks must be sinks of oneemb.sinks, or functions of the changes, got {type(sink).__name__} {sink!r:.100}"
    )


def _named(sinks: Sequence[Sink]) -> dict[str, Sink]:
    """{name: sink}, with numbers behind names that occur twice."""
    named: dict[str, Sink] = {}
    for sink in sinks:
        name, n = sink.name, 2
        while name in named:
            name, n = f"{sink.name} {n}", n + 1
        named[name] = sink
    return named


def _check_choice(argument: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{argument} must be {' or '.join(map(repr, allowed))}, got {value!r}")
