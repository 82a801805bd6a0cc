"""A file to which lines are added, each a JSON object.

A place is [offset of a line, bytes at the beginning of the file, their checksum].
"""

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from oneemb.data.lines import columns_of, parse_json, schema_of
from oneemb.data.source import (
    POLL_S,
    BadRowError,
    ChangedSourceError,
    Piece,
    Position,
    read_stretches,
    share_stretches,
)

_BLOCK = 65_536
"""A line belongs to the rank of the block in which it begins."""
_HEAD = 4096
_LINE_BYTES_MAX = 1 << 26


class GrowingFile:
    """Rows of a file of JSON lines, also of lines that are added later. A line is read once its line break is there.

    The file must not be shortened, replaced or rotated. For logs that rotate, write each part as a file of its own, and
    use GrowingFolder.

    Args:
        path: the file.
        schema: pyarrow.Schema, or {name of a column: pyarrow type, or its name such as "int64"}.
    """

    is_live = True

    def __init__(self, path: str | os.PathLike[str], schema: Any):
        self.name = os.fspath(path)
        self._schema = schema_of(schema, "GrowingFile")

    def begin(self, rank: int, world_size: int) -> Position:
        return [[[0, 0, 0], None, rank, world_size]]

    def share(self, positions: Sequence[Position], rank: int, world_size: int) -> Position:
        return share_stretches(positions, rank, world_size)

    def read(self, position: Position, columns: Sequence[str]) -> Iterator[Piece | None]:
        schema = columns_of(self._schema, columns)

        def stretch(at: Any, end: Any, rank: int, world_size: int) -> Iterator[Piece | None]:
            with self._open(at) as file:
                offset, stop, size = at[0], None if end is None else end[0], _BLOCK * 16
                while stop is None or offset < stop:
                    block = os.pread(file.fileno(), size, offset)
                    head = self._check(file.fileno(), at)  # after the read, so that the block is of this file
                    whole = block.rfind(b"\n") + 1
                    if not whole:
                        self._check_path(file.fileno(), offset)
                        if len(block) == size:
                            if size >= _LINE_BYTES_MAX:
                                raise BadRowError(
                                    f"{self.name}, byte {offset}: a line must have at most {_LINE_BYTES_MAX} bytes"
                                )
                            size *= 2
                            continue
                        yield None
                        time.sleep(POLL_S)
                        continue
                    end_N = offset + np.flatnonzero(np.frombuffer(block, np.uint8, whole) == ord("\n")) + 1
                    begin_N = np.concatenate([[offset], end_N[:-1]])
                    mine_N = begin_N // _BLOCK % world_size == rank
                    if stop is not None:
                        mine_N &= begin_N < stop
                    head = head[: offset + whole]
                    at = [offset + whole, len(head), zlib.crc32(head)]
                    if mine_N.any():
                        texts = block[:whole].split(b"\n")
                        lines = texts[:-1] if mine_N.all() else [texts[n] for n in np.flatnonzero(mine_N)]
                        yield self._piece(lines, begin_N[mine_N], end_N[mine_N], at[1:], schema)
                    offset, size = at[0], _BLOCK * 16

        return read_stretches(position, stretch)

    def _piece(
        self, lines: list[bytes], begin_N: np.ndarray, end_N: np.ndarray, head: list[int], schema: Any
    ) -> Piece:  # fmt: skip
        rows, bad = parse_json(lines, schema)
        return Piece(
            rows,
            lambda k: [int(begin_N[k] if k < len(begin_N) else end_N[-1]), *head],
            lambda k: f"{self.name}, byte {begin_N[k]}",
            bad=bad,
        )

    def _open(self, at: Any) -> IO[bytes]:
        try:
            return open(self.name, "rb", buffering=0)
        except FileNotFoundError as error:
            if not at[0]:
                raise
            raise self._changed(at[0], "is gone") from error

    def _check(self, file: int, at: Any) -> bytes:
        """Beginning of the file.

        Raises:
            ChangedSourceError: the open file is not the file of the place `at`.
        """
        offset, length, checksum = at
        head, size = os.pread(file, _HEAD, 0), os.fstat(file).st_size
        if size < offset:
            raise self._changed(offset, f"has been shortened to {size} bytes")
        if zlib.crc32(head[:length]) != checksum:
            raise self._changed(offset, "has another beginning")
        if offset and os.pread(file, 1, offset - 1) != b"\n":
            raise self._changed(offset, f"has no line that begins at byte {offset}")
        return head

    def _check_path(self, file: int, offset: int) -> None:
        """Raise ChangedSourceError if the open file is no longer at the path, where lines are added."""
        try:
            if not os.path.samestat(os.stat(self.name), os.fstat(file)):
                raise self._changed(offset, "was replaced")
        except FileNotFoundError as error:
            raise self._changed(offset, "is gone") from error

    def _changed(self, offset: int, why: str) -> ChangedSourceError:
        return ChangedSourceError(
            f"{self.name} must only grow, and was read up to byte {offset}; it {why}; restore it, or write parts as"
            " files of their own for oneemb.data.GrowingFolder"
        )
