"""Writes what can still be read of a damaged table into a new one: every row whose checksum holds.

Chunks keep their numbers, and snapshots their names, identities and shares of chunks, so the new table takes no more
disk than the old one:

1. examine each chunk that snapshots need;
2. copy it; where it is damaged, write zeros for the blocks that are lost, and keys with the checksums of those zeros;
3. write each snapshot with the rows that are left;
4. check the new table.

Invariants:
- the damaged table is only read;
- every row in the new table has the bytes with which it was saved;
- a snapshot that has lost something says so in its meta, as `salvaged`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oneemb.kernels.checksum import xxh64
from oneemb.storage.errors import CorruptTableError, FormatVersionError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import FileSystem, LocalFileSystem, doing, is_damage
from oneemb.storage.new_files import new_file
from oneemb.storage.table.check import SnapshotCheck, check_table, longest_parts
from oneemb.storage.table.chunk_damage import ChunkState, check_fits, examine_chunk
from oneemb.storage.table.chunk_files import ROWS_BEGIN, ChunkEnd, chunk_paths, key_record
from oneemb.storage.table.chunk_scan import ChunkKeys, live_rows
from oneemb.storage.table.delta import GONE
from oneemb.storage.table.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, pack_header
from oneemb.storage.table.recovery import lost_text, needed_bytes
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ArrayPart, ChunkPart, SnapshotRecord
from oneemb.storage.table.table_info import chunk_bytes_of, lost_and_kept, need_table
from oneemb.storage.table.unlisted_rows import unlisted_rows
from oneemb.storage.table.writer_lock import lock_holder

_COPY_BYTES = 1 << 22


@dataclass
class SalvageResult:
    """Result of a salvage.

    Args:
        by_snapshot: {name of a snapshot: what is left of it}. A snapshot of which `unreadable` has "file" is not in the
            new table.
        problems: a text for each damage that was found.
    """

    by_snapshot: dict[str, SnapshotCheck] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rows_lost(self) -> int:
        """Number of rows that are lost, over all snapshots; a row that k snapshots share counts k times."""
        return sum(found.rows_lost for found in self.by_snapshot.values())


def salvage_table(
    path: str, to: str, *, fs: FileSystem | None = None, leave_out: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None, unlisted: tuple[str, str, Mapping[str, Any]] | None = None,
) -> SalvageResult:  # fmt: skip
    """Write all that can be read of the table at `path` into the folder `to`, which must be new.

    Args:
        leave_out: names of snapshots of the table that are not wanted.
        progress: called with (bytes of blocks examined so far, bytes of all blocks to examine).
        unlisted: name, identity and `other_meta` of a further snapshot, of the newest version of all rows in the files
            of chunks, whether a snapshot lists them or not; see `unlisted_rows`.

    Raises:
        StorageError: there is no table, or a file call fails in a way that does not show damage to the table.
        CorruptTableError: there are chunks, and none can be read, for `unlisted`.
    """
    fs = fs or LocalFileSystem()
    need_table(fs, path)
    for folder in ("chunks", "snapshots"):
        with doing("make the folder", f"{to}/{folder}"):
            fs.make_directories(f"{to}/{folder}")
    salvage = _Salvage(fs, path, to, progress)
    salvage.run(leave_out, unlisted)
    return salvage.result


class _Salvage:
    def __init__(self, fs: FileSystem, path: str, to: str, progress: Callable[[int, int], None] | None):
        self._fs, self._path, self._to, self._progress = fs, path, to, progress
        self._files, self._new = SnapshotFiles(fs, f"{path}/snapshots"), SnapshotFiles(fs, f"{to}/snapshots")
        self._states: dict[int, ChunkState] = {}
        self._ends: dict[tuple[int, int], ChunkEnd] = {}
        self._done = self._total = 0
        self.result = SalvageResult()

    def run(self, leave_out: Collection[str], unlisted: tuple[str, str, Mapping[str, Any]] | None) -> None:
        records: list[SnapshotRecord] = []
        for name in self._files.names():
            if name in leave_out:
                continue
            try:
                records.append(self._files.read(name))
            except StorageError as error:
                if not is_damage(error) and not isinstance(error, FormatVersionError | SnapshotNotFoundError):
                    raise
                self._problem(error)
                self.result.by_snapshot[name] = SnapshotCheck(unreadable=["file"], whole=False)
        needed = needed_bytes(records)
        if unlisted is not None:
            every_row = unlisted_rows(self._fs, self._path, *unlisted, records, self._problem)
            records += [] if every_row is None else [every_row]
        longest = longest_parts(records)
        self._total = sum(part.blocks * geometry.block_bytes for geometry, part in longest.values())
        for number, (geometry, part) in sorted(longest.items()):
            state = examine_chunk(
                self._fs, f"{self._path}/chunks", geometry, part,
                self._problem, self._read,
            )  # fmt: skip
            self._states[number] = state
            ends = {one.blocks for record in records for one in record.parts if one.number == number}
            if state.intact:
                self._copy(state)
                state.keys = ChunkKeys.empty(geometry, 0)  # Keys are needed where rows are lost only.
            else:
                self._rewrite(state, sorted(ends))
        with doing("sync the directory", f"{self._to}/chunks"):
            self._fs.sync_directory(f"{self._to}/chunks")
        for record in sorted(records, key=lambda record: record.info.sequence):
            self._save(record)
        self._count_lost(needed)
        if problems := check_table(self._to, fs=self._fs).problems:
            raise StorageError(
                f"{self._to}: the new table must be sound, but {problems[0]} ({len(problems)} problems). If `oneemb"
                f" check` says the same of {self._path}, the snapshot there contradicts itself: delete it in a copy of"
                " the folder, and salvage the copy; if not, the new folder's disk has failed: salvage to another disk"
            )

    def _count_lost(self, needed: dict[int, tuple[int, int]]) -> None:
        """Report the snapshots whose files something other than oneemb has removed."""
        held = lock_holder(self._fs, f"{self._path}/LOCK") is not None
        lost, more, kept = lost_and_kept(self._fs, self._path, self._files, needed, held)
        if lost or more:
            self.result.problems.append(f"{self._path}/LOCK: {lost_text(lost, more, len(kept))}")
        for name in lost:
            self.result.by_snapshot[name] = SnapshotCheck(unreadable=["file"], whole=False)

    def _problem(self, error: StorageError) -> None:
        self.result.problems.append(str(error))

    def _damage(self, error: StorageError) -> None:
        if not is_damage(error):
            raise error
        self._problem(error)

    def _read(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)

    # ---- chunks -----------------------------------------------------------------------------------------------------

    def _copy(self, state: ChunkState) -> None:
        """Copy the files of a sound chunk, as far as snapshots need them."""
        sizes = ROWS_BEGIN + state.part.blocks * state.geometry.block_bytes, state.part.keys_bytes
        old, new = (chunk_paths(f"{path}/chunks", state.part.number) for path in (self._path, self._to))
        for source, target, size in zip(old, new, sizes, strict=True):
            self._write(target, copied(self._fs, source, size))

    def _rewrite(self, state: ChunkState, ends: list[int]) -> None:
        """Write a damaged chunk anew, with zeros in the blocks that are lost. `ends`: numbers of blocks with which the
        parts of snapshots end; a run of keys ends with each of them."""
        geometry, part = state.geometry, state.part
        numbers = (part.number, geometry.row_width, geometry.physical_block_size, geometry.blocks_per_chunk)
        rows_path, keys_path = chunk_paths(f"{self._to}/chunks", part.number)
        self._write(rows_path, self._sound_blocks(state, pack_header(ROWS_MAGIC, numbers)))
        nothing = np.uint32(xxh64(bytes(geometry.block_bytes)) & 0xFFFFFFFF)
        sum_B = np.where(state.sound_B, state.keys.sum_B, nothing)
        header = pack_header(KEYS_MAGIC, numbers)
        pieces, end = [np.frombuffer(header, np.uint8)], ChunkEnd(0, HEADER_BYTES, xxh64(header))
        for blocks in ends:
            rows = slice(end.blocks * geometry.rows_per_block, blocks * geometry.rows_per_block)
            run_N, end = key_record(end, state.keys.table_N[rows], state.keys.id_N[rows], sum_B[end.blocks : blocks])
            pieces.append(run_N)
            self._ends[part.number, blocks] = end
        self._write(keys_path, pieces)

    def _sound_blocks(self, state: ChunkState, header: bytes) -> Iterable[np.ndarray]:
        """Bytes of a rows file: its header, and its blocks, those that are lost as zeros."""
        begin_N = np.zeros(ROWS_BEGIN, np.uint8)
        begin_N[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        yield begin_N
        size = state.geometry.block_bytes
        path = chunk_paths(f"{self._path}/chunks", state.part.number)[0]
        piece = max(1, _COPY_BYTES // size)
        for first in range(0, state.part.blocks, piece):
            sound_B = state.sound_B[first : first + piece]
            block_BX = np.zeros((len(sound_B), size), np.uint8)
            # Runs of sound blocks are read, since the device may be unable to read the others.
            edge_B = np.flatnonzero(np.diff(np.concatenate([[False], sound_B, [False]])))
            for begin, end in edge_B.reshape(-1, 2).tolist():
                pieces = copied(self._fs, path, (end - begin) * size, ROWS_BEGIN + (first + begin) * size)
                block_BX[begin:end] = np.concatenate(list(pieces)).reshape(-1, size)
            yield block_BX.reshape(-1)

    def _write(self, path: str, pieces: Iterable[np.ndarray]) -> None:
        with doing("write", path), new_file(self._fs, path) as new:
            for piece in pieces:
                new.write(piece)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _save(self, record: SnapshotRecord) -> None:
        """Write a snapshot with the rows and arrays that are left of it."""
        name, found = record.info.name, SnapshotCheck(rows=record.info.rows)
        self.result.by_snapshot[name] = found
        arrays = self._arrays(record, found)
        lost: list[tuple[np.ndarray, np.ndarray]] = []
        parts = [left for part in record.parts if (left := self._part(record, part, found, lost)) is not None]
        found.whole = not found.rows_lost and not found.unreadable
        if GONE in found.unreadable:
            found.unreadable.append("file")  # Its parent's rows that are gone by now would come back.
            return
        meta = record.info.meta
        if not found.whole:
            by_table = {str(table): rows for table, rows in sorted(found.lost.items())}
            lost_too = {"lost": by_table, "lost_unknown": found.lost_unknown, "arrays": found.unreadable}
            meta = meta | {"salvaged": meta.get("salvaged", {}) | lost_too}
        if GONE in arrays and lost:  # Without this, older rows of the parent would come back for these keys.
            gone_N2 = np.concatenate([arrays[GONE].data, *(np.stack(keys, 1) for keys in lost)])
            arrays[GONE] = ArrayPart("<i8", (len(gone_N2 := np.unique(gone_N2, axis=0)), 2), data=gone_N2)
        info = replace(record.info, rows=sum(part.rows for part in parts), meta=meta)
        new = SnapshotRecord(info, record.geometry, parts, self._new.path(name), arrays)
        info.bytes = chunk_bytes_of([new])
        self._new.write(new)

    def _part(
        self, record: SnapshotRecord, part: ChunkPart, found: SnapshotCheck, lost: list[tuple[np.ndarray, np.ndarray]]
    ) -> ChunkPart | None:
        """The rows of a chunk that are left of a snapshot; None if there are none. Counts the others in `found`, and
        adds their keys, as far as they are known, to `lost`."""
        state = self._states[part.number]
        try:
            row_N = live_rows(part.bit_N if len(part.bit_N) else self._files.read_bits(record, part))
            check_fits(self._fs, f"{self._path}/chunks", state, part, row_N)
        except StorageError as error:
            self._damage(error)
            found.lost_unknown += part.rows
            return None
        found.add(SnapshotCheck(0, *state.lost(row_N)))
        table_N, id_N = state.keys.of(row_N[~state.is_sound(row_N) & state.has_keys(row_N)])
        lost.append((table_N.astype(np.int64), id_N))
        row_N = row_N[state.is_sound(row_N)]
        if not len(row_N):
            return None
        is_live_N = np.zeros(record.bits_bytes(part) * 8, np.bool_)
        is_live_N[row_N] = True
        blocks, keys_bytes, keys_sum = self._ends.get((part.number, part.blocks), ChunkEnd(*_end_of(part)))
        bit_N = np.packbits(is_live_N, bitorder="little")
        return ChunkPart(part.number, blocks, keys_bytes, keys_sum, len(row_N), bit_N=bit_N)

    def _arrays(self, record: SnapshotRecord, found: SnapshotCheck) -> dict[str, ArrayPart]:
        arrays = {}
        for name, array in record.arrays.items():
            try:
                arrays[name] = ArrayPart(array.dtype, array.shape, data=self._files.read_array(record, name))
            except StorageError as error:
                self._damage(error)
                found.unreadable.append(name)
        return arrays


def _end_of(part: ChunkPart) -> tuple[int, int, int]:
    return part.blocks, part.keys_bytes, part.keys_sum


def copied(fs: FileSystem, path: str, size: int, offset: int = 0) -> Iterable[np.ndarray]:
    """Bytes of a file from an offset on, `size` in all, piece by piece. CorruptTableError if the file ends before."""
    with doing("read", path):
        file = fs.open(path)
        try:
            for begin in range(0, size, _COPY_BYTES):
                piece_N = np.empty(min(_COPY_BYTES, size - begin), np.uint8)
                got = fs.read_into(file, piece_N.data, offset + begin)
                if got < len(piece_N):
                    raise CorruptTableError(
                        f"{path} is cut off: it must have {offset + size} bytes, it has {offset + begin + got}; restore"
                        " the file from a copy"
                    )
                yield piece_N
        finally:
            fs.close(file)
