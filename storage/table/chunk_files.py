"""Creates, extends, syncs, holds and removes the chunk files of a table. FORMAT.md describes their bytes.

A chunk is two files, `<number>.rows` and `<number>.keys`. Both only grow, in runs: a run is a group of blocks, which
are appended to the first file, with their keys and checksums, which are appended to the second file. The bytes of a run
are never written again, so the prefix of a chunk that a snapshot or a scan reads never changes.

Invariants:
- the number of a chunk is not used again while files with this number may exist;
- files are removed after the last hold of the chunk is released, and at no other time: at once, or by the thread
  `remover`, since a system may take long to free the space of a large file;
- a file is synced on the descriptor that wrote it, which stays open until then: Linux reports a failed writeback to
  each descriptor that was open, but to a descriptor that is opened later only if no process was told before;
- while a sync of a chunk runs, no other sync of the chunk begins, and its files stay open;
- a chunk whose sync has failed stays `suspect`: the system may have dropped pages of its files, so no new snapshot may
  rely on the chunk.
"""

import errno
import os
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from oneemb.kernels.checksum import xxh64
from oneemb.kernels.threads import submit
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import FileSystem, aligned_bytes, storage_error
from oneemb.storage.table.file_header import HEADER_BYTES, KEYS_MAGIC, ROWS_MAGIC, pack_header
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.writer_lock import WriterLock

# Offset of the first block in a rows file. The header takes 4096 bytes, so that blocks are aligned for direct reads.
ROWS_BEGIN = 4096
# A bound: the number of every chunk is smaller.
EVERY_NUMBER = 1 << 62
_RUN = struct.Struct("<3Q")
_SUM = struct.Struct("<Q")
_FILES_OPEN_MAX = 256
# Most full chunks whose files stay open because they are not synced. Beyond this number the oldest chunk is synced, by
# the thread `syncer` if there is one; the system has probably written it back by then.
_UNSYNCED_MAX = 64
# Most chunks that wait for the thread: a call that needs one more waits for the oldest of them.
_SYNCING_MAX = 8
_CHUNK_NAME = re.compile(r"([0-9]{12})\.(?:rows|keys)")


class ChunkFile:
    """One chunk: its paths, the end of its last run, what is synced, and how often it is held. Only `ChunkFiles`
    changes these fields."""

    def __init__(self, number: int, geometry: Geometry, rows_path: str, keys_path: str):
        self.number = number
        self.geometry = geometry
        self.rows_path = rows_path
        self.keys_path = keys_path
        self.blocks = 0
        self.keys_bytes = HEADER_BYTES
        self.keys_sum = 0
        self.runs_bytes = 0
        """Bytes on disk of the chunk's runs, in both files."""
        self.synced_bytes = 0
        self.suspect = False
        self.holds = 0
        self.snapshots = 0
        self.live_rows = 0
        """Number of `LiveRows` that have the chunk: two while a load replaces the rows."""
        self.reading = False
        """Whether a `get` reads the rows file without the lock of the table: the file stays open."""
        self.rows_out: int | None = None
        self.keys_out: int | None = None

    @property
    def full(self) -> bool:
        return self.blocks == self.geometry.blocks_per_chunk

    @property
    def needed(self) -> bool:
        """Whether a snapshot or a `LiveRows` has the chunk. Other chunks are held only briefly, by a scan or a move."""
        return self.snapshots > 0 or self.live_rows > 0

    @property
    def end(self) -> "ChunkEnd":
        return ChunkEnd(self.blocks, self.keys_bytes, self.keys_sum)

    @property
    def nbytes(self) -> int:
        """Bytes on disk of both files. Headers are written with the first run."""
        return ROWS_BEGIN + HEADER_BYTES + self.runs_bytes if self.blocks else 0


class ChunkEnd(NamedTuple):
    """The place where the next run of a chunk begins: number of blocks, size of the keys file, and the checksum of all
    keys before it."""

    blocks: int
    keys_bytes: int
    keys_sum: int


