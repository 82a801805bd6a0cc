"""Sink of vectors in an index of another library, which is searched while newer versions are added.

A vector is added behind all others, at the next position. An id whose vector changes gets a new position; the vector at
its old position stays, and searches leave it out. `IndexView` says which positions are live, and which id each one has.
Once too many positions are dead, the index is built anew from all rows.

    MANIFEST.json                      list of saved indexes, the newest last
    <sequence>-<identity>.<library>    index that shows a version of the table, as its library writes it
    <sequence>-<identity>.ids          ids and liveness of the positions

Invariants:
- a search sees one view, of one version of the table: positions that are added for the next version are not live there;
- the manifest is replaced, atomically, after the files that it names are durable; these do not change.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from oneemb.kernels.threads import Threads
from oneemb.sinks.changes import Changes
from oneemb.sinks.folder_lock import FolderLock
from oneemb.sinks.turns import Turns
from oneemb.sinks.version import TableVersion, choice_of, read_json, sum_of, unused_stem, write_json
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.new_files import new_files

_ADDED = 1024
"""Vectors that are added while searches wait."""
_OURS = re.compile(r"\d{12,}-[0-9a-f]{32}(-\d+)?\.(faiss|usearch|ids)(\.tmp)?")


class IndexView(NamedTuple):
    """The index as searches see it: the positions that are live in one version of the table. P positions."""

    version: TableVersion
    index: Any
    """Index of the library; it may have more positions than the view, none of which is live."""
    id_P: np.ndarray
    """int64 [P]: id of each position."""
    live_P: np.ndarray
    """bool [P]: whether a search may find the position."""
    bit_N: np.ndarray
    """uint8: `live_P` as bits, the lowest first."""
    choice: dict[str, Any]
    """Table and library of the index, as its sink was made."""

    @classmethod
    def of(
        cls, version: TableVersion, index: Any, id_P: np.ndarray, live_P: np.ndarray, choice: dict[str, Any]
    ) -> "IndexView":
        """View with these positions."""
        return cls(version, index, id_P, live_P, np.packbits(live_P, bitorder="little"), choice)


class IndexLibrary(Protocol):
    """A library's index of vectors at positions 0, 1, 2 and so on."""

    name: str
    """Name of the library, in figures and errors."""
    suffix: str
    """End of the name of an index file."""
    choice: dict[str, Any]
    """Arguments that a new index depends on; with others, the sink gets all rows."""

    def made(self, vector_ND: np.ndarray) -> Any:
        """Empty index for these vectors, trained if it needs to be."""

    def size(self, index: Any) -> int:
        """Number of positions."""
        ...

    def add(self, index: Any, vector_ND: np.ndarray) -> None:
        """Add vectors at the next positions. No search runs meanwhile."""

    def search(self, view: IndexView, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, float32 [Q, k], and live positions, int64 [Q, k], of the nearest vectors; infinite and -1 where there
        are fewer. Several threads may call it."""
        ...

    def write(self, index: Any, file: "SummedFile") -> None:
        """Write the index to a file."""

    def read(self, file: IO[bytes]) -> Any:
        """Index that `write` has written."""


class IndexSink:
    """An index of the vectors of one table, which follows the table.

    Args:
        folder: folder for the index on disk; one publisher at a time writes to it. None = memory only, and the index is
            built anew in each process.
        library: library of the index.
        table: number of the table.
        vectors: function of weights, float32 [N, D], that returns the vectors to index, such as a tower; None = the
            weights.
        rebuild: share of dead positions from which the index is built anew.
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
        self._library, self._table, self._vectors = library, table, vectors
        self._rebuild, self._save_every, self._keep = rebuild, save_every, keep
        self._choice = choice_of([table], False, max_rows) | {"library": library.name} | library.choice
        self._fs, self.max_rows = LocalFileSystem(), max_rows
        self._lock = None if self._folder is None else FolderLock(self._fs, self._folder)
        self._view: IndexView | None = None
        self._places: HashIndex | None = None  # positions of the live ids; None = to be made from the view
        self._turns, self._unsaved, self._broken = Turns(), 0, False

    @property
    def view(self) -> IndexView:
        """The index as searches see it now. StorageError if there is none yet."""
        view = self._view or self._load_newest()
        if view is None:
            raise StorageError(f"{self.name} must have a version before it is searched; publish one to it")
        return view

    @property
    def wants_whole(self) -> bool:
        return self._view is not None and self._broken

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
        if not changes.is_whole and self._dead_share(changes) > self._rebuild:
            changes = changes.whole()
        if changes.is_whole:
            self._places = None
            view = self._on_disk(changes.version.identity) or self._built(changes)
        else:
            view = self._added(changes)
        self._unsaved += 1
        if changes.is_whole or self._unsaved >= self._save_every:
            self._save(view)
            self._unsaved = 0
        places, self._places = self._places, None
        if places is not None:
            new_P = view.live_P.copy()
            new_P[: len(self.view.live_P)] ^= self.view.live_P  # positions that the changes have made live or dead
            for live in (False, True):
                place_N = np.flatnonzero(new_P & (view.live_P == live))
                keys = np.zeros(len(place_N), np.int32), view.id_P[place_N]
                places.put(*keys, place_N) if live else places.erase(*keys)
        self._view, self._places, self._broken = view, places, False

    def close(self) -> None:
        """Release the folder. The index can still be searched."""
        if self._lock is not None:
            self._lock.release()

    def _vectors_of(self, weight_ND: np.ndarray) -> np.ndarray:
        weight_ND = np.ascontiguousarray(weight_ND, np.float32)
        if self._vectors is None:
            return weight_ND
        vector_ND = np.ascontiguousarray(self._vectors(weight_ND), np.float32)
        if vector_ND.ndim != 2 or len(vector_ND) != len(weight_ND):
            raise ValueError(f"vectors must return [{len(weight_ND)}, D], got shape {list(vector_ND.shape)}")
        return vector_ND

    def _batches(self, changes: Changes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in changes.batches(tables=[self._table]):
            yield batch.id_N, self._vectors_of(batch.weight_ND)

    def _built(self, changes: Changes) -> IndexView:
        """View of a new index with all rows."""
        batches = list(self._batches(changes))
        dim = changes.rows.format.dim
        first = np.empty((0, dim), np.float32) if self._vectors is None else self._vectors_of(np.zeros((1, dim)))[:0]
        vector_ND = np.concatenate([first, *(vector_ND for _, vector_ND in batches)])
        id_P = np.concatenate([np.empty(0, np.int64), *(id_N for id_N, _ in batches)])
        del batches
        index = self._library.made(vector_ND)
        for begin in range(0, len(vector_ND), _ADDED):
            changes.check_wanted()
            self._library.add(index, vector_ND[begin : begin + _ADDED])
        return IndexView.of(changes.version, index, id_P, np.ones(len(id_P), np.bool_), self._choice)

    def _dead_share(self, changes: Changes) -> float:
        """Share of dead positions once the changes are added."""
        view = self.view
        ids = [batch.id_N for batch in changes.batches(tables=[self._table])]
        changed_N = np.concatenate([*ids, changes.gone(tables=[self._table])[1]])
        old_N = self._places_of(view).find(np.zeros(len(changed_N), np.int32), changed_N)
        size = self._library.size(view.index)
        dead = size - int(view.live_P.sum()) + int((old_N >= 0).sum())
        return dead / max(1, size + sum(map(len, ids)))

    def _added(self, changes: Changes) -> IndexView:
        """View of the index with the changes. The view before stays as it was: it has none of the new positions."""
        before = self.view
        first, new = self._library.size(before.index), [np.empty(0, np.int64)]
        for id_N, vector_ND in self._batches(changes):
            new.append(id_N)
            for begin in range(0, len(id_N), _ADDED):
                with self._turns.alone():
                    self._broken = True  # An index that fails in the middle of an addition is built anew.
                    self._library.add(before.index, vector_ND[begin : begin + _ADDED])
                    self._broken = False
        id_N = np.concatenate(new)
        _, gone_N = changes.gone(tables=[self._table])
        # Positions between those of the view and `first` were added by calls that failed later.
        id_P = np.concatenate([before.id_P, np.zeros(first - len(before.id_P), np.int64), id_N])
        live_P = np.zeros(len(id_P), np.bool_)
        live_P[: len(before.live_P)] = before.live_P
        live_P[first:] = True
        changed_N = np.concatenate([id_N, gone_N])
        old_N = self._places_of(before).find(np.zeros(len(changed_N), np.int32), changed_N)
        live_P[old_N[old_N >= 0]] = False
        return IndexView.of(changes.version, before.index, id_P, live_P, self._choice)

    def _places_of(self, view: IndexView) -> HashIndex:
        if self._places is None:
            places, place_N = HashIndex(Threads(1)), np.flatnonzero(view.live_P)
            places.put(np.zeros(len(place_N), np.int32), view.id_P[place_N], place_N)
            self._places = places
        return self._places

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
            self._view, self._places = view, None
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


class SummedFile:
    """A new file with the CRC-32 of all bytes that were written."""

    def __init__(self, file: IO[bytes]):
        self._file, self.sum = file, 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._file.write(data)
