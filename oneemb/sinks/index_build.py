"""Builds an index from all rows of a version: in the call, or in a thread beside the index in use.

While the thread builds, later versions are added to the index in use, and noted. Once the thread has all rows of its
version, it adds the rows that have changed since, round by round, and the sink takes the new index over.

Invariants:
- the new index is in no object but the frames of its thread until the sink takes it over, so a child of fork, which has
  no such thread, never frees an index in the middle of an addition;
- the thread ends at the next piece once its sink is closed or collected, or the program ends.
"""

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from oneemb.sinks.changes import Changes, StoppedError
from oneemb.sinks.index_library import PIECE, IndexLibrary, IndexView
from oneemb.sinks.version import TableVersion
from oneemb.storage.hash_index import HashIndex


class Vectors(NamedTuple):
    """Changes of a version, as vectors: the ids that were written, and the ids that are gone."""

    version: TableVersion
    id_N: np.ndarray
    """int64 [N]."""
    vector_ND: np.ndarray
    """float32 [N, D]."""
    gone_M: np.ndarray
    """int64 [M]."""

    @classmethod
    def merged(cls, later: "Sequence[Vectors]") -> "Vectors":
        """Changes of several versions that follow each other, as one: each id once, as the last version has it."""
        vector_ND = np.concatenate([one.vector_ND for one in later])
        # A version that lists an id as gone and as written has a row of the id.
        id_N = np.concatenate([ids for one in later for ids in (one.gone_M, one.id_N)])
        row_N, first, end = np.full(len(id_N), -1), 0, 0
        for one in later:
            end += len(one.gone_M) + len(one.id_N)
            row_N[end - len(one.id_N) : end] = np.arange(first, first + len(one.id_N))
            first += len(one.id_N)
        id_N, last_N = np.unique(id_N[::-1], return_index=True)
        row_N = row_N[::-1][last_N]
        return cls(later[-1].version, id_N[row_N >= 0], vector_ND[row_N[row_N >= 0]], id_N[row_N < 0])


class IndexMaker:
    """Makes indexes of the rows of one table.

    Args:
        library: library of the indexes.
        table: number of the table.
        vectors: function of weights that returns the vectors; None = the weights.
        choice: arguments that an index depends on.
    """

    def __init__(
        self, library: IndexLibrary, table: int, vectors: Callable[[np.ndarray], np.ndarray] | None,
        choice: dict[str, Any],
    ):  # fmt: skip
        self.library, self.choice = library, choice
        self._table, self._vectors = table, vectors

    def vectors_of(self, changes: Changes, check: Callable[[], None] = lambda: None) -> Vectors:
        """Read the changes. `check` is called before each batch, and may end the call by an error."""
        ids, vectors = [np.empty(0, np.int64)], []
        for id_N, vector_ND in self._batches(changes):
            check()
            ids.append(id_N)
            vectors.append(vector_ND)
        _, gone_M = changes.gone(tables=[self._table])
        vector_ND = np.concatenate(vectors) if vectors else self._no_vectors(changes)
        return Vectors(changes.version, np.concatenate(ids), vector_ND, gone_M)

    def built(self, rows: Vectors, check: Callable[[], None]) -> IndexView:
        """View of a new index with all rows of a version. `check` is called before each piece."""
        index = self.library.made(rows.vector_ND)
        self.add(index, rows.vector_ND, check)
        return IndexView.of(rows.version, index, rows.id_N, np.ones(len(rows.id_N), np.bool_), self.choice)

    def add(self, index: Any, vector_ND: np.ndarray, check: Callable[[], None]) -> None:
        """Add vectors to an index that nobody searches yet."""
        for begin in range(0, len(vector_ND), PIECE):
            check()
            self.library.add(index, vector_ND[begin : begin + PIECE])

    def _batches(self, changes: Changes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in changes.batches(tables=[self._table]):
            yield batch.id_N, self._vectors_of(batch.weight_ND)

    def _no_vectors(self, changes: Changes) -> np.ndarray:
        dim = changes.rows.format.dim
        return np.empty((0, dim), np.float32) if self._vectors is None else self._vectors_of(np.zeros((1, dim)))[:0]

    def _vectors_of(self, weight_ND: np.ndarray) -> np.ndarray:
        weight_ND = np.ascontiguousarray(weight_ND, np.float32)
        if self._vectors is None:
            return weight_ND
        vector_ND = np.ascontiguousarray(self._vectors(weight_ND), np.float32)
        if vector_ND.ndim != 2 or len(vector_ND) != len(weight_ND):
            raise ValueError(f"vectors must return [{len(weight_ND)}, D], got shape {list(vector_ND.shape)}")
        return vector_ND


class IndexBuild:
    """A thread that builds an index from all rows of a version. `start` begins the thread, after the sink has stored
    this object, so that an interrupt leaves no thread that cannot be stopped.

    Args:
        maker: makes the index.
        changes: all rows of the version.
        take_over: a bound method of the sink, called with this object, the view of the new index and the positions of
            its live ids. It returns the changes of later versions that the new index lacks, or takes the index over and
            returns none.
    """

    def __init__(
        self, maker: IndexMaker, changes: Changes,
        take_over: "Callable[[IndexBuild, IndexView, HashIndex], list[Vectors]]",
    ):  # fmt: skip
        self.later: list[Vectors] = []
        """Changes of later versions that the thread must still add."""
        self.rounds = 0
        """Number of times that the thread has begun to add changes of later versions."""
        self.has_read = False
        """Whether the thread has read the rows of its version."""
        self.error: BaseException | None = None
        """Error that has ended the thread."""
        self._maker, self._changes, self._stopped = maker, changes, False
        self._take_over, self._ended = weakref.WeakMethod(take_over), threading.Event()
        # No daemon: a library's code that runs while Python ends would crash. The thread itself sees the end.
        self._thread = threading.Thread(target=self._run, name="oneemb-index")

    @property
    def is_at_work(self) -> bool:
        """Whether the thread runs. False in a child of fork, which has no such thread."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin the thread. An error is kept in `error`."""
        try:
            self._thread.start()
        except RuntimeError as error:  # The system has no room for a thread.
            self.error = error

    def stop(self) -> None:
        """Make the thread end at the next piece."""
        self._stopped = True

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the thread has ended. `check` is called now and then, and ends the wait by an error."""
        while self.is_at_work:
            check()
            self._ended.wait(0.05)  # After Ctrl-C in `join`, Python takes a thread that runs for one that has ended.

    def _check(self) -> None:
        if self._stopped or self._take_over() is None or not threading.main_thread().is_alive():
            raise StoppedError

    def _run(self) -> None:
        try:
            self._build()
        except StoppedError:
            pass
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # The frames hold the vectors and an unfinished index.
            self.error = error
        finally:
            self._ended.set()

    def _build(self) -> None:
        rows = self._maker.vectors_of(self._changes, self._check)
        self.has_read = True
        view = self._maker.built(rows, self._check)
        del rows
        places = view.places()
        while later := self._offered(view, places):
            self.rounds += 1
            changed = Vectors.merged(later)
            first = self._maker.library.size(view.index)
            self._maker.add(view.index, changed.vector_ND, self._check)
            before, view = view, view.after(changed.version, places, first, changed.id_N, changed.gone_M)
            view.move(places, before)

    def _offered(self, view: IndexView, places: HashIndex) -> list[Vectors]:
        self._check()
        take_over = self._take_over()
        if take_over is None:
            raise StoppedError
        return take_over(self, view, places)
