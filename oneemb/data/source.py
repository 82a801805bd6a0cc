"""Interface of a source of rows, and the positions of sources that are one sequence without an end.

Invariant: reading from a position gives the same rows in the same order, however often it is read.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

Position = Any
"""Where reading goes on: numbers and strings in lists and dicts, as a checkpoint can hold them."""

PIECE_ROWS = 65_536
"""Largest number of rows that a source reads at once."""

POLL_S = 0.05
"""Seconds that a live source waits for rows before it says that there are none now."""


class BadRowError(ValueError):
    """A row has no value, a value of a wrong type, or a list that is too long; or a column is missing."""


class ChangedSourceError(RuntimeError):
    """Rows at the position of a loader are gone, or are not the rows that were there."""


def check_column(name: str, names: Sequence[str], place: str) -> None:
    """Raise BadRowError unless one of the columns `names` has this name. `place`: where the first row stands."""
    if names.count(name) != 1:
        has = f"it has {', '.join(map(repr, names))}" if name not in names else "it has several"
        raise BadRowError(f"{place}: there must be one column {name!r}; {has}")


def gone_file(path: str) -> ChangedSourceError:
    """Error about a file that was removed before the loader had read it."""
    return ChangedSourceError(f"{path} must stay until the loader has read it, and is gone; restore it")


@dataclass(frozen=True)
class Piece:
    """Rows that a source has read."""

    rows: Any
    """pyarrow.RecordBatch or pyarrow.Table."""
    at: Callable[[int], Position]
    """Function that returns the source's position before row k of the piece; for k = len(rows), behind the piece."""
    place: Callable[[int], str]
    """Function that returns where row k stands, for errors."""
    alone: Callable[[int], Position] | None = None
    """Function that returns a position from which a read gives row k first, then the rows behind it. None = this piece
    begins where the piece before it ended, so that one read gives both."""
    bad: dict[int, str] = field(default_factory=dict)
    """{row: why it could not be read}; such a row has nulls."""


class DataSource(Protocol):
    """Rows in an order that never changes."""

    name: str
    """Name for errors."""
    is_live: bool
    """Whether more rows may come. False = a `FixedSource`, and a loop over the loader is one epoch."""

    def begin(self, rank: int, world_size: int) -> Position:
        """Position before the first row of a rank."""

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        """Position of one rank. All `world_size` ranks together read the rows that `positions` have not read."""

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece | None]:
        """Yield the rows from a position on. A live source yields None when there are no rows now, at least each
        `POLL_S` seconds, and does not end unless the position has an end."""


class FixedSource(DataSource, Protocol):
    """DataSource whose rows are all known; `is_live` is False."""

    def rows_of_ranks(self, position: Position) -> list[int]:
        """Rows of each rank from `begin` or `share` on."""

    def identity(self) -> str:
        """Text that `check` compares later: another text means other rows."""

    def check(self, identity: str) -> None:
        """Raise ChangedSourceError if the source has another identity now."""


# ---- sources that are one sequence without an end --------------------------------------------------------------------

# A position is a list of stretches [at, end, rank, world_size]: the rows of one rank from `at` on, before `end` if it
# is not None. Places `at` are lists of numbers and strings that Python orders as the rows are ordered.

ReadStretch = Callable[[Any, Any, int, int], Iterator[Piece | None]]


def share_stretches(positions: Sequence[Position], rank: int, world_size: int) -> Position:
    """Position of one rank after the number of ranks has changed. Before the place that the foremost rank has reached,
    the stretches of the former ranks go on as they were; behind it, rows are shared anew."""
    front = max(stretch[0] for position in positions for stretch in position if stretch[1] is None)
    rest = []
    for position in positions:
        for at, end, *of in position:
            if (end is None or at < end) and at < front:
                rest.append([at, front if end is None else end, *of])
    return [*sorted(rest)[rank::world_size], [front, None, rank, world_size]]


def read_stretches(position: Position, read: ReadStretch) -> Iterator[Piece | None]:
    """Yield the rows of one stretch after the other."""
    for number, (at, end, rank, world_size) in enumerate(position):
        behind = [end, rank, world_size], position[number + 1 :]
        for piece in read(at, end, rank, world_size):
            yield None if piece is None else dataclasses.replace(piece, at=partial(_in_stretch, piece.at, *behind))


def _in_stretch(at: Callable[[int], Any], tail: list[Any], rest: list[Any], k: int) -> Position:
    return [[at(k), *tail], *rest]
