"""usearch as the library of an index that follows a table.

Vectors are never removed: in a graph where new vectors have taken the places of removed ones, searches of usearch find
fewer of the nearest vectors than in a graph that was built anew.
"""

import threading
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from oneemb.kernels.extras import need
from oneemb.sinks.index_library import IndexView, SummedFile
from oneemb.sinks.index_sink import IndexSink
from oneemb.storage.fs import AnyPath


class UsearchLibrary:
    """HNSW indexes of usearch, whose keys are positions."""

    name, suffix = "usearch", ".usearch"

    def __init__(
        self, inner_product: bool, dtype: str, connectivity: int, expansion_add: int, expansion_search: int,
        num_threads: int,
    ):  # fmt: skip
        self._usearch: Any = need("usearch.index", "a sink in a usearch index", "usearch")
        self._threads = num_threads
        self._options: dict[str, Any] = {
            "metric": "ip" if inner_product else "l2sq", "dtype": dtype, "connectivity": connectivity,
            "expansion_add": expansion_add, "expansion_search": expansion_search,
        }  # fmt: skip
        self.choice = {key: value for key, value in self._options.items() if key != "expansion_search"}
        # A search of usearch may reserve memory in the index, and two may take the same thread's buffers.
        self._lock = threading.Lock()

    def made(self, vector_ND: np.ndarray) -> Any:
        return self._usearch.Index(ndim=vector_ND.shape[1], **self._options)

    def size(self, index: Any) -> int:
        return len(index)

    def add(self, index: Any, vector_ND: np.ndarray) -> None:
        place_N = np.arange(len(index), len(index) + len(vector_ND), dtype=np.uint64)
        if len(place_N):
            index.add(place_N, vector_ND, threads=self._threads)

    def search(self, view: IndexView, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        index, total = view.index, len(view.index)
        inner_product = index.metric_kind == self._usearch.MetricKind.IP  # a reader may have another argument
        score_QK = np.full((len(query_QD), k), -np.inf if inner_product else np.inf, np.float32)
        place_QK = np.full((len(query_QD), k), -1, np.int64)
        num_live = int(view.live_P.sum())
        if not len(query_QD) or not num_live:
            return score_QK, place_QK
        # usearch has no filter: the search asks for more vectors until enough of them are live.
        wanted, count = min(k, num_live), min(total, -(-k * total // num_live))
        while True:
            place_QN, distance_QN = self._nearest(index, query_QD, count)
            live_QN = place_QN < len(view.live_P)
            live_QN[live_QN] = view.live_P[place_QN[live_QN]]
            live_QN &= place_QN >= 0
            if count == total or (live_QN.sum(1) >= wanted).all():
                break
            count = min(total, 2 * count)
        column_QN = np.argsort(~live_QN, axis=1, kind="stable")[:, :k]  # the live ones first, in their order
        row_QN = np.arange(len(query_QD))[:, None]
        live_QN, place_QN, distance_QN = (its[row_QN, column_QN] for its in (live_QN, place_QN, distance_QN))
        into = (slice(None), slice(live_QN.shape[1]))
        np.copyto(score_QK[into], 1 - distance_QN if inner_product else distance_QN, where=live_QN)
        np.copyto(place_QK[into], place_QN, where=live_QN)
        return score_QK, place_QK

    def _nearest(self, index: Any, query_QD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions, int64 [Q, N], -1 where there are fewer, and distances, float32 [Q, N]."""
        with self._lock:
            found = index.search(query_QD, count, threads=self._threads)
        place_QN = found.keys.astype(np.int64).reshape(len(query_QD), -1)
        if len(query_QD) > 1:  # The matches of one query are as many as were found.
            place_QN[np.arange(place_QN.shape[1]) >= np.asarray(found.counts)[:, None]] = -1
        return place_QN, found.distances.reshape(place_QN.shape)

    def write(self, index: Any, file: SummedFile) -> None:
        file.write(index.save())

    def read(self, file: IO[bytes]) -> Any:
        index = self._usearch.Index.restore(file.read())
        index.expansion_add, index.expansion_search = self._options["expansion_add"], self._options["expansion_search"]
        return index


def usearch_sink(
    folder: AnyPath | None, *, table: int = 0, vectors: Callable[[np.ndarray], np.ndarray] | None = None,
    inner_product: bool = True, dtype: str = "f32", connectivity: int = 16, expansion_add: int = 128,
    expansion_search: int = 64, num_threads: int = 1, rebuild: float = 0.25, save_every: int = 1, keep: int = 2,
    max_rows: int | None = None,
) -> IndexSink:  # fmt: skip
    """A usearch index of the rows of one table, which follows the table. Needs `pip install 'oneemb[usearch]'`.

    Args:
        folder: folder for the index on disk; one publisher at a time writes to it. None = memory only, and the index is
            built anew in each process.
        table: number of the table.
        vectors: function of weights, float32 [N, D], that returns the vectors to index, such as a tower; None = the
            weights.
        inner_product: if True, the index ranks by the inner product; if False, by the L2 distance.
        dtype: numbers of the vectors in the index: "f32", "bf16", "f16" or "i8".
        connectivity: edges of a vector in the graph.
        expansion_add: candidates that an addition looks at.
        expansion_search: candidates that a search looks at, at least.
        num_threads: threads of an addition or a search.
        rebuild: share of dead positions from which a thread builds the index anew, beside the index in use.
        save_every: number of versions after which the index is written to the folder.
        keep: number of saved indexes that stay in the folder, for a rollback.
        max_rows: largest number of rows, of the table; None = all. [A cap](../publish.md#a-cap) says which rows stay.

    Raises:
        ImportError: the package is not installed.
        ValueError: an argument is not as above.
    """
    library = UsearchLibrary(inner_product, dtype, connectivity, expansion_add, expansion_search, num_threads)
    return IndexSink(
        folder, library, table=table, vectors=vectors, rebuild=rebuild, save_every=save_every, keep=keep,
        max_rows=max_rows,
    )  # fmt: skip
