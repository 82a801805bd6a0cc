"""Loads a snapshot into a table: builds the index from the keys files, and reads no rows."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.threads import Threads, submit
from oneemb.storage.errors import CorruptTableError, RowWidthError
from oneemb.storage.fs import FileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFile, ChunkFiles, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, check_header, fill_keys, live_rows, opened, read_keys, reading
from oneemb.storage.table.delta import GONE, gone_keys
from oneemb.storage.table.file_header import HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord

_PIECES_AHEAD = 4
# Number of rows of the first piece, and of the largest. With more keys at once, fewer pages of the index are read
# twice.
_PIECE_ROWS_FIRST = 1 << 17
_PIECE_ROWS = 1 << 20


def read_chain(snapshots: SnapshotFiles, names: Sequence[str], row_width: int) -> list[SnapshotRecord]:
    """Read the records of a chain: a whole snapshot and its deltas, by their names.

    Raises:
        SnapshotNotFoundError: a snapshot is missing.
        RowWidthError: the rows have another width than `row_width`.
        CorruptTableError: a file is damaged, or a delta has blocks of another size.
    """
    records = [snapshots.read(name) for name in names]
    for record in records:
        where, geometry = f"snapshot {record.info.name!r} at {record.path}", record.geometry
        if geometry.row_width != row_width:
            raise RowWidthError(
                f"{where} has rows of {geometry.row_width} words, this table has {row_width}; open the table with"
                f" row_width={geometry.row_width}: the same dimension, dtype and optimizer as when it was saved"
            )
        if geometry != records[0].geometry:
            raise CorruptTableError(
                f"{where} is a delta of {names[0]!r}, but has blocks of another size; restore their files from a copy,"
                " or load another snapshot"
            )
    return records


def load_live_rows(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, records: Sequence[SnapshotRecord], threads: Threads,
    beside: Executor | None = None,
) -> LiveRows:  # fmt: skip
    """Live rows that are exactly those of a snapshot. `records`: the records of its chain, a whole snapshot and its
    deltas. After a CorruptTableError no chunk is held."""
    record, *deltas = records
    for part in [part for one in records for part in one.parts]:
        keys_path = chunk_paths(files.directory, part.number)[1]
        _check_size(fs, keys_path, part.keys_bytes)  # before memory is allocated for that many keys
    pieces = _pieces(fs, snapshots, files, record)
    # A thread reads and checks the next pieces while the keys of earlier pieces go into the index.
    with ThreadPoolExecutor(1, thread_name_prefix="oneemb-load") as ahead:
        coming = deque(submit(ahead, next, pieces, None) for _ in range(_PIECES_AHEAD))
        live = LiveRows(record.geometry, files, threads, record.info.rows, beside)
        chunk: ChunkFile | None = None
        try:
            while (piece := coming.popleft().result()) is not None:
                coming.append(submit(ahead, next, pieces, None))
                signals_deferred.raise_interrupt()  # The table's rows have not changed yet.
                part = piece.part
                if chunk is None:
                    chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
                    live.add(chunk, chunk.blocks)  # `chunk.blocks` may exceed `part.blocks`, for another snapshot
                twice = live.load(chunk, piece.table_N, piece.id_N, piece.row_N)
                if twice is not None:
                    raise CorruptTableError(
                        f"{chunk.keys_path}: table {twice[0]}, id {twice[1]} is twice in the snapshot "
                        f"{record.info.name!r}; run `oneemb check` on the table"
                    )
                if piece.bit_N is not None and piece.sum_B is not None:
                    live.load_chunk(chunk, piece.bit_N, piece.sum_B)
                    chunk = None
            for delta in deltas:
                _apply_delta(fs, snapshots, files, delta, live)
        except BaseException:
            live.release()
            raise
    return live


def _apply_delta(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord, live: LiveRows
) -> None:
    """Apply a delta to live rows: erase the keys that are gone, and add the delta's rows."""
    gone = snapshots.read_array(record, GONE) if GONE in record.arrays else None
    live.erase(*gone_keys(gone, record.info.name))
    for part in record.parts:
        signals_deferred.raise_interrupt()
        rows_path, keys_path = chunk_paths(files.directory, part.number)
        _check_rows_file(fs, rows_path, record.geometry, part)
        keys, row_N = read_keys(fs, keys_path, record.geometry, part), live_rows(snapshots.read_bits(record, part))
        chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
        if chunk in live:
            files.release(chunk)  # The live rows hold the chunk already, once.
        else:
            live.add(chunk, chunk.blocks)
        live.load_sums(chunk, keys.sum_B)
        live.load_over(chunk, *keys.of(row_N), row_N)


@dataclass
class _Piece:
    """Keys and numbers of some of a snapshot's rows in one chunk. The last piece of a chunk has no keys: it comes after
    the whole keys file has been checked, and has the bits of all rows and the checksums of the blocks."""

    part: ChunkPart
    table_N: np.ndarray
    id_N: np.ndarray
    row_N: np.ndarray
    bit_N: np.ndarray | None = None
    sum_B: np.ndarray | None = None


def _pieces(fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord) -> Iterator[_Piece]:
    """Yield the snapshot's rows, chunk by chunk. The first pieces are small, so that filling the index begins soon."""
    rows_min = _PIECE_ROWS_FIRST
    for part in record.parts:
        rows_path, keys_path = chunk_paths(files.directory, part.number)
        bit_N = snapshots.read_bits(record, part)
        row_N = live_rows(bit_N)
        _check_rows_file(fs, rows_path, record.geometry, part)
        keys = ChunkKeys.empty(record.geometry, part)
        begin = 0
        for filled in fill_keys(fs, keys_path, record.geometry, part, keys):
            end = int(np.searchsorted(row_N, filled))
            if end - begin < rows_min and filled < len(keys.id_N):
                continue
            rows_min = min(2 * rows_min, _PIECE_ROWS)
            piece_N, begin = row_N[begin:end], end
            yield _Piece(part, *_keys_of(keys, piece_N), piece_N)
        no_row_N = row_N[:0]
        yield _Piece(part, *keys.of(no_row_N), no_row_N, bit_N, keys.sum_B)


def _keys_of(keys: ChunkKeys, row_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tables and ids of ascending rows; views of `keys` if the rows are consecutive."""
    if len(row_N) and row_N[-1] + 1 - row_N[0] == len(row_N):
        return keys.table_N[row_N[0] : row_N[-1] + 1], keys.id_N[row_N[0] : row_N[-1] + 1]
    return keys.of(row_N)


def _check_rows_file(fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart) -> None:
    """Raise CorruptTableError unless the chunk's rows file exists and is long enough. Blocks are checked when they are
    read."""
    header = bytearray(HEADER_BYTES)
    with opened(fs, path) as file:
        size = fs.read_into(file, memoryview(header), 0)
    check_header(header[:size], ROWS_MAGIC, path, part.number, geometry)
    _check_size(fs, path, ROWS_BEGIN + part.blocks * geometry.block_bytes)


def _check_size(fs: FileSystem, path: str, needed: int) -> None:
    with reading(path):
        size = fs.size(path)
    if size < needed:
        raise CorruptTableError(
            f"{path} must have {needed} bytes, has {size}; restore it from a copy, or delete the snapshots that need it"
        )
