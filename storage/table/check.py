"""Reads everything that the snapshots at a path need, and lists what is damaged.

Invariants:
- nothing is written and no lock is taken, so a live writer may go on; a snapshot that the writer removes meanwhile is
  no problem;
- every byte that a reader of any snapshot could read is compared with its checksum, and every file that a snapshot
  names is read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from oneemb.kernels.checksum import blocks_sum
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import CorruptTableError, FormatVersionError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, aligned_bytes, doing
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.table.chunk_files import ROWS_BEGIN, chunk_numbers, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, block_damage, check_header, live_rows, opened, read_keys
from oneemb.storage.table.file_header import HEADER_BYTES, ROWS_MAGIC
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.recovery import lost_text, needed_bytes
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord
from oneemb.storage.table.table_info import lost_and_kept, need_table
from oneemb.storage.table.writer_lock import lock_holder

_READ_BYTES = 1 << 22
_Progress = Callable[[int, int], None]


@dataclass
class CheckResult:
    """Result of a check.

    Args:
        problems: a text for each problem, with the path of the file; empty = nothing is damaged.
        snapshots: names of the snapshots that were checked.
        rows: number of rows in all snapshots; a row that k snapshots share counts k times.
        bytes_read: number of bytes of blocks that were read.
        unneeded: paths of files that no snapshot needs. A live writer uses them, or the next open removes them.
        kept: paths among `unneeded` that the next open keeps: a snapshot is lost or cannot be read, and may need them.
        unreadable: paths of snapshots that cannot be read; if there is any, the next open removes no file.
        left_over: a text for each leftover of a killed call: a part of a snapshot, or a rank's folder without a table.
    """

    problems: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    rows: int = 0
    bytes_read: int = 0
    unneeded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)


def check_table(
    path: AnyPath, *, fs: FileSystem | None = None, progress: _Progress | None = None, leftovers: Collection[str] = ()
) -> CheckResult:
    """Compare every byte that the snapshots at a path need with its checksum, and read every file that they name.

    Args:
        progress: called with (bytes of blocks read so far, bytes of all blocks to read).
        leftovers: names of snapshots that killed calls have left; they count as unneeded files.

    Raises:
        StorageError: there is no table, or a file call fails in a way that does not show damage to the files.
    """
    fs, path = fs or LocalFileSystem(), absolute_path(path)
    need_table(fs, path)
    check = _Check(fs, path, progress, leftovers)
    check.run()
    return check.result


class _Check:
    def __init__(self, fs: FileSystem, path: str, progress: _Progress | None, leftovers: Collection[str]):
        self._fs, self._path, self._progress, self._leftovers = fs, path, progress, leftovers
        self._files = SnapshotFiles(fs, f"{path}/snapshots")
        self._sequence: dict[str, int] = {}
        self._done = self._total = 0
        self.result = CheckResult()

    def run(self) -> None:
        records = []
        for name in self._files.names():
            if name in self._leftovers:
                self.result.unneeded.append(self._files.path(name))
                continue
            try:
                records.append(self._files.read(name))
                self._sequence[name] = records[-1].info.sequence
            except (CorruptTableError, FormatVersionError, SnapshotNotFoundError) as error:
                self._problem(error, [name])
                if not self._gone(name):
                    self.result.unreadable.append(self._files.path(name))
        # For each chunk: the longest prefix that any snapshot needs, and the snapshots that need the chunk.
        longest: dict[int, tuple[Geometry, ChunkPart]] = {}
        users: dict[int, list[SnapshotRecord]] = {}
        for record in records:
            for part in record.parts:
                users.setdefault(part.number, []).append(record)
                known = longest.get(part.number)
                if known is not None and known[0] != record.geometry:
                    problem = f"{record.path}: chunk {part.number} has another geometry in another snapshot"
                    self.result.problems.append(problem)
                if known is None or part.keys_bytes > known[1].keys_bytes:
                    longest[part.number] = record.geometry, part
        self._total = sum(part.blocks * geometry.block_bytes for geometry, part in longest.values())
        sound = set()
        for number, (geometry, part) in sorted(longest.items()):
            names = [record.info.name for record in users[number]]
            try:
                keys = read_keys(self._fs, chunk_paths(f"{self._path}/chunks", number)[1], geometry, part)
                sound.add(number)
                self._check_blocks(geometry, part, keys, names)
            except CorruptTableError as error:
                self._problem(error, names)
        for record in sorted(records, key=lambda record: record.info.sequence):
            self._check_snapshot(record, sound)
        self._list_unneeded(set(longest))
        self._check_lost(needed_bytes(records))

    def _check_blocks(self, geometry: Geometry, part: ChunkPart, keys: ChunkKeys, names: list[str]) -> None:
        """Compare all blocks of the part of a chunk with their checksums. `names` are the snapshots that need the
        chunk."""
        path = chunk_paths(f"{self._path}/chunks", part.number)[0]
        with opened(self._fs, path) as file:
            header = bytearray(HEADER_BYTES)
            size = self._fs.read_into(file, memoryview(header), 0)
            check_header(header[:size], ROWS_MAGIC, path, part.number, geometry)
            if self._fs.size(path) < ROWS_BEGIN + geometry.block_bytes:
                raise CorruptTableError(
                    f"{path} has none of the {part.blocks} blocks that snapshots need; restore the file from a copy, or"
                    " delete the snapshots that need it"
                )
            piece = max(1, _READ_BYTES // geometry.block_bytes)
            buffer = aligned_bytes(min(piece, part.blocks) * geometry.block_bytes)
            for first in range(0, part.blocks, piece):
                blocks = min(piece, part.blocks - first)
                want = blocks * geometry.block_bytes
                offset = ROWS_BEGIN + first * geometry.block_bytes
                size = self._fs.read_into(file, buffer.data[:want], offset)
                self._read(size)
                whole = size // geometry.block_bytes
                sum_B = np.empty(blocks, np.uint32)
                blocks_sum(0, whole, buffer.view(np.uint64), geometry.block_words, sum_B)
                for b in np.flatnonzero(sum_B[:whole] != keys.sum_B[first : first + whole]).tolist():
                    row = (first + b) * geometry.rows_per_block
                    data = buffer[b * geometry.block_bytes : (b + 1) * geometry.block_bytes]
                    expected, table, id = int(keys.sum_B[first + b]), int(keys.table_N[row]), int(keys.id_N[row])
                    self._problem(block_damage(path, geometry, first + b, data, expected, table, id), names)
                if whole < blocks:
                    raise CorruptTableError(
                        f"{path} is cut off: from offset {offset} on it must have {want} bytes, it has {size}"
                        f"; restore the file from a copy, or delete the snapshots that need it"
                    )

    def _check_snapshot(self, record: SnapshotRecord, sound: set[int]) -> None:
        """Check the lists of rows and the arrays of a snapshot, and that no key is in the snapshot twice.

        Args:
            sound: numbers of the chunks whose keys were read without an error.
        """
        name, geometry = record.info.name, record.geometry
        index = HashIndex(Threads(1), sum(part.rows for part in record.parts if part.number in sound))
        for part in record.parts:
            try:
                rows = live_rows(self._files.read_bits(record, part))
                if part.number not in sound:
                    continue  # Reported already.
                keys = read_keys(self._fs, chunk_paths(f"{self._path}/chunks", part.number)[1], geometry, part)
            except (CorruptTableError, SnapshotNotFoundError) as error:
                self._problem(error, [name])
                continue
            old_U = index.put(keys.table_N[rows], keys.id_N[rows], rows)
            for twice in np.flatnonzero(old_U >= 0)[:1]:
                row = int(rows[twice])
                self.result.problems.append(
                    f"{record.path}: snapshot {name!r} has {int((old_U >= 0).sum())} keys of chunk {part.number} twice,"
                    f" the first is table {keys.table_N[row]}, id {keys.id_N[row]}"
                )
        for array in record.arrays:
            try:
                self._files.read_array(record, array)
            except (CorruptTableError, SnapshotNotFoundError) as error:
                self._problem(error, [name])
        self.result.snapshots.append(name)
        self.result.rows += record.info.rows

    def _list_unneeded(self, needed: set[int]) -> None:
        with doing("list", f"{self._path}/chunks"):
            for name, number in sorted(chunk_numbers(self._fs.names(f"{self._path}/chunks")).items()):
                if number not in needed:
                    self.result.unneeded.append(f"{self._path}/chunks/{name}")
        self.result.unneeded += self._files.leftovers()

    def _check_lost(self, needed: dict[int, tuple[int, int]]) -> None:
        held = lock_holder(self._fs, f"{self._path}/LOCK") is not None
        lost, more, self.result.kept = lost_and_kept(self._fs, self._path, self._files, needed, held)
        if lost or more:
            self.result.problems.append(f"{self._path}/LOCK: {lost_text(lost, more, len(self.result.kept))}")
        if self.result.unreadable:
            self.result.kept = list(self.result.unneeded)

    def _problem(self, error: StorageError, names: list[str]) -> None:
        if not all(self._gone(name) for name in names):
            self.result.problems.append(str(error))

    def _gone(self, name: str) -> bool:
        """Whether a writer has deleted or replaced the snapshot since its file was read; its chunks may be gone too."""
        try:
            return self._files.read(name).info.sequence != self._sequence.get(name)
        except SnapshotNotFoundError:
            return True
        except (CorruptTableError, FormatVersionError):
            return False

    def _read(self, size: int) -> None:
        self._done += size
        self.result.bytes_read = self._done
        if self._progress is not None:
            self._progress(self._done, self._total)
