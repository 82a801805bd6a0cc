"""Makes a snapshot's rows the rows of a table: the index from the keys files, nothing of the rows themselves."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import ROWS_BEGIN, ChunkFiles
from oneemb.storage.chunk_scan import ChunkKeys, check_header, live_rows, missing_file, read_keys
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.file_header import HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.geometry import Geometry
from oneemb.storage.live_rows import LiveRows
from oneemb.storage.snapshot_file import ChunkPart, SnapshotFiles, SnapshotRecord

__all__ = ["load_live_rows"]


def load_live_rows(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord, threads: Threads
) -> LiveRows:
    """The live rows of a table that holds exactly this snapshot.

    Raises:
        CorruptTableError: a file is not what was written; nothing is held.
    """
    live = LiveRows(record.geometry, files, threads, expected=record.info.rows)
    # The files of a chunk are read and checked while the keys of the one before go into the index.
    with ThreadPoolExecutor(1, thread_name_prefix="oneemb-load") as ahead:
        try:
            reads = [ahead.submit(_read_part, fs, snapshots, files, record, part) for part in record.parts[:1]]
            for n, part in enumerate(record.parts):
                keys, row_N, bit_N = reads.pop().result()
                if n + 1 < len(record.parts):
                    reads.append(ahead.submit(_read_part, fs, snapshots, files, record, record.parts[n + 1]))
                chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
                table_N, id_N = live.load(live.add(chunk), keys, row_N, bit_N)
                if len(id_N):
                    raise CorruptTableError(
                        f"{chunk.keys_path}: table {table_N[0]}, id {id_N[0]} is twice in the snapshot "
                        f"{record.info.name!r}; run `oneemb check` on the table"
                    )
        except BaseException:
            live.release()
            raise
    return live


def _read_part(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord, part: ChunkPart
) -> tuple[ChunkKeys, np.ndarray, np.ndarray]:
    """The keys of a chunk, and which of its rows are the snapshot's: their numbers, and as bits."""
    rows_path, keys_path = files.paths(part.number)
    bit_N = snapshots.read_bits(record, part)
    row_N = live_rows(bit_N)
    if len(row_N) != part.rows:
        raise CorruptTableError(
            f"{record.path}: chunk {part.number} must have {part.rows} rows, its list has {len(row_N)}"
        )
    _check_rows_file(fs, rows_path, record.geometry, part)
    return read_keys(fs, keys_path, record.geometry, part), row_N, bit_N


def _check_rows_file(fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart) -> None:
    """Raise unless the file is there, is that chunk's, and is long enough. Its blocks are checked when read."""
    header = bytearray(HEADER_BYTES)
    try:
        file = fs.open(path)
        try:
            size = fs.read_into(file, memoryview(header), 0)
        finally:
            fs.close(file)
        check_header(header[:size], ROWS_MAGIC, path, part.number, geometry)
        size, needed = fs.size(path), ROWS_BEGIN + part.blocks * geometry.block_bytes
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except OSError as error:
        raise storage_error(error, "read", path) from error
    if size < needed:
        raise CorruptTableError(
            f"{path} must have {needed} bytes, has {size}; restore it from a copy, or delete the snapshots that need it"
        )
