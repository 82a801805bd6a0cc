"""Reads the pieces of a source in order and converts them to arrays, on threads if the loader has workers."""

import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from oneemb.data.columns import Chunk, Column, Convert, Kinds, cut
from oneemb.data.source import DataSource, Position

_END: Any = object()


@dataclass(frozen=True)
class RowRange:
    """Rows begin to end of a chunk."""

    chunk: Chunk
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin

    @property
    def bad_N(self) -> np.ndarray:
        """Mask of bad rows."""
        return self.chunk.bad_N[self.begin : self.end]

    def column(self, name: str, number: int) -> Column:
        """Rows of a column."""
        return cut(self.chunk.columns[name][number], self.begin, self.end)


class ChunkReader:
    """Rows of a source from a position on.

    Args:
        columns: names of the columns that are read.
        kinds: kinds that the columns have had so far.
        executor: threads that convert pieces; None = the calling thread converts them.
        ahead: number of pieces that are read ahead for the threads.
    """

    def __init__(
        self, source: DataSource, position: Position, columns: Sequence[str], convert: Convert, kinds: Kinds,
        executor: Executor | None, ahead: int,
    ):  # fmt: skip
        self.position = position
        """Position behind the rows taken so far."""
        self.ended = False
        """Whether the source has ended and all its rows are taken."""
        self._pieces: Any = source.read(position, columns)
        self._convert, self._kinds, self._executor, self._ahead = convert, kinds, executor, ahead
        self._coming: deque[Chunk | Future[Chunk]] = deque()
        self._chunk: Chunk | None = None
        self._row = 0
        self._has_read_all = False
        self._process = os.getpid()
        self._error: Exception | None = None
        """Error of the source, which is raised after the chunks that were read before it."""

    def next_part(self, rows_max: int) -> RowRange | None:
        """The next rows, at most `rows_max`; None = the source has none now, or has ended.

        Raises:
            RuntimeError: the process is a fork of the one that began to read.
        """
        if os.getpid() != self._process:  # It has no threads, and shares the places in open files.
            raise RuntimeError("a loop over a loader must stay in its process; begin another loop in the forked one")
        while self._chunk is None or self._row == len(self._chunk.bad_N):
            self._read_ahead()
            if not self._coming and self._error is not None:
                raise self._error
            if not self._coming:
                self.ended = self._has_read_all
                return None
            coming = self._coming.popleft()
            chunk = coming.result() if isinstance(coming, Future) else coming
            self._kinds.check(chunk)
            self._chunk, self._row = chunk, 0
        begin, end = self._row, min(self._row + rows_max, len(self._chunk.bad_N))
        self._row, self.position = end, self._chunk.piece.at(end)
        return RowRange(self._chunk, begin, end)

    def _read_ahead(self) -> None:
        while not self._has_read_all and len(self._coming) <= self._ahead:
            piece: Any = _END
            try:
                piece = next(self._pieces, _END)
            except Exception as error:
                self._error = error
            self._has_read_all = piece is _END
            if piece is _END or piece is None:
                return
            if self._executor is None:  # `ahead` is 0, so no row is read behind its error.
                self._coming.append(self._convert(piece))
            else:
                self._coming.append(self._executor.submit(self._convert, piece))

    def close(self) -> None:
        """Close the source's files and connections."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()
