"""Takes batches through the tables: gives ids their cache ids, brings rows into place, and unpins rows after the step.

    begin(batch k + p)    gives ids their cache ids; reads the evicted rows, which are sent to the server later
    finish(batch k)       writes the batch's rows into the tables
    release(batch k)      after the step of the batch: its rows may be evicted

The thread that trains makes all three calls, between two steps. Only calls of servers, which `ServerCalls` orders, may
be made by another thread.

Invariants:
- the rows of a batch are pinned from `begin` to `release`. So an evicted row belongs to no batch that is still to be
  trained, and is read after the last step that trains it; and a fetched row is written to a place that no earlier batch
  uses;
- a pull of an id is made after every push of the id. On one rank calls of servers are in order. With several ranks an
  id is *late* if any rank may still be pushing it: it is pulled after all ranks have reported their pushes;
- `begin` gives cache ids to all tables of a batch or, if a table has no room, to none;
- ranks make the same calls in the same order; an error on one rank is raised on all.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from oneemb.graph.ranks import AnyRanks
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_keys import unique_keys
from oneemb.tde.id_transformer import IDTransformer
from oneemb.tde.ps import PS, FetchHandle
from oneemb.tde.traffic import ServerCalls

_ONE_THREAD = Threads(1)


class JaggedIds:
    """Distinct ids of a KeyedJaggedTensor, table by table.

    Args:
        features: the batch.
        names_T: names of each table's features.

    Raises:
        ValueError: a feature is missing, or ids are not integers.
    """

    def __init__(self, features: KeyedJaggedTensor, names_T: Sequence[Sequence[str]]):
        values = features.values()
        if values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32, got {values.dtype}")
        self._features = features
        value_N = values.detach().to("cpu", torch.int64).numpy()
        begin_F1 = features.offset_per_key()
        index = {name: f for f, name in enumerate(features.keys())}
        self._slices_T: list[list[slice]] = []
        self._inverse_T: list[np.ndarray] = []
        self.id_TU: list[np.ndarray] = []
        """For each table, its distinct ids, int64 [U], in the order of their first occurrence."""
        self.count_TU: list[np.ndarray] = []
        """For each table, the number of occurrences of each distinct id, int64 [U]."""
        for names in names_T:
            missing = [name for name in names if name not in index]
            if missing:
                raise ValueError(f"the KeyedJaggedTensor lacks the features {missing}, it has {list(index)}")
            slices = [slice(begin_F1[index[name]], begin_F1[index[name] + 1]) for name in names]
            id_N = np.concatenate([value_N[part] for part in slices])
            keys = unique_keys(np.zeros(len(id_N), np.int32), id_N, threads=_ONE_THREAD)
            self._slices_T.append(slices)
            self._inverse_T.append(keys.inverse_N)
            self.id_TU.append(keys.id_U)
            self.count_TU.append(np.bincount(keys.inverse_N, minlength=len(keys.id_U)).astype(np.int64))

    def with_cache_ids(self, cache_TU: Sequence[np.ndarray]) -> KeyedJaggedTensor:
        """Copy of the features with cache ids in place of ids; features without a table keep their ids.

        Args:
            cache_TU: for each table, the cache ids of its distinct ids, int64 [U].
        """
        features = self._features
        values = features.values().detach().to("cpu", copy=True)
        for slices, inverse_N, cache_U in zip(self._slices_T, self._inverse_T, cache_TU, strict=True):
            cache_N, begin = torch.from_numpy(cache_U.take(inverse_N)), 0
            for part in slices:
                size = part.stop - part.start
                values[part] = cache_N[begin : begin + size].to(values.dtype)
                begin += size
        shape: dict[str, Any] = {"stride": features.stride()}
        if features.variable_stride_per_key():
            shape = {"stride_per_key_per_rank": features.stride_per_key_per_rank()}
        return KeyedJaggedTensor(
            keys=features.keys(), values=values.to(features.values().device), weights=features.weights_or_none(),
            lengths=features.lengths(), inverse_indices=features.inverse_indices_or_none(), **shape,
        )  # fmt: skip


class NoRoomError(RuntimeError):
    """A table has fewer rows than a batch has distinct ids."""


class CachedTable(NamedTuple):
    """A table, its features, its cache ids and its server."""

    name: str
    features: list[str]
    transformer: IDTransformer
    ps: PS | None
    """The table's rows on the server; None = no server, so that rows are neither fetched nor evicted."""
    bounds: Callable[[], tuple[float, float] | None]
    """Returns the bounds of the initial weights of rows that the server lacks; None = they keep the table's numbers."""
    seed: int


class HasTables(Protocol):
    """Interface of a collection that `Steps` uses."""

    @property
    def tables(self) -> Sequence[CachedTable]:
        """Tables of the collection."""


class Gathered(NamedTuple):
    """Ids of a batch on all ranks."""

    jagged: dict[str, JaggedIds]
    """Ids of this rank's batch, by path of the collection."""
    of_ranks: list[dict[str, list[tuple[np.ndarray, np.ndarray]]]]
    """For each rank {path of a collection: (distinct ids, number of occurrences of each) for each table}."""


