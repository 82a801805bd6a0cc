"""One writer a path: the lock, and how it names its holder.

The system frees the lock when its holder ends, however that comes about. What a dead holder has left in the file
tells the next one whose work it takes over.
"""

import json
import os
import socket
import time

from oneemb.storage.errors import LockedError, StorageError
from oneemb.storage.fs import FileSystem, storage_error

__all__ = ["WriterLock", "lock_holder"]


class WriterLock:
    """Held from construction until `release`.

    Args:
        fs: where the table is.
        path: of the lock's file.

    Raises:
        LockedError: another table object has it.
    """

    def __init__(self, fs: FileSystem, path: str):
        self._fs = fs
        self._pid = os.getpid()
        holder = {"pid": self._pid, "host": socket.gethostname(), "since": time.time()}
        try:
            self._lock, left = fs.lock(path, json.dumps(holder).encode())
        except BlockingIOError as error:
            raise LockedError(
                f"{path} is held by {_holder_text((error.strerror or '').encode())}; one table object at a time writes "
                f"to a path: close that one, choose another path, or read its snapshots with SnapshotReader"
            ) from error
        except OSError as error:
            raise storage_error(error, "lock", path) from error
        self.left_by = _holder_text(left) if left else None

    def release(self) -> None:
        if self._pid == os.getpid():
            try:
                self._fs.unlock(self._lock)
            except OSError as error:
                raise StorageError(f"could not give back the lock: {error}") from error


def lock_holder(fs: FileSystem, path: str) -> str | None:
    """Who holds the lock, in words; None when nobody does."""
    holder = fs.read_lock(path)
    return None if holder is None else _holder_text(holder)


def _holder_text(holder: bytes) -> str:
    try:
        fields = json.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["since"]))
        return f"process {fields['pid']} on host {fields['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        return "a process that did not leave its name"