class ChunkFiles:
    """The chunk files of one table.

    Args:
        directory: path of the folder `chunks`, which must exist.
        next_number: number of the next new chunk, greater than the number of any existing chunk.
        direct: whether rows are written and read past the system's page cache.
        lock: lock of the folder that the writer holds; None = the files are only read.
    """

    def __init__(
        self, fs: FileSystem, directory: str, next_number: int, direct: bool, lock: WriterLock | None = None
    ):  # fmt: skip
        self.open_rows_files: OrderedDict[ChunkFile, int] = OrderedDict()
        self.chunks: dict[int, ChunkFile] = {}
        # Kept up to date by every call that changes a chunk, since each put asks, and a large table has many chunks.
        self.needed_bytes = 0
        """Bytes of the runs of all needed chunks."""
        self.loose: dict[ChunkFile, None] = {}
        """The chunks of `LiveRows` that no snapshot needs."""
        self._fs = fs
        self._lock = lock
        self.directory = directory
        self._next_number = next_number
        self.direct = direct
        self._directory_synced = True
        self._unremoved: list[str] = []
        self.unsynced: dict[ChunkFile, None] = {}  # Sealed chunks whose files are still open, oldest first.
        self.files_open_max = _FILES_OPEN_MAX
        self.sync_threads = 1
        self.keep_below = 0
        """Chunks with a smaller number are not removed: a snapshot that cannot be read may need them."""
        self.bytes_written = 0
        self.bytes_removed = 0
        self.remover: Executor | None = None
        self._removals: dict[ChunkFile, Future[None]] = {}
        self.syncer: Executor | None = None
        self._syncs: dict[ChunkFile, Future[None]] = {}  # Of some chunks in `unsynced`, oldest first.
        self._process = os.getpid()  # A forked child releases copies of holds, but must not remove files.

    def create(self, geometry: Geometry) -> ChunkFile:
        """Create an empty chunk, held once. StorageError, with no file left, if the files cannot be created, or if the
        table's folder was removed or replaced."""
        if self._lock is not None:
            self._lock.check()
        rows_path, keys_path = chunk_paths(self.directory, self._next_number)
        chunk = ChunkFile(self._next_number, geometry, rows_path, keys_path)
        self._next_number += 1
        path, removals = rows_path, self._unfinished()
        try:
            chunk.rows_out = self._fs.create(rows_path, direct=self.direct)
            path = keys_path
            chunk.keys_out = self._fs.create(keys_path)
        except OSError as error:
            self._close_written(chunk)
            self._remove(rows_path)
            self._remove(keys_path)
            if _made_space(error, removals):
                return self.create(geometry)
            raise storage_error(error, "make the chunk file", path) from error
        chunk.keys_sum = xxh64(_header(KEYS_MAGIC, chunk))
        chunk.holds = 1
        self._directory_synced = False
        self.chunks[chunk.number] = chunk
        return chunk

    def adopt(self, number: int, geometry: Geometry, blocks: int, keys_bytes: int, keys_sum: int) -> ChunkFile:
        """Hold chunk `number` of a snapshot once more, and return it. Its files are not opened. If the snapshot has
        more blocks of the chunk than are known, its `blocks`, `keys_bytes` and `keys_sum` are taken over."""
        chunk = self.chunks.get(number)
        if chunk is None:
            chunk = self.chunks[number] = ChunkFile(number, geometry, *chunk_paths(self.directory, number))
        if blocks > chunk.blocks:
            self._extend(chunk, ChunkEnd(blocks, keys_bytes, keys_sum))
            chunk.synced_bytes = chunk.nbytes
        chunk.holds += 1
        return chunk

    def write(self, chunk: ChunkFile, end: ChunkEnd, block_N: np.ndarray, record_N: np.ndarray) -> None:
        """Write one run: consecutive blocks and the record of their keys. The run is part of the chunk only after
        `append`. Other threads may make any call but `write` meanwhile. After a StorageError, write again from the same
        `end`.

        The first run also writes the headers of the files, so that `create` need not wait for the disk.

        Args:
            end: where the run begins: the end of the chunk, or of a run that is written and not yet appended.
            block_N, record_N: bytes of the run's blocks, in aligned memory, and of its `key_record`.
        """
        assert chunk.rows_out is not None and chunk.keys_out is not None, "only an open chunk grows"
        path, removals = chunk.rows_path, self._unfinished()
        try:
            if end.blocks == 0:
                header_N = aligned_bytes(ROWS_BEGIN)
                header_N[:HEADER_BYTES] = np.frombuffer(_header(ROWS_MAGIC, chunk), np.uint8)
                self._fs.write(chunk.rows_out, header_N, 0)
            self._fs.write(chunk.rows_out, block_N, ROWS_BEGIN + end.blocks * chunk.geometry.block_bytes)
            path = chunk.keys_path
            if end.blocks == 0:
                self._fs.write(chunk.keys_out, _header(KEYS_MAGIC, chunk), 0)
            self._fs.write(chunk.keys_out, record_N, end.keys_bytes)
        except OSError as error:
            if _made_space(error, removals):
                self.write(chunk, end, block_N, record_N)
                return
            raise storage_error(error, "write rows to", path) from error

    def append(self, chunk: ChunkFile, end: ChunkEnd) -> None:
        """Make a written run part of the chunk: `end` is the end of that run."""
        before = chunk.nbytes
        self._extend(chunk, end)
        self.bytes_written += chunk.nbytes - before

    def seal(self, chunk: ChunkFile) -> None:
        """Note that no run follows. The files are closed once all runs are synced."""
        if chunk.suspect or chunk.synced_bytes == chunk.nbytes:
            self._close_written(chunk)
            return
        self.unsynced[chunk] = None
        self.end_syncs()
        most = min(_UNSYNCED_MAX, self._fs.spare_files() // 2)
        if len(self.unsynced) - len(self._syncs) > most:
            self.end_syncs(min(_SYNCING_MAX, most) - 1)
            oldest = next(chunk for chunk in self.unsynced if chunk not in self._syncs)
            if self.syncer is not None:
                self._syncs[oldest] = submit(self.syncer, self._sync_files, oldest)
                return
            with suppress(StorageError):  # On an error the chunk is suspect, and the next save moves its rows.
                self.sync(oldest)

    def end_syncs(self, most: int | None = None) -> None:
        """Take over the results of syncs that the thread `syncer` has ended. most: number of syncs that may be left
        running; those beyond it are waited for."""
        for count, (chunk, synced) in zip(range(len(self._syncs), 0, -1), list(self._syncs.items()), strict=True):
            if synced.done() or most is not None and count > most:
                with suppress(StorageError):
                    self.sync(chunk)

    def sync(self, chunk: ChunkFile) -> None:
        """Wait until all appended runs are on the device; may run beside appends. After a StorageError the runs may be
        missing on the device, and the chunk stays suspect."""
        if chunk.suspect:
            raise StorageError(
                f"{chunk.rows_path} or its keys could not be written to the device earlier, so no snapshot may rely on"
                " them; save again: the rows go to another file"
            )
        size = chunk.nbytes
        if chunk.synced_bytes == size:
            return
        try:
            synced = self._syncs.get(chunk)
            if synced is None:
                self._sync_files(chunk)
            else:
                synced.result()
            chunk.synced_bytes = size
        except StorageError:
            chunk.suspect = True
            raise
        finally:
            self._syncs.pop(chunk, None)
            # A run that was appended during this sync is synced by the next call, so the files stay open for it.
            if chunk in self.unsynced and (chunk.suspect or chunk.synced_bytes == chunk.nbytes):
                self._close_written(chunk)

    def _sync_files(self, chunk: ChunkFile) -> None:
        assert chunk.rows_out is not None and chunk.keys_out is not None, "a chunk stays open until it is synced"
        for file, path in ((chunk.rows_out, chunk.rows_path), (chunk.keys_out, chunk.keys_path)):
            try:
                self._fs.sync(file)
            except OSError as error:
                raise storage_error(error, "sync", path) from error

    def sync_all(self, chunks: Iterable[ChunkFile]) -> None:
        """`sync` each chunk, up to `sync_threads` at a time. An error is raised after all chunks were tried, so that
        all suspect chunks are known."""
        grown = [chunk for chunk in chunks if chunk.synced_bytes != chunk.nbytes]
        failed: list[StorageError] = []

        def sync(chunk: ChunkFile) -> None:
            try:
                self.sync(chunk)
            except StorageError as error:
                failed.append(error)

        if len(grown) < 2 or self.sync_threads == 1:
            for chunk in grown:
                sync(chunk)
        else:
            with ThreadPoolExecutor(min(len(grown), self.sync_threads), thread_name_prefix="oneemb-sync") as beside:
                for synced in [submit(beside, sync, chunk) for chunk in grown]:
                    synced.result()
        if failed:
            raise failed[0]

    def sync_names(self) -> None:
        """Wait until the names of all chunk files are on the device: sync the folder. May run beside `create`."""
        if self._directory_synced:
            return
        self._directory_synced = True
        try:
            self._fs.sync_directory(self.directory)
        except OSError as error:
            self._directory_synced = False
            raise storage_error(error, "sync the directory", self.directory) from error

    def need(self, chunk: ChunkFile, *, snapshots: int = 0, live_rows: int = 0) -> None:
        """Add to the number of snapshots, or of `LiveRows`, that have a chunk. Each of them holds the chunk too."""
        needed = chunk.needed
        chunk.snapshots += snapshots
        chunk.live_rows += live_rows
        self.needed_bytes += (chunk.needed - needed) * chunk.runs_bytes
        if chunk.live_rows and not chunk.snapshots:
            self.loose[chunk] = None
        else:
            self.loose.pop(chunk, None)

    def hold(self, chunk: ChunkFile) -> None:
        chunk.holds += 1

    def release(self, chunk: ChunkFile) -> None:
        """Release one hold. Releasing the last one removes the files."""
        chunk.holds -= 1
        if chunk.holds == 0:
            del self.chunks[chunk.number]
            self._close_chunk(chunk)
            if chunk.number < self.keep_below or os.getpid() != self._process:
                return
            self.bytes_removed += chunk.nbytes
            if self.remover is None:
                self._remove_files(chunk)
            else:
                self._removals[chunk] = submit(self.remover, self._remove_files, chunk)

    @property
    def removing_bytes(self) -> int:
        """Bytes on disk of released chunks whose files are not removed yet."""
        for chunk, removed in list(self._removals.items()):
            if removed.done():
                del self._removals[chunk]
        return sum(chunk.nbytes for chunk in self._removals)

    def finish_removals(self, most: int | None = None) -> None:
        """Wait until the files of all released chunks are removed, or of the `most` that were released first. Other
        threads may make any call meanwhile."""
        wait(list(self._removals.values())[:most])

    def rows_file(self, chunk: ChunkFile) -> int:
        """Return the open rows file of a chunk, for reading. At most `files_open_max` files stay open only for reading:
        beyond this number the least recently used file is closed."""
        if chunk.rows_out is not None:
            return chunk.rows_out
        file = self.open_rows_files.pop(chunk, None)
        if file is None:
            file = self._fs.open(chunk.rows_path, direct=self.direct)
            while len(self.open_rows_files) >= self.files_open_max:
                self._close(self.open_rows_files.popitem(last=False)[1])
        self.open_rows_files[chunk] = file
        return file

    def close(self) -> None:
        """Close all files. Afterwards no file is removed: another writer may use the numbers of the chunks again."""
        self.keep_below = EVERY_NUMBER
        for chunk in self.chunks.values():
            self._close_chunk(chunk)

    # At exit, names of modules are None, and the system closes the files.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "chunks") and not is_finalizing():  # Without chunks, `__init__` has failed early.
            self.close()

    def _extend(self, chunk: ChunkFile, end: ChunkEnd) -> None:
        before = chunk.runs_bytes
        chunk.blocks, chunk.keys_bytes, chunk.keys_sum = end
        chunk.runs_bytes = chunk.blocks * chunk.geometry.block_bytes + chunk.keys_bytes - HEADER_BYTES
        self.needed_bytes += chunk.needed * (chunk.runs_bytes - before)

    def _close_chunk(self, chunk: ChunkFile) -> None:
        file = self.open_rows_files.pop(chunk, None)
        if file is not None:
            self._close(file)
        self._close_written(chunk)

    def _close_written(self, chunk: ChunkFile) -> None:
        """Close the descriptors that wrote the chunk."""
        self.unsynced.pop(chunk, None)
        synced = self._syncs.pop(chunk, None)
        if synced is not None and not synced.done() and os.getpid() == self._process:
            wait([synced])  # Seldom: compaction removes a chunk that is just being synced.
        if chunk.rows_out is not None and chunk.reading:
            self.open_rows_files[chunk] = chunk.rows_out
        elif chunk.rows_out is not None:
            self._close(chunk.rows_out)
        if chunk.keys_out is not None:
            self._close(chunk.keys_out)
        chunk.rows_out = chunk.keys_out = None

    def _close(self, file: int) -> None:
        try:
            self._fs.close(file)
        except OSError:
            pass  # Files that must be durable are synced before they are closed.

    def _unfinished(self) -> list[Future[None]]:
        """The removals of files that have not ended."""
        return [removed for removed in list(self._removals.values()) if not removed.done()]

    def _remove_files(self, chunk: ChunkFile) -> None:
        if self._lock is not None and not self._lock.still_there:
            return  # The folder was replaced: its files belong to another table.
        for path in [chunk.rows_path, chunk.keys_path, *self._unremoved]:
            self._remove(path)

    def _remove(self, path: str) -> None:
        # A file that cannot be removed now is tried again at the next removal, and at the next open of the table.
        try:
            self._fs.remove(path)
        except FileNotFoundError:
            pass
        except OSError:
            if path not in self._unremoved:
                self._unremoved.append(path)
            return
        if path in self._unremoved:
            self._unremoved.remove(path)


def _made_space(error: OSError, removals: list[Future[None]]) -> bool:
    """Whether an error is a full disk while removals were running. Waits until these removals have ended."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return False
    wait(removals)
    return bool(removals)


def key_record(end: ChunkEnd, table_N: np.ndarray, id_N: np.ndarray, sum_B: np.ndarray) -> tuple[np.ndarray, ChunkEnd]:
    """Return the bytes of a run in the keys file, uint8, and the end of the chunk after the run.

    Args:
        end: end of the chunk before the run.
        table_N, id_N, sum_B: keys of the run's rows, and checksums of its B blocks.
    """
    parts = [np.frombuffer(_RUN.pack(end.blocks, len(id_N), len(sum_B)), np.uint8)]
    parts += [array.view(np.uint8) for array in (id_N, table_N, sum_B)]
    size = sum(map(len, parts))
    record_N = np.empty(size + -size % 8 + _SUM.size, np.uint8)
    np.concatenate(parts, out=record_N[:size])
    record_N[size : -_SUM.size] = 0
    keys_sum = xxh64(record_N[: -_SUM.size], end.keys_sum)
    _SUM.pack_into(record_N.data, len(record_N) - _SUM.size, keys_sum)
    return record_N, ChunkEnd(end.blocks + len(sum_B), end.keys_bytes + len(record_N), keys_sum)


def _header(magic: bytes, chunk: ChunkFile) -> bytes:
    geometry = chunk.geometry
    number_4 = (chunk.number, geometry.row_width, geometry.physical_block_size, geometry.blocks_per_chunk)
    return pack_header(magic, number_4)


def chunk_paths(directory: str, number: int) -> tuple[str, str]:
    """Paths of the rows file and of the keys file of a chunk."""
    return f"{directory}/{number:012d}.rows", f"{directory}/{number:012d}.keys"


def chunk_numbers(names: list[str]) -> dict[str, int]:
    """{name: number of the chunk} for all names that are names of chunk files."""
    return {name: int(match[1]) for name in names if (match := _CHUNK_NAME.fullmatch(name))}
