"""The current rows of a table with their writer and their compactor. A load or a `clear` replaces all three.

Nothing here is thread-safe: `PersistentTable` holds its lock when it calls a method.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.storage.cold_index import ColdIndex
from oneemb.storage.compact_index import CompactIndex
from oneemb.storage.fs import FileSystem
from oneemb.storage.locking.store_lock import StoreLock
from oneemb.storage.row_store import Places
from oneemb.storage.table.chunk_files import chunk_paths
from oneemb.storage.table.chunk_scan import live_rows, read_keys
from oneemb.storage.table.cold_file import ColdFile
from oneemb.storage.table.compaction import Background, Compactor
from oneemb.storage.table.geometry import Geometry
from oneemb.storage.table.live_rows import LiveRows
from oneemb.storage.table.row_writer import RowWriter
from oneemb.storage.table.snapshot_load import load_index, load_live_rows
from oneemb.storage.table.snapshot_manifest import ChunkPart, SnapshotRecord
from oneemb.storage.table.snapshot_store import HeldRows, SnapshotStore, rows_not_in


class Contents:
    """Current rows of a table, empty at first: the index (`live`), the writer and the compactor.

    Args:
        indexes: the result of `index_maker`.
        background: if True, write and compact in background threads; if False, in the calls themselves.
        expected_rows: number of rows for which the index of an empty table has room.
    """

    live: LiveRows
    writer: RowWriter
    compactor: Compactor

    def __init__(
        self, fs: FileSystem, store: SnapshotStore, geometry: Geometry, threads: Threads, store_lock: StoreLock,
        indexes: tuple[Callable[[int], CompactIndex | ColdIndex], ColdFile | None], max_space_amplification: float,
        background: bool, expected_rows: int,
    ):  # fmt: skip
        self._fs, self._store, self._files = fs, store, store.chunk_files
        self._threads, self._store_lock = threads, store_lock
        self._make_index, self._cold_file = indexes
        self._max_space_amplification, self._expected_rows = max_space_amplification, expected_rows
        self.compactions = Background("compaction") if background else None
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="oneemb-write") if background else None
        self.index_thread = ThreadPoolExecutor(1, thread_name_prefix="oneemb-index") if background else None
        self._files.remover = ThreadPoolExecutor(1, thread_name_prefix="oneemb-remove") if background else None
        self._files.syncer = ThreadPoolExecutor(1, thread_name_prefix="oneemb-fsync") if background else None
        self._rows_moved = 0
        self._use(LiveRows(geometry, self._files, self._make_index, expected_rows, self.index_thread))

    @property
    def rows_moved(self) -> int:
        """Number of rows that compactions have moved since the table was opened."""
        return self._rows_moved + self.compactor.done.rows_moved

    def index_stats(self) -> dict[str, int]:
        """Figures of the index of the rows: bytes of memory, with and without bits and checksums; bytes on disk; number
        of blocks that were read from there."""
        file = self._cold_file
        return {
            "memory_bytes": self.live.nbytes,
            "index_bytes": self.live.index.nbytes,
            "index_disk_bytes": file.disk_bytes if file is not None else 0,
            "index_blocks_read": file.blocks_read if file is not None else 0,
        }

    @contextmanager
    def no_compaction(self) -> Iterator[None]:
        """Let no compaction run during a `with` block. Waits for a compaction at work, with the lock released, so the
        block must check that the table is still open."""
        compactor: Compactor | None = None
        while compactor is not self.compactor:  # A call that ran meanwhile may have made a new one.
            compactor = self.compactor
            compactor.stop()
        try:
            yield
        finally:
            if compactor is self.compactor:  # A compactor whose rows were replaced has nothing to move.
                compactor.resume()

    def clear(self) -> None:
        """Replace the rows by an empty set of rows. No compaction may be running."""
        self.replace(
            LiveRows(self.live.geometry, self._files, self._make_index, self._expected_rows, self.index_thread)
        )

    def replace(self, live: LiveRows) -> None:
        """Replace the present rows by these rows, and release the old chunks. No compaction may be running."""
        self._rows_moved += self.compactor.done.rows_moved
        self.writer.drop()
        old = self.live
        self._use(live)
        old.release()

    def load(self, records: Sequence[SnapshotRecord]) -> None:
        """Replace the rows by those of a chain of snapshots (see `load_live_rows`). The index of the present rows is
        freed first, so that memory holds one index at a time; after an error the index is built again, from the keys
        files and the rows in memory, and stays in memory if the disk is full. If that fails too, the table is broken.
        No compaction may be running, and no keys pending."""
        old = self.live
        old.drop_index()
        try:
            live = load_live_rows(
                self._fs, self._store.files, self._files, records, self._make_index, self.index_thread
            )
        except BaseException as error:
            try:
                load_index(self._fs, self._files, old, self.writer.live_keys())
            except BaseException as second:
                error.add_note(f"the index of the rows that the table had could not be built again: {second}")
                self._store_lock.cut_short(second)
            raise
        self.replace(live)

    def mend_index(self, put_pending: bool) -> None:
        """If the file of the index is damaged, make the index anew from the keys files and the rows in memory. If that
        fails, the table is broken. `put_pending`: whether to put pending keys into the index afterwards."""
        if self._cold_file is not None and self._cold_file.damaged:
            try:
                former = self.live.drop_index()
                self._cold_file.damaged = False
                load_index(self._fs, self._files, self.live, self.writer.live_keys())
                self.live.put_pending_of(former)
            except BaseException as error:
                self._store_lock.cut_short(error)
                raise
        if put_pending:
            self.compactor.put_pending()

    def _use(self, live: LiveRows) -> None:
        self.live = live
        self.writer = RowWriter(live, self._files, self._threads, self._writes)
        self.compactor = Compactor(
            self._fs, live, self.writer, self._store, self._store_lock, self._max_space_amplification, self.compactions
        )

    def hold_rows(self, without: tuple[np.ndarray, np.ndarray] | None = None) -> HeldRows:
        """Return the live rows of each chunk that are on disk now, and hold the chunks once more.

        Args:
            without: keys, (table_U, id_U), whose rows are left out.
        """
        held = HeldRows(self.live.geometry, [], [])
        place_U = np.empty(0, np.int64) if without is None else np.sort(self.live.index.find(*without))
        for chunk in self.live.chunks():
            if chunk.blocks and self.live.live_of(chunk):
                part = self.live.part(chunk, place_U)
                if not part.rows and without is not None:
                    continue
                held.parts.append(part)
                held.chunks.append(chunk)
                self._files.hold(chunk)
        return held

    def parts(self) -> dict[int, ChunkPart]:
        """{number of a chunk: its live rows that are on disk now}."""
        return {chunk.number: self.live.part(chunk) for chunk in self.live.chunks() if chunk.blocks}

    def gone_since(self, then: Places) -> tuple[np.ndarray, np.ndarray]:
        """Keys, (table_N, id_N), that had a row when `then` was taken (see `PersistentTable.places`) and have no row
        now. Their keys are read from the keys files of the chunks in `then`."""
        tables, ids, now = [np.empty(0, np.int32)], [np.empty(0, np.int64)], self.parts()
        for number, part in then.items():
            lost = live_rows(rows_not_in(part, now.get(number)).bit_N)
            if len(lost):
                keys_path = chunk_paths(self._files.directory, number)[1]
                table_N, id_N = read_keys(self._fs, keys_path, self.live.geometry, part).of(lost)
                gone = np.flatnonzero(self.live.index.find(table_N, id_N) < 0)
                tables.append(table_N[gone])
                ids.append(id_N[gone])
        return np.concatenate(tables), np.concatenate(ids)

    def leave_suspects(self) -> None:
        """Move live rows out of chunks whose sync has failed, so that no snapshot relies on those chunks."""
        self._files.end_syncs()
        for chunk in self.live.chunks():
            if chunk.suspect:
                if self.writer.writes_to(chunk):
                    self.writer.seal()
                self.compactor.move(chunk)

    def get_ready_for_fork(self) -> None:
        """Put all pending keys and write all full runs now, since a forked child has no background threads."""
        self.compactor.put_pending()
        self.writer.finish()

    def close(self) -> None:
        """End the threads and release the rows."""
        self.compactor.stop()
        self._end(cancel=False)
        self.live.release()
        self._files.close()
        if self._cold_file is not None:
            self._cold_file.close()

    def abandon(self) -> None:
        """End the threads of a broken table. Chunk files stay, since the state of the table is unknown; the next open
        removes them."""
        self.compactor.stop_soon()
        self._end(cancel=True)  # Waits for a write in progress, so that its file is not closed meanwhile.
        self._files.close()
        if self._cold_file is not None:
            self._cold_file.close()

    def _end(self, *, cancel: bool) -> None:
        remover, self._files.remover = self._files.remover, None  # From now on a call removes files itself.
        syncer, self._files.syncer = self._files.syncer, None
        for beside in (self._writes, self.index_thread, remover, syncer):
            if beside is not None:
                beside.shutdown(cancel_futures=cancel)
