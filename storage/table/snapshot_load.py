"""Loads a snapshot into a table: builds the index from the keys files, and reads no rows."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from oneemb.kernels.threads import submit
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.errors import CorruptTableError, RowWidthError
from oneemb.storage.fs import FileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkFiles, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, check_header, key_pieces, live_rows, opened, reading
from oneemb.storage.table.delta import GONE, gone_keys
from oneemb.storage.table.file_header import HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord

_PIECES_AHEAD = 2
# Number of rows of a piece. Beside the index a load takes about 90 bytes of memory for each row of one piece.
_PIECE_ROWS = 1 << 17
# Bytes of keys files that the system is asked to read before they are needed.
_BYTES_AHEAD = 64 << 20


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
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, records: Sequence[SnapshotRecord],
    make_index: Callable[[int], CompactIndex | ColdIndex], beside: Executor | None = None,
) -> LiveRows:  # fmt: skip
    """Live rows that are exactly those of a snapshot. `records`: the records of its chain, a whole snapshot and its
    deltas. After a CorruptTableError no chunk is held."""
    record, *deltas = records
    for part in [part for one in records for part in one.parts]:
        keys_path = chunk_paths(files.directory, part.number)[1]
        _check_size(fs, keys_path, part.keys_bytes)  # before memory is allocated for that many keys

    def listed(part: ChunkPart) -> np.ndarray:
        _check_rows_file(fs, chunk_paths(files.directory, part.number)[0], record.geometry, part)
        return snapshots.read_bits(record, part)

    live = LiveRows(record.geometry, files, make_index, 0, beside)
    try:
        for n in live.index.loading(record.info.rows):
            with _ahead(_pieces(fs, files.directory, record.geometry, record.parts, listed)) as pieces:
                for piece in pieces:
                    signals_deferred.raise_interrupt()  # The table's rows have not changed yet.
                    part = piece.part
                    chunk = files.chunks.get(part.number)
                    if chunk is None or chunk not in live:
                        chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
                        live.add(chunk, chunk.blocks)  # `chunk.blocks` may exceed `part.blocks`, for another snapshot
                        live.load_bits(chunk, piece.bit_N)
                    if n == 0:
                        live.load_sums(chunk, piece.sum_B, piece.block)
                        live.load_counts(chunk, piece.row_N)
                    twice = live.load(chunk, piece.table_N, piece.id_N, piece.row_N)
                    if twice is not None:
                        raise CorruptTableError(
                            f"{chunk.keys_path}: table {twice[0]}, id {twice[1]} is twice in the snapshot "
                            f"{record.info.name!r}; run `oneemb check` on the table"
                        )
        for delta in deltas:
            _apply_delta(fs, snapshots, files, delta, live)
    except BaseException:
        live.release()
        raise
    return live


def load_index(
    fs: FileSystem, files: ChunkFiles, live: LiveRows, in_memory_N: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Put the keys of all live rows into the index of `live`, which is empty. If the disk is full, the index stays in
    memory. StorageError if a keys file is damaged or cannot be read: the index is incomplete then.

    Args:
        in_memory_N: table_N, id_N, place_N of the live rows that are not on disk yet.
    """
    parts = [live.part(chunk) for chunk in live.chunks() if chunk.blocks]
    for _ in live.index.loading(int(live.live_E.sum()), must_write=False):
        with _ahead(_pieces(fs, files.directory, live.geometry, parts, lambda part: part.bit_N)) as pieces:
            for piece in pieces:
                place_N = piece.row_N + live.first_place(files.chunks[piece.part.number])
                live.index.put_new(piece.table_N, piece.id_N, place_N)
        live.index.put_new(*in_memory_N)


