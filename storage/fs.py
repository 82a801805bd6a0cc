"""The only place of the persistent table that touches files: a table given another `FileSystem` runs on that one.

Invariants, for every implementation:
- `write` writes everything or raises; what it wrote may still be lost until `sync` of that file has returned;
- a created, renamed or removed name may still be lost, or still be there, until `sync_directory` has returned;
- `rename` replaces the target in one step: whoever looks sees the old file or the new one.

Failures are OSError. `storage_error` turns one into the error that users see.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oneemb.storage.errors import CorruptTableError, StorageError

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path as callers give it; `absolute_path` makes one for use."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_LOCK_TRIES = 4
_PIECE_BYTES = 1 << 14
_HUGE_PAGE = 2 << 20


class FileSystem(Protocol):
    """The file calls that the table makes. A file is known by a number, as in the system's own calls."""

    native: bool
    """Whether files are the system's own descriptors, which compiled loops may read by themselves."""

    def make_directories(self, path: str) -> None:
        """Make a directory and those above it where they are not there. It outlives a loss of power, even if it was
        there already: another process may have made it a moment ago, and ended."""

    def names(self, path: str) -> list[str]:
        """The names in a directory, in no order."""

    def size(self, path: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    def is_linked(self, path: str) -> bool:
        """Whether the file has another hard link, as one in a copy made by `cp -l`. Raises FileNotFoundError."""

    def create(self, path: str, *, direct: bool = False) -> int:
        """Make a new file for reading and writing. Raises FileExistsError."""

    def open(self, path: str, *, direct: bool = False) -> int:
        """Open a file for reading. Raises FileNotFoundError."""

    def read_into(self, file: int, out: memoryview, offset: int) -> int:
        """Read into `out`; returns the bytes read, fewer than asked for at the end of the file only."""

    def will_read(self, path: str, size: int) -> None:
        """Let the system read the first bytes of a file into its cache while the caller goes on, if it can. Raises
        nothing where the file is missing or the disk fails: the read does."""

    def write(self, file: int, data: Any, offset: int) -> None: ...

    def sync(self, file: int) -> None: ...

    def close(self, file: int) -> None: ...

    def spare_files(self) -> int:
        """Number of files that a table may keep open beside those that it needs."""
        ...

    def truncate(self, path: str, size: int) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def lock(self, path: str, *, exists: bool = False) -> int:
        """Lock a file, which is made unless it must exist, or a folder. Returns the file, open for reading and writing.

        Raises:
            BlockingIOError: another has the lock.
            FileNotFoundError: `exists`, and there is no file.
        """

    def unlock(self, lock: int) -> None: ...

    def still_locks(self, lock: int, path: str) -> bool:
        """Whether the lock is that of the file at the path, not of one that was there before."""
        ...

    def read_lock(self, path: str) -> bytes | None:
        """The lock's file; None while nobody holds the lock."""


class LocalFileSystem:
    """The files of this machine."""

    native = True

    def __init__(self) -> None:
        self._locks: dict[int, _LockFile] = {}

    def make_directories(self, path: str) -> None:
        above = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path):
            try:
                self.sync_directory(above)
            except PermissionError:
                pass  # Who may not read the directory above has not made this one.
            return
        self.make_directories(above)
        try:
            os.mkdir(path)
        except FileExistsError:
            pass
        self.sync_directory(above)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def is_linked(self, path: str) -> bool:
        return os.stat(path).st_nlink > 1

    def create(self, path: str, *, direct: bool = False) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | (_O_DIRECT if direct else 0), 0o666)

    def open(self, path: str, *, direct: bool = False) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_O_DIRECT if direct else 0))

    def read_into(self, file: int, out: memoryview, offset: int) -> int:
        done = 0
        while done < len(out):
            size = os.preadv(file, [out[done:]], offset + done)
            if size == 0:
                break
            done += size
        return done

    def will_read(self, path: str, size: int) -> None:
        try:
            file = self.open(path)
        except OSError:
            return
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # A file system without a cache.
        finally:
            self.close(file)

    def write(self, file: int, data: Any, offset: int) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            size = os.pwrite(file, rest, offset)
            if size == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            rest, offset = rest[size:], offset + size

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def spare_files(self) -> int:
        # A quarter of the process's limit of open files, shared by all tables that it has locked.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (1 << 20 if limit == resource.RLIM_INFINITY else limit) // (4 * max(1, len(_lock_files)))

    def truncate(self, path: str, size: int) -> None:
        os.truncate(path, size)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def sync_directory(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def lock(self, path: str, *, exists: bool = False) -> int:
        # The system frees the lock when the process ends, however it ends, so a dead holder needs no breaking. A
        # forked child must let go of its copy of the file, or it would hold the lock for a parent that is gone.
        how = os.O_RDONLY | os.O_DIRECTORY if os.path.isdir(path) else os.O_RDWR | (0 if exists else os.O_CREAT)
        file = _LockFile(os.open(path, how | os.O_CLOEXEC, 0o666))
        try:
            _take(file.number, path)
        except BaseException:
            file.close()
            raise
        self._locks[file.number] = file
        return file.number

    def unlock(self, lock: int) -> None:
        file = self._locks.pop(lock, None)
        if file is not None:
            file.close()

    def still_locks(self, lock: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(path))
        except OSError:
            return False

    def read_lock(self, path: str) -> bytes | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return os.pread(file, 4096, 0)
        finally:
            os.close(file)


def _take(file: int, path: str) -> None:
    # Whoever asks who holds the lock has it for a moment: only a lock that stays is a writer's.
    for patience in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if patience == _LOCK_TRIES - 1:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path) from error
        time.sleep(0.01)


