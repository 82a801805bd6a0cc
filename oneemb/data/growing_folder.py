"""A folder to which Parquet and Arrow files are added."""

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from oneemb.data.files import files_of
from oneemb.data.row_groups import RowGroups, file_identity
from oneemb.data.source import POLL_S, ChangedSourceError, Piece, Position, gone_file, read_stretches, share_stretches
from oneemb.kernels.extras import need

_FIRST = ["", 0, 0, ""]
"""Place before all files: name of a file, row group, row, identity of the file."""

_ALL = 1 << 40
"""Row group of a place behind a whole file."""


class GrowingFolder:
    """Rows of Parquet and Arrow files in the order of the files' names, also of files that are added later.

    The name of a new file must sort behind the names of all files before it; a file that comes late while no loop runs
    is not noticed. The file must be whole when it gets its name: write it under another name that the pattern does not
    fit, and rename it. A file may be deleted once the positions of all checkpoints that may be resumed are behind it.
    Ranks share row groups by a checksum of file name and number.

    Args:
        pattern: pattern such as "clicks/*.parquet".
    """

    is_live = True

    def __init__(self, pattern: str | os.PathLike[str]):
        need("pyarrow", "GrowingFolder", "parquet")
        self.name = os.fspath(pattern)

    def begin(self, rank: int, world_size: int) -> Position:
        return [[_FIRST, None, rank, world_size]]

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        return share_stretches(positions, rank, world_size)

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece | None]:
        def stretch(at: Any, end: Any, rank: int, world_size: int) -> Iterator[Piece | None]:
            known: set[str] = set()
            while True:
                files = self._files(at, known)
                for name, path in files:
                    yield from _read_file(name, path, at, end, rank, world_size, columns)
                    at = [name, _ALL, 0, ""]
                    if end is not None and name >= end[0]:
                        return
                if end is not None:
                    raise gone_file(f"{end[0]} of {self.name}")
                yield None
                time.sleep(POLL_S)

        return read_stretches(position, stretch)

    def _files(self, at: Any, known: set[str]) -> list[tuple[str, str]]:
        """(name, path) of each file that may have rows behind a place; `known` gets the names of all files."""
        files = files_of(self.name)
        names = {name for name, _ in files}
        late = sorted(name for name in names - known if name < at[0]) if known else []
        if late:
            raise ChangedSourceError(
                f"new files of {self.name} must sort behind {at[0]}, up to which files were read, and {late[0]} does"
                " not; rename it"
            )
        known |= names | {at[0]}
        if at[0] and at[1] != _ALL and at[0] not in names:
            raise gone_file(f"{at[0]} of {self.name}")
        return [(name, path) for name, path in files if (name, 0) >= (at[0], at[1] == _ALL)]


def _read_file(
    name: str, path: str, at: Any, end: Any, rank: int, world_size: int, columns: Sequence[str]
) -> Iterator[Piece]:  # fmt: skip
    identity = file_identity(path)
    here: Any = at if at[0] == name else [name, 0, 0, identity]
    if here[3] != identity:
        raise ChangedSourceError(
            f"{path} must be the file of the loader's position, {here[3]} (size, checksum), and is {identity};"
            " restore it"
        )
    file = RowGroups(path)
    try:
        rows_of = {
            n: file.rows(n) for n in range(here[1], file.count)
            if zlib.crc32(f"{name}/{n}".encode()) % world_size == rank
        }  # fmt: skip
        mine = [n for n, rows in rows_of.items() if rows]
        for group in mine:
            begin, rows = here[2] if group == here[1] else 0, rows_of[group]
            stop = rows
            if end is not None and [name, group] >= end[:2]:
                stop = end[2] if [name, group] == end[:2] else 0
            for first, part in file.read(group, begin, stop, columns):
                is_last = group == mine[-1] and first + len(part) == rows
                yield _piece(name, path, group, first, part, identity, is_last)
    finally:
        file.close()


def _piece(name: str, path: str, group: int, first: int, rows: Any, identity: str, is_last: bool) -> Piece:
    count = len(rows)

    def at(k: int) -> list[Any]:
        if is_last and k == count:
            return [name, _ALL, 0, ""]  # The file may be deleted.
        return [name, group, first + k, identity]

    return Piece(rows, at, lambda k: f"{path}, row group {group}, row {first + k}")
