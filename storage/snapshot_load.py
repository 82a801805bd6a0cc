"""Makes a snapshot's rows the rows of a table: the index from the keys files, nothing of the rows themselves."""

from oneemb.kernels.threads import Threads
from oneemb.storage.chunk_files import ROWS_BEGIN, ChunkFile
from oneemb.storage.chunk_scan import check_header, live_rows, missing_file, read_keys
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.file_header import HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.fs import FileSystem, storage_error
from oneemb.storage.live_rows import LiveRows
from oneemb.storage.snapshot_file import ChunkPart, SnapshotRecord
from oneemb.storage.snapshot_store import SnapshotStore

__all__ = ["load_live_rows"]


def load_live_rows(fs: FileSystem, store: SnapshotStore, record: SnapshotRecord, threads: Threads) -> LiveRows:
    """The live rows of a table that holds exactly this snapshot.

    Raises:
        CorruptTableError: a file is not what was written; nothing is held.
    """
    live = LiveRows(record.geometry, store.chunk_files, threads, expected=record.info.rows)
    try:
        for part in record.parts:
            _load_part(fs, store, live, record, part)
        if len(live.index) != record.info.rows:
            raise CorruptTableError(
                f"{record.path}: the snapshot must have {record.info.rows} rows, its chunks have {len(live.index)} "
                f"different keys; run `oneemb check` on the table"
            )
    except BaseException:
        live.release()
        raise
    return live


def _load_part(
    fs: FileSystem, store: SnapshotStore, live: LiveRows, record: SnapshotRecord, part: ChunkPart
) -> None:
    geometry = record.geometry
    bit_N = store.files.read_bits(record, part)
    chunk = store.adopt(record, part)
    slot = live.add(chunk)
    _check_rows_file(fs, chunk, part)
    keys = read_keys(fs, chunk.keys_path, geometry, part)
    begin = slot * geometry.blocks_per_chunk
    live.sum_B[begin : begin + part.blocks] = keys.sum_B
    rows = live_rows(bit_N)
    if len(rows) != part.rows:
        raise CorruptTableError(
            f"{record.path}: chunk {part.number} must have {part.rows} rows, its list has {len(rows)}"
        )
    live.put(keys.table_N[rows], keys.id_N[rows], slot * geometry.rows_per_chunk + rows)


def _check_rows_file(fs: FileSystem, chunk: ChunkFile, part: ChunkPart) -> None:
    """Raise unless the file is there, is that chunk's, and is long enough. Its blocks are checked when read."""
    path, header = chunk.rows_path, bytearray(HEADER_BYTES)
    try:
        file = fs.open(path)
        try:
            size = fs.read_into(file, memoryview(header), 0)
        finally:
            fs.close(file)
        check_header(header[:size], ROWS_MAGIC, path, chunk.number, chunk.geometry)
        size, needed = fs.size(path), ROWS_BEGIN + part.blocks * chunk.geometry.block_bytes
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except OSError as error:
        raise storage_error(error, "read", path) from error
    if size < needed:
        raise CorruptTableError(
            f"{path} must have {needed} bytes, has {size}; restore it from a copy, or delete the snapshots that need it"
        )