class FetchedBatch:
    """A batch whose ids have cache ids, with the fetches and pins of its rows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kjts: dict[str, KeyedJaggedTensor] = {}
        self.handles: list[FetchHandle] = []
        self.late: list[FetchHandle] = []
        self.any_late = False
        """Whether a row of the batch is late (see the top of the file) on any rank."""
        self.pushed = 0
        """Ticket of the last push of rows that were evicted for this batch."""
        self.pins: list[tuple[IDTransformer, np.ndarray]] = []
        self.finished = False


class Steps:
    """Takes batches, which ranks train together, through their tables.

    Args:
        collections: {path: collection}.
        ranks: ranks that train together.
        traffic: queue for calls of all servers.
    """

    def __init__(self, collections: Mapping[str, HasTables], ranks: AnyRanks, traffic: ServerCalls):
        self.collections = collections
        self.ranks = ranks
        self.traffic = traffic
        self._time = 0
        self._unfinished: deque[FetchedBatch] = deque()
        self._dropped: deque[FetchedBatch] = deque()
        self._unpushed: list[tuple[int, IDTransformer, np.ndarray]] = []
        self._torn = False
        self._last: FetchedBatch | None = None
        """Batch of the last call of `transform`, which may be training now."""

    def gather(self, kjts: Mapping[str, KeyedJaggedTensor]) -> Gathered:
        """Distinct ids of a batch on all ranks. Every rank makes the call with its own features, {path: features}.
        ValueError if a path or a feature is unknown; other ranks then raise RankError."""
        jagged: dict[str, JaggedIds] = {}

        def mine() -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
            jagged.update({path: self._ids_of(path, kjt) for path, kjt in kjts.items()})
            return {path: list(zip(ids.id_TU, ids.count_TU, strict=True)) for path, ids in jagged.items()}

        return Gathered(jagged, self.ranks.all_gather("gather the ids of a batch", mine))

    def begin(self, gathered: Gathered) -> FetchedBatch | None:
        """Give the ids of a batch cache ids, and start to fetch its rows. None = a table has no room besides the
        batches that are still to be trained; then nothing has changed."""
        self._check()
        merged = {
            path: [_merged([of_rank[path][t] for of_rank in gathered.of_ranks]) for t in range(len(collection.tables))]
            for path, collection in self.collections.items()
            if path in gathered.jagged
        }
        if not all(
            table.transformer.has_room(id_U, table.ps is not None)
            for path, ids_T in merged.items()
            for table, (id_U, _) in zip(self.collections[path].tables, ids_T, strict=True)
        ):
            return None
        batch = FetchedBatch(self._time)
        self._torn = True
        cache: dict[str, list[np.ndarray]] = {}
        fetches: list[tuple[CachedTable, np.ndarray]] = []
        for path, ids_T in merged.items():
            cache[path] = []
            for table, (id_U, count_U) in zip(self.collections[path].tables, ids_T, strict=True):
                moves = table.transformer.moves(id_U, count_U, self._time)
                table.transformer.pin(moves.cache_U)
                batch.pins.append((table.transformer, moves.cache_U))
                cache[path].append(_in_order_of(gathered.jagged[path].id_TU[len(cache[path])], id_U, moves.cache_U))
                if table.ps is not None:
                    batch.pushed = table.ps.evict_later(moves.evict_E2)
                    if self.ranks.size > 1 and len(moves.evict_E2):
                        self._unpushed.append((batch.number, table.transformer, moves.evict_E2[:, 0]))
                    fetches.append((table, moves.fetch_F2))
        for table, pair_F2 in fetches:
            self._fetch(batch, table, pair_F2)
        self._time += 1
        self._unfinished.append(batch)
        batch.kjts = {path: ids.with_cache_ids(cache[path]) for path, ids in gathered.jagged.items()}
        self._torn = False
        return batch

    def finish(self, batch: FetchedBatch) -> None:
        """Write the rows of a batch, and of all batches that began earlier, into the tables. Every rank makes the call.
        After an error the call may be repeated.

        Raises:
            ServerError: a server failed.
            RankError: another rank failed.
        """
        self._check()
        while not batch.finished:
            first = self._unfinished[0]
            if first.any_late:
                self.ranks.agree("push rows for others", functools.partial(self.traffic.wait, first.pushed))
            self.ranks.agree("bring the rows of a batch", functools.partial(self._bring, first))
            self._unpushed = [push for push in self._unpushed if push[0] > first.number]
            first.finished = True
            self._unfinished.popleft()

    def release(self, batch: FetchedBatch) -> None:
        """Unpin the rows of a batch."""
        pins, batch.pins = batch.pins, []
        for transformer, cache_U in pins:
            transformer.unpin(cache_U)

    def finish_all(self) -> None:
        """Finish every batch that has begun, dropped batches too. Errors are those of `finish`."""
        self._check()
        if self._unfinished:
            self.finish(self._unfinished[-1])

    def drop(self, batch: FetchedBatch) -> None:
        """Record that a batch will not be trained: the next call releases it. Any thread may call this."""
        self._dropped.append(batch)

    def save(self) -> None:
        """Push the rows that were used since the last call. Every rank makes the call, between two steps. After an
        error the next call pushes the rows that are still missing on the server."""
        self.finish_all()
        self.ranks.agree("save the rows of tables", self._save)

    def transform(
        self, kjts: Mapping[str, KeyedJaggedTensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list["BatchHandle"]]:
        """{path: features with cache ids}, and handles to wait for before these features are looked up.

        A call means that the step of the previous batch has ended, so that its rows may be evicted.

        Raises:
            NoRoomError: a table has fewer rows than the batch has distinct ids.
            ServerError: a server failed.
        """
        if self._last is not None:
            self.finish(self._last)
            self.release(self._last)
            self._last = None
        gathered = self.gather(kjts)
        batch = self.begin(gathered)
        if batch is None:
            raise self.no_room(gathered)
        self._last = batch
        return batch.kjts, [BatchHandle(self, batch)]

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def no_room(self, gathered: Gathered) -> NoRoomError:
        """Error that names the table without room for a batch."""
        for path in gathered.jagged:
            for t, table in enumerate(self.collections[path].tables):
                id_U, _ = _merged([of_rank[path][t] for of_rank in gathered.of_ranks])
                if not table.transformer.has_room(id_U, table.ps is not None):
                    more = "" if table.ps is not None else ", and without a parameter server none leaves"
                    return NoRoomError(
                        f"table {table.name!r} of module {path!r} has {table.transformer.num_embedding} rows"
                        f" (num_embeddings), and this batch has {len(id_U)} distinct ids on all ranks together{more};"
                        " give it more rows than that, or batches fewer ids"
                    )
        return NoRoomError("a table has no room for this batch")

    def _bring(self, batch: FetchedBatch) -> None:
        self.traffic.wait(batch.pushed)
        for handle in [*batch.handles, *batch.late]:
            handle.wait()

    def _save(self) -> None:
        for collection in self.collections.values():
            for table in collection.tables:
                if table.ps is not None:
                    pairs = table.transformer.used()
                    self.traffic.wait(table.ps.evict_later(pairs))
                    table.transformer.saved(pairs[:, 1])

    def _ids_of(self, path: str, kjt: KeyedJaggedTensor) -> JaggedIds:
        if path not in self.collections:
            raise ValueError(f"path must be one of {list(self.collections)}, got {path!r}")
        return JaggedIds(kjt, [table.features for table in self.collections[path].tables])

    def _fetch(self, batch: FetchedBatch, table: CachedTable, pair_F2: np.ndarray) -> None:
        if not len(pair_F2) or table.ps is None:
            return
        pushing = [id_E for _, transformer, id_E in self._unpushed if transformer is table.transformer]
        late_F = np.isin(pair_F2[:, 0], np.concatenate(pushing)) if pushing else np.zeros(len(pair_F2), np.bool_)
        for some, handles in ((pair_F2[~late_F], batch.handles), (pair_F2[late_F], batch.late)):
            if len(some):
                table.transformer.pin(some[:, 1])
                unpin = functools.partial(table.transformer.unpin, some[:, 1])
                handle = table.ps.fetch_later(some, table.bounds(), table.seed, unpin)
                handles.append(handle)
                if handles is batch.handles:
                    handle.ask()
        batch.any_late |= bool(late_F.any())

    def _check(self) -> None:
        while self._dropped:
            self.release(self._dropped.popleft())
        if self._torn:
            raise RuntimeError(
                "a call that gave ids their cache ids was interrupted, so the ids of rows are no longer known; start"
                " again from the last save"
            )


class BatchHandle:
    """Handle for the fetch of a batch's rows."""

    def __init__(self, steps: Steps, batch: FetchedBatch) -> None:
        self._steps, self._batch = steps, batch

    def wait(self) -> None:
        """Write the rows of the batch into the tables. Errors are those of `Steps.finish`."""
        self._steps.finish(self._batch)


def _merged(of_ranks: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids of all ranks, in the order of their first occurrence, and the number of occurrences of each.

    Args:
        of_ranks: distinct ids of each rank, and the number of occurrences of each.
    """
    if len(of_ranks) == 1:
        return of_ranks[0]
    id_N, count_N = (np.concatenate(arrays) for arrays in zip(*of_ranks, strict=True))
    id_U, head_U, inverse_N = np.unique(id_N, return_index=True, return_inverse=True)
    order_U = np.argsort(head_U)
    return id_U[order_U], np.bincount(inverse_N, count_N, len(id_U)).astype(np.int64)[order_U]


def _in_order_of(asked_U: np.ndarray, id_U: np.ndarray, cache_U: np.ndarray) -> np.ndarray:
    """Cache ids of `asked_U`, a subset of the ids `id_U`, whose cache ids are `cache_U`."""
    if asked_U is id_U:
        return cache_U
    order_U = np.argsort(id_U)
    return cache_U[order_U[np.searchsorted(id_U, asked_U, sorter=order_U)]]
