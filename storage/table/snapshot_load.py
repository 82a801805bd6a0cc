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
# The more keys go into the index at once, the fewer of its pages are fetched twice.
_PIECE_ROWS_FIRST = 1 << 17
_PIECE_ROWS = 1 << 20


def read_chain(snapshots: SnapshotFiles, names: Sequence[str], row_width: int) -> list[SnapshotRecord]:
    """Records of a whole snapshot and of its deltas, by their names.

    Raises:
        SnapshotNotFoundError: there is no snapshot of a name.
        RowWidthError: rows are not of this many words.
        CorruptTableError: a file is damaged, or a delta has other blocks.
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
                f"{where} has blocks of another size than {names[0]!r}, from which it goes on; restore their files from"
                " a copy, or load another one"
            )
    return records


def load_live_rows(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, records: Sequence[SnapshotRecord], threads: Threads,
    beside: Executor | None = None,
) -> LiveRows:  # fmt: skip
    """The live rows of a table that holds exactly a snapshot: `records` of a whole one and its deltas. After a
    CorruptTableError no chunk is held."""
    record, *deltas = records
    for part in [part for one in records for part in one.parts]:
        keys_path = chunk_paths(files.directory, part.number)[1]
        _check_size(fs, keys_path, part.keys_bytes)  # before memory is taken for that many keys
    pieces = _pieces(fs, snapshots, files, record)
    # Pieces are read and checked while the keys of those before go into the index.
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
                    live.add(chunk, chunk.blocks)  # another snapshot may need more blocks of it
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
                _go_on(fs, snapshots, files, delta, live)
        except BaseException:
            live.release()
            raise
    return live


def _go_on(fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord, live: LiveRows) -> None:
    """Let live rows be those that a delta makes of them."""
    gone = snapshots.read_array(record, GONE) if GONE in record.arrays else None
    live.erase(*gone_keys(gone, record.info.name))
    for part in record.parts:
        signals_deferred.raise_interrupt()
        rows_path, keys_path = chunk_paths(files.directory, part.number)
        _check_rows_file(fs, rows_path, record.geometry, part)
        keys, row_N = read_keys(fs, keys_path, record.geometry, part), live_rows(snapshots.read_bits(record, part))
        chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
        if chunk in live:
            files.release(chunk)  # It is held once.
        else:
            live.add(chunk, chunk.blocks)
        live.load_sums(chunk, keys.sum_B)
        live.load_over(chunk, *keys.of(row_N), row_N)


@dataclass
class _Piece:
    """Part of a snapshot's rows in one chunk: their keys and row numbers. The last piece of a chunk has no keys: it
    comes after the whole keys file was checked, and has all rows as bits and the checksums of the blocks."""

    part: ChunkPart
    table_N: np.ndarray
    id_N: np.ndarray
    row_N: np.ndarray
    bit_N: np.ndarray | None = None
    sum_B: np.ndarray | None = None


def _pieces(fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord) -> Iterator[_Piece]:
    """The snapshot's rows, chunk by chunk. The first pieces are small, so that filling the index begins soon."""
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
    """The tables and ids of ascending rows: views of the arrays if no row is left out."""
    if len(row_N) and row_N[-1] + 1 - row_N[0] == len(row_N):
        return keys.table_N[row_N[0] : row_N[-1] + 1], keys.id_N[row_N[0] : row_N[-1] + 1]
    return keys.of(row_N)


def _check_rows_file(fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart) -> None:
    """Raise unless the chunk's rows file exists and is long enough. Its blocks are checked when they are read."""
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
