"""A folder's server, shared by all who open its URL in one process: a model's embeddings, their averages and copies.

Invariants:
- calls are made one at a time, on whatever threads;
- the folder is released when the last who opened it has closed; one who has closed is told so, whoever else goes on;
- a forked child has none of its parent's.
"""

import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from oneemb.storage.remote.file_server import FileServer, read_file_url
from oneemb.storage.remote.parameter_server import ServerError

_open: "weakref.WeakValueDictionary[tuple[int, str], _Shared]" = weakref.WeakValueDictionary()
"""By process and path."""

_opening = threading.RLock()  # The garbage collector may close one while another is opened.


class _Shared:
    def __init__(self, path: str, save_bytes: int, accept_loss: bool):
        self.save_bytes = save_bytes
        self.server = FileServer(path, save_bytes=save_bytes, accept_loss=accept_loss)
        self.one_at_a_time = threading.RLock()
        self.handles: weakref.WeakSet[FileHandle] = weakref.WeakSet()


def open_file_server(url_rest: str) -> "FileHandle":
    """The server of a URL that `open_server` is given, less its `file://`.

    Args:
        url_rest: see `read_file_url`.

    Raises:
        ValueError: there is no path, an option is unknown, or the folder is open with another `save_bytes`.
        ServerError: as `FileServer`.
    """
    path, save_bytes, accept_loss = read_file_url(url_rest)
    key = (os.getpid(), path)
    with _opening:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(path, save_bytes, accept_loss)
        elif shared.save_bytes != save_bytes:
            raise ValueError(
                f"file://{path} is open in this process with save_bytes={shared.save_bytes}, got {save_bytes}; open it"
                " with the same one"
            )
        return FileHandle(shared)


class FileHandle:
    """A `FileServer` for one who opened it."""

    def __init__(self, shared: _Shared):
        self.name = shared.server.name
        self._shared: _Shared | None = shared
        shared.handles.add(self)

    def pull(self, table: str, id_N: np.ndarray, widths: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """See `ParameterServer`."""
        shared = self._its()
        with shared.one_at_a_time:
            return shared.server.pull(table, id_N, widths)

    def push(self, table: str, id_N: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """See `ParameterServer`."""
        shared = self._its()
        with shared.one_at_a_time:
            shared.server.push(table, id_N, parts)

    def erase(self, table: str, id_N: np.ndarray, parts: int) -> None:
        """See `Erases`."""
        shared = self._its()
        with shared.one_at_a_time:
            shared.server.erase(table, id_N, parts)

    def flush(self) -> None:
        """See `FileServer`."""
        shared = self._its()
        with shared.one_at_a_time:
            shared.server.flush()

    def close(self) -> None:
        """See `FileServer`."""
        if self._shared is None or self._shared.server.forked:
            return
        with _opening, self._shared.one_at_a_time:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.handles.discard(self)
            if not shared.handles:
                for key in [key for key, its in _open.items() if its is shared]:
                    del _open[key]
                shared.server.close()

    def _its(self) -> _Shared:
        if self._shared is None:
            raise ServerError(f"{self.name} is closed; open it again")
        self._shared.server.check_process()
        return self._shared