class _LockFile:
    """An open file that a forked child closes at once."""

    def __init__(self, number: int):
        self.number = number
        _lock_files.add(self)

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    # At exit, names of modules are None, and the system closes the file.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "number") and not is_finalizing():  # It may have been stopped before it had one.
            self.close()


_lock_files: "weakref.WeakSet[_LockFile]" = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_lock_files):
        lock.close()


os.register_at_fork(after_in_child=_in_child)


def absolute_path(path: AnyPath) -> str:
    """The path that the caller means now, whatever the current directory becomes; `~` is the user's home."""
    return str(Path(os.path.expanduser(path_text(path, "a file or folder"))).absolute())


def path_text(path: AnyPath, what: str) -> str:
    """Text of a path that a caller gave, of `what` in errors. Raises TypeError if it is no path."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"path must be a str, bytes or os.PathLike, got {type(path).__name__} {path!r:.100}; give the path of"
            f" {what}"
        ) from None


def file_path(path: AnyPath, what: str) -> str:
    """Text of a file's path that a caller gave. Raises TypeError, or ValueError if it is empty or has a null byte."""
    text = path_text(path, what)
    if not text or "\0" in text:
        raise ValueError(f"path must not be empty or have a null byte, got {text!r}; give the path of {what}")
    return text


def aligned_bytes(size: int) -> np.ndarray:
    """Zeroed memory that begins at a page, as direct reads and writes need it: uint8 [size]."""
    # Private: what a child of fork has is a copy. Direct reads into such memory beside a fork are safe where nothing
    # else writes to their pages: forks wait for our reads, and no page belongs to two buffers.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Every page of a direct read or write is looked up and pinned: with few of them that costs less.
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A system without huge pages.
    return np.frombuffer(memory, np.uint8)[:size]


def free_pages(address: int, size: int) -> None:
    """Give whole pages of memory of `aligned_bytes` to the system, if it takes them; the bytes are undefined then."""
    if hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def read_file(fs: FileSystem, path: str) -> bytes | None:
    """Bytes of a small file; None = there is none. Raises StorageError if it cannot be read."""
    try:
        file = fs.open(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, "open", path) from error
    with doing("read", path):
        try:
            # Not by the size of the path: the file there may have been replaced since `file` was opened.
            data = bytearray()
            while True:
                piece = bytearray(max(_PIECE_BYTES, len(data)))
                got = fs.read_into(file, memoryview(piece), len(data))
                data += piece[:got]
                if got < len(piece):
                    return bytes(data)
        finally:
            fs.close(file)


def storage_error(error: OSError, action: str, path: str) -> StorageError:
    """The error to raise for a failed file call: what was tried, on which file, and what to do about it."""
    advice = {
        errno.ENOSPC: "free space on that file system and call again; nothing that was saved is harmed",
        errno.EDQUOT: "free some of the quota and call again; nothing that was saved is harmed",
        errno.EIO: "the device failed; the snapshots on it may still be read, copy them elsewhere",
        errno.EROFS: "the file system is read-only; remount it for writing or choose another path",
        errno.EACCES: "give this user the right to write there or choose another path",
        errno.EPERM: "give this user the right to write there or choose another path",
        errno.ENOENT: "the file or a folder above it is not there: make it, or choose another path; if it was removed"
        " while it was in use, restore it and open anew what used it",
        errno.ENOTDIR: "what is above it is a file, not a folder; choose another path",
        errno.ENAMETOOLONG: "choose a shorter path",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "raise the system's limit of open files",
        errno.EAGAIN: "the system takes no more reads; raise its limit fs.aio-max-nr (sysctl) and call again",
    }.get(error.errno or 0, "see the system's error and call again")
    name = errno.errorcode.get(error.errno or 0, "error")
    return StorageError(f"could not {action} {path}: {name}: {error.strerror or error}; {advice}")


def is_damage(error: StorageError) -> bool:
    """Whether an error says that bytes on a disk are damaged, or that the device cannot read them."""
    cause = error.__cause__
    return isinstance(error, CorruptTableError) or isinstance(cause, OSError) and cause.errno == errno.EIO


@contextmanager
def doing(action: str, path: str) -> Iterator[None]:
    """Turn an error of the system in the block into a StorageError that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, action, path) from error
