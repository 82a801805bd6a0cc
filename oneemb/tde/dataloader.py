"""A loader that replaces the ids of batches by cache ids, and brings a batch's rows into the tables before returning
it.

A call of `__next__` means that the step of the previous batch has ended. It writes the rows of the next batch into the
tables, and gives cache ids to the batch `num_prefetch` batches later. A thread reads the user's loader one batch ahead
and calls servers; only `__next__` changes tables.

Invariants:
- every batch of the user's loader is returned once, in order; an error of the loader is raised in place of the batch;
- at most `num_prefetch` batches have cache ids but are not yet returned, and at most one more batch is read;
- the numbers of a job do not depend on `num_prefetch`;
- an iterator that is collected or closed leaves no thread running.
"""

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.adapters.worker import Worker
from oneemb.tde.batch_parts import find_jagged, replace_jagged
from oneemb.tde.id_transformer_group import IDTransformerGroup
from oneemb.tde.steps import FetchedBatch, Gathered, Steps

__all__ = ["DataLoader", "close", "save", "wrap"]


class DataLoader:
    """A loader of batches with cache ids in place of ids.

    Args:
        id_transformer_group: cache ids and servers of the model's tables.
        dataloader: the user's loader, an iterable.
        data_info, paths: the path of the collection for each KeyedJaggedTensor of a batch; see `find_jagged`.
        num_prefetch: number of batches whose rows are fetched ahead.

    Raises:
        ValueError: `data_info` has a path without tables, or `num_prefetch` is below 0.
    """

    def __init__(
        self,
        id_transformer_group: IDTransformerGroup,
        dataloader: Any,
        *,
        data_info: Mapping[Any, str] | None = None,
        paths: Sequence[str] | None = None,
        num_prefetch: int = 0,
    ):
        for path in (data_info or {}).values():
            if path not in id_transformer_group:
                raise ValueError(
                    f"data_info must have paths of collections, got the path {path!r}, which has no tables"
                )
        if type(num_prefetch) is not int or num_prefetch < 0:
            raise ValueError(f"num_prefetch must be an int of 0 or more, got {num_prefetch!r}")
        self._steps = id_transformer_group.steps
        self._dataloader = dataloader
        self._data_info, self._paths = data_info, list(paths or ())
        self._num_prefetch = num_prefetch
        self._live: Callable[[], DataLoaderIter | None] = lambda: None

    def __iter__(self) -> "DataLoaderIter":
        """New iterator over the loader; the iterator of an earlier call ends."""
        live = self._live()
        if live is not None:
            live.close()
        made = DataLoaderIter(self._steps, self._dataloader, self._data_info, self._paths, self._num_prefetch)
        self._live = weakref.ref(made)
        return made

    def __len__(self) -> int:
        return len(self._dataloader)


class _Read(NamedTuple):
    """A batch of the user's loader, and {path: its KeyedJaggedTensor}."""

    data: Any
    jagged: dict[str, KeyedJaggedTensor]


class _Next(NamedTuple):
    """The batch that gets cache ids next."""

    read: _Read
    gathered: Gathered | None
    """Ids of the batch on all ranks; None = an interrupt came before ranks had exchanged them."""


