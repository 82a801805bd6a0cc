"""Sink of vectors in an index of another library, which is searched while newer versions are added.

Once too many positions are dead, a thread builds the index anew from all rows, beside the index in use
(index_build.py), and the new index takes the place of the old one in one step.

    MANIFEST.json                      list of saved indexes, the newest last
    <sequence>-<identity>.<library>    index that shows a version of the table, as its library writes it
    <sequence>-<identity>.ids          ids and liveness of the positions

Invariants:
- a search sees one view, of one version of the table: positions that are added for the next version are not live there;
- the manifest is replaced, atomically, after the files that it names are durable; these do not change.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Any

import numpy as np

from oneemb.sinks.changes import Changes, StoppedError
from oneemb.sinks.folder_lock import FolderLock
from oneemb.sinks.index_build import IndexBuild, IndexMaker, Vectors
from oneemb.sinks.index_library import PIECE, IndexLibrary, IndexView, SummedFile
from oneemb.sinks.turns import Turns
from oneemb.sinks.version import PublishError, TableVersion, choice_of, read_json, sum_of, unused_stem, write_json
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.new_files import new_files

_OURS = re.compile(r"\d{12,}-[0-9a-f]{32}(-\d+)?\.(faiss|usearch|ids)(\.tmp)?")
_ROUNDS = 4
"""Rounds of a build after which the next version waits for the build, so that the build comes to an end."""
_READS = 4
"""Largest number of builds in a row whose version the job has deleted while its rows were read."""


class IndexSink:
    """An index of the vectors of one table, which follows the table.

    Args:
        folder: folder for the index on disk; one publisher at a time writes to it. None = memory only, and the index is
            built anew in each process.
        library: library of the index.
        table: number of the table.
        vectors: function of weights, float32 [N, D], that returns the vectors to index, such as a tower; None = the
            weights.
        rebuild: share of dead positions from which a thread builds the index anew, beside the index in use.
        save_every: number of versions after which the index is written to the folder.
        keep: number of saved indexes that stay in the folder, for a rollback.
        max_rows: largest number of rows, of the table; None = all. [A cap](../publish.md#a-cap) says which rows stay.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self, folder: AnyPath | None, library: IndexLibrary, *, table: int,
        vectors: Callable[[np.ndarray], np.ndarray] | None, rebuild: float, save_every: int, keep: int,
        max_rows: int | None,
    ):  # fmt: skip
        if not 0 < rebuild <= 1 or save_every < 1 or keep < 1:
            raise ValueError(
                f"rebuild must be above 0 and 1 at most, save_every and keep 1 or more, got {rebuild}, {save_every} and"
                f" {keep}"
            )
        self._folder = None if folder is None else absolute_path(folder)
        self.name = f"{library.name} index of table {table}{'' if self._folder is None else f' in {self._folder}'}"
        self._library, self._rebuild, self._save_every, self._keep = library, rebuild, save_every, keep
        self._choice = choice_of([table], False, max_rows) | {"library": library.name} | library.choice
        self._maker = IndexMaker(library, table, vectors, self._choice)
        self._fs, self.max_rows = LocalFileSystem(), max_rows
        self._lock = None if self._folder is None else FolderLock(self._fs, self._folder)
        self._view: IndexView | None = None
        self._placed: tuple[IndexView, HashIndex] | None = None  # a view, and the positions of its live ids
        self._turns, self._unsaved = Turns(), 0
        self._broken: Any = None  # index that has failed in the middle of an addition
        self._build: IndexBuild | None = None
        # Dead positions when the last build ended, and builds in a row whose version was deleted.
        self._dead_before, self._unread = 0, 0

    @property
    def view(self) -> IndexView:
        """The index as searches see it now. StorageError if there is none yet."""
        view = self._view or self._load_newest()
        if view is None:
            raise StorageError(f"{self.name} must have a version before it is searched; publish one to it")
        return view

    @property
    def wants_whole(self) -> bool:
        return self._view is not None and self._view.index is self._broken

    def search(self, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, TableVersion]:
        """The k nearest rows of each query.

        Args:
            query_QD: float32 [Q, D].
            k: number of rows.

        Returns:
            Scores, float32 [Q, k]: inner products, or squares of L2 distances, the nearest first; ids, int64 [Q, k];
            and the version of the table that the index shows. Where fewer than k rows were found, the score is infinite
            and the id -1.

        Raises:
            StorageError: no version was published yet.
        """
        view = self.view
        with self._turns.shared():
            score_QK, place_QK = self._library.search(view, np.ascontiguousarray(query_QD, np.float32), k)
        id_QK = np.where(place_QK < 0, -1, view.id_P.take(place_QK, mode="clip") if len(view.id_P) else -1)
        return score_QK, id_QK, view.version

    def refresh(self) -> TableVersion | None:
        """Load the newest saved index, for a process that searches an index which another process publishes. Returns
        the version of the table that the index shows; None = there is none."""
        if self._lock is None or not self._lock.taken:
            self._load_newest()
        return None if self._view is None else self._view.version

    def version(self) -> TableVersion | None:
        view = self._view or self._load_newest()
        return None if view is None or view.choice != self._choice else view.version

    def apply(self, changes: Changes) -> None:
        if self._lock is not None:
            self._lock.take()
        self._look_at_build(changes)
        if changes.is_whole:
            self._show_all(changes)
            return
        changed = self._maker.vectors_of(changes)
        if self._is_built_at_once(changed):
            self._show_all(changes.whole())
            return
        while not self._show(changed):
            pass  # A build has taken the place of the index meanwhile.
        self._begin_build(changes)

    def close(self) -> None:
        """End a build, and release the folder. The index can still be searched."""
        try:
            self._end_build()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _show_all(self, changes: Changes) -> None:
        """Show a version by an index of its own, saved or new."""
        self._end_build()
        view = self._on_disk(changes.version.identity)
        if view is None:
            view = self._maker.built(self._maker.vectors_of(changes), changes.check_wanted)
        placed = view, view.places()
        self._save(view)
        with self._turns.alone():
            self._view, self._placed = view, placed
            self._broken, self._dead_before, self._unread, self._unsaved = None, 0, 0, 0

    def _show(self, changed: Vectors) -> bool:
        """Add changes to the index in use, and show their version. False = another index has taken its place."""
        before = self.view
        places = self._places_of(before)
        view = self._added(before, places, changed)
        unsaved = self._unsaved + 1
        if unsaved >= self._save_every:
            self._save(view)
            unsaved = 0
        self._placed = None
        view.move(places, before)
        with self._turns.alone():
            if self._view is not before:
                return False
            self._view, self._placed, self._unsaved = view, (view, places), unsaved
            if self._build is not None:
                self._build.later.append(changed)
        return True

    def _added(self, before: IndexView, places: HashIndex, changed: Vectors) -> IndexView:
        """View of the index with the changes. The view before stays as it was: it has none of the new positions."""
        first = self._library.size(before.index)
        for begin in range(0, len(changed.vector_ND), PIECE):
            with self._turns.alone():
                self._broken = before.index  # An index that fails in the middle of an addition is built anew.
                self._library.add(before.index, changed.vector_ND[begin : begin + PIECE])
                self._broken = None
        return before.after(changed.version, places, first, changed.id_N, changed.gone_M)

    def _places_of(self, view: IndexView) -> HashIndex:
        placed = self._placed
        if placed is None or placed[0] is not view:
            self._placed = placed = view, view.places()
        return placed[1]

    # ---- an index that is built anew ---------------------------------------------------------------------------------

    def _is_built_at_once(self, changed: Vectors) -> bool:
        """Whether the index is built anew in the call: with the changes too many positions are dead, and all rows
        together are at most twice as many as the changed ones, or one piece."""
        view = self.view
        changed_N = np.concatenate([changed.id_N, changed.gone_M])
        old = int((self._places_of(view).find(np.zeros(len(changed_N), np.int32), changed_N) >= 0).sum())
        live, size = int(view.live_P.sum()) - old + len(changed.id_N), self._library.size(view.index)
        is_due = size + len(changed.id_N) - live > self._rebuild * (size + len(changed.id_N))
        return is_due and live <= max(PIECE, 2 * len(changed.id_N))

    def _begin_build(self, changes: Changes) -> None:
        """Begin to build the index anew if too many positions are dead: at least twice as many as when the last build
        ended, so that a build is never at work all the time."""
        size, dead = self._dead_positions()
        if self._build is None and dead > self._rebuild * size and dead >= 2 * self._dead_before:
            build = self._build = IndexBuild(self._maker, changes.whole(), self._take_over)
            build.start()

    def _dead_positions(self) -> tuple[int, int]:
        """Number of positions, and of dead ones among them."""
        size = self._library.size(self.view.index)
        return size, size - int(self.view.live_P.sum())

    def _take_over(self, build: IndexBuild, view: IndexView, places: HashIndex) -> list[Vectors]:
        """Put the index of a build in place of the index in use. If the sink shows a later version than the new index
        does, return the changes since, and do nothing. The thread of the build calls it."""
        with self._turns.alone():
            if self._build is not build:
                raise StoppedError
            later, build.later = build.later, []
            if not later:
                self._view, self._placed, self._build = view, (view, places), None
                self._dead_before, self._unread = len(view.live_P) - int(view.live_P.sum()), 0
            return later

    def _look_at_build(self, changes: Changes) -> None:
        """Wait for a build that lags behind. Raise PublishError if a build has failed, once."""
        build = self._build
        if build is None:
            return
        if build.rounds >= _ROUNDS:
            build.wait(changes.check_wanted)
        if build.is_at_work or self._build is None:
            return
        self._build, error = None, build.error
        if isinstance(error, StorageError) and not build.has_read and self._unread < _READS:
            self._unread += 1  # The job may have deleted the version; the next build reads a newer one.
        elif error is not None:
            self._unread, self._dead_before = 0, self._dead_positions()[1]
            raise PublishError(
                f"{self.name} must be built anew, since too many of its positions are dead, and that has failed:"
                f" {type(error).__name__}: {error}. Searches and newer versions go on with the index in use, and the"
                " index is built anew once twice as many positions are dead; give the process memory for both indexes,"
                " or remove the cause"
            ) from error

    def _end_build(self) -> None:
        build, self._build = self._build, None
        if build is not None:
            build.stop()
            build.wait()

    # ---- the folder --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"{self._folder}/MANIFEST.json"

    def _manifest(self) -> list[dict[str, Any]]:
        """Entries of the saved indexes, the newest last."""
        found = None if self._folder is None else read_json(self._fs, self._path)
        if found is None:
            return []
        try:
            assert isinstance(found, dict)
            for one in found["versions"]:
                assert all(isinstance(one[key], str) for key in ("index", "ids"))
                assert all(isinstance(one[key], int) for key in ("index_sum", "ids_sum"))
                assert isinstance(one["version"], dict)
            return found["versions"]
        except (AssertionError, KeyError, TypeError) as error:
            raise CorruptTableError(
                f"{self._path} must be a manifest of a publisher, it is {repr(found)[:100]}; restore it from a copy, or"
                " remove it, and the index is built anew"
            ) from error

    def _save(self, view: IndexView) -> None:
        if self._folder is None:
            return
        before = self._manifest()
        stem = f"{view.version.sequence:012d}-{view.version.identity}"
        stem = unused_stem(stem, [one["index"] for one in before])
        entry: dict[str, Any] = {"version": view.version.to_fields(), "choice": self._choice}
        entry |= {"index": f"{stem}{self._library.suffix}", "ids": f"{stem}.ids"}
        others = [one for one in before if one["version"].get("identity") != view.version.identity]
        with doing("write an index in", self._folder):
            with new_files(f"{self._folder}/{entry['index']}", f"{self._folder}/{entry['ids']}") as files:
                summed = [SummedFile(file) for file in files]
                self._library.write(view.index, summed[0])
                for array in (view.id_P, view.live_P):
                    np.save(summed[1], array)
            self._fs.sync_directory(self._folder)
            versions = [*others, entry | {"index_sum": summed[0].sum, "ids_sum": summed[1].sum}][-self._keep :]
            write_json(self._fs, self._path, {"versions": versions})
            kept = {one[key] for one in versions for key in ("index", "ids")}
            for file in self._fs.names(self._folder):
                if _OURS.fullmatch(file) and file not in kept:
                    with suppress(OSError):
                        self._fs.remove(f"{self._folder}/{file}")

    def _load_newest(self) -> IndexView | None:
        versions, view = self._manifest(), self._view
        while versions and (view is None or view.version.identity != versions[-1]["version"].get("identity")):
            try:
                view = self._load(versions[-1])
            except StorageError:
                tried, versions = versions[-1], self._manifest()
                if versions[-1:] == [tried]:
                    raise
                # A publisher has saved a newer version, and removed these files.
        if view is not self._view:
            self._view = view
        return view

    def _on_disk(self, identity: str) -> IndexView | None:
        for one in self._manifest():
            if one["version"].get("identity") == identity and one.get("choice", self._choice) == self._choice:
                return self._load(one)
        return None

    def _load(self, entry: dict[str, Any]) -> IndexView:
        version = TableVersion.of_fields(entry["version"], self._path)
        index_path, ids_path = (f"{self._folder}/{entry[key]}" for key in ("index", "ids"))
        with ExitStack() as stack:
            files = []
            for path in (index_path, ids_path):  # both before the first read: an open file outlasts its removal
                with doing("read", path):
                    files.append(stack.enter_context(open(path, "rb")))
            # Sums first: a library may crash on bytes that it has not written.
            self._check_sum(files[0], index_path, entry["index_sum"])
            self._check_sum(files[1], ids_path, entry["ids_sum"])
            with doing("read", index_path):
                index = self._library.read(files[0])
            with doing("read", ids_path):
                id_P, live_P = (np.load(files[1], allow_pickle=False) for _ in range(2))
        return IndexView.of(version, index, id_P, live_P, entry.get("choice", self._choice))

    def _check_sum(self, file: IO[bytes], path: str, expected: int) -> None:
        """Compare the sum of a file's bytes with its sum when it was written, and go back to its begin."""
        with doing("read", path):
            found = sum_of(file)
            file.seek(0)
        if found != expected:
            raise CorruptTableError(
                f"{path} must have CRC-32 {expected:08x}, as it was written, it has {found:08x}; restore it from a"
                f" copy, or remove {self._path}, and the index is built anew"
            )
