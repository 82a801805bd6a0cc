"""Lock of a folder that one publisher at a time writes to."""

from oneemb.storage.errors import LockedError
from oneemb.storage.fs import FileSystem, doing
from oneemb.storage.locking.signals_deferred import signals_deferred


class FolderLock:
    """Lock of a folder, taken when the folder is first written to.

    Invariant: after an interrupt at any line, `taken` says whether the folder is locked, so `release` frees it.
    """

    def __init__(self, fs: FileSystem, folder: str):
        self._fs, self._folder = fs, folder
        self._lock: int | None = None

    @property
    def taken(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None

    def take(self) -> None:
        """Make the folder and lock it, unless this object has done so. LockedError if another publisher holds it."""
        if self._lock is not None:
            return
        with doing("make the folder", self._folder):
            self._fs.make_directories(self._folder)
            try:
                with signals_deferred:
                    self._lock = self._fs.lock(f"{self._folder}/LOCK")
            except BlockingIOError:
                raise LockedError(
                    f"{self._folder} must have one publisher at a time, and another one writes to it; stop that one, or"
                    " give another folder"
                ) from None

    def release(self) -> None:
        """Release the lock, if it was taken."""
        with signals_deferred:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._fs.unlock(lock)