class DataLoaderIter:
    """One pass over a loader; see `DataLoader`."""

    def __init__(
        self, steps: Steps, dataloader: Any, data_info: Mapping[Any, str] | None, paths: list[str], num_prefetch: int
    ):
        self._steps, self._depth = steps, num_prefetch
        self._reader = _Reader(dataloader, data_info, paths)
        self._given: list[FetchedBatch] = []  # the batch that is training now
        self._begun: deque[tuple[FetchedBatch, _Read]] = deque()
        self._next: _Next | None = None
        self._failed: BaseException | None = None  # raised after the batches in `_begun`
        self._ended = False
        self._worker = Worker("oneemb-tde") if num_prefetch else None
        self._reading: Future[_Read] | None = None
        self._finalizer = weakref.finalize(self, _end_iterator, self._worker, steps, self._given, self._begun)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch. A call means that the step of the previous batch has ended.

        Raises:
            StopIteration: there are no more batches.
            NoRoomError: a table has fewer rows than the batch has ids.
            ServerError: a server failed; the next call tries again.
            Exception: error of the user's loader, in place of a batch; the next call goes on with the loader.
        """
        if self._ended:
            raise StopIteration
        self._release()
        if not self._begun:
            if self._failed is None:
                self._steps.finish_all()
                self._begin_next(must=True)
            if self._failed is not None:
                failed, self._failed = self._failed, None
                if isinstance(failed, StopIteration):
                    self.close()
                    raise StopIteration
                try:
                    raise failed
                finally:
                    del failed  # else the error keeps this frame, the frame keeps the error, and both keep the thread
        batch, read = self._begun[0]
        self._steps.finish(batch)
        while len(self._begun) <= self._depth and self._failed is None:
            if not self._begin_next(must=False):
                break
        self._run_ahead()
        self._begun.popleft()  # Last, so that after an error above the next call returns this batch.
        self._given.append(batch)
        return self._reader.replaced(read.data, batch.kjts)

    def close(self) -> None:
        """End the iterator and its thread; batches that were not returned yet are dropped."""
        self._ended = True
        self._release()
        self._finalizer()

    def _release(self) -> None:
        while self._given:
            self._steps.release(self._given.pop())

    def _begin_next(self, *, must: bool) -> bool:
        """Give the next batch cache ids; returns whether that was done. If not, `_failed` has the reason, or it is
        None: then tables have no room for the batch yet. `must`: lack of room is an error, put into `_failed`."""
        if self._next is None or self._next.gathered is None:
            self._next = self._gather()
            if self._next is None:
                return False
        gathered = self._next.gathered
        assert gathered is not None
        batch = self._steps.begin(gathered)
        if batch is None:
            if must:
                failed = self._steps.no_room(gathered)
                self._next, self._failed = None, failed
            return False
        self._begun.append((batch, self._next.read))
        self._next = None
        return True

    def _gather(self) -> _Next | None:
        """The loader's next batch, with its ids on all ranks. None if a rank has no batch; then `_failed` has the
        reason."""
        try:
            if self._next is None:
                self._take_read()
        except Exception as error:
            self._failed = error
        ranks = self._steps.ranks
        if ranks.size > 1:
            report = _report(self._failed)
            self._failed = _error_of_ranks(
                ranks.all_gather("read the next batch", lambda: report), self._failed, ranks.rank
            )
        if self._failed is None:
            assert self._next is not None
            read = self._next.read
            try:
                return _Next(read, self._steps.gather(read.jagged))
            except Exception as error:
                self._failed = error
        return None

    def _take_read(self) -> None:
        """Put the loader's next batch into `_next`. If an interrupt prevents that, the next call does it."""
        if self._reading is None:
            self._next = _Next(self._reader.read(), None)
            return
        try:
            self._next = _Next(self._reading.result(), None)
        except BaseException as error:
            if self._reading.done() and self._reading.exception() is error:
                self._reading = None
            raise
        self._reading = None

    def _run_ahead(self) -> None:
        if self._worker is None:
            return
        traffic, until = self._steps.traffic, self._steps.traffic.last_ticket
        self._worker.submit(lambda: traffic.run_ahead(until))
        if self._reading is None and self._next is None and self._failed is None:
            self._reading = self._worker.submit(self._reader.read)


class _Reader:
    """Reads the user's loader, one batch at a time."""

    def __init__(self, dataloader: Any, data_info: Mapping[Any, str] | None, paths: list[str]) -> None:
        self._dataloader, self._data_info, self._paths = dataloader, data_info, paths
        self._iterator: Iterator[Any] | None = None

    def read(self) -> _Read:
        if self._iterator is None:
            self._iterator = iter(self._dataloader)
        data = next(self._iterator)
        return _Read(data, find_jagged(data, self._data_info, self._paths))

    def replaced(self, data: Any, new: Mapping[str, KeyedJaggedTensor]) -> Any:
        return replace_jagged(data, self._data_info, self._paths, new)


def _end_iterator(
    worker: Worker | None, steps: Steps, given: list[FetchedBatch], begun: "deque[tuple[FetchedBatch, _Read]]"
) -> None:
    """Stop an iterator's worker and drop its batches. Called once: when the iterator ends or is collected, or at
    exit."""
    if worker is not None:
        worker.stop()
    while given:
        steps.drop(given.pop())
    while begun:
        steps.drop(begun.popleft()[0])