def _apply_delta(
    fs: FileSystem, snapshots: SnapshotFiles, files: ChunkFiles, record: SnapshotRecord, live: LiveRows
) -> None:
    """Apply a delta to live rows: erase the keys that are gone, and add the delta's rows."""
    gone = snapshots.read_array(record, GONE) if GONE in record.arrays else None
    live.erase(*gone_keys(gone, record.info.name))
    for part in record.parts:
        rows_path, keys_path = chunk_paths(files.directory, part.number)
        _check_rows_file(fs, rows_path, record.geometry, part)
        bit_N = snapshots.read_bits(record, part)
        chunk = files.adopt(part.number, record.geometry, part.blocks, part.keys_bytes, part.keys_sum)
        if chunk in live:
            files.release(chunk)  # The live rows hold the chunk already, once.
        else:
            live.add(chunk, chunk.blocks)
        for piece in _pieces_of(fs, keys_path, record.geometry, part, bit_N):
            signals_deferred.raise_interrupt()
            live.load_sums(chunk, piece.sum_B, piece.block)
            live.load_over(chunk, piece.table_N, piece.id_N, piece.row_N)


@dataclass
class _Piece:
    """Keys and numbers of the rows of some blocks of a chunk.

    Args:
        bit_N: bits of all rows of the chunk that belong to the part.
        block: the first of the piece's blocks.
        sum_B: checksums of the piece's blocks.
        row_N: numbers of the rows in the chunk, ascending.
    """

    part: ChunkPart
    bit_N: np.ndarray
    block: int
    sum_B: np.ndarray
    row_N: np.ndarray
    table_N: np.ndarray
    id_N: np.ndarray


@contextmanager
def _ahead(pieces: Iterator[_Piece]) -> Iterator[Iterator[_Piece]]:
    """An iterator over the same pieces. A thread reads and checks the next pieces while the caller uses one."""
    with ThreadPoolExecutor(1, thread_name_prefix="oneemb-load") as beside:
        coming = deque(submit(beside, next, pieces, None) for _ in range(_PIECES_AHEAD))

        def taken() -> Iterator[_Piece]:
            while (piece := coming.popleft().result()) is not None:
                coming.append(submit(beside, next, pieces, None))
                yield piece

        yield taken()


def _pieces(
    fs: FileSystem, directory: str, geometry: Geometry, parts: Sequence[ChunkPart],
    bits_of: Callable[[ChunkPart], np.ndarray],
) -> Iterator[_Piece]:  # fmt: skip
    """Yield the rows of parts of chunks, in order, and let the system read the next keys files meanwhile.

    Args:
        directory: folder of the chunks.
        bits_of: returns the bits of the rows that belong to a part.
    """
    announced = announced_bytes = done_bytes = 0
    for part in parts:
        while announced < len(parts) and announced_bytes - done_bytes < _BYTES_AHEAD:
            rows_path, keys_path = chunk_paths(directory, parts[announced].number)
            fs.will_read(keys_path, parts[announced].keys_bytes)
            fs.will_read(rows_path, HEADER_BYTES)
            announced_bytes += parts[announced].keys_bytes
            announced += 1
        yield from _pieces_of(fs, chunk_paths(directory, part.number)[1], geometry, part, bits_of(part))
        done_bytes += part.keys_bytes


def _pieces_of(
    fs: FileSystem, path: str, geometry: Geometry, part: ChunkPart, bit_N: np.ndarray
) -> Iterator[_Piece]:  # fmt: skip
    """Yield the rows of one part, whose keys file is at `path`, piece by piece."""
    for block, keys in key_pieces(fs, path, geometry, part, max(1, _PIECE_ROWS // geometry.rows_per_block)):
        first = block * geometry.rows_per_block
        byte, end = first // 8, first + len(keys.id_N)
        row_N = live_rows(bit_N[byte : -(-end // 8)])
        row_N += 8 * byte
        row_N = row_N[slice(*np.searchsorted(row_N, [first, end]))]
        yield _Piece(part, bit_N, block, keys.sum_B, row_N, *_keys_of(keys, row_N - first))


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
