"""Finds what can still be read of a chunk whose files may be damaged: keys and rows whose checksums hold.

The checksum of a run of keys is seeded with that of the run before. After a damaged run, the next one is recognized by
its checksum, seeded with the 8 bytes before it.

Invariants:
- a block counts as sound only if the checksums of its keys and of its rows hold;
- no row is taken from files of another chunk or another table, although their own checksums hold (`check_fits`).
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oneemb.kernels.checksum import blocks_sum, xxh64
from oneemb.storage.errors import CorruptTableError, FormatVersionError, StorageError
from oneemb.storage.fs import FileSystem, aligned_bytes, is_damage, storage_error
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_paths
from oneemb.storage.table.chunk_scan import (
    ChunkKeys,
    block_damage,
    check_header,
    opened,
    put_run,
    read_keys,
    run_size,
)
from oneemb.storage.table.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, pack_header, read_header
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.snapshot_manifest import ChunkPart

_READ_BYTES = 1 << 22
_FILE_BYTES_MAX = 1 << 40
# Unit in which a file of keys is read around what its device cannot read.
_KEYS_UNIT = 4096
# A search for the next run computes checksums of at most as many bytes as this number of files of keys has.
_SEARCH_FILES = 16

Problem = Callable[[StorageError], None]
"""Function that is called with each damage that is found."""


@dataclass
class ChunkState:
    """The part of a chunk that snapshots need, as its files are now.

    Args:
        keys: keys of the rows; table 0, id 0 in blocks whose keys cannot be read.
        has_keys_B, sound_B: whether the keys of a block can be read; whether its keys and its rows can; bool [B].
        intact: whether both files are as they were written. False does not mean that rows are lost.
        runs: runs of keys whose checksums hold; None = all keys of the part are as they were written.
    """

    geometry: Geometry
    part: ChunkPart
    keys: ChunkKeys
    has_keys_B: np.ndarray
    sound_B: np.ndarray
    intact: bool = True
    runs: "list[Run] | None" = None

    def has_keys(self, row_N: np.ndarray) -> np.ndarray:
        """Whether the key of each row `row_N` of the chunk can be read, bool [N]."""
        return self.has_keys_B[row_N // self.geometry.rows_per_block]

    def is_sound(self, row_N: np.ndarray) -> np.ndarray:
        """Whether each row `row_N` of the chunk can be read, bool [N]."""
        return self.sound_B[row_N // self.geometry.rows_per_block]

    def lost(self, row_N: np.ndarray) -> tuple[dict[int, int], int]:
        """Count the unreadable rows among `row_N`: ({table: rows}, number of rows whose keys are unreadable too)."""
        lost_N, has_keys_N = ~self.is_sound(row_N), self.has_keys(row_N)
        table_N, count_N = np.unique(self.keys.table_N[row_N[lost_N & has_keys_N]], return_counts=True)
        return dict(zip(table_N.tolist(), count_N.tolist(), strict=True)), int((~has_keys_N).sum())


def examine_chunk(
    fs: FileSystem, directory: str, geometry: Geometry, part: ChunkPart, problem: Problem,
    read: Callable[[int], None] | None = None,
) -> ChunkState:  # fmt: skip
    """Compare all that a part of a chunk needs with checksums, and go on after damage.

    Args:
        directory: folder of the table's chunks.
        read: called with the size of each piece of blocks that was read.

    Raises:
        StorageError: a file call fails in a way that does not show damage to the files.
    """
    rows_path, keys_path = chunk_paths(directory, part.number)

    def found(error: StorageError) -> None:
        state.intact = False
        problem(error)

    none_B = np.zeros(part.blocks, np.bool_)
    try:
        state = ChunkState(geometry, part, read_keys(fs, keys_path, geometry, part), ~none_B, none_B.copy())
    except StorageError as error:
        if not is_damage(error):
            raise
        keys = ChunkKeys(*(np.zeros_like(array) for array in vars(ChunkKeys.empty(geometry, part.blocks)).values()))
        state = ChunkState(geometry, part, keys, none_B, none_B.copy())
        found(error)
        _examine_keys(fs, keys_path, state)
    try:
        _examine_blocks(fs, rows_path, state, found, read)
    except CorruptTableError as error:
        found(error)
    return state


def check_fits(fs: FileSystem, directory: str, state: ChunkState, part: ChunkPart, row_N: np.ndarray) -> None:
    """Raise CorruptTableError if the files of a chunk are others than those with which a snapshot was saved. Damage to
    the right files raises nothing. The files are others if the run in which the part ends has another end or another
    checksum than the part, or if the snapshot has a row at a place that its run of keys leaves empty.

    Args:
        part: what the snapshot needs of the chunk.
        row_N: numbers of the snapshot's rows in the chunk, ascending.
    """
    path = chunk_paths(directory, part.number)[1]
    if state.runs is None:
        if (part.blocks, part.keys_bytes, part.keys_sum) != _end_of(state.part):
            read_keys(fs, path, state.geometry, part)
        return
    at_end = [run for run in state.runs if run.offset < part.keys_bytes <= run.end]
    is_other = part.blocks > state.part.blocks or any((run.end, run.sum) != _end_of(part)[1:] for run in at_end)
    row_R2 = np.array([(run.first, run.first + run.blocks) for run in state.runs]).reshape(-1, 2)
    row_R2 = row_R2 * state.geometry.rows_per_block
    filled_R = row_R2[:, 0] + np.array([run.rows for run in state.runs], np.int64)
    if is_other or np.any(np.searchsorted(row_N, filled_R) < np.searchsorted(row_N, row_R2[:, 1])):
        raise CorruptTableError(
            f"{path}: the keys up to offset {part.keys_bytes} must be those that a snapshot was saved with, the file is"
            " of another chunk or table; restore the file from a copy"
        )


def _end_of(part: ChunkPart) -> tuple[int, int, int]:
    return part.blocks, part.keys_bytes, part.keys_sum


def check_chunk(fs: FileSystem, directory: str, geometry: Geometry, part: ChunkPart) -> None:
    """Raise CorruptTableError unless all bytes that a part of a chunk needs are as they were written."""
    problems: list[StorageError] = []
    if not examine_chunk(fs, directory, geometry, part, problems.append).intact:
        raise CorruptTableError(str(problems[0]))


class Run(NamedTuple):
    """A run of keys: its offset in the file, its first block, its rows and blocks, the offset behind it, and the
    checksum that the file has of it."""

    offset: int
    first: int
    rows: int
    blocks: int
    end: int
    sum: int


def _examine_keys(fs: FileSystem, path: str, state: ChunkState) -> None:
    """Read the keys of a damaged file: those of each run whose checksum holds. The file is read to its end, since a run
    that begins before the end of the part's keys and ends behind it shows that the file is another one."""
    state.runs = []
    try:
        byte_N = _keys_file(fs, path, _FILE_BYTES_MAX)
    except CorruptTableError:
        return  # There is no file.
    with suppress(CorruptTableError, FormatVersionError):  # The header is damaged; runs may be sound.
        if read_header(bytes(byte_N[:HEADER_BYTES]), KEYS_MAGIC, path) != _numbers(state.geometry, state.part):
            return
    state.runs = list(_sound_runs(byte_N, state.geometry, state.part))
    for run in state.runs:
        if run.first + run.blocks <= state.part.blocks and _put(state.keys, state.geometry, byte_N, run):
            state.has_keys_B[run.first : run.first + run.blocks] = True


