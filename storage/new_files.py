"""New files that get their names once they are whole and durable; removal of unfinished files of killed processes.

A file is written under a temporary name beside its path, synced, and renamed: `NewFile`. Where several processes may
make a file at once, `begin` gives each process a unique temporary name and a lock on that file. A temporary file that
no process has locked was left by a killed process; `remove_unfinished` removes it.

Invariant: with one writer of a path at a time, a reader sees the former file or the new one, whole. Two writers at once
need `begin`, because `NewFile` removes a temporary file that exists already. To make the new name durable, the caller
calls `sync_directory`.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from oneemb.storage.fs import FileSystem, LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred


class NewFile:
    """A file that is written beside its path and renamed to it when it is whole.

    Args:
        temporary: path under which the file is written; None = `path.tmp`. A file that has this path already, left by a
            killed process, is removed.
    """

    def __init__(self, path: str, temporary: str | None = None, fs: FileSystem | None = None):
        self.path, self.temporary = path, f"{path}.tmp" if temporary is None else temporary
        self._fs, self._offset = fs or LocalFileSystem(), 0
        self._stream: IO[bytes] | None = None
        self._renamed = False
        self._file: int | None = self._create()

    def _create(self) -> int:
        try:
            return self._fs.create(self.temporary)
        except FileExistsError:
            self._fs.remove(self.temporary)
            return self._fs.create(self.temporary)

    @property
    def stream(self) -> IO[bytes]:
        """The file as a Python file object, for libraries that write to one; then `write` is not used."""
        if self._stream is None:
            assert self._file is not None
            self._stream = open(self._file, "wb", closefd=False)
        return self._stream

    def write(self, data: Any) -> None:
        """Append the bytes of `data`, an object with the buffer protocol."""
        assert self._file is not None
        self._fs.write(self._file, data, self._offset)
        self._offset += memoryview(data).nbytes

    def sync(self) -> None:
        """Make all written bytes durable: they outlive a loss of power once this returns."""
        assert self._file is not None
        if self._stream is not None:
            self._stream.flush()
        self._fs.sync(self._file)

    def put_in_place(self) -> None:
        """Rename the file to its path; call `sync` first."""
        self._fs.rename(self.temporary, self.path)
        self._renamed = True

    def close(self) -> None:
        """Close the file. Without `sync` a loss of power may lose its end. Closing twice is fine."""
        file, self._file, stream, self._stream = self._file, None, self._stream, None
        try:
            if stream is not None:
                close_dropped(stream)
        finally:
            if file is not None:
                self._fs.close(file)

    def drop(self) -> None:
        """Close the file and remove it, unless it has been renamed."""
        with suppress(OSError):
            self.close()
        if not self._renamed:
            with suppress(OSError):
                self._fs.remove(self.temporary)


def replace_file(fs: FileSystem, path: str, data: Any, temporary: str | None = None) -> None:
    """Replace a file by one with the bytes `data`, atomically. After an OSError the old file is unchanged, and the
    temporary file is removed if possible."""
    with new_file(fs, path, temporary) as new:
        new.write(data)


@contextmanager
def new_file(fs: FileSystem, path: str, temporary: str | None = None) -> Iterator[NewFile]:
    """Yield a `NewFile` to write. When the block ends without an error, the file is synced and renamed to its path. If
    the block raises, the old file is unchanged, and the temporary file is removed if possible."""
    new = NewFile(path, temporary, fs)
    try:
        yield new
        new.sync()
        new.close()
        new.put_in_place()
    except BaseException:
        new.drop()
        raise


@contextmanager
def new_files(*paths: str) -> Iterator[list[IO[bytes]]]:
    """Yield a file object for each path. When the block ends without an error, all files are synced, then renamed to
    their paths. If the block raises, all are removed."""
    files: list[NewFile] = []
    try:
        with signals_deferred:
            for path in paths:
                files.append(NewFile(path))
        yield [new.stream for new in files]
        for new in files:
            new.sync()
        with signals_deferred:  # Keys of a new file with values of an old one would be wrong rows.
            for new in files:
                new.put_in_place()
    finally:
        with signals_deferred:
            for new in files:
                new.drop()


def close_dropped(file: IO[bytes]) -> None:
    """Close a file that nobody will read, and ignore OSError: unwritten bytes of it do not matter."""
    with suppress(OSError):
        file.close()


# ---- unique names ---------------------------------------------------------------------------------------------


def begin(fs: FileSystem, stem: str, digits: int, make: Callable[[str], None] | None = None) -> tuple[str, int]:
    """Make and lock a file, or the folder that `make(path)` makes, with the unique name `stem.<random hex digits>.tmp`.
    Returns its path, and the open file that has the lock."""
    while True:
        path = f"{stem}.{uuid.uuid4().hex[:digits]}.tmp"
        if make is not None:
            make(path)
        with suppress(BlockingIOError, FileNotFoundError):  # `remove_unfinished` has found it before it was locked.
            lock = fs.lock(path, exists=make is not None)
            if fs.still_locks(lock, path):
                return path, lock
            fs.unlock(lock)


def is_held(fs: FileSystem, path: str) -> bool:
    """Whether a process has locked this unfinished file or folder. A path whose lock cannot be tested counts as
    held."""
    try:
        return fs.read_lock(path) is not None
    except OSError:
        return True


def remove_unfinished(fs: FileSystem, folder: str, stem: str, digits: int, remove: Callable[[str], None]) -> None:
    """Call `remove(path)` for each unfinished file of `begin` in a folder that no process has locked. `stem` is a
    regular expression for the part of the name before the digits."""
    for name in fs.names(folder):
        if re.fullmatch(rf"(?s:{stem})\.[0-9a-f]{{{digits}}}\.tmp", name):
            with suppress(OSError):  # BlockingIOError: somebody holds it; or another has removed it, or may remove it.
                path = os.path.join(folder, name)
                lock = fs.lock(path, exists=True)
                try:
                    remove(path)
                finally:
                    fs.unlock(lock)
