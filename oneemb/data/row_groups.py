"""Row groups of Parquet files and record batches of Arrow files, read a part at a time; identities of files."""

import contextlib
import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from oneemb.data.source import PIECE_ROWS, ChangedSourceError
from oneemb.kernels.extras import need

_END_BYTES = 65_536


def file_identity(path: str) -> str:
    """Size of a file and checksum of its end, which describes all row groups: another file of this name differs in it.

    Raises:
        ChangedSourceError: the file is gone.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return f"{size}-{zlib.crc32(file.read()):08x}"
    except FileNotFoundError as error:
        raise ChangedSourceError(f"{path} must stay until the loader has read it, and is gone; restore it") from error


class RowGroups:
    """Row groups of a Parquet file, or record batches of an Arrow file (random-access format).

    Raises:
        ValueError: the file is neither, or is damaged.
    """

    def __init__(self, path: str):
        pa = need("pyarrow", "reading files", "parquet")
        import pyarrow.parquet

        self.path = path
        self._parquet: Any = None
        try:
            with open(path, "rb") as file:
                is_arrow = file.read(6) == b"ARROW1"
            if is_arrow:
                self._arrow = pa.ipc.open_file(pa.memory_map(path))
                self.count = self._arrow.num_record_batches
                self._names = self._arrow.schema.names
            else:
                self._parquet = pyarrow.parquet.ParquetFile(path)
                self.count = self._parquet.num_row_groups
                self._names = self._parquet.schema_arrow.names
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return ChangedSourceError(f"{self.path} must stay until the loader has read it, and is gone; restore it")
        return ValueError(f"{self.path} must be a whole Parquet or Arrow file: {error}; write it again")

    def rows(self, group: int) -> int:
        """Number of rows of a row group."""
        if self._parquet is not None:
            return self._parquet.metadata.row_group(group).num_rows
        return self._arrow.get_batch(group).num_rows

    def read(self, group: int, begin: int, end: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first row, rows) of parts of a row group.

        Raises:
            ValueError: the file is damaged.
        """
        import pyarrow as pa

        names = [name for name in self._names if name in columns]
        try:
            at = 0
            with contextlib.closing(self._parts(group, names)) as parts:
                for part in parts:
                    first, last = max(begin - at, 0), min(end - at, len(part))
                    if first < last:
                        yield at + first, part.slice(first, last - first)
                    at += len(part)
                    if at >= end:
                        return
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def _parts(self, group: int, names: list[str]) -> Generator[Any, None, None]:
        if self._parquet is not None:
            yield from self._parquet.iter_batches(PIECE_ROWS, row_groups=[group], columns=names)
            return
        batch = self._arrow.get_batch(group).select(names)
        for first in range(0, len(batch), PIECE_ROWS):
            yield batch.slice(first, PIECE_ROWS)

    def close(self) -> None:
        """Close the file."""
        if self._parquet is not None:
            self._parquet.close()
