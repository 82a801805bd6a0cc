"""FAISS as the library of an index that follows a table."""

from collections.abc import Callable
from typing import IO, Any

import numpy as np

from oneemb.kernels.extras import need
from oneemb.sinks.index_library import IndexView, SummedFile
from oneemb.sinks.index_sink import IndexSink
from oneemb.storage.fs import AnyPath

# Largest number of vectors that one thread adds: more threads would wait for one another for longer than they work.
_ALONE = 256


class FaissLibrary:
    """Indexes of FAISS, of a factory's text or made by a function."""

    name, suffix = "FAISS", ".faiss"

    def __init__(self, make: "str | Callable[[np.ndarray], Any]", inner_product: bool):
        self._faiss: Any = need("faiss", "a sink in a FAISS index", "faiss")
        self._make = make
        self.choice = {"index": make if isinstance(make, str) else None, "inner_product": inner_product}
        self._metric = self._faiss.METRIC_INNER_PRODUCT if inner_product else self._faiss.METRIC_L2

    def made(self, vector_ND: np.ndarray) -> Any:
        if not isinstance(self._make, str):
            return self._make(vector_ND)
        index = self._faiss.index_factory(vector_ND.shape[1], self._make, self._metric)
        if not index.is_trained:
            index.train(vector_ND)
        return index

    def size(self, index: Any) -> int:
        return index.ntotal

    def add(self, index: Any, vector_ND: np.ndarray) -> None:
        threads = self._faiss.omp_get_max_threads()
        if len(vector_ND) <= _ALONE:
            self._faiss.omp_set_num_threads(1)
        try:
            index.add(vector_ND)
        finally:
            self._faiss.omp_set_num_threads(threads)

    def search(self, view: IndexView, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        score_QK, place_QK = view.index.search(query_QD, k, params=self._parameters(view))
        # FAISS gives absent rows the largest finite number.
        is_similarity = self._faiss.is_similarity_metric(view.index.metric_type)
        score_QK[place_QK < 0] = -np.inf if is_similarity else np.inf
        return score_QK, place_QK

    def _parameters(self, view: IndexView) -> Any:
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

    def write(self, index: Any, file: SummedFile) -> None:
        self._faiss.write_index(index, self._faiss.PyCallbackIOWriter(file.write))

    def read(self, file: IO[bytes]) -> Any:
        return self._faiss.read_index(self._faiss.PyCallbackIOReader(file.read))


def faiss_sink(
    folder: AnyPath | None, index: "str | Callable[[np.ndarray], Any]" = "HNSW32", *, table: int = 0,
    vectors: Callable[[np.ndarray], np.ndarray] | None = None, inner_product: bool = True, rebuild: float = 0.25,
    save_every: int = 1, keep: int = 2,
    max_rows: int | None = None,
) -> IndexSink:  # fmt: skip
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
        rebuild: share of dead positions from which a thread builds the index anew, beside the index in use.
        save_every: number of versions after which the index is written to the folder.
        keep: number of saved indexes that stay in the folder, for a rollback.
        max_rows: largest number of rows, of the table; None = all. [A cap](../publish.md#a-cap) says which rows stay.

    Raises:
        ImportError: the package is not installed.
        ValueError: an argument is not as above.
    """
    library = FaissLibrary(index, inner_product)
    return IndexSink(
        folder, library, table=table, vectors=vectors, rebuild=rebuild, save_every=save_every, keep=keep,
        max_rows=max_rows,
    )  # fmt: skip
