"""Row groups of Parquet files and record batches of Arrow files, read a part at a time; identities of files."""

import contextlib
import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from oneemb.data.source import PIECE_ROWS, check_column, gone_file
from oneemb.kernels.extras import need

_END_BYTES = 65_536


def file_identity(path: str) -> str:
    """Size of a file and checksum of its end. The end describes all row groups, so another file has another identity.

    Raises:
        ChangedSourceError: the file is gone.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return f"{size}-{zlib.crc32(file.read()):08x}"
    except FileNotFoundError as error:
        raise gone_file(path) from error


class RowGroups:
    """Row groups of a Parquet file, or record batches of an Arrow file (random-access format).

    Raises:
        ValueError: the file is neither, or is damaged.
    """

    def __init__(self, path: str):
        need("pyarrow", "reading files", "parquet")
        import pyarrow.parquet

        self.path = path
        self._parquet: Any = None
        with self._reading():
            with open(path, "rb") as file:
                is_arrow = file.read(6) == b"ARROW1"
            if is_arrow:
                self._names = self._open_arrow([]).schema.names
                self._arrow = self._open_arrow([0])  # A column has the numbers of rows.
                self.count = self._arrow.num_record_batches
            else:
                self._parquet = pyarrow.parquet.ParquetFile(path)
                self.count = self._parquet.num_row_groups
                self._names = self._parquet.schema_arrow.names

    def _open_arrow(self, columns: list[int]) -> Any:
        """Reader of the columns of these numbers; [] = all columns. The file is not mapped into memory, since a mapped
        file that is cut short ends the process."""
        import pyarrow as pa

        return pa.ipc.open_file(pa.OSFile(self.path), options=pa.ipc.IpcReadOptions(included_fields=columns))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except FileNotFoundError as error:
            raise gone_file(self.path) from error
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} must be a whole Parquet or Arrow file: {error}; write it again") from error

    def rows(self, group: int) -> int:
        """Number of rows of a row group.

        Raises:
            ValueError: the file is damaged.
        """
        if self._parquet is not None:
            return self._parquet.metadata.row_group(group).num_rows
        with self._reading():
            return self._arrow.get_batch(group).num_rows

    def read(self, group: int, begin: int, end: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first row, rows) of parts of a row group.

        Raises:
            BadRowError: a column is missing, or comes twice.
            ValueError: the file is damaged.
        """
        for name in columns:
            check_column(name, self._names, f"{self.path}, row group {group}, row {begin}")
        at = 0
        with contextlib.closing(self._parts(group, columns)) as parts:
            while at < end:
                with self._reading():
                    part = next(parts, None)
                if part is None:
                    return
                first, last = max(begin - at, 0), min(end - at, len(part))
                if first < last:
                    yield at + first, part.slice(first, last - first)
                at += len(part)

    def _parts(self, group: int, columns: Sequence[str]) -> Generator[Any, None, None]:
        if self._parquet is not None:
            yield from self._parquet.iter_batches(PIECE_ROWS, row_groups=[group], columns=list(columns))
            return
        batch = self._open_arrow([self._names.index(name) for name in columns]).get_batch(group)
        # The bytes may be damaged, and Arrow checks nothing on its own: a wrong offset would end the process.
        batch.validate(full=True)
        for first in range(0, len(batch), PIECE_ROWS):
            yield batch.slice(first, PIECE_ROWS)

    def close(self) -> None:
        """Close the file."""
        if self._parquet is not None:
            self._parquet.close()
