"""Interface of a sink, to which versions of a table are published; and the sink that calls a function."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from oneemb.sinks.changes import Changes
from oneemb.sinks.version import TableVersion, choice_of, read_json, write_json
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing


class Sink(Protocol):
    """Place that shows one version of a table at a time.

    Invariants, for every implementation:
    - `version` returns the version of the last `apply` that returned, in another process too;
    - after an `apply` that was killed or has raised, `version` returns the version before, or None, and the next
      `apply`, with the same changes or with all rows of any version, leaves the sink as if the first had not been.

    A sink may have an attribute `max_rows`: the largest number of rows that the changes, all applied, leave.
    """

    @property
    def name(self) -> str:
        """Name of the sink in figures and errors, without passwords."""

    @property
    def wants_whole(self) -> bool:
        """Whether the sink wants all rows the next time, in place of deltas."""
        ...

    def version(self) -> TableVersion | None:
        """The version that the sink shows; None = none."""

    def apply(self, changes: Changes) -> None:
        """Show the version of the changes. Only changes of all rows come while `version` returns None."""

    def close(self) -> None:
        """Close files and connections. A second call does nothing."""


class FunctionSink:
    """A function that takes each version's `Changes`, once in order; again if it raised, or if the process was killed
    before the position was stored.

    Args:
        function: function of one argument, `Changes`.
        position: file for the version that the function has taken last; None = memory, and the first version of a
            publisher has all rows.
        max_rows: largest number of rows that a reader of the changes has; None = all.
            [A cap](../publish.md#a-cap) says which rows stay.
    """

    wants_whole = False

    def __init__(
        self, function: Callable[[Changes], Any], position: AnyPath | None = None, *, max_rows: int | None = None
    ):
        if not callable(function):
            raise TypeError(f"function must be callable with the changes, got {type(function).__name__} {function!r}")
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._function, self._path = function, None if position is None else absolute_path(position)
        choice_of(None, False, max_rows)
        self._fs, self.max_rows = LocalFileSystem(), max_rows
        self._version: TableVersion | None = None

    def version(self) -> TableVersion | None:
        if self._path is None:
            return self._version
        found = read_json(self._fs, self._path)
        if isinstance(found, dict) and found.get("max_rows") != self.max_rows:
            return None  # Rows that have not stayed under the former cap are missing.
        return None if found is None else TableVersion.of_fields(found, self._path)

    def apply(self, changes: Changes) -> None:
        self._function(changes)
        if self._path is None:
            self._version = changes.version
            return
        capped = {} if self.max_rows is None else {"max_rows": self.max_rows}
        with doing("make the folder of", self._path):
            self._fs.make_directories(os.path.dirname(self._path))
        write_json(self._fs, self._path, changes.version.to_fields() | capped)

    def close(self) -> None:
        """Do nothing: nothing is open."""
