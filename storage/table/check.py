"""Reads everything that the snapshots at a path need, and lists what is damaged.

Invariants:
- nothing is written and no lock is taken, so a live writer may go on; a snapshot that the writer removes meanwhile is
  no problem;
- every byte that a reader of any snapshot could read is compared with its checksum, and every file that a snapshot
  names is read; the check goes on after damage.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from oneemb.storage.errors import CorruptTableError, FormatVersionError, SnapshotNotFoundError, StorageError
from oneemb.storage.fs import AnyPath, FileSystem, LocalFileSystem, absolute_path, doing, is_damage
from oneemb.storage.table.chunk_damage import ChunkState, check_fits, examine_chunk
from oneemb.storage.table.chunk_files import chunk_numbers, chunk_paths
from oneemb.storage.table.chunk_scan import ChunkKeys, live_rows, read_keys
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.recovery import lost_text, needed_bytes
from oneemb.storage.table.repeated_keys import repeated_keys
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord
from oneemb.storage.table.table_info import lost_and_kept, need_table
from oneemb.storage.table.writer_lock import lock_holder

_Progress = Callable[[int, int], None]
_NO_KEYS = ChunkKeys(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint32)), np.empty(0, np.int64)


@dataclass
class SnapshotCheck:
    """State of a snapshot: its rows, and those that are lost.

    Args:
        rows: number of its rows, lost ones included.
        lost: {table: number of its rows that cannot be read}.
        lost_unknown: number of rows that cannot be read, and whose tables cannot be told.
        unreadable: content that cannot be read as a whole: "file", names of arrays, "part 1" of ranks; and content that
            a delta lacks: "parent 'base'", or "rows of parent 'base'".
        whole: whether nothing of it is lost.
    """

    rows: int = 0
    lost: dict[int, int] = field(default_factory=dict)
    lost_unknown: int = 0
    unreadable: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def rows_lost(self) -> int:
        """Number of rows that cannot be read."""
        return sum(self.lost.values()) + self.lost_unknown

    @property
    def missing_parent(self) -> bool:
        """Whether the snapshot is a delta that cannot be loaded, since one of its ancestors is missing."""
        return any(what.startswith("parent ") for what in self.unreadable)

    def add(self, other: "SnapshotCheck") -> None:
        """Add another part of the same snapshot."""
        for table, rows in other.lost.items():
            self.lost[table] = self.lost.get(table, 0) + rows
        self.rows += other.rows
        self.lost_unknown += other.lost_unknown
        self.unreadable += other.unreadable
        self.whole &= other.whole


@dataclass
class CheckResult:
    """Result of a check.

    Args:
        problems: a text for each problem, with the path of the file; empty = nothing is damaged.
        by_snapshot: {name of a snapshot: what is left of it}, those included whose files cannot be read.
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
    by_snapshot: dict[str, SnapshotCheck] = field(default_factory=dict)


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


def longest_parts(records: Iterable[SnapshotRecord]) -> dict[int, tuple[Geometry, ChunkPart]]:
    """{number of a chunk: (its geometry, the longest part of it that any of these snapshots needs)}."""
    longest: dict[int, tuple[Geometry, ChunkPart]] = {}
    for record in records:
        for part in record.parts:
            known = longest.get(part.number)
            if known is None or part.keys_bytes > known[1].keys_bytes:
                longest[part.number] = record.geometry, part
    return longest