def _keys_file(fs: FileSystem, path: str, size: int) -> np.ndarray:
    """Bytes of a file of keys, at most `size`, a multiple of 8. CorruptTableError if there is no file."""
    with opened(fs, path, "read the keys") as file:
        byte_N = aligned_bytes(min(size, fs.size(path)))
        return byte_N[: _read(fs, file, byte_N, 0, _KEYS_UNIT, lambda offset, error: None) // 8 * 8]


def sound_runs_of(
    fs: FileSystem, directory: str, number: int, geometry: Geometry, problem: Problem
) -> list[Run]:  # fmt: skip
    """The runs of a chunk's keys whose checksums hold, whatever snapshots say of the chunk."""
    path = chunk_paths(directory, number)[1]
    try:
        byte_N = _keys_file(fs, path, _FILE_BYTES_MAX)
    except CorruptTableError as error:
        problem(error)
        return []
    runs = list(_sound_runs(byte_N, geometry, ChunkPart(number, geometry.blocks_per_chunk, len(byte_N), -1, 0)))
    if not runs:
        problem(CorruptTableError(f"{path} must have runs of keys, no run has a sound checksum; its rows are lost"))
    return runs


def keys_of_runs(
    fs: FileSystem, directory: str, geometry: Geometry, part: ChunkPart, runs: Iterable[Run]
) -> tuple[ChunkKeys, list[Run]]:
    """Keys of the rows of these runs of a chunk, table 0, id 0 for all others; and the runs, without those that have
    tables which no index can hold."""
    keys = ChunkKeys(*(np.zeros_like(array) for array in vars(ChunkKeys.empty(geometry, part.blocks)).values()))
    byte_N = _keys_file(fs, chunk_paths(directory, part.number)[1], part.keys_bytes)
    return keys, [run for run in runs if _put(keys, geometry, byte_N, run)]


def _put(keys: ChunkKeys, geometry: Geometry, byte_N: np.ndarray, run: Run) -> bool:
    """Write the keys of a run into `keys`. Returns False if no index can hold its tables."""
    try:
        put_run(keys, geometry, byte_N[run.offset :], run.first, run.rows, run.blocks)
        return True
    except ValueError:
        row = run.first * geometry.rows_per_block
        keys.table_N[row : row + run.rows] = keys.id_N[row : row + run.rows] = 0
        return False


def _sound_runs(byte_N: np.ndarray, geometry: Geometry, part: ChunkPart) -> Iterator[Run]:
    """Yield the runs whose checksums hold, in order, with these checksums."""
    headers = (bytes(byte_N[:HEADER_BYTES]), pack_header(KEYS_MAGIC, _numbers(geometry, part)))
    # {offset: [(seed that a run there may have, run before it whose own checksum may be what is damaged)]}
    seeds: dict[int, list[tuple[int, Run | None]]] = {HEADER_BYTES: [(xxh64(header), None) for header in headers]}
    word_N = byte_N.view(np.uint64)
    offset, block, budget = HEADER_BYTES, 0, _SEARCH_FILES * len(byte_N)
    for run in _possible_runs(word_N, geometry):
        if run.offset < offset or run.first < block or budget < 0:
            continue
        tries = [*seeds.get(run.offset, ()), (int(word_N[run.offset // 8 - 1]), None)]
        sums = [(xxh64(byte_N[run.offset : run.end - 8], seed), seed, before) for seed, before in tries]
        budget -= len(sums) * (run.end - run.offset)
        is_last = (run.first + run.blocks, run.end) == (part.blocks, part.keys_bytes)
        expected = {run.sum} | ({part.keys_sum} if is_last else set())
        for sum, seed, before in sums:
            if sum in expected:
                if before is not None and before.first >= block:
                    yield before._replace(sum=seed)
                yield run._replace(sum=sum)
                offset, block = run.end, run.first + run.blocks
                break
        else:
            seeds.setdefault(run.end, []).extend((sum, run) for sum, *_ in sums)


def _numbers(geometry: Geometry, part: ChunkPart) -> tuple[int, int, int, int]:
    return part.number, geometry.row_width, geometry.physical_block_size, geometry.blocks_per_chunk


def _possible_runs(word_N: np.ndarray, geometry: Geometry) -> Iterator[Run]:
    """Runs at the offsets where three numbers stand that may begin one, in order."""
    most = geometry.blocks_per_chunk
    at_N = np.flatnonzero(
        (word_N[:-3] < most) & (word_N[2:-1] <= most) & (word_N[2:-1] > 0)
        & (word_N[1:-2] <= most * geometry.rows_per_block)
    )  # fmt: skip
    for at in at_N[at_N >= HEADER_BYTES // 8].tolist():
        first, rows, blocks = (int(word) for word in word_N[at : at + 3])
        end = at * 8 + run_size(rows, blocks) + 8
        if first + blocks <= most and rows <= blocks * geometry.rows_per_block and end <= word_N.nbytes:
            yield Run(at * 8, first, rows, blocks, end, int(word_N[end // 8 - 1]))


def _examine_blocks(
    fs: FileSystem, path: str, state: ChunkState, problem: Problem, read: Callable[[int], None] | None
) -> None:
    """Compare the blocks with the checksums that the keys have, and mark the sound ones."""
    geometry, part = state.geometry, state.part

    def unreadable(offset: int, error: OSError) -> None:
        problem(storage_error(error, f"read the block at offset {offset} of", path))

    with opened(fs, path) as file:
        header = bytearray(HEADER_BYTES)
        size = fs.read_into(file, memoryview(header), 0)
        try:
            check_header(header[:size], ROWS_MAGIC, path, part.number, geometry)
        except CorruptTableError as error:
            problem(error)
        if fs.size(path) < ROWS_BEGIN + geometry.block_bytes:
            raise CorruptTableError(
                f"{path} has none of the {part.blocks} blocks that snapshots need; restore the file from a copy, or"
                " delete the snapshots that need it"
            )
        piece = max(1, _READ_BYTES // geometry.block_bytes)
        buffer = aligned_bytes(min(piece, part.blocks) * geometry.block_bytes)
        for first in range(0, part.blocks, piece):
            blocks = min(piece, part.blocks - first)
            size = _read(
                fs, file, buffer[: blocks * geometry.block_bytes], ROWS_BEGIN + first * geometry.block_bytes,
                geometry.block_bytes, unreadable,
            )  # fmt: skip
            whole = size // geometry.block_bytes
            if read is not None:
                read(size)
            sum_B = np.empty(blocks, np.uint32)
            blocks_sum(0, whole, buffer.view(np.uint64), geometry.block_words, sum_B)
            same_B = sum_B[:whole] == state.keys.sum_B[first : first + whole]
            has_keys_B = state.has_keys_B[first : first + whole]
            state.sound_B[first : first + whole] = same_B & has_keys_B
            for b in np.flatnonzero(has_keys_B & ~same_B).tolist():
                row = (first + b) * geometry.rows_per_block
                data = buffer[b * geometry.block_bytes : (b + 1) * geometry.block_bytes]
                table, id = int(state.keys.table_N[row]), int(state.keys.id_N[row])
                problem(block_damage(path, geometry, first + b, data, int(state.keys.sum_B[first + b]), table, id))
            if whole < blocks:
                offset = ROWS_BEGIN + first * geometry.block_bytes
                raise CorruptTableError(
                    f"{path} is cut off: from offset {offset} on it must have {blocks * geometry.block_bytes} bytes, it"
                    f" has {size}; restore the file from a copy, or delete the snapshots that"
                    " need it"
                )


def _read(
    fs: FileSystem, file: int, out: np.ndarray, offset: int, unit: int, unreadable: Callable[[int, OSError], None]
) -> int:
    """Read into `out` as `FileSystem.read_into` does. Units that the device cannot read are filled with ones, after a
    call of `unreadable(offset, error)` for each."""
    try:
        return fs.read_into(file, out.data, offset)
    except OSError as error:
        if not _is_unreadable(error):
            raise
        if len(out) <= unit:
            unreadable(offset, error)
            out[:] = 255
            return len(out)
    middle = max(1, len(out) // unit // 2) * unit
    size = _read(fs, file, out[:middle], offset, unit, unreadable)
    return size + (_read(fs, file, out[middle:], offset + middle, unit, unreadable) if size == middle else 0)


def _is_unreadable(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EIO
