"""Sink of vectors in a FAISS index, which is searched while newer versions are added.

A vector is added behind all others, at the next position. An id whose vector changes gets a new position; the vector at
its old position stays, and searches leave it out. `FaissView` says which positions are live, and which id each one has.
Once too many positions are dead, the index is built anew from all rows.

    MANIFEST.json                      versions on disk, newest last
    <sequence>-<identity>.faiss        index of a version
    <sequence>-<identity>.ids          ids and liveness of the positions

Invariants:
- a search sees one version, completely: positions that are added for the next one are not live in its view;
- the manifest is replaced, atomically, after the files that it names are durable.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, NamedTuple

import numpy as np

from oneemb.kernels.extras import need
from oneemb.kernels.threads import Threads
from oneemb.sinks.changes import Changes
from oneemb.sinks.folder_lock import FolderLock
from oneemb.sinks.turns import Turns
from oneemb.sinks.version import TableVersion, read_json, write_json
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path, doing
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.new_files import new_files

_ADDED = 1024
"""Vectors that are added while searches wait."""
_READ_BYTES = 1 << 20


class FaissView(NamedTuple):
    """An index as one version sees it. P positions."""

    version: TableVersion
    index: Any
    """FAISS index; it may have more positions than the view, none of which is live."""
    id_P: np.ndarray
    """int64 [P]: id of each position."""
    live_P: np.ndarray
    """bool [P]: whether a search may find the position."""
    bit_N: np.ndarray
    """uint8: `live_P` as bits, for FAISS."""

    @classmethod
    def of(cls, version: TableVersion, index: Any, id_P: np.ndarray, live_P: np.ndarray) -> "FaissView":
        """View with these positions."""
        return cls(version, index, id_P, live_P, np.packbits(live_P, bitorder="little"))


class FaissSink:
    """A FAISS index of the rows of one table, which follows the table. Needs `pip install 'oneemb[faiss]'`.

    Args:
        folder: folder for the index on disk; one publisher at a time writes to it. None = memory only, and the index is
            built anew in each process.
        index: text for `faiss.index_factory`, such as "HNSW32" or "IVF1024,Flat"; or a function of all vectors,
            float32 [N, D], that returns an empty, trained index. It must take a selector of ids when it searches, as
            flat, HNSW and IVF indexes do.
        table: number of the table.
        vectors: function of weights, float32 [N, D], that returns the vectors to index, such as a tower; None = the
            weights.
        inner_product: if True, a text `index` ranks by the inner product; if False, by the L2 distance.
        rebuild: share of dead positions from which the index is built anew.
        save_every: number of versions after which the index is written to the folder.
        keep: number of versions that stay in the folder, for a rollback.

    Raises:
        ImportError: the package is not installed.
        ValueError: an argument is not as above.
    """

    def __init__(
        self, folder: AnyPath | None, index: "str | Callable[[np.ndarray], Any]" = "HNSW32", *, table: int = 0,
        vectors: Callable[[np.ndarray], np.ndarray] | None = None, inner_product: bool = True, rebuild: float = 0.25,
        save_every: int = 1, keep: int = 2,
    ):  # fmt: skip
        self._faiss: Any = need("faiss", "a sink in a FAISS index", "faiss")
        if not 0 < rebuild <= 1 or save_every < 1 or keep < 1:
            raise ValueError(
                f"rebuild must be above 0 and 1 at most, save_every and keep 1 or more, got {rebuild}, {save_every} and"
                f" {keep}"
            )
        self._folder = None if folder is None else absolute_path(folder)
        self.name = f"FAISS index of table {table}{'' if self._folder is None else f' in {self._folder}'}"
        self._make, self._table, self._vectors = index, table, vectors
        self._inner_product, self._rebuild, self._save_every, self._keep = inner_product, rebuild, save_every, keep
        self._fs = LocalFileSystem()
        self._lock = None if self._folder is None else FolderLock(self._fs, self._folder)
        self._view: FaissView | None = None
        self._places: HashIndex | None = None  # positions of the live ids; None = to be made from the view
        self._turns, self._unsaved, self._broken = Turns(), 0, False

    @property
    def view(self) -> FaissView:
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
            Scores, float32 [Q, k], as FAISS gives them; ids, int64 [Q, k]; and the version that has answered. Where
            there are fewer than k rows, the score is infinite and the id -1.

        Raises:
            StorageError: no version was published yet.
        """
        view = self.view
        with self._turns.shared():
            score_QK, place_QK = view.index.search(
                np.ascontiguousarray(query_QD, np.float32), k, params=self._parameters(view)
            )
        id_QK = np.where(place_QK < 0, -1, view.id_P.take(place_QK, mode="clip") if len(view.id_P) else -1)
        return score_QK, id_QK, view.version

    def refresh(self) -> TableVersion | None:
        """Load the newest version in the folder, for a process that searches an index which another one publishes.
        Returns the version; None = there is none."""
        if self._lock is None or not self._lock.taken:
            self._load_newest()
        return None if self._view is None else self._view.version

    def version(self) -> TableVersion | None:
        view = self._view or self._load_newest()
        return None if view is None else view.version

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

    def _built(self, changes: Changes) -> FaissView:
        """View of a new index with all rows."""
        batches = list(self._batches(changes))
        dim = changes.rows.format.dim
        first = np.empty((0, dim), np.float32) if self._vectors is None else self._vectors_of(np.zeros((1, dim)))[:0]
        vector_ND = np.concatenate([first, *(vector_ND for _, vector_ND in batches)])
        id_P = np.concatenate([np.empty(0, np.int64), *(id_N for id_N, _ in batches)])
        del batches
        if isinstance(self._make, str):
            metric = self._faiss.METRIC_INNER_PRODUCT if self._inner_product else self._faiss.METRIC_L2
            index = self._faiss.index_factory(vector_ND.shape[1], self._make, metric)
            if not index.is_trained:
                index.train(vector_ND)
        else:
            index = self._make(vector_ND)
        for begin in range(0, len(vector_ND), _ADDED):
            changes.check_wanted()
            index.add(vector_ND[begin : begin + _ADDED])
        return FaissView.of(changes.version, index, id_P, np.ones(len(id_P), np.bool_))

    def _dead_share(self, changes: Changes) -> float:
        """Share of dead positions once the changes are added."""
        view = self.view
        ids = [batch.id_N for batch in changes.batches(tables=[self._table])]
        changed_N = np.concatenate([*ids, changes.gone(tables=[self._table])[1]])
        old_N = self._places_of(view).find(np.zeros(len(changed_N), np.int32), changed_N)
        dead = view.index.ntotal - int(view.live_P.sum()) + int((old_N >= 0).sum())
        return dead / max(1, view.index.ntotal + sum(map(len, ids)))

    def _added(self, changes: Changes) -> FaissView:
        """View of the index with the changes. The view before stays as it was: it has none of the new positions."""
        before = self.view
        first, new = before.index.ntotal, [np.empty(0, np.int64)]
        for id_N, vector_ND in self._batches(changes):
            new.append(id_N)
            for begin in range(0, len(id_N), _ADDED):
                with self._turns.alone():
                    self._broken = True  # An index that fails in the middle of an addition is built anew.
                    before.index.add(vector_ND[begin : begin + _ADDED])
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
        return FaissView.of(changes.version, before.index, id_P, live_P)

    def _places_of(self, view: FaissView) -> HashIndex:
        if self._places is None:
            places, place_N = HashIndex(Threads(1)), np.flatnonzero(view.live_P)
            places.put(np.zeros(len(place_N), np.int32), view.id_P[place_N], place_N)
            self._places = places
        return self._places

    def _parameters(self, view: FaissView) -> Any:
        """Parameters of a search that finds live positions only; None = all positions are live."""
        faiss, index = self._faiss, self._faiss.downcast_index(view.index)
        if view.live_P.all() and view.index.ntotal == len(view.live_P):
            return None
        selector = faiss.IDSelectorBitmap(view.bit_N)
        if isinstance(index, faiss.IndexHNSW):
            return faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)
        if isinstance(index, faiss.IndexIVF):
            return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
        return faiss.SearchParameters(sel=selector)

    # ---- the folder --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"{self._folder}/MANIFEST.json"

    def _manifest(self) -> list[dict[str, Any]]:
        """Versions on disk, newest last."""
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

    def _save(self, view: FaissView) -> None:
        if self._folder is None:
            return
        stem = f"{view.version.sequence:012d}-{view.version.identity}"
        entry = {"version": view.version.to_fields(), "index": f"{stem}.faiss", "ids": f"{stem}.ids"}
        others = [one for one in self._manifest() if one["index"] != entry["index"]]
        with doing("write an index in", self._folder):
            with new_files(f"{self._folder}/{entry['index']}", f"{self._folder}/{entry['ids']}") as files:
                summed = [_Summed(file) for file in files]
                self._faiss.write_index(view.index, self._faiss.PyCallbackIOWriter(summed[0].write))
                for array in (view.id_P, view.live_P):
                    np.save(summed[1], array)
            self._fs.sync_directory(self._folder)
            versions = [*others, entry | {"index_sum": summed[0].sum, "ids_sum": summed[1].sum}][-self._keep :]
            write_json(self._fs, self._path, {"versions": versions})
            kept = {one[key] for one in versions for key in ("index", "ids")}
            for file in self._fs.names(self._folder):
                if file.endswith((".faiss", ".ids", ".tmp")) and file not in kept:
                    with suppress(OSError):
                        self._fs.remove(f"{self._folder}/{file}")

    def _load_newest(self) -> FaissView | None:
        versions = self._manifest()
        if versions and (self._view is None or self._view.version.identity != versions[-1]["version"].get("identity")):
            self._view, self._places = self._load(versions[-1]), None
        return self._view

    def _on_disk(self, identity: str) -> FaissView | None:
        for one in self._manifest():
            if one["version"].get("identity") == identity:
                return self._load(one)
        return None

    def _load(self, entry: dict[str, Any]) -> FaissView:
        version = TableVersion.of_fields(entry["version"], self._path)
        index_path, ids_path = (f"{self._folder}/{entry[key]}" for key in ("index", "ids"))
        # Sums first: FAISS may crash on bytes that it has not written.
        for path, expected in ((index_path, entry["index_sum"]), (ids_path, entry["ids_sum"])):
            with doing("read", path), open(path, "rb") as file:
                found = 0
                while data := file.read(_READ_BYTES):
                    found = zlib.crc32(data, found)
            if found != expected:
                raise CorruptTableError(
                    f"{path} must have CRC-32 {expected:08x}, as it was written, it has {found:08x}; restore it from a"
                    f" copy, or remove {self._path}, and the index is built anew"
                )
        with doing("read", index_path), open(index_path, "rb") as file:
            index = self._faiss.read_index(self._faiss.PyCallbackIOReader(file.read))
        with doing("read", ids_path), open(ids_path, "rb") as file:
            id_P, live_P = np.load(file, allow_pickle=False), np.load(file, allow_pickle=False)
        return FaissView.of(version, index, id_P, live_P)


class _Summed:
    """A new file with the CRC-32 of all bytes that were written."""

    def __init__(self, file: IO[bytes]):
        self._file, self.sum = file, 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._file.write(data)