class _Check:
    def __init__(self, fs: FileSystem, path: str, progress: _Progress | None, leftovers: Collection[str]):
        self._fs, self._path, self._progress, self._leftovers = fs, path, progress, leftovers
        self._files = SnapshotFiles(fs, f"{path}/snapshots")
        self._records: list[SnapshotRecord] = []
        self._sequence: dict[str, int] = {}
        self._damaged: dict[int, ChunkState] = {}
        self._done = self._total = 0
        self.result = CheckResult()

    def run(self) -> None:
        records = self._records
        for name in self._files.names():
            if name in self._leftovers:
                self.result.unneeded.append(self._files.path(name))
                continue
            try:
                records.append(self._files.read(name))
                self._sequence[name] = records[-1].info.sequence
            except StorageError as error:
                if not is_damage(error) and not isinstance(error, FormatVersionError | SnapshotNotFoundError):
                    raise
                self._problem(error, [name])
                if not self._gone(name):
                    self.result.unreadable.append(self._files.path(name))
                    self.result.by_snapshot[name] = SnapshotCheck(unreadable=["file"], whole=False)
        longest = longest_parts(records)
        users: dict[int, list[SnapshotRecord]] = {}
        for record in records:
            for part in record.parts:
                users.setdefault(part.number, []).append(record)
                if longest[part.number][0] != record.geometry:
                    problem = f"{record.path}: chunk {part.number} has another geometry in another snapshot"
                    self.result.problems.append(problem)
        self._total = sum(part.blocks * geometry.block_bytes for geometry, part in longest.values())
        for number, (geometry, part) in sorted(longest.items()):
            self._check_chunk(geometry, part, [record.info.name for record in users[number]])
        for record in sorted(records, key=lambda record: record.info.sequence):
            self._check_snapshot(record)
        self._list_unneeded(set(longest))
        self._check_lost(needed_bytes(records))

    def _check_chunk(self, geometry: Geometry, part: ChunkPart, names: list[str]) -> None:
        """Compare a chunk with its checksums. `names` are the snapshots that need the chunk."""
        problems: list[StorageError] = []
        state = examine_chunk(self._fs, f"{self._path}/chunks", geometry, part, problems.append, self._read)
        if state.intact:
            return
        self._damaged[part.number] = state
        there = [name for name in names if not self._gone(name)]
        if there and len(there) < len(names):
            # A writer has deleted a snapshot since, and may have cut off what only this snapshot needed.
            longest = longest_parts([record for record in self._records if record.info.name in there])[part.number]
            if longest[1].keys_bytes < part.keys_bytes:
                del self._damaged[part.number]
                self._check_chunk(*longest, there)
                return
        for error in problems if there else ():
            self.result.problems.append(str(error))

    def _check_snapshot(self, record: SnapshotRecord) -> None:
        """Check the lists of rows and the arrays of a snapshot, and that no key is in the snapshot twice. Counts the
        rows that are lost."""
        name, found = record.info.name, SnapshotCheck(rows=record.info.rows)
        readable: list[ChunkPart] | None = None

        def keys() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """Keys of the snapshot's rows, a chunk a batch. Only the first call reports damage and counts lost rows."""
            nonlocal readable
            if readable is None:
                readable = []
                for part in record.parts:
                    of_part = self._keys_of(record, part, found)
                    if of_part is not None:
                        readable.append(part)
                        yield of_part[0].of(of_part[1])
                return
            for part in readable:
                chunk, row_N = self._keys_of(record, part, SnapshotCheck()) or _NO_KEYS
                yield chunk.of(row_N)

        for number, n in repeated_keys(keys, record.info.rows):
            assert readable is not None
            of_part = self._keys_of(record, readable[number], SnapshotCheck())
            if of_part is not None:
                row, chunk = int(of_part[1][n[0]]), of_part[0]
                self.result.problems.append(
                    f"{record.path}: snapshot {name!r} has {len(n)} keys of chunk {readable[number].number} twice, the"
                    f" first is table {chunk.table_N[row]}, id {chunk.id_N[row]}"
                )
            found.whole = False
        for array in record.arrays:
            try:
                self._files.read_array(record, array)
            except StorageError as error:
                self._damage(error, name)
                found.unreadable.append(array)
        found.whole &= not found.rows_lost and not found.unreadable
        if not self._gone(name):
            self.result.by_snapshot[name] = found
            self.result.snapshots.append(name)
            self.result.rows += record.info.rows

    def _keys_of(
        self, record: SnapshotRecord, part: ChunkPart, found: SnapshotCheck
    ) -> tuple[ChunkKeys, np.ndarray] | None:
        """Keys of a chunk, and the rows of a snapshot whose keys can be read; None if no key can be. Counts the lost
        rows in `found`."""
        try:
            row_N = live_rows(self._files.read_bits(record, part))
        except StorageError as error:
            self._damage(error, record.info.name)
            found.lost_unknown += part.rows
            return None
        state = self._damaged.get(part.number)
        try:
            if state is None:
                path = chunk_paths(f"{self._path}/chunks", part.number)[1]
                return read_keys(self._fs, path, record.geometry, part), row_N
            check_fits(self._fs, f"{self._path}/chunks", state, part, row_N)
        except CorruptTableError as error:  # This part may be shorter than that of another snapshot.
            self._problem(error, [record.info.name])
            found.lost_unknown += len(row_N)
            return None
        found.add(SnapshotCheck(0, *state.lost(row_N)))
        return state.keys, row_N[state.has_keys(row_N)]

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
        for name in lost:
            self.result.by_snapshot[name] = SnapshotCheck(unreadable=["file"], whole=False)
        if self.result.unreadable:
            self.result.kept = list(self.result.unneeded)

    def _damage(self, error: StorageError, name: str) -> None:
        """Report damage to the file of a snapshot; raise any other error."""
        if not is_damage(error) and not isinstance(error, SnapshotNotFoundError):
            raise error
        self._problem(error, [name])

    def _problem(self, error: StorageError, names: list[str]) -> None:
        if not all(self._gone(name) for name in names):
            self.result.problems.append(str(error))

    def _gone(self, name: str) -> bool:
        """Whether a writer has deleted or replaced the snapshot since its file was read; its chunks may be gone too."""
        try:
            return self._files.read(name).info.sequence != self._sequence.get(name)
        except SnapshotNotFoundError:
            return True
        except StorageError:
            return False

    def _read(self, size: int) -> None:
        self._done += size
        self.result.bytes_read = self._done
        if self._progress is not None:
            self._progress(self._done, self._total)
