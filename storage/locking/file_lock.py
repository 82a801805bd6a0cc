"""Lock of a file, for one process at a time.

Invariant: after an interrupt at any line, `taken` says whether the file is locked. So a caller that makes the object
before a `try`, takes the lock in the block, and releases the lock in the `finally` leaves nothing locked, even if the
exception is kept with its frames. One gap is left: an interrupt at the first instruction of the release, which no
Python code can prevent.
"""

from oneemb.storage.fs import FileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred


class FileLock:
    """Lock of the file or folder `path`. `exists`: whether the path must exist; if not, a missing file is made."""

    def __init__(self, fs: FileSystem, path: str, *, exists: bool = False):
        self._fs, self._path, self._exists = fs, path, exists
        self._lock: int | None = None

    @property
    def taken(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None

    @property
    def is_at_path(self) -> bool:
        """Whether the path still leads to the file that this object has locked."""
        return self._lock is not None and self._fs.still_locks(self._lock, self._path)

    def take(self) -> None:
        """Take the lock. BlockingIOError if another object or process holds it."""
        with signals_deferred:
            self._lock = self._fs.lock(self._path, exists=self._exists)

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        with signals_deferred:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._fs.unlock(lock)