def _report(failed: BaseException | None) -> str | None:
    if failed is None:
        return None
    return "" if isinstance(failed, StopIteration) else "".join(traceback.format_exception(failed))


def _error_of_ranks(reports: list[str | None], failed: BaseException | None, rank: int) -> BaseException | None:
    """Error, or end, of a loader on any rank; None = every rank has a next batch.

    Args:
        reports: traceback of each rank's error; "" = the loader has ended, None = there is a batch.
        failed: this rank's own error or StopIteration.
        rank: this rank.
    """
    if failed is not None and not isinstance(failed, StopIteration):
        return failed
    for other, text in enumerate(reports):
        if text:
            return RuntimeError(f"the loader of rank {other} failed instead of this batch; there it was:\n{text}")
    if failed is None and "" in reports:
        return RuntimeError(
            f"the loader of rank {reports.index('')} has ended, but that of rank {rank} has one more batch; ranks that"
            " train together need equally many"
        )
    return failed


def wrap(
    url: str | Callable[[str, str], str],
    dataloader: Any,
    module: Any,
    configs_dict: Mapping[str, Sequence[BaseEmbeddingConfig]],
    *,
    data_info: Mapping[Any, str] | None = None,
    eviction_config: Mapping[str, Any] | None = None,
    transform_config: Mapping[str, Any] | None = None,
    ps_config: Mapping[str, Any] | None = None,
    parallel: bool = True,
    num_prefetch: int = 0,
) -> tuple[DataLoader, Any]:
    """Make a loader and a model that train small static tables on any int64 id; rows without room are kept on a server.

    All ranks of the default process group make the call together, and iterate over the loader together.

    Args:
        url: URL of the parameter server, such as `redis://127.0.0.1:6379/?prefix=model`; or a function that returns the
            URL for a module's path and a table's name.
        dataloader: iterable of batches with KeyedJaggedTensors of ids.
        module: the model, in TorchRec's DistributedModelParallel.
        configs_dict: {path of a collection's module: configs of its tables}. `num_embeddings` of a config is the number
            of rows in memory: at least the number of distinct ids in one batch of all ranks together.
        data_info: {index, key or field of a batch: path of the collection that looks up the KeyedJaggedTensor there};
            None = the n-th KeyedJaggedTensor of a batch belongs to the n-th path of `configs_dict`.
        eviction_config: `{"type": "mixed_lru_lfu", "min_used_freq_power": 5}`; see `IDTransformer`.
        transform_config: `{"type": "naive"}` or `{"type": "cacheline"}`, which do the same.
        ps_config: options of pushes, initial rows and optimizers; see `IDTransformerGroup`.
        parallel: has no effect.
        num_prefetch: number of batches whose rows are fetched while earlier batches train; 0 = none, and no thread.

    Returns:
        The loader, and `module`.

    Raises:
        ValueError: a path leads to no module that TorchRec has sharded, or a table cannot be on a server.
        ServerError: a server cannot be reached.

    Reference: torchrec_dynamic_embedding's wrap.
    """
    group = IDTransformerGroup(
        url, module, configs_dict, eviction_config=eviction_config, transform_config=transform_config,
        ps_config=ps_config, parallel=parallel,
    )  # fmt: skip
    # `save` reads this attribute. It is not a submodule, so state dicts do not contain it.
    object.__setattr__(module, "_id_transformer_group", group)
    loader = DataLoader(group, dataloader, data_info=data_info, paths=list(configs_dict), num_prefetch=num_prefetch)
    return loader, module


def save(module: Any) -> None:
    """Push the rows that were used since the last call to the server. All ranks make the call together, between two
    steps.

    Args:
        module: the model that `wrap` returned.

    Raises:
        ValueError: `wrap` did not return `module`.
        ServerError: a server failed; the next call pushes the rest.
    """
    _group_of(module).save()


def close(module: Any) -> None:
    """Close the connections to the servers of a model that `wrap` returned; ValueError for another model. Rows that
    were trained since the last `save` are not pushed."""
    _group_of(module).close()


def _group_of(module: Any) -> IDTransformerGroup:
    group = getattr(module, "_id_transformer_group", None)
    if not isinstance(group, IDTransformerGroup):
        raise ValueError("module must be the model that oneemb.tde.wrap returned; this one has no rows on a server")
    return group
