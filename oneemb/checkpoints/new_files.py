"""Files that appear under their names when they are complete, in place of those of these names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from oneemb.storage.locking.undisturbed import undisturbed

__all__ = ["NewFile", "close_dropped", "make_durable", "new_files"]


class NewFile:
    """A file that is written beside its path, `.tmp`, and renamed to it when it is complete."""

    def __init__(self, path: str):
        self._path, self._temporary = path, f"{path}.tmp"
        self.file = open(self._temporary, "wb")

    def put_in_place(self) -> None:
        """Rename the file to its path, once `make_durable` has been called for it."""
        os.replace(self._temporary, self._path)

    def drop(self) -> None:
        """Close the file and remove it, unless it has been renamed."""
        close_dropped(self.file)
        with suppress(FileNotFoundError):
            os.remove(self._temporary)


@contextmanager
def new_files(*paths: str) -> Iterator[list[IO[bytes]]]:
    """Files to write to. When the block ends without an error, all of them take their paths, after all are durable; if
    it raises, none of them is left."""
    files: list[NewFile] = []
    try:
        with undisturbed:
            for path in paths:
                files.append(NewFile(path))
        yield [new.file for new in files]
        for new in files:
            make_durable(new.file)
        with undisturbed:  # Keys of a new file with values of an old one would be wrong rows.
            for new in files:
                new.put_in_place()
    finally:
        with undisturbed:
            for new in files:
                new.drop()


def make_durable(file: IO[bytes]) -> None:
    """Return when what was written to the file outlives a loss of power; its name in the folder may not."""
    file.flush()
    os.fsync(file.fileno())


def close_dropped(file: IO[bytes]) -> None:
    """Close a file that nobody will read. On a full disk the rest of it cannot be written, which no longer matters."""
    with suppress(OSError):
        file.close()
