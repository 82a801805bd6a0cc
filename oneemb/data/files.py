"""A fixed set of Parquet and Arrow files, whose rows are dealt evenly to the ranks.

A position is {"taken": [[rows of each rank] for each former number of ranks], "rank", "of", "row"}: "taken" are the
rows that each rank had taken when the number of ranks changed, "row" the rows that this rank has taken since. A read
deals row groups again from the first deal on to find the rows of each rank, so a position stays small.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from oneemb.data.row_groups import RowGroups, file_identity
from oneemb.data.source import ChangedSourceError, Piece, Position
from oneemb.kernels.extras import need

Stretch = tuple[int, int, int]
"""(number of a row group in the set, first row, end)."""


class Files:
    """Rows of Parquet and Arrow files. A loop over a loader is one epoch.

    Each rank reads whole row groups; the last ones are cut, so that numbers of rows of ranks differ by one at most.

    Args:
        *paths: paths, or patterns such as "clicks/**/*.parquet", whose files are read in the order of their names. A
            file that several patterns have is read once.

    Raises:
        ValueError: no file fits the paths.
    """

    is_live = False

    def __init__(self, *paths: str | os.PathLike[str]):
        need("pyarrow", "Files", "parquet")
        self.name = ", ".join(os.fspath(path) for path in paths)
        found: dict[str, tuple[str, str]] = {}  # Several patterns may have a file, which is read once.
        for name, path in (file for pattern in paths for file in files_of(os.fspath(pattern))):
            found.setdefault(os.path.abspath(path), (name, path))
        self._names, self.paths = [name for name, _ in found.values()], [path for _, path in found.values()]
        if not self.paths:
            raise ValueError(f"there must be a file at {self.name or 'a path'}, and there is none; check the pattern")

    @cached_property
    def _groups(self) -> list[tuple[int, int, int]]:
        """(file, row group in the file, rows) of each row group."""
        groups = []
        for number, path in enumerate(self.paths):
            file = RowGroups(path)
            groups += [(number, group, file.rows(group)) for group in range(file.count)]
            file.close()
        return groups

    @cached_property
    def _identity(self) -> str:
        return "\n".join(f"{name} {file_identity(path)}" for name, path in zip(self._names, self.paths, strict=True))

    def identity(self) -> str:
        return self._identity

    def check(self, identity: str) -> None:
        had, has = identity.split("\n"), self._identity.split("\n")
        for one, other in zip(had, has, strict=False):
            if one != other:
                raise ChangedSourceError(
                    f"the files of {self.name} must be those of the loader's position: where it had {one}, there is"
                    f" {other} (name, size, checksum); restore the files, or begin anew without a position"
                )
        if len(had) != len(has):
            raise ChangedSourceError(
                f"the files of {self.name} must be those of the loader's position, {len(had)} files, and there are"
                f" {len(has)}; restore them, or use oneemb.data.GrowingFolder for files that are added"
            )

    def begin(self, rank: int, world_size: int) -> Position:
        return {"taken": [], "rank": rank, "of": world_size, "row": 0}

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        taken = [*positions[0]["taken"], [position["row"] for position in positions]]
        return {"taken": taken, "rank": rank, "of": world_size, "row": 0}

    def _dealt(self, position: Position) -> list[list[Stretch]]:
        """Rows of each rank since the number of ranks changed last."""
        stretches = [(number, 0, rows) for number, (_, _, rows) in enumerate(self._groups) if rows]
        for taken in position["taken"]:
            dealt = deal(stretches, len(taken))
            rest = [split(mine, rows)[1] for mine, rows in zip(dealt, taken, strict=True)]
            stretches = sorted(stretch for mine in rest for stretch in mine)
        return deal(stretches, position["of"])

    def rows_of_ranks(self, position: Position) -> list[int]:
        return [count(mine) for mine in self._dealt(position)]

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece]:
        mine = self._dealt(position)[position["rank"]]
        row = position["row"]
        file: RowGroups | None = None
        opened = -1
        try:
            for number, begin, end in split(mine, row)[1]:
                path, group, _ = self._groups[number]
                if file is None or opened != path:
                    if file is not None:
                        file.close()
                    file, opened = RowGroups(self.paths[path]), path
                for first, rows in file.read(group, begin, end, columns):
                    yield _piece(self.paths[path], group, first, rows, position, row)
                    row += len(rows)
        finally:
            if file is not None:
                file.close()


def _piece(path: str, group: int, first: int, rows: Any, position: Position, row: int) -> Piece:
    return Piece(
        rows, lambda k: {**position, "row": row + k}, lambda k: f"{path}, row group {group}, row {first + k}"
    )  # fmt: skip


def files_of(pattern: str) -> list[tuple[str, str]]:
    """(name, path) of each file of a pattern, or of the file with this very path, sorted. Names begin below the last
    folder without a wildcard."""
    if not glob.has_magic(pattern) or os.path.isfile(pattern):
        return [(os.path.basename(pattern), pattern)]
    root = os.path.dirname(pattern[: re.search(r"[*?[]", pattern).start()])  # type: ignore[union-attr]
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    return sorted((os.path.relpath(path, root or "."), path) for path in found)


# ---- rows of ranks ---------------------------------------------------------------------------------------------------


def count(stretches: Iterable[Stretch]) -> int:
    """Number of rows."""
    return sum(end - begin for _, begin, end in stretches)


def split(stretches: Sequence[Stretch], rows: int) -> tuple[list[Stretch], list[Stretch]]:
    """(first `rows` rows, the others)."""
    for n, (number, begin, end) in enumerate(stretches):
        if rows < end - begin:
            middle = begin + rows
            first = [*stretches[:n], *([(number, begin, middle)] if rows else [])]
            return first, [(number, middle, end), *stretches[n + 1 :]]
        rows -= end - begin
    return list(stretches), []


def deal(stretches: Sequence[Stretch], world_size: int) -> list[list[Stretch]]:
    """Stretches of each rank: dealt in turn; then ranks with too many rows give their last rows to the other ranks."""
    dealt = [list(stretches[rank::world_size]) for rank in range(world_size)]
    each, more = divmod(count(stretches), world_size)
    spare: list[Stretch] = []
    for rank, mine in enumerate(dealt):
        dealt[rank], surplus = split(mine, each + (rank < more))
        spare += surplus
    for rank, mine in enumerate(dealt):
        given, spare = split(spare, each + (rank < more) - count(mine))
        dealt[rank] = mine + given
    return dealt
