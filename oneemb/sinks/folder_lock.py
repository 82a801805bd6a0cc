"""Lock of a folder that one publisher at a time writes to."""

from oneemb.storage.errors import LockedError
from oneemb.storage.fs import FileSystem, doing
from oneemb.storage.locking.file_lock import FileLock


class FolderLock:
    """Lock of a folder, taken when the folder is first written to."""

    def __init__(self, fs: FileSystem, folder: str):
        self._fs, self._folder = fs, folder
        self._lock = FileLock(fs, f"{folder}/LOCK")

    @property
    def taken(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock.taken

    def take(self) -> None:
        """Make the folder and lock it, unless this object has done so. LockedError if another publisher holds it."""
        if self.taken:
            return
        with doing("make the folder", self._folder):
            self._fs.make_directories(self._folder)
            try:
                self._lock.take()
            except BlockingIOError:
                raise LockedError(
                    f"{self._folder} must have one publisher at a time, and another one writes to it; stop that one, or"
                    " give another folder"
                ) from None

    def release(self) -> None:
        """Release the lock, if it was taken."""
        self._lock.release()
